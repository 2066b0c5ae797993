//! One round: what is drawn, and what becomes of it.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::bail;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::super::hosts::Side;
use super::super::process::{Process, wait_for};
use super::super::tools::tail;
use super::Stage;

/// Timeout and retries: with these a peer that is silent for 0.3 s is waited for, and one that is gone is given up after at most
/// 2.34 s (4 x 4.096 us x 2^14 x 5 + 1 s).
const RETRIES: &str = "-T 14 -r 4";
const BOUND: Duration = Duration::from_millis(2342);
/// For a program to start, on a machine that does other things.
const SOON: Duration = Duration::from_secs(10);
/// For a program of the connection manager to end, whose peer is gone: somebody else on its host says so.
const CM_BOUND: Duration = Duration::from_secs(20);

/// What two programs do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    /// `exchange`, with these options.
    Exchange(&'static str, &'static str),
    /// The same, struck while it sets up.
    SetUp,
    /// A server for one client after the other, a client.
    Rping,
    /// Connections by the dozen.
    Ucmatose,
}

const WORKS: [Work; 10] = [
    Work::Exchange("everything", "-t rc"),
    Work::Exchange("SENDs", "-t rc -o s"),
    Work::Exchange("WRITEs", "-t rc -o w"),
    Work::Exchange("READs", "-t rc -o r -s 100000"),
    Work::Exchange("atomics", "-t rc -o a"),
    Work::Exchange("everything on an SRQ, by events", "-t rc -R -e"),
    Work::Exchange("everything on XRC", "-t xrc"),
    Work::SetUp,
    Work::Rping,
    Work::Ucmatose,
];

/// What happens to one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blow {
    Kill,
    /// The launcher above it.
    KillLauncher,
    /// Stopped for a moment.
    Pause(Duration),
    /// Stopped until the other one has given it up.
    Stop,
}

/// A round.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    work: Work,
    one_host: bool,
    victim: Side,
    blow: Blow,
    /// After they are connected, or started.
    moment: Duration,
    seed: u64,
}

/// What became of it.
#[derive(Debug)]
pub(super) struct Verdict {
    pub(super) what: &'static str,
    /// From the blow until the other one's end.
    pub(super) took: Option<Duration>,
    pub(super) complaint: Option<String>,
    pub(super) said: String,
}

impl Plan {
    pub(super) fn draw(seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let work = *WORKS.choose(&mut rng).expect("not empty");
        let by_exchange = matches!(work, Work::Exchange(..));
        let blow = match rng.random_range(0..10) {
            0 | 1 if by_exchange => Blow::Pause(Duration::from_millis(rng.random_range(1..=200))),
            2 | 3 if by_exchange => Blow::Stop,
            4 if by_exchange => Blow::KillLauncher,
            _ => Blow::Kill,
        };
        let one_host = rng.random_bool(0.5);
        // WRITEs and READs go straight into the memory of a process that is stopped, as they would on a device in hardware.
        let direct = matches!(work, Work::Exchange("WRITEs" | "READs", _));
        let one_host = one_host && !(direct && blow == Blow::Stop);
        // To another host nobody says that a server was killed, and a client that only waits for it never asks.
        let victim = if rng.random_bool(0.5) { Side::Server } else { Side::Client };
        let waits = matches!(work, Work::Rping | Work::Ucmatose) && !one_host;
        Plan {
            work,
            one_host,
            victim: if waits { Side::Client } else { victim },
            blow,
            moment: Duration::from_micros(rng.random_range(0..200_000)),
            seed,
        }
    }

    /// What a row of the table tells of.
    pub(super) fn subject(&self) -> String {
        let work = match self.work {
            Work::Exchange(name, _) => name,
            Work::SetUp => "set-up",
            Work::Rping => "rping",
            Work::Ucmatose => "ucmatose, 20 connections",
        };
        let blow = match self.blow {
            Blow::Kill => "SIGKILL",
            Blow::KillLauncher => "SIGKILL to its launcher",
            Blow::Pause(_) => "SIGSTOP and SIGCONT",
            Blow::Stop => "SIGSTOP",
        };
        let place = if self.one_host { "one host" } else { "two hosts" };
        format!("{work}, {place}: {blow}")
    }

