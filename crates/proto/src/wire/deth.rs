//! Datagram extended transport header (IBA 9.3.3).

use std::fmt;

use super::field::{byte_and_u24, put, u24_at, u32_at};
use crate::types::{QKey, Qpn};

/// Datagram extended transport header: the sender, and its right to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Deth {
    /// Must equal the receiving queue pair's.
    pub qkey: QKey,
    /// The sending queue pair.
    pub src_qpn: Qpn,
}

impl Deth {
    /// Bytes on the wire.
    pub const LEN: usize = 8;

    /// Reads a header; the reserved byte is ignored.
    #[must_use]
    pub const fn parse(b: &[u8; Self::LEN]) -> Self {
        Self { qkey: QKey(u32_at(b, 0)), src_qpn: Qpn::new(u24_at(b, 5)) }
    }

    /// Writes the header.
    pub fn emit(&self, b: &mut [u8; Self::LEN]) {
        put(b, 0, self.qkey.0.to_be_bytes());
        put(b, 4, byte_and_u24(0, self.src_qpn.get()));
    }
}

impl fmt::Display for Deth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "qkey {:#010x} sqp {}", self.qkey.0, self.src_qpn)
    }
}
