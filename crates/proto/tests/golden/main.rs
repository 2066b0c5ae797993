//! Packets that the Linux kernel's rxe sent: each parses, has the checksum that the kernel gave it,
//! and is written again byte for byte.
#![expect(clippy::unwrap_used, reason = "a test")]

mod cm;
mod corpus;
mod pcap;

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyverbs_proto::wire::icrc::{self, Flow, IcrcVerdict, Pseudo};
use anyverbs_proto::wire::packet::{ICRC_LEN, Packet};
use pcap::Captured;

fn flow(captured: &Captured) -> Flow {
    Flow::new(captured.src, captured.dst, captured.src_port, captured.dst_port)
}

fn without_icrc(captured: &Captured) -> &[u8] {
    &captured.datagram[..captured.datagram.len() - ICRC_LEN]
}

/// Directories of captures, with the number of files and of packets.
const CAPTURES: [(&str, usize, usize); 2] = [("rxe", 28, 1293), ("rxe-ipv6", 8, 57)];

fn packets(dir: &str) -> impl Iterator<Item = (String, Captured)> {
    pcap::files(dir).into_iter().flat_map(|path| {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let packets = pcap::read(&path).into_iter().enumerate();
        packets.map(move |(i, packet)| (format!("{name} {i}"), packet))
    })
}

fn all() -> impl Iterator<Item = (String, Captured)> {
    CAPTURES.into_iter().flat_map(|(dir, ..)| packets(dir))
}

#[test]
fn no_packet_is_left_out() {
    for (dir, file_count, packet_count) in CAPTURES {
        assert_eq!(pcap::files(dir).len(), file_count, "{dir}");
        assert_eq!(packets(dir).count(), packet_count, "{dir}");
    }
}

#[test]
fn checksum_is_the_kernels() {
    for (name, captured) in all() {
        let Captured { src, dst, id, src_port, dst_port, ref datagram } = captured;
        let flow = flow(&captured);
        let computed = flow.compute(id, without_icrc(&captured));
        assert_eq!(computed.to_le_bytes(), datagram[datagram.len() - ICRC_LEN..], "{name}");
        assert_eq!(flow.check(datagram, id), IcrcVerdict::Exact, "{name}");

        let ip = match (src, dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => Pseudo::V4 { src, dst, id },
            (IpAddr::V6(src), IpAddr::V6(dst)) => Pseudo::V6 { src, dst },
            mixed => panic!("{name}: {mixed:?}"),
        };
        assert_eq!(icrc::check(&ip, src_port, dst_port, datagram), IcrcVerdict::Exact, "{name}");
    }
}

#[test]
fn id_is_found_from_the_checksum() {
    for (name, captured) in all() {
        let flow = flow(&captured);
        for expected in [0, 1, 63, 0x8000, 0xffff] {
            let verdict = flow.check(&captured.datagram, expected);
            if captured.id == expected || captured.src.is_ipv6() {
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
        let other = match src {
            IpAddr::V4(_) => IpAddr::from([192, 0, 2, 1]),
            IpAddr::V6(_) => IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1]),
        };
        for flow in [
            Flow::new(other, dst, src_port, dst_port),
            Flow::new(src, other, src_port, dst_port),
            Flow::new(src, dst, src_port ^ 1, dst_port),
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
    for (_, captured) in packets("rxe") {
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
        ("RC WRITE_ONLY", 19),
        ("RC WRITE_ONLY_WITH_IMM", 13),
        ("RC READ_REQUEST", 135),
        ("RC READ_RESPONSE_FIRST", 100),
        ("RC READ_RESPONSE_MIDDLE", 205),
        ("RC READ_RESPONSE_LAST", 105),
        ("RC READ_RESPONSE_ONLY", 9),
        ("RC ACK", 115),
        ("RC ATOMIC_ACK", 10),
        ("RC COMPARE_SWAP", 5),
        ("RC FETCH_ADD", 5),
        ("RC SEND_ONLY_WITH_INV", 1),
        ("RC ATOMIC_WRITE", 1),
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

/// One line of each kind, to be compared with tshark's output for the same capture.
#[test]
fn packets_print_as_one_line() {
    let line = |file: &str, n: usize| {
        let path = ["rxe", "rxe-ipv6"]
            .into_iter()
            .flat_map(pcap::files)
            .find(|p| p.ends_with(file))
            .unwrap();
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
        ("rnr.pcap", 1, "RC ACK qp 0x000012 psn 16777214 rnr-nak timer 18 msn 0"),
        ("access.pcap", 1, "RC ACK qp 0x000013 psn 16777214 nak remote-access msn 0"),
        ("invalid.pcap", 1, "RC ACK qp 0x000014 psn 16777214 nak remote-operational msn 0"),
        (
            "send-inv.pcap",
            0,
            "RC SEND_ONLY_WITH_INV qp 0x000015 psn 16777214 ack inv 0x080001ce len 7",
        ),
        ("send-inv.pcap", 4, "RC SEND_LAST_WITH_INV qp 0x000015 psn 1 ack inv 0x0000067a len 2"),
        (
            "write-imm.pcap",
            4,
            "RC WRITE_ONLY_WITH_IMM qp 0x000016 psn 1 ack va 0x1a112000 rkey 0x0000071c dmalen 0 imm 0x01020304 len 0",
        ),
        (
            "atomic-write.pcap",
            0,
            "RC ATOMIC_WRITE qp 0x000017 psn 16777214 ack va 0x3ba01000 rkey 0x00000817 dmalen 8 len 8",
        ),
        ("atomic-write.pcap", 1, "RC READ_RESPONSE_ONLY qp 0x000017 psn 16777214 ack msn 1 len 0"),
    ];
    for (file, n, expected) in lines {
        assert_eq!(line(file, n), expected, "{file} {n}");
    }
}
