//! The fuzz target `host_store`, without a fuzzer: its corpus, and random inputs.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

#[path = "../../../fuzz/src/input.rs"]
#[allow(unreachable_pub, dead_code, reason = "public in the fuzz crate")]
mod input;

#[path = "../../../fuzz/src/host_store.rs"]
#[allow(unreachable_pub, reason = "public in the fuzz crate")]
mod host_store;

#[test]
fn the_corpus_is_replayed() {
    anyverbs_testing::corpus::replay("host_store", host_store::run);
}

#[test]
fn random_inputs() {
    for seed in 0..anyverbs_testing::seeds(500) {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut input = vec![0; rng.random_range(10..2000)];
        rng.fill(input.as_mut_slice());
        println!("seed {seed}");
        host_store::run(&input);
    }
}
