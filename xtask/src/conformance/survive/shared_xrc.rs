//! A round with an XRC domain that processes share by a file (`conformance/c/xrc_share.c`).

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Context;

use super::super::hosts::Side;
use super::super::process::{Process, wait_for};
use super::super::tools::tail;
use super::Stage;
use super::bystanders::monotonic;
use super::plan::{Fault, Part, Plan};
use super::round::{
    BOUND, CM_BOUND, ENDED_BEFORE, Outcome, Round, SOON, Verdict, end, inject, port, progress,
};

/// A time in which a process would have ended that should not.
const A_WHILE: Duration = Duration::from_millis(500);
/// Times 100 ms in which something must be done for a program to go on.
const GOES_ON: usize = 5;

/// The four processes.
struct Programs {
    initiator: Process,
    holder: Process,
    target: Process,
    opener: Process,
}

impl Programs {
    fn each(&mut self) -> [(&'static str, &mut Process); 4] {
        [
            ("initiator", &mut self.initiator),
            ("holder", &mut self.holder),
            ("target", &mut self.target),
            ("opener", &mut self.opener),
        ]
    }

    fn part(&mut self, part: Part) -> &mut Process {
        match part {
            Part::Initiator => &mut self.initiator,
            Part::Holder => &mut self.holder,
            Part::Target => &mut self.target,
            Part::Opener => &mut self.opener,
        }
    }

    fn said(&mut self) -> String {
        self.each().map(|(name, process)| tail(name, &process.output())).concat()
    }

    /// A survivor that has ended, and how.
    fn ended(&mut self, victim: Part) -> anyhow::Result<Option<String>> {
        let id = self.part(victim).id();
        for (name, process) in self.each() {
            if process.id() != id
                && let Some(status) = process.ended()?
            {
                return Ok(Some(format!("the {name} ended with {status}")));
            }
        }
        Ok(None)
    }
}

pub(super) fn attempt(stage: &Stage<'_>, plan: &Plan, part: Part) -> anyhow::Result<Round> {
    let file = stage.scratch.join("domain");
    let opened = stage.scratch.join("domain.open");
    let _ = fs::remove_file(&opened);
    let mut programs = match start(stage, plan)? {
        Ok(programs) => programs,
        Err(complaint) => return Ok(Round::not_begun(complaint)),
    };
    let begin = monotonic();
    sleep(plan.delay);
    let (injected, at) = (Instant::now(), monotonic());
    let outcome = match inject(plan.fault, programs.part(part))? {
        false => Err(ENDED_BEFORE.into()),
        true => survive(plan, part, &mut programs, injected)?,
    };
    let times = Some([begin, at, monotonic()]);
    let said = programs.said();
    let verdict = Verdict::of(Some(outcome), end(programs.each())?);
    for path in [&file, &opened] {
        fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(Round { verdict, drawn_again: 0, times, said })
}

/// Starts all; the inner error is the device's.
fn start(stage: &Stage<'_>, plan: &Plan) -> anyhow::Result<Result<Programs, String>> {
    let port = port(plan);
    let launch = |side, name: &str, words: &str| stage.start(side, name, &stage.xrc_share, words);
    // The rest of a program's first line, after a word.
    let first = |process: &mut Process, word: &str| -> anyhow::Result<Option<String>> {
        let mut rest = None;
        wait_for(Instant::now() + SOON, || {
            let output = process.output();
            let line = output.split_once('\n').and_then(|(line, _)| line.strip_prefix(word));
            rest = line.map(|line| line.trim().to_owned());
            Ok(rest.is_some() || process.ended()?.is_some())
        })?;
        Ok(rest)
    };
    let mut initiator = launch(plan.client_side(), "initiator", &format!("initiator {port}"))?;
    let sockets = stage.hosts.sockets(plan.client_side());
    wait_for(Instant::now() + SOON, || Ok(sockets.listens(port)? || initiator.ended()?.is_some()))?;
    let mut holder = launch(Side::Server, "holder", "holder domain")?;
    let Some(numbers) = first(&mut holder, "holds")? else {
        return Ok(Err(format!("no SRQ: {}", holder.output())));
    };
    let host = if plan.one_host { "10.77.0.1" } else { "10.77.0.2" };
    let line = format!("target domain {port} {host} {numbers}");
    let mut target = launch(Side::Server, "target", &line)?;
    let Some(qpn) = first(&mut target, "target")? else {
        return Ok(Err(format!("no target: {} {}", target.output(), initiator.output())));
    };
    let mut opener = launch(Side::Server, "opener", &format!("opener domain {qpn}"))?;
    if first(&mut opener, "open")?.is_none() {
        return Ok(Err(format!("the target is not opened: {}", opener.output())));
    }
    fs::write(stage.scratch.join("domain.open"), "").context("cannot say that it is open")?;
    if first(&mut initiator, "connected")?.is_none() {
        return Ok(Err(format!("not connected: {}", initiator.output())));
    }
    Ok(Ok(Programs { initiator, holder, target, opener }))
}

fn survive(
    plan: &Plan,
    part: Part,
    programs: &mut Programs,
    injected: Instant,
) -> anyhow::Result<Outcome> {
    match (part, plan.fault) {
        (_, Fault::Pause(_)) | (Part::Opener, _) => go_on(part, programs),
        (Part::Initiator, _) => {
            sleep(A_WHILE);
            Ok(programs.ended(part)?.map_or(Ok(("the others stay", None)), Err))
        }
        (Part::Holder | Part::Target, _) => {
            // It measures its promise itself; this is about its end.
            let status = programs.initiator.wait(injected + BOUND + CM_BOUND)?;
            let took = injected.elapsed();
            Ok(match status.map(|status| status.code()) {
                Some(Some(3)) => Ok(("the right error", Some(took))),
                Some(code) => Err(format!("the initiator ended with {code:?}")),
                None => Err(format!("the initiator has not ended after {took:?}")),
            })
        }
    }
}

/// Requests are answered, and messages arrive.
fn go_on(part: Part, programs: &mut Programs) -> anyhow::Result<Outcome> {
    let counts = |programs: &Programs| [&programs.initiator, &programs.holder].map(progress);
    let before = counts(programs);
    let mut ended = None;
    let on = wait_for(Instant::now() + SOON, || {
        ended = programs.ended(part)?;
        let now = counts(programs);
        Ok(ended.is_some() || now.iter().zip(before).all(|(now, before)| *now >= before + GOES_ON))
    })?;
    Ok(match ended {
        Some(ended) => Err(ended),
        None if on => Ok(("all go on", None)),
        None => Err("they do not go on".into()),
    })
}
