//! A lock that is released by a plain store.
//!
//! A release of an ordinary lock is a locked instruction, since it must learn in one step whether a thread waits. Here the
//! releasing thread stores, and then loads a word by which waiters ask to be woken. A processor may do the load before others see
//! the store. So a thread that is about to sleep sets that word, and then makes every other thread of the process pass a memory
//! barrier (membarrier(2)). Each release before the barrier is seen by the waiter, and each one after it sees the word.
//!
//! The release that sees it clears it and wakes one who sleeps. That one sets it again when it has the lock, or finds it taken, for
//! others may sleep still. So a waiter that is awake but has no processor costs the releases nothing meanwhile.
//!
//! Where the kernel refuses the barrier, a waiter looks again every millisecond.
//!
//! So a release is no barrier for the loads behind it. Whoever leaves a note for the holder of a lock calls [`heavy_fence`] before it
//! tries the lock again. A release reads the word of the waiters, and may write it, when another thread may have the lock
//! already. So having had the lock does not tell a thread that it may free the lock's memory.
//!
//! A thread that takes the lock again at once would keep a waiter away, which needs tens of microseconds to wake. So a waiter that
//! has slept in vain more than once says so. The release that wakes a thread then waits a little until somebody has the lock.
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

const NOBODY: u32 = 0;
const SOMEBODY: u32 = 1;
/// One of them has slept in vain, [more than once](IN_VAIN).
const STARVING: u32 = 2;

/// So often a waiter may find that another thread was faster. While the release waits for it, nobody has the lock.
const IN_VAIN: u32 = 2;
/// The kernel needs less to run a thread that was woken, if it has a processor for it.
const PATIENCE: Duration = Duration::from_micros(100);

/// A word and what a thread does around it: those of the machine, or of a model checker.
pub trait Word: Sync {
    /// As [`AtomicU32::load`]; the others likewise.
    fn load(&self, order: Ordering) -> u32;
    /// Stores.
    fn store(&self, value: u32, order: Ordering);
    /// Replaces.
    fn swap(&self, value: u32, order: Ordering) -> u32;
    /// Between a store and a load that [`heavy_fence`](Self::heavy_fence) orders for other threads.
    fn light_fence();
    /// Makes all other threads pass a barrier. False where the kernel refuses.
    fn heavy_fence() -> bool;
    /// Sleeps until it is woken, if the word has this value; not longer than `timeout`. It may return at any time.
    fn sleep(&self, value: u32, timeout: Option<Duration>);
    /// Wakes a thread that sleeps. Whether one did.
    fn wake(&self) -> bool;
    /// Waits a little until the word is 0 and `is_over` becomes true. Whether it did.
    fn spin(&self, is_over: impl FnMut() -> bool) -> bool;
    /// Waits a little until the word is not 0, and lets other threads run.
    fn give_way(&self);
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

    fn wake(&self) -> bool {
        // It fails for no word of this process.
        futex::wake(self, futex::Flags::PRIVATE, 1).is_ok_and(|woken| woken > 0)
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

    fn give_way(&self) {
        let begin = Instant::now();
        while self.load(Ordering::Relaxed) == 0 && begin.elapsed() < PATIENCE {
            std::thread::yield_now();
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
    /// Whether a thread sleeps, or is about to, that no release has seen. They sleep at this word.
    asleep: W,
}

impl Lock {
    /// A free one.
    #[must_use]
    pub const fn new() -> Self {
        let (state, asleep) = (AtomicU32::new(FREE), AtomicU32::new(NOBODY));
        Self { state, asleep }
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
    pub fn of(state: W, asleep: W) -> Self {
        Self { state, asleep }
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
        if self.asleep.load(Ordering::Relaxed) != NOBODY {
            self.wake();
        }
    }

    #[cold]
    #[inline(never)]
    fn wake(&self) {
        let asleep = self.asleep.swap(NOBODY, Ordering::SeqCst);
        let has_woken = asleep != NOBODY && self.asleep.wake();
        if has_woken && asleep == STARVING {
            self.state.give_way();
        }
    }

    #[cold]
    #[inline(never)]
    fn wait(&self, deadline: Option<Instant>) -> bool {
        /// Where the kernel refuses barriers, a release may go unnoticed for so long.
        const PAUSE: Duration = Duration::from_millis(1);
        if self.state.spin(|| self.take()) {
            return true;
        }
        let mut slept = 0;
        loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                if slept > 0 {
                    // It may have been the one that a release woke.
                    self.asleep.wake();
                }
                return false;
            }
            let own = if slept < IN_VAIN { SOMEBODY } else { STARVING };
            let told = own.max(self.asleep.load(Ordering::Relaxed));
            self.asleep.swap(told, Ordering::SeqCst);
            let pause = (!W::heavy_fence()).then_some(PAUSE);
            if self.state.spin(|| self.take()) {
                // The word is set: the release of this thread wakes the next one.
                return true;
            }
            self.asleep.sleep(told, pause.into_iter().chain(left).min());
            slept += 1;
        }
    }
}
