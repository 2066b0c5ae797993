//! Threads that share an end of a lane, and the end of a lane.

use std::sync::atomic::{AtomicUsize, Ordering};

use anyverbs_locks::fast::Lock;
use anyverbs_net::shm::Memory;
use anyverbs_net::shm::lane::{LanePlace, LaneReader, LaneWriter};
use anyverbs_net::shm::notify::{Doorbell, Ears};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::lanes::lane;
use crate::lock_model;
use crate::model::{DATA, Model, WORDS, check};

/// Two threads that poll a queue each. Both are queues of one queue pair, so either finds what has come for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Poller {
    /// It falls asleep.
    Last,
    Other,
}

/// An end of a lane of that queue pair, and what was executed or completed there: who did it, and its number. Without `LOCKED` the
/// threads do not exclude each other.
struct Polled<T, const LOCKED: bool> {
    lock: Lock<lock_model::Model<true>>,
    end: T,
    done: UnsafeCell<Vec<(Poller, u32)>>,
}

// SAFETY: this test checks that accesses of `done` exclude each other.
unsafe impl<T: Sync, const LOCKED: bool> Sync for Polled<T, LOCKED> {}
// SAFETY: as above.
unsafe impl<T: Send, const LOCKED: bool> Send for Polled<T, LOCKED> {}

impl<T, const LOCKED: bool> Polled<T, LOCKED> {
    fn new(end: T) -> Arc<Self> {
        let lock = Lock::of(lock_model::Model::default(), lock_model::Model::default());
        Arc::new(Self { lock, end, done: UnsafeCell::new(Vec::new()) })
    }

    fn locked<R>(&self, serve: impl FnOnce(&T, &mut Vec<(Poller, u32)>) -> R) -> R {
        if LOCKED {
            self.lock.lock();
        }
        // SAFETY: the model checker finds out whether another thread is there.
        let result = self.done.with_mut(|done| serve(&self.end, unsafe { &mut *done }));
        if LOCKED {
            self.lock.unlock();
        }
        result
    }

    /// The numbers that were done, and whether each thread has done some.
    fn done(&self) -> (Vec<u32>, bool) {
        self.locked(|_, done| {
            let by = |poller| done.iter().any(|(by, _)| *by == poller);
            (done.iter().map(|(_, n)| *n).collect(), by(Poller::Last) && by(Poller::Other))
        })
    }
}

/// An end at which a thread finds news.
trait End: Sync {
    fn has_news(&self) -> bool;
    fn serve(&self, by: Poller, done: &mut Vec<(Poller, u32)>);
}

impl<const F: bool> End for LaneReader<Model<F>> {
    fn has_news(&self) -> bool {
        self.is_ready()
    }

    /// Executes the cells that are there.
    fn serve(&self, by: Poller, executed: &mut Vec<(Poller, u32)>) {
        while let Some(cell) = self.peek() {
            executed.push((by, cell.low));
            self.take();
            self.answer(Some(cell.low));
        }
        // The last PSN stays, as it does behind a request that is not executed at once.
        self.answer(None);
    }
}

impl<const F: bool> End for LaneWriter<Model<F>> {
    fn has_news(&self) -> bool {
        self.has_answer()
    }

    /// Completes the requests that the answer says to be executed.
    fn serve(&self, by: Poller, completed: &mut Vec<(Poller, u32)>) {
        let Some(answer) = self.take_answer() else { return };
        assert!(answer.is_open, "it is not taken for an old one");
        let una = completed.last().map_or(0, |(_, psn)| *psn) + 1;
        completed.extend((una..=answer.executed.unwrap_or(0)).map(|psn| (by, psn)));
    }
}

impl<T: End, const LOCKED: bool> Polled<T, LOCKED> {
    fn poll(&self, by: Poller) {
        if self.end.has_news() {
            self.locked(|end, done| end.serve(by, done));
        }
    }
}

/// The runs in which a sleeper was woken, and those in which both threads found something.
#[derive(Default)]
struct Runs {
    woken: AtomicUsize,
    shared: AtomicUsize,
}

impl Runs {
    const fn new() -> Self {
        Self { woken: AtomicUsize::new(0), shared: AtomicUsize::new(0) }
    }

    fn saw_all(&self) -> bool {
        self.woken.load(Ordering::Relaxed) > 0 && self.shared.load(Ordering::Relaxed) > 0
    }
}

