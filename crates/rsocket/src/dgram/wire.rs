//! The wire format between two datagram rsockets.
//!
//! A datagram begins with the address of its sender. Before a socket knows the other's queue pair, datagrams travel
//! over UDP with a header that gives its own. The answer gives the other's.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use anyverbs::Qpn;

/// Bytes of a datagram with its header, at most.
pub(crate) const MAX_DATAGRAM: usize = 2048;

/// The header of a datagram (`struct ds_header`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    bytes: [u8; Self::MAX],
    len: u8,
}

impl Header {
    const IPV4: usize = 8;
    const IPV6: usize = 24;
    pub(super) const MAX: usize = Self::IPV6;

    pub(super) fn new(source: SocketAddr) -> Self {
        let mut bytes = [0; Self::MAX];
        bytes[2..4].copy_from_slice(&source.port().to_be_bytes());
        let len = match source {
            SocketAddr::V4(v4) => {
                bytes[0] = 4;
                bytes[4..8].copy_from_slice(&v4.ip().octets());
                Self::IPV4
            }
            SocketAddr::V6(v6) => {
                bytes[0] = 6;
                bytes[4..8].copy_from_slice(&v6.flowinfo().to_ne_bytes());
                bytes[8..24].copy_from_slice(&v6.ip().octets());
                Self::IPV6
            }
        };
        bytes[1] = len as u8;
        Self { bytes, len: len as u8 }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len()]
    }

    pub(super) fn len(&self) -> usize {
        self.len.into()
    }

    /// The source that the first `received` bytes of a datagram name, and the length of the header.
    pub(super) fn parse(bytes: &[u8; Self::MAX], received: usize) -> Option<(SocketAddr, usize)> {
        let port = u16::from_be_bytes([bytes[2], bytes[3]]);
        let word = [bytes[4], bytes[5], bytes[6], bytes[7]];
        match (bytes[0], usize::from(bytes[1])) {
            (4, Self::IPV4) if received >= Self::IPV4 => {
                Some((SocketAddr::new(Ipv4Addr::from(word).into(), port), Self::IPV4))
            }
            (6, Self::IPV6) if received >= Self::IPV6 => {
                let ip: [u8; 16] = bytes[8..24].try_into().ok()?;
                let flow = u32::from_ne_bytes(word);
                Some((SocketAddrV6::new(ip.into(), port, flow, 0).into(), Self::IPV6))
            }
            _ => None,
        }
    }
}

/// The purpose of a datagram over UDP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Purpose {
    /// It carries data, and asks for an answer.
    Data,
    /// It only tells the queue pair.
    Control,
}

/// The header of a datagram over UDP (`struct ds_udp_header`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct UdpHeader {
    pub(super) purpose: Purpose,
    pub(super) qpn: Qpn,
    pub(super) ip: IpAddr,
}

impl UdpHeader {
    const TAG: u32 = 0x5555_5555;
    const DATA: u8 = 0;
    const CONTROL: u8 = 7;
    const IPV4: usize = 16;
    const IPV6: usize = 28;
    pub(super) const MAX: usize = Self::IPV6;

    /// The bytes, and how many they are.
    pub(super) fn encode(&self) -> ([u8; Self::MAX], usize) {
        let mut bytes = [0; Self::MAX];
        bytes[..4].copy_from_slice(&Self::TAG.to_be_bytes());
        bytes[5] = match self.purpose {
            Purpose::Data => Self::DATA,
            Purpose::Control => Self::CONTROL,
        };
        bytes[8..12].copy_from_slice(&self.qpn.get().to_be_bytes());
        let len = match self.ip {
            IpAddr::V4(ip) => {
                bytes[4] = 4;
                bytes[12..16].copy_from_slice(&ip.octets());
                Self::IPV4
            }
            IpAddr::V6(ip) => {
                bytes[4] = 6;
                bytes[12..28].copy_from_slice(&ip.octets());
                Self::IPV6
            }
        };
        bytes[6] = len as u8;
        (bytes, len)
    }

    /// The header of a datagram from `source`, and the data behind it.
    pub(super) fn parse(bytes: &[u8], source: SocketAddr) -> Option<(Self, &[u8])> {
        let (fixed, _) = bytes.split_first_chunk::<12>()?;
        let (version, len) = match source {
            SocketAddr::V4(_) => (4, Self::IPV4),
            SocketAddr::V6(_) => (6, Self::IPV6),
        };
        let tag = u32::from_be_bytes([fixed[0], fixed[1], fixed[2], fixed[3]]);
        if tag != Self::TAG || fixed[4] != version || usize::from(fixed[6]) != len {
            return None;
        }
        let purpose = match fixed[5] {
            Self::DATA => Purpose::Data,
            Self::CONTROL => Purpose::Control,
            _ => return None,
        };
        let (header, data) = bytes.split_at_checked(len)?;
        let ip = match source {
            SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::from(*header[12..].first_chunk::<4>()?)),
            SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::from(*header[12..].first_chunk::<16>()?)),
        };
        let qpn = Qpn::new(u32::from_be_bytes([fixed[8], fixed[9], fixed[10], fixed[11]]));
        Some((Self { purpose, qpn, ip }, data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_lie_as_the_structures_do() {
        let v4: SocketAddr = "10.1.2.3:258".parse().unwrap();
        assert_eq!(Header::new(v4).bytes(), [4, 8, 1, 2, 10, 1, 2, 3]);
        let v6: SocketAddr = "[fd00::5]:9".parse().unwrap();
        let header = Header::new(v6);
        assert_eq!((header.len(), header.bytes()[8], header.bytes()[23]), (24, 0xfd, 5));
        for source in [v4, v6] {
            let header = Header::new(source);
            assert_eq!(Header::parse(&header.bytes, 30), Some((source, header.len())));
            assert_eq!(Header::parse(&header.bytes, header.len() - 1), None);
        }
        assert_eq!(Header::parse(&[5; 24], 30), None);
    }

    #[test]
    fn headers_over_udp_lie_as_the_structures_do() {
        let source: SocketAddr = "10.1.2.3:258".parse().unwrap();
        let header =
            UdpHeader { purpose: Purpose::Control, qpn: Qpn::new(0x01_0203), ip: source.ip() };
        let (bytes, len) = header.encode();
        assert_eq!(bytes[..len], [0x55, 0x55, 0x55, 0x55, 4, 7, 16, 0, 0, 1, 2, 3, 10, 1, 2, 3]);
        let datagram = [&bytes[..len], b"data"].concat();
        assert_eq!(UdpHeader::parse(&datagram, source), Some((header, &b"data"[..])));
        let v6: SocketAddr = "[::1]:9".parse().unwrap();
        assert_eq!(UdpHeader::parse(&datagram, v6), None);
        for len in 0..16 {
            assert_eq!(UdpHeader::parse(&datagram[..len], source), None);
        }
        let header = UdpHeader { purpose: Purpose::Data, qpn: Qpn::new(7), ip: v6.ip() };
        let (bytes, len) = header.encode();
        assert_eq!((len, UdpHeader::parse(&bytes, v6)), (28, Some((header, &[][..]))));
        let mut wrong = bytes;
        wrong[5] = 3;
        assert_eq!(UdpHeader::parse(&wrong, v6), None);
    }
}
