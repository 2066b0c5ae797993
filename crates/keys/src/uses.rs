//! Counts the users of a slot of the key table, without a lock. Public for the model checker only (`tests/uses_loom.rs`).
//!
//! One word holds a valid bit and the number of accesses in progress. An access adds itself and looks at the bit in one
//! step. To take the slot out of use, a thread clears the bit, then waits until the number is zero. The slot's other
//! fields change only while the bit is clear and no access that saw it set remains. So an access that counted itself in
//! and saw the bit may read them.

use std::hint;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

const VALID: u64 = 1 << 63;

/// An atomic word: that of the machine, or that of a model checker.
pub trait Word {
    /// As [`AtomicU64::load`]; the others likewise.
    fn load(&self, order: Ordering) -> u64;
    /// Adds.
    fn fetch_add(&self, value: u64, order: Ordering) -> u64;
    /// Subtracts.
    fn fetch_sub(&self, value: u64, order: Ordering) -> u64;
    /// Sets bits.
    fn fetch_or(&self, bits: u64, order: Ordering) -> u64;
    /// Keeps bits.
    fn fetch_and(&self, bits: u64, order: Ordering) -> u64;
    /// Lets others run.
    fn pause(&self, spins: u32);
}

impl Word for AtomicU64 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    #[inline]
    fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        self.fetch_add(value, order)
    }

    #[inline]
    fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
        self.fetch_sub(value, order)
    }

    #[inline]
    fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
        self.fetch_or(bits, order)
    }

    #[inline]
    fn fetch_and(&self, bits: u64, order: Ordering) -> u64 {
        self.fetch_and(bits, order)
    }

    fn pause(&self, spins: u32) {
        /// After which the access is taken for one that waits for a page: a millisecond or more.
        const LONG: u32 = 64 * 1024;
        match spins {
            LONG.. => rest(),
            _ if spins.is_multiple_of(64) => thread::yield_now(),
            _ => hint::spin_loop(),
        }
    }
}

/// Yields the processor for a while. It sleeps on a futex: the sleep of the C library is a cancellation point, and
/// callers hold locks.
#[cold]
fn rest() {
    /// In microseconds. A sleep costs a hundredth of it (`a_long_wait_for_an_access_yields_the_processor`).
    const PAUSE: Duration = Duration::from_micros(500);
    let nobody = Mutex::new(());
    let guard = nobody.lock().unwrap_or_else(PoisonError::into_inner);
    drop(Condvar::new().wait_timeout(guard, PAUSE));
}

/// The state word of a slot.
#[derive(Debug, Default)]
pub struct Uses<W = AtomicU64>(W);

/// An access in progress; the slot's fields stay as they are while this lives.
#[derive(Debug)]
pub struct Use<'a, W: Word = AtomicU64>(&'a W);

impl<W: Word> Uses<W> {
    /// Begins an access, if the slot is valid.
    #[inline]
    #[must_use]
    pub fn begin(&self) -> Option<Use<'_, W>> {
        // Acquire: writes from before the bit was set are seen.
        let before = self.0.fetch_add(1, Ordering::Acquire);
        let in_use = Use(&self.0);
        (before & VALID != 0).then_some(in_use)
    }

    /// Whether it is open.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.0.load(Ordering::Acquire) & VALID != 0
    }

    /// Whoever finds the slot from now on may use it.
    pub fn open(&self) {
        self.0.fetch_or(VALID, Ordering::Release);
    }

    /// Lets no new user in from now on. Present users may go on.
    pub fn close(&self) {
        self.0.fetch_and(!VALID, Ordering::AcqRel);
    }

    /// Whether accesses are in progress. After [`close`](Self::close) none begins.
    #[must_use]
    pub fn are_any(&self) -> bool {
        self.0.load(Ordering::Relaxed) & !VALID != 0
    }

    /// Waits until no access is in progress, after [`close`](Self::close).
    pub fn drain(&self) {
        let mut spins = 0u32;
        // Acquire: the last access has read before anything is written from now on.
        while self.0.load(Ordering::Acquire) & !VALID != 0 {
            spins = spins.saturating_add(1);
            self.0.pause(spins);
        }
    }
}

impl<W: Word> Drop for Use<'_, W> {
    #[inline]
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    /// Time that this thread has had a processor.
    fn busy() -> Duration {
        let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        Duration::from_nanos(stat.split(' ').next().unwrap().parse().unwrap())
    }

    #[test]
    fn a_long_wait_for_an_access_yields_the_processor() {
        let uses: &'static Uses = Box::leak(Box::default());
        uses.open();
        let access = uses.begin().unwrap();
        uses.close();
        let waiting = thread::spawn(|| {
            let (begin, before) = (Instant::now(), busy());
            uses.drain();
            (begin.elapsed(), busy() - before)
        });
        thread::sleep(Duration::from_secs(2));
        drop(access);
        let (waited, busy) = waiting.join().unwrap();
        assert!(waited > Duration::from_secs(1) && busy < waited / 4, "{busy:?} of {waited:?}");
    }
}
