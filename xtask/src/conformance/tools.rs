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

use super::hosts::{Hosts, Side, Topology, sweep};
use super::process::{Process, quiet, wait_for};
use super::table::{self, Case, Kind};
use super::{Selection, Tally};
use crate::dist::Dist;
use crate::{packages, workspace};

/// For a server to listen, and for a server to end after its client.
const SOON: Duration = Duration::from_secs(10);

/// Runs the selected cases and says what became of them.
pub(crate) fn run(dist: &Dist, selection: &Selection) -> anyhow::Result<Tally> {
    packages::ensure(&[
        packages::IPROUTE2,
        packages::IBVERBS_UTILS,
        packages::PERFTEST,
        packages::QPERF,
    ])?;
    let cases = table::read(&workspace::root().join("conformance/tools.toml"))?;
    let all = cases.len();
    let mut cases: Vec<Case> =
        cases.into_iter().filter(|case| selection.takes(&case.name(), case.default)).collect();
    if cases.is_empty() {
        bail!("no case of the tools' table has that in its name");
    }
    println!("tools: {} of {all} cases", cases.len());
    // Each worker builds a topology's hosts once and goes through all of its cases.
    cases.sort_by_key(|case| case.topology);
    let scratch = workspace::target().join("conformance/tools");
    fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
    sweep();

    let report = Report { count: cases.len(), ..Report::default() };
    let queue = Mutex::new(VecDeque::from(cases));
    let port = AtomicU16::new(20_000);
    let worker = |label| {
        let mut hosts: Option<(Topology, Option<Hosts>)> = None;
        while let Some(case) = take(&queue) {
            if hosts.as_ref().is_none_or(|(topology, _)| *topology != case.topology) {
                // The old ones go first: names are free again.
                drop(hosts.take());
                hosts = Some((case.topology, Hosts::new(case.topology, label, &scratch)?));
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
            let runner = Runner { dist, hosts, case: &case, scratch: &scratch, label };
            let outcome = runner.run(&port)?;
            report.add(&case, started.elapsed(), &outcome);
        }
        anyhow::Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> =
            (0..selection.jobs.max(1)).map(|label| scope.spawn(move || worker(label))).collect();
        // A worker that failed leaves the rest of the queue to nobody: the error is what counts then.
        workers.into_iter().try_for_each(|worker| worker.join().expect("a worker does not panic"))
    })?;
    Ok(report.finish())
}

fn take(queue: &Mutex<VecDeque<Case>>) -> Option<Case> {
    queue.lock().expect("no worker panics with the queue").pop_front()
}

/// What became of a case.
enum Outcome {
    Passed(String),
    /// A line, and what the programs said.
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
        *times.entry(case.topology).or_default() += time;
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

struct Runner<'a> {
    dist: &'a Dist,
    hosts: &'a Hosts,
    case: &'a Case,
    scratch: &'a Path,
    label: usize,
}

/// Server and client of one pair; a case without a server has a client only.
struct Pair {
    port: u16,
    server: Option<Process>,
    client: Option<Process>,
}

