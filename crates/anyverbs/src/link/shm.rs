//! The same-host link: packets to other processes of this user, through shared memory.
//!
//! A message of the ring is a packet without pad and ICRC: in front of its headers the addresses that it would have on
//! the wire. Its payload may be as long as [`SEGMENT`]; the packet then stands for as many as it fills at the path MTU,
//! which it says. So PSNs are the same on every link, and the two ends of a connection need not agree on one.
//!
//! Nothing is lost on the way, but for a peer that has not read for [`PATIENCE`]: what is sent to it then vanishes, and
//! connections end by their retries, as they would on a network.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyverbs_net::Slot;
use anyverbs_net::shm::{
    Channel, Closed, Config, ConnectError, Endpoint, MAX_HEADER, Message, Poller, SendError, Sender,
};
use anyverbs_proto::counters::Counter;
use anyverbs_proto::env::TransmitError;
use anyverbs_proto::payload::{Data, Payload};
use anyverbs_proto::qp::{Arrival, Incoming};
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Gid, Qpn};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::packet::Headers;
use anyverbs_proto::wr::AddressVector;
use parking_lot::Mutex;

use super::direct::{self, Published};
use super::udp::{Asked, CreditPacket, takes_recv};
use crate::engine::Engine;
use crate::engine::pace::Credit;
use crate::engine::path::Path;
use crate::engine::timers::NEVER;

/// Bytes that a connected queue pair may have in flight here: half a ring.
pub(crate) const WINDOW: u32 = 256 << 10;
/// Longest payload of a packet.
pub(crate) const SEGMENT: u32 = 32 << 10;
/// Bytes after which the peer is shown what is there, though more follows under the same lock.
const SHOW_AFTER: usize = 16 << 10;
/// How long a full ring is waited for.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long requests to a process that has ended go on waiting, though their end is known. On a network they would until
/// their retries had run out, and programs rely on that: one whose peer has left with a message too many on its way has
/// taken what it wanted by then.
pub(crate) const GRACE: Duration = Duration::from_millis(250);
/// How long a process without this link is not asked again for the sake of a datagram.
const ABSENCE: Duration = Duration::from_secs(1);

/// Flow label with the family above it, traffic class, hop limit, count of packets; then the addresses.
const FIXED: usize = 8;
const V4: u8 = 0x40;
const V6: u8 = 0x60;

/// Why a peer is not one any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gone {
    /// The process has ended, or might as well have.
    Dead,
    /// It does not want this link.
    Unwilling,
}

/// Another process that has this link.
#[derive(Debug)]
pub(crate) struct Peer {
    channel: Arc<Channel>,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Since when an answer to a question for room is awaited.
    asked: Option<Time>,
    /// The answer did not come in time: what is sent vanishes until it comes.
    stalled: bool,
    blocked: Vec<Qpn>,
    gone: Option<Gone>,
    /// Until when requests to a process that has ended vanish; then they fail.
    grace: Option<Time>,
}

impl Peer {
    pub(crate) fn is(&self, channel: &Arc<Channel>) -> bool {
        Arc::ptr_eq(&self.channel, channel)
    }

    /// There is room. Who waited for it.
    pub(crate) fn take_room(&self, blocked: &mut Vec<Qpn>) {
        let mut waiting = self.waiting.lock();
        waiting.asked = None;
        waiting.stalled = false;
        blocked.append(&mut waiting.blocked);
    }

    /// It is gone. Who waited for it.
    pub(crate) fn end(&self, gone: Gone, now: Time, blocked: &mut Vec<Qpn>) {
        let mut waiting = self.waiting.lock();
        waiting.gone = Some(gone);
        waiting.grace.get_or_insert(now + GRACE);
        blocked.append(&mut waiting.blocked);
    }

    pub(crate) fn channel(&self) -> &Channel {
        &self.channel
    }

    pub(crate) fn is_open(&self) -> bool {
        self.channel.closed().is_none()
    }