    pub(super) fn promise(&self) -> &'static str {
        match (self.work, self.blow, self.victim) {
            (Work::Exchange(..), Blow::Pause(_), _) => "goes on",
            (Work::Exchange(..), ..) => "IBV_WC_RETRY_EXC_ERR in time, then flushes",
            (Work::SetUp, ..) => "the same, or the end of its TCP connection",
            (Work::Rping, _, Side::Client) => "serves the next client",
            _ => "ends",
        }
    }

    fn client_side(&self) -> Side {
        if self.one_host { Side::Server } else { Side::Client }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let victim = if self.victim == Side::Server { "server" } else { "client" };
        write!(f, "{} to the {victim} after {} us", self.subject(), self.moment.as_micros())
    }
}

/// The two programs.
struct Two {
    server: Process,
    client: Process,
}

impl Two {
    fn victim(&mut self, plan: &Plan) -> &mut Process {
        if plan.victim == Side::Server { &mut self.server } else { &mut self.client }
    }

    fn other(&mut self, plan: &Plan) -> &mut Process {
        if plan.victim == Side::Server { &mut self.client } else { &mut self.server }
    }

    fn said(&self) -> String {
        tail("server", &self.server.output()) + &tail("client", &self.client.output())
    }
}

/// Runs one.
pub(super) fn run(stage: &Stage<'_>, plan: &Plan) -> anyhow::Result<Verdict> {
    let mut two = match start(stage, plan)? {
        Ok(two) => two,
        Err(complaint) => {
            return Ok(Verdict {
                what: "",
                took: None,
                complaint: Some(complaint),
                said: String::new(),
            });
        }
    };
    sleep(plan.moment);
    let struck = Instant::now();
    let result = match plan.blow {
        Blow::Kill | Blow::KillLauncher => {
            two.victim(plan).signal(libc::SIGKILL)?;
            after_end(stage, plan, &mut two, struck)
        }
        Blow::Stop => {
            two.victim(plan).signal(libc::SIGSTOP)?;
            after_end(stage, plan, &mut two, struck)
        }
        Blow::Pause(time) => {
            two.victim(plan).signal(libc::SIGSTOP)?;
            sleep(time);
            two.victim(plan).signal(libc::SIGCONT)?;
            go_on(&mut two)
        }
    }?;
    let said = two.said();
    // Stopped or not: SIGKILL ends it.
    for process in [&mut two.server, &mut two.client] {
        process.signal(libc::SIGKILL)?;
        process.wait(Instant::now() + SOON)?;
    }
    Ok(match result {
        Ok(what) => {
            let took = (!matches!(plan.blow, Blow::Pause(_))).then_some(what.1);
            Verdict { what: what.0, took, complaint: None, said }
        }
        Err(complaint) => Verdict { what: "", took: None, complaint: Some(complaint), said },
    })
}

