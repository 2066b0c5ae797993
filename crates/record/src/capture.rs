//! Packets into a pcapng file (draft-ietf-opsawg-pcapng), with Ethernet, IP and UDP headers around them, so that Wireshark and
//! tshark read it.
//!
//! Each way of packets is an interface of the file. Packets that this process has sent are marked as outbound and have the source MAC
//! address 02:00:00:00:00:01; those that it received are inbound and have 02:00:00:00:00:02. Fields that a UDP socket does
//! not show have their most likely values: DF is set, the UDP checksum of IPv4 is zero.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::{SharedFile, path_for_process, process};

/// The way of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By a socket.
    Udp,
    /// Through memory that two processes share.
    Ring,
    /// From one queue pair of a process to another.
    InProcess,
}

impl Way {
    /// All, in the order of the file's interfaces.
    const ALL: [Self; 3] = [Self::Udp, Self::Ring, Self::InProcess];

    /// Its name: that of the interface.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Ring => "ring",
            Self::InProcess => "in-process",
        }
    }
}

/// A packet with the fields of its IP and UDP headers.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// This process has sent it; else it was received.
    pub sent: bool,
    /// Source address and port.
    pub source: SocketAddr,
    /// Destination address and port.
    pub destination: SocketAddr,
    /// IPv4 TOS or IPv6 traffic class.
    pub traffic_class: u8,
    /// IPv4 TTL or IPv6 hop limit.
    pub hop_limit: u8,
    /// IPv6 flow label.
    pub flow_label: u32,
    /// IPv4 ID.
    pub id: u16,
    /// The payload of UDP.
    pub bytes: &'a [u8],
}

/// A capture being written. Each packet is one write at the end of the file.
#[derive(Debug)]
pub struct Capture {
    file: SharedFile,
    process: String,
}

/// Types of blocks, and codes of options.
const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
const ENHANCED_PACKET: u32 = 6;
const OPT_COMMENT: u16 = 1;
const SHB_USERAPPL: u16 = 4;
const IF_NAME: u16 = 2;
const IF_TSRESOL: u16 = 9;
const EPB_FLAGS: u16 = 2;
const LINKTYPE_ETHERNET: u16 = 1;

const LOCAL: [u8; 6] = [2, 0, 0, 0, 0, 1];
const REMOTE: [u8; 6] = [2, 0, 0, 0, 0, 2];

impl Capture {
    /// Opens the file that this path means in this process ([`path_for_process`]). It begins anew, unless another process
    /// writes it now.
    ///
    /// # Errors
    /// Those of [`SharedFile::open`].
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = SharedFile::open(&path_for_process(path), "capture", &header())?;
        Ok(Self { file, process: process() })
    }

    /// Appends a packet. Its comment names process and way, and has the note, if there is one.
    pub fn record(&self, way: Way, frame: &Frame<'_>, note: Option<&str>) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let done = if frame.sent { "sent" } else { "received" };
        let [colon, note] = note.map_or(["", ""], |note| [": ", note]);
        let comment = format!("{} {done} by {}{colon}{note}", self.process, way.name());
        self.file.append(&packet(now.as_nanos() as u64, way, frame, &comment));
    }
}

/// Begins a capture that other processes write, and keeps it in use until it is dropped. `None` where each has a file of its
/// own.
///
/// # Errors
/// Those of [`SharedFile::open`]; or those of opendir(3) of the directory, if each process has a file.
pub fn begin(path: &Path) -> io::Result<Option<SharedFile>> {
    SharedFile::begin(path, "capture", &header())
}

/// A block: type, length, body, length.
fn block(kind: u32, body: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = [kind.to_le_bytes(), [0; 4]].concat();
    body(&mut out);
    pad(&mut out);
    let len = (out.len() as u32 + 4).to_le_bytes();
    out[4..8].copy_from_slice(&len);
    out.extend_from_slice(&len);
    out
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

fn option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    // An option has at most so many bytes.
    let value = &value[..value.len().min(0xfffc)];
    out.extend_from_slice(&code.to_le_bytes());
    out.extend_from_slice(&(value.len() as u16).to_le_bytes());
    out.extend_from_slice(value);
    pad(out);
}

