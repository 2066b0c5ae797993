//! The part of docs/reliability.md that a whole run writes.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::Tally;
use super::table::{Case, Direction};
use crate::conformance::table::Place;
use crate::{page, workspace};

const BEGIN: &str = "<!-- result: written by `cargo xtask conformance rxe --all --write-docs` -->";

/// The results of the cases, by where they ran.
#[derive(Debug, Default)]
pub(super) struct Results {
    tallies: BTreeMap<Direction, Tally>,
    failures: Vec<String>,
}

impl Results {
    /// `reason`: why it failed.
    pub(super) fn add(&mut self, case: &Case, reason: Option<&str>) {
        let tally = self.tallies.entry(case.place).or_default();
        match reason {
            None => tally.passed += 1,
            Some(reason) => {
                tally.failed += 1;
                self.failures.push(format!("`{}`: {reason}", case.name()));
            }
        }
    }

    pub(super) fn write(&self) -> anyhow::Result<()> {
        page::write(&workspace::root().join("docs/reliability.md"), BEGIN, &self.text())
    }

    fn text(&self) -> String {
        let mut text = String::from("| place | cases | passed |\n|---|---|---|\n");
        let mut all = Tally::default();
        let mut row = |name: &str, tally: Tally| {
            let _ =
                writeln!(text, "| {name} | {} | {} |", tally.passed + tally.failed, tally.passed);
        };
        for (place, tally) in &self.tallies {
            all += *tally;
            row(place.name(), *tally);
        }
        row("all", all);
        if !self.failures.is_empty() {
            text += "\nFailed:\n\n";
        }
        for failure in &self.failures {
            let _ = writeln!(text, "- {}", failure.lines().next().unwrap_or_default());
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_its_marks() {
        let page = std::fs::read_to_string(workspace::root().join("docs/reliability.md")).unwrap();
        assert!(page::replaced(&page, BEGIN, "").is_some());
    }

    #[test]
    fn failures_are_listed_with_their_reason() {
        let cases =
            super::super::table::read(&workspace::root().join("conformance/rxe.toml")).unwrap();
        let mut results = Results::default();
        results.add(&cases[0], None);
        results.add(&cases[0], Some("no answer\nmore"));
        let text = results.text();
        assert!(text.contains("| all | 2 | 1 |"), "{text}");
        assert!(text.contains(&format!("- `{}`: no answer\n", cases[0].name())), "{text}");
        assert!(!text.contains("more"), "{text}");
    }
}
