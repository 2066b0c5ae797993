//! The headers around an ESP packet: put there, and taken away.

use super::super::checksum;
use super::super::frame::{Frame, Headers, Network, PROTO_UDP};

const PROTO_IPV4: u8 = 4;
const PROTO_IPV6: u8 = 41;
const PROTO_ESP: u8 = 50;
const ETHER_IPV4: u16 = 0x0800;
const ETHER_IPV6: u16 = 0x86dd;
const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;
/// Bytes of a UDP header.
pub(super) const UDP_LEN: usize = 8;
/// Time to live of outer headers that say none.
const TTL: u8 = 64;

/// Outer headers of a tunnel (`struct ib_uverbs_flow_action_esp_encap`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encapsulation {
    /// IP.
    pub ip: OuterIp,
    /// Source and destination port, for ESP in UDP (RFC 3948).
    pub udp: Option<(u16, u16)>,
}

/// Outer IP header of a tunnel. A time to live or hop limit of 0 stands for 64.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OuterIp {
    /// IPv4.
    V4 {
        /// Source.
        src: u32,
        /// Destination.
        dst: u32,
        /// Type of service.
        tos: u8,
        /// Time to live.
        ttl: u8,
        /// Don't fragment.
        df: bool,
    },
    /// IPv6.
    V6 {
        /// Source.
        src: u128,
        /// Destination.
        dst: u128,
        /// Flow label.
        flow_label: u32,
        /// Traffic class.
        traffic_class: u8,
        /// Hop limit.
        hop_limit: u8,
    },
}

/// A packet that is to be encrypted.
pub(super) struct Packet<'a> {
    bytes: &'a [u8],
    outer: &'a Headers,
}

/// The protocol number of an IP packet, by its first byte.
pub(super) fn version_protocol(first: u8) -> Option<u8> {
    match first >> 4 {
        4 => Some(PROTO_IPV4),
        6 => Some(PROTO_IPV6),
        _ => None,
    }
}

impl<'a> Packet<'a> {
    /// `None` if it is cut short.
    pub(super) fn new(frame: &'a Frame<'a>) -> Option<Self> {
        let bytes = frame.bytes.get(..frame.outer.network_end)?;
        (frame.outer.transport_at <= bytes.len()).then_some(Self { bytes, outer: &frame.outer })
    }

    /// With its IP header.
    pub(super) fn whole(&self) -> &'a [u8] {
        &self.bytes[self.outer.network_at..]
    }

    /// Without it.
    pub(super) fn above_ip(&self) -> &'a [u8] {
        &self.bytes[self.outer.transport_at..]
    }

    /// Begins the frame of a packet in transport mode, up to the ESP header; the protocol that is carried.
    pub(super) fn open_transport(&self, to: &mut Vec<u8>) -> u8 {
        to.extend(&self.bytes[..self.outer.transport_at]);
        let at = protocol_at(to, self.outer);
        std::mem::replace(&mut to[at], PROTO_ESP)
    }

    /// Begins the frame of a packet in tunnel mode, up to the ESP header; the protocol that is carried. Lengths and checksum
    /// come with [`finish`].
    pub(super) fn open_tunnel(&self, around: &Encapsulation, to: &mut Vec<u8>) -> u8 {
        let network_at = self.outer.network_at;
        to.extend(&self.bytes[..network_at]);
        let proto = if around.udp.is_some() { PROTO_UDP } else { PROTO_ESP };
        let or_default = |ttl: u8| if ttl == 0 { TTL } else { ttl };
        let ether_type = match around.ip {
            OuterIp::V4 { src, dst, tos, ttl, df } => {
                let flags = u8::from(df) << 6;
                to.extend([0x45, tos, 0, 0, 0, 0, flags, 0, or_default(ttl), proto, 0, 0]);
                to.extend(src.to_be_bytes());
                to.extend(dst.to_be_bytes());
                ETHER_IPV4
            }
            OuterIp::V6 { src, dst, flow_label, traffic_class, hop_limit } => {
                let word = 6 << 28 | u32::from(traffic_class) << 20 | flow_label & 0xf_ffff;
                to.extend(word.to_be_bytes());
                to.extend([0, 0, proto, or_default(hop_limit)]);
                to.extend(src.to_be_bytes());
                to.extend(dst.to_be_bytes());
                ETHER_IPV6
            }
        };
        to[network_at - 2..network_at].copy_from_slice(&ether_type.to_be_bytes());
        if let Some((src, dst)) = around.udp {
            to.extend(src.to_be_bytes());
            to.extend(dst.to_be_bytes());
            // No checksum is needed: the packet has one of its own (RFC 3948, 2.1).
            to.extend([0; 4]);
        }
        version_protocol(self.bytes[network_at]).unwrap_or(PROTO_IPV4)
    }
}

