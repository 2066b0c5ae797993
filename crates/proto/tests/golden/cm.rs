//! Connection management as the kernel's `ib_cm` and `rdma_cm` speak it.

use std::collections::BTreeMap;
use std::fs;

use anyverbs_proto::cm::id::{PortSpace, ServiceId};
use anyverbs_proto::cm::ip::IpHeader;
use anyverbs_proto::cm::mad::Mad;
use anyverbs_proto::cm::message::Message;
use anyverbs_proto::types::{PKey, QKey, Qpn};
use anyverbs_proto::wire::packet::Packet;

use crate::{all, pcap, without_icrc};

/// The MAD of a datagram to QP1.
fn mad(packet: &Packet<'_>) -> Option<Mad> {
    (packet.headers.bth.dest_qpn == Qpn::GSI).then(|| Mad::parse(packet.payload).unwrap())
}

fn messages(file: &str) -> Vec<Message> {
    let path = pcap::files("rxe").into_iter().find(|p| p.ends_with(file)).unwrap();
    let packets = pcap::read(&path);
    packets
        .iter()
        .filter_map(|p| mad(&Packet::parse(without_icrc(p)).unwrap()).map(|mad| mad.message))
        .collect()
}

#[test]
fn every_message_is_written_again() {
    let mut seen = BTreeMap::new();
    for (name, captured) in all() {
        let packet = Packet::parse(without_icrc(&captured)).unwrap();
        let Some(mad) = mad(&packet) else { continue };
        assert_eq!(mad.emit()[..], *packet.payload, "{name}: {mad}");
        assert_eq!(packet.headers.deth.unwrap().qkey, QKey::GSI, "{name}");
        *seen.entry(mad.message.attribute().name()).or_insert(0) += 1;
    }
    let expected = [
        ("req", 5),
        ("rej", 1),
        ("rep", 4),
        ("rtu", 4),
        ("dreq", 4),
        ("drep", 4),
        ("sidr_req", 1),
        ("sidr_rep", 1),
    ];
    assert_eq!(seen, BTreeMap::from(expected));
}

/// Compares with tshark's output for the same packets.
#[test]
fn messages_print_as_one_line() {
    let lines = |file| messages(file).iter().map(Message::to_string).collect::<Vec<_>>();
    assert_eq!(
        lines("cm-reject.pcap"),
        [
            "REQ 0x026dc6a6 service Tcp/9999 RC qp 0x00002a psn 1196625 res 1 depth 1 retry 7 rnr 7 tries 15 mtu 1024 ::ffff:10.99.0.4 > ::ffff:10.99.0.3",
            "REJ 0x00000000 for 0x026dc6a6 of REQ: invalid service ID",
        ]
    );
    assert_eq!(
        lines("udaddy-sidr.pcap"),
        [
            "SIDR_REQ 0x046dc6a6 service Udp/7174",
            "SIDR_REP 0x046dc6a6 service Udp/7174 valid qp 0x000027 qkey 0x01234567",
        ]
    );
    assert_eq!(
        lines("ucmatose.pcap"),
        [
            "REQ 0x076dc6a6 service Tcp/7471 RC qp 0x000026 psn 4522239 res 1 depth 1 retry 5 rnr 0 tries 15 mtu 1024 ::ffff:10.99.0.4 > ::ffff:10.99.0.3",
            "REP 0x8376020d for 0x076dc6a6 qp 0x000026 psn 11741807 res 1 depth 1 rnr 7",
            "RTU 0x076dc6a6 for 0x8376020d",
            "DREQ 0x8376020d for 0x076dc6a6 qp 0x000026",
            "DREP 0x076dc6a6 for 0x8376020d",
        ]
    );
}

#[test]
fn requests_carry_addresses() {
    for file in ["rping-cm.pcap", "ucmatose.pcap", "rstream.pcap", "cm-reject.pcap"] {
        let messages = messages(file);
        let Message::Req(req) = &messages[0] else { panic!("{file}: {}", messages[0]) };
        let header = IpHeader::parse(req.private_data.0.first_chunk().unwrap()).unwrap();
        assert_eq!(header.source.ip(), req.primary.local_gid.to_ip(), "{file}");
        assert_eq!(header.destination, req.primary.remote_gid.to_ip(), "{file}");
        assert_eq!(header.emit(), req.private_data.0[..IpHeader::LEN], "{file}");
        assert!(matches!(req.service_id.port(), Some((PortSpace::Tcp, _))), "{file}");
        assert_eq!((req.pkey, req.primary.local_lid), (PKey::DEFAULT, 0xffff), "{file}");
        assert_eq!((req.primary.ack_timeout, req.remote_response_timeout), (17, 20), "{file}");
    }
    let messages = messages("udaddy-sidr.pcap");
    let Message::SidrReq(req) = &messages[0] else { panic!("{}", messages[0]) };
    let header = IpHeader::parse(req.private_data.0.first_chunk().unwrap()).unwrap();
    assert_eq!(header.destination.to_string(), "10.99.0.3");
    assert_eq!(req.service_id, ServiceId::of_port(PortSpace::Udp, 7174));
}

/// The starting PSN of a message is the one with which its recipient begins to send.
#[test]
fn the_starting_psn_is_the_recipients() {
    for file in ["rping-cm.pcap", "ucmatose.pcap", "rstream.pcap"] {
        let path = pcap::files("rxe").into_iter().find(|p| p.ends_with(file)).unwrap();
        let captured = pcap::read(&path);
        let packets = || captured.iter().map(|c| (c, Packet::parse(without_icrc(c)).unwrap()));
        let first_request = |host, qpn| {
            let mut requests = packets()
                .filter(|(captured, _)| captured.dst == host)
                .map(|(_, packet)| packet.headers.bth)
                .filter(|bth| bth.dest_qpn == qpn && !bth.opcode.is_response());
            requests.next().map(|bth| bth.psn)
        };
        let mut seen = 0;
        for (captured, packet) in packets() {
            let (qpn, psn) = match mad(&packet).map(|mad| mad.message) {
                Some(Message::Req(req)) => (req.local_qpn, req.starting_psn),
                Some(Message::Rep(rep)) => (rep.local_qpn, rep.starting_psn),
                _ => continue,
            };
            let first = first_request(captured.src, qpn);
            assert_eq!(first, Some(psn), "{file}: to {qpn}");
            seen += 1;
        }
        assert_eq!(seen, 2, "{file}");
    }
}

/// Seeds of the fuzz target `cm`: a MAD alone, and as the first step of a list.
#[test]
fn seeds_are_those_of_the_captures() {
    let dir = anyverbs_testing::corpus::named("cm");
    let mut seeds = BTreeMap::new();
    for (_, captured) in all() {
        let packet = Packet::parse(without_icrc(&captured)).unwrap();
        let Some(mad) = mad(&packet) else { continue };
        let name = mad.message.attribute().name();
        seeds.entry(format!("{name}-alone")).or_insert(packet.payload.to_vec());
        let step = [&[0, 0], packet.payload].concat();
        seeds.entry(format!("{name}-step")).or_insert(step);
    }
    for (name, bytes) in seeds {
        let path = dir.join(&name);
        if std::env::var_os("ANYVERBS_WRITE_SEEDS").is_some() {
            fs::write(&path, &bytes).unwrap();
        }
        let on_disk = fs::read(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(on_disk, bytes, "{name}");
    }
}
