//! Datagrams out: equal datagrams to one destination are staged in one contiguous buffer and leave by one
//! `sendmsg(2)` with `UDP_SEGMENT` (udp(7)).

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;
use std::sync::Arc;

use socket2::Socket;

use crate::cmsg::{self, ControlBuffer};
use crate::sockopt;
use crate::sys;

use super::connected::{Connected, Lease};
use super::outlet::OutletRef;
use super::sending::SendingSocket;
use super::{MAX_PAYLOAD_V4, MAX_PAYLOAD_V6, UdpPort, capture, connected};

/// Most datagrams in one batch: the kernel's limit before Linux 6.9.
pub const MAX_SEGMENTS: usize = 64;

/// Bytes of the staging buffer.
const STAGING_LEN: usize = 65_536;
/// Longest wait for a full send buffer, in milliseconds, before a batch is dropped.
///
/// The caller may hold locks, so it is short; a device that takes longer has lost these packets
/// (`a_full_send_buffer_is_waited_for_briefly`).
const SEND_WAIT_MS: i32 = 5;
/// Pause, in milliseconds, before another try where the kernel sends no event for the room that it waits for (ENOBUFS). It is the
/// shortest that poll(2) knows.
const NO_EVENT_MS: i32 = 1;

/// The destination of datagrams and the fields of their IP headers. All datagrams of a batch agree in all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Address and port; IPv6 with scope id where it is link-local.
    pub address: SocketAddr,
    /// Source address, or `None` for the one of the routing table. Must be one of this host.
    pub source: Option<IpAddr>,
    /// Outgoing interface, 0 for the one of the routing table. A multicast group needs one.
    pub interface: u32,
    /// IPv4 TOS or IPv6 traffic class: DSCP and, in the low two bits, ECN.
    pub traffic_class: u8,
    /// IPv4 TTL or IPv6 hop limit; 0 for the system's default.
    pub hop_limit: u8,
    /// IPv6 flow label (20 bits).
    pub flow_label: u32,
    /// The sending socket, and so the source port: one sending socket for each receiving process.
    pub sending_socket: u8,
}

impl Destination {
    /// A destination with the system's defaults, on sending socket 0.
    #[must_use]
    pub fn new(address: SocketAddr) -> Self {
        Self {
            address,
            source: None,
            interface: 0,
            traffic_class: 0,
            hop_limit: 0,
            flow_label: 0,
            sending_socket: 0,
        }
    }
}

/// Counts of a batch so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxStats {
    /// System calls that sent something.
    pub sends: u64,
    /// Datagrams sent.
    pub segments: u64,
    /// Payload bytes sent.
    pub bytes: u64,
    /// Datagrams that the kernel did not take: no route, too long for the path, no room for too long.
    pub dropped: u64,
    /// `errno` of the last such refusal, 0 for none.
    pub last_error: i32,
    /// Batches that the kernel refused to segment and that left as single datagrams.
    pub gso_refused: u64,
}

/// Datagrams being collected for one destination.
///
/// Datagrams that are staged and not flushed when the batch is dropped are not sent.
pub struct TxBatch {
    staging: Box<[u8]>,
    control: ControlBuffer,
    to: Destination,
    /// For this batch: the sockets of a connected outlet.
    lease: Option<Lease>,
    /// Whether this batch leaves with `UDP_SEGMENT`, decided when it began by its sending socket.
    gso: bool,
    segments: usize,
    segment_size: usize,
    len: usize,
    last_len: usize,
    /// The comments of some datagrams, by their places in the batch, for a capture.
    notes: Vec<(usize, String)>,
    stats: TxStats,
}

