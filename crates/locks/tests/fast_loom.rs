//! The lock that is released by a plain store, under every interleaving and every reordering that the memory model allows.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod model;

use anyverbs_locks::fast::Lock;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use model::Model;

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
