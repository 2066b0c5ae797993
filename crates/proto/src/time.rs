//! Time as the caller gives it.

use std::ops::{Add, Sub};
use std::time::Duration;

/// A moment: nanoseconds since a start that the caller chose.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash)]
pub struct Time(u64);

impl Time {
    /// `ns` nanoseconds after the start.
    #[must_use]
    pub const fn from_nanos(ns: u64) -> Self {
        Self(ns)
    }

    /// Nanoseconds since the start.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Time since `earlier`; zero if that lies later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// A time slice of a busy machine, in milliseconds: a thread that can run may have to wait for so long. It is longer than the
/// kernel's tick and than the time to wake a process. A shorter timer of a sleeping worker costs each event 8 us (tests
/// `an_ack_timeout_is_no_shorter_than_two_time_slices`, and in `anyverbs-links`
/// `pace::tests::a_sender_without_receives_asks_again_and_gives_up`).
pub const TIME_SLICE: Duration = Duration::from_millis(8);

/// The greatest age, in seconds, of an answer (an ACK, a DREP) that leaves once more when its sender ends. A peer that has missed it
/// asks again within this time at first, and finds nobody (`lost_ack.rs` in the scenarios).
pub(crate) const LAST_ANSWER: Duration = Duration::from_secs(1);

/// A clock.
pub trait Clock {
    /// The moment of this call; the same value throughout a call of a machine.
    fn now(&self) -> Time;

    /// About this moment, some milliseconds off, where that is cheaper to know than [`now`](Self::now). For timeouts.
    fn soon(&self) -> Time {
        self.now()
    }
}

impl Add<Duration> for Time {
    type Output = Self;
    #[inline]
    fn add(self, d: Duration) -> Self {
        Self(self.0.saturating_add(nanos(d)))
    }
}

impl Sub<Duration> for Time {
    type Output = Self;
    #[inline]
    fn sub(self, d: Duration) -> Self {
        Self(self.0.saturating_sub(nanos(d)))
    }
}

/// Nanoseconds, without the 128 bits of [`Duration::as_nanos`].
#[inline]
fn nanos(d: Duration) -> u64 {
    d.as_secs().saturating_mul(1_000_000_000).saturating_add(d.subsec_nanos().into())
}
