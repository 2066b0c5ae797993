//! Connected sending sockets, for the destinations of connected queue pairs.
//!
//! The kernel looks for the route of every datagram that an unconnected socket sends. A connected one keeps it, which saves a tenth
//! of the time that a datagram takes to another host.
//!
//! # IPv4 IDs
//! The ICRC covers the ID of the IPv4 header, so a sender has to know it before the datagram leaves. An unconnected socket sends 0, or
//! the place in a GSO batch. A connected one counts up from a random number, by one for each system call; a batch counts on inside
//! from there. The kernel shows the number to a sender that asks for the time of sending (`SO_TIMESTAMPING`): the time comes with the
//! datagram and its headers. So an empty datagram finds it out. It leaves by the loopback interface, where nobody has the address of
//! another host, and ends there. The next datagram asks as well, and then some. If the number is another one, that datagram is lost, and the number is found out anew.
//!
//! A thread that stages a batch has the counter to itself until the batch has left. Meanwhile, and while the number is not known,
//! datagrams go by an unconnected socket of the same port. No other socket has that port: a receiver judges the IDs of each source port
//! by itself.
//!
//! The network's errors (ICMP) about earlier datagrams come to a connected socket as errors of sendmsg(2). Then nothing was sent.

use std::cell::Cell;
use std::io;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Weak};

use anyverbs_locks::{Mutex, rank};
use rustix::net::connect;
use socket2::{Domain, Socket};

use crate::cmsg::{self, ControlBuffer};
use crate::sockopt;
use crate::sys::{self, Uncancelled, udp_socket};

use super::sending::{SendingSocket, SendingSockets, drop_all};
use super::{Destination, Family};

/// Most connected sockets of a port. Peers behind these are sent to by the unconnected ones.
const MOST: usize = 64;
/// Most numbers that were another one than expected. Then something else counts, and the socket is not used again.
const MOST_SURPRISES: u8 = 4;
/// Batches that leave by the unconnected socket, after which the number is asked for no more: at most 64 datagrams each. A receiver
/// that has seen more than 256 with small IDs takes no others.
const MOST_UNKNOWN: u16 = 4;
/// The number is looked at again at least once in so many system calls.
const LOOK_EVERY: u32 = 1 << 16;

/// The index of the loopback interface, in each network namespace.
const LOOPBACK: libc::c_int = 1;
/// Reports of the network that a datagram is sent again behind. The bound keeps a storm of them from holding the caller.
const MOST_REPORTS: u8 = 3;

// include/uapi/linux/net_tstamp.h; missing in libc.
const SOF_TIMESTAMPING_SOFTWARE: libc::c_int = 1 << 4;
const SOF_TIMESTAMPING_TX_SCHED: u32 = 1 << 8;

/// A socket that is connected to a destination.
#[derive(Debug)]
pub(super) struct Connected {
    /// An unconnected socket with the same port.
    pub(super) unconnected: ManuallyDrop<SendingSocket>,
    socket: ManuallyDrop<Socket>,
    to: Destination,
    /// IPv4 only. `None` in it: a lease has it.
    counter: Option<Mutex<rank::Ipv4Ids, Option<Counter>>>,
}

/// The connected sockets of a port that queue pairs still use.
#[derive(Debug, Default)]
pub(super) struct ConnectedSockets(Mutex<rank::ConnectedSockets, Vec<Weak<Connected>>>);

impl ConnectedSockets {
    /// The socket that is connected to a destination, made if there is none. `None`: there are too many, or it cannot be had.
    pub(super) fn to(&self, to: &Destination, sending: &SendingSockets) -> Option<Arc<Connected>> {
        // The sockets may close again.
        let _uncancelled = Uncancelled::new();
        let mut all = self.0.lock();
        all.retain(|connected| connected.strong_count() > 0);
        let mut alive = all.iter().filter_map(Weak::upgrade);
        if let Some(connected) = alive.find(|connected| connected.to == *to) {
            return Some(connected);
        }
        if all.len() == MOST {
            return None;
        }
        let connected = Connected::new(to, sending)
            .inspect_err(|error| tracing::debug!(to = %to.address, %error, "no connected socket"))
            .ok()
            .map(Arc::new)?;
        all.push(Arc::downgrade(&connected));
        Some(connected)
    }
}

