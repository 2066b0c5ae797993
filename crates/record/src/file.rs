//! A file to which several processes append.
//!
//! Each record is one write at the end of the file, so the kernel keeps those of several processes apart, and a process that is
//! killed leaves whole records. A lock on the file, shared by all its writers, says that it is in use. Whoever finds it
//! unlocked begins it anew. Nobody waits for a lock while packets flow.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::process::{Resource, getrlimit};

/// A file being written, by this process and by others.
#[derive(Debug)]
pub struct SharedFile {
    file: File,
    /// Its name in messages: "capture".
    what: &'static str,
    failed: AtomicBool,
}

impl SharedFile {
    /// Opens the file for appending. If no other process writes it, it is emptied and begins with `header`.
    ///
    /// # Errors
    /// Those of open(2), flock(2), ftruncate(2) and write(2), and `InvalidInput` for what is no regular file.
    pub fn open(path: &Path, what: &'static str, header: &[u8]) -> io::Result<Self> {
        // Without waiting for the reader of a pipe.
        let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
        let mut options = OpenOptions::new();
        let file = options.create(true).append(true).custom_flags(nonblocking).open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
        }
        let new = Self { file, what, failed: AtomicBool::new(false) };
        match flock(&new.file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                new.file.set_len(0)?;
                new.write(header)?;
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {}
            Err(error) => return Err(error.into()),
        }
        // A process that begins the file holds its lock for the time of one write.
        flock(&new.file, FlockOperation::LockShared)?;
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
        if self.failed.load(Ordering::Relaxed) {
            return;
        }
        if let Err(error) = self.write(record)
            && !self.failed.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(%error, "the {} ends here", self.what);
        }
    }

    fn write(&self, record: &[u8]) -> io::Result<()> {
        // A longer file would end the process (SIGXFSZ).
        if let Some(limit) = getrlimit(Resource::Fsize).current
            && self.file.metadata()?.len() + record.len() as u64 > limit
        {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        // No point of cancellation: the caller may hold locks.
        match rustix::io::write(&self.file, record)? {
            n if n == record.len() => Ok(()),
            _ => Err(io::ErrorKind::StorageFull.into()),
        }
    }
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
        let full = SharedFile { file, what: "test", failed: AtomicBool::new(false) };
        full.append(b"a");
        assert!(full.failed.load(Ordering::Relaxed));
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
