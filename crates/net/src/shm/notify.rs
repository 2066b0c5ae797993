//! Telling a reader that there is something to read, without a system call unless it sleeps.
//!
//! A reader looks at a few rings by itself (they are *watched*). For all others it has one word of *doorbells*, one bit for
//! several rings, which writers set. Before it sleeps it makes its *epoch* odd. A writer that sees an odd epoch wakes
//! it, once for each epoch and writer.
//!
//! All of this follows the pattern "I write mine and then read yours, you write yours and then read mine". It needs a
//! sequentially consistent fence between the two on both sides: then at least one sees the other's write.
//!
//! | the writer | the reader |
//! |---|---|
//! | publishes, fence, reads `WATCH` | `WATCH = UNWATCHED`, fence, looks into the ring |
//! | publishes, fence, sees its doorbell set already | takes the doorbells, fence, looks into the rings |
//! | publishes or rings, fence, reads the epoch | makes the epoch odd, fence, looks into doorbells and all rings |
//! | asks for room, then as above | releases, and then, after any of these fences, looks for writers that asked for room |
//!
//! The doorbells are a hint: all peers can write them, so one that clears them could delay the others' messages. Hence the
//! reader also looks into all rings before and after it sleeps, and into one after the other while it polls. The epoch
//! is mapped read-only by the peers.

use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::{UNWATCHED, WATCH, WATCHED};
use super::memory::{Area, Memory, SharedWords, Words};

/// The word of the doorbells, and of the epoch, in their objects.
const WORD: usize = 0;

/// Doorbells: bit 0 is the process's own, for news that do not come through a ring.
pub(crate) const OWN_DOORBELL: u64 = 1;

/// The doorbell of the ring with number `index`.
pub(crate) fn doorbell_of(index: usize) -> u64 {
    1 << (1 + index % 63)
}

/// The means of a writer to wake one reader.
#[derive(Debug)]
pub struct Doorbell<M = Area> {
    doorbells: M,
    epoch: Words<M>,
    doorbell: u64,
    /// The last odd epoch in which this writer has woken the reader.
    woken: AtomicU64,
}

impl<M: SharedWords> Doorbell<M> {
    /// The doorbell of the reader with these doorbells and this epoch, at which bit `doorbell` is this writer's.
    pub fn new(doorbells: M, epoch: M, doorbell: u64) -> Self {
        let epoch = Words::new(epoch, WORD, 1);
        Self { doorbells, epoch, doorbell, woken: AtomicU64::new(0) }
    }

    /// Call it after something was published for the reader whose words are `reader`. Tells whether the reader sleeps,
    /// and the caller must wake it.
    #[inline]
    #[must_use]
    pub fn ring(&self, reader: &M) -> bool {
        self.doorbells.fence();
        if reader.load(WATCH, Ordering::Relaxed) != WATCHED
            && self.doorbells.load(WORD, Ordering::Relaxed) & self.doorbell == 0
        {
            self.doorbells.fetch_or(WORD, self.doorbell);
            // Ringing is publishing as well.
            self.doorbells.fence();
        }
        self.is_asleep()
    }

    /// As [`ring`](Self::ring), for news that the reader does not find in the ring.
    #[must_use]
    pub fn ring_always(&self) -> bool {
        self.doorbells.fence();
        self.doorbells.fetch_or(WORD, self.doorbell);
        self.doorbells.fence();
        self.is_asleep()
    }

    /// As [`ring`](Self::ring), for news that a reader who is awake finds by itself. The caller has fenced behind these.
    #[inline]
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        let epoch = self.epoch.load(0, Ordering::Relaxed);
        epoch & 1 == 1 && self.woken.swap(epoch, Ordering::Relaxed) != epoch
    }
}

/// A reader's doorbells and epoch.
#[derive(Debug)]
pub struct Ears<M = Area> {
    doorbells: M,
    epoch: M,
    now: u64,
}

impl<M: SharedWords> Ears<M> {
    /// The ears of a reader that is awake. Both objects are zero.
    pub fn new(doorbells: M, epoch: M) -> Self {
        Self { doorbells, epoch, now: 0 }
    }

    /// Whether a doorbell rang: one load.
    #[inline]
    #[must_use]
    pub fn is_rung(&self) -> bool {
        self.doorbells.load(WORD, Ordering::Relaxed) != 0
    }

    /// Takes the doorbells that rang. The caller looks into their rings afterwards.
    pub fn take(&mut self) -> u64 {
        let doorbells = self.doorbells.swap(WORD, 0);
        self.doorbells.fence();
        doorbells
    }

    /// Says that this reader is about to sleep. The caller then looks once more at doorbells and rings, and if anything is
    /// there, [wakes](Self::wake) at once.
    pub fn fall_asleep(&mut self) {
        // A new epoch each time: writers wake once an epoch.
        self.now += if self.is_asleep() { 2 } else { 1 };
        self.epoch.store(WORD, self.now, Ordering::Release);
        self.epoch.fence();
    }

    /// Says that this reader does not sleep. Writers that have not heard it yet may wake it for nothing.
    pub fn wake(&mut self) {
        if self.is_asleep() {
            self.now += 1;
            self.epoch.store(WORD, self.now, Ordering::Release);
        }
    }

    /// Whether writers are asked to wake this reader.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        self.now & 1 == 1
    }
}

/// Tells the writer that this ring is watched.
pub fn watch<M: Memory>(own: &M) {
    own.store(WATCH, WATCHED, Ordering::Release);
}

/// Tells the writer to ring for this ring. The caller looks into it once more afterwards.
pub fn unwatch<M: Memory>(own: &M) {
    own.store(WATCH, UNWATCHED, Ordering::Release);
    own.fence();
}