impl TxBatch {
    /// An empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self {
            staging: vec![0; STAGING_LEN].into(),
            control: ControlBuffer::new(),
            to: Destination::new(SocketAddr::from(([0, 0, 0, 0], 0))),
            lease: None,
            gso: false,
            segments: 0,
            segment_size: 0,
            len: 0,
            last_len: 0,
            notes: Vec::new(),
            stats: TxStats::default(),
        }
    }

    /// Room for one more datagram of `len` bytes to `to`, and the IPv4 ID that it will carry. The caller fills the room
    /// completely (it holds old bytes). By an unconnected socket the ID is the index inside the GSO batch, or 0 where GSO is
    /// off.
    ///
    /// Flushes first when the datagram does not fit the batch: another destination, longer than the batch's segments,
    /// after a shorter one, or no room. A failure of that flush concerns earlier datagrams; it is lost packets, and
    /// shows in [`TxBatch::stats`] only.
    ///
    /// # Errors
    /// `InvalidInput` when `len` is 0 or more than UDP can carry; those of socket(2) when the sending socket cannot be opened.
    #[inline]
    pub fn segment<'a>(
        &mut self,
        port: &UdpPort,
        to: impl Into<OutletRef<'a>>,
        len: usize,
    ) -> io::Result<(&mut [u8], u16)> {
        let mut rooms = self.equal_segments(port, to, len, 1)?;
        // There is one at least.
        rooms.next().ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// As [`segment`](Self::segment), for up to `most` datagrams of one length, as many as fit the batch: one at least.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn equal_segments<'a>(
        &mut self,
        port: &UdpPort,
        to: impl Into<OutletRef<'a>>,
        len: usize,
        most: usize,
    ) -> io::Result<impl ExactSizeIterator<Item = (&mut [u8], u16)>> {
        let outlet = to.into();
        let to = outlet.to;
        let fits = self.segments > 0
            && self.last_len == self.segment_size
            && len <= self.segment_size
            && len != 0
            && self.segments < MAX_SEGMENTS
            && self.len + len <= max_payload(to)
            && self.to == *to
            && self.lease.as_ref().map(Lease::connected) == outlet.connected.map(Arc::as_ptr);
        if !fits {
            self.begin(port, outlet, len)?;
        }
        let n = if len == self.segment_size && most > 1 {
            most.min(MAX_SEGMENTS - self.segments).min((max_payload(to) - self.len) / len)
        } else {
            1
        };
        let (start, first, gso) = (self.len, self.segments, self.gso);
        let first_id = self.lease.as_ref().map_or(0, Lease::first_id);
        self.segments += n;
        self.len += n * len;
        self.last_len = len;
        let rooms = self.staging[start..start + n * len].chunks_exact_mut(len);
        let id = move |i| if gso { first_id.wrapping_add((first + i) as u16) } else { 0 };
        Ok(rooms.enumerate().map(move |(i, room)| (room, id(i))))
    }

    /// Starts a batch with a datagram of `len` bytes.
    fn begin(&mut self, port: &UdpPort, outlet: OutletRef<'_>, len: usize) -> io::Result<()> {
        let to = outlet.to;
        if len == 0 || len > max_payload(to) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "UDP payload length out of range",
            ));
        }
        // Counted in the statistics; the caller's new datagram is not to blame.
        let _ = self.flush(port);
        self.lease = outlet.connected.map(Connected::lease);
        self.gso = match &self.lease {
            Some(lease) => lease.unconnected().gso(),
            None => port.sending.of(to)?.gso(),
        };
        self.to = *to;
        self.segment_size = len;
        self.last_len = len;
        Ok(())
    }

    /// Takes the last `n` datagrams back, when their content could not be had after all. They have one length.
    pub fn discard_last(&mut self, n: usize) {
        let n = n.min(self.segments);
        if n > 0 {
            self.segments -= n;
            self.len -= n * self.last_len;
            // All segments before the last datagram have full size.
            self.last_len = self.segment_size;
            self.notes.retain(|(at, _)| *at < self.segments);
        }
    }

    /// Says what the last datagram is, for the port's capture.
    #[cold]
    pub fn note(&mut self, note: &str) {
        self.notes.push((self.segments.saturating_sub(1), note.to_owned()));
    }

    /// Datagrams staged and not yet sent.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.segments
    }

    /// Payload bytes staged and not yet sent.
    #[must_use]
    pub fn pending_bytes(&self) -> usize {
        self.len
    }

    /// Counts of this batch so far.
    #[must_use]
    pub fn stats(&self) -> TxStats {
        self.stats
    }

    /// Sends the staged datagrams. Waits for room in a full send buffer, up to 5 ms.
    ///
    /// When the kernel refuses to segment (a device without checksum offload), the datagrams leave one by one and the
    /// sending socket stops using GSO. IPv4 only: they then carry ID 0 and not the one that [`TxBatch::segment`] promised, in this one
    /// batch.
    ///
    /// # Errors
    /// Those of sendmsg(2). The batch is empty afterwards: datagrams that were not sent are lost.
    pub fn flush(&mut self, port: &UdpPort) -> io::Result<()> {
        let lease = self.lease.take();
        if self.segments == 0 {
            return Ok(());
        }
        let (segments, len) = (self.segments, self.len);
        let result = self.send_all(port, lease);
        self.segments = 0;
        self.len = 0;
        self.notes.clear();
        match result {
            Ok(()) => {
                self.stats.segments += segments as u64;
                self.stats.bytes += len as u64;
                Ok(())
            }
            Err((sent, error)) => {
                self.stats.segments += sent as u64;
                self.stats.bytes += (sent * self.segment_size).min(len) as u64;
                self.stats.dropped += (segments - sent) as u64;
                self.stats.last_error = error.raw_os_error().unwrap_or(libc::ETIMEDOUT);
                Err(error)
            }
        }
    }

    /// Sends the staged datagrams; on failure says how many were sent.
    fn send_all(&mut self, port: &UdpPort, lease: Option<Lease>) -> Result<(), (usize, io::Error)> {
        let sending = match &lease {
            Some(lease) => lease.unconnected(),
            None => port.sending.of(&self.to).map_err(|error| (0, error))?,
        };
        if let Some(capture) = port.capture() {
            let mut notes = self.notes.drain(..).peekable();
            for (i, bytes) in self.staging[..self.len].chunks(self.segment_size).enumerate() {
                let note = notes.next_if(|(at, _)| *at == i).map(|(_, note)| note);
                let first = lease.as_ref().map_or(0, Lease::first_id);
                let id = if self.gso { first.wrapping_add(i as u16) } else { 0 };
                let packet = (bytes, note.as_deref());
                capture::record_sent(capture, sending.port, &self.to, id, packet);
            }
        }
        if self.segments == 1 || self.gso {
            let connected = lease.as_ref().filter(|lease| lease.is_connected());
            let result = match connected {
                Some(lease) => self.send_connected(lease),
                None => self.send_batch(sending),
            };
            let is_report = connected.is_some() && result.as_ref().is_err_and(connected::is_report);
            match result {
                Err(error) if self.segments > 1 && gso_refused(&error) && !is_report => {
                    self.stats.gso_refused += 1;
                    self.send_singles(sending)?;
                    // The datagrams were fine, so it was the segmentation that was not.
                    sending.disable_gso();
                    tracing::info!(sending = self.to.sending_socket, to = %self.to.address, %error, "no UDP segmentation offload here");
                    Ok(())
                }
                result => result.map_err(|error| (0, error)),
            }
        } else {
            self.send_singles(sending)
        }
    }

    /// One sendmsg for the whole batch, by a connected socket.
    fn send_connected(&mut self, lease: &Lease) -> io::Result<()> {
        let segment_size = (self.segments > 1).then_some(self.segment_size as u16);
        let bytes = &self.staging[..self.len];
        waiting(lease.socket(), |_| lease.send(bytes, segment_size))?;
        self.stats.sends += 1;
        Ok(())
    }

    /// One sendmsg for the whole batch.
    fn send_batch(&mut self, sending: &SendingSocket) -> io::Result<()> {
        let segment_size = (self.segments > 1).then_some(self.segment_size as u16);
        let bytes = &self.staging[..self.len];
        with_sender(&self.to, &mut self.control, segment_size, bytes, |send| {
            waiting(&sending.socket, |socket| send(socket))
        })?;
        self.stats.sends += 1;
        Ok(())
    }

    /// The batch as single datagrams, with sendmmsg; on failure says how many were sent.
    fn send_singles(&mut self, sending: &SendingSocket) -> Result<(), (usize, io::Error)> {
        let (name, name_len) = name(&self.to);
        let control_len = write_control(&mut self.control, &self.to, None);
        let mut iovecs = [const { MaybeUninit::<libc::iovec>::uninit() }; MAX_SEGMENTS];
        let mut headers = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; MAX_SEGMENTS];
        for (i, bytes) in self.staging[..self.len].chunks_mut(self.segment_size).enumerate() {
            let iovec = iovecs[i]
                .write(libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() });
            // SAFETY: all-zero is a valid mmsghdr.
            let mut header: libc::mmsghdr = unsafe { MaybeUninit::zeroed().assume_init() };
            header.msg_hdr.msg_name = (&raw const name).cast_mut().cast();
            header.msg_hdr.msg_namelen = name_len;
            header.msg_hdr.msg_iov = iovec;
            header.msg_hdr.msg_iovlen = 1;
            if control_len > 0 {
                header.msg_hdr.msg_control = (&raw mut self.control).cast();
                header.msg_hdr.msg_controllen = control_len as _;
            }
            headers[i].write(header);
        }
        let mut sent = 0;
        while sent < self.segments {
            let result = waiting(&sending.socket, |socket| {
                // SAFETY: the first `segments` headers are initialised and point to live memory of the given sizes.
                let n = unsafe {
                    sys::sendmmsg(
                        socket.as_raw_fd(),
                        headers.as_mut_ptr().add(sent).cast(),
                        (self.segments - sent) as libc::c_uint,
                        libc::MSG_DONTWAIT as _,
                    )
                };
                if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
            });
            match result {
                Ok(n) => sent += n,
                Err(error) => return Err((sent, error)),
            }
            self.stats.sends += 1;
        }
        Ok(())
    }
}

