//! The shared UDP port: its receiving sockets, their options, and receiving.

use std::ffi::c_int;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use anyverbs_record::capture::Capture;
use socket2::{Domain, Socket};

use crate::host::{Announced, Lock, Slot};
use crate::sockopt;
use crate::steering::{Resteer, Rules, SteerByKind, Steering, SteeringState};

use super::capture;
use super::connected::ConnectedSockets;
use super::forward::{ForwardCounters, Forwarder};
use super::multicast::Memberships;
use super::outlet::OutletRef;
use super::sending::SendingSockets;
use super::{Datagram, Destination, Family, OpenError, Outlet, RxBatch};

// include/uapi/linux/in6.h; missing in libc.
pub(crate) const IPV6_FLOWINFO: c_int = 11;
pub(super) const IPV6_MULTICAST_ALL: c_int = 29;

/// Options of a [`UdpPort`].
#[derive(Clone, Debug)]
pub struct PortOptions {
    /// The UDP port.
    pub port: u16,
    /// This process's slot. Without one the port is this process's alone: not shared, not steered, nothing forwarded.
    pub slot: Option<Arc<Slot>>,
    /// Offset in the UDP payload of the byte that holds the slot of the receiving process.
    pub steer_offset: usize,
    /// Datagrams that hold it elsewhere.
    pub steer_by_kind: Option<SteerByKind>,
    /// First payload byte of the datagrams by which processes find out how to steer. Must be one that no real datagram
    /// begins with.
    pub probe_byte: u8,
    /// Receive buffer to ask for, in bytes.
    pub receive_buffer: usize,
    /// Whether senders may use GSO. Without it, every datagram has IPv4 ID 0.
    pub gso: bool,
    /// Whether to receive IPv4.
    pub ipv4: bool,
    /// Whether to receive IPv6.
    pub ipv6: bool,
    /// Whether to send IPv6 datagrams without UDP checksum.
    pub no_checksum6: bool,
    /// The IPv4 ID that a datagram had which came to this port, as far as its bytes show it. A capture asks.
    pub id_of: fn(&Datagram<'_>, u16) -> u16,
}

impl PortOptions {
    /// The defaults: unshared, both families, 8 MiB, GSO, checksums.
    #[must_use]
    pub fn new(port: u16) -> Self {
        Self {
            port,
            slot: None,
            steer_offset: 0,
            steer_by_kind: None,
            probe_byte: 0xff,
            receive_buffer: 8 << 20,
            gso: true,
            ipv4: true,
            ipv6: true,
            no_checksum6: false,
            id_of: |datagram, _| datagram.segment,
        }
    }
}

/// A UDP port of this host, received on by this process and perhaps others of the same user.
///
/// All methods take `&self` and may be called from any thread. Poll the descriptors of [`UdpPort::fds`] for input.
#[derive(Debug)]
pub struct UdpPort {
    pub(crate) sending: SendingSockets,
    connected: ConnectedSockets,
    sockets: [Option<Arc<Socket>>; 2],
    port: u16,
    receive_buffer: usize,
    steering: Option<Steering>,
    pub(crate) forwarder: Option<Forwarder>,
    pub(super) memberships: Memberships,
    receive_errors: AtomicU64,
    capture: OnceLock<Arc<Capture>>,
    id_of: fn(&Datagram<'_>, u16) -> u16,
    /// When the other processes could find this one.
    pub(super) announced_at: Instant,
    // Declared after the sockets: the announcement must not end before they are closed.
    _announced: Option<Announced>,
}

impl UdpPort {
    /// Opens the port, joins the processes that share it and steers this process's datagrams to it. Takes a few
    /// milliseconds when others share the port, about 25 when one of them does not answer.
    ///
    /// # Errors
    /// [`OpenError`], each with one clear line.
    pub fn open(options: PortOptions) -> Result<Self, OpenError> {
        let port = options.port;
        let lock = options.slot.as_ref().and_then(|slot| {
            slot.store()
                .lock(Lock::Steering)
                .inspect_err(
                    |error| tracing::warn!(port, %error, "joining without the lock of the host's store"),
                )
                .ok()
        });
        let mut sockets = [None, None];
        for family in Family::ALL {
            if (family == Family::V4 && options.ipv4) || (family == Family::V6 && options.ipv6) {
                sockets[family as usize] = open_socket(family, &options)?.map(Arc::new);
            }
        }
        let Some(receive_buffer) =
            sockets.iter().flatten().filter_map(|s| s.recv_buffer_size().ok()).min()
        else {
            return Err(OpenError::NoSocketFamily);
        };
        let mut this = Self {
            sending: SendingSockets::new(sockets.clone(), options.gso, options.no_checksum6),
            connected: ConnectedSockets::default(),
            sockets,
            port,
            // The kernel reports twice the requested size, its own overhead included.
            receive_buffer: receive_buffer / 2,
            steering: None,
            forwarder: None,
            memberships: Memberships::default(),
            receive_errors: AtomicU64::new(0),
            capture: OnceLock::new(),
            id_of: options.id_of,
            announced_at: Instant::now(),
            _announced: None,
        };
        if let Some(slot) = options.slot {
            this._announced = Some(slot.announce(port));
            this.announced_at = Instant::now();
            let rules = Rules {
                probe_byte: options.probe_byte,
                steer_offset: options.steer_offset,
                by_kind: options.steer_by_kind,
            };
            this.steering = Some(Steering::new(&slot, port, rules));
            this.forwarder = Some(Forwarder::new(slot));
            this.join(lock).map_err(|source| OpenError::Io {
                port,
                action: "join the other processes",
                source,
            })?;
        }
        Ok(this)
    }

