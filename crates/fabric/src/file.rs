//! The file of a simulation (TOML), checked. A message names the line, or the first line of the table for a value of one.

use std::fmt::Display;
use std::ops::Range;

use anyverbs_proto::time::TIME_SLICE;
use anyverbs_proto::types::Mtu;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use toml::{Spanned, Table, Value};

use crate::dcqcn::Parameters;
use crate::topology::{Link, Topology};

/// Most hosts.
const MAX_HOSTS: usize = 10_000;
/// Most connections of a run: each has two of the 2^24 queue pair numbers.
const MAX_CONNECTIONS: u64 = 1 << 22;
/// Most messages of a run, each of which has a time in the results.
const MAX_MESSAGES: u64 = 10_000_000;
/// Most bytes of a message.
const MAX_SIZE: u64 = 1 << 30;

/// A simulation: what happens on which network, and the settings to compare.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Decides everything random.
    pub seed: u64,
    /// The network.
    pub topology: Topology,
    /// The messages of the hosts.
    pub workload: Workload,
    /// The settings of the file's `[transport]`.
    pub transport: Transport,
    /// The settings to compare, with their names: those of the file, or else a usual selection.
    pub settings: Vec<(String, Transport)>,
}

/// The messages of the hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// The pattern.
    pub kind: Kind,
    /// Bytes of a message; of `ring-all-reduce` those of each host's buffer.
    pub size: u64,
    /// Messages of each sender to each receiver, one after the other; rounds of `ring-all-reduce`.
    #[serde(default = "one")]
    pub count: u32,
    /// The senders of `incast`: all hosts but the receiver if it is absent.
    pub senders: Option<u32>,
    /// For `all-to-all`, the peers to which a host sends at a time.
    pub parallel: Option<u32>,
}

fn one() -> u32 {
    1
}

/// A pattern of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Each host sends to each other one.
    AllToAll,
    /// Many hosts send to one, the first.
    Incast,
    /// Each host sends parts of a buffer to the next one, and goes on when a part has come from the one before it.
    RingAllReduce,
}

/// The settings of the transport.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Transport {
    /// Path MTU: 256, 512, 1024, 2048 or 4096 bytes.
    #[serde(deserialize_with = "mtu")]
    pub mtu: Mtu,
    /// Bytes that a queue pair may have in flight.
    pub window_bytes: u32,
    /// The receiver's treatment of packets behind a lost one.
    pub recovery: Recovery,
    /// Microseconds of silence after which the sender asks whether packets were lost.
    pub probe_us: f64,
    /// The sender's answer to marked packets.
    pub control: Control,
    /// Parameters of `control = "dcqcn"`.
    pub dcqcn: Parameters,
}

/// The receiver's treatment of packets behind a lost one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recovery {
    /// It keeps up to 256 KiB of them, as the device does on UDP.
    Selective,
    /// It drops them.
    #[serde(rename = "go-back-n")]
    GoBackN,
}

/// The sender's answer to marked packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Control {
    /// It halves its window, as the device does.
    Window,
    /// It cuts its rate, as a network interface with DCQCN does.
    Dcqcn,
    /// Nothing: packets are not marked.
    None,
}

impl Default for Transport {
    /// As the device by UDP, with the largest MTU.
    fn default() -> Self {
        Self {
            mtu: Mtu::Mtu4096,
            window_bytes: 200 << 10,
            recovery: Recovery::Selective,
            probe_us: TIME_SLICE.as_secs_f64() * 1e6,
            control: Control::Window,
            dcqcn: Parameters::default(),
        }
    }
}

/// A path MTU, from its bytes.
fn mtu<'de, D: Deserializer<'de>>(from: D) -> Result<Mtu, D::Error> {
    let bytes = u32::deserialize(from)?;
    Mtu::ALL.into_iter().find(|mtu| mtu.bytes() == bytes).ok_or_else(|| {
        D::Error::custom(format!("mtu = {bytes}: expected 256, 512, 1024, 2048 or 4096"))
    })
}

impl Transport {
    fn check(&self) -> Result<(), String> {
        if !(8192..=1 << 30).contains(&self.window_bytes) {
            let given = self.window_bytes;
            return Err(format!("window_bytes = {given}: expected 8192 to 1073741824"));
        }
        if !(1.0..=1e6).contains(&self.probe_us) {
            return Err(format!("probe_us = {}: expected 1 to 1000000", self.probe_us));
        }
        self.dcqcn.check()
    }
}

