//! The ring, its notification and the lanes under every interleaving and every reordering that the memory model allows.
//!
//! The algorithms are generic over the memory, so the model checker runs the very code, in an ordinary test run.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod lane_ends;
mod lanes;
#[path = "../../../locks/tests/model/mod.rs"]
mod lock_model;
mod model;

use std::sync::atomic::{AtomicUsize, Ordering};

use anyverbs_net::shm::Memory;
use anyverbs_net::shm::notify::{Doorbell, Ears, unwatch, watch};
use anyverbs_net::shm::published::Marks;
use anyverbs_net::shm::ring::{ONE_LINE, Reader, Writer};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, fence};
use loom::thread;

use model::{DATA, Model, RING, WORDS, check};

fn ring<const F: bool>(size: usize) -> (Writer<Model<F>>, Reader<Model<F>>, Model<F>, Model<F>) {
    let (written, read) = (Model::of(WORDS + size / 8), Model::side());
    (
        Writer::new(written.clone(), read.clone(), DATA, size, 56),
        Reader::new(read.clone(), written.clone(), DATA, size, 56),
        written,
        read,
    )
}

fn push<const F: bool>(writer: &mut Writer<Model<F>>, value: u64) -> bool {
    if value.is_multiple_of(2) {
        let mut line = [0; ONE_LINE];
        line[..8].copy_from_slice(&value.to_le_bytes());
        if writer.commit_line(0, 8, &line) {
            return true;
        }
    }
    let Ok(mut reservation) = writer.reserve(0, 8) else { return false };
    reservation.write_payload(0, &value.to_le_bytes());
    reservation.commit();
    true
}

fn pop<const F: bool>(reader: &mut Reader<Model<F>>) -> Option<u64> {
    let mut bytes = [0; 8];
    let message = reader.batch(1).next()?;
    message.read_payload(0, &mut bytes);
    reader.release();
    Some(u64::from_le_bytes(bytes))
}

/// Messages up to `last`, each published by itself, through a ring of this size, arrive whole, in order and once. `then`
/// follows each.
fn arrive_in_order(size: usize, last: u64, then: fn(&mut Writer<Model<true>>)) {
    check(move || {
        let (mut writer, mut reader, ..) = ring::<true>(size);
        let sender = thread::spawn(move || {
            for value in 1..=last {
                while !push(&mut writer, value) {
                    thread::yield_now();
                }
                writer.publish();
                then(&mut writer);
            }
        });
        for value in 1..=last {
            let got = loop {
                if let Some(got) = pop(&mut reader) {
                    break got;
                }
                thread::yield_now();
            };
            assert_eq!(got, value);
        }
        sender.join().unwrap();
        assert!(!reader.is_ready() && !reader.is_broken());
    });
}

#[test]
fn messages_arrive_whole_in_order_and_once_over_reused_places() {
    arrive_in_order(RING, 3, |_| ());
}

#[test]
fn messages_arrive_whole_behind_a_zero_that_was_put_ahead() {
    arrive_in_order(256, 4, Writer::prepare);
}

#[test]
fn a_batch_is_visible_whole_behind_its_first_message() {
    static SEEN: AtomicUsize = AtomicUsize::new(0);
    check(|| {
        let (mut writer, mut reader, ..) = ring::<true>(256);
        let receiver = thread::spawn(move || {
            if let Some(first) = pop(&mut reader) {
                SEEN.fetch_add(1, Ordering::Relaxed);
                assert_eq!(first, 1);
                assert_eq!((pop(&mut reader), pop(&mut reader)), (Some(2), Some(3)));
                assert_eq!((pop(&mut reader), reader.is_broken()), (None, false));
            }
        });
        for value in 1..=3 {
            assert!(push(&mut writer, value));
        }
        writer.publish();
        receiver.join().unwrap();
    });
    assert!(SEEN.load(Ordering::Relaxed) > 0);
}