impl Connected {
    fn new(to: &Destination, sending: &SendingSockets) -> io::Result<Self> {
        let unsuited = || io::Error::from(io::ErrorKind::Unsupported);
        let source = to.source.ok_or_else(unsuited)?;
        let family = Family::of(to.address.ip());
        let scope = match to.address {
            SocketAddr::V6(address) => address.scope_id(),
            SocketAddr::V4(_) => 0,
        };
        // An interface is given to a socket as the scope of its addresses.
        if to.address.ip().is_multicast() || to.interface != scope {
            return Err(unsuited());
        }
        let unconnected = sending.open(family, true)?;
        let port = unconnected.port;
        let socket = udp_socket(Domain::for_address(to.address))?;
        socket.set_nonblocking(true)?;
        socket.set_reuse_port(true)?;
        drop_all(&socket)?;
        sending.configure(socket.as_fd(), family)?;
        let (class, limit) = (to.traffic_class.into(), to.hop_limit.into());
        let (here, there) = match (source, to.address) {
            (IpAddr::V4(_), SocketAddr::V4(_)) => {
                if class != 0 {
                    sockopt::set(socket.as_fd(), libc::IPPROTO_IP, libc::IP_TOS, class)?;
                }
                if limit != 0 {
                    sockopt::set(socket.as_fd(), libc::IPPROTO_IP, libc::IP_TTL, limit)?;
                }
                sockopt::set(
                    socket.as_fd(),
                    libc::SOL_SOCKET,
                    libc::SO_TIMESTAMPING,
                    SOF_TIMESTAMPING_SOFTWARE,
                )?;
                (SocketAddr::new(source, port), to.address)
            }
            (IpAddr::V6(source), SocketAddr::V6(address)) => {
                socket.set_only_v6(true)?;
                if class != 0 {
                    sockopt::set(socket.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_TCLASS, class)?;
                }
                if limit != 0 {
                    let option = libc::IPV6_UNICAST_HOPS;
                    sockopt::set(socket.as_fd(), libc::IPPROTO_IPV6, option, limit)?;
                }
                let flow = to.flow_label & 0xf_ffff;
                let there = SocketAddrV6::new(*address.ip(), address.port(), flow, scope);
                (SocketAddrV6::new(source, port, 0, scope).into(), there.into())
            }
            _ => return Err(unsuited()),
        };
        socket.bind(&here.into())?;
        connect(&socket, &there)?;
        let counter = to.address.is_ipv4().then(|| Mutex::new(Some(Counter::default())));
        let (unconnected, socket) = (ManuallyDrop::new(unconnected), ManuallyDrop::new(socket));
        Ok(Self { unconnected, socket, to: *to, counter })
    }

    /// The sockets for one batch. It leaves by the connected one if no other batch does, and if its IDs are known.
    pub(super) fn lease(self: &Arc<Self>) -> Lease {
        // Without GSO a batch is as many system calls as datagrams, which do not know each other's IDs.
        if !self.unconnected.gso() {
            return Lease { of: self.clone(), is_connected: false, counter: Cell::new(None) };
        }
        let counter = self.counter.as_ref().map(|counter| counter.lock().take());
        let (is_connected, counter) = match counter {
            None => (true, None),
            Some(None) => (false, None),
            Some(Some(mut counter)) => (counter.is_known(self), Some(counter)),
        };
        Lease { of: self.clone(), is_connected, counter: Cell::new(counter) }
    }

