//! Layout and reading of the store's memory. Other processes wrote all of it, so every index and length is bounded.
//!
//! | offset | what |
//! |---|---|
//! | 0 | magic, version, number of entries as a power of two |
//! | 16 | the last incarnation; 24: the last number in the order of opening the port; 32: whether a process has joined; 40: up to when the right to tell all processes is used up; 48: the digest of the names of the counters, or 0 |
//! | 2016 | a bit for each slot: its owner is ending, and has added its counters |
//! | 2048 | the journal's headers, 8 bytes each |
//! | 4096 | a section of 32 bytes for each slot: incarnation, port, place in the order of opening the port, whether it lingers |
//! | 12288 | counters of processes that have ended, 64 of 8 bytes for each of 64 ports |
//! | 45056 | entries of 32 bytes each, a hash table with open addressing |
//!
//! Only the owner of a slot writes its section. An *entry* says that the owner of a slot has something: a service at an
//! address, an XRC domain. It names the slot and the *incarnation* of its owner. So the entries of an ended process
//! become void as soon as another has its slot. Until then the lock of the slot tells ([`super::store`]).
//!
//! Entries are added under the store's lock. Their owner removes them with one store, without the lock. The first word
//! of an entry counts how often the entry was used. It is written last (`Release`) and read first (`Acquire`), then
//! once more behind the others. So a reader never waits, and sees an entry as it was written or not at all.

use std::sync::atomic::{Ordering, fence};

use crate::shm::{Area, Memory, SharedWords};

const MAGIC: u64 = u64::from_le_bytes(*b"avb-host");
const VERSION: u32 = 2;
const INCARNATIONS: usize = 16;
const ORDER: usize = 24;
const SETTLED: usize = 32;
const TOLD_ALL: usize = 40;
const NAMES: usize = 48;
const COUNTED: usize = 2016;
const HEADERS: usize = 2048;
const SLOTS: usize = 4096;
const SLOT_LEN: usize = 32;
const ENDED: usize = SLOTS + 256 * SLOT_LEN;
/// Counters of a port of ended processes; further ones are not kept.
pub const MAX_ENDED: usize = 64;
/// Most ports of the devices of a process. Those of processes that have ended have their counters here.
pub const MOST_PORTS: usize = 64;
const ENTRIES: usize = ENDED + MOST_PORTS * MAX_ENDED * 8;
const ENTRY_LEN: usize = 32;
/// Numbers of entries, as powers of two.
pub(super) const ENTRY_BITS: std::ops::RangeInclusive<u32> = 8..=15;
/// Entries that are looked at for one number.
const MAX_PROBE: usize = 1024;
/// The table is swept after a probe of this length.
const LONG_PROBE: usize = 64;
/// In the second word of a section: the low 16 bits are the port.
const OPEN: u64 = 1 << 16;

const EMPTY: u64 = 0;
const REMOVED: u64 = 1;

/// The state of a number, by its entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A service that one process holds.
    Exclusive = 2,
    /// A service that others may hold as well.
    Shared = 3,
    /// A service that may be held again soon.
    Left = 4,
    /// A name that several processes share.
    Common = 5,
}

/// The key of an entry, and its further contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fact {
    pub(crate) kind: Kind,
    pub(crate) number: u64,
    /// One of several kinds of details.
    pub(crate) form: u8,
    pub(crate) details: u128,
}

/// An entry as it was read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    /// Its place.
    pub(crate) at: usize,
    pub(crate) fact: Fact,
    pub(crate) slot: u8,
    incarnation: u32,
}

/// The memory of a store.
#[derive(Debug)]
pub(crate) struct Table {
    area: Area,
    entries: usize,
}

/// Bytes of a table.
pub(super) fn len(entry_bits: u32) -> usize {
    ENTRIES + (ENTRY_LEN << entry_bits)
}