/// The shape of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Shape {
    Star,
    TwoTier,
    Links,
}

/// A number of hosts, or their names.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "hosts: expected their number, or a list of their names")]
enum Hosts {
    Number(usize),
    Names(Vec<String>),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Network {
    shape: Shape,
    hosts: Spanned<Hosts>,
    #[serde(default)]
    switches: Vec<String>,
    hosts_per_leaf: Option<Spanned<usize>>,
    spines: Option<Spanned<usize>>,
    link: Option<Spanned<Link>>,
    uplink: Option<Spanned<Link>>,
    #[serde(default)]
    links: Vec<Spanned<Table>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default = "first_seed")]
    seed: u64,
    network: Spanned<Network>,
    workload: Spanned<Workload>,
    #[serde(default)]
    transport: Option<Spanned<Table>>,
    #[serde(default)]
    setting: Vec<Spanned<Table>>,
}

fn first_seed() -> u64 {
    1
}

/// The usual selection: each changes something of the file's own settings.
const USUAL: [(&str, &str); 8] = [
    ("dcqcn", "control = 'dcqcn'"),
    ("window", "control = 'window'"),
    ("no control", "control = 'none'"),
    ("go-back-n", "recovery = 'go-back-n'"),
    ("probe 200 us", "probe_us = 200"),
    ("mtu 1024", "mtu = 1024"),
    ("mtu 4096", "mtu = 4096"),
    ("window 64 KiB", "window_bytes = 65536"),
];

const UNUSED: &str = "dcqcn has no meaning where nothing has control = \"dcqcn\"";

/// Says in which line something is wrong.
struct Lines<'a>(&'a str);

impl Lines<'_> {
    fn at(&self, place: Range<usize>, reason: impl Display) -> String {
        let before = self.0.get(..place.start).unwrap_or(self.0);
        format!("line {}: {reason}", before.matches('\n').count() + 1)
    }

    fn of(&self, error: &toml::de::Error) -> String {
        let reason = error.message().replace('\n', " ");
        error.span().map_or(reason.clone(), |place| self.at(place, reason))
    }

    /// The value of a table that has this place.
    fn parse<T: for<'de> Deserialize<'de>>(&self, table: &Spanned<Table>) -> Result<T, String> {
        let parsed = Value::Table(table.get_ref().clone()).try_into();
        parsed.map_err(|error: toml::de::Error| self.at(table.span(), error.message()))
    }
}

impl Plan {
    /// Reads the text of a file.
    ///
    /// # Errors
    /// The mistake, with its line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let lines = Lines(text);
        let file: File = toml::from_str(text).map_err(|error| lines.of(&error))?;
        let topology = file.network.get_ref().topology(file.network.span(), &lines)?;
        let workload = *file.workload.get_ref();
        workload
            .check(topology.hosts() as u64)
            .map_err(|reason| lines.at(file.workload.span(), reason))?;
        let transport = |table: &Spanned<Table>| {
            let transport: Transport = lines.parse(table)?;
            transport.check().map_err(|reason| lines.at(table.span(), reason))?;
            Ok::<_, String>(transport)
        };
        let own = file.transport.unwrap_or(Spanned::new(0..0, Table::new()));
        let base = transport(&own)?;
        let mut settings: Vec<(String, Transport)> = Vec::new();
        for table in file.setting {
            let (place, mut table) = (table.span(), table.into_inner());
            let Some(Value::String(name)) = table.remove("name") else {
                return Err(lines.at(place, "a setting needs a name"));
            };
            if !(1..=16).contains(&name.chars().count()) || name.contains(char::is_control) {
                return Err(lines.at(place, "name: expected 1 to 16 characters of a line"));
            }
            if settings.iter().any(|(other, _)| *other == name) {
                return Err(lines.at(place, format!("two settings have the name {name}")));
            }
            let tunes = table.contains_key("dcqcn");
            let merged = merged(own.get_ref(), table);
            let setting = transport(&Spanned::new(place.clone(), merged))?;
            if tunes && setting.control != Control::Dcqcn {
                return Err(lines.at(place, UNUSED));
            }
            settings.push((name, setting));
        }
        let is_dcqcn = |setting: &Transport| setting.control == Control::Dcqcn;
        let has_dcqcn = is_dcqcn(&base) || settings.iter().any(|(_, setting)| is_dcqcn(setting));
        if own.get_ref().contains_key("dcqcn") && !has_dcqcn {
            return Err(lines.at(own.span(), UNUSED));
        }
        if settings.is_empty() {
            settings.push(("as given".to_owned(), base));
            for (name, change) in USUAL {
                let change = change.parse().expect("it is TOML");
                let changed = transport(&Spanned::new(0..0, merged(own.get_ref(), change)))?;
                if changed != base {
                    settings.push((name.to_owned(), changed));
                }
            }
        }
        Ok(Self { seed: file.seed, topology, workload, transport: base, settings })
    }
}

