//! Runs the table of unmodified tools.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::failover;
use super::findings::{self, Known};
use super::hosts::{Hosts, INTERFACE, Side, Topology, sweep};
use super::process::{Process, quiet, wait_for};
use super::table::{self, Kind, Place, fill};
use super::{Selection, Tally, exchange};
use crate::dist::Dist;
use crate::{packages, workspace};

/// Time for a server to listen.
const SOON: Duration = Duration::from_secs(10);

pub(super) type Case = table::Case<Topology>;

/// Runs the selected cases and reports their results.
pub(crate) fn run(dist: &Dist, selection: &Selection) -> anyhow::Result<Tally> {
    packages::ensure(&[
        packages::IPROUTE2,
        packages::IBVERBS_UTILS,
        packages::PERFTEST,
        packages::QPERF,
        packages::RDMACM_UTILS,
        packages::IPERF3,
        packages::FIO,
        packages::UCX_UTILS,
        packages::LIBFABRIC_BIN,
    ])?;
    let cases: Vec<Case> = table::read(&workspace::root().join("conformance/tools.toml"))?;
    let all = cases.len();
    let mut cases: Vec<Case> =
        cases.into_iter().filter(|case| selection.takes(&case.name(), case.default)).collect();
    let scripts = failover::run_scripts(dist, selection, "programs", None)?;
    if cases.is_empty() && scripts == Tally::default() {
        bail!("no case of the tools' tables has that in its name");
    }
    println!("tools: {} of {all} cases", cases.len());
    // Each worker builds a topology's hosts once and goes through all of its cases.
    cases.sort_by_key(|case| case.place);
    let scratch = workspace::target().join("conformance/tools");
    fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
    sweep();
    exchange::build(&scratch)?;

    let known = Known::wanted(selection)?;
    let report = Report { count: cases.len(), ..Report::default() };
    let queue = Mutex::new(VecDeque::from(cases));
    let port = AtomicU16::new(20_000);
    let worker = |label| {
        let mut hosts: Option<(Topology, Option<Hosts>)> = None;
        while let Some(case) = take(&queue) {
            if hosts.as_ref().is_none_or(|(topology, _)| *topology != case.place) {
                // The old ones go first: names are free again.
                drop(hosts.take());
                hosts = Some((case.place, Hosts::new(case.place, label, &scratch)?));
            }
            let Some((_, Some(hosts))) = &hosts else {
                report.add(
                    &case,
                    Duration::ZERO,
                    &Outcome::Skipped("needs root for network namespaces".into()),
                );
                continue;
            };
            let started = Instant::now();
            let known = known.as_ref();
            let runner = Runner { dist, hosts, case: &case, scratch: &scratch, label, known };
            let outcome = runner.run(&port)?;
            report.add(&case, started.elapsed(), &outcome);
        }
        anyhow::Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> =
            (0..selection.jobs.max(1)).map(|label| scope.spawn(move || worker(label))).collect();
        // A worker that failed leaves the rest of the queue undone: the error is what counts then.
        workers.into_iter().try_for_each(|worker| worker.join().expect("a worker does not panic"))
    })?;
    if let Some(known) = &known {
        println!("{known}");
    }
    let mut tally = report.finish();
    tally += scripts;
    Ok(tally)
}

fn take(queue: &Mutex<VecDeque<Case>>) -> Option<Case> {
    queue.lock().expect("no worker panics with the queue").pop_front()
}

/// The result of a case.
pub(super) enum Outcome {
    Passed(String),
    /// A line, and the programs' output.
    Failed(String, String),
    Skipped(String),
}

#[derive(Default)]
struct Report {
    count: usize,
    done: AtomicUsize,
    lines: Mutex<(Tally, BTreeMap<Topology, Duration>, Vec<String>)>,
}

