//! GID tables: the addresses of the devices' ports.
//!
//! A device that has another address does not list 127.0.0.1 and ::1, as devices of an Ethernet interface do not.
//! Programs that look for an address to give to peers would find them. They are addresses of the device all the same,
//! behind the table, so that connections to 127.0.0.1 stay on the loopback interface.

mod withheld;

use std::io;
use std::net::IpAddr;

use anyverbs_locks::{RwLock, rank};
use anyverbs_net::Interface;
use anyverbs_proto::types::{Gid, Mtu};

use crate::config::{Addresses, Config, PortConfig};
use crate::limits::{DeviceAttr, GID_TABLE_LEN};
use crate::persona::{Family, GidShape, GidType, Persona};
use withheld::Tables;

/// The use of an entry of a GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// RoCE v2, by an address of an interface: it carries traffic.
    RoceV2,
    /// RoCE v1, which a persona lists and this device does not speak.
    RoceV1,
    /// RoCE v2, by the link-local address that a persona's hardware would have, and no interface here has.
    NoInterface,
}

/// An address in a GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// The device that has it.
    pub device: usize,
    /// The number of its port there, from 1.
    pub port: u8,
    /// Its place in that one's table.
    pub index: usize,
    /// The address.
    pub gid: Gid,
    /// Its type, and whether it carries traffic.
    pub kind: GidKind,
    /// Index of its interface.
    pub interface: u32,
    /// Name of its interface.
    pub interface_name: String,
    /// Largest path MTU that fits the interface.
    pub mtu: Mtu,
    /// MTU of the interface's link in bytes.
    pub link_mtu: u32,
}

impl GidEntry {
    /// Its port, among those of all devices.
    #[must_use]
    pub fn port_place(&self) -> usize {
        self.device + usize::from(self.port) - 1
    }

    /// Whether it carries traffic. Without a persona, all do.
    #[must_use]
    pub fn carries(&self) -> bool {
        self.kind == GidKind::RoceV2
    }

    fn is_link_local(&self) -> bool {
        matches!(self.gid.to_ip(), IpAddr::V6(ip) if ip.is_unicast_link_local())
    }
}

/// The shape that a persona gives to a device's table, and the link-local address that its hardware would have.
#[derive(Clone, Debug)]
pub struct Shape {
    /// The persona's.
    pub gids: GidShape,
    /// That address.
    pub link_local: Gid,
}

/// Places behind a table, for addresses that are not listed.
const UNLISTED_LEN: usize = 4;

/// A port's table, and behind it the addresses that are not listed. Entry 0 is the IPv4 address of the first interface that is
/// up and not the loopback, or 127.0.0.1.
type Table = Vec<Option<GidEntry>>;

/// The tables of the ports of all devices of a process.
#[derive(Debug)]
pub struct GidTables {
    tables: RwLock<rank::Gids, Tables>,
    /// All addresses of the host, also of interfaces that no port has, which other processes may use.
    host: RwLock<rank::HostGids, Vec<Gid>>,
    sources: Vec<Addresses>,
    shapes: Vec<Option<Shape>>,
    /// The device of each port, and its number there.
    owners: Vec<(usize, u8)>,
    /// The largest path MTU of each port.
    mtus: Vec<Mtu>,
}

impl GidTables {
    /// The tables of the ports of a configuration, which have these attributes.
    ///
    /// # Errors
    /// Those of listing the host's interfaces.
    pub fn of(config: &Config, attrs: &[DeviceAttr]) -> io::Result<Self> {
        let sources = config.ports.iter().map(|port| port.addresses.clone()).collect();
        let shape = |(port, attr): (&PortConfig, &DeviceAttr)| {
            let gids = port.persona.as_ref()?.gids.clone();
            Some(Shape { gids, link_local: Persona::link_local(attr.node_guid) })
        };
        let shapes = config.ports.iter().zip(attrs).map(shape).collect();
        let owners = (0..config.ports.len()).map(|port| config.device_of(port)).collect();
        let mtus = config.ports.iter().map(|port| port.mtu).collect();
        Self::new(sources, shapes, owners, mtus)
    }

    /// A table for each of `sources`, in the shape of its persona, of these ports: each a device and a number there. No path MTU is
    /// larger than that of `mtus`.
    ///
    /// # Errors
    /// Those of listing the host's interfaces.
    pub fn new(
        sources: Vec<Addresses>,
        shapes: Vec<Option<Shape>>,
        owners: Vec<(usize, u8)>,
        mtus: Vec<Mtu>,
    ) -> io::Result<Self> {
        let empty = vec![None; GID_TABLE_LEN + UNLISTED_LEN];
        let ports = vec![empty; sources.len()];
        let tables = RwLock::new(Tables { ports, withheld: Vec::new() });
        let tables = Self { tables, host: RwLock::default(), sources, shapes, owners, mtus };
        tables.refresh()?;
        Ok(tables)
    }

