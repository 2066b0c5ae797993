//! GID table: the addresses of the port.
//!
//! A device that has another address does not list 127.0.0.1 and ::1, as devices of an Ethernet interface do not.
//! Programs that look for an address to give to peers would find them. They are addresses of the device all the same,
//! behind the table, so that connections to 127.0.0.1 stay on the loopback interface.

use std::io;
use std::net::IpAddr;

use anyverbs_locks::{RwLock, rank};
use anyverbs_net::Interface;
use anyverbs_proto::types::{Gid, Mtu};

use crate::limits::GID_TABLE_LEN;

/// An address in the GID table. All are of type RoCE v2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Its place.
    pub index: usize,
    /// The address.
    pub gid: Gid,
    /// Index of its interface.
    pub interface: u32,
    /// Name of its interface.
    pub interface_name: String,
    /// Largest path MTU that fits the interface.
    pub mtu: Mtu,
    /// MTU of the interface's link in bytes.
    pub link_mtu: u32,
}

/// Places behind the table, for addresses that are not listed.
const UNLISTED_LEN: usize = 4;

/// The table. Entry 0 is the IPv4 address of the first interface that is up and not the loopback, or 127.0.0.1.
#[derive(Debug)]
pub struct GidTable {
    /// The table, and behind it the addresses that are not listed.
    entries: RwLock<rank::Gids, Vec<Option<GidEntry>>>,
    /// All addresses of the host, also of interfaces that are not in `only`, which other processes may use.
    host: RwLock<rank::HostGids, Vec<Gid>>,
    only: Vec<String>,
}

impl GidTable {
    /// A table of the interfaces named in `only`, or of all where that is empty.
    pub fn new(only: &[String]) -> io::Result<Self> {
        let entries = RwLock::new(vec![None; GID_TABLE_LEN + UNLISTED_LEN]);
        let table = Self { entries, host: RwLock::default(), only: only.to_vec() };
        table.refresh()?;
        Ok(table)
    }

    /// Reads the host's addresses again. Whether anything changed.
    pub fn refresh(&self) -> io::Result<bool> {
        let interfaces = anyverbs_net::interfaces()?;
        *self.host.write() =
            interfaces.iter().flat_map(|i| &i.addresses).map(|a| Gid::from(a.ip)).collect();
        let found = candidates(&interfaces, &self.only);
        Ok(update(&mut self.entries.write(), found))
    }

    /// An entry that holds an address.
    pub fn entry(&self, index: usize) -> Option<GidEntry> {
        self.entries.read().get(index).cloned().flatten()
    }

    /// Every address of the device.
    pub fn entries(&self) -> Vec<GidEntry> {
        self.entries.read().iter().flatten().cloned().collect()
    }

    /// The entries that the table lists.
    pub fn listed(&self) -> Vec<GidEntry> {
        self.entries.read()[..GID_TABLE_LEN].iter().flatten().cloned().collect()
    }

    /// Whether an address is ours.
    pub fn contains(&self, gid: Gid) -> bool {
        self.entries.read().iter().flatten().any(|e| e.gid == gid)
    }

    /// Tells whether an address belongs to any interface of the host.
    pub fn is_of_host(&self, gid: Gid) -> bool {
        self.host.read().contains(&gid)
    }

    /// The entry of an address; of one interface unless that is 0.
    pub fn find(&self, gid: Gid, interface: u32) -> Option<GidEntry> {
        let entries = self.entries.read();
        let is_it = |e: &&GidEntry| e.gid == gid && (interface == 0 || e.interface == interface);
        entries.iter().flatten().find(is_it).cloned()
    }

    /// The interfaces that have addresses of a family, in the order of the table.
    pub fn interfaces(&self, v4: bool) -> Vec<u32> {
        let mut found = Vec::new();
        for entry in self.entries.read().iter().flatten() {
            if entry.gid.to_ip().is_ipv4() == v4 && !found.contains(&entry.interface) {
                found.push(entry.interface);
            }
        }
        found
    }

    /// The first address of a family that an interface has.
    pub(crate) fn address(&self, interface: u32, v4: bool) -> Option<Gid> {
        let entries = self.entries.read();
        let mut of_interface = entries.iter().flatten().filter(|e| e.interface == interface);
        of_interface.find(|e| e.gid.to_ip().is_ipv4() == v4).map(|e| e.gid)
    }

    /// Largest path MTU of the interface that has `gid`.
    pub fn mtu_of(&self, gid: Gid) -> Option<Mtu> {
        self.entries.read().iter().flatten().find(|e| e.gid == gid).map(|e| e.mtu)
    }

    /// Index of the interface that has `gid`.
    pub fn interface_of(&self, gid: Gid) -> Option<u32> {
        self.entries.read().iter().flatten().find(|e| e.gid == gid).map(|e| e.interface)
    }

    /// Largest path MTU of entry 0's interface.
    pub fn active_mtu(&self) -> Mtu {
        self.entries.read()[0].as_ref().map_or(Mtu::Mtu1024, |e| e.mtu)
    }

    /// Why interfaces that were asked for by name give no address.
    pub fn unusable(&self) -> Vec<String> {
        match anyverbs_net::interfaces() {
            Ok(interfaces) if !self.only.is_empty() => unusable(&interfaces, &self.only),
            _ => Vec::new(),
        }
    }

    /// Whether there is no address.
    pub fn is_empty(&self) -> bool {
        self.entries.read().iter().all(Option::is_none)
    }
}