    fn flush(&self) {
        self.channel.sender().flush();
    }
}

#[derive(Debug, Default)]
enum Entry {
    #[default]
    Unknown,
    Peer(Arc<Peer>),
    Absent(Instant),
}

/// The link of this process.
#[derive(Debug)]
pub(crate) struct Shm {
    endpoint: Endpoint,
    /// What is on its board, unless one-sided operations go by the rings.
    published: Option<Published>,
    /// By slot.
    entries: Mutex<Vec<Entry>>,
    /// When [`expire`](Self::expire) has something to do, in nanoseconds.
    next: AtomicU64,
}

impl Shm {
    /// With `direct`, one-sided operations need no message.
    pub(crate) fn new(slot: &Slot, direct: bool) -> io::Result<(Self, Poller)> {
        let board = if direct { direct::BOARD } else { 1 };
        let (endpoint, poller) = Endpoint::new(slot, Config { board, ..Config::default() })?;
        let published = direct.then(|| {
            direct::begin(endpoint.board());
            Published::default()
        });
        let entries = Mutex::new((0..256).map(|_| Entry::default()).collect());
        Ok((Self { endpoint, published, entries, next: AtomicU64::new(NEVER) }, poller))
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub(crate) fn published(&self) -> Option<&Published> {
        self.published.as_ref()
    }

    /// Accepts and ends connections.
    pub(crate) fn control(&self) {
        if let Err(error) = self.endpoint.control() {
            tracing::debug!(%error, "the same-host link's connections");
        }
    }

    /// The process that holds `slot`, if it has this link. `thorough`: it lives now, and is asked in any case.
    fn peer(&self, slot: u8, thorough: bool) -> Option<Arc<Peer>> {
        let mut entries = self.entries.lock();
        let entry = &mut entries[usize::from(slot)];
        match entry {
            Entry::Peer(peer)
                if peer.channel.closed().is_none() && (!thorough || peer.channel.is_alive()) =>
            {
                return Some(Arc::clone(peer));
            }
            Entry::Absent(since) if !thorough && since.elapsed() < ABSENCE => return None,
            _ => {}
        }
        // Twice: the slot's last owner may have ended, and not be known to have.
        for _ in 0..2 {
            match self.endpoint.connect(slot) {
                Ok(channel) if channel.max_payload() < SEGMENT as usize => break,
                Ok(channel) if channel.is_alive() => {
                    let peer = Arc::new(Peer { channel, waiting: Mutex::default() });
                    *entry = Entry::Peer(Arc::clone(&peer));
                    return Some(peer);
                }
                Ok(_) => self.control(),
                Err(ConnectError::Nobody | ConnectError::NotAnother) => break,
                Err(error) => {
                    tracing::debug!(%error, slot, "no same-host link");
                    break;
                }
            }
        }
        *entry = Entry::Absent(Instant::now());
        None
    }

    /// The peer at the other end of a channel.
    pub(crate) fn find(&self, channel: &Arc<Channel>) -> Option<Arc<Peer>> {
        match &self.entries.lock()[usize::from(channel.slot())] {
            Entry::Peer(peer) if peer.is(channel) => Some(Arc::clone(peer)),
            _ => None,
        }
    }

    /// A channel is closed.
    pub(crate) fn forget(&self, channel: &Arc<Channel>, gone: Gone) {
        let entry = &mut self.entries.lock()[usize::from(channel.slot())];
        if matches!(entry, Entry::Peer(peer) if peer.is(channel)) {
            *entry = match gone {
                Gone::Dead => Entry::Unknown,
                Gone::Unwilling => Entry::Absent(Instant::now()),
            };
        }
    }

    pub(crate) fn next(&self) -> u64 {
        self.next.load(Ordering::SeqCst)
    }

    /// Gives up waiting for peers whose rings have been full for too long.
    pub(crate) fn expire(&self, now: Time, resume: &mut Vec<Qpn>) {
        if now.as_nanos() < self.next() {
            return;
        }
        self.next.store(NEVER, Ordering::SeqCst);
        for entry in &*self.entries.lock() {
            let Entry::Peer(peer) = entry else { continue };
            let mut waiting = peer.waiting.lock();
            let Some(until) = waiting.asked.map(|at| at + PATIENCE) else { continue };
            if until > now {
                self.next.fetch_min(until.as_nanos(), Ordering::SeqCst);
            } else if !waiting.stalled {
                waiting.stalled = true;
                resume.append(&mut waiting.blocked);
            }
        }
    }
}

/// What is committed to a ring and not shown to its reader.
#[derive(Debug, Default)]
pub(crate) struct Unflushed {
    peer: Option<Arc<Peer>>,
    bytes: usize,
}

impl Unflushed {
    pub(crate) fn flush(&mut self) {
        self.bytes = 0;
        if let Some(peer) = self.peer.take() {
            peer.flush();
        }
    }

