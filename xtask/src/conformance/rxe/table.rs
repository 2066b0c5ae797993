//! `conformance/rxe.toml`: the cases, and which packets each of them may put on the wire.

use std::collections::BTreeSet;
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use anyhow::{Context, ensure};
use serde::Deserialize;

use crate::conformance::Report;
use crate::conformance::table::braces;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    group: Vec<Group>,
}

/// Cases that differ in their command and direction only.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Group {
    /// A pattern: `{a,b,}` stands for each of its words in turn; the word `GID` in what comes out for the index of the
    /// side's own address in its GID table.
    command: String,
    report: Report,
    /// Lines that perftest's table must have.
    #[serde(default = "one")]
    rows: usize,
    carries: Carries,
    #[serde(default)]
    requesters: Requesters,
    #[serde(default = "minute")]
    timeout_s: u64,
    #[serde(default = "yes")]
    default: bool,
    /// Why this is in the table as it is, where that is not obvious.
    #[serde(default)]
    #[expect(dead_code, reason = "for the reader of the table")]
    why: Option<String>,
}

fn one() -> usize {
    1
}

fn minute() -> u64 {
    60
}

fn yes() -> bool {
    true
}

/// The only operation on the wire, by service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Carries {
    RcSend,
    RcWrite,
    RcRead,
    RcCompareSwap,
    RcFetchAdd,
    UcSend,
    UcWrite,
    UdSend,
}

impl Carries {
    /// BTH opcodes of the requests.
    pub(super) fn requests(self) -> RangeInclusive<u8> {
        match self {
            Carries::RcSend => 0x00..=0x05,
            Carries::RcWrite => 0x06..=0x0b,
            Carries::RcRead => 0x0c..=0x0c,
            Carries::RcCompareSwap => 0x13..=0x13,
            Carries::RcFetchAdd => 0x14..=0x14,
            Carries::UcSend => 0x20..=0x25,
            Carries::UcWrite => 0x26..=0x2b,
            Carries::UdSend => 0x64..=0x65,
        }
    }

    /// BTH opcodes of the answers without errors; `None` where there is no answer.
    pub(super) fn answers(self) -> Option<RangeInclusive<u8>> {
        match self {
            Carries::RcSend | Carries::RcWrite => Some(0x11..=0x11),
            Carries::RcRead => Some(0x0d..=0x10),
            Carries::RcCompareSwap | Carries::RcFetchAdd => Some(0x12..=0x12),
            Carries::UcSend | Carries::UcWrite | Carries::UdSend => None,
        }
    }
}

/// Who posts requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Requesters {
    #[default]
    Client,
    Both,
}

/// Where the client runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// Here; the server is in the guest.
    ToRxe,
    /// In the guest; the server is here.
    FromRxe,
}

/// One case.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) direction: Direction,
    pub(super) command: String,
    pub(super) report: Report,
    pub(super) rows: usize,
    pub(super) carries: Carries,
    pub(super) requesters: Requesters,
    pub(super) timeout_s: u64,
    pub(super) default: bool,
}

impl Case {
    /// What the case is called in reports and filters.
    pub(super) fn name(&self) -> String {
        let direction = match self.direction {
            Direction::ToRxe => "to-rxe",
            Direction::FromRxe => "from-rxe",
        };
        format!("{direction} {}", self.command)
    }

    /// The name as a file's, without an extension.
    pub(super) fn file_name(&self) -> String {
        let name = self.name();
        let words: Vec<_> = name
            .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .filter(|word| !word.is_empty())
            .collect();
        words.join("-")
    }

    /// Whether a side posts requests.
    pub(super) fn requests(&self, client: bool) -> bool {
        client || self.requesters == Requesters::Both
    }

    /// Whether a side answers requests.
    pub(super) fn answers(&self, client: bool) -> bool {
        self.carries.answers().is_some() && self.requests(!client)
    }
}

/// Reads and expands the table.
pub(super) fn read(path: &Path) -> anyhow::Result<Vec<Case>> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    expand(&text).with_context(|| format!("in {}", path.display()))
}

fn expand(text: &str) -> anyhow::Result<Vec<Case>> {
    let table: Table = toml::from_str(text)?;
    let mut cases = Vec::new();
    for group in table.group {
        ensure!(
            group.rows > 0 && group.report != Report::None,
            "nothing to check in the group {:?}",
            group.command
        );
        for command in braces(&group.command)? {
            for direction in [Direction::ToRxe, Direction::FromRxe] {
                cases.push(Case {
                    direction,
                    command: command.clone(),
                    report: group.report,
                    rows: group.rows,
                    carries: group.carries,
                    requesters: group.requesters,
                    timeout_s: group.timeout_s,
                    default: group.default,
                });
            }
        }
    }
    let mut names = BTreeSet::new();
    for case in &cases {
        ensure!(names.insert(case.file_name()), "{:?} is in the table twice", case.name());
    }
    Ok(cases)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_projects_table_is_sound() {
        let cases = read(&crate::workspace::root().join("conformance/rxe.toml")).unwrap();
        for tool in [
            "ibv_rc_pingpong",
            "ibv_uc_pingpong",
            "ibv_ud_pingpong",
            "ibv_srq_pingpong",
            "ib_send_bw",
            "ib_write_bw",
            "ib_read_bw",
            "ib_atomic_bw",
        ] {
            for direction in [Direction::ToRxe, Direction::FromRxe] {
                let found = cases.iter().any(|case| {
                    case.default
                        && case.direction == direction
                        && case.command.split(' ').next() == Some(tool)
                });
                assert!(found, "{tool} {direction:?}");
            }
        }
    }

    #[test]
    fn names_are_fit_for_files_and_both_directions_are_there() {
        let cases = expand(
            "[[group]]\ncommand = 'ib_read_bw -s {1,2}'\nreport = 'perftest'\ncarries = 'rc-read'\n",
        )
        .unwrap();
        let names: Vec<_> = cases.iter().map(Case::file_name).collect();
        assert_eq!(
            names,
            [
                "to-rxe-ib_read_bw-s-1",
                "from-rxe-ib_read_bw-s-1",
                "to-rxe-ib_read_bw-s-2",
                "from-rxe-ib_read_bw-s-2"
            ]
        );
        assert!(cases[0].requests(true) && !cases[0].requests(false));
        assert!(cases[0].answers(false) && !cases[0].answers(true));
    }

    #[test]
    fn mistakes_in_a_table_are_found() {
        let group = |more: &str| format!("[[group]]\ncommand = 'a'\ncarries = 'rc-send'\n{more}\n");
        assert!(expand(&group("report = 'pingpong'")).is_ok());
        assert!(expand(&group("report = 'none'")).is_err(), "nothing to check");
        assert!(expand(&group("report = 'pingpong'\nrows = 0")).is_err());
        assert!(expand(&group("report = 'pingpong'\nnonsense = 1")).is_err());
        assert!(expand(&group("report = 'pingpong'").repeat(2)).is_err(), "twice");
    }
}