/// A table with the changes of another one.
fn merged(base: &Table, changes: Table) -> Table {
    let mut merged = base.clone();
    for (key, value) in changes {
        match (merged.get_mut(&key), value) {
            (Some(Value::Table(old)), Value::Table(new)) => old.extend(new),
            (_, value) => {
                merged.insert(key, value);
            }
        }
    }
    merged
}

impl Workload {
    fn check(&self, hosts: u64) -> Result<(), String> {
        let parts = if self.kind == Kind::RingAllReduce { hosts } else { 1 };
        if !(parts..=MAX_SIZE).contains(&self.size) {
            return Err(format!("size = {}: expected {parts} to {MAX_SIZE}", self.size));
        }
        if self.count == 0 {
            return Err("count = 0: expected 1 or more".to_owned());
        }
        let each = match self.kind {
            Kind::Incast => self.senders.map_or(hosts - 1, u64::from),
            Kind::AllToAll => hosts * (hosts - 1),
            Kind::RingAllReduce => 2 * hosts * (hosts - 1),
        };
        let messages = each.saturating_mul(self.count.into());
        if messages > MAX_MESSAGES {
            return Err(format!("{messages} messages: expected {MAX_MESSAGES} at most"));
        }
        let of = |name, value: Option<u32>, kind, most: u64| match value {
            Some(_) if self.kind != kind => Err(format!("{name} has no meaning here")),
            Some(n) if !(1..=most).contains(&n.into()) => {
                Err(format!("{name} = {n}: expected 1 to {most}"))
            }
            _ => Ok(()),
        };
        of("senders", self.senders, Kind::Incast, hosts - 1)?;
        of("parallel", self.parallel, Kind::AllToAll, hosts - 1)?;
        if self.kind == Kind::AllToAll && hosts * (hosts - 1) > MAX_CONNECTIONS {
            let connections = hosts * (hosts - 1);
            return Err(format!(
                "all-to-all of {hosts} hosts has {connections} connections: expected {MAX_CONNECTIONS} at most, those of 2048 hosts"
            ));
        }
        Ok(())
    }
}

impl Network {
    fn topology(&self, place: Range<usize>, lines: &Lines<'_>) -> Result<Topology, String> {
        let here = |reason: String| lines.at(place.clone(), reason);
        let hosts = self.hosts.get_ref();
        let number = match hosts {
            Hosts::Number(number) => *number,
            Hosts::Names(names) => names.len(),
        };
        if !(2..=MAX_HOSTS).contains(&number) {
            let reason = format!("{number} hosts: expected 2 to {MAX_HOSTS}");
            return Err(lines.at(self.hosts.span(), reason));
        }
        self.check_keys().map_err(here)?;
        let link = checked(self.link.as_ref(), lines)?.unwrap_or_default();
        let uplink = checked(self.uplink.as_ref(), lines)?.unwrap_or(link);
        let part = |name, value: &Option<Spanned<usize>>| match value {
            None => Err(here(format!("a two-tier network needs {name}"))),
            Some(n) if !(1..=MAX_HOSTS).contains(n.get_ref()) => {
                let reason = format!("{name} = {}: expected 1 to {MAX_HOSTS}", n.get_ref());
                Err(lines.at(n.span(), reason))
            }
            Some(n) => Ok(*n.get_ref()),
        };
        match (self.shape, hosts) {
            (Shape::Star, Hosts::Number(_)) => Topology::star(number, link).map_err(here),
            (Shape::TwoTier, Hosts::Number(_)) => {
                let hosts_per_leaf = part("hosts_per_leaf", &self.hosts_per_leaf)?;
                let spines = part("spines", &self.spines)?;
                Topology::two_tier(number, hosts_per_leaf, spines, link, uplink).map_err(here)
            }
            (Shape::Links, Hosts::Names(names)) => {
                let names: Vec<String> = names.iter().chain(&self.switches).cloned().collect();
                let twice = (1..names.len()).find(|n| names[..*n].contains(&names[*n]));
                if let Some(n) = twice {
                    return Err(here(format!("two nodes have the name {}", names[n])));
                }
                let links: Result<Vec<_>, String> =
                    self.links.iter().map(|link| ends(link, &names, lines)).collect();
                Topology::new(names, number, &links?).map_err(here)
            }
            (Shape::Links, _) => Err(lines.at(self.hosts.span(), "links need the names of hosts")),
            _ => Err(lines.at(self.hosts.span(), "this shape needs the number of hosts")),
        }
    }

