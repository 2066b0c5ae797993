//! The tables of cases, `conformance/*.toml`: written as patterns and expanded here.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, bail, ensure};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::results::Report;

/// The place of a case: one of a suite's own set of places.
pub(super) trait Place: DeserializeOwned + Copy + Ord {
    fn name(self) -> &'static str;
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", bound = "P: Place")]
struct Table<P> {
    /// The places of groups that give none.
    #[serde(default = "Vec::new")]
    on: Vec<P>,
    #[serde(default = "Vec::new")]
    default_on: Vec<P>,
    /// Programs by the first word of a command.
    #[serde(default)]
    program: BTreeMap<String, Program>,
    group: Vec<Group<P>>,
}

/// The way to start a program, if it is not `COMMAND -p PORT` and `COMMAND -p PORT HOST`. A group may give another.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Program {
    server: Option<String>,
    client: Option<String>,
    ready: Option<String>,
    port: Option<u16>,
    stays: Option<bool>,
    /// Its own last words in a race that it loses at its end, when its work is done.
    race: Option<String>,
    /// A C program of the project's own, below `conformance`, that is compiled for the case.
    source: Option<String>,
    /// An example of the crate `anyverbs`, which is built for the case.
    #[serde(default)]
    example: bool,
}

/// Cases that differ in their command and place only.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", bound = "P: Place")]
struct Group<P> {
    /// A pattern: `{a,b,}` stands for each of its words in turn.
    command: String,
    #[serde(default = "Vec::new")]
    on: Vec<P>,
    #[serde(default)]
    kind: Kind,
    /// The server's command line. `COMMAND` is the command, and `ARGS` stands for all after its first word.
    server: Option<String>,
    /// The client's.
    client: Option<String>,
    /// The server's output when it listens, for one whose listener cannot be seen from outside.
    ready: Option<String>,
    /// The port of a program that takes no other.
    port: Option<u16>,
    /// The server serves until it is ended.
    stays: Option<bool>,
    report: Report,
    /// Lines that a table of results must have.
    #[serde(default = "one")]
    rows: usize,
    /// Text that the output of all sides together must contain.
    #[serde(default)]
    prints: Vec<String>,
    /// Text that each side's output must contain.
    #[serde(default)]
    both_print: Vec<String>,
    /// The test is to fail (on both sides), and to say this.
    fails_with: Option<String>,
    /// The client's output at which the server is to be killed (SIGKILL).
    kill_server_at: Option<String>,
    /// Pairs of server and client at the same time.
    #[serde(default = "one")]
    pairs: usize,
    /// Clients of one server at the same time.
    #[serde(default = "one")]
    clients: usize,
    /// A client's output when it is connected: the next one starts then.
    connected: Option<String>,
    /// A second server, on the client's host.
    #[serde(default)]
    second_server: bool,
    /// Ordinary socket programs: `anyverbs run --sockets`.
    #[serde(default)]
    sockets: bool,
    /// Raw packets leave by the hosts' Ethernet interface as well: `ANYVERBS_RAW_INTERFACE`.
    #[serde(default)]
    raw_interface: bool,
    /// Length of the file that `SOURCE` names; the server's `COPY` must become the same.
    file_bytes: Option<usize>,
    /// The tool always exchanges its set-up over IPv4, even if its traffic uses IPv6.
    #[serde(default)]
    dial_ipv4: bool,
    /// Operations that a side posts, and that alone may be on the wire.
    #[serde(default)]
    client_posts: Vec<Operation>,
    #[serde(default)]
    server_posts: Vec<Operation>,
    /// The server must have refused a SEND for want of a receive.
    #[serde(default)]
    rnr: bool,
    /// The server must have refused a request with a remote access error.
    #[serde(default)]
    access_error: bool,
    /// MTU of the cable, if it is not the usual 1500.
    mtu: Option<u16>,
    #[serde(default = "minute")]
    timeout_s: u64,
    /// The longest time of a server to end after its client.
    #[serde(default = "ten_seconds")]
    end_s: u64,
    #[serde(default)]
    default: Defaults,
    #[serde(default = "Vec::new")]
    default_on: Vec<P>,
    /// The reason for a row of the table, where it is not obvious.
    #[serde(default)]
    #[expect(dead_code, reason = "for the reader of the table")]
    why: Option<String>,
}

