use proptest::prelude::*;

use super::*;
use crate::types::{PKey, Psn, QKey, Qpn};
use crate::wire::aeth::{NakCode, Syndrome};
use crate::wire::feth::{Placement, Selectivity};
use crate::wire::opcode::{Opcode, Operation, Service};

fn any_opcode() -> impl Strategy<Value = Opcode> {
    let legal: Vec<Opcode> = (0..=255).filter_map(Opcode::parse).collect();
    prop::sample::select(legal)
}

fn any_bth() -> impl Strategy<Value = Bth> {
    let flags = any::<[bool; 5]>();
    (any_opcode(), flags, (0..64u8, 0..128u8), any::<u16>(), 0..1u32 << 24, 0..1u32 << 24).prop_map(
        |(opcode, [solicited, migreq, fecn, becn, ack_req], (reserved, resv7), pkey, qpn, psn)| {
            Bth {
                opcode,
                solicited,
                migreq,
                pad: 0,
                pkey: PKey(pkey),
                fecn,
                becn,
                reserved,
                dest_qpn: Qpn::new(qpn),
                ack_req,
                resv7,
                psn: Psn::new(psn),
            }
        },
    )
}

fn any_aeth() -> impl Strategy<Value = Aeth> {
    let syndrome = prop_oneof![
        (0u8..32).prop_map(|credit| Syndrome::Ack { credit }),
        (0u8..32).prop_map(|timer| Syndrome::RnrNak { timer }),
        prop::sample::select(vec![
            NakCode::PsnSequence,
            NakCode::InvalidRequest,
            NakCode::RemoteAccess,
            NakCode::RemoteOperational,
        ])
        .prop_map(Syndrome::Nak),
    ];
    (syndrome, 0..1u32 << 24).prop_map(|(syndrome, msn)| Aeth { syndrome, msn })
}

/// Headers of any legal opcode, with exactly those extension headers that it has.
fn any_headers() -> impl Strategy<Value = Headers> {
    let numbers = (any::<[u64; 3]>(), any::<[u32; 5]>(), 0u8..16, 0u8..4, any_aeth());
    (any_bth(), numbers).prop_map(|(bth, (big, small, placement, selectivity, aeth))| {
        let ext = bth.opcode.ext();
        let [va, swap_add, compare] = big;
        let [rkey, len, qkey, imm, number] = small;
        Headers {
            bth,
            xrceth: ext.has(Ext::XRCETH).then_some(XrcEth { srqn: number & 0xff_ffff }),
            deth: ext
                .has(Ext::DETH)
                .then_some(Deth { qkey: QKey(qkey), src_qpn: Qpn::new(number) }),
            reth: ext.has(Ext::RETH).then_some(Reth { va, rkey, len }),
            atomic: ext.has(Ext::ATOMIC).then_some(AtomicEth { va, rkey, swap_add, compare }),
            aeth: ext.has(Ext::AETH).then_some(aeth),
            atomic_ack: ext.has(Ext::ATOMIC_ACK).then_some(AtomicAckEth { original: va }),
            feth: ext.has(Ext::FETH).then_some(Feth {
                placement: Placement::from_bits_retain(placement),
                selectivity: match selectivity {
                    0 => Selectivity::Range,
                    1 => Selectivity::Mr,
                    code => Selectivity::Reserved(code),
                },
            }),
            imm: ext.has(Ext::IMM).then_some(imm),
            ieth: ext.has(Ext::IETH).then_some(rkey),
        }
    })
}

/// A payload that the opcode can have, out of random bytes.
fn payload_for(opcode: Opcode, bytes: &[u8]) -> &[u8] {
    (0..=bytes.len())
        .rev()
        .map(|len| &bytes[..len])
        .find(|payload| opcode.admits_payload(payload.len()))
        .expect("no opcode needs more than 16 bytes")
}

