//! A ring whose other side writes any bytes at any place.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use anyverbs_net::shm::notify::{Doorbell, Ears};
use anyverbs_net::shm::ring::{Reader, ReserveError, Writer};
use anyverbs_net::shm::{MAX_HEADER, Memory, SharedWords};

/// Words in front of the ring, the ring, and the longest payload.
const DATA: usize = 512;
const RING: usize = 2048;
const MAX_PAYLOAD: usize = RING / 4;

/// Shared memory that can be checked: an access outside panics.
#[derive(Clone)]
struct Heap(Arc<Vec<AtomicU64>>);

impl Heap {
    fn new(bytes: usize) -> Self {
        Self(Arc::new((0..bytes / 8).map(|_| AtomicU64::new(0)).collect()))
    }

    fn at(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8));
        &self.0[at / 8]
    }

    fn byte(&self, at: usize) -> (&AtomicU64, usize) {
        (&self.0[at / 8], at % 8 * 8)
    }
}

impl Memory for Heap {
    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.at(at).load(order)
    }

    fn store(&self, at: usize, value: u64, order: Ordering) {
        self.at(at).store(value, order);
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }

    fn read(&self, at: usize, into: &mut [u8]) {
        for (n, byte) in into.iter_mut().enumerate() {
            let (word, shift) = self.byte(at + n);
            *byte = (word.load(Ordering::Relaxed) >> shift) as u8;
        }
    }

    fn write(&self, at: usize, from: &[u8]) {
        for (n, &byte) in from.iter().enumerate() {
            let (word, shift) = self.byte(at + n);
            let old = word.load(Ordering::Relaxed) & !(0xff << shift);
            word.store(old | u64::from(byte) << shift, Ordering::Relaxed);
        }
    }
}

impl SharedWords for Heap {
    fn fetch_or(&self, at: usize, bits: u64) -> u64 {
        self.at(at).fetch_or(bits, Ordering::SeqCst)
    }

    fn swap(&self, at: usize, value: u64) -> u64 {
        self.at(at).swap(value, Ordering::SeqCst)
    }
}

fn byte(rest: &mut &[u8]) -> u8 {
    match rest.split_first() {
        Some((first, tail)) => {
            *rest = tail;
            *first
        }
        None => 0,
    }
}

/// A word that is likely to mean something, or any.
fn word(rest: &mut &[u8], near: u64) -> u64 {
    match byte(rest) % 6 {
        0 => 0,
        // A control word: a message with these lengths.
        1 => 1 << 63 | u64::from(byte(rest)) << 32 | u64::from(byte(rest)) << 2,
        2 => 3 << 62,
        3 => near.wrapping_add(u64::from(byte(rest)) * 64),
        4 => near.wrapping_sub(u64::from(byte(rest))),
        _ => (0..8).fold(0, |word, _| word << 8 | u64::from(byte(rest))),
    }
}

struct World {
    /// Written by the writer's side, and by the reader's.
    written: Heap,
    read: Heap,
    writer: Writer<Heap>,
    reader: Reader<Heap>,
    doorbell: Doorbell<Heap>,
    ears: Ears<Heap>,
    /// Messages that were committed and not read yet; some of them are published.
    expected: VecDeque<(Vec<u8>, Vec<u8>)>,
    published: usize,
    n: u8,
    /// One side wrote nonsense: the only remaining promise is that all goes on.
    is_tainted: bool,
}

/// The input as a list of steps, behind a byte that is even if both sides are honest.
pub fn run(input: &[u8]) {
    let (written, read) = (Heap::new(DATA + RING), Heap::new(DATA + RING));
    let (doorbells, epoch) = (Heap::new(8), Heap::new(8));
    let mut world = World {
        writer: Writer::new(written.clone(), read.clone(), DATA, RING, MAX_PAYLOAD),
        reader: Reader::new(read.clone(), written.clone(), DATA, RING, MAX_PAYLOAD),
        doorbell: Doorbell::new(doorbells.clone(), epoch.clone(), 2),
        ears: Ears::new(doorbells, epoch),
        written,
        read,
        expected: VecDeque::new(),
        published: 0,
        n: 0,
        is_tainted: false,
    };
    let mut rest = input;
    let honest = byte(&mut rest) & 1 == 0;
    while !rest.is_empty() {
        let choice = byte(&mut rest) % if honest { 14 } else { 16 };
        world.step(choice, &mut rest);
    }
    world.finish();
}

