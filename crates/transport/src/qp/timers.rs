//! When which queue pair wants to be woken.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicU64, Ordering};

use anyverbs_locks::{Mutex, rank};
use anyverbs_objects::base::NEVER;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::Qpn;

/// Deadlines, earliest first. A queue pair enters one only when it is earlier than the one it has here; one that moved
/// later since is found out when it fires.
#[derive(Debug)]
pub struct Timers {
    heap: Mutex<rank::Timers, BinaryHeap<Reverse<(Time, Qpn)>>>,
    /// The earliest deadline.
    next: AtomicU64,
}

impl Default for Timers {
    fn default() -> Self {
        Self { heap: Mutex::new(BinaryHeap::with_capacity(256)), next: AtomicU64::new(NEVER) }
    }
}

impl Timers {
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

/// A queue pair's entries in the heap, latest first. A new one is entered only if it is earlier than all others. So a
/// deadline that moves to and fro (RNR waits between ACK timeouts) uses the existing entries.
#[derive(Debug, Default)]
pub(crate) struct Registered(Vec<Time>);

impl Registered {
    /// Entries kept in mind. Beyond, the latest are forgotten; they fire in vain.
    const MOST: usize = 4;

    /// Whether `at` has to be entered: nothing fires as early.
    pub(crate) fn add(&mut self, at: Time) -> bool {
        if self.0.last().is_some_and(|earliest| *earliest <= at) {
            return false;
        }
        if self.0.len() == Self::MOST {
            self.0.remove(0);
        }
        self.0.push(at);
        true
    }

    /// An entry has fired. False if it was forgotten.
    pub(crate) fn remove(&mut self, at: Time) -> bool {
        let found = self.0.iter().rposition(|t| *t == at);
        found.map(|i| self.0.remove(i)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_that_moves_to_and_fro_uses_its_entries() {
        let at = Time::from_nanos;
        let mut timers = Registered::default();
        assert!(timers.add(at(1000)));
        for round in 0..10 {
            // An RNR wait, then an ACK timeout that is later than the one entered.
            assert!(timers.add(at(10 + round)));
            assert!(timers.remove(at(10 + round)));
            assert!(!timers.add(at(1001 + round)));
        }
        assert!(timers.remove(at(1000)));
        assert!(timers.add(at(2000)));
        for early in (1..100).rev() {
            assert!(timers.add(at(early)));
        }
        assert!(timers.0.len() <= Registered::MOST);
        assert!(!timers.remove(at(2000)));
    }

    #[test]
    fn fire_in_order_when_due() {
        let timers = Timers::default();
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
