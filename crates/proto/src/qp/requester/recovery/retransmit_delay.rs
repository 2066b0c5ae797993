//! The shortest time for which a silent peer is left alone. It is learnt from spurious retransmissions.
//!
//! If a repeated request was only slow, the peer gives one answer more than there were repeats. The answers come as far
//! apart as the requests went out. Both together show a spurious retransmission (as in RFC 3522). From then on the peer
//! gets at least the time that the first answer took. If a request or an answer was lost, one answer is missing. The
//! answers to one repeat of several packets come close together, which proves nothing. No clock is read for answers
//! that come in time.

use std::time::Duration;

use crate::time::{LAST_ANSWER, Time};
use crate::types::Psn;

use super::super::super::timers::Expired;
use super::congestion_window::CongestionWindow;

/// Longest delay, in milliseconds, that a single spurious retransmission can prove. A peer that was stopped for a while has not become a
/// slow one (`a_peer_that_was_stopped_is_not_a_slow_one`).
const LONGEST_AT_ONCE: Duration = Duration::from_millis(100);

/// Longest delay at all: a longer silence is left to the ACK timeout (`a_delay_has_an_end`). So a peer asks again within
/// the time for which answers are repeated.
const LONGEST: Duration = LAST_ANSWER;

#[derive(Debug, Default)]
pub(super) struct RetransmitDelay {
    repeat: Repeat,
    /// The end of the packets in flight when `least` last became shorter.
    round: Psn,
    /// The delay that the last spurious retransmission proved.
    last: Duration,
    least: Duration,
}

/// A retransmission without a sign of a loss, and the congestion window before it.
#[derive(Debug, Default)]
enum Repeat {
    #[default]
    None,
    /// Packets from `first` to before `end` were sent again, and `first` is not answered.
    Unanswered { first: Psn, end: Psn, silence: Expired, repeats: u32, window: CongestionWindow },
    /// The first packet is answered, but the answer may be to either sending. Kept until more than those packets is
    /// answered.
    Ambiguous {
        end: Psn,
        /// Time that the answer took.
        took: Duration,
        /// When it came.
        at: Time,
        /// The time between the answers to the first request and to its repeat, if both come.
        apart: Duration,
        /// Answers that are missing until there are more than repeats.
        missing: u32,
        window: CongestionWindow,
    },
}

impl RetransmitDelay {
    /// Notes that `first` and all behind it up to `end` are sent again after this silence. `window` is the congestion
    /// window before.
    pub(super) fn on_repeat(
        &mut self,
        first: Psn,
        end: Psn,
        silence: Expired,
        window: CongestionWindow,
    ) {
        match &mut self.repeat {
            Repeat::Unanswered { repeats, .. } => *repeats += 1,
            repeat => *repeat = Repeat::Unanswered { first, end, silence, repeats: 1, window },
        }
    }

    /// Tells whether packets were sent again and are not answered.
    pub(super) fn has_repeated(&self) -> bool {
        matches!(self.repeat, Repeat::Unanswered { .. })
    }

    /// Tells whether nothing that was sent again is in doubt.
    pub(super) fn is_calm(&self) -> bool {
        matches!(self.repeat, Repeat::None)
    }

    /// Notes that the peer answered something new, up to `una`, of the packets up to `max_sent`.
    #[inline]
    pub(super) fn on_answer(&mut self, una: Psn, max_sent: Psn, now: impl FnOnce() -> Time) {
        match self.repeat {
            Repeat::Unanswered { first, end, silence, repeats, window } => {
                if una.since(first) > 0 {
                    let at = now();
                    let (took, apart) = (at.since(silence.since), silence.length);
                    let missing = repeats;
                    self.repeat = Repeat::Ambiguous { end, took, at, apart, missing, window };
                }
                return;
            }
            Repeat::Ambiguous { end, .. } if una.since(end) > 0 => self.repeat = Repeat::None,
            Repeat::Ambiguous { .. } | Repeat::None => {}
        }
        // A path may become short again: once for each round trip.
        if una.since(self.round) > 0 {
            self.round = max_sent;
            self.least -= self.least / 64;
        }
    }

