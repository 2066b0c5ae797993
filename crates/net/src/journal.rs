//! Records that outlive the process that wrote them, so that others can finish what it left undone.
//!
//! A journal is a memfd that all processes of a registry share which joined it ([`crate::held_file`]).
//!
//! It has *sections*, each a list of records. Who holds the lock of a section, one of the open file, writes it: the process that
//! claimed it or, when that has ended, however it did, the one that takes it over. So each record has one process that sees to it, whoever
//! dies. (A child that forked and did not exec keeps its parent's locks, as it keeps its slot.)
//!
//! A record is written before the section's length counts it, and its first byte says that it is one: who is killed in between
//! leaves no half of it. What it says is checked by who takes it over.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::held_file;
use crate::ofd_lock;
use crate::registry::{Lock, NameGuard, Registry};
use crate::shm::memfd;
use crate::sys::Uncancelled;

/// Bytes that a record has for its user.
pub const PAYLOAD_LEN: usize = 63;
/// As a record.
pub type Payload = [u8; PAYLOAD_LEN];

const RECORD_LEN: usize = 1 + PAYLOAD_LEN;
/// The first byte of a record; 0 where there is none.
const IS_SET: u8 = 1;
/// As many as there can be processes.
const SECTIONS: u32 = 256;
/// Records of a section.
const RECORDS: u32 = 4096;
/// For each section: how many of its records to look at, and the slot of the process that has taken it over, each in 4 bytes.
const HEADER_LEN: usize = 8;
const HEADERS_LEN: usize = HEADER_LEN * SECTIONS as usize;

/// The journal of a registry, as one process has it.
#[derive(Debug)]
pub struct Journal {
    file: File,
    /// Sections whose lock this process holds: to the kernel its own lock is none.
    held: Mutex<BTreeSet<u32>>,
    _name: NameGuard,
}

/// The records of this process. They stay when the value is dropped, for others, unless it was [cleared](Self::clear).
#[derive(Debug)]
pub struct Section {
    journal: Arc<Journal>,
    number: u32,
    /// Records that were or are set.
    len: u32,
    free: Vec<u32>,
}

/// What a process left that has ended; this one has it until it is dropped. What is not [done](Self::done) by then others find.
#[derive(Debug)]
pub struct Abandoned {
    journal: Arc<Journal>,
    number: u32,
    records: Vec<(u32, Payload)>,
    left: usize,
}

impl Journal {
    /// The journal that others of the registry have, or a new one.
    ///
    /// # Errors
    /// `TimedOut` where another process does not get done; those of memfd_create(2) and bind(2).
    pub fn join(registry: &Registry) -> io::Result<Arc<Self>> {
        let (file, _name) = held_file::join(registry, KIND, Lock::Journal, new_file)?;
        Ok(Arc::new(Self { file, held: Mutex::default(), _name }))
    }

    /// A section for the records of this process.
    ///
    /// # Errors
    /// `StorageFull` where there is none; those of pread(2).
    pub fn section(self: &Arc<Self>) -> io::Result<Section> {
        let _uncancelled = Uncancelled::new();
        let mut held = self.held.lock();
        for number in 0..SECTIONS {
            if held.contains(&number) || !self.try_lock(number) {
                continue;
            }
            let header = self.header(number);
            if let Ok((0, _)) = header {
                held.insert(number);
                return Ok(Section { journal: Arc::clone(self), number, len: 0, free: Vec::new() });
            }
            self.unlock(number);
            header?;
        }
        Err(io::ErrorKind::StorageFull.into())
    }

