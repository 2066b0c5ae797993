//! The 40 bytes in front of a received datagram (IBA 8.3; RoCEv2: annex A17.4.5.1).

use std::net::IpAddr;

use super::Arrival;

/// Bytes of the area.
pub const GRH_LEN: usize = 40;

const UDP: u8 = 17;
const UDP_HEADER: usize = 8;

/// For IPv6 the IP header itself; for IPv4 20 zero bytes, then the IP header. `wire_len`: from the BTH to the ICRC.
pub(super) fn build(arrival: &Arrival, wire_len: usize) -> [u8; GRH_LEN] {
    let mut grh = [0; GRH_LEN];
    let udp_len = (wire_len + UDP_HEADER) as u16;
    match (arrival.source.to_ip(), arrival.destination.to_ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let ip = &mut grh[20..];
            ip[0] = 0x45;
            ip[1] = arrival.traffic_class;
            ip[2..4].copy_from_slice(&(udp_len + 20).to_be_bytes());
            ip[6] = 0x40; // don't fragment; the ID is not known
            ip[8] = arrival.hop_limit;
            ip[9] = UDP;
            ip[12..16].copy_from_slice(&source.octets());
            ip[16..20].copy_from_slice(&destination.octets());
            let sum: u32 =
                ip.chunks_exact(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
            let folded = (sum & 0xffff) + (sum >> 16);
            let checksum = !((folded & 0xffff) + (folded >> 16)) as u16;
            ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        }
        _ => {
            let first =
                6 << 28 | u32::from(arrival.traffic_class) << 20 | arrival.flow_label & 0xf_ffff;
            grh[..4].copy_from_slice(&first.to_be_bytes());
            grh[4..6].copy_from_slice(&udp_len.to_be_bytes());
            grh[6] = UDP;
            grh[7] = arrival.hop_limit;
            grh[8..24].copy_from_slice(&arrival.source.0);
            grh[24..40].copy_from_slice(&arrival.destination.0);
        }
    }
    grh
}

/// The field of a completion that holds the service level on InfiniBand. Here it tells the headers of the datagram:
/// that it had UDP (bit 3), and the IP version (bits 0 to 2: 1 for IPv6, 2 for IPv4). The receiver finds the addresses
/// in the GRH area by it. Annex A17.4.5.1 asks for such a flag, and programs look for it in this field.
pub(super) fn packet_type(arrival: &Arrival) -> u8 {
    match (arrival.source.to_ip(), arrival.destination.to_ip()) {
        (IpAddr::V4(_), IpAddr::V4(_)) => 0b1010,
        _ => 0b1001,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Gid;

    fn arrival(source: &str, destination: &str) -> Arrival {
        let gid = |s: &str| Gid::from(s.parse::<IpAddr>().unwrap());
        Arrival {
            source: gid(source),
            destination: gid(destination),
            traffic_class: 0x12,
            hop_limit: 63,
            flow_label: 0xabcde,
            interface: 0,
            port: 0,
        }
    }

    #[test]
    fn ipv4_header_has_a_right_checksum() {
        let grh = build(&arrival("10.0.0.1", "10.0.0.2"), 100);
        assert_eq!(grh[..20], [0; 20]);
        let sum: u32 =
            grh[20..].chunks_exact(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
        assert_eq!(grh[22..24], 128u16.to_be_bytes());
        assert_eq!((grh[21], grh[28]), (0x12, 63));
        assert_eq!(packet_type(&arrival("10.0.0.1", "10.0.0.2")), 0b1010);
    }

    #[test]
    fn ipv6_header_carries_class_label_and_addresses() {
        let grh = build(&arrival("fd00::1", "fd00::2"), 100);
        assert_eq!(grh[..8], [0x61, 0x2a, 0xbc, 0xde, 0, 108, 17, 63]);
        assert_eq!((grh[23], grh[39]), (1, 2));
        assert_eq!(packet_type(&arrival("fd00::1", "fd00::2")), 0b1001);
    }

    #[test]
    fn the_checksum_of_every_ipv4_header_is_right() {
        // Sums of the words that carry never, once and twice.
        for host in 0..=u16::MAX {
            let [high, low] = host.to_be_bytes();
            let grh = build(&arrival("255.255.1.2", &format!("255.255.{high}.{low}")), 100);
            let words = grh[20..].chunks_exact(2).map(|w| u16::from_be_bytes([w[0], w[1]]));
            let sum: u64 = words.map(u64::from).sum();
            // The sum in ones' complement is the remainder by 0xffff, and not zero.
            assert_eq!((sum > 0, sum % 0xffff), (true, 0), "{host:#x}");
        }
    }
}
