//! Objects that have something to do at a time: completion queues whose notification comes when the period of their moderation is
//! over (`ibv_modify_cq`), and raw queue pairs whose frames wait for a rate limit.

use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};

use anyverbs_locks::{Mutex, rank};
use anyverbs_objects::base::NEVER;
use anyverbs_objects::base::Timed;
use anyverbs_proto::time::Time;

use super::Driver;

/// An object, and until when it waits.
type Scheduled = (Time, Weak<dyn Timed>);

/// The objects that wait, in no order, each of them once: they are few, and for a short time.
#[derive(Debug)]
pub(super) struct Moderated {
    waiting: Mutex<rank::ModeratedQueues, Vec<Scheduled>>,
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

    /// Enters a queue, or moves its entry to an earlier time.
    pub(super) fn add(&self, at: Time, cq: Weak<dyn Timed>) {
        let mut waiting = self.waiting.lock();
        match waiting.iter_mut().find(|(_, waits)| waits.ptr_eq(&cq)) {
            Some((earliest, _)) => *earliest = at.min(*earliest),
            None => waiting.push((at, cq)),
        }
        self.next.fetch_min(at.as_nanos(), Ordering::SeqCst);
    }

    /// Takes one that is due.
    fn pop(&self, now: Time) -> Option<Weak<dyn Timed>> {
        let mut waiting = self.waiting.lock();
        let due = waiting.iter().position(|(at, _)| *at <= now);
        let cq = due.map(|i| waiting.swap_remove(i).1);
        let next = waiting.iter().map(|(at, _)| at.as_nanos()).min();
        self.next.store(next.unwrap_or(NEVER), Ordering::SeqCst);
        cq
    }
}

impl Driver {
    pub(super) fn tell_moderated(&self, now: Time) {
        while self.moderated.next() <= now.as_nanos()
            && let Some(cq) = self.moderated.pop(now)
        {
            if let Some(cq) = cq.upgrade() {
                cq.on_time(now);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    struct Queue;
    impl Timed for Queue {
        fn on_time(self: Arc<Self>, _: Time) {}
    }

    #[test]
    fn a_queue_waits_once_for_the_earliest_time() {
        let at = Time::from_nanos;
        let moderated = Moderated::new();
        let queues: [Arc<dyn Timed>; 2] = [Arc::new(Queue), Arc::new(Queue)];
        // An Arc of an empty type has an address of its own.
        let [one, other] = &queues;
        for time in (50..1000).chain(10..20) {
            moderated.add(at(time), Arc::downgrade(one));
        }
        moderated.add(at(30), Arc::downgrade(other));
        assert_eq!(moderated.waiting.lock().len(), 2);
        assert_eq!(moderated.next(), 10);
        let pop = |now| {
            let popped = moderated.pop(at(now)).and_then(|cq| cq.upgrade())?;
            queues.iter().position(|queue| Arc::ptr_eq(queue, &popped))
        };
        assert_eq!([pop(9), pop(10), pop(29), pop(30)], [None, Some(0), None, Some(1)]);
        assert_eq!(moderated.next(), NEVER);
    }
}
