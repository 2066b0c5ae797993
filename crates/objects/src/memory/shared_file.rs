//! A file of the device's own in memory, which may be handed to other processes: words that all of them change, and room
//! behind them.

use std::ffi::CStr;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, Stat, fallocate, fcntl_add_seals,
    fcntl_get_seals, fstat, ftruncate, memfd_create, open,
};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::mapping::Mapping;

/// Bytes of the words.
const WORDS_LEN: usize = 64 << 10;
/// Words at the beginning of the file.
pub(crate) const WORDS: usize = WORDS_LEN / size_of::<AtomicU64>();

/// The file and its words.
#[derive(Debug)]
pub(crate) struct SharedFile {
    fd: OwnedFd,
    words: Mapping,
}

impl SharedFile {
    /// A new one, `room` bytes long behind the words. Memory is used as it is touched.
    pub(crate) fn create(name: &CStr, room: u64) -> io::Result<Self> {
        let fd = match memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING) {
            Ok(fd) => fd,
            Err(Errno::PERM | Errno::NOSYS) => return Self::unshared(),
            Err(error) => return Err(error.into()),
        };
        // A limit on the length of files would end the process (SIGXFSZ).
        let (least, whole) = (WORDS_LEN as u64, WORDS_LEN as u64 + room);
        let limit = getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX);
        if limit < least {
            return Self::unshared();
        }
        ftruncate(&fd, if limit < whole { least } else { whole })?;
        fcntl_add_seals(&fd, SealFlags::SHRINK)?;
        let words = Mapping::of_file(fd.as_fd(), 0, WORDS_LEN, true)?;
        Ok(Self { fd, words })
    }

    /// Makes a substitute where the kernel gives no memfd (a container's filter): a file without a name and without
    /// room, which no other process can open. Its words lie beside it, since it could shrink.
    fn unshared() -> io::Result<Self> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let open = |folder: &CStr| open(folder, flags, Mode::RUSR | Mode::WUSR);
        let fd = open(c"/dev/shm").or_else(|_| open(c"/tmp"))?;
        Ok(Self { fd, words: Mapping::anonymous(WORDS_LEN)? })
    }

    /// Opens a file that another process, or another part of this one, made: any holder of the descriptor may write to
    /// it.
    pub(crate) fn open(fd: OwnedFd) -> io::Result<Self> {
        // A file that cannot shrink does not fault where it is mapped. Others than memfds have no seals.
        let is_sealed = fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if !is_sealed || len(&fstat(&fd)?) < WORDS_LEN as u64 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let words = Mapping::of_file(fd.as_fd(), 0, WORDS_LEN, true)?;
        Ok(Self { fd, words })
    }

    /// Tells files apart: device and inode.
    pub(crate) fn identity(&self) -> io::Result<(u64, u64)> {
        let stat = fstat(&self.fd)?;
        Ok((stat.st_dev, stat.st_ino))
    }

    /// A word.
    ///
    /// # Panics
    /// Beyond [`WORDS`].
    pub(crate) fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < WORDS, "a word of the file");
        // SAFETY: inside the mapping, aligned as pages are, and never touched but as an atomic; the file cannot shrink. It
        // lives as long as `self`.
        unsafe { &*self.words.as_ptr().cast::<AtomicU64>().add(index) }
    }

    /// Bytes of the room.
    pub(crate) fn room(&self) -> io::Result<u64> {
        Ok(len(&fstat(&self.fd)?).saturating_sub(WORDS_LEN as u64))
    }

    /// Where the room begins in the file.
    pub(crate) fn room_at(&self) -> u64 {
        WORDS_LEN as u64
    }

    /// Maps a part of the room, at a multiple of the page size.
    pub(crate) fn map(&self, at: u64, len: usize) -> io::Result<Mapping> {
        let end = at.checked_add(len as u64).ok_or(io::ErrorKind::InvalidInput)?;
        if end > self.room()? {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        Mapping::of_file(self.fd.as_fd(), self.room_at() + at, len, true)
    }

    /// Clears a part of the room: it is zero again, and takes no memory.
    pub(crate) fn clear(&self, at: u64, len: u64) {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // A file system that cannot do it keeps the old bytes, as the file itself does.
        let _ = fallocate(&self.fd, mode, self.room_at() + at, len);
    }
}

impl AsFd for SharedFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn len(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn two_openings_share_words_and_room() {
        let one = SharedFile::create(c"test", 1 << 20).unwrap();
        let two = SharedFile::open(one.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(one.identity().unwrap(), two.identity().unwrap());
        one.word(5).store(7, Ordering::Relaxed);
        assert_eq!(two.word(5).load(Ordering::Relaxed), 7);
        assert_eq!(two.room().unwrap(), 1 << 20);
        assert!(one.map(0, 4096).is_ok() && one.map(1 << 20, 1).is_err());
        assert_ne!(
            one.identity().unwrap(),
            SharedFile::create(c"test", 0).unwrap().identity().unwrap()
        );
    }

    #[test]
    fn a_limit_on_the_length_of_files_ends_nobody() {
        let name = "memory::shared_file::tests::a_limit_on_the_length_of_files_ends_nobody";
        anyverbs_testing::in_own_process(name, || {
            for bytes in [WORDS_LEN as u64, 20 << 10, 0] {
                let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
                // SAFETY: a limit to read.
                assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
                let file = SharedFile::create(c"test", 1 << 20).unwrap();
                file.word(5).store(7, Ordering::Relaxed);
                assert_eq!(file.word(5).load(Ordering::Relaxed), 7);
                // There is no device memory then, as docs/differences.md says.
                let error = file.map(0, 4096).unwrap_err();
                assert_eq!((file.room().unwrap(), error.kind()), (0, io::ErrorKind::OutOfMemory));
            }
        });
    }

    #[test]
    fn another_file_is_refused() {
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(SharedFile::open(null.into()).is_err());
        let bare = memfd_create(c"bare", MemfdFlags::CLOEXEC).unwrap();
        assert!(SharedFile::open(bare).is_err());
    }
}
