//! Records of a host: each of the processes of one user that share a table writes a section of its own and reads those of all, so that
//! who has to heed what others say looks at one word until something has changed.
//!
//! A table is a memfd ([`crate::held_file`]). Its first pages are mapped:
//!
//! | offset | what |
//! |---|---|
//! | 0 | *generation*: counts the changes of all sections |
//! | 64 | the number that is given out next |
//! | 4096 + slot x 16 | a section's *version*, odd while its owner writes it; how many of its records to look at |
//!
//! Behind them lies a section for each slot, of records: a byte that says whether there is one, and the record. These are read and written by
//! system calls, so that what nobody wrote needs no memory; and a section without records gives its own back. A limit on the length of
//! files (`ulimit -f`) holds for this one, too: a process whose section lies beyond it cannot join.
//!
//! A section is written by the owner of its slot alone, who holds a lock of the byte of the file that has the slot's number, one of the open
//! file ([`crate::ofd_lock`]): a section whose byte nobody holds is that of a process that has ended, however it did, and says nothing. (A
//! child that forked and did not exec keeps its parent's lock, as it keeps its slot.) A change is counted when it has been made, before the
//! call that makes it returns: who looks after that sees it. What stands in another's section is for the reader to check.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use parking_lot::Mutex;

use crate::held_file;
use crate::ofd_lock;
use crate::registry::{Lock, NameGuard, Slot};
use crate::shm::{Access, Area, Memory, memfd};
use crate::sys::Uncancelled;

/// Bytes of a record.
pub const RECORD_LEN: usize = 319;
/// Most records of one process.
pub const MAX_RECORDS: usize = 16_384;

/// A record in the file.
const ENTRY_LEN: usize = 1 + RECORD_LEN;
/// The first byte of a record; 0 where there is none.
const IS_SET: u8 = 1;
const SLOTS: usize = 256;
const SECTION_LEN: u64 = (MAX_RECORDS * ENTRY_LEN) as u64;
const GENERATION: usize = 0;
const NUMBER: usize = 64;
const SECTIONS: usize = 4096;
const HEADER_LEN: usize = SECTIONS + SLOTS * 16;
/// Records that are read in one system call.
const CHUNK: usize = 256;
/// How often a section is read that is being written meanwhile, since its owner may be stopped.
const ATTEMPTS: usize = 3;

/// A table, as one process has it.
#[derive(Debug)]
pub struct SharedTable {
    area: Area,
    slot: u8,
    /// Its open file, which no other process has, holds the lock.
    file: File,
    own: Mutex<Own>,
    _name: NameGuard,
}

/// Which records of the own section are in use.
#[derive(Debug, Default)]
struct Own {
    /// That were or are.
    len: usize,
    free: Vec<usize>,
    /// The process ends: nothing is added any more.
    has_left: bool,
}

/// What another process has written.
#[derive(Debug)]
pub struct Section {
    /// That of the section before it was read.
    pub version: u64,
    /// Its owner did not write it meanwhile.
    pub settled: bool,
    /// Of a process that has not ended.
    pub records: Vec<[u8; RECORD_LEN]>,
}

