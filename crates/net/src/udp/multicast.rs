//! Multicast groups: what this process has joined, and where the kernel alone does not do.
//!
//! Every socket of the port that joined a group gets a copy of its datagrams, the sender's own included
//! (`IP_MULTICAST_LOOP`); steering has no part in it. Two things the kernel does not give:
//!
//! - One socket has room for few memberships: 20 over IPv4 (`net.ipv4.igmp_max_memberships`), over IPv6 what fits into
//!   `net.core.optmem_max`. Beyond, further sockets join, and the receiving one takes every group that anybody of the
//!   host has joined: the reader has to tell its own ones anyway.
//! - IPv6 has no multicast route over the loopback interface. A datagram for a group there is to be handed on to all
//!   [`UdpPort::sharers`] by their slots' sockets ([`UdpPort::forward`]).
//!
//! Who has other ways to the processes of this host asks for the [`Members`] of a group. Those that a list in shared memory names
//! ([`super::roster`]) are all where the kernel counts as many memberships: processes of other users or registries, and such as
//! have nothing to do with this crate, are in its count only.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use socket2::{Domain, InterfaceIndexOrAddress, Protocol, Socket, Type};

use crate::sockopt;
use crate::sys::Uncancelled;

use super::port::IPV6_MULTICAST_ALL;
use super::roster::Roster;
use super::{Family, UdpPort};

/// Index of the loopback interface, the same in every network namespace (`LOOPBACK_IFINDEX`).
pub const LOOPBACK: u32 = 1;

/// How long it is not tried to join the host's list after that has failed.
const PAUSE: Duration = Duration::from_secs(1);

/// What this process has joined.
#[derive(Debug, Default)]
pub(crate) struct Memberships {
    inner: Mutex<Inner>,
    /// Set under the lock of `inner`.
    roster: OnceLock<Roster>,
}

#[derive(Debug, Default)]
struct Inner {
    joined: HashMap<(IpAddr, u32), Membership>,
    /// Sockets that do nothing but join, by family.
    helpers: [Vec<Arc<Socket>>; 2],
    /// When it is tried again to join the list of the host, if that failed.
    again_at: Option<Instant>,
}

#[derive(Debug)]
struct Membership {
    times: usize,
    holder: Holder,
}

/// Whose membership it is in the kernel.
#[derive(Debug)]
enum Holder {
    Receiver,
    Helper(Arc<Socket>),
    /// The kernel's it is not.
    Nobody,
}

impl Holder {
    /// What came of joining by the receiver, and `elsewhere` where that is full.
    fn of(
        joined: io::Result<()>,
        elsewhere: impl FnOnce() -> io::Result<Arc<Socket>>,
        is_handed_on: bool,
    ) -> io::Result<Self> {
        let holder = match joined {
            Err(error) if is_full(&error) => elsewhere().map(Self::Helper),
            joined => joined.map(|()| Self::Receiver),
        };
        match holder {
            // Nothing would come by it: it is for the count.
            Err(_) if is_handed_on => Ok(Self::Nobody),
            holder => holder,
        }
    }
}

/// Who of this host has joined a group on an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members {
    /// The slots of processes that share the port, this one perhaps among them; some may be of processes that have ended.
    pub slots: Vec<u8>,
    /// How many have joined, whoever they are.
    pub count: usize,
    /// What [`UdpPort::groups_generation`] was.
    pub generation: u64,
}

impl Inner {
    /// The list, once it is joined. After an error it is not tried again for a while: who sends would wait each time.
    fn join<'a>(
        &mut self,
        roster: &'a OnceLock<Roster>,
        now: impl Fn() -> Instant,
        join: impl FnOnce() -> io::Result<Roster>,
    ) -> io::Result<&'a Roster> {
        if let Some(roster) = roster.get() {
            return Ok(roster);
        }
        if self.again_at.is_some_and(|at| now() < at) {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, "tried a moment ago"));
        }
        let _uncancelled = Uncancelled::new();
        let joined = join().inspect_err(|_| self.again_at = Some(now() + PAUSE))?;
        Ok(roster.get_or_init(|| joined))
    }

    fn publish(&self, roster: Option<&Roster>) {
        if let Some(roster) = roster {
            roster.publish(self.joined.keys());
        }
    }
}

/// Whether a group of an interface is out of the kernel's reach, so that its datagrams have to be handed on.
#[must_use]
pub fn is_handed_on(group: IpAddr, interface: u32) -> bool {
    interface == LOOPBACK && group.is_ipv6() && group.is_multicast()
}

