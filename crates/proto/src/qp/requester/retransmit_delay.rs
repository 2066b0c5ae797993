//! The shortest time for which a silent peer is left alone. It is learnt from spurious retransmissions.
//!
//! If a repeated request was only slow, the peer gives one answer more than there were repeats. The answers come as far
//! apart as the requests went out. Both together show a spurious retransmission (as in RFC 3522). From then on the peer
//! gets at least the time that the first answer took. If a request or an answer was lost, one answer is missing. The
//! answers to one repeat of several packets come close together, which proves nothing. No clock is read for answers
//! that come in time.

use std::time::Duration;

use crate::time::Time;
use crate::types::Psn;

/// Longest delay that a single spurious retransmission can prove. A peer that was stopped for a while has not become a
/// slow one.
const LONGEST_AT_ONCE: Duration = Duration::from_millis(100);

/// Longer is left to the ACK timeout.
const LONGEST: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct RetransmitDelay {
    /// The packets that were sent again without a sign of a loss.
    again: Option<Again>,
    ambiguous: Option<Ambiguous>,
    /// The end of the packets in flight when `least` last became shorter.
    round: Psn,
    /// The delay that the last spurious repeat proved.
    last: Duration,
    least: Duration,
}

#[derive(Debug)]
struct Again {
    first: Psn,
    /// The PSN behind it.
    end: Psn,
    /// When the peer's silence began, and how long it was before the first repeat.
    since: Time,
    after: Duration,
    repeats: u32,
}

/// The first of the repeated packets is answered, but the answer may be to either sending. Kept until more than those
/// packets is answered.
#[derive(Debug)]
struct Ambiguous {
    /// Time that the answer took.
    took: Duration,
    /// When it came.
    at: Time,
    end: Psn,
    /// The time between the answers to the first request and to its repeat, if both come.
    after: Duration,
    /// Answers that are missing until there are more than repeats.
    missing: u32,
}

impl RetransmitDelay {
    /// Notes that the peer is asked again for `first` and all behind it up to `end`, after a silence of `after` since
    /// `since`. Tells whether that is the first time.
    pub(super) fn asked_again(
        &mut self,
        first: Psn,
        end: Psn,
        since: Time,
        after: Duration,
    ) -> bool {
        if let Some(again) = &mut self.again {
            again.repeats += 1;
            return false;
        }
        self.again = Some(Again { first, end, since, after, repeats: 1 });
        self.ambiguous = None;
        true
    }

    /// Whether the peer was asked again and has not answered.
    pub(super) fn has_asked(&self) -> bool {
        self.again.is_some()
    }

    /// Notes that the peer answered something new, up to `una`, of the packets up to `end`. Tells whether no repeat can
    /// turn out to be spurious any more.
    pub(super) fn progressed(&mut self, una: Psn, end: Psn, now: impl FnOnce() -> Time) -> bool {
        match &self.again {
            Some(again) if una.since(again.first) > 0 => {
                let at = now();
                let &Again { end, since, after, repeats, .. } = again;
                self.ambiguous =
                    Some(Ambiguous { took: at.since(since), at, end, after, missing: repeats });
                self.again = None;
            }
            Some(_) => {}
            None => {
                // A path may become short again: once for each round trip.
                if una.since(self.round) > 0 {
                    self.round = end;
                    self.least -= self.least / 64;
                }
                self.ambiguous.take_if(|ambiguous| una.since(ambiguous.end) > 0);
            }
        }
        self.again.is_none() && self.ambiguous.is_none()
    }

    /// Notes a repeated answer. Tells whether it shows that the peer was asked again too early.
    pub(super) fn answered_twice(&mut self, now: impl FnOnce() -> Time) -> bool {
        let Some(ambiguous) = &mut self.ambiguous else { return false };
        let now = now();
        if now.since(ambiguous.at) < ambiguous.after / 2 {
            // Another answer to the same sending.
            return false;
        }
        ambiguous.missing -= 1;
        if ambiguous.missing > 0 {
            ambiguous.at = now;
            return false;
        }
        let Ambiguous { took, end, .. } = *ambiguous;
        self.ambiguous = None;
        self.round = end;
        let proven = took + took / 2;
        let longest = self.last.clamp(LONGEST_AT_ONCE, LONGEST);
        self.last = proven;
        self.least = self.least.max(proven.min(longest));
        true
    }

