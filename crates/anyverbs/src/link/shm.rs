//! The same-host link: packets to other processes of this user, through shared memory.
//!
//! A message of the ring is a packet without pad and ICRC: in front of its headers the addresses that it would have on
//! the wire, and room for the ACK of what came before: one that the responder owes goes along with its program's reply, in
//! the same cache line. Its payload may be as long as [`SEGMENT`]; the packet then stands for as many as it fills at the path MTU,
//! which it says. So PSNs are the same on every link, and the two ends of a connection need not agree on one.
//!
//! Nothing is lost on the way, but for a peer that has not read for [`PATIENCE`]: what is sent to it then vanishes, and
//! connections end by their retries, as they would on a network.

use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyverbs_net::Slot;
use anyverbs_net::shm::{
    Channel, Closed, Committed, Config, ConnectError, Endpoint, MAX_HEADER, Message, Poller,
    SendError, Sender,
};
use anyverbs_proto::counters::Counter;
use anyverbs_proto::env::TransmitError;
use anyverbs_proto::payload::{Data, Payload};
use anyverbs_proto::qp::{Arrival, Incoming};
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Gid, Psn, Qpn};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::opcode::{Opcode, Operation, Service};
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

/// Flow label with the family above it, traffic class, hop limit, count of packets, the ACK that goes along; then the
/// addresses.
const FIXED: usize = 12;
/// Where the ACK is: 0, or a 1 and the PSN up to which it goes.
const RIDER: usize = 8;
const RIDES: u8 = 1;
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

/// What is committed to a ring and not shown to its reader. The ring stays locked from the first message on.
#[derive(Debug, Default)]
pub(crate) struct Unflushed {
    sender: Option<Sender>,
    bytes: usize,
    /// The last message, if an ACK of its queue pair may go along.
    carrier: Option<Committed>,
    /// Packets and bytes that are to be counted.
    packets: u64,
    counted: u64,
}

impl Unflushed {
    #[inline]
    pub(crate) fn flush(&mut self, engine: &Engine) {
        if let Some(mut sender) = self.sender.take() {
            sender.flush();
            drop(sender);
            self.bytes = 0;
            self.carrier = None;
        }
        if self.packets > 0 {
            let (packets, bytes) = (mem::take(&mut self.packets), mem::take(&mut self.counted));
            engine.count(Counter::ShmSentPkts, packets);
            engine.count(Counter::SentPkts, packets);
            engine.count(Counter::SentBytes, bytes);
        }
    }

    /// The sending side to `peer`.
    #[inline]
    fn sender(&mut self, peer: &Peer) -> &mut Sender {
        if self.sender.as_ref().is_some_and(|sender| !sender.is_of(&peer.channel))
            && let Some(mut other) = self.sender.take()
        {
            other.flush();
            self.bytes = 0;
        }
        self.carrier = None;
        self.sender.get_or_insert_with(|| peer.channel.sender())
    }

    /// Notes `bytes` of payload.
    #[inline]
    fn note(&mut self, bytes: usize) {
        self.bytes += bytes;
        if self.bytes >= SHOW_AFTER
            && let Some(sender) = &mut self.sender
        {
            self.bytes = 0;
            sender.flush();
        }
    }

    /// Adds an ACK of everything up to `psn` to the last request; whether that could be.
    #[inline]
    pub(crate) fn ride(&mut self, psn: Psn) -> bool {
        let (Some(sender), Some(carrier)) = (&mut self.sender, self.carrier.take()) else {
            return false;
        };
        let [_, a, b, c] = psn.get().to_be_bytes();
        sender.amend(carrier, RIDER, &[RIDES, a, b, c])
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

    /// Puts a packet into the ring.
    #[expect(clippy::too_many_arguments, reason = "the parts of one packet")]
    pub(crate) fn send(
        &self,
        out: &mut Unflushed,
        engine: &'static Engine,
        shm: &Shm,
        from: Qpn,
        reliable: bool,
        now: impl Fn() -> Time,
        headers: &Headers,
        payload: &Payload<'_>,
    ) -> Result<(), Refused> {
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
            match self.path.ask(end + len, from, dest, takes_recv(opcode), now()) {
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
        let sender = out.sender(&self.peer);
        let message = loop {
            match sender.reserve(end, len) {
                Ok(mut room) => {
                    room.write_front(&head);
                    if len > 0 {
                        let to = room.payload_ptr() as u64;
                        payload
                            .copy_to_addr(&engine.mrs, &engine.memory, to)
                            .map_err(TransmitError::from)?;
                    }
                    break room.commit();
                }
                Err(SendError::Full) => {
                    let mut waiting = self.peer.waiting.lock();
                    if waiting.stalled {
                        return Ok(());
                    }
                    if waiting.asked.is_some() {
                        waiting.blocked.push(from);
                        return Err(TransmitError::Blocked.into());
                    }
                    // Room that came before the question may not be told.
                    let now = now();
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
                                && waiting.grace.is_some_and(|until| now() >= until) =>
                        {
                            Err(TransmitError::PeerGone.into())
                        }
                        Some(Gone::Dead) => Ok(()),
                        None => {
                            // The last that it sent may not be read yet.
                            waiting.blocked.push(from);
                            Err(TransmitError::Blocked.into())
                        }
                    };
                }
                Err(error) => {
                    debug_assert!(false, "no segment is longer than a ring takes: {error}");
                    return Ok(());
                }
            }
        };
        out.carrier = opcode.is_request().then_some(message);
        out.packets += 1;
        out.counted += (end - at + len) as u64;
        out.note(len);
        if let Some(counts) = probe {
            self.credit(out, CreditPacket { is_probe: true, dest, from, counts });
        }
        Ok(())
    }

    fn credit(&self, out: &mut Unflushed, packet: CreditPacket) {
        // One that finds no room is asked for again.
        let _ = put_credit(&self.peer, &self.front, out, packet);
    }
}

fn put_credit(peer: &Peer, front: &Front, out: &mut Unflushed, packet: CreditPacket) -> bool {
    let mut head = [0; MAX_HEADER];
    let at = front.write(&mut head);
    let end = at + CreditPacket::LEN;
    packet.emit(&mut head[at..end]);
    let Ok(mut room) = out.sender(peer).reserve(end, 0) else { return false };
    room.write_header(&head[..end]);
    room.commit();
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
        // All of it: its length is known here, and what follows overwrites the rest.
        into[..self.bytes.len()].copy_from_slice(&self.bytes);
        self.len
    }
}