    /// Reads the host's addresses again. The ports whose addresses have changed.
    ///
    /// # Errors
    /// Those of listing the host's interfaces.
    pub fn refresh(&self) -> io::Result<Vec<usize>> {
        let interfaces = anyverbs_net::interfaces()?;
        *self.host.write() =
            interfaces.iter().flat_map(|i| &i.addresses).map(|a| Gid::from(a.ip)).collect();
        let shares = shares(&interfaces, &self.sources);
        Ok(self.tables.write().change(|tables, _| {
            for (port, (table, share)) in tables.iter_mut().zip(shares).enumerate() {
                let Candidates { listed, unlisted } = share.has;
                let (listed, from) = match self.shapes.get(port).and_then(Option::as_ref) {
                    // The address of the first interface that leads elsewhere keeps place 0.
                    None => (listed, 1),
                    Some(shape) => (shaped(listed, shape), 0),
                };
                let owner = self.owners.get(port).copied().unwrap_or((port, 1));
                update(table, owner, Candidates { listed, unlisted }, from);
                let most = self.mtus.get(port).copied().unwrap_or(Mtu::Mtu4096);
                table.iter_mut().flatten().for_each(|entry| entry.mtu = entry.mtu.min(most));
            }
        }))
    }

    /// Calls `f` with an entry that carries traffic and for which `is_it` holds, the first in the order of the ports.
    fn first<T>(
        &self,
        is_it: impl Fn(&GidEntry) -> bool,
        f: impl FnOnce(&GidEntry) -> T,
    ) -> Option<T> {
        self.tables.read().ports.iter().flatten().flatten().find(|e| e.carries() && is_it(e)).map(f)
    }

    /// An entry of a port that holds an address. It may be one that carries no traffic.
    pub fn entry(&self, port: usize, index: usize) -> Option<GidEntry> {
        self.tables.read().ports.get(port)?.get(index)?.clone()
    }

    /// Every address of every port.
    pub fn entries(&self) -> Vec<GidEntry> {
        self.tables
            .read()
            .ports
            .iter()
            .flatten()
            .flatten()
            .filter(|e| e.carries())
            .cloned()
            .collect()
    }

    /// The entry by which a port is known: that of its first address that is not link-local, or of its first.
    pub fn principal(&self, port: usize) -> Option<GidEntry> {
        let carries = |e: &GidEntry| e.carries() && e.index < GID_TABLE_LEN;
        let mut carriers = self.all_of(port, carries);
        let at = carriers.iter().position(|e| !e.is_link_local()).unwrap_or(0);
        (at < carriers.len()).then(|| carriers.swap_remove(at))
    }

    /// The entry of RoCE v2 that has the address of another entry and carries traffic.
    pub(crate) fn twin(&self, entry: &GidEntry) -> Option<usize> {
        let is_it = |e: &GidEntry| {
            (e.port_place(), e.interface, e.gid) == (entry.port_place(), entry.interface, entry.gid)
        };
        self.first(is_it, |e| e.index)
    }

    fn all_of(&self, port: usize, is_it: impl Fn(&GidEntry) -> bool) -> Vec<GidEntry> {
        let tables = self.tables.read();
        let entries = tables.ports.get(port).into_iter().flatten().flatten();
        entries.filter(|e| is_it(e)).cloned().collect()
    }

    /// Every address of a port.
    pub fn of_port(&self, port: usize) -> Vec<GidEntry> {
        self.all_of(port, GidEntry::carries)
    }

    /// The entries that a port's table lists, those that carry no traffic among them.
    pub fn listed(&self, port: usize) -> Vec<GidEntry> {
        self.all_of(port, |e| e.index < GID_TABLE_LEN)
    }

    /// Whether an address is one of a port.
    pub fn contains(&self, gid: Gid) -> bool {
        self.first(|e| e.gid == gid, |_| ()).is_some()
    }

    /// Whether an address is one of this port.
    pub fn has(&self, port: usize, gid: Gid) -> bool {
        self.first(|e| e.port_place() == port && e.gid == gid, |_| ()).is_some()
    }