impl Report {
    fn add(&self, case: &Case, time: Duration, outcome: &Outcome) {
        let number = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        let head = format!("[{number:>3}/{}] {}", self.count, case.name());
        let mut state = self.lines.lock().expect("no worker panics with the report");
        let (tally, times, failures) = &mut *state;
        *times.entry(case.place).or_default() += time;
        let seconds = time.as_secs_f64();
        match outcome {
            Outcome::Passed(figures) => {
                tally.passed += 1;
                println!("ok   {head}  {figures}  ({seconds:.1} s)");
            }
            Outcome::Failed(reason, said) => {
                tally.failed += 1;
                println!("FAIL {head}  {reason}  ({seconds:.1} s)\n{said}");
                failures.push(case.name());
            }
            Outcome::Skipped(reason) => {
                tally.skipped += 1;
                println!("skip {head}  {reason}");
            }
        }
    }

    fn finish(self) -> Tally {
        let (tally, times, failures) =
            self.lines.into_inner().expect("no worker panics with the report");
        let times: Vec<_> = times
            .iter()
            .map(|(topology, time)| format!("{} {:.0} s", topology.name(), time.as_secs_f64()))
            .collect();
        println!("tools: {tally}; {}", times.join(", "));
        for name in failures {
            println!("  failed: {name}");
        }
        tally
    }
}

/// Runs one case on hosts that are there.
pub(super) struct Runner<'a> {
    pub(super) dist: &'a Dist,
    pub(super) hosts: &'a Hosts,
    pub(super) case: &'a Case,
    pub(super) scratch: &'a Path,
    pub(super) label: usize,
    /// Mistakes that the programs are known to make, if they are looked for.
    pub(super) known: Option<&'a Known>,
}

/// Servers and clients that belong together; a case without a server has a client only.
struct Pair {
    port: u16,
    programs: Vec<Program>,
}

struct Program {
    role: Role,
    side: Side,
    process: Process,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Server,
    Client,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::Server => "server",
            Role::Client => "client",
        }
    }
}

/// The case's verdict: its figures, or the complaint.
type Verdict = Result<String, String>;

