//! The lock that is released by a plain store, under every interleaving and every reordering that the memory model allows.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::atomic::Ordering;
use std::time::Duration;

use anyverbs_locks::fast::{Lock, Word};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

/// A word of the model checker, and who sleeps at it. The light fence is a whole one here, since the checker knows no
/// membarrier(2). Without `FENCED` there is none, to show that the models notice.
struct Model<const FENCED: bool> {
    word: AtomicU32,
    /// Those who sleep and were not woken.
    sleepers: Mutex<u32>,
    woken: Condvar,
}

impl<const FENCED: bool> Default for Model<FENCED> {
    fn default() -> Self {
        Self { word: AtomicU32::new(0), sleepers: Mutex::new(0), woken: Condvar::new() }
    }
}

impl<const FENCED: bool> Word for Model<FENCED> {
    fn load(&self, order: Ordering) -> u32 {
        self.word.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        // For the checker, a swap of a thread that waits may come behind the release that it precedes. Swaps have one order.
        self.word.swap(value, order);
    }

    fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.word.swap(value, order)
    }

    fn light_fence() {
        if FENCED {
            fence(Ordering::SeqCst);
        }
    }

    fn heavy_fence() -> bool {
        fence(Ordering::SeqCst);
        true
    }

    fn sleep(&self, value: u32, timeout: Option<Duration>) {
        assert!(timeout.is_none(), "a model has no clock");
        // As in the kernel, the look and the sleep are one step for whoever wakes. An addition reads the last value.
        let mut sleepers = self.sleepers.lock().unwrap();
        if self.word.fetch_add(0, Ordering::Relaxed) != value {
            return;
        }
        *sleepers += 1;
        if FENCED {
            drop(self.woken.wait(sleepers).unwrap());
            return;
        }
        // The only thread that sleeps. The checker would abort the process if it found it asleep for ever.
        while *sleepers > 0 {
            drop(sleepers);
            thread::yield_now();
            sleepers = self.sleepers.lock().unwrap();
        }
    }

    fn wake(&self) {
        let mut sleepers = self.sleepers.lock().unwrap();
        *sleepers = sleepers.saturating_sub(1);
        self.woken.notify_one();
    }

    fn spin(&self, mut is_over: impl FnMut() -> bool) -> bool {
        is_over()
    }
}

/// A lock and what it guards.
struct Guarded<const FENCED: bool> {
    lock: Lock<Model<FENCED>>,
    value: UnsafeCell<u32>,
}

// SAFETY: this test checks that accesses of `value` exclude each other.
unsafe impl<const FENCED: bool> Sync for Guarded<FENCED> {}
// SAFETY: as above.
unsafe impl<const FENCED: bool> Send for Guarded<FENCED> {}

impl<const FENCED: bool> Guarded<FENCED> {
    fn add(&self) {
        self.lock.lock();
        // SAFETY: the model checker finds out whether another thread is there.
        self.value.with_mut(|at| unsafe { *at += 1 });
        self.lock.unlock();
    }
}

/// `threads` threads that add `times` each; all of them end.
fn add_in_turn<const FENCED: bool>(threads: u32, times: u32) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let lock = Lock::of(Model::default(), Model::default());
        let guarded = Arc::new(Guarded::<FENCED> { lock, value: UnsafeCell::new(0) });
        let others: Vec<_> = (1..threads)
            .map(|_| {
                let guarded = guarded.clone();
                thread::spawn(move || (0..times).for_each(|_| guarded.add()))
            })
            .collect();
        (0..times).for_each(|_| guarded.add());
        others.into_iter().for_each(|other| other.join().unwrap());
        guarded.lock.lock();
        // SAFETY: as above.
        let sum = guarded.value.with(|at| unsafe { *at });
        assert_eq!(sum, threads * times);
    });
}

#[test]
fn threads_exclude_each_other_and_none_sleeps_for_ever() {
    add_in_turn::<true>(2, 2);
}

#[test]
fn one_of_two_who_wait_wakes_the_other() {
    add_in_turn::<true>(3, 1);
}

#[test]
#[should_panic(expected = "exceeded maximum number of branches")]
fn without_the_fence_a_release_overlooks_a_waiter() {
    add_in_turn::<false>(2, 1);
}
