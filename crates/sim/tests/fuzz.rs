//! The fuzz target `qp_sequence`, without a fuzzer: its corpus, and random inputs.

use std::fs;
use std::path::Path;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

#[path = "../../../fuzz/src/qp_sequence.rs"]
#[allow(unreachable_pub, reason = "public in the fuzz crate")]
mod qp_sequence;

#[test]
fn the_corpus_is_replayed() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/qp_sequence");
    let mut count = 0;
    for entry in fs::read_dir(&dir).expect("the corpus is there") {
        let path = entry.expect("readable").path();
        println!("{}", path.display());
        qp_sequence::run(&fs::read(&path).expect("readable"));
        count += 1;
    }
    assert!(count > 0, "{} is empty", dir.display());
}

#[test]
fn random_inputs() {
    for seed in 0..2000 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut input = vec![0; rng.random_range(10..1500)];
        rng.fill(input.as_mut_slice());
        println!("seed {seed}");
        qp_sequence::run(&input);
    }
}
