//! The format of a message of the ring: the arrival of the packet, and its headers.

use std::net::{IpAddr, Ipv4Addr};

use anyverbs_net::shm::{MAX_HEADER, Message};
use anyverbs_proto::payload::Data;
use anyverbs_proto::qp::{Arrival, Incoming};
use anyverbs_proto::types::{Gid, Psn};
use anyverbs_proto::wire::bth::Bth;

use crate::udp::CreditPacket;

/// Flow label with the family above it, traffic class, hop limit, count of packets, the ACK that goes along; then the
/// addresses.
const FIXED: usize = 12;
/// Where the ACK is: 0, or a 1 and the PSN up to which it goes.
pub(super) const RIDER: usize = 8;
pub(super) const RIDES: u8 = 1;
/// Bytes in front of the headers of a packet by IPv4.
pub(super) const FRONT_V4: usize = FIXED + 8;
const V4: u8 = 0x40;
const V6: u8 = 0x60;

/// The front of a message.
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

    /// All of it, of a packet by IPv4.
    #[inline]
    pub(super) fn v4(&self) -> Option<&[u8; FRONT_V4]> {
        self.bytes.first_chunk().filter(|_| self.len == FRONT_V4)
    }

    #[inline]
    pub(super) fn write(&self, into: &mut [u8; MAX_HEADER]) -> usize {
        // All of it: its length is known here, and the headers overwrite the rest.
        into[..self.bytes.len()].copy_from_slice(&self.bytes);
        self.len
    }
}

/// The kinds of messages.
#[derive(Debug)]
pub enum Received {
    /// The packet that is in the inbox.
    Packet,
    /// Credit, or a question for it.
    Credit(CreditPacket),
}

/// A packet, as it was read last: it stays where it is, since its parts are long to move about.
#[derive(Debug)]
pub struct Inbox {
    /// Where it came from.
    pub arrival: Arrival,
    /// Its payload is good as long as the message is in the ring.
    pub packet: Incoming<'static>,
    /// Bytes of the packet's headers.
    pub headers_len: usize,
    /// The bytes of `arrival`, for a packet by IPv4: the next one likely begins with the same. Otherwise of no family.
    front: [u8; FRONT_V4],
    /// The header from which the packet was read, if that was a request by IPv4 with nothing but a base header.
    plain: Option<[u64; PLAIN / 8]>,
}

/// Bytes of the header of such a packet.
pub(super) const PLAIN: usize = FRONT_V4 + Bth::LEN;
/// Where its BTH has the pad, the request for an ACK and the PSN.
const PAD: usize = FRONT_V4 + 1;
const ACK_REQ: usize = FRONT_V4 + 8;

/// Such a header as words.
#[inline]
fn words(header: &[u8; PLAIN]) -> [u64; PLAIN / 8] {
    std::array::from_fn(|n| u64::from_le_bytes(std::array::from_fn(|i| header[8 * n + i])))
}

/// Tells whether two such headers are those of packets of one kind and one flow, to one queue pair. They may differ in
/// the piggybacked ACK, the pad, the request for an ACK and the PSN.
#[inline]
fn is_alike(a: &[u64; PLAIN / 8], b: &[u64; PLAIN / 8]) -> bool {
    const _: () = assert!(RIDER == 8 && PAD == 21 && ACK_REQ == 28 && PLAIN == 32);
    const MASK: [u64; 4] = [!0, !0 << 32, !(0x30 << 40), !(!0 << 32)];
    (0..4).fold(0, |differ, n| differ | (a[n] ^ b[n]) & MASK[n]) == 0
}

impl Default for Inbox {
    fn default() -> Self {
        Self {
            arrival: Arrival::default(),
            packet: Incoming::default(),
            headers_len: 0,
            front: [0; FRONT_V4],
            plain: None,
        }
    }
}

impl Inbox {
    /// Reads a message. None for nonsense, and for a packet that would have come from another host: the writer of a
    /// ring could pretend to be any.
    #[inline]
    pub fn read(
        &mut self,
        message: &Message<'_>,
        is_of_host: impl Fn(Gid) -> bool,
    ) -> Option<Received> {
        let len = message.payload_len();
        let payload = Data::Shared { addr: message.payload_ptr() as u64, len };
        self.parse(message.header_of(), payload, |inbox| {
            let mut head = [0; MAX_HEADER];
            inbox.parse_any(message.header(&mut head), payload, is_of_host)
        })
    }