impl UdpPort {
    /// Joins a multicast group on an interface. Each join has its [`leave_multicast`](Self::leave_multicast).
    ///
    /// Joined are at least the groups asked for: who receives looks at [`Datagram::destination`](super::Datagram::destination).
    ///
    /// # Errors
    /// Those of setsockopt(2), `NoSuchDevice` for one; `Unsupported` when the port does not receive the group's family.
    pub fn join_multicast(&self, group: IpAddr, interface: u32) -> io::Result<()> {
        let receiver = self.socket_for(group)?;
        let mut inner = self.memberships.inner.lock();
        let Inner { joined, helpers, .. } = &mut *inner;
        if let Some(membership) = joined.get_mut(&(group, interface)) {
            membership.times += 1;
            return Ok(());
        }
        let family = Family::of(group);
        let elsewhere = || join_elsewhere(&mut helpers[family as usize], group, interface);
        let holder = Holder::of(
            join(receiver, group, interface),
            elsewhere,
            is_handed_on(group, interface),
        )?;
        if matches!(holder, Holder::Helper(_)) {
            take_all(receiver, family, true);
        }
        joined.insert((group, interface), Membership { times: 1, holder });
        self.list(&mut inner);
        Ok(())
    }

    /// Takes a join back.
    ///
    /// # Errors
    /// `AddrNotAvailable` when the group is not joined there, those of setsockopt(2); `Unsupported` when the port does not
    /// receive the group's family.
    pub fn leave_multicast(&self, group: IpAddr, interface: u32) -> io::Result<()> {
        let receiver = self.socket_for(group)?;
        let mut inner = self.memberships.inner.lock();
        let Inner { joined, .. } = &mut *inner;
        let Some(membership) = joined.get_mut(&(group, interface)) else {
            return Err(io::ErrorKind::AddrNotAvailable.into());
        };
        membership.times -= 1;
        if membership.times > 0 {
            return Ok(());
        }
        let family = Family::of(group);
        let left = joined.remove(&(group, interface));
        // First, so that nobody counts on it any more.
        self.list(&mut inner);
        let Inner { helpers, .. } = &mut *inner;
        match left.map(|m| m.holder) {
            Some(Holder::Receiver) => leave(receiver, group, interface),
            Some(Holder::Helper(socket)) => {
                let left = leave(&socket, group, interface);
                drop(socket);
                let helpers = &mut helpers[family as usize];
                helpers.retain(|helper| Arc::strong_count(helper) > 1);
                if helpers.is_empty() {
                    take_all(receiver, family, false);
                }
                left
            }
            Some(Holder::Nobody) | None => Ok(()),
        }
    }

    /// Tells the others what this process has joined.
    fn list(&self, inner: &mut Inner) {
        if let Err(error) = self.roster(inner).map(|roster| inner.publish(roster)) {
            tracing::debug!(%error, "this process's groups are not on the host's list");
        }
    }

    /// The host's list, joined with the first use of groups; `None` where the port is not shared.
    fn roster(&self, inner: &mut Inner) -> io::Result<Option<&Roster>> {
        let Some(slot) = self.slot() else { return Ok(None) };
        let join = || Roster::join(slot, self.port());
        inner.join(&self.memberships.roster, Instant::now, join).map(Some)
    }

    /// How often processes of this host have joined and left groups, as far as they share the list: a member that has joined before
    /// the call is in it. 0 before the list is joined.
    #[inline]
    #[must_use]
    pub fn groups_generation(&self) -> u64 {
        self.memberships.roster.get().map_or(0, Roster::generation)
    }

    /// Joins the host's list of groups, so that [`groups_generation`](Self::groups_generation) tells of changes. Costs nothing once
    /// that is done, and little for a while after it has failed.
    ///
    /// # Errors
    /// Why it could not be joined.
    pub fn join_groups_list(&self) -> io::Result<()> {
        self.joined_roster().map(drop)
    }

    fn joined_roster(&self) -> io::Result<Option<&Roster>> {
        if let Some(roster) = self.memberships.roster.get() {
            return Ok(Some(roster));
        }
        let inner = &mut *self.memberships.inner.lock();
        let Some(roster) = self.roster(inner)? else { return Ok(None) };
        // What was joined while the list could not be.
        inner.publish(Some(roster));
        Ok(Some(roster))
    }