/// The commands in the default selection, on `default-on` or, without one, on the first place of `on`.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Defaults {
    /// All or none.
    Whole(bool),
    /// The commands that match these patterns.
    Patterns(Vec<String>),
}

impl Default for Defaults {
    fn default() -> Self {
        Defaults::Whole(false)
    }
}

fn one() -> usize {
    1
}

fn minute() -> u64 {
    60
}

fn ten_seconds() -> u64 {
    10
}

/// The way in which server and client are started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kind {
    /// A server and its clients, which end by themselves.
    #[default]
    Pair,
    /// No server: a command that ends by itself.
    Alone,
    /// No server: a command that is interrupted when it has printed the expected text.
    Watch,
}

/// Operations posted to a queue pair, by service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Operation {
    RcSend,
    RcWrite,
    RcRead,
    RcCompareSwap,
    RcFetchAdd,
    UcSend,
    UcWrite,
    UdSend,
    RcSendInvalidate,
    RcAtomicWrite,
    /// Messages of the connection manager, which are UD SENDs to QP 1.
    Cm,
}

/// One case.
#[derive(Debug, Clone)]
pub(super) struct Case<P> {
    pub(super) command: String,
    pub(super) place: P,
    pub(super) kind: Kind,
    /// Command lines with the words that [`fill`] replaces.
    pub(super) server: String,
    pub(super) client: String,
    pub(super) ready: Option<String>,
    pub(super) port: Option<u16>,
    pub(super) stays: bool,
    pub(super) race: Option<String>,
    pub(super) source: Option<String>,
    pub(super) example: bool,
    pub(super) report: Report,
    pub(super) rows: usize,
    pub(super) prints: Vec<String>,
    pub(super) both_print: Vec<String>,
    pub(super) fails_with: Option<String>,
    pub(super) kill_server_at: Option<String>,
    pub(super) pairs: usize,
    pub(super) clients: usize,
    pub(super) connected: Option<String>,
    pub(super) second_server: bool,
    pub(super) sockets: bool,
    pub(super) raw_interface: bool,
    pub(super) file_bytes: Option<usize>,
    pub(super) dial_ipv4: bool,
    pub(super) client_posts: Vec<Operation>,
    pub(super) server_posts: Vec<Operation>,
    pub(super) rnr: bool,
    pub(super) access_error: bool,
    pub(super) mtu: Option<u16>,
    pub(super) timeout_s: u64,
    pub(super) end_s: u64,
    pub(super) default: bool,
}

impl<P: Place> Case<P> {
    /// The name of the case in reports and filters.
    pub(super) fn name(&self) -> String {
        let mut name = self.place.name().to_owned();
        if self.pairs > 1 {
            name += &format!(" {}x", self.pairs);
        }
        if self.sockets {
            name += " sockets";
        }
        if let Some(mtu) = self.mtu {
            name += &format!(" mtu-{mtu}");
        }
        name += &format!(" {}", self.command);
        if self.clients > 1 {
            name += &format!(" with {} clients", self.clients);
        }
        name
    }

    /// The first complaint about the output of a side or of all sides together, if there is one.
    pub(super) fn unprinted(&self, outputs: &[String]) -> Option<String> {
        let missing = |wanted: &String, output: &str| !output.contains(wanted.as_str());
        let all = outputs.concat();
        self.prints
            .iter()
            .find(|want| missing(want, &all))
            .map(|want| format!("nobody printed {want:?}"))
            .or_else(|| {
                self.both_print
                    .iter()
                    .find(|want| outputs.iter().any(|output| missing(want, output)))
                    .map(|want| format!("not everybody printed {want:?}"))
            })
    }
}

/// Reads and expands a table.
pub(super) fn read<P: Place>(path: &Path) -> anyhow::Result<Vec<Case<P>>> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    expand(&text).with_context(|| format!("in {}", path.display()))
}

