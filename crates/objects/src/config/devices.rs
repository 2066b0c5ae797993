//! The devices of a configuration: a number of them, a list of places, or a table for each.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;

use super::form::{Item, Kind, PkeyList, Several, Tabled};
use super::places::{
    AskedBy, Placed, check_place, in_file, key_of, loopback, place_from, place_of,
};
use super::ports::{self, PortTable};
use super::{Addresses, Config, ConfigError, MOST_PORTS, MaxQp, PortConfig, refusal};
use crate::limits::{self, DeviceAttr};
use crate::persona::{Limits, Persona};
use crate::text::{DEVICE_NAME, is_device_name};

/// The name of the first device, where the configuration gives none.
pub(super) const FIRST: &str = "anyverbs0";

/// The devices that are asked for, and by what.
#[derive(Debug)]
pub(super) struct Asked<'a> {
    devices: FileDevices,
    by: AskedBy<'a>,
}

/// The warning that the value of the variable replaces so many tables of a file.
pub(super) fn replaced(value: &str, tables: usize, path: &Path) -> String {
    format!(
        "ANYVERBS_DEVICES={value:?} replaces the devices of configuration file {path:?}, {tables} of them with a table: their names, places, personas, GUIDs, limits, MTUs, ports and P_Keys do not hold"
    )
}

/// The devices, as the file names them.
pub(super) type FileDevices = Several<Item<Table>>;

/// The keys of a device. Without a place it has an address of the loopback interface.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Table {
    name: Option<String>,
    interface: Option<String>,
    address: Option<IpAddr>,
    persona: Option<String>,
    guid: Option<String>,
    limits: Option<Tabled<Limits>>,
    mtu: Option<i128>,
    pkeys: Option<PkeyList>,
    ports: Option<Several<Item<PortTable>>>,
}

impl Kind for Table {
    const MANY: &'static str = "devices";

    fn says_something(&self) -> bool {
        let Self { name, interface, address, persona, guid, limits, mtu, pkeys, ports } = self;
        let texts = [name, interface, persona, guid].iter().any(|text| text.is_some());
        let of_device = limits.is_some() || ports.is_some();
        texts || of_device || address.is_some() || mtu.is_some() || pkeys.is_some()
    }
}

impl<'a> Asked<'a> {
    /// Those of a file.
    pub(super) fn of_file(devices: FileDevices, path: &'a Path) -> Self {
        Self { devices, by: AskedBy::File(path) }
    }

    /// Reads the value of a variable.
    pub(super) fn parse(text: &str) -> Self {
        let devices = match text.trim().parse() {
            Ok(number) => Several::Number(number),
            Err(_) => {
                let items = text.split(',').map(|item| Item::Text(item.trim().to_owned()));
                Several::List(items.collect())
            }
        };
        Self { devices, by: AskedBy::Variable(text.to_owned()) }
    }
}

/// The rest of a configuration, for devices that do not say it themselves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Without<'a> {
    /// The name of the first device. The others count on.
    pub(super) first: &'a str,
    pub(super) persona: Option<&'a Arc<Persona>>,
    /// The interfaces of a device that is the only one, and the file that has them if no variable does.
    pub(super) interfaces: (&'a [String], Option<&'a Path>),
    /// The most queue pairs of the process, which may be more than those of a device without it.
    pub(super) max_qp: Option<&'a MaxQp>,
}

impl Config {
    /// The GUID of a port, by its place among those of all devices. That of a first port is the node's. `guid` gives those that the
    /// configuration does not, by the persona and the place.
    pub fn guid_of(&self, port: usize, guid: impl Fn(Option<&Persona>, u64) -> u64) -> u64 {
        let row = self.ports.get(port);
        if let Some(given) = row.and_then(|row| row.guid) {
            return given;
        }
        let given: Vec<u64> = self.ports.iter().filter_map(|row| row.guid).collect();
        let persona = row.and_then(|row| row.persona.as_deref());
        // No two ports try the same numbers. One that is given to another device is left out.
        let candidate = |round: usize| guid(persona, (port + round * MOST_PORTS) as u64);
        let free = (0..=given.len()).map(candidate).find(|guid| !given.contains(guid));
        free.unwrap_or_else(|| candidate(0))
    }

    /// The attributes of each device, a row for each of its ports. `guid` gives the GUID of a node, by its persona and its number.
    /// In the row of a second port it is the port's. Both rows have the device's for the adapter.
    pub fn device_attrs(&self, guid: impl Fn(Option<&Persona>, u64) -> u64) -> Box<[DeviceAttr]> {
        let of = |(number, row): (usize, &PortConfig)| {
            let persona = row.persona.as_deref();
            let attr = persona.map_or(limits::DEFAULT, |persona| persona.apply(limits::DEFAULT));
            let attr = row.limits.apply(attr);
            let node_guid = self.guid_of(number, &guid);
            let sys_image_guid = self.guid_of(self.device_of(number).0, &guid);
            let own = row.limits.max_qp();
            let all = self.max_qp.as_ref().map(|all| all.number);
            let max_qp = all.map_or(attr.max_qp, |all| all.min(own.unwrap_or(all)));
            let ports = self.ports.iter().filter(|port| port.name == row.name);
            let max_pkeys = ports.clone().map(|port| port.pkeys.len()).max().unwrap_or(0) as u16;
            let phys_port_cnt = ports.count() as u8;
            DeviceAttr { node_guid, sys_image_guid, max_qp, max_pkeys, phys_port_cnt, ..attr }
        };
        self.ports.iter().enumerate().map(of).collect()
    }
}