    /// Who of this host has joined a group on an interface; `None` where the port is not shared. Takes some system calls.
    ///
    /// # Errors
    /// Those of open(2) and read(2), and `TimedOut`, where it cannot be found out.
    pub fn members(&self, group: IpAddr, interface: u32) -> io::Result<Option<Members>> {
        let Some(roster) = self.joined_roster()? else { return Ok(None) };
        // What changes while this looks makes another generation.
        let generation = roster.generation();
        let slots = roster.members(group, interface);
        Ok(Some(Members { slots, count: joins(group, interface)?, generation }))
    }

    /// The slots of the other processes that share the port, for what has to be handed on to all of them. Takes some 255
    /// system calls.
    ///
    /// # Errors
    /// Those of socket(2).
    pub fn sharers(&self) -> io::Result<Vec<u8>> {
        let Some(slot) = self.slot() else { return Ok(Vec::new()) };
        let mut all = slot.registry().announced(self.port())?;
        all.retain(|number| *number != slot.number());
        Ok(all)
    }
}

/// How many sockets have joined a group on an interface, as the kernel counts; of processes of this crate one each.
fn joins(group: IpAddr, interface: u32) -> io::Result<usize> {
    let _uncancelled = Uncancelled::new();
    let (file, wanted) = match group {
        IpAddr::V4(ip) => ("igmp", format!("{:08X}", u32::from_ne_bytes(ip.octets()))),
        IpAddr::V6(ip) => ("igmp6", format!("{:032x}", ip.to_bits())),
    };
    let list = std::fs::read_to_string(format!("/proc/thread-self/net/{file}"))?;
    Ok(count_in(&list, &wanted, interface).unwrap_or(0))
}

/// What a list of `/proc/net/igmp` or `igmp6` says. The former has a line for each interface, beginning with its index, and
/// below it a line for each group; the latter has both in one line.
fn count_in(list: &str, group: &str, interface: u32) -> Option<usize> {
    let mut of_interface = false;
    list.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        if !line.starts_with('\t') {
            of_interface = fields.next()?.parse() == Ok(interface);
            fields.next()?;
        }
        let is_it = of_interface && fields.next()? == group;
        fields.next().filter(|_| is_it)?.parse().ok()
    })
}

fn join(socket: &Socket, group: IpAddr, interface: u32) -> io::Result<()> {
    match group {
        IpAddr::V4(group) => {
            socket.join_multicast_v4_n(&group, &InterfaceIndexOrAddress::Index(interface))
        }
        IpAddr::V6(group) => socket.join_multicast_v6(&group, interface),
    }
}

fn leave(socket: &Socket, group: IpAddr, interface: u32) -> io::Result<()> {
    match group {
        IpAddr::V4(group) => {
            socket.leave_multicast_v4_n(&group, &InterfaceIndexOrAddress::Index(interface))
        }
        IpAddr::V6(group) => socket.leave_multicast_v6(&group, interface),
    }
}

/// Whether a socket has no room for one more membership.
fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::ENOMEM))
}

/// Joins by a helper, a new one if no other has room.
fn join_elsewhere(
    helpers: &mut Vec<Arc<Socket>>,
    group: IpAddr,
    interface: u32,
) -> io::Result<Arc<Socket>> {
    for helper in &*helpers {
        match join(helper, group, interface) {
            Ok(()) => return Ok(Arc::clone(helper)),
            Err(error) if is_full(&error) => {}
            Err(error) => return Err(error),
        }
    }
    let domain = if group.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
    let helper = Socket::new(domain, Type::DGRAM.cloexec(), Some(Protocol::UDP))?;
    join(&helper, group, interface)?;
    helpers.push(Arc::new(helper));
    Ok(Arc::clone(&helpers[helpers.len() - 1]))
}

/// Whether the receiving socket takes groups that others have joined.
fn take_all(receiver: &Socket, family: Family, all: bool) {
    let (level, option) = match family {
        Family::V4 => (libc::IPPROTO_IP, libc::IP_MULTICAST_ALL),
        Family::V6 => (libc::IPPROTO_IPV6, IPV6_MULTICAST_ALL),
    };
    if let Err(error) = sockopt::set(receiver.as_fd(), level, option, all.into()) {
        // A kernel without the option for IPv6 always takes all.
        tracing::debug!(%error, "MULTICAST_ALL");
    }
}

#[cfg(test)]
mod tests {
    use super::super::PortOptions;
    use super::*;
    use crate::registry::{Lock, Registry, Slot};