    /// Notes a message in the ring of `peer`, which `sender` has locked.
    fn note(&mut self, peer: &Arc<Peer>, sender: &mut Sender<'_>, bytes: usize) {
        if self.peer.as_ref().is_some_and(|other| !Arc::ptr_eq(other, peer)) {
            self.flush();
        }
        self.bytes += bytes;
        if self.bytes >= SHOW_AFTER {
            self.bytes = 0;
            self.peer = None;
            sender.flush();
        } else if self.peer.is_none() {
            self.peer = Some(Arc::clone(peer));
        }
    }
}

/// Why a packet did not go out.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Refused {
    Transmit(TransmitError),
    /// The peer does not have this link any more: the packet needs another route.
    Reroute,
}

impl<T: Into<TransmitError>> From<T> for Refused {
    fn from(error: T) -> Self {
        Self::Transmit(error.into())
    }
}

/// How packets of one queue pair, or to one address handle, leave.
#[derive(Clone, Debug)]
pub(crate) struct ShmRoute {
    pub(crate) peer: Arc<Peer>,
    path: Arc<Path>,
    /// Of a connected queue pair, else 0.
    mtu: usize,
    front: Front,
    /// Our address on it.
    source: Gid,
}

impl ShmRoute {
    /// The way to an address of this host; `mtu` of a connected queue pair. None where there is no such way.
    pub(crate) fn new(
        engine: &Engine,
        shm: &Shm,
        av: &AddressVector,
        slot: u8,
        mtu: Option<u32>,
    ) -> Option<Self> {
        let peer = shm.peer(slot, mtu.is_some())?;
        Some(Self {
            peer,
            path: engine.paths.path(av.dgid.to_ip(), av.scope_id, slot, true),
            mtu: mtu.unwrap_or(0) as usize,
            source: av.sgid,
            front: Front::new(&Arrival {
                source: av.sgid,
                destination: av.dgid,
                traffic_class: av.traffic_class,
                hop_limit: av.hop_limit,
                flow_label: av.flow_label,
            }),
        })
    }

    pub(crate) fn source(&self) -> Gid {
        self.source
    }

