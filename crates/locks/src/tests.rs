use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::{Monitor, Mutex, Rank, Ranked, RwLock, rank};

/// Whether `f` panics because of the order of locks, in a thread of its own.
fn is_refused(f: impl FnOnce() + Send) -> bool {
    let ended = thread::scope(|scope| scope.spawn(f).join());
    match ended {
        Ok(()) => false,
        Err(panic) => {
            let message = panic.downcast_ref::<String>().expect("a formatted message");
            assert!(message.starts_with("locks out of order"), "{message}");
            true
        }
    }
}

#[test]
fn locks_are_taken_in_the_order_of_their_ranks() {
    let (qp, cq) = (Mutex::<rank::QueuePair, _>::new(1), Mutex::<rank::CompletionQueue, _>::new(2));
    let down = || {
        let first = qp.lock();
        assert_eq!(*first + *cq.lock(), 3);
    };
    let up = || {
        let _first = cq.lock();
        drop(qp.lock());
    };
    assert!(!is_refused(down) && is_refused(up));
    // The refused thread has released its locks, and they counted for it alone.
    assert!(!is_refused(down));
}

#[test]
fn two_locks_of_a_rank_are_refused() {
    let pair = [const { Mutex::<rank::QueuePair, ()>::new(()) }; 2];
    let both = || {
        let _first = pair[0].lock();
        drop(pair[1].lock());
    };
    let one_after_the_other = || pair.iter().for_each(|lock| drop(lock.lock()));
    assert!(is_refused(both) && !is_refused(one_after_the_other));
}

#[test]
fn try_lock_may_be_out_of_order_and_counts_afterwards() {
    let (qp, cq) =
        (Mutex::<rank::QueuePair, ()>::new(()), Mutex::<rank::CompletionQueue, ()>::new(()));
    let tries = || {
        let _first = cq.lock();
        assert!(qp.try_lock().is_some() && qp.try_lock_for(Duration::ZERO).is_some());
    };
    let tried_before = || {
        let _first = cq.try_lock().expect("nobody else has it");
        drop(qp.lock());
    };
    assert!(!is_refused(tries) && is_refused(tried_before));
}

#[test]
fn readers_count_as_holders() {
    let (table, qp) =
        (RwLock::<rank::QueuePairs, ()>::new(()), Mutex::<rank::QueuePair, ()>::new(()));
    let reads_first = || {
        let _table = table.read();
        drop(qp.lock());
    };
    let reads_below = || {
        let _qp = qp.lock();
        drop(table.read());
    };
    let reads_twice = || {
        let _table = table.read();
        drop(table.read());
    };
    let writes_below_a_reader = || {
        let _table = table.read();
        drop(table.write());
    };
    assert!(!is_refused(reads_first) && is_refused(reads_below));
    assert!(is_refused(reads_twice) && is_refused(writes_below_a_reader));
    assert!(table.try_write().is_some(), "refused readers have let go");
}

#[test]
fn a_monitor_wakes_who_waits_and_has_a_rank() {
    let monitor = Monitor::<rank::EventChannel, bool>::default();
    let (waits, waiting) = mpsc::channel();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let mut state = monitor.lock();
            waits.send(()).expect("the test listens");
            while !*state {
                state.wait();
            }
        });
        waiting.recv().expect("the thread waits");
        *monitor.lock() = true;
        monitor.notify_all();
        waiter.join().expect("it was woken");
    });
    assert!(monitor.lock().wait_until(Instant::now()) && monitor.lock().wait_for(Duration::ZERO));
    let below = || {
        let _state = monitor.lock();
        drop(Mutex::<rank::CmMachine, ()>::new(()).lock());
    };
    assert!(is_refused(below));
}

#[test]
fn a_rank_as_a_type_is_that_of_the_list() {
    assert_eq!(Rank::ALL[Rank::QueuePair as usize], <rank::QueuePair as Ranked>::RANK);
    assert!(Rank::ALL.is_sorted());
}
