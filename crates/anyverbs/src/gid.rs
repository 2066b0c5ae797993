//! GID table: the addresses of the port.

use std::io;
use std::net::IpAddr;

use anyverbs_net::Interface;
use anyverbs_proto::types::{Gid, Mtu};
use parking_lot::RwLock;

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

/// The table. Entry 0 is the IPv4 address of the first interface that is up and not the loopback, or 127.0.0.1.
#[derive(Debug)]
pub(crate) struct GidTable {
    entries: RwLock<Vec<Option<GidEntry>>>,
    only: Vec<String>,
}

impl GidTable {
    /// A table of the interfaces named in `only`, or of all where that is empty.
    pub(crate) fn new(only: &[String]) -> io::Result<Self> {
        let table = Self { entries: RwLock::new(vec![None; GID_TABLE_LEN]), only: only.to_vec() };
        table.refresh()?;
        Ok(table)
    }

    /// Reads the host's addresses again. Whether anything changed.
    pub(crate) fn refresh(&self) -> io::Result<bool> {
        let found = candidates(&anyverbs_net::interfaces()?, &self.only);
        Ok(update(&mut self.entries.write(), found))
    }

    pub(crate) fn entry(&self, index: usize) -> Option<GidEntry> {
        self.entries.read().get(index).cloned().flatten()
    }

    pub(crate) fn entries(&self) -> Vec<GidEntry> {
        self.entries.read().iter().flatten().cloned().collect()
    }

    /// Whether an address is ours.
    pub(crate) fn contains(&self, gid: Gid) -> bool {
        self.entries.read().iter().flatten().any(|e| e.gid == gid)
    }

    /// The entry of an address; of one interface unless that is 0.
    pub(crate) fn find(&self, gid: Gid, interface: u32) -> Option<GidEntry> {
        let entries = self.entries.read();
        let is_it = |e: &&GidEntry| e.gid == gid && (interface == 0 || e.interface == interface);
        entries.iter().flatten().find(is_it).cloned()
    }

    /// The interfaces that have addresses of a family, in the order of the table.
    pub(crate) fn interfaces(&self, v4: bool) -> Vec<u32> {
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
    pub(crate) fn mtu_of(&self, gid: Gid) -> Option<Mtu> {
        self.entries.read().iter().flatten().find(|e| e.gid == gid).map(|e| e.mtu)
    }

    /// Index of the interface that has `gid`.
    pub(crate) fn interface_of(&self, gid: Gid) -> Option<u32> {
        self.entries.read().iter().flatten().find(|e| e.gid == gid).map(|e| e.interface)
    }

    /// Largest path MTU of entry 0's interface.
    pub(crate) fn active_mtu(&self) -> Mtu {
        self.entries.read()[0].as_ref().map_or(Mtu::Mtu1024, |e| e.mtu)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.read().iter().all(Option::is_none)
    }
}

/// Every address of every interface that is up; the first is the one for index 0.
fn candidates(interfaces: &[Interface], only: &[String]) -> Vec<GidEntry> {
    let mut found: Vec<GidEntry> = interfaces
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
        })
        .collect();
    let loopback = |e: &GidEntry| interfaces.iter().any(|i| i.index == e.interface && i.loopback);
    let is_v4 = |e: &GidEntry| matches!(e.gid.to_ip(), IpAddr::V4(_));
    let first = found
        .iter()
        .position(|e| is_v4(e) && !loopback(e))
        .or_else(|| found.iter().position(|e| is_v4(e) && loopback(e)))
        .unwrap_or(0);
    if !found.is_empty() {
        let first = found.remove(first);
        found.insert(0, first);
    }
    found
}

