//! Headers of a frame, as far as rules, hash and checksums look at them.
//!
//! A parser of a peer's bytes. A header that is cut short or does not fit counts as absent.

/// Ethernet header without VLAN tags.
pub const ETHERNET_LEN: usize = 14;
/// A VLAN tag (IEEE 802.1Q).
pub const VLAN_LEN: usize = 4;

const ETHER_IPV4: u16 = 0x0800;
const ETHER_IPV6: u16 = 0x86dd;
const ETHER_CVLAN: u16 = 0x8100;
const ETHER_SVLAN: u16 = 0x88a8;
const ETHER_MPLS: u16 = 0x8847;
const ETHER_MPLS_MULTICAST: u16 = 0x8848;
const ETHER_BRIDGED: u16 = 0x6558; // transparent Ethernet bridging, in GRE (RFC 1701)
/// IP protocol numbers.
pub const PROTO_TCP: u8 = 6;
/// See [`PROTO_TCP`].
pub const PROTO_UDP: u8 = 17;
const PROTO_IPV4: u8 = 4;
const PROTO_IPV6: u8 = 41;
const PROTO_GRE: u8 = 47;
const PROTO_ESP: u8 = 50;
const PORT_VXLAN: u16 = 4789; // RFC 7348
const PORT_MPLS: u16 = 6635; // RFC 7510
/// VLAN tags that are skipped.
const MAX_TAGS: usize = 4;
/// IPv6 extension headers that are skipped, and MPLS labels.
const MAX_CHAIN: usize = 8;

/// Ethernet header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ethernet {
    /// Destination MAC, in the low 48 bits.
    pub dst: u64,
    /// Source MAC.
    pub src: u64,
    /// The one after the last VLAN tag.
    pub ether_type: u16,
    /// Tag control information of the first VLAN tag.
    pub vlan: Option<u16>,
}

/// IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// RFC 791.
    V4 {
        /// Source.
        src: u32,
        /// Destination.
        dst: u32,
        /// Protocol above it.
        proto: u8,
        /// Type of service.
        tos: u8,
        /// Time to live.
        ttl: u8,
        /// As `enum ib_ipv4_flags` of Linux: don't fragment 2, more fragments 4.
        flags: u8,
    },
    /// RFC 8200.
    V6 {
        /// Source.
        src: u128,
        /// Destination.
        dst: u128,
        /// Flow label, 20 bits.
        flow_label: u32,
        /// Protocol above it, behind the extension headers.
        next_hdr: u8,
        /// Traffic class.
        traffic_class: u8,
        /// Hop limit.
        hop_limit: u8,
    },
}

/// The header above IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// RFC 9293.
    Tcp {
        /// Source port.
        src: u16,
        /// Destination port.
        dst: u16,
    },
    /// RFC 768.
    Udp {
        /// Source port.
        src: u16,
        /// Destination port.
        dst: u16,
    },
    /// RFC 4303.
    Esp {
        /// Security parameters index.
        spi: u32,
        /// Sequence number.
        seq: u32,
    },
    /// RFC 2784, 2890.
    Gre {
        /// The first two bytes: flags and version.
        flags: u16,
        /// EtherType of the payload.
        protocol: u16,
        /// 0 without one.
        key: u32,
    },
}

/// The header below an MPLS label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MplsOver {
    /// RFC 3032.
    Ethernet,
    /// RFC 4023.
    Gre,
    /// RFC 7510.
    Udp,
}

/// The headers of one level: the outer one, or that inside a tunnel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Headers {
    /// Ethernet; missing where a tunnel carries IP.
    pub ethernet: Option<Ethernet>,
    /// IP.
    pub network: Option<Network>,
    /// Above IP; missing in fragments but the first.
    pub transport: Option<Transport>,
    /// The first MPLS label stack entry.
    pub mpls: Option<(MplsOver, u32)>,
    /// VXLAN network identifier.
    pub vxlan: Option<u32>,
    /// The start of the IP header, or of another header above Ethernet.
    pub network_at: usize,
    /// The place of the header above.
    pub transport_at: usize,
    /// The end of the IP packet.
    pub network_end: usize,
    /// The packet is a piece of one.
    pub is_fragment: bool,
}

