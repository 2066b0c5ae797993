//! The checksums of IPv4, TCP and UDP (RFC 1071), checked on receipt and filled in on request.

use super::frame::{Frame, Headers, Network, PROTO_TCP, PROTO_UDP, Transport};

/// Adds the 16-bit words of `bytes` to a sum that is not folded yet.
fn add(mut sum: u64, bytes: &[u8]) -> u64 {
    let mut words = bytes.chunks_exact(4);
    for word in &mut words {
        sum += u64::from(u32::from_be_bytes([word[0], word[1], word[2], word[3]]));
    }
    let mut rest = [0; 4];
    rest[..words.remainder().len()].copy_from_slice(words.remainder());
    sum + u64::from(u32::from_be_bytes(rest))
}

/// Folds a sum to 16 bits.
fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// The place of the checksum of TCP or UDP, and the sum of its pseudo-header; `None` for fragments and others.
fn transport(headers: &Headers) -> Option<(usize, u64)> {
    let (at, proto) = match headers.transport.filter(|_| !headers.is_fragment)? {
        Transport::Tcp { .. } => (headers.transport_at + 16, PROTO_TCP),
        Transport::Udp { .. } => (headers.transport_at + 6, PROTO_UDP),
        _ => return None,
    };
    let len = headers.network_end.checked_sub(headers.transport_at)?;
    if at + 2 > headers.network_end {
        return None;
    }
    let addresses = match headers.network? {
        Network::V4 { src, dst, .. } => u64::from(src) + u64::from(dst),
        Network::V6 { src, dst, .. } => add(add(0, &src.to_be_bytes()), &dst.to_be_bytes()),
    };
    Some((at, addresses + u64::from(proto) + len as u64))
}

/// Length of the IPv4 header at `at`.
fn ipv4_len(bytes: &[u8], at: usize) -> usize {
    usize::from(bytes[at] & 15) * 4
}

/// Fills in the checksum of the IPv4 header at `at`, which is whole.
pub(super) fn fill_in_ipv4(bytes: &mut [u8], at: usize) {
    let len = ipv4_len(bytes, at);
    let header = &mut bytes[at..at + len];
    header[10..12].fill(0);
    let sum = !fold(add(0, header));
    header[10..12].copy_from_slice(&sum.to_be_bytes());
}

/// Tells whether this is IPv4 with TCP or UDP above it, and the checksums of both are right, as `IBV_WC_IP_CSUM_OK`
/// says. A UDP checksum of zero means none, which is right.
#[must_use]
pub fn is_right(frame: &Frame<'_>) -> bool {
    let (bytes, headers) = (frame.bytes, &frame.outer);
    if !matches!(headers.network, Some(Network::V4 { .. })) {
        return false;
    }
    let at = headers.network_at;
    if fold(add(0, &bytes[at..at + ipv4_len(bytes, at)])) != 0xffff {
        return false;
    }
    let Some((at, pseudo)) = transport(headers) else { return false };
    let none =
        matches!(headers.transport, Some(Transport::Udp { .. })) && bytes[at..at + 2] == [0; 2];
    none || fold(add(pseudo, &bytes[headers.transport_at..headers.network_end])) == 0xffff
}

/// Fills in the checksums of the outer IPv4 header and of TCP or UDP above IPv4 or IPv6 (`IBV_SEND_IP_CSUM`). Frames of
/// other protocols stay as they are.
pub fn fill_in(bytes: &mut [u8]) {
    let Some(headers) = Frame::parse(bytes).map(|frame| frame.outer) else { return };
    if matches!(headers.network, Some(Network::V4 { .. })) {
        fill_in_ipv4(bytes, headers.network_at);
    }
    if let Some((at, pseudo)) = transport(&headers) {
        bytes[at..at + 2].fill(0);
        let sum = !fold(add(pseudo, &bytes[headers.transport_at..headers.network_end]));
        // Zero would say that there is none (RFC 768).
        let udp = matches!(headers.transport, Some(Transport::Udp { .. }));
        let sum = if sum == 0 && udp { 0xffff } else { sum };
        bytes[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::super::frame::tests::{Builder, udp4};
    use super::*;

    fn is_right(bytes: &[u8]) -> bool {
        super::is_right(&Frame::parse(bytes).unwrap())
    }

    #[test]
    fn an_ipv4_header_as_published() {
        // The example of RFC 1071's readers: 45 00 00 73 ... sums to b861.
        let mut bytes = Builder::default().ethernet(0x0800).0;
        bytes.extend([0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0, 0]);
        bytes.extend([0xc0, 0xa8, 0, 1, 0xc0, 0xa8, 0, 0xc7]);
        fill_in(&mut bytes);
        assert_eq!(bytes[24..26], [0xb8, 0x61]);
    }

    #[test]
    fn filled_in_is_right_and_a_changed_byte_is_not() {
        for odd in [0, 1] {
            let payload = vec![0xa5; 7 + odd];
            let frames = [
                Builder::default()
                    .ethernet(0x0800)
                    .ipv4([1, 2, 3, 4], [5, 6, 7, 8], PROTO_UDP, 8 + payload.len())
                    .udp(1, 2, payload.len())
                    .bytes(&payload),
                Builder::default()
                    .ethernet(0x8100)
                    .vlan(5, 0x0800)
                    .ipv4([1, 2, 3, 4], [5, 6, 7, 8], PROTO_TCP, 20 + payload.len())
                    .tcp(1, 2, 3, 0x18)
                    .bytes(&payload),
            ];
            for frame in frames {
                let mut bytes = frame.0;
                fill_in(&mut bytes);
                assert!(is_right(&bytes));
                // Beyond the end of the packet is padding.
                bytes.push(1);
                assert!(is_right(&bytes));
                bytes.pop();
                *bytes.last_mut().unwrap() ^= 1;
                assert!(!is_right(&bytes));
            }
        }
    }

    #[test]
    fn ipv6_is_filled_in_and_does_not_count_as_checked() {
        let frame = Builder::default()
            .ethernet(0x86dd)
            .ipv6(1, 2, PROTO_UDP, 8 + 3)
            .udp(4, 5, 3)
            .bytes(b"abc");
        let mut bytes = frame.0;
        fill_in(&mut bytes);
        let sum = u16::from_be_bytes([bytes[60], bytes[61]]);
        // 1 + 2 + 17 + 11, ports 4 and 5, length 11, "abc".
        let expected = !fold(3 + 17 + 11 + 4 + 5 + 11 + 0x6162 + 0x6300);
        assert_eq!(sum, expected);
        assert!(!is_right(&bytes));
    }

    #[test]
    fn udp_without_a_checksum_is_right() {
        let mut bytes = udp4().bytes(b"abcd").0;
        fill_in(&mut bytes);
        bytes[40..42].fill(0);
        assert!(is_right(&bytes));
        bytes[40] = 1;
        assert!(!is_right(&bytes));
    }

    #[test]
    fn no_bytes_make_it_panic() {
        let whole = udp4().bytes(b"abcd").0;
        for len in 0..whole.len() {
            for at in 0..len {
                for value in [0, 0x4f, 0x45, 6, 0xff] {
                    let mut bytes = whole[..len].to_vec();
                    bytes[at] = value;
                    fill_in(&mut bytes);
                    if let Some(frame) = Frame::parse(&bytes) {
                        let _ = super::is_right(&frame);
                    }
                }
            }
        }
    }
}