/// opt_endofopt.
const END: [u8; 4] = [0; 4];

/// The beginning of a file: a section, and an interface for each way.
fn header() -> Vec<u8> {
    let mut out = block(SECTION_HEADER, |out| {
        // Byte order, version 1.0, no length of the section.
        out.extend_from_slice(&0x1a2b_3c4d_u32.to_le_bytes());
        out.extend_from_slice(&[1, 0, 0, 0]);
        out.extend_from_slice(&(-1_i64).to_le_bytes());
        option(out, SHB_USERAPPL, concat!("anyverbs ", env!("CARGO_PKG_VERSION")).as_bytes());
        out.extend_from_slice(&END);
    });
    for way in Way::ALL {
        out.extend(block(INTERFACE_DESCRIPTION, |out| {
            out.extend_from_slice(&LINKTYPE_ETHERNET.to_le_bytes());
            // Reserved; no limit of a packet's length.
            out.extend_from_slice(&[0; 6]);
            option(out, IF_NAME, way.name().as_bytes());
            // Nanoseconds.
            option(out, IF_TSRESOL, &[9]);
            out.extend_from_slice(&END);
        }));
    }
    out
}

fn packet(nanos: u64, way: Way, frame: &Frame<'_>, comment: &str) -> Vec<u8> {
    block(ENHANCED_PACKET, |out| {
        out.extend_from_slice(&(way as u32).to_le_bytes());
        out.extend_from_slice(&((nanos >> 32) as u32).to_le_bytes());
        out.extend_from_slice(&(nanos as u32).to_le_bytes());
        // The length, captured and original.
        let at = out.len();
        out.extend_from_slice(&[0; 8]);
        write_frame(frame, out);
        let len = ((out.len() - at - 8) as u32).to_le_bytes();
        out[at..at + 4].copy_from_slice(&len);
        out[at + 4..at + 8].copy_from_slice(&len);
        pad(out);
        let direction: u32 = if frame.sent { 2 } else { 1 };
        option(out, EPB_FLAGS, &direction.to_le_bytes());
        option(out, OPT_COMMENT, comment.as_bytes());
        out.extend_from_slice(&END);
    })
}

/// Appends Ethernet, IP and UDP headers and the payload.
fn write_frame(frame: &Frame<'_>, out: &mut Vec<u8>) {
    let (from, to) = if frame.sent { (LOCAL, REMOTE) } else { (REMOTE, LOCAL) };
    out.extend_from_slice(&to);
    out.extend_from_slice(&from);
    let udp_len = (frame.bytes.len() + 8) as u16;
    let udp = |out: &mut Vec<u8>, checksum: u16| {
        out.extend_from_slice(&frame.source.port().to_be_bytes());
        out.extend_from_slice(&frame.destination.port().to_be_bytes());
        out.extend_from_slice(&udp_len.to_be_bytes());
        out.extend_from_slice(&checksum.to_be_bytes());
        out.extend_from_slice(frame.bytes);
    };
    match (frame.source.ip(), frame.destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            out.extend_from_slice(&0x0800u16.to_be_bytes());
            let start = out.len();
            out.extend_from_slice(&[0x45, frame.traffic_class]);
            out.extend_from_slice(&(udp_len.saturating_add(20)).to_be_bytes());
            out.extend_from_slice(&frame.id.to_be_bytes());
            out.extend_from_slice(&[0x40, 0, frame.hop_limit, 17, 0, 0]);
            out.extend_from_slice(&source.octets());
            out.extend_from_slice(&destination.octets());
            let checksum = !ones_sum(0, &out[start..]);
            out[start + 10..start + 12].copy_from_slice(&checksum.to_be_bytes());
            udp(out, 0);
        }
        (source, destination) => {
            let [source, destination] = [source, destination].map(|ip| match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            });
            out.extend_from_slice(&0x86ddu16.to_be_bytes());
            let word =
                6 << 28 | u32::from(frame.traffic_class) << 20 | (frame.flow_label & 0xf_ffff);
            out.extend_from_slice(&word.to_be_bytes());
            out.extend_from_slice(&udp_len.to_be_bytes());
            out.extend_from_slice(&[17, frame.hop_limit]);
            out.extend_from_slice(&source.octets());
            out.extend_from_slice(&destination.octets());
            let start = out.len();
            udp(out, 0);
            let checksum = udp_checksum(source, destination, &out[start..]);
            out[start + 6..start + 8].copy_from_slice(&checksum.to_be_bytes());
        }
    }
}

