//! Random operations against an oracle. Queue pairs of every type connect two or three devices that share completion
//! queues and receive queues. Both directions go over links that lose, duplicate, reorder and delay. In some of the
//! runs things break on purpose.
//!
//! The oracle knows the final contents of the memory, and every received message when it completes. It knows that
//! completions come exactly once, in the order of posting, with the right status, and which posts are refused. It knows
//! that atomics happened once each, and that no other memory was written.
//!
//! `ANYVERBS_SIM_SEEDS=N` runs N seeds instead of [`SEEDS`]; `ANYVERBS_SIM_SEED=S` runs that one alone.
//! `cargo xtask test --gate` runs a third of them.

mod completions;
mod config;
mod post;
mod run;
mod slots;
mod world;

use std::env;
use std::num::NonZero;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// The ways of frequent requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ways {
    General,
    /// Their short ways. They are the same packets.
    Short,
    /// Their short ways, and in some of the runs lanes.
    Lanes,
}

/// Seeds of an ordinary run.
const SEEDS: u64 = 5000;

/// Says how to repeat a run that failed.
struct Replay(u64);

impl Drop for Replay {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!(
                "to repeat: ANYVERBS_SIM_SEED={} cargo test -p anyverbs-sim --test model",
                self.0
            );
        }
    }
}

fn run_seed(seed: u64) {
    let _replay = Replay(seed);
    run::run(seed, Ways::Lanes);
}

fn number(name: &str) -> Option<u64> {
    let value = env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

#[test]
fn every_seed() {
    if let Some(seed) = number("ANYVERBS_SIM_SEED") {
        return run_seed(seed);
    }
    let seeds = number("ANYVERBS_SIM_SEEDS").unwrap_or_else(|| anyverbs_testing::seeds(SEEDS));
    let next = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(|| {
                loop {
                    match next.fetch_add(1, Ordering::Relaxed) {
                        seed if seed < seeds => run_seed(seed),
                        _ => return,
                    }
                }
            });
        }
    });
}

#[test]
fn a_run_repeats_exactly() {
    for seed in [1, 2, 3] {
        assert_eq!(run::run(seed, Ways::Lanes), run::run(seed, Ways::Lanes));
    }
}

/// Packets, completions and memory are the same.
#[test]
fn short_ways_do_what_the_general_way_does() {
    for seed in 0..anyverbs_testing::seeds(SEEDS) / 10 {
        let _replay = Replay(seed);
        assert!(run::run(seed, Ways::Short) == run::run(seed, Ways::General), "seed {seed}");
    }
}
