//! The body of the fuzz target `cm`: over its corpus, and over random steps.

#[expect(unreachable_pub, reason = "the target's file is part of another crate")]
#[path = "../../../../fuzz/src/cm.rs"]
mod target;

use std::fs;
use std::path::Path;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

#[test]
fn corpus_breaks_nothing() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/cm");
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let replayed = files.map(|path| target::run(&fs::read(path).unwrap())).count();
    assert!(replayed > 0);
}

#[test]
fn random_steps_break_nothing() {
    for seed in 0..1000 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut input = vec![0; rng.random_range(0..4000)];
        rng.fill(&mut input[..]);
        target::run(&input);
    }
}
