//! XRC extended transport header (IBA A14.3).

use std::fmt;

use super::field::{byte_and_u24, u24_at};

/// XRC extended transport header: the shared receive queue that a request is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct XrcEth {
    /// Number of the shared receive queue, 24 bits.
    pub srqn: u32,
}

impl XrcEth {
    /// Bytes on the wire.
    pub const LEN: usize = 4;

    /// Reads a header; the reserved byte is ignored.
    #[must_use]
    pub const fn parse(b: &[u8; Self::LEN]) -> Self {
        Self { srqn: u24_at(b, 1) }
    }

    /// Writes the header; of the number, the low 24 bits.
    pub fn emit(&self, b: &mut [u8; Self::LEN]) {
        *b = byte_and_u24(0, self.srqn);
    }
}

impl fmt::Display for XrcEth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "srq {:#08x}", self.srqn)
    }
}
