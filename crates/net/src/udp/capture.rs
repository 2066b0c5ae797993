//! Datagrams into a pcap file, with synthetic Ethernet, IP and UDP headers, so that Wireshark and tshark read it.
//!
//! Sent datagrams have the source MAC address 02:00:00:00:00:01, received ones 02:00:00:00:00:02. Fields that a UDP
//! socket does not show get their most likely values: the IPv4 ID is the place inside the batch, DF is set, the UDP
//! checksum is zero.

use std::fs::File;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyverbs_locks::{Mutex, rank};

use super::{Datagram, Destination};
use crate::shm::check_length;

/// A pcap file being written. Each datagram is one write, so that a killed process leaves a readable file.
pub struct Capture {
    inner: Mutex<rank::Capture, Inner>,
}

struct Inner {
    out: Box<dyn Write + Send>,
    buffer: Vec<u8>,
    /// Bytes so far.
    written: u64,
    failed: bool,
}

impl std::fmt::Debug for Capture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Capture").finish_non_exhaustive()
    }
}

const LOCAL: [u8; 6] = [2, 0, 0, 0, 0, 1];
const REMOTE: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// One datagram with its headers' variable fields.
struct Packet<'a> {
    sent: bool,
    source: SocketAddr,
    destination: SocketAddr,
    traffic_class: u8,
    hop_limit: u8,
    flow_label: u32,
    id: u16,
    bytes: &'a [u8],
}

impl Capture {
    /// Creates or empties a file.
    ///
    /// # Errors
    /// Those of open(2) and write(2).
    pub fn create(path: &Path) -> io::Result<Self> {
        Self::new(Box::new(File::create(path)?))
    }

    /// Writes to `out`.
    ///
    /// # Errors
    /// Those of writing the file's header.
    pub fn new(mut out: Box<dyn Write + Send>) -> io::Result<Self> {
        // libpcap's pcap-savefile(5): nanosecond magic, version 2.4, snap length, LINKTYPE_ETHERNET.
        let mut header = Vec::with_capacity(24);
        header.extend_from_slice(&0xa1b2_3c4d_u32.to_le_bytes());
        header.extend_from_slice(&2u16.to_le_bytes());
        header.extend_from_slice(&4u16.to_le_bytes());
        header.extend_from_slice(&[0; 8]);
        header.extend_from_slice(&0x0004_0000_u32.to_le_bytes());
        header.extend_from_slice(&1u32.to_le_bytes());
        let written = header.len() as u64;
        check_length(written)?;
        out.write_all(&header)?;
        let (buffer, failed) = (Vec::new(), false);
        Ok(Self { inner: Mutex::new(Inner { out, buffer, written, failed }) })
    }

    pub(crate) fn record_sent(&self, source_port: u16, to: &Destination, id: u16, bytes: &[u8]) {
        let unspecified: IpAddr = match to.address {
            SocketAddr::V4(_) => [0; 4].into(),
            SocketAddr::V6(_) => [0; 16].into(),
        };
        let source =
            to.source.filter(|ip| ip.is_ipv4() == to.address.is_ipv4()).unwrap_or(unspecified);
        self.record(&Packet {
            sent: true,
            source: (source, source_port).into(),
            destination: to.address,
            traffic_class: to.traffic_class,
            hop_limit: if to.hop_limit == 0 { 64 } else { to.hop_limit },
            flow_label: to.flow_label,
            id,
            bytes,
        });
    }

    pub(crate) fn record_received(&self, port: u16, datagram: &Datagram<'_>) {
        self.record(&Packet {
            sent: false,
            source: datagram.source,
            destination: (datagram.destination, port).into(),
            traffic_class: datagram.traffic_class,
            hop_limit: datagram.hop_limit,
            flow_label: datagram.flow_label,
            id: datagram.segment,
            bytes: datagram.bytes,
        });
    }

