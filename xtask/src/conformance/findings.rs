//! Mistakes that the tools are known to make: what `anyverbs run --check` may say of them.

use std::fs;
use std::path::Path;

use anyhow::Context;
use serde::Deserialize;

use crate::workspace;

/// The exit status of a program with findings.
pub(super) const STATUS: i32 = 66;

/// The table `conformance/findings.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Known {
    known: Vec<Mistake>,
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

impl Known {
    pub(super) fn read() -> anyhow::Result<Self> {
        let file = workspace::root().join("conformance/findings.toml");
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        toml::from_str(&text).with_context(|| file.display().to_string())
    }

    /// Whether all findings of a report are known.
    pub(super) fn judge(&self, report: &Path) -> anyhow::Result<Result<(), String>> {
        let text = fs::read_to_string(report).with_context(|| report.display().to_string())?;
        for line in text.lines() {
            let found: Finding = serde_json::from_str(line).with_context(|| line.to_owned())?;
            if !self.has(&found) {
                let Finding { check, program, message } = found;
                return Ok(Err(format!("--check says of {program}: {check}: {message}")));
            }
        }
        Ok(Ok(()))
    }

    fn has(&self, found: &Finding) -> bool {
        self.known
            .iter()
            .any(|known| known.check == found.check && known.programs.contains(&found.program))
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
}
