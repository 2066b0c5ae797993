use proptest::prelude::*;

use super::super::frame::PROTO_UDP;
use super::super::frame::tests::Builder;
use super::*;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

fn keymat(key_len: usize, icv_len: usize) -> AesGcm {
    AesGcm { key: (1..=key_len as u8).collect(), salt: [9, 8, 7, 6], iv: 77, icv_len }
}

fn full() -> FullOffload {
    FullOffload { spi: 0x4321, seq: 0, tfc_pad: 0, hard_limit: 0, replay_window: 64, tunnel: None }
}

fn attr(direction: Direction, full: &FullOffload) -> EspAttr {
    EspAttr { direction, offload: Offload::Full(full.clone()), keymat: keymat(16, 16), esn: None }
}

fn pair(full: &FullOffload) -> (Esp, Esp) {
    let make = |direction| Esp::new(attr(direction, full)).unwrap();
    (make(Direction::Encrypt), make(Direction::Decrypt))
}

fn apply(esp: &mut Esp, bytes: &[u8]) -> Result<Vec<u8>, EspDrop> {
    let mut to = vec![1, 2, 3];
    esp.transform(&Frame::parse(bytes).unwrap(), &mut to).map(|()| to)
}

fn udp_packet(payload: &[u8]) -> Vec<u8> {
    let mut bytes = Builder::default()
        .ethernet(0x8100)
        .vlan(5, 0x0800)
        .ipv4([10, 0, 0, 1], [10, 0, 0, 2], PROTO_UDP, 8 + payload.len())
        .udp(1234, 5678, payload.len())
        .bytes(payload)
        .0;
    super::super::checksum::fill_in(&mut bytes);
    bytes
}

fn tunnels() -> Vec<Encapsulation> {
    let v4 = OuterIp::V4 { src: 0x0102_0304, dst: 0x0506_0708, tos: 3, ttl: 9, df: true };
    let v6 =
        OuterIp::V6 { src: 1 << 100, dst: 2, flow_label: 0x12345, traffic_class: 7, hop_limit: 0 };
    [v4, v6]
        .into_iter()
        .flat_map(|ip| [None, Some((4500, 4500))].map(|udp| Encapsulation { ip: ip.clone(), udp }))
        .collect()
}

/// The first packet of draft-mcgrew-gcm-test-01. Another implementation of AES-GCM makes the same ciphertext. The SPI
/// and the extended sequence number are the authenticated data.
#[test]
fn a_packet_as_published() {
    let text = "45000048699a000080114db7c0a80102c0a801010a9bf15638d301000001000000000000045f736970045f7564700373\
                69700963796265726369747902646b0000210001";
    let sealed = "fecf537e729d5b07dc30df528dd22b768d1b98736696a6fd348509fa13ceac34cfa2436f14a3f3cf65925bf1f4a13c5d\
                  15b21e1884f5ff6247aeabb786b93bce61bc17d768fd9732459018148f6cbe722fd04796562dfdb4";
    let key = hex("4c80cdefbb5d10da906ac73c3613a634");
    let aead = Aead::new(&AesGcm {
        key: key.into_iter().collect(),
        salt: [0x2e, 0x44, 0x3b, 0x68],
        iv: 0,
        icv_len: 16,
    })
    .unwrap();
    let iv = [0x49, 0x56, 0xed, 0x7e, 0x3b, 0x24, 0x4c, 0xfe];
    let aad = hex("000043218765432100000000");
    let mut text = hex(text);
    text.extend([1, 2, 2, 1]);
    let plain = text.clone();
    let tag = aead.seal(iv, &aad, &mut text);
    assert_eq!([&text[..], &tag].concat(), hex(sealed));
    assert!(aead.open(iv, &aad, &mut text, &tag));
    assert_eq!(text, plain);
}

#[test]
fn transport_mode_on_the_wire() {
    let (mut encrypt, mut decrypt) = pair(&full());
    let packet = udp_packet(b"hello");
    let sealed = apply(&mut encrypt, &packet).unwrap();
    let frame = Frame::parse(&sealed).unwrap();
    assert_eq!(frame.outer.transport, Some(Transport::Esp { spi: 0x4321, seq: 1 }));
    assert_eq!(frame.outer.network_end, sealed.len());
    // UDP header, 5 bytes, 1 of padding, 2 of trailer; IV and ICV.
    assert_eq!(sealed.len(), frame.outer.transport_at + 8 + 8 + 16 + 16);
    assert_eq!(sealed[frame.outer.transport_at + 8..][..8], 77u64.to_be_bytes());
    assert_eq!(apply(&mut decrypt, &sealed), Ok(packet.clone()));
    assert_eq!(apply(&mut decrypt, &sealed), Err(EspDrop::Replayed));
    let second = apply(&mut encrypt, &packet).unwrap();
    assert_eq!(second[frame.outer.transport_at + 4..][..12], [0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 78]);
    assert_eq!(apply(&mut decrypt, &second), Ok(packet));
}

