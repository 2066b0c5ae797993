//! Services of a host: names that one process at a time holds, at an address or at all, and who holds one.
//!
//! A service is a number (a port of some port space, for instance). Who reserves it at an address binds the abstract Unix
//! name `<registry>/s/<service>/<address>/<slot>`, or `...s` while it shares it; so a process that ends
//! holds nothing, and who looks for a service's holder asks for the names of the live slots, which takes a system call each.
//! Reserving is done under a lock of the service, another such name.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::Hash;
use std::io;
use std::net::IpAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::registry::{self, NameGuard, Registry, Slot};
use crate::sys::Uncancelled;

/// How long reserving waits for another process that reserves the same service.
const LOCK_WAIT: Duration = Duration::from_millis(250);
/// How long a list of the live slots is good for when an answer may be late, but not wrong.
const FRESH: Duration = Duration::from_millis(50);
/// How long it is good for, when a service is not found among those, in looking for processes that began since.
const MISS_FRESH: Duration = Duration::from_millis(4);
/// How long nobody holds a service that nobody held.
const ABSENT: Duration = Duration::from_micros(800);
/// Services that this process says it has left, at most: each costs a descriptor.
const LEFT: usize = 16;
/// Services whose holders are remembered.
const REMEMBERED: usize = 1024;
/// Linux's `net.ipv4.ip_local_port_range` where it cannot be read.
const EPHEMERAL: (u16, u16) = (32_768, 60_999);

/// Where a service is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum ServiceAddress {
    /// At every address.
    Any,
    /// At every IPv4 address.
    AnyV4,
    /// At every IPv6 address.
    AnyV6,
    /// At one.
    Ip(IpAddr),
}

impl ServiceAddress {
    /// Where a service may be held that answers at `address`.
    #[must_use]
    pub fn candidates(address: IpAddr) -> [Self; 3] {
        let family = if address.is_ipv4() { Self::AnyV4 } else { Self::AnyV6 };
        [Self::Ip(address), family, Self::Any]
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
}

impl std::fmt::Display for ServiceAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Any => f.write_str("any"),
            Self::AnyV4 => f.write_str("any4"),
            Self::AnyV6 => f.write_str("any6"),
            Self::Ip(ip) => ip.fmt(f),
        }
    }
}

type Name = (u64, ServiceAddress);

/// The services of a host, as one process sees them.
#[derive(Debug)]
pub struct Services {
    slot: Arc<Slot>,
    /// By which names are looked up; one at a time, since a connect takes two steps. Made at the start, so that a process that
    /// runs out of descriptors still knows the others.
    probe: OnceLock<Mutex<UnixDatagram>>,
    own: Mutex<Own>,
    live: Mutex<(Option<Instant>, Vec<u8>)>,
    /// Where a service at an address was found last: asked first.
    holders: Mutex<HashMap<(u64, IpAddr), (u8, ServiceAddress)>>,
    /// Where nobody held a service, and when.
    absent: Mutex<HashMap<(u64, IpAddr), Instant>>,
    /// What this process has left, and until when others should know.
    left: Mutex<VecDeque<(u64, Instant, NameGuard)>>,
    /// What nobody had left, and when.
    unknown: Mutex<HashMap<u64, Instant>>,
    #[cfg(test)]
    lookups: std::sync::atomic::AtomicUsize,
}

/// What this process holds.
#[derive(Debug, Default)]
struct Own {
    exclusive: HashSet<Name>,
    /// One guard for all of this process that share a name.
    shared: HashMap<Name, Weak<NameGuard>>,
}

/// A service that this process holds at an address until this is dropped.
#[derive(Debug)]
pub struct Reservation {
    services: Arc<Services>,
    name: Name,
    /// `None` only after drop.
    guard: Mutex<Option<Guard>>,
}

/// See [`Services::linger`].
#[derive(Debug)]
pub struct Lingering {
    _name: NameGuard,
}

#[derive(Debug)]
enum Guard {
    Exclusive { _name: NameGuard },
    Shared(Arc<NameGuard>),
}

impl Services {
    /// Those of the registry of `slot`.
    #[must_use]
    pub fn new(slot: Arc<Slot>) -> Arc<Self> {
        let probe = UnixDatagram::unbound().map(|probe| OnceLock::from(Mutex::new(probe)));
        Arc::new(Self {
            slot,
            probe: probe.unwrap_or_default(),
            own: Mutex::default(),
            live: Mutex::default(),
            holders: Mutex::default(),
            absent: Mutex::default(),
            left: Mutex::default(),
            unknown: Mutex::default(),
            #[cfg(test)]
            lookups: std::sync::atomic::AtomicUsize::new(0),
        })
    }