/// The header of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Header {
    /// A table with this number of entries.
    Table {
        entry_bits: u32,
    },
    /// The header of another version of this library.
    OtherVersion,
    Nonsense,
}

pub(super) fn parse_header(bytes: [u8; 16]) -> Header {
    let word = u128::from_le_bytes(bytes);
    let (magic, version, entry_bits) = (word as u64, (word >> 64) as u32, (word >> 96) as u32);
    if magic != MAGIC {
        Header::Nonsense
    } else if version != VERSION {
        Header::OtherVersion
    } else if ENTRY_BITS.contains(&entry_bits) {
        Header::Table { entry_bits }
    } else {
        Header::Nonsense
    }
}

impl Table {
    /// A table in `area`. Only its length is trusted.
    pub(super) fn new(area: Area, entry_bits: u32) -> Self {
        Self { area, entries: 1 << entry_bits }
    }

    /// Makes a table of zeros one.
    pub(super) fn begin(&self) {
        let bits = u64::from(self.entries.trailing_zeros());
        self.area.store(8, bits << 32 | u64::from(VERSION), Ordering::Relaxed);
        self.area.store(0, MAGIC, Ordering::Release);
    }

    /// Its bytes.
    pub(super) fn len(&self) -> usize {
        ENTRIES + self.entries * ENTRY_LEN
    }

    pub(super) fn place_of(&self, number: u64) -> usize {
        self.cell(home(number))
    }

    pub(super) fn overwrite(&self, at: usize, word: u64) {
        self.area.store(16 + at % (self.len() - 16) / 8 * 8, word, Ordering::SeqCst);
    }

    /// Its first process has joined.
    pub(super) fn settle(&self) {
        self.area.store(SETTLED, 1, Ordering::Release);
    }

    pub(super) fn is_settled(&self) -> bool {
        self.area.load(SETTLED, Ordering::Acquire) != 0
    }

    /// As the last process wrote it that told all.
    pub(super) fn told_all(&self) -> u64 {
        self.area.load(TOLD_ALL, Ordering::Relaxed)
    }

    /// Writes it, if no other process has meanwhile.
    pub(super) fn replace_told_all(&self, before: u64, at: u64) -> bool {
        self.area.replace(TOLD_ALL, before, at)
    }

    /// Whether the counters of ended processes have these names.
    fn has_names(&self, names: u64) -> bool {
        self.area.load(NAMES, Ordering::Acquire) == names
    }

    /// Adds the counters of each device of the owner of a slot, which is ending. Not where those of others have other names.
    pub(super) fn add_ended<C: AsRef<[u64]>>(&self, slot: u8, names: u64, devices: &[C]) {
        if self.area.load(NAMES, Ordering::Acquire) == 0 {
            self.area.store(NAMES, names, Ordering::Release);
        }
        if !self.has_names(names) {
            return;
        }
        let (word, bit) = Self::counted_bit(slot);
        // Before: who adds up the living must not count it twice.
        self.area.fetch_or(word, bit);
        for (device, counters) in devices.iter().take(MOST_PORTS).enumerate() {
            let counters = counters.as_ref().iter().take(MAX_ENDED).enumerate();
            for (index, counter) in counters.filter(|(_, counter)| **counter > 0) {
                self.area.fetch_add(Self::ended_at(device, index), *counter);
            }
        }
    }

    /// A counter of a device of processes that have ended; 0 where these have others.
    pub(super) fn ended(&self, names: u64, device: usize, index: usize) -> u64 {
        if device < MOST_PORTS && index < MAX_ENDED && self.has_names(names) {
            self.area.load(Self::ended_at(device, index), Ordering::Acquire)
        } else {
            0
        }
    }

    fn ended_at(device: usize, index: usize) -> usize {
        ENDED + 8 * (device * MAX_ENDED + index)
    }

