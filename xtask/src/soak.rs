//! `cargo xtask soak`: two processes that do everything again and again, and others that come and go, killed or not.
//! Nothing fails, and the memory, descriptors and mappings of the two do not grow.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::dist::{self, Dist};
use crate::workspace::{root, succeed, target};
use crate::{interrupt, packages};

/// The length of the run.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Duration
    #[arg(long, default_value_t = 30)]
    minutes: u32,
    #[command(flatten)]
    dist: dist::Options,
}

/// The measured values, and the most that each may grow from the middle of the run to its end: 2 %, or this amount.
/// Only the process's own memory counts. The rings that it shares with others become resident as they are first used,
/// and count as mappings.
const LIMITS: [(&str, u64); 3] =
    [("KiB of its own memory", 1024), ("descriptors", 32), ("mappings", 32)];
/// Between two looks at the memory.
const SAMPLE: Duration = Duration::from_millis(500);
/// UDP port of the device, and of the programs.
const UDP_PORT: u16 = 19_792;
const PORT: u16 = 18_515;

/// Builds, and runs for that long.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    interrupt::catch();
    packages::ensure(&[
        packages::CC,
        packages::LIBC6_DEV,
        packages::LIBIBVERBS_DEV,
        packages::LIBRDMACM_DEV,
        packages::IBVERBS_UTILS,
        packages::RDMACM_UTILS,
    ])?;
    let dist = dist::run(&options.dist)?;
    run_on(&dist, Duration::from_secs(60 * u64::from(options.minutes)))
}

/// Runs for so long.
pub(crate) fn run_on(dist: &Dist, time: Duration) -> anyhow::Result<()> {
    let place = Place::new(dist)?;
    let mut serve = Long::start(&place, "serve", &[])?;
    place.wait_for_server(&mut serve)?;
    let mut work = Long::start(&place, "work", &["0"])?;
    let mut visitors = Visitors::default();
    let begin = Instant::now();
    let mut next = begin;
    while begin.elapsed() < time {
        interrupt::check()?;
        if Instant::now() >= next {
            next += SAMPLE;
            serve.look()?;
            work.look()?;
        }
        visitors.step(&place)?;
        std::thread::sleep(Duration::from_millis(20));
    }
    visitors.end()?;
    let rounds = work.end()?;
    serve.end()?;
    println!("{} came and went, {} of them killed; {rounds}", visitors.came, visitors.killed);
    for long in [&serve, &work] {
        long.judge()?;
    }
    Ok(())
}

/// The program, and where it finds the device.
struct Place {
    program: PathBuf,
    lib: PathBuf,
}

impl Place {
    fn new(dist: &Dist) -> anyhow::Result<Self> {
        let lib = dist.libibverbs().parent().expect("it lies in a folder").to_owned();
        let program = target().join("soak");
        succeed(
            Command::new("cc")
                .args(["-D_GNU_SOURCE", "-O1", "-g", "-pthread", "-o"])
                .arg(&program)
                .arg(root().join("crates/capi/tests/c/soak.c"))
                .args(["-lrdmacm", "-libverbs"]),
        )?;
        Ok(Self { program, lib })
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env("LD_LIBRARY_PATH", &self.lib)
            .env("ANYVERBS_REGISTRY", "anyverbs-soak")
            .env("ANYVERBS_UDP_PORT", UDP_PORT.to_string())
            .env("ANYVERBS_INTERFACES", "lo")
            .env("ANYVERBS_LOG", "error")
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        command
    }

    fn soak(&self, role: &str, arguments: &[&str]) -> Command {
        let mut command = self.command(&self.program);
        command.args([role, &PORT.to_string()]).args(arguments);
        command
    }