/// The ports of the devices of a process. `own` finds a persona by its name and the key that has it.
pub(super) fn devices(
    without: Without<'_>,
    asked: Option<Asked<'_>>,
    own: impl Fn(&str, &str) -> Result<Arc<Persona>, ConfigError>,
) -> Result<Vec<PortConfig>, ConfigError> {
    let Without { first, persona, interfaces: (interfaces, file), .. } = without;
    let persona = persona.cloned();
    let Some(Asked { devices, by }) = asked else {
        let addresses = Addresses::Interfaces(interfaces.to_vec());
        let port = PortConfig::new(first.to_owned(), addresses, persona);
        let named_by = match file {
            _ if interfaces.is_empty() => String::new(),
            Some(path) => in_file(path, "interfaces"),
            None => "ANYVERBS_INTERFACES".to_owned(),
        };
        return Ok(vec![PortConfig { named_by, ..port }]);
    };
    if !interfaces.is_empty() {
        let asked = match by.file() {
            None => "ANYVERBS_DEVICES",
            Some(_) => "the key devices of the configuration file",
        };
        let expected = format!("nothing beside {asked}, which names the interfaces of each device");
        let key = if file.is_some() { "interfaces" } else { "ANYVERBS_INTERFACES" };
        return Err(refusal(file, key, &interfaces.join(","), &expected));
    }
    let items = match devices {
        Several::Number(n) if !(1..=MOST_PORTS as i128).contains(&n) => {
            return Err(by.refuse(None, "", &n.to_string(), &form(&by)));
        }
        Several::Number(n) => (0..n).map(|_| Item::Table(Table::default())).collect(),
        Several::List(items) if !(1..=MOST_PORTS).contains(&items.len()) => {
            let value = format!("a list of {}", items.len());
            return Err(by.refuse(None, "", &value, &form(&by)));
        }
        Several::List(items) => items,
    };
    let mut found: Vec<Placed> = Vec::new();
    let is_named = |item: &Item<Table>| match item {
        Item::Text(item) => item.contains('='),
        Item::Table(table) => table.name.is_some(),
    };
    let named: Vec<bool> = items.iter().map(is_named).collect();
    for (n, item) in items.into_iter().enumerate() {
        let new = match item {
            Item::Text(item) => vec![listed(first, n, &item, persona.clone(), &by)?],
            Item::Table(table) => tabled(without, (n, found.len()), table, &own, &by)?,
        };
        for port in new {
            is_new(&found, &port, (n, &named), &by)?;
            found.push(port);
        }
    }
    if found.len() > MOST_PORTS {
        let expected = format!("{MOST_PORTS} at most, of all devices together");
        return Err(by.refuse(None, "", &format!("{} ports", found.len()), &expected));
    }
    Ok(found.into_iter().map(|placed| placed.port).collect())
}

/// Refuses the name or the place of an earlier one. `named`: the devices whose names are given; those of others are counted.
fn is_new(
    found: &[Placed],
    new: &Placed,
    (n, named): (usize, &[bool]),
    by: &AskedBy<'_>,
) -> Result<(), ConfigError> {
    let earlier = |same: &dyn Fn(&Placed) -> bool| found.iter().find(|other| same(other));
    let same_guid = |other: &Placed| other.port.guid.is_some() && other.port.guid == new.port.guid;
    if let (Some(other), Some(guid)) = (earlier(&same_guid), new.port.guid) {
        let (value, expected) = match new.port.port {
            1 => (guid, format!("a GUID that {} does not have", other.whose())),
            _ => {
                let (next, other) = (shown(guid), other.whose());
                (guid - 1, format!("another one: port 2 gets the next, {next}, which {other} has"))
            }
        };
        return Err(by.refuse(Some(n), "guid", &shown(value), &expected));
    }
    let same_name = |other: &Placed| other.device != n && other.port.name == new.port.name;
    if let Some(other) = earlier(&same_name) {
        // The key is that of a name that is written, if one of them is.
        let (at, other) = if named[n] { (n, other.device) } else { (other.device, n) };
        let expected = match (named[at], named[other]) {
            (true, true) => format!("a name that device {} does not have", other + 1),
            (true, false) => {
                format!("another one: device {} has no key name, and gets this one", other + 1)
            }
            (false, _) => format!("a key name: without one, device {} gets the same", other + 1),
        };
        return Err(by.refuse(Some(at), "name", &new.port.name, &expected));
    }
    if let Some(other) = earlier(&|other| other.port.addresses == new.port.addresses) {
        let (key, place) = place_of(&new.port.addresses);
        // The key is that of a place that is written. Those that are not differ from each other.
        let (at, other) = if new.has_place { (new, other) } else { (other, new) };
        let (key, whose) = (format!("{}{key}", at.before), other.whose());
        let expected = match other.has_place {
            true => format!("a place that {whose} does not have"),
            false => format!("another one: {whose} has no key address, and gets this one"),
        };
        return Err(by.refuse(Some(at.device), &key, &place, &expected));
    }
    Ok(())
}

