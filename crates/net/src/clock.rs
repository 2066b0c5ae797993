//! A clock that is cheaper than exact.

use std::time::Duration;

use rustix::time::{ClockId, Timespec, clock_getres, clock_gettime};

/// Counts from its own beginning, in ticks of the kernel (1 to 10 ms).
#[derive(Clone, Copy, Debug)]
pub struct CoarseClock {
    start: Duration,
    tick: Duration,
}

impl CoarseClock {
    /// Begins now.
    #[must_use]
    pub fn new() -> Self {
        let tick = duration(clock_getres(ClockId::MonotonicCoarse));
        Self { start: read(ClockId::Monotonic), tick }
    }

    /// The time since the beginning, or up to a tick more; less where the kernel's ticks come late, as on a virtual machine.
    #[inline]
    #[must_use]
    pub fn soon(&self) -> Duration {
        (read(ClockId::MonotonicCoarse) + self.tick).saturating_sub(self.start)
    }
}

impl Default for CoarseClock {
    fn default() -> Self {
        Self::new()
    }
}

#[inline]
fn read(clock: ClockId) -> Duration {
    duration(clock_gettime(clock))
}

#[inline]
fn duration(time: Timespec) -> Duration {
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn soon_is_about_now() {
        const ABOUT: Duration = Duration::from_millis(100);
        let (clock, begin) = (CoarseClock::new(), Instant::now());
        while begin.elapsed() < Duration::from_millis(30) {
            let before = begin.elapsed();
            let soon = clock.soon();
            assert!(
                before <= soon + ABOUT && soon <= begin.elapsed() + ABOUT,
                "{before:?} {soon:?}"
            );
        }
        assert!(clock.soon() > Duration::ZERO);
    }
}