fn emitted(packet: &Packet<'_>) -> Vec<u8> {
    let mut bytes = vec![0xaa; packet.len() + 8];
    let len = packet.emit(&mut bytes);
    assert_eq!(len, packet.len());
    assert_eq!(bytes[len..], [0xaa; 8], "nothing written behind the packet");
    bytes.truncate(len);
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn written_packets_parse_to_the_same(
        headers in any_headers(),
        bytes in prop::collection::vec(any::<u8>(), 16..80),
    ) {
        let packet = Packet::new(headers, payload_for(headers.bth.opcode, &bytes));
        let bytes = emitted(&packet);
        prop_assert_eq!(bytes.len() % 4, 0);
        prop_assert_eq!(Packet::parse(&bytes), Ok(packet));
        prop_assert!(headers.len() <= MAX_HEADERS);

        let mut buf = [0; MAX_HEADERS];
        prop_assert_eq!(packet.headers.emit(&mut buf), headers.len());
        prop_assert_eq!(&buf[..headers.len()], &bytes[..headers.len()]);

        let (alone, len) = (&bytes[..headers.len()], packet.payload.len());
        prop_assert_eq!(Headers::parse(alone, len), Ok(packet.headers));
        let longer = [alone, &[0]].concat();
        prop_assert_eq!(Headers::parse(&longer, len), Err(Malformed::Length));
        let mut padded = alone.to_vec();
        padded[1] ^= 0x10;
        prop_assert_eq!(Headers::parse(&padded, len), Err(Malformed::Pad));

        let mut buf = [0xaa; MAX_HEADERS];
        let behind = &bytes[Bth::LEN..headers.len()];
        prop_assert_eq!(headers.emit_extensions(&mut buf), behind.len());
        prop_assert_eq!(&buf[..behind.len()], behind);
        prop_assert!(buf[behind.len()..].iter().all(|byte| *byte == 0xaa));
    }

    /// Every cut inside the headers is noticed as one.
    #[test]
    fn cut_headers_are_truncated(headers in any_headers(), cut: prop::sample::Index) {
        let mut bytes = vec![0; headers.len()];
        headers.emit(&mut bytes);
        bytes.truncate(cut.index(bytes.len()));
        prop_assert_eq!(Packet::parse(&bytes), Err(Malformed::Truncated));
    }

    /// Bytes that no one meant to be a packet: mostly with a legal first half of the BTH, so that
    /// they get past the first check.
    #[test]
    fn any_bytes_parse_or_do_not(
        opcode in prop::option::weighted(0.9, any_opcode()),
        mut bytes in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        if let (Some(opcode), [first, second, ..]) = (opcode, &mut bytes[..]) {
            *first = opcode.code();
            *second &= 0xf0;
        }
        if let Ok(packet) = Packet::parse(&bytes) {
            // Reserved bits and the pad come out as zeros, everything else as it was.
            let again = emitted(&packet);
            prop_assert_eq!(Packet::parse(&again), Ok(packet));
            prop_assert_eq!(packet.len(), bytes.len());
            prop_assert!(!packet.to_string().contains('\n'));
        }
    }
}

/// The difference between a packet and the one before it.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// PSN, request for an ACK, RETH and payload.
    Usual,
    Other,
    /// Usual, and one bit of its bytes.
    Flip(prop::sample::Index, u8),
    /// Usual, and cut.
    Cut(prop::sample::Index),
}

fn any_change() -> impl Strategy<Value = Change> {
    prop_oneof![
        4 => Just(Change::Usual),
        2 => Just(Change::Other),
        1 => (any::<prop::sample::Index>(), 0u8..8).prop_map(|(at, bit)| Change::Flip(at, bit)),
        1 => any::<prop::sample::Index>().prop_map(Change::Cut),
    ]
}

