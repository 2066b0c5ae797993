//! Headers of the ring's messages, read as they come and not.

use anyverbs_proto::types::Qpn;
use anyverbs_proto::wire::aeth::{Aeth, Syndrome};
use anyverbs_proto::wire::opcode::{Opcode, Operation, Service};
use anyverbs_proto::wire::packet::Headers;
use anyverbs_proto::wire::reth::Reth;

use super::*;

/// Reads a header and a payload.
fn read(inbox: &mut Inbox, head: &[u8], payload: Data<'static>) -> Option<Received> {
    inbox.parse(head.try_into().ok(), payload, |inbox| inbox.parse_any(head, payload, |_| true))
}

const ADDR: u64 = 0x1000;

fn arrival(last: u8) -> Arrival {
    let gid = |last| Gid::from(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)));
    Arrival {
        source: gid(last),
        destination: gid(9),
        traffic_class: 4,
        hop_limit: 64,
        flow_label: 0xabcde,
        interface: 0,
    }
}

fn message(arrival: &Arrival, headers: &Headers, len: usize) -> Vec<u8> {
    let mut head = [0; MAX_HEADER];
    let at = Front::new(arrival).write(&mut head);
    let end = at + headers.emit(&mut head[at..]);
    head[at + 1] = head[at + 1] & !0x30 | Bth::pad_of(len) << 4;
    head[..end].to_vec()
}

fn send() -> Headers {
    let opcode = Opcode::new(Service::Rc, Operation::SendOnly);
    Headers::new(Bth::new(opcode, Qpn::new(0x01_0203), Psn::new(77)))
}

fn write() -> Headers {
    let opcode = Opcode::new(Service::Rc, Operation::WriteOnly);
    let mut headers = Headers::new(Bth::new(opcode, Qpn::new(0x01_0204), Psn::new(78)));
    headers.reth = Some(Reth { va: 1, rkey: 2, len: 3 });
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
        (arrival(2), send()),
        (v6, write()),
        (arrival(2), send()),
    ] {
        let bytes = message(&arrival, &headers, 3);
        assert!(matches!(read(&mut inbox, &bytes, payload(3)), Some(Received::Packet)));
        assert_eq!(inbox.arrival, arrival);
        let mut expected = headers;
        expected.bth.pad = 1;
        assert_eq!(inbox.packet.headers, expected);
        assert_eq!((inbox.packet.packets, inbox.packet.acks), (1, None));
        assert_eq!(inbox.headers_len, headers.len());
    }
}

#[test]
fn an_ack_rides_with_a_request_and_with_nothing_else() {
    let mut inbox = Inbox::default();
    let mut bytes = message(&arrival(1), &send(), 0);
    bytes[RIDER..RIDER + 4].copy_from_slice(&[RIDES, 1, 2, 3]);
    assert!(read(&mut inbox, &bytes, payload(0)).is_some());
    assert_eq!(inbox.packet.acks, Some(Psn::new(0x01_0203)));
    bytes[RIDER] = 2;
    assert!(read(&mut inbox, &bytes, payload(0)).is_none());

    let opcode = Opcode::new(Service::Rc, Operation::Ack);
    let mut ack = Headers::new(Bth::new(opcode, Qpn::new(1), Psn::new(1)));
    ack.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: 1 });
    let mut bytes = message(&arrival(1), &ack, 0);
    assert!(read(&mut inbox, &bytes, payload(0)).is_some());
    assert_eq!(inbox.packet.acks, None);
    bytes[RIDER] = RIDES;
    assert!(read(&mut inbox, &bytes, payload(0)).is_none());
}

#[test]
fn a_header_of_no_family_is_refused_whatever_came_before() {
    let v6 = Arrival { source: Gid([7; 16]), ..arrival(1) };
    for before in [None, Some(arrival(1)), Some(v6)] {
        for byte in [0, 0xff] {
            let mut inbox = Inbox::default();
            if let Some(before) = before {
                assert!(read(&mut inbox, &message(&before, &send(), 0), payload(0)).is_some());
            }
            let mut bytes = message(&arrival(1), &send(), 0);
            bytes[..6].fill(byte);
            bytes[FIXED..FIXED + 8].fill(byte);
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
        let headers = if random() % 2 == 0 { send() } else { write() };
        let mut bytes = message(&arrival(random() as u8 % 3), &headers, 4);
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
            assert_eq!(inbox.arrival, fresh.arrival);
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
        let bytes = message(arrival, &send(), 3);
        let header = bytes.as_slice().try_into().ok();
        let read = inbox.parse(header, payload(3), |inbox| {
            inbox.parse_any(&bytes, payload(3), |gid| ours.contains(&gid))
        });
        read.is_some()
    };
    for _ in 0..3 {
        assert!(read(&here) && read(&here));
        assert!(!read(&elsewhere) && !read(&elsewhere), "by IPv4");
        assert!(read(&v6(7)) && read(&v6(7)));
        assert!(!read(&v6(8)) && !read(&v6(8)), "by IPv6");
    }
}
