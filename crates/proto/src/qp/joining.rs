//! Joining packets in a row that continue each other.

use super::Incoming;
use crate::joined::Joined;
use crate::payload::Data;
use crate::wire::bth::Bth;
use crate::wire::opcode::{Opcode, Operation, Service};
use crate::wire::repeated::Repeated;

/// The kinds of packets that are joined.
const KINDS: [Opcode; 3] = [
    Opcode::new(Service::Rc, Operation::WriteOnly),
    Opcode::new(Service::Rc, Operation::SendMiddle),
    Opcode::new(Service::Rc, Operation::WriteMiddle),
];

impl<'a> Incoming<'a> {
    /// Joins to this packet those that continue it: MIDDLEs of one message, or WRITEs of one packet under one key, whose addresses
    /// grow by equal steps. `all` has it and what came behind it, each `stride` bytes long with its ICRC. `is_right` checks the ICRC of one
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
        let is_plain = is_whole && self.acks.is_none() && each > 0;
        if all.len() < 2 * stride || !is_plain || !KINDS.contains(&opcode) {
            return 1;
        }
        let (mut asks, mut asks_twice) = (false, false);
        let Some(step) = self.step(&all[stride..], each) else { return 1 };
        let mut headers = Repeated::new(&self.headers, step);
        let continues = |(i, packet): &(usize, &[u8])| {
            headers.has(packet).is_some_and(|asks_for_ack| {
                let is_right = *i == 0 || is_right(*i, packet);
                asks_twice |= is_right && asks && asks_for_ack;
                asks |= is_right && asks_for_ack;
                is_right
            })
        };
        let n = all.chunks_exact(stride).enumerate().take_while(continues).count();
        if n > 1 {
            let packets = &all[..n * stride];
            let shape = (self.headers.len(), each);
            self.payload = Data::Joined(Joined::new(packets, stride, shape, step, !asks_twice));
            (self.packets, self.headers.bth.ack_req) = (n as u32, asks);
        }
        n.max(1)
    }

    /// How far the address of `next` lies behind that of this packet.
    #[inline]
    fn step(&self, next: &[u8], each: usize) -> Option<u32> {
        let Some(reth) = self.headers.reth else { return Some(each as u32) };
        let va = next.get(Bth::LEN..)?.first_chunk().map(|va| u64::from_be_bytes(*va))?;
        u32::try_from(va.wrapping_sub(reth.va)).ok()
    }
}