/// A writer sends one message to a reader that falls asleep: it is found, or the reader is woken.
fn sleeper<const F: bool>() {
    check(|| {
        let (mut writer, mut reader, _, read) = ring::<F>(RING);
        let (doorbells, epoch) = (Model::word(), Model::word());
        watch(&read);
        let doorbell = Doorbell::new(doorbells.clone(), epoch.clone(), 2);
        let sender = thread::spawn(move || {
            assert!(push(&mut writer, 7));
            writer.publish();
            doorbell.ring(&read)
        });
        let mut ears = Ears::new(doorbells, epoch);
        ears.fall_asleep();
        let found = ears.is_rung() || reader.is_ready();
        let woken = sender.join().unwrap();
        assert!(found || woken, "asleep for ever");
        assert_eq!(pop(&mut reader), Some(7));
    });
}

#[test]
fn a_sleeper_finds_the_message_or_is_woken() {
    sleeper::<true>();
}

#[test]
#[should_panic(expected = "asleep for ever")]
fn without_fences_a_sleeper_may_never_wake() {
    sleeper::<false>();
}

/// A reader stops watching a ring while the writer sends: it finds the message, or the doorbell rings.
fn unwatcher<const F: bool>() {
    check(|| {
        let (mut writer, reader, _, read) = ring::<F>(RING);
        let (doorbells, epoch) = (Model::word(), Model::word());
        watch(&read);
        let doorbell = Doorbell::new(doorbells.clone(), epoch.clone(), 2);
        let own = read.clone();
        let sender = thread::spawn(move || {
            assert!(push(&mut writer, 7));
            writer.publish();
            assert!(!doorbell.ring(&read), "nobody sleeps");
        });
        unwatch(&own);
        let found = reader.is_ready();
        sender.join().unwrap();
        assert!(found || Ears::new(doorbells, epoch).is_rung(), "unheard");
    });
}

#[test]
fn a_ring_that_is_no_longer_watched_rings() {
    unwatcher::<true>();
}

#[test]
#[should_panic(expected = "unheard")]
fn without_fences_an_unwatched_ring_may_be_missed() {
    unwatcher::<false>();
}

/// A writer that finds its doorbell set does not set it; the reader takes the doorbells meanwhile.
fn doorbell_taker<const F: bool>() {
    check(|| {
        let (mut writer, mut reader, _, read) = ring::<F>(256);
        let (doorbells, epoch) = (Model::word(), Model::word());
        let doorbell = Doorbell::new(doorbells.clone(), epoch.clone(), 2);
        assert!(push(&mut writer, 1));
        writer.publish();
        assert!(!doorbell.ring(&read), "nobody sleeps");
        let sender = thread::spawn(move || {
            assert!(push(&mut writer, 2));
            writer.publish();
            assert!(!doorbell.ring(&read), "nobody sleeps");
        });
        let mut ears = Ears::new(doorbells, epoch);
        let mut got = 0;
        assert_eq!(ears.take(), 2);
        while pop(&mut reader).is_some() {
            got += 1;
        }
        sender.join().unwrap();
        assert!(got == 2 || ears.is_rung(), "unheard");
    });
}

#[test]
fn a_doorbell_taken_during_a_look_is_not_lost() {
    doorbell_taker::<true>();
}

#[test]
#[should_panic(expected = "unheard")]
fn without_fences_a_doorbell_may_be_lost() {
    doorbell_taker::<false>();
}

/// A writer asks for room while the reader makes it and falls asleep. The writer sees the room, or the reader sees the
/// request, or is woken to see it.
fn asker<const F: bool>() {
    check(|| {
        let (mut writer, mut reader, _, read) = ring::<F>(RING);
        let (doorbells, epoch) = (Model::word(), Model::word());
        assert!(push(&mut writer, 1));
        writer.publish();
        assert!(!push(&mut writer, 2), "full");
        watch(&read);
        let doorbell = Doorbell::new(doorbells.clone(), epoch.clone(), 2);
        let sender = thread::spawn(move || {
            writer.ask_for_room();
            let wakes = doorbell.ring(&read);
            (wakes, push(&mut writer, 2))
        });
        assert_eq!(pop(&mut reader), Some(1));
        let mut ears = Ears::new(doorbells, epoch);
        ears.fall_asleep();
        let asked = reader.is_room_asked() || ears.is_rung();
        let (wakes, has_room) = sender.join().unwrap();
        assert!(has_room || asked || wakes, "both wait for ever");
    });
}

