//! Random numbers of ids.

use std::hash::{BuildHasher, RandomState};

/// A number that a stranger does not guess.
pub(super) fn random() -> u64 {
    // Each has keys of its own, drawn from the system once a thread.
    RandomState::new().hash_one(0)
}
