//! Invariant CRC of RoCEv2 (IBA 7.8.1, A17.3.3).
//!
//! CRC-32 over 64 ones, the IP header, the UDP header and the packet from the BTH to the pad.
//! Whatever may change on the way counts as ones: IPv4 TOS, TTL and checksum; IPv6 traffic class,
//! flow label and hop limit; the UDP checksum; byte 4 of the BTH. The trailer is little-endian.
//!
//! Before the BTH, only the two lengths and the IPv4 ID differ between packets of a [`Flow`]. CRC is linear: the
//! register after the headers is one that belongs to the flow, plus the contributions of the length and the ID.
//!
//! # An ID that nobody shows
//! The checksum covers the IPv4 ID, and a UDP socket does not tell the ID of a datagram. If all else is right, the
//! trailer and a checksum for the expected ID differ by the contribution of the difference of the IDs. Feeding bytes
//! can be undone, so this difference is brought back to the place of the ID. There it must fit in the field, or the
//! packet is damaged. A packet damaged at random passes with probability 2^-16 instead of 2^-32. A single flipped bit
//! is always noticed, in packets of any path MTU.
//!
//! DF is expected to be set, as RoCEv2 senders do. To accept it clear as well would be one more
//! comparison, but then some single flipped bits, the first in byte 173, would pass.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::crc32::{contribution, feed, feed_8, feed_all, unfeed_words};
use super::packet::ICRC_LEN;

/// Bytes of ones before the IP header, where InfiniBand has its local route header.
const ONES: [u8; 8] = [0xff; 8];
const V4_LEN: usize = 20;
const V6_LEN: usize = 40;
const UDP_LEN: usize = 8;

/// The flags of IPv4 with DF set, in the first byte of the field.
const DF: u8 = 0x40;

/// The part of an IP header that the checksum covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pseudo {
    /// IPv4 without options, DF set.
    V4 {
        /// Source address.
        src: Ipv4Addr,
        /// Destination address.
        dst: Ipv4Addr,
        /// Identification.
        id: u16,
    },
    /// IPv6 without extension headers.
    V6 {
        /// Source address.
        src: Ipv6Addr,
        /// Destination address.
        dst: Ipv6Addr,
    },
}

impl Pseudo {
    fn flow(&self, src_port: u16, dst_port: u16) -> Flow {
        match *self {
            Self::V4 { src, dst, .. } => Flow::v4(src, dst, src_port, dst_port),
            Self::V6 { src, dst } => Flow::v6(src, dst, src_port, dst_port),
        }
    }

    const fn id(&self) -> u16 {
        match *self {
            Self::V4 { id, .. } => id,
            Self::V6 { .. } => 0,
        }
    }
}

/// The result of a check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IcrcVerdict {
    /// Right, with the ID that was expected.
    Exact,
    /// Right if the IPv4 header carried this ID.
    SomeId(u16),
    /// Wrong: the packet was damaged, or its addresses or ports were translated.
    Wrong,
}

/// The checksum of one packet: `to_le_bytes` of it is the trailer.
///
/// A sender of more than one packet keeps a [`Flow`].
#[must_use]
pub fn compute(ip: &Pseudo, src_port: u16, dst_port: u16, bth_to_pad: &[u8]) -> u32 {
    ip.flow(src_port, dst_port).compute(ip.id(), bth_to_pad)
}

/// Checks one packet that ends in its trailer; the ID of an IPv4 header is the expected one.
#[must_use]
pub fn check(ip: &Pseudo, src_port: u16, dst_port: u16, bytes_with_icrc: &[u8]) -> IcrcVerdict {
    ip.flow(src_port, dst_port).check(bytes_with_icrc, ip.id())
}

/// The addresses and ports of packets, digested: eight bytes to keep for every destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flow {
    /// The register after the headers of a packet with zeros as lengths and ID.
    base: u32,
    is_v4: bool,
}

/// Contributions of the two bytes of a field that starts `at` bytes into headers of `of` bytes, as
/// of the end of the headers.
const fn field(at: usize, of: usize) -> [[u32; 256]; 2] {
    [contribution(of - at - 1), contribution(of - at - 2)]
}