    /// Takes over what processes left that have ended. `slot`: where this one is found.
    ///
    /// # Errors
    /// Those of pread(2) and pwrite(2).
    pub fn take_abandoned(self: &Arc<Self>, slot: u8) -> io::Result<Vec<Abandoned>> {
        let _uncancelled = Uncancelled::new();
        // Declared before `held`: those in it lock that when they are dropped.
        let mut all = Vec::new();
        let mut held = self.held.lock();
        for number in self.in_use()? {
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
    fn take_over(&self, number: u32, slot: u8) -> io::Result<Vec<(u32, Payload)>> {
        let records = self.records(number)?;
        let header =
            if records.is_empty() { (0, 0) } else { (self.header(number)?.0, slot.into()) };
        self.set_header(number, header)?;
        Ok(records)
    }

    /// Whether a process has ended and left something.
    ///
    /// # Errors
    /// Those of pread(2).
    pub fn has_abandoned(&self) -> io::Result<bool> {
        let held = self.held.lock();
        for number in self.in_use()? {
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

    /// The slots of those that have taken something over, and maybe of some that have ended themselves.
    ///
    /// # Errors
    /// Those of pread(2).
    pub fn successors(&self) -> io::Result<BTreeSet<u8>> {
        successors_in(&self.file)
    }

    /// The same for who has not joined, and does not: of the journal that others of the registry have, if there is one.
    ///
    /// # Errors
    /// Those of pread(2), and of reading the registry.
    pub fn successors_in_registry(registry: &Registry) -> io::Result<BTreeSet<u8>> {
        let _uncancelled = Uncancelled::new();
        let file = held_file::find(registry, KIND)?;
        file.map_or_else(|| Ok(BTreeSet::new()), |file| successors_in(&file))
    }

    fn in_use(&self) -> io::Result<Vec<u32>> {
        Ok((0..).zip(self.headers()?).filter(|(_, (len, _))| *len > 0).map(|(n, _)| n).collect())
    }

    fn headers(&self) -> io::Result<Vec<(u32, u32)>> {
        headers_in(&self.file)
    }

    fn header(&self, number: u32) -> io::Result<(u32, u32)> {
        let mut bytes = [0; HEADER_LEN];
        self.read(HEADER_LEN as u64 * u64::from(number), &mut bytes)?;
        Ok(parse_header(bytes))
    }

    fn set_header(&self, number: u32, (len, slot): (u32, u32)) -> io::Result<()> {
        let _uncancelled = Uncancelled::new();
        let mut bytes = [0; HEADER_LEN];
        bytes[..4].copy_from_slice(&len.to_le_bytes());
        bytes[4..].copy_from_slice(&slot.to_le_bytes());
        self.file.write_all_at(&bytes, HEADER_LEN as u64 * u64::from(number))
    }

    fn records(&self, number: u32) -> io::Result<Vec<(u32, Payload)>> {
        let len = self.header(number)?.0;
        let mut bytes = vec![0; RECORD_LEN * len as usize];
        self.read(record_at(number, 0), &mut bytes)?;
        let records = bytes.as_chunks::<RECORD_LEN>().0.iter().zip(0..);
        let set = records.filter(|(record, _)| record[0] == IS_SET);
        Ok(set
            .map(|(record, at)| (at, *record[1..].first_chunk().expect("the rest of a record")))
            .collect())
    }

    fn set_record(&self, number: u32, at: u32, record: Option<&Payload>) -> io::Result<()> {
        let _uncancelled = Uncancelled::new();
        let mut bytes = [0; RECORD_LEN];
        if let Some(payload) = record {
            bytes[0] = IS_SET;
            bytes[1..].copy_from_slice(payload);
        }
        self.file.write_all_at(&bytes, record_at(number, at))
    }

    /// Reads; behind the end are zeros.
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        held_file::read_at(&self.file, at, into).map(drop)
    }

    fn try_lock(&self, number: u32) -> bool {
        ofd_lock::try_lock(&self.file, number.into())
    }

    fn unlock(&self, number: u32) {
        ofd_lock::unlock(&self.file, number.into());
    }
}

fn successors_in(file: &File) -> io::Result<BTreeSet<u8>> {
    let slots = headers_in(file)?.into_iter().filter(|(len, _)| *len > 0);
    Ok(slots.filter_map(|(_, slot)| u8::try_from(slot).ok()).filter(|s| *s != 0).collect())
}

fn headers_in(file: &File) -> io::Result<Vec<(u32, u32)>> {
    let mut bytes = [0; HEADERS_LEN];
    held_file::read_at(file, 0, &mut bytes)?;
    Ok(bytes.as_chunks().0.iter().copied().map(parse_header).collect())
}

impl Section {
    /// Adds a record, and says where; `None` where there is no room.
    pub fn add(&mut self, payload: &Payload) -> Option<u32> {
        let at = self.free.pop().unwrap_or(self.len);
        let added = (at < RECORDS).then(|| {
            self.journal.set_record(self.number, at, Some(payload))?;
            if at == self.len {
                self.journal.set_header(self.number, (self.len + 1, 0))?;
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
            let header = self.journal.set_header(self.number, (0, 0));
            header.and_then(|()| self.journal.set_record(self.number, at, None))
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
            // Nothing is given back: this is called in exit(3), in whose caller malloc(3) may have been interrupted.
            self.len = 0;
            self.free.clear();
            let _ = self.journal.set_header(self.number, (0, 0));
        }
    }
}

impl Drop for Section {
    fn drop(&mut self) {
        self.journal.release(self.number);
    }
}

impl Journal {
    fn release(&self, number: u32) {
        let mut held = self.held.lock();
        self.unlock(number);
        held.remove(&number);
    }
}

impl Abandoned {
    /// Tells it from others that this process has.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Its records, and where they are.
    #[must_use]
    pub fn records(&self) -> &[(u32, Payload)] {
        &self.records
    }

    /// Nothing remains to be done for a record, each of which is named once. True if that was the last.
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
        let len =
            if self.left == 0 { 0 } else { self.journal.header(self.number).map_or(0, |h| h.0) };
        let _ = self.journal.set_header(self.number, (len, 0));
        self.journal.release(self.number);
    }
}

fn record_at(number: u32, at: u32) -> u64 {
    let index = u64::from(number) * u64::from(RECORDS) + u64::from(at);
    HEADERS_LEN as u64 + index * RECORD_LEN as u64
}

/// The length is bounded, whatever stands there.
fn parse_header(bytes: [u8; HEADER_LEN]) -> (u32, u32) {
    let word = |at| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    (word(0).min(RECORDS), word(4))
}

const KIND: &str = "journal";

/// One that nobody can seal against those who write it.
fn new_file() -> io::Result<File> {
    let file = File::from(memfd()?);
    // SAFETY: fcntl with an integer argument, on our own descriptor.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SEAL) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::os::unix::fs::MetadataExt;
    use std::time::Duration;

    use super::*;

    fn registry(name: &str) -> Registry {
        Registry::new(&format!("{name}-{}", std::process::id())).unwrap()
    }

    fn payload(n: u8) -> Payload {
        [n; PAYLOAD_LEN]
    }

    fn contents(abandoned: &[Abandoned]) -> Vec<u8> {
        abandoned.iter().flat_map(|a| a.records()).map(|(_, payload)| payload[0]).collect()
    }

    #[test]
    fn what_a_holder_leaves_another_takes_over_once() {
        let registry = registry("journal");
        let (a, b) = (Journal::join(&registry).unwrap(), Journal::join(&registry).unwrap());
        let c = Journal::join(&registry).unwrap();
        assert_eq!(a.file.metadata().unwrap().ino(), b.file.metadata().unwrap().ino());
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
        assert_eq!(c.successors().unwrap(), BTreeSet::from([7]));
        assert!(!taken[0].done(places[0]));
        // So does this one: what it has not done others find.
        drop((taken, b));
        let mut taken = c.take_abandoned(8).unwrap();
        assert_eq!(contents(&taken), [3]);
        assert!(taken[0].done(places[2]));
        drop(taken);
        assert!(!c.has_abandoned().unwrap() && c.successors().unwrap().is_empty());
    }

    #[test]
    fn who_has_nothing_open_leaves_nothing() {
        let registry = registry("journal-empty");
        let (a, b) = (Journal::join(&registry).unwrap(), Journal::join(&registry).unwrap());
        let mut section = a.section().unwrap();
        let at = section.add(&payload(1)).unwrap();
        section.remove(at);
        drop(section);
        assert!(!b.has_abandoned().unwrap());
        let mut section = a.section().unwrap();
        section.add(&payload(2)).unwrap();
        section.clear();
        // Killed between the record and the length that counts it: it is not there, nor what lay there before.
        a.set_record(section.number, 0, Some(&payload(3))).unwrap();
        drop(section);
        assert!(!b.has_abandoned().unwrap() && b.take_abandoned(1).unwrap().is_empty());
    }

    #[test]
    fn places_are_used_again_and_end() {
        let journal = Journal::join(&registry("journal-full")).unwrap();
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
    fn nonsense_is_bounded_and_strangers_files_are_not_taken() {
        let registry = registry("journal-nonsense");
        let journal = Journal::join(&registry).unwrap();
        journal.set_header(5, (u32::MAX, u32::MAX)).unwrap();
        assert!(!journal.has_abandoned().unwrap() && journal.successors().unwrap().is_empty());
        assert!(journal.take_abandoned(1).unwrap().is_empty());
        drop(journal);
        // Names that lead to no journal.
        let pid = std::process::id();
        for name in ["journal/1/2".into(), format!("journal/{pid}/0/1"), "journal/x/y/z".into()] {
            let _name = registry.hold(&name).unwrap();
            assert!(held_file::find(&registry, KIND).unwrap().is_none(), "{name}");
        }
    }

    fn seal(file: &File, seals: i32) -> bool {
        // SAFETY: fcntl with an integer argument.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) == 0 }
    }

    #[test]
    fn a_section_is_not_kept_after_an_error() {
        let registry = registry("journal-error");
        assert!(!seal(&Journal::join(&registry).unwrap().file, libc::F_SEAL_WRITE));
        // One that can be sealed, so that to write it fails.
        let file = File::from(memfd().unwrap());
        let open = || {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
            let _name = registry.hold(&format!("test/{}", file.as_raw_fd())).unwrap();
            Arc::new(Journal { file, held: Mutex::default(), _name })
        };
        let (a, b, c) = (open(), open(), open());
        let mut sections = [a.section().unwrap(), a.section().unwrap()];
        for section in &mut sections {
            section.add(&payload(1)).unwrap();
        }
        drop(sections);
        assert!(seal(&file, libc::F_SEAL_WRITE));
        b.take_abandoned(1).unwrap_err();
        assert!(b.held.lock().is_empty());
        assert!((0..2).all(|number| c.try_lock(number)), "it has a lock");
    }

    /// pread(2) and pwrite(2) are cancellation points in the C library.
    #[test]
    fn nobody_is_cancelled_while_it_reads_or_writes() {
        unsafe extern "C" {
            fn pthread_cancel(thread: libc::pthread_t) -> libc::c_int;
        }
        let registry = registry("journal-cancelled");
        let (a, b) = (Journal::join(&registry).unwrap(), Journal::join(&registry).unwrap());
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
            let successors = a.successors().unwrap();
            taken[0].done(places[1]);
            drop(taken);
            let mut section = b.section().unwrap();
            section.add(&payload(4)).unwrap();
            section.clear();
            // For what follows in this thread.
            std::mem::forget(Uncancelled::new());
            sender.send(has && successors.contains(&7)).unwrap();
        });
        assert!(done.recv_timeout(Duration::from_secs(20)).unwrap());
        thread.join().unwrap();
    }
}