#[test]
fn a_request_for_room_is_granted_or_seen() {
    asker::<true>();
}

#[test]
#[should_panic(expected = "both wait for ever")]
fn without_fences_both_may_wait_for_ever() {
    asker::<false>();
}

/// A writer asks while the reader, awake, looks for questions after each batch and before it sleeps.
#[test]
fn an_answer_is_seen_by_who_is_called() {
    check(|| {
        let (mut writer, mut reader, _, read) = ring::<true>(RING);
        // The other direction's notification, with which the reader calls the writer.
        let (doorbells, epoch) = (Model::<true>::word(), Model::<true>::word());
        assert!(push(&mut writer, 1));
        writer.publish();
        writer.ask_for_room();
        let doorbell = Doorbell::new(doorbells.clone(), epoch.clone(), 4);
        let answering = thread::spawn(move || {
            assert_eq!(pop(&mut reader), Some(1));
            reader.feed();
            let _ = &read;
            doorbell.ring_always()
        });
        let mut ears = Ears::new(doorbells, epoch);
        ears.fall_asleep();
        let seen = ears.is_rung() || writer.was_answered();
        let woken = answering.join().unwrap();
        assert!(seen || woken, "not told");
        assert!(writer.was_answered() && push(&mut writer, 2));
    });
}

/// The marks of one side.
#[derive(Clone, Debug)]
struct Side<const FENCES: bool>(Arc<[AtomicU64; 8]>);

impl<const FENCES: bool> Side<FENCES> {
    fn new() -> Self {
        Self(Arc::new(std::array::from_fn(|_| AtomicU64::new(0))))
    }

    fn at(&self, at: usize) -> &AtomicU64 {
        assert_eq!((at - 512) % 64, 0, "the state of a mark");
        &self.0[(at - 512) / 64]
    }
}

impl<const FENCES: bool> Memory for Side<FENCES> {
    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.at(at).load(order)
    }

    fn store(&self, at: usize, value: u64, order: Ordering) {
        self.at(at).store(value, order);
    }

    fn fence(&self) {
        if FENCES {
            fence(Ordering::SeqCst);
        }
    }

    fn read(&self, _: usize, _: &mut [u8]) {
        unreachable!("marks are words")
    }

    fn write(&self, _: usize, _: &[u8]) {
        unreachable!("marks are words")
    }
}

/// Copies while the published memory allows it. The owner takes that back, waits, and uses the memory for something else.
fn copies_end_before_the_memory_is_used_again<const F: bool>() {
    let side = Side::<F>::new();
    let published = Arc::new(AtomicU64::new(1));
    let memory = Arc::new(UnsafeCell::new(0u64));
    let copier = {
        let (side, published, memory) = (side.clone(), published.clone(), memory.clone());
        thread::spawn(move || {
            let marks = Marks::new(side);
            for _ in 0..2 {
                let mark = marks.set().unwrap();
                if published.load(Ordering::Acquire) == 1 {
                    // SAFETY: the model checks that no thread writes it meanwhile.
                    memory.with(|at| assert_eq!(unsafe { *at }, 0));
                }
                drop(mark);
            }
        })
    };
    published.store(0, Ordering::Release);
    side.fence();
    let waited = Marks::new(side).wait(|| {
        thread::yield_now();
        true
    });
    assert!(waited);
    // SAFETY: as above.
    memory.with_mut(|at| unsafe { *at = 1 });
    copier.join().unwrap();
}

#[test]
fn memory_taken_back_is_no_longer_copied() {
    check(copies_end_before_the_memory_is_used_again::<true>);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_fences_a_copy_is_missed() {
    check(copies_end_before_the_memory_is_used_again::<false>);
}
