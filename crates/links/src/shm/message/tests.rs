//! Headers of the ring's messages, as they are written and as anybody may write them.

use std::net::Ipv4Addr;

use anyverbs_proto::direct::MAX_FETCH;
use anyverbs_proto::types::{PKey, QKey};
use anyverbs_proto::wire::aeth::{Aeth, Syndrome};
use anyverbs_proto::wire::deth::Deth;
use anyverbs_proto::wire::reth::Reth;
use anyverbs_proto::wire::xrceth::XrcEth;

use super::*;

/// Slots of writer and reader.
const SLOTS: (u8, u8) = (7, 3);
const ADDR: u64 = 0x1000;

fn read(inbox: &mut Inbox, head: &[u8], payload: Data<'static>) -> Option<Received> {
    inbox.parse(head, payload, SLOTS, |_| true)
}

fn arrival(last: u8) -> Arrival {
    let gid = |last| Gid::from(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)));
    Arrival {
        source: gid(last),
        destination: gid(9),
        traffic_class: 4,
        hop_limit: 64,
        flow_label: 0xabcde,
        interface: 0,
        port: 0,
    }
}

fn digest(arrival: &Arrival) -> Digest {
    Digest::new(arrival.source, arrival.destination)
}

/// A message as the link writes it.
fn message(arrival: &Arrival, headers: &Headers, len: usize, acks: Option<Psn>) -> Vec<u8> {
    message_for(arrival, headers, (len, 1), acks)
}

/// As [`message`], of a packet that stands for several.
fn message_for(
    arrival: &Arrival,
    headers: &Headers,
    (len, packets): (usize, u8),
    acks: Option<Psn>,
) -> Vec<u8> {
    let mut head = [0; MAX_HEADER];
    let end = if is_connected(headers.bth.opcode) {
        emit_connected(headers, digest(arrival), packets, acks, None, &mut head)
    } else {
        Front::new(arrival).emit(headers, len, packets.into(), &mut head).1
    };
    head[..end].to_vec()
}

fn bth(service: Service, operation: Operation) -> Bth {
    let bth = Bth::new(Opcode::new(service, operation), Qpn::new(0x03_0203), Psn::new(77));
    Bth { migreq: true, ..bth }
}

fn send() -> Headers {
    Headers::new(bth(Service::Rc, Operation::SendOnly))
}

fn write() -> Headers {
    let mut headers = Headers::new(bth(Service::Rc, Operation::WriteOnly));
    headers.reth = Some(Reth { va: 1, rkey: 2, len: 3 });
    headers
}

fn ack() -> Headers {
    let mut headers = Headers::new(bth(Service::Rc, Operation::Ack));
    headers.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: 1 });
    headers
}

fn datagram() -> Headers {
    let mut headers = Headers::new(bth(Service::Ud, Operation::SendOnly));
    headers.deth = Some(Deth { qkey: QKey(5), src_qpn: Qpn::new(6) });
    headers
}

fn payload(len: usize) -> Data<'static> {
    Data::Shared { addr: ADDR, len }
}

#[test]
fn packets_are_read_one_after_the_other_into_one_inbox() {
    let v6 = Arrival { source: Gid([7; 16]), ..arrival(1) };
    let mut inbox = Inbox::default();
    for (arrival, headers) in [
        (arrival(1), send()),
        (arrival(1), write()),
        (arrival(1), datagram()),
        (arrival(2), send()),
        (v6, datagram()),
        (v6, write()),
        (arrival(2), send()),
        (arrival(2), datagram()),
    ] {
        for (solicited, ack_req, pkey) in
            [(false, false, 0xffff), (true, false, 0x8001), (false, true, 0x7fff)]
        {
            let mut headers = headers;
            (headers.bth.solicited, headers.bth.ack_req) = (solicited, ack_req);
            headers.bth.pkey = PKey(pkey);
            let bytes = message(&arrival, &headers, 3, None);
            assert!(matches!(read(&mut inbox, &bytes, payload(3)), Some(Received::Packet)));
            if is_connected(headers.bth.opcode) {
                assert_eq!(inbox.digest, Some(digest(&arrival).from_slot(SLOTS.0)));
            } else {
                assert_eq!((inbox.digest, inbox.arrival), (None, arrival));
            }
            headers.bth.pad = 1;
            assert_eq!(inbox.packet.headers, headers);
            assert_eq!((inbox.packet.packets, inbox.packet.acks), (1, None));
            assert_eq!(inbox.headers_len, headers.len());
        }
    }
}

