//! Forwards datagrams that arrived at the wrong process of the host. They go to the right one over a connection to its
//! slot ([`crate::host`]). Before anything is sent, the kernel confirms that it is a process of the same user.
//!
//! The kernel queues as many of them as a socket's send buffer holds, some hundred small ones. So this is for the
//! moments in which steering is out of date, not for a stream. A datagram that does not fit is dropped and counted. If
//! the caller wants that ([`UdpPort::forward_or_keep`]), it is kept in order until there is room.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyverbs_locks::{Mutex, rank};
use socket2::Socket;

use crate::host::{LOOK_AGAIN, Name, Received, Slot, TIME_SLICES, WAIT};
use crate::sys::{self, Uncancelled};

use super::{Datagram, UdpPort};

/// Header of a forwarded datagram. Integers are little-endian.
///
/// kind 1 | flags 1 (bit 0: IPv6) | source port 2 | traffic class 1 | hop limit 1 | segment 2 | flow label 4 |
/// interface 4 | scope id of the source 4 | source 16 | destination 16 (IPv4: in the first 4)
const HEADER_LEN: usize = 52;
const KIND: u8 = 0xf2;
const MAX_LEN: usize = HEADER_LEN + 65_536;
/// Messages without a datagram that one call takes.
const MAX_IGNORED: usize = 64;
/// Most bytes that wait for room at other processes.
const KEEP: usize = 8 << 20;
/// Most datagrams that wait for room at one.
const KEEP_FOR_ONE: usize = 4096;

/// Counts the fates of datagrams for other processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ForwardCounters {
    /// Handed on.
    pub sent: u64,
    /// Dropped: the slot is free.
    pub dropped_dead: u64,
    /// Dropped: the owner's queue is full.
    pub dropped_full: u64,
    /// Kept for a while, because the owner's queue was full.
    pub kept: u64,
    /// Dropped: any other refusal.
    pub dropped_error: u64,
    /// Received from others.
    pub received: u64,
    /// Ignored: malformed messages, and connections of other users, which are closed unread.
    pub ignored: u64,
}

#[derive(Debug, Default)]
struct Counters {
    sent: AtomicU64,
    dropped_dead: AtomicU64,
    dropped_full: AtomicU64,
    kept: AtomicU64,
    dropped_error: AtomicU64,
    received: AtomicU64,
    ignored: AtomicU64,
}

/// The result of [`UdpPort::forward`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forwarded {
    /// Handed on.
    Sent,
    /// Kept until the owner's queue has room: [`UdpPort::forward_kept`].
    Kept,
    /// Dropped: the slot is free.
    Dead,
    /// Dropped: the owner's queue is full.
    Full,
    /// Dropped: the port is not shared, or the kernel refused.
    Failed,
}

/// A reused buffer for [`UdpPort::receive_forwarded`].
pub struct ForwardBuffer {
    bytes: Box<[u8]>,
}

impl ForwardBuffer {
    /// A buffer for the longest datagram.
    #[must_use]
    pub fn new() -> Self {
        Self { bytes: vec![0; MAX_LEN].into() }
    }
}

impl Default for ForwardBuffer {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for ForwardBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ForwardBuffer").finish_non_exhaustive()
    }
}

/// The forwarding side of a shared port.
#[derive(Debug)]
pub(crate) struct Forwarder {
    slot: Arc<Slot>,
    /// Connections to those that datagrams were handed on to.
    to: Mutex<rank::ForwardConnections, HashMap<u8, Socket>>,
    counters: Counters,
    kept: Mutex<rank::ForwardKept, KeptDatagrams>,
    /// Datagrams that are kept.
    kept_len: AtomicUsize,
}

/// Datagrams that wait for room, by slot.
#[derive(Debug, Default)]
struct KeptDatagrams {
    queues: BTreeMap<u8, Backlog>,
    bytes: usize,
}

/// Messages for one process, in their order, and since when each waits.
#[derive(Debug)]
struct Backlog {
    messages: VecDeque<(Instant, Box<[u8]>)>,
    /// When there may be room, and how long that is after it was tried last.
    at: Instant,
    pause: Duration,
}

impl UdpPort {
    /// Hands a datagram on to the process that holds `slot`. Never waits.
    pub fn forward(&self, slot: u8, datagram: &Datagram<'_>) -> Forwarded {
        match &self.forwarder {
            Some(forwarder) => forwarder.forward(slot, datagram),
            None => Forwarded::Failed,
        }
    }

