//! One round: the programs start, the fault is injected, and the survivor is judged.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::super::hosts::Side;
use super::super::process::{Process, wait_for};
use super::super::tools::tail;
use super::bystanders::monotonic;
use super::plan::{Fault, Plan, Workload};
use super::{FIRST_PORT, Stage, shared_xrc};

/// Timeout and retries. With these a requester waits for a peer that is silent for 0.3 s. It gives up a peer that has
/// gone after at most 2.34 s (4 x 4.096 us x 2^14 x 5 + 1 s).
const RETRIES: &str = "-T 14 -r 4";
pub(super) const BOUND: Duration = Duration::from_millis(2342);
/// Time for a program to start or to be ended, on a machine that does other things.
pub(super) const SOON: Duration = Duration::from_secs(60);
/// Time for a program of the connection manager to end after its peer has gone. Another process of the peer's host
/// tells it.
pub(super) const CM_BOUND: Duration = Duration::from_secs(20);
/// Times that a round is drawn again if its victim had ended before the fault.
const ATTEMPTS: u32 = 6;

/// The complaint about a victim whose work should have no end.
pub(super) const ENDED_BEFORE: &str = "the victim had ended by itself before the fault";

/// The result of a round.
#[derive(Debug)]
pub(super) enum Verdict {
    /// As promised: the promise, and the time after the fault if it matters.
    Kept(&'static str, Option<Duration>),
    Broken(String),
    /// The victim had ended before the fault each time: nothing was tried.
    Void,
}

#[derive(Debug)]
pub(super) struct Round {
    pub(super) verdict: Verdict,
    /// Times that the victim had ended before the fault.
    pub(super) drawn_again: u32,
    /// When both worked, when the fault was injected and when the survivor was done, by the monotonic clock.
    pub(super) times: Option<[f64; 3]>,
    /// The ends of the programs' output.
    pub(super) said: String,
}

impl Round {
    pub(super) fn not_begun(complaint: String) -> Self {
        let verdict = Verdict::Broken(complaint);
        Round { verdict, drawn_again: 0, times: None, said: String::new() }
    }
}

impl Verdict {
    /// `outcome` is none if the fault hit no victim; `end` says whether the programs could be ended.
    pub(super) fn of(outcome: Option<Outcome>, end: Result<(), String>) -> Self {
        match (outcome, end) {
            (_, Err(stuck)) | (Some(Err(stuck)), _) => Verdict::Broken(stuck),
            (None, Ok(())) => Verdict::Void,
            (Some(Ok((what, took))), Ok(())) => Verdict::Kept(what, took),
        }
    }
}

/// As promised, after so long; or not, and why.
pub(super) type Outcome = Result<(&'static str, Option<Duration>), String>;

/// The two programs.
struct Pair {
    server: Process,
    client: Process,
}

impl Pair {
    fn victim(&mut self, plan: &Plan) -> &mut Process {
        if plan.victim == Side::Server { &mut self.server } else { &mut self.client }
    }

    fn survivor(&mut self, plan: &Plan) -> &mut Process {
        if plan.victim == Side::Server { &mut self.client } else { &mut self.server }
    }

    fn said(&self) -> String {
        tail("server", &self.server.output()) + &tail("client", &self.client.output())
    }

    fn end(&mut self) -> anyhow::Result<Result<(), String>> {
        end([("server", &mut self.server), ("client", &mut self.client)])
    }
}

/// Ends programs, stopped or not; the inner error names one that does not end.
pub(super) fn end<'a>(
    programs: impl IntoIterator<Item = (&'static str, &'a mut Process)>,
) -> anyhow::Result<Result<(), String>> {
    let mut stuck = Ok(());
    for (name, process) in programs {
        process.signal(libc::SIGKILL)?;
        if process.wait(Instant::now() + SOON)?.is_none() {
            let id = process.id();
            stuck = Err(format!("the {name} ({id}) does not end after SIGKILL"));
        }
    }
    Ok(stuck)
}

/// Runs one; with the fault earlier, where the victim had ended before it.
pub(super) fn run(stage: &Stage<'_>, plan: &Plan) -> anyhow::Result<Round> {
    let mut plan = plan.clone();
    let mut round = attempt(stage, &plan)?;
    for drawn_again in 1..ATTEMPTS {
        if !matches!(round.verdict, Verdict::Void) {
            break;
        }
        plan = plan.sooner();
        round = Round { drawn_again, ..attempt(stage, &plan)? };
    }
    Ok(round)
}

fn attempt(stage: &Stage<'_>, plan: &Plan) -> anyhow::Result<Round> {
    if let Workload::SharedXrc(part) = plan.workload {
        return shared_xrc::attempt(stage, plan, part);
    }
    let mut pair = match start(stage, plan)? {
        Ok(pair) => pair,
        Err(complaint) => return Ok(Round::not_begun(complaint)),
    };
    let begin = monotonic();
    sleep(plan.delay);
    let (injected, at) = (Instant::now(), monotonic());
    let outcome = match (inject(plan.fault, pair.victim(plan))?, plan.fault) {
        (false, _) if plan.ends_by_itself() => None,
        (false, _) => Some(Err(ENDED_BEFORE.into())),
        (true, Fault::Pause(_)) => Some(after_pause(plan, &mut pair)?),
        (true, _) => Some(after_end(stage, plan, &mut pair, injected)?),
    };
    let times = Some([begin, at, monotonic()]);
    let said = pair.said();
    let verdict = Verdict::of(outcome, pair.end()?);
    Ok(Round { verdict, drawn_again: 0, times, said })
}

/// Injects a fault, with the end of a pause, and says whether it hit.
pub(super) fn inject(fault: Fault, victim: &mut Process) -> anyhow::Result<bool> {
    let signal = match fault {
        Fault::Kill | Fault::KillLauncher => libc::SIGKILL,
        Fault::Pause(_) | Fault::Stop => libc::SIGSTOP,
    };
    victim.signal(signal)?;
    let hit = took_effect(victim, signal)?;
    if let Fault::Pause(time) = fault {
        sleep(time);
        victim.signal(libc::SIGCONT)?;
    }
    Ok(hit)
}

/// Whether it was the signal that ended or stopped the victim: it may have ended by itself before.
fn took_effect(victim: &mut Process, signal: libc::c_int) -> anyhow::Result<bool> {
    let mut effect = false;
    wait_for(Instant::now() + SOON, || {
        let status = victim.ended()?;
        effect = status.is_some_and(|status| status.signal() == Some(signal))
            || state(victim.id()) == Some('T');
        Ok(effect || status.is_some())
    })?;
    Ok(effect)
}

/// The state of a process as in `/proc/PID/stat`.
fn state(id: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// The threads of a process: name, state, and where in the kernel each one waits.
fn threads(id: u32) -> String {
    let tasks = fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    let about = tasks.map(|task| {
        let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let (stat, wchan) = (read("stat"), read("wchan"));
        let state = stat.rsplit_once(") ").map_or("", |(_, rest)| &rest[..1]);
        format!("{} {state} {wchan}", read("comm").trim())
    });
    about.collect::<Vec<_>>().join(", ")
}

/// Starts both; they are connected where the plan wants that. The inner error is the device's.
fn start(stage: &Stage<'_>, plan: &Plan) -> anyhow::Result<Result<Pair, String>> {
    let port = port(plan);
    let paused = matches!(plan.fault, Fault::Pause(_));
    let (program, server, client): (&Path, String, String) = match plan.workload {
        Workload::Exchange(_, options) => {
            let rest = if paused { "-b" } else { "-n 100000000" };
            let line = format!("-p {port} {options} {rest} {RETRIES} -S {}", plan.seed);
            (&stage.exchange, line.clone(), line + " 10.77.0.1")
        }
        Workload::SetUp => {
            let line = format!("-p {port} -n 100000000 {RETRIES}");
            (&stage.exchange, line.clone(), line + " 10.77.0.1")
        }
        Workload::Rping => {
            let count = if paused { 4000 } else { 100_000_000 };
            (
                Path::new("/usr/bin/rping"),
                format!("-s -P -a 10.77.0.1 -p {port}"),
                format!("-c -a 10.77.0.1 -p {port} -C {count}"),
            )
        }
        Workload::Ucmatose => (
            Path::new("/usr/bin/ucmatose"),
            // Without messages. A program that waits for them polls, and looks for no event, so it never learns of its
            // peer's end.
            format!("-b 10.77.0.1 -p {port} -c 500 -C 0"),
            format!("-s 10.77.0.1 -p {port} -c 500 -C 0"),
        ),
        Workload::SharedXrc(_) => unreachable!("has programs of its own"),
    };
    let launched = plan.fault == Fault::KillLauncher;
    let start = |side, name: &str, line: &str, is_victim: bool| {
        if launched && is_victim {
            stage.launch(side, name, program, line)
        } else {
            stage.start(side, name, program, line)
        }
    };
    let mut server = start(Side::Server, "server", &server, plan.victim == Side::Server)?;
    let sockets = stage.hosts.sockets(Side::Server);
    let listens = wait_for(Instant::now() + SOON, || {
        Ok(sockets.listens(port)? || sockets.cm_listens(port)? || server.ended()?.is_some())
    })?;
    if !listens || server.ended()?.is_some() {
        return Ok(Err(format!("the server does not listen: {}", server.output())));
    }
    let mut client = start(plan.client_side(), "client", &client, plan.victim == Side::Client)?;
    if matches!(plan.workload, Workload::Exchange(..)) {
        let mut connected = false;
        wait_for(Instant::now() + SOON, || {
            connected =
                [&server, &client].iter().all(|process| process.output().contains("connected"));
            Ok(connected || server.ended()?.is_some() || client.ended()?.is_some())
        })?;
        if !connected {
            return Ok(Err(format!("not connected: {} {}", server.output(), client.output())));
        }
    } else {
        // Until then it is this program, which enters the host.
        let runs = |id| fs::read_link(format!("/proc/{id}/exe")).is_ok_and(|exe| exe == program);
        wait_for(Instant::now() + SOON, || Ok(runs(client.id()) || client.ended()?.is_some()))?;
    }
    Ok(Ok(Pair { server, client }))
}

pub(super) fn port(plan: &Plan) -> u16 {
    FIRST_PORT + (plan.seed % 10_000) as u16
}

/// The victim is gone, or does not run any more.
fn after_end(
    stage: &Stage<'_>,
    plan: &Plan,
    pair: &mut Pair,
    injected: Instant,
) -> anyhow::Result<Outcome> {
    if plan.workload == Workload::Rping && plan.victim == Side::Client {
        return next_client(stage, plan, pair);
    }
    if plan.workload == Workload::Ucmatose && plan.victim == Side::Client {
        // It waits for its connections, which may never have been asked for. That wait is not in a kernel.
        pair.server.signal(libc::SIGTERM)?;
    }
    let by_exchange = matches!(plan.workload, Workload::Exchange(..) | Workload::SetUp);
    let bound = if by_exchange { BOUND } else { CM_BOUND };
    // It measures its promise itself; this is about its end.
    let status = pair.survivor(plan).wait(injected + bound + CM_BOUND)?;
    let took = injected.elapsed();
    let Some(status) = status else {
        let (survivor, victim) = (pair.survivor(plan).id(), pair.victim(plan).id());
        return Ok(Err(format!(
            "the survivor has not ended after {took:?}; its threads: {}; the victim's: {}",
            threads(survivor),
            threads(victim)
        )));
    };
    Ok(judge(plan, status, took))
}

fn judge(plan: &Plan, status: ExitStatus, took: Duration) -> Outcome {
    match (plan.workload, status.code()) {
        (Workload::Exchange(..) | Workload::SetUp, Some(3)) => Ok(("the right error", Some(took))),
        (Workload::SetUp, Some(6)) => Ok(("the end of its TCP connection", Some(took))),
        (Workload::Exchange(..) | Workload::SetUp, _) => {
            Err(format!("the survivor ended with {status}"))
        }
        // Ucmatose's other side waits for connections that never come, and is ended.
        (workload, None)
            if workload != Workload::Ucmatose || status.signal() != Some(libc::SIGTERM) =>
        {
            Err(format!("the survivor ended with {status}"))
        }
        _ if took > CM_BOUND => Err(format!("the survivor ended only after {took:?}")),
        _ => Ok(("its end", Some(took))),
    }
}

/// A server serves the next client after one was killed or stopped.
fn next_client(stage: &Stage<'_>, plan: &Plan, pair: &mut Pair) -> anyhow::Result<Outcome> {
    let begin = Instant::now();
    let line = format!("-c -a 10.77.0.1 -p {} -C 5", port(plan));
    let mut next = stage.start(plan.client_side(), "next", Path::new("/usr/bin/rping"), &line)?;
    let status = next.wait(begin + CM_BOUND)?;
    // Rping's server ends at any rejection, as that of its answer to a client that was killed before it was connected.
    if status.is_some_and(|status| !status.success())
        && pair.server.output().contains("RDMA_CM_EVENT_REJECTED")
        && pair.server.wait(begin + CM_BOUND)?.is_some_and(|end| end.code() == Some(255))
    {
        return Ok(Ok(("rping's end at the rejection of its answer", Some(begin.elapsed()))));
    }
    Ok(match status {
        Some(status) if status.success() && pair.server.ended()?.is_none() => {
            Ok(("the next client is served", Some(begin.elapsed())))
        }
        Some(status) => Err(format!("the next client ended with {status}: {}", next.output())),
        None => Err("the next client is not served".into()),
    })
}

/// The victim was stopped for a moment: both go on, or end well.
fn after_pause(plan: &Plan, pair: &mut Pair) -> anyhow::Result<Outcome> {
    match plan.workload {
        Workload::Rping | Workload::Ucmatose => ends_well(plan, pair),
        _ => go_on(pair),
    }
}

/// Programs of a limited work end with success.
fn ends_well(plan: &Plan, pair: &mut Pair) -> anyhow::Result<Outcome> {
    let until = Instant::now() + CM_BOUND;
    // Rping's server waits for the next client.
    let servers_end = plan.workload == Workload::Ucmatose;
    let mut ends = vec![("client", pair.client.wait(until)?)];
    if servers_end {
        ends.push(("server", pair.server.wait(until)?));
    } else if let Some(status) = pair.server.ended()? {
        return Ok(Err(format!("the server ended with {status} after a pause")));
    }
    for (name, end) in ends {
        match end {
            Some(status) if status.success() => {}
            Some(status) => {
                return Ok(Err(format!("the {name} ended with {status} after a pause")));
            }
            None => return Ok(Err(format!("the {name} does not go on after a pause"))),
        }
    }
    Ok(Ok(("both end well", None)))
}

/// The number of intervals of 100 ms in which a program has done something.
pub(super) fn progress(process: &Process) -> usize {
    let output = process.output();
    output.lines().filter(|line| line.starts_with("at ") && !line.contains(", 0 more")).count()
}

/// Both make progress again.
fn go_on(pair: &mut Pair) -> anyhow::Result<Outcome> {
    let before = [progress(&pair.server), progress(&pair.client)];
    let mut ended = None;
    let on = wait_for(Instant::now() + SOON, || {
        ended = pair.server.ended()?.or(pair.client.ended()?);
        let now = [progress(&pair.server), progress(&pair.client)];
        Ok(ended.is_some() || now[0] > before[0] + 1 && now[1] > before[1] + 1)
    })?;
    Ok(match ended {
        Some(status) => Err(format!("one of the two ended with {status} after a pause")),
        None if on => Ok(("both go on", None)),
        None => Err("they do not go on".into()),
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn run(script: &str) -> Process {
        let output = std::env::temp_dir().join(format!("survive-{}.out", std::process::id()));
        let process = Process::start(Command::new("sh").args(["-c", script]), &output).unwrap();
        std::fs::remove_file(output).unwrap();
        process
    }

    #[test]
    fn a_fault_after_the_victims_own_end_is_none() {
        let mut victim = run("exit 0");
        // It has ended but is not waited for: a signal to it is lost without an error.
        wait_for(Instant::now() + SOON, || Ok(state(victim.id()) == Some('Z'))).unwrap();
        victim.signal(libc::SIGKILL).unwrap();
        assert!(!took_effect(&mut victim, libc::SIGKILL).unwrap());

        for signal in [libc::SIGSTOP, libc::SIGKILL] {
            let mut victim = run("exec sleep 100");
            victim.signal(signal).unwrap();
            assert!(took_effect(&mut victim, signal).unwrap());
            victim.signal(libc::SIGKILL).unwrap();
        }
    }
}
