//! Receive-side scaling: which of several work queues gets a frame (`ibv_rx_hash_conf`).

use bitflags::bitflags;
use thiserror::Error;

use super::frame::{Frame, Headers, Network, Transport};

/// Bytes of a Toeplitz key.
pub const KEY_LEN: usize = 40;

bitflags! {
    /// `enum ibv_rx_hash_fields`.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct HashFields: u64 {
        /// IPv4 source.
        const SRC_IPV4 = 1;
        /// IPv4 destination.
        const DST_IPV4 = 1 << 1;
        /// IPv6 source.
        const SRC_IPV6 = 1 << 2;
        /// IPv6 destination.
        const DST_IPV6 = 1 << 3;
        /// TCP source port.
        const SRC_PORT_TCP = 1 << 4;
        /// TCP destination port.
        const DST_PORT_TCP = 1 << 5;
        /// UDP source port.
        const SRC_PORT_UDP = 1 << 6;
        /// UDP destination port.
        const DST_PORT_UDP = 1 << 7;
        /// ESP security parameters index.
        const IPSEC_SPI = 1 << 8;
        /// The fields are those inside a tunnel.
        const INNER = 1 << 31;
    }
}

/// The reason why there is no such hash; `EINVAL`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum HashError {
    /// The key does not have [`KEY_LEN`] bytes.
    #[error("the key of the Toeplitz hash has 40 bytes")]
    KeyLen,
    /// A bit that no field has.
    #[error("unknown hash fields")]
    Fields,
    /// `INNER` of nothing.
    #[error("no field of the inner headers is given")]
    Inner,
}

/// The Toeplitz hash over some fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RxHash {
    key: [u8; KEY_LEN],
    fields: HashFields,
}

impl RxHash {
    /// A hash with this key over the fields of `enum ibv_rx_hash_fields`.
    pub fn new(key: &[u8], fields: u64) -> Result<Self, HashError> {
        let fields = HashFields::from_bits(fields).ok_or(HashError::Fields)?;
        if fields == HashFields::INNER {
            return Err(HashError::Inner);
        }
        Ok(Self { key: key.try_into().map_err(|_| HashError::KeyLen)?, fields })
    }

    /// The hash of a frame. It covers the fields that the frame has: source and destination address, source and
    /// destination port, security parameters index, in this order. It is 0 if the frame has none of them.
    #[must_use]
    pub fn of(&self, frame: &Frame<'_>) -> u32 {
        let inner = self.fields.contains(HashFields::INNER);
        let headers = if inner { frame.inner.as_ref() } else { Some(&frame.outer) };
        let mut input = Input { bytes: [0; 36], len: 0 };
        if let Some(headers) = headers {
            self.addresses(headers, &mut input);
            self.ports(headers, &mut input);
        }
        toeplitz(&self.key, input.bytes())
    }

    fn addresses(&self, headers: &Headers, input: &mut Input) {
        let has = |field| self.fields.contains(field);
        match headers.network {
            Some(Network::V4 { src, dst, .. }) => {
                input.add(has(HashFields::SRC_IPV4), &src.to_be_bytes());
                input.add(has(HashFields::DST_IPV4), &dst.to_be_bytes());
            }
            Some(Network::V6 { src, dst, .. }) => {
                input.add(has(HashFields::SRC_IPV6), &src.to_be_bytes());
                input.add(has(HashFields::DST_IPV6), &dst.to_be_bytes());
            }
            None => {}
        }
    }

    fn ports(&self, headers: &Headers, input: &mut Input) {
        let has = |field| self.fields.contains(field);
        // Only the first fragment has ports, and all belong together.
        match headers.transport.filter(|_| !headers.is_fragment) {
            Some(Transport::Tcp { src, dst }) => {
                input.add(has(HashFields::SRC_PORT_TCP), &src.to_be_bytes());
                input.add(has(HashFields::DST_PORT_TCP), &dst.to_be_bytes());
            }
            Some(Transport::Udp { src, dst }) => {
                input.add(has(HashFields::SRC_PORT_UDP), &src.to_be_bytes());
                input.add(has(HashFields::DST_PORT_UDP), &dst.to_be_bytes());
            }
            Some(Transport::Esp { spi, .. }) => {
                input.add(has(HashFields::IPSEC_SPI), &spi.to_be_bytes());
            }
            _ => {}
        }
    }
}

/// The bytes that are hashed: at most two IPv6 addresses and two ports, which is as much as the key has room for.
struct Input {
    bytes: [u8; 36],
    len: usize,
}