    /// The time for which silence means nothing.
    pub(super) fn least(&self) -> Duration {
        self.least
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn at(ms: u32) -> Time {
        Time::default() + MS * ms
    }

    fn psn(n: u32) -> Psn {
        Psn::new(n)
    }

    fn never() -> Time {
        panic!("no clock is needed")
    }

    /// Sent at 1 ms, again at 2 ms, and answered at these times.
    fn repeated_once(delay: &mut RetransmitDelay, answers: [u32; 2]) -> bool {
        delay.asked_again(psn(1), psn(3), at(1), MS);
        delay.progressed(psn(3), psn(3), || at(answers[0]));
        delay.answered_twice(|| at(answers[1]))
    }

    #[test]
    fn a_second_answer_makes_it_longer() {
        let mut delay = RetransmitDelay::default();
        delay.progressed(psn(0), psn(0), never);
        assert!(!delay.answered_twice(never), "a duplicate of the network's");
        delay.asked_again(psn(0xff_ffff), psn(1), at(1), MS);
        delay.progressed(psn(0xff_ffff), psn(1), never);
        delay.progressed(psn(0), psn(1), || at(11));
        assert_eq!(delay.least(), Duration::ZERO, "the packet may have been lost");
        assert!(delay.answered_twice(|| at(12)));
        assert_eq!(delay.least(), 15 * MS);
        assert!(!delay.answered_twice(never));
        assert_eq!(delay.least(), 15 * MS);
    }

    #[test]
    fn where_something_was_lost_it_stays() {
        let mut delay = RetransmitDelay::default();
        // The repeat was several packets, each with an answer.
        assert!(!repeated_once(&mut delay, [11, 11]));
        // The first one was lost, both repeats were answered.
        delay.asked_again(psn(1), psn(3), at(1), MS);
        delay.asked_again(psn(1), psn(3), at(2), 2 * MS);
        delay.progressed(psn(3), psn(3), || at(3));
        assert!(!delay.answered_twice(|| at(5)));
        assert_eq!(delay.least(), Duration::ZERO);
        // All three were.
        assert!(delay.answered_twice(|| at(7)));
        assert_eq!(delay.least(), 3 * MS);
    }

    #[test]
    fn answers_in_time_make_it_shorter() {
        // Whatever the numbers of an earlier connection were.
        let mut delay = RetransmitDelay { round: psn(1 << 23 | 100), ..Default::default() };
        delay.asked_again(psn(1), psn(3), at(1), MS);
        delay.progressed(psn(2), psn(3), || at(61));
        delay.progressed(psn(3), psn(3), never);
        assert!(delay.answered_twice(|| at(62)));
        assert_eq!(delay.least(), 90 * MS);
        let long = delay.least();
        for n in 4..=13 {
            delay.progressed(psn(n), psn(14), never);
        }
        assert!(delay.least() > long * 19 / 20, "one round, not ten answers");
        for n in 14..14 + 64 * 5 {
            delay.progressed(psn(n), psn(n), never);
        }
        assert!(delay.least() < 2 * MS, "{:?}", delay.least());
    }

    #[test]
    fn a_late_duplicate_says_nothing() {
        let mut delay = RetransmitDelay::default();
        delay.asked_again(psn(1), psn(3), at(1), MS);
        delay.progressed(psn(3), psn(3), || at(11));
        delay.progressed(psn(4), psn(4), never);
        assert!(!delay.answered_twice(never));
        assert_eq!(delay.least(), Duration::ZERO);
    }

    #[test]
    fn a_peer_that_was_stopped_is_not_a_slow_one() {
        let mut delay = RetransmitDelay::default();
        assert!(repeated_once(&mut delay, [2000, 2001]));
        assert_eq!(delay.least(), LONGEST_AT_ONCE);
        // Twice in a row it is.
        delay.asked_again(psn(3), psn(4), at(3000), MS);
        delay.progressed(psn(4), psn(4), || at(3200));
        assert!(delay.answered_twice(|| at(3201)));
        assert_eq!(delay.least(), 300 * MS);
    }
}
