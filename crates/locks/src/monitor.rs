//! A mutex that a thread may wait at until its contents change.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use crate::held;
use crate::order::Ranked;

/// A mutex of rank `R` with a condition variable. It counts as held while a thread waits at it.
#[derive(Debug)]
pub struct Monitor<R, T> {
    state: parking_lot::Mutex<T>,
    changed: parking_lot::Condvar,
    rank: PhantomData<fn() -> R>,
}

impl<R: Ranked, T> Monitor<R, T> {
    /// A monitor of `state`.
    pub const fn new(state: T) -> Self {
        Self {
            state: parking_lot::Mutex::new(state),
            changed: parking_lot::Condvar::new(),
            rank: PhantomData,
        }
    }

    /// Locks it.
    pub fn lock(&self) -> MonitorGuard<'_, R, T> {
        held::check(R::RANK);
        let state = self.state.lock();
        held::add(R::RANK);
        MonitorGuard { state, changed: &self.changed, rank: PhantomData }
    }

    /// Wakes a thread that waits.
    pub fn notify_one(&self) {
        self.changed.notify_one();
    }

    /// Wakes all threads that wait.
    pub fn notify_all(&self) {
        self.changed.notify_all();
    }
}

impl<R: Ranked, T: Default> Default for Monitor<R, T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

/// A hold of a [`Monitor`]; its drop releases it.
#[derive(Debug)]
pub struct MonitorGuard<'a, R: Ranked, T> {
    state: parking_lot::MutexGuard<'a, T>,
    changed: &'a parking_lot::Condvar,
    rank: PhantomData<fn() -> R>,
}

impl<R: Ranked, T> MonitorGuard<'_, R, T> {
    /// Releases the monitor until it is notified, and locks it again.
    pub fn wait(&mut self) {
        self.changed.wait(&mut self.state);
    }

    /// As [`wait`](Self::wait), until `deadline` at the latest. Returns whether that has passed.
    pub fn wait_until(&mut self, deadline: Instant) -> bool {
        self.changed.wait_until(&mut self.state, deadline).timed_out()
    }

    /// As [`wait`](Self::wait), for `timeout` at the longest. Returns whether that has passed.
    pub fn wait_for(&mut self, timeout: Duration) -> bool {
        self.changed.wait_for(&mut self.state, timeout).timed_out()
    }
}

impl<R: Ranked, T> Deref for MonitorGuard<'_, R, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.state
    }
}

impl<R: Ranked, T> DerefMut for MonitorGuard<'_, R, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.state
    }
}

impl<R: Ranked, T> Drop for MonitorGuard<'_, R, T> {
    fn drop(&mut self) {
        held::remove(R::RANK);
    }
}
