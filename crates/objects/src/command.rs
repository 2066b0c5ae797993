//! The descriptor that stands for an open device (`ibv_context.cmd_fd`). It survives `dup`, may be passed to other
//! processes, and names the device there. Behind it is a file that all its holders share, with the device memory of the
//! context.
//!
//! Words: what the file is, the process that made it, bytes of device memory in use, the last handle, the device's name, and
//! from [`SLOTS`] on one for each piece of device memory: handle and length, or 0. Whoever has the descriptor may write
//! anything there: what is read is checked.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use crate::limits::MAX_DM_SIZE;
use crate::memory::mapping::{Mapping, dmabuf};
use crate::memory::shared_file::{SharedFile, WORDS};

const MAGIC: u64 = u64::from_le_bytes(*b"avb-cmd2");
const KIND: usize = 0;
const PROCESS: usize = 1;
const USED: usize = 2;
const LAST_HANDLE: usize = 3;
const NAME: usize = 4;
const NAME_LEN: usize = 64;
const SLOTS: usize = 16;

const _: () = assert!(NAME + NAME_LEN / 8 <= SLOTS);

/// The file behind the descriptor.
#[derive(Debug)]
pub struct CommandFile {
    file: SharedFile,
    /// Identifies the file, wherever it is open.
    pub identity: (u64, u64),
}

/// A piece of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    slot: usize,
    pub(crate) handle: u32,
    pub(crate) len: u32,
}

impl Piece {
    fn word(&self) -> u64 {
        u64::from(self.handle) << 32 | u64::from(self.len)
    }

    fn of(slot: usize, word: u64) -> Self {
        Self { slot, handle: (word >> 32) as u32, len: word as u32 }
    }

    /// Each piece has its place in the file, as large as the largest.
    fn at(&self) -> u64 {
        (self.slot - SLOTS) as u64 * MAX_DM_SIZE
    }
}

fn name_words(name: &str) -> [u64; NAME_LEN / 8] {
    let mut bytes = [0; NAME_LEN];
    for (to, from) in bytes[..NAME_LEN - 1].iter_mut().zip(name.bytes()) {
        *to = from;
    }
    std::array::from_fn(|i| {
        bytes[i * 8..][..8].iter().fold(0, |word, byte| word << 8 | u64::from(*byte))
    })
}

impl CommandFile {
    /// For a context of the device called `name`.
    pub fn create(name: &str) -> io::Result<Self> {
        let file_name = CString::new(format!("uverbs:{name}"))?;
        let file = SharedFile::create(&file_name, (WORDS - SLOTS) as u64 * MAX_DM_SIZE)?;
        let set = |word, value| file.word(word).store(value, Ordering::Relaxed);
        set(PROCESS, std::process::id().into());
        for (i, word) in name_words(name).into_iter().enumerate() {
            set(NAME + i, word);
        }
        file.word(KIND).store(MAGIC, Ordering::Release);
        Ok(Self { identity: file.identity()?, file })
    }

    /// From a descriptor that was passed on; `InvalidInput` for one of something else than a context.
    pub fn open(fd: OwnedFd) -> io::Result<Self> {
        let file = SharedFile::open(fd)?;
        if file.word(KIND).load(Ordering::Acquire) != MAGIC {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self { identity: file.identity()?, file })
    }

    /// Whether it is of a context of the device called `name`.
    #[must_use]
    pub fn is_of(&self, name: &str) -> bool {
        let word = |word| self.file.word(word).load(Ordering::Relaxed);
        name_words(name).into_iter().enumerate().all(|(i, w)| word(NAME + i) == w)
    }

    /// Whether this process made it.
    pub fn is_own(&self) -> bool {
        self.file.word(PROCESS).load(Ordering::Relaxed) == u64::from(std::process::id())
    }

    /// Takes device memory, all zero; `None` when there is no more.
    pub(crate) fn alloc(&self, len: u32) -> Option<Piece> {
        let used = self.file.word(USED);
        let more = |used: u64| used.checked_add(len.into()).filter(|sum| *sum <= MAX_DM_SIZE);
        used.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok()?;
        let handle = loop {
            let handle = self.file.word(LAST_HANDLE).fetch_add(1, Ordering::Relaxed) as u32;
            if handle != u32::MAX {
                break handle + 1;
            }
        };
        let free = (SLOTS..WORDS).map(|slot| Piece { slot, handle, len }).find(|piece| {
            let word = self.file.word(piece.slot);
            let order = (Ordering::AcqRel, Ordering::Relaxed);
            word.compare_exchange(0, piece.word(), order.0, order.1).is_ok()
        });
        if free.is_none() {
            self.give_back(len);
        }
        free
    }

    /// The piece with this handle.
    pub(crate) fn find(&self, handle: u32) -> Option<Piece> {
        let pieces = (SLOTS..WORDS)
            .map(|slot| Piece::of(slot, self.file.word(slot).load(Ordering::Acquire)));
        let mut fits = pieces.filter(|p| p.len > 0 && u64::from(p.len) <= MAX_DM_SIZE);
        fits.find(|piece| piece.handle == handle)
    }

    /// Gives a piece back; false if that was done before, here or elsewhere.
    pub(crate) fn free(&self, piece: &Piece) -> bool {
        let word = self.file.word(piece.slot);
        // Its length is 0: it is not found, and not taken before it is zero.
        let ending = piece.word() & !u64::from(u32::MAX);
        let order = (Ordering::AcqRel, Ordering::Relaxed);
        if word.compare_exchange(piece.word(), ending, order.0, order.1).is_err() {
            return false;
        }
        self.file.clear(piece.at(), piece.len.into());
        word.store(0, Ordering::Release);
        self.give_back(piece.len);
        true
    }

    fn give_back(&self, len: u32) {
        let less = |used: u64| Some(used.saturating_sub(len.into()));
        let used = self.file.word(USED);
        // It always has a new value.
        let _ = used.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
    }

    /// Maps a piece.
    pub(crate) fn map(&self, piece: &Piece) -> io::Result<Mapping> {
        self.file.map(piece.at(), piece.len as usize)
    }

    /// A dma-buf of a piece, where the system makes such.
    pub(crate) fn export(&self, piece: &Piece) -> io::Result<OwnedFd> {
        dmabuf::export(self.file.as_fd(), self.file.room_at() + piece.at(), piece.len.into())
    }
}

impl AsFd for CommandFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_taken_found_and_given_back() {
        let file = CommandFile::create("dev0").unwrap();
        assert!(file.is_own());
        let all = file.alloc(MAX_DM_SIZE as u32).unwrap();
        assert_eq!(file.alloc(1), None);
        assert_eq!(file.find(all.handle), Some(all));
        assert!(file.free(&all) && !file.free(&all));
        assert_eq!(file.find(all.handle), None);
        let (a, b) = (file.alloc(100).unwrap(), file.alloc(8).unwrap());
        assert_ne!(a.handle, b.handle);
        assert_ne!(file.map(&a).unwrap().addr(), file.map(&b).unwrap().addr());
    }

    #[test]
    fn a_passed_descriptor_leads_to_the_same_file() {
        let file = CommandFile::create("dev0").unwrap();
        let fd = || file.as_fd().try_clone_to_owned().unwrap();
        let other = CommandFile::open(fd()).unwrap();
        assert_eq!(other.identity, file.identity);
        let piece = file.alloc(100).unwrap();
        assert_eq!(other.find(piece.handle), Some(piece));
        assert!(other.free(&piece) && !file.free(&piece));
        assert!(other.is_of("dev0") && !other.is_of("dev1"));
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(CommandFile::open(null.into()).is_err());
    }
}
