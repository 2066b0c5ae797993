//! A process's page: what it tells other processes of its user about itself, while one of them looks.
//!
//! The page is a memfd. Its process writes it, and never reads it. Others get a descriptor that cannot write, and read it by
//! pread(2): they map nothing, take no lock, and wait for nobody. It begins with a header:
//!
//! | offset | what |
//! |---|---|
//! | 0 | a count, odd while the page is being written |
//! | 8 | bytes of the contents |
//! | 16 | when they were written, in nanoseconds of CLOCK_MONOTONIC |
//! | 4096 | the contents |
//!
//! A reader reads the header before and after the contents. The fences between the calls order them.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use rustix::fs::fcntl_get_seals;

use super::pass::Given;
use crate::shm::{check_length, memfd};
use crate::sys::above_standard_streams;

/// The longest contents.
pub const MAX_PAGE: usize = 16 << 20;
const HEADER: usize = 24;
const CONTENTS: u64 = 4096;
/// Attempts of a reader to find a page that is not being written.
const ATTEMPTS: usize = 20;

/// The page of this process.
#[derive(Default)]
pub struct Page {
    /// Made when somebody looks for the first time.
    file: OnceLock<File>,
    /// How often others have asked.
    looks: AtomicU64,
    /// Called then.
    wake: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Changed by the one thread that writes.
    count: AtomicU64,
}

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Page").field("looks", &self.looks).finish_non_exhaustive()
    }
}

/// The contents of a page, as they were read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Contents {
    pub(super) bytes: Vec<u8>,
    /// Nanoseconds of CLOCK_MONOTONIC.
    pub(super) at: u64,
}

impl Page {
    /// Has `wake` called when somebody looks; once.
    pub fn on_look(&self, wake: impl Fn() + Send + Sync + 'static) {
        let _ = self.wake.set(Box::new(wake));
    }

    /// How often others have asked for a fresh page. 0: never. The thread that serves the process writes it for some seconds after each
    /// change.
    #[inline]
    #[must_use]
    pub fn looks(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }

    pub(super) fn note_look(&self) {
        self.looks.fetch_add(1, Ordering::Relaxed);
        self.wake();
    }

    /// Wakes the thread that serves the process.
    pub(super) fn wake(&self) {
        if let Some(wake) = self.wake.get() {
            wake();
        }
    }

    /// None while the process has no descriptor for it, or where it may have no such file.
    fn file(&self) -> Option<&File> {
        if self.file.get().is_none() {
            let file = memfd(c"anyverbs-page").map(File::from);
            let file = file.inspect_err(|error| tracing::debug!(%error, "no page can be made"));
            // Another thread may have made one.
            let _ = self.file.set(file.ok()?);
        }
        self.file.get()
    }

    /// For a reader.
    pub(super) fn copy(&self) -> Option<(OwnedFd, Given)> {
        let file = self.file()?;
        let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        let fd = match OpenOptions::new().read(true).open(path) {
            Ok(file) => above_standard_streams(file.into()).ok()?,
            Err(_) => file.try_clone().ok()?.into(),
        };
        Some((fd, Given::Own))
    }

    /// Replaces the contents. One thread at a time calls it.
    ///
    /// # Errors
    /// `FileTooLarge` beyond [`MAX_PAGE`], or beyond the limit of the process; those of write(2).
    pub fn write(&self, contents: &[u8]) -> io::Result<()> {
        let Some(file) = self.file() else { return Err(io::ErrorKind::Unsupported.into()) };
        if contents.len() > MAX_PAGE {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        check_length(CONTENTS + contents.len() as u64)?;
        let count = self.count.load(Ordering::Relaxed) | 1;
        file.write_all_at(&count.to_ne_bytes(), 0)?;
        fence(Ordering::SeqCst);
        file.write_all_at(contents, CONTENTS)?;
        let rest = [contents.len() as u64, monotonic()].map(u64::to_ne_bytes).concat();
        file.write_all_at(&rest, 8)?;
        fence(Ordering::SeqCst);
        let count = count.wrapping_add(1);
        self.count.store(count, Ordering::Relaxed);
        file.write_all_at(&count.to_ne_bytes(), 0)
    }

    /// Nobody looks any more: gives the memory back.
    pub fn clear(&self) {
        if let Some(file) = self.file.get() {
            let _ = file.set_len(0);
        }
    }
}

/// CLOCK_MONOTONIC in nanoseconds.
pub(super) fn monotonic() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn header(file: &File) -> Option<[u64; 3]> {
    let mut bytes = [0; HEADER];
    file.read_exact_at(&mut bytes, 0).ok()?;
    let mut words =
        bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().expect("eight bytes")));
    Some(std::array::from_fn(|_| words.next().expect("three words")))
}

