//! `anyverbs doctor`: problems that would stop or slow down a program here, and their remedies.

mod checks;
pub(crate) mod elf;
mod loading;
mod start;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use crate::args::Doctor;

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Severity {
    /// As it should be.
    Good,
    /// Good to know.
    Note,
    /// Slower, or less, than it could be.
    Slow,
    /// A program cannot run.
    Stop,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) severity: Severity,
    pub(crate) what: String,
    /// The remedy; empty where there is nothing to do.
    pub(crate) remedy: String,
}

impl Finding {
    fn new(severity: Severity, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Finding { severity, what: what.into(), remedy: remedy.into() }
    }

    fn good(what: impl Into<String>) -> Self {
        Finding::new(Severity::Good, what, "")
    }

    /// A failure that stops programs. Messages of this command end with `; ` and the remedy, where they know one.
    fn stop(what: &str, error: &anyhow::Error) -> Self {
        let text = format!("{error:#}");
        let (cause, remedy) = text
            .rsplit_once("; ")
            .unwrap_or((&text, "change what this message names, then ask `anyverbs doctor` again"));
        Finding::new(Severity::Stop, format!("{what}: {cause}"), remedy)
    }
}

/// Prints every finding; the exit status is 1 if one would stop a program.
pub(crate) fn print(args: &Doctor) -> anyhow::Result<ExitCode> {
    let findings = checks::all(args);
    let code = match findings.iter().any(|finding| finding.severity == Severity::Stop) {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    };
    let text = describe(&findings) + "\n" + &verdict(&findings, args.program.first()) + "\n";
    crate::write_out(text.as_bytes())?;
    Ok(code)
}

/// One line: ready, or what to do first.
fn verdict(findings: &[Finding], program: Option<&OsString>) -> String {
    let stops: Vec<_> = findings.iter().filter(|f| f.severity == Severity::Stop).collect();
    // A directory was looked at for what lies in it.
    let program = program.filter(|name| !Path::new(name).is_dir());
    let program = program.map_or_else(|| "PROGRAM".into(), |name| name.to_string_lossy());
    match stops[..] {
        [] => format!("ready: anyverbs run -- {program}"),
        [only] => format!("not ready: {}. To do: {}", only.what, only.remedy),
        [first, ..] => {
            format!("not ready, {} problems. To do first: {}", stops.len(), first.remedy)
        }
    }
}

fn describe(findings: &[Finding]) -> String {
    let mut text = String::new();
    for finding in findings {
        let mark = match finding.severity {
            Severity::Good => "ok  ",
            Severity::Note => "note",
            Severity::Slow => "slow",
            Severity::Stop => "STOP",
        };
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{mark}  {}", finding.what);
        if !finding.remedy.is_empty() {
            let _ = writeln!(text, "      -> {}", finding.remedy);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_is_ready_or_what_to_do() {
        let stop = |what| Finding::new(Severity::Stop, what, format!("mend {what}"));
        let slow = Finding::new(Severity::Slow, "slow", "hurry");
        assert_eq!(verdict(std::slice::from_ref(&slow), None), "ready: anyverbs run -- PROGRAM");
        assert_eq!(verdict(&[], Some(&"./x".into())), "ready: anyverbs run -- ./x");
        assert_eq!(verdict(&[], Some(&"/tmp".into())), "ready: anyverbs run -- PROGRAM");
        let one = [slow, stop("a")];
        assert_eq!(verdict(&one, None), "not ready: a. To do: mend a");
        let two = [stop("a"), stop("b")];
        assert_eq!(verdict(&two, None), "not ready, 2 problems. To do first: mend a");
    }

    #[test]
    fn the_remedy_of_a_failure_is_the_end_of_its_message() {
        let error = anyhow::anyhow!("no place (a: full; b: full); set TMPDIR");
        let finding = Finding::stop("there are no libraries", &error);
        assert_eq!(finding.what, "there are no libraries: no place (a: full; b: full)");
        assert_eq!(finding.remedy, "set TMPDIR");
        let finding = Finding::stop("there is no device", &anyhow::anyhow!("X=2: expected 1 or 0"));
        assert_eq!(finding.what, "there is no device: X=2: expected 1 or 0");
        assert!(finding.remedy.starts_with("change what"), "{}", finding.remedy);
    }
}
