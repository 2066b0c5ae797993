//! Lanes: short messages from one queue pair to another, each in a *cell* of one line. A payload that is longer than a cell
//! lies in the [room](super::room) of the lane.
//!
//! A lane belongs to one sender and one reader. Cells have numbers in a row. A cell is there when its place has its number,
//! which is stored last. So nothing is zeroed, and an old cell is never taken for a new one. The reader answers by a word
//! of its own side: up to where it has read, and what it has executed. That word is an acknowledgement; no message is sent
//! for it.
//!
//! A lane is opened by a message of the ring, which tells the reader its place and the number of its first cell. The reader
//! accepts or refuses by its answer. No cell is written before.
//!
//! The numbers of the next lane at a place begin so far after the last ones that every answer to the last lane is seen to be old. The number
//! of the first cell itself is not kept: a long stream uses all numbers, again and again.
//!
//! Words of the other side are believed as far as they can be true. An answer beyond the last cell breaks the lane, and so
//! does a cell that is longer than one can be, or whose payload lies outside the room.

use std::sync::atomic::Ordering;

pub use super::layout::CELLS;
use super::layout::{ANSWER, CELLS_LEN, LANE, LINE};
use super::memory::{Area, OwnWord, Owned, Words};
pub use super::room::LONGEST;
use super::room::{self, Room};

/// Bytes of payload that a cell takes.
pub const CELL_PAYLOAD: usize = LINE - PAYLOAD;
/// The place of the payload in a cell, behind two words.
const PAYLOAD: usize = 16;
/// Words of a cell, and of all cells of a lane.
const WORDS: usize = LINE / 8;
const ALL: usize = CELLS_LEN / 8;

/// The number of the first cell of a place, and how far the first cell of the next lane there is from the next cell of the last.
/// An answer is that far away from the cells that it can be to. So is the word 0, which a place has in the beginning.
pub(super) const FIRST: u32 = CELLS + 1;

/// The place of a lane in a side, and that of its answer in the other one.
#[derive(Clone, Copy, Debug)]
pub struct LanePlace {
    /// The lane's number in its side.
    pub index: usize,
    pub(crate) cells: usize,
    pub(crate) answer: usize,
}

impl LanePlace {
    /// Lane `index` of a side whose lanes begin at `lanes`, with its answer in the other side, where answers begin at
    /// `answers`.
    #[must_use]
    pub fn new(index: usize, lanes: usize, answers: usize) -> Self {
        Self { index, cells: lanes + index * LANE, answer: answers + index * ANSWER }
    }

    /// The place of the lane's room.
    fn room(&self) -> usize {
        self.cells + CELLS_LEN
    }
}

/// The place of a cell's first word among those of its lane.
#[inline]
fn cell(number: u32) -> usize {
    number as usize * WORDS
}

/// The word of a reader.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Answer {
    /// The number of the cell that it reads next.
    pub next: u32,
    /// It reads this lane.
    pub is_open: bool,
    /// The PSN of the last request that it has executed.
    pub executed: Option<u32>,
}

const OPEN: u64 = 1 << 31;
const EXECUTED: u64 = 1 << 30;
const PSN: u64 = 0xff_ffff;

impl Answer {
    #[inline]
    fn encode(self) -> u64 {
        let executed = self.executed.map_or(0, |psn| EXECUTED | u64::from(psn) & PSN);
        u64::from(self.next) << 32 | executed | if self.is_open { OPEN } else { 0 }
    }

    #[inline]
    fn decode(word: u64) -> Self {
        let executed = (word & EXECUTED != 0).then_some((word & PSN) as u32);
        Self { next: (word >> 32) as u32, is_open: word & OPEN != 0, executed }
    }
}