    /// Puts a packet into the ring; how long it is.
    #[expect(clippy::too_many_arguments, reason = "the parts of one packet")]
    pub(crate) fn send(
        &self,
        out: &mut Unflushed,
        engine: &'static Engine,
        shm: &Shm,
        from: Qpn,
        reliable: bool,
        now: Time,
        headers: &Headers,
        payload: &Payload<'_>,
    ) -> Result<usize, Refused> {
        let mut head = [0; MAX_HEADER];
        let at = self.front.write(&mut head);
        let end = at + headers.emit(&mut head[at..]);
        let len = payload.len();
        // The pad count, which is the link's affair.
        head[at + 1] = head[at + 1] & !0x30 | Bth::pad_of(len) << 4;
        if len > self.mtu && self.mtu > 0 {
            head[6..8].copy_from_slice(&(len.div_ceil(self.mtu) as u16).to_be_bytes());
        }
        let dest = headers.bth.dest_qpn;
        let opcode = headers.bth.opcode;
        let mut probe = None;
        if !reliable {
            match self.path.ask(end + len, from, dest, takes_recv(opcode), now) {
                Credit::Send(with) => probe = with,
                Credit::Blocked(with, until) => {
                    if let Some(counts) = with {
                        self.credit(out, CreditPacket { is_probe: true, dest, from, counts });
                    }
                    engine.wait_for_credit(until);
                    return Err(TransmitError::Blocked.into());
                }
            }
        }
        let mut sender = self.peer.channel.sender();
        loop {
            match sender.reserve(end, len) {
                Ok(mut room) => {
                    room.write_header(&head[..end]);
                    if len > 0 {
                        let to = room.payload_ptr() as u64;
                        payload
                            .copy_to_addr(&engine.mrs, &engine.memory, to)
                            .map_err(TransmitError::from)?;
                    }
                    room.commit();
                    break;
                }
                Err(SendError::Full) => {
                    let mut waiting = self.peer.waiting.lock();
                    if waiting.stalled {
                        return Ok(0);
                    }
                    if waiting.asked.is_some() {
                        waiting.blocked.push(from);
                        return Err(TransmitError::Blocked.into());
                    }
                    // Room that came before the question may not be told.
                    waiting.asked = Some(now);
                    sender.ask_for_room();
                    drop(waiting);
                    let until = now + PATIENCE;
                    shm.next.fetch_min(until.as_nanos(), Ordering::SeqCst);
                    engine.wake_before(until);
                }
                Err(SendError::Closed(_)) if self.mtu == 0 => return Err(Refused::Reroute),
                Err(SendError::Closed(_)) => {
                    let mut waiting = self.peer.waiting.lock();
                    return match waiting.gone {
                        Some(Gone::Unwilling) => Err(Refused::Reroute),
                        Some(Gone::Dead)
                            if reliable
                                && !opcode.is_response()
                                && waiting.grace.is_some_and(|until| now >= until) =>
                        {
                            Err(TransmitError::PeerGone.into())
                        }
                        Some(Gone::Dead) => Ok(0),
                        None => {
                            // The last that it sent may not be read yet.
                            waiting.blocked.push(from);
                            Err(TransmitError::Blocked.into())
                        }
                    };
                }
                Err(error) => {
                    debug_assert!(false, "no segment is longer than a ring takes: {error}");
                    return Ok(0);
                }
            }
        }
        out.note(&self.peer, &mut sender, len);
        drop(sender);
        engine.count(Counter::ShmSentPkts, 1);
        if let Some(counts) = probe {
            self.credit(out, CreditPacket { is_probe: true, dest, from, counts });
        }
        Ok(end - at + len)
    }

    fn credit(&self, out: &mut Unflushed, packet: CreditPacket) {
        // One that finds no room is asked for again.
        let _ = put_credit(&self.peer, &self.front, out, packet);
    }
}

fn put_credit(peer: &Arc<Peer>, front: &Front, out: &mut Unflushed, packet: CreditPacket) -> bool {
    let mut head = [0; MAX_HEADER];
    let at = front.write(&mut head);
    let end = at + CreditPacket::LEN;
    packet.emit(&mut head[at..end]);
    let mut sender = peer.channel.sender();
    let Ok(mut room) = sender.reserve(end, 0) else { return false };
    room.write_header(&head[..end]);
    room.commit();
    out.note(peer, &mut sender, 0);
    true
}

impl Shm {
    /// Answers a credit probe that came by this link. False if it has to take another.
    pub(crate) fn echo(&self, out: &mut Unflushed, asked: &Asked, packet: CreditPacket) -> bool {
        let Some(peer) = self.peer(packet.dest.slot(), false) else { return false };
        let front = Front::new(&Arrival {
            source: asked.to_us.into(),
            destination: asked.from.into(),
            traffic_class: 0,
            hop_limit: 0,
            flow_label: 0,
        });
        put_credit(&peer, &front, out, packet)
    }
}