    /// Steers for the first time, serving probes meanwhile. No other thread reads the sockets yet.
    fn join(&self, lock: Option<crate::host::LockGuard>) -> io::Result<()> {
        let (Some(steering), Some(slot)) = (&self.steering, self.slot()) else {
            return Ok(());
        };
        let rules = steering.rules();
        let mut scratch = RxBatch::new(4)?;
        steering.start_join(lock);
        loop {
            match steering.step(self.fds_by_family())? {
                Resteer::Pending { retry_after } => {
                    steering.wait(self.fds_by_family(), retry_after);
                    while self.receive(&mut scratch)? > 0 {
                        // No process knows this one yet, so datagrams here belong to another process, or to any. Those
                        // wait until this process reads forwarded datagrams.
                        for datagram in scratch.datagrams() {
                            if rules.by_kind.is_some_and(|rule| rule.covers(datagram.bytes)) {
                                self.forward_or_keep(slot.number(), &datagram);
                            } else if let Some(&slot) = datagram.bytes.get(rules.steer_offset) {
                                self.forward(slot, &datagram);
                            }
                        }
                    }
                }
                Resteer::Idle | Resteer::Done { .. } => return Ok(()),
            }
        }
    }

    /// The UDP port number.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// This process's slot, if the port is shared.
    #[must_use]
    pub fn slot(&self) -> Option<&Arc<Slot>> {
        self.forwarder.as_ref().map(Forwarder::slot)
    }

    /// The descriptors to poll for input: the receiving sockets, and the slot's socket for forwarded datagrams.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let sockets = self.sockets.iter().flatten().map(AsFd::as_fd);
        sockets.chain(self.forwarder.iter().map(|forwarder| forwarder.slot().as_fd()))
    }

    /// Whether the port receives this family.
    #[must_use]
    pub fn has_family(&self, family: Family) -> bool {
        self.sockets[family as usize].is_some()
    }

    fn fds_by_family(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [0, 1].map(|i| self.sockets[i].as_ref().map(AsFd::as_fd))
    }

    /// Bytes that each receiving socket can hold: the part of [`PortOptions::receive_buffer`] that the system allowed.
    /// The kernel's own overhead counts against it too.
    #[must_use]
    pub fn receive_buffer(&self) -> usize {
        self.receive_buffer
    }

    /// Datagrams that the kernel dropped since the port was opened, mostly for want of buffer.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.sockets
            .iter()
            .flatten()
            .filter_map(|s| sockopt::drops(s.as_fd()).ok())
            .map(u64::from)
            .sum()
    }

    /// Errors of other hosts and the network (ICMP) that receiving met and passed over.
    #[must_use]
    pub fn receive_errors(&self) -> u64 {
        self.receive_errors.load(Ordering::Relaxed)
    }

