//! The clock of the machines: nanoseconds since the device was started.

use std::time::Instant;

use anyverbs_net::CoarseClock;
use anyverbs_proto::time::Time;

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
