//! The clocks that completions are stamped with.

use std::time::{SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// Ticks a second of the device's clock.
pub(crate) const HZ: u64 = 1_000_000_000;

/// The device's clock: one for all processes of a host, never set, without a relation to the time of day.
pub fn raw() -> u64 {
    let now = clock_gettime(ClockId::MonotonicRaw);
    (now.tv_sec as u64).wrapping_mul(HZ).wrapping_add(now.tv_nsec as u64)
}

/// Nanoseconds since 1970.
pub(crate) fn wall() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn both_run_in_nanoseconds() {
        let begin = Instant::now();
        let (raw_before, wall_before) = (raw(), wall());
        std::thread::sleep(Duration::from_millis(2));
        let passed = u128::from(raw() - raw_before);
        // No one adjusts the raw clock.
        let most = begin.elapsed().as_nanos() * 101 / 100;
        assert!((1_900_000..=most).contains(&passed), "{passed} of {most}");
        assert!(wall() - wall_before >= 1_900_000);
        // After 2020.
        assert!(wall_before > 1_577_836_800 * HZ);
    }
}
