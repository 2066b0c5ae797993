//! How long answers take, on which depends how long a peer may be silent before it is asked again (RFC 6298).

use std::time::Duration;

use crate::time::Time;
use crate::types::Psn;

/// What is known of a connection's round trip.
#[derive(Debug, Default)]
pub(super) struct RoundTrip {
    /// The smoothed time and its variation; `None` before the first measurement.
    estimate: Option<(Duration, Duration)>,
    /// The packet whose answer is timed, and when it was sent.
    timed: Option<(Psn, Time)>,
    /// The last wait that was in vain, doubled: it holds until an answer is measured, or a path whose round trip became long
    /// would have everything sent several times (RFC 6298, 5.5 to 5.7).
    backed_off: Duration,
}

impl RoundTrip {
    pub(super) fn is_timing(&self) -> bool {
        self.timed.is_some()
    }

    /// `psn` was sent for the first time.
    pub(super) fn sent(&mut self, psn: Psn, now: Time) {
        self.timed = Some((psn, now));
    }

    /// Something is sent again: to which sending an answer belongs is not known any more (Karn's algorithm).
    pub(super) fn sent_again(&mut self) {
        self.timed = None;
    }

    /// Whether an answer up to `una` ends the measurement.
    pub(super) fn is_answered(&self, una: Psn) -> bool {
        self.timed.is_some_and(|(psn, _)| una.since(psn) > 0)
    }

    pub(super) fn answered(&mut self, now: Time) {
        let Some((_, sent)) = self.timed.take() else { return };
        let sample = now.since(sent);
        self.backed_off = Duration::ZERO;
        self.estimate = Some(match self.estimate {
            None => (sample, sample / 2),
            Some((smoothed, variation)) => {
                let error = smoothed.abs_diff(sample);
                (smoothed - smoothed / 8 + sample / 8, variation - variation / 4 + error / 4)
            }
        });
    }

    /// A wait of half of this was in vain.
    pub(super) fn back_off(&mut self, wait: Duration) {
        self.backed_off = wait;
    }

    /// For how long silence means nothing.
    pub(super) fn patience(&self) -> Duration {
        let usual =
            self.estimate.map_or(Duration::ZERO, |(smoothed, variation)| smoothed + variation * 4);
        usual.max(self.backed_off)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn measure(trip: &mut RoundTrip, time: Duration) {
        trip.sent(Psn::new(1), Time::default());
        trip.answered(Time::default() + time);
    }

    #[test]
    fn the_patience_follows_the_round_trip() {
        let mut trip = RoundTrip::default();
        assert_eq!(trip.patience(), Duration::ZERO);
        measure(&mut trip, 10 * MS);
        assert_eq!(trip.patience(), 30 * MS);
        for _ in 0..50 {
            measure(&mut trip, 10 * MS);
        }
        assert!((10 * MS..11 * MS).contains(&trip.patience()), "{:?}", trip.patience());
        measure(&mut trip, 100 * MS);
        assert!(trip.patience() > 100 * MS);
        for _ in 0..100 {
            measure(&mut trip, MS);
        }
        assert!(trip.patience() < 2 * MS, "{:?}", trip.patience());
    }

    #[test]
    fn a_vain_wait_holds_until_an_answer_is_measured() {
        let mut trip = RoundTrip::default();
        measure(&mut trip, MS);
        trip.sent(Psn::new(2), Time::default());
        trip.back_off(16 * MS);
        trip.sent_again();
        assert!(!trip.is_answered(Psn::new(3)), "of which sending?");
        trip.answered(Time::default() + MS);
        assert_eq!(trip.patience(), 16 * MS);
        measure(&mut trip, MS);
        assert!(trip.patience() < 4 * MS);
    }

    #[test]
    fn only_the_timed_packet_ends_the_measurement() {
        let mut trip = RoundTrip::default();
        trip.sent(Psn::new(0xff_ffff), Time::default());
        assert!(trip.is_timing());
        assert!(!trip.is_answered(Psn::new(0xff_ffff)));
        assert!(trip.is_answered(Psn::new(0)));
    }
}