/// The sending end of a lane. Its owner sends and takes answers from one thread at a time; any thread may ask whether there is
/// an answer.
#[derive(Debug)]
pub struct LaneWriter<M: Owned = Area> {
    cells: Words<M>,
    answer: Words<M>,
    room: Room<M>,
    index: usize,
    /// The number of the next cell.
    next: M::Word,
    /// The last answer that was taken.
    seen: M::Word,
    /// Not 0: the reader was told of it.
    told: M::Word,
    /// Not 0: nobody sends by it.
    given_up: M::Word,
}

impl<M: Owned + Clone> LaneWriter<M> {
    /// A lane in `own` whose first cell has the number `first`. The last answer of its reader was to cells before.
    pub fn new(own: M, peer: M, place: LanePlace, first: u32) -> Self {
        let room = Room::new(own.clone(), place.room(), first);
        let cells = Words::new(own, place.cells, ALL);
        let answer = Words::new(peer, place.answer, 1);
        let seen = M::Word::of(answer.load(0, Ordering::Relaxed));
        let (told, given_up) = (M::Word::of(0), M::Word::of(0));
        let (index, next) = (place.index, M::Word::of(first.into()));
        Self { cells, answer, room, index, next, seen, told, given_up }
    }
}

impl<M: Owned> LaneWriter<M> {
    /// Its number in its side.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// The number of the next cell.
    #[inline]
    #[must_use]
    pub fn next(&self) -> u32 {
        self.next.load(Ordering::Relaxed) as u32
    }

    /// Whether there is an answer that was not taken.
    #[inline]
    #[must_use]
    pub fn has_answer(&self) -> bool {
        self.answer.load(0, Ordering::Relaxed) != self.seen.load(Ordering::Relaxed)
    }

    /// Takes an answer, if it is new. An impossible one counts as a refusal.
    #[inline]
    pub fn take_answer(&self) -> Option<Answer> {
        let word = self.answer.load(0, Ordering::Acquire);
        if self.seen.load(Ordering::Relaxed) == word {
            return None;
        }
        self.seen.store(word, Ordering::Relaxed);
        let answer = Answer::decode(word);
        Some(if self.is_possible(&answer) { answer } else { Answer::default() })
    }

    /// Whether there is a free cell, as far as answers were taken.
    #[inline]
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.next().wrapping_sub(self.read()) < CELLS
    }

    /// The number of the cell that the reader reads next, by the last answer that was taken.
    #[inline]
    fn read(&self) -> u32 {
        (self.seen.load(Ordering::Relaxed) >> 32) as u32
    }

    /// Shows the reader a cell whose payload is written. `low` and `word` are its words below the number.
    #[inline]
    pub fn show(&self, low: u32, word: u64) {
        let number = self.next();
        let at = cell(number);
        self.cells.store(at + 1, word, Ordering::Relaxed);
        self.cells.store(at, u64::from(number) << 32 | u64::from(low), Ordering::Release);
        self.next.store(number.wrapping_add(1).into(), Ordering::Relaxed);
    }

    /// Nobody sends by it any more.
    pub fn give_up(&self) {
        self.given_up.store(1, Ordering::Release);
    }

    /// Whether nobody sends by it.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire) != 0
    }

    /// Notes that its reader was told of it.
    pub fn note_told(&self) {
        self.told.store(1, Ordering::Relaxed);
    }

    /// The number of the first cell of the next lane at this place. It is none that an answer to this lane can have.
    #[must_use]
    pub fn first_of_next(&self) -> u32 {
        self.next().wrapping_add(FIRST)
    }

    /// Whether an answer can be one to this lane: not to cells that were not shown, and not to a lane that had its place before.
    #[inline]
    fn is_possible(&self, answer: &Answer) -> bool {
        self.next().wrapping_sub(answer.next) <= CELLS
    }

    /// Whether its place can be another's: nobody sends by it, and nobody reads it or ever will.
    #[must_use]
    pub fn is_free(&self) -> bool {
        let answer = Answer::decode(self.answer.load(0, Ordering::Acquire));
        let is_ended = !answer.is_open && self.is_possible(&answer);
        self.is_given_up() && (is_ended || self.told.load(Ordering::Relaxed) == 0)
    }
}

