//! The short way of a poll: the lanes of the queue pair that gave this thread its last completion.
//!
//! It takes that queue pair's lock and no other. So threads that poll queues of their own do not meet, but once in
//! [`CLOCK_EVERY`] polls.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use anyverbs_objects::base::Caller;
use anyverbs_proto::env::Side;

use super::Driver;
use crate::qp::QpCell;

/// A caller that finds nothing looks at everything, at the clock and for forwarded datagrams once in this many polls. Reading the
/// clock costs a tenth of an empty poll.
pub(super) const CLOCK_EVERY: u32 = 16;
/// Counts of polls. Threads share them when there are more.
const COUNTS: usize = 32;

/// Counts the empty polls of all threads. It only has to move while somebody polls.
#[derive(Debug, Default)]
pub(super) struct Polls([Count; COUNTS]);

/// In a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Count(AtomicU64);

impl Polls {
    /// Counts a poll of this thread, and returns the count. One that two threads make at once may be lost.
    #[inline]
    pub(super) fn note(&self) -> u64 {
        let count = OWN.try_with(|own| own.number % COUNTS).unwrap_or_default();
        let Count(count) = &self.0[count];
        let polls = count.load(Ordering::Relaxed).wrapping_add(1);
        count.store(polls, Ordering::Release);
        polls
    }

    /// The polls of all threads.
    pub(super) fn sum(&self) -> u64 {
        let counts = self.0.iter().map(|Count(count)| count.load(Ordering::SeqCst));
        counts.fold(0, u64::wrapping_add)
    }
}

/// The short way of a thread.
struct Own {
    /// Tells it from others.
    number: usize,
    cell: Cell<Option<Arc<QpCell>>>,
    polls: Cell<u32>,
    /// Something was found since everything was looked at.
    found: Cell<bool>,
}

impl Own {
    fn new() -> Self {
        static LAST: AtomicUsize = AtomicUsize::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed);
        Self { number, cell: Cell::new(None), polls: Cell::new(0), found: Cell::new(false) }
    }
}

thread_local! {
    static OWN: Own = Own::new();
}

/// The finding of a look.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    /// Something that was executed.
    Something,
    /// Nothing, and nothing else is to be looked at.
    Nothing,
    /// There is more to do: everything is to be looked at. Whether the thread has found something by itself since the last
    /// time.
    All { is_due: bool, has_found: bool },
}

impl Driver {
    /// Looks at the lanes of the queue pair that gave this thread its last completion, if that has the queue that is polled.
    #[inline]
    pub(super) fn look_at_own(&'static self, into: Option<&mut dyn Caller>) -> Look {
        let unknown = Look::All { is_due: false, has_found: false };
        OWN.try_with(|own| {
            let Some(into) = into else { return unknown };
            let polls = own.polls.get().wrapping_add(1);
            own.polls.set(polls);
            let is_due = polls.is_multiple_of(CLOCK_EVERY);
            let all = |is_due| Look::All { is_due, has_found: own.found.take() };
            let Some(cell) = own.cell.take() else { return unknown };
            let is_polled =
                |side| cell.cq(side).is_some_and(|cq| into.polls(Arc::as_ptr(cq).cast()));
            if is_due || !(is_polled(Side::Send) || is_polled(Side::Recv)) {
                own.cell.set(Some(cell));
                return all(is_due);
            }
            let served = self.serve(&cell, None, Some(into));
            own.cell.set(Some(cell));
            if served.has_more {
                return all(false);
            }
            if served.found.is_none() {
                return Look::Nothing;
            }
            own.found.set(true);
            Look::Something
        })
        .unwrap_or(unknown)
    }

    /// The next polls of this thread look at the lanes of a queue pair first, or of none.
    #[inline]
    pub(super) fn note_own(cell: Option<&Arc<QpCell>>) {
        // A thread that ends has none any more.
        let _ = OWN.try_with(|own| {
            let last = own.cell.take();
            let is_same = match (&last, cell) {
                (Some(last), Some(cell)) => Arc::ptr_eq(last, cell),
                (last, cell) => last.is_none() && cell.is_none(),
            };
            own.cell.set(if is_same { last } else { cell.cloned() });
        });
    }
}