    /// The source port of datagrams to `to`, which depends on its address family and socket.
    ///
    /// # Errors
    /// Those of socket(2) when the sending socket cannot be opened.
    pub fn source_port<'a>(&self, to: impl Into<OutletRef<'a>>) -> io::Result<u16> {
        let OutletRef { to, connected } = to.into();
        match connected {
            Some(connected) => Ok(connected.unconnected.port),
            None => Ok(self.sending.of(to)?.port),
        }
    }

    /// An outlet for much traffic: with a socket that is connected to the destination, if that can be had.
    #[must_use]
    pub fn connect(&self, to: Destination) -> Outlet {
        Outlet::new(to, self.connected.to(&to, &self.sending))
    }

    /// Whether all sending sockets opened so far can use GSO; `None` when none is open.
    #[must_use]
    pub fn gso(&self) -> Option<bool> {
        self.sending.opened().map(super::sending::SendingSocket::gso).reduce(|a, b| a && b)
    }

    /// Receives waiting datagrams into `batch`, without waiting, and drops its former content. Returns the number of
    /// messages (a GRO batch is one). One call need not bring everything; 0 means that there is nothing. Datagrams by
    /// which processes find each other are answered and not delivered.
    ///
    /// # Errors
    /// Those of recvmmsg(2) that are about this process. Errors of the network are counted.
    pub fn receive(&self, batch: &mut RxBatch) -> io::Result<usize> {
        self.receive_from(batch, true, false)
    }

    /// As [`receive`](Self::receive), for a caller that asks over and over. Only every eighth call asks a family that
    /// was silent the last time, which halves the price of an empty one. So does a call with `all`.
    ///
    /// # Errors
    /// Those of [`receive`](Self::receive).
    pub fn poll(&self, batch: &mut RxBatch, all: bool) -> io::Result<usize> {
        self.receive_from(batch, false, all)
    }

    fn receive_from(&self, batch: &mut RxBatch, thorough: bool, all: bool) -> io::Result<usize> {
        batch.clear();
        batch.calls = batch.calls.wrapping_add(1);
        batch.asked_all = true;
        let mut received = 0;
        // A busy family is asked again first; every eighth call asks both, so that neither starves.
        let all = all || batch.calls.is_multiple_of(8);
        let first = usize::from(batch.prefer_v6);
        for i in [first, 1 - first] {
            let Some(socket) = &self.sockets[i] else {
                continue;
            };
            let n = self.fill(batch, socket, Family::ALL[i])?;
            if n > 0 {
                batch.prefer_v6 = i == 1;
                received += n;
            }
            if !all && (n > 0 || !thorough) {
                batch.asked_all = false;
                break;
            }
        }
        if received == 0 {
            return Ok(0);
        }
        if let Some(steering) = &self.steering {
            let fds = self.fds_by_family();
            batch.retain(0, |meta, bytes| steering.answer(fds, meta, bytes));
        }
        batch.inject_faults();
        if let Some(capture) = self.capture() {
            for datagram in batch.datagrams() {
                let id = (self.id_of)(&datagram, self.port);
                capture::record_received(capture, self.port, &datagram, id);
            }
        }
        Ok(received)
    }

    fn fill(&self, batch: &mut RxBatch, socket: &Socket, family: Family) -> io::Result<usize> {
        // Each pending network error is reported once; a bound keeps a storm of them, or of empty datagrams, from holding the
        // caller.
        for _ in 0..8 {
            match batch.fill(socket.as_fd(), family) {
                // A sender of this device sends an empty one now and then. A caller that got 0 would take the socket for empty.
                Ok(n) if batch.drops_empty(n) => {}
                Ok(n) => return Ok(n),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN) => return Ok(0),
                    Some(libc::EINTR) => {}
                    Some(
                        libc::ECONNREFUSED
                        | libc::EHOSTUNREACH
                        | libc::ENETUNREACH
                        | libc::EHOSTDOWN
                        | libc::ENETDOWN
                        | libc::EMSGSIZE
                        | libc::EPROTO
                        | libc::EACCES
                        | libc::ENOMEM,
                    ) => {
                        self.receive_errors.fetch_add(1, Ordering::Relaxed);
                    }
                    _ => return Err(error),
                },
            }
        }
        Ok(0)
    }

    /// Notes that this process received a datagram of another live one: steering is out of date.
    pub fn note_misdelivery(&self) {
        if let Some(steering) = &self.steering {
            steering.note_misdelivery();
        }
    }

    /// Whether [`UdpPort::resteer`] has something to do.
    #[must_use]
    pub fn needs_resteer(&self) -> bool {
        self.steering.as_ref().is_some_and(Steering::wanted)
    }

    /// Repairs steering, step by step and without waiting. A worker thread calls it while [`UdpPort::needs_resteer`],
    /// again after the time in [`Resteer::Pending`]. Meanwhile another thread of this process must go on calling
    /// [`UdpPort::receive`]. The repairs are limited: at most one in 10 ms, and fewer when they change nothing.
    ///
    /// # Errors
    /// Those of the socket calls; the next call starts anew.
    pub fn resteer(&self) -> io::Result<Resteer> {
        match &self.steering {
            Some(steering) => steering.resteer(self.fds_by_family()),
            None => Ok(Resteer::Idle),
        }
    }

    /// The state of steering, for diagnostics.
    #[must_use]
    pub fn steering_state(&self) -> SteeringState {
        self.steering.as_ref().map_or(SteeringState::UNSHARED, Steering::state)
    }

    /// Counts of forwarded and dropped datagrams so far.
    #[must_use]
    pub fn forward_counters(&self) -> ForwardCounters {
        self.forwarder.as_ref().map(Forwarder::counters).unwrap_or_default()
    }

    pub(super) fn socket_for(&self, address: IpAddr) -> io::Result<&Socket> {
        self.sockets[Family::of(address) as usize].as_deref().ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::Unsupported,
                "the port does not receive this address family",
            )
        })
    }

    /// Records everything sent and received from now on. Only the first call counts; answers whether it was.
    pub fn set_capture(&self, capture: Arc<Capture>) -> bool {
        self.capture.set(capture).is_ok()
    }

    pub(crate) fn capture(&self) -> Option<&Capture> {
        self.capture.get().map(|capture| &**capture)
    }
}

