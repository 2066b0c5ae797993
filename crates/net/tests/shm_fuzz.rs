//! The fuzz target `shm_ring`, without a fuzzer: its corpus, and random inputs.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

#[path = "../../../fuzz/src/shm_ring.rs"]
#[allow(unreachable_pub, reason = "public in the fuzz crate")]
mod shm_ring;

#[test]
fn the_corpus_is_replayed() {
    anyverbs_testing::corpus::replay("shm_ring", shm_ring::run);
}

#[test]
fn random_inputs() {
    for seed in 0..anyverbs_testing::seeds(5000) {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut input = vec![0; rng.random_range(10..2000)];
        rng.fill(input.as_mut_slice());
        println!("seed {seed}");
        shm_ring::run(&input);
    }
}
