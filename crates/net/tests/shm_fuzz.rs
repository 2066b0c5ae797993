//! The fuzz target `shm_ring`, without a fuzzer: its corpus, and random inputs.

use std::fs;
use std::path::Path;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

#[path = "../../../fuzz/src/shm_ring.rs"]
#[allow(unreachable_pub, reason = "public in the fuzz crate")]
mod shm_ring;

#[test]
fn the_corpus_is_replayed() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/shm_ring");
    let mut count = 0;
    for entry in fs::read_dir(&dir).expect("the corpus is there") {
        let path = entry.expect("readable").path();
        println!("{}", path.display());
        shm_ring::run(&fs::read(&path).expect("readable"));
        count += 1;
    }
    assert!(count > 0, "{} is empty", dir.display());
}

#[test]
fn random_inputs() {
    for seed in 0..5000 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut input = vec![0; rng.random_range(10..2000)];
        rng.fill(input.as_mut_slice());
        println!("seed {seed}");
        shm_ring::run(&input);
    }
}