/// The form of the whole.
fn form(by: &AskedBy<'_>) -> String {
    let list = match by.file() {
        None => {
            "as many interfaces or addresses with commas between them, each perhaps behind NAME=, and each once"
        }
        Some(_) => "a list of as many interfaces, addresses or tables",
    };
    format!("a number from 1 to {MOST_PORTS}, or {list}")
}

/// A device that a text names.
fn listed(
    first: &str,
    n: usize,
    item: &str,
    persona: Option<Arc<Persona>>,
    by: &AskedBy<'_>,
) -> Result<Placed, ConfigError> {
    let (name, place) = match item.split_once('=') {
        Some((name, place)) => (name.trim().to_owned(), place.trim()),
        None => (counted(first, n), item),
    };
    let addresses = place_from(place);
    check_name(n, &name, by)?;
    check_place((n, ""), &addresses, by)?;
    let port = PortConfig::new(name, addresses, persona);
    let port = PortConfig { named_by: by.name(n, None), ..port };
    Ok(Placed { device: n, before: String::new(), has_place: true, port })
}

/// A device that has a table, behind so many ports of others.
fn tabled(
    without: Without<'_>,
    (n, before): (usize, usize),
    table: Table,
    own: impl Fn(&str, &str) -> Result<Arc<Persona>, ConfigError>,
    by: &AskedBy<'_>,
) -> Result<Vec<Placed>, ConfigError> {
    let Table { name, interface, address, persona, guid, limits, mtu, pkeys, ports } = table;
    let limits = limits.map_or_else(Limits::default, |Tabled(limits)| limits);
    let max_qp = without.max_qp.map_or(0, |all| all.number).max(limits::DEFAULT.max_qp);
    if let Some((key, value, most)) = limits.beyond(&DeviceAttr { max_qp, ..limits::DEFAULT }) {
        return Err(by.refuse(Some(n), key, &value.to_string(), &format!("1 to {most}")));
    }
    let guid = guid.map(|text| {
        let expected = "four groups of four hexadecimal digits, as 0002:c903:00aa:bbcc, not all 0";
        guid_from(&text).ok_or_else(|| by.refuse(Some(n), "guid", &text, expected))
    });
    let guid = guid.transpose()?;
    let persona = persona.map(|name| own(&name, &key_of(n, "persona"))).transpose()?;
    let first = persona.as_ref().map_or(without.first, |persona| &persona.device);
    let name = name.unwrap_or_else(|| counted(first, n));
    check_name(n, &name, by)?;
    let persona = persona.or(without.persona.cloned());
    let device = PortConfig::new(name, loopback(before), persona);
    let device = PortConfig { guid, limits, named_by: by.name(n, None), ..device };
    let only = PortTable { interface, address, mtu, pkeys };
    match ports {
        None => Ok(vec![only.read((n, ""), device, by)?]),
        Some(ports) => ports::read(ports, only, n, (&device, before), by),
    }
}

/// A GUID, as sysfs writes it.
fn guid_from(text: &str) -> Option<u64> {
    let is_group = |group: &str| group.len() == 4 && group.bytes().all(|b| b.is_ascii_hexdigit());
    let groups: Vec<&str> = text.split(':').collect();
    let fits = groups.len() == 4 && groups.iter().all(|group| is_group(group));
    u64::from_str_radix(&groups.concat(), 16).ok().filter(|guid| fits && *guid != 0)
}

/// The same the other way.
pub(super) fn shown(guid: u64) -> String {
    [48, 32, 16, 0].map(|bits| format!("{:04x}", guid >> bits & 0xffff)).join(":")
}

/// Refuses a name that no device can have.
fn check_name(n: usize, name: &str, by: &AskedBy<'_>) -> Result<(), ConfigError> {
    if is_device_name(name) { Ok(()) } else { Err(by.refuse(Some(n), "name", name, DEVICE_NAME)) }
}

