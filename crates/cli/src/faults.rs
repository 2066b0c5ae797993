//! `anyverbs faults`: what a script of faults does, in words.

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use anyverbs::config::read_text;
use anyverbs_faults::{Script, ScriptError};

use crate::write_out;

/// Whether a value is the name of a file: it is one word, and no rule is.
pub(crate) fn is_file(value: &str) -> bool {
    !value.trim().contains(char::is_whitespace)
}

/// Prints a sentence for each rule.
pub(crate) fn explain(value: &str) -> anyhow::Result<ExitCode> {
    let text = if is_file(value) {
        let failed = || format!("cannot read the script {value:?}; rules have more than one word");
        read_text(Path::new(value.trim())).with_context(failed)?
    } else {
        value.to_owned()
    };
    match Script::parse(&text) {
        Err(error) => bail!("{error}\n{}", excerpt(&text, &error)),
        Ok(script) if script.rules.is_empty() => bail!("the script has no rules"),
        Ok(script) => {
            let mut said = String::new();
            let seed = anyverbs_environment::text("ANYVERBS_FAULT_SEED");
            let seed = seed.filter(|seed| !seed.is_empty()).map(|seed| seed.parse()).transpose();
            for line in script.explain(seed.context("ANYVERBS_FAULT_SEED is no number")?) {
                // Writing to a String cannot fail.
                let _ = writeln!(said, "{line}");
            }
            write_out(said.as_bytes())
        }
    }
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