    /// Tells whether an address belongs to any interface of the host. The loopback interface has all addresses of 127.0.0.0/8.
    pub fn is_of_host(&self, gid: Gid) -> bool {
        let host = self.host.read();
        host.contains(&gid)
            || (is_v4_loopback(gid.to_ip()) && host.iter().any(|own| is_v4_loopback(own.to_ip())))
    }

    /// The entry of an address; of one interface unless that is 0.
    pub fn find(&self, gid: Gid, interface: u32) -> Option<GidEntry> {
        let is_it = |e: &GidEntry| e.gid == gid && (interface == 0 || e.interface == interface);
        self.first(is_it, GidEntry::clone)
    }

    /// The port to which an address belongs, or the interface by which a datagram of a group came. The first where none is.
    pub fn port_of(&self, gid: Gid, interface: u32) -> usize {
        let of_interface = || self.first(|e| e.interface == interface, GidEntry::port_place);
        let found = self.find(gid, interface).or_else(|| self.find(gid, 0));
        let found = found.map(|e| e.port_place());
        found.or_else(|| gid.is_multicast().then(of_interface)?).unwrap_or(0)
    }

    /// The interfaces that have addresses of a family, in the order of the tables.
    pub fn interfaces(&self, v4: bool) -> Vec<u32> {
        let mut found = Vec::new();
        for entry in self.tables.read().ports.iter().flatten().flatten().filter(|e| e.carries()) {
            if entry.gid.to_ip().is_ipv4() == v4 && !found.contains(&entry.interface) {
                found.push(entry.interface);
            }
        }
        found
    }

    /// The first address of a family beside an entry: of its port and its interface.
    pub(crate) fn beside(&self, entry: &GidEntry, v4: bool) -> Option<Gid> {
        let is_it = |e: &GidEntry| {
            (e.port_place(), e.interface) == (entry.port_place(), entry.interface)
                && e.gid.to_ip().is_ipv4() == v4
        };
        self.first(is_it, |e| e.gid)
    }

    /// Largest path MTU of the interface that has `gid`.
    pub fn mtu_of(&self, gid: Gid) -> Option<Mtu> {
        self.first(|e| e.gid == gid, |e| e.mtu)
    }

    /// Index of the interface that has `gid`.
    pub fn interface_of(&self, gid: Gid) -> Option<u32> {
        self.first(|e| e.gid == gid, |e| e.interface)
    }

    /// Largest path MTU of the interface of a port's first address.
    pub fn active_mtu(&self, port: usize) -> Mtu {
        self.principal(port).map_or(Mtu::Mtu1024, |e| e.mtu)
    }

    /// Why a port has fewer addresses than it was given.
    pub fn unusable(&self, port: usize) -> Vec<String> {
        let (Ok(interfaces), Some(source)) = (anyverbs_net::interfaces(), self.sources.get(port))
        else {
            return Vec::new();
        };
        let mut reasons = unusable(&interfaces, source);
        let lacks = shares(&interfaces, &self.sources).swap_remove(port).lacks;
        let owner = |ip| match self.find(Gid::from(ip), 0) {
            Some(entry) if Some(&(entry.device, 2)) == self.owners.get(port) => "the first port",
            _ => "an earlier device",
        };
        reasons.extend(lacks.iter().map(|ip| format!("{ip} belongs to {}", owner(*ip))));
        reasons
    }

    /// Whether a port has no address.
    pub fn is_empty(&self, port: usize) -> bool {
        self.first(|e| e.port_place() == port, |_| ()).is_none()
    }
}

/// The GUID of a device's node, if that of the first device is `first`.
#[must_use]
pub fn node_guid(first: u64, number: u64) -> u64 {
    first ^ number
}

/// Whether it is an address of 127.0.0.0/8.
fn is_v4_loopback(ip: IpAddr) -> bool {
    ip.is_ipv4() && ip.is_loopback()
}

/// The interface that has an address, if that is up.
fn interface_with(interfaces: &[Interface], ip: IpAddr) -> Option<&Interface> {
    interfaces.iter().find(|i| {
        i.up && (i.addresses.iter().any(|a| a.ip == ip && !a.tentative)
            || (is_v4_loopback(ip) && i.loopback))
    })
}

