//! A datagram of any bytes: the checksum, the parser, the writer.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyverbs_proto::wire::icrc::{Flow, IcrcVerdict};
use anyverbs_proto::wire::packet::{ICRC_LEN, Packet};

/// The addresses of the datagrams of the corpus: their checksums are for [`v4`].
pub fn v4() -> Flow {
    let (src, dst) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2));
    Flow::new(IpAddr::V4(src), IpAddr::V4(dst), 0xc000, 4791)
}

fn v6() -> Flow {
    let address = |n| IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, n));
    Flow::new(address(1), address(2), 0xc000, 4791)
}

/// Runs one datagram: from the BTH to the ICRC.
pub fn run(datagram: &[u8]) {
    checksum(&v4(), datagram);
    checksum(&v6(), datagram);
    ids(datagram);
    parse(datagram);
    if let Some((bth_to_pad, _)) = datagram.split_last_chunk::<ICRC_LEN>() {
        parse(bth_to_pad);
    }
}

/// The verdict agrees with the checksum.
fn checksum(flow: &Flow, datagram: &[u8]) {
    let verdict = flow.check(datagram, 0);
    let Some((bth_to_pad, trailer)) = datagram.split_last_chunk::<ICRC_LEN>() else {
        assert_eq!(verdict, IcrcVerdict::Wrong);
        return;
    };
    let trailer = u32::from_le_bytes(*trailer);
    match verdict {
        IcrcVerdict::Exact => assert_eq!(flow.compute(0, bth_to_pad), trailer),
        IcrcVerdict::SomeId(id) => {
            assert_ne!(id, 0);
            assert_eq!(flow.compute(id, bth_to_pad), trailer);
        }
        IcrcVerdict::Wrong => assert_ne!(flow.compute(0, bth_to_pad), trailer),
    }
}

/// Any bytes that could be a packet can be sent with any ID, and the ID is found.
fn ids(bth_to_pad: &[u8]) {
    if !bth_to_pad.len().is_multiple_of(4) || bth_to_pad.len() > 65_000 {
        return;
    }
    for id in [1, 63, 0x1234, u16::MAX] {
        let datagram = [bth_to_pad, &v4().compute(id, bth_to_pad).to_le_bytes()].concat();
        assert_eq!(v4().check(&datagram, 0), IcrcVerdict::SomeId(id));
        assert_eq!(v4().check(&datagram, id), IcrcVerdict::Exact);
    }
}

/// A packet that parses can be written, and then is the same packet.
fn parse(bth_to_pad: &[u8]) {
    let packet = match Packet::parse(bth_to_pad) {
        Ok(packet) => packet,
        Err(reason) => {
            assert!(!reason.to_string().is_empty());
            return;
        }
    };
    assert_eq!(packet.len(), bth_to_pad.len());
    assert!(packet.headers.bth.opcode.is_legal());
    assert!(!packet.to_string().contains('\n'));

    let mut bytes = vec![0xaa; packet.len()];
    assert_eq!(packet.emit(&mut bytes), packet.len());
    assert_eq!(Packet::parse(&bytes), Ok(packet));
}