/// RFC 8200, 8.1. IPv6 has no packets without one.
fn udp_checksum(source: Ipv6Addr, destination: Ipv6Addr, udp: &[u8]) -> u16 {
    let pseudo = [&source.octets()[..], &destination.octets()].concat();
    let sum = ones_sum(17 + udp.len() as u32, &pseudo);
    match !ones_sum(sum.into(), udp) {
        0 => 0xffff,
        checksum => checksum,
    }
}

/// RFC 1071: the sum in ones' complement, from `sum` on.
fn ones_sum(sum: u32, bytes: &[u8]) -> u16 {
    let (pairs, rest) = bytes.as_chunks();
    let words = pairs.iter().map(|&pair| u16::from_be_bytes(pair));
    let last = rest.first().map_or(0, |&byte| u16::from_be_bytes([byte, 0]));
    let mut sum = words.fold(sum + u32::from(last), |sum, word| sum + u32::from(word));
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    /// Types and lengths of the blocks.
    fn blocks(mut bytes: &[u8]) -> Vec<(u32, usize)> {
        let mut found = Vec::new();
        while !bytes.is_empty() {
            let len = u32_at(bytes, 4) as usize;
            assert_eq!(u32_at(bytes, len - 4) as usize, len, "the length stands at both ends");
            assert!(len.is_multiple_of(4));
            found.push((u32_at(bytes, 0), len));
            bytes = &bytes[len..];
        }
        found
    }

    #[test]
    fn a_file_is_a_section_with_an_interface_for_each_way() {
        let kinds: Vec<_> = blocks(&header()).into_iter().map(|(kind, _)| kind).collect();
        assert_eq!(
            kinds,
            [SECTION_HEADER, INTERFACE_DESCRIPTION, INTERFACE_DESCRIPTION, INTERFACE_DESCRIPTION]
        );
        for (i, way) in Way::ALL.into_iter().enumerate() {
            assert_eq!(way as usize, i);
        }
    }

    #[test]
    fn a_packet_is_one_block_with_its_comment() {
        for (address, headers) in [("10.0.0.1:4791", 14 + 20 + 8), ("[fe80::1]:4791", 14 + 40 + 8)]
        {
            let address = address.parse().unwrap();
            for len in 0..5 {
                let bytes = &[9; 5][..len];
                let frame = Frame {
                    sent: true,
                    source: address,
                    destination: address,
                    traffic_class: 2,
                    hop_limit: 64,
                    flow_label: 7,
                    id: 3,
                    bytes,
                };
                let block = packet(5 << 32 | 6, Way::Ring, &frame, "what it is");
                assert_eq!(blocks(&block), [(ENHANCED_PACKET, block.len())]);
                assert_eq!([8, 12, 16].map(|at| u32_at(&block, at)), [1, 5, 6]);
                assert_eq!(u32_at(&block, 20) as usize, headers + len);
                assert_eq!(block[20..24], block[24..28]);
                let text = String::from_utf8_lossy(&block);
                assert!(text.contains("what it is"), "{text}");
            }
        }
    }

    #[test]
    fn the_checksum_over_ipv6_makes_the_sum_all_ones() {
        let (source, destination) = ("fe80::1".parse().unwrap(), "ff02::1:2".parse().unwrap());
        for len in 8..40 {
            let mut udp: Vec<u8> = (0..len).map(|i| (i * 37) as u8).collect();
            udp[6..8].fill(0);
            let checksum = udp_checksum(source, destination, &udp);
            udp[6..8].copy_from_slice(&checksum.to_be_bytes());
            let pseudo = [&source.octets()[..], &destination.octets()].concat();
            let sum = ones_sum(17 + len as u32, &pseudo);
            assert_eq!(ones_sum(sum.into(), &udp), 0xffff, "{len}");
        }
    }
}