impl World {
    fn step(&mut self, choice: u8, rest: &mut &[u8]) {
        match choice {
            0..=4 => {
                let (header, payload) = (byte(rest), byte(rest));
                self.push(usize::from(header) % (MAX_HEADER + 2), usize::from(payload) * 2 + 4);
            }
            5..=7 => {
                self.writer.publish();
                self.published = self.expected.len();
                if self.doorbell.ring(&self.read) {
                    assert!(self.ears.is_asleep() || self.is_tainted);
                }
            }
            8..=10 => self.pop(usize::from(byte(rest)) % 5),
            11 => self.reader.release(),
            12 => {
                let _ = self.writer.ask_for_room();
                if self.reader.is_room_asked() {
                    self.reader.feed();
                }
                assert!(self.is_tainted || self.writer.was_answered());
            }
            13 => {
                self.ears.fall_asleep();
                self.ears.take();
                if byte(rest) & 1 == 0 {
                    self.ears.wake();
                }
            }
            // The writer's side writes anywhere in its memory, and the reader's in its own.
            _ => {
                let memory = if choice == 14 { &self.written } else { &self.read };
                let at = match byte(rest) {
                    at @ 0..64 => usize::from(at) * 8,
                    at => DATA + usize::from(at - 64) * 64 % RING,
                };
                let value = word(rest, memory.load(at, Ordering::Relaxed));
                memory.store(at, value, Ordering::Relaxed);
                self.is_tainted = true;
            }
        }
    }

    fn push(&mut self, header: usize, payload: usize) {
        self.n = self.n.wrapping_add(1);
        let (header, payload) = (vec![self.n; header], vec![!self.n; payload]);
        match self.writer.reserve(header.len(), payload.len()) {
            Ok(mut reservation) => {
                reservation.write_header(&header);
                reservation.write_payload(0, &payload);
                reservation.commit();
                self.expected.push_back((header, payload));
            }
            Err(ReserveError::TooLong) => {
                assert!(header.len() > MAX_HEADER || payload.len() > MAX_PAYLOAD);
            }
            Err(ReserveError::Full) => {}
            Err(ReserveError::Broken) => assert!(self.is_tainted),
        }
    }

    fn pop(&mut self, limit: usize) {
        let mut taken = 0;
        for message in self.reader.batch(limit) {
            taken += 1;
            let mut header = [0; MAX_HEADER];
            let header = message.header(&mut header);
            assert!(message.payload_len() <= MAX_PAYLOAD);
            let mut payload = vec![0; message.payload_len()];
            message.read_payload(0, &mut payload);
            if !self.is_tainted {
                let expected = self.expected.pop_front().expect("a message that was sent");
                assert_eq!((header, &payload), (&expected.0[..], &expected.1));
                self.published -= 1;
            }
        }
        assert!(taken <= limit);
        if !self.is_tainted {
            assert!(!self.reader.is_broken());
            assert!(taken == limit || self.published == 0, "all that was published is there");
        }
    }

    /// A ring that was not spoilt delivers everything in the end.
    fn finish(mut self) {
        self.writer.publish();
        self.published = self.expected.len();
        self.pop(RING / 64 + 1);
        self.reader.release();
        if !self.is_tainted {
            assert!(self.expected.is_empty());
            assert_eq!(self.writer.is_drained(), Ok(true));
            assert!(self.writer.reserve(MAX_HEADER, MAX_PAYLOAD).is_ok());
        }
    }
}
