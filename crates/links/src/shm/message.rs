//! The format of a message of the ring: the arrival of the packet, and its headers.

use std::net::IpAddr;

use anyverbs_net::shm::{LANES, MAX_HEADER, Message};
use anyverbs_objects::base::Digest;
use anyverbs_proto::direct::{MAX_FETCH, Place};
use anyverbs_proto::payload::Data;
use anyverbs_proto::qp::{Arrival, Incoming};
use anyverbs_proto::reason::Told;
use anyverbs_proto::types::{Gid, PKey, Psn, Qpn};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::credit::CreditPacket;
use anyverbs_proto::wire::opcode::{Opcode, Operation, Service};
use anyverbs_proto::wire::packet::Headers;
use anyverbs_proto::wr::RemoteAddr;

/// The first byte of a packet between connected queue pairs. Both ends know the addresses, so a digest stands for them:
///
/// | bytes | what |
/// |---|---|
/// | 0 | [`CONNECTED`] |
/// | 1 | [`SOLICITED`], [`ACK_REQ`], [`ACKS`], [`PKEY`], [`ELSEWHERE`] |
/// | 2 | opcode |
/// | 3 | packets of the path MTU that it stands for |
/// | 4 to 7 | digest of the addresses |
/// | 8 to 10 | PSN |
/// | 11 to 13 | the PSN up to which it acknowledges, if [`ACKS`] is set |
/// | 14, 15 | low half of the destination QPN; the slot is the reader's |
///
/// All in this processor's byte order. The P_Key follows if [`PKEY`] is set; then, if [`ELSEWHERE`] is set, address, key, generation
/// and length of the payload; and then extension headers as on the wire.
const CONNECTED: u8 = 0x20;
/// Bytes in front of the extension headers.
pub(super) const CONNECTED_LEN: usize = 16;
const PKEY_LEN: usize = 2;
const SOLICITED: u64 = 1 << 8;
const ACK_REQ: u64 = 1 << 9;
/// It carries an ACK.
const ACKS: u64 = 1 << 10;
/// Its P_Key is not the default one.
const PKEY: u64 = 1 << 11;
/// Its payload is not in the message: the reader fetches it.
const ELSEWHERE: u64 = 1 << 12;
/// Bytes of the place of a payload.
const PLACE_LEN: usize = 20;

/// The first byte of a message that opens a lane ([`LaneCall`]). The number of the lane follows. All else stands where a packet
/// between connected queue pairs has it, with the number of the first cell in place of PSNs.
const OPENS_LANE: u8 = 0x10;

/// A process has opened a lane from one of its queue pairs to one of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneCall {
    /// The lane.
    pub index: u8,
    /// The number of its first cell.
    pub first: u32,
    /// Source and destination of its packets.
    pub digest: Digest,
    /// The queue pair that sends.
    pub from: Qpn,
    /// The queue pair that receives.
    pub dest: Qpn,
}

impl LaneCall {
    /// Bytes of the message.
    pub(super) const LEN: usize = CONNECTED_LEN;

    pub(super) fn emit(&self) -> [u8; Self::LEN] {
        let first = u64::from(OPENS_LANE)
            | u64::from(self.index) << 8
            | u64::from(self.from.get() as u16) << 16
            | u64::from(self.digest.0) << 32;
        let second = u64::from(self.first) | u64::from(self.dest.get() as u16) << 48;
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&first.to_ne_bytes());
        bytes[8..].copy_from_slice(&second.to_ne_bytes());
        bytes
    }

    fn parse(head: &[u8], (from, to): (u8, u8)) -> Option<Self> {
        let fixed: &[u8; Self::LEN] = head.try_into().ok()?;
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| fixed[at + i]));
        let (first, second) = (word(0), word(8));
        let qpn = |slot: u8, low: u16| Qpn::new(u32::from(slot) << 16 | u32::from(low));
        let index = (first >> 8) as u8;
        (usize::from(index) < LANES).then(|| Self {
            index,
            first: second as u32,
            digest: Digest((first >> 32) as u32).from_slot(from),
            from: qpn(from, (first >> 16) as u16),
            dest: qpn(to, (second >> 48) as u16),
        })
    }
}

