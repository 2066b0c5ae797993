//! `conformance/tools.toml`: the cases, written as patterns and expanded here.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

use super::hosts::Topology;
use super::results::Report;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    group: Vec<Group>,
}

/// Cases that differ in their command and topology only.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Group {
    /// A pattern: `{a,b,}` stands for each of its words in turn; the word `GID` in what comes out for the index of the
    /// side's own address in its GID table.
    command: String,
    on: Vec<Topology>,
    #[serde(default)]
    kind: Kind,
    report: Report,
    /// Lines that perftest's table must have.
    #[serde(default = "one")]
    rows: usize,
    /// What the output (of both sides together) must contain.
    #[serde(default)]
    prints: Vec<String>,
    /// The test is to fail (on both sides), and to say this.
    fails_with: Option<String>,
    /// Pairs of server and client at the same time.
    #[serde(default = "one")]
    pairs: usize,
    /// The tool exchanges its set-up over IPv4 whatever its traffic uses.
    #[serde(default)]
    dial_ipv4: bool,
    #[serde(default = "minute")]
    timeout_s: u64,
    /// Patterns of the commands that are in the default selection, on the first topology of `on` or the named ones.
    #[serde(default)]
    default: Vec<String>,
    #[serde(default)]
    default_on: Vec<Topology>,
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

/// How server and client are started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    /// `COMMAND -p PORT` and `COMMAND -p PORT HOST`; both end by themselves.
    #[default]
    Pair,
    /// `qperf -lp PORT` and `qperf HOST -lp PORT COMMAND quit`, which ends the server.
    Qperf,
    /// No server: `COMMAND`, which ends by itself.
    Alone,
    /// No server: `COMMAND`, which is interrupted when it has printed what is expected.
    Watch,
}

/// One case.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) command: String,
    pub(crate) topology: Topology,
    pub(crate) kind: Kind,
    pub(crate) report: Report,
    pub(crate) rows: usize,
    pub(crate) prints: Vec<String>,
    pub(crate) fails_with: Option<String>,
    pub(crate) pairs: usize,
    pub(crate) dial_ipv4: bool,
    pub(crate) timeout_s: u64,
    pub(crate) default: bool,
}

impl Case {
    /// What the case is called in reports and filters.
    pub(crate) fn name(&self) -> String {
        let topology = self.topology.name();
        let tool = if self.kind == Kind::Qperf { "qperf " } else { "" };
        match self.pairs {
            1 => format!("{topology} {tool}{}", self.command),
            pairs => format!("{topology} {pairs}x {tool}{}", self.command),
        }
    }
}

/// Reads and expands the table.
pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<Case>> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    expand(&text).with_context(|| format!("in {}", path.display()))
}

fn expand(text: &str) -> anyhow::Result<Vec<Case>> {
    let table: Table = toml::from_str(text)?;
    let mut cases = Vec::new();
    for group in table.group {
        let of = || format!("in the group {:?}", group.command);
        ensure!(
            !group.on.is_empty() && group.pairs > 0 && group.rows > 0,
            "nothing to run {}",
            of()
        );
        ensure!(
            group.kind != Kind::Watch || !group.prints.is_empty(),
            "nothing to wait for {}",
            of()
        );
        ensure!(
            group.report != Report::None || !group.prints.is_empty() || group.fails_with.is_some(),
            "nothing to check {}",
            of()
        );
        let commands = braces(&group.command).with_context(of)?;
        let mut defaults = BTreeSet::new();
        for pattern in &group.default {
            for command in braces(pattern).with_context(of)? {
                ensure!(
                    commands.contains(&command),
                    "{command:?} of `default` is no command {}",
                    of()
                );
                defaults.insert(command);
            }
        }
        let default_on =
            if group.default_on.is_empty() { &group.on[..1] } else { &group.default_on };
        if let Some(stray) = default_on.iter().find(|topology| !group.on.contains(topology)) {
            bail!("{:?} of `default-on` is not in `on` {}", stray.name(), of());
        }
        for command in &commands {
            for &topology in &group.on {
                cases.push(Case {
                    command: command.clone(),
                    topology,
                    kind: group.kind,
                    report: group.report,
                    rows: group.rows,
                    prints: group.prints.clone(),
                    fails_with: group.fails_with.clone(),
                    pairs: group.pairs,
                    dial_ipv4: group.dial_ipv4,
                    timeout_s: group.timeout_s,
                    default: defaults.contains(command) && default_on.contains(&topology),
                });
            }
        }
    }
    let mut names = BTreeSet::new();
    for case in &cases {
        ensure!(names.insert(case.name()), "{:?} is in the table twice", case.name());
    }
    Ok(cases)
}

