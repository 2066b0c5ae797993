//! How long a silent peer is left alone at least, learnt from what was sent again too early.
//!
//! A request that is repeated although the first one was only slow is answered twice. The second answer is the sign of it
//! (as in RFC 3522): from then on the peer gets at least the time that the first answer took. No clock is read for
//! answers that come in time.

use std::time::Duration;

use crate::time::Time;
use crate::types::Psn;

/// One that was stopped for a while has not become a slow one: once does not prove more.
const LONGEST_AT_ONCE: Duration = Duration::from_millis(100);

/// Longer is left to the ACK timeout.
const LONGEST: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct RetransmitDelay {
    /// What was sent again without a sign of a loss.
    again: Option<Again>,
    /// The first of it is answered, after this time: the answer to which of both? Until more than that is answered (its end).
    ambiguous: Option<(Duration, Psn)>,
    /// Behind what was in flight when `least` last became shorter.
    round: Psn,
    /// What the last needless repeat proved.
    last: Duration,
    least: Duration,
}

#[derive(Debug)]
struct Again {
    first: Psn,
    /// The PSN behind it.
    end: Psn,
    /// When the peer's silence began.
    since: Time,
}

impl RetransmitDelay {
    /// The peer is asked again for `first` and all behind it up to `end`, after silence since `since`. Whether that is the
    /// first time.
    pub(super) fn asked_again(&mut self, first: Psn, end: Psn, since: Time) -> bool {
        let first_time = self.again.is_none();
        if first_time {
            self.again = Some(Again { first, end, since });
            self.ambiguous = None;
        }
        first_time
    }

    /// The peer answered something new, up to `una`, of what was sent up to `end`. Whether no repeat can turn out to be
    /// needless any more.
    pub(super) fn progressed(&mut self, una: Psn, end: Psn, now: impl FnOnce() -> Time) -> bool {
        match &self.again {
            Some(again) if una.since(again.first) > 0 => {
                self.ambiguous = Some((now().since(again.since), again.end));
                self.again = None;
            }
            Some(_) => {}
            None => {
                // A path may become short again: once for each way there and back.
                if una.since(self.round) > 0 {
                    self.round = end;
                    self.least -= self.least / 64;
                }
                self.ambiguous = self.ambiguous.filter(|(_, end)| una.since(*end) <= 0);
            }
        }
        self.again.is_none() && self.ambiguous.is_none()
    }

    /// The peer answered what it had answered before. Whether that shows that it was asked again too early.
    pub(super) fn answered_twice(&mut self) -> bool {
        let Some((time, end)) = self.ambiguous.take() else { return false };
        self.round = end;
        let proven = time + time / 2;
        let longest = self.last.clamp(LONGEST_AT_ONCE, LONGEST);
        self.last = proven;
        self.least = self.least.max(proven.min(longest));
        true
    }

    /// For how long silence means nothing.
    pub(super) fn least(&self) -> Duration {
        self.least
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn at(time: Duration) -> Time {
        Time::default() + time
    }

    fn never() -> Time {
        panic!("no clock is needed")
    }

    #[test]
    fn a_second_answer_makes_it_longer() {
        let mut delay = RetransmitDelay::default();
        delay.progressed(Psn::new(0), Psn::new(0), never);
        delay.answered_twice();
        assert_eq!(delay.least(), Duration::ZERO, "a duplicate of the network's");
        delay.asked_again(Psn::new(0xff_ffff), Psn::new(1), at(MS));
        delay.asked_again(Psn::new(0xff_ffff), Psn::new(1), at(3 * MS));
        delay.progressed(Psn::new(0xff_ffff), Psn::new(0xff_ffff), never);
        delay.progressed(Psn::new(0), Psn::new(0), || at(11 * MS));
        assert_eq!(delay.least(), Duration::ZERO, "the packet may have been lost");
        delay.answered_twice();
        assert_eq!(delay.least(), 15 * MS);
        delay.answered_twice();
        assert_eq!(delay.least(), 15 * MS);
    }

    #[test]
    fn answers_in_time_make_it_shorter() {
        // Whatever the numbers of an earlier connection were.
        let mut delay = RetransmitDelay { round: Psn::new(1 << 23 | 100), ..Default::default() };
        delay.asked_again(Psn::new(1), Psn::new(3), at(MS));
        delay.progressed(Psn::new(2), Psn::new(2), || at(61 * MS));
        delay.progressed(Psn::new(3), Psn::new(3), never);
        delay.answered_twice();
        assert_eq!(delay.least(), 90 * MS);
        let long = delay.least();
        for n in 4..=13 {
            delay.progressed(Psn::new(n), Psn::new(14), never);
        }
        assert!(delay.least() > long * 19 / 20, "one round, not ten answers");
        for n in 14..14 + 64 * 5 {
            delay.progressed(Psn::new(n), Psn::new(n), never);
        }
        assert!(delay.least() < 2 * MS, "{:?}", delay.least());
    }

    #[test]
    fn a_late_duplicate_says_nothing() {
        let mut delay = RetransmitDelay::default();
        delay.asked_again(Psn::new(1), Psn::new(3), at(MS));
        delay.progressed(Psn::new(3), Psn::new(3), || at(11 * MS));
        delay.progressed(Psn::new(4), Psn::new(4), never);
        delay.answered_twice();
        assert_eq!(delay.least(), Duration::ZERO);
    }

    #[test]
    fn a_peer_that_was_stopped_is_not_a_slow_one() {
        let mut delay = RetransmitDelay::default();
        delay.asked_again(Psn::new(1), Psn::new(3), at(MS));
        delay.progressed(Psn::new(3), Psn::new(3), || at(2000 * MS));
        delay.answered_twice();
        assert_eq!(delay.least(), LONGEST_AT_ONCE);
        // Twice in a row it is.
        delay.asked_again(Psn::new(3), Psn::new(4), at(3000 * MS));
        delay.progressed(Psn::new(4), Psn::new(4), || at(3200 * MS));
        delay.answered_twice();
        assert_eq!(delay.least(), 300 * MS);
    }
}