/// The front of other packets: flow label with the family above it, traffic class, hop limit; then the addresses.
const FIXED: usize = 8;
const V4: u8 = 0x40;
const V6: u8 = 0x60;

/// The front of a message that has addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Front {
    bytes: [u8; FIXED + 32],
    len: usize,
}

impl Front {
    pub(super) fn new(arrival: &Arrival) -> Self {
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

    #[inline]
    pub(super) fn write(&self, into: &mut [u8; MAX_HEADER]) -> usize {
        // All of it: its length is known here, and the headers overwrite the rest.
        into[..self.bytes.len()].copy_from_slice(&self.bytes);
        self.len
    }

    /// Writes the header of a packet that stands for `packets`, with a payload of `len` bytes; returns where the packet's
    /// headers begin and end.
    pub(super) fn emit(
        &self,
        headers: &Headers,
        len: usize,
        packets: u16,
        head: &mut [u8; MAX_HEADER],
    ) -> (usize, usize) {
        let at = self.write(head);
        let end = at + headers.emit(&mut head[at..]);
        head[6..8].copy_from_slice(&packets.to_be_bytes());
        // The pad count, which is the link's affair.
        head[at + 1] = head[at + 1] & !0x30 | Bth::pad_of(len) << 4;
        (at, end)
    }
}

/// Whether the header of a packet may have a digest for its addresses.
#[inline]
pub(super) fn is_connected(opcode: Opcode) -> bool {
    matches!(opcode.service, Service::Rc | Service::Uc)
}

/// The bytes in front of the extension headers: `bth` of a packet that stands for `packets`, and carries the ACK `acks`. Its payload
/// may be elsewhere.
#[inline]
fn fixed(
    bth: &Bth,
    digest: Digest,
    packets: u8,
    acks: Option<Psn>,
    is_elsewhere: bool,
) -> [u8; CONNECTED_LEN] {
    let flags = if bth.solicited { SOLICITED } else { 0 }
        | if bth.ack_req { ACK_REQ } else { 0 }
        | if acks.is_some() { ACKS } else { 0 }
        | if bth.pkey == PKey::DEFAULT { 0 } else { PKEY }
        | if is_elsewhere { ELSEWHERE } else { 0 };
    let first = u64::from(CONNECTED)
        | flags
        | u64::from(bth.opcode.code()) << 16
        | u64::from(packets) << 24
        | u64::from(digest.0) << 32;
    let second = u64::from(bth.psn.get())
        | u64::from(acks.map_or(0, Psn::get)) << 24
        | u64::from(bth.dest_qpn.get() as u16) << 48;
    let mut bytes = [0; CONNECTED_LEN];
    bytes[..8].copy_from_slice(&first.to_ne_bytes());
    bytes[8..].copy_from_slice(&second.to_ne_bytes());
    bytes
}

/// Writes the header of a packet between connected queue pairs that stands for `packets`; returns its length. The peer fetches the
/// payload from where it is `elsewhere`.
#[inline]
pub(super) fn emit_connected(
    headers: &Headers,
    digest: Digest,
    packets: u8,
    acks: Option<Psn>,
    elsewhere: Option<(Place, u32)>,
    head: &mut [u8; MAX_HEADER],
) -> usize {
    let fixed = fixed(&headers.bth, digest, packets, acks, elsewhere.is_some());
    head[..CONNECTED_LEN].copy_from_slice(&fixed);
    let mut len = CONNECTED_LEN;
    if headers.bth.pkey != PKey::DEFAULT {
        head[len..len + PKEY_LEN].copy_from_slice(&headers.bth.pkey.0.to_ne_bytes());
        len += PKEY_LEN;
    }
    if let Some((Place { at, generation }, bytes)) = elsewhere {
        let place = &mut head[len..len + PLACE_LEN];
        place[..8].copy_from_slice(&at.va.to_ne_bytes());
        for (i, half) in [at.rkey, generation, bytes].into_iter().enumerate() {
            place[8 + 4 * i..][..4].copy_from_slice(&half.to_ne_bytes());
        }
        len += PLACE_LEN;
    }
    len + headers.emit_extensions(&mut head[len..])
}

/// Reads the headers of a NAK whose payload is its reason.
#[cold]
fn parse_refusal(headers: &mut Headers, bth: Bth, extensions: &[u8], len: usize) -> Option<()> {
    let is_refusal = bth.opcode.operation == Operation::Ack && len == Told::LEN;
    let bth = Bth { pad: 0, ..bth };
    is_refusal.then(|| headers.parse_extensions(bth, extensions, 0).ok())?
}

/// Reads where a payload is that is not in the message; the rest.
fn parse_place<'a>(bytes: &'a [u8], here: Data<'_>) -> Option<(Data<'static>, &'a [u8])> {
    let (words, rest) = bytes.split_first_chunk::<PLACE_LEN>()?;
    let half = |at: usize| u32::from_ne_bytes(std::array::from_fn(|i| words[at + i]));
    let va = u64::from_ne_bytes(std::array::from_fn(|i| words[i]));
    let (at, len) = (RemoteAddr { va, rkey: half(8) }, half(16));
    let place = Place { at, generation: half(12) };
    let fits = here.is_empty() && (1..=MAX_FETCH).contains(&len);
    fits.then_some((Data::Elsewhere(place, len), rest))
}

