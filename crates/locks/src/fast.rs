//! A lock that is released by a plain store.
//!
//! A release of an ordinary lock is a locked instruction, since it must learn in one step whether a thread waits. Here the
//! releasing thread stores, and then loads the number of waiters. A processor may do the load before others see the store. So a
//! thread that begins to wait adds itself to that number, and then makes every other thread of the process pass a memory barrier
//! (membarrier(2)). Each release before the barrier is seen by the waiter, and each one after it sees the waiter.
//!
//! Where the kernel refuses the barrier, a waiter looks again every millisecond.
//!
//! So a release is no barrier for the loads behind it. Whoever leaves a note for the holder of a lock calls [`heavy_fence`] before it
//! tries the lock again. A release touches the lock once more when another thread may have it
//! already. So having had the lock does not tell a thread that it may free the lock's memory.
//!
//! Public for the model checker only (`tests/fast_loom.rs`).

use std::sync::atomic::{AtomicU32, Ordering, compiler_fence};
use std::time::{Duration, Instant};

use parking_lot::lock_api::{GuardNoSend, RawMutex, RawMutexTimed};
use parking_lot_core::SpinWait;
use rustix::thread::{MembarrierCommand, futex, membarrier};
use rustix::time::Timespec;

const FREE: u32 = 0;
const TAKEN: u32 = 1;

/// A word and what a thread does around it: those of the machine, or of a model checker.
pub trait Word: Sync {
    /// As [`AtomicU32::load`]; the others likewise.
    fn load(&self, order: Ordering) -> u32;
    /// Stores.
    fn store(&self, value: u32, order: Ordering);
    /// Replaces.
    fn swap(&self, value: u32, order: Ordering) -> u32;
    /// Adds.
    fn fetch_add(&self, value: u32, order: Ordering) -> u32;
    /// Subtracts.
    fn fetch_sub(&self, value: u32, order: Ordering) -> u32;
    /// Between a store and a load that [`heavy_fence`](Self::heavy_fence) orders for other threads.
    fn light_fence();
    /// Makes all other threads pass a barrier. False where the kernel refuses.
    fn heavy_fence() -> bool;
    /// Sleeps until it is woken, if the word has this value; not longer than `timeout`. It may return at any time.
    fn sleep(&self, value: u32, timeout: Option<Duration>);
    /// Wakes a thread that sleeps.
    fn wake(&self);
    /// Waits a little until the word is 0 and `is_over` becomes true. Whether it did.
    fn spin(&self, is_over: impl FnMut() -> bool) -> bool;
}

impl Word for AtomicU32 {
    #[inline]
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    #[inline]
    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order);
    }

    #[inline]
    fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.swap(value, order)
    }

    fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        self.fetch_add(value, order)
    }

    fn fetch_sub(&self, value: u32, order: Ordering) -> u32 {
        self.fetch_sub(value, order)
    }

    #[inline]
    fn light_fence() {
        compiler_fence(Ordering::SeqCst);
    }

    fn heavy_fence() -> bool {
        membarrier(MembarrierCommand::PrivateExpedited).is_ok()
    }

    fn sleep(&self, value: u32, timeout: Option<Duration>) {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        // An interruption, the end of the time and another value: the caller looks again after each.
        let _ = futex::wait(self, futex::Flags::PRIVATE, value, timeout.as_ref());
    }

    fn wake(&self) {
        // It fails for no word of this process.
        let _ = futex::wake(self, futex::Flags::PRIVATE, 1);
    }

    fn spin(&self, mut is_over: impl FnMut() -> bool) -> bool {
        let mut spins = SpinWait::new();
        loop {
            // A look takes the line from nobody.
            if self.load(Ordering::Relaxed) == 0 && is_over() {
                return true;
            }
            if !spins.spin() {
                return false;
            }
        }
    }
}

/// Tells the kernel that this process will ask for barriers. Before its first threads: then it costs nothing.
pub fn prepare() {
    // Where it fails, waiters notice.
    let _ = membarrier(MembarrierCommand::RegisterPrivateExpedited);
}

/// Makes all other threads of the process pass a memory barrier: behind it, what they have stored before it is seen, and they
/// see what the caller has stored. Where the kernel refuses, there is none.
pub fn heavy_fence() {
    let _ = AtomicU32::heavy_fence();
}

/// The lock.
#[derive(Debug)]
pub struct Lock<W = AtomicU32> {
    state: W,
    waiters: W,
}

impl Lock {
    /// A free one.
    #[must_use]
    pub const fn new() -> Self {
        Self { state: AtomicU32::new(FREE), waiters: AtomicU32::new(0) }
    }
}

impl Default for Lock {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: a thread has it from a swap that found it free to the store that frees it.
unsafe impl RawMutex for Lock {
    const INIT: Self = Self::new();
    type GuardMarker = GuardNoSend;

    #[inline]
    fn lock(&self) {
        self.lock();
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.try_lock()
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.unlock();
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.is_locked()
    }
}

// SAFETY: as above.
unsafe impl RawMutexTimed for Lock {
    type Duration = Duration;
    type Instant = Instant;

    fn try_lock_for(&self, timeout: Duration) -> bool {
        // A time that the clock cannot show never comes.
        let latest = Instant::now().checked_add(timeout);
        self.try_lock() || self.wait(latest)
    }

    fn try_lock_until(&self, timeout: Instant) -> bool {
        self.try_lock() || self.wait(Some(timeout))
    }
}

impl<W: Word> Lock<W> {
    /// A free one, of words that are 0.
    pub fn of(state: W, waiters: W) -> Self {
        Self { state, waiters }
    }

    /// Takes it. Waits as long as another thread has it.
    #[inline]
    pub fn lock(&self) {
        if !self.take() {
            self.wait(None);
        }
    }

    /// Takes it, if it is free.
    #[inline]
    pub fn try_lock(&self) -> bool {
        !self.is_locked() && self.take()
    }

    #[inline]
    fn take(&self) -> bool {
        self.state.swap(TAKEN, Ordering::Acquire) == FREE
    }

    /// Whether a thread has it.
    #[inline]
    pub fn is_locked(&self) -> bool {
        self.state.load(Ordering::Relaxed) != FREE
    }

    /// Releases it. The calling thread has it.
    #[inline]
    pub fn unlock(&self) {
        self.state.store(FREE, Ordering::Release);
        W::light_fence();
        if self.waiters.load(Ordering::Relaxed) != 0 {
            self.wake();
        }
    }

    #[cold]
    #[inline(never)]
    fn wake(&self) {
        self.state.wake();
    }

    #[cold]
    #[inline(never)]
    fn wait(&self, deadline: Option<Instant>) -> bool {
        /// Where the kernel refuses barriers, a release may go unnoticed for so long.
        const PAUSE: Duration = Duration::from_millis(1);
        if self.state.spin(|| self.take()) {
            return true;
        }
        if deadline.is_some_and(|at| at <= Instant::now()) {
            return false;
        }
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let pause = (!W::heavy_fence()).then_some(PAUSE);
        let is_taken = loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if self.state.spin(|| self.take()) {
                break true;
            }
            if left.is_some_and(|left| left.is_zero()) {
                // Whoever has the lock sees the other waiters when it releases it.
                break false;
            }
            self.state.sleep(TAKEN, pause.into_iter().chain(left).min());
        };
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        is_taken
    }
}