    /// Reads a packet that is like the last by its header, if that is as long as such a one has, and others by `any`.
    #[inline]
    fn parse(
        &mut self,
        header: Option<[u8; PLAIN]>,
        payload: Data<'static>,
        any: impl FnOnce(&mut Self) -> Option<Received>,
    ) -> Option<Received> {
        match header {
            Some(header) if self.parse_alike(&header, payload) => Some(Received::Packet),
            _ => any(self),
        }
    }

    /// Reads the header of a packet that is like the last; false if it is not.
    #[inline]
    fn parse_alike(&mut self, header: &[u8; PLAIN], payload: Data<'static>) -> bool {
        let is_alike = self.plain.is_some_and(|known| is_alike(&known, &words(header)))
            && header[PAD] >> 4 & 3 == Bth::pad_of(payload.len())
            && header[RIDER] <= RIDES;
        if is_alike {
            // Any payload goes with an operation that has no other header.
            let [a, x, y, z] = std::array::from_fn(|i| header[ACK_REQ + i]);
            let bth = &mut self.packet.headers.bth;
            bth.pad = header[PAD] >> 4 & 3;
            bth.ack_req = a & 0x80 != 0;
            bth.psn = Psn::new(u32::from_be_bytes([0, x, y, z]));
            self.packet.acks = (header[RIDER] == RIDES).then(|| rider(header));
            self.packet.payload = payload;
        }
        is_alike
    }

    fn parse_any(
        &mut self,
        head: &[u8],
        payload: Data<'static>,
        is_of_host: impl Fn(Gid) -> bool,
    ) -> Option<Received> {
        self.plain = None;
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
            _ => self.read_arrival(fixed, rest, is_of_host)?,
        };
        if let Some(credit) = CreditPacket::parse(rest) {
            return Some(Received::Credit(credit));
        }
        let packet = &mut self.packet;
        packet.headers.parse_from(rest, payload.len()).ok()?;
        packet.packets = u32::from(u16::from_be_bytes([fixed[6], fixed[7]]));
        packet.payload = payload;
        let is_request = packet.headers.bth.opcode.is_request();
        packet.acks = match fixed[RIDER] {
            0 => None,
            RIDES if is_request => Some(rider(fixed)),
            _ => return None,
        };
        self.headers_len = rest.len();
        if packet.packets == 0 {
            return None;
        }
        if is_request && fixed[0] == V4 {
            self.plain = head.try_into().ok().map(words);
        }
        Some(Received::Packet)
    }

    /// Reads the arrival of a packet, and returns the rest.
    fn read_arrival<'b>(
        &mut self,
        fixed: &[u8; FIXED],
        rest: &'b [u8],
        is_of_host: impl Fn(Gid) -> bool,
    ) -> Option<&'b [u8]> {
        self.front = [0; FRONT_V4];
        let rest = match fixed[0] {
            V4 => {
                let (addresses, rest) = rest.split_first_chunk::<8>()?;
                let [a, b, c, d, e, f, g, h] = *addresses;
                let gid = |ip: Ipv4Addr| Gid::from(IpAddr::V4(ip));
                self.accept(gid([a, b, c, d].into()), is_of_host)?;
                self.arrival.destination = gid([e, f, g, h].into());
                self.front[..6].copy_from_slice(&fixed[..6]);
                self.front[FIXED..].copy_from_slice(addresses);
                rest
            }
            V6 => {
                let (source, rest) = rest.split_first_chunk()?;
                let (destination, rest) = rest.split_first_chunk()?;
                self.accept(Gid(*source), is_of_host)?;
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

impl Inbox {
    /// Takes an address as the source, if it is one of this host.
    #[inline]
    fn accept(&mut self, source: Gid, is_of_host: impl Fn(Gid) -> bool) -> Option<()> {
        // The last one was, and the next one likely is the same.
        if self.arrival.source != source {
            is_of_host(source).then_some(())?;
            self.arrival.source = source;
        }
        Some(())
    }
}

/// Up to where the ACK goes that goes along.
#[inline]
fn rider<const N: usize>(header: &[u8; N]) -> Psn {
    Psn::new(u32::from_be_bytes([0, header[RIDER + 1], header[RIDER + 2], header[RIDER + 3]]))
}

#[cfg(test)]
mod tests;