impl SharedTable {
    /// The table of this kind that others of the registry have, or a new one. What an earlier owner of the slot left is cleared.
    ///
    /// # Errors
    /// `ResourceBusy` where another process has the slot's section; `TimedOut` where another does not get done with joining;
    /// `FileTooLarge` where the section lies beyond the limit on the length of files; those of memfd_create(2), bind(2), fallocate(2),
    /// fcntl(2) and mmap(2).
    pub fn join(slot: &Slot, kind: &str) -> io::Result<Self> {
        let _uncancelled = Uncancelled::new();
        check_limit(entry_at(slot.number(), 0) + SECTION_LEN)?;
        let (file, name) = held_file::join(slot.registry(), kind, Lock::Table, new_file)?;
        // SAFETY: fcntl without an argument that points anywhere.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0
            || seals & libc::F_SEAL_SHRINK == 0
            || file.metadata()?.size() < HEADER_LEN as u64
        {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // Whoever made it: a store to a page that finds no memory would end the process.
        allocate_header(&file)?;
        let area = Area::map(file.as_fd(), HEADER_LEN, Access::ReadWrite)?;
        let table = Self { area, slot: slot.number(), file, own: Mutex::default(), _name: name };
        let byte = slot.number().into();
        if ofd_lock::is_locked_by_another(&table.file, byte)? {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        // Before the lock, with which it would be believed.
        if table.version(table.slot) != 0 {
            table.erase_all()?;
        }
        if !ofd_lock::try_lock(&table.file, byte) {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        Ok(table)
    }

    /// How often sections have changed.
    #[inline]
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.area.load(GENERATION, Ordering::Acquire)
    }

    /// A number that no other process gets, greater than those that were given out before.
    #[must_use]
    pub fn take_number(&self) -> u64 {
        self.area.fetch_add(NUMBER, 1)
    }

    /// Adds a record to the own section, and says where.
    ///
    /// # Errors
    /// `StorageFull` where there are as many as can be, or the process ends; `FileTooLarge` where the limit on the length of files has
    /// become too low; those of pwrite(2).
    pub fn add(&self, record: &[u8; RECORD_LEN]) -> io::Result<usize> {
        let own = &mut *self.own.lock();
        let at = own.free.last().copied().unwrap_or(own.len);
        if at >= MAX_RECORDS || own.has_left {
            return Err(io::ErrorKind::StorageFull.into());
        }
        check_limit(entry_at(self.slot, at) + ENTRY_LEN as u64)?;
        self.write(|| {
            // Who is killed in between leaves no half of a record.
            self.file.write_all_at(record, entry_at(self.slot, at) + 1)?;
            self.file.write_all_at(&[IS_SET], entry_at(self.slot, at))?;
            if at == own.len {
                self.area.store(word_of(self.slot) + 8, at as u64 + 1, Ordering::SeqCst);
            }
            Ok(())
        })?;
        if own.free.pop().is_none() {
            own.len += 1;
        }
        Ok(at)
    }

    /// Takes a record back that [`add`](Self::add) added.
    pub fn remove(&self, at: usize) {
        let own = &mut *self.own.lock();
        if own.has_left {
            return;
        }
        own.free.push(at);
        if own.free.len() == own.len {
            return self.clear(own);
        }
        // No limit on the length of files holds for that.
        let removed = self.write(|| self.erase(at, ENTRY_LEN as u64));
        if let Err(error) = removed {
            tracing::debug!(%error, "a record was not taken back");
        }
    }

    /// Takes all records back, for good; allocates nothing, and frees nothing. False if another thread does not get done with changing
    /// them before the time is over.
    pub fn leave(&self, patience: Duration) -> bool {
        let Some(mut own) = self.own.try_lock_for(patience) else { return false };
        own.has_left = true;
        own.len == 0 || self.erase_all().is_ok()
    }

    fn erase_all(&self) -> io::Result<()> {
        self.write(|| {
            self.area.store(word_of(self.slot) + 8, 0, Ordering::SeqCst);
            self.erase(0, SECTION_LEN)
        })
    }

    fn clear(&self, own: &mut Own) {
        *own = Own::default();
        if let Err(error) = self.erase_all() {
            tracing::debug!(%error, "the memory of a section was not given back");
        }
    }

    /// Makes zeros of what begins with a record of the own section.
    fn erase(&self, at: usize, len: u64) -> io::Result<()> {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let from = entry_at(self.slot, at).cast_signed();
        // SAFETY: a plain call on our own descriptor.
        if unsafe { libc::fallocate(self.file.as_raw_fd(), mode, from, len.cast_signed()) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Changes the own section. One at a time.
    fn write(&self, change: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let _uncancelled = Uncancelled::new();
        let version = word_of(self.slot);
        // Odd: a process that was killed may have left it so.
        let writing = self.version(self.slot) | 1;
        self.area.store(version, writing, Ordering::SeqCst);
        // The system calls come behind that and before the next one, for those who read as well.
        fence(Ordering::SeqCst);
        let changed = change();
        fence(Ordering::SeqCst);
        // 0 is a section that was never written.
        let written = writing.checked_add(1).unwrap_or(2);
        self.area.store(version, written, Ordering::SeqCst);
        self.area.fetch_add(GENERATION, 1);
        changed
    }

    fn version(&self, slot: u8) -> u64 {
        self.area.load(word_of(slot), Ordering::SeqCst)
    }

    /// The slots of others, and the versions of their sections, which change with them; 0 for one that was never written.
    pub fn versions(&self) -> impl Iterator<Item = (u8, u64)> {
        let others = (1..=255).filter(|slot| *slot != self.slot);
        others.map(|slot| (slot, self.version(slot)))
    }

    /// Whether the owner of a section has not ended. A system call. Where that cannot be found out, it has not.
    #[must_use]
    pub fn lives(&self, slot: u8) -> bool {
        ofd_lock::is_locked_by_another(&self.file, slot.into()).unwrap_or(true)
    }

    /// What another process has written; nothing, if it has ended.
    ///
    /// # Errors
    /// Those of pread(2).
    pub fn section(&self, slot: u8) -> io::Result<Section> {
        let _uncancelled = Uncancelled::new();
        let mut version = self.version(slot);
        let mut attempts = 0;
        loop {
            fence(Ordering::SeqCst);
            let records = if self.lives(slot) { self.read(slot)? } else { Vec::new() };
            fence(Ordering::SeqCst);
            let after = self.version(slot);
            let settled = version == after && version & 1 == 0;
            attempts += 1;
            if settled || attempts == ATTEMPTS {
                return Ok(Section { version, settled, records });
            }
            version = after;
        }
    }

    fn read(&self, slot: u8) -> io::Result<Vec<[u8; RECORD_LEN]>> {
        let len = self.area.load(word_of(slot) + 8, Ordering::SeqCst);
        let len = usize::try_from(len).unwrap_or(usize::MAX).min(MAX_RECORDS);
        let mut records = Vec::new();
        let mut bytes = vec![0; ENTRY_LEN * CHUNK.min(len)];
        for from in (0..len).step_by(CHUNK) {
            let chunk = &mut bytes[..ENTRY_LEN * CHUNK.min(len - from)];
            // What lies behind the end of the file is no record.
            let n = held_file::read_at(&self.file, entry_at(slot, from), chunk)?;
            let entries = chunk[..n].as_chunks::<ENTRY_LEN>().0.iter();
            let set = entries.filter(|entry| entry[0] == IS_SET);
            records.extend(set.map(|e| *e[1..].first_chunk().expect("the rest of an entry")));
        }
        Ok(records)
    }
}

fn word_of(slot: u8) -> usize {
    SECTIONS + usize::from(slot) * 16
}

fn entry_at(slot: u8, at: usize) -> u64 {
    HEADER_LEN as u64 + ((usize::from(slot) * MAX_RECORDS + at) * ENTRY_LEN) as u64
}

fn allocate_header(file: &File) -> io::Result<()> {
    // SAFETY: a plain call on our own descriptor.
    if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, HEADER_LEN as i64) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Whether a file may be written up to this length. To write behind the limit would end the process (SIGXFSZ).
fn check_limit(len: u64) -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a struct to write to.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    if len > limit.rlim_cur { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(()) }
}

/// One whose first pages stay, and that nobody can seal against those who write it.
fn new_file() -> io::Result<File> {
    let file = File::from(memfd()?);
    allocate_header(&file)?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
    // SAFETY: fcntl with an integer argument, on our own descriptor.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(name: &str) -> [Slot; 3] {
        let name = format!("{name}-{}", std::process::id());
        [(); 3].map(|()| Slot::claim(&name).unwrap())
    }

    fn record(n: u8) -> [u8; RECORD_LEN] {
        [n; RECORD_LEN]
    }

    fn written(table: &SharedTable) -> impl Iterator<Item = (u8, u64)> {
        table.versions().filter(|(_, version)| *version != 0)
    }

    /// First bytes of what one sees of another.
    fn seen(table: &SharedTable, slot: &Slot) -> Vec<u8> {
        let section = table.section(slot.number()).unwrap();
        assert!(section.settled);
        assert!(section.records.iter().all(|record| record.iter().all(|byte| *byte == record[0])));
        section.records.iter().map(|record| record[0]).collect()
    }

    #[test]
    fn each_sees_what_others_write_and_that_it_has_changed() {
        let slots = slots("table");
        let [a, b, c] = slots.each_ref().map(|slot| SharedTable::join(slot, "table/1").unwrap());
        let apart = SharedTable::join(&slots[0], "table/2").unwrap();
        assert_eq!(written(&b).count(), 0);
        let before = c.generation();
        let at = [1, 2, 3].map(|n| a.add(&record(n)).unwrap());
        b.add(&record(4)).unwrap();
        assert_eq!(c.generation(), before + 4);
        let versions: Vec<_> = written(&c).collect();
        let mut writers = [slots[0].number(), slots[1].number()];
        writers.sort_unstable();
        assert!(versions.iter().map(|(slot, _)| *slot).eq(writers) && written(&apart).count() == 0);
        assert_eq!((seen(&c, &slots[0]), seen(&c, &slots[1])), (vec![1, 2, 3], vec![4]));
        assert_eq!(
            c.section(slots[0].number()).unwrap().version,
            versions[usize::from(slots[0].number() > slots[1].number())].1
        );
        a.remove(at[1]);
        assert_eq!(seen(&c, &slots[0]), [1, 3]);
        a.add(&record(5)).unwrap();
        assert_eq!(seen(&c, &slots[0]), [1, 5, 3]);
        at.into_iter().for_each(|at| a.remove(at));
        assert!(seen(&c, &slots[0]).is_empty());
        a.add(&record(6)).unwrap();
        assert_eq!(seen(&c, &slots[0]), [6]);
        // The words that count are a process's own.
        assert!(c.version(slots[0].number()) != versions[0].1 && seen(&c, &slots[1]) == [4]);
        let numbers = [&a, &b, &a, &c].map(SharedTable::take_number);
        assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
    }

    #[test]
    fn what_a_process_leaves_is_not_believed() {
        let slots = slots("table-ended");
        let [a, b, c] = slots.each_ref().map(|slot| SharedTable::join(slot, "table").unwrap());
        let number = slots[0].number();
        a.add(&record(1)).unwrap();
        assert!(c.lives(number) && seen(&c, &slots[0]) == [1]);
        // It was killed as it wrote.
        a.area.fetch_or(word_of(number), 1);
        drop((a, b));
        assert!(!c.lives(number) && c.section(number).unwrap().records.is_empty());
        let before = (c.version(number), c.generation());
        // Who has its slot next begins with nothing, and is the only one.
        let next = SharedTable::join(&slots[0], "table").unwrap();
        assert!(c.version(number) != before.0 && c.generation() != before.1);
        assert!(c.lives(number) && seen(&c, &slots[0]).is_empty());
        next.add(&record(2)).unwrap();
        let error = SharedTable::join(&slots[0], "table").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        assert_eq!(seen(&c, &slots[0]), [2]);
    }

    #[test]
    fn a_section_that_is_being_written_is_read_as_far_as_it_is() {
        let slots = slots("table-writing");
        let [a, b, _] = slots.each_ref().map(|slot| SharedTable::join(slot, "table").unwrap());
        a.add(&record(1)).unwrap();
        a.area.fetch_or(word_of(slots[0].number()), 1);
        let section = b.section(slots[0].number()).unwrap();
        assert!(!section.settled && section.records == [record(1)]);
        // It gets done.
        let before = b.generation();
        a.add(&record(2)).unwrap();
        assert!(b.generation() != before && seen(&b, &slots[0]) == [1, 2]);
    }

    #[test]
    fn nonsense_and_too_many_records_are_bounded() {
        let slots = slots("table-many");
        let [a, b, _] = slots.each_ref().map(|slot| SharedTable::join(slot, "table").unwrap());
        for _ in 0..MAX_RECORDS {
            a.add(&record(1)).unwrap();
        }
        assert_eq!(a.add(&record(1)).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(seen(&b, &slots[0]).len(), MAX_RECORDS);
        a.remove(17);
        assert_eq!(seen(&b, &slots[0]).len(), MAX_RECORDS - 1);
        assert_eq!(a.add(&record(2)).unwrap(), 17);
        a.add(&record(1)).unwrap_err();
        // Whoever shares it may write anything.
        for word in (0..HEADER_LEN).step_by(8) {
            a.area.store(word, u64::MAX, Ordering::Relaxed);
        }
        assert_eq!(written(&b).count(), 254);
        assert_eq!(b.section(slots[0].number()).unwrap().records.len(), MAX_RECORDS);
        assert!(b.section(slots[2].number()).unwrap().records.is_empty(), "behind the end");
        a.remove(3);
        assert_eq!(b.section(slots[0].number()).unwrap().records.len(), MAX_RECORDS - 1);
    }

    #[test]
    fn a_version_that_overflows_is_not_that_of_a_section_without_records() {
        let slots = slots("table-wraps");
        let [a, b, _] = slots.each_ref().map(|slot| SharedTable::join(slot, "table").unwrap());
        a.area.store(word_of(slots[0].number()), u64::MAX, Ordering::SeqCst);
        a.add(&record(1)).unwrap();
        assert!(written(&b).eq([(slots[0].number(), 2)]) && seen(&b, &slots[0]) == [1]);
    }

    #[test]
    fn a_section_without_records_takes_no_memory() {
        let slots = slots("table-memory");
        let [a, b, _] = slots.each_ref().map(|slot| SharedTable::join(slot, "table").unwrap());
        let blocks = || a.file.metadata().unwrap().blocks();
        let empty = blocks();
        let at: Vec<_> = (0..100).map(|_| a.add(&record(1)).unwrap()).collect();
        assert!(blocks() > empty);
        at.into_iter().for_each(|at| a.remove(at));
        assert_eq!(blocks(), empty);
        // What the last owner of the slot left, and the header, if it has none.
        a.add(&record(1)).unwrap();
        let file = b.file.try_clone().unwrap();
        drop(a);
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: a plain call on our own descriptor.
        assert_eq!(unsafe { libc::fallocate(file.as_raw_fd(), mode, 0, 4096) }, 0);
        let a = SharedTable::join(&slots[0], "table").unwrap();
        assert_eq!(file.metadata().unwrap().blocks(), empty);
        a.add(&record(1)).unwrap();
        // Nothing more is told by who ends.
        assert!(a.leave(Duration::ZERO) && file.metadata().unwrap().blocks() == empty);
        a.remove(0);
        a.add(&record(1)).unwrap_err();
        assert!(seen(&b, &slots[0]).is_empty());
    }

    #[test]
    fn a_limit_on_the_length_of_files_ends_nobody() {
        anyverbs_testing::in_own_process(
            "shared_table::tests::a_limit_on_the_length_of_files_ends_nobody",
            || {
                let limit = |bytes| {
                    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
                    // SAFETY: a limit to read.
                    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
                };
                let mut slots = slots("table-limit");
                slots.sort_by_key(Slot::number);
                let error = |slot| SharedTable::join(slot, "table").unwrap_err().kind();
                limit(0);
                assert_eq!(error(&slots[0]), io::ErrorKind::FileTooLarge);
                limit(libc::RLIM_INFINITY);
                let [a, b] = [0, 1].map(|n| SharedTable::join(&slots[n], "table").unwrap());
                let at = [1, 2].map(|n| a.add(&record(n)).unwrap());
                for bytes in [entry_at(slots[0].number(), 2) + 1, 1, 0] {
                    limit(bytes);
                    assert_eq!(error(&slots[2]), io::ErrorKind::FileTooLarge);
                    let error = a.add(&record(1)).unwrap_err();
                    assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
                }
                a.remove(at[0]);
                assert_eq!(seen(&b, &slots[0]), [2]);
                a.remove(at[1]);
                assert!(seen(&b, &slots[0]).is_empty());
                limit(entry_at(slots[0].number(), 1));
                a.add(&record(1)).unwrap();
                a.add(&record(1)).unwrap_err();
                assert_eq!(seen(&b, &slots[0]), [1]);
            },
        );
    }

    #[test]
    fn what_is_read_as_settled_is_no_mixture() {
        let slots = slots("table-torn");
        let [a, b, _] = slots.each_ref().map(|slot| SharedTable::join(slot, "table").unwrap());
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // One record at a time; or the same one twice.
                let mut before = a.add(&record(0)).unwrap();
                for n in 1..2000 {
                    let next = a.add(&record(n as u8)).unwrap();
                    a.remove(before);
                    before = next;
                }
                done.store(true, Ordering::Release);
            });
            while !done.load(Ordering::Acquire) {
                let section = b.section(slots[0].number()).unwrap();
                if section.settled {
                    assert!(section.records.len() <= 2);
                    let whole = |r: &[u8; RECORD_LEN]| r.iter().all(|byte| *byte == r[0]);
                    assert!(section.records.iter().all(whole));
                    if let [a, b] = &*section.records {
                        assert!(matches!(a[0].wrapping_sub(b[0]), 1 | 255));
                    }
                }
            }
        });
        assert_eq!(seen(&b, &slots[0]), [(1999 % 256) as u8]);
    }

    #[test]
    fn another_file_is_not_taken() {
        let slots = slots("table-other");
        let name = format!("table/{}", std::process::id());
        for len in [0, HEADER_LEN as u64] {
            let file = File::from(memfd().unwrap());
            file.set_len(len).unwrap();
            let inode = file.metadata().unwrap().ino();
            let _name =
                slots[0].registry().hold(&format!("{name}/{}/{inode}", file.as_raw_fd())).unwrap();
            let error = SharedTable::join(&slots[0], "table").unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "it could shrink");
        }
        SharedTable::join(&slots[0], "table").unwrap();
    }
}
