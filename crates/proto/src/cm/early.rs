//! Early repetitions: within the wait that the program asked for, on top of the repetitions that it asked for.
//!
//! That wait (the kernel's is 4.3 s) allows for the slowest peer, and a datagram that is lost would cost all of it. So a
//! message is repeated after 1/64, 1/16 and 1/4 of the wait too. A peer whose program is slow answers the first of these
//! with an MRA; and where answers take long as a rule, because both sides are busy, the first are left out.

use std::time::Duration;

use crate::time::Time;

/// Of a message: where in its first wait the repetitions lie.
const PARTS: [u32; 3] = [64, 16, 4];

/// How soon messages are repeated.
#[derive(Debug)]
pub(super) struct Early {
    on: bool,
    /// How long answers take, smoothed.
    answers_take: Duration,
}

/// A message that waits for its answer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Attempt {
    since: Time,
    /// Early repetitions that were made or left out.
    done: u8,
    /// It was answered.
    is_answered: bool,
}

impl Early {
    pub(super) fn new(on: bool) -> Self {
        Self { on, answers_take: Duration::ZERO }
    }

    /// A message is sent for the first time; when to look for its answer.
    pub(super) fn begin(&self, now: Time, timeout: Duration) -> (Attempt, Time) {
        let is_soon = |part: &&u32| !self.on || 4 * self.answers_take >= timeout / **part;
        let left_out = PARTS.iter().take_while(is_soon).count();
        let attempt = Attempt { since: now, done: left_out as u8, is_answered: false };
        (attempt, now + attempt.wait(timeout))
    }

    /// A message is sent to which there is no answer: as [`begin`](Self::begin), if it is repeated early at all.
    pub(super) fn begin_unanswered(&self, now: Time, timeout: Duration) -> Option<(Attempt, Time)> {
        let (mut attempt, _) = self.begin(now, timeout);
        attempt.done = attempt.done.min(PARTS.len() as u8 - 1);
        self.on.then(|| (attempt, now + attempt.wait(timeout)))
    }

    /// The answer is not there. If it is time for an early repetition, when to look again.
    pub(super) fn repeat(attempt: &mut Attempt, timeout: Duration) -> Option<Time> {
        if attempt.is_answered || usize::from(attempt.done) >= PARTS.len() {
            return None;
        }
        attempt.done += 1;
        Some(attempt.since + attempt.wait(timeout))
    }

    /// Something came that answers the message, be it that the answer takes time.
    pub(super) fn answered(&mut self, attempt: &mut Attempt, now: Time) {
        if !std::mem::replace(&mut attempt.is_answered, true) {
            let took = now.since(attempt.since);
            self.answers_take = (self.answers_take * 7 + took) / 8;
        }
    }
}

impl Attempt {
    /// From the beginning to the next repetition.
    fn wait(&self, timeout: Duration) -> Duration {
        PARTS.get(usize::from(self.done)).map_or(timeout, |part| timeout / *part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: Duration = Duration::from_millis(640);

    /// Times of all repetitions, and of the end of the first wait.
    fn times(early: &Early) -> Vec<u64> {
        let start = Time::default() + Duration::from_secs(5);
        let (mut attempt, mut at) = early.begin(start, WAIT);
        let mut times = vec![at];
        while let Some(next) = Early::repeat(&mut attempt, WAIT) {
            at = next;
            times.push(at);
        }
        times.into_iter().map(|at| at.since(start).as_millis() as u64).collect()
    }

    fn after(answers: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let mut early = Early::new(true);
        for ms in answers {
            let mut attempt = Attempt::default();
            early.answered(&mut attempt, Time::default() + Duration::from_millis(ms));
            // Said twice.
            early.answered(&mut attempt, Time::default() + Duration::from_secs(1000));
        }
        times(&early)
    }

    #[test]
    fn repetitions_lie_in_the_first_wait() {
        assert_eq!(times(&Early::new(true)), [10, 40, 160, 640]);
        assert_eq!(times(&Early::new(false)), [640]);
    }

    #[test]
    fn where_answers_take_long_they_come_later() {
        assert_eq!(after([1; 100]), [10, 40, 160, 640]);
        assert_eq!(after([5; 100]), [40, 160, 640]);
        assert_eq!(after([25; 100]), [160, 640]);
        assert_eq!(after([100; 100]), [640]);
        assert_eq!(after([15]), [10, 40, 160, 640], "one answer says little");
        assert_eq!(after([100; 100].into_iter().chain([0; 100])), [10, 40, 160, 640]);
    }

    #[test]
    fn what_is_not_answered_is_repeated_at_least_once() {
        let mut early = Early::new(true);
        early.answers_take = WAIT;
        let (mut attempt, next) = early.begin_unanswered(Time::default(), WAIT).unwrap();
        assert_eq!(next, Time::default() + WAIT / 4);
        assert!(Early::repeat(&mut attempt, WAIT).is_some());
        assert!(Early::repeat(&mut attempt, WAIT).is_none());
        assert!(Early::new(false).begin_unanswered(Time::default(), WAIT).is_none());
    }

    #[test]
    fn what_was_answered_is_not_repeated_early() {
        let mut early = Early::new(true);
        let (mut attempt, _) = early.begin(Time::default(), WAIT);
        early.answered(&mut attempt, Time::default());
        assert_eq!(Early::repeat(&mut attempt, WAIT), None);
    }
}