/// Expands `{a,b}` as a shell does, spaces included, then takes the spaces that are too many away. No nesting.
pub(super) fn braces(pattern: &str) -> anyhow::Result<Vec<String>> {
    let Some((before, rest)) = pattern.split_once('{') else {
        ensure!(!pattern.contains('}'), "a brace without a beginning in {pattern:?}");
        return Ok(vec![pattern.split_ascii_whitespace().collect::<Vec<_>>().join(" ")]);
    };
    let (words, after) =
        rest.split_once('}').with_context(|| format!("a brace without an end in {pattern:?}"))?;
    ensure!(!words.contains('{'), "a brace in a brace in {pattern:?}");
    let mut all = Vec::new();
    for word in words.split(',') {
        all.extend(braces(&format!("{before}{word}{after}"))?);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        assert_eq!(
            braces("a -c {RC,UC} {,-q 8}").unwrap(),
            ["a -c RC", "a -c RC -q 8", "a -c UC", "a -c UC -q 8"]
        );
        assert_eq!(braces("x").unwrap(), ["x"]);
        assert!(braces("{a").is_err());
        assert!(braces("a}").is_err());
        assert!(braces("{a,{b}}").is_err());
    }

    #[test]
    fn the_projects_table_is_sound() {
        let cases = read(&crate::workspace::root().join("conformance/tools.toml")).unwrap();
        assert!(cases.iter().any(|case| case.default));
        for tool in [
            "ibv_devices",
            "ibv_devinfo",
            "ibv_asyncwatch",
            "ibv_rc_pingpong",
            "ibv_uc_pingpong",
            "ibv_ud_pingpong",
            "ibv_srq_pingpong",
            "ib_send_bw",
            "ib_send_lat",
            "ib_write_bw",
            "ib_write_lat",
            "ib_read_bw",
            "ib_read_lat",
            "ib_atomic_bw",
            "ib_atomic_lat",
        ] {
            for topology in [Topology::Loopback, Topology::TwoHosts] {
                let found = cases.iter().any(|case| {
                    case.topology == topology && case.command.split(' ').any(|word| word == tool)
                });
                assert!(found, "{tool} on {}", topology.name());
            }
        }
    }

    #[test]
    fn mistakes_in_a_table_are_found() {
        let group = |more: &str| {
            format!(
                "[[group]]\ncommand = 'a {{b,c}}'\non = ['loopback']\nreport = 'perftest'\n{more}"
            )
        };
        assert_eq!(expand(&group("")).unwrap().len(), 2);
        assert_eq!(
            expand(&group("default = ['a b']")).unwrap().iter().filter(|case| case.default).count(),
            1
        );
        assert!(expand(&group("default = ['a d']")).is_err());
        assert!(expand(&group("default-on = ['two-hosts']")).is_err());
        assert!(expand(&group("nonsense = 1")).is_err());
        assert!(expand(&group("pairs = 0")).is_err());
        assert!(expand(&(group("") + &group(""))).is_err(), "twice");
        assert!(
            expand("[[group]]\ncommand = 'a'\non = ['loopback']\nreport = 'none'\n").is_err(),
            "nothing to check"
        );
    }
}