/// The name of a device by its number, if the first one has this name: mlx5_0 counts on to mlx5_1.
fn counted(first: &str, n: usize) -> String {
    let stem = first.trim_end_matches(|c: char| c.is_ascii_digit());
    let number: usize = first[stem.len()..].parse().unwrap_or(0);
    if n == 0 { first.to_owned() } else { format!("{stem}{}", number as u128 + n as u128) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The devices that a configuration has, as `name=addresses`, with `:persona` if they have one.
    fn devices_of(file: &str, variables: &[(&str, &str)]) -> Result<Vec<String>, String> {
        let value = |name: &str| {
            let found = variables.iter().find(|(variable, _)| *variable == name)?;
            Some(found.1.to_owned())
        };
        let config = Config::parse("/etc/rack.toml", file, value).map_err(|e| e.to_string())?;
        let shown = |device: &PortConfig| {
            let place = match &device.addresses {
                Addresses::One(ip) => ip.to_string(),
                Addresses::Interfaces(names) => names.join("+"),
            };
            let persona = device.persona.as_ref().map_or(String::new(), |p| format!(":{}", p.name));
            let port = if device.port == 1 { "" } else { "/2" };
            format!("{}{port}={place}{persona}", device.name)
        };
        Ok(config.ports.iter().map(shown).collect())
    }

    #[test]
    fn devices_are_named_counted_or_given_an_address_each() {
        let of = |asked: &str| devices_of("", &[("ANYVERBS_DEVICES", asked)]).unwrap().join(" ");
        assert_eq!(devices_of("", &[]).unwrap(), ["anyverbs0="]);
        assert_eq!(of("2"), "anyverbs0=127.0.0.1 anyverbs1=127.0.0.2");
        assert_eq!(of("eth0, 10.0.0.2"), "anyverbs0=eth0 anyverbs1=10.0.0.2");
        assert_eq!(of("a=eth0,b=fd00::1,eth1"), "a=eth0 b=fd00::1 anyverbs2=eth1");
        let named = [("ANYVERBS_DEVICES", "3"), ("ANYVERBS_DEVICE", "mlx5_4")];
        let named = devices_of("", &named).unwrap().join(" ");
        assert_eq!(named, "mlx5_4=127.0.0.1 mlx5_5=127.0.0.2 mlx5_6=127.0.0.3");
        let last = format!("x{}", usize::MAX);
        let named = [("ANYVERBS_DEVICES", "2"), ("ANYVERBS_DEVICE", &*last)];
        let named = devices_of("", &named).unwrap().join(" ");
        assert_eq!(named, "x18446744073709551615=127.0.0.1 x18446744073709551616=127.0.0.2");
        let nameless = devices_of("devices = 2\ndevice = \"rdma\"", &[]).unwrap().join(" ");
        assert_eq!(nameless, "rdma=127.0.0.1 rdma1=127.0.0.2");
        assert_eq!(devices_of("devices = [\"eth0\"]", &[]).unwrap(), ["anyverbs0=eth0"]);
    }

    #[test]
    fn a_persona_names_the_first_device_and_the_variable_goes_before_it() {
        let names = |variables: &[(&str, &str)]| devices_of("", variables).unwrap().join(" ");
        let mlx5 = ("ANYVERBS_PERSONA", "mlx5");
        assert_eq!(names(&[mlx5]), "mlx5_0=:mlx5");
        let two = names(&[mlx5, ("ANYVERBS_DEVICES", "2")]);
        assert_eq!(two, "mlx5_0=127.0.0.1:mlx5 mlx5_1=127.0.0.2:mlx5");
        assert_eq!(names(&[mlx5, ("ANYVERBS_DEVICE", "mlx5_4")]), "mlx5_4=:mlx5");
        assert_eq!(devices_of("persona = \"rxe\"", &[]).unwrap(), ["rxe0=:rxe"]);
        let file = devices_of("persona = \"own.toml\"", &[]).unwrap_err();
        let named = "configuration file \"/etc/rack.toml\": persona";
        assert_eq!(
            file,
            format!("{named} \"/etc/own.toml\": no file is read here"),
            "beside the file"
        );
        let file = devices_of("", &[("ANYVERBS_PERSONA", "own.toml")]).unwrap_err();
        let named = "ANYVERBS_PERSONA: persona";
        assert_eq!(
            file,
            format!("{named} \"own.toml\": no file is read here"),
            "in the working one"
        );
        let unknown = devices_of("persona = \"mlx6\"", &[]).unwrap_err();
        assert!(unknown.contains("persona") && !unknown.contains("ANYVERBS_PERSONA"), "{unknown}");
    }

    #[test]
    fn limits_are_those_of_each_device_and_of_all() {
        let limits = |file: &str| {
            let config = Config::parse("", file, |_| None).unwrap();
            let each = config.device_attrs(|_, _| 0);
            let all = limits::of_all(&each, config.max_qp.as_ref());
            let of = |attr: &limits::DeviceAttr| (attr.max_qp, attr.max_sge, attr.max_qp_rd_atom);
            (each.iter().map(of).collect::<Vec<_>>(), of(&all))
        };
        let (irdma, engine) = ((4092, 6, 8), (16_384, 32, 128));
        assert_eq!(limits("persona = 'irdma'"), (vec![irdma], irdma));
        let most = (7, irdma.1, irdma.2);
        assert_eq!(limits("persona = 'irdma'\nmax_qp = 7"), (vec![most], most));
        let both = limits("devices = [{ persona = 'irdma' }, {}]");
        assert_eq!(both, (vec![irdma, engine], (engine.0, engine.1, irdma.2)));
    }

    #[test]
    fn a_device_may_have_limits_of_its_own() {
        let rack = "max_qp = 9
            devices = [
                { limits = { max_qp = 2, max_sge = 3 } },
                { persona = 'irdma', limits = { max_qp = 10, max_srq = 5, max_qp_rd_atom = 4 } },
                {},
            ]";
        let config = Config::parse("", rack, |_| None).unwrap();
        let each = config.device_attrs(|_, _| 0);
        let of = |attr: &limits::DeviceAttr| {
            let DeviceAttr { max_qp, max_sge, max_sge_rd, max_srq, max_qp_rd_atom, .. } = *attr;
            [max_qp, max_sge, max_sge_rd, max_srq, max_qp_rd_atom]
        };
        let found: Vec<_> = each.iter().map(of).collect();
        // Those of a device precede the persona's, whose missing features stay missing. No device has more than the process.
        assert_eq!(found, [[2, 3, 3, 16_384, 128], [9, 6, 6, 0, 4], [9, 32, 32, 16_384, 128]]);
        let all = limits::of_all(&each, config.max_qp.as_ref());
        assert_eq!((all.max_qp, all.max_sge, all.max_qp_rd_atom), (9, 32, 4));
        // A process may hold more than a device without a limit.
        let file = "max_qp = 60_000\ndevices = [{ limits = { max_qp = 50_000 } }, {}]";
        let each = Config::parse("", file, |_| None).unwrap().device_attrs(|_, _| 0);
        assert_eq!([0, 1].map(|n: usize| each[n].max_qp), [50_000, 60_000]);
        let groups = "devices = [{ limits = { max_mcast_grp = 2, max_mcast_qp_attach = 3 } }, {}]";
        let each = Config::parse("", groups, |_| None).unwrap().device_attrs(|_, _| 0);
        assert_eq!([0, 1].map(|n: usize| each[n].max_total_mcast_qp_attach), [6, 16_384]);
    }

    #[test]
    fn a_guid_of_the_configuration_is_that_of_the_node() {
        let rack = "devices = [{ guid = '0002:c903:00aa:bbcc', persona = 'mlx5', ports = 2 }, {}]";
        let config = Config::parse("", rack, |_| None).unwrap();
        let attrs = config.device_attrs(|_, place| place);
        let guids: Vec<_> = attrs.iter().map(|a| (a.node_guid, a.sys_image_guid)).collect();
        let own = 0x0002_c903_00aa_bbcc;
        assert_eq!(guids, [(own, own), (own + 1, own), (2, 2)]);
    }

    #[test]
    fn an_automatic_guid_steps_aside_for_one_that_is_given() {
        let rack = "devices = [
            {}, {},
            { guid = '0000:0000:0000:0001' }, { guid = '0000:0000:0000:0040', ports = 2 }, {}
        ]";
        let config = Config::parse("", rack, |_| None).unwrap();
        let automatic = |_: Option<&Persona>, place| place;
        let guids: Vec<_> = (0..6).map(|port| config.guid_of(port, automatic)).collect();
        assert_eq!(guids, [0, 129, 1, 0x40, 0x41, 5]);
        let alike = (0..6).map(|port| config.guid_of(port, |_, _| 7)).collect::<Vec<_>>();
        assert_eq!(alike, [7, 7, 1, 0x40, 0x41, 7], "the search ends");
    }

    #[test]
    fn a_device_may_have_a_table() {
        let file = "
            devices = [
                'eth0',
                { persona = 'irdma' },
                { name = 'storage', interface = 'eth1', persona = ' rxe ' },
                { address = 'fd00::1' },
            ]";
        let with = |variables: &[_]| devices_of(file, variables).unwrap().join(" ");
        assert_eq!(
            with(&[]),
            "anyverbs0=eth0 irdma1=127.0.0.2:irdma storage=eth1:rxe anyverbs3=fd00::1"
        );
        let persona = ("ANYVERBS_PERSONA", "mlx5");
        assert_eq!(
            with(&[persona]),
            "mlx5_0=eth0:mlx5 irdma1=127.0.0.2:irdma storage=eth1:rxe mlx5_3=fd00::1:mlx5"
        );
        // A variable goes before the file.
        assert_eq!(with(&[persona, ("ANYVERBS_DEVICES", "1")]), "mlx5_0=127.0.0.1:mlx5");
        let tables = "[[devices]]\nname = 'a'\n[[devices]]\nname = 'b'\n";
        assert_eq!(devices_of(tables, &[]).unwrap().join(" "), "a=127.0.0.1 b=127.0.0.2");
    }

    #[test]
    fn devices_that_cannot_be_are_refused() {
        for asked in [
            "0",
            "65",
            "-1",
            "eth0,eth0",
            "a=eth0,a=eth1",
            "a=",
            ",",
            "0.0.0.0",
            "a/b=eth0",
            "224.0.0.1",
            "8,lo",
            "b=127.0.0.300",
            "eth0:1",
            "eth0/lo",
            "eth0 lo",
        ] {
            let error = devices_of("", &[("ANYVERBS_DEVICES", asked)]).unwrap_err();
            assert!(error.starts_with("ANYVERBS_DEVICES="), "{asked}: {error}");
        }
        let number = devices_of("", &[("ANYVERBS_DEVICES", "b=127.0.0.300")]).unwrap_err();
        let wanted = "an address, or the name of an interface, which is no number, and not \"127.0.0.300\" for device 1";
        assert!(number.ends_with(wanted), "{number}");
        let both = [("ANYVERBS_DEVICES", "2"), ("ANYVERBS_INTERFACES", "eth0")];
        assert!(devices_of("", &both).unwrap_err().starts_with("ANYVERBS_INTERFACES="));
        let twice = devices_of("", &[("ANYVERBS_DEVICES", "a=eth0,a=eth1")]).unwrap_err();
        let wanted = "a name that device 1 does not have, and not \"a\" for device 2";
        assert_eq!(twice, format!("ANYVERBS_DEVICES=\"a=eth0,a=eth1\": expected {wanted}"));
    }

    #[test]
    fn tables_that_a_variable_replaces_are_told() {
        let replaced = |file: &str, variables: &[(&str, &str)]| {
            let value = |name: &str| {
                let found = variables.iter().find(|(variable, _)| *variable == name)?;
                Some(found.1.to_owned())
            };
            Config::parse("/etc/rack.toml", file, value).unwrap().replaced
        };
        let (two, file) = ([("ANYVERBS_DEVICES", "2")], "devices = ['eth0', { pkeys = [1] }]");
        let said = replaced(file, &two).unwrap();
        let wanted = "ANYVERBS_DEVICES=\"2\" replaces the devices of configuration file \"/etc/rack.toml\", 1 of them";
        assert!(said.starts_with(wanted), "{said}");
        assert_eq!(replaced(file, &[]), None);
        for file in ["devices = ['eth0', 'eth1']", "devices = [{}, {}]"] {
            assert_eq!(replaced(file, &two), None, "{file}: nothing else is lost");
        }
    }

    #[test]
    fn a_value_of_the_file_is_not_told_as_one_of_a_variable() {
        for (file, wanted) in [
            ("udp_port = 0", "udp_port=\"0\": expected a UDP port"),
            ("device = 'a/b'", "device=\"a/b\": expected a name"),
            ("loss = 2.0", "loss=\"2\": expected a probability"),
            ("persona = 'mlx6'", "persona=\"mlx6\": expected mlx5, "),
        ] {
            let error = devices_of(file, &[]).unwrap_err();
            let wanted = format!("configuration file \"/etc/rack.toml\": {wanted}");
            assert!(error.starts_with(&wanted), "{error}");
        }
    }

    #[test]
    fn a_device_says_what_names_its_addresses() {
        let names = |file: &str, variables: &[(&str, &str)]| {
            let value = |name: &str| {
                let found = variables.iter().find(|(variable, _)| *variable == name)?;
                Some(found.1.to_owned())
            };
            let config = Config::parse("/etc/rack.toml", file, value).unwrap();
            config.ports.into_iter().map(|port| port.named_by).collect::<Vec<_>>()
        };
        let in_file = |key: &str| format!("configuration file \"/etc/rack.toml\": {key}");
        assert_eq!(names("", &[]), [""]);
        assert_eq!(names("", &[("ANYVERBS_INTERFACES", "eth7")]), ["ANYVERBS_INTERFACES"]);
        assert_eq!(names("", &[("ANYVERBS_DEVICES", "a=eth7,2.2.2.2")]), ["ANYVERBS_DEVICES"; 2]);
        assert_eq!(names("interfaces = ['eth7']", &[]), [in_file("interfaces")]);
        assert_eq!(names("devices = 1", &[]), [in_file("devices")]);
        assert_eq!(
            names("devices = ['eth7', { interface = 'eth8' }, { address = '2.2.2.2' }, {}]", &[]),
            [
                in_file("devices"),
                in_file("device 2 of devices: interface"),
                in_file("device 3 of devices: address"),
                in_file("devices"),
            ]
        );
        let config = Config::parse("/etc/rack.toml", "interfaces = ['eth7']", |_| None).unwrap();
        assert_eq!(
            config.fault_of_addresses(0, "it is down"),
            "device anyverbs0, by configuration file \"/etc/rack.toml\": interfaces: it is down"
        );
    }

    #[test]
    fn a_mistake_in_a_table_is_told_with_its_key() {
        let many = format!("{{ pkeys = {:?} }}", (1..=129).collect::<Vec<_>>());
        for (devices, wanted) in [
            ("{}, { persona = 'mlx6' }", "device 2 of devices: persona=\"mlx6\": expected mlx5, "),
            ("{ name = 'a/b' }", "device 1 of devices: name=\"a/b\": expected a name"),
            ("{ interface = '' }", "device 1 of devices: interface=\"\": expected the name"),
            ("{ address = '0.0.0.0' }", "device 1 of devices: address=\"0.0.0.0\": expected an"),
            (
                "{ interface = 'eth0', address = '10.0.0.1' }",
                "device 1 of devices: address=\"10.0.0.1\": expected nothing beside the interface",
            ),
            (
                "{ pkeys = [] }",
                "device 1 of devices: pkeys=\"a list of 0\": expected a list of 1 to",
            ),
            (
                &many,
                "device 1 of devices: pkeys=\"a list of 129\": expected a list of 1 to 128 keys",
            ),
            (
                "{ pkeys = [0xffff, 0x8000] }",
                "device 1 of devices: pkeys, key 2=\"0x8000\": expected a partition from 1 to",
            ),
            (
                "{ pkeys = [0x10000] }",
                "device 1 of devices: pkeys, key 1=\"0x10000\": expected a P_Key from 0x0001 to",
            ),
            (
                "{ pkeys = [-1] }",
                "device 1 of devices: pkeys, key 1=\"-1\": expected a P_Key from 0x0001 to 0xffff",
            ),
            (
                "{}, { pkeys = [1, 2, 1] }",
                "device 2 of devices: pkeys, key 3=\"0x0001\": expected another key than key 1",
            ),
            (
                "{}, { limits = { max_cqe = 1_048_577 } }",
                "device 2 of devices: limits.max_cqe=\"1048577\": expected 1 to 1048576",
            ),
            (
                "{ limits = { max_sge = 0 } }",
                "device 1 of devices: limits.max_sge=\"0\": expected 1 to 32",
            ),
            (
                "{}, { guid = '2:c903:aa:bbcc' }",
                "device 2 of devices: guid=\"2:c903:aa:bbcc\": expected four groups of four",
            ),
            (
                "{ guid = '0000:0000:0000:0000' }",
                "device 1 of devices: guid=\"0000:0000:0000:0000\": expected four groups of four",
            ),
            (
                "{ guid = '0002:C903:00aa:bbcc' }, { guid = '0002:c903:00aa:bbcc' }",
                "device 2 of devices: guid=\"0002:c903:00aa:bbcc\": expected a GUID that device 1 does not have",
            ),
            (
                "{ guid = '0002:c903:00aa:bbcc', ports = 2 }, { guid = '0002:c903:00aa:bbcd' }",
                "device 2 of devices: guid=\"0002:c903:00aa:bbcd\": expected a GUID that port 2 of device 1 does not have",
            ),
            (
                "{ guid = '0002:c903:00aa:bbcd' }, { guid = '0002:c903:00aa:bbcc', ports = 2 }",
                "device 2 of devices: guid=\"0002:c903:00aa:bbcc\": expected another one: port 2 gets the next, 0002:c903:00aa:bbcd, which device 1 has",
            ),
            (
                "{ guid = 'ffff:ffff:ffff:ffff', ports = 2 }",
                "device 1 of devices: guid=\"ffff:ffff:ffff:ffff\": expected a GUID below it: port 2 gets the next",
            ),
            (
                "{ limits = { max_qp = -1 } }",
                "device 1 of devices: limits.max_qp=\"-1\": expected 1 to 16384",
            ),
            (
                "{}, { mtu = 1500 }",
                "device 2 of devices: mtu=\"1500\": expected 256, 512, 1024, 2048 or 4096",
            ),
            (
                "{ ports = [{}, { mtu = 0 }] }",
                "device 1 of devices: port 2 of ports: mtu=\"0\": expected 256, 512, 1024, 2048 or 4096",
            ),
            (
                "{ name = 'a' }, { name = 'b' }, { name = 'a' }",
                "device 3 of devices: name=\"a\": expected a name that device 1 does not have",
            ),
            (
                "{ name = 'anyverbs1' }, {}",
                "device 1 of devices: name=\"anyverbs1\": expected another one: device 2 has no key name, and",
            ),
            (
                "{}, { name = 'anyverbs0' }",
                "device 2 of devices: name=\"anyverbs0\": expected another one: device 1 has no key name, and",
            ),
            // The other one has the address of its place.
            (
                "{ address = '127.0.0.2' }, {}",
                "device 1 of devices: address=\"127.0.0.2\": expected another one: device 2 has no key address, and gets this one",
            ),
            (
                "{}, { address = '127.0.0.1' }",
                "device 2 of devices: address=\"127.0.0.1\": expected another one: device 1 has no key address, and gets this one",
            ),
            (
                "{ ports = [{}, { address = '127.0.0.3' }] }, {}",
                "device 1 of devices: port 2 of ports: address=\"127.0.0.3\": expected another one: device 2 has no key address, and",
            ),
            (
                "'127.0.0.2', { ports = 2 }",
                "device 1 of devices: address=\"127.0.0.2\": expected another one: port 1 of device 2 has no key address, and",
            ),
            (
                "'eth0', { interface = 'eth0' }",
                "device 2 of devices: interface=\"eth0\": expected a place that device 1 does",
            ),
            ("'a=eth0', 'b/c=eth1'", "device 2 of devices: name=\"b/c\": expected a name of 1 to"),
            (
                "",
                "devices=\"a list of 0\": expected a number from 1 to 64, or a list of as many interfaces, addresses or tables",
            ),
            (
                "{ limits = { max_qp = 18446744073709551615 } }",
                "device 1 of devices: limits.max_qp=\"18446744073709551615\": expected 1 to 16384",
            ),
            (
                "{ mtu = 18446744073709551615 }",
                "device 1 of devices: mtu=\"18446744073709551615\": expected 256, 512,",
            ),
            (
                "{ pkeys = [18446744073709551615] }",
                "device 1 of devices: pkeys, key 1=\"0xffffffffffffffff\": expected a P_Key from",
            ),
            (
                "{ ports = 18446744073709551615 }",
                "device 1 of devices: ports=\"18446744073709551615\": expected 1 or 2, or a list",
            ),
        ] {
            let error = devices_of(&format!("devices = [{devices}]"), &[]).unwrap_err();
            let wanted = format!("configuration file \"/etc/rack.toml\": {wanted}");
            assert!(error.starts_with(&wanted), "{devices}: {error}");
        }
        let more = "max_qp = 60_000\ndevices = [{ limits = { max_qp = 60_001 } }]";
        let error = devices_of(more, &[]).unwrap_err();
        assert!(error.ends_with("limits.max_qp=\"60001\": expected 1 to 60000"), "{error}");
        // A file of a persona lies beside that of the configuration; no file is read here.
        let error = devices_of("devices = [{ persona = 'nic.toml' }]", &[]).unwrap_err();
        let named = "configuration file \"/etc/rack.toml\": device 1 of devices: persona";
        assert_eq!(error, format!("{named} \"/etc/nic.toml\": no file is read here"));
        for number in ["65", "18446744073709551615"] {
            let error = devices_of(&format!("devices = {number}"), &[]).unwrap_err();
            let wanted = format!("configuration file \"/etc/rack.toml\": devices=\"{number}\": ");
            assert!(error.starts_with(&wanted), "{error}");
        }
        let both = "devices = 2\ninterfaces = ['eth0']";
        let error = devices_of(both, &[]).unwrap_err();
        assert!(
            error.contains("rack.toml\": interfaces=\"eth0\": expected nothing beside the key")
        );
        for (devices, wanted) in [
            ("{ persono = 'mlx5' }", "unknown field `persono`, expected one of `name`"),
            ("{ address = 'eth0' }", "invalid IP address"),
            ("{ persona = 5 }", "expected a string"),
            ("{ limits = { max_qps = 5 } }", "unknown field `max_qps`, expected one of `max_qp`"),
            ("{ pkeys = ['a'] }", "invalid type: string \"a\", expected a P_Key as a number"),
            ("{ limits = [] }", "invalid type: sequence, expected a table"),
            ("{ limits = [1, 2] }", "invalid type: sequence, expected a table"),
            ("{ limits = 5 }", "invalid type: integer `5`, expected a table"),
            (
                "{ limits = { max_qp = '8' } }",
                "invalid type: string \"8\", expected a whole number",
            ),
            ("{ pkeys = 1 }", "invalid type: integer `1`, expected a list of P_Keys"),
            ("7", "expected an interface, an address or a table"),
        ] {
            let error = devices_of(&format!("devices = [{devices}]"), &[]).unwrap_err();
            assert!(error.contains("line 1, column") && error.contains(wanted), "{error}");
        }
        for (file, wanted) in [
            ("udp_port = 70000", "expected a number from 0 to 65535"),
            ("window = -1", "expected a number from 0 to 4294967295"),
            ("receive_buffer = 'much'", "expected a number, 0 at least"),
            ("fault_seed = 'x'", "expected a number, 0 at least"),
            ("loss = 'much'", "expected a number"),
            ("capture = 5", "expected the name of a file"),
            ("interfaces = 'eth0'", "expected a list"),
        ] {
            let error = devices_of(file, &[]).unwrap_err();
            assert!(error.contains("line 1, column") && error.ends_with(wanted), "{error}");
        }
        let error = devices_of("devices = 1.5", &[]).unwrap_err();
        assert!(error.contains("expected a number of devices, or a list of them"), "{error}");
    }
}