/// The fault of each name of a list of interfaces, if it gives no address.
fn unusable(interfaces: &[Interface], source: &Addresses) -> Vec<String> {
    let only = match source {
        Addresses::Interfaces(only) => only,
        Addresses::One(ip) => {
            let lacks = interface_with(interfaces, *ip).is_none();
            return lacks
                .then(|| format!("no interface that is up has {ip}"))
                .into_iter()
                .collect();
        }
    };
    let reason = |name: &String| {
        let Some(interface) = interfaces.iter().find(|i| i.name == *name) else {
            if name.contains(char::is_whitespace) {
                return Some(format!("{name:?} has a space, and names are separated by commas"));
            }
            let names: Vec<_> = interfaces.iter().map(|i| i.name.as_str()).collect();
            return Some(format!("there is no interface {name:?}, but {}", names.join(", ")));
        };
        if !interface.up {
            return Some(format!("{name} is down; `ip link set {name} up` brings it up"));
        }
        interface.addresses.iter().all(|a| a.tentative).then(|| format!("{name} has no address"))
    };
    only.iter().filter_map(reason).collect()
}

/// A port's share of the host's addresses.
struct Share {
    has: Candidates,
    /// The addresses that it was given, and that an earlier port has.
    lacks: Vec<IpAddr>,
}

/// The share of each of `sources`. An address belongs to one port, the first that was given it.
fn shares(interfaces: &[Interface], sources: &[Addresses]) -> Vec<Share> {
    let mut taken = Vec::new();
    let share = |source| {
        let mut lacks = Vec::new();
        // The same link-local address may be one of two interfaces.
        let mut is_new = |e: &GidEntry| {
            let is_new = !taken.contains(&(e.gid, e.interface));
            if !is_new {
                lacks.push(e.gid.to_ip());
            }
            is_new
        };
        let Candidates { listed, unlisted } = candidates(interfaces, source);
        let listed = listed.into_iter().filter(&mut is_new).collect();
        let unlisted = unlisted.into_iter().filter(&mut is_new).collect();
        let has = Candidates { listed, unlisted };
        taken.extend(has.listed.iter().chain(&has.unlisted).map(|e| (e.gid, e.interface)));
        Share { has, lacks }
    };
    sources.iter().map(share).collect()
}

/// The addresses of the device.
#[derive(Debug, Default)]
struct Candidates {
    /// Those for the table; the first is the one for index 0.
    listed: Vec<GidEntry>,
    unlisted: Vec<GidEntry>,
}

/// Every address of every interface that is up. Loopback addresses are listed if their interface was asked for by name, or
/// if there is no other address than link-local ones.
fn candidates(interfaces: &[Interface], source: &Addresses) -> Candidates {
    let entry = |i: &Interface, ip: IpAddr| GidEntry {
        device: 0,
        port: 1,
        index: 0,
        gid: Gid::from(ip),
        kind: GidKind::RoceV2,
        interface: i.index,
        interface_name: i.name.clone(),
        mtu: Mtu::fitting(i.mtu),
        link_mtu: i.mtu,
    };
    let only = match source {
        Addresses::Interfaces(only) => only,
        Addresses::One(ip) => {
            let listed = interface_with(interfaces, *ip).map(|i| entry(i, *ip));
            return Candidates { listed: listed.into_iter().collect(), unlisted: Vec::new() };
        }
    };
    let found = interfaces
        .iter()
        .filter(|i| i.up && (only.is_empty() || only.contains(&i.name)))
        .flat_map(|i| i.addresses.iter().filter(|a| !a.tentative).map(|a| entry(i, a.ip)));
    let is_loopback = |e: &GidEntry| e.gid.to_ip().is_loopback();
    let (mut unlisted, mut listed): (Vec<_>, Vec<_>) =
        found.partition(|e| is_loopback(e) && only.is_empty());
    let leads_elsewhere = |e: &GidEntry| match e.gid.to_ip() {
        IpAddr::V4(_) => true,
        IpAddr::V6(ip) => !ip.is_unicast_link_local(),
    };
    if !listed.iter().any(leads_elsewhere) {
        // In the order of the interfaces; the loopback is the first.
        unlisted.append(&mut listed);
        listed = std::mem::take(&mut unlisted);
    }
    let on_loopback =
        |e: &GidEntry| interfaces.iter().any(|i| i.index == e.interface && i.loopback);
    let is_v4 = |e: &GidEntry| matches!(e.gid.to_ip(), IpAddr::V4(_));
    let first = listed
        .iter()
        .position(|e| is_v4(e) && !on_loopback(e))
        .or_else(|| listed.iter().position(is_v4))
        .or_else(|| listed.iter().position(leads_elsewhere))
        .unwrap_or(0);
    if !listed.is_empty() {
        let first = listed.remove(first);
        listed.insert(0, first);
    }
    Candidates { listed, unlisted }
}

