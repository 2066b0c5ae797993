use proptest::prelude::*;

use super::*;

const V4: Pseudo =
    Pseudo::V4 { src: Ipv4Addr::new(10, 99, 0, 2), dst: Ipv4Addr::new(10, 99, 0, 3), id: 0 };
const PORT: u16 = 4791;

/// The definition, byte by byte: the packet as it lies on the wire, masked, and a plain CRC-32.
fn by_definition(ip: &Pseudo, src_port: u16, dst_port: u16, bth_to_pad: &[u8]) -> u32 {
    let udp_len = (8 + bth_to_pad.len() + 4) as u16;
    let mut bytes = vec![0xff; 8];
    match ip {
        Pseudo::V4 { src, dst, id } => {
            bytes.extend([0x45, 0xff]);
            bytes.extend((udp_len + 20).to_be_bytes());
            bytes.extend(id.to_be_bytes());
            bytes.extend([0x40, 0, 0xff, 17, 0xff, 0xff]);
            bytes.extend(src.octets());
            bytes.extend(dst.octets());
        }
        Pseudo::V6 { src, dst } => {
            bytes.extend([0x6f, 0xff, 0xff, 0xff]);
            bytes.extend(udp_len.to_be_bytes());
            bytes.extend([17, 0xff]);
            bytes.extend(src.octets());
            bytes.extend(dst.octets());
        }
    }
    bytes.extend(src_port.to_be_bytes());
    bytes.extend(dst_port.to_be_bytes());
    bytes.extend(udp_len.to_be_bytes());
    bytes.extend([0xff, 0xff]);
    let bth = bytes.len();
    bytes.extend(bth_to_pad);
    if let Some(byte) = bytes.get_mut(bth + 4) {
        *byte = 0xff;
    }
    !bytes.iter().fold(u32::MAX, |mut r, byte| {
        r ^= u32::from(*byte);
        for _ in 0..8 {
            r = r >> 1 ^ if r & 1 != 0 { 0xedb8_8320 } else { 0 };
        }
        r
    })
}

fn with_trailer(bth_to_pad: &[u8], icrc: u32) -> Vec<u8> {
    [bth_to_pad, &icrc.to_le_bytes()].concat()
}

fn any_v4() -> impl Strategy<Value = Pseudo> {
    any::<(Ipv4Addr, Ipv4Addr, u16)>().prop_map(|(src, dst, id)| Pseudo::V4 { src, dst, id })
}

fn any_pseudo() -> impl Strategy<Value = Pseudo> {
    let v6 = any::<(Ipv6Addr, Ipv6Addr)>().prop_map(|(src, dst)| Pseudo::V6 { src, dst });
    prop_oneof![any_v4(), v6]
}

/// Bytes of a packet without its trailer: a multiple of four.
fn any_packet() -> impl Strategy<Value = Vec<u8>> {
    let len = prop_oneof![4 => 3usize..40, 1 => 1000usize..1100, 1 => 0x3ff0usize..0x3ff4];
    len.prop_flat_map(|words| prop::collection::vec(any::<u8>(), 4 * words))
}

proptest! {
    #[test]
    fn is_what_the_definition_says(
        ip in any_pseudo(),
        ports: (u16, u16),
        packet in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let expected = by_definition(&ip, ports.0, ports.1, &packet);
        prop_assert_eq!(compute(&ip, ports.0, ports.1, &packet), expected);
        prop_assert_eq!(
            check(&ip, ports.0, ports.1, &with_trailer(&packet, expected)),
            IcrcVerdict::Exact
        );
    }

    #[test]
    fn finds_an_id_that_was_not_told(ip in any_v4(), expected: u16, packet in any_packet()) {
        let bytes = with_trailer(&packet, by_definition(&ip, PORT, PORT, &packet));
        let verdict = ip.flow(PORT, PORT).check(&bytes, expected);
        if ip.id() == expected {
            prop_assert_eq!(verdict, IcrcVerdict::Exact);
        } else {
            prop_assert_eq!(verdict, IcrcVerdict::SomeId(ip.id()));
        }
    }

    #[test]
    fn the_masked_byte_may_change(ip in any_pseudo(), packet in any_packet(), byte: u8) {
        let mut bytes = with_trailer(&packet, compute(&ip, PORT, PORT, &packet));
        bytes[4] = byte;
        prop_assert_eq!(check(&ip, PORT, PORT, &bytes), IcrcVerdict::Exact);
    }

    #[test]
    fn notices_a_flipped_bit(ip in any_pseudo(), packet in any_packet(), at: prop::sample::Index) {
        let mut bytes = with_trailer(&packet, compute(&ip, PORT, PORT, &packet));
        let bit = at.index(8 * bytes.len().min(SINGLE_BITS));
        prop_assume!(bit / 8 != 4);
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert_eq!(check(&ip, PORT, PORT, &bytes), IcrcVerdict::Wrong);
    }
}

