//! `anyverbs faults`: what a script of faults does, in words. `anyverbs fault`: the faults of a process that runs.

use std::fmt::Write as _;
use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use anyverbs::config::{Config, read_text};
use anyverbs::watch::{MAX_ORDER as MOST, change_faults};
use anyverbs_faults::{Script, ScriptError};

use crate::look::{self, Looker};
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
        read_text(Path::new(value.trim())).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                anyhow!("there is no script {value:?}; rules have more than one word")
            }
            _ => anyhow!("cannot read the script {value:?}: {error}"),
        })?
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
    let process = look::find(&processes, &args.process, "fault")?;
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

/// The characters of a line that are shown before and behind the place of an error, at most.
const SHOWN: (usize, usize) = (40, 30);

/// The part of the line of an error around its place, and a mark below that.
fn excerpt(text: &str, error: &ScriptError) -> String {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let line = text.lines().nth(error.line.saturating_sub(1) as usize).unwrap_or_default();
    let at = error.column.saturating_sub(1) as usize;
    let from = at.saturating_sub(SHOWN.0);
    let mut rest = line.chars().skip(from).map(|c| if c.is_control() { ' ' } else { c });
    let before: String = rest.by_ref().take(at - from).collect();
    let behind: String = rest.by_ref().take(SHOWN.1).collect();
    let begin = if from > 0 { "..." } else { "" };
    let end = if rest.next().is_some() { "..." } else { "" };
    let columns = begin.len() + before.chars().map(columns).sum::<usize>();
    format!("  {begin}{before}{behind}{end}\n  {}^", " ".repeat(columns))
}

/// The columns that a terminal takes for a character: two for those of East Asia and pictures, none for accents and what joins.
fn columns(c: char) -> usize {
    match u32::from(c) {
        0x300..=0x36f | 0x200b..=0x200f | 0xfe00..=0xfe0f => 0,
        0x1100..=0x115f
        | 0x2e80..=0x303e
        | 0x3041..=0xa4cf
        | 0xac00..=0xd7a3
        | 0xf900..=0xfaff
        | 0xfe30..=0xfe6f
        | 0xff00..=0xff60
        | 0xffe0..=0xffe6
        | 0x1f300..=0x1faff
        | 0x20000..=0x3fffd => 2,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_of_an_error_is_shown() {
        let text = "drop packet 5\n\tdrop\u{1b} \u{e9}";
        let error = ScriptError { line: 2, column: 8, reason: String::new() };
        assert_eq!(excerpt(text, &error), "   drop  \u{e9}\n         ^");
        let of = |text: &str, column| {
            excerpt(text, &ScriptError { line: 1, column, reason: String::new() })
        };
        assert_eq!(
            of("\u{feff}drop \u{6f22}\u{5b57} x", 9),
            "  drop \u{6f22}\u{5b57} x\n            ^"
        );
        assert_eq!(of("e\u{301} drop", 4), "  e\u{301} drop\n    ^");
        let long = of(&"drop packet 1; ".repeat(7000), 50_001);
        let (line, mark) = long.split_once('\n').unwrap();
        assert!(line.starts_with("  ...") && line.ends_with("...") && line.len() < 90, "{long}");
        assert_eq!(&line[mark.len() - 1..][..4], &"drop packet 1; ".repeat(7000)[50_000..][..4]);
        assert!(is_file(" rail.fault ") && !is_file("drop packets"));
    }
}
