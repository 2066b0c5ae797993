use super::*;

/// A frame, header by header.
#[derive(Clone, Default)]
pub(crate) struct Builder(pub(crate) Vec<u8>);

impl Builder {
    pub(crate) fn ethernet(mut self, ether_type: u16) -> Self {
        self.0.extend([0x24, 0x8a, 7, 0xa5, 0x28, 0xc8, 0x24, 0x8a, 7, 0xa5, 0x28, 0xc7]);
        self.0.extend(ether_type.to_be_bytes());
        self
    }

    pub(crate) fn vlan(mut self, tci: u16, ether_type: u16) -> Self {
        self.0.extend(tci.to_be_bytes());
        self.0.extend(ether_type.to_be_bytes());
        self
    }

    pub(crate) fn ipv4(mut self, src: [u8; 4], dst: [u8; 4], proto: u8, payload: usize) -> Self {
        let total = (20 + payload) as u16;
        self.0.extend([0x45, 0x10]);
        self.0.extend(total.to_be_bytes());
        self.0.extend([0, 7, 0x40, 0, 64, proto, 0, 0]);
        self.0.extend(src);
        self.0.extend(dst);
        self
    }

    pub(crate) fn ipv6(mut self, src: u128, dst: u128, next_hdr: u8, payload: usize) -> Self {
        self.0.extend(0x6123_4567u32.to_be_bytes());
        self.0.extend((payload as u16).to_be_bytes());
        self.0.extend([next_hdr, 63]);
        self.0.extend(src.to_be_bytes());
        self.0.extend(dst.to_be_bytes());
        self
    }

    pub(crate) fn udp(mut self, src: u16, dst: u16, payload: usize) -> Self {
        self.0.extend(src.to_be_bytes());
        self.0.extend(dst.to_be_bytes());
        self.0.extend((8 + payload as u16).to_be_bytes());
        self.0.extend([0, 0]);
        self
    }

    pub(crate) fn tcp(mut self, src: u16, dst: u16, seq: u32, flags: u8) -> Self {
        self.0.extend(src.to_be_bytes());
        self.0.extend(dst.to_be_bytes());
        self.0.extend(seq.to_be_bytes());
        self.0.extend([0, 0, 0, 0, 0x50, flags, 0x20, 0, 0, 0, 0, 0]);
        self
    }

    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    pub(crate) fn parse(&self) -> Frame<'_> {
        Frame::parse(&self.0).unwrap()
    }
}

pub(crate) fn udp4() -> Builder {
    Builder::default()
        .ethernet(ETHER_IPV4)
        .ipv4([10, 0, 0, 1], [10, 0, 0, 2], PROTO_UDP, 12)
        .udp(1234, 5678, 4)
}

#[test]
fn udp_over_ipv4() {
    let built = udp4().bytes(b"abcd");
    let frame = built.parse();
    let outer = frame.outer;
    let ethernet = outer.ethernet.unwrap();
    assert_eq!((ethernet.dst, ethernet.src), (0x248a_07a5_28c8, 0x248a_07a5_28c7));
    assert_eq!((ethernet.ether_type, ethernet.vlan), (ETHER_IPV4, None));
    assert_eq!(
        outer.network,
        Some(Network::V4 {
            src: 0x0a00_0001,
            dst: 0x0a00_0002,
            proto: 17,
            tos: 0x10,
            ttl: 64,
            flags: 2
        })
    );
    assert_eq!(outer.transport, Some(Transport::Udp { src: 1234, dst: 5678 }));
    assert_eq!((outer.network_at, outer.transport_at, outer.network_end), (14, 34, 46));
    assert!(frame.inner.is_none() && !frame.is_multicast() && frame.cvlan().is_none());
}

#[test]
fn tags_are_skipped_and_the_first_is_told() {
    let built = Builder::default()
        .ethernet(ETHER_CVLAN)
        .vlan(0x6005, ETHER_CVLAN)
        .vlan(7, ETHER_IPV6)
        .ipv6(1, 2, PROTO_TCP, 20)
        .tcp(1, 2, 3, 0x10);
    let frame = built.parse();
    let ethernet = frame.outer.ethernet.unwrap();
    assert_eq!((ethernet.ether_type, ethernet.vlan), (ETHER_IPV6, Some(0x6005)));
    assert_eq!(frame.cvlan(), Some(0x6005));
    assert_eq!(frame.outer.transport, Some(Transport::Tcp { src: 1, dst: 2 }));
    assert!(matches!(
        frame.outer.network,
        Some(Network::V6 { flow_label: 0x3_4567, traffic_class: 0x12, hop_limit: 63, .. })
    ));
}

