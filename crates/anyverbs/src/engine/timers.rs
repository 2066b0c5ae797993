//! When which queue pair wants to be woken.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicU64, Ordering};

use anyverbs_proto::time::Time;
use anyverbs_proto::types::Qpn;
use parking_lot::Mutex;

/// "Never", in nanoseconds.
pub(crate) const NEVER: u64 = u64::MAX;

/// Deadlines, earliest first. A queue pair enters one only when it is earlier than the one it has here; one that moved
/// later since is found out when it fires.
#[derive(Debug)]
pub(crate) struct Timers {
    heap: Mutex<BinaryHeap<Reverse<(Time, Qpn)>>>,
    /// The earliest deadline.
    next: AtomicU64,
}

impl Timers {
    pub(crate) fn new() -> Self {
        Self { heap: Mutex::new(BinaryHeap::with_capacity(256)), next: AtomicU64::new(NEVER) }
    }

    /// The earliest deadline in nanoseconds, or [`NEVER`].
    pub(crate) fn next(&self) -> u64 {
        self.next.load(Ordering::SeqCst)
    }

    pub(crate) fn push(&self, at: Time, qpn: Qpn) {
        let mut heap = self.heap.lock();
        heap.push(Reverse((at, qpn)));
        self.publish(&heap);
    }

    /// Takes one that is due.
    pub(crate) fn pop(&self, now: Time) -> Option<(Time, Qpn)> {
        if self.next() > now.as_nanos() {
            return None;
        }
        let mut heap = self.heap.lock();
        let due = heap.peek().is_some_and(|Reverse((at, _))| *at <= now);
        let entry = if due { heap.pop() } else { None };
        self.publish(&heap);
        entry.map(|Reverse(entry)| entry)
    }

    fn publish(&self, heap: &BinaryHeap<Reverse<(Time, Qpn)>>) {
        self.next
            .store(heap.peek().map_or(NEVER, |Reverse((at, _))| at.as_nanos()), Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fire_in_order_when_due() {
        let timers = Timers::new();
        let at = Time::from_nanos;
        assert_eq!(timers.next(), NEVER);
        for (ns, qpn) in [(30, 3), (10, 1), (20, 2)] {
            timers.push(at(ns), Qpn::new(qpn));
        }
        assert_eq!(timers.next(), 10);
        assert_eq!(timers.pop(at(9)), None);
        assert_eq!(timers.pop(at(20)), Some((at(10), Qpn::new(1))));
        assert_eq!(timers.pop(at(20)), Some((at(20), Qpn::new(2))));
        assert_eq!(timers.pop(at(20)), None);
        assert_eq!(timers.next(), 30);
    }
}
