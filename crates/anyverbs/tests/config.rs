//! The fuzz target `config`, without a fuzzer: its corpus, and every prefix of each input.

#[path = "../../../fuzz/src/config.rs"]
#[allow(unreachable_pub, reason = "public in the fuzz crate")]
mod target;

#[test]
fn the_corpus_is_replayed() {
    anyverbs_testing::corpus::replay("config", |input| {
        for end in 0..=input.len() {
            target::run(&input[..end]);
        }
    });
}