impl UdpPort {
    /// Sends one datagram from the port itself, by which a firewall takes it for the answer to one that came there.
    ///
    /// # Errors
    /// Those of sendmsg(2).
    pub fn answer(&self, to: &Destination, datagram: &[u8]) -> io::Result<()> {
        let socket = self.socket_for(to.address.ip())?;
        if let Some(capture) = self.capture() {
            capture::record_sent(capture, self.port(), to, 0, (datagram, None));
        }
        with_sender(to, &mut ControlBuffer::new(), None, datagram, |send| send(socket))
    }
}

impl Default for TxBatch {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for TxBatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TxBatch")
            .field("to", &self.to)
            .field("segments", &self.segments)
            .field("len", &self.len)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

fn max_payload(to: &Destination) -> usize {
    if to.address.is_ipv4() { MAX_PAYLOAD_V4 } else { MAX_PAYLOAD_V6 }
}

/// Whether an error can mean that the path cannot segment. EINVAL has other reasons too, so the caller must see single
/// datagrams succeed before it believes that.
fn gso_refused(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EIO | libc::EINVAL | libc::ENOPROTOOPT | libc::EOPNOTSUPP)
    )
}

/// Repeats `send` while the buffer of `socket` is full, for a bounded time.
fn waiting<T>(socket: &Socket, mut send: impl FnMut(&Socket) -> io::Result<T>) -> io::Result<T> {
    let mut left_ms = SEND_WAIT_MS;
    loop {
        let error = match send(socket) {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::EAGAIN | libc::ENOBUFS) if left_ms > 0 => {
                // Short rounds: a wake-up may be for another thread's sake, and ENOBUFS has no event.
                let has_event = error.raw_os_error() == Some(libc::EAGAIN);
                let round_ms = if has_event { 2 * SEND_WAIT_MS } else { NO_EVENT_MS };
                let begin = std::time::Instant::now();
                let ready = sockopt::poll(socket.as_fd(), libc::POLLOUT, round_ms)?;
                if ready && !has_event {
                    std::thread::sleep(std::time::Duration::from_millis(NO_EVENT_MS as u64));
                }
                left_ms -= (begin.elapsed().as_millis() as i32).max(1);
            }
            _ => return Err(error),
        }
    }
}

