//! Multicast groups: the groups that this process has joined, and those that the kernel alone does not serve.
//!
//! Every socket of the port that joined a group gets a copy of its datagrams, the sender's own included
//! (`IP_MULTICAST_LOOP`); steering has no part in it. Three things the kernel does not give:
//!
//! - A datagram over IPv4 from another host skips the search for members if a single socket matches it: early
//!   demultiplexing has found that socket. Linux 6.18 then picks again among the socket's `SO_REUSEPORT` group, and one
//!   of the other processes of the port gets the only copy. Two sockets that match make early demultiplexing give up.
//!   So each membership over IPv4 has a *companion*: a socket bound to the group's address that joins first, leaves
//!   last, and drops all datagrams. (The kernel counts these drops as `InErrors` of UDP.) Over IPv6 there is no early
//!   demultiplexing of groups.
//! - One socket has room for few memberships: 20 over IPv4 (`net.ipv4.igmp_max_memberships`), over IPv6 as many as fit
//!   into `net.core.optmem_max`. Beyond that the companion alone joins, and the receiving socket takes every group that
//!   any process of the host has joined. The reader has to pick out its own ones anyway.
//! - IPv6 has no multicast route over the loopback interface. A datagram for a group there is to be handed on to all
//!   [`UdpPort::sharers`] by their slots' sockets ([`UdpPort::forward`]).

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyverbs_locks::{Mutex, rank};
use socket2::{Domain, InterfaceIndexOrAddress, Socket};

use crate::host::TIME_SLICES;
use crate::sockopt;

use super::port::IPV6_MULTICAST_ALL;
use super::sending::drop_all;
use super::{Family, UdpPort};

/// Index of the loopback interface, the same in every network namespace (`LOOPBACK_IFINDEX`).
pub const LOOPBACK: u32 = 1;

/// Time for which a list of [`UdpPort::sharers`] may be used. A list costs some 255 system calls, and a sender may send
/// 100,000 datagrams in a second (test `a_new_member_gets_forwarded_messages` of `anyverbs`).
pub const SHARERS_VALID: Duration = TIME_SLICES;

/// The groups that this process has joined.
#[derive(Debug, Default)]
pub(crate) struct Memberships {
    joined: Mutex<rank::Memberships, HashMap<(IpAddr, u32), Membership>>,
}

#[derive(Debug, Default)]
struct Membership {
    times: usize,
    /// Whether the receiving socket has joined.
    by_receiver: bool,
    /// Has joined for the receiving socket's sake.
    companion: Option<Socket>,
}

/// Whether a group of an interface is out of the kernel's reach, so that its datagrams have to be handed on.
#[must_use]
pub fn is_handed_on(group: IpAddr, interface: u32) -> bool {
    interface == LOOPBACK && group.is_ipv6() && group.is_multicast()
}

impl UdpPort {
    /// Joins a multicast group on an interface. Each join has its [`leave_multicast`](Self::leave_multicast).
    ///
    /// At least these groups are joined: receivers check [`Datagram::destination`](super::Datagram::destination).
    ///
    /// # Errors
    /// Those of socket(2), bind(2) and setsockopt(2), `NoSuchDevice` for one; `Unsupported` when the port does not receive the
    /// group's family.
    pub fn join_multicast(&self, group: IpAddr, interface: u32) -> io::Result<()> {
        let receiver = self.socket_for(group)?;
        let mut joined = self.memberships.joined.lock();
        if let Some(membership) = joined.get_mut(&(group, interface)) {
            membership.times += 1;
            return Ok(());
        }
        let membership = if is_handed_on(group, interface) {
            self.outlast_older_lists();
            Membership::default()
        } else {
            self.membership(receiver, group, interface)?
        };
        joined.insert((group, interface), Membership { times: 1, ..membership });
        Ok(())
    }