/// The kinds of messages.
#[derive(Debug)]
pub enum Received {
    /// The packet that is in the inbox.
    Packet,
    /// Credit, or a question for it.
    Credit(CreditPacket),
    /// A lane was opened.
    Lane(LaneCall),
}

/// A packet, as it was read last: it stays where it is, since its parts are long to move about.
#[derive(Debug, Default)]
pub struct Inbox {
    /// Where it came from, unless it has a digest.
    pub arrival: Arrival,
    /// The digest of a packet between connected queue pairs, with the slot of its sender.
    pub digest: Option<Digest>,
    /// Its payload is good as long as the message is in the ring.
    pub packet: Incoming<'static>,
    /// Bytes of the packet's headers.
    pub headers_len: usize,
}

impl Inbox {
    /// Reads a message from process `from` to process `to` of this host, both slots. None for nonsense, and for a packet that
    /// would have come from another host: the writer of a ring could pretend to be any.
    #[inline]
    pub fn read(
        &mut self,
        message: &Message<'_>,
        (from, to): (u8, u8),
        is_of_host: impl Fn(Gid) -> bool,
    ) -> Option<Received> {
        let len = message.payload_len();
        let payload = Data::Shared { addr: message.payload_ptr() as u64, len };
        let mut head = [0; MAX_HEADER];
        self.parse(message.header(&mut head), payload, (from, to), is_of_host)
    }

    #[inline]
    fn parse(
        &mut self,
        head: &[u8],
        payload: Data<'static>,
        (from, to): (u8, u8),
        is_of_host: impl Fn(Gid) -> bool,
    ) -> Option<Received> {
        match head.split_first_chunk() {
            Some((fixed, extensions)) if fixed[0] == CONNECTED => {
                self.parse_connected(fixed, extensions, payload, (from, to))
            }
            Some((fixed, _)) if fixed[0] == OPENS_LANE => {
                LaneCall::parse(head, (from, to)).map(Received::Lane)
            }
            _ => self.parse_addressed(head, payload, is_of_host),
        }
    }

