//! `anyverbs faults`: what a script of faults does, in words. `anyverbs fault`: the faults of a process that runs.

use std::fmt::Write as _;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use anyverbs::config::{Config, read_text};
use anyverbs::watch::{MAX_ORDER as MOST, change_faults};
use anyverbs_faults::{Script, ScriptError};

use crate::look::{self, Looker, Process};
use crate::{args, write_out};

/// Longest wait for the answer of a process, in seconds. Its own thread answers, which needs the processor.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whether a value is the name of a file: it is one word, and no rule is.
pub(crate) fn is_file(value: &str) -> bool {
    !value.trim().contains(char::is_whitespace)
}

/// The text of a script, or of the file that it names, and the script.
fn parse(value: &str) -> anyhow::Result<(String, Script)> {
    let text = if is_file(value) {
        let failed = || format!("cannot read the script {value:?}; rules have more than one word");
        read_text(Path::new(value.trim())).with_context(failed)?
    } else {
        value.to_owned()
    };
    match Script::parse(&text) {
        Err(error) => bail!("{error}\n{}", excerpt(&text, &error)),
        Ok(script) => Ok((text, script)),
    }
}

/// Prints a sentence for each rule.
pub(crate) fn explain(value: &str) -> anyhow::Result<ExitCode> {
    let (_, script) = parse(value)?;
    if script.rules.is_empty() && script.seed.is_none() {
        bail!("the script has neither rules nor a seed");
    }
    let mut said = String::new();
    let seed = anyverbs_environment::text("ANYVERBS_FAULT_SEED");
    let seed = seed.filter(|seed| !seed.is_empty()).map(|seed| seed.parse()).transpose();
    for line in script.explain(seed.context("ANYVERBS_FAULT_SEED is no number")?) {
        // Writing to a String cannot fail.
        let _ = writeln!(said, "{line}");
    }
    write_out(said.as_bytes())
}

/// Changes the faults of a process that runs, and prints its answer.
pub(crate) fn change(args: &args::Fault) -> anyhow::Result<ExitCode> {
    let order = match args.order.trim() {
        word @ ("clear" | "list") => word.to_owned(),
        script => parse(script)?.0,
    };
    if order.len() > MOST {
        bail!("the script has {} bytes, and a process that runs takes {MOST} at once", order.len());
    }
    let config = Config::load_with(&args.settings.variables())?;
    let processes = Looker::new(&args.settings)?.look(look::longest_wait());
    let process = find(&processes, &args.process)?;
    let pid = process.pid;
    let at = (config.registry.as_str(), config.udp_port);
    match change_faults(at, &process.seen, &order, PATIENCE) {
        Ok(Ok(done)) => {
            let lines = done.lines().map(|line| look::printable(line) + "\n");
            write_out(lines.collect::<String>().as_bytes())
        }
        Ok(Err(why)) => bail!("process {pid}: {}", look::printable(&why)),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            let trouble = process.trouble().unwrap_or_else(|| "it may be stopped".into());
            bail!("process {pid} does not answer: {trouble}")
        }
        Err(error) => bail!("process {pid} does not answer: {error}"),
    }
}

/// The process of this number, or the only one with a program of this name.
fn find<'a>(processes: &'a [Process], wanted: &str) -> anyhow::Result<&'a Process> {
    let number = wanted.parse::<u32>().ok();
    let is_it = |process: &&Process| match number {
        Some(pid) => process.pid == pid,
        None => process.program() == wanted,
    };
    let found: Vec<_> = processes.iter().filter(is_it).collect();
    match (&found[..], number) {
        ([process], _) => Ok(process),
        ([], Some(pid)) => {
            let owner = std::fs::metadata(format!("/proc/{pid}")).map(|it| it.uid());
            // SAFETY: it has no arguments, and cannot fail.
            let own = unsafe { libc::geteuid() };
            match owner {
                Ok(owner) if owner != own => bail!("process {pid} is another user's"),
                Ok(_) if is_elsewhere(pid) => bail!(
                    "process {pid} is in another network namespace; run this there: `nsenter -t {pid} -n anyverbs fault ...`"
                ),
                Ok(_) => bail!(
                    "process {pid} does not run with this device; `anyverbs show` lists those that do"
                ),
                Err(_) => bail!("there is no process {pid}"),
            }
        }
        ([], None) => bail!(
            "no process of yours with this device runs {wanted:?} in this network namespace; `anyverbs show` lists those there are"
        ),
        (several, _) => {
            let pids: Vec<_> = several.iter().map(|process| process.pid.to_string()).collect();
            bail!("several processes run {wanted:?}; give the number of one: {}", pids.join(", "))
        }
    }
}

/// Whether a process is known to be in another network namespace, from where no message reaches it.
fn is_elsewhere(pid: u32) -> bool {
    let namespace = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/net")).ok();
    namespace(&pid.to_string()).is_some_and(|there| Some(there) != namespace("self"))
}

/// The line of an error, and a mark below the place.
fn excerpt(text: &str, error: &ScriptError) -> String {
    let line = text.lines().nth(error.line.saturating_sub(1) as usize).unwrap_or_default();
    let line: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let before = " ".repeat(error.column.saturating_sub(1) as usize);
    format!("  {line}\n  {before}^")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_of_an_error_is_shown() {
        let text = "drop packet 5\n\tdrop\u{1b} \u{e9}";
        let error = ScriptError { line: 2, column: 8, reason: String::new() };
        assert_eq!(excerpt(text, &error), "   drop  \u{e9}\n         ^");
        assert!(is_file(" rail.fault ") && !is_file("drop packets"));
    }
}