/// What a message begins with.
#[derive(Clone, Copy, Debug)]
struct Front {
    bytes: [u8; FIXED + 32],
    len: usize,
}

impl Front {
    fn new(arrival: &Arrival) -> Self {
        let mut bytes = [0; FIXED + 32];
        bytes[..4].copy_from_slice(&(arrival.flow_label & 0xf_ffff).to_be_bytes());
        bytes[4] = arrival.traffic_class;
        bytes[5] = arrival.hop_limit;
        bytes[7] = 1;
        let addresses = (arrival.source.to_ip(), arrival.destination.to_ip());
        let len = if let (IpAddr::V4(source), IpAddr::V4(destination)) = addresses {
            bytes[0] = V4;
            bytes[FIXED..FIXED + 4].copy_from_slice(&source.octets());
            bytes[FIXED + 4..FIXED + 8].copy_from_slice(&destination.octets());
            FIXED + 8
        } else {
            bytes[0] = V6;
            bytes[FIXED..FIXED + 16].copy_from_slice(&arrival.source.0);
            bytes[FIXED + 16..].copy_from_slice(&arrival.destination.0);
            FIXED + 32
        };
        Self { bytes, len }
    }

    fn write(&self, into: &mut [u8; MAX_HEADER]) -> usize {
        into[..self.len].copy_from_slice(&self.bytes[..self.len]);
        self.len
    }
}

/// What a message is.
#[derive(Debug)]
pub(crate) enum Received<'a> {
    Packet(Arrival, Incoming<'a>),
    Credit(Arrival, CreditPacket),
}

/// Reads a message. None for nonsense.
///
/// The payload is good as long as the message is in the ring.
pub(crate) fn parse<'a>(message: &Message<'a>) -> Option<Received<'a>> {
    let mut head = [0; MAX_HEADER];
    let len = message.payload_len();
    let payload = Data::Shared { addr: message.payload_ptr() as u64, len };
    parse_header(message.header(&mut head), payload)
}

fn parse_header<'a>(head: &[u8], payload: Data<'a>) -> Option<Received<'a>> {
    let (fixed, rest) = head.split_first_chunk::<FIXED>()?;
    let (source, destination, rest) = match fixed[0] {
        V4 => {
            let (addresses, rest) = rest.split_first_chunk::<8>()?;
            let [a, b, c, d, e, f, g, h] = *addresses;
            let gid = |ip: Ipv4Addr| Gid::from(IpAddr::V4(ip));
            (gid([a, b, c, d].into()), gid([e, f, g, h].into()), rest)
        }
        V6 => {
            let (source, rest) = rest.split_first_chunk()?;
            let (destination, rest) = rest.split_first_chunk()?;
            (Gid(*source), Gid(*destination), rest)
        }
        _ => return None,
    };
    let flow_label = u32::from_be_bytes([0, fixed[1], fixed[2], fixed[3]]);
    let (traffic_class, hop_limit) = (fixed[4], fixed[5]);
    let arrival = Arrival { source, destination, traffic_class, hop_limit, flow_label };
    if let Some(credit) = CreditPacket::parse(rest) {
        return Some(Received::Credit(arrival, credit));
    }
    let headers = Headers::parse(rest, payload.len()).ok()?;
    let packets = u32::from(u16::from_be_bytes([fixed[6], fixed[7]]));
    if packets == 0 {
        return None;
    }
    Some(Received::Packet(arrival, Incoming { headers, payload, packets }))
}

/// What a closed channel says about its peer.
pub(crate) fn reason(closed: Closed) -> Gone {
    match closed {
        Closed::Version | Closed::Refused => Gone::Unwilling,
        // The process might live, but nothing that it says can be trusted.
        _ => Gone::Dead,
    }
}
