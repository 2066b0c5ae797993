//! State that packets of one batch for one queue pair share. Their completions are gathered, and enter the completion
//! queue under one hold of its lock. The region of the last receive stays in use for the next one.

use std::sync::Arc;

use anyverbs_proto::env::Side;
use anyverbs_proto::mr::LastLocal;
use anyverbs_proto::wc::Wc;
use arrayvec::ArrayVec;

use super::QpCell;

/// The completion of a longer message is added at once: copying it costs more than the lock of the queue.
const LONG: u32 = 4096;

/// The arrivals of a queue pair, under its lock. They are [ended](Self::end) before that is released.
#[derive(Debug)]
pub(crate) struct Arrivals<'a> {
    cell: &'a QpCell,
    /// The side whose completions wait.
    side: Side,
    /// With whether they are solicited.
    waiting: ArrayVec<(Wc, bool), 16>,
    pub(crate) region: LastLocal<'static>,
    /// There is one more packet.
    pub(crate) more: bool,
}

impl<'a> Arrivals<'a> {
    pub(crate) fn new(cell: &'a QpCell) -> Self {
        let region = LastLocal::default();
        Self { cell, side: Side::Recv, waiting: ArrayVec::new_const(), region, more: false }
    }

    /// Adds a completion. False if there is no queue of the queue pair's own that it belongs to.
    #[inline]
    pub(crate) fn complete(&mut self, side: Side, wc: Wc, solicited: bool) -> bool {
        if self.cell.cq(side).is_none() {
            return false;
        }
        if side != self.side || self.waiting.is_full() {
            self.flush();
            self.side = side;
        }
        self.waiting.push((wc, solicited));
        // A thread that waits for it elsewhere does not wait for the copies of a whole batch.
        if wc.byte_len > LONG {
            self.flush();
        }
        true
    }

    /// Gives the completions to their queue.
    #[inline]
    pub(crate) fn flush(&mut self) {
        if let Some(cq) = self.cell.cq(self.side).filter(|_| !self.waiting.is_empty()) {
            if cq.push_all(&self.waiting) {
                self.cell
                    .transport
                    .core
                    .progress()
                    .note_overrun(Arc::clone(cq) as _, self.cell.qpn);
            }
            self.waiting.clear();
        }
    }

    /// The batch is over.
    #[inline]
    pub(crate) fn end(&mut self) {
        self.flush();
        self.region.release();
    }
}
