//! The fuzz target `receive_path`, without a fuzzer: its corpus, and random inputs.

#![allow(clippy::unwrap_used, reason = "tests")]

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

#[path = "../../../fuzz/src/input.rs"]
#[allow(unreachable_pub, dead_code, reason = "public in the fuzz crate")]
mod input;

#[path = "../../../fuzz/src/receive_path.rs"]
#[allow(unreachable_pub, reason = "public in the fuzz crate")]
mod receive_path;

#[test]
fn the_corpus_is_replayed() {
    anyverbs_testing::corpus::replay("receive_path", receive_path::run);
}

#[test]
fn random_inputs() {
    for seed in 0..anyverbs_testing::seeds(1000) {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut input = vec![0; rng.random_range(10..600)];
        rng.fill(input.as_mut_slice());
        println!("seed {seed}");
        receive_path::run(&input);
    }
}
