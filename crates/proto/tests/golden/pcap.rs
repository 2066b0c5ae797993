//! RoCEv2 packets out of classic pcap files (Ethernet, IPv4 without options).

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

/// A RoCEv2 packet as it was captured.
pub(crate) struct Captured {
    pub(crate) src: Ipv4Addr,
    pub(crate) dst: Ipv4Addr,
    /// Identification of the IPv4 header.
    pub(crate) id: u16,
    pub(crate) src_port: u16,
    pub(crate) dst_port: u16,
    /// From the BTH to the ICRC.
    pub(crate) datagram: Vec<u8>,
}

/// The captures in `tests/data/rxe`, sorted by name.
pub(crate) fn files() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/rxe");
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
    let ipv4_at = |at: usize| Ipv4Addr::from(<[u8; 4]>::try_from(&frame[at..at + 4]).unwrap());
    let (ip, udp) = (14, 34);
    let is_roce = u16_at(12) == 0x0800 && frame[ip + 9] == 17 && u16_at(udp + 2) == 4791;
    is_roce.then(|| {
        assert_eq!(frame[ip], 0x45, "no options");
        let end = ip + usize::from(u16_at(ip + 2));
        Captured {
            src: ipv4_at(ip + 12),
            dst: ipv4_at(ip + 16),
            id: u16_at(ip + 4),
            src_port: u16_at(udp),
            dst_port: u16_at(udp + 2),
            datagram: frame[udp + 8..end].to_vec(),
        }
    })
}