const fn sum(field: &[[u32; 256]; 2], value: u16) -> u32 {
    let [high, low] = value.to_be_bytes();
    field[0][high as usize] ^ field[1][low as usize]
}

static V4_TOTAL_LEN: [[u32; 256]; 2] = field(2, V4_LEN + UDP_LEN);
static V4_ID: [[u32; 256]; 2] = field(4, V4_LEN + UDP_LEN);
static V6_PAYLOAD_LEN: [[u32; 256]; 2] = field(4, V6_LEN + UDP_LEN);
static UDP_DATAGRAM_LEN: [[u32; 256]; 2] = field(4, UDP_LEN);

/// Bytes of the headers from the IPv4 ID to the end.
const FROM_ID: usize = V4_LEN - 4 + UDP_LEN;

impl Flow {
    /// Packets from `src` to `dst`. IPv4 addresses may come mapped into IPv6.
    #[must_use]
    pub fn new(src: IpAddr, dst: IpAddr, src_port: u16, dst_port: u16) -> Self {
        let to_v6 = |ip| match ip {
            IpAddr::V4(v4) => Ipv4Addr::to_ipv6_mapped(&v4),
            IpAddr::V6(v6) => v6,
        };
        match (src.to_canonical(), dst.to_canonical()) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => Self::v4(src, dst, src_port, dst_port),
            (src, dst) => Self::v6(to_v6(src), to_v6(dst), src_port, dst_port),
        }
    }

    fn v4(src: Ipv4Addr, dst: Ipv4Addr, src_port: u16, dst_port: u16) -> Self {
        let mut r = feed_all(u32::MAX, &ONES);
        r = feed_all(r, &[0x45, 0xff, 0, 0, 0, 0, DF, 0, 0xff, 17, 0xff, 0xff]);
        r = feed_all(r, &src.octets());
        r = feed_all(r, &dst.octets());
        Self { base: udp(r, src_port, dst_port), is_v4: true }
    }

    fn v6(src: Ipv6Addr, dst: Ipv6Addr, src_port: u16, dst_port: u16) -> Self {
        let mut r = feed_all(u32::MAX, &ONES);
        r = feed_all(r, &[0x6f, 0xff, 0xff, 0xff, 0, 0, 17, 0xff]);
        r = feed_all(r, &src.octets());
        r = feed_all(r, &dst.octets());
        Self { base: udp(r, src_port, dst_port), is_v4: false }
    }

    /// The checksum of a packet; `to_le_bytes` of it is the trailer.
    ///
    /// `id` is that of the IPv4 header and means nothing for IPv6. No IP packet carries more than
    /// 65,507 bytes; for more the result is of no use.
    #[inline]
    #[must_use]
    pub fn compute(&self, id: u16, bth_to_pad: &[u8]) -> u32 {
        self.of_length(bth_to_pad.len()).compute(id, bth_to_pad)
    }

    /// Its packets of this length, from the BTH to the pad.
    #[inline]
    #[must_use]
    pub fn of_length(&self, bth_to_pad: usize) -> FlowOfLength {
        let udp_len = (UDP_LEN + bth_to_pad + ICRC_LEN) as u16;
        let lengths = if self.is_v4 {
            sum(&V4_TOTAL_LEN, udp_len.wrapping_add(V4_LEN as u16))
        } else {
            sum(&V6_PAYLOAD_LEN, udp_len)
        };
        let base = self.base ^ lengths ^ sum(&UDP_DATAGRAM_LEN, udp_len);
        FlowOfLength(Self { base, ..*self })
    }
}

/// The packets of a flow that have one length.
#[derive(Clone, Copy, Debug)]
pub struct FlowOfLength(Flow);

impl FlowOfLength {
    /// As [`Flow::compute`].
    #[inline]
    #[must_use]
    pub fn compute(&self, id: u16, bth_to_pad: &[u8]) -> u32 {
        !self.register(id, bth_to_pad)
    }

