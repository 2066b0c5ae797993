//! Flush extended transport header (IBA A19.4).

use std::fmt;

use crate::mr::Access;

bitflags::bitflags! {
    /// The depth that written data shall reach before the FLUSH is answered. Reserved bits are kept, so that a
    /// responder can refuse them.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct Placement: u8 {
        /// The data is visible to all on the responder's host.
        const GLOBAL = 1;
        /// Safe from a loss of power.
        const PERSISTENCE = 2;
    }
}

impl Placement {
    /// The rights that it needs.
    #[must_use]
    pub fn rights(self) -> Access {
        let mut rights = Access::empty();
        rights.set(Access::FLUSH_GLOBAL, self.contains(Self::GLOBAL));
        rights.set(Access::FLUSH_PERSISTENT, self.contains(Self::PERSISTENCE));
        rights
    }
}

/// The range of a FLUSH.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Selectivity {
    /// The range of the RETH.
    #[default]
    Range,
    /// The whole memory region of the RETH's key.
    Mr,
    /// A code without a meaning (2 or 3): the responder refuses it.
    Reserved(u8),
}

/// Flush extended transport header: how deep and how wide to flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Feth {
    /// The depth.
    pub placement: Placement,
    /// The range.
    pub selectivity: Selectivity,
}

impl Feth {
    /// Bytes on the wire.
    pub const LEN: usize = 4;

    /// Reads a header; the upper 26 bits are reserved and ignored.
    #[must_use]
    pub const fn parse(b: &[u8; Self::LEN]) -> Self {
        Self {
            placement: Placement::from_bits_retain(b[3] & 0x0f),
            selectivity: match b[3] >> 4 & 3 {
                0 => Selectivity::Range,
                1 => Selectivity::Mr,
                code => Selectivity::Reserved(code),
            },
        }
    }

    /// Writes the header.
    pub fn emit(&self, b: &mut [u8; Self::LEN]) {
        let selectivity = match self.selectivity {
            Selectivity::Range => 0,
            Selectivity::Mr => 1,
            Selectivity::Reserved(code) => code & 3,
        };
        *b = [0, 0, 0, selectivity << 4 | self.placement.bits() & 0x0f];
    }
}

impl fmt::Display for Feth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "placement {:#x} ", self.placement.bits())?;
        match self.selectivity {
            Selectivity::Range => f.write_str("range"),
            Selectivity::Mr => f.write_str("mr"),
            Selectivity::Reserved(code) => write!(f, "selectivity {code}"),
        }
    }
}