#[test]
fn every_mode_and_key_comes_back() {
    let packets = [
        udp_packet(b"a"),
        Builder::default().ethernet(0x86dd).ipv6(1, 2, 60, 16).bytes(&[17, 0, 1, 4, 0, 0, 0, 0]).0,
    ];
    let mut second = packets[1].clone();
    second.extend([0, 1, 0, 2, 0, 8, 0, 0]);
    for tunnel in std::iter::once(None).chain(tunnels().into_iter().map(Some)) {
        for (key_len, icv_len, esn) in [(16, 8, None), (24, 12, Some(0)), (32, 16, Some(u32::MAX))]
        {
            let tfc_pad = if tunnel.is_some() { 5 } else { 0 };
            let full = FullOffload { tunnel: tunnel.clone(), tfc_pad, ..full() };
            let make = |direction| {
                let keymat = keymat(key_len, icv_len);
                Esp::new(EspAttr { keymat, esn, ..attr(direction, &full) }).unwrap()
            };
            let (mut encrypt, mut decrypt) = (make(Direction::Encrypt), make(Direction::Decrypt));
            for packet in [&packets[0], &second] {
                // The padding that an interface adds to a short frame is not part of the packet.
                let padded = [&packet[..], &[0; 7]].concat();
                let sealed = apply(&mut encrypt, &padded).unwrap();
                let mut changed = sealed.clone();
                *changed.last_mut().unwrap() ^= 1;
                assert_eq!(apply(&mut decrypt, &changed), Err(EspDrop::Integrity));
                let opened = apply(&mut decrypt, &[&sealed[..], &[0; 3]].concat());
                assert_eq!(opened.as_ref(), Ok(packet), "{tunnel:?} {key_len}");
            }
        }
    }
}

#[test]
fn inline_crypto_leaves_the_headers() {
    let inner = &udp_packet(b"inside")[18..];
    let mut packet = Builder::default()
        .ethernet(0x0800)
        .ipv4([1, 2, 3, 4], [5, 6, 7, 8], 50, 16 + inner.len())
        .bytes(&[0, 0, 0x43, 0x21, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0])
        .bytes(inner)
        .0;
    super::super::checksum::fill_in(&mut packet);
    let inline = |direction, esn, new_window| {
        Esp::new(EspAttr {
            direction,
            offload: Offload::InlineCrypto { new_window, tunnel: true },
            keymat: keymat(32, 16),
            esn,
        })
        .unwrap()
    };
    let mut encrypt = inline(Direction::Encrypt, Some(6), true);
    let sealed = apply(&mut encrypt, &packet).unwrap();
    // The IV is the number: 7 for the next window, 9.
    assert_eq!(sealed[42..50], [0, 0, 0, 7, 0, 0, 0, 9]);
    let opened = apply(&mut inline(Direction::Decrypt, Some(7), false), &sealed).unwrap();
    let mut wanted = packet.clone();
    wanted[42..50].copy_from_slice(&sealed[42..50]);
    assert_eq!(opened, wanted);
    let wrong = apply(&mut inline(Direction::Decrypt, Some(6), false), &sealed);
    assert_eq!(wrong, Err(EspDrop::Integrity));
}

#[test]
fn it_ends() {
    let packet = udp_packet(b"x");
    let (mut limited, _) = pair(&FullOffload { hard_limit: 1, ..full() });
    assert!(apply(&mut limited, &packet).is_ok());
    assert_eq!(apply(&mut limited, &packet), Err(EspDrop::Exhausted));
    let (mut last, _) = pair(&FullOffload { seq: u32::MAX - 1, ..full() });
    assert!(apply(&mut last, &packet).is_ok());
    assert_eq!(apply(&mut last, &packet), Err(EspDrop::Exhausted));
    let long = udp_packet(&vec![0; MAX_FRAME - 46 - 20]);
    let (mut encrypt, _) = pair(&full());
    assert_eq!(apply(&mut encrypt, &long), Err(EspDrop::TooLong));
}

