use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::{FastMutex, Monitor, Mutex, Rank, Ranked, RwLock, fast, rank};

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

/// Threads that add to a value, some of them with a limit of time. None is lost, and none waits for ever.
fn threads_take_turns() {
    const EACH: u32 = 20_000;
    let sum = FastMutex::<rank::CompletionQueue, _>::new(0);
    thread::scope(|scope| {
        for n in 0..4 {
            let sum = &sum;
            scope.spawn(move || {
                for _ in 0..EACH {
                    let mut held = match n {
                        0 => loop {
                            if let Some(held) = sum.try_lock_for(Duration::from_micros(10)) {
                                break held;
                            }
                        },
                        _ => sum.lock(),
                    };
                    *held += 1;
                    // Long enough that the others fall asleep.
                    if u32::is_multiple_of(*held, 64) {
                        thread::yield_now();
                    }
                }
            });
        }
    });
    assert_eq!(*sum.lock(), 4 * EACH);
}

#[test]
fn threads_take_turns_at_a_lock_that_is_released_by_a_store() {
    fast::prepare();
    threads_take_turns();
}

#[test]
fn they_do_where_the_kernel_refuses_barriers() {
    // As long as the process has not asked for them.
    threads_take_turns();
}

#[test]
fn a_wait_for_a_fast_lock_ends_in_time() {
    let lock = FastMutex::<rank::QueuePair, ()>::new(());
    let held = lock.lock();
    thread::scope(|scope| {
        let waited = scope.spawn(|| {
            let begin = Instant::now();
            (lock.try_lock_for(Duration::from_millis(30)).is_none(), begin.elapsed())
        });
        let (is_none, waited) = waited.join().expect("no panic");
        assert!(is_none && waited >= Duration::from_millis(30), "{waited:?}");
    });
    assert!(lock.is_locked() && lock.try_lock().is_none());
    drop(held);
    assert!(!lock.is_locked() && lock.try_lock_for(Duration::MAX).is_some());
}

/// A word at which a thread that was woken gets a processor when the test says so.
#[derive(Default)]
struct Slow {
    word: AtomicU32,
    /// How often a thread fell asleep, and how often one may go on.
    asleep: AtomicU32,
    processors: AtomicU32,
    wakes: AtomicU32,
    given: AtomicU32,
}

impl Slow {
    fn has_slept(&self, times: u32) {
        while self.asleep.load(Ordering::SeqCst) < times {
            thread::yield_now();
        }
    }
}

impl fast::Word for &Slow {
    fn load(&self, order: Ordering) -> u32 {
        self.word.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        self.word.store(value, order);
    }

    fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.word.swap(value, order)
    }

    fn light_fence() {
        fence(Ordering::SeqCst);
    }

    fn heavy_fence() -> bool {
        fence(Ordering::SeqCst);
        true
    }

    fn sleep(&self, value: u32, _: Option<Duration>) {
        if self.word.load(Ordering::SeqCst) == value {
            let times = self.asleep.fetch_add(1, Ordering::SeqCst);
            while self.processors.load(Ordering::SeqCst) <= times {
                thread::yield_now();
            }
        }
    }

    fn wake(&self) -> bool {
        self.wakes.fetch_add(1, Ordering::SeqCst);
        self.asleep.load(Ordering::SeqCst) > self.processors.load(Ordering::SeqCst)
    }

    fn spin(&self, mut is_over: impl FnMut() -> bool) -> bool {
        is_over()
    }

    fn give_way(&self) {
        self.given.fetch_add(1, Ordering::SeqCst);
    }
}

/// Holds a lock for which another thread waits, and releases it at the end.
fn beside_a_waiter(test: impl FnOnce(&fast::Lock<&Slow>, &Slow, &Slow)) {
    let (state, asleep) = (Slow::default(), Slow::default());
    let lock = fast::Lock::of(&state, &asleep);
    lock.lock();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            lock.lock();
            lock.unlock();
        });
        asleep.has_slept(1);
        test(&lock, &state, &asleep);
        lock.unlock();
        asleep.processors.store(u32::MAX, Ordering::SeqCst);
        waiter.join().expect("it takes the lock");
    });
}

#[test]
fn a_waiter_without_a_processor_is_woken_once() {
    beside_a_waiter(|lock, _, asleep| {
        for _ in 0..1000 {
            lock.unlock();
            lock.lock();
        }
        assert_eq!(asleep.wakes.load(Ordering::SeqCst), 1);
    });
}

#[test]
fn a_release_gives_way_to_a_waiter_that_was_woken_twice_in_vain() {
    beside_a_waiter(|lock, state, asleep| {
        let given = || {
            lock.unlock();
            lock.lock();
            state.given.load(Ordering::SeqCst)
        };
        for (times, expected) in [(1, 0), (2, 0), (3, 1), (4, 2)] {
            asleep.has_slept(times);
            assert_eq!(given(), expected, "it has slept {times} times");
            asleep.processors.store(times, Ordering::SeqCst);
        }
    });
}
