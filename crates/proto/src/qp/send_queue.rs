//! The send queue: a ring of WQEs, and where in it the requester stands.

use anyverbs_queue_memory::{OutOfMemory, QueueMemory, QueueVec, filled, with_capacity, zeroed};

use crate::recv_queue::copy_sges;
use crate::types::Psn;
use crate::wr::{MAX_SGE, SendFlags, SendOp, SendWr, Sge, UdDest};

use super::attr::QpCap;

/// Bytes that a packet costs in a window in addition to its payload.
pub(super) const PACKET_COST: u64 = 64;

/// A send WQE.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sqe {
    pub(super) wr_id: u64,
    pub(super) op: SendOp,
    pub(super) flags: SendFlags,
    sge_count: u8,
    /// Bytes of the message.
    pub(super) len: u32,
    /// PSN of its first packet, once it was started.
    pub(super) first_psn: Psn,
    /// Packets of the message, or of the answer to a READ.
    pub(super) packets: u32,
    /// Window cost of all WQEs before this one.
    pub(super) cost_before: u64,
    /// A WRITE that goes out as a message for each packet, a READ whose packets are asked for one by one.
    pub(super) split: bool,
    /// On XRC the peer's SRQ.
    pub(super) xrc_srqn: u32,
}

impl Sqe {
    /// PSN after the last packet.
    pub(super) fn end_psn(&self) -> Psn {
        self.first_psn.plus(self.packets)
    }

    /// Cost of everything up to packet `k` of this WQE.
    pub(super) fn cost_at(&self, k: u32, mtu: u32) -> u64 {
        let bytes = (u64::from(k) * u64::from(mtu)).min(self.len.into());
        self.cost_before.wrapping_add(bytes + u64::from(k) * PACKET_COST)
    }
}

impl Default for Sqe {
    fn default() -> Self {
        Self {
            wr_id: 0,
            op: SendOp::Send,
            flags: SendFlags::empty(),
            sge_count: 0,
            len: 0,
            first_psn: Psn::default(),
            packets: 0,
            cost_before: 0,
            split: false,
            xrc_srqn: 0,
        }
    }
}

/// Ring of send WQEs. Positions count posted WQEs and wrap at 2^32;
/// `done <= next <= head` and `next <= started <= head` hold in that arithmetic.
#[derive(Debug)]
pub(super) struct SendQueue {
    slots: QueueVec<Sqe>,
    sges: QueueVec<Sge>,
    inline: QueueVec<u8>,
    ud: QueueVec<UdDest>,
    capacity: u32,
    max_sge: usize,
    max_inline: usize,
    /// WQEs that were posted since the beginning.
    posted: u64,
    /// Their bytes.
    posted_bytes: u64,
    /// Those of them that failed, were flushed, or were forgotten by a reset.
    failed: u64,
    /// Their bytes.
    failed_bytes: u64,
    /// WQEs before this one have PSNs.
    pub(super) started: u32,
    /// The WQE that is being sent.
    pub(super) next: u32,
    /// The oldest WQE that is not complete.
    pub(super) done: u32,
    /// The position behind the last WQE that was [passed](Self::pass), and that behind the last of these that made a completion. Their
    /// slots hold older WQEs.
    passed: [u32; 2],
}

impl SendQueue {
    pub(super) fn new(
        cap: &QpCap,
        datagrams: Option<UdDest>,
        memory: &QueueMemory,
    ) -> Result<Self, OutOfMemory> {
        let slots = cap.max_send_wr.max(1).next_power_of_two() as usize;
        let max_sge = (cap.max_send_sge as usize).min(MAX_SGE);
        let max_inline = cap.max_inline_data as usize;
        Ok(Self {
            slots: filled(Sqe::default(), slots, memory)?,
            sges: filled(Sge::default(), slots * max_sge, memory)?,
            inline: zeroed(slots * max_inline, memory)?,
            ud: match datagrams {
                Some(to) => filled(to, slots, memory)?,
                None => with_capacity(0, memory)?,
            },
            capacity: cap.max_send_wr,
            max_sge,
            max_inline,
            posted: 0,
            posted_bytes: 0,
            failed: 0,
            failed_bytes: 0,
            started: 0,
            next: 0,
            done: 0,
            passed: [0; 2],
        })
    }

    /// As it is, for WQEs of the device alone: programs find it full.
    pub(super) fn of_the_device(self) -> Self {
        Self { capacity: 0, ..self }
    }

    /// Tells whether no slot is free. `released` is the count that pollers handed back.
    pub(super) fn is_full(&self, released: u32) -> bool {
        self.head().wrapping_sub(released) >= self.capacity
    }

    /// Slots that are free, `released` being the count that pollers handed back.
    pub(super) fn room(&self, released: u32) -> u32 {
        self.capacity.saturating_sub(self.head().wrapping_sub(released))
    }

    pub(super) fn max_sge(&self) -> usize {
        self.max_sge
    }

    pub(super) fn max_inline(&self) -> usize {
        self.max_inline
    }

