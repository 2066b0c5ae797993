//! State that packets of one batch for one queue pair share. Their completions are gathered, and enter the completion
//! queue under one hold of its lock. The region of the last receive stays in use for the next one.

use std::sync::Arc;

use anyverbs_objects::base::Caller;
use anyverbs_proto::env::Side;
use anyverbs_proto::mr::LastLocal;
use anyverbs_proto::wc::Wc;
use arrayvec::ArrayVec;

use super::QpCell;

/// The completion of a longer message is added at once: copying it costs more than the lock of the queue.
const LONG: u32 = 4096;

/// The arrivals of a queue pair, under its lock. They are [ended](Self::end) before that is released.
pub(crate) struct Arrivals<'a> {
    cell: &'a QpCell,
    /// The thread that polls for them.
    into: Option<&'a mut dyn Caller>,
    /// The side whose completions wait.
    side: Side,
    /// With whether they are solicited.
    waiting: ArrayVec<(Wc, bool), 16>,
    pub(crate) region: LastLocal<'static>,
    /// There is one more packet.
    pub(crate) more: bool,
}

/// The same caller for a shorter time.
#[inline]
pub(crate) fn reborrow<'a>(into: &'a mut Option<&mut dyn Caller>) -> Option<&'a mut dyn Caller> {
    match into {
        Some(caller) => Some(&mut **caller),
        None => None,
    }
}

impl<'a> Arrivals<'a> {
    pub(crate) fn new(cell: &'a QpCell, into: Option<&'a mut dyn Caller>) -> Self {
        let region = LastLocal::default();
        Self { cell, into, side: Side::Recv, waiting: ArrayVec::new_const(), region, more: false }
    }

    /// Adds a completion. False if there is no queue of the queue pair's own that it belongs to.
    #[inline]
    pub(crate) fn complete(&mut self, side: Side, wc: Wc, solicited: bool) -> bool {
        let Some(cq) = self.cell.cq(side) else { return false };
        // Those of one queue stay in order.
        let is_next = self.waiting.is_empty()
            || self.cell.cq(self.side).is_none_or(|other| !Arc::ptr_eq(other, cq));
        if let Some(into) = &mut self.into
            && is_next
            && into.take(Arc::as_ptr(cq).cast(), &wc)
        {
            if side == Side::Send {
                self.cell.sq_credit.release(wc.sq_count);
            }
            return true;
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