    /// Where their names are.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        self.slot.registry()
    }

    /// Takes a service at an address: alone, or with others who share it. `locals` are the addresses of this host: only
    /// there a wildcard's conflicts are looked for.
    ///
    /// # Errors
    /// When another reservation conflicts, of this process or another, unless both are shared: `AddrInUse` if it is of the same
    /// address, `AddrNotAvailable` if one of the two is a wildcard (as Linux has it). `TimedOut` when another process does not
    /// get done; those of socket(2).
    pub fn reserve(
        self: &Arc<Self>,
        service: u64,
        address: ServiceAddress,
        share: bool,
        locals: &[IpAddr],
    ) -> io::Result<Reservation> {
        self.take((service, address), share, share, locals, LOCK_WAIT)
    }

    /// As [`reserve`](Self::reserve). `others_share`: who shares it is no conflict.
    fn take(
        self: &Arc<Self>,
        name: Name,
        share: bool,
        others_share: bool,
        locals: &[IpAddr],
        patience: Duration,
    ) -> io::Result<Reservation> {
        let _uncancelled = Uncancelled::new();
        let _lock = self.lock(name.0, patience)?;
        self.refuse_conflicts(name, others_share, locals, None)?;
        let mut own = self.own.lock();
        let guard = if share {
            let guard = match own.shared.get(&name).and_then(Weak::upgrade) {
                Some(guard) => guard,
                None => Arc::new(self.slot.registry().hold(&self.shared_name(name))?),
            };
            own.shared.insert(name, Arc::downgrade(&guard));
            Guard::Shared(guard)
        } else {
            self.hold(&mut own, name)?
        };
        Ok(Reservation { services: Arc::clone(self), name, guard: Mutex::new(Some(guard)) })
    }

    /// Takes a service of those that `service` gives for a port: a free one of `net.ipv4.ip_local_port_range`, from a random
    /// place on. Alone, or to be shared with those who come later. One that another is just reserving is passed over.
    ///
    /// # Errors
    /// `AddrNotAvailable` when all are taken; those of [`reserve`](Self::reserve).
    pub fn reserve_ephemeral(
        self: &Arc<Self>,
        service: impl Fn(u16) -> u64,
        address: ServiceAddress,
        share: bool,
        locals: &[IpAddr],
    ) -> io::Result<(u16, Reservation)> {
        for port in ephemeral_ports() {
            match self.take((service(port), address), share, false, locals, Duration::ZERO) {
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::AddrInUse
                            | io::ErrorKind::AddrNotAvailable
                            | io::ErrorKind::TimedOut
                    ) => {}
                result => return result.map(|reservation| (port, reservation)),
            }
        }
        Err(io::Error::new(io::ErrorKind::AddrNotAvailable, "all ephemeral ports are taken"))
    }

    /// The slot of the process that holds a service at `address`, alone. A snapshot: who began to hold it less than 1 ms ago, or
    /// started less than 4 ms ago, may not be found yet, so that many may ask for what nobody holds.
    #[must_use]
    pub fn holder(&self, service: u64, address: IpAddr) -> Option<u8> {
        let candidates = ServiceAddress::candidates(address);
        let own = self.own.lock();
        if candidates.iter().any(|&at| own.exclusive.contains(&(service, at))) {
            return Some(self.slot.number());
        }
        drop(own);
        let key = (service, address);
        let known = self.holders.lock().get(&key).copied();
        if let Some((slot, at)) = known {
            if self.is_held(&self.name((service, at), slot)) {
                return Some(slot);
            }
            self.holders.lock().remove(&key);
        } else if self.absent.lock().get(&key).is_some_and(|since| since.elapsed() < ABSENT) {
            return None;
        }
        // What is not among those who lived a moment ago may have begun since.
        let recent = self.live_slots(FRESH);
        let find = |slots: &[u8]| {
            slots.iter().copied().find_map(|slot| {
                let at = candidates
                    .into_iter()
                    .find(|&at| self.is_held(&self.name((service, at), slot)))?;
                Some((slot, at))
            })
        };
        let found = find(&recent).or_else(|| {
            let mut new = self.live_slots(MISS_FRESH);
            new.retain(|slot| !recent.contains(slot));
            find(&new)
        });
        let Some((slot, at)) = found else {
            remember(&mut self.absent.lock(), key, Instant::now());
            return None;
        };
        remember(&mut self.holders.lock(), key, (slot, at));
        Some(slot)
    }

    /// This process may be asked for services that it does not hold any more, until the value is dropped. One at a time.
    ///
    /// # Errors
    /// Those of socket(2) and bind(2).
    pub fn linger(&self) -> io::Result<Lingering> {
        let name = lingering_name(self.slot.number());
        Ok(Lingering { _name: self.slot.registry().hold(&name)? })
    }

    /// The slots of other processes that linger, in ascending order, as they were at most `age` ago.
    #[must_use]
    pub fn lingering(&self, age: Duration) -> Vec<u8> {
        let others = self.live_slots(age).into_iter().filter(|slot| *slot != self.slot.number());
        others.filter(|slot| self.is_held(&lingering_name(*slot))).collect()
    }

    /// This process has given up a service, and may take it again soon: says so for `time`, until
    /// [`forget_left`](Self::forget_left) is called after that.
    ///
    /// # Errors
    /// Those of socket(2) and bind(2).
    pub fn leave(&self, service: u64, time: Duration) -> io::Result<()> {
        let _uncancelled = Uncancelled::new();
        let mut left = self.left.lock();
        let until = Instant::now() + time;
        // Its name is bound already.
        let known = left.iter().position(|(known, ..)| *known == service);
        let name = match known.and_then(|at| left.remove(at)) {
            Some((_, _, name)) => name,
            None => self.slot.registry().hold(&left_name(service, self.slot.number()))?,
        };
        if left.len() >= LEFT {
            left.pop_front();
        }
        left.push_back((service, until, name));
        Ok(())
    }

    /// Says no longer what is past. For how long there is something to say.
    pub fn forget_left(&self) -> Option<Duration> {
        let _uncancelled = Uncancelled::new();
        let mut left = self.left.lock();
        let now = Instant::now();
        left.retain(|(_, until, _)| *until > now);
        left.front().map(|(_, until, _)| until.duration_since(now))
    }

    /// Whether a process has given up a service of late: see [`leave`](Self::leave).
    #[must_use]
    pub fn was_left(&self, service: u64) -> bool {
        if self.unknown.lock().get(&service).is_some_and(|since| since.elapsed() < ABSENT) {
            return false;
        }
        let mut slots = self.live_slots(FRESH).into_iter();
        let was_left = slots.any(|slot| self.is_held(&left_name(service, slot)));
        if !was_left {
            remember(&mut self.unknown.lock(), service, Instant::now());
        }
        was_left
    }

    /// The slots of all live processes, in ascending order, as they were at most `age` ago.
    #[must_use]
    pub fn live_slots(&self, age: Duration) -> Vec<u8> {
        let _uncancelled = Uncancelled::new();
        let mut live = self.live.lock();
        let now = Instant::now();
        if live.0.is_none_or(|at| now.duration_since(at) > age) {
            #[cfg(test)]
            self.lookups.fetch_add(255, std::sync::atomic::Ordering::Relaxed);
            match self.probe().and_then(|p| self.slot.registry().live_slots_by(&p.lock())) {
                Ok(slots) => *live = (Some(now), slots),
                Err(error) => tracing::debug!(%error, "the host's processes were not listed"),
            }
        }
        live.1.clone()
    }

    /// Whether some process holds a slot.
    ///
    /// # Errors
    /// As [`crate::Registry::is_alive`].
    pub fn is_alive(&self, slot: u8) -> io::Result<bool> {
        let _uncancelled = Uncancelled::new();
        Ok(slot == self.slot.number()
            || self.slot.registry().is_alive_by(&self.probe()?.lock(), slot)?)
    }

    /// As [`crate::Registry::incarnations`].
    ///
    /// # Errors
    /// As there.
    pub fn incarnations(&self) -> io::Result<HashMap<u8, u64>> {
        let _uncancelled = Uncancelled::new();
        self.slot.registry().incarnations()
    }

    fn probe(&self) -> io::Result<&Mutex<UnixDatagram>> {
        if let Some(probe) = self.probe.get() {
            return Ok(probe);
        }
        let probe = UnixDatagram::unbound()?;
        Ok(self.probe.get_or_init(|| Mutex::new(probe)))
    }

    /// Excludes who else reserves this service.
    fn lock(&self, service: u64, patience: Duration) -> io::Result<NameGuard> {
        let name = format!("s/{service:x}/lock");
        let deadline = Instant::now() + patience;
        loop {
            match self.slot.registry().hold(&name) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    if Instant::now() >= deadline {
                        return Err(io::Error::new(
                            io::ErrorKind::TimedOut,
                            "another process holds the lock of this service",
                        ));
                    }
                    std::thread::sleep(Duration::from_micros(200));
                }
                result => return result,
            }
        }
    }

    /// Looks at the names of all that `name` conflicts with, `mine` excepted.
    fn refuse_conflicts(
        &self,
        name: Name,
        share: bool,
        locals: &[IpAddr],
        mine: Option<&str>,
    ) -> io::Result<()> {
        let (service, address) = name;
        let held = |name: &str| Some(name) != mine && self.is_held(name);
        let wildcards = [ServiceAddress::Any, ServiceAddress::AnyV4, ServiceAddress::AnyV6];
        let all = wildcards.into_iter().chain(locals.iter().map(|&ip| ServiceAddress::Ip(ip)));
        let mut others: Vec<_> =
            all.chain([address]).filter(|other| address.conflicts(*other)).collect();
        others.sort_unstable();
        others.dedup();
        let slots = self.live_slots(Duration::ZERO);
        let taken = others.into_iter().find(|&other| {
            slots.iter().any(|&slot| {
                held(&self.name((service, other), slot))
                    || (!share && held(&self.shared_in((service, other), slot)))
            })
        });
        taken.map_or(Ok(()), |other| Err(conflict(address, other).into()))
    }

    fn hold(&self, own: &mut Own, name: Name) -> io::Result<Guard> {
        let guard = self.slot.registry().hold(&self.name(name, self.slot.number()))?;
        own.exclusive.insert(name);
        Ok(Guard::Exclusive { _name: guard })
    }

    fn name(&self, (service, address): Name, slot: u8) -> String {
        format!("s/{service:x}/{address}/{slot}")
    }

    fn shared_name(&self, name: Name) -> String {
        self.shared_in(name, self.slot.number())
    }

    fn shared_in(&self, (service, address): Name, slot: u8) -> String {
        format!("s/{service:x}/{address}/{slot}s")
    }

    /// Whether somebody has bound a name.
    fn is_held(&self, name: &str) -> bool {
        let _uncancelled = Uncancelled::new();
        #[cfg(test)]
        self.lookups.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let full = format!("{}/{name}", self.slot.registry().prefix());
        let address = SocketAddr::from_abstract_name(full);
        let held = address.and_then(|a| registry::is_bound(&self.probe()?.lock(), &a));
        held.unwrap_or_default()
    }
}

