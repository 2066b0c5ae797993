//! The clock of the machines: nanoseconds since the device was started.

use std::time::{Duration, Instant};

use anyverbs_net::CoarseClock;
use anyverbs_proto::time::Time;

/// A look at the clock that comes so much later than it was meant to shows that this process has not run: it was
/// stopped, or its container frozen. That time is not the silence of its peers.
pub const LATE: Duration = Duration::from_millis(64);

/// The clock of the machines: time since the device was opened.
#[derive(Debug)]
pub struct DeviceClock {
    start: Instant,
    /// Begun with `start`.
    coarse: CoarseClock,
}

impl Default for DeviceClock {
    fn default() -> Self {
        Self { start: Instant::now(), coarse: CoarseClock::new() }
    }
}

impl DeviceClock {
    #[inline]
    pub(crate) fn now(&self) -> Time {
        Time::from_nanos(self.start.elapsed().as_nanos() as u64)
    }

    /// Now, or up to a tick of the kernel later; see [`CoarseClock::soon`]. Costs a fraction of [`now`](Self::now).
    #[inline]
    pub fn soon(&self) -> Time {
        Time::from_nanos(self.coarse.soon().as_nanos() as u64)
    }
}
