//! Records that outlive the process that wrote them, so that other processes can finish its work.
//!
//! A journal is a part of the store's file ([`super::store`]): headers in memory, records behind the table.
//!
//! The journal has *sections*, each a list of records. The process that holds the lock of a section writes it. At first
//! that is the process that claimed it. When that one has ended, in whatever way, another takes it over. So each record
//! always has one process in charge. (A child that forked and did not exec keeps its parent's locks, as it keeps its
//! slot.)
//!
//! A record is written before the section's length counts it, and its first byte marks it as a record. So a process
//! that is killed in between leaves no half record. The process that takes a record over checks its contents.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use anyverbs_locks::{Mutex, rank};

use super::store::{JOURNAL_LOCKS_AT, Store, read_at};
use crate::shm::check_length;
use crate::sys::Uncancelled;

/// Bytes that a record has for its user.
pub const PAYLOAD_LEN: usize = 63;
/// As a record.
pub type Payload = [u8; PAYLOAD_LEN];

const RECORD_LEN: usize = 1 + PAYLOAD_LEN;
/// The first byte of a record; 0 where there is none.
const IS_SET: u8 = 1;
/// The greatest number of processes.
const SECTIONS: u16 = 256;
/// Records of a section.
const RECORDS: u32 = 4096;

/// The journal of a registry, as one process has it.
#[derive(Debug)]
pub struct Journal {
    store: Arc<Store>,
    /// Sections whose lock this process holds. The kernel does not refuse a process its own lock.
    held: Mutex<rank::Journal, BTreeSet<u8>>,
}

/// The records of this process. They stay when the value is dropped, for others, unless it was [cleared](Self::clear).
#[derive(Debug)]
pub struct Section {
    journal: Arc<Journal>,
    number: u8,
    /// Records that were or are set.
    len: u32,
    free: Vec<u32>,
}

/// Records of a process that has ended. This process has them until the value is dropped. Records that are not
/// [done](Self::done) by then go to others.
#[derive(Debug)]
pub struct Abandoned {
    journal: Arc<Journal>,
    number: u8,
    records: Vec<(u32, Payload)>,
    left: usize,
}

impl Journal {
    /// The journal of a store.
    ///
    /// # Errors
    /// `Unsupported` where the store has no file, `FileTooLarge` where a limit of the process keeps it from growing.
    pub fn join(store: &Arc<Store>) -> io::Result<Arc<Self>> {
        store.file().ok_or(io::ErrorKind::Unsupported)?;
        check_length(record_at(store, 0, RECORDS))?;
        Ok(Arc::new(Self { store: Arc::clone(store), held: Mutex::default() }))
    }

    /// A section for the records of this process.
    ///
    /// # Errors
    /// `StorageFull` where there is none.
    pub fn section(self: &Arc<Self>) -> io::Result<Section> {
        let _uncancelled = Uncancelled::new();
        let mut held = self.held.lock();
        for number in 0..=(SECTIONS - 1) as u8 {
            if held.contains(&number) || !self.try_lock(number) {
                continue;
            }
            if self.header(number).0 == 0 {
                held.insert(number);
                return Ok(Section { journal: Arc::clone(self), number, len: 0, free: Vec::new() });
            }
            self.unlock(number);
        }
        Err(io::ErrorKind::StorageFull.into())
    }

    /// Takes over records of processes that have ended. `slot`: the slot of this process.
    ///
    /// # Errors
    /// Those of pread(2) and pwrite(2).
    pub fn take_abandoned(self: &Arc<Self>, slot: u8) -> io::Result<Vec<Abandoned>> {
        let _uncancelled = Uncancelled::new();
        // Declared before `held`: those in it lock that when they are dropped.
        let mut all = Vec::new();
        let mut held = self.held.lock();
        for number in self.in_use() {
            if held.contains(&number) || !self.try_lock(number) {
                continue;
            }
            match self.take_over(number, slot) {
                Ok(records) if !records.is_empty() => {
                    held.insert(number);
                    let left = records.len();
                    all.push(Abandoned { journal: Arc::clone(self), number, records, left });
                }
                nothing => {
                    self.unlock(number);
                    nothing?;
                }
            }
        }
        Ok(all)
    }

