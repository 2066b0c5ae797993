//! Completion queues whose channel is told later: when the period of their moderation is over (`ibv_modify_cq`).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use anyverbs_proto::time::Time;
use parking_lot::Mutex;

use super::Engine;
use super::timers::NEVER;
use crate::cq::CqCell;

/// The queues that wait, in no order: they are few, and for a short time.
#[derive(Debug)]
pub(super) struct Moderated {
    waiting: Mutex<Vec<(Time, Weak<CqCell>)>>,
    /// The earliest of them.
    next: AtomicU64,
}

impl Moderated {
    pub(super) fn new() -> Self {
        Self { waiting: Mutex::new(Vec::new()), next: AtomicU64::new(NEVER) }
    }

    /// The earliest deadline in nanoseconds, or [`NEVER`].
    pub(super) fn next(&self) -> u64 {
        self.next.load(Ordering::SeqCst)
    }

    fn add(&self, at: Time, cq: Weak<CqCell>) {
        self.waiting.lock().push((at, cq));
        self.next.fetch_min(at.as_nanos(), Ordering::SeqCst);
    }

    /// Takes one that is due.
    fn pop(&self, now: Time) -> Option<Weak<CqCell>> {
        let mut waiting = self.waiting.lock();
        let due = waiting.iter().position(|(at, _)| *at <= now);
        let cq = due.map(|i| waiting.swap_remove(i).1);
        let next = waiting.iter().map(|(at, _)| at.as_nanos()).min();
        self.next.store(next.unwrap_or(NEVER), Ordering::SeqCst);
        cq
    }
}

impl Engine {
    /// Has [`CqCell::period_over`] called at this time.
    pub(crate) fn tell_later(&self, at: Time, cq: &Arc<CqCell>) {
        self.moderated.add(at, Arc::downgrade(cq));
        self.worker.look_before(at.as_nanos());
    }

    pub(super) fn tell_moderated(&self, now: Time) {
        while self.moderated.next() <= now.as_nanos()
            && let Some(cq) = self.moderated.pop(now)
        {
            if let Some(cq) = cq.upgrade() {
                cq.period_over(now);
            }
        }
    }
}