/// A frame that was looked into.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// All of it, without the frame check sequence.
    pub bytes: &'a [u8],
    /// The outer headers.
    pub outer: Headers,
    /// Headers that a tunnel carries: VXLAN, GRE, MPLS, IP in IP.
    pub inner: Option<Headers>,
}

/// The place where parsing goes on.
enum Next {
    Nothing,
    Ethernet(usize),
    Ip(usize),
}

impl<'a> Frame<'a> {
    /// Looks into a frame; `None` unless it has an Ethernet header.
    #[must_use]
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let mut outer = Headers::default();
        let next = outer.ethernet(bytes, 0)?;
        let mut inner = Headers::default();
        let inner = match next {
            Next::Nothing => None,
            Next::Ethernet(at) => inner.ethernet(bytes, at).map(|_| inner),
            Next::Ip(at) => inner.ip(bytes, at).map(|_| inner),
        };
        Some(Self { bytes, outer, inner })
    }

    /// Sent to a group, or to all.
    #[must_use]
    pub fn is_multicast(&self) -> bool {
        self.bytes.first().is_some_and(|first| first & 1 != 0)
    }

    /// The tag control information of the C-VLAN tag that is the first thing after the addresses.
    #[must_use]
    pub fn cvlan(&self) -> Option<u16> {
        (be16(self.bytes, 12)? == ETHER_CVLAN).then(|| be16(self.bytes, 14)).flatten()
    }
}

impl Headers {
    fn ethernet(&mut self, bytes: &[u8], at: usize) -> Option<Next> {
        let [dst, src] = [mac(bytes, at)?, mac(bytes, at + 6)?];
        let mut type_at = at + 12;
        let mut ether_type = be16(bytes, type_at)?;
        let mut vlan = None;
        for _ in 0..MAX_TAGS {
            if !matches!(ether_type, ETHER_CVLAN | ETHER_SVLAN) {
                break;
            }
            let (Some(tci), Some(next)) = (be16(bytes, type_at + 2), be16(bytes, type_at + 4))
            else {
                break;
            };
            vlan.get_or_insert(tci);
            ether_type = next;
            type_at += VLAN_LEN;
        }
        self.ethernet = Some(Ethernet { dst, src, ether_type, vlan });
        let payload = type_at + 2;
        self.network_at = payload;
        Some(match ether_type {
            ETHER_IPV4 | ETHER_IPV6 => self.ip(bytes, payload).unwrap_or(Next::Nothing),
            ETHER_MPLS | ETHER_MPLS_MULTICAST => self.labels(bytes, payload, MplsOver::Ethernet),
            _ => Next::Nothing,
        })
    }

    fn ip(&mut self, bytes: &[u8], at: usize) -> Option<Next> {
        let (proto, transport_at) = match bytes.get(at)? >> 4 {
            4 => self.ipv4(bytes, at)?,
            6 => self.ipv6(bytes, at)?,
            _ => return None,
        };
        self.network_at = at;
        self.transport_at = transport_at;
        Some(self.above_ip(bytes, proto, transport_at).unwrap_or(Next::Nothing))
    }

    fn ipv4(&mut self, bytes: &[u8], at: usize) -> Option<(u8, usize)> {
        let header = bytes.get(at..at + 20)?;
        let header_len = usize::from(header[0] & 15) * 4;
        let total = usize::from(be16(header, 2)?);
        if header_len < 20 || total < header_len || bytes.len() < at + header_len {
            return None;
        }
        let fragment = be16(header, 6)?;
        // DF is bit 14 and MF bit 13 on the wire.
        let flags = (fragment >> 15 | (fragment >> 14 & 1) << 1 | (fragment >> 13 & 1) << 2) as u8;
        let proto = header[9];
        self.network = Some(Network::V4 {
            src: be32(header, 12)?,
            dst: be32(header, 16)?,
            proto,
            tos: header[1],
            ttl: header[8],
            flags,
        });
        self.network_end = (at + total).min(bytes.len());
        self.is_fragment = fragment & 0x3fff != 0;
        // A later fragment has no header of its protocol.
        let proto = if fragment & 0x1fff == 0 { proto } else { u8::MAX };
        Some((proto, at + header_len))
    }

