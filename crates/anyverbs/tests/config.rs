//! The fuzz target `config`, without a fuzzer: its corpus, and every prefix of each input.

#[path = "../../../fuzz/src/config.rs"]
#[allow(unreachable_pub, reason = "public in the fuzz crate")]
mod target;

use std::fs;
use std::path::Path;

#[test]
fn the_corpus_is_replayed() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/config");
    let mut count = 0;
    for entry in fs::read_dir(&dir).expect("the corpus is there") {
        let input = fs::read(entry.expect("readable").path()).expect("readable");
        for end in 0..=input.len() {
            target::run(&input[..end]);
        }
        count += 1;
    }
    assert!(count > 0, "{} is empty", dir.display());
}