/// Calls `f` with a function that sends these bytes by one sendmsg(2), without waiting.
fn with_sender<R>(
    to: &Destination,
    control: &mut ControlBuffer,
    segment_size: Option<u16>,
    bytes: &[u8],
    f: impl FnOnce(&dyn Fn(&Socket) -> io::Result<()>) -> R,
) -> R {
    let (name, name_len) = name(to);
    let control_len = write_control(control, to, segment_size);
    let mut iovec =
        libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: all-zero is a valid msghdr.
    let mut header: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    header.msg_name = (&raw const name).cast_mut().cast();
    header.msg_namelen = name_len;
    header.msg_iov = &raw mut iovec;
    header.msg_iovlen = 1;
    if control_len > 0 {
        header.msg_control = std::ptr::from_mut(control).cast();
        header.msg_controllen = control_len as _;
    }
    f(&|socket| {
        // SAFETY: `header` points to a live name, iovec, bytes and control buffer, of the given sizes, which are only read.
        let n = unsafe { sys::sendmsg(socket.as_raw_fd(), &raw const header, libc::MSG_DONTWAIT) };
        if n < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    })
}

/// The destination as the kernel wants it.
fn name(to: &Destination) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: all-zero is a valid sockaddr_storage.
    let mut name: libc::sockaddr_storage = unsafe { MaybeUninit::zeroed().assume_init() };
    let len = match to.address {
        SocketAddr::V4(a) => {
            let v4 = libc::sockaddr_in {
                sin_family: libc::AF_INET as _,
                sin_port: a.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(a.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: sockaddr_storage is large enough and aligned for sockaddr_in.
            unsafe { ptr::write((&raw mut name).cast(), v4) };
            size_of::<libc::sockaddr_in>()
        }
        SocketAddr::V6(a) => {
            let v6 = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as _,
                sin6_port: a.port().to_be(),
                sin6_flowinfo: (to.flow_label & 0xf_ffff).to_be(),
                sin6_addr: libc::in6_addr { s6_addr: a.ip().octets() },
                sin6_scope_id: a.scope_id(),
            };
            // SAFETY: sockaddr_storage is large enough and aligned for sockaddr_in6.
            unsafe { ptr::write((&raw mut name).cast(), v6) };
            size_of::<libc::sockaddr_in6>()
        }
    };
    (name, len as libc::socklen_t)
}