#[test]
fn fragments_have_no_transport_but_the_first() {
    let mut built = udp4().bytes(b"abcd");
    built.0[20] = 0x20; // more fragments, offset 0
    assert!(built.parse().outer.transport.is_some() && built.parse().outer.is_fragment);
    built.0[21] = 1;
    assert!(built.parse().outer.transport.is_none() && built.parse().outer.is_fragment);
    let six = |offset| {
        Builder::default()
            .ethernet(ETHER_IPV6)
            .ipv6(1, 2, 44, 16)
            .bytes(&[PROTO_UDP, 0, 0, offset, 0, 0, 0, 1])
            .udp(1, 2, 0)
    };
    assert_eq!(six(1).parse().outer.transport, Some(Transport::Udp { src: 1, dst: 2 }));
    assert_eq!(six(8).parse().outer.transport, None);
}

#[test]
fn tunnels_have_an_inner_level() {
    let inner = Builder::default()
        .ethernet(ETHER_IPV4)
        .ipv4([1; 4], [2; 4], PROTO_TCP, 20)
        .tcp(80, 81, 0, 0x10);
    let vxlan = Builder::default()
        .ethernet(ETHER_IPV4)
        .ipv4([3; 4], [4; 4], PROTO_UDP, 8 + 8 + inner.0.len())
        .udp(9, PORT_VXLAN, 8 + inner.0.len())
        .bytes(&[8, 0, 0, 0, 0x12, 0x34, 0x56, 0])
        .bytes(&inner.0);
    let frame = vxlan.parse();
    assert_eq!(frame.outer.vxlan, Some(0x12_3456));
    assert_eq!(frame.inner.unwrap().transport, Some(Transport::Tcp { src: 80, dst: 81 }));
    assert!(frame.inner.unwrap().ethernet.is_some());

    let gre = Builder::default()
        .ethernet(ETHER_IPV4)
        .ipv4([3; 4], [4; 4], PROTO_GRE, 8 + 28)
        .bytes(&[0x20, 0, 8, 0, 0, 0, 0, 99])
        .ipv4([5; 4], [6; 4], PROTO_UDP, 8)
        .udp(1, 2, 0);
    let frame = gre.parse();
    assert_eq!(
        frame.outer.transport,
        Some(Transport::Gre { flags: 0x2000, protocol: ETHER_IPV4, key: 99 })
    );
    assert!(matches!(frame.inner.unwrap().network, Some(Network::V4 { src: 0x0505_0505, .. })));

    let label = |bottom: u32| (0x12345 << 12 | bottom << 8 | 64u32).to_be_bytes();
    let mpls = Builder::default()
        .ethernet(ETHER_MPLS)
        .bytes(&label(0))
        .bytes(&label(1))
        .ipv4([5; 4], [6; 4], PROTO_UDP, 8)
        .udp(1, 2, 0);
    let frame = mpls.parse();
    assert_eq!(frame.outer.mpls, Some((MplsOver::Ethernet, 0x1234_5040)));
    assert_eq!(frame.inner.unwrap().transport, Some(Transport::Udp { src: 1, dst: 2 }));
}

#[test]
fn esp_is_seen() {
    let built = Builder::default()
        .ethernet(ETHER_IPV4)
        .ipv4([1; 4], [2; 4], PROTO_ESP, 8)
        .bytes(&[0, 0, 1, 0, 0, 0, 0, 5]);
    assert_eq!(built.parse().outer.transport, Some(Transport::Esp { spi: 256, seq: 5 }));
}

#[test]
fn no_bytes_make_it_panic() {
    let whole = [
        udp4().bytes(b"abcd").0,
        Builder::default().ethernet(ETHER_IPV6).ipv6(1, 2, 0, 8).bytes(&[6, 255, 0, 0]).0,
        Builder::default().ethernet(ETHER_MPLS).bytes(&[0; 64]).0,
    ];
    for bytes in &whole {
        for len in 0..bytes.len() {
            let parsed = Frame::parse(&bytes[..len]);
            assert_eq!(parsed.is_some(), len >= ETHERNET_LEN);
            for at in 0..len {
                for value in [0, 0x0f, 0x4f, 0x60, 0xff] {
                    let mut changed = bytes[..len].to_vec();
                    changed[at] = value;
                    if let Some(frame) = Frame::parse(&changed) {
                        assert!(frame.outer.network_end <= len);
                    }
                }
            }
        }
    }
}

#[test]
fn each_flag_of_ipv4_is_told() {
    // Reserved, don't fragment, more fragments: bits 15 to 13 on the wire.
    for wire in 0..8u8 {
        let mut built = udp4().bytes(b"abcd");
        built.0[20] = wire << 5;
        let outer = built.parse().outer;
        let wanted = wire >> 2 | (wire >> 1 & 1) << 1 | (wire & 1) << 2;
        assert!(matches!(outer.network, Some(Network::V4 { flags, .. }) if flags == wanted));
        assert_eq!(outer.is_fragment, wire & 1 != 0, "{wire}");
        assert!(outer.transport.is_some());
        // A later fragment, whatever its flags.
        built.0[21] = 0x80;
        let outer = built.parse().outer;
        assert!(
            matches!(outer.network, Some(Network::V4 { flags, proto: 17, .. }) if flags == wanted)
        );
        assert!(outer.is_fragment && outer.transport.is_none(), "{wire}");
    }
}

