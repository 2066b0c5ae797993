//! Calls that come in a row, between a call that begins and one that ends: `ibv_wr_start` to `ibv_wr_complete`,
//! `ibv_start_poll` to `ibv_end_poll`. The beginning thread has the object to itself until then.

use std::{
    cell::UnsafeCell,
    sync::atomic::{AtomicUsize, Ordering},
};

/// State that one thread at a time works with, from [`begin`](Session::begin) to [`end`](Session::end).
///
/// A program that begins twice without an end starts over, in one thread, instead of waiting for itself; calls without
/// a beginning are refused.
#[derive(Debug, Default)]
pub(crate) struct Session<T> {
    /// The thread that has it: [`me`], or 0.
    owner: AtomicUsize,
    state: UnsafeCell<T>,
}

// SAFETY: `state` is only reached by the thread that stands in `owner`.
unsafe impl<T: Send> Sync for Session<T> {}

/// A number for this thread, which live threads do not share; never 0.
fn me() -> usize {
    // SAFETY: takes no pointers, and does not fail.
    let me = unsafe { libc::pthread_self() };
    me as usize
}

impl<T> Session<T> {
    pub(crate) fn new(state: T) -> Self {
        Self { owner: AtomicUsize::new(0), state: UnsafeCell::new(state) }
    }

    /// Waits until no other thread has the object, and takes it. False if `give_up` says so while it waits.
    pub(crate) fn begin(&self, give_up: impl Fn() -> bool) -> bool {
        let me = me();
        for round in 0u32.. {
            match self.owner.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => break,
                Err(owner) if owner == me => break,
                // The owner is between two calls of its program, which takes no time or very long.
                Err(_) if round < 64 => std::hint::spin_loop(),
                Err(_) if give_up() => return false,
                Err(_) => std::thread::yield_now(),
            }
        }
        true
    }

    /// Whether this thread has the object.
    pub(crate) fn is_mine(&self) -> bool {
        self.owner.load(Ordering::Relaxed) == me()
    }

    /// Whether any thread has the object.
    pub(crate) fn is_begun(&self) -> bool {
        self.owner.load(Ordering::Relaxed) != 0
    }

    /// The state, for the thread that began; `None` for others.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        // SAFETY: this thread is the owner, and `f` is code of this library that does not come back here.
        self.is_mine().then(|| f(unsafe { &mut *self.state.get() }))
    }

    /// Gives the object up.
    pub(crate) fn end(&self) {
        if self.is_mine() {
            self.owner.store(0, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn one_thread_at_a_time() {
        let session = Arc::new(Session::new(0u32));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let session = Arc::clone(&session);
                std::thread::spawn(move || {
                    for _ in 0..1000 {
                        assert!(session.begin(|| false));
                        let before = session.with(|n| *n).unwrap();
                        std::thread::yield_now();
                        session.with(|n| *n = before + 1).unwrap();
                        session.end();
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert!(session.begin(|| false));
        assert_eq!(session.with(|n| *n), Some(4000));
    }

    #[test]
    fn a_second_session_does_not_wait_and_strangers_get_none() {
        let session = Arc::new(Session::new(()));
        assert_eq!(session.with(|()| ()), None);
        assert!(session.begin(|| false) && session.begin(|| false));
        let other = Arc::clone(&session);
        std::thread::spawn(move || {
            assert_eq!(other.with(|()| ()), None);
            other.end();
            assert!(!other.begin(|| true));
        })
        .join()
        .unwrap();
        assert!(session.is_mine());
    }
}