/// Writes the control messages for a destination; their length.
fn write_control(buffer: &mut ControlBuffer, to: &Destination, segment_size: Option<u16>) -> usize {
    let mut control = cmsg::Writer::new(buffer);
    if let Some(size) = segment_size {
        control.push(libc::SOL_UDP, libc::UDP_SEGMENT, size);
    }
    let (traffic_class, hop_limit) = (i32::from(to.traffic_class), i32::from(to.hop_limit));
    match to.address {
        SocketAddr::V4(_) => {
            if let (Some(IpAddr::V4(_)), _) | (_, 1..) = (to.source, to.interface) {
                let source = if let Some(IpAddr::V4(ip)) = to.source {
                    u32::from_ne_bytes(ip.octets())
                } else {
                    0
                };
                control.push(
                    libc::IPPROTO_IP,
                    libc::IP_PKTINFO,
                    libc::in_pktinfo {
                        ipi_ifindex: to.interface as _,
                        ipi_spec_dst: libc::in_addr { s_addr: source },
                        ipi_addr: libc::in_addr { s_addr: 0 },
                    },
                );
            }
            if traffic_class != 0 {
                control.push(libc::IPPROTO_IP, libc::IP_TOS, traffic_class);
            }
            if hop_limit != 0 {
                control.push(libc::IPPROTO_IP, libc::IP_TTL, hop_limit);
            }
        }
        SocketAddr::V6(_) => {
            if let (Some(IpAddr::V6(_)), _) | (_, 1..) = (to.source, to.interface) {
                let source =
                    if let Some(IpAddr::V6(ip)) = to.source { ip.octets() } else { [0; 16] };
                control.push(
                    libc::IPPROTO_IPV6,
                    libc::IPV6_PKTINFO,
                    libc::in6_pktinfo {
                        ipi6_addr: libc::in6_addr { s6_addr: source },
                        ipi6_ifindex: to.interface as _,
                    },
                );
            }
            if traffic_class != 0 {
                control.push(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, traffic_class);
            }
            if hop_limit != 0 {
                control.push(libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT, hop_limit);
            }
        }
    }
    control.len()
}