fn remember<K: Eq + Hash, T>(table: &mut HashMap<K, T>, key: K, value: T) {
    if table.len() >= REMEMBERED {
        table.clear();
    }
    table.insert(key, value);
}

/// What is said to who wants `wanted` while another has `held`.
fn conflict(wanted: ServiceAddress, held: ServiceAddress) -> io::ErrorKind {
    match (wanted, held) {
        (ServiceAddress::Ip(_), ServiceAddress::Ip(_)) => io::ErrorKind::AddrInUse,
        _ => io::ErrorKind::AddrNotAvailable,
    }
}

fn left_name(service: u64, slot: u8) -> String {
    format!("s/{service:x}/left/{slot}")
}

fn lingering_name(slot: u8) -> String {
    format!("lingering/{slot}")
}

impl Reservation {
    /// Nobody shares it any more from here on: what a listener wants.
    ///
    /// # Errors
    /// As [`Services::reserve`], while another shares it or holds it at a conflicting address; it stays shared then.
    pub fn make_exclusive(&self, locals: &[IpAddr]) -> io::Result<()> {
        let _uncancelled = Uncancelled::new();
        let mut guard = self.guard.lock();
        let Some(Guard::Shared(shared)) = &*guard else { return Ok(()) };
        let _lock = self.services.lock(self.name.0, LOCK_WAIT)?;
        let own = self.services.own.lock();
        if Arc::strong_count(shared) > 1 {
            return Err(conflict(self.name.1, self.name.1).into());
        }
        drop(own);
        let mine = self.services.shared_name(self.name);
        self.services.refuse_conflicts(self.name, false, locals, Some(&mine))?;
        let mut own = self.services.own.lock();
        own.shared.remove(&self.name);
        *guard = Some(self.services.hold(&mut own, self.name)?);
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
    let start = (registry::random_u64() % u64::from(n)) as u32;
    // Below 2^16, since `high` is.
    (0..n).map(move |i| low + ((start + i) % n) as u16)
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let _uncancelled = Uncancelled::new();
        let mut own = self.services.own.lock();
        // Under the lock: what `own` does not have nobody of this process has bound.
        let guard = self.guard.get_mut().take();
        match &guard {
            Some(Guard::Exclusive { .. }) => drop(own.exclusive.remove(&self.name)),
            Some(Guard::Shared(guard)) if Arc::strong_count(guard) == 1 => {
                own.shared.remove(&self.name);
            }
            Some(Guard::Shared(_)) | None => {}
        }
        drop(guard);
    }
}

#[cfg(test)]
mod tests;