/// What a message was.
#[derive(Debug)]
pub(crate) enum Received {
    /// The packet that is in the inbox.
    Packet,
    Credit(CreditPacket),
}

/// A packet, as it was read last: it stays where it is, since its parts are long to move about.
#[derive(Debug)]
pub(crate) struct Inbox<'a> {
    pub(crate) arrival: Arrival,
    pub(crate) packet: Incoming<'a>,
    /// Bytes of the packet's headers.
    pub(crate) headers_len: usize,
    /// What `arrival` was read from, of a packet by IPv4: the next one likely begins with the same. Otherwise of no family.
    front: [u8; FIXED + 8],
}

impl<'a> Inbox<'a> {
    pub(crate) fn new() -> Self {
        let any = Opcode::new(Service::Rc, Operation::Ack);
        let (source, destination) = (Gid::ZERO, Gid::ZERO);
        Self {
            arrival: Arrival { source, destination, traffic_class: 0, hop_limit: 0, flow_label: 0 },
            packet: Incoming {
                headers: Headers::new(Bth::new(any, Qpn::default(), Psn::default())),
                payload: Data::Bytes(&[]),
                packets: 1,
                acks: None,
            },
            headers_len: 0,
            front: [0; FIXED + 8],
        }
    }

    /// Reads a message. None for nonsense.
    ///
    /// The payload is good as long as the message is in the ring.
    #[inline]
    pub(crate) fn read(&mut self, message: &Message<'a>) -> Option<Received> {
        let mut head = [0; MAX_HEADER];
        let len = message.payload_len();
        let payload = Data::Shared { addr: message.payload_ptr() as u64, len };
        self.parse(message.header(&mut head), payload)
    }

    #[inline]
    fn parse(&mut self, head: &[u8], payload: Data<'a>) -> Option<Received> {
        let (fixed, rest) = head.split_first_chunk::<FIXED>()?;
        let rest = match rest.split_first_chunk::<8>() {
            // The peer may have written a header of no family, too.
            Some((addresses, rest))
                if fixed[0] == V4
                    && self.front[..6] == fixed[..6]
                    && self.front[FIXED..] == *addresses =>
            {
                rest
            }
            _ => self.read_arrival(fixed, rest)?,
        };
        if let Some(credit) = CreditPacket::parse(rest) {
            return Some(Received::Credit(credit));
        }
        let packet = &mut self.packet;
        packet.headers.parse_from(rest, payload.len()).ok()?;
        packet.packets = u32::from(u16::from_be_bytes([fixed[6], fixed[7]]));
        packet.payload = payload;
        packet.acks = match fixed[RIDER] {
            0 => None,
            RIDES if packet.headers.bth.opcode.is_request() => {
                Some(Psn::new(u32::from_be_bytes([
                    0,
                    fixed[RIDER + 1],
                    fixed[RIDER + 2],
                    fixed[RIDER + 3],
                ])))
            }
            _ => return None,
        };
        self.headers_len = rest.len();
        (packet.packets > 0).then_some(Received::Packet)
    }

    /// Reads how a packet came, and returns what follows that.
    fn read_arrival<'b>(&mut self, fixed: &[u8; FIXED], rest: &'b [u8]) -> Option<&'b [u8]> {
        self.front = [0; FIXED + 8];
        let rest = match fixed[0] {
            V4 => {
                let (addresses, rest) = rest.split_first_chunk::<8>()?;
                let [a, b, c, d, e, f, g, h] = *addresses;
                let gid = |ip: Ipv4Addr| Gid::from(IpAddr::V4(ip));
                self.arrival.source = gid([a, b, c, d].into());
                self.arrival.destination = gid([e, f, g, h].into());
                self.front[..6].copy_from_slice(&fixed[..6]);
                self.front[FIXED..].copy_from_slice(addresses);
                rest
            }
            V6 => {
                let (source, rest) = rest.split_first_chunk()?;
                let (destination, rest) = rest.split_first_chunk()?;
                self.arrival.source = Gid(*source);
                self.arrival.destination = Gid(*destination);
                rest
            }
            _ => return None,
        };
        self.arrival.flow_label = u32::from_be_bytes([0, fixed[1], fixed[2], fixed[3]]);
        (self.arrival.traffic_class, self.arrival.hop_limit) = (fixed[4], fixed[5]);
        Some(rest)
    }
}

/// What a closed channel says about its peer.
pub(crate) fn reason(closed: Closed) -> Gone {
    match closed {
        Closed::Version | Closed::Refused => Gone::Unwilling,
        // The process might live, but nothing that it says can be trusted.
        _ => Gone::Dead,
    }
}

#[cfg(test)]
mod tests;
