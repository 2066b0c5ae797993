//! The room of a lane: memory behind its cells for payloads that are longer than a cell.
//!
//! The writer chooses the places and tells each in its cell, so the reader keeps no account. The room has parts, and the
//! writer leaves each for the next. It enters a part again when all cells are read that had a payload there. When no cell at
//! all is unread, it begins anew at the first: a pair of programs that take turns needs few lines.

use std::sync::atomic::{AtomicU32, Ordering};

use super::layout::{CELLS, LINE, ROOM};
use super::memory::{Area, Memory};

/// Parts of a room.
const PARTS: u32 = 4;
/// Bytes of a part.
const PART: u32 = ROOM as u32 / PARTS;
/// Longest payload of a lane. Packets of the ring are as fast where payloads are longer, and have more memory.
pub const LONGEST: usize = 1024;

/// The writer's account of a room. Its owner uses it from one thread at a time.
#[derive(Debug)]
pub(super) struct Room<M> {
    memory: M,
    /// The place of the room in that memory.
    start: usize,
    /// The place behind the last payload, in bytes of the room.
    next: AtomicU32,
    /// For each part, the number of the last cell with a payload in it.
    last: [AtomicU32; PARTS as usize],
    /// Parts that have memory behind them, a bit each.
    backed: AtomicU32,
}

impl<M: Memory> Room<M> {
    /// The room at `start`, of a lane whose first cell has the number `first`.
    pub(super) fn new(memory: M, start: usize, first: u32) -> Self {
        let last = std::array::from_fn(|_| AtomicU32::new(first.wrapping_sub(1)));
        Self { memory, start, next: AtomicU32::new(0), last, backed: AtomicU32::new(0) }
    }

    /// A place for a payload of `len` bytes that belongs to the cell `cell`, as a number of lines. All cells before `read` were
    /// read. `None`: there is none now, or no memory.
    ///
    /// # Panics
    /// If the payload is longer than [`LONGEST`].
    #[inline]
    pub(super) fn place(&self, len: usize, (cell, read): (u32, u32)) -> Option<u32> {
        assert!(len <= LONGEST, "a payload is as long as a lane allows");
        let len = len as u32;
        let is_all_read = cell == read;
        let mut at = if is_all_read { 0 } else { self.next.load(Ordering::Relaxed) };
        if at.is_multiple_of(PART) || at % PART + len > PART {
            let part = at.div_ceil(PART) % PARTS;
            // A place that was given to the same cell before, and never shown, is not unread.
            if !is_all_read && self.is_unread(part, read) {
                return None;
            }
            self.back(part)?;
            at = part * PART;
        }
        self.last[(at / PART) as usize].store(cell, Ordering::Relaxed);
        self.next.store(at + len.next_multiple_of(LINE as u32), Ordering::Relaxed);
        Some(at / LINE as u32)
    }

    /// Whether a cell is unread that has a payload in this part.
    fn is_unread(&self, part: u32, read: u32) -> bool {
        let last = self.last[part as usize].load(Ordering::Relaxed);
        last.wrapping_sub(read) < CELLS
    }

    /// Sees to it that there is memory behind a part.
    fn back(&self, part: u32) -> Option<()> {
        let backed = self.backed.load(Ordering::Relaxed);
        if backed & 1 << part == 0 {
            let (at, len) = (self.start + (part * PART) as usize, PART as usize);
            self.memory.allocate(at, len).then_some(())?;
            self.backed.store(backed | 1 << part, Ordering::Relaxed);
        }
        Some(())
    }
}

impl Room<Area> {
    /// The address of a place.
    #[inline]
    pub(super) fn address(&self, line: u32, len: usize) -> Option<*mut u8> {
        Some(self.memory.at(find(self.start, line, len)?, len))
    }
}

/// The place in its side of `len` bytes at a line of the room that begins at `start`. `None` if no writer places them there.
#[inline]
pub(super) fn find(start: usize, line: u32, len: usize) -> Option<usize> {
    let at = line as usize * LINE;
    (len <= LONGEST && at + len <= ROOM).then_some(start + at)
}

#[cfg(test)]
mod tests {
    use super::super::layout::page;
    use super::*;

    fn room(first: u32) -> Room<Area> {
        Room::new(Area::private(page() + ROOM).unwrap(), page(), first)
    }

    #[test]
    fn payloads_that_are_read_at_once_share_the_first_lines() {
        let room = room(7);
        for cell in 7..1000 {
            assert_eq!(room.place(LONGEST, (cell, cell)), Some(0));
        }
        assert_eq!(room.backed.load(Ordering::Relaxed), 1, "no other part has memory");
    }

    #[test]
    fn a_place_that_is_not_used_is_given_again() {
        let room = room(7);
        assert_eq!(room.place(64, (7, 7)), Some(0));
        assert_eq!(room.place(64, (7, 7)), Some(0), "its payload could not be copied");
        // Behind one that is unread, too.
        assert_eq!(room.place(64, (8, 7)), Some(1));
        assert_eq!(room.place(64, (8, 7)), Some(2));
    }

    #[test]
    fn unread_payloads_never_overlap() {
        for seed in 0..200u32 {
            let mut random = seed.wrapping_mul(0x9e37_79b9) | 1;
            let mut next = || {
                random ^= random << 13;
                random ^= random >> 17;
                random ^= random << 5;
                random
            };
            // Beyond the last number, too.
            let first = u32::MAX - 200;
            let room = room(first);
            let (mut cell, mut unread) = (first, Vec::<(u32, usize, usize)>::new());
            let mut placed = 0;
            for _ in 0..2000 {
                let len = 1 + next() as usize % LONGEST;
                let read = unread.first().map_or(cell, |&(cell, ..)| cell);
                if cell.wrapping_sub(read) < CELLS
                    && let Some(line) = room.place(len, (cell, read))
                {
                    let at = line as usize * LINE;
                    assert_eq!(find(0, line, len), Some(at));
                    let overlaps =
                        |&(_, from, to): &(u32, usize, usize)| at < to && from < at + len;
                    assert!(!unread.iter().any(overlaps), "seed {seed}");
                    unread.push((cell, at, at + len));
                    cell = cell.wrapping_add(1);
                    placed += 1;
                }
                let taken = (next() as usize % 4).min(unread.len());
                unread.drain(..taken);
            }
            assert!(placed > 1000, "{placed} of 2000");
        }
    }

    #[test]
    fn a_full_room_takes_no_payload_until_its_oldest_part_is_read() {
        let room = room(1);
        let fit = (ROOM / LONGEST) as u32;
        for n in 0..fit {
            assert_eq!(room.place(LONGEST, (1 + n, 1)), Some(n * (LONGEST / LINE) as u32));
        }
        assert_eq!(room.place(1, (1 + fit, 1)), None);
        let of_a_part = PART / LONGEST as u32;
        assert_eq!(room.place(1, (1 + fit, of_a_part)), None, "one is unread");
        assert_eq!(room.place(1, (1 + fit, 1 + of_a_part)), Some(0));
    }

    #[test]
    fn places_outside_are_refused() {
        let lines = (ROOM / LINE) as u32;
        assert_eq!(find(4096, lines - 1, LINE), Some(4096 + ROOM - LINE));
        for (line, len) in [(lines - 1, LINE + 1), (lines, 1), (u32::MAX, 1), (0, LONGEST + 1)] {
            assert_eq!(find(4096, line, len), None);
        }
    }
}