    /// Adds a WQE; the caller checked that it fits. Inline data follows through [`Self::inline_mut`], before
    /// [`Self::commit`].
    pub(super) fn stage(&mut self, wr: &SendWr<'_>, len: u32) {
        let slot = self.slot(self.head());
        let inline = wr.flags.contains(SendFlags::INLINE);
        let sge_count = if inline { 0 } else { wr.sges.len() };
        self.slots[slot] = Sqe {
            wr_id: wr.wr_id,
            op: wr.op,
            flags: wr.flags,
            sge_count: sge_count as u8,
            len,
            xrc_srqn: wr.xrc_srqn,
            ..Sqe::default()
        };
        if !inline {
            let first = slot * self.max_sge;
            copy_sges(&mut self.sges[first..first + sge_count], wr.sges);
        }
        if let (Some(dest), Some(ud)) = (self.ud.get_mut(slot), wr.ud) {
            *dest = ud;
        }
    }

    /// Posts a SEND of one element that was sent as one packet, with its PSN and the window cost before it. The caller
    /// checked that there is room, and that everything before it was sent.
    #[inline]
    pub(super) fn push_sent(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        sge: Sge,
        (first_psn, cost_before): (Psn, u64),
    ) {
        let slot = self.slot(self.head());
        self.slots[slot] = Sqe {
            wr_id,
            flags,
            sge_count: u8::from(!flags.contains(SendFlags::INLINE)),
            len: sge.len,
            first_psn,
            packets: 1,
            cost_before,
            ..Sqe::default()
        };
        self.sges[slot * self.max_sge] = sge;
        self.note_posted(sge.len);
        let head = self.head();
        (self.next, self.started) = (head, head);
    }

    /// A WQE of `len` bytes was posted, sent and completed in one. There was none that is not complete.
    #[inline]
    pub(super) fn pass(&mut self, len: u32, is_signaled: bool) {
        self.note_posted(len);
        let head = self.head();
        (self.started, self.next, self.done) = (head, head, head);
        self.passed[0] = head;
        if is_signaled {
            self.passed[1] = head;
        }
    }

    /// Whether a WQE was signaled when it was posted. One that has passed since its slot was filled counts as the one in the slot, unless
    /// it was the last signaled one that has.
    pub(super) fn was_signaled(&self, position: u32) -> bool {
        position.wrapping_add(1) == self.passed[1]
            || self.at(position).flags.contains(SendFlags::SIGNALED)
    }

    /// Whether the slot of a WQE may hold an older one.
    pub(super) fn may_have_passed(&self, position: u32) -> bool {
        (self.passed[0].wrapping_sub(position) as i32) > 0
    }

    #[inline]
    fn note_posted(&mut self, len: u32) {
        self.posted += 1;
        self.posted_bytes = self.posted_bytes.wrapping_add(len.into());
    }

    /// The position of the next post.
    #[inline]
    pub(super) fn head(&self) -> u32 {
        self.posted as u32
    }

    /// WQEs that succeeded, and their bytes.
    pub(super) fn succeeded(&self) -> (u64, u64) {
        let outstanding = self.outstanding();
        let positions = (0..outstanding).map(|n| self.done.wrapping_add(n));
        let bytes: u64 = positions.map(|position| u64::from(self.at(position).len)).sum();
        let others = (u64::from(outstanding) + self.failed, bytes.wrapping_add(self.failed_bytes));
        (self.posted - others.0, self.posted_bytes.wrapping_sub(others.1))
    }

    /// A WQE of `len` bytes that is complete has failed.
    pub(super) fn note_failed(&mut self, len: u32) {
        self.failed += 1;
        self.failed_bytes = self.failed_bytes.wrapping_add(len.into());
    }

    /// Room for the inline data of the staged WQE.
    pub(super) fn inline_mut(&mut self) -> &mut [u8] {
        let first = self.slot(self.head()) * self.max_inline;
        &mut self.inline[first..first + self.max_inline]
    }

    /// The same, to read.
    pub(super) fn inline_next(&self) -> &[u8] {
        let first = self.slot(self.head()) * self.max_inline;
        &self.inline[first..first + self.max_inline]
    }

    /// Posts the staged WQE.
    pub(super) fn commit(&mut self) {
        let len = self.at(self.head()).len;
        self.note_posted(len);
    }

    pub(super) fn at(&self, position: u32) -> &Sqe {
        &self.slots[self.slot(position)]
    }

    pub(super) fn at_mut(&mut self, position: u32) -> &mut Sqe {
        let slot = self.slot(position);
        &mut self.slots[slot]
    }

    pub(super) fn sges(&self, position: u32) -> &[Sge] {
        let slot = self.slot(position);
        let first = slot * self.max_sge;
        &self.sges[first..first + usize::from(self.slots[slot].sge_count)]
    }

    /// Inline data of a WQE.
    pub(super) fn inline(&self, position: u32) -> &[u8] {
        let slot = self.slot(position);
        let first = slot * self.max_inline;
        &self.inline[first..first + self.slots[slot].len as usize]
    }

    pub(super) fn dest(&self, position: u32) -> &UdDest {
        &self.ud[self.slot(position)]
    }

    /// Forgets every WQE.
    pub(super) fn clear(&mut self) {
        let (succeeded, bytes) = self.succeeded();
        self.failed = self.posted - succeeded;
        self.failed_bytes = self.posted_bytes.wrapping_sub(bytes);
        let head = self.head();
        (self.started, self.next, self.done) = (head, head, head);
    }

    /// WQEs that are not complete.
    pub(super) fn outstanding(&self) -> u32 {
        self.head().wrapping_sub(self.done)
    }

    fn slot(&self, position: u32) -> usize {
        position as usize & (self.slots.len() - 1)
    }
}