fn any_write_or_send() -> impl Strategy<Value = Opcode> {
    use Operation as O;
    let operation = prop::sample::select(vec![
        O::SendFirst,
        O::SendMiddle,
        O::SendOnly,
        O::WriteFirst,
        O::WriteMiddle,
        O::WriteOnly,
        O::WriteOnlyImm,
        O::ReadRequest,
    ]);
    let service = prop::sample::select(vec![Service::Rc, Service::Xrc]);
    (service, operation).prop_map(|(service, operation)| Opcode { service, operation })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Whatever came before to the same place.
    #[test]
    fn a_packet_among_many_is_read_as_if_alone(
        packets in prop::collection::vec(
            (
                any_headers(),
                prop::option::weighted(0.7, any_write_or_send()),
                prop::collection::vec(any::<u8>(), 16..80),
                any_change(),
            ),
            1..20,
        ),
    ) {
        let mut place = headers(Service::Rc, Operation::Ack);
        let (mut last, mut before) = (Beginning::default(), packets[0].0);
        for (drawn, opcode, payload, change) in packets {
            let this = if let Change::Other = change {
                let bth = Bth { opcode: opcode.unwrap_or(drawn.bth.opcode), ..drawn.bth };
                let reth = Some(drawn.reth.unwrap_or(Reth { va: 1, rkey: 2, len: 3 }));
                let (imm, xrceth) = (drawn.imm.or(Some(4)), drawn.xrceth.or(Some(XrcEth { srqn: 5 })));
                Headers { bth, reth, imm, xrceth, ..drawn }
            } else {
                let bth = Bth { ack_req: drawn.bth.ack_req, psn: drawn.bth.psn, ..before.bth };
                Headers { bth, reth: before.reth.map(|reth| drawn.reth.unwrap_or(reth)), ..before }
            };
            before = this;
            let payload = payload_for(this.bth.opcode, &payload);
            let mut bytes = emitted(&Packet::new(this, payload));
            match change {
                Change::Flip(at, bit) => bytes[at.index(payload.len().max(1)).min(11)] ^= 1 << bit,
                Change::Cut(at) => bytes.truncate(at.index(bytes.len())),
                _ => {}
            }
            let read = place.parse_next(&mut last, &bytes).map(<[u8]>::to_vec);
            let alone = Packet::parse(&bytes);
            prop_assert_eq!(read, alone.map(|packet| packet.payload.to_vec()));
            if let Ok(packet) = alone {
                prop_assert_eq!(place, packet.headers);
            }
        }
    }
}

const QPN: Qpn = Qpn::new(0x0a_0001);

fn headers(service: Service, operation: Operation) -> Headers {
    Headers::new(Bth::new(Opcode::new(service, operation), QPN, Psn::new(17)))
}

/// The bytes behind the BTH.
fn behind_bth(headers: Headers) -> Vec<u8> {
    let mut bytes = [0; MAX_HEADERS];
    let len = headers.emit(&mut bytes);
    bytes[Bth::LEN..len].to_vec()
}

const RETH: Reth = Reth { va: 0x0102_0304_0506_0708, rkey: 0x1112_1314, len: 0x2122_2324 };
const RETH_BYTES: [u8; 16] =
    [1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14, 0x21, 0x22, 0x23, 0x24];

#[test]
fn write_with_imm_has_the_reth_first() {
    let headers = Headers {
        reth: Some(RETH),
        imm: Some(0x3132_3334),
        ..headers(Service::Rc, Operation::WriteOnlyImm)
    };
    let expected = [&RETH_BYTES[..], &[0x31, 0x32, 0x33, 0x34]].concat();
    assert_eq!(behind_bth(headers), expected);
}

#[test]
fn xrceth_follows_the_bth_at_once() {
    let headers = Headers {
        xrceth: Some(XrcEth { srqn: 0x41_4243 }),
        reth: Some(RETH),
        ..headers(Service::Xrc, Operation::WriteOnly)
    };
    assert_eq!(behind_bth(headers), [&[0, 0x41, 0x42, 0x43], &RETH_BYTES[..]].concat());
}

#[test]
fn feth_stands_before_the_reth() {
    let feth = Feth { placement: Placement::PERSISTENCE, selectivity: Selectivity::Mr };
    let headers =
        Headers { feth: Some(feth), reth: Some(RETH), ..headers(Service::Rc, Operation::Flush) };
    assert_eq!(behind_bth(headers), [&[0, 0, 0, 0x12], &RETH_BYTES[..]].concat());
}

