//! The times that a queue pair can wait for.

use std::time::Duration;

use crate::time::Time;

/// A timer of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Timer {
    /// The receiver was not ready: requests wait until it may be (IBA 9.7.5.2.8).
    RnrWait,
    /// The probe timeout (RFC 8985, 9002): a silent peer is asked again, which uses up no retry.
    Probe,
    /// The ACK timeout (IBA 9.7.6.1.3).
    Ack,
    /// The pause between two bursts of READ responses.
    Responses,
    /// Sends are held back: by a rate limit, or for a moment, since much was copied without a message.
    Rate,
}

impl Timer {
    /// All timers. Those that are due at the same moment run in this order.
    pub(super) const ALL: [Self; 5] =
        [Self::RnrWait, Self::Probe, Self::Ack, Self::Responses, Self::Rate];
}

/// A timer that does not run.
const STOPPED: Time = Time::from_nanos(u64::MAX);

/// The deadlines of a queue pair.
#[derive(Debug)]
pub(super) struct Timers {
    deadlines: [Time; Timer::ALL.len()],
    started: [Time; Timer::ALL.len()],
}

/// A timer that has run out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Expired {
    /// When it was started.
    pub(super) since: Time,
    /// Its length.
    pub(super) length: Duration,
}

impl Default for Timers {
    fn default() -> Self {
        let started = [Time::default(); Timer::ALL.len()];
        Self { deadlines: [STOPPED; Timer::ALL.len()], started }
    }
}

impl Timers {
    /// Starts a timer, or starts it anew.
    #[inline]
    pub(super) fn start(&mut self, timer: Timer, now: Time, length: Duration) {
        self.deadlines[timer as usize] = now + length;
        self.started[timer as usize] = now;
    }

    #[inline]
    pub(super) fn stop(&mut self, timer: Timer) {
        self.deadlines[timer as usize] = STOPPED;
    }

    #[inline]
    pub(super) fn is_running(&self, timer: Timer) -> bool {
        self.deadlines[timer as usize] != STOPPED
    }

    /// When a timer that runs was started.
    pub(super) fn started(&self, timer: Timer) -> Option<Time> {
        self.is_running(timer).then(|| self.started[timer as usize])
    }

    /// Tells whether a timer has run out.
    pub(super) fn is_due(&self, timer: Timer, now: Time) -> bool {
        self.is_running(timer) && self.deadlines[timer as usize] <= now
    }

    /// Stops a timer that has run out.
    #[inline]
    pub(super) fn expire(&mut self, timer: Timer, now: Time) -> Option<Expired> {
        if !self.is_due(timer, now) {
            return None;
        }
        let since = self.started[timer as usize];
        let length = self.deadlines[timer as usize].since(since);
        self.stop(timer);
        Some(Expired { since, length })
    }

    /// The earliest deadline.
    #[inline]
    pub(super) fn next(&self) -> Option<Time> {
        let next = self.deadlines.iter().fold(STOPPED, |next, at| next.min(*at));
        (next != STOPPED).then_some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn at(ms: u32) -> Time {
        Time::default() + MS * ms
    }

    #[test]
    fn the_earliest_is_next_and_runs_out_once() {
        let mut timers = Timers::default();
        assert_eq!(timers.next(), None);
        timers.start(Timer::Ack, at(1), 16 * MS);
        timers.start(Timer::Probe, at(2), 8 * MS);
        assert_eq!(timers.next(), Some(at(10)));
        assert_eq!(timers.expire(Timer::Probe, at(9)), None);
        let expired = Expired { since: at(2), length: 8 * MS };
        assert_eq!(timers.expire(Timer::Probe, at(11)), Some(expired));
        assert_eq!(timers.expire(Timer::Probe, at(11)), None);
        assert_eq!(timers.next(), Some(at(17)));
        timers.stop(Timer::Ack);
        assert_eq!(timers.next(), None);
    }

    #[test]
    fn a_stopped_timer_never_runs_out() {
        let timers = Timers::default();
        for (n, timer) in Timer::ALL.into_iter().enumerate() {
            assert_eq!(timer as usize, n);
            assert!(!timers.is_due(timer, STOPPED));
        }
    }
}
