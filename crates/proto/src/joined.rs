//! Packets in a row of one buffer, as GRO joins datagrams, that are received as one.

use crate::memory::{Fault, Memory};
use crate::wire::packet::{ICRC_LEN, Packet};

/// The payloads of such packets, or a part of them. The packets have one length and one kind. They differ in the PSN, in
/// whether they ask for an ACK, and in the address of a RETH, which grows by one step from packet to packet.
#[derive(Clone, Copy, Debug)]
pub struct Joined<'a> {
    /// The packets, each with its ICRC.
    packets: &'a [u8],
    /// Bytes of one of them, of its headers, and of its payload.
    stride: u16,
    head: u16,
    each: u16,
    /// From the place of a payload in memory to that of the next one.
    step: u32,
    /// At most one asks for an ACK: they may be pieces of one WRITE.
    is_one: bool,
    /// The part of all payloads, one behind the other.
    skip: u32,
    len: u32,
}

impl<'a> Joined<'a> {
    /// Packets of `stride` bytes, of which `head` are headers and `each` are payload.
    pub(crate) fn new(
        packets: &'a [u8],
        stride: usize,
        (head, each): (usize, usize),
        step: u32,
        is_one: bool,
    ) -> Self {
        debug_assert!(
            packets.len() <= usize::from(u16::MAX) && packets.len().is_multiple_of(stride)
        );
        debug_assert!(each > 0 && head + each + ICRC_LEN <= stride);
        let len = (packets.len() / stride * each) as u32;
        let [stride, head, each] = [stride, head, each].map(|n| n as u16);
        Self { packets, stride, head, each, step, is_one, skip: 0, len }
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether they may be the pieces of one WRITE.
    pub(crate) fn is_one(&self) -> bool {
        self.is_one
    }

    /// Bytes of the payload of each packet.
    pub(crate) fn each(&self) -> usize {
        self.each.into()
    }

    /// Bytes of memory from the first to the last that whole packets are for.
    pub(crate) fn span(&self) -> u64 {
        let n = self.packets.len() / usize::from(self.stride);
        u64::from(self.step) * (n - 1) as u64 + u64::from(self.each)
    }

    /// Copies the payloads of whole packets to where their steps lead from an address.
    #[inline]
    pub(crate) fn write_by_steps(&self, mut to: u64, memory: &impl Memory) -> Result<(), Fault> {
        self.each_piece(|bytes| {
            memory.write(to, bytes)?;
            to = to.wrapping_add(self.step.into());
            Ok(())
        })
    }

    /// The first `at` bytes and the rest. There must be at least `at`.
    pub(crate) fn split_at(self, at: usize) -> (Self, Self) {
        let at = at as u32;
        (Self { len: at, ..self }, Self { skip: self.skip + at, len: self.len - at, ..self })
    }

    /// The packets, one by one.
    pub fn packets(self) -> impl Iterator<Item = Packet<'a>> {
        let all = self.packets.chunks_exact(self.stride.into());
        // They are as the first one, which was parsed.
        all.filter_map(|packet| Packet::parse(&packet[..packet.len() - ICRC_LEN]).ok())
    }

    /// Calls `f` with the bytes, piece by piece.
    #[inline]
    pub(crate) fn each_piece(
        &self,
        mut f: impl FnMut(&[u8]) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let (first, mut skip) = ((self.skip / u32::from(self.each)) as usize, self.skip as usize);
        skip -= first * self.each();
        let mut left = self.len();
        for packet in self.packets.chunks_exact(self.stride.into()).skip(first) {
            let payload = &packet[self.head.into()..][skip..self.each()];
            let here = &payload[..payload.len().min(left)];
            if here.is_empty() {
                break;
            }
            f(here)?;
            (skip, left) = (0, left - here.len());
        }
        debug_assert_eq!(left, 0);
        Ok(())
    }

    /// Copies everything to an address.
    #[inline]
    pub(crate) fn write(&self, mut to: u64, memory: &impl Memory) -> Result<(), Fault> {
        self.each_piece(|bytes| {
            memory.write(to, bytes)?;
            to = to.wrapping_add(bytes.len() as u64);
            Ok(())
        })
    }

    /// Copies the beginning to `dst`, which is not longer than this.
    pub(crate) fn read(&self, mut dst: &mut [u8]) -> Result<(), Fault> {
        self.split_at(dst.len()).0.each_piece(|bytes| {
            let (here, rest) = std::mem::take(&mut dst).split_at_mut(bytes.len());
            here.copy_from_slice(bytes);
            dst = rest;
            Ok(())
        })
    }
}
