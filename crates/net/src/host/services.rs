//! Services of a host: numbers that one process at a time holds, at one address or at all addresses, and their holders.
//!
//! The holder of a service has an entry in the store ([`super::table`]). So a process that looks for the holder reads
//! memory. If it finds one, it makes one system call to see whether that process lives. Reserving is done under the
//! store's lock of entries.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyverbs_locks::{Mutex, rank};

use super::slot::Slot;
use super::store::{Lock, LockGuard, Said, Store};
use super::table::{Entry, Fact, Kind};
use crate::random_u64;
use crate::sys::Uncancelled;

/// Services that this process says it has left, at most.
const LEFT: usize = 16;
/// Linux's `net.ipv4.ip_local_port_range` where it cannot be read.
const EPHEMERAL: (u16, u16) = (32_768, 60_999);

/// The place at which a service is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum ServiceAddress {
    /// At every address.
    Any,
    /// At every IPv4 address.
    AnyV4,
    /// At every IPv6 address.
    AnyV6,
    /// At one address.
    Ip(IpAddr),
}

impl ServiceAddress {
    /// Whether a service that is held here answers at `address`.
    #[must_use]
    pub fn covers(self, address: IpAddr) -> bool {
        self.conflicts(Self::Ip(address))
    }

    /// Whether a service cannot be held at both.
    #[must_use]
    pub fn conflicts(self, other: Self) -> bool {
        match (self, other) {
            (Self::Any, _) | (_, Self::Any) => true,
            (Self::Ip(a), Self::Ip(b)) => a == b,
            (a, b) => a.is_ipv4() == b.is_ipv4(),
        }
    }

    fn is_ipv4(self) -> bool {
        match self {
            Self::AnyV4 => true,
            Self::Ip(ip) => ip.is_ipv4(),
            Self::Any | Self::AnyV6 => false,
        }
    }

    /// As an entry has it.
    fn emit(self) -> (u8, u128) {
        match self {
            Self::Any => (0, 0),
            Self::AnyV4 => (1, 0),
            Self::AnyV6 => (2, 0),
            Self::Ip(IpAddr::V4(ip)) => (3, ip.to_bits().into()),
            Self::Ip(IpAddr::V6(ip)) => (4, ip.to_bits()),
        }
    }

    fn parse(form: u8, details: u128) -> Option<Self> {
        Some(match form {
            0 => Self::Any,
            1 => Self::AnyV4,
            2 => Self::AnyV6,
            3 => Self::Ip(Ipv4Addr::from_bits(u32::try_from(details).ok()?).into()),
            4 => Self::Ip(Ipv6Addr::from_bits(details).into()),
            _ => return None,
        })
    }
}

/// The services of a host, as one process sees them.
#[derive(Debug)]
pub struct Services {
    slot: Arc<Slot>,
    /// Services that this process has left, and until when others should know.
    left: Mutex<rank::ServicesLeft, VecDeque<(u64, Instant, Said)>>,
}

/// A service that this process holds at an address until this is dropped.
#[derive(Debug)]
pub struct Reservation {
    services: Arc<Services>,
    service: u64,
    address: ServiceAddress,
    held: Mutex<rank::ServiceHeld, (Kind, Said)>,
}

/// See [`Services::linger`].
#[derive(Debug)]
pub struct Lingering(Arc<Slot>);

impl Services {
    /// The services of the store of `slot`.
    #[must_use]
    pub fn new(slot: Arc<Slot>) -> Arc<Self> {
        Arc::new(Self { slot, left: Mutex::default() })
    }

    /// The store of the services.
    #[must_use]
    pub fn store(&self) -> &Arc<Store> {
        self.slot.store()
    }

    fn lock(&self) -> io::Result<LockGuard> {
        self.store().lock(Lock::Entries)
    }

