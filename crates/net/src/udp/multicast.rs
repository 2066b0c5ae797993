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

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::Arc;

use parking_lot::Mutex;
use socket2::{Domain, InterfaceIndexOrAddress, Protocol, Socket, Type};

use crate::sockopt;

use super::port::IPV6_MULTICAST_ALL;
use super::{Family, UdpPort};

/// Index of the loopback interface, the same in every network namespace (`LOOPBACK_IFINDEX`).
const LOOPBACK: u32 = 1;

/// What this process has joined.
#[derive(Debug, Default)]
pub(crate) struct Memberships(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    joined: HashMap<(IpAddr, u32), Membership>,
    /// Sockets that do nothing but join, by family.
    helpers: [Vec<Arc<Socket>>; 2],
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
        let mut inner = self.memberships.0.lock();
        let Inner { joined, helpers } = &mut *inner;
        if let Some(membership) = joined.get_mut(&(group, interface)) {
            membership.times += 1;
            return Ok(());
        }
        let holder = if is_handed_on(group, interface) {
            Holder::Nobody
        } else {
            match join(receiver, group, interface) {
                Err(error) if is_full(&error) => {
                    let family = Family::of(group);
                    let helper = join_elsewhere(&mut helpers[family as usize], group, interface)?;
                    take_all(receiver, family, true);
                    Holder::Helper(helper)
                }
                result => result.map(|()| Holder::Receiver)?,
            }
        };
        joined.insert((group, interface), Membership { times: 1, holder });
        Ok(())
    }

    /// Takes a join back.
    ///
    /// # Errors
    /// `AddrNotAvailable` when the group is not joined there, those of setsockopt(2); `Unsupported` when the port does not
    /// receive the group's family.
    pub fn leave_multicast(&self, group: IpAddr, interface: u32) -> io::Result<()> {
        let receiver = self.socket_for(group)?;
        let mut inner = self.memberships.0.lock();
        let Inner { joined, helpers } = &mut *inner;
        let Some(membership) = joined.get_mut(&(group, interface)) else {
            return Err(io::ErrorKind::AddrNotAvailable.into());
        };
        membership.times -= 1;
        if membership.times > 0 {
            return Ok(());
        }
        let family = Family::of(group);
        match joined.remove(&(group, interface)).map(|m| m.holder) {
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

    /// The slots of the other processes that share the port, for what has to be handed on to all of them. Takes some 255
    /// system calls.
    #[must_use]
    pub fn sharers(&self) -> Vec<u8> {
        let Some(slot) = self.slot() else { return Vec::new() };
        let mut all = slot.registry().announced(self.port()).unwrap_or_default();
        all.retain(|number| *number != slot.number());
        all
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