/// The place of the protocol number for the header at `transport_at`.
fn protocol_at(bytes: &[u8], outer: &Headers) -> usize {
    if matches!(outer.network, Some(Network::V4 { .. })) {
        return outer.network_at + 9;
    }
    let mut at = outer.network_at + 6;
    let mut header = outer.network_at + IPV6_LEN;
    // The extension headers, which the parser has walked before.
    while header < outer.transport_at && header + 2 <= bytes.len() {
        at = header;
        header += 8 + usize::from(bytes[header + 1]) * 8;
    }
    at
}

/// Sets the lengths of a frame of ESP, of ESP in UDP if `udp_at` says where that begins, and the checksum of its IPv4 header.
pub(super) fn finish(bytes: &mut [u8], network_at: usize, udp_at: Option<usize>) {
    let len = (bytes.len() - network_at) as u16;
    if bytes[network_at] >> 4 == 4 {
        bytes[network_at + 2..network_at + 4].copy_from_slice(&len.to_be_bytes());
        checksum::fill_in_ipv4(bytes, network_at);
    } else {
        let payload = len - IPV6_LEN as u16;
        bytes[network_at + 4..network_at + 6].copy_from_slice(&payload.to_be_bytes());
    }
    if let Some(at) = udp_at {
        let udp = (bytes.len() - at) as u16;
        bytes[at + 4..at + 6].copy_from_slice(&udp.to_be_bytes());
    }
}

/// Takes padding and trailer away from a decrypted text that begins at `begin`; the protocol that it names.
pub(super) fn cut_trailer(bytes: &mut Vec<u8>, begin: usize) -> Option<u8> {
    let text = &bytes[begin..];
    let [.., pad, next_header] = *text else { return None };
    let pad = usize::from(pad);
    let end = text.len().checked_sub(2 + pad)?;
    // RFC 4303, 2.4: 1, 2, 3 and so on.
    let right =
        text[end..end + pad].iter().zip(1..).all(|(byte, n): (&u8, usize)| *byte == n as u8);
    bytes.truncate(begin + end);
    right.then_some(next_header)
}

/// Removes ESP header and IV from a packet in transport mode, whose text begins at `payload`.
pub(super) fn leave_transport(
    bytes: &mut Vec<u8>,
    outer: &Headers,
    payload: usize,
    next_header: u8,
) {
    let at = protocol_at(&bytes[..outer.transport_at], outer);
    bytes[at] = next_header;
    bytes.drain(outer.transport_at..payload);
    finish(bytes, outer.network_at, None);
}

/// Reduces a packet in tunnel mode, whose text begins at `payload`, to the packet inside, behind the link's header.
pub(super) fn leave_tunnel(
    bytes: &mut Vec<u8>,
    outer: &Headers,
    payload: usize,
    next_header: u8,
) -> Option<()> {
    let text = &bytes[payload..];
    if version_protocol(*text.first()?)? != next_header {
        return None;
    }
    let be16 = |at: usize| text.get(at..at + 2).map(|b| usize::from(b[0]) << 8 | usize::from(b[1]));
    let (len, ether_type) = match next_header {
        PROTO_IPV4 => (be16(2)?, ETHER_IPV4),
        _ => (IPV6_LEN + be16(4)?, ETHER_IPV6),
    };
    if len < IPV4_LEN || len > text.len() {
        return None;
    }
    // The rest is padding against traffic analysis.
    bytes.truncate(payload + len);
    bytes.drain(outer.network_at..payload);
    bytes[outer.network_at - 2..outer.network_at].copy_from_slice(&ether_type.to_be_bytes());
    Some(())
}