    /// Whether the counters of the owner of a slot are among those.
    pub(super) fn is_counted(&self, slot: u8) -> bool {
        let (word, bit) = Self::counted_bit(slot);
        self.area.load(word, Ordering::Acquire) & bit != 0
    }

    fn counted_bit(slot: u8) -> (usize, u64) {
        (COUNTED + usize::from(slot) / 64 * 8, 1 << (slot % 64))
    }

    fn section(slot: u8) -> usize {
        SLOTS + usize::from(slot) * SLOT_LEN
    }

    /// The incarnation of the last owner of a slot; 0 if it never had one, or after it was given back.
    pub(super) fn incarnation(&self, slot: u8) -> u32 {
        self.area.load(Self::section(slot), Ordering::Acquire) as u32
    }

    /// The owner of a slot begins, and the entries of its last owner become void.
    pub(super) fn enter(&self, slot: u8) {
        let at = Self::section(slot);
        self.area.store(at, 0, Ordering::Release);
        let (word, bit) = Self::counted_bit(slot);
        self.area.fetch_and(word, !bit);
        for word in 1..4 {
            self.area.store(at + 8 * word, 0, Ordering::Relaxed);
        }
        let incarnation = loop {
            match (self.area.fetch_add(INCARNATIONS, 1) as u32).wrapping_add(1) {
                0 => {}
                n => break n,
            }
        };
        self.area.store(at, incarnation.into(), Ordering::SeqCst);
    }

    /// The owner of a slot ends.
    pub(super) fn leave(&self, slot: u8) {
        self.area.store(Self::section(slot), 0, Ordering::Release);
    }

    /// The owner of a slot opens a port, or closes it.
    pub(super) fn set_port(&self, slot: u8, port: Option<u16>) {
        let at = Self::section(slot) + 8;
        if port.is_some() {
            let order = self.area.fetch_add(ORDER, 1);
            self.area.store(at + 8, order, Ordering::Relaxed);
        }
        let port = port.map_or(0, |port| u64::from(port) | OPEN);
        self.area.store(at, port, Ordering::Release);
    }

    pub(super) fn port(&self, slot: u8) -> Option<u16> {
        let word = self.area.load(Self::section(slot) + 8, Ordering::Acquire);
        (word & OPEN != 0).then_some(word as u16)
    }

    /// Places in the order of opening.
    pub(super) fn order(&self, slot: u8) -> u64 {
        self.area.load(Self::section(slot) + 16, Ordering::Relaxed)
    }

    pub(super) fn set_lingers(&self, slot: u8, lingers: bool) {
        self.area.store(Self::section(slot) + 24, lingers.into(), Ordering::Release);
    }

    pub(super) fn lingers(&self, slot: u8) -> bool {
        self.area.load(Self::section(slot) + 24, Ordering::Acquire) != 0
    }

    /// A header of the journal.
    pub(super) fn header(&self, section: u8) -> u64 {
        self.area.load(HEADERS + 8 * usize::from(section), Ordering::Acquire)
    }

    pub(super) fn set_header(&self, section: u8, word: u64) {
        self.area.store(HEADERS + 8 * usize::from(section), word, Ordering::Release);
    }

    fn cell(&self, index: usize) -> usize {
        ENTRIES + (index & (self.entries - 1)) * ENTRY_LEN
    }

    fn cells(&self, number: u64) -> impl Iterator<Item = usize> {
        let start = home(number);
        (0..self.entries.min(MAX_PROBE)).map(move |i| self.cell(start.wrapping_add(i)))
    }

    /// The entries of a number; they may be those of one that has ended.
    pub(super) fn find(&self, number: u64) -> impl Iterator<Item = Entry> {
        self.cells(number)
            .map(|at| (at, self.area.load(at, Ordering::Acquire)))
            .take_while(|(_, word)| *word != EMPTY)
            .filter_map(move |(at, word)| self.read(at, word).filter(|e| e.fact.number == number))
    }