    /// Sends by one sendmsg(2), without waiting; what is empty, within this host. `asks`: for the time of sending as well.
    fn send(&self, bytes: &[u8], segment_size: Option<u16>, asks: bool) -> io::Result<()> {
        let stays = bytes.is_empty();
        let mut control = ControlBuffer::new();
        let mut writer = cmsg::Writer::new(&mut control);
        if let Some(size) = segment_size {
            writer.push(libc::SOL_UDP, libc::UDP_SEGMENT, size);
        }
        if asks {
            writer.push(libc::SOL_SOCKET, libc::SO_TIMESTAMPING, SOF_TIMESTAMPING_TX_SCHED);
        }
        if stays {
            let nobody = libc::in_addr { s_addr: 0 };
            let by_loopback =
                libc::in_pktinfo { ipi_ifindex: LOOPBACK, ipi_spec_dst: nobody, ipi_addr: nobody };
            writer.push(libc::IPPROTO_IP, libc::IP_PKTINFO, by_loopback);
            // A host that forwards packets drops it as well.
            writer.push(libc::IPPROTO_IP, libc::IP_TTL, 1 as libc::c_int);
        }
        let control_len = writer.len();
        let mut iovec =
            libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: all-zero is a valid msghdr.
        let mut header: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
        header.msg_iov = &raw mut iovec;
        header.msg_iovlen = 1;
        if control_len > 0 {
            header.msg_control = (&raw mut control).cast();
            header.msg_controllen = control_len as _;
        }
        let fd = self.socket.as_raw_fd();
        // SAFETY: `header` points to a live iovec, bytes and control buffer, of the given sizes, which are only read.
        let n = unsafe { sys::sendmsg(fd, &raw const header, libc::MSG_DONTWAIT) };
        if n < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// As [`send`](Self::send), and gives the ID of the datagram, if the kernel shows it at once.
    fn ask(&self, bytes: &[u8], segment_size: Option<u16>) -> io::Result<Option<u16>> {
        // Numbers that earlier ones show come late, and are of no use.
        self.last_shown();
        self.send(bytes, segment_size, true)?;
        Ok(self.last_shown())
    }

    /// The ID of the last datagram whose time the kernel has shown. Afterwards it shows none of them again.
    fn last_shown(&self) -> Option<u16> {
        let mut last = None;
        let mut bytes = [0; 128];
        let mut control = ControlBuffer::new();
        loop {
            let mut iovec =
                libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
            // SAFETY: all-zero is a valid msghdr.
            let mut header: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
            header.msg_iov = &raw mut iovec;
            header.msg_iovlen = 1;
            header.msg_control = (&raw mut control).cast();
            header.msg_controllen = cmsg::CONTROL_LEN as _;
            let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
            // SAFETY: `header` points to a live iovec, bytes and control buffer, of the given sizes.
            let n = unsafe { sys::recvmsg(self.socket.as_raw_fd(), &raw mut header, flags) };
            let Ok(n) = usize::try_from(n) else { return last };
            last = id_of(&bytes[..n.min(bytes.len())], &self.to).or(last);
        }
    }
}

/// A queue pair is locked while its route ends, and close(2) is a cancellation point.
impl Drop for Connected {
    fn drop(&mut self) {
        let _uncancelled = Uncancelled::new();
        // SAFETY: nobody uses them behind this.
        unsafe {
            ManuallyDrop::drop(&mut self.socket);
            ManuallyDrop::drop(&mut self.unconnected);
        }
    }
}

/// The ID in the IPv4 header of a datagram to a destination, which begins somewhere in `bytes`: behind that of the link.
fn id_of(bytes: &[u8], to: &Destination) -> Option<u16> {
    let octets = |ip| if let IpAddr::V4(ip) = ip { Ipv4Addr::octets(&ip) } else { [0; 4] };
    let (from, there) = (octets(to.source?), octets(to.address.ip()));
    let header = bytes.windows(20).find(|header| {
        header[0] == 0x45 && header[9] == 17 && header[12..16] == from && header[16..20] == there
    })?;
    Some(u16::from_be_bytes([header[4], header[5]]))
}

/// Whether an error may be a report of the network about an earlier datagram. Each is reported once, before another one is sent.
pub(super) fn is_report(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::ECONNREFUSED
                | libc::ENOPROTOOPT
                | libc::EPROTO
                | libc::EHOSTUNREACH
                | libc::EHOSTDOWN
                | libc::ENETUNREACH
                | libc::ENONET
                | libc::EMSGSIZE
                | libc::EACCES
        )
    )
}

/// The IPv4 IDs of a connected socket.
#[derive(Clone, Copy, Debug, Default)]
struct Counter {
    /// The ID of the next datagram.
    next: Option<u16>,
    /// Batches that could not be sent since it is not known.
    unknown: u16,
    /// System calls that have sent.
    sends: u32,
    /// The next datagram asks for its ID.
    is_doubtful: bool,
    surprises: u8,
}