/// Whether a file is in memory: no read of it waits for another process, as those of FUSE do.
pub(super) fn is_in_memory(file: &File) -> bool {
    fcntl_get_seals(file).is_ok()
}

/// When a page was written. None if never, or it is no page.
pub(super) fn written_at(file: &File) -> Option<u64> {
    header(file).map(|[_, _, at]| at)
}

/// The contents of a page that another process writes. None if there are none, or they change all the time, or it is no page.
pub(super) fn read(file: &File) -> Option<Contents> {
    for attempt in 0..ATTEMPTS {
        let before = header(file)?;
        let [count, len, at] = before;
        if count & 1 == 0 && len <= MAX_PAGE as u64 {
            fence(Ordering::SeqCst);
            let mut bytes = vec![0; len as usize];
            let is_whole = file.read_exact_at(&mut bytes, CONTENTS).is_ok();
            fence(Ordering::SeqCst);
            if is_whole && header(file)? == before {
                return Some(Contents { bytes, at });
            }
        }
        if attempt > 0 {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_sees_whole_contents_and_cannot_write() {
        let page = Page::default();
        let (fd, _) = page.copy().unwrap();
        let reader = File::from(fd);
        assert_eq!(read(&reader), None, "nothing was written");
        assert!(reader.write_all_at(b"x", 0).is_err());
        for len in [0, 5, 100_000, 3] {
            page.write(&vec![7; len]).unwrap();
            assert_eq!(read(&reader).unwrap().bytes, vec![7; len]);
        }
        assert!(monotonic() - read(&reader).unwrap().at < 20_000_000_000);
        page.clear();
        assert_eq!(read(&reader), None);
        assert!(page.write(&vec![0; MAX_PAGE + 1]).is_err());
    }

    #[test]
    fn a_reader_never_sees_a_mixture() {
        let page = &Page::default();
        let reader = File::from(page.copy().unwrap().0);
        page.write(&[0; 50_000]).unwrap();
        std::thread::scope(|scope| {
            let writer =
                scope.spawn(move || (0..200).for_each(|n| page.write(&[n; 50_000]).unwrap()));
            while !writer.is_finished() {
                if let Some(Contents { bytes, .. }) = read(&reader) {
                    assert!(bytes.len() == 50_000 && bytes.iter().all(|byte| *byte == bytes[0]));
                }
            }
        });
    }

    #[test]
    fn a_file_that_may_block_is_no_page() {
        assert!(is_in_memory(&File::from(Page::default().copy().unwrap().0)));
        let (pipe, _end) = std::io::pipe().unwrap();
        assert!(!is_in_memory(&File::from(OwnedFd::from(pipe))));
        assert!(!is_in_memory(&File::open("/proc/self/stat").unwrap()));
    }

    #[test]
    fn nonsense_is_no_page() {
        let file = File::from(memfd(c"nonsense").unwrap());
        assert_eq!(read(&file), None);
        for words in [[0, u64::MAX, 0], [0, 1 << 20, 0], [1, 0, 0], [2, MAX_PAGE as u64 + 1, 0]] {
            file.write_all_at(&words.map(u64::to_ne_bytes).concat(), 0).unwrap();
            assert_eq!(read(&file), None, "{words:?}");
        }
    }
}