    /// The register behind the beginning of a packet, to be [fed](feed_all) with the rest up to the pad. Its complement is the
    /// checksum.
    #[inline]
    #[must_use]
    pub fn register(&self, id: u16, beginning: &[u8]) -> u32 {
        let Self(Flow { base: mut r, is_v4 }) = *self;
        if is_v4 {
            r ^= sum(&V4_ID, id);
        }
        match beginning.split_first_chunk() {
            Some((&[a, b, c, d, _, f, g, h], rest)) => {
                r = feed_8(r, [a, b, c, d, 0xff, f, g, h]);
                r = feed_all(r, rest);
            }
            // No packet is that short, but the answer is right.
            None => {
                for (i, byte) in beginning.iter().enumerate() {
                    r = feed(r, if i == 4 { 0xff } else { *byte });
                }
            }
        }
        r
    }

    /// Feeds the end of a packet, its pad, to its [`register`](Self::register), and writes the trailer behind it.
    ///
    /// # Panics
    /// When there are fewer than four bytes.
    #[inline]
    pub fn end(register: u32, pad_and_trailer: &mut [u8]) {
        let (pad, icrc) = pad_and_trailer.split_at_mut(pad_and_trailer.len() - ICRC_LEN);
        icrc.copy_from_slice(&(!feed_all(register, pad)).to_le_bytes());
    }

    /// Writes the trailer into the last four bytes of a packet.
    ///
    /// # Panics
    /// When it has fewer.
    #[inline]
    pub fn seal(&self, id: u16, packet: &mut [u8]) {
        let (bytes, icrc) = packet.split_at_mut(packet.len() - ICRC_LEN);
        icrc.copy_from_slice(&self.compute(id, bytes).to_le_bytes());
    }

    /// Whether a packet that ends in its trailer is right, and has this ID.
    #[inline]
    #[must_use]
    pub fn is_right(&self, id: u16, bytes_with_icrc: &[u8]) -> bool {
        let split = bytes_with_icrc.split_last_chunk::<ICRC_LEN>();
        split.is_some_and(|(bytes, icrc)| self.compute(id, bytes) == u32::from_le_bytes(*icrc))
    }
}

impl Flow {
    /// Checks a packet that ends in its trailer.
    ///
    /// `expected_id` is the ID that the IPv4 header had, if known, else the likeliest: 0, or the
    /// place in a batch that one system call sent.
    #[inline]
    #[must_use]
    pub fn check(&self, bytes_with_icrc: &[u8], expected_id: u16) -> IcrcVerdict {
        let Some((bth_to_pad, trailer)) = bytes_with_icrc.split_last_chunk::<ICRC_LEN>() else {
            return IcrcVerdict::Wrong;
        };
        let difference = self.compute(expected_id, bth_to_pad) ^ u32::from_le_bytes(*trailer);
        if difference == 0 {
            return IcrcVerdict::Exact;
        }
        match self.is_v4.then(|| id_difference(difference, bth_to_pad.len())) {
            Some(Some(id)) => IcrcVerdict::SomeId(expected_id ^ id),
            _ => IcrcVerdict::Wrong,
        }
    }
}

/// Feeds a UDP header with length zero.
fn udp(r: u32, src_port: u16, dst_port: u16) -> u32 {
    let ([a, b], [c, d]) = (src_port.to_be_bytes(), dst_port.to_be_bytes());
    feed_8(r, [a, b, c, d, 0, 0, 0xff, 0xff])
}

/// The difference of two IDs that makes this difference of two checksums, if there is one.
#[inline(never)]
fn id_difference(difference: u32, bth_to_pad: usize) -> Option<u16> {
    let bytes = FROM_ID + bth_to_pad;
    // Every packet is a multiple of four bytes, and no longer than IP allows.
    if !bytes.is_multiple_of(4) || bytes > usize::from(u16::MAX) {
        return None;
    }
    // The next byte is added to a register's low byte. So back at the ID, the register's four bytes are the differences
    // of ID (two bytes), flags and fragment offset.
    match unfeed_words(difference, bytes / 4).to_le_bytes() {
        [high, low, 0, 0] => Some(u16::from_be_bytes([high, low])),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
