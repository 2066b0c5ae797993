//! The fuzz targets on the simulation, without a fuzzer: their corpora, and random inputs.

use anyverbs_testing::corpus::replay;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

#[path = "../../../fuzz/src/input.rs"]
#[allow(unreachable_pub, dead_code, reason = "public in the fuzz crate")]
mod input;
#[path = "../../../fuzz/src/qp_sequence.rs"]
#[allow(unreachable_pub, reason = "public in the fuzz crate")]
mod qp_sequence;
#[path = "../../../fuzz/src/requester.rs"]
#[allow(unreachable_pub, reason = "public in the fuzz crate")]
mod requester;
#[path = "../../../fuzz/src/responder.rs"]
#[allow(unreachable_pub, reason = "public in the fuzz crate")]
mod responder;
#[path = "../../../fuzz/src/xrc_message.rs"]
#[allow(unreachable_pub, reason = "public in the fuzz crate")]
mod xrc_message;

fn random(seeds: u64, run: fn(&[u8])) {
    for seed in 0..anyverbs_testing::seeds(seeds) {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut input = vec![0; rng.random_range(10..1500)];
        rng.fill(input.as_mut_slice());
        println!("seed {seed}");
        run(&input);
    }
}

#[test]
fn the_corpus_is_replayed() {
    replay("qp_sequence", qp_sequence::run);
}

#[test]
fn the_corpus_of_the_responder_is_replayed() {
    replay("responder", responder::run);
}

#[test]
fn the_corpus_of_the_requester_is_replayed() {
    replay("requester", requester::run);
}

#[test]
fn random_inputs() {
    random(2000, qp_sequence::run);
}

/// With a peer that writes anything into its lane.
#[test]
fn random_inputs_with_lanes() {
    random(1000, |input| {
        let mut input = input.to_vec();
        (input[0], input[2]) = (input[0] & !3, 5 << 2);
        qp_sequence::run(&input);
    });
}

#[test]
fn random_packets_to_a_responder() {
    random(1000, responder::run);
}

#[test]
fn random_answers_to_a_requester() {
    random(1000, requester::run);
}

#[test]
fn the_corpus_of_xrc_messages_is_replayed() {
    replay("xrc_message", xrc_message::run);
}

#[test]
fn random_xrc_messages() {
    random(1000, xrc_message::run);
}