/// Enters what was found: addresses that stay keep their places, others go where one is free; the last stays empty.
fn update(entries: &mut [Option<GidEntry>], found: Vec<GidEntry>) -> bool {
    let before = entries.to_vec();
    entries.fill(None);
    let last = entries.len() - 1;
    let mut new = Vec::new();
    for (i, mut entry) in found.into_iter().enumerate() {
        let kept =
            before.iter().flatten().find(|b| (b.gid, b.interface) == (entry.gid, entry.interface));
        entry.index = match kept {
            _ if i == 0 => 0,
            Some(b) if b.index != 0 => b.index,
            _ => {
                new.push(entry);
                continue;
            }
        };
        let at = entry.index;
        entries[at] = Some(entry);
    }
    for mut entry in new {
        let Some(at) = entries[1..last].iter().position(Option::is_none).map(|at| at + 1) else {
            tracing::warn!(gid = %entry.gid, "the GID table is full; this address is left out");
            continue;
        };
        entry.index = at;
        entries[at] = Some(entry);
    }
    before != entries
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

    fn shown(entries: &[Option<GidEntry>]) -> Vec<String> {
        entries.iter().flatten().map(|e| format!("{}={}", e.index, e.gid.to_ip())).collect()
    }

    #[test]
    fn index_0_is_ipv4_of_the_first_real_interface() {
        let lo = interface(1, "lo", 65536, &["127.0.0.1", "::1"]);
        let mut down = interface(2, "eth0", 1500, &["10.0.0.9"]);
        down.up = false;
        let eth = interface(3, "eth1", 1500, &["fe80::1", "10.0.0.1"]);
        let mut entries = vec![None; 8];
        assert!(update(&mut entries, candidates(&[lo.clone(), down.clone(), eth.clone()], &[])));
        assert_eq!(shown(&entries), ["0=10.0.0.1", "1=127.0.0.1", "2=::1", "3=fe80::1"]);
        assert_eq!(entries[0].as_ref().unwrap().mtu, Mtu::Mtu1024);
        assert!(!update(&mut entries, candidates(&[lo.clone(), down, eth], &[])));
        let mut alone = vec![None; 8];
        update(&mut alone, candidates(&[lo], &[]));
        assert_eq!(shown(&alone), ["0=127.0.0.1", "1=::1"]);
    }

    #[test]
    fn addresses_that_stay_keep_their_places() {
        let lo = interface(1, "lo", 65536, &["127.0.0.1"]);
        let mut entries = vec![None; 8];
        let eth = |ips: &[&str]| interface(2, "eth0", 9000, ips);
        update(
            &mut entries,
            candidates(&[lo.clone(), eth(&["10.0.0.1", "10.0.0.2", "10.0.0.3"])], &[]),
        );
        assert_eq!(shown(&entries), ["0=10.0.0.1", "1=127.0.0.1", "2=10.0.0.2", "3=10.0.0.3"]);
        update(
            &mut entries,
            candidates(&[lo.clone(), eth(&["10.0.0.1", "10.0.0.3", "10.0.0.4"])], &[]),
        );
        assert_eq!(shown(&entries), ["0=10.0.0.1", "1=127.0.0.1", "2=10.0.0.4", "3=10.0.0.3"]);
        update(&mut entries, candidates(&[lo, eth(&["10.0.0.3"])], &[]));
        assert_eq!(shown(&entries), ["0=10.0.0.3", "1=127.0.0.1"]);
    }

    #[test]
    fn one_index_stays_empty() {
        let ips: Vec<String> = (0..20).map(|i| format!("10.0.0.{i}")).collect();
        let ips: Vec<&str> = ips.iter().map(String::as_str).collect();
        let mut entries = vec![None; 8];
        update(&mut entries, candidates(&[interface(2, "eth0", 1500, &ips)], &[]));
        assert_eq!(shown(&entries).len(), 7);
        assert!(entries[7].is_none());
    }

    #[test]
    fn only_the_named_interfaces() {
        let lo = interface(1, "lo", 65536, &["127.0.0.1"]);
        let eth = interface(2, "eth0", 1500, &["10.0.0.1"]);
        let mut entries = vec![None; 8];
        update(&mut entries, candidates(&[lo, eth], &["lo".into()]));
        assert_eq!(shown(&entries), ["0=127.0.0.1"]);
    }
}