/// The entries of a table that has the shape of a persona: the link-local address of the hardware, then the other addresses, each
/// with every type.
fn shaped(listed: Vec<GidEntry>, shape: &Shape) -> Vec<GidEntry> {
    let Some(first) = listed.first().cloned() else { return listed };
    let (links, mut others): (Vec<_>, Vec<_>) =
        listed.into_iter().partition(GidEntry::is_link_local);
    let place = |e: &GidEntry| {
        let family = if e.gid.to_ip().is_ipv4() { Family::Ipv4 } else { Family::Ipv6 };
        shape.gids.order.iter().position(|known| *known == family)
    };
    others.sort_by_key(place);
    let mut addresses = Vec::new();
    if shape.gids.link_local {
        let own = links.iter().find(|e| e.interface == first.interface).cloned();
        let gid = shape.link_local;
        addresses.push(own.unwrap_or(GidEntry { gid, kind: GidKind::NoInterface, ..first }));
    }
    addresses.append(&mut others);
    let rest: Vec<_> = links.into_iter().filter(|e| !addresses.contains(e)).collect();
    addresses.extend(rest);
    let typed = |e: &GidEntry| {
        let entry = |kind: &GidType| match kind {
            GidType::RoceV1 => GidEntry { kind: GidKind::RoceV1, ..e.clone() },
            GidType::RoceV2 => e.clone(),
        };
        shape.gids.types.iter().map(entry).collect::<Vec<_>>()
    };
    addresses.iter().flat_map(typed).collect()
}

/// Enters the addresses found. Present addresses keep their places, and new ones take free places from `from` on; the last of the
/// table stays empty.
fn update(entries: &mut [Option<GidEntry>], owner: (usize, u8), found: Candidates, from: usize) {
    let before = entries.to_vec();
    entries.fill(None);
    let len = entries.len() - UNLISTED_LEN;
    let (table, behind) = entries.split_at_mut(len);
    let Candidates { mut listed, unlisted } = found;
    for (index, place) in table.iter_mut().enumerate().take(from.min(listed.len())) {
        *place = Some(GidEntry { index, ..listed.remove(0) });
    }
    enter(&mut table[..len - 1], from, 0, &before, listed);
    enter(behind, 0, len, &before, unlisted);
    entries.iter_mut().flatten().for_each(|entry| (entry.device, entry.port) = owner);
}

/// Enters addresses at `from` and later of `places`, which begin at index `first`.
fn enter(
    places: &mut [Option<GidEntry>],
    from: usize,
    first: usize,
    before: &[Option<GidEntry>],
    found: Vec<GidEntry>,
) {
    let range = first + from..first + places.len();
    let place_of = |entry: &GidEntry| {
        let is_it = |b: &&GidEntry| {
            (b.gid, b.interface, b.kind) == (entry.gid, entry.interface, entry.kind)
        };
        before.iter().flatten().find(is_it).map(|b| b.index).filter(|index| range.contains(index))
    };
    let (kept, new): (Vec<_>, Vec<_>) = found.into_iter().partition(|e| place_of(e).is_some());
    for entry in kept {
        if let Some(index) = place_of(&entry) {
            places[index - first] = Some(GidEntry { index, ..entry });
        }
    }
    for entry in new {
        let Some(at) = (from..places.len()).find(|at| places[*at].is_none()) else {
            crate::say_again!(warn, 0, "the GID table is full; {} is left out", entry.gid);
            continue;
        };
        places[at] = Some(GidEntry { index: first + at, ..entry });
    }
}

#[cfg(test)]
mod tests {
    use super::withheld::Withheld;
    use super::*;
    use anyverbs_net::InterfaceAddress;

    fn interface(index: u32, name: &str, mtu: u32, ips: &[&str]) -> Interface {
        let address = |ip: &&str| InterfaceAddress {
            ip: ip.parse().unwrap(),
            prefix_len: 24,
            scope_id: 0,
            tentative: false,
            deprecated: false,
            secondary: false,
        };
        Interface {
            index,
            name: name.into(),
            up: true,
            running: true,
            loopback: name == "lo",
            multicast: true,
            mtu,
            mac: None,
            vlan: None,
            addresses: ips.iter().map(address).collect(),
        }
    }

    /// A table of eight places.
    fn table() -> Vec<Option<GidEntry>> {
        vec![None; 8 + UNLISTED_LEN]
    }

    fn candidates_of(interfaces: &[Interface], only: &[String]) -> Candidates {
        candidates(interfaces, &Addresses::Interfaces(only.to_vec()))
    }

