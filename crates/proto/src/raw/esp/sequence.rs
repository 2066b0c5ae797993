//! Sequence numbers of received packets: their upper halves, and which were there before (RFC 4303, 3.4.3 and appendix A).

use super::EspDrop;

/// The 64-bit number whose lower half is `low`, where the program tells the upper half and whether the lower one is about to
/// begin anew.
pub(super) fn extend(esn: u32, new_window: bool, low: u32) -> u64 {
    let next = new_window && low < 1 << 31;
    u64::from(esn.wrapping_add(next.into())) << 32 | u64::from(low)
}

/// The numbers up to the highest that was received.
#[derive(Debug)]
pub(super) struct ReplayWindow {
    /// Numbers at and below `top` that are looked at; 0: none are.
    size: u32,
    top: u64,
    /// Bit n of the ring stands for the numbers that are n modulo its length.
    seen: Vec<u64>,
}

impl ReplayWindow {
    /// `top` is the highest number so far.
    pub(super) fn new(size: u32, top: u64) -> Self {
        // One word more than the window, so that it never laps itself (RFC 6479).
        let words = if size == 0 { 0 } else { size.div_ceil(64) as usize + 1 };
        Self { size, top, seen: vec![0; words] }
    }

    /// The number nearest to the window whose lower half is `low`.
    pub(super) fn number(&self, low: u32) -> u64 {
        let near = self.top & !u64::from(u32::MAX) | u64::from(low);
        let half = 1 << 31;
        if near > self.top && near - self.top > half {
            near.checked_sub(1 << 32).unwrap_or(near)
        } else if near < self.top && self.top - near > half {
            near.checked_add(1 << 32).unwrap_or(near)
        } else {
            near
        }
    }

    fn place(&self, number: u64) -> (usize, u64) {
        ((number / 64) as usize % self.seen.len(), 1 << (number % 64))
    }

    /// Tells whether a packet may be the first with its number.
    pub(super) fn check(&self, number: u64) -> Result<(), EspDrop> {
        if self.size == 0 || number > self.top {
            // A window does not move further (`ibv_flow_action_esp(3)`).
            let far = self.size != 0 && number - self.top > 1 << 31;
            return if far { Err(EspDrop::Replayed) } else { Ok(()) };
        }
        let (word, bit) = self.place(number);
        let old = self.top - number >= self.size.into();
        // Number 0 is never sent.
        if old || number == 0 || self.seen[word] & bit != 0 {
            Err(EspDrop::Replayed)
        } else {
            Ok(())
        }
    }

    /// Notes a packet that was checked and is genuine.
    pub(super) fn take(&mut self, number: u64) {
        if number > self.top {
            if self.size != 0 {
                let passed = (number / 64 - self.top / 64).min(self.seen.len() as u64);
                for word in 0..passed {
                    let at = ((number / 64 - word) % self.seen.len() as u64) as usize;
                    self.seen[at] = 0;
                }
            }
            self.top = number;
        }
        if self.size != 0 {
            let (word, bit) = self.place(number);
            self.seen[word] |= bit;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    #[test]
    fn the_upper_half_is_the_nearest() {
        let mut window = ReplayWindow::new(0, 5 << 32 | 10);
        assert_eq!(window.number(11), 5 << 32 | 11);
        assert_eq!(window.number(u32::MAX), 4 << 32 | u64::from(u32::MAX));
        window.take(5 << 32 | 0xffff_fff0);
        assert_eq!(window.number(3), 6 << 32 | 3);
        assert_eq!(extend(7, false, 3), 7 << 32 | 3);
        assert_eq!(extend(7, true, 3), 8 << 32 | 3);
        assert_eq!(extend(7, true, 1 << 31), 7 << 32 | 1 << 31);
    }

    #[test]
    fn each_number_in_the_window_passes_once() {
        for seed in 0..200 {
            let mut rng = SmallRng::seed_from_u64(seed);
            let size = rng.random_range(1..300);
            let mut window = ReplayWindow::new(size, 0);
            let (mut seen, mut top) = (BTreeSet::new(), 0u64);
            for _ in 0..2000 {
                let low = top.saturating_sub(400);
                let jump = if rng.random_ratio(1, 20) { 203 } else { 3 };
                let number = rng.random_range(low..top + jump);
                let fresh =
                    number != 0 && number + u64::from(size) > top && !seen.contains(&number);
                assert_eq!(window.check(number).is_ok(), fresh, "seed {seed}: {number} at {top}");
                if fresh {
                    window.take(number);
                    seen.insert(number);
                    top = top.max(number);
                }
            }
        }
    }

    #[test]
    fn a_window_does_not_jump_far() {
        let window = ReplayWindow::new(64, 100);
        assert!(window.check(100 + (1 << 31)).is_ok());
        assert_eq!(window.check(101 + (1 << 31)), Err(EspDrop::Replayed));
    }

    #[test]
    fn the_nearest_number_is_half_the_range_away_at_most() {
        const HALF: u64 = 1 << 31;
        for top in [5 << 32, 5 << 32 | 10, 5 << 32 | HALF, 5 << 32 | 0xffff_fff0] {
            let window = ReplayWindow::new(0, top);
            for away in [0, 1, 9, 1000, HALF - 1] {
                for number in [top + away, top - away] {
                    assert_eq!(window.number(number as u32), number, "{top:#x} {number:#x}");
                }
            }
            // Half the range away both would do: the epoch of the window's top counts.
            let epoch = top & !u64::from(u32::MAX);
            let number = window.number((top + HALF) as u32);
            assert_eq!(number & !u64::from(u32::MAX), epoch, "{top:#x}");
        }
        // There is no epoch before the first, and none behind the last.
        assert_eq!(ReplayWindow::new(0, 3).number(u32::MAX), u64::from(u32::MAX));
        assert_eq!(ReplayWindow::new(0, u64::MAX).number(3), u64::MAX << 32 | 3);
    }
}
