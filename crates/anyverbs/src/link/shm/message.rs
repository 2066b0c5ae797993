//! What a message of the ring is: how a packet came, and its headers.

use std::net::{IpAddr, Ipv4Addr};

use anyverbs_net::shm::{MAX_HEADER, Message};
use anyverbs_proto::payload::Data;
use anyverbs_proto::qp::{Arrival, Incoming};
use anyverbs_proto::types::{Gid, Psn};

use crate::link::udp::CreditPacket;

/// Flow label with the family above it, traffic class, hop limit, count of packets, the ACK that goes along; then the
/// addresses.
const FIXED: usize = 12;
/// Where the ACK is: 0, or a 1 and the PSN up to which it goes.
pub(super) const RIDER: usize = 8;
pub(super) const RIDES: u8 = 1;
const V4: u8 = 0x40;
const V6: u8 = 0x60;

/// What a message begins with.
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
        Self {
            arrival: Arrival::default(),
            packet: Incoming::default(),
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

#[cfg(test)]
mod tests;