pub(super) fn expand<P: Place>(text: &str) -> anyhow::Result<Vec<Case<P>>> {
    let table: Table<P> = toml::from_str(text)?;
    let mut cases = Vec::new();
    for mut group in table.group {
        if group.on.is_empty() {
            group.on.clone_from(&table.on);
            if group.default_on.is_empty() {
                group.default_on.clone_from(&table.default_on);
            }
        }
        let more = group_cases(&group, &table.program)
            .with_context(|| format!("in the group {:?}", group.command))?;
        cases.extend(more);
    }
    let mut names = BTreeSet::new();
    for case in &cases {
        ensure!(names.insert(case.name()), "{:?} is in the table twice", case.name());
    }
    Ok(cases)
}

fn group_cases<P: Place>(
    group: &Group<P>,
    programs: &BTreeMap<String, Program>,
) -> anyhow::Result<Vec<Case<P>>> {
    check(group)?;
    let commands = braces(&group.command)?;
    let defaults = match &group.default {
        Defaults::Whole(true) => commands.clone(),
        Defaults::Whole(false) => Vec::new(),
        Defaults::Patterns(patterns) => {
            let all: anyhow::Result<Vec<_>> =
                patterns.iter().map(|pattern| braces(pattern)).collect();
            all?.concat()
        }
    };
    if let Some(stray) = defaults.iter().find(|command| !commands.contains(command)) {
        bail!("{stray:?} of `default` is no command of it");
    }
    let default_on = if group.default_on.is_empty() { &group.on[..1] } else { &group.default_on };
    if let Some(stray) = default_on.iter().find(|place| !group.on.contains(place)) {
        bail!("{:?} of `default-on` is not in `on`", stray.name());
    }
    let mut cases = Vec::new();
    for command in &commands {
        let (first, rest) = command.split_once(' ').unwrap_or((command, ""));
        let program = programs.get(first).cloned().unwrap_or_default();
        let line = |own: &Option<String>, program: &Option<String>, usual: &str| {
            let line = own.as_ref().or(program.as_ref()).map_or(usual, String::as_str);
            fill(line, |word| match word {
                "COMMAND" => Some(command.as_str()),
                "ARGS" => Some(rest),
                _ => None,
            })
        };
        let alone = group.kind != Kind::Pair;
        for &place in &group.on {
            cases.push(Case {
                command: command.clone(),
                place,
                kind: group.kind,
                server: line(&group.server, &program.server, "COMMAND -p PORT"),
                client: if alone {
                    command.clone()
                } else {
                    line(&group.client, &program.client, "COMMAND -p PORT HOST")
                },
                ready: group.ready.clone().or_else(|| program.ready.clone()),
                port: group.port.or(program.port),
                stays: group.stays.or(program.stays).unwrap_or(false),
                race: program.race.clone(),
                source: program.source.clone(),
                example: program.example,
                report: group.report,
                rows: group.rows,
                prints: group.prints.clone(),
                both_print: group.both_print.clone(),
                fails_with: group.fails_with.clone(),
                kill_server_at: group.kill_server_at.clone(),
                pairs: group.pairs,
                clients: group.clients,
                connected: group.connected.clone(),
                second_server: group.second_server,
                sockets: group.sockets,
                raw_interface: group.raw_interface,
                file_bytes: group.file_bytes,
                dial_ipv4: group.dial_ipv4,
                client_posts: group.client_posts.clone(),
                server_posts: group.server_posts.clone(),
                rnr: group.rnr,
                access_error: group.access_error,
                mtu: group.mtu,
                timeout_s: group.timeout_s,
                end_s: group.end_s,
                default: defaults.contains(command) && default_on.contains(&place),
            });
        }
    }
    Ok(cases)
}

fn check<P>(group: &Group<P>) -> anyhow::Result<()> {
    ensure!(
        !group.on.is_empty() && group.pairs > 0 && group.clients > 0 && group.rows > 0,
        "nothing to run"
    );
    ensure!(group.kind != Kind::Watch || !group.prints.is_empty(), "nothing to wait for");
    ensure!(
        group.report != Report::None
            || !group.prints.is_empty()
            || !group.both_print.is_empty()
            || group.fails_with.is_some()
            || group.file_bytes.is_some(),
        "nothing to check"
    );
    Ok(())
}