    /// As [`forward`](Self::forward), but a datagram is kept if the owner's queue has no room for it. The following
    /// ones to that process are kept as well, until [`forward_kept`](Self::forward_kept) finds room. The limits are
    /// 4096 for one process, 8 MiB in all, and an age of [`WAIT`].
    pub fn forward_or_keep(&self, slot: u8, datagram: &Datagram<'_>) -> Forwarded {
        match &self.forwarder {
            Some(forwarder) => forwarder.forward_or_keep(slot, datagram),
            None => Forwarded::Failed,
        }
    }

    /// Forwards kept datagrams as far as there is room. If some are left, returns the time after which to call this
    /// again. It is [`LOOK_AGAIN`] for a process whose queue has just become full, and up to [`TIME_SLICES`] for one that takes nothing.
    /// Earlier calls do not try it. If none is left, the connections to other processes are closed.
    pub fn forward_kept(&self) -> Option<Duration> {
        self.forwarder.as_ref()?.forward_kept(Instant::now())
    }

    /// Datagrams that [`forward_kept`](Self::forward_kept) has to hand on.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.forwarder.as_ref().map_or(0, |f| f.kept_len.load(Ordering::SeqCst))
    }

    /// The next datagram that another process handed on to this one, if there is any.
    ///
    /// # Errors
    /// Those of recvmsg(2).
    pub fn receive_forwarded<'a>(
        &self,
        buffer: &'a mut ForwardBuffer,
    ) -> io::Result<Option<Datagram<'a>>> {
        match &self.forwarder {
            Some(forwarder) => forwarder.receive(buffer),
            None => Ok(None),
        }
    }
}

impl Forwarder {
    pub(crate) fn new(slot: Arc<Slot>) -> Self {
        Self {
            slot,
            to: Mutex::default(),
            counters: Counters::default(),
            kept: Mutex::default(),
            kept_len: AtomicUsize::new(0),
        }
    }

    pub(crate) fn slot(&self) -> &Arc<Slot> {
        &self.slot
    }

    pub(crate) fn counters(&self) -> ForwardCounters {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ForwardCounters {
            sent: load(&self.counters.sent),
            dropped_dead: load(&self.counters.dropped_dead),
            dropped_full: load(&self.counters.dropped_full),
            kept: load(&self.counters.kept),
            dropped_error: load(&self.counters.dropped_error),
            received: load(&self.counters.received),
            ignored: load(&self.counters.ignored),
        }
    }

    fn forward(&self, slot: u8, datagram: &Datagram<'_>) -> Forwarded {
        self.count(self.try_forward(slot, &encode(datagram), datagram.bytes))
    }

    fn forward_or_keep(&self, slot: u8, datagram: &Datagram<'_>) -> Forwarded {
        let header = encode(datagram);
        if self.kept_len.load(Ordering::SeqCst) == 0 {
            let outcome = self.try_forward(slot, &header, datagram.bytes);
            if outcome != Forwarded::Full {
                return self.count(outcome);
            }
        }
        let mut kept = self.kept.lock();
        if !kept.queues.contains_key(&slot) {
            let outcome = self.try_forward(slot, &header, datagram.bytes);
            if outcome != Forwarded::Full {
                return self.count(outcome);
            }
        }
        let message = [&header, datagram.bytes].concat().into_boxed_slice();
        let waiting = kept.queues.get(&slot).map_or(0, |waiting| waiting.messages.len());
        if waiting >= KEEP_FOR_ONE || kept.bytes + message.len() > KEEP {
            return self.count(Forwarded::Full);
        }
        kept.bytes += message.len();
        let now = Instant::now();
        let first =
            || Backlog { messages: VecDeque::new(), at: now + LOOK_AGAIN, pause: LOOK_AGAIN };
        kept.queues.entry(slot).or_insert_with(first).messages.push_back((now, message));
        self.kept_len.fetch_add(1, Ordering::SeqCst);
        self.count(Forwarded::Kept)
    }

    fn forward_kept(&self, now: Instant) -> Option<Duration> {
        if self.kept_len.load(Ordering::SeqCst) == 0 {
            // A new connection is made when one is needed. Those of ended processes would stay otherwise.
            self.to.lock().clear();
            return None;
        }
        let mut kept = self.kept.lock();
        let KeptDatagrams { queues, bytes } = &mut *kept;
        queues.retain(|&slot, waiting| {
            if waiting.at > now {
                return true;
            }
            waiting.pause = (waiting.pause * 2).min(TIME_SLICES);
            while let Some((since, message)) = waiting.messages.front() {
                match self.try_forward(slot, message, &[]) {
                    Forwarded::Full if now.duration_since(*since) < WAIT => {
                        waiting.at = now + waiting.pause;
                        return true;
                    }
                    Forwarded::Sent => {
                        waiting.pause = LOOK_AGAIN;
                        self.count(Forwarded::Sent)
                    }
                    outcome => self.count(outcome),
                };
                *bytes -= message.len();
                waiting.messages.pop_front();
            }
            false
        });
        let left = queues.values().map(|waiting| waiting.messages.len()).sum();
        self.kept_len.store(left, Ordering::SeqCst);
        let at = queues.values().map(|waiting| waiting.at).min()?;
        Some(at.saturating_duration_since(now))
    }

