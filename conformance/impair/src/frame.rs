//! Ethernet frames: which carry RoCEv2, and how they are damaged.

use std::ops::Range;

use rand::Rng;

const ETHERNET: usize = 14;
const UDP_HEADER: usize = 8;
const UDP: u8 = 17;

/// Offsets in a frame with a UDP datagram to the RoCE port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roce {
    ipv6: bool,
    udp: usize,
    /// BTH to ICRC.
    pub payload: Range<usize>,
}

impl Roce {
    /// Tells whether a frame is one. IP options and fragments never belong to RoCE packets.
    #[must_use]
    pub fn parse(frame: &[u8], port: u16) -> Option<Self> {
        let (ipv6, udp) = match frame.get(12..ETHERNET)? {
            [0x08, 0x00] if frame.get(14)? & 0xf == 5 && *frame.get(23)? == UDP => (false, 34),
            [0x86, 0xdd] if *frame.get(20)? == UDP => (true, 54),
            _ => return None,
        };
        let word = |at: usize| Some(u16::from_be_bytes([*frame.get(at)?, *frame.get(at + 1)?]));
        let end = udp + usize::from(word(udp + 4)?);
        (word(udp + 2)? == port && end >= udp + UDP_HEADER && end <= frame.len()).then_some(Self {
            ipv6,
            udp,
            payload: udp + UDP_HEADER..end,
        })
    }

    /// Flips one bit of the datagram, its header included: the UDP checksum tells, or the port is another.
    pub fn flip(&self, frame: &mut [u8], rng: &mut impl Rng) {
        let at = rng.random_range(self.udp..self.payload.end);
        frame[at] ^= 1 << rng.random_range(0..8);
    }

    /// Flips two bits of the payload so that the UDP checksum, a sum of 16-bit words, stays right: only the ICRC tells.
    /// False where no two words differ.
    pub fn flip_unseen(&self, frame: &mut [u8], rng: &mut impl Rng) -> bool {
        let words = self.payload.len() / 2;
        for _ in 0..64 {
            let [one, other] =
                [(); 2].map(|()| self.payload.start + rng.random_range(0..words.max(1)) * 2);
            let (byte, bit) = (rng.random_range(0..2), 1u8 << rng.random_range(0..8));
            let (one, other) = (one + byte, other + byte);
            if frame.get(one).zip(frame.get(other)).is_some_and(|(a, b)| (a ^ b) & bit != 0) {
                frame[one] ^= bit;
                frame[other] ^= bit;
                return true;
            }
        }
        false
    }

    /// Cuts the end off. With `lengths` the headers say so too. Over IPv6 the UDP checksum is corrected as well, so
    /// that the device sees the rest and only the ICRC tells. Over IPv4 the ICRC alone does not tell enough, so the UDP
    /// checksum stays as it was.
    pub fn cut(&self, frame: &mut Vec<u8>, lengths: bool, rng: &mut impl Rng) {
        let end =
            rng.random_range(self.payload.start..self.payload.end.max(self.payload.start + 1));
        frame.truncate(end);
        if !lengths {
            return;
        }
        let set = |frame: &mut Vec<u8>, at: usize, value: usize| {
            let value = u16::try_from(value).expect("shorter than it was");
            frame[at..at + 2].copy_from_slice(&value.to_be_bytes());
        };
        set(frame, self.udp + 4, end - self.udp);
        if self.ipv6 {
            set(frame, ETHERNET + 4, end - self.udp);
            set(frame, self.udp + 6, 0);
            let sum = self.udp_checksum_v6(frame);
            set(frame, self.udp + 6, usize::from(sum));
        } else {
            set(frame, ETHERNET + 2, end - ETHERNET);
            set(frame, ETHERNET + 10, 0);
            let sum = checksum(&frame[ETHERNET..self.udp]);
            set(frame, ETHERNET + 10, usize::from(sum));
        }
    }

    /// The checksum of all behind the IPv6 header, with zero as checksum (RFC 8200, 8.1).
    fn udp_checksum_v6(&self, frame: &[u8]) -> u16 {
        let (addresses, udp) = (&frame[ETHERNET + 8..ETHERNET + 40], &frame[self.udp..]);
        let len = u16::try_from(udp.len()).expect("a datagram").to_be_bytes();
        match checksum(&[addresses, &len, &[0, UDP], udp].concat()) {
            // Zero would say that there is no checksum.
            0 => 0xffff,
            sum => sum,
        }
    }
}

