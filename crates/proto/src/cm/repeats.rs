//! Early repetitions: within the wait that the program asked for, on top of the repetitions that it asked for.
//!
//! That wait (the kernel's is 4.3 s) allows for the slowest peer, and a lost datagram would cost all of it. So a
//! message is also repeated after 1/64, 1/16 and 1/4 of the wait. A peer whose program is slow answers the first of
//! these with an MRA. Where answers usually take long, because both sides are busy, the first repetitions are left out.

use std::time::Duration;

use crate::time::Time;

/// The repetitions lie at these fractions of a message's first wait.
const PARTS: [u32; 3] = [64, 16, 4];

/// Decides how soon messages are repeated.
#[derive(Debug)]
pub(super) struct Repeats {
    on: bool,
    /// The smoothed time that answers take.
    answers_take: Duration,
}

/// A message that waits for its answer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Attempt {
    /// When it left first.
    since: Option<Time>,
    /// Time to wait for an answer to the last message sent.
    interval: Duration,
    /// Early repetitions that were made or left out.
    done: u8,
    /// It waits to be sent, so it cannot have been answered.
    is_queued: bool,
    is_answered: bool,
}

impl Repeats {
    pub(super) fn new(on: bool) -> Self {
        Self { on, answers_take: Duration::ZERO }
    }

    /// Begins with a message that is sent for the first time. Without `is_queued` it is lost already.
    pub(super) fn begin(&self, timeout: Duration, is_queued: bool) -> Attempt {
        let is_soon = |part: &&u32| !self.on || 4 * self.answers_take >= timeout / **part;
        let done = PARTS.iter().take_while(is_soon).count() as u8;
        let interval = until(done, timeout);
        Attempt { since: None, interval, done, is_queued, is_answered: false }
    }

    /// Something came that answers the message, even if only to say that the answer takes time.
    pub(super) fn answered(&mut self, attempt: &mut Attempt, now: Time) {
        if let Some(since) = attempt.since
            && !std::mem::replace(&mut attempt.is_answered, true)
        {
            self.answers_take = (self.answers_take * 7 + now.since(since)) / 8;
        }
    }
}

/// The time from the first sending to the repetition after `done` others.
fn until(done: u8, timeout: Duration) -> Duration {
    PARTS.get(usize::from(done)).map_or(timeout, |part| timeout / *part)
}

impl Attempt {
    /// When to look for an answer, at the latest.
    pub(super) fn deadline(&self, now: Time) -> Time {
        now + self.interval
    }

    /// Tells whether it is time for a quick repetition. The answer is not there yet.
    pub(super) fn repeat(&mut self, timeout: Duration) -> bool {
        if self.is_answered || usize::from(self.done) >= PARTS.len() {
            return false;
        }
        self.interval = until(self.done + 1, timeout) - until(self.done, timeout);
        self.done += 1;
        true
    }

    /// The message is sent again, and the whole wait begins anew.
    pub(super) fn retry(&mut self, timeout: Duration) {
        self.interval = timeout;
    }

    /// The message is queued. Without `is_queued` it is lost already.
    pub(super) fn queue(&mut self, is_queued: bool) {
        self.is_queued = is_queued;
    }

    /// Whether it waits to be sent.
    pub(super) fn is_queued(&self) -> bool {
        self.is_queued
    }

    /// Whether it was sent at least once.
    pub(super) fn has_left(&self) -> bool {
        self.since.is_some()
    }

    /// The message leaves. Returns when to look for an answer, if it waited for its departure.
    pub(super) fn leave(&mut self, now: Time) -> Option<Time> {
        self.since.get_or_insert(now);
        std::mem::take(&mut self.is_queued).then(|| self.deadline(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: Duration = Duration::from_millis(640);

    /// Times of all repetitions, and of the end of the first wait.
    fn times(repeats: &Repeats) -> Vec<u64> {
        let start = Time::default() + Duration::from_secs(5);
        let mut attempt = repeats.begin(WAIT, true);
        let mut times = Vec::new();
        let mut now = start;
        loop {
            now = attempt.leave(now).unwrap();
            times.push(now.since(start).as_millis() as u64);
            if !attempt.repeat(WAIT) {
                return times;
            }
            attempt.queue(true);
        }
    }

    fn after(answers: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let mut repeats = Repeats::new(true);
        for ms in answers {
            let mut attempt = repeats.begin(WAIT, true);
            attempt.leave(Time::default());
            repeats.answered(&mut attempt, Time::default() + Duration::from_millis(ms));
            // Said twice.
            repeats.answered(&mut attempt, Time::default() + Duration::from_secs(1000));
        }
        times(&repeats)
    }

    #[test]
    fn repetitions_lie_in_the_first_wait() {
        assert_eq!(times(&Repeats::new(true)), [10, 40, 160, 640]);
        assert_eq!(times(&Repeats::new(false)), [640]);
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
    fn a_queued_message_waits_for_no_answer() {
        let mut attempt = Repeats::new(true).begin(WAIT, true);
        assert!(attempt.is_queued() && !attempt.has_left());
        let later = Time::default() + Duration::from_secs(3);
        assert_eq!(attempt.leave(later), Some(later + WAIT / 64));
        assert!(!attempt.is_queued() && attempt.has_left());
        assert_eq!(attempt.leave(later), None, "sent to a peer that asked");
    }

    #[test]
    fn an_answered_message_is_not_repeated_early() {
        let mut repeats = Repeats::new(true);
        let mut attempt = repeats.begin(WAIT, true);
        attempt.leave(Time::default());
        repeats.answered(&mut attempt, Time::default());
        assert!(!attempt.repeat(WAIT));
    }
}