/// The longest packet that a path MTU allows.
const SINGLE_BITS: usize = 4096 + 44 + 4;

/// The effect of a flipped bit on the ID depends only on its distance from the ID. So one long packet stands for all
/// shorter ones.
#[test]
fn notices_every_single_flipped_bit() {
    let packet: Vec<u8> = (0..SINGLE_BITS - ICRC_LEN).map(|i| (i / 3) as u8).collect();
    let mut bytes = with_trailer(&packet, compute(&V4, PORT, PORT, &packet));
    for bit in (0..8 * bytes.len()).filter(|bit| bit / 8 != 4) {
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(check(&V4, PORT, PORT, &bytes), IcrcVerdict::Wrong, "bit {bit}");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

/// The strength that the module's documentation promises, counted.
#[test]
fn one_damaged_packet_in_2_to_the_16_passes() {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let passed = (0..1 << 21).filter(|_| {
        // xorshift64
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        id_difference(random as u32, 64).is_some()
    });
    let passed = passed.count();
    // 32 expected, standard deviation 5.7.
    assert!((9..=55).contains(&passed), "{passed} of 2^21");
}

/// A packet damaged in a way that an ID would explain if the sender may leave DF clear.
#[test]
fn does_not_believe_that_df_was_clear() {
    let mut bytes = with_trailer(&[7; 256], compute(&V4, PORT, PORT, &[7; 256]));
    bytes[173] ^= 1 << 3;
    assert_eq!(check(&V4, PORT, PORT, &bytes), IcrcVerdict::Wrong);
}

#[test]
fn too_short_for_a_trailer_is_wrong() {
    for len in 0..4 {
        assert_eq!(check(&V4, PORT, PORT, &[0; 4][..len]), IcrcVerdict::Wrong);
    }
}

#[test]
fn mapped_addresses_are_ipv4() {
    let (src, dst) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2));
    let plain = Flow::new(src.into(), dst.into(), 1, 2);
    let mapped = Flow::new(src.to_ipv6_mapped().into(), dst.to_ipv6_mapped().into(), 1, 2);
    assert_eq!(plain, mapped);
}

/// `SEND_ONLY` of a UC queue pair of a ConnectX to itself: ID 1144, UDP checksum not zero.
#[test]
fn packet_of_a_connectx() {
    let address = Ipv4Addr::new(192, 168, 0, 7);
    let flow = Flow::new(address.into(), address.into(), 49152, PORT);
    let mut packet = vec![0x24, 0x60, 0xff, 0xff, 0, 0, 0, 211];
    packet.extend(13_571_856_u32.to_be_bytes());
    packet.extend(b"F0\x81\x8b\xe2\x895\xd9\x0e\x9a\x95PT\x01\xbe\x88^P\0\0");
    packet.extend([0x78, 0xf3, 0x53, 0xf3]);
    assert_eq!(flow.check(&packet, 1144), IcrcVerdict::Exact);
    assert_eq!(flow.check(&packet, 0), IcrcVerdict::SomeId(1144));
}

/// Congestion notification captured on a ConnectX-4 Lx: ID 0x718c, BECN set, TOS 0xc2.
#[test]
fn congestion_notification_of_a_connectx() {
    let flow =
        Flow::new(Ipv4Addr::new(10, 0, 17, 1).into(), Ipv4Addr::new(10, 0, 18, 1).into(), 0, PORT);
    let mut packet = vec![0x81, 0, 0xff, 0xff, 0x40, 0, 1, 0x18];
    packet.extend([0; 4 + 16]);
    packet.extend([0x82, 0xfd, 0x00, 0x2a]);
    assert_eq!(flow.check(&packet, 0x718c), IcrcVerdict::Exact);
    assert_eq!(flow.check(&packet, 0), IcrcVerdict::SomeId(0x718c));
}