    fn update(entries: &mut [Option<GidEntry>], device: usize, found: Candidates) -> bool {
        let before = entries.to_vec();
        super::update(entries, (device, 1), found, 1);
        before != entries
    }

    fn shape_of(persona: &str) -> Shape {
        let gids = crate::persona::Persona::built_in(persona).unwrap().gids;
        Shape { gids, link_local: Gid::from("fe80::a".parse::<IpAddr>().unwrap()) }
    }

    /// The table of a persona as `index=address`, with a mark behind what carries no traffic.
    fn shaped_table(table: &mut [Option<GidEntry>], persona: &str, ips: &[&str]) -> Vec<String> {
        let eth = interface(2, "eth0", 1500, ips);
        let Candidates { listed, unlisted } = candidates_of(&[eth], &[]);
        let listed = shaped(listed, &shape_of(persona));
        super::update(table, (0, 1), Candidates { listed, unlisted }, 0);
        let mark = |entry: &GidEntry| match entry.kind {
            GidKind::RoceV2 => "",
            GidKind::RoceV1 => " v1",
            GidKind::NoInterface => " none",
        };
        let marks = table.iter().flatten().map(mark);
        shown(table).into_iter().zip(marks).map(|(entry, mark)| entry + mark).collect()
    }

    #[test]
    fn a_table_has_the_shape_of_its_persona() {
        let of = |persona, ips: &[&str]| shaped_table(&mut table(), persona, ips);
        let mlx5 = ["0=fe80::a v1", "1=fe80::a none", "2=10.0.0.1 v1", "3=10.0.0.1"];
        assert_eq!(of("mlx5", &["10.0.0.1"]), mlx5);
        // The interface's own link-local address stands for that of the hardware, and carries traffic.
        let mlx5 = ["0=fe80::1 v1", "1=fe80::1", "2=10.0.0.1 v1", "3=10.0.0.1"];
        assert_eq!(of("mlx5", &["10.0.0.1", "fe80::1"]), mlx5);
        let bnxt = ["0=fe80::1 v1", "1=fe80::1", "2=fd93::1 v1", "3=fd93::1"];
        assert_eq!(of("bnxt", &["fe80::1", "fd93::1"]), bnxt);
        assert_eq!(of("ionic", &["10.0.0.1"]), ["0=fe80::a none", "1=10.0.0.1"]);
        let both = ["0=fe80::1", "1=10.0.0.1", "2=fd00::1"];
        assert_eq!(of("irdma", &["fd00::1", "fe80::1", "10.0.0.1"]), both);
        assert_eq!(of("mlx5", &[]), [""; 0]);
    }

    #[test]
    fn entries_of_a_persona_that_stay_keep_their_places() {
        let mut table = table();
        shaped_table(&mut table, "mlx5", &["10.0.0.1", "10.0.0.2"]);
        let left = shaped_table(&mut table, "mlx5", &["10.0.0.2"]);
        assert_eq!(left, ["0=fe80::a v1", "1=fe80::a none", "4=10.0.0.2 v1", "5=10.0.0.2"]);
        let full = shaped_table(&mut table, "mlx5", &["10.0.0.2", "10.0.0.3"]);
        assert_eq!(full[2..4], ["2=10.0.0.3 v1", "3=10.0.0.3"]);
    }

    fn shown(entries: &[Option<GidEntry>]) -> Vec<String> {
        let places = entries.iter().enumerate().filter_map(|(i, e)| Some((i, e.as_ref()?)));
        places
            .inspect(|(i, e)| assert_eq!(*i, e.index))
            .map(|(i, e)| format!("{i}={}", e.gid.to_ip()))
            .collect()
    }

    #[test]
    fn index_0_is_ipv4_of_the_first_real_interface() {
        let lo = interface(1, "lo", 65536, &["127.0.0.1", "::1"]);
        let mut down = interface(2, "eth0", 1500, &["10.0.0.9"]);
        down.up = false;
        let eth = interface(3, "eth1", 1500, &["fe80::1", "10.0.0.1"]);
        let mut entries = table();
        assert!(update(
            &mut entries,
            0,
            candidates_of(&[lo.clone(), down.clone(), eth.clone()], &[])
        ));
        assert_eq!(shown(&entries), ["0=10.0.0.1", "1=fe80::1", "8=127.0.0.1", "9=::1"]);
        assert_eq!(entries[0].as_ref().unwrap().mtu, Mtu::Mtu1024);
        assert!(!update(&mut entries, 0, candidates_of(&[lo.clone(), down, eth], &[])));
        let mut alone = table();
        update(&mut alone, 0, candidates_of(&[lo], &[]));
        assert_eq!(shown(&alone), ["0=127.0.0.1", "1=::1"]);
    }

