//! The memory that the model checker knows.

use std::sync::atomic::Ordering;

use anyverbs_net::shm::{Memory, OwnWord, Owned, SharedWords};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, fence};

/// The place where the ring or the lanes begin; in front of it are the words, 128 bytes apart.
pub(crate) const DATA: usize = 512;
pub(crate) const WORDS: usize = DATA / 128;
/// Two lines: one message, and the zero behind it.
pub(crate) const RING: usize = 128;

/// Words that the model checker knows. Without `FENCES` the fences do nothing, to show that the models notice.
#[derive(Clone, Debug)]
pub(crate) struct Model<const FENCES: bool>(Arc<Vec<AtomicU64>>);

impl<const FENCES: bool> Model<FENCES> {
    pub(crate) fn side() -> Self {
        Self::of(WORDS + RING / 8)
    }

    pub(crate) fn word() -> Self {
        Self::of(1)
    }

    pub(crate) fn of(words: usize) -> Self {
        Self(Arc::new((0..words).map(|_| AtomicU64::new(0)).collect()))
    }

    fn at(&self, at: usize) -> &AtomicU64 {
        if at < DATA { &self.0[at / 128] } else { &self.0[WORDS + (at - DATA) / 8] }
    }
}

impl<const FENCES: bool> Memory for Model<FENCES> {
    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.at(at).load(order)
    }

    fn store(&self, at: usize, value: u64, order: Ordering) {
        self.at(at).store(value, order);
    }

    fn fence(&self) {
        if FENCES {
            fence(Ordering::SeqCst);
        }
    }

    fn read(&self, at: usize, into: &mut [u8]) {
        for (n, chunk) in into.chunks_mut(8).enumerate() {
            let word = self.at(at + 8 * n).load(Ordering::Relaxed).to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }

    fn write(&self, at: usize, from: &[u8]) {
        for (n, chunk) in from.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.at(at + 8 * n).store(u64::from_le_bytes(word), Ordering::Relaxed);
        }
    }
}

impl<const FENCES: bool> SharedWords for Model<FENCES> {
    fn fetch_or(&self, at: usize, bits: u64) -> u64 {
        self.at(at).fetch_or(bits, Ordering::SeqCst)
    }

    fn swap(&self, at: usize, value: u64) -> u64 {
        self.at(at).swap(value, Ordering::SeqCst)
    }
}

/// A word of a process alone.
#[derive(Debug)]
pub(crate) struct Own(AtomicU64);

impl OwnWord for Own {
    fn of(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }

    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, order);
    }
}

impl<const FENCES: bool> Owned for Model<FENCES> {
    type Word = Own;
}

/// Checks a model under every interleaving, with threads that are interrupted up to three times.
pub(crate) fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}