/// RFC 1071.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes
        .chunks(2)
        .map(|word| u32::from(word[0]) << 8 | word.get(1).map_or(0, |b| u32::from(*b)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
pub(crate) mod tests {
    use rand::SeedableRng;
    use rand::rngs::SmallRng;

    use super::*;

    pub(crate) const PORT: u16 = 4791;

    /// A frame with this much payload, all of its lengths and checksums right.
    pub(crate) fn frame(len: usize, ipv6: bool) -> Vec<u8> {
        let mut frame = vec![0; ETHERNET];
        let udp_len = (UDP_HEADER + len) as u16;
        if ipv6 {
            frame[12..].copy_from_slice(&[0x86, 0xdd]);
            frame.extend([0x60, 0, 0, 0]);
            frame.extend(udp_len.to_be_bytes());
            frame.extend([UDP, 64]);
            frame.extend([1; 32]);
        } else {
            frame[12..].copy_from_slice(&[0x08, 0x00]);
            frame.extend([0x45, 0]);
            frame.extend((20 + udp_len).to_be_bytes());
            frame.extend([0, 0, 0x40, 0, 64, UDP, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
            let sum = checksum(&frame[ETHERNET..]);
            frame[24..26].copy_from_slice(&sum.to_be_bytes());
        }
        frame.extend([0xc0, 0]);
        frame.extend(PORT.to_be_bytes());
        frame.extend(udp_len.to_be_bytes());
        frame.extend([0, 0]);
        frame.extend((0..len).map(|i| (i * 7) as u8));
        frame
    }

    #[test]
    fn only_whole_datagrams_to_the_port_are_roce() {
        for ipv6 in [false, true] {
            let bytes = frame(32, ipv6);
            let roce = Roce::parse(&bytes, PORT).unwrap();
            assert_eq!(roce.payload, bytes.len() - 32..bytes.len());
            assert_eq!(Roce::parse(&bytes, PORT + 1), None);
            for end in 0..bytes.len() {
                assert_eq!(Roce::parse(&bytes[..end], PORT), None, "{end}");
            }
        }
    }

    #[test]
    fn damage_for_the_icrc_alone_keeps_the_sum_of_words() {
        let mut rng = SmallRng::seed_from_u64(1);
        for _ in 0..1000 {
            let before = frame(33, false);
            let roce = Roce::parse(&before, PORT).unwrap();
            let mut after = before.clone();
            assert!(roce.flip_unseen(&mut after, &mut rng));
            let payload = roce.payload.clone();
            assert_ne!(before, after);
            assert_eq!(before[..payload.start], after[..payload.start]);
            assert_eq!(checksum(&before[payload.clone()]), checksum(&after[payload]));
        }
        let mut same = frame(32, false);
        let roce = Roce::parse(&same, PORT).unwrap();
        same[roce.payload.clone()].fill(7);
        assert!(!roce.flip_unseen(&mut same, &mut rng));
    }

    #[test]
    fn cutting_gives_a_shorter_packet_or_a_broken_frame() {
        let mut rng = SmallRng::seed_from_u64(2);
        for ipv6 in [false, true] {
            for _ in 0..200 {
                let mut bytes = frame(64, ipv6);
                let roce = Roce::parse(&bytes, PORT).unwrap();
                roce.cut(&mut bytes, true, &mut rng);
                let left = Roce::parse(&bytes, PORT).unwrap();
                assert!(left.payload.len() < 64);
                assert!(ipv6 || checksum(&bytes[ETHERNET..34]) == 0);
                if ipv6 {
                    let pseudo = [&bytes[22..54], &bytes[58..60], &[0, UDP], &bytes[54..]];
                    assert_eq!(checksum(&pseudo.concat()), 0);
                }
                let mut bytes = frame(64, ipv6);
                roce.cut(&mut bytes, false, &mut rng);
                assert_eq!(Roce::parse(&bytes, PORT), None);
            }
        }
    }

    #[test]
    fn flips_one_bit() {
        let mut rng = SmallRng::seed_from_u64(3);
        let (before, mut after) = (frame(64, true), frame(64, true));
        Roce::parse(&before, PORT).unwrap().flip(&mut after, &mut rng);
        let flipped: u32 = before.iter().zip(&after).map(|(a, b)| (a ^ b).count_ones()).sum();
        assert_eq!(flipped, 1);
    }
}
