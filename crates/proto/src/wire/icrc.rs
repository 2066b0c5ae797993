//! Invariant CRC of RoCEv2.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// What the checksum covers of an IP header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pseudo {
    /// IPv4 without options, DF set.
    V4 {
        /// Source address.
        src: Ipv4Addr,
        /// Destination address.
        dst: Ipv4Addr,
        /// Identification field.
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

/// What a check found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IcrcVerdict {
    /// Right, with the ID that was given.
    Exact,
    /// Right if the IPv4 header carried this ID.
    SomeId(u16),
    /// Wrong.
    Wrong,
}

/// The part of the checksum that is the same for all packets between two sockets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flow {
    src: IpAddr,
    dst: IpAddr,
    src_port: u16,
    dst_port: u16,
}

impl Flow {
    /// Packets from `src` to `dst`.
    #[must_use]
    pub fn new(src: IpAddr, dst: IpAddr, src_port: u16, dst_port: u16) -> Self {
        Self { src: src.to_canonical(), dst: dst.to_canonical(), src_port, dst_port }
    }

    /// The checksum of a packet; `to_le_bytes` of it is the trailer.
    #[must_use]
    pub fn compute(&self, id: u16, bth_to_pad: &[u8]) -> u32 {
        let len = bth_to_pad.len() + 12;
        let mut h = crc32fast::Hasher::new();
        h.update(&[0xff; 8]);
        match (self.src, self.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let total = ((len + 20) as u16).to_be_bytes();
                let id = id.to_be_bytes();
                h.update(&[
                    0x45, 0xff, total[0], total[1], id[0], id[1], 0x40, 0, 0xff, 17, 0xff, 0xff,
                ]);
                h.update(&src.octets());
                h.update(&dst.octets());
            }
            (src, dst) => {
                let l = (len as u16).to_be_bytes();
                h.update(&[0x6f, 0xff, 0xff, 0xff, l[0], l[1], 17, 0xff]);
                h.update(&v6(src));
                h.update(&v6(dst));
            }
        }
        h.update(&self.src_port.to_be_bytes());
        h.update(&self.dst_port.to_be_bytes());
        h.update(&(len as u16).to_be_bytes());
        h.update(&[0xff, 0xff]);
        let (head, tail) = bth_to_pad.split_at(bth_to_pad.len().min(4));
        h.update(head);
        if let Some(tail) = tail.get(1..) {
            h.update(&[0xff]);
            h.update(tail);
        }
        h.finalize()
    }

    /// Checks a packet with its trailer.
    #[must_use]
    pub fn check(&self, bytes_with_icrc: &[u8], expected_id: u16) -> IcrcVerdict {
        match bytes_with_icrc.split_last_chunk::<4>() {
            Some((b, icrc)) if self.compute(expected_id, b) == u32::from_le_bytes(*icrc) => {
                IcrcVerdict::Exact
            }
            _ => IcrcVerdict::Wrong,
        }
    }
}

fn v6(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}
