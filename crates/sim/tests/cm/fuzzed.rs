//! The body of the fuzz target `cm`: over its corpus, and over random steps.

#[expect(unreachable_pub, reason = "the target's file is part of another crate")]
#[path = "../../../../fuzz/src/cm.rs"]
mod target;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

#[test]
fn corpus_breaks_nothing() {
    anyverbs_testing::corpus::replay("cm", target::run);
}

#[test]
fn random_steps_break_nothing() {
    for seed in 0..anyverbs_testing::seeds(1000) {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut input = vec![0; rng.random_range(0..4000)];
        rng.fill(&mut input[..]);
        target::run(&input);
    }
}