    /// Notes a repeated answer. If it shows that the retransmission was spurious, this is the congestion window before
    /// it.
    pub(super) fn on_duplicate_answer(
        &mut self,
        now: impl FnOnce() -> Time,
    ) -> Option<CongestionWindow> {
        let Repeat::Ambiguous { end, took, at, apart, missing, window } = &mut self.repeat else {
            return None;
        };
        let now = now();
        if now.since(*at) < *apart / 2 {
            // Another answer to the same sending.
            return None;
        }
        *missing -= 1;
        if *missing > 0 {
            *at = now;
            return None;
        }
        let (end, took, window) = (*end, *took, *window);
        self.repeat = Repeat::None;
        self.round = end;
        let proven = took + took / 2;
        let longest = self.last.clamp(LONGEST_AT_ONCE, LONGEST);
        self.last = proven;
        self.least = self.least.max(proven.min(longest));
        Some(window)
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

    fn silence(since: u32, ms: u32) -> Expired {
        Expired { since: at(since), length: MS * ms }
    }

    fn window(limit: u64) -> CongestionWindow {
        CongestionWindow::of(limit)
    }

    /// Sent at 1 ms, again at 2 ms, and answered at these times.
    fn repeated_once(delay: &mut RetransmitDelay, answers: [u32; 2]) -> bool {
        delay.on_repeat(psn(1), psn(3), silence(1, 1), window(7));
        delay.on_answer(psn(3), psn(3), || at(answers[0]));
        delay.on_duplicate_answer(|| at(answers[1])).is_some()
    }

    #[test]
    fn a_second_answer_makes_it_longer() {
        let mut delay = RetransmitDelay::default();
        delay.on_answer(psn(0), psn(0), never);
        assert!(delay.on_duplicate_answer(never).is_none(), "a duplicate of the network's");
        delay.on_repeat(psn(0xff_ffff), psn(1), silence(1, 1), window(7));
        delay.on_answer(psn(0xff_ffff), psn(1), never);
        delay.on_answer(psn(0), psn(1), || at(11));
        assert_eq!(delay.least(), Duration::ZERO, "the packet may have been lost");
        assert!(delay.on_duplicate_answer(|| at(12)).is_some());
        assert_eq!(delay.least(), 15 * MS);
        assert!(delay.on_duplicate_answer(never).is_none());
        assert_eq!(delay.least(), 15 * MS);
    }

    #[test]
    fn where_something_was_lost_it_stays() {
        let mut delay = RetransmitDelay::default();
        // The repeat was several packets, each with an answer.
        assert!(!repeated_once(&mut delay, [11, 11]));
        // The first one was lost, both repeats were answered.
        delay.on_repeat(psn(1), psn(3), silence(1, 1), window(7));
        delay.on_repeat(psn(1), psn(3), silence(2, 2), window(5));
        delay.on_answer(psn(3), psn(3), || at(3));
        assert!(delay.on_duplicate_answer(|| at(5)).is_none());
        assert_eq!(delay.least(), Duration::ZERO);
        // All three were.
        assert_eq!(delay.on_duplicate_answer(|| at(7)), Some(window(7)), "before the first");
        assert_eq!(delay.least(), 3 * MS);
    }

    #[test]
    fn answers_in_time_make_it_shorter() {
        // Whatever the numbers of an earlier connection were.
        let mut delay = RetransmitDelay { round: psn(1 << 23 | 100), ..Default::default() };
        delay.on_repeat(psn(1), psn(3), silence(1, 1), window(7));
        delay.on_answer(psn(2), psn(3), || at(61));
        delay.on_answer(psn(3), psn(3), never);
        assert!(delay.on_duplicate_answer(|| at(62)).is_some());
        assert_eq!(delay.least(), 90 * MS);
        let long = delay.least();
        for n in 4..=13 {
            delay.on_answer(psn(n), psn(14), never);
        }
        assert!(delay.least() > long * 19 / 20, "one round, not ten answers");
        for n in 14..14 + 64 * 5 {
            delay.on_answer(psn(n), psn(n), never);
        }
        assert!(delay.least() < 2 * MS, "{:?}", delay.least());
    }

    #[test]
    fn a_late_duplicate_says_nothing() {
        let mut delay = RetransmitDelay::default();
        delay.on_repeat(psn(1), psn(3), silence(1, 1), window(7));
        delay.on_answer(psn(3), psn(3), || at(11));
        delay.on_answer(psn(4), psn(4), never);
        assert!(delay.on_duplicate_answer(never).is_none());
        assert_eq!(delay.least(), Duration::ZERO);
    }

    #[test]
    fn a_peer_that_was_stopped_is_not_a_slow_one() {
        let mut delay = RetransmitDelay::default();
        assert!(repeated_once(&mut delay, [2000, 2001]));
        assert_eq!(delay.least(), LONGEST_AT_ONCE);
        // Twice in a row it is.
        delay.on_repeat(psn(3), psn(4), silence(3000, 1), window(7));
        delay.on_answer(psn(4), psn(4), || at(3200));
        assert!(delay.on_duplicate_answer(|| at(3201)).is_some());
        assert_eq!(delay.least(), 300 * MS);
    }

    #[test]
    fn a_delay_has_an_end() {
        let mut delay = RetransmitDelay::default();
        for _ in 0..3 {
            assert!(repeated_once(&mut delay, [9000, 9001]));
        }
        assert_eq!(delay.least(), LONGEST);
    }
}
