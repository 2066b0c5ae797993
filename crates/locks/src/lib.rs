//! The locks of the device. Each has a [`Rank`], and a thread takes locks in the order of their ranks.
//!
//! A lock names its rank in its type: `Mutex<rank::CompletionQueue, State>`. Builds with debug assertions check
//! the order, so every test does. A thread panics that takes a lock while it holds one of the same rank or of a later one.
//! `try_lock` never waits, so it may be used out of order. A lock that it takes counts for later ones.
//! Without debug assertions these are parking_lot's locks, or those of [`fast`], and the rank costs nothing.

pub mod fast;
mod held;
mod monitor;
mod order;

use std::marker::PhantomData;
use std::time::{Duration, Instant};

use parking_lot::lock_api::{self, GuardNoSend, RawMutexTimed, RawRwLockTimed};

pub use monitor::{Monitor, MonitorGuard};
pub use order::{Rank, Ranked, rank};

/// A mutex of rank `R`.
pub type Mutex<R, T> = lock_api::Mutex<RawMutex<R>, T>;
/// A hold of a [`Mutex`]; its drop releases it.
pub type MutexGuard<'a, R, T> = lock_api::MutexGuard<'a, RawMutex<R>, T>;
/// A mutex of rank `R` for the data path: its release is a plain store ([`fast`]).
pub type FastMutex<R, T> = lock_api::Mutex<RawFastMutex<R>, T>;
/// A hold of a [`FastMutex`]; its drop releases it.
pub type FastMutexGuard<'a, R, T> = lock_api::MutexGuard<'a, RawFastMutex<R>, T>;
/// A reader-writer lock of rank `R`. A thread that reads does not read again: a waiting writer would stop it.
pub type RwLock<R, T> = lock_api::RwLock<RawRwLock<R>, T>;
/// A hold of an [`RwLock`] for reading.
pub type RwLockReadGuard<'a, R, T> = lock_api::RwLockReadGuard<'a, RawRwLock<R>, T>;
/// A hold of an [`RwLock`] for writing.
pub type RwLockWriteGuard<'a, R, T> = lock_api::RwLockWriteGuard<'a, RawRwLock<R>, T>;

/// A raw mutex with a rank.
pub struct RankedMutex<R, M>(M, PhantomData<fn() -> R>);
/// parking_lot's.
pub type RawMutex<R> = RankedMutex<R, parking_lot::RawMutex>;
/// That of the data path.
pub type RawFastMutex<R> = RankedMutex<R, fast::Lock>;

// SAFETY: all is done by the raw mutex; the rank is only looked at.
unsafe impl<R: Ranked, M: lock_api::RawMutex> lock_api::RawMutex for RankedMutex<R, M> {
    const INIT: Self = Self(M::INIT, PhantomData);
    type GuardMarker = GuardNoSend;

    #[inline]
    fn lock(&self) {
        held::check(R::RANK);
        self.0.lock();
        held::add(R::RANK);
    }

    #[inline]
    fn try_lock(&self) -> bool {
        let is_taken = self.0.try_lock();
        held::add_if(is_taken, R::RANK)
    }

    #[inline]
    unsafe fn unlock(&self) {
        held::remove(R::RANK);
        // SAFETY: as the caller promises.
        unsafe { self.0.unlock() }
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.0.is_locked()
    }
}

// SAFETY: as above.
unsafe impl<R: Ranked, M: RawMutexTimed> RawMutexTimed for RankedMutex<R, M> {
    type Duration = M::Duration;
    type Instant = M::Instant;

    #[inline]
    fn try_lock_for(&self, timeout: M::Duration) -> bool {
        let is_taken = self.0.try_lock_for(timeout);
        held::add_if(is_taken, R::RANK)
    }

    #[inline]
    fn try_lock_until(&self, timeout: M::Instant) -> bool {
        let is_taken = self.0.try_lock_until(timeout);
        held::add_if(is_taken, R::RANK)
    }
}

/// parking_lot's raw reader-writer lock with a rank.
pub struct RawRwLock<R>(parking_lot::RawRwLock, PhantomData<fn() -> R>);

// SAFETY: all is done by parking_lot's raw lock; the rank is only looked at.
unsafe impl<R: Ranked> lock_api::RawRwLock for RawRwLock<R> {
    const INIT: Self = Self(<parking_lot::RawRwLock as lock_api::RawRwLock>::INIT, PhantomData);
    type GuardMarker = GuardNoSend;

    #[inline]
    fn lock_shared(&self) {
        held::check(R::RANK);
        self.0.lock_shared();
        held::add(R::RANK);
    }

    #[inline]
    fn try_lock_shared(&self) -> bool {
        let is_taken = self.0.try_lock_shared();
        held::add_if(is_taken, R::RANK)
    }

    #[inline]
    unsafe fn unlock_shared(&self) {
        held::remove(R::RANK);
        // SAFETY: as the caller promises.
        unsafe { self.0.unlock_shared() }
    }

    #[inline]
    fn lock_exclusive(&self) {
        held::check(R::RANK);
        self.0.lock_exclusive();
        held::add(R::RANK);
    }

    #[inline]
    fn try_lock_exclusive(&self) -> bool {
        let is_taken = self.0.try_lock_exclusive();
        held::add_if(is_taken, R::RANK)
    }

    #[inline]
    unsafe fn unlock_exclusive(&self) {
        held::remove(R::RANK);
        // SAFETY: as the caller promises.
        unsafe { self.0.unlock_exclusive() }
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.0.is_locked()
    }
}

// SAFETY: as above.
unsafe impl<R: Ranked> RawRwLockTimed for RawRwLock<R> {
    type Duration = Duration;
    type Instant = Instant;

    fn try_lock_shared_for(&self, timeout: Duration) -> bool {
        let is_taken = self.0.try_lock_shared_for(timeout);
        held::add_if(is_taken, R::RANK)
    }

    fn try_lock_shared_until(&self, timeout: Instant) -> bool {
        let is_taken = self.0.try_lock_shared_until(timeout);
        held::add_if(is_taken, R::RANK)
    }

    fn try_lock_exclusive_for(&self, timeout: Duration) -> bool {
        let is_taken = self.0.try_lock_exclusive_for(timeout);
        held::add_if(is_taken, R::RANK)
    }

    fn try_lock_exclusive_until(&self, timeout: Instant) -> bool {
        let is_taken = self.0.try_lock_exclusive_until(timeout);
        held::add_if(is_taken, R::RANK)
    }
}

#[cfg(test)]
mod tests;
