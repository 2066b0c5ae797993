//! RDMA extended transport header (IBA 9.3.1).

use std::fmt;

use super::field::{put, u32_at, u64_at};

/// RDMA extended transport header: where in the responder's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Reth {
    /// First address.
    pub va: u64,
    /// Key of the memory region or window.
    pub rkey: u32,
    /// Bytes of the whole message.
    pub len: u32,
}

impl Reth {
    /// Bytes on the wire.
    pub const LEN: usize = 16;

    /// Reads a header.
    #[must_use]
    pub const fn parse(b: &[u8; Self::LEN]) -> Self {
        Self { va: u64_at(b, 0), rkey: u32_at(b, 8), len: u32_at(b, 12) }
    }

    /// Writes the header.
    pub fn emit(&self, b: &mut [u8; Self::LEN]) {
        put(b, 0, self.va.to_be_bytes());
        put(b, 8, self.rkey.to_be_bytes());
        put(b, 12, self.len.to_be_bytes());
    }
}

impl fmt::Display for Reth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "va {:#x} rkey {:#010x} dmalen {}", self.va, self.rkey, self.len)
    }
}
