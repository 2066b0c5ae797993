//! The short way of a poll: the lanes of the queue pair by which this thread's last completion came.
//!
//! It takes that queue pair's lock and no other. So threads that poll queues of their own do not meet, but once in
//! [`CLOCK_EVERY`] polls. A message that comes by another way after one by a lane waits for that poll at most.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use anyverbs_objects::base::Caller;
use anyverbs_proto::env::Side;

use super::Driver;
use super::lanes::Served;
use crate::qp::QpCell;

/// A thread looks at everything, at the clock and for forwarded datagrams once in this many polls. Reading the clock costs a
/// tenth of an empty poll.
const CLOCK_EVERY: u32 = 16;
/// Counts of looks. Threads share them when there are more.
const COUNTS: usize = 32;

/// Counts the looks of polls at everything, of all threads. The worker stays away while it moves. A thread that polls so rarely
/// that it does not look at everything within the worker's time off is helped by the worker.
#[derive(Debug, Default)]
pub(super) struct PollLooks([Count; COUNTS]);

/// In a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Count(AtomicU64);

impl PollLooks {
    /// Counts a look of this thread. One that two threads make at once may be lost.
    #[inline]
    pub(super) fn note(&self) {
        let count = OWN.try_with(|own| own.number % COUNTS).unwrap_or_default();
        let Count(count) = &self.0[count];
        count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    }

    /// The looks of all threads.
    pub(super) fn sum(&self) -> u64 {
        let counts = self.0.iter().map(|Count(count)| count.load(Ordering::SeqCst));
        counts.fold(0, u64::wrapping_add)
    }
}

/// The short way of a thread.
struct Own {
    /// Tells it from others.
    number: usize,
    /// The queue pair by whose lane the last completion for the thread came.
    cell: Cell<Option<Arc<QpCell>>>,
    /// The thread's polls that found no completion in their queue.
    polls: Cell<u32>,
    /// Something came by the lane since everything was looked at.
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

/// The finding of a look at the thread's own lanes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum OwnLook {
    /// Something that was executed.
    Something,
    /// Nothing, and nothing else is to be looked at.
    Nothing,
    /// Everything is to be looked at.
    LookAtAll {
        /// At the clock and for forwarded datagrams, too.
        is_due: bool,
        /// Something came by the lane since the last time.
        has_found: bool,
    },
}

/// Whether completions of a queue pair go to a queue that is polled.
pub(super) fn completes_for(cell: &QpCell, into: &dyn Caller) -> bool {
    let polled = into.queue();
    let is_polled = |side| cell.cq(side).is_some_and(|cq| Arc::as_ptr(cq).cast() == polled);
    is_polled(Side::Send) || is_polled(Side::Recv)
}

impl Driver {
    /// Looks at the lanes of the queue pair by which this thread's last completion came, if that has the queue that is polled.
    #[inline]
    pub(super) fn look_at_own(&'static self, into: Option<&mut dyn Caller>) -> OwnLook {
        let look = OWN.try_with(|own| {
            let polls = own.polls.get().wrapping_add(1);
            own.polls.set(polls);
            let is_due = polls.is_multiple_of(CLOCK_EVERY);
            let all = || OwnLook::LookAtAll { is_due, has_found: own.found.take() };
            let Some(into) = into.filter(|_| !is_due) else { return all() };
            let Some(cell) = own.cell.take() else { return all() };
            let is_polled = completes_for(&cell, into);
            let served =
                is_polled.then(|| self.serve(&cell, self.core.memory.guard(), None, Some(into)));
            let is_over = served.as_ref().is_some_and(|served| served.is_over);
            own.cell.set((!is_over).then_some(cell));
            match served {
                None | Some(Served { has_more: true, .. }) => all(),
                Some(Served { found: None, .. }) => OwnLook::Nothing,
                Some(_) => {
                    own.found.set(true);
                    OwnLook::Something
                }
            }
        });
        // A thread that ends counts no more.
        look.unwrap_or(OwnLook::LookAtAll { is_due: true, has_found: false })
    }

    /// A completion for this thread came by a lane of this queue pair, or (`None`) something came by another way. Its next
    /// polls look there first.
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