    #[test]
    fn addresses_that_stay_keep_their_places() {
        let lo = interface(1, "lo", 65536, &["127.0.0.1"]);
        let mut entries = table();
        let eth = |ips: &[&str]| interface(2, "eth0", 9000, ips);
        update(
            &mut entries,
            0,
            candidates_of(&[lo.clone(), eth(&["10.0.0.1", "10.0.0.2", "10.0.0.3"])], &[]),
        );
        assert_eq!(shown(&entries), ["0=10.0.0.1", "1=10.0.0.2", "2=10.0.0.3", "8=127.0.0.1"]);
        update(
            &mut entries,
            0,
            candidates_of(&[lo.clone(), eth(&["10.0.0.1", "10.0.0.3", "10.0.0.4"])], &[]),
        );
        assert_eq!(shown(&entries), ["0=10.0.0.1", "1=10.0.0.4", "2=10.0.0.3", "8=127.0.0.1"]);
        update(&mut entries, 0, candidates_of(&[lo, eth(&["10.0.0.3"])], &[]));
        assert_eq!(shown(&entries), ["0=10.0.0.3", "8=127.0.0.1"]);
    }

    #[test]
    fn the_host_may_change_what_is_withheld() {
        let tables = std::cell::RefCell::new(Tables { ports: vec![table()], withheld: Vec::new() });
        let eth = |ips: &[&str]| interface(2, "eth0", 9000, ips);
        let changes = |ips: &[&str]| {
            let found = candidates_of(&[eth(ips)], &[]);
            let change = |tables: &mut [Table]| super::update(&mut tables[0], (0, 1), found, 1);
            tables.borrow_mut().change(|tables, _| change(tables))
        };
        assert_eq!(changes(&["10.0.0.1", "10.0.0.2", "10.0.0.3"]), [0]);
        tables.borrow_mut().withheld.push(Withheld {
            port: 0,
            index: 1,
            rule: String::new(),
            entry: None,
        });
        assert_eq!(changes(&["10.0.0.1", "10.0.0.2", "10.0.0.3"]), [0]);
        let shown = || shown(&tables.borrow().ports[0]);
        assert_eq!(shown(), ["0=10.0.0.1", "2=10.0.0.3"]);
        // Its place stays its own, and its end is no change that anybody sees.
        assert_eq!(changes(&["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]), [0]);
        assert_eq!(shown(), ["0=10.0.0.1", "2=10.0.0.3", "3=10.0.0.4"]);
        assert_eq!(changes(&["10.0.0.1", "10.0.0.3", "10.0.0.4"]), [0; 0]);
        tables.borrow_mut().withheld.clear();
        assert_eq!(changes(&["10.0.0.1", "10.0.0.3", "10.0.0.4"]), [0; 0]);
    }

    #[test]
    fn one_index_stays_empty() {
        let ips: Vec<String> = (0..20).map(|i| format!("10.0.0.{i}")).collect();
        let ips: Vec<&str> = ips.iter().map(String::as_str).collect();
        let mut entries = table();
        update(&mut entries, 0, candidates_of(&[interface(2, "eth0", 1500, &ips)], &[]));
        assert_eq!(shown(&entries).len(), 7);
        assert!(entries[7].is_none());
    }

    #[test]
    fn loopback_addresses_are_listed_where_there_is_nothing_else() {
        let lo = interface(1, "lo", 65536, &["127.0.0.1", "::1", "192.0.2.7"]);
        let mut entries = table();
        // A service's address on the loopback interface is as good as another.
        update(&mut entries, 0, candidates_of(std::slice::from_ref(&lo), &[]));
        assert_eq!(shown(&entries), ["0=192.0.2.7", "8=127.0.0.1", "9=::1"]);
        let lo = interface(1, "lo", 65536, &["127.0.0.1", "::1"]);
        let eth = |ips: &[&str]| interface(2, "eth0", 1500, ips);
        let mut entries = table();
        update(&mut entries, 0, candidates_of(&[lo.clone(), eth(&["fe80::1"])], &[]));
        assert_eq!(shown(&entries), ["0=127.0.0.1", "1=::1", "2=fe80::1"]);
        assert!(update(
            &mut entries,
            0,
            candidates_of(&[lo.clone(), eth(&["fe80::1", "fd00::1"])], &[])
        ));
        assert_eq!(shown(&entries), ["0=fd00::1", "2=fe80::1", "8=127.0.0.1", "9=::1"]);
        assert!(update(&mut entries, 0, candidates_of(&[lo.clone(), eth(&[])], &[])));
        assert_eq!(shown(&entries), ["0=127.0.0.1", "1=::1"]);
        // A configuration that names the interface wants its addresses.
        let named = ["lo".into(), "eth0".into()];
        update(&mut entries, 0, candidates_of(&[lo, eth(&["10.0.0.1"])], &named));
        assert_eq!(shown(&entries), ["0=10.0.0.1", "1=::1", "2=127.0.0.1"]);
    }

    #[test]
    fn faults_of_a_list_of_interfaces_are_named() {
        let lo = interface(1, "lo", 65536, &["127.0.0.1"]);
        let mut down = interface(2, "eth0", 1500, &["10.0.0.9"]);
        down.up = false;
        let bare = interface(3, "eth1", 1500, &[]);
        let interfaces = [lo, down, bare];
        let said = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
            unusable(&interfaces, &Addresses::Interfaces(names)).join("; ")
        };
        assert_eq!(said(&["lo"]), "");
        assert_eq!(said(&["lo", "nosuch"]), "there is no interface \"nosuch\", but lo, eth0, eth1");
        assert!(said(&["eth0"]).starts_with("eth0 is down"));
        assert_eq!(said(&["eth1"]), "eth1 has no address");
        assert!(said(&["eth0 lo"]).contains("separated by commas"));
    }

    #[test]
    fn only_the_named_interfaces() {
        let lo = interface(1, "lo", 65536, &["127.0.0.1"]);
        let eth = interface(2, "eth0", 1500, &["10.0.0.1"]);
        let mut entries = table();
        update(&mut entries, 0, candidates_of(&[lo, eth], &["lo".into()]));
        assert_eq!(shown(&entries), ["0=127.0.0.1"]);
    }

    #[test]
    fn an_address_belongs_to_the_first_device_that_was_given_it() {
        let lo = interface(1, "lo", 65536, &["127.0.0.1", "::1"]);
        let eth = |index| interface(index, &format!("eth{index}"), 1500, &["fe80::1"]);
        let interfaces = [lo, eth(2), eth(3)];
        let named = |name: &str| Addresses::Interfaces(vec![name.into()]);
        let one = |ip: &str| Addresses::One(ip.parse().unwrap());
        let shared = |sources: &[Addresses]| {
            let all = |share: Share| {
                let has = share.has.listed.iter().map(|e| e.gid.to_ip().to_string());
                let lacks = share.lacks.iter().map(|ip| format!("-{ip}"));
                has.chain(lacks).collect::<Vec<_>>().join(" ")
            };
            shares(&interfaces, sources).into_iter().map(all).collect::<Vec<_>>()
        };
        assert_eq!(shared(&[named("lo"), one("127.0.0.1")]), ["127.0.0.1 ::1", "-127.0.0.1"]);
        assert_eq!(shared(&[one("127.0.0.1"), named("lo")]), ["127.0.0.1", "::1 -127.0.0.1"]);
        let two_links = [named("eth2"), named("eth3")];
        assert_eq!(shared(&two_links), ["fe80::1", "fe80::1"], "of two interfaces");
    }

    #[test]
    fn a_device_of_one_address_lists_that_alone() {
        let lo = interface(1, "lo", 65536, &["127.0.0.1", "::1"]);
        let eth = interface(2, "eth0", 1500, &["10.0.0.1", "10.0.0.2"]);
        let mut down = interface(3, "eth1", 1500, &["10.0.0.3"]);
        down.up = false;
        let interfaces = [lo, eth, down];
        let listed = |ip: &str| {
            let mut entries = table();
            let source = Addresses::One(ip.parse().unwrap());
            update(&mut entries, 3, candidates(&interfaces, &source));
            assert!(entries.iter().flatten().all(|e| e.device == 3));
            (shown(&entries).join(" "), unusable(&interfaces, &source).join("; "))
        };
        assert_eq!(listed("10.0.0.2"), ("0=10.0.0.2".into(), String::new()));
        // The loopback interface takes all of 127.0.0.0/8.
        assert_eq!(listed("127.0.0.9"), ("0=127.0.0.9".into(), String::new()));
        for ip in ["10.0.0.3", "10.0.0.9", "::2"] {
            assert_eq!(listed(ip), (String::new(), format!("no interface that is up has {ip}")));
        }
    }
}