/// Two threads poll an end to which `news` come twice. One of them falls asleep. What came is done once and in order, or somebody
/// is awake who will do it.
fn two_pollers<const LOCKED: bool, const F: bool, T>(
    polled: &Arc<Polled<T, LOCKED>>,
    news: impl Fn(u32) + Send + 'static,
    runs: &Runs,
) where
    T: End + Send + 'static,
{
    let (doorbells, epoch) = (Model::<F>::word(), Model::<F>::word());
    let (fenced, doorbell) = (epoch.clone(), Doorbell::new(doorbells.clone(), epoch.clone(), 2));
    let peer = thread::spawn(move || {
        let show = |n| {
            news(n);
            fenced.fence();
            doorbell.is_asleep()
        };
        show(1) | show(2)
    });
    let other = Arc::clone(polled);
    let other = thread::spawn(move || other.poll(Poller::Other));
    let mut ears = Ears::new(doorbells, epoch);
    ears.fall_asleep();
    let found = polled.end.has_news();
    if found {
        ears.wake();
        polled.poll(Poller::Last);
    }
    other.join().unwrap();
    let woken = peer.join().unwrap();
    assert!(found || woken || !polled.end.has_news(), "asleep for ever");
    polled.poll(Poller::Last);
    let (done, is_shared) = polled.done();
    assert_eq!(done, [1, 2]);
    runs.woken.fetch_add(usize::from(woken), Ordering::Relaxed);
    runs.shared.fetch_add(usize::from(is_shared), Ordering::Relaxed);
}

/// Cells are shown to a queue pair that two threads poll.
fn two_pollers_of_cells<const LOCKED: bool, const F: bool>() {
    static RUNS: Runs = Runs::new();
    check(|| {
        let (writer, reader) = lane::<F>();
        let polled = Polled::<_, LOCKED>::new(reader);
        let writer = Arc::new(writer);
        let shown = Arc::clone(&writer);
        two_pollers::<LOCKED, F, _>(&polled, move |n| shown.show(n, 0), &RUNS);
        let answer = writer.take_answer().unwrap();
        assert_eq!((answer.next, answer.executed), (3, Some(2)));
    });
    assert!(RUNS.saw_all());
}