    /// All entries.
    pub(super) fn all(&self) -> impl Iterator<Item = Entry> {
        let cells = (0..self.entries).map(|index| self.cell(index));
        cells.filter_map(|at| self.read(at, self.area.load(at, Ordering::Acquire)))
    }

    fn read(&self, at: usize, word: u64) -> Option<Entry> {
        let kind = match word & 0xff {
            2 => Kind::Exclusive,
            3 => Kind::Shared,
            4 => Kind::Left,
            5 => Kind::Common,
            _ => return None,
        };
        let [number, low, high] = [8, 16, 24].map(|i| self.area.load(at + i, Ordering::Relaxed));
        fence(Ordering::Acquire);
        // This is another entry by now: the first was removed.
        if self.area.load(at, Ordering::Relaxed) != word {
            return None;
        }
        let details = u128::from(high) << 64 | u128::from(low);
        let fact = Fact { kind, number, form: (word >> 8) as u8, details };
        Some(Entry { at, fact, slot: (word >> 16) as u8, incarnation: (word >> 32) as u32 })
    }

    /// Whether its owner had the slot last.
    pub(super) fn is_current(&self, entry: &Entry) -> bool {
        entry.incarnation != 0 && entry.incarnation == self.incarnation(entry.slot)
    }

    /// Adds an entry, under the store's lock; its place, or none if there is no room. `lives` says of a slot that its owner has not ended.
    pub(super) fn add(&self, fact: Fact, slot: u8, lives: impl Fn(u8) -> bool) -> Option<usize> {
        let swept = |(at, length)| if length <= LONG_PROBE { Some(at) } else { None };
        let at = match self.room(fact.number).and_then(swept) {
            Some(at) => at,
            None => {
                self.sweep(lives);
                self.room(fact.number)?.0
            }
        };
        let uses = (self.area.load(at, Ordering::Relaxed) >> 24) as u8;
        // Readers ignore it while it is written.
        self.area.store(at, u64::from(uses) << 24 | REMOVED, Ordering::Relaxed);
        fence(Ordering::Release);
        let details = [fact.number, fact.details as u64, (fact.details >> 64) as u64];
        for (i, word) in details.into_iter().enumerate() {
            self.area.store(at + 8 * (i + 1), word, Ordering::Relaxed);
        }
        let head = fact.kind as u64
            | u64::from(fact.form) << 8
            | u64::from(slot) << 16
            | u64::from(uses.wrapping_add(1)) << 24
            | u64::from(self.incarnation(slot)) << 32;
        self.area.store(at, head, Ordering::Release);
        Some(at)
    }

    /// The first free place for a number, and how many are looked at to find that there is no other entry.
    fn room(&self, number: u64) -> Option<(usize, usize)> {
        let mut free = None;
        for (i, at) in self.cells(number).enumerate() {
            let word = self.area.load(at, Ordering::Acquire);
            if word == EMPTY {
                return Some((free.unwrap_or(at), i));
            }
            if self.read(at, word).is_none_or(|entry| !self.is_current(&entry)) {
                free.get_or_insert(at);
            }
        }
        free.map(|at| (at, MAX_PROBE))
    }

    /// Its owner takes an entry back, if it is still that one.
    pub(super) fn remove(&self, at: usize, slot: u8) {
        let word = self.area.load(at, Ordering::Relaxed);
        let is_it = |entry: Entry| entry.slot == slot && self.is_current(&entry);
        if self.read(at, word).is_some_and(is_it) {
            self.area.store(at, word & 0xff00_0000 | REMOVED, Ordering::Release);
        }
    }