/// Opens and binds one receiving socket; `None` when the family does not exist here.
fn open_socket(family: Family, options: &PortOptions) -> Result<Option<Socket>, OpenError> {
    let port = options.port;
    let (domain, any): (_, IpAddr) = match family {
        Family::V4 => (Domain::IPV4, Ipv4Addr::UNSPECIFIED.into()),
        Family::V6 => (Domain::IPV6, Ipv6Addr::UNSPECIFIED.into()),
    };
    let made = crate::sys::udp_socket(domain);
    let socket = match made.and_then(|socket| socket.set_nonblocking(true).map(|()| socket)) {
        Ok(socket) => socket,
        Err(error) => {
            return match error.raw_os_error() {
                Some(libc::EAFNOSUPPORT | libc::EPROTONOSUPPORT) => Ok(None),
                _ => Err(OpenError::new(port, "open a socket", error)),
            };
        }
    };
    configure(&socket, family, options)
        .map_err(|error| OpenError::new(port, "configure a socket", error))?;
    match socket.bind(&SocketAddr::new(any, port).into()) {
        Ok(()) => Ok(Some(socket)),
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => Ok(None),
        Err(error) => Err(OpenError::new(port, "bind a socket", error)),
    }
}

fn configure(socket: &Socket, family: Family, options: &PortOptions) -> io::Result<()> {
    let fd = socket.as_fd();
    if options.slot.is_some() {
        socket.set_reuse_port(true)?;
    }
    match family {
        Family::V4 => {
            for option in [libc::IP_PKTINFO, libc::IP_RECVTOS, libc::IP_RECVTTL] {
                sockopt::set(fd, libc::IPPROTO_IP, option, 1)?;
            }
            optional(
                "IP_MULTICAST_ALL",
                sockopt::set(fd, libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0),
            );
        }
        Family::V6 => {
            socket.set_only_v6(true)?;
            for option in [libc::IPV6_RECVPKTINFO, libc::IPV6_RECVTCLASS, libc::IPV6_RECVHOPLIMIT] {
                sockopt::set(fd, libc::IPPROTO_IPV6, option, 1)?;
            }
            optional("IPV6_FLOWINFO", sockopt::set(fd, libc::IPPROTO_IPV6, IPV6_FLOWINFO, 1));
            // Since Linux 4.20.
            optional(
                "IPV6_MULTICAST_ALL",
                sockopt::set(fd, libc::IPPROTO_IPV6, IPV6_MULTICAST_ALL, 0),
            );
            // Hardware and the kernel's rxe send zero checksums.
            sockopt::set(fd, libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1)?;
        }
    }
    // Since Linux 5.0.
    optional("UDP_GRO", sockopt::set(fd, libc::SOL_UDP, libc::UDP_GRO, 1));
    let size = c_int::try_from(options.receive_buffer).unwrap_or(c_int::MAX);
    if sockopt::set(fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, size).is_err() {
        sockopt::set(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, size)?;
    }
    Ok(())
}

/// Old kernels, and emulators of user mode (qemu-user), lack some options that only make things better.
fn optional(name: &str, result: io::Result<()>) {
    if let Err(error) = result {
        tracing::debug!(option = name, %error, "socket option not available");
    }
}