#[test]
fn datagram_with_imm() {
    let headers = Headers {
        deth: Some(Deth { qkey: QKey::GSI, src_qpn: Qpn::new(0x51_5253) }),
        imm: Some(0x3132_3334),
        ..headers(Service::Ud, Operation::SendOnlyImm)
    };
    let expected = [0x80, 1, 0, 0, 0, 0x51, 0x52, 0x53, 0x31, 0x32, 0x33, 0x34];
    assert_eq!(behind_bth(headers), expected);
}

#[test]
fn atomic_request_and_answer() {
    let request = Headers {
        atomic: Some(AtomicEth { va: 1, rkey: 2, swap_add: 3, compare: 4 }),
        ..headers(Service::Rc, Operation::CompareSwap)
    };
    let expected =
        [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 4];
    assert_eq!(behind_bth(request), expected);

    let answer = Headers {
        aeth: Some(Aeth { syndrome: Syndrome::ACK, msn: 5 }),
        atomic_ack: Some(AtomicAckEth { original: 6 }),
        ..headers(Service::Rc, Operation::AtomicAck)
    };
    assert_eq!(behind_bth(answer), [0x1f, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 6]);
}

#[test]
fn congestion_notification_carries_16_bytes() {
    let mut headers = headers(Service::Cnp, Operation::Cnp);
    headers.bth.becn = true;
    let packet = Packet::new(headers, &[0; 16]);
    let bytes = emitted(&packet);
    assert_eq!(bytes.len(), 28);
    assert_eq!(bytes[..5], [0x81, 0, 0xff, 0xff, 0x40]);
    assert_eq!(Packet::parse(&bytes), Ok(packet));
    assert_eq!(Packet::parse(&bytes[..12]), Err(Malformed::Length));
}

#[test]
fn pad_is_not_payload() {
    let mut packet = Packet::new(headers(Service::Rc, Operation::SendOnly), &[1, 2, 3, 4, 5]);
    assert_eq!((packet.headers.bth.pad, packet.len()), (3, 20));
    let mut bytes = emitted(&packet);
    assert_eq!(bytes[12..], [1, 2, 3, 4, 5, 0, 0, 0]);
    bytes[19] = 0xff;
    assert_eq!(Packet::parse(&bytes), Ok(packet), "the content of the pad is ignored");
    packet.headers.bth.ack_req = true;
    assert_eq!(packet.to_string(), "RC SEND_ONLY qp 0x0a0001 psn 17 ack len 5");
}

#[test]
fn malformed_packets_say_why() {
    let send = emitted(&Packet::new(headers(Service::Rc, Operation::SendOnly), &[1, 2, 3, 4]));
    let parse = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = send.clone();
        change(&mut bytes);
        Packet::parse(&bytes).map(|_| ())
    };
    assert_eq!(parse(&|_| ()), Ok(()));
    assert_eq!(parse(&|b| b.truncate(11)), Err(Malformed::Truncated));
    assert_eq!(parse(&|b| b[1] |= 0x01), Err(Malformed::Version));
    assert_eq!(parse(&|b| b[0] = 0x44), Err(Malformed::Opcode), "reliable datagram");
    assert_eq!(parse(&|b| b[0] = 0x2c), Err(Malformed::Opcode), "UC has no READ");
    assert_eq!(parse(&|b| b.truncate(14)), Err(Malformed::Length), "not a multiple of four");
    assert_eq!(parse(&|b| b[0] = 0x0c), Err(Malformed::Truncated), "no RETH");
    assert_eq!(parse(&|b| b[0] = 0x11), Ok(()), "the payload is an AETH");
    let ack = |b: &mut Vec<u8>| {
        b[0] = 0x11;
        b[12] = 0x64;
    };
    assert_eq!(parse(&ack), Err(Malformed::Syndrome));
    let padded_without_payload = |b: &mut Vec<u8>| {
        b[1] = 0x10;
        b.truncate(12);
    };
    assert_eq!(parse(&padded_without_payload), Err(Malformed::Pad));
    let ack_with_payload = |b: &mut Vec<u8>| {
        b[0] = 0x11;
        b.extend([0; 4]);
    };
    assert_eq!(parse(&ack_with_payload), Err(Malformed::Length));
}