    #[test]
    fn what_is_handed_on_needs_no_membership() {
        let error = |n| io::Error::from_raw_os_error(n);
        let socket = Arc::new(Socket::new(Domain::IPV6, Type::DGRAM.cloexec(), None).unwrap());
        let full = || Err(error(libc::ENOBUFS));
        let unasked = || panic!("it is asked");
        for is_handed_on in [false, true] {
            let of = |joined, elsewhere| Holder::of(joined, || elsewhere, is_handed_on);
            let helper = of(full(), Ok(Arc::clone(&socket)));
            assert!(matches!(helper, Ok(Holder::Helper(_))));
            for (joined, elsewhere) in [
                (full(), Err(error(libc::EMFILE))),
                (full(), full().map(|()| Arc::clone(&socket))),
                (Err(error(libc::ENODEV)), Ok(Arc::clone(&socket))),
            ] {
                let holder = of(joined, elsewhere);
                assert!(match holder {
                    Ok(Holder::Nobody) => is_handed_on,
                    Ok(_) => false,
                    Err(_) => !is_handed_on,
                });
            }
            let joined = Holder::of(Ok(()), unasked, is_handed_on);
            assert!(matches!(joined, Ok(Holder::Receiver)));
        }
    }

    #[test]
    fn a_list_that_cannot_be_joined_is_left_alone_for_a_while() {
        let slot = Slot::claim(&format!("roster-pause-{}", std::process::id())).unwrap();
        let (mut inner, roster, begin) = (Inner::default(), OnceLock::new(), Instant::now());
        let fails = || Err(io::ErrorKind::TimedOut.into());
        let kind = |joined: io::Result<&Roster>| joined.unwrap_err().kind();
        assert_eq!(kind(inner.join(&roster, || begin, fails)), io::ErrorKind::TimedOut);
        let unasked = || -> io::Result<Roster> { panic!("it is asked") };
        let soon = begin + PAUSE - Duration::from_nanos(1);
        assert_eq!(kind(inner.join(&roster, || soon, unasked)), io::ErrorKind::WouldBlock);
        assert_eq!(kind(inner.join(&roster, || begin + PAUSE, fails)), io::ErrorKind::TimedOut);
        assert_eq!(kind(inner.join(&roster, || begin + PAUSE, unasked)), io::ErrorKind::WouldBlock);
        let later = begin + 2 * PAUSE;
        inner.join(&roster, || later, || Roster::join(&slot, 4791)).unwrap();
        inner.join(&roster, || later, unasked).unwrap();
    }

    /// Another process holds the registry's lock.
    #[test]
    fn what_was_joined_without_the_list_is_on_it_later() {
        let registry = Registry::new(&format!("roster-late-{}", std::process::id())).unwrap();
        let slots = [(); 2].map(|()| Arc::new(Slot::claim_in(&registry).unwrap()));
        let (number, udp) = (slots[0].number(), anyverbs_testing::UdpPort::of_this_process());
        let other = Roster::join(&slots[1], udp).unwrap();
        let slot = Some(Arc::clone(&slots[0]));
        let port = UdpPort::open(PortOptions { slot, ..PortOptions::new(udp) });
        let port = port.unwrap();
        let group = "239.4.7.101".parse().unwrap();
        let held = registry.try_lock(Lock::Groups).unwrap().unwrap();
        port.join_multicast(group, LOOPBACK).unwrap();
        assert!(other.members(group, LOOPBACK).is_empty());
        drop(held);
        port.memberships.inner.lock().again_at = None;
        assert_eq!(port.members(group, LOOPBACK).unwrap().unwrap().slots, [number]);
        assert_eq!(other.members(group, LOOPBACK), [number]);
    }

    #[test]
    fn the_kernels_lists_are_read() {
        let igmp = "Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n\
            1\tlo        :     2      V3\n\t\t\t\t5B0704EF     3 0:00000000\t\t0\n\t\t\t\t010000E0     1 0:00000000\t\t0\n\
            12\teth0      :     1      V3\n\t\t\t\t5B0704EF    12 0:00000000\t\t0\n";
        for (group, interface, count) in [
            ("5B0704EF", 1, Some(3)),
            ("5B0704EF", 12, Some(12)),
            ("010000E0", 1, Some(1)),
            ("010000E0", 12, None),
            ("5B0704EF", 2, None),
        ] {
            assert_eq!(count_in(igmp, group, interface), count, "{group} {interface}");
        }
        let igmp6 = "1    lo              ff020000000000000000000000000001     1 0000000C 0\n\
            2    eth0            ff150000000000000000000000004791     2 00000004 0\n";
        let group = "ff150000000000000000000000004791";
        assert_eq!(count_in(igmp6, group, 2), Some(2));
        assert_eq!(count_in(igmp6, group, 1), None);
    }
}
