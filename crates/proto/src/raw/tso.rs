//! TCP segmentation: one request to send becomes frames of at most `mss` bytes of payload (`IBV_WR_TSO`).

use thiserror::Error;

use super::checksum;
use super::frame::{Frame, Headers, Network, Transport};

const FIN: u8 = 1;
const PSH: u8 = 8;
const CWR: u8 = 0x80;

/// Bytes of the longest header.
pub const MAX_HEADER: usize = 512;

/// The header is not one that can be segmented.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the header is not Ethernet, IP and TCP, to its end")]
pub struct NotTcp;

/// Numbers the segments of one request.
#[derive(Clone, Copy, Debug)]
pub struct Segmenter {
    headers: Headers,
    len: usize,
    seq: u32,
    id: u16,
}

impl Segmenter {
    /// Makes a segmenter for segments that begin with `header`: Ethernet, IP and TCP, and nothing behind them. Its
    /// length fields do not count.
    pub fn new(header: &[u8]) -> Result<Self, NotTcp> {
        let mut copy = [0; MAX_HEADER];
        let copy = copy.get_mut(..header.len()).ok_or(NotTcp)?;
        copy.copy_from_slice(header);
        let outer = Frame::parse(copy).ok_or(NotTcp)?.outer;
        let rest = copy.get_mut(outer.network_at..).ok_or(NotTcp)?;
        let len = rest.len();
        let (field, len) = match rest.first().ok_or(NotTcp)? >> 4 {
            4 => (rest.get_mut(2..4), Some(len)),
            _ => (rest.get_mut(4..6), len.checked_sub(40)),
        };
        let len = len.ok_or(NotTcp)? as u16;
        field.ok_or(NotTcp)?.copy_from_slice(&len.to_be_bytes());
        let headers = Frame::parse(copy).ok_or(NotTcp)?.outer;
        let at = headers.transport_at;
        let is_tcp = matches!(headers.transport, Some(Transport::Tcp { .. }));
        if !is_tcp || headers.is_fragment || header.len() < at + 20 {
            return Err(NotTcp);
        }
        let len = usize::from(header[at + 12] >> 4) * 4;
        if len < 20 || at + len != header.len() {
            return Err(NotTcp);
        }
        let word = |at: usize| {
            u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        let id = (word(headers.network_at + 4) >> 16) as u16;
        Ok(Self { headers, len: header.len(), seq: word(at + 4), id })
    }

    /// Makes the `index`th segment of `bytes`, the header and `offset` bytes of payload before this piece: lengths, sequence
    /// number, flags, checksums.
    pub fn finish(&self, bytes: &mut [u8], index: usize, offset: usize, is_last: bool) {
        debug_assert!(bytes.len() >= self.len);
        let (ip, tcp) = (self.headers.network_at, self.headers.transport_at);
        let total = bytes.len() - ip;
        match self.headers.network {
            Some(Network::V4 { .. }) => {
                bytes[ip + 2..ip + 4].copy_from_slice(&(total as u16).to_be_bytes());
                let id = self.id.wrapping_add(index as u16);
                bytes[ip + 4..ip + 6].copy_from_slice(&id.to_be_bytes());
            }
            _ => bytes[ip + 4..ip + 6].copy_from_slice(&((total - 40) as u16).to_be_bytes()),
        }
        let seq = self.seq.wrapping_add(offset as u32);
        bytes[tcp + 4..tcp + 8].copy_from_slice(&seq.to_be_bytes());
        let flags = &mut bytes[tcp + 13];
        if !is_last {
            *flags &= !(FIN | PSH);
        }
        if index > 0 {
            *flags &= !CWR;
        }
        checksum::fill_in(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::super::frame::tests::Builder;
    use super::*;

    fn header(ether_type: u16) -> Vec<u8> {
        let ethernet = Builder::default().ethernet(ether_type);
        let ip = if ether_type == 0x0800 {
            ethernet.ipv4([1; 4], [2; 4], 6, 20)
        } else {
            ethernet.ipv6(1, 2, 6, 20)
        };
        ip.tcp(1, 2, 0xffff_fff0, FIN | PSH | CWR | 0x10).0
    }

    #[test]
    fn segments_are_numbered_and_sum_right() {
        let header = header(0x0800);
        let segmenter = Segmenter::new(&header).unwrap();
        let mut seen = Vec::new();
        for (index, (offset, len)) in [(0, 100), (100, 100), (200, 37)].into_iter().enumerate() {
            let mut bytes = header.clone();
            bytes.resize(header.len() + len, 0x33);
            segmenter.finish(&mut bytes, index, offset, index == 2);
            let frame = Frame::parse(&bytes).unwrap();
            assert!(checksum::is_right(&frame));
            assert_eq!(frame.outer.network_end, bytes.len());
            let seq = u32::from_be_bytes(bytes[38..42].try_into().unwrap());
            seen.push((bytes[19], seq, bytes[47]));
        }
        assert_eq!(seen, [(7, 0xffff_fff0, 0x90), (8, 0x54, 0x10), (9, 0xb8, 0x19)]);
    }

    #[test]
    fn ipv6_has_its_own_length_field() {
        let header = header(0x86dd);
        let mut bytes = header.clone();
        bytes.extend([1, 2, 3]);
        Segmenter::new(&header).unwrap().finish(&mut bytes, 0, 0, true);
        assert_eq!(bytes[18..20], [0, 23]);
    }

    #[test]
    fn other_frames_are_not_segmented() {
        let whole = header(0x0800);
        for len in 0..whole.len() {
            assert!(Segmenter::new(&whole[..len]).is_err(), "{len}");
        }
        let mut longer = whole.clone();
        longer.push(0);
        assert!(Segmenter::new(&longer).is_err());
        let mut any_length = whole.clone();
        any_length[16..18].fill(0);
        assert!(Segmenter::new(&any_length).is_ok());
        let mut udp = whole;
        udp[23] = 17;
        assert!(Segmenter::new(&udp).is_err());
    }
}