    fn record(&self, packet: &Packet<'_>) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut inner = self.inner.lock();
        let Inner { out, buffer, written, failed } = &mut *inner;
        if *failed {
            return;
        }
        buffer.clear();
        buffer.extend_from_slice(&(now.as_secs() as u32).to_le_bytes());
        buffer.extend_from_slice(&now.subsec_nanos().to_le_bytes());
        buffer.extend_from_slice(&[0; 8]);
        frame(packet, buffer);
        let len = ((buffer.len() - 16) as u32).to_le_bytes();
        buffer[8..12].copy_from_slice(&len);
        buffer[12..16].copy_from_slice(&len);
        *written += buffer.len() as u64;
        // A longer file would end the process (SIGXFSZ).
        if let Err(error) = check_length(*written).and_then(|()| out.write_all(buffer)) {
            *failed = true;
            tracing::warn!(%error, "the capture ends here");
        }
    }
}

/// Appends Ethernet, IP and UDP headers and the payload.
fn frame(packet: &Packet<'_>, out: &mut Vec<u8>) {
    let (from, to) = if packet.sent { (LOCAL, REMOTE) } else { (REMOTE, LOCAL) };
    out.extend_from_slice(&to);
    out.extend_from_slice(&from);
    let udp_len = (packet.bytes.len() + 8) as u16;
    match (packet.source.ip(), packet.destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            out.extend_from_slice(&0x0800u16.to_be_bytes());
            let start = out.len();
            out.extend_from_slice(&[0x45, packet.traffic_class]);
            out.extend_from_slice(&(udp_len.saturating_add(20)).to_be_bytes());
            out.extend_from_slice(&packet.id.to_be_bytes());
            out.extend_from_slice(&[0x40, 0, packet.hop_limit, 17, 0, 0]);
            out.extend_from_slice(&source.octets());
            out.extend_from_slice(&destination.octets());
            let checksum = internet_checksum(&out[start..]).to_be_bytes();
            out[start + 10..start + 12].copy_from_slice(&checksum);
        }
        (source, destination) => {
            let v6 = |ip: IpAddr| match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            out.extend_from_slice(&0x86ddu16.to_be_bytes());
            let word =
                6 << 28 | u32::from(packet.traffic_class) << 20 | (packet.flow_label & 0xf_ffff);
            out.extend_from_slice(&word.to_be_bytes());
            out.extend_from_slice(&udp_len.to_be_bytes());
            out.extend_from_slice(&[17, packet.hop_limit]);
            out.extend_from_slice(&v6(source).octets());
            out.extend_from_slice(&v6(destination).octets());
        }
    }
    out.extend_from_slice(&packet.source.port().to_be_bytes());
    out.extend_from_slice(&packet.destination.port().to_be_bytes());
    out.extend_from_slice(&udp_len.to_be_bytes());
    out.extend_from_slice(&[0, 0]);
    out.extend_from_slice(packet.bytes);
}

/// RFC 1071, of an even number of bytes.
fn internet_checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 =
        bytes.as_chunks().0.iter().map(|&pair| u32::from(u16::from_be_bytes(pair))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_length_limit_ends_the_capture_only() {
        let name = "udp::capture::tests::a_file_length_limit_ends_the_capture_only";
        anyverbs_testing::in_own_process(name, || {
            let file = format!("anyverbs-capture-{}", std::process::id());
            let path = std::env::temp_dir().join(file);
            let limit = libc::rlimit { rlim_cur: 1000, rlim_max: libc::RLIM_INFINITY };
            // SAFETY: a limit to read.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
            let capture = Capture::create(&path).unwrap();
            let to = Destination::new("127.0.0.1:4791".parse().unwrap());
            (0..20).for_each(|_| capture.record_sent(4791, &to, 0, &[7; 100]));
            let len = std::fs::metadata(&path).unwrap().len();
            std::fs::remove_file(&path).unwrap();
            assert!(
                (500..=1000).contains(&len),
                "whole datagrams, as many as the limit lets: {len}"
            );
        });
    }
}