impl Runner<'_> {
    /// Fails only if the machine does. A failure of the programs is an outcome.
    pub(super) fn run(&self, next_port: &AtomicU16) -> anyhow::Result<Outcome> {
        let mut pairs: Vec<Pair> = (0..self.case.pairs)
            .map(|_| Pair {
                port: self.case.port.unwrap_or_else(|| {
                    // Below the range from which the kernel takes ports for clients.
                    20_000 + next_port.fetch_add(1, Ordering::Relaxed) % 10_000
                }),
                programs: Vec::new(),
            })
            .collect();
        let verdict = self.run_pairs(&mut pairs)?;
        let verdict = match (verdict, self.known) {
            (Ok(figures), Some(known)) => known.judge(&self.findings(), None)?.map(|()| figures),
            (verdict, _) => verdict,
        };
        Ok(match verdict {
            Ok(figures) => Outcome::Passed(figures),
            Err(reason) => {
                let mut programs: Vec<_> =
                    pairs.into_iter().flat_map(|pair| pair.programs).collect();
                // Stop first, so that everything is written.
                for program in &mut programs {
                    program.process.stop();
                }
                let said = programs
                    .iter()
                    .map(|program| tail(program.role.name(), &program.process.output()));
                Outcome::Failed(reason, said.collect())
            }
        })
    }

    /// The file of what is found in the programs of this case.
    fn findings(&self) -> PathBuf {
        self.file("findings")
    }

    /// Whether a program has done its work.
    fn is_good(&self, status: &ExitStatus) -> bool {
        findings::has_done_its_work(*status, self.known.is_some())
    }

    fn run_pairs(&self, pairs: &mut [Pair]) -> anyhow::Result<Verdict> {
        let deadline = Instant::now() + Duration::from_secs(self.case.timeout_s);
        if self.known.is_some() {
            fs::write(self.findings(), "")?;
        }
        if self.case.kind == Kind::Pair {
            for pair in &mut *pairs {
                self.start(pair, Role::Server, Side::Server)?;
                if self.case.second_server {
                    self.start(pair, Role::Server, Side::Client)?;
                }
            }
            for pair in &mut *pairs {
                for server in &mut pair.programs {
                    if let Err(reason) = self.wait_for_listener(server, pair.port)? {
                        return Ok(Err(reason));
                    }
                }
            }
        }
        for pair in &mut *pairs {
            for nth in 0..self.case.clients {
                if nth > 0 {
                    self.wait_until_connected(pair, deadline)?;
                }
                self.start(pair, Role::Client, Side::Client)?;
            }
        }
        let mut figures = Vec::new();
        for pair in &mut *pairs {
            let verdict = if self.case.kind == Kind::Watch {
                self.watch(pair, deadline)?
            } else {
                self.judge(pair, deadline)?
            };
            match verdict {
                Ok(figure) => figures.push(figure),
                Err(reason) => return Ok(Err(reason)),
            }
        }
        Ok(Ok(figures.join(" | ")))
    }

    fn wait_for_listener(
        &self,
        server: &mut Program,
        port: u16,
    ) -> anyhow::Result<Result<(), String>> {
        let sockets = self.hosts.sockets(server.side);
        let mut ended = None;
        let listens = wait_for(Instant::now() + SOON, || {
            ended = server.process.ended()?;
            Ok(ended.is_some()
                || match &self.case.ready {
                    Some(text) => server.process.output().contains(text.as_str()),
                    // A program that is to use the device must not have the kernel's socket.
                    None if self.case.sockets => sockets.cm_listens(port)?,
                    None => {
                        sockets.listens(port)?
                            || sockets.cm_listens(port)?
                            || sockets.is_bound(port)?
                    }
                })
        })?;
        Ok(match ended {
            // A side that should fail may do so before it has a peer, which should fail all the same.
            Some(status) if self.case.fails_with.is_none() || status.success() => {
                Err(format!("the server ended before it listened ({status})"))
            }
            None if !listens => {
                Err(format!("the server does not listen after {} s", SOON.as_secs()))
            }
            _ => Ok(()),
        })
    }

    /// Waits until the client that was started last says that it is connected, where the next one must not ask before. If
    /// it never does, its status tells.
    fn wait_until_connected(&self, pair: &mut Pair, deadline: Instant) -> anyhow::Result<()> {
        let Some(text) = &self.case.connected else { return Ok(()) };
        let client = pair.programs.last_mut().expect("started before");
        wait_for(deadline, || {
            Ok(client.process.output().contains(text.as_str()) || client.process.ended()?.is_some())
        })?;
        Ok(())
    }

    /// Waits for one pair and checks its work.
    fn judge(&self, pair: &mut Pair, deadline: Instant) -> anyhow::Result<Verdict> {
        let case = self.case;
        let (servers, clients): (Vec<_>, Vec<_>) =
            pair.programs.iter_mut().partition(|program| program.role == Role::Server);
        let mut statuses = Vec::new();
        for client in clients {
            match client.process.wait(deadline)? {
                Some(status) => statuses.push(("client", status)),
                None => {
                    return Ok(Err(format!("the client ran out of time ({} s)", case.timeout_s)));
                }
            }
        }
        let failed = statuses.iter().find(|(_, status)| !self.is_good(status));
        let how = failed.or(statuses.first()).map(|(_, status)| *status);
        // A client that broke off may leave its server waiting for ever.
        let surprising = failed.is_some() && case.fails_with.is_none();
        let within = if surprising { SOON / 5 } else { Duration::from_secs(self.case.end_s) };
        let end = Instant::now() + within;
        for server in servers {
            if case.stays {
                match server.process.ended()? {
                    Some(status) => statuses.push(("server", status)),
                    None => server.process.stop(),
                }
                continue;
            }
            match (server.process.wait(end)?, how) {
                (Some(status), _) => statuses.push(("server", status)),
                (None, Some(status)) => {
                    return Ok(Err(format!(
                        "the server does not end; the client did with {status}"
                    )));
                }
                (None, None) => return Ok(Err("the server does not end".into())),
            }
        }
        let outputs: Vec<String> =
            pair.programs.iter().map(|program| program.process.output()).collect();
        if let Some(complaint) = case.unprinted(&outputs) {
            return Ok(Err(complaint));
        }
        if let Some(want) = &case.fails_with {
            let refused = |status: &ExitStatus| status.code().is_some() && !self.is_good(status);
            return Ok(match statuses.iter().find(|(_, status)| !refused(status)) {
                Some((side, status)) => {
                    Err(format!("the {side} was to fail and ended with {status}"))
                }
                None if !outputs.concat().contains(want.as_str()) => {
                    Err(format!("it failed without {want:?}"))
                }
                None => Ok(format!("fails as it must: {want}")),
            });
        }
        if let Some((side, status)) = statuses.iter().find(|(_, status)| !self.is_good(status)) {
            return Ok(Err(format!("the {side} ended with {status}")));
        }
        if let Err(reason) = self.compare_files(pair.port)? {
            return Ok(Err(reason));
        }
        let mut figures = Vec::new();
        for (program, output) in pair.programs.iter().zip(&outputs) {
            let client = program.role == Role::Client;
            if client || case.report.on_both_sides() {
                match case.report.read(output, case.rows) {
                    Ok(figure) if client => figures.push(figure),
                    Ok(_) => {}
                    Err(reason) => {
                        return Ok(Err(format!("the {}: {reason}", program.role.name())));
                    }
                }
            }
        }
        Ok(Ok(figures.join(", ")))
    }

    /// Waits until a program has printed the expected text, and interrupts it.
    fn watch(&self, pair: &mut Pair, deadline: Instant) -> anyhow::Result<Verdict> {
        let client = &mut pair.programs.first_mut().expect("started before").process;
        let missing = |client: &Process| self.case.unprinted(&[client.output()]);
        let done =
            wait_for(deadline, || Ok(missing(client).is_none() || client.ended()?.is_some()))?;
        if let Some(complaint) = missing(client) {
            let how = if done { "ended" } else { "ran out of time" };
            return Ok(Err(format!("it {how}: {complaint}")));
        }
        client.signal(libc::SIGINT)?;
        Ok(match client.wait(Instant::now() + SOON)? {
            Some(status) if status.signal() == Some(libc::SIGINT) => Ok(String::new()),
            Some(status) => Err(format!("interrupted, it ended with {status}")),
            None => Err("interrupted, it did not end".into()),
        })
    }

    fn start(&self, pair: &mut Pair, role: Role, side: Side) -> anyhow::Result<()> {
        let words = self.command(role, side, pair.port)?;
        let mut command = self.hosts.command(side, &self.dist.anyverbs());
        command.arg("run");
        if self.case.raw_interface {
            command.env("ANYVERBS_RAW_INTERFACE", INTERFACE);
        }
        if self.case.sockets {
            command.arg("--sockets");
        }
        if self.known.is_some() {
            command.arg("--check").arg("--check-report").arg(self.findings());
        }
        command.arg("--").args(words.split(' ')).current_dir(self.scratch);
        let name = format!("{}-{}-{}", role.name(), pair.port, pair.programs.len());
        let process = Process::start(&mut command, &self.file(&name))?;
        pair.programs.push(Program { role, side, process });
        Ok(())
    }

    /// A file of this worker.
    fn file(&self, name: &str) -> PathBuf {
        self.scratch.join(format!("{}-{name}.out", self.label))
    }

    /// A program's command line.
    fn command(&self, role: Role, side: Side, port: u16) -> anyhow::Result<String> {
        let line = match role {
            Role::Server => &self.case.server,
            Role::Client => &self.case.client,
        };
        let gid = if line.split(' ').any(|word| word == "GID") {
            let own = self.hosts.own_address(side);
            gid_index(self.hosts.command(side, &self.dist.anyverbs()), own)?.to_string()
        } else {
            String::new()
        };
        let port_number = port.to_string();
        let (source, copy) = self.files(port);
        if role == Role::Client
            && let Some(bytes) = self.case.file_bytes
        {
            fs::write(&source, noise(bytes))
                .with_context(|| format!("cannot write {}", source.display()))?;
            if copy.exists() {
                fs::remove_file(&copy)
                    .with_context(|| format!("cannot remove {}", copy.display()))?;
            }
        }
        let (source, copy) = (source.to_string_lossy(), copy.to_string_lossy());
        Ok(fill(line, |word| {
            Some(match word {
                "PORT" => port_number.as_str(),
                "HOST" => self.hosts.server_address(self.case.dial_ipv4),
                "OWN" => self.hosts.own_address(side),
                "GID" => gid.as_str(),
                "SOURCE" => &source,
                "COPY" => &copy,
                _ => return None,
            })
        }))
    }

    /// The file that a client sends, and the copy that its server makes.
    fn files(&self, port: u16) -> (PathBuf, PathBuf) {
        (self.file(&format!("source-{port}")), self.file(&format!("copy-{port}")))
    }

    fn compare_files(&self, port: u16) -> anyhow::Result<Result<(), String>> {
        if self.case.file_bytes.is_none() {
            return Ok(Ok(()));
        }
        let (source, copy) = self.files(port);
        let sent =
            fs::read(&source).with_context(|| format!("cannot read {}", source.display()))?;
        let verdict = match fs::read(&copy) {
            Ok(received) if received == sent => Ok(()),
            Ok(_) => Err("the copy differs".into()),
            Err(error) => Err(format!("no copy: {error}")),
        };
        for file in [&source, &copy] {
            // They are large, and there may be none.
            let _ = fs::remove_file(file);
        }
        Ok(verdict)
    }
}