/// The fault of each name of a list of interfaces, if it gives no address.
fn unusable(interfaces: &[Interface], only: &[String]) -> Vec<String> {
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

/// The addresses of the device.
#[derive(Debug, Default)]
struct Candidates {
    /// Those for the table; the first is the one for index 0.
    listed: Vec<GidEntry>,
    unlisted: Vec<GidEntry>,
}

/// Every address of every interface that is up. Loopback addresses are listed if their interface was asked for by name, or
/// if there is no other address than link-local ones.
fn candidates(interfaces: &[Interface], only: &[String]) -> Candidates {
    let found = interfaces
        .iter()
        .filter(|i| i.up && (only.is_empty() || only.contains(&i.name)))
        .flat_map(|i| {
            i.addresses.iter().filter(|a| !a.tentative).map(|a| GidEntry {
                index: 0,
                gid: Gid::from(a.ip),
                interface: i.index,
                interface_name: i.name.clone(),
                mtu: Mtu::fitting(i.mtu),
                link_mtu: i.mtu,
            })
        });
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

/// Enters the addresses found. Present addresses keep their places, and new ones take free places; the last of the
/// table stays empty.
fn update(entries: &mut [Option<GidEntry>], found: Candidates) -> bool {
    let before = entries.to_vec();
    entries.fill(None);
    let len = entries.len() - UNLISTED_LEN;
    let (table, behind) = entries.split_at_mut(len);
    let Candidates { mut listed, unlisted } = found;
    if !listed.is_empty() {
        table[0] = Some(GidEntry { index: 0, ..listed.remove(0) });
    }
    enter(&mut table[..len - 1], 1, 0, &before, listed);
    enter(behind, 0, len, &before, unlisted);
    before != entries
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
        let is_it = |b: &&GidEntry| (b.gid, b.interface) == (entry.gid, entry.interface);
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
            crate::say_again!(warn, 0, gid = %entry.gid, "the GID table is full; this address is left out");
            continue;
        };
        places[at] = Some(GidEntry { index: first + at, ..entry });
    }
}

#[cfg(test)]
mod tests {
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
        assert!(update(&mut entries, candidates(&[lo.clone(), down.clone(), eth.clone()], &[])));
        assert_eq!(shown(&entries), ["0=10.0.0.1", "1=fe80::1", "8=127.0.0.1", "9=::1"]);
        assert_eq!(entries[0].as_ref().unwrap().mtu, Mtu::Mtu1024);
        assert!(!update(&mut entries, candidates(&[lo.clone(), down, eth], &[])));
        let mut alone = table();
        update(&mut alone, candidates(&[lo], &[]));
        assert_eq!(shown(&alone), ["0=127.0.0.1", "1=::1"]);
    }

    #[test]
    fn addresses_that_stay_keep_their_places() {
        let lo = interface(1, "lo", 65536, &["127.0.0.1"]);
        let mut entries = table();
        let eth = |ips: &[&str]| interface(2, "eth0", 9000, ips);
        update(
            &mut entries,
            candidates(&[lo.clone(), eth(&["10.0.0.1", "10.0.0.2", "10.0.0.3"])], &[]),
        );
        assert_eq!(shown(&entries), ["0=10.0.0.1", "1=10.0.0.2", "2=10.0.0.3", "8=127.0.0.1"]);
        update(
            &mut entries,
            candidates(&[lo.clone(), eth(&["10.0.0.1", "10.0.0.3", "10.0.0.4"])], &[]),
        );
        assert_eq!(shown(&entries), ["0=10.0.0.1", "1=10.0.0.4", "2=10.0.0.3", "8=127.0.0.1"]);
        update(&mut entries, candidates(&[lo, eth(&["10.0.0.3"])], &[]));
        assert_eq!(shown(&entries), ["0=10.0.0.3", "8=127.0.0.1"]);
    }

    #[test]
    fn one_index_stays_empty() {
        let ips: Vec<String> = (0..20).map(|i| format!("10.0.0.{i}")).collect();
        let ips: Vec<&str> = ips.iter().map(String::as_str).collect();
        let mut entries = table();
        update(&mut entries, candidates(&[interface(2, "eth0", 1500, &ips)], &[]));
        assert_eq!(shown(&entries).len(), 7);
        assert!(entries[7].is_none());
    }

    #[test]
    fn loopback_addresses_are_listed_where_there_is_nothing_else() {
        let lo = interface(1, "lo", 65536, &["127.0.0.1", "::1", "192.0.2.7"]);
        let mut entries = table();
        // A service's address on the loopback interface is as good as another.
        update(&mut entries, candidates(std::slice::from_ref(&lo), &[]));
        assert_eq!(shown(&entries), ["0=192.0.2.7", "8=127.0.0.1", "9=::1"]);
        let lo = interface(1, "lo", 65536, &["127.0.0.1", "::1"]);
        let eth = |ips: &[&str]| interface(2, "eth0", 1500, ips);
        let mut entries = table();
        update(&mut entries, candidates(&[lo.clone(), eth(&["fe80::1"])], &[]));
        assert_eq!(shown(&entries), ["0=127.0.0.1", "1=::1", "2=fe80::1"]);
        assert!(update(&mut entries, candidates(&[lo.clone(), eth(&["fe80::1", "fd00::1"])], &[])));
        assert_eq!(shown(&entries), ["0=fd00::1", "2=fe80::1", "8=127.0.0.1", "9=::1"]);
        assert!(update(&mut entries, candidates(&[lo.clone(), eth(&[])], &[])));
        assert_eq!(shown(&entries), ["0=127.0.0.1", "1=::1"]);
        // A configuration that names the interface wants its addresses.
        let named = ["lo".into(), "eth0".into()];
        update(&mut entries, candidates(&[lo, eth(&["10.0.0.1"])], &named));
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
            unusable(&interfaces, &names).join("; ")
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
        update(&mut entries, candidates(&[lo, eth], &["lo".into()]));
        assert_eq!(shown(&entries), ["0=127.0.0.1"]);
    }
}
