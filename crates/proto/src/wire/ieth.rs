//! Invalidate extended transport header (IBA 9.3.7).

use std::fmt;

/// Invalidate extended transport header: a key that the responder shall make invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ieth {
    /// The key.
    pub rkey: u32,
}

impl Ieth {
    /// Bytes on the wire.
    pub const LEN: usize = 4;

    /// Reads a header.
    #[must_use]
    pub const fn parse(b: &[u8; Self::LEN]) -> Self {
        Self { rkey: u32::from_be_bytes(*b) }
    }

    /// Writes the header.
    pub fn emit(&self, b: &mut [u8; Self::LEN]) {
        *b = self.rkey.to_be_bytes();
    }
}

impl fmt::Display for Ieth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "inv {:#010x}", self.rkey)
    }
}
