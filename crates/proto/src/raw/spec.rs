//! Filters of a flow rule (`struct ibv_flow_spec_*`), and whether a frame matches them.

use std::ops::BitAnd;

use super::frame::{Frame, Headers, MplsOver, Network, Transport};

/// A value, of which only the bits of the mask count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Masked<T> {
    /// The value.
    pub val: T,
    /// The bits that count.
    pub mask: T,
}

impl<T: Copy + PartialEq + BitAnd<Output = T>> Masked<T> {
    fn matches(self, value: T) -> bool {
        value & self.mask == self.val & self.mask
    }
}

/// A filter for one header. A filter that looks at no bit still wants the header itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Filter {
    /// `IBV_FLOW_SPEC_ETH`. MACs are in the low 48 bits.
    Ethernet {
        /// Destination.
        dst: Masked<u64>,
        /// Source.
        src: Masked<u64>,
        /// The one after the last VLAN tag.
        ether_type: Masked<u16>,
        /// Tag control information of the first VLAN tag; a mask of 0 takes frames without one as well.
        vlan: Masked<u16>,
    },
    /// `IBV_FLOW_SPEC_IPV4` and `IBV_FLOW_SPEC_IPV4_EXT`.
    Ipv4 {
        /// Source.
        src: Masked<u32>,
        /// Destination.
        dst: Masked<u32>,
        /// Protocol.
        proto: Masked<u8>,
        /// Type of service.
        tos: Masked<u8>,
        /// Time to live.
        ttl: Masked<u8>,
        /// Don't fragment 2, more fragments 4.
        flags: Masked<u8>,
    },
    /// `IBV_FLOW_SPEC_IPV6`.
    Ipv6 {
        /// Source.
        src: Masked<u128>,
        /// Destination.
        dst: Masked<u128>,
        /// Flow label.
        flow_label: Masked<u32>,
        /// Protocol above, behind the extension headers.
        next_hdr: Masked<u8>,
        /// Traffic class.
        traffic_class: Masked<u8>,
        /// Hop limit.
        hop_limit: Masked<u8>,
    },
    /// `IBV_FLOW_SPEC_TCP`.
    Tcp {
        /// Destination port.
        dst: Masked<u16>,
        /// Source port.
        src: Masked<u16>,
    },
    /// `IBV_FLOW_SPEC_UDP`.
    Udp {
        /// Destination port.
        dst: Masked<u16>,
        /// Source port.
        src: Masked<u16>,
    },
    /// `IBV_FLOW_SPEC_ESP`.
    Esp {
        /// Security parameters index.
        spi: Masked<u32>,
        /// Sequence number.
        seq: Masked<u32>,
    },
    /// `IBV_FLOW_SPEC_GRE`.
    Gre {
        /// The first two bytes.
        flags: Masked<u16>,
        /// EtherType of the payload.
        protocol: Masked<u16>,
        /// Key.
        key: Masked<u32>,
    },
    /// `IBV_FLOW_SPEC_VXLAN_TUNNEL`.
    Vxlan {
        /// Network identifier, 24 bits.
        vni: Masked<u32>,
    },
    /// `IBV_FLOW_SPEC_MPLS`.
    Mpls {
        /// The first label stack entry.
        entry: Masked<u32>,
    },
}

/// The layer of the stack that a filter speaks of; a rule has at most one filter of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// Ethernet.
    Link,
    /// IP.
    Network,
    /// TCP, UDP, ESP, GRE.
    Transport,
    /// VXLAN, MPLS.
    Tunnel,
}

impl Filter {
    /// Its layer.
    #[must_use]
    pub fn layer(&self) -> Layer {
        match self {
            Self::Ethernet { .. } => Layer::Link,
            Self::Ipv4 { .. } | Self::Ipv6 { .. } => Layer::Network,
            Self::Tcp { .. } | Self::Udp { .. } | Self::Esp { .. } | Self::Gre { .. } => {
                Layer::Transport
            }
            Self::Vxlan { .. } | Self::Mpls { .. } => Layer::Tunnel,
        }
    }
}

/// One filter of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Spec {
    /// The header that is wanted.
    pub filter: Filter,
    /// The filter looks at the headers that a tunnel carries (`IBV_FLOW_SPEC_INNER`).
    pub inner: bool,
    /// For MPLS: the header below it, by the order of the rule's filters. Otherwise `None`.
    pub over: Option<MplsOver>,
}

impl Spec {
    /// Tells whether the frame has this header as the filter wants it.
    #[must_use]
    pub fn matches(&self, frame: &Frame<'_>) -> bool {
        let headers = if self.inner { frame.inner.as_ref() } else { Some(&frame.outer) };
        headers.is_some_and(|headers| self.filter.matches(headers, self.over))
    }
}

