//! The addresses of a connection in one word, by which two processes of a host tell whether they mean the same connection.

use anyverbs_proto::types::Gid;

/// Source and destination of a connection's packets, and the slot of the process that sends them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest(pub u32);

impl Digest {
    /// The digest of packets from one address to another.
    #[must_use]
    pub fn new(source: Gid, destination: Gid) -> Self {
        // FNV-1a. It tells mistakes apart; processes of one user trust each other with their addresses.
        let hash =
            source.0.iter().chain(&destination.0).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
                (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
            });
        Self((hash >> 32) as u32 ^ hash as u32)
    }

    /// As packets have it that come from the process with this slot.
    #[inline]
    #[must_use]
    pub fn from_slot(self, slot: u8) -> Self {
        Self(self.0 ^ u32::from(slot) << 24)
    }
}
