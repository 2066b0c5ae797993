//! The MAD around a message: 256 bytes on QP1 (IBA 13.4).

use std::fmt;

use super::message::{Attribute, BODY_LEN, Message};

/// Bytes of a management datagram.
pub const MAD_LEN: usize = 256;

/// A management datagram on the wire.
pub type MadBytes = [u8; MAD_LEN];

const HEADER_LEN: usize = MAD_LEN - BODY_LEN;
const BASE_VERSION: u8 = 1;
const CLASS: u8 = 0x07;
const METHOD_SEND: u8 = 0x03;

/// The version of the communication management class.
pub const CLASS_VERSION: u8 = 2;

/// The reason why bytes are no MAD of the CM. The receiver drops them and counts the reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Malformed {
    /// The length is not 256 bytes.
    #[error("not of a MAD's length")]
    Length,
    /// The base version is not 1.
    #[error("unknown base version")]
    BaseVersion,
    /// The class is not communication management.
    #[error("another management class")]
    Class,
    /// Another version of the class.
    #[error("unknown class version")]
    ClassVersion,
    /// The method is not Send.
    #[error("unknown method")]
    Method,
    /// No message that we know.
    #[error("unknown attribute")]
    Attribute,
}

/// A MAD of the CM. Status and class-specific bits mean nothing in it, and are written as zero.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mad {
    /// Copied from a request to its answers.
    pub transaction_id: u64,
    /// Attribute modifier: ECE options in REQ, REP and SIDR_REP; else 0.
    pub modifier: u32,
    /// The message.
    pub message: Message,
}

impl Mad {
    /// Reads a MAD.
    ///
    /// # Errors
    /// The reason why the bytes are none of ours.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let bytes: &MadBytes = bytes.try_into().map_err(|_| Malformed::Length)?;
        let (header, body) = bytes.split_at(HEADER_LEN);
        if header[0] != BASE_VERSION {
            return Err(Malformed::BaseVersion);
        }
        if header[1] != CLASS {
            return Err(Malformed::Class);
        }
        if header[2] != CLASS_VERSION {
            return Err(Malformed::ClassVersion);
        }
        if header[3] != METHOD_SEND {
            return Err(Malformed::Method);
        }
        let attribute = u16::from_be_bytes([header[16], header[17]]);
        let attribute = Attribute::from_code(attribute).ok_or(Malformed::Attribute)?;
        let body = body.try_into().expect("a MAD is a header and a body");
        Ok(Self {
            transaction_id: transaction_id(bytes),
            modifier: u32::from_be_bytes([header[20], header[21], header[22], header[23]]),
            message: Message::parse(attribute, body),
        })
    }

    /// The bytes on the wire.
    #[must_use]
    pub fn emit(&self) -> MadBytes {
        let mut bytes = [0; MAD_LEN];
        let (header, body) = bytes.split_at_mut(HEADER_LEN);
        header[..4].copy_from_slice(&[BASE_VERSION, CLASS, CLASS_VERSION, METHOD_SEND]);
        header[8..16].copy_from_slice(&self.transaction_id.to_be_bytes());
        header[16..18].copy_from_slice(&(self.message.attribute() as u16).to_be_bytes());
        header[20..24].copy_from_slice(&self.modifier.to_be_bytes());
        self.message.emit(body.try_into().expect("a MAD is a header and a body"));
        bytes
    }

    /// Reads a MAD whose class version this device does not speak. Gives the transaction ID and, if it may be a REQ,
    /// the first communication ID. Both fields have had these offsets since version 1.
    pub(super) fn foreign_req(bytes: &[u8]) -> Option<(u64, u32)> {
        let bytes: &MadBytes = bytes.try_into().ok()?;
        let is_req = bytes[..2] == [BASE_VERSION, CLASS]
            && bytes[3] == METHOD_SEND
            && bytes[16..18] == (Attribute::Req as u16).to_be_bytes();
        let id = [bytes[24], bytes[25], bytes[26], bytes[27]];
        is_req.then(|| (transaction_id(bytes), u32::from_be_bytes(id)))
    }
}

fn transaction_id(bytes: &MadBytes) -> u64 {
    u64::from_be_bytes(*bytes[8..].first_chunk().expect("a MAD is longer than its header"))
}

impl fmt::Display for Mad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tid {:#x}", self.message, self.transaction_id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cm::message::rtu::Rtu;

    #[test]
    fn everything_in_the_header_is_checked() {
        let mad = Mad {
            transaction_id: 0x0102_0304_0506_0708,
            modifier: 9,
            message: Rtu::default().into(),
        };
        let bytes = mad.emit();
        assert_eq!(Mad::parse(&bytes), Ok(mad));
        assert_eq!(Mad::parse(&bytes[..255]), Err(Malformed::Length));
        assert_eq!(Mad::parse(&[&bytes[..], &[0]].concat()), Err(Malformed::Length));
        for (at, error) in [
            (0, Malformed::BaseVersion),
            (1, Malformed::Class),
            (2, Malformed::ClassVersion),
            (3, Malformed::Method),
            (17, Malformed::Attribute),
        ] {
            let mut bad = bytes;
            bad[at] ^= 0x40;
            assert_eq!(Mad::parse(&bad), Err(error));
        }
    }
}