    /// Takes a service at an address, alone or shared.
    ///
    /// # Errors
    /// When another reservation conflicts, of this process or another, unless both are shared: `AddrInUse` if it is of the same
    /// address, `AddrNotAvailable` if one of the two is a wildcard (as Linux has it). `TimedOut` when another process does not
    /// get done; `StorageFull`.
    pub fn reserve(
        self: &Arc<Self>,
        service: u64,
        address: ServiceAddress,
        share: bool,
    ) -> io::Result<Reservation> {
        let _uncancelled = Uncancelled::new();
        let lock = self.lock()?;
        self.refuse_conflicts(service, address, share, None)?;
        self.take(service, address, share, &lock)
    }

    /// Takes a service of those that `service` gives for a port: a free one of `net.ipv4.ip_local_port_range`, searched
    /// from a random place on. It is taken alone, or shared with processes that come later.
    ///
    /// # Errors
    /// `AddrNotAvailable` when all are taken; those of [`reserve`](Self::reserve).
    pub fn reserve_ephemeral(
        self: &Arc<Self>,
        service: impl Fn(u16) -> u64,
        address: ServiceAddress,
        share: bool,
    ) -> io::Result<(u16, Reservation)> {
        let _uncancelled = Uncancelled::new();
        // Without the lock: a process that is stopped while it has it holds up the others.
        let mut ports = ephemeral_ports();
        let lock = self.lock()?;
        let is_free =
            |port: &u16| self.refuse_conflicts(service(*port), address, false, None).is_ok();
        let port = ports.find(is_free).ok_or_else(|| {
            io::Error::new(io::ErrorKind::AddrNotAvailable, "all ephemeral ports are taken")
        })?;
        Ok((port, self.take(service(port), address, share, &lock)?))
    }

    fn take(
        self: &Arc<Self>,
        service: u64,
        address: ServiceAddress,
        share: bool,
        lock: &LockGuard,
    ) -> io::Result<Reservation> {
        let kind = if share { Kind::Shared } else { Kind::Exclusive };
        let said = self.say(kind, service, address, lock)?;
        let held = Mutex::new((kind, said));
        Ok(Reservation { services: Arc::clone(self), service, address, held })
    }

    fn say(
        &self,
        kind: Kind,
        service: u64,
        address: ServiceAddress,
        lock: &LockGuard,
    ) -> io::Result<Said> {
        let (form, details) = address.emit();
        let fact = Fact { kind, number: service, form, details };
        self.store().say(fact, self.slot.number(), lock)
    }

    /// The reservations of a service, of those that live.
    fn held(&self, service: u64) -> impl Iterator<Item = (Entry, ServiceAddress)> {
        let is_held = |e: &Entry| matches!(e.fact.kind, Kind::Exclusive | Kind::Shared);
        let entries = self.store().find_entries(service, is_held);
        entries.filter_map(|e| Some((e, ServiceAddress::parse(e.fact.form, e.fact.details)?)))
    }

    /// Fails if an entry other than `mine` conflicts.
    fn refuse_conflicts(
        &self,
        service: u64,
        address: ServiceAddress,
        share: bool,
        mine: Option<usize>,
    ) -> io::Result<()> {
        let conflicting = self.held(service).filter(|(entry, at)| {
            let both_share = share && entry.fact.kind == Kind::Shared;
            Some(entry.at) != mine && !both_share && address.conflicts(*at)
        });
        match conflicting.map(|(_, at)| at).min() {
            None => Ok(()),
            // An entry of the same address tells more than a wildcard, and the two do not coexist.
            Some(ServiceAddress::Ip(_)) if matches!(address, ServiceAddress::Ip(_)) => {
                Err(io::ErrorKind::AddrInUse.into())
            }
            Some(_) => Err(io::ErrorKind::AddrNotAvailable.into()),
        }
    }

    /// The slot of the process that holds a service at `address`, alone. A snapshot.
    #[must_use]
    pub fn holder(&self, service: u64, address: IpAddr) -> Option<u8> {
        let mut holders = self
            .held(service)
            .filter(|(entry, at)| entry.fact.kind == Kind::Exclusive && at.covers(address));
        holders.next().map(|(entry, _)| entry.slot)
    }