    /// Waits until a short worker gets through.
    fn wait_for_server(&self, serve: &mut Long) -> anyhow::Result<()> {
        for _ in 0..50 {
            serve.check()?;
            if self.soak("work", &["0.01"]).status().context("cannot run it")?.success() {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        bail!("the server does not answer");
    }
}

/// A process that lasts.
struct Long {
    role: String,
    child: Child,
    log: PathBuf,
    /// One list for each of [`LIMITS`].
    samples: [Vec<u64>; LIMITS.len()],
}

impl Long {
    fn start(place: &Place, role: &str, arguments: &[&str]) -> anyhow::Result<Self> {
        let log = target().join(format!("soak-{role}.log"));
        let file =
            fs::File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = place.soak(role, arguments);
        command.stdin(Stdio::piped()).stdout(file);
        let child = command.spawn().with_context(|| format!("cannot run {role}"))?;
        Ok(Self { role: role.to_owned(), child, log, samples: Default::default() })
    }

    fn check(&mut self) -> anyhow::Result<()> {
        if let Some(status) = self.child.try_wait().context("cannot wait")? {
            bail!("{} ended ({status}): {}", self.role, self.said());
        }
        Ok(())
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn look(&mut self) -> anyhow::Result<()> {
        self.check()?;
        for (samples, now) in self.samples.iter_mut().zip(held(self.child.id())?) {
            samples.push(now);
        }
        Ok(())
    }

    /// Closes its input, which ends it. Returns its last output.
    fn end(&mut self) -> anyhow::Result<String> {
        drop(self.child.stdin.take());
        let status = self.child.wait().context("cannot wait")?;
        if !status.success() {
            bail!("{} ended with {status}: {}", self.role, self.said());
        }
        Ok(self.said().lines().last().unwrap_or("less than 1000 rounds").to_owned())
    }

    fn judge(&self) -> anyhow::Result<()> {
        for (samples, (what, may_grow)) in self.samples.iter().zip(LIMITS) {
            let (middle, end) = middle_and_end(samples).context("too short to say anything")?;
            let most = samples.iter().max().copied().unwrap_or(0);
            println!(
                "{}: {what}: {middle} in the middle, {end} at the end, {most} at most",
                self.role
            );
            let limit = middle + may_grow.max(middle / 50);
            if end > limit {
                bail!("{} has grown from {middle} to {end} {what}, more than {limit}", self.role);
            }
        }
        Ok(())
    }
}

impl Drop for Long {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The resources of a process, in the order of [`LIMITS`].
fn held(pid: u32) -> anyhow::Result<[u64; LIMITS.len()]> {
    let read = |name: &str| {
        let path = format!("/proc/{pid}/{name}");
        fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))
    };
    let memory = own_memory(&read("status")?).context("its status has no RssAnon")?;
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).context("cannot list descriptors")?;
    Ok([memory, descriptors.count() as u64, read("maps")?.lines().count() as u64])
}

fn own_memory(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}

/// Medians around the middle and at the end.
fn middle_and_end(samples: &[u64]) -> Option<(u64, u64)> {
    let tenth = samples.len() / 10;
    let median = |part: &[u64]| {
        let mut part = part.to_vec();
        part.sort_unstable();
        part.get(part.len() / 2).copied()
    };
    let middle = samples.len() / 2;
    let around = samples.get(middle.checked_sub(tenth / 2)?..middle + tenth.div_ceil(2))?;
    Some((median(around)?, median(&samples[samples.len() - tenth..])?))
}

/// Processes that come and go.
#[derive(Default)]
struct Visitors {
    present: Vec<Visitor>,
    came: u32,
    killed: u32,
}

struct Visitor {
    name: &'static str,
    child: Child,
    kill_at: Option<Instant>,
    until: Instant,
}

impl Visitors {
    /// Two of the program's own workers, one of which is killed, then a pair of tools. The next step comes when these
    /// have ended.
    fn step(&mut self, place: &Place) -> anyhow::Result<()> {
        for mut visitor in std::mem::take(&mut self.present) {
            if let Some(status) = visitor.child.try_wait().context("cannot wait")? {
                let was_killed = visitor.kill_at.is_some_and(|at| at <= Instant::now());
                if !status.success() && !was_killed {
                    bail!("{} ended with {status}", visitor.name);
                }
                continue;
            }
            if visitor.kill_at.is_some_and(|at| at <= Instant::now()) {
                visitor.child.kill().context("cannot kill it")?;
                visitor.child.wait().context("cannot wait")?;
                self.killed += 1;
                continue;
            }
            if Instant::now() > visitor.until {
                let _ = visitor.child.kill();
                let _ = visitor.child.wait();
                bail!("{} does not end", visitor.name);
            }
            self.present.push(visitor);
        }
        if !self.present.is_empty() {
            return Ok(());
        }
        let turn = self.came / 2;
        if turn.is_multiple_of(2) {
            self.add("worker", place.soak("work", &["1"]), None)?;
            // At another moment of its life each time.
            let after = Duration::from_millis(50 + u64::from(turn) * 377 % 900);
            self.add("killed worker", place.soak("work", &["5"]), Some(after))?;
        } else {
            let tool =
                ["ibv_uc_pingpong", "ibv_ud_pingpong", "ibv_rc_pingpong"][turn as usize / 2 % 3];
            let pingpong = || {
                let mut command = place.command(Path::new(tool));
                command.args(["-g", "0", "-n", "500", "-p", "18520"]).stderr(Stdio::null());
                command
            };
            self.add(tool, pingpong(), None)?;
            await_listener(18_520)?;
            let mut client = pingpong();
            client.arg("127.0.0.1");
            self.add(tool, client, None)?;
        }
        Ok(())
    }

    fn add(
        &mut self,
        name: &'static str,
        mut command: Command,
        kill: Option<Duration>,
    ) -> anyhow::Result<()> {
        let child = command.spawn().with_context(|| format!("cannot run {name}"))?;
        self.came += 1;
        let now = Instant::now();
        let until = now + Duration::from_secs(60);
        self.present.push(Visitor { name, child, kill_at: kill.map(|k| now + k), until });
        Ok(())
    }

    /// Waits for those that are there.
    fn end(&mut self) -> anyhow::Result<()> {
        for mut visitor in std::mem::take(&mut self.present) {
            if visitor.kill_at.is_some() {
                let _ = visitor.child.kill();
            }
            let status = visitor.child.wait().context("cannot wait")?;
            if !status.success() && visitor.kill_at.is_none() {
                bail!("{} ended with {status}", visitor.name);
            }
        }
        Ok(())
    }
}

impl Drop for Visitors {
    fn drop(&mut self) {
        for visitor in &mut self.present {
            let _ = visitor.child.kill();
            let _ = visitor.child.wait();
        }
    }
}

/// Waits until a process listens at a TCP port of the loopback.
fn await_listener(port: u16) -> anyhow::Result<()> {
    let needle = format!(":{port:04X} ");
    for _ in 0..500 {
        let listens = ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|path| {
            let table = fs::read_to_string(path).unwrap_or_default();
            table.lines().any(|line| line.contains(&needle) && line.contains(" 0A "))
        });
        if listens {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    bail!("nobody listens at port {port}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_from_the_middle_to_the_end() {
        let rising: Vec<u64> = (0..100).collect();
        assert_eq!(middle_and_end(&rising), Some((50, 95)));
        let warm: Vec<u64> = (0..100).map(|n| 1000.min(n * 50)).collect();
        assert_eq!(middle_and_end(&warm), Some((1000, 1000)));
        assert_eq!(middle_and_end(&[1, 2, 3]), None);
        assert_eq!(own_memory("Name:\tx\nRssAnon:\t    1234 kB\n"), Some(1234));
    }
}
