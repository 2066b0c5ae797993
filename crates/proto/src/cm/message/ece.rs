//! Enhanced connection establishment: options that devices of one vendor agree on (`struct ibv_ece`, IBA comment 9434).

use super::field::{Value, read, write};

/// Vendor and options of one side. The options travel as the MAD's attribute modifier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ece {
    /// Vendor, 24 bits; 0: none.
    pub vendor_id: u32,
    /// The vendor's options.
    pub options: u32,
}

/// The vendor's ID in a REP: 24 bits in three places.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RepVendorId(pub u32);

/// The vendor's ID in a SIDR_REP: the upper 16 bits, and the lower 8 further on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SidrRepVendorId(pub u32);

impl Value for RepVendorId {
    const BITS: usize = 8;
    fn read(body: &[u8], first: usize, width: usize) -> Self {
        Self((0..3).fold(0, |id, i| id << 8 | read(body, first + 32 * i, width) as u32))
    }
    fn write(&self, body: &mut [u8], first: usize, width: usize) {
        for i in 0..3 {
            write(body, first + 32 * i, width, u64::from(self.0 >> (16 - 8 * i)));
        }
    }
}

impl Value for SidrRepVendorId {
    const BITS: usize = 16;
    fn read(body: &[u8], first: usize, width: usize) -> Self {
        Self((read(body, first, width) << 8 | read(body, first + 40, 8)) as u32)
    }
    fn write(&self, body: &mut [u8], first: usize, width: usize) {
        write(body, first, width, u64::from(self.0 >> 8));
        write(body, first + 40, 8, u64::from(self.0));
    }
}
