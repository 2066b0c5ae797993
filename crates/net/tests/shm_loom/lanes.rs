//! Lanes: cells, answers, bells and sleep.

use std::sync::atomic::{AtomicUsize, Ordering};

use anyverbs_net::shm::Memory;
use anyverbs_net::shm::bells::{BellPlace, Listener, Looks, Ringer, Rung, Spot};
use anyverbs_net::shm::lane::{LanePlace, LaneReader, LaneWriter};
use anyverbs_net::shm::notify::{Doorbell, Ears};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::model::{DATA, Model, WORDS, check};

/// A lane whose cells lie where a ring would, with its answer in the first word of the other side. The first three cells have
/// memory.
pub(crate) fn lane<const F: bool>() -> (LaneWriter<Model<F>>, LaneReader<Model<F>>) {
    let (written, read) = (Model::of(WORDS + 4 * 64 / 8), Model::side());
    let place = LanePlace::new(0, DATA, 0);
    let writer = LaneWriter::new(written.clone(), read.clone(), place, 1);
    let reader = LaneReader::new(read, written, place, 1);
    assert!(writer.take_answer().is_some_and(|answer| answer.is_open));
    (writer, reader)
}

#[test]
fn a_lanes_cell_is_whole_once_its_number_is_there() {
    static SEEN: AtomicUsize = AtomicUsize::new(0);
    check(|| {
        let (writer, reader) = lane::<true>();
        let sender = thread::spawn(move || {
            for n in 1..=2 {
                writer.show(n, u64::from(n) << 32);
            }
        });
        for n in 1..=2 {
            let Some(cell) = reader.peek() else { break };
            SEEN.fetch_add(1, Ordering::Relaxed);
            assert_eq!((cell.low, cell.word), (n, u64::from(n) << 32));
            reader.take();
        }
        sender.join().unwrap();
    });
    assert!(SEEN.load(Ordering::Relaxed) > 0);
}

#[test]
fn what_a_reader_did_is_visible_with_its_answer() {
    static SEEN: AtomicUsize = AtomicUsize::new(0);
    check(|| {
        let (writer, reader) = lane::<true>();
        writer.show(0, 0);
        let done = Arc::new(UnsafeCell::new(0));
        let executed = Arc::clone(&done);
        let receiver = thread::spawn(move || {
            assert!(reader.peek().is_some());
            // SAFETY: the other thread looks only after the answer.
            executed.with_mut(|executed| unsafe { *executed = 7 });
            reader.take();
            reader.answer(Some(7));
        });
        if let Some(answer) = writer.take_answer() {
            SEEN.fetch_add(1, Ordering::Relaxed);
            assert_eq!((answer.next, answer.executed), (2, Some(7)));
            // SAFETY: the answer says that it is done.
            done.with(|done| assert_eq!(unsafe { *done }, 7));
        }
        receiver.join().unwrap();
    });
    assert!(SEEN.load(Ordering::Relaxed) > 0);
}

/// A cell is shown to a reader that falls asleep: it is found, or the reader is woken.
fn sleeper_at_a_lane<const F: bool>() {
    check(|| {
        let (writer, reader) = lane::<F>();
        let (doorbells, epoch) = (Model::<F>::word(), Model::<F>::word());
        let (fenced, doorbell) =
            (epoch.clone(), Doorbell::new(doorbells.clone(), epoch.clone(), 2));
        let sender = thread::spawn(move || {
            writer.show(0, 0);
            fenced.fence();
            doorbell.is_asleep()
        });
        let mut ears = Ears::new(doorbells, epoch);
        ears.fall_asleep();
        let found = reader.is_ready();
        let woken = sender.join().unwrap();
        assert!(found || woken, "asleep for ever");
    });
}

#[test]
fn a_sleeper_finds_the_cell_or_is_woken() {
    sleeper_at_a_lane::<true>();
}

#[test]
#[should_panic(expected = "asleep for ever")]
fn without_fences_a_sleeper_may_miss_a_cell() {
    sleeper_at_a_lane::<false>();
}

/// A cell is shown while its reader looks away from the lane: it is seen by the last look, or a bell rings.
fn reader_that_looks_away<const F: bool>() {
    static RANG: AtomicUsize = AtomicUsize::new(0);
    check(|| {
        let (writer, reader) = lane::<F>();
        let spot = Spot::Cells(0);
        // One word for the spot, and one for the first bell behind that.
        let (own, peer) = (Model::<F>::of(1), Model::<F>::of(3));
        let place = BellPlace { looks: 0, bells: 0 };
        let (looks, fences) = (Looks::new(own.clone(), place), own.clone());
        let mut ringer = Ringer::new(peer.clone(), BellPlace { looks: 0, bells: 120 });
        let mut listener = Listener::new(own, peer, BellPlace { looks: 0, bells: 120 });
        listener.look_at(spot.number());
        let sender = thread::spawn(move || {
            writer.show(0, 0);
            fences.fence();
            if !looks.has(spot) {
                ringer.ring(spot);
            }
        });
        listener.look_away(spot.number());
        let found = reader.is_ready();
        sender.join().unwrap();
        let rang = listener.hear() == Some(Rung::Spot(spot.number()));
        RANG.fetch_add(usize::from(rang), Ordering::Relaxed);
        assert!(found || rang, "nobody sees it");
    });
    assert!(RANG.load(Ordering::Relaxed) > 0);
}

#[test]
fn a_reader_that_looks_away_sees_the_cell_or_hears_a_bell() {
    reader_that_looks_away::<true>();
}

#[test]
#[should_panic(expected = "nobody sees it")]
fn without_fences_a_reader_that_looks_away_may_miss_a_cell() {
    reader_that_looks_away::<false>();
}

/// An answer is given to a writer that falls asleep: it is found, or the writer is woken.
fn sleeper_for_an_answer<const F: bool>() {
    check(|| {
        let (writer, reader) = lane::<F>();
        writer.show(0, 0);
        let (doorbells, epoch) = (Model::<F>::word(), Model::<F>::word());
        let (fenced, doorbell) =
            (epoch.clone(), Doorbell::new(doorbells.clone(), epoch.clone(), 2));
        let receiver = thread::spawn(move || {
            reader.take();
            reader.answer(Some(0));
            fenced.fence();
            doorbell.is_asleep()
        });
        let mut ears = Ears::new(doorbells, epoch);
        ears.fall_asleep();
        let found = writer.has_answer();
        let woken = receiver.join().unwrap();
        assert!(found || woken, "asleep for ever");
    });
}

#[test]
fn a_sleeper_finds_the_answer_or_is_woken() {
    sleeper_for_an_answer::<true>();
}

#[test]
#[should_panic(expected = "asleep for ever")]
fn without_fences_a_sleeper_may_miss_an_answer() {
    sleeper_for_an_answer::<false>();
}