    /// Refuses keys that mean nothing in this shape.
    fn check_keys(&self) -> Result<(), String> {
        let is_tiers = self.shape == Shape::TwoTier;
        let is_links = self.shape == Shape::Links;
        for (key, is_there, is_of_shape) in [
            ("switches", !self.switches.is_empty(), is_links),
            ("links", !self.links.is_empty(), is_links),
            ("link", self.link.is_some(), !is_links),
            ("uplink", self.uplink.is_some(), is_tiers),
            ("hosts_per_leaf", self.hosts_per_leaf.is_some(), is_tiers),
            ("spines", self.spines.is_some(), is_tiers),
        ] {
            if is_there && !is_of_shape {
                return Err(format!("{key} has no meaning in this shape"));
            }
        }
        Ok(())
    }
}

fn checked(link: Option<&Spanned<Link>>, lines: &Lines<'_>) -> Result<Option<Link>, String> {
    let Some(link) = link else { return Ok(None) };
    link.get_ref().check().map_err(|reason| lines.at(link.span(), reason))?;
    Ok(Some(*link.get_ref()))
}

/// A link and the numbers of its ends.
fn ends(
    table: &Spanned<Table>,
    names: &[String],
    lines: &Lines<'_>,
) -> Result<(usize, usize, Link), String> {
    let mut rest = table.get_ref().clone();
    let here = |reason: String| lines.at(table.span(), reason);
    let ends = rest.remove("ends").unwrap_or(Value::Boolean(false));
    let Ok([a, b]) = ends.try_into::<[String; 2]>() else {
        return Err(here("a link needs ends = [NODE, NODE]".to_owned()));
    };
    let find = |name: &String| {
        let found = names.iter().position(|known| known == name);
        found.ok_or_else(|| here(format!("no host or switch has the name {name}")))
    };
    let (a, b) = (find(&a)?, find(&b)?);
    let link = Spanned::new(table.span(), lines.parse(&Spanned::new(table.span(), rest))?);
    checked(Some(&link), lines)?;
    Ok((a, b, link.into_inner()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAR: &str = "[network]\nshape = 'star'\nhosts = 4\n";
    const INCAST: &str = "[workload]\nkind = 'incast'\nsize = 1000\n";

    fn error(text: &str) -> String {
        Plan::parse(text).unwrap_err()
    }

    #[test]
    fn a_short_file_has_the_usual_settings() {
        let plan = Plan::parse(&format!("{STAR}{INCAST}")).unwrap();
        assert_eq!((plan.seed, plan.topology.hosts(), plan.topology.switches()), (1, 4, 1));
        let names: Vec<_> = plan.settings.iter().map(|(name, _)| name.as_str()).collect();
        let usual = USUAL.map(|(name, _)| name);
        let others = usual.into_iter().filter(|name| !["window", "mtu 4096"].contains(name));
        assert_eq!(names, ["as given"].into_iter().chain(others).collect::<Vec<_>>());
    }

    #[test]
    fn settings_change_what_the_transport_says() {
        let plan = Plan::parse(&format!(
            "{STAR}{INCAST}[transport]\nmtu = 1024\ndcqcn = {{ g = 0.5 }}\n\
             [[setting]]\nname = 'a'\ncontrol = 'dcqcn'\ndcqcn = {{ f = 3 }}\n"
        ))
        .unwrap();
        let [(name, transport)] = &plan.settings[..] else { panic!("one setting") };
        assert_eq!(
            (name.as_str(), transport.mtu, transport.control),
            ("a", Mtu::Mtu1024, Control::Dcqcn)
        );
        assert!((transport.dcqcn.g - 0.5).abs() < 1e-9 && transport.dcqcn.f == 3);
    }

    #[test]
    fn links_join_names() {
        let text = format!(
            "[network]\nshape = 'links'\nhosts = ['a', 'b']\nswitches = ['s']\n\
             [[network.links]]\nends = ['a', 's']\n[[network.links]]\nends = ['s', 'b']\n{INCAST}"
        );
        let plan = Plan::parse(&text).unwrap();
        assert_eq!((plan.topology.links(), plan.topology.name(2)), (2, "s"));
        assert_eq!(
            error(&text.replace("ends = ['s', 'b']", "ends = ['s', 'c']")),
            "line 7: no host or switch has the name c"
        );
        assert_eq!(
            error(&text.replace("ends = ['a', 's']", "ends = ['a', 's']\ngbps = 0")),
            "line 5: gbps = 0: expected 0.001 to 10000"
        );
    }

    #[test]
    fn messages_name_the_line() {
        let text = format!("{STAR}{INCAST}");
        for (from, to, message) in [
            ("'star'", "'ring'", "line 2: unknown variant `ring`"),
            ("hosts = 4", "hosts = 1", "line 3: 1 hosts: expected 2 to 10000"),
            ("hosts = 4", "hosts = '4'", "line 3: hosts: expected their number, or a list"),
            ("hosts = 4", "hosts = 4\nspines = 2", "line 1: spines has no meaning in this shape"),
            ("size = 1000", "size = 0", "line 4: size = 0: expected 1 to 1073741824"),
            ("size = 1000", "size = 1\nsenders = 4", "line 4: senders = 4: expected 1 to 3"),
            ("size = 1000", "size = 1\nparallel = 2", "line 4: parallel has no meaning here"),
            ("size = 1000", "size = 1\ncount = 50_000_000", "line 4: 150000000 messages: expected"),
            ("size = 1000", "size = 1\nsice = 2", "line 7: unknown field `sice`"),
            ("size = 1000", "size = 1\n[transport]\nmtu = 9000", "line 7: mtu = 9000: expected"),
            ("size = 1000", "size = 1\n[[setting]]\nmtu = 256", "line 7: a setting needs a name"),
            (
                "size = 1000",
                "size = 1\n[[setting]]\nname = 'a'\ncontrol = 'window'\ndcqcn = { f = 3 }",
                "line 7: dcqcn has no meaning where nothing has control = \"dcqcn\"",
            ),
            (
                "size = 1000",
                "size = 1\n[transport]\ncontrol = 'window'\ndcqcn = { f = 3 }",
                "line 7: dcqcn has no meaning where nothing has control = \"dcqcn\"",
            ),
            (
                "size = 1000",
                "size = 1\n[transport]\ndcqcn = { f = 3 }\n[[setting]]\nname = 'a'",
                "line 7: dcqcn has no meaning where nothing has control = \"dcqcn\"",
            ),
            ("[workload]", "[network.link]\nloss = 2\n[workload]", "line 4: loss = 2"),
        ] {
            let got = error(&text.replace(from, to));
            assert!(got.starts_with(message), "{got}");
        }
        let all = |hosts: u32| {
            let text = text.replace("hosts = 4", &format!("hosts = {hosts}"));
            Plan::parse(&text.replace("'incast'", "'all-to-all'")).map(drop)
        };
        assert_eq!(all(2048), Ok(()));
        let refused = "line 4: all-to-all of 2049 hosts has 4196352 connections: expected 4194304 at most, those of 2048 hosts";
        assert_eq!(all(2049), Err(refused.to_owned()));
        let two_tier = text.replace("'star'", "'two-tier'\nspines = 2");
        assert_eq!(error(&two_tier), "line 1: a two-tier network needs hosts_per_leaf");
        let large = two_tier.replace("hosts = 4", "hosts_per_leaf = 1\nhosts = 10000");
        assert_eq!(error(&large), "line 1: 10002 switches are too many for 10000 hosts");
        let dense = large.replace("spines = 2", "spines = 1000");
        assert_eq!(error(&dense), "line 1: 10000 leaves and 1000 spines have too many links");
    }
}