#[test]
fn invalid_associations_are_refused() {
    let make = |direction, change: &dyn Fn(&mut EspAttr)| {
        let mut attr = attr(direction, &full());
        change(&mut attr);
        Esp::new(attr).map(drop)
    };
    let encrypt = Direction::Encrypt;
    assert_eq!(make(encrypt, &|a| a.keymat.key.truncate(15)), Err(EspError::KeyLen));
    assert_eq!(make(encrypt, &|a| a.keymat.icv_len = 4), Err(EspError::IcvLen));
    let inline =
        |a: &mut EspAttr| a.offload = Offload::InlineCrypto { new_window: false, tunnel: false };
    assert_eq!(make(encrypt, &inline), Err(EspError::InlineTransport));
    assert_eq!(make(Direction::Decrypt, &inline), Ok(()));
    let with = |full: FullOffload| move |a: &mut EspAttr| a.offload = Offload::Full(full.clone());
    let padded = with(FullOffload { tfc_pad: 1, ..full() });
    assert_eq!(make(encrypt, &padded), Err(EspError::TfcPad));
    let wide = with(FullOffload { replay_window: MAX_REPLAY_WINDOW + 1, ..full() });
    assert_eq!(make(encrypt, &wide), Err(EspError::ReplayWindow));
}

#[test]
fn a_modification_goes_on_or_begins_anew() {
    let packet = udp_packet(b"x");
    let (mut encrypt, _) = pair(&full());
    let number = |bytes: &[u8]| match Frame::parse(bytes).unwrap().outer.transport {
        Some(Transport::Esp { seq, .. }) => seq,
        other => panic!("{other:?}"),
    };
    apply(&mut encrypt, &packet).unwrap();
    let again = encrypt.attr().clone();
    encrypt.modify(again.clone(), Restart { key: true, ..Restart::default() }).unwrap();
    assert_eq!(number(&apply(&mut encrypt, &packet).unwrap()), 2);
    encrypt.modify(again.clone(), Restart { sequence: true, ..Restart::default() }).unwrap();
    assert_eq!(number(&apply(&mut encrypt, &packet).unwrap()), 1);
    let tunnel = FullOffload { tunnel: tunnels().pop(), ..full() };
    let other = EspAttr { offload: Offload::Full(tunnel), ..again.clone() };
    assert_eq!(encrypt.modify(other, Restart::default()), Err(EspError::Fixed));
    let other = EspAttr { direction: Direction::Decrypt, ..again };
    assert_eq!(encrypt.modify(other, Restart::default()), Err(EspError::Fixed));
}

proptest! {
    /// Whatever arrives is dropped or becomes a frame: nothing is touched that is not there.
    #[test]
    fn noise_is_dropped(
        bytes in prop::collection::vec(any::<u8>(), 14..200),
        cut in 14usize..120,
        flip in 14usize..120,
    ) {
        let mut sas: Vec<Esp> = Vec::new();
        for tunnel in std::iter::once(None).chain(tunnels().into_iter().map(Some)) {
            let (encrypt, decrypt) = pair(&FullOffload { tunnel, ..full() });
            sas.extend([encrypt, decrypt]);
        }
        let (mut encrypt, _) = pair(&full());
        let mut sealed = apply(&mut encrypt, &udp_packet(&bytes)).unwrap();
        if let Some(byte) = sealed.get_mut(flip) {
            *byte ^= 0x10;
        }
        sealed.truncate(cut);
        for frame in [&bytes, &sealed, &udp_packet(&bytes)] {
            for esp in &mut sas {
                let mut to = Vec::new();
                if let Some(frame) = Frame::parse(frame) && esp.transform(&frame, &mut to).is_ok() {
                    prop_assert!(Frame::parse(&to).is_some());
                }
            }
        }
    }
}

/// The protocol number stands in the last extension header.
#[test]
fn extension_headers_of_ipv6_stay_before_the_esp_header() {
    let ip = |chain: &[u8]| {
        let next = if chain.is_empty() { PROTO_UDP } else { 60 };
        Builder::default()
            .ethernet(0x86dd)
            .ipv6(1, 2, next, chain.len() + 8)
            .bytes(chain)
            .udp(1234, 5678, 0)
            .0
    };
    let one = [&[PROTO_UDP, 1][..], &[0; 14]].concat();
    let two = [&[60, 2][..], &[0; 22], &[PROTO_UDP, 0], &[0; 6]].concat();
    // The chain, and the place of the protocol number.
    for (chain, at) in [(&[][..], 14 + 6), (&one, 54), (&two, 54 + 24)] {
        let packet = ip(chain);
        let (mut encrypt, mut decrypt) = pair(&full());
        let sealed = apply(&mut encrypt, &packet).unwrap();
        let mut headers = packet[..54 + chain.len()].to_vec();
        headers[at] = 50;
        headers[18..20].copy_from_slice(&sealed[18..20]);
        assert_eq!(sealed[..headers.len()], headers);
        assert_eq!(usize::from(sealed[19]), sealed.len() - 54);
        let outer = Frame::parse(&sealed).unwrap().outer;
        assert_eq!(outer.transport, Some(Transport::Esp { spi: 0x4321, seq: 1 }));
        assert_eq!(apply(&mut decrypt, &sealed), Ok(packet));
    }
}
