//! Two hosts, and the injector of faults between them.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::super::hosts::{Hosts, INTERFACE, MIDDLE, SINGLE_PACKETS, Side};
use super::super::process::{Process, quiet, wait_for};
use super::fault::Fault;
use crate::workspace::{self, cargo, succeed};

/// Time for the bridge to start and to end.
const SOON: Duration = Duration::from_secs(10);

/// Builds the bridge.
pub(super) fn build_bridge() -> anyhow::Result<PathBuf> {
    succeed(cargo().args(["build", "--quiet", "-p", "anyverbs-impair"]))?;
    Ok(workspace::target().join("debug/anyverbs-impair"))
}

/// Hosts that some faults can be injected between.
pub(super) struct Network<'a> {
    hosts: Hosts,
    fault: Fault,
    bridge: &'a Path,
    scratch: &'a Path,
}

/// Faults being injected.
pub(super) enum Injection<'a> {
    Bridge(Process),
    /// Rules of both hosts.
    Filter(&'a Network<'a>),
}

/// The injected faults.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) packets: u64,
    pub(super) injected: u64,
    pub(super) text: String,
}

impl<'a> Network<'a> {
    /// Sets it up; `None` if that takes root.
    pub(super) fn new(
        fault: &Fault,
        bridge: &'a Path,
        scratch: &'a Path,
    ) -> anyhow::Result<Option<Self>> {
        let Some(hosts) = Hosts::new(fault.on, 0, scratch)? else { return Ok(None) };
        let network = Network { hosts, fault: fault.clone(), bridge, scratch };
        if let Some(share) = fault.nft {
            network.filter(share, fault.offloads)?;
        }
        Ok(Some(network))
    }

    /// Whether it can inject this fault.
    pub(super) fn serves(&self, fault: &Fault) -> bool {
        self.fault.on == fault.on && (fault.bridge.is_some() || self.fault.name == fault.name)
    }

    pub(super) fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    fn on(&self, side: Side, program: &str, words: &str) -> anyhow::Result<String> {
        quiet(self.hosts.command(side, Path::new(program)).args(words.split(' ')))
    }

    /// Rules that drop packets of RoCE: a batch where the sender hands it over, a packet where it arrives.
    fn filter(&self, share: u32, offloads: bool) -> anyhow::Result<()> {
        for side in [Side::Server, Side::Client] {
            let hook = if offloads { "output" } else { "input" };
            let to = if offloads { "oif" } else { "iif" };
            self.on(side, "nft", "add table inet impair")?;
            let chain =
                format!("add chain inet impair c {{ type filter hook {hook} priority 0 ; }}");
            self.on(side, "nft", &chain)?;
            let rule = format!(
                "add rule inet impair c {to} {INTERFACE} udp dport 4791 numgen random mod 1000 < {share} counter drop"
            );
            self.on(side, "nft", &rule)?;
            if !offloads {
                self.on(side, "ethtool", &format!("-K {INTERFACE} {SINGLE_PACKETS}"))?;
            }
        }
        Ok(())
    }

    /// Begins to inject.
    pub(super) fn start(&'a self, fault: &Fault, seed: u64) -> anyhow::Result<Injection<'a>> {
        let Some(options) = &fault.bridge else {
            return Ok(Injection::Filter(self));
        };
        let mut command = self.hosts.in_the_middle(self.bridge);
        command.args(MIDDLE).args(options.split_ascii_whitespace());
        command.args(["--seed", &seed.to_string()]);
        let mut process = Process::start(&mut command, &self.scratch.join("bridge.out"))?;
        let ready = wait_for(Instant::now() + SOON, || {
            Ok(process.output().contains("ready") || process.ended()?.is_some())
        })?;
        if !ready || process.ended()?.is_some() {
            bail!("the bridge does not start: {}", process.output().trim());
        }
        Ok(Injection::Bridge(process))
    }
}

impl Injection<'_> {
    /// Stops injecting and counts.
    pub(super) fn finish(self) -> anyhow::Result<Counts> {
        match self {
            Injection::Bridge(mut process) => {
                process.signal(libc::SIGTERM)?;
                let status = process.wait(Instant::now() + SOON)?;
                let text = process.output();
                if !status.is_some_and(|status| status.success()) {
                    bail!("the bridge ended with {status:?}: {}", text.trim());
                }
                Counts::of_bridge(&text)
            }
            Injection::Filter(network) => {
                let mut counts = Counts::default();
                for side in [Side::Server, Side::Client] {
                    let text = network.on(side, "nft", "list chain inet impair c")?;
                    counts.injected += dropped(&text).context("no counter in the rule")?;
                    counts.text += &text;
                    // The next case counts from zero.
                    network.on(side, "nft", "delete table inet impair")?;
                }
                let fault = &network.fault;
                network.filter(fault.nft.unwrap_or_default(), fault.offloads)?;
                Ok(counts)
            }
        }
    }
}

impl Counts {
    /// Reads `packets=12 lost=3 ...`.
    fn of_bridge(text: &str) -> anyhow::Result<Self> {
        let line = text.lines().find(|line| line.starts_with("packets=")).context("no counters")?;
        let mut counts = Counts { text: line.to_owned(), ..Counts::default() };
        for word in line.split(' ') {
            let (name, value) = word.split_once('=').context("not name=value")?;
            let value: u64 = value.parse().with_context(|| format!("{name} is no number"))?;
            if name == "packets" {
                counts.packets = value;
            } else {
                counts.injected += value;
            }
        }
        Ok(counts)
    }

    fn of(&self, name: &str) -> Option<u64> {
        let words = self.text.split(' ').filter_map(|word| word.split_once('='));
        words.filter(|(word, _)| *word == name).find_map(|(_, value)| value.parse().ok())
    }

    /// Tells whether a fault that should be injected was not. A short program may end before one of a thousand packets
    /// is hit.
    pub(super) fn is_missing(&self, fault: &Fault) -> bool {
        const ENOUGH: u64 = 5000;
        match &fault.injects {
            Some(name) => self.of(name).is_none_or(|count| count == 0 && self.packets > ENOUGH),
            None => false,
        }
    }

    /// Whether something happened where nothing was to.
    pub(super) fn is_foreign(&self, fault: &Fault) -> bool {
        fault.bridge.as_deref() == Some("") && self.injected > 0
    }
}

/// The packets of a rule's `counter packets 12 bytes 3456`.
fn dropped(text: &str) -> Option<u64> {
    text.split_once("counter packets ")?.1.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read() {
        let counts = Counts::of_bridge("ready\npackets=12 lost=3 outage=4\n").unwrap();
        assert_eq!((counts.packets, counts.injected), (12, 7));
        assert_eq!(counts.of("outage"), Some(4));
        assert!(Counts::of_bridge("ready\n").is_err());
        let rule = "iif \"eth0\" udp dport 4791 numgen random mod 1000 < 10 counter packets 12 bytes 3456 drop";
        assert_eq!(dropped(rule), Some(12));
        assert_eq!(dropped("drop"), None);
    }
}