#[test]
fn a_request_carries_an_ack_and_nothing_else_does() {
    let mut inbox = Inbox::default();
    let psn = Psn::new(0xfe_dcba);
    let bytes = message(&arrival(1), &send(), 0, Some(psn));
    assert!(read(&mut inbox, &bytes, payload(0)).is_some());
    assert_eq!(inbox.packet.acks, Some(psn));
    assert_eq!(inbox.packet.headers.bth.psn, send().bth.psn);

    let bytes = message(&arrival(1), &ack(), 0, None);
    assert!(read(&mut inbox, &bytes, payload(0)).is_some());
    assert_eq!(inbox.packet.acks, None);
    let bytes = message(&arrival(1), &ack(), 0, Some(psn));
    assert!(read(&mut inbox, &bytes, payload(0)).is_none());
}

/// The link adds the reason as a payload. No NAK of a network has one.
#[test]
fn a_refusal_of_rc_and_of_xrc_has_its_reason_as_payload() {
    let packets = [send(), Headers { bth: bth(Service::Xrc, Operation::Ack), ..ack() }];
    for service in [Service::Rc, Service::Xrc] {
        let refusal = Headers { bth: bth(service, Operation::Ack), ..ack() };
        let mut inbox = Inbox::default();
        for before in packets {
            // The inbox forgets the packet that it read before.
            read(&mut inbox, &message(&arrival(2), &before, 0, None), payload(0));
            let bytes = message(&arrival(1), &refusal, Told::LEN, None);
            assert!(matches!(read(&mut inbox, &bytes, payload(Told::LEN)), Some(Received::Packet)));
            assert_eq!(inbox.packet.headers, refusal);
            assert_eq!(inbox.packet.payload.len(), Told::LEN);
            assert!(read(&mut inbox, &bytes, payload(Told::LEN + 1)).is_none());
        }
    }
    let mut other = Headers::new(bth(Service::Xrc, Operation::ReadRequest));
    (other.xrceth, other.reth) = (Some(XrcEth { srqn: 9 }), write().reth);
    let bytes = message(&arrival(1), &other, Told::LEN, None);
    assert!(read(&mut Inbox::default(), &bytes, payload(Told::LEN)).is_none());
}

#[test]
fn a_payload_that_is_elsewhere_has_a_place() {
    let mut inbox = Inbox::default();
    let at = RemoteAddr { va: 0x1234_5678_9abc_def0, rkey: 77 };
    let (at, psn) = (Place { at, generation: 0x8000_0005 }, Psn::new(9));
    for (pkey, acks) in [(0xffff, None), (0x8001, Some(psn))] {
        let mut headers = send();
        headers.bth.pkey = PKey(pkey);
        let mut emit = |bytes: u32, in_message: usize| {
            let mut head = [0; MAX_HEADER];
            let elsewhere = Some((at, bytes));
            let digest = digest(&arrival(1));
            let end = emit_connected(&headers, digest, 16, acks, elsewhere, &mut head);
            let read = read(&mut inbox, &head[..end], payload(in_message)).is_some();
            read.then_some((inbox.packet.payload, inbox.packet.packets, inbox.packet.acks))
        };
        for bytes in [1, 20_003, MAX_FETCH] {
            let got = emit(bytes, 0);
            let is_right = matches!(got, Some((Data::Elsewhere(place, len), 16, got_acks))
                if place == at && len == bytes && got_acks == acks);
            assert!(is_right, "{bytes}: {got:?}");
        }
        for (bytes, in_message) in [(0, 0), (MAX_FETCH + 1, 0), (u32::MAX, 0), (9, 9)] {
            assert!(emit(bytes, in_message).is_none(), "{bytes} {in_message}");
        }
    }
}