impl Counter {
    /// Whether the next ID is known. If not, it is asked for, a few times.
    fn is_known(&mut self, of: &Connected) -> bool {
        if self.next.is_some() {
            return true;
        }
        self.unknown = self.unknown.saturating_add(1);
        let may_ask = self.unknown <= MOST_UNKNOWN && self.surprises < MOST_SURPRISES;
        if may_ask && self.unknown.is_power_of_two() {
            let asked = of.ask(&[], None);
            let shown = asked.as_ref().ok().copied().flatten();
            self.next = shown.map(|id| id.wrapping_add(1));
            if self.next.is_some() {
                (self.unknown, self.is_doubtful) = (0, true);
            }
            tracing::debug!(to = %of.to.address, ?asked, next = ?self.next, "IDs of a connected socket");
        }
        self.next.is_some()
    }

    /// Whether the next datagram is to show its ID.
    fn wants_to_look(&self) -> bool {
        let n = self.sends;
        self.is_doubtful || n.is_power_of_two() || n.is_multiple_of(LOOK_EVERY)
    }

    /// A datagram could not be sent.
    fn failed(&mut self, error: &io::Error) {
        match error.raw_os_error() {
            // It got no ID.
            Some(libc::EAGAIN | libc::EINTR) => {}
            Some(libc::ENOBUFS) => self.is_doubtful = true,
            _ => self.next = None,
        }
    }

    /// A batch has left. `shown`: the ID that it had, if it was to show that.
    fn sent(&mut self, of: &Connected, shown: Option<Option<u16>>) {
        let Some(id) = self.next else { return };
        self.next = Some(id.wrapping_add(1));
        self.sends = self.sends.wrapping_add(1);
        if let Some(shown) = shown {
            self.is_doubtful = false;
            if shown != Some(id) {
                tracing::debug!(to = %of.to.address, id, ?shown, "unexpected ID of a connected socket");
                self.surprises = self.surprises.saturating_add(1);
                self.next = None;
            }
        }
    }
}

/// The sockets of an outlet, for one batch.
#[derive(Debug)]
pub(super) struct Lease {
    of: Arc<Connected>,
    /// Whether the batch leaves by the connected socket.
    is_connected: bool,
    /// Taken from there until the batch has left.
    counter: Cell<Option<Counter>>,
}

impl Lease {
    /// Tells outlets apart.
    pub(super) fn connected(&self) -> *const Connected {
        Arc::as_ptr(&self.of)
    }

    /// Whether the batch leaves by the connected socket.
    pub(super) fn is_connected(&self) -> bool {
        self.is_connected
    }

    pub(super) fn unconnected(&self) -> &SendingSocket {
        &self.of.unconnected
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.of.socket
    }

    /// The ID of the first datagram.
    pub(super) fn first_id(&self) -> u16 {
        self.counter.get().and_then(|counter| counter.next).unwrap_or(0)
    }

    /// Sends by one sendmsg(2), without waiting.
    pub(super) fn send(&self, bytes: &[u8], segment_size: Option<u16>) -> io::Result<()> {
        let mut counter = self.counter.get();
        let mut tries = 0..MOST_REPORTS;
        let result = loop {
            let looks = counter.as_ref().is_some_and(Counter::wants_to_look);
            let sent = if looks {
                self.of.ask(bytes, segment_size).map(Some)
            } else {
                self.of.send(bytes, segment_size, false).map(|()| None)
            };
            match sent {
                Err(error) if is_report(&error) && tries.next().is_some() => {
                    // This datagram has no ID yet, as far as one can tell.
                    if let Some(counter) = &mut counter {
                        counter.is_doubtful = true;
                    }
                }
                sent => break sent,
            }
        };
        let result = match (result, &mut counter) {
            (Ok(shown), Some(counter)) => {
                counter.sent(&self.of, shown);
                Ok(())
            }
            (Err(error), Some(counter)) => {
                counter.failed(&error);
                // A number that was shown late would end a wait for room.
                self.of.last_shown();
                Err(error)
            }
            (result, None) => result.map(drop),
        };
        self.counter.set(counter);
        result
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let (Some(place), Some(counter)) = (&self.of.counter, self.counter.take()) {
            *place.lock() = Some(counter);
        }
    }
}