/// Bytes without a period that a lost or moved block could hide in (xorshift).
pub(super) fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    });
    words.flat_map(u64::to_le_bytes).take(len).collect()
}

/// The index of an address in the GID table that `anyverbs` shows.
pub(super) fn gid_index(mut anyverbs: Command, address: &str) -> anyhow::Result<u64> {
    let text = quiet(anyverbs.args(["devices", "--json"]))?;
    let devices: serde_json::Value =
        serde_json::from_str(&text).context("`anyverbs devices --json`")?;
    let gids =
        devices[0]["port"]["gids"].as_array().context("`anyverbs devices --json` without GIDs")?;
    let entry = gids.iter().find(|gid| gid["address"] == address);
    entry
        .and_then(|gid| gid["index"].as_u64())
        .with_context(|| format!("{address} is not in the GID table"))
}

/// The end of an output, indented.
pub(super) fn tail(side: &str, output: &str) -> String {
    const LINES: usize = 15;
    let lines: Vec<&str> = output.lines().filter(|line| !line.trim().is_empty()).collect();
    let from = lines.len().saturating_sub(LINES);
    lines[from..].iter().map(|line| format!("       {side}: {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_projects_table_is_sound() {
        let cases: Vec<Case> =
            table::read(&workspace::root().join("conformance/tools.toml")).unwrap();
        assert!(cases.iter().any(|case| case.default));
        for tool in [
            "ibv_devices",
            "ibv_devinfo",
            "ibv_asyncwatch",
            "ibv_rc_pingpong",
            "ibv_uc_pingpong",
            "ibv_ud_pingpong",
            "ibv_srq_pingpong",
            "ib_send_bw",
            "ib_send_lat",
            "ib_write_bw",
            "ib_write_lat",
            "ib_read_bw",
            "ib_read_lat",
            "ib_atomic_bw",
            "ib_atomic_lat",
            "rping",
            "ucmatose",
            "udaddy",
            "mckey",
            "rdma_server",
            "rdma_xserver",
            "cmtime",
            "rcopy",
            "rstream",
            "riostream",
            "udpong",
            "fio",
            "iperf3",
        ] {
            for topology in [Topology::Loopback, Topology::TwoHosts] {
                let found = cases.iter().any(|case| {
                    case.place == topology && case.command.split(' ').any(|word| word == tool)
                });
                assert!(found, "{tool} on {}", topology.name());
            }
        }
    }

    #[test]
    fn noise_has_the_length_asked_for() {
        assert_eq!(noise(13).len(), 13);
        assert_ne!(noise(16)[..8], noise(16)[8..]);
    }
}
