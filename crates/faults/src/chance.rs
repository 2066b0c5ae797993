//! The choice of what happens: a function of seed, rule, place and count. Nothing is remembered, so no order of threads changes it.

use std::time::Duration;

use crate::{Script, Which};

/// The seed of a run in which nobody gives one.
const SEED: u64 = 1;

/// SplitMix64.
fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The source of a rule's choices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dice(u64);

impl Dice {
    /// The dice of a rule, by its place in the script, at a place of the process: a queue pair by its number, or 0.
    #[must_use]
    pub fn new(seed: u64, rule: usize, place: u64) -> Self {
        // Mixed once more: otherwise the choices of a place would be those of the next one, one count later.
        Self(mix(mix(mix(seed).wrapping_add(rule as u64)).wrapping_add(place)))
    }

    /// Whether the `n`-th thing, from 1, is one of `which`.
    #[must_use]
    pub fn chooses(self, which: Which, n: u64) -> bool {
        match which {
            Which::All => true,
            Which::Numbers(first, last) => (first..=last).contains(&n),
            Which::Chance(parts) => mix(self.0.wrapping_add(n)) % 1_000_000 < u64::from(parts),
        }
    }

    /// The time of the `n`-th thing, between two.
    #[must_use]
    pub fn time(self, (least, most): (Duration, Duration), n: u64) -> Duration {
        let range = most.saturating_sub(least).as_nanos().min(u64::MAX.into()) as u64;
        let more = match range.checked_add(1) {
            Some(values) => mix(self.0.wrapping_add(n) ^ u64::MAX) % values,
            None => 0,
        };
        least.saturating_add(Duration::from_nanos(more))
    }
}

impl Script {
    /// The seed: the one that is given beside the script, or the script's own, or 1.
    #[must_use]
    pub fn seed_by(&self, given: Option<u64>) -> u64 {
        given.or(self.seed).unwrap_or(SEED)
    }
}
