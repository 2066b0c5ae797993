//! Packets that the Linux kernel's rxe sent: each parses, has the checksum that the kernel gave it,
//! and is written again byte for byte.
#![expect(clippy::unwrap_used, reason = "a test")]

mod pcap;

use std::collections::BTreeMap;

use anyverbs_proto::wire::icrc::{self, Flow, IcrcVerdict, Pseudo};
use anyverbs_proto::wire::packet::{ICRC_LEN, Packet};
use pcap::Captured;

fn flow(captured: &Captured) -> Flow {
    Flow::new(captured.src.into(), captured.dst.into(), captured.src_port, captured.dst_port)
}

fn without_icrc(captured: &Captured) -> &[u8] {
    &captured.datagram[..captured.datagram.len() - ICRC_LEN]
}

fn all() -> impl Iterator<Item = (String, Captured)> {
    pcap::files().into_iter().flat_map(|path| {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let packets = pcap::read(&path).into_iter().enumerate();
        packets.map(move |(i, packet)| (format!("{name} {i}"), packet))
    })
}

#[test]
fn no_packet_is_left_out() {
    assert_eq!(pcap::files().len(), 27);
    assert_eq!(all().count(), 1283);
}

#[test]
fn checksum_is_the_kernels() {
    for (name, captured) in all() {
        let Captured { src, dst, id, src_port, dst_port, ref datagram } = captured;
        let flow = flow(&captured);
        let computed = flow.compute(id, without_icrc(&captured));
        assert_eq!(computed.to_le_bytes(), datagram[datagram.len() - ICRC_LEN..], "{name}");
        assert_eq!(flow.check(datagram, id), IcrcVerdict::Exact, "{name}");

        let ip = Pseudo::V4 { src, dst, id };
        assert_eq!(icrc::check(&ip, src_port, dst_port, datagram), IcrcVerdict::Exact, "{name}");
    }
}

#[test]
fn id_is_found_from_the_checksum() {
    for (name, captured) in all() {
        let flow = flow(&captured);
        for expected in [0, 1, 63, 0x8000, 0xffff] {
            let verdict = flow.check(&captured.datagram, expected);
            if captured.id == expected {
                assert_eq!(verdict, IcrcVerdict::Exact, "{name}");
            } else {
                assert_eq!(verdict, IcrcVerdict::SomeId(captured.id), "{name}");
            }
        }
    }
}

#[test]
fn a_translated_address_or_port_is_noticed() {
    for (name, captured) in all() {
        let Captured { src, dst, src_port, dst_port, .. } = captured;
        let other = std::net::Ipv4Addr::new(192, 0, 2, 1);
        for flow in [
            Flow::new(other.into(), dst.into(), src_port, dst_port),
            Flow::new(src.into(), other.into(), src_port, dst_port),
            Flow::new(src.into(), dst.into(), src_port ^ 1, dst_port),
        ] {
            assert_eq!(flow.check(&captured.datagram, captured.id), IcrcVerdict::Wrong, "{name}");
        }
    }
}

#[test]
fn every_packet_parses_and_is_written_again() {
    for (name, captured) in all() {
        let bytes = without_icrc(&captured);
        let packet = Packet::parse(bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(packet.len(), bytes.len(), "{name}");
        let mut written = vec![0xaa; bytes.len()];
        assert_eq!(packet.emit(&mut written), bytes.len(), "{name}");
        assert_eq!(written, bytes, "{name}: {packet}");
        assert_eq!(Packet::new(packet.headers, packet.payload), packet, "{name}: the pad");
    }
}

/// Opcodes by how often they occur, as an independent program counts them.
#[test]
fn opcodes_are_those_that_were_sent() {
    let mut seen = BTreeMap::new();
    for (_, captured) in all() {
        let packet = Packet::parse(without_icrc(&captured)).unwrap();
        *seen.entry(packet.headers.bth.opcode.to_string()).or_insert(0) += 1;
    }
    let expected = [
        ("RC SEND_FIRST", 109),
        ("RC SEND_MIDDLE", 212),
        ("RC SEND_LAST", 107),
        ("RC SEND_ONLY", 35),
        ("RC WRITE_FIRST", 5),
        ("RC WRITE_MIDDLE", 10),
        ("RC WRITE_LAST", 5),
        ("RC WRITE_ONLY", 17),
        ("RC WRITE_ONLY_WITH_IMM", 13),
        ("RC READ_REQUEST", 134),
        ("RC READ_RESPONSE_FIRST", 100),
        ("RC READ_RESPONSE_MIDDLE", 205),
        ("RC READ_RESPONSE_LAST", 105),
        ("RC READ_RESPONSE_ONLY", 7),
        ("RC ACK", 112),
        ("RC ATOMIC_ACK", 10),
        ("RC COMPARE_SWAP", 5),
        ("RC FETCH_ADD", 5),
        ("UC SEND_FIRST", 5),
        ("UC SEND_MIDDLE", 10),
        ("UC SEND_LAST", 5),
        ("UC SEND_ONLY", 5),
        ("UC WRITE_FIRST", 5),
        ("UC WRITE_MIDDLE", 10),
        ("UC WRITE_LAST", 5),
        ("UC WRITE_ONLY", 5),
        ("UD SEND_ONLY", 30),
        ("UD SEND_ONLY_WITH_IMM", 7),
    ];
    assert_eq!(seen, BTreeMap::from(expected.map(|(name, count)| (name.to_owned(), count))));
}

/// One line of each kind, to be compared with what tshark says of the same capture.
#[test]
fn packets_print_as_one_line() {
    let line = |file: &str, n: usize| {
        let path = pcap::files().into_iter().find(|p| p.ends_with(file)).unwrap();
        let captured = pcap::read(&path).swap_remove(n);
        Packet::parse(without_icrc(&captured)).unwrap().to_string()
    };
    let lines = [
        (
            "atomic-cs.pcap",
            0,
            "RC COMPARE_SWAP qp 0x00001f psn 2912478 ack va 0x55f1e2f13000 rkey 0x000010f6 swap_add 0x0 compare 0x0",
        ),
        ("rc-send-2.pcap", 0, "RC SEND_ONLY qp 0x000011 psn 16300815 ack len 2"),
        ("pingpong-rc.pcap", 0, "RC SEND_FIRST qp 0x000021 psn 9452396 len 1024"),
        (
            "pingpong-ud.pcap",
            0,
            "UD SEND_ONLY qp 0x000022 psn 15094613 qkey 0x11111111 sqp 0x000022 len 512",
        ),
        ("rstream.pcap", 10, "RC ACK qp 0x000028 psn 11269354 ack msn 2"),
        (
            "rc-read-4096.pcap",
            0,
            "RC READ_REQUEST qp 0x000018 psn 10143117 ack va 0x5646fcd15000 rkey 0x00000922 dmalen 4096",
        ),
        (
            "atomic-cs.pcap",
            9,
            "RC ATOMIC_ACK qp 0x00001f psn 2912482 ack msn 5 original 0x1dfc01835872628f",
        ),
        (
            "mckey.pcap",
            0,
            "UD SEND_ONLY_WITH_IMM qp 0xffffff psn 0 qkey 0x01234567 sqp 0x000029 imm 0x00000029 len 64",
        ),
    ];
    for (file, n, expected) in lines {
        assert_eq!(line(file, n), expected, "{file} {n}");
    }
}
