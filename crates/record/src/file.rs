//! A file to which several processes append.
//!
//! Each record is one write at the end of the file, so the kernel keeps those of several processes apart. A lock on the file,
//! shared by all its writers, says that it is in use. Whoever finds it unlocked begins it anew. No process waits for another
//! one while packets flow.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, SeekFrom, flock};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Time for which an opener waits for one that begins the file, which takes a write.
const BEGINNING: Duration = Duration::from_secs(2);

/// A file being written, by this process and by others.
#[derive(Debug)]
pub struct SharedFile {
    file: File,
    /// Its name in messages: "capture".
    what: &'static str,
    /// Whether a write has failed. It is held for each write of this process, so that the file offset behind it is known.
    failed: Mutex<bool>,
}

impl SharedFile {
    /// Opens the file for appending. If no other process writes it, it is emptied and begins with `header`.
    ///
    /// # Errors
    /// Those of open(2), flock(2), ftruncate(2) and write(2), `InvalidInput` for what is no regular file, `WouldBlock` if
    /// another program keeps it to itself, and `InvalidData` if others write something else than behind this header.
    pub fn open(path: &Path, what: &'static str, header: &[u8]) -> io::Result<Self> {
        // Without waiting for the reader of a pipe.
        let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
        let mut options = OpenOptions::new();
        options.create(true).append(true).read(true).custom_flags(nonblocking);
        let file = options.open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
        }
        let new = Self { file, what, failed: Mutex::default() };
        let deadline = Instant::now() + BEGINNING;
        loop {
            match flock(&new.file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {
                    new.file.set_len(0)?;
                    new.write(header)?;
                    // Somebody may take the lock between this one and the next, and begin the file once more.
                    flock(&new.file, FlockOperation::Unlock)?;
                }
                Err(Errno::WOULDBLOCK) => {}
                Err(error) => return Err(error.into()),
            }
            match flock(&new.file, FlockOperation::NonBlockingLockShared) {
                // Empty: whoever began it has ended.
                Ok(()) if new.file.metadata()?.len() > 0 => break,
                Ok(()) | Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok(()) | Err(Errno::WOULDBLOCK) => {
                    let reason = "another program keeps it to itself";
                    return Err(io::Error::new(io::ErrorKind::WouldBlock, reason));
                }
                Err(error) => return Err(error.into()),
            }
        }
        let mut begin = vec![0; header.len()];
        if new.file.read_exact_at(&mut begin, 0).is_err() || begin != header {
            let reason = format!("another program writes it now, and not as this {what}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        Ok(new)
    }

    /// As [`open`](Self::open), for the processes that will write. `None` where this path means another file in each of them;
    /// then only its directory has to be there.
    pub(crate) fn begin(
        path: &Path,
        what: &'static str,
        header: &[u8],
    ) -> io::Result<Option<Self>> {
        let own = path_for_process(path);
        let in_another = expanded(path, "");
        if own == in_another {
            return Self::open(&own, what, header).map(Some);
        }
        let directory = own.parent().filter(|dir| !dir.as_os_str().is_empty());
        std::fs::read_dir(directory.unwrap_or(Path::new("."))).map(|_| None)
    }

    /// Appends a record in one piece. After the first failure nothing more is written; the log says so once.
    pub fn append(&self, record: &[u8]) {
        // Nothing panics under it.
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if !*failed && let Err(error) = self.write(record) {
            *failed = true;
            drop(failed);
            tracing::warn!(%error, "the {} ends here", self.what);
        }
    }

    /// Nobody else of this process writes meanwhile.
    fn write(&self, record: &[u8]) -> io::Result<()> {
        let written = match getrlimit(Resource::Fsize).current {
            None => rustix::io::write(&self.file, record)?,
            Some(limit) if self.file.metadata()?.len() + record.len() as u64 > limit => {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
            // Others may write meanwhile.
            Some(_) => without_sigxfsz(|| rustix::io::write(&self.file, record))?,
        };
        if written == record.len() {
            return Ok(());
        }
        self.take_back(written as u64)?;
        Err(io::ErrorKind::StorageFull.into())
    }

    /// Removes the beginning of a record that was just written. With it goes what others have appended since: nothing could be
    /// read behind it.
    fn take_back(&self, written: u64) -> io::Result<()> {
        // An append moves the offset behind itself.
        let begin = rustix::fs::seek(&self.file, SeekFrom::Current(0))?.saturating_sub(written);
        if self.file.metadata()?.len() > begin {
            self.file.set_len(begin)?;
        }
        Ok(())
    }
}

/// Calls `f`, for which a limit of a file's length is an error, and not the signal that ends the process.
fn without_sigxfsz<T>(f: impl FnOnce() -> T) -> T {
    let is_pending = || {
        let mut pending = MaybeUninit::uninit();
        // SAFETY: it fills the set, or fails for a bad address, and this is none.
        unsafe {
            libc::sigpending(pending.as_mut_ptr());
            libc::sigismember(pending.as_ptr(), libc::SIGXFSZ) == 1
        }
    };
    let (mut only, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: sets to fill, then to read. The mask is that of this thread.
    unsafe {
        libc::sigemptyset(only.as_mut_ptr());
        libc::sigaddset(only.as_mut_ptr(), libc::SIGXFSZ);
        libc::pthread_sigmask(libc::SIG_BLOCK, only.as_ptr(), before.as_mut_ptr());
    }
    let of_the_program = is_pending();
    let result = f();
    if !of_the_program && is_pending() {
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let nothing = ptr::null::<libc::siginfo_t>();
        // The call of libc is a point of cancellation. The kernel's sets have a bit for each of 64 signals.
        // SAFETY: a set and a time to read; it takes the signal that waits for this thread.
        unsafe {
            libc::syscall(libc::SYS_rt_sigtimedwait, only.as_ptr(), nothing, &raw const now, 8)
        };
    }
    // SAFETY: the set that was filled above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
    result
}

/// The file of this process: `%p` in a path stands for the number of the process, `%%` for a percent sign.
#[must_use]
pub fn path_for_process(pattern: &Path) -> PathBuf {
    expanded(pattern, &std::process::id().to_string())
}

fn expanded(pattern: &Path, process: &str) -> PathBuf {
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let mut path = Vec::new();
    let mut rest = pattern.as_os_str().as_bytes();
    while let Some((&byte, more)) = rest.split_first() {
        rest = more;
        match (byte, more.first()) {
            (b'%', Some(b'p')) => path.extend_from_slice(process.as_bytes()),
            (b'%', Some(b'%')) => path.push(b'%'),
            _ => {
                path.push(byte);
                continue;
            }
        }
        rest = &more[1..];
    }
    PathBuf::from(OsString::from_vec(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let dir =
                std::env::temp_dir().join(format!("anyverbs-record-{name}-{}", std::process::id()));
            std::fs::create_dir(&dir).unwrap();
            Self(dir)
        }

        fn file(&self) -> PathBuf {
            self.0.join("file")
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn writers_at_the_same_time_share_a_file() {
        let scratch = Scratch::new("share");
        let (path, content) = (scratch.file(), || std::fs::read(scratch.file()).unwrap());
        std::fs::write(&path, "old, and longer than what comes").unwrap();
        let first = SharedFile::open(&path, "test", b"head;").unwrap();
        first.append(b"a;");
        let second = SharedFile::open(&path, "test", b"head;").unwrap();
        second.append(b"b;");
        first.append(b"c;");
        assert_eq!(content(), b"head;a;b;c;");
        drop(first);
        let third = SharedFile::open(&path, "test", b"head;").unwrap();
        third.append(b"d;");
        assert_eq!(content(), b"head;a;b;c;d;");
        drop((second, third));
        let last = SharedFile::open(&path, "test", b"head;").unwrap();
        last.append(b"e;");
        assert_eq!(content(), b"head;e;", "nobody wrote the file any more");
    }

    #[test]
    fn a_launcher_begins_the_file_of_its_program() {
        let scratch = Scratch::new("begin");
        let kept = SharedFile::begin(&scratch.file(), "test", b"head;").unwrap();
        for record in [b"a;", b"b;"] {
            SharedFile::open(&scratch.file(), "test", b"head;").unwrap().append(record);
        }
        assert_eq!(std::fs::read(scratch.file()).unwrap(), b"head;a;b;");
        drop(kept);
        let each = scratch.0.join("%p");
        assert!(SharedFile::begin(&each, "test", b"").unwrap().is_none());
        assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 1);
        let nowhere = scratch.0.join("no/%p");
        let error = SharedFile::begin(&nowhere, "test", b"").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn what_is_no_regular_file_is_refused() {
        let scratch = Scratch::new("kinds");
        let kind = |path: &Path| SharedFile::open(path, "test", b"").unwrap_err().kind();
        assert_eq!(kind(&scratch.0), io::ErrorKind::IsADirectory);
        assert_eq!(kind(&scratch.0.join("no/file")), io::ErrorKind::NotFound);
        assert_eq!(kind(Path::new("/dev/null")), io::ErrorKind::InvalidInput);
        rustix::fs::mkfifoat(rustix::fs::CWD, scratch.file(), rustix::fs::Mode::RWXU).unwrap();
        // ENXIO: a pipe without a reader.
        assert!(SharedFile::open(&scratch.file(), "test", b"").is_err());
    }

    #[test]
    fn a_full_disk_ends_the_records_only() {
        // A file that is always full has no other name.
        let file = File::options().write(true).open("/dev/full").unwrap();
        let full = SharedFile { file, what: "test", failed: Mutex::default() };
        full.append(b"a");
        assert!(*full.failed.lock().unwrap());
    }

    #[test]
    fn a_record_that_is_cut_is_taken_back() {
        let scratch = Scratch::new("cut");
        let open = || SharedFile::open(&scratch.file(), "test", b"head;").unwrap();
        let (file, other) = (open(), open());
        other.append(b"a;");
        file.append(b"cut");
        other.append(b"b;");
        file.take_back(3).unwrap();
        assert_eq!(std::fs::read(scratch.file()).unwrap(), b"head;a;");
        other.append(b"c;");
        assert_eq!(std::fs::read(scratch.file()).unwrap(), b"head;a;c;");
    }

    #[test]
    fn a_file_that_is_written_otherwise_is_refused() {
        let scratch = Scratch::new("otherwise");
        let _capture = SharedFile::open(&scratch.file(), "capture", b"head;").unwrap();
        let error = SharedFile::open(&scratch.file(), "trace", b"[\n").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
        let kept = scratch.0.join("kept");
        let other = File::create(&kept).unwrap();
        flock(&other, FlockOperation::LockExclusive).unwrap();
        let error = SharedFile::open(&kept, "test", b"head;").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
        assert_eq!(std::fs::metadata(&kept).unwrap().len(), 0);
    }

    /// Whoever checks the limit may be late.
    #[test]
    fn the_signal_of_a_file_length_limit_ends_nothing() {
        let name = "file::tests::the_signal_of_a_file_length_limit_ends_nothing";
        anyverbs_testing::in_own_process(name, || {
            let scratch = Scratch::new("signal");
            let file = File::create(scratch.file()).unwrap();
            let limit = libc::rlimit { rlim_cur: 0, rlim_max: libc::RLIM_INFINITY };
            // SAFETY: a limit to read.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
            for _ in 0..3 {
                let written = without_sigxfsz(|| rustix::io::write(&file, b"a"));
                assert_eq!(written, Err(Errno::FBIG));
            }
        });
    }

    #[test]
    fn a_file_length_limit_ends_the_records_only() {
        let name = "file::tests::a_file_length_limit_ends_the_records_only";
        anyverbs_testing::in_own_process(name, || {
            let scratch = Scratch::new("limit");
            let limit = libc::rlimit { rlim_cur: 1000, rlim_max: libc::RLIM_INFINITY };
            // SAFETY: a limit to read.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
            let file = SharedFile::open(&scratch.file(), "test", b"head").unwrap();
            (0..20).for_each(|_| file.append(&[7; 100]));
            let len = std::fs::metadata(scratch.file()).unwrap().len();
            assert_eq!(len, 904, "whole records, as many as the limit lets");
        });
    }

    #[test]
    fn a_path_may_have_the_number_of_the_process() {
        let pid = std::process::id();
        let path = |pattern: &str| path_for_process(Path::new(pattern)).display().to_string();
        assert_eq!(path("/tmp/a.pcapng"), "/tmp/a.pcapng");
        assert_eq!(path("a-%p.pcapng"), format!("a-{pid}.pcapng"));
        assert_eq!(path("100%%p %q %"), "100%p %q %");
    }
}
