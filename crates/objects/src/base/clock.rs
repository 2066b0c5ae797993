//! The clock of the machines: nanoseconds since the device was started.

#[cfg(debug_assertions)]
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyverbs_net::CoarseClock;
use anyverbs_proto::time::{TIME_SLICE, Time};

/// A look at the clock that comes so much later than it was meant to shows that this process has not run: it was
/// stopped, or its container frozen. That time is not the silence of its peers. It is longer than the time slices that
/// others take of a busy processor (tests `time_in_which_the_process_stood_is_no_silence` and
/// `a_timer_does_not_wait_for_ever` of `anyverbs-transport`).
pub const LATE: Duration = TIME_SLICE.saturating_mul(8);

/// The clock of the machines: time since the device was opened.
#[derive(Debug)]
pub struct DeviceClock {
    start: Instant,
    /// Begun with `start`.
    coarse: CoarseClock,
    /// The time that a test has set, in nanoseconds, or 0.
    #[cfg(debug_assertions)]
    set: AtomicU64,
}

impl Default for DeviceClock {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            coarse: CoarseClock::new(),
            #[cfg(debug_assertions)]
            set: AtomicU64::new(0),
        }
    }
}

impl DeviceClock {
    #[inline]
    pub(crate) fn now(&self) -> Time {
        #[cfg(debug_assertions)]
        if let Some(set) = self.set_time() {
            return set;
        }
        Time::from_nanos(self.start.elapsed().as_nanos() as u64)
    }

    /// Now, or up to a tick of the kernel later; see [`CoarseClock::soon`]. Costs a fraction of [`now`](Self::now).
    #[inline]
    pub fn soon(&self) -> Time {
        #[cfg(debug_assertions)]
        if let Some(set) = self.set_time() {
            return set;
        }
        Time::from_nanos(self.coarse.soon().as_nanos() as u64)
    }

    /// Stops the clock at a time, for a test. Only a build for tests has this.
    #[cfg(debug_assertions)]
    pub fn set(&self, now: Time) {
        self.set.store(now.as_nanos(), Ordering::SeqCst);
    }

    #[cfg(debug_assertions)]
    fn set_time(&self) -> Option<Time> {
        let set = self.set.load(Ordering::SeqCst);
        (set != 0).then(|| Time::from_nanos(set))
    }
}
