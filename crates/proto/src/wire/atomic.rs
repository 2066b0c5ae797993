//! Headers of atomic operations: the request (IBA 9.3.2) and its answer (IBA 9.5.3).

use std::fmt;

use super::field::{put, u32_at, u64_at};

/// Atomic extended transport header: the operation on 8 bytes of the responder's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AtomicEth {
    /// Address, to be a multiple of 8.
    pub va: u64,
    /// Key of the memory region or window.
    pub rkey: u32,
    /// The value to store, or to add.
    pub swap_add: u64,
    /// The value that compare-swap expects; ignored by fetch-add.
    pub compare: u64,
}

impl AtomicEth {
    /// Bytes on the wire.
    pub const LEN: usize = 28;

    /// Reads a header.
    #[must_use]
    pub const fn parse(b: &[u8; Self::LEN]) -> Self {
        Self {
            va: u64_at(b, 0),
            rkey: u32_at(b, 8),
            swap_add: u64_at(b, 12),
            compare: u64_at(b, 20),
        }
    }

    /// Writes the header.
    pub fn emit(&self, b: &mut [u8; Self::LEN]) {
        put(b, 0, self.va.to_be_bytes());
        put(b, 8, self.rkey.to_be_bytes());
        put(b, 12, self.swap_add.to_be_bytes());
        put(b, 20, self.compare.to_be_bytes());
    }
}

impl fmt::Display for AtomicEth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "va {:#x} rkey {:#010x} ", self.va, self.rkey)?;
        write!(f, "swap_add {:#x} compare {:#x}", self.swap_add, self.compare)
    }
}

/// Atomic acknowledge header: the value before the operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AtomicAckEth {
    /// The value in the memory before.
    pub original: u64,
}

impl AtomicAckEth {
    /// Bytes on the wire.
    pub const LEN: usize = 8;

    /// Reads a header.
    #[must_use]
    pub const fn parse(b: &[u8; Self::LEN]) -> Self {
        Self { original: u64_at(b, 0) }
    }

    /// Writes the header.
    pub fn emit(&self, b: &mut [u8; Self::LEN]) {
        *b = self.original.to_be_bytes();
    }
}

impl fmt::Display for AtomicAckEth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "original {:#x}", self.original)
    }
}