/// Replaces words in capitals by their values.
pub(super) fn fill<'a>(line: &str, value: impl Fn(&str) -> Option<&'a str>) -> String {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut filled = String::new();
    let mut rest = line;
    while !rest.is_empty() {
        let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        filled += value(word).unwrap_or(word);
        let gap = after.find(is_word).unwrap_or(after.len());
        filled += &after[..gap];
        rest = &after[gap..];
    }
    filled.split_ascii_whitespace().collect::<Vec<_>>().join(" ")
}

/// Expands `{a,b}` as a shell does, spaces included, then takes the spaces that are too many away. No nesting.
fn braces(pattern: &str) -> anyhow::Result<Vec<String>> {
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
    use crate::conformance::Topology;

    fn expand(text: &str) -> anyhow::Result<Vec<Case<Topology>>> {
        super::expand(text)
    }

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
    fn whole_words_are_filled_in() {
        let value = |word: &str| match word {
            "PORT" => Some("7471"),
            "HOST" => Some("fd77::1"),
            _ => None,
        };
        assert_eq!(
            fill("a --port=PORT HOST:/x PORTS MY_PORT", value),
            "a --port=7471 fd77::1:/x PORTS MY_PORT"
        );
        assert_eq!(fill("a NOTHING  b", |word| (word == "NOTHING").then_some("")), "a b");
    }

    #[test]
    fn command_lines_of_both_sides() {
        let cases = expand(
            "[program.ping]
            server = 'COMMAND -s -a HOST'
            client = 'ping_client ARGS -a HOST'
            stays = true
            [[group]]
            command = 'ping -C {1,2}'
            on = ['loopback']
            report = 'perftest'
            [[group]]
            command = 'pong'
            on = ['loopback']
            report = 'perftest'
            [[group]]
            command = 'ping'
            on = ['loopback']
            report = 'perftest'
            client = 'COMMAND HOST'
            stays = false
            ",
        )
        .unwrap();
        let lines: Vec<_> = cases
            .iter()
            .map(|case| (case.server.as_str(), case.client.as_str(), case.stays))
            .collect();
        assert_eq!(
            lines,
            [
                ("ping -C 1 -s -a HOST", "ping_client -C 1 -a HOST", true),
                ("ping -C 2 -s -a HOST", "ping_client -C 2 -a HOST", true),
                ("pong -p PORT", "pong -p PORT HOST", false),
                ("ping -s -a HOST", "ping HOST", false),
            ]
        );
    }

    #[test]
    fn places_and_defaults_of_the_whole_table() {
        let cases = expand(
            "on = ['two-hosts', 'loopback']
            default-on = ['two-hosts', 'loopback']
            [[group]]
            command = 'a'
            report = 'perftest'
            default = true
            [[group]]
            command = 'b'
            report = 'perftest'
            [[group]]
            command = 'c'
            on = ['loopback', 'one-host']
            report = 'perftest'
            default = true
            ",
        )
        .unwrap();
        let defaults: Vec<_> = cases.iter().filter(|case| case.default).map(Case::name).collect();
        assert_eq!(cases.len(), 6);
        assert_eq!(defaults, ["two-hosts a", "loopback a", "loopback c"]);
    }

    #[test]
    fn complaints_name_missing_output() {
        let case = |keys: &str| {
            let text =
                format!("[[group]]\ncommand = 'a'\non = ['loopback']\nreport = 'none'\n{keys}");
            expand(&text).unwrap().remove(0)
        };
        let said = |one: &str, other: &str| [one.to_owned(), other.to_owned()];
        let prints = case("prints = ['x', 'y']");
        assert_eq!(prints.unprinted(&said("x", "y")), None);
        assert!(prints.unprinted(&said("x", "x")).is_some());
        let both = case("both-print = ['x']");
        assert_eq!(both.unprinted(&said("x", "x")), None);
        assert!(both.unprinted(&said("x", "y")).is_some());
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
        assert!(expand(&group("clients = 0")).is_err());
        assert!(expand(&group("rows = 0")).is_err());
        assert!(expand(&(group("") + &group(""))).is_err(), "twice");
        assert!(expand("[[group]]\ncommand = 'a'\nreport = 'perftest'\n").is_err(), "nowhere");
        assert!(
            expand("[[group]]\ncommand = 'a'\non = ['loopback']\nreport = 'none'\n").is_err(),
            "nothing to check"
        );
    }
}
