//! The line behind a port that a rule makes slow. The queue pairs for which the rule holds there share it, and its queue.

use std::sync::atomic::{AtomicU64, Ordering};

use anyverbs_faults::Limit;
use anyverbs_proto::time::Time;

/// A slow line.
#[derive(Debug, Default)]
pub struct Line {
    /// When it is done with the packets before, in nanoseconds.
    busy_until: AtomicU64,
    /// Packets that wait for it, of all queue pairs.
    waiting: AtomicU64,
}

/// A packet's place in the queue of a line. It is free again when this is dropped.
#[derive(Debug)]
pub struct InLine(&'static Line);

impl Line {
    /// How many packets wait. Queue pairs that ask at the same moment may both get the last place.
    pub fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// A packet of so many bytes waits from now on: when it has left.
    pub fn takes(&'static self, limit: Limit, bytes: usize, now: Time) -> (Time, InLine) {
        let takes = limit.time(bytes);
        let after = |until: u64| Time::from_nanos(until.max(now.as_nanos())) + takes;
        let next = |until| Some(after(until).as_nanos());
        let before = self.busy_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        (before.map_or(now, after), InLine(self))
    }
}

impl Drop for InLine {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_leave_one_behind_the_other_and_give_their_places_back() {
        let line: &'static Line = Box::leak(Box::default());
        let limit = Limit { rate: 8_000_000, queue: None };
        let at = |us: u64| Time::from_nanos(us * 1000);
        // A byte takes 1 us.
        let (first, one) = line.takes(limit, 100, at(1000));
        let (second, two) = line.takes(limit, 50, at(1010));
        assert_eq!((first, second, line.waiting()), (at(1100), at(1150), 2));
        drop(one);
        assert_eq!(line.waiting(), 1);
        drop(two);
        let (third, _three) = line.takes(limit, 1, at(2000));
        assert_eq!((third, line.waiting()), (at(2001), 1));
    }
}
