//! IP CM header: the addresses in front of the user's private data of REQ and SIDR_REQ (IBA annex A11.3.3).

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::types::Gid;

/// IP CM header. The destination's port is that of the service ID.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IpHeader {
    /// The address that the connection comes from.
    pub source: SocketAddr,
    /// The address that it is meant for.
    pub destination: IpAddr,
}

/// The reason why private data does not start with an IP CM header.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BadIpHeader {
    /// It has another major version.
    #[error("unknown version of the IP CM header")]
    Version,
    /// The IP version is neither 4 nor 6.
    #[error("unknown IP version")]
    IpVersion,
}

impl IpHeader {
    /// Bytes on the wire.
    pub const LEN: usize = 36;

    /// Reads a header. A newer minor version is one that we understand.
    ///
    /// # Errors
    /// The reason why the bytes are no header.
    pub fn parse(b: &[u8; Self::LEN]) -> Result<Self, BadIpHeader> {
        if b[0] >> 4 != 0 {
            return Err(BadIpHeader::Version);
        }
        let address = |at: usize| -> Result<IpAddr, BadIpHeader> {
            let bytes = b[at..].first_chunk::<16>().expect("both addresses lie inside");
            match b[1] >> 4 {
                4 => Ok(Ipv4Addr::new(bytes[12], bytes[13], bytes[14], bytes[15]).into()),
                6 => Ok(Ipv6Addr::from(*bytes).into()),
                _ => Err(BadIpHeader::IpVersion),
            }
        };
        let port = u16::from_be_bytes([b[2], b[3]]);
        Ok(Self { source: SocketAddr::new(address(4)?, port), destination: address(20)? })
    }

    /// The header of a request that came from port `source` to port `destination`, if it names these. With other
    /// addresses the sender could reach listeners that its packets do not reach, in another's name.
    pub(super) fn between(self, source: Gid, destination: Gid) -> Option<Self> {
        let is_it =
            Gid::from(self.source.ip()) == source && Gid::from(self.destination) == destination;
        // An IPv4 address may have come mapped.
        is_it.then(|| Self {
            source: SocketAddr::new(source.to_ip(), self.source.port()),
            destination: destination.to_ip(),
        })
    }

    /// The bytes on the wire. Addresses of two families are written as IPv6, the IPv4 one mapped.
    #[must_use]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[2..4].copy_from_slice(&self.source.port().to_be_bytes());
        match (self.source.ip(), self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                b[1] = 4 << 4;
                b[16..20].copy_from_slice(&source.octets());
                b[32..36].copy_from_slice(&destination.octets());
            }
            (source, destination) => {
                let octets = |ip| match ip {
                    IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                    IpAddr::V6(v6) => v6.octets(),
                };
                b[1] = 6 << 4;
                b[4..20].copy_from_slice(&octets(source));
                b[20..36].copy_from_slice(&octets(destination));
            }
        }
        b
    }
}

impl fmt::Display for IpHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} > {}", self.source, self.destination)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_families_are_read_as_written() {
        for (source, destination) in
            [("10.0.0.1:7471", "10.0.0.2"), ("[fd00::1]:7471", "fd00::2"), ("[::1]:0", "::1")]
        {
            let header = IpHeader {
                source: source.parse().unwrap(),
                destination: destination.parse().unwrap(),
            };
            assert_eq!(IpHeader::parse(&header.emit()), Ok(header));
        }
    }

    #[test]
    fn a_header_names_the_ports_that_it_came_between() {
        let gid = |ip: &str| Gid::from(ip.parse::<IpAddr>().unwrap());
        let named = |source: &str, destination: &str| IpHeader {
            source: SocketAddr::new(source.parse().unwrap(), 9),
            destination: destination.parse().unwrap(),
        };
        let v4 = named("10.0.0.1", "10.0.0.2");
        let between = |header: IpHeader| header.between(gid("10.0.0.1"), gid("10.0.0.2"));
        assert_eq!(between(v4), Some(v4));
        assert_eq!(between(named("::ffff:10.0.0.1", "::ffff:10.0.0.2")), Some(v4), "mapped");
        assert_eq!(between(named("10.0.0.1", "127.0.0.1")), None);
        assert_eq!(between(named("127.0.0.1", "10.0.0.2")), None);
        let v6 = named("fd00::1", "fd00::2");
        assert_eq!(v6.between(gid("fd00::1"), gid("fd00::2")), Some(v6));
        assert_eq!(between(v6), None);
    }

    #[test]
    fn unknown_versions_are_refused() {
        let mut b = [0; IpHeader::LEN];
        assert_eq!(IpHeader::parse(&b), Err(BadIpHeader::IpVersion));
        b[1] = 0x40;
        b[0] = 0x01;
        assert!(IpHeader::parse(&b).is_ok(), "a minor version changes nothing");
        b[0] = 0x10;
        assert_eq!(IpHeader::parse(&b), Err(BadIpHeader::Version));
    }
}