impl Input {
    fn add(&mut self, wanted: bool, field: &[u8]) {
        if wanted {
            self.bytes[self.len..self.len + field.len()].copy_from_slice(field);
            self.len += field.len();
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The Toeplitz hash: for each bit of the input that is set, the 32 bits of the key that begin at its place, added
/// without carries. The input is at most 4 bytes shorter than the key.
fn toeplitz(key: &[u8; KEY_LEN], input: &[u8]) -> u32 {
    let mut hash = 0;
    for (at, byte) in input.iter().enumerate() {
        let window =
            key[at..at + 5].iter().fold(0u64, |window, byte| window << 8 | u64::from(*byte));
        for bit in 0..8 {
            if byte & 0x80 >> bit != 0 {
                hash ^= (window >> (8 - bit)) as u32;
            }
        }
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::super::frame::tests::Builder;
    use super::super::frame::{PROTO_TCP, PROTO_UDP};
    use super::*;

    /// Key and results of Microsoft's "Verifying the RSS hash calculation".
    const KEY: [u8; KEY_LEN] = [
        0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f,
        0xb0, 0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30,
        0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
    ];

    const V4: u64 = 0b11;
    const V6: u64 = 0b1100;
    const TCP: u64 = 0b11_0000;

    #[test]
    fn ipv4_as_published() {
        for (dst, dport, src, sport, addresses, ports) in [
            ([161, 142, 100, 80], 1766, [66, 9, 149, 187], 2794, 0x323e_8fc2, 0x51cc_c178),
            ([65, 69, 140, 83], 4739, [199, 92, 111, 2], 14230, 0xd718_262a, 0xc626_b0ea),
            ([12, 22, 207, 184], 38024, [24, 19, 198, 95], 12898, 0xd2d0_a5de, 0x5c2b_394a),
            ([209, 142, 163, 6], 2217, [38, 27, 205, 30], 48228, 0x8298_9176, 0xafc7_327f),
            ([202, 188, 127, 2], 1303, [153, 39, 163, 191], 44251, 0x5d18_09c5, 0x10e8_28a2),
        ] {
            let frame = Builder::default()
                .ethernet(0x0800)
                .ipv4(src, dst, PROTO_TCP, 20)
                .tcp(sport, dport, 0, 0);
            let hash = |fields| RxHash::new(&KEY, fields).unwrap().of(&frame.parse());
            assert_eq!((hash(V4), hash(V4 | TCP)), (addresses, ports));
            assert_eq!(hash(V4 | V6), addresses);
            assert_eq!(hash(V6), 0);
        }
    }

    #[test]
    fn ipv6_as_published() {
        let [src, dst]: [u128; 2] = ["3ffe:2501:200:1fff::7", "3ffe:2501:200:3::1"]
            .map(|a| a.parse::<std::net::Ipv6Addr>().unwrap().into());
        let frame =
            Builder::default().ethernet(0x86dd).ipv6(src, dst, PROTO_TCP, 20).tcp(2794, 1766, 0, 0);
        let hash = |fields| RxHash::new(&KEY, fields).unwrap().of(&frame.parse());
        assert_eq!((hash(V6), hash(V6 | TCP)), (0x2cc1_8cd5, 0x4020_7d3d));
    }

    #[test]
    fn ports_of_the_other_protocol_do_not_count() {
        let inner = Builder::default().ipv4([66, 9, 149, 187], [161, 142, 100, 80], PROTO_UDP, 8);
        let frame = Builder::default()
            .ethernet(0x0800)
            .ipv4([1; 4], [2; 4], 47, 4 + 28)
            .bytes(&[0, 0, 8, 0])
            .bytes(&inner.udp(2794, 1766, 0).0);
        let hash = |fields| RxHash::new(&KEY, fields).unwrap().of(&frame.parse());
        let inner = 1 << 31;
        assert_eq!(hash(inner | V4 | TCP), 0x323e_8fc2);
        assert_eq!(hash(inner | V4 | TCP << 2), 0x51cc_c178);
        assert_ne!(hash(V4), 0x323e_8fc2);
    }

    #[test]
    fn invalid_hashes_are_refused() {
        assert_eq!(RxHash::new(&KEY[..39], 1), Err(HashError::KeyLen));
        assert_eq!(RxHash::new(&KEY, 1 << 9), Err(HashError::Fields));
        assert_eq!(RxHash::new(&KEY, 1 << 31), Err(HashError::Inner));
        assert!(RxHash::new(&KEY, 0).is_ok());
    }
}