impl LaneWriter<Area> {
    /// The place of the payload of the next cell: [`CELL_PAYLOAD`] bytes, for raw copies alone.
    #[inline]
    #[must_use]
    pub fn payload_ptr(&self) -> *mut u8 {
        self.cells.address(cell(self.next()) + PAYLOAD / 8)
    }

    /// A place in the room for a payload of `len` bytes of the next cell, for raw copies alone, and its line, for the reader's
    /// [`room_ptr`](LaneReader::room_ptr). `None`: there is none now.
    ///
    /// # Panics
    /// If the payload is longer than [`LONGEST`].
    #[inline]
    pub fn room_ptr(&self, len: usize) -> Option<(u32, *mut u8)> {
        let line = self.room.place(len, (self.next(), self.read()))?;
        Some((line, self.room.address(line, len)?))
    }
}

/// A cell that is there: its words below the number. Its payload may change as long as the peer wishes.
#[derive(Clone, Copy, Debug)]
pub struct Cell {
    /// The low half of the first word.
    pub low: u32,
    /// The second word.
    pub word: u64,
}

/// The reading end of a lane. Its owner reads from one thread at a time; any thread may ask whether a cell is there.
#[derive(Debug)]
pub struct LaneReader<M: Owned = Area> {
    cells: Words<M>,
    answer: Words<M>,
    /// The writer's side, and the place of the room in it.
    room: (M, usize),
    index: usize,
    /// The number of the next cell.
    next: M::Word,
    /// The last answer.
    answered: M::Word,
}

impl<M: Owned + Clone> LaneReader<M> {
    /// Reads a lane of `peer` whose first cell has the number `first`, and says so.
    pub fn new(own: M, peer: M, place: LanePlace, first: u32) -> Self {
        let room = (peer.clone(), place.room());
        let cells = Words::new(peer, place.cells, ALL);
        let (answer, index) = (Words::new(own, place.answer, 1), place.index);
        let (next, answered) = (M::Word::of(first.into()), M::Word::of(0));
        let this = Self { cells, answer, room, index, next, answered };
        this.answer(None);
        this
    }
}

impl<M: Owned> LaneReader<M> {
    /// Its number in the writer's side.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// The number of the next cell.
    #[inline]
    fn next(&self) -> u32 {
        self.next.load(Ordering::Relaxed) as u32
    }

    /// Refuses a lane.
    pub fn refuse(own: &M, place: LanePlace, first: u32) {
        let answer = Answer { next: first, ..Answer::default() };
        own.store(place.answer, answer.encode(), Ordering::Release);
    }

    /// Whether the next cell is there.
    #[inline]
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let next = self.next();
        (self.cells.load(cell(next), Ordering::Relaxed) >> 32) as u32 == next
    }

    /// The next cell, if it is there.
    #[inline]
    #[must_use]
    pub fn peek(&self) -> Option<Cell> {
        let next = self.next();
        let word = self.cells.load(cell(next), Ordering::Acquire);
        ((word >> 32) as u32 == next).then(|| Cell {
            low: word as u32,
            word: self.cells.load(cell(next) + 1, Ordering::Relaxed),
        })
    }

    /// Goes on to the next cell. The place of this one is the writer's again with the next [`answer`](Self::answer).
    #[inline]
    pub fn take(&self) {
        let next = self.next();
        self.next.store(next.wrapping_add(1).into(), Ordering::Relaxed);
    }

    /// Tells the writer up to where cells are read, and requests executed. With `None` the last PSN stays.
    #[inline]
    pub fn answer(&self, executed: Option<u32>) {
        let last = Answer::decode(self.answered.load(Ordering::Relaxed));
        let next = self.next();
        self.say(Answer { next, is_open: true, executed: executed.or(last.executed) });
    }

    /// Reads no more. What was executed stays said: the writer may not have looked yet.
    pub fn close(&self) {
        let last = Answer::decode(self.answered.load(Ordering::Relaxed));
        let next = self.next();
        self.say(Answer { next, is_open: false, executed: last.executed });
    }

    #[inline]
    fn say(&self, answer: Answer) {
        let word = answer.encode();
        self.answered.store(word, Ordering::Relaxed);
        self.answer.store(0, word, Ordering::Release);
    }

    /// Whether it reads.
    #[must_use]
    pub fn is_open(&self) -> bool {
        Answer::decode(self.answered.load(Ordering::Relaxed)).is_open
    }
}