    fn count(&self, outcome: Forwarded) -> Forwarded {
        let counter = match outcome {
            Forwarded::Sent => &self.counters.sent,
            Forwarded::Kept => &self.counters.kept,
            Forwarded::Dead => &self.counters.dropped_dead,
            Forwarded::Full => &self.counters.dropped_full,
            Forwarded::Failed => &self.counters.dropped_error,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        outcome
    }

    fn try_forward(&self, slot: u8, header: &[u8], bytes: &[u8]) -> Forwarded {
        match self.send(slot, header, bytes) {
            Ok(()) => Forwarded::Sent,
            Err(error) => match error.kind() {
                io::ErrorKind::ConnectionRefused => Forwarded::Dead,
                io::ErrorKind::PermissionDenied => {
                    tracing::debug!(slot, %error, "nothing is handed on to another user");
                    Forwarded::Dead
                }
                io::ErrorKind::WouldBlock => Forwarded::Full,
                _ if error.raw_os_error() == Some(libc::ENOBUFS) => Forwarded::Full,
                _ => Forwarded::Failed,
            },
        }
    }

    fn send(&self, slot: u8, header: &[u8], bytes: &[u8]) -> io::Result<()> {
        if slot == 0 {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let _uncancelled = Uncancelled::new();
        let mut to = self.to.lock();
        if let Entry::Occupied(known) = to.entry(slot) {
            match send(known.get(), header, bytes) {
                // The process has ended. Another may have the slot.
                Err(error) if is_end(&error) => drop(known.remove()),
                result => return result,
            }
        }
        let (socket, _) = self.slot.registry().connect(Name::Slot(slot))?;
        let sent = send(&socket, header, bytes);
        match sent {
            Err(error) if is_end(&error) => Err(io::ErrorKind::ConnectionRefused.into()),
            sent => {
                to.insert(slot, socket);
                sent
            }
        }
    }

    fn receive<'a>(&self, buffer: &'a mut ForwardBuffer) -> io::Result<Option<Datagram<'a>>> {
        // A process that sends nonsense all the time does not keep the caller.
        for _ in 0..MAX_IGNORED {
            match self.slot.receive(&mut buffer.bytes)? {
                Received::Nothing => return Ok(None),
                Received::Message(len) if decode(&buffer.bytes[..len]).is_some() => {
                    self.counters.received.fetch_add(1, Ordering::Relaxed);
                    return Ok(decode(&buffer.bytes[..len]));
                }
                Received::Message(_) | Received::Stranger => {
                    self.counters.ignored.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Ok(None)
    }
}

/// Tells whether an error says that the process at the other end has ended.
fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, NotConnected};
    matches!(error.kind(), BrokenPipe | ConnectionReset | NotConnected | ConnectionRefused)
}

fn send(socket: &Socket, header: &[u8], bytes: &[u8]) -> io::Result<()> {
    let mut iovecs = [
        libc::iovec { iov_base: header.as_ptr().cast_mut().cast(), iov_len: header.len() },
        libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() },
    ];
    // SAFETY: all-zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = iovecs.as_mut_ptr();
    message.msg_iovlen = iovecs.len() as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    loop {
        // SAFETY: iovecs and their bytes are live and of the given sizes; sendmsg reads.
        if unsafe { sys::sendmsg(socket.as_raw_fd(), &raw const message, flags) } >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn encode(d: &Datagram<'_>) -> [u8; HEADER_LEN] {
    let mut h = [0; HEADER_LEN];
    h[0] = KIND;
    h[2..4].copy_from_slice(&d.source.port().to_le_bytes());
    h[4] = d.traffic_class;
    h[5] = d.hop_limit;
    h[6..8].copy_from_slice(&d.segment.to_le_bytes());
    h[8..12].copy_from_slice(&d.flow_label.to_le_bytes());
    h[12..16].copy_from_slice(&d.interface.to_le_bytes());
    if let SocketAddr::V6(source) = d.source {
        h[1] = 1;
        h[16..20].copy_from_slice(&source.scope_id().to_le_bytes());
    }
    for (at, ip) in [(20, d.source.ip()), (36, d.destination)] {
        match ip {
            IpAddr::V4(ip) => h[at..at + 4].copy_from_slice(&ip.octets()),
            IpAddr::V6(ip) => h[at..at + 16].copy_from_slice(&ip.octets()),
        }
    }
    h
}

fn decode(message: &[u8]) -> Option<Datagram<'_>> {
    let (h, bytes) = message.split_first_chunk::<HEADER_LEN>()?;
    if h[0] != KIND || h[1] > 1 {
        return None;
    }
    let u32_at = |at: usize| u32::from_le_bytes([h[at], h[at + 1], h[at + 2], h[at + 3]]);
    let ip = |at: usize| -> Option<IpAddr> {
        if h[1] == 0 {
            h[at..].first_chunk::<4>().map(|&octets| Ipv4Addr::from(octets).into())
        } else {
            h[at..].first_chunk::<16>().map(|&octets| Ipv6Addr::from(octets).into())
        }
    };
    let port = u16::from_le_bytes([h[2], h[3]]);
    let source = match ip(20)? {
        IpAddr::V4(ip) => SocketAddr::new(ip.into(), port),
        IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, u32_at(16)).into(),
    };
    Some(Datagram {
        source,
        destination: ip(36)?,
        interface: u32_at(12),
        traffic_class: h[4],
        hop_limit: h[5],
        flow_label: u32_at(8),
        segment: u16::from_le_bytes([h[6], h[7]]),
        bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_datagram_survives_the_header() {
        for (source, destination) in
            [("192.0.2.1:50000", "192.0.2.2"), ("[fe80::1%3]:50000", "2001:db8::2")]
        {
            let datagram = Datagram {
                source: source.parse().unwrap(),
                destination: destination.parse().unwrap(),
                interface: 7,
                traffic_class: 0x2a,
                hop_limit: 63,
                flow_label: 0xabcde,
                segment: 5,
                bytes: b"payload",
            };
            let mut message = encode(&datagram).to_vec();
            message.extend_from_slice(datagram.bytes);
            assert_eq!(decode(&message), Some(datagram));
            assert_eq!(decode(&message[..HEADER_LEN - 1]), None);
            message[0] = 0;
            assert_eq!(decode(&message), None);
        }
    }

    #[test]
    fn a_full_process_is_tried_ever_less_and_given_up() {
        let name = format!("av-forward-{}", std::process::id());
        let registry = crate::Registry::new(&name).unwrap();
        let slots = [(); 2].map(|()| Arc::new(Slot::claim_in(&registry).unwrap()));
        let [from, to] = slots.map(Forwarder::new);
        let datagram = Datagram {
            source: "127.0.0.1:50000".parse().unwrap(),
            destination: Ipv4Addr::LOCALHOST.into(),
            interface: 1,
            traffic_class: 0,
            hop_limit: 1,
            flow_label: 0,
            segment: 0,
            bytes: &[7; 280],
        };
        let slot = to.slot.number();
        while from.forward_or_keep(slot, &datagram) != Forwarded::Kept {}
        let begin = Instant::now();
        let (mut now, mut tries, mut last) = (begin, 0, Duration::ZERO);
        while let Some(pause) = from.forward_kept(now) {
            assert!(from.forward_kept(now).is_some_and(|again| again <= pause));
            assert!(pause >= last && pause <= TIME_SLICES, "{pause:?} after {last:?}");
            (now, tries, last) = (now + pause, tries + 1, pause);
        }
        assert_eq!(last, TIME_SLICES);
        assert!((80..100).contains(&tries), "{tries}");
        let waited = now - begin;
        assert!(waited >= WAIT - TIME_SLICES && waited <= WAIT + TIME_SLICES, "{waited:?}");
        let counters = from.counters();
        assert_eq!((counters.kept, counters.dropped_full), (1, 1));
        // A process that takes datagrams again is tried again soon.
        while from.forward_or_keep(slot, &datagram) != Forwarded::Kept {}
        while from.forward_or_keep(slot, &datagram) != Forwarded::Full {}
        let pause = from.forward_kept(Instant::now() + LOOK_AGAIN).unwrap();
        let now = Instant::now() + LOOK_AGAIN + pause;
        assert!(to.receive(&mut ForwardBuffer::new()).unwrap().is_some());
        assert!(from.forward_kept(now).unwrap() <= LOOK_AGAIN);
    }
}
