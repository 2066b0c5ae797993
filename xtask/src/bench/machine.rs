//! The machine of the measurements, and its state.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Context;
use serde::Serialize;

use crate::conformance::quiet;

/// The distance of the two processors, by the time that a changed cache line takes between them. A virtual machine may
/// change it without notice, when its host moves one of its processors. Traffic through memory that both touch then
/// takes several times as long. That holds for us and for peers, but not in the same proportion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    /// They are threads of one core: a spinning program takes time from the other.
    #[serde(rename = "one core")]
    OneCore,
    Near,
    Far,
}

impl State {
    /// Between the 11 ns of two threads of a core and the 53 ns of cores that share a cache.
    const ONE_CORE_NS: f64 = 25.0;
    /// Between the 53 to 125 ns of cores that share a cache, on several machines, and the 250 ns of those that do not.
    const NEAR_NS: f64 = 175.0;

    pub(super) fn of(cache_line_ns: f64) -> Self {
        match cache_line_ns {
            ..Self::ONE_CORE_NS => Self::OneCore,
            ..Self::NEAR_NS => Self::Near,
            _ => Self::Far,
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OneCore => "one core",
            Self::Near => "near",
            Self::Far => "far",
        })
    }
}

/// Nanoseconds of a changed cache line to the other processor, now.
pub(super) fn cache_line(limits: &Path) -> anyhow::Result<f64> {
    let said = quiet(Command::new(limits).arg("cache-line"))?;
    said.trim().parse().with_context(|| format!("not a number: {said:?}"))
}

/// Work of all processors since they began, in ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ticks {
    all: u64,
    stolen: u64,
}

impl Ticks {
    /// The ticks up to now.
    pub(super) fn now() -> anyhow::Result<Self> {
        let stat = fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
        Self::parse(&stat).context("no processors in /proc/stat")
    }

    fn parse(stat: &str) -> Option<Self> {
        let fields = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
        // The first two already contain the guests' time.
        let ticks: Result<Vec<u64>, _> =
            fields.split_whitespace().take(8).map(str::parse).collect();
        let ticks = ticks.ok()?;
        Some(Self { all: ticks.iter().sum(), stolen: *ticks.get(7)? })
    }

    /// Percent of the elapsed time that others had.
    pub(super) fn stolen_since(self, then: Self) -> f64 {
        let passed = self.all.saturating_sub(then.all).max(1);
        100.0 * self.stolen.saturating_sub(then.stolen) as f64 / passed as f64
    }
}

/// As the machine describes itself.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Machine {
    pub(super) processor: String,
    pub(super) processors: usize,
    pub(super) virtual_machine: bool,
    pub(super) memory_gib: u64,
    pub(super) kernel: String,
    pub(super) distribution: String,
    /// Bytes of an unprivileged socket's receive buffer.
    pub(super) receive_buffer: String,
    /// Runnable processes when the run began: a busy machine measures something else.
    pub(super) load: f64,
    /// Percent of the processors' time that the host gave to others while it was measured (steal, proc_stat(5)).
    pub(super) stolen: f64,
    /// Debian's versions of the peers.
    pub(super) versions: BTreeMap<String, String>,
}

impl Machine {
    /// Reads it. A value that cannot be read is left empty.
    pub(super) fn read(packages: &[&str]) -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = text("/proc/cpuinfo");
        let field = |text: &str, name: &str, separator: char| {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
            line.split_once(separator)
                .map_or_else(String::new, |(_, value)| value.trim().trim_matches('"').to_owned())
        };
        let memory = field(&text("/proc/meminfo"), "MemTotal", ':');
        let kib = memory.split(' ').next().and_then(|kib| kib.parse::<u64>().ok());
        let load = text("/proc/loadavg");
        Machine {
            processor: field(&cpuinfo, "model name", ':'),
            processors: std::thread::available_parallelism().map_or(0, usize::from),
            virtual_machine: field(&cpuinfo, "flags", ':').split(' ').any(|f| f == "hypervisor"),
            memory_gib: kib.unwrap_or_default().div_ceil(1 << 20),
            kernel: text("/proc/sys/kernel/osrelease").trim().to_owned(),
            distribution: field(&text("/etc/os-release"), "PRETTY_NAME", '='),
            receive_buffer: text("/proc/sys/net/core/rmem_default").trim().to_owned(),
            load: load.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or_default(),
            stolen: 0.0,
            versions: versions(packages),
        }
    }

    /// Whether others used the machine when the run began.
    pub(super) fn is_busy(&self) -> bool {
        self.load > 0.5
    }
}

fn versions(packages: &[&str]) -> BTreeMap<String, String> {
    let mut query = Command::new("dpkg-query");
    query.args(["--show", "--showformat", "${Package} ${Version}\\n"]).args(packages);
    let said = quiet(&mut query).unwrap_or_default();
    let pair = |line: &str| line.split_once(' ').map(|(name, v)| (name.to_owned(), v.to_owned()));
    said.lines().filter_map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_states_of_machines_that_were_seen() {
        assert_eq!(State::of(10.7), State::OneCore);
        for ns in [53.0, 105.0, 124.0] {
            assert_eq!(State::of(ns), State::Near);
        }
        assert_eq!(State::of(250.0), State::Far);
    }

    #[test]
    fn the_share_of_others_in_the_elapsed_time() {
        let at = |line: &str| Ticks::parse(&format!("{line}\ncpu0 1 1 1 1\n")).unwrap();
        let then = at("cpu  100 0 50 800 10 0 20 20 7 0");
        let now = at("cpu  150 0 60 810 10 0 20 50 9 0");
        assert!((now.stolen_since(then) - 30.0).abs() < 1e-9);
        assert!(then.stolen_since(then).abs() < 1e-9);
        assert_eq!(Ticks::parse("cpu 1 2 3"), None);
        assert_eq!(Ticks::parse("intr 1"), None);
        assert!(Ticks::now().is_ok());
    }

    #[test]
    fn this_machine_says_what_it_is() {
        let machine = Machine::read(&["dpkg"]);
        assert!(machine.processors > 0);
        assert!(!machine.kernel.is_empty());
    }
}