    #[inline]
    fn parse_connected(
        &mut self,
        fixed: &[u8; CONNECTED_LEN],
        extensions: &[u8],
        payload: Data<'static>,
        (from, to): (u8, u8),
    ) -> Option<Received> {
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| fixed[at + i]));
        let (first, second) = (word(0), word(8));
        let opcode = Opcode::parse((first >> 16) as u8).filter(|opcode| is_connected(*opcode))?;
        let (pkey, extensions) = if first & PKEY == 0 {
            (PKey::DEFAULT, extensions)
        } else {
            let (pkey, extensions) = extensions.split_first_chunk()?;
            (PKey(u16::from_ne_bytes(*pkey)), extensions)
        };
        let (payload, extensions) = if first & ELSEWHERE == 0 {
            (payload, extensions)
        } else {
            parse_place(extensions, payload)?
        };
        let dest = Qpn::new(u32::from(to) << 16 | (second >> 48) as u32);
        let bth = Bth {
            solicited: first & SOLICITED != 0,
            migreq: true,
            pad: Bth::pad_of(payload.len()),
            ack_req: first & ACK_REQ != 0,
            pkey,
            ..Bth::new(opcode, dest, Psn::new(second as u32 & 0xff_ffff))
        };
        let packet = &mut self.packet;
        if packet.headers.parse_extensions(bth, extensions, payload.len()).is_err() {
            parse_refusal(&mut packet.headers, bth, extensions, payload.len())?;
        }
        packet.packets = (first >> 24) as u32 & 0xff;
        packet.payload = payload;
        packet.acks = (first & ACKS != 0).then(|| Psn::new((second >> 24) as u32 & 0xff_ffff));
        self.digest = Some(Digest((first >> 32) as u32).from_slot(from));
        self.headers_len = Bth::LEN + extensions.len();
        let fits = packet.packets > 0 && (packet.acks.is_none() || opcode.is_request());
        fits.then_some(Received::Packet)
    }

    #[inline(never)]
    fn parse_addressed(
        &mut self,
        head: &[u8],
        payload: Data<'static>,
        is_of_host: impl Fn(Gid) -> bool,
    ) -> Option<Received> {
        let (fixed, rest) = head.split_first_chunk::<FIXED>()?;
        let rest = self.read_arrival(fixed, rest, is_of_host)?;
        if let Some(credit) = CreditPacket::parse(rest) {
            return Some(Received::Credit(credit));
        }
        let packet = &mut self.packet;
        if packet.headers.parse_from(rest, payload.len()).is_err() {
            // NAKs of XRC have no other form.
            let (bth, extensions) = rest.split_first_chunk()?;
            let bth = Bth::parse(bth).ok().filter(|bth| bth.opcode.service == Service::Xrc)?;
            parse_refusal(&mut packet.headers, bth, extensions, payload.len())?;
        }
        packet.packets = u32::from(u16::from_be_bytes([fixed[6], fixed[7]]));
        packet.payload = payload;
        packet.acks = None;
        self.digest = None;
        self.headers_len = rest.len();
        (packet.packets > 0).then_some(Received::Packet)
    }

    /// Reads the arrival of a packet, and returns the rest.
    fn read_arrival<'b>(
        &mut self,
        fixed: &[u8; FIXED],
        rest: &'b [u8],
        is_of_host: impl Fn(Gid) -> bool,
    ) -> Option<&'b [u8]> {
        let (source, destination, rest) = match fixed[0] {
            V4 => {
                let (&[a, b, c, d, e, f, g, h], rest) = rest.split_first_chunk::<8>()?;
                let gid = |ip: [u8; 4]| Gid::from(IpAddr::V4(ip.into()));
                (gid([a, b, c, d]), gid([e, f, g, h]), rest)
            }
            V6 => {
                let (source, rest) = rest.split_first_chunk()?;
                let (destination, rest) = rest.split_first_chunk()?;
                (Gid(*source), Gid(*destination), rest)
            }
            _ => return None,
        };
        // The last one was, and the next one likely is the same.
        if self.arrival.source != source {
            is_of_host(source).then_some(())?;
            self.arrival.source = source;
        }
        self.arrival.destination = destination;
        self.arrival.flow_label = u32::from_be_bytes([0, fixed[1], fixed[2], fixed[3]]);
        (self.arrival.traffic_class, self.arrival.hop_limit) = (fixed[4], fixed[5]);
        Some(rest)
    }
}

#[cfg(test)]
mod tests;