    /// The records of a section whose lock this process has just got.
    fn take_over(&self, number: u8, slot: u8) -> io::Result<Vec<(u32, Payload)>> {
        let records = self.records(number)?;
        let header = if records.is_empty() { (0, 0) } else { (self.header(number).0, slot.into()) };
        self.set_header(number, header);
        Ok(records)
    }

    /// Whether a process has ended and left something.
    ///
    /// # Errors
    /// Those of pread(2).
    pub fn has_abandoned(&self) -> io::Result<bool> {
        let held = self.held.lock();
        for number in self.in_use() {
            if !held.contains(&number) && self.try_lock(number) {
                let records = self.records(number);
                self.unlock(number);
                if !records?.is_empty() {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// The slots of processes that have taken records over, maybe also of some that have ended since. The caller need
    /// not have joined.
    #[must_use]
    pub fn successors(store: &Store) -> BTreeSet<u8> {
        let headers =
            (0..=(SECTIONS - 1) as u8).map(|number| parse_header(store.table().header(number)));
        let slots = headers.filter(|(len, _)| *len > 0).map(|(_, slot)| slot);
        slots.filter_map(|slot| u8::try_from(slot).ok()).filter(|slot| *slot != 0).collect()
    }

    fn in_use(&self) -> impl Iterator<Item = u8> {
        (0..=(SECTIONS - 1) as u8).filter(|number| self.header(*number).0 > 0)
    }

    fn header(&self, number: u8) -> (u32, u32) {
        parse_header(self.store.table().header(number))
    }

    fn set_header(&self, number: u8, (len, slot): (u32, u32)) {
        self.store.table().set_header(number, u64::from(slot) << 32 | u64::from(len));
    }

    fn file(&self) -> &File {
        self.store.file().expect("who joins a journal has a file")
    }

    fn records(&self, number: u8) -> io::Result<Vec<(u32, Payload)>> {
        // Behind the end are zeros.
        let mut bytes = vec![0; RECORD_LEN * self.header(number).0 as usize];
        read_at(self.file(), record_at(&self.store, number, 0), &mut bytes)?;
        let records = bytes.as_chunks::<RECORD_LEN>().0.iter().zip(0..);
        let set = records.filter(|(record, _)| record[0] == IS_SET);
        Ok(set
            .map(|(record, at)| (at, *record[1..].first_chunk().expect("the rest of a record")))
            .collect())
    }

    fn set_record(&self, number: u8, at: u32, record: Option<&Payload>) -> io::Result<()> {
        let _uncancelled = Uncancelled::new();
        let mut bytes = [0; RECORD_LEN];
        if let Some(payload) = record {
            bytes[0] = IS_SET;
            bytes[1..].copy_from_slice(payload);
        }
        // A write beyond the limit on the length of files would end the process.
        check_length(record_at(&self.store, number, at + 1))?;
        self.file().write_all_at(&bytes, record_at(&self.store, number, at))
    }

    fn try_lock(&self, number: u8) -> bool {
        self.store.try_lock_byte(JOURNAL_LOCKS_AT + u64::from(number))
    }

    fn unlock(&self, number: u8) {
        self.store.unlock_byte(JOURNAL_LOCKS_AT + u64::from(number));
    }
}

impl Section {
    /// Adds a record, and says where; `None` where there is no room.
    pub fn add(&mut self, payload: &Payload) -> Option<u32> {
        let at = self.free.pop().unwrap_or(self.len);
        let added = (at < RECORDS).then(|| {
            self.journal.set_record(self.number, at, Some(payload))?;
            if at == self.len {
                self.journal.set_header(self.number, (self.len + 1, 0));
                self.len += 1;
            }
            io::Result::Ok(())
        })?;
        added.inspect_err(|error| tracing::debug!(%error, "a record was not written")).ok()?;
        Some(at)
    }

    /// Takes a record back that [`add`](Self::add) added.
    pub fn remove(&mut self, at: u32) {
        self.free.push(at);
        let done = if self.free.len() == self.len as usize {
            (self.len, self.free) = (0, Vec::new());
            self.journal.set_header(self.number, (0, 0));
            self.journal.set_record(self.number, at, None)
        } else {
            self.journal.set_record(self.number, at, None)
        };
        if let Err(error) = done {
            tracing::debug!(%error, "a record was not taken back");
        }
    }

    /// Takes all records back.
    pub fn clear(&mut self) {
        if self.len > 0 {
            // This is called in exit(3), whose caller may have interrupted malloc(3). So no memory is freed here.
            self.len = 0;
            self.free.clear();
            self.journal.set_header(self.number, (0, 0));
        }
    }
}

impl Drop for Section {
    fn drop(&mut self) {
        self.journal.release(self.number);
    }
}

impl Journal {
    fn release(&self, number: u8) {
        let mut held = self.held.lock();
        self.unlock(number);
        held.remove(&number);
    }
}

impl Abandoned {
    /// Tells it from others that this process has.
    #[must_use]
    pub fn number(&self) -> u8 {
        self.number
    }

    /// Its records, and where they are.
    #[must_use]
    pub fn records(&self) -> &[(u32, Payload)] {
        &self.records
    }

    /// Removes a record for which nothing remains to be done. Each is named once. True if it was the last.
    pub fn done(&mut self, at: u32) -> bool {
        self.left -= 1;
        if let Err(error) = self.journal.set_record(self.number, at, None) {
            tracing::debug!(%error, "a record was not taken back");
        }
        self.left == 0
    }
}

impl Drop for Abandoned {
    fn drop(&mut self) {
        let len = if self.left == 0 { 0 } else { self.journal.header(self.number).0 };
        self.journal.set_header(self.number, (len, 0));
        self.journal.release(self.number);
    }
}

fn record_at(store: &Store, number: u8, at: u32) -> u64 {
    let index = u64::from(number) * u64::from(RECORDS) + u64::from(at);
    store.base + index * RECORD_LEN as u64
}

/// The number of a section's records to look at, and the slot of the process that has taken it over. The number is
/// bounded, whatever the word holds.
fn parse_header(word: u64) -> (u32, u32) {
    ((word as u32).min(RECORDS), (word >> 32) as u32)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::host::Registry;

    /// Joins that many processes to one store.
    fn join<const N: usize>(name: &str) -> [Arc<Journal>; N] {
        let registry = Registry::new(&format!("{name}-{}", std::process::id())).unwrap();
        // All before the first is given back.
        let stores = [(); N].map(|()| Store::join(&registry).unwrap());
        stores.map(|store| Journal::join(&store).unwrap())
    }

    fn payload(n: u8) -> Payload {
        [n; PAYLOAD_LEN]
    }

    fn contents(abandoned: &[Abandoned]) -> Vec<u8> {
        abandoned.iter().flat_map(|a| a.records()).map(|(_, payload)| payload[0]).collect()
    }

    #[test]
    fn records_of_an_ended_holder_are_taken_over_once() {
        let [a, b, c] = join("journal");
        let mut section = a.section().unwrap();
        let places: Vec<_> = (1..=3).map(|n| section.add(&payload(n)).unwrap()).collect();
        section.remove(places[1]);
        assert!(!b.has_abandoned().unwrap() && b.take_abandoned(7).unwrap().is_empty());
        // The process ends.
        drop((section, a));
        assert!(b.has_abandoned().unwrap());
        let mut taken = b.take_abandoned(7).unwrap();
        assert_eq!(contents(&taken), [1, 3]);
        assert!(b.take_abandoned(7).unwrap().is_empty(), "it has it");
        assert!(!c.has_abandoned().unwrap() && c.take_abandoned(8).unwrap().is_empty());
        assert_eq!(Journal::successors(&c.store), BTreeSet::from([7]));
        assert!(!taken[0].done(places[0]));
        // The next process also ends. Its unfinished records go to a third.
        drop((taken, b));
        let mut taken = c.take_abandoned(8).unwrap();
        assert_eq!(contents(&taken), [3]);
        assert!(taken[0].done(places[2]));
        drop(taken);
        assert!(!c.has_abandoned().unwrap() && Journal::successors(&c.store).is_empty());
    }

    /// There is a section for each process that a host can have, and each is looked through.
    #[test]
    fn a_record_is_found_in_whichever_section_it_lies() {
        let [a, b, c] = join("journal-sections");
        let mut sections: Vec<_> = (0..SECTIONS).map(|_| a.section().unwrap()).collect();
        for journal in [&a, &b] {
            assert_eq!(journal.section().unwrap_err().kind(), io::ErrorKind::StorageFull);
        }
        for (at, n) in [(77, 1), (255, 2)] {
            sections[at].add(&payload(n)).unwrap();
        }
        drop((sections, a));
        // A process that only looks keeps nothing from the others.
        assert!(c.has_abandoned().unwrap());
        let taken = b.take_abandoned(7).unwrap();
        assert_eq!(contents(&taken), [1, 2]);
        assert_ne!(taken[0].number(), taken[1].number());
        assert!(c.section().is_ok());
    }

    #[test]
    fn a_holder_without_records_leaves_none() {
        let [a, b] = join("journal-empty");
        let mut section = a.section().unwrap();
        let at = section.add(&payload(1)).unwrap();
        section.remove(at);
        drop(section);
        assert!(!b.has_abandoned().unwrap());
        let mut section = a.section().unwrap();
        section.add(&payload(2)).unwrap();
        section.clear();
        // The process was killed between the record and the length that counts it. Neither this record nor the old one
        // in its place is there.
        a.set_record(section.number, 0, Some(&payload(3))).unwrap();
        drop(section);
        assert!(!b.has_abandoned().unwrap() && b.take_abandoned(1).unwrap().is_empty());
    }

    #[test]
    fn places_are_used_again_and_end() {
        let [journal] = join("journal-full");
        let mut section = journal.section().unwrap();
        for n in 0..RECORDS {
            assert_eq!(section.add(&payload(1)), Some(n));
        }
        assert_eq!(section.add(&payload(1)), None);
        section.remove(17);
        assert_eq!(section.add(&payload(1)), Some(17));
        assert_eq!(section.add(&payload(1)), None);
    }

    #[test]
    fn nonsense_is_bounded() {
        let [journal] = join("journal-nonsense");
        journal.set_header(5, (u32::MAX, u32::MAX));
        assert!(!journal.has_abandoned().unwrap());
        assert!(Journal::successors(&journal.store).is_empty());
        assert!(journal.take_abandoned(1).unwrap().is_empty());
    }

    #[test]
    fn a_limit_on_the_length_of_files_ends_nobody() {
        let name = "host::journal::tests::a_limit_on_the_length_of_files_ends_nobody";
        anyverbs_testing::in_own_process(name, || {
            let [journal] = join("journal-limit");
            let mut section = journal.section().unwrap();
            let at = section.add(&payload(1)).unwrap();
            let limit = libc::rlimit {
                rlim_cur: journal.store.base + RECORD_LEN as u64,
                rlim_max: libc::RLIM_INFINITY,
            };
            // SAFETY: a limit to read.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
            assert_eq!(section.add(&payload(2)), None);
            let error = Journal::join(&journal.store).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
            section.remove(at);
            assert_eq!(section.add(&payload(3)), Some(at));
        });
    }

    /// pread(2) and pwrite(2) are cancellation points in the C library.
    #[test]
    fn nobody_is_cancelled_while_it_reads_or_writes() {
        unsafe extern "C" {
            fn pthread_cancel(thread: libc::pthread_t) -> libc::c_int;
        }
        let [a, b] = join("journal-cancelled");
        let (sender, done) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            // SAFETY: this thread's own id.
            assert_eq!(unsafe { pthread_cancel(libc::pthread_self()) }, 0);
            let mut section = a.section().unwrap();
            let places = [1, 2, 3].map(|n| section.add(&payload(n)).unwrap());
            section.remove(places[0]);
            drop(section);
            let has = b.has_abandoned().unwrap();
            let mut taken = b.take_abandoned(7).unwrap();
            let successors = Journal::successors(&a.store);
            taken[0].done(places[1]);
            drop(taken);
            let mut section = b.section().unwrap();
            section.add(&payload(4)).unwrap();
            section.clear();
            // For the rest of this thread.
            std::mem::forget(Uncancelled::new());
            sender.send(has && successors.contains(&7)).unwrap();
        });
        assert!(done.recv_timeout(Duration::from_secs(20)).unwrap());
        thread.join().unwrap();
    }
}
