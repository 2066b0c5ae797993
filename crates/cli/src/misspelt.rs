//! Variables of the environment that look like settings of the device, and are none.
//!
//! The libraries read the variables that they know, and no others: a program should not pay for a look at its whole environment. So a
//! mistake in a name has no effect there. The command says so.

use std::fmt;

use anyverbs_environment as environment;

use crate::settings::SETTINGS;

/// Beginnings of names that the GitHub Action and the tests of this project use.
const OTHERS: [&str; 2] = ["ANYVERBS_SETUP_", "ANYVERBS_TEST_"];

/// A variable that is no setting.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Misspelt {
    name: String,
    /// The setting that its name resembles.
    nearest: Option<&'static str>,
}

/// Those of the environment of this process, in the order of their names.
pub(crate) fn all() -> Vec<Misspelt> {
    among(environment::names())
}

fn among(names: impl IntoIterator<Item = String>) -> Vec<Misspelt> {
    let is_ours = |name: &String| {
        name.starts_with("ANYVERBS_")
            && !SETTINGS.iter().any(|setting| setting.variable == name)
            && !OTHERS.iter().any(|other| name.starts_with(other))
    };
    let mut names: Vec<_> = names.into_iter().filter(is_ours).collect();
    names.sort();
    names
        .into_iter()
        .map(|name| {
            let nearest = nearest(&name);
            Misspelt { name, nearest }
        })
        .collect()
}

impl Misspelt {
    /// The mistake.
    pub(crate) fn what(&self) -> String {
        format!("{} is set, and is no setting: it has no effect", self.name)
    }

    /// The remedy.
    pub(crate) fn remedy(&self) -> String {
        match self.nearest {
            Some(nearest) => format!("did you mean {nearest}?"),
            None => "`anyverbs run --help` lists the settings".into(),
        }
    }
}

impl fmt::Display for Misspelt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.what(), self.remedy())
    }
}

/// The setting whose name needs the fewest changes, if those are few for its length.
fn nearest(name: &str) -> Option<&'static str> {
    let own = |name: &str| name["ANYVERBS_".len()..].to_owned();
    let name = own(name);
    SETTINGS
        .iter()
        .map(|setting| (changes(&name, &own(setting.variable)), setting.variable))
        .filter(|(changes, variable)| *changes <= 1.max(own(variable).len() / 3))
        .min_by_key(|(changes, _)| *changes)
        .map(|(_, variable)| variable)
}

/// The number of letters to insert, remove, replace, or swap with their neighbour.
fn changes(from: &str, to: &str) -> usize {
    let (from, to) = (from.as_bytes(), to.as_bytes());
    // Each row is for one more letter of `from`, and the places in it for one more of `to`.
    let mut rows: Vec<Vec<usize>> = vec![(0..=to.len()).collect()];
    for i in 1..=from.len() {
        let mut row = vec![i];
        for j in 1..=to.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(from[i - 1] != to[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[from.len()][to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_and_the_names_of_others_are_passed_over() {
        let known = SETTINGS.iter().map(|setting| setting.variable.to_owned());
        let others = ["PATH", "ANYVERBS", "ANYVERBS_SETUP_FILE", "ANYVERBS_TEST_ROLE"];
        assert_eq!(among(known.chain(others.map(str::to_owned))), []);
    }

    #[test]
    fn a_mistake_is_told_with_the_nearest_name() {
        let said = |name: &str| among([name.to_owned()])[0].to_string();
        let nearest = [
            ("ANYVERBS_DEVCE", "ANYVERBS_DEVICE"),
            ("ANYVERBS_LSOS", "ANYVERBS_LOSS"),
            ("ANYVERBS_INTERFACE", "ANYVERBS_INTERFACES"),
            ("ANYVERBS_UDPPORT", "ANYVERBS_UDP_PORT"),
            ("ANYVERBS_LIBDIR", "ANYVERBS_LIB_DIR"),
        ];
        for (name, nearest) in nearest {
            let wanted = format!(
                "{name} is set, and is no setting: it has no effect; did you mean {nearest}?"
            );
            assert_eq!(said(name), wanted);
        }
        for name in ["ANYVERBS_", "ANYVERBS_SOMETHING_ELSE", "ANYVERBS_Å"] {
            assert!(
                said(name).ends_with("`anyverbs run --help` lists the settings"),
                "{}",
                said(name)
            );
        }
    }

    #[test]
    fn a_swap_is_one_change() {
        assert_eq!(changes("", "loss"), 4);
        assert_eq!(changes("loss", "loss"), 0);
        assert_eq!(changes("lsos", "loss"), 1);
        assert_eq!(changes("gso", "gro"), 1);
        assert_eq!(changes("shmm", "shm"), 1);
    }
}
