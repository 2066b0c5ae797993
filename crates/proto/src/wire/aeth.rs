//! ACK extended transport header (IBA 9.3.5).

use std::fmt;

use super::field::{byte_and_u24, u24_at};
use super::packet::Malformed;

/// The reason of a refusal by the responder (IBA table 44). The code of reliable datagram is left out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum NakCode {
    /// A packet before this one is missing.
    PsnSequence = 0,
    /// The operation is not supported, out of sequence, or too long.
    InvalidRequest = 1,
    /// The key, the range or the rights do not allow it.
    RemoteAccess = 2,
    /// The responder failed.
    RemoteOperational = 3,
}

/// The meaning of a responder's AETH.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Syndrome {
    /// Done, with credit for more (low five bits count; 31: not counted).
    Ack {
        /// Code of the end-to-end credit, 0 to 31.
        credit: u8,
    },
    /// Receiver not ready.
    RnrNak {
        /// Code of the time to wait, 0 to 31: see [`crate::types::timer_code::rnr`].
        timer: u8,
    },
    /// Refused.
    Nak(NakCode),
}

impl Syndrome {
    /// An acknowledgement that does not limit the requester by credit.
    pub const ACK: Self = Self::Ack { credit: 0x1f };

    /// From the byte on the wire; `None` for reserved ones.
    #[must_use]
    pub const fn parse(byte: u8) -> Option<Self> {
        let low = byte & 0x1f;
        Some(match (byte >> 5, low) {
            (0, _) => Self::Ack { credit: low },
            (1, _) => Self::RnrNak { timer: low },
            (3, 0) => Self::Nak(NakCode::PsnSequence),
            (3, 1) => Self::Nak(NakCode::InvalidRequest),
            (3, 2) => Self::Nak(NakCode::RemoteAccess),
            (3, 3) => Self::Nak(NakCode::RemoteOperational),
            _ => return None,
        })
    }

    /// The byte on the wire.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Ack { credit } => credit & 0x1f,
            Self::RnrNak { timer } => 0x20 | timer & 0x1f,
            Self::Nak(code) => 0x60 | code as u8,
        }
    }
}

impl fmt::Display for Syndrome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ack { credit: 0x1f } => f.write_str("ack"),
            Self::Ack { credit } => write!(f, "ack credit {credit}"),
            Self::RnrNak { timer } => write!(f, "rnr-nak timer {timer}"),
            Self::Nak(NakCode::PsnSequence) => f.write_str("nak psn-sequence"),
            Self::Nak(NakCode::InvalidRequest) => f.write_str("nak invalid-request"),
            Self::Nak(NakCode::RemoteAccess) => f.write_str("nak remote-access"),
            Self::Nak(NakCode::RemoteOperational) => f.write_str("nak remote-operational"),
        }
    }
}

/// ACK extended transport header: the responder's verdict.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Aeth {
    /// Acknowledged, not ready, or refused.
    pub syndrome: Syndrome,
    /// Message sequence number, 24 bits: messages that the responder has completed.
    pub msn: u32,
}

impl Aeth {
    /// Bytes on the wire.
    pub const LEN: usize = 4;

    /// Reads a header.
    ///
    /// # Errors
    /// [`Malformed::Syndrome`] for a reserved one.
    pub const fn parse(b: &[u8; Self::LEN]) -> Result<Self, Malformed> {
        match Syndrome::parse(b[0]) {
            Some(syndrome) => Ok(Self { syndrome, msn: u24_at(b, 1) }),
            None => Err(Malformed::Syndrome),
        }
    }

    /// Writes the header; of the MSN, the low 24 bits.
    pub fn emit(&self, b: &mut [u8; Self::LEN]) {
        *b = byte_and_u24(self.syndrome.code(), self.msn);
    }
}

impl fmt::Display for Aeth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} msn {}", self.syndrome, self.msn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn syndromes_parse_to_what_they_were_or_not_at_all() {
        for byte in 0..=255u8 {
            let legal = matches!(byte, 0x00..=0x3f | 0x60..=0x63);
            assert_eq!(Syndrome::parse(byte).map(Syndrome::code), legal.then_some(byte));
        }
    }

    #[test]
    fn reads_syndrome_and_msn() {
        let aeth = Aeth::parse(&[0x62, 1, 2, 3]).unwrap();
        let expected = Aeth { syndrome: Syndrome::Nak(NakCode::RemoteAccess), msn: 0x01_0203 };
        assert_eq!(aeth, expected);
        assert_eq!(Aeth::parse(&[0x64, 0, 0, 0]), Err(Malformed::Syndrome));
        assert_eq!(aeth.to_string(), "nak remote-access msn 66051");
    }
}