    /// Announces that this process may be asked for services that it does not hold any more, until the value is
    /// dropped. One at a time.
    #[must_use]
    pub fn linger(&self) -> Lingering {
        self.store().table().set_lingers(self.slot.number(), true);
        Lingering(Arc::clone(&self.slot))
    }

    /// The slots of other processes that linger, in ascending order.
    #[must_use]
    pub fn lingering(&self) -> Vec<u8> {
        let others = (1..=255).filter(|slot| *slot != self.slot.number());
        let store = self.store();
        others.filter(|slot| store.table().lingers(*slot) && store.is_alive(*slot)).collect()
    }

    /// Announces for `time` that this process has given up a service, and may take it again soon. The announcement
    /// lasts until [`forget_left`](Self::forget_left) is called after that.
    ///
    /// # Errors
    /// `TimedOut`, `StorageFull`.
    pub fn leave(&self, service: u64, time: Duration) -> io::Result<()> {
        let _uncancelled = Uncancelled::new();
        let until = Instant::now() + time;
        // It may have announced that already.
        let known = {
            let mut left = self.left.lock();
            let at = left.iter().position(|(known, ..)| *known == service);
            at.and_then(|at| left.remove(at))
        };
        // Without `left`: timers take that, and the lock of the store is waited for.
        let said = match known {
            Some((_, _, said)) => said,
            None => self.say(Kind::Left, service, ServiceAddress::Any, &self.lock()?)?,
        };
        let mut left = self.left.lock();
        if left.len() >= LEFT {
            left.pop_front();
        }
        left.push_back((service, until, said));
        Ok(())
    }

    /// Removes notices that are past. Returns the time for which others remain.
    pub fn forget_left(&self) -> Option<Duration> {
        let mut left = self.left.lock();
        let now = Instant::now();
        left.retain(|(_, until, _)| *until > now);
        left.front().map(|(_, until, _)| until.duration_since(now))
    }

    /// Whether a process has given up a service of late: see [`leave`](Self::leave).
    #[must_use]
    pub fn was_left(&self, service: u64) -> bool {
        self.store().find_entries(service, |e| e.fact.kind == Kind::Left).next().is_some()
    }
}

impl Reservation {
    /// Stops sharing, as a listener wants.
    ///
    /// # Errors
    /// As [`Services::reserve`], while another shares it or holds it at a conflicting address; it stays shared then.
    pub fn make_exclusive(&self) -> io::Result<()> {
        let _uncancelled = Uncancelled::new();
        let (kind, said) = &mut *self.held.lock();
        if *kind == Kind::Exclusive {
            return Ok(());
        }
        let (services, service, address) = (&self.services, self.service, self.address);
        let lock = services.lock()?;
        services.refuse_conflicts(service, address, false, Some(said.at()))?;
        let exclusive = services.say(Kind::Exclusive, service, address, &lock)?;
        (*kind, *said) = (Kind::Exclusive, exclusive);
        Ok(())
    }
}

/// The ports of `net.ipv4.ip_local_port_range`, each once, from a random place on.
pub fn ephemeral_ports() -> impl Iterator<Item = u16> {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok();
    let range = range.and_then(|text| {
        let mut words = text.split_ascii_whitespace().map(str::parse);
        Some((words.next()?.ok()?, words.next()?.ok()?))
    });
    let (low, high): (u16, u16) = range.filter(|(low, high)| low <= high).unwrap_or(EPHEMERAL);
    let n = u32::from(high - low) + 1;
    let start = (random_u64() % u64::from(n)) as u32;
    // Below 2^16, since `high` is.
    (0..n).map(move |i| low + ((start + i) % n) as u16)
}

impl Drop for Lingering {
    fn drop(&mut self) {
        if self.0.store().is_own() {
            self.0.store().table().set_lingers(self.0.number(), false);
        }
    }
}

#[cfg(test)]
mod tests;
