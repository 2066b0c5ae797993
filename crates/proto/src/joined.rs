//! Packets in a row of one buffer, as GRO joins datagrams, that are received as one.

use crate::memory::{Fault, Memory};
use crate::payload::Data;
use crate::qp::Incoming;
use crate::wire::opcode::{Opcode, Operation, Service};
use crate::wire::packet::{ICRC_LEN, Packet};
use crate::wire::repeated::Repeated;

/// The kinds of packets that are joined.
const KINDS: [Opcode; 3] = [
    Opcode::new(Service::Rc, Operation::WriteOnly),
    Opcode::new(Service::Rc, Operation::SendMiddle),
    Opcode::new(Service::Rc, Operation::WriteMiddle),
];

/// The payloads of such packets, or a part of them. The packets have one length and one kind. They differ in the PSN, in
/// whether they ask for an ACK, and in the address of a RETH, which moves on with the payload.
#[derive(Clone, Copy, Debug)]
pub struct Joined<'a> {
    /// The packets, each with its ICRC.
    packets: &'a [u8],
    /// Bytes of one of them, of its headers, and of its payload.
    stride: u16,
    head: u16,
    each: u16,
    /// The part of all payloads, one behind the other.
    skip: u32,
    len: u32,
}

impl<'a> Joined<'a> {
    /// Packets of `stride` bytes, of which `head` are headers and `each` are payload.
    pub(crate) fn new(packets: &'a [u8], stride: usize, head: usize, each: usize) -> Self {
        debug_assert!(
            packets.len() <= usize::from(u16::MAX) && packets.len().is_multiple_of(stride)
        );
        debug_assert!(each > 0 && head + each + ICRC_LEN <= stride);
        let len = (packets.len() / stride * each) as u32;
        let [stride, head, each] = [stride, head, each].map(|n| n as u16);
        Self { packets, stride, head, each, skip: 0, len }
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    /// Bytes of the payload of each packet.
    pub(crate) fn each(&self) -> usize {
        self.each.into()
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

impl<'a> Incoming<'a> {
    /// Joins to this packet those that continue it: MIDDLEs of one message, or WRITEs of one packet into adjoining memory. `all`
    /// has it and what came behind it, each `stride` bytes long with its ICRC. `is_right` checks the ICRC of one
    /// that seems to continue it. Returns how many it now stands for.
    #[inline]
    pub fn join(
        &mut self,
        all: &'a [u8],
        stride: usize,
        mut is_right: impl FnMut(usize, &[u8]) -> bool,
    ) -> usize {
        let (opcode, each) = (self.headers.bth.opcode, self.payload.len());
        let is_whole = self.headers.reth.is_none_or(|reth| reth.len as usize == each);
        if all.len() < 2 * stride || each == 0 || !is_whole || !KINDS.contains(&opcode) {
            return 1;
        }
        let mut asks = false;
        let mut headers = Repeated::new(&self.headers, each as u32);
        let continues = |(i, packet): &(usize, &[u8])| {
            headers.has(packet).is_some_and(|asks_for_ack| {
                let is_right = *i == 0 || is_right(*i, packet);
                asks |= is_right && asks_for_ack;
                is_right
            })
        };
        let n = all.chunks_exact(stride).enumerate().take_while(continues).count();
        if n > 1 {
            let packets = &all[..n * stride];
            self.payload = Data::Joined(Joined::new(packets, stride, self.headers.len(), each));
            (self.packets, self.headers.bth.ack_req) = (n as u32, asks);
        }
        n.max(1)
    }
}
