//! How long a silent peer is left alone at least, learnt from what was sent again too early.
//!
//! A request that is repeated although the first one was only slow is answered twice. The second answer is the sign of it
//! (as in RFC 3522): from then on the peer gets at least the time that the first answer took. No clock is read for
//! answers that come in time.

use std::time::Duration;

use crate::time::Time;
use crate::types::Psn;

#[derive(Debug, Default)]
pub(super) struct RetransmitDelay {
    /// The oldest packet that was sent again without a sign of a loss, and since when it had been silent before.
    again: Option<(Psn, Time)>,
    /// What was sent again is answered, after this time: the answer to which of both?
    ambiguous: Option<Duration>,
    least: Duration,
}

impl RetransmitDelay {
    /// The peer is asked again for `psn` and all behind it, after silence since `since`.
    pub(super) fn asked_again(&mut self, psn: Psn, since: Time) {
        if self.again.is_none() {
            self.again = Some((psn, since));
            self.ambiguous = None;
        }
    }

    /// The peer answered something new, up to `una`.
    pub(super) fn progressed(&mut self, una: Psn, now: impl FnOnce() -> Time) {
        match self.again {
            Some((psn, since)) if una.since(psn) > 0 => {
                self.again = None;
                self.ambiguous = Some(now().since(since));
            }
            Some(_) => {}
            // A path may become short again.
            None => self.least -= self.least / 256,
        }
    }

    /// The peer answered what it had answered before.
    pub(super) fn answered_twice(&mut self) {
        if let Some(time) = self.ambiguous.take() {
            self.least = self.least.max(time + time / 2);
        }
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
        delay.progressed(Psn::new(0), never);
        delay.answered_twice();
        assert_eq!(delay.least(), Duration::ZERO, "a duplicate of the network's");
        delay.asked_again(Psn::new(0xff_ffff), at(MS));
        delay.asked_again(Psn::new(0xff_ffff), at(3 * MS));
        delay.progressed(Psn::new(0xff_ffff), never);
        delay.progressed(Psn::new(0), || at(11 * MS));
        assert_eq!(delay.least(), Duration::ZERO, "the packet may have been lost");
        delay.answered_twice();
        assert_eq!(delay.least(), 15 * MS);
        delay.answered_twice();
        assert_eq!(delay.least(), 15 * MS);
    }

    #[test]
    fn answers_in_time_make_it_shorter() {
        let mut delay = RetransmitDelay::default();
        delay.asked_again(Psn::new(1), at(MS));
        delay.progressed(Psn::new(2), || at(101 * MS));
        delay.answered_twice();
        for _ in 0..256 * 5 {
            delay.progressed(Psn::new(3), never);
        }
        assert!(delay.least() < 2 * MS, "{:?}", delay.least());
    }
}