impl Filter {
    fn matches(&self, headers: &Headers, below: Option<MplsOver>) -> bool {
        match (*self, headers.network, headers.transport) {
            (Self::Ethernet { dst, src, ether_type, vlan }, ..) => {
                headers.ethernet.is_some_and(|e| {
                    dst.matches(e.dst)
                        && src.matches(e.src)
                        && ether_type.matches(e.ether_type)
                        && (vlan.mask == 0 || e.vlan.is_some_and(|tci| vlan.matches(tci)))
                })
            }
            (
                Self::Ipv4 { src, dst, proto, tos, ttl, flags },
                Some(Network::V4 { src: s, dst: d, proto: p, tos: o, ttl: l, flags: f }),
                _,
            ) => {
                src.matches(s)
                    && dst.matches(d)
                    && proto.matches(p)
                    && tos.matches(o)
                    && ttl.matches(l)
                    && flags.matches(f)
            }
            (
                Self::Ipv6 { src, dst, flow_label, next_hdr, traffic_class, hop_limit },
                Some(Network::V6 {
                    src: s,
                    dst: d,
                    flow_label: f,
                    next_hdr: n,
                    traffic_class: t,
                    hop_limit: h,
                }),
                _,
            ) => {
                src.matches(s)
                    && dst.matches(d)
                    && flow_label.matches(f)
                    && next_hdr.matches(n)
                    && traffic_class.matches(t)
                    && hop_limit.matches(h)
            }
            (Self::Tcp { dst, src }, _, Some(Transport::Tcp { src: s, dst: d }))
            | (Self::Udp { dst, src }, _, Some(Transport::Udp { src: s, dst: d })) => {
                src.matches(s) && dst.matches(d)
            }
            (Self::Esp { spi, seq }, _, Some(Transport::Esp { spi: i, seq: n })) => {
                spi.matches(i) && seq.matches(n)
            }
            (
                Self::Gre { flags, protocol, key },
                _,
                Some(Transport::Gre { flags: f, protocol: p, key: k }),
            ) => flags.matches(f) && protocol.matches(p) && key.matches(k),
            (Self::Vxlan { vni }, ..) => headers.vxlan.is_some_and(|id| vni.matches(id)),
            (Self::Mpls { entry }, ..) => headers.mpls.is_some_and(|(over, label)| {
                entry.matches(label) && below.is_none_or(|below| below == over)
            }),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::frame::tests::{Builder, udp4};
    use super::*;

    fn full<T: From<u8> + std::ops::Not<Output = T>>(val: T) -> Masked<T> {
        Masked { val, mask: !T::from(0) }
    }

    fn matches(filter: Filter, frame: &Builder) -> bool {
        Spec { filter, inner: false, over: None }.matches(&frame.parse())
    }

    fn ethernet(dst: Masked<u64>, vlan: Masked<u16>) -> Filter {
        Filter::Ethernet { dst, src: Masked::default(), ether_type: Masked::default(), vlan }
    }

    #[test]
    fn only_the_bits_of_the_mask_count() {
        let frame = udp4().bytes(b"abcd");
        let mac = 0x248a_07a5_28c8;
        assert!(matches(ethernet(full(mac), Masked::default()), &frame));
        assert!(!matches(ethernet(full(mac + 1), Masked::default()), &frame));
        let prefix = Masked { val: 0x248a_0700_0000, mask: 0xffff_ff00_0000 };
        assert!(matches(ethernet(prefix, Masked::default()), &frame));
        let stray = Masked { val: u64::MAX, mask: 0x0400_0000_0000 };
        assert!(matches(ethernet(stray, Masked::default()), &frame));
    }

    #[test]
    fn a_vlan_filter_wants_a_tag() {
        let tagged = Builder::default().ethernet(0x8100).vlan(0x0005, 0x0800);
        let vlan = Masked { val: 5, mask: 0xfff };
        assert!(matches(ethernet(Masked::default(), vlan), &tagged));
        assert!(!matches(ethernet(Masked::default(), vlan), &udp4()));
        let zero = Masked { val: 0, mask: 0xfff };
        assert!(!matches(ethernet(Masked::default(), zero), &udp4()));
        assert!(matches(ethernet(Masked::default(), Masked::default()), &tagged));
    }

    #[test]
    fn a_filter_wants_its_header_whatever_its_mask() {
        let frame = udp4().bytes(b"abcd");
        let any = Masked::default();
        let ipv4 = |proto| Filter::Ipv4 {
            src: any,
            dst: any,
            proto,
            tos: any8(),
            ttl: any8(),
            flags: any8(),
        };
        fn any8() -> Masked<u8> {
            Masked::default()
        }
        assert!(matches(ipv4(any8()), &frame));
        assert!(matches(ipv4(full(17)), &frame) && !matches(ipv4(full(6)), &frame));
        assert!(matches(Filter::Udp { dst: full(5678), src: Masked::default() }, &frame));
        assert!(!matches(Filter::Udp { dst: full(5678), src: full(1) }, &frame));
        assert!(!matches(Filter::Tcp { dst: Masked::default(), src: Masked::default() }, &frame));
        assert!(!matches(Filter::Vxlan { vni: any }, &frame));
        let inner = Spec { filter: ipv4(any8()), inner: true, over: None };
        assert!(!inner.matches(&frame.parse()), "there is no tunnel");
    }

    #[test]
    fn mpls_is_wanted_where_the_rule_has_it() {
        let frame = Builder::default().ethernet(0x8847).bytes(&(77u32 << 12 | 0x100).to_be_bytes());
        let filter = Filter::Mpls { entry: Masked { val: 77 << 12, mask: 0xffff_f000 } };
        let spec = |over| Spec { filter, inner: false, over };
        assert!(spec(None).matches(&frame.parse()));
        assert!(spec(Some(MplsOver::Ethernet)).matches(&frame.parse()));
        assert!(!spec(Some(MplsOver::Gre)).matches(&frame.parse()));
    }
}