    fn ipv6(&mut self, bytes: &[u8], at: usize) -> Option<(u8, usize)> {
        let header = bytes.get(at..at + 40)?;
        let word = be32(header, 0)?;
        let mut next_hdr = header[6];
        let mut above = at + 40;
        let mut hidden = false;
        for _ in 0..MAX_CHAIN {
            let len = match next_hdr {
                // Hop-by-hop options, routing, destination options.
                0 | 43 | 60 => 8 + usize::from(*bytes.get(above + 1).unwrap_or(&0)) * 8,
                44 => {
                    self.is_fragment = true;
                    hidden |= be16(bytes, above + 2).is_none_or(|offset| offset & 0xfff8 != 0);
                    8
                }
                _ => break,
            };
            let Some(&next) = bytes.get(above) else { break };
            next_hdr = next;
            above += len;
        }
        self.network = Some(Network::V6 {
            src: u128::from_be_bytes(header[8..24].try_into().ok()?),
            dst: u128::from_be_bytes(header[24..40].try_into().ok()?),
            flow_label: word & 0xf_ffff,
            next_hdr,
            traffic_class: (word >> 20) as u8,
            hop_limit: header[7],
        });
        self.network_end = (at + 40 + usize::from(be16(header, 4)?)).min(bytes.len());
        Some((if hidden { u8::MAX } else { next_hdr }, above))
    }

    fn above_ip(&mut self, bytes: &[u8], proto: u8, at: usize) -> Option<Next> {
        let bytes = bytes.get(..self.network_end)?;
        let ports = || Some((be16(bytes, at)?, be16(bytes, at + 2)?));
        match proto {
            PROTO_TCP => {
                let (src, dst) = ports()?;
                self.transport = Some(Transport::Tcp { src, dst });
            }
            PROTO_UDP => {
                let (src, dst) = ports()?;
                self.transport = Some(Transport::Udp { src, dst });
                match dst {
                    PORT_VXLAN => {
                        self.vxlan = Some(be32(bytes, at + 12)? >> 8);
                        return Some(Next::Ethernet(at + 16));
                    }
                    PORT_MPLS => return Some(self.labels(bytes, at + 8, MplsOver::Udp)),
                    _ => {}
                }
            }
            PROTO_ESP => {
                self.transport =
                    Some(Transport::Esp { spi: be32(bytes, at)?, seq: be32(bytes, at + 4)? });
            }
            PROTO_GRE => return self.gre(bytes, at),
            PROTO_IPV4 | PROTO_IPV6 => return Some(Next::Ip(at)),
            _ => {}
        }
        Some(Next::Nothing)
    }

    fn gre(&mut self, bytes: &[u8], at: usize) -> Option<Next> {
        let (flags, protocol) = (be16(bytes, at)?, be16(bytes, at + 2)?);
        let mut above = at + 4;
        // Checksum, key and sequence number are there as the flags say (RFC 2890).
        above += if flags & 0x8000 != 0 { 4 } else { 0 };
        let mut key = 0;
        if flags & 0x2000 != 0 {
            key = be32(bytes, above)?;
            above += 4;
        }
        above += if flags & 0x1000 != 0 { 4 } else { 0 };
        self.transport = Some(Transport::Gre { flags, protocol, key });
        Some(match protocol {
            ETHER_IPV4 | ETHER_IPV6 => Next::Ip(above),
            ETHER_BRIDGED => Next::Ethernet(above),
            ETHER_MPLS | ETHER_MPLS_MULTICAST => self.labels(bytes, above, MplsOver::Gre),
            _ => Next::Nothing,
        })
    }

    fn labels(&mut self, bytes: &[u8], mut at: usize, over: MplsOver) -> Next {
        for _ in 0..MAX_CHAIN {
            let Some(entry) = be32(bytes, at) else { break };
            self.mpls.get_or_insert((over, entry));
            at += 4;
            if entry & 0x100 != 0 {
                // Bottom of the stack.
                return Next::Ip(at);
            }
        }
        Next::Nothing
    }
}

pub(super) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

pub(super) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn mac(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at + 6)?;
    Some(bytes.iter().fold(0, |mac, byte| mac << 8 | u64::from(*byte)))
}

#[cfg(test)]
#[path = "frame/tests.rs"]
pub(crate) mod tests;