impl Runner<'_> {
    /// Fails only where the machine does; what the programs do is an outcome.
    fn run(&self, next_port: &AtomicU16) -> anyhow::Result<Outcome> {
        let mut pairs: Vec<Pair> = (0..self.case.pairs)
            .map(|_| Pair {
                // Below the range from which the kernel takes ports for clients.
                port: 20_000 + next_port.fetch_add(1, Ordering::Relaxed) % 10_000,
                server: None,
                client: None,
            })
            .collect();
        let verdict = self.run_pairs(&mut pairs)?;
        Ok(match verdict {
            Ok(figures) => Outcome::Passed(figures),
            Err(reason) => {
                // Stop first, so that everything is written.
                for process in
                    pairs.iter_mut().flat_map(|pair| [&mut pair.server, &mut pair.client]).flatten()
                {
                    process.stop();
                }
                let said = pairs.iter().flat_map(|pair| {
                    [("server", &pair.server), ("client", &pair.client)]
                        .into_iter()
                        .filter_map(|(side, process)| Some((side, process.as_ref()?.output())))
                });
                Outcome::Failed(reason, said.map(|(side, output)| tail(side, &output)).collect())
            }
        })
    }

    /// The inner result is the case's: its figures, or what is wrong.
    fn run_pairs(&self, pairs: &mut [Pair]) -> anyhow::Result<Result<String, String>> {
        let Case { kind, .. } = *self.case;
        let deadline = Instant::now() + Duration::from_secs(self.case.timeout_s);
        if matches!(kind, Kind::Pair | Kind::Qperf) {
            for pair in &mut *pairs {
                let words = match self.command(Side::Server)? {
                    command if kind == Kind::Pair => format!("{command} -p {}", pair.port),
                    _ => format!("qperf -lp {}", pair.port),
                };
                pair.server = Some(self.start(Side::Server, pair.port, &words)?);
            }
            for pair in &mut *pairs {
                let server = pair.server.as_mut().expect("started above");
                let mut ended = None;
                let listens = wait_for(Instant::now() + SOON, || {
                    ended = server.ended()?;
                    Ok(ended.is_some() || self.hosts.listens(pair.port)?)
                })?;
                if let Some(status) = ended {
                    return Ok(Err(format!("the server ended before it listened ({status})")));
                }
                if !listens {
                    return Ok(Err(format!(
                        "the server does not listen after {} s",
                        SOON.as_secs()
                    )));
                }
            }
        }
        for pair in &mut *pairs {
            let command = self.command(Side::Client)?;
            let host = self.hosts.server_address(self.case.dial_ipv4);
            let words = match kind {
                Kind::Pair => format!("{command} -p {} {host}", pair.port),
                Kind::Qperf => format!("qperf {host} -lp {} {command} quit", pair.port),
                Kind::Alone | Kind::Watch => command,
            };
            pair.client = Some(self.start(Side::Client, pair.port, &words)?);
        }
        let mut figures = Vec::new();
        for pair in &mut *pairs {
            let client = pair.client.as_mut().expect("started above");
            match self.judge(client, pair.server.as_mut(), deadline)? {
                Ok(figure) => figures.push(figure),
                Err(reason) => return Ok(Err(reason)),
            }
        }
        Ok(Ok(figures.join(" | ")))
    }

    /// Waits for one pair and checks what it did.
    fn judge(
        &self,
        client: &mut Process,
        mut server: Option<&mut Process>,
        deadline: Instant,
    ) -> anyhow::Result<Result<String, String>> {
        let case = self.case;
        let printed = |text: &str| case.prints.iter().find(|want| !text.contains(*want)).cloned();
        if case.kind == Kind::Watch {
            let done = wait_for(deadline, || {
                Ok(printed(&client.output()).is_none() || client.ended()?.is_some())
            })?;
            if let Some(want) = printed(&client.output()) {
                let how = if done { "ended" } else { "ran out of time" };
                return Ok(Err(format!("{how} without {want:?}")));
            }
            client.signal(libc::SIGINT)?;
            return Ok(match client.wait(Instant::now() + SOON)? {
                Some(status) if status.signal() == Some(libc::SIGINT) => Ok(String::new()),
                Some(status) => Err(format!("interrupted, it ended with {status}")),
                None => Err("interrupted, it did not end".into()),
            });
        }

        let Some(client_status) = client.wait(deadline)? else {
            return Ok(Err(format!("the client ran out of time ({} s)", case.timeout_s)));
        };
        let mut statuses = vec![("client", client_status)];
        if let Some(server) = server.as_mut() {
            // A client that broke off may leave its server waiting for ever.
            let patience = if client_status.success() { SOON } else { SOON / 5 };
            match server.wait(Instant::now() + patience)? {
                Some(status) => statuses.push(("server", status)),
                None if !client_status.success() => {
                    return Ok(Err(format!(
                        "the client ended with {client_status}, and the server not at all"
                    )));
                }
                None => {
                    return Ok(Err(format!(
                        "the server does not end; the client did with {client_status}"
                    )));
                }
            }
        }
        let said =
            client.output() + &server.as_ref().map(|server| server.output()).unwrap_or_default();
        if let Some(want) = printed(&said) {
            return Ok(Err(format!("nobody printed {want:?}")));
        }
        if let Some(want) = &case.fails_with {
            let refused = |status: &ExitStatus| status.code().is_some_and(|code| code != 0);
            return Ok(match statuses.iter().find(|(_, status)| !refused(status)) {
                Some((side, status)) => {
                    Err(format!("the {side} was to fail and ended with {status}"))
                }
                None if !said.contains(want.as_str()) => Err(format!("it failed without {want:?}")),
                None => Ok(format!("fails as it must: {want}")),
            });
        }
        if let Some((side, status)) = statuses.iter().find(|(_, status)| !status.success()) {
            return Ok(Err(format!("the {side} ended with {status}")));
        }
        if case.report.on_both_sides()
            && let Some(Err(reason)) =
                server.map(|server| case.report.read(&server.output(), case.rows))
        {
            return Ok(Err(format!("the server: {reason}")));
        }
        Ok(case.report.read(&client.output(), case.rows))
    }

    fn start(&self, side: Side, port: u16, words: &str) -> anyhow::Result<Process> {
        let name = if side == Side::Server { "server" } else { "client" };
        let mut command = self.hosts.command(side, &self.dist.anyverbs());
        command.args(["run", "--"]).args(words.split(' ')).current_dir(self.scratch);
        Process::start(&mut command, &self.output(&format!("{name}-{port}")))
    }

    fn output(&self, name: &str) -> PathBuf {
        self.scratch.join(format!("{}-{name}.out", self.label))
    }

    /// The case's command for one side.
    fn command(&self, side: Side) -> anyhow::Result<String> {
        if !self.case.command.split(' ').any(|word| word == "GID") {
            return Ok(self.case.command.clone());
        }
        let index = self.gid_index(side)?.to_string();
        let words: Vec<&str> = self
            .case
            .command
            .split(' ')
            .map(|word| if word == "GID" { index.as_str() } else { word })
            .collect();
        Ok(words.join(" "))
    }

    /// The index of a side's address in its GID table.
    fn gid_index(&self, side: Side) -> anyhow::Result<u64> {
        gid_index(self.hosts.command(side, &self.dist.anyverbs()), self.hosts.own_address(side))
    }
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
