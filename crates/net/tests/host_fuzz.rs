//! The fuzz target `host_store`, without a fuzzer: its corpus, and random inputs.

use std::fs;
use std::path::Path;

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
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/host_store");
    let mut count = 0;
    for entry in fs::read_dir(&dir).expect("the corpus is there") {
        let path = entry.expect("readable").path();
        println!("{}", path.display());
        host_store::run(&fs::read(&path).expect("readable"));
        count += 1;
    }
    assert!(count > 0, "{} is empty", dir.display());
}

#[test]
fn random_inputs() {
    for seed in 0..500 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut input = vec![0; rng.random_range(10..2000)];
        rng.fill(input.as_mut_slice());
        println!("seed {seed}");
        host_store::run(&input);
    }
}
