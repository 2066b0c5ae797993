//! The fuzz target `shm_handshake`, without a fuzzer: its corpus, and random inputs.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

#[path = "../../../fuzz/src/input.rs"]
#[allow(unreachable_pub, dead_code, reason = "public in the fuzz crate")]
mod input;

#[path = "../../../fuzz/src/shm_handshake.rs"]
#[allow(unreachable_pub, reason = "public in the fuzz crate")]
mod shm_handshake;

#[test]
fn the_corpus_is_replayed() {
    anyverbs_testing::corpus::replay("shm_handshake", shm_handshake::run);
}

#[test]
fn random_inputs() {
    for seed in 0..anyverbs_testing::seeds(500) {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut input = vec![0; rng.random_range(10..600)];
        rng.fill(input.as_mut_slice());
        println!("seed {seed}");
        shm_handshake::run(&input);
    }
}