#[test]
fn options_of_ipv4_stand_before_the_transport() {
    let with = |words: u8, total: u16| {
        let mut built = udp4();
        built.0.truncate(34);
        built.0[14] = 0x40 | words;
        built.0[16..18].copy_from_slice(&total.to_be_bytes());
        built.0.extend(vec![0; usize::from(words.saturating_sub(5)) * 4]);
        built.udp(1234, 5678, 4).bytes(b"abcd")
    };
    for words in 5..=15u8 {
        let header = u16::from(words) * 4;
        let built = with(words, header + 12);
        let outer = built.parse().outer;
        assert_eq!(outer.transport, Some(Transport::Udp { src: 1234, dst: 5678 }), "{words}");
        assert_eq!(outer.transport_at, 14 + usize::from(header));
        assert_eq!(outer.network_end, built.0.len());
        // A packet of its header alone has no transport, and one that is shorter is none.
        let alone = with(words, header).parse().outer;
        assert_eq!((alone.transport, alone.network_end), (None, 14 + usize::from(header)));
        assert!(alone.network.is_some());
        assert!(with(words, header - 1).parse().outer.network.is_none());
        // As many bytes as the header has are needed.
        let end = 14 + usize::from(header);
        assert!(Frame::parse(&built.0[..end]).unwrap().outer.network.is_some());
        assert!(Frame::parse(&built.0[..end - 1]).unwrap().outer.network.is_none());
    }
    for words in 0..5 {
        assert!(with(words, 60).parse().outer.network.is_none(), "{words}");
    }
}

#[test]
fn the_packet_ends_where_its_length_says() {
    let mut four = udp4().bytes(b"abcd").bytes(&[0; 14]);
    assert_eq!(four.parse().outer.network_end, 46);
    four.0[17] = 200;
    assert_eq!(four.parse().outer.network_end, four.0.len());
    let mut six = Builder::default()
        .ethernet(ETHER_IPV6)
        .ipv6(1, 2, PROTO_UDP, 12)
        .udp(1, 2, 4)
        .bytes(b"abcd")
        .bytes(&[0; 9]);
    assert_eq!(six.parse().outer.network_end, 14 + 40 + 12);
    six.0[19] = 200;
    assert_eq!(six.parse().outer.network_end, six.0.len());
}

#[test]
fn extension_headers_of_ipv6_are_skipped() {
    // Hop-by-hop, routing and destination options, each of another length, then a fragment.
    let built = Builder::default()
        .ethernet(ETHER_IPV6)
        .ipv6(1, 2, 0, 8 + 16 + 24 + 8 + 8)
        .bytes(&[43, 0, 0, 0, 0, 0, 0, 0])
        .bytes(&[60, 1])
        .bytes(&[0; 14])
        .bytes(&[44, 2])
        .bytes(&[0; 22])
        .bytes(&[PROTO_UDP, 9, 0, 7, 0, 0, 0, 1])
        .udp(7, 8, 0);
    let outer = built.parse().outer;
    assert_eq!(outer.transport, Some(Transport::Udp { src: 7, dst: 8 }));
    assert_eq!(outer.transport_at, 54 + 8 + 16 + 24 + 8);
    assert!(outer.is_fragment);
    assert!(matches!(outer.network, Some(Network::V6 { next_hdr: PROTO_UDP, .. })));
    // The piece at the offset of one unit begins elsewhere.
    let mut later = built.clone();
    later.0[54 + 8 + 16 + 24 + 3] = 8;
    assert_eq!(later.parse().outer.transport, None);
}

#[test]
fn fields_of_a_gre_header_stand_where_its_flags_say() {
    for flags in [0u16, 0x8000, 0x2000, 0x1000, 0xa000, 0x9000, 0x3000, 0xb000] {
        let mut gre = flags.to_be_bytes().to_vec();
        gre.extend([8, 0]);
        if flags & 0x8000 != 0 {
            gre.extend([0xcc; 4]);
        }
        let key = if flags & 0x2000 != 0 { 0x0102_0304 } else { 0 };
        if key != 0 {
            gre.extend([1, 2, 3, 4]);
        }
        if flags & 0x1000 != 0 {
            gre.extend([0x55; 4]);
        }
        let built = Builder::default()
            .ethernet(ETHER_IPV4)
            .ipv4([3; 4], [4; 4], PROTO_GRE, gre.len() + 28)
            .bytes(&gre)
            .ipv4([5; 4], [6; 4], PROTO_UDP, 8)
            .udp(1, 2, 0);
        let frame = built.parse();
        let wanted = Transport::Gre { flags, protocol: ETHER_IPV4, key };
        assert_eq!(frame.outer.transport, Some(wanted), "{flags:#x}");
        let inner = frame.inner.unwrap();
        assert_eq!(inner.transport, Some(Transport::Udp { src: 1, dst: 2 }), "{flags:#x}");
    }
}