    /// Frees the entries of processes that have ended, and removed entries with none behind them. Under the store's
    /// lock.
    fn sweep(&self, lives: impl Fn(u8) -> bool) {
        let ended: Vec<bool> = (0..=255).map(|slot| !lives(slot)).collect();
        // Twice around: entries before the first empty place depend on those at the end.
        let mut behind = 1;
        for index in (0..2 * self.entries).rev() {
            let at = self.cell(index);
            let mut word = self.area.load(at, Ordering::Acquire);
            if word == EMPTY {
                behind = EMPTY;
                continue;
            }
            let is_over = |e: Entry| ended[usize::from(e.slot)] || !self.is_current(&e);
            if self.read(at, word).is_none_or(is_over) {
                word = if behind == EMPTY { EMPTY } else { word & 0xff00_0000 | REMOVED };
                self.area.store(at, word, Ordering::Release);
            }
            behind = word;
        }
    }
}

/// The place where the entries of a number begin. Consecutive numbers lie apart.
fn home(number: u64) -> usize {
    (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let bits = *ENTRY_BITS.start();
        let table = Table::new(Area::private(len(bits)).unwrap(), bits);
        table.begin();
        table
    }

    fn fact(number: u64) -> Fact {
        Fact { kind: Kind::Shared, number, form: 3, details: u128::from(number) << 70 | 5 }
    }

    fn found(table: &Table, number: u64) -> Vec<(u8, Fact)> {
        let current = table.find(number).filter(|entry| table.is_current(entry));
        current.map(|entry| (entry.slot, entry.fact)).collect()
    }

    #[test]
    fn entries_last_until_removal_or_another_owner_of_the_slot() {
        let table = table();
        table.enter(7);
        table.enter(8);
        let a = table.add(fact(1), 7, |_| true).unwrap();
        table.add(fact(1), 8, |_| true).unwrap();
        table.add(fact(2), 7, |_| true).unwrap();
        assert_eq!(found(&table, 1), [(7, fact(1)), (8, fact(1))]);
        table.remove(a, 7);
        assert_eq!(found(&table, 1), [(8, fact(1))]);
        // The slot is another's, or free.
        table.add(fact(1), 8, |_| true).unwrap();
        table.remove(a, 7);
        assert_eq!(found(&table, 1).len(), 2);
        table.enter(8);
        assert!(found(&table, 1).is_empty() && found(&table, 2).len() == 1);
        table.leave(7);
        assert!(found(&table, 2).is_empty());
    }

    #[test]
    fn a_full_table_has_room_again_when_owners_have_ended() {
        let table = table();
        table.enter(1);
        table.enter(2);
        let mut added = 0;
        while table.add(fact(added), 1 + (added & 1) as u8, |_| true).is_some() {
            added += 1;
        }
        assert_eq!(added, 256);
        assert!((0..256).all(|number| found(&table, number).len() == 1));
        // One was killed.
        let lives = |slot| slot != 1;
        assert!(table.add(fact(1000), 2, lives).is_some());
        assert!((0..256).all(|number| found(&table, number).len() as u64 == number & 1));
        assert_eq!(found(&table, 1000).len(), 1);
        for round in 0..10_000 {
            let at = table.add(fact(round), 2, lives).unwrap();
            table.remove(at, 2);
        }
        assert!((0..256).all(|number| found(&table, number).len() as u64 == number & 1));
    }

    #[test]
    fn a_reused_place_is_not_read_as_the_old_entry() {
        let table = table();
        table.enter(7);
        let at = table.add(fact(1), 7, |_| true).unwrap();
        for _ in 0..100 {
            let word = table.area.load(at, Ordering::Relaxed);
            assert!(table.read(at, word).is_some());
            table.remove(at, 7);
            assert!(table.read(at, word).is_none());
            assert_eq!(table.add(fact(1), 7, |_| true), Some(at), "the first place that is free");
            assert!(
                table.read(at, word).is_none(),
                "it is another one, though with the same words"
            );
        }
        table.add(fact(1), 7, |_| true).unwrap();
        table.remove(at, 7);
        assert_eq!(table.add(fact(1), 7, |_| true), Some(at), "in front of one that is taken");
    }

    #[test]
    fn the_next_owner_of_a_slot_begins_anew() {
        let table = table();
        table.enter(7);
        let first = table.incarnation(7);
        table.set_port(7, Some(5));
        table.set_lingers(7, true);
        assert!(table.port(7) == Some(5) && table.lingers(7));
        table.enter(7);
        assert!(table.port(7).is_none() && !table.lingers(7) && table.incarnation(7) != first);
        // The numbers go around, and 0 is none.
        table.area.store(INCARNATIONS, u64::from(u32::MAX), Ordering::Relaxed);
        table.enter(8);
        table.enter(9);
        assert_eq!([8, 9].map(|slot| table.incarnation(slot)), [1, 2]);
    }

    #[test]
    fn an_entry_is_read_as_it_was_written() {
        let table = table();
        table.enter(1);
        for kind in [Kind::Exclusive, Kind::Shared, Kind::Left, Kind::Common] {
            let fact = Fact { kind, ..fact(kind as u64) };
            table.add(fact, 1, |_| true).unwrap();
            assert_eq!(found(&table, fact.number), [(1, fact)]);
        }
    }

    #[test]
    fn a_slot_without_an_owner_says_nothing() {
        let table = table();
        table.add(fact(1), 9, |_| true).unwrap();
        assert!(found(&table, 1).is_empty());
    }

    #[test]
    fn a_long_row_of_entries_of_the_dead_is_swept() {
        let table = table();
        table.enter(1);
        table.enter(2);
        for _ in 0..=LONG_PROBE {
            table.add(fact(1), 1, |_| true).unwrap();
        }
        assert_eq!(table.find(1).count(), LONG_PROBE + 1);
        table.add(fact(1), 2, |slot| slot != 1).unwrap();
        assert_eq!(table.find(1).map(|entry| entry.slot).collect::<Vec<_>>(), [2]);
    }

    /// The row of a number may go on at the beginning of the table.
    #[test]
    fn sweeping_heeds_a_row_that_goes_around_the_end() {
        let number = (0..).find(|number| home(*number) & 255 == 255).unwrap();
        for survives in [false, true] {
            let table = table();
            table.enter(1);
            table.enter(2);
            let last = table.add(fact(number), 1, |_| true).unwrap();
            assert_eq!(last, table.cell(255));
            if survives {
                assert_eq!(table.add(fact(number), 2, |_| true), Some(table.cell(0)));
            }
            table.sweep(|slot| slot != 1);
            let is_empty = table.area.load(last, Ordering::Relaxed) == EMPTY;
            assert_eq!(is_empty, !survives);
            assert_eq!(found(&table, number).len(), usize::from(survives));
        }
    }

    #[test]
    fn nonsense_is_bounded() {
        let table = table();
        for at in (0..len(*ENTRY_BITS.start())).step_by(8) {
            table.area.store(at, u64::MAX - at as u64, Ordering::Relaxed);
        }
        assert!(table.find(5).count() <= MAX_PROBE);
        table.add(fact(1), 255, |_| true);
        table.add(fact(1), 255, |_| false);
        table.enter(255);
        table.add(fact(1), 255, |slot| slot == 255).unwrap();
        assert_eq!(found(&table, 1), [(255, fact(1))]);
    }

    #[test]
    fn headers_are_checked() {
        let header = |magic: u64, version: u32, bits: u32| {
            let word = u128::from(magic) | u128::from(version) << 64 | u128::from(bits) << 96;
            parse_header(word.to_le_bytes())
        };
        assert_eq!(header(MAGIC, VERSION, 8), Header::Table { entry_bits: 8 });
        assert_eq!(header(MAGIC, VERSION + 1, 8), Header::OtherVersion);
        for (magic, bits) in [(MAGIC ^ 1, 8), (MAGIC, 7), (MAGIC, 16), (MAGIC, u32::MAX)] {
            assert_eq!(header(magic, VERSION, bits), Header::Nonsense);
        }
    }
}
