//! Listeners, which answer for a service at an address.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::id::ServiceId;
use super::params::{Listen, ListenAddress};

/// A listener's handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct ListenerId(u64);

#[derive(Debug)]
pub(super) struct Listener {
    pub(super) listen: Listen,
    /// Requests that the program has not taken yet.
    pub(super) waiting: usize,
}

impl Listener {
    pub(super) fn is_full(&self) -> bool {
        self.waiting >= self.listen.backlog
    }
}

/// The listeners.
#[derive(Debug, Default)]
pub(super) struct Listeners {
    by_id: BTreeMap<ListenerId, Listener>,
    by_name: BTreeMap<(ServiceId, ListenAddress), ListenerId>,
    next: u64,
}

impl Listeners {
    /// Adds one; `None` if the name is taken.
    pub(super) fn add(&mut self, listen: Listen) -> Option<ListenerId> {
        let name = (listen.service_id, listen.address);
        if self.by_name.contains_key(&name) {
            return None;
        }
        let id = ListenerId(self.next);
        self.next += 1;
        self.by_name.insert(name, id);
        self.by_id.insert(id, Listener { listen, waiting: 0 });
        Some(id)
    }

    pub(super) fn remove(&mut self, id: ListenerId) -> bool {
        let Some(listener) = self.by_id.remove(&id) else { return false };
        self.by_name.remove(&(listener.listen.service_id, listener.listen.address));
        true
    }

    pub(super) fn get_mut(&mut self, id: ListenerId) -> Option<&mut Listener> {
        self.by_id.get_mut(&id)
    }

    /// Finds a listener for a service at any address. It tells whether requests carry an IP CM header.
    pub(super) fn any_of(&self, service_id: ServiceId) -> Option<&Listener> {
        let least = (service_id, ListenAddress::Any);
        let (name, id) = self.by_name.range(least..).next()?;
        (name.0 == service_id).then(|| self.by_id.get(id)).flatten()
    }

    /// Finds the listener for a service at an address: the most specific one.
    pub(super) fn find(
        &mut self,
        service_id: ServiceId,
        destination: IpAddr,
    ) -> Option<(ListenerId, &mut Listener)> {
        let mut names = ListenAddress::candidates(destination).into_iter();
        let id = names.find_map(|address| self.by_name.get(&(service_id, address)))?;
        self.by_id.get_mut(id).map(|listener| (*id, listener))
    }

    pub(super) fn ids(&self) -> Vec<ListenerId> {
        self.by_id.keys().copied().collect()
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cm::params::{Serves, Transport};

    #[test]
    fn the_most_particular_listener_answers() {
        let mut listeners = Listeners::default();
        let mut add = |address| {
            listeners.add(Listen {
                service_id: ServiceId(5),
                address,
                serves: Serves::Connections(Transport::Rc),
                ip_header: true,
                backlog: 1,
            })
        };
        let v4: IpAddr = "10.0.0.1".parse().unwrap();
        let any = add(ListenAddress::Any).unwrap();
        let any_v4 = add(ListenAddress::AnyV4).unwrap();
        let one = add(ListenAddress::Ip(v4)).unwrap();
        assert_eq!(add(ListenAddress::Ip(v4)), None, "taken");
        let mut find = |address: &str| {
            listeners.find(ServiceId(5), address.parse().unwrap()).map(|(id, _)| id)
        };
        assert_eq!(find("10.0.0.1"), Some(one));
        assert_eq!(find("10.0.0.2"), Some(any_v4));
        assert_eq!(find("fd00::1"), Some(any));
        assert!(listeners.any_of(ServiceId(4)).is_none());
        assert!(listeners.any_of(ServiceId(6)).is_none());
        assert!(listeners.remove(any) && !listeners.remove(any));
        assert!(listeners.find(ServiceId(5), "fd00::1".parse().unwrap()).is_none());
        assert!(listeners.any_of(ServiceId(5)).is_some());
    }
}