    fn membership(
        &self,
        receiver: &Socket,
        group: IpAddr,
        interface: u32,
    ) -> io::Result<Membership> {
        let companion = || self.companion(group, interface);
        let before = if group.is_ipv4() { Some(companion()?) } else { None };
        match join(receiver, group, interface) {
            Err(error) if is_full(&error) => {
                let companion = before.map_or_else(companion, Ok)?;
                take_all(receiver, Family::of(group), true);
                Ok(Membership { companion: Some(companion), ..Membership::default() })
            }
            joined => joined.map(|()| Membership {
                by_receiver: true,
                companion: before,
                ..Membership::default()
            }),
        }
    }

    /// A socket that joins a group and drops all datagrams.
    fn companion(&self, group: IpAddr, interface: u32) -> io::Result<Socket> {
        let family = Family::of(group);
        let domain = if group.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
        let socket = crate::sys::udp_socket(domain)?;
        take_all(&socket, family, false);
        drop_all(&socket)?;
        // A port that is not shared has no `SO_REUSEPORT` group, and lets no other socket bind.
        if group.is_ipv4() && self.slot().is_some() {
            socket.set_reuse_port(true)?;
            // The group's address: no datagram for one process comes here.
            socket.bind(&SocketAddr::new(group, self.port()).into())?;
        }
        join(&socket, group, interface)?;
        Ok(socket)
    }

    /// Takes a join back.
    ///
    /// # Errors
    /// `AddrNotAvailable` when the group is not joined there, those of setsockopt(2); `Unsupported` when the port does not
    /// receive the group's family.
    pub fn leave_multicast(&self, group: IpAddr, interface: u32) -> io::Result<()> {
        let receiver = self.socket_for(group)?;
        let mut joined = self.memberships.joined.lock();
        let Some(membership) = joined.get_mut(&(group, interface)) else {
            return Err(io::ErrorKind::AddrNotAvailable.into());
        };
        membership.times -= 1;
        if membership.times > 0 {
            return Ok(());
        }
        let Some(left) = joined.remove(&(group, interface)) else { return Ok(()) };
        if left.by_receiver {
            // Before its companion: never is a member the only socket that matches.
            return leave(receiver, group, interface);
        }
        let family = Family::of(group);
        let takes_all = |(key, m): (&(IpAddr, u32), &Membership)| {
            Family::of(key.0) == family && !m.by_receiver && m.companion.is_some()
        };
        if left.companion.is_some() && !joined.iter().any(takes_all) {
            take_all(receiver, family, false);
        }
        Ok(())
    }

    /// The slots of the other processes that share the port, for datagrams that have to be forwarded to all of them.
    /// May be used for [`SHARERS_VALID`] from before the call. Takes some 255 system calls.
    ///
    /// # Errors
    /// Those of socket(2).
    pub fn sharers(&self) -> io::Result<Vec<u8>> {
        let Some(slot) = self.slot() else { return Ok(Vec::new()) };
        let mut all = slot.store().announced(self.port());
        all.retain(|number| *number != slot.number());
        Ok(all)
    }

    /// Waits until no process uses a list of [`sharers`](Self::sharers) from before this process was announced. That is
    /// over soon after the port was opened.
    fn outlast_older_lists(&self) {
        let since = Instant::now().saturating_duration_since(self.announced_at);
        if let Some(rest) = SHARERS_VALID.checked_sub(since).filter(|_| self.slot().is_some()) {
            std::thread::sleep(rest);
        }
    }
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

/// Whether a socket takes groups that others have joined.
fn take_all(socket: &Socket, family: Family, all: bool) {
    let (level, option) = match family {
        Family::V4 => (libc::IPPROTO_IP, libc::IP_MULTICAST_ALL),
        Family::V6 => (libc::IPPROTO_IPV6, IPV6_MULTICAST_ALL),
    };
    if let Err(error) = sockopt::set(socket.as_fd(), level, option, all.into()) {
        // A kernel without the option for IPv6 always takes all.
        tracing::debug!(%error, "MULTICAST_ALL");
    }
}
