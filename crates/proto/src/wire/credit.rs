//! Credit packets of unreliable traffic, between devices of this make. Their opcodes are of the range that the IBA leaves to
//! manufacturers. Others ignore them.

use super::bth::Bth;
use super::field::{u24_at, u64_at};
use crate::types::Qpn;

/// Opcode of a credit probe: BTH (PSN: the sender's QPN), then the counts of bytes and of messages, 8 bytes big-endian
/// each.
const PROBE: u8 = 0xc1;
/// Opcode of the answer: the same count of bytes, then the number of messages that may be sent in all; PSN: the QPN
/// that the probe was sent to.
const ECHO: u8 = 0xc2;

/// The contents of a credit probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreditCounts {
    /// Bytes sent on the path.
    pub bytes: u64,
    /// Messages sent to the queue pair that use up a receive.
    pub messages: u64,
}

/// A credit probe or its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreditPacket {
    /// It asks for an answer.
    pub is_probe: bool,
    /// The queue pair that it is for.
    pub dest: Qpn,
    /// The sender's queue pair.
    pub from: Qpn,
    /// In a probe: the bytes and messages sent so far. In an answer: the bytes received, and the messages that may
    /// come.
    pub counts: CreditCounts,
}

impl CreditPacket {
    /// BTH, bytes, messages.
    pub const LEN: usize = Bth::LEN + 16;

    /// The answer to a probe: `messages` may be sent in all.
    #[must_use]
    pub fn answer(probe: &Self, messages: u64) -> Self {
        let counts = CreditCounts { bytes: probe.counts.bytes, messages };
        Self { is_probe: false, dest: probe.from, from: probe.dest, counts }
    }

    /// Writes it to the [`LEN`](Self::LEN) bytes of `to`.
    pub fn emit(&self, to: &mut [u8]) {
        let opcode = if self.is_probe { PROBE } else { ECHO };
        to[..12].copy_from_slice(&Bth::of_manufacturer(opcode, self.dest.get(), self.from.get()));
        to[12..20].copy_from_slice(&self.counts.bytes.to_be_bytes());
        to[20..28].copy_from_slice(&self.counts.messages.to_be_bytes());
    }

    /// Reads one; `bytes` are those before the ICRC. `None` for anything else.
    #[must_use]
    #[inline]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let is_probe = match *bytes.first()? {
            PROBE => true,
            ECHO => false,
            _ => return None,
        };
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        let (dest, from) = (Qpn::new(u24_at(bytes, 5)), Qpn::new(u24_at(bytes, 9)));
        let counts = CreditCounts { bytes: u64_at(bytes, 12), messages: u64_at(bytes, 20) };
        Some(Self { is_probe, dest, from, counts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_and_its_answer_survive_the_way() {
        let counts = CreditCounts { bytes: 0x0102_0304_0506_0708, messages: 9 };
        let (dest, from) = (Qpn::new(0x0a_0b0c), Qpn::new(0x0d_0e0f));
        let probe = CreditPacket { is_probe: true, dest, from, counts };
        let mut bytes = [0xaa; CreditPacket::LEN];
        probe.emit(&mut bytes);
        let header = [0xc1, 0, 0xff, 0xff, 0, 0x0a, 0x0b, 0x0c, 0, 0x0d, 0x0e, 0x0f];
        assert_eq!(bytes[..Bth::LEN], header);
        assert_eq!(CreditPacket::parse(&bytes), Some(probe));
        let answer = CreditPacket::answer(&probe, 7);
        answer.emit(&mut bytes);
        assert_eq!((bytes[0], CreditPacket::parse(&bytes)), (0xc2, Some(answer)));
        assert_eq!((answer.dest, answer.from), (from, dest));
        assert_eq!(answer.counts, CreditCounts { messages: 7, ..counts });
        assert_eq!(CreditPacket::parse(&bytes[1..]), None);
        assert_eq!(CreditPacket::parse(&bytes[..27]), None);
        assert_eq!(CreditPacket::parse(&[]), None);
    }
}
