//! Immediate data (IBA 9.3.6).

use std::fmt;

/// Immediate data: four bytes for the receiver's completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ImmDt(
    /// The value of the big-endian field.
    pub u32,
);

impl ImmDt {
    /// Bytes on the wire.
    pub const LEN: usize = 4;

    /// Reads the field.
    #[must_use]
    pub const fn parse(b: &[u8; Self::LEN]) -> Self {
        Self(u32::from_be_bytes(*b))
    }

    /// Writes the field.
    pub fn emit(&self, b: &mut [u8; Self::LEN]) {
        *b = self.0.to_be_bytes();
    }
}

impl fmt::Display for ImmDt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "imm {:#010x}", self.0)
    }
}
