//! The fuzz target `copy_and_crc`, without a fuzzer: its corpus, and random inputs.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

#[path = "../../../fuzz/src/copy_and_crc.rs"]
#[allow(unreachable_pub, reason = "public in the fuzz crate")]
mod copy_and_crc;
#[path = "../../../fuzz/src/input.rs"]
#[allow(unreachable_pub, dead_code, reason = "public in the fuzz crate")]
mod input;

#[test]
fn the_corpus_is_replayed() {
    anyverbs_testing::corpus::replay("copy_and_crc", copy_and_crc::run);
}

#[test]
fn random_inputs() {
    for seed in 0..anyverbs_testing::seeds(2000) {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut input = vec![0; rng.random_range(10..600)];
        rng.fill(input.as_mut_slice());
        println!("seed {seed}");
        copy_and_crc::run(&input);
    }
}
