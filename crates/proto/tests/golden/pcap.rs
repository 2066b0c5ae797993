//! RoCEv2 packets out of classic pcap files (Ethernet, IP without options).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

/// A RoCEv2 packet as it was captured.
pub(crate) struct Captured {
    pub(crate) src: IpAddr,
    pub(crate) dst: IpAddr,
    /// Identification of the IPv4 header; 0 for IPv6.
    pub(crate) id: u16,
    pub(crate) src_port: u16,
    pub(crate) dst_port: u16,
    /// From the BTH to the ICRC.
    pub(crate) datagram: Vec<u8>,
}

/// The captures in a directory of `tests/data`, sorted by name.
pub(crate) fn files(dir: &str) -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(dir);
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> =
        entries.filter(|p| p.extension().is_some_and(|e| e == "pcap")).collect();
    files.sort();
    files
}

/// The RoCEv2 packets of a capture; other traffic is left out.
pub(crate) fn read(path: &Path) -> Vec<Captured> {
    let bytes = std::fs::read(path).unwrap();
    assert_eq!(bytes[..4], [0xd4, 0xc3, 0xb2, 0xa1], "little-endian pcap, microseconds");
    assert_eq!(bytes[20..24], [1, 0, 0, 0], "Ethernet");
    let mut rest = &bytes[24..];
    let mut packets = vec![];
    while !rest.is_empty() {
        let u32_at = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap()) as usize;
        let (captured, on_wire) = (u32_at(8), u32_at(12));
        assert_eq!(captured, on_wire, "not cut short");
        packets.extend(roce(&rest[16..16 + captured]));
        rest = &rest[16 + captured..];
    }
    packets
}

fn roce(frame: &[u8]) -> Option<Captured> {
    let u16_at = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    let v4_at = |at: usize| Ipv4Addr::from(<[u8; 4]>::try_from(&frame[at..at + 4]).unwrap());
    let v6_at = |at: usize| Ipv6Addr::from(<[u8; 16]>::try_from(&frame[at..at + 16]).unwrap());
    const IP: usize = 14;
    let (src, dst, id, udp, protocol): (IpAddr, IpAddr, _, _, _) = match u16_at(12) {
        0x0800 => {
            let is_udp = frame[IP + 9] == 17;
            assert!(frame[IP] == 0x45 || !is_udp, "no options");
            let (src, dst) = (v4_at(IP + 12).into(), v4_at(IP + 16).into());
            (src, dst, u16_at(IP + 4), IP + 20, frame[IP + 9])
        }
        0x86dd => (v6_at(IP + 8).into(), v6_at(IP + 24).into(), 0, IP + 40, frame[IP + 6]),
        _ => return None,
    };
    (protocol == 17 && u16_at(udp + 2) == 4791).then(|| Captured {
        src,
        dst,
        id,
        src_port: u16_at(udp),
        dst_port: u16_at(udp + 2),
        // Short frames have a pad of their own.
        datagram: frame[udp + 8..udp + usize::from(u16_at(udp + 4))].to_vec(),
    })
}
