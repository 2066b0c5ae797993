//! The headers of packets in a row.

use super::bth::Bth;
use super::field::byte_and_u24;
use super::packet::Headers;
use super::reth::Reth;
use crate::types::Psn;

/// Headers of packets in a row, which differ in the PSN and in whether they ask for an ACK, and in the address of a RETH.
/// They are written once and then changed.
#[derive(Clone, Copy, Debug)]
pub struct Repeated {
    bytes: [u8; Self::LONG],
    psn: Psn,
    /// The address of the next RETH, if there is one.
    va: Option<u64>,
    step: u32,
}

impl Repeated {
    /// Bytes with a RETH.
    const LONG: usize = Bth::LEN + Reth::LEN;

    /// The headers of the first packet. In each the address is `step` bytes behind that of the one before.
    ///
    /// # Panics
    /// When there are other extension headers than a RETH.
    #[must_use]
    pub fn new(first: &Headers, step: u32) -> Self {
        let mut bytes = [0; Self::LONG];
        let len = first.emit(&mut bytes);
        let va = first.reth.filter(|_| len > Bth::LEN).map(|reth| reth.va);
        Self { bytes, psn: first.bth.psn, va, step }
    }

    /// The next packet's RETH, if it has one, is to have this address.
    #[inline]
    pub fn aim(&mut self, at: u64) {
        if let Some(va) = &mut self.va {
            *va = at;
        }
    }

    /// Writes the headers of the next packet to the beginning of `room`; their length.
    ///
    /// # Panics
    /// When `room` is shorter.
    #[inline]
    pub fn write(&mut self, asks_for_ack: bool, room: &mut [u8]) -> usize {
        // Lengths known here make a few moves of it.
        if self.go_on(asks_for_ack) {
            room[..Self::LONG].copy_from_slice(&self.bytes);
            Self::LONG
        } else {
            room[..Bth::LEN].copy_from_slice(&self.bytes[..Bth::LEN]);
            Bth::LEN
        }
    }

    /// Whether a packet has the headers of the next one: if so, whether it asks for an ACK.
    #[inline]
    pub(crate) fn has(&mut self, packet: &[u8]) -> Option<bool> {
        let asks_for_ack = packet.get(8)? & 0x80 != 0;
        let is_next = if self.go_on(asks_for_ack) {
            packet.first_chunk() == Some(&self.bytes)
        } else {
            packet.first_chunk::<{ Bth::LEN }>() == self.bytes.first_chunk()
        };
        is_next.then_some(asks_for_ack)
    }

    /// Makes the bytes those of the next packet; whether it has a RETH.
    #[inline]
    fn go_on(&mut self, asks_for_ack: bool) -> bool {
        let [.., a, x, y, z] = &mut self.bytes[..Bth::LEN] else { return false };
        [*a, *x, *y, *z] = byte_and_u24(u8::from(asks_for_ack) << 7 | *a & 0x7f, self.psn.get());
        self.psn = self.psn.plus(1);
        let Some(va) = self.va else { return false };
        self.bytes[Bth::LEN..Bth::LEN + 8].copy_from_slice(&va.to_be_bytes());
        self.va = Some(va.wrapping_add(self.step.into()));
        true
    }
}