type Outcome = Result<(&'static str, Duration), String>;

/// Starts both; they are connected where the plan wants that. The inner error is the device's.
fn start(stage: &Stage<'_>, plan: &Plan) -> anyhow::Result<Result<Two, String>> {
    let port = 20_000 + (plan.seed % 10_000) as u16;
    let (program, server, client): (&Path, String, String) = match plan.work {
        Work::Exchange(_, options) => {
            let rest = if matches!(plan.blow, Blow::Pause(_)) { "-b" } else { "-n 100000000" };
            let line = format!("-p {port} {options} {rest} {RETRIES} -S {}", plan.seed);
            (&stage.exchange, line.clone(), line + " 10.77.0.1")
        }
        Work::SetUp => {
            let line = format!("-p {port} -n 100000000 {RETRIES}");
            (&stage.exchange, line.clone(), line + " 10.77.0.1")
        }
        Work::Rping => (
            Path::new("/usr/bin/rping"),
            format!("-s -P -a 10.77.0.1 -p {port}"),
            format!("-c -a 10.77.0.1 -p {port} -C 100000000"),
        ),
        Work::Ucmatose => (
            Path::new("/usr/bin/ucmatose"),
            format!("-b 10.77.0.1 -p {port} -c 20"),
            format!("-s 10.77.0.1 -p {port} -c 20"),
        ),
    };
    let launched = plan.blow == Blow::KillLauncher;
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
    if matches!(plan.work, Work::Exchange(..)) {
        let mut connected = false;
        wait_for(Instant::now() + SOON, || {
            connected =
                [&server, &client].iter().all(|process| process.output().contains("connected"));
            Ok(connected || server.ended()?.is_some() || client.ended()?.is_some())
        })?;
        if !connected {
            return Ok(Err(format!("not connected: {} {}", server.output(), client.output())));
        }
    }
    Ok(Ok(Two { server, client }))
}

/// One is gone, or does not run any more.
fn after_end(
    stage: &Stage<'_>,
    plan: &Plan,
    two: &mut Two,
    struck: Instant,
) -> anyhow::Result<Result<(&'static str, Duration), String>> {
    if plan.work == Work::Rping && plan.victim == Side::Client {
        return next_client(stage, plan, two);
    }
    if plan.work == Work::Ucmatose && plan.victim == Side::Client {
        // It waits for its connections, which may never have been asked for; nobody hangs in a kernel for that.
        two.server.signal(libc::SIGTERM)?;
    }
    let by_exchange = matches!(plan.work, Work::Exchange(..) | Work::SetUp);
    let bound = if by_exchange { BOUND } else { CM_BOUND };
    // It measures itself what it promises; this is about its end.
    let status = two.other(plan).wait(struck + bound + SOON)?;
    let took = struck.elapsed();
    let Some(status) = status else {
        return Ok(Err(format!("the other one has not ended after {took:?}")));
    };
    Ok(judge(plan, status, took))
}

fn judge(plan: &Plan, status: ExitStatus, took: Duration) -> Outcome {
    match (plan.work, status.code()) {
        (Work::Exchange(..) | Work::SetUp, Some(3)) => Ok(("the right error", took)),
        (Work::SetUp, Some(6)) => Ok(("the end of its TCP connection", took)),
        (Work::Exchange(..) | Work::SetUp, _) => Err(format!("the other one ended with {status}")),
        // Ucmatose's other side waits for connections that never come, and is ended.
        (work, None) if work != Work::Ucmatose || status.signal() != Some(libc::SIGTERM) => {
            Err(format!("the other one ended with {status}"))
        }
        _ if took > CM_BOUND => Err(format!("the other one ended only after {took:?}")),
        _ => Ok(("its end", took)),
    }
}

/// A server whose client was killed serves the next one.
fn next_client(
    stage: &Stage<'_>,
    plan: &Plan,
    two: &mut Two,
) -> anyhow::Result<Result<(&'static str, Duration), String>> {
    let begin = Instant::now();
    let port = 20_000 + plan.seed % 10_000;
    let line = format!("-c -a 10.77.0.1 -p {port} -C 5");
    let mut next = stage.start(plan.client_side(), "next", Path::new("/usr/bin/rping"), &line)?;
    let status = next.wait(begin + CM_BOUND)?;
    Ok(match status {
        Some(status) if status.success() && two.server.ended()?.is_none() => {
            Ok(("the next client is served", begin.elapsed()))
        }
        Some(status) => Err(format!("the next client ended with {status}: {}", next.output())),
        None => Err("the next client is not served".into()),
    })
}

/// Both go on.
fn go_on(two: &mut Two) -> anyhow::Result<Result<(&'static str, Duration), String>> {
    let begin = Instant::now();
    let progress = |process: &Process| {
        // Numbers of operations in the last 100 ms that are not zero.
        process
            .output()
            .lines()
            .filter(|line| line.starts_with("at ") && !line.contains(", 0 more"))
            .count()
    };
    let before = [progress(&two.server), progress(&two.client)];
    let on = wait_for(begin + SOON, || {
        if let Some(status) = two.server.ended()?.or(two.client.ended()?) {
            bail!("one of two ended with {status} after a pause:\n{}", two.said());
        }
        let now = [progress(&two.server), progress(&two.client)];
        Ok(now[0] > before[0] + 1 && now[1] > before[1] + 1)
    })?;
    Ok(if on { Ok(("both go on", begin.elapsed())) } else { Err("they do not go on".into()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_work_and_every_blow_is_drawn_in_an_ordinary_run() {
        let plans: Vec<Plan> = (1..=40).map(Plan::draw).collect();
        for work in WORKS {
            assert!(plans.iter().any(|plan| plan.work == work), "{work:?}");
        }
        for blow in [Blow::Kill, Blow::KillLauncher, Blow::Stop] {
            assert!(plans.iter().any(|plan| plan.blow == blow), "{blow:?}");
        }
        assert!(plans.iter().any(|plan| matches!(plan.blow, Blow::Pause(_))));
        assert_eq!(Plan::draw(7).to_string(), Plan::draw(7).to_string());
    }
}