impl LaneReader<Area> {
    /// The place of the payload of the next cell: [`CELL_PAYLOAD`] bytes, for raw copies alone.
    #[inline]
    #[must_use]
    pub fn payload_ptr(&self) -> *mut u8 {
        let next = self.next();
        self.cells.address(cell(next) + PAYLOAD / 8)
    }

    /// The place of a payload of `len` bytes at a line of the room, for raw copies alone. `None`: no writer places it there.
    #[inline]
    #[must_use]
    pub fn room_ptr(&self, line: u32, len: usize) -> Option<*mut u8> {
        let (memory, start) = &self.room;
        Some(memory.at(room::find(*start, line, len)?, len))
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::page;
    use super::*;

    /// The memory of the sender's side and of the reader's, with the lane's place.
    fn sides() -> (Area, Area, LanePlace) {
        let side = || Area::private(page() + 2 * LANE).unwrap();
        (side(), side(), LanePlace::new(1, page(), 0))
    }

    fn lane(first: u32) -> (LaneWriter, LaneReader) {
        let (own, peer, place) = sides();
        let writer = LaneWriter::new(own.clone(), peer.clone(), place, first);
        let reader = LaneReader::new(peer, own, place, first);
        assert!(writer.take_answer().is_some_and(|answer| answer.is_open));
        (writer, reader)
    }

    #[test]
    fn cells_arrive_once_and_in_order_beyond_the_last_number() {
        let (writer, reader) = lane(u32::MAX - 2 * CELLS);
        for n in 0..4 * CELLS {
            assert!(!reader.is_ready() && reader.peek().is_none());
            writer.show(n, u64::from(n) << 8);
            let cell = reader.peek().unwrap();
            assert_eq!((cell.low, cell.word, reader.is_ready()), (n, u64::from(n) << 8, true));
            reader.take();
            reader.answer(None);
            assert!(writer.has_answer());
            assert_eq!(writer.take_answer().unwrap().next, writer.next());
            assert!(!writer.has_answer() && writer.take_answer().is_none());
        }
    }

    #[test]
    fn answers_count_after_all_numbers_were_used() {
        let (writer, reader) = lane(1);
        // As if so many cells had been shown and read that the next but 64 has the number of the first again.
        let next = 1u32.wrapping_sub(64);
        writer.next.store(next.into(), Ordering::Relaxed);
        reader.next.store(next.into(), Ordering::Relaxed);
        reader.answer(None);
        assert_eq!(writer.take_answer().map(|answer| answer.next), Some(next));
        (0..CELLS).for_each(|_| writer.show(0, 0));
        for n in 1..=CELLS {
            reader.take();
            reader.answer(Some(n));
            let answer = writer.take_answer();
            let expected = Answer { next: next.wrapping_add(n), is_open: true, executed: Some(n) };
            assert_eq!(answer, Some(expected), "{n} of {CELLS} cells are read");
        }
        reader.close();
        writer.note_told();
        writer.give_up();
        assert!(writer.is_free(), "its place is never another's");
    }

    #[test]
    fn a_lane_has_room_until_all_cells_are_unread() {
        let (writer, reader) = lane(1);
        for n in 0..CELLS {
            assert!(writer.has_room(), "{n} unread");
            writer.show(0, 0);
        }
        assert!(!writer.has_room());
        reader.take();
        reader.answer(None);
        assert!(!writer.has_room(), "the answer was not taken");
        assert!(writer.take_answer().is_some());
        assert!(writer.has_room());
    }

    #[test]
    fn the_last_psn_stays_in_answers_that_have_none() {
        let (writer, reader) = lane(1);
        reader.answer(Some(0xff_ffff));
        assert_eq!(writer.take_answer().unwrap().executed, Some(0xff_ffff));
        writer.show(0, 0);
        reader.take();
        reader.answer(None);
        assert_eq!(writer.take_answer().unwrap().executed, Some(0xff_ffff));
        reader.close();
        let last = Answer { next: 2, is_open: false, executed: Some(0xff_ffff) };
        assert_eq!(writer.take_answer(), Some(last));
    }

    #[test]
    fn an_answer_to_unsent_cells_is_a_refusal() {
        let (writer, reader) = lane(1);
        reader.take();
        reader.answer(Some(5));
        assert_eq!(writer.take_answer(), Some(Answer::default()));
    }

    #[test]
    fn a_lane_is_free_when_neither_end_uses_it() {
        let (writer, reader) = lane(1);
        assert!(!writer.is_free() && !writer.is_given_up());
        writer.note_told();
        writer.give_up();
        assert!(!writer.is_free() && writer.is_given_up(), "it is read");
        assert!(reader.is_open());
        reader.close();
        assert!(writer.is_free() && !reader.is_open());
        let (own, peer, place) = sides();
        let mut first = FIRST;
        for round in 0..3 {
            let writer = LaneWriter::new(own.clone(), peer.clone(), place, first);
            writer.give_up();
            assert!(writer.is_free(), "the other process will not hear of it");
            writer.note_told();
            assert!(!writer.is_free(), "the other process has not answered, round {round}");
            LaneReader::refuse(&peer, place, first);
            assert!(writer.has_answer());
            assert_eq!(writer.take_answer(), Some(Answer { next: first, ..Answer::default() }));
            assert!(writer.is_free());
            first = writer.first_of_next();
        }
    }

    #[test]
    fn the_next_user_of_a_place_ignores_an_old_answer() {
        let (own, peer, place) = sides();
        let last = LaneWriter::new(own.clone(), peer.clone(), place, FIRST);
        let reader = LaneReader::new(peer.clone(), own.clone(), place, FIRST);
        last.show(0, 0);
        reader.take();
        reader.answer(Some(1));
        reader.close();
        let writer = LaneWriter::new(own, peer, place, last.first_of_next());
        reader.answer(Some(2));
        assert_eq!(writer.take_answer(), Some(Answer::default()));
        writer.note_told();
        writer.give_up();
        reader.close();
        assert!(!writer.is_free(), "its own reader has not answered");
    }

    #[test]
    fn cells_of_the_last_user_are_none_of_the_next() {
        let (own, peer, place) = sides();
        let writer = LaneWriter::new(own.clone(), peer.clone(), place, 1);
        for _ in 0..10 {
            writer.show(0, 0);
        }
        let writer = LaneWriter::new(own.clone(), peer.clone(), place, writer.first_of_next());
        let reader = LaneReader::new(peer, own, place, writer.next());
        assert!(!reader.is_ready());
        writer.show(3, 0);
        assert_eq!(reader.peek().unwrap().low, 3);
    }

    #[test]
    fn payloads_lie_in_their_cells() {
        let (writer, reader) = lane(1);
        // SAFETY: the place is as long as the copy, in memory that lives.
        unsafe { writer.payload_ptr().write_bytes(7, CELL_PAYLOAD) };
        let sent = writer.payload_ptr() as usize;
        assert_eq!(sent % LINE, PAYLOAD);
        writer.show(0, 0);
        assert_eq!(writer.payload_ptr() as usize, sent + LINE);
        // SAFETY: as above.
        let first = unsafe { reader.payload_ptr().read() };
        assert_eq!(first, 7);
    }
}