#[test]
fn both_forms_of_a_packet_say_how_many_it_is() {
    let mut xrc = Headers::new(bth(Service::Xrc, Operation::SendOnly));
    xrc.xrceth = Some(XrcEth { srqn: 9 });
    for headers in [send(), xrc] {
        let mut inbox = Inbox::default();
        let bytes = message_for(&arrival(1), &headers, (8192, 8), None);
        assert!(matches!(read(&mut inbox, &bytes, payload(8192)), Some(Received::Packet)));
        assert_eq!(inbox.packet.packets, 8);
    }
}

#[test]
fn a_digest_tells_addresses_directions_and_slots_apart() {
    let [a, b, c] = [1, 2, 3].map(|last| arrival(last).source);
    let all = [(a, b), (b, a), (a, c), (c, a), (b, c)].map(|(from, to)| Digest::new(from, to));
    for (i, one) in all.iter().enumerate() {
        assert!(all[i + 1..].iter().all(|other| one != other));
        assert_ne!(one.from_slot(1), one.from_slot(2));
    }
}

#[test]
fn a_header_of_no_kind_is_refused_whatever_came_before() {
    let v6 = Arrival { source: Gid([7; 16]), ..arrival(1) };
    for before in [None, Some(arrival(1)), Some(v6)] {
        for byte in [0, 0xff] {
            let mut inbox = Inbox::default();
            if let Some(before) = before {
                let bytes = message(&before, &datagram(), 0, None);
                assert!(read(&mut inbox, &bytes, payload(0)).is_some());
            }
            let mut bytes = message(&arrival(1), &datagram(), 0, None);
            bytes[..6].fill(byte);
            assert!(read(&mut inbox, &bytes, payload(0)).is_none(), "{before:?} {byte}");
        }
    }
}

/// A peer may write anything. The result is a packet of this version, or nothing, and never the rest of an earlier one.
#[test]
fn nonsense_in_a_header_is_nothing_or_another_packet() {
    let mut seed = 3u64;
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed as usize
    };
    let (mut packets, mut refused) = (0, 0);
    let mut inbox = Inbox::default();
    for _ in 0..100_000 {
        let headers = [send(), write(), datagram(), ack()][random() % 4];
        let mut bytes = message(&arrival(random() as u8 % 3), &headers, 4, None);
        for _ in 0..random() % 4 {
            let at = random() % bytes.len();
            bytes[at] = random() as u8;
        }
        bytes.truncate(if random() % 8 == 0 { random() % bytes.len() } else { bytes.len() });
        let len = if random() % 8 == 0 { random() % 40_000 } else { 4 };
        let mut fresh = Inbox::default();
        let (kept, anew) =
            (read(&mut inbox, &bytes, payload(len)), read(&mut fresh, &bytes, payload(len)));
        assert_eq!(kept.is_some(), anew.is_some());
        if let Some(Received::Packet) = kept {
            packets += 1;
            assert_eq!(inbox.digest, fresh.digest);
            assert!(inbox.digest.is_some() || inbox.arrival == fresh.arrival);
            assert_eq!(inbox.packet.headers, fresh.packet.headers);
            assert_eq!(inbox.packet.acks, fresh.packet.acks);
            assert!(inbox.packet.packets > 0 && inbox.packet.payload.len() == len);
        }
        refused += u32::from(kept.is_none());
    }
    assert!(packets > 10_000 && refused > 10_000, "{packets} {refused}");
}

#[test]
fn a_packet_with_another_host_as_source_is_refused() {
    let (here, elsewhere) = (arrival(1), arrival(2));
    let v6 = |byte| Arrival { source: Gid([byte; 16]), ..arrival(1) };
    let ours = [here.source, v6(7).source];
    let mut inbox = Inbox::default();
    let mut read = |arrival: &Arrival| {
        let bytes = message(arrival, &datagram(), 3, None);
        inbox.parse(&bytes, payload(3), SLOTS, |gid| ours.contains(&gid)).is_some()
    };
    for _ in 0..3 {
        assert!(read(&here) && read(&here));
        assert!(!read(&elsewhere) && !read(&elsewhere), "by IPv4");
        assert!(read(&v6(7)) && read(&v6(7)));
        assert!(!read(&v6(8)) && !read(&v6(8)), "by IPv6");
    }
}
