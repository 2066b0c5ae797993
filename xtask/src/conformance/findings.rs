//! Mistakes that the programs of the suites are known to make: what `anyverbs run --check` may say of them.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::Mutex;

use anyhow::Context;
use serde::Deserialize;

use super::Selection;
use crate::workspace;

/// The exit status of a program that has done its work and has findings. One that failed keeps its own.
const STATUS: i32 = 66;

/// Whether a program has done its work, by its status. Its mistakes are judged apart.
pub(super) fn has_done_its_work(status: ExitStatus, is_checked: bool) -> bool {
    status.success() || is_checked && status.code() == Some(STATUS)
}

/// The table `conformance/findings.toml`, and what was found.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Known {
    known: Vec<Mistake>,
    /// Reports by program and check.
    #[serde(skip)]
    found: Mutex<BTreeMap<(String, String), usize>>,
}

/// A mistake of some programs.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mistake {
    programs: Vec<String>,
    check: String,
    /// The proof that it is one.
    #[serde(rename = "why")]
    _why: String,
}

/// A line of a report.
#[derive(Debug, Deserialize)]
struct Finding {
    check: String,
    program: String,
    message: String,
}

/// Has a program that is started without `anyverbs run`, or by a script, append its findings to a file.
pub(super) fn ask(command: &mut Command, report: &Path) {
    command.env("ANYVERBS_CHECK", "report").env("ANYVERBS_CHECK_REPORT", report);
}

impl Known {
    /// `None` if the selection does not ask for findings.
    pub(super) fn wanted(selection: &Selection) -> anyhow::Result<Option<Self>> {
        selection.check.then(Self::read).transpose()
    }

    fn read() -> anyhow::Result<Self> {
        let file = workspace::root().join("conformance/findings.toml");
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        toml::from_str(&text).with_context(|| file.display().to_string())
    }

    /// Whether all findings of a report are known; the inner error has the first of each other kind. A program of Python has the name of its
    /// `script` here.
    pub(super) fn judge(
        &self,
        report: &Path,
        script: Option<&str>,
    ) -> anyhow::Result<Result<(), String>> {
        let text = fs::read_to_string(report).with_context(|| report.display().to_string())?;
        let mut counts = self.found.lock().expect("nobody panics with the counts");
        let mut unknown = BTreeMap::new();
        for line in text.lines() {
            let mut found: Finding = serde_json::from_str(line).with_context(|| line.to_owned())?;
            if let Some(script) = script.filter(|_| found.program.starts_with("python")) {
                script.clone_into(&mut found.program);
            }
            let is_known = self.has(&found);
            let Finding { check, program, message } = found;
            if !is_known {
                let text = || format!("--check says of {program}: {check}: {message}");
                unknown.entry((program.clone(), check.clone())).or_insert_with(text);
            }
            *counts.entry((program, check)).or_default() += 1;
        }
        let unknown: Vec<_> = unknown.into_values().collect();
        Ok(if unknown.is_empty() { Ok(()) } else { Err(unknown.join("\n")) })
    }

    fn has(&self, found: &Finding) -> bool {
        self.known
            .iter()
            .any(|known| known.check == found.check && known.programs.contains(&found.program))
    }
}

/// The reports, by program and check.
impl fmt::Display for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = self.found.lock().expect("nobody panics with the counts");
        write!(f, "--check: {} reports", counts.values().sum::<usize>())?;
        for ((program, check), count) in counts.iter() {
            write!(f, "\n  {count} of {program}: {check}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_of_a_program_and_a_check() {
        let known = Known::read().unwrap();
        let first = &known.known[0];
        let finding = |program: &str| Finding {
            check: first.check.clone(),
            program: program.into(),
            message: String::new(),
        };
        assert!(known.has(&finding(&first.programs[0])));
        assert!(!known.has(&finding("another")));
    }

    #[test]
    fn a_program_with_findings_has_done_its_work_and_one_that_failed_has_not() {
        let ends = |how: &str, is_checked| {
            let status = Command::new("sh").args(["-c", how]).status().unwrap();
            has_done_its_work(status, is_checked)
        };
        assert!(ends("exit 0", false) && ends("exit 0", true) && ends("exit 66", true));
        for is_checked in [false, true] {
            assert!(!ends("exit 1", is_checked) && !ends("kill -9 $$", is_checked));
        }
        assert!(!ends("exit 66", false), "a status of its own");
    }

    #[test]
    fn a_program_of_python_has_the_name_of_its_script() {
        let known: Known =
            toml::from_str("known = [{programs = ['a'], check = 'leak', why = ''}]").unwrap();
        let report = std::env::temp_dir().join(format!("findings-script-{}", std::process::id()));
        let line = r#"{"check": "leak", "program": "python3.11", "message": "it leaks"}"#;
        fs::write(&report, format!("{line}\n{line}\n")).unwrap();
        assert_eq!(known.judge(&report, Some("a")).unwrap(), Ok(()));
        let unknown = known.judge(&report, Some("b")).unwrap();
        assert_eq!(unknown, Err("--check says of b: leak: it leaks".into()));
        fs::remove_file(report).unwrap();
        assert_eq!(known.to_string(), "--check: 4 reports\n  2 of a: leak\n  2 of b: leak");
    }
}
