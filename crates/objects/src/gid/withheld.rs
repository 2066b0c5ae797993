//! Addresses that a script of faults takes out of the tables of GIDs.

use anyverbs_proto::types::Gid;

use super::{GidEntry, GidTables, Table};

/// The tables, and what a script of faults takes out of them.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) ports: Vec<Table>,
    pub(super) withheld: Vec<Withheld>,
}

/// An entry that is not there as long as a script of faults says so.
#[derive(Debug)]
pub(super) struct Withheld {
    pub(super) port: usize,
    pub(super) index: usize,
    /// The rule, for people.
    pub(super) rule: String,
    /// It, unless another one of these has it, or the host has no such address.
    pub(super) entry: Option<GidEntry>,
}

impl Tables {
    /// Changes the tables as they are with the entries that were taken out, and takes them out again. The ports whose tables look
    /// other than before.
    pub(super) fn change(
        &mut self,
        change: impl FnOnce(&mut [Table], &mut Vec<Withheld>),
    ) -> Vec<usize> {
        let Self { ports, withheld } = self;
        let before = ports.clone();
        for Withheld { port, index, entry, .. } in &mut *withheld {
            if let Some(entry) = entry.take() {
                ports[*port][*index] = Some(entry);
            }
        }
        change(ports, withheld);
        for Withheld { port, index, entry, .. } in withheld {
            *entry = ports[*port][*index].take();
        }
        let changed = before.iter().zip(ports).enumerate().filter(|(_, (old, new))| *old != *new);
        changed.map(|(port, _)| port).collect()
    }
}

impl GidTables {
    /// From now on the entry at a place of a port's table is not there by a rule, whatever the host has, until
    /// [`give_back`](Self::give_back) is called as often. The ports whose addresses have changed.
    pub fn withhold(&self, port: usize, index: usize, rule: String) -> Vec<usize> {
        let mut tables = self.tables.write();
        let is_place = tables.ports.get(port).is_some_and(|table| index < table.len());
        tables.change(|_, withheld| {
            if is_place {
                withheld.push(Withheld { port, index, rule, entry: None });
            }
        })
    }

    /// Ends one [`withhold`](Self::withhold). The ports whose addresses have changed.
    pub fn give_back(&self, port: usize, index: usize) -> Vec<usize> {
        self.tables.write().change(|_, withheld| {
            let found = withheld.iter().position(|it| (it.port, it.index) == (port, index));
            found.map(|at| withheld.swap_remove(at));
        })
    }

    /// Ends each [`withhold`](Self::withhold). The ports whose addresses have changed.
    pub fn give_all_back(&self) -> Vec<usize> {
        self.tables.write().change(|_, withheld| withheld.clear())
    }

    /// The index at which an address of a port is withheld.
    pub fn withheld_index(&self, port: usize, gid: Gid) -> Option<usize> {
        let tables = self.tables.read();
        let is_it = |entry: &GidEntry| entry.gid == gid && entry.carries();
        let mut found = tables
            .withheld
            .iter()
            .filter(|it| it.port == port && it.entry.as_ref().is_some_and(is_it));
        found.next().map(|it| it.index)
    }

    /// The address at a place that is withheld.
    pub fn withheld(&self, port: usize, index: usize) -> Option<Gid> {
        let tables = self.tables.read();
        let mut of_place = tables.withheld.iter().filter(|it| (it.port, it.index) == (port, index));
        of_place.find_map(|it| it.entry.as_ref()).map(|entry| entry.gid)
    }
}

impl GidTables {
    /// The rule that withholds the address at a place.
    pub(crate) fn withheld_by(&self, port: usize, index: usize) -> Option<String> {
        let tables = self.tables.read();
        let is_it = |it: &&Withheld| (it.port, it.index) == (port, index) && it.entry.is_some();
        tables.withheld.iter().find(is_it).map(|it| it.rule.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use anyverbs_locks::RwLock;
    use anyverbs_proto::types::Mtu;

    use super::*;
    use crate::gid::GidKind;

    #[test]
    fn an_entry_that_is_withheld_comes_back_to_its_place() {
        let of = |index| Some(GidEntry { index, ..entry(index) });
        let ports = vec![vec![of(0), of(1), of(2), None]; 2];
        let tables = RwLock::new(Tables { ports, withheld: Vec::new() });
        let host = RwLock::default();
        let gids = GidTables {
            tables,
            host,
            sources: Vec::new(),
            shapes: Vec::new(),
            owners: Vec::new(),
            mtus: Vec::new(),
        };
        let there = || [0, 1, 2].map(|index| gids.entry(1, index).is_some());
        assert_eq!(gids.withhold(1, 1, "line 1".into()), [1]);
        assert_eq!((there(), gids.entry(0, 1)), ([true, false, true], of(1)));
        assert_eq!(gids.withheld(1, 1), Some(entry(1).gid));
        let by = |port, index| gids.withheld_by(port, index);
        assert_eq!([by(1, 1), by(1, 0), by(0, 1)], [Some("line 1".into()), None, None]);
        let index = |port, n| gids.withheld_index(port, entry(n).gid);
        assert_eq!([index(1, 1), index(0, 1), index(1, 0)], [Some(1), None, None]);
        // Two rules may be about one address.
        assert_eq!(gids.withhold(1, 1, "line 1".into()), [0; 0]);
        assert_eq!(gids.withhold(1, 2, "line 1".into()), [1]);
        assert_eq!(gids.give_back(1, 1), [0; 0]);
        assert_eq!((there(), gids.withheld(1, 1)), ([true, false, false], Some(entry(1).gid)));
        assert_eq!(gids.give_back(1, 1), [1]);
        assert_eq!((there(), gids.withheld(1, 1)), ([true, true, false], None));
        assert_eq!(gids.withhold(0, 0, "line 1".into()), [0]);
        assert_eq!(gids.give_all_back(), [0, 1]);
        assert_eq!([1, 2].map(|index| gids.entry(1, index)), [of(1), of(2)]);
        for (port, index) in [(1, 3), (1, 99), (9, 0)] {
            assert_eq!(gids.withhold(port, index, "line 1".into()), [0; 0]);
            assert_eq!(gids.withheld(port, index), None);
        }
        assert_eq!(there(), [true; 3]);
    }

    fn entry(index: usize) -> GidEntry {
        let ip: IpAddr = format!("10.0.0.{index}").parse().unwrap();
        GidEntry {
            device: 0,
            port: 2,
            index,
            gid: ip.into(),
            kind: GidKind::RoceV2,
            interface: 1,
            interface_name: "eth0".into(),
            mtu: Mtu::Mtu1024,
            link_mtu: 1500,
        }
    }
}