#[test]
fn two_threads_execute_each_cell_once() {
    two_pollers_of_cells::<true, true>();
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_lock_two_threads_execute_at_once() {
    two_pollers_of_cells::<false, true>();
}

#[test]
#[should_panic(expected = "asleep for ever")]
fn without_fences_one_of_two_threads_may_miss_a_cell() {
    two_pollers_of_cells::<true, false>();
}

/// Answers are given to a queue pair that two threads poll.
fn two_pollers_of_answers<const LOCKED: bool, const F: bool>() {
    static RUNS: Runs = Runs::new();
    check(|| {
        let (writer, reader) = lane::<F>();
        (0..2).for_each(|_| writer.show(0, 0));
        let polled = Polled::<_, LOCKED>::new(writer);
        let execute = move |n| {
            reader.take();
            reader.answer(Some(n));
        };
        two_pollers::<LOCKED, F, _>(&polled, execute, &RUNS);
    });
    assert!(RUNS.saw_all());
}

#[test]
fn two_threads_complete_each_send_once() {
    two_pollers_of_answers::<true, true>();
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_lock_two_threads_complete_at_once() {
    two_pollers_of_answers::<false, true>();
}

#[test]
#[should_panic(expected = "asleep for ever")]
fn without_fences_one_of_two_threads_may_miss_an_answer() {
    two_pollers_of_answers::<true, false>();
}

/// A reader executes what it sees, and leaves, while two cells are shown. The last answer says all that it has executed, and what it
/// did is visible.
#[test]
fn a_reader_that_leaves_has_said_what_it_executed() {
    static SEEN: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];
    check(|| {
        let (writer, reader) = lane::<true>();
        let executed = Arc::new(UnsafeCell::new(0));
        let done = Arc::clone(&executed);
        let receiver = thread::spawn(move || {
            for _ in 0..2 {
                let Some(cell) = reader.peek() else { break };
                // SAFETY: the other thread looks only after the last answer.
                done.with_mut(|done| unsafe { *done = cell.low });
                reader.take();
                reader.answer(Some(cell.low));
            }
            reader.close();
            assert!(!reader.is_open());
        });
        writer.show(1, 0);
        writer.show(2, 0);
        let last = loop {
            match writer.take_answer() {
                Some(answer) if !answer.is_open => break answer,
                _ => thread::yield_now(),
            }
        };
        // SAFETY: the reader does nothing more.
        let done = executed.with(|executed| unsafe { *executed });
        assert_eq!((last.next, last.executed.unwrap_or(0)), (1 + done, done));
        SEEN[done as usize].fetch_add(1, Ordering::Relaxed);
        writer.note_told();
        writer.give_up();
        assert!(writer.is_free());
        receiver.join().unwrap();
    });
    assert!(SEEN.iter().all(|seen| seen.load(Ordering::Relaxed) > 0));
}

/// The reader of a lane leaves it while its writer falls asleep. That one finds it, or is woken.
fn sleeper_for_an_end<const F: bool>() {
    check(|| {
        let (writer, reader) = lane::<F>();
        let (doorbells, epoch) = (Model::<F>::word(), Model::<F>::word());
        let (fenced, doorbell) =
            (epoch.clone(), Doorbell::new(doorbells.clone(), epoch.clone(), 2));
        let receiver = thread::spawn(move || {
            reader.close();
            fenced.fence();
            doorbell.is_asleep()
        });
        let mut ears = Ears::new(doorbells, epoch);
        ears.fall_asleep();
        let found = writer.has_answer();
        let woken = receiver.join().unwrap();
        assert!(found || woken, "asleep for ever");
        assert!(writer.take_answer().is_some_and(|answer| !answer.is_open));
    });
}

#[test]
fn a_sleeper_finds_the_end_of_its_lane_or_is_woken() {
    sleeper_for_an_end::<true>();
}

#[test]
#[should_panic(expected = "asleep for ever")]
fn without_fences_a_sleeper_may_miss_the_end_of_its_lane() {
    sleeper_for_an_end::<false>();
}

/// A thread gives a lane up, its reader leaves it, and a third thread would open the next one at its place, with the same memory for
/// payloads. It does so only when nobody writes or reads there, and neither end takes anything of the other lane for its own.
#[test]
fn a_place_is_anothers_when_both_ends_have_left_it() {
    static OPENED: AtomicUsize = AtomicUsize::new(0);
    check(|| {
        let (written, read) = (Model::<true>::of(WORDS + 5 * 64 / 8), Model::<true>::side());
        let place = LanePlace::new(0, DATA, 0);
        let writer = Arc::new(LaneWriter::new(written.clone(), read.clone(), place, 1));
        let reader = LaneReader::new(read.clone(), written.clone(), place, 1);
        assert!(writer.take_answer().is_some_and(|answer| answer.is_open));
        writer.note_told();
        let payload = Arc::new(UnsafeCell::new(0));
        let sends = {
            let (writer, payload) = (Arc::clone(&writer), Arc::clone(&payload));
            thread::spawn(move || {
                // SAFETY: the model checker finds out whether another thread is there.
                payload.with_mut(|payload| unsafe { *payload = 1 });
                writer.show(1, 0);
                writer.give_up();
            })
        };
        let reads = {
            let payload = Arc::clone(&payload);
            thread::spawn(move || {
                if let Some(cell) = reader.peek() {
                    // SAFETY: as above.
                    payload.with(|payload| assert_eq!(unsafe { *payload }, cell.low));
                    reader.take();
                    reader.answer(Some(cell.low));
                }
                reader.close();
                reader
            })
        };
        // `Channel::open_lane` does the same.
        let next = writer.is_free().then(|| {
            OPENED.fetch_add(1, Ordering::Relaxed);
            let first = writer.first_of_next();
            let next = LaneWriter::new(written.clone(), read.clone(), place, first);
            // SAFETY: as above.
            payload.with_mut(|payload| unsafe { *payload = 2 });
            next.show(2, 0);
            assert_eq!(next.take_answer(), None, "the answer to the last lane is none to this");
            (next, first)
        });
        sends.join().unwrap();
        let before = reads.join().unwrap();
        if let Some((next, first)) = next {
            assert!(before.peek().is_none_or(|cell| cell.low == 1), "a cell of the next lane");
            let reader = LaneReader::new(read, written, place, first);
            assert!(next.take_answer().is_some_and(|answer| answer.is_open));
            assert_eq!(reader.peek().map(|cell| cell.low), Some(2));
        }
    });
    assert!(OPENED.load(Ordering::Relaxed) > 0);
}
