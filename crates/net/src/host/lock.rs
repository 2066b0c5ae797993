//! Locks of single bytes of the store's file (fcntl(2)): they end with their holder, however it ends.
//!
//! The locks belong to an *open file description* that no other process has. A forked child that keeps the descriptor
//! keeps them. A process without `/proc` cannot open the file for itself, and has process-owned locks instead. The two
//! kinds exclude each other.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The owner of the locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    Description,
    Process,
}

impl Owner {
    /// Whether the byte is now locked by this owner; false if another has it.
    pub(super) fn try_lock(self, file: BorrowedFd<'_>, byte: u64) -> bool {
        let command = if self == Self::Process { libc::F_SETLK } else { libc::F_OFD_SETLK };
        call(file, command, &mut lock_of(libc::F_WRLCK, byte)).is_ok()
    }

    pub(super) fn unlock(self, file: BorrowedFd<'_>, byte: u64) {
        let command = if self == Self::Process { libc::F_SETLK } else { libc::F_OFD_SETLK };
        // A byte that is not locked can be unlocked.
        let _ = call(file, command, &mut lock_of(libc::F_UNLCK, byte));
    }

    /// Tells whether another owner has the byte locked. If that cannot be found out, one has.
    pub(super) fn is_locked_by_another(self, file: BorrowedFd<'_>, byte: u64) -> bool {
        let command = if self == Self::Process { libc::F_GETLK } else { libc::F_OFD_GETLK };
        let mut lock = lock_of(libc::F_WRLCK, byte);
        call(file, command, &mut lock).is_err() || i32::from(lock.l_type) != libc::F_UNLCK
    }
}

fn lock_of(kind: i32, byte: u64) -> libc::flock {
    // SAFETY: all zeros is a valid flock.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_start = byte as i64;
    lock.l_len = 1;
    lock
}

fn call(file: BorrowedFd<'_>, command: i32, lock: &mut libc::flock) -> io::Result<()> {
    // The C library's call is a cancellation point, so this one is raw.
    // SAFETY: a live descriptor, and a lock that the kernel reads and may write.
    let done = unsafe { libc::syscall(libc::SYS_fcntl, file.as_raw_fd(), command, &raw mut *lock) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::os::fd::AsFd;

    use super::*;
    use crate::shm::memfd;

    #[test]
    fn locks_last_until_the_last_descriptor_is_closed() {
        let a = File::from(memfd(c"test").unwrap());
        let path = format!("/proc/self/fd/{}", a.as_raw_fd());
        let b = OpenOptions::new().read(true).write(true).open(path).unwrap();
        let own = Owner::Description;
        let lock = |file: &File, byte| own.try_lock(file.as_fd(), byte);
        assert!(lock(&a, 5) && lock(&a, 5), "its own is none");
        assert!(!lock(&b, 5) && lock(&b, 4));
        let seen = |file: &File, byte| own.is_locked_by_another(file.as_fd(), byte);
        assert!(seen(&b, 5) && seen(&a, 4) && !seen(&a, 5) && !seen(&b, 4) && !seen(&b, 6));
        // The locks of processes are others' to descriptions.
        let process = Owner::Process;
        assert!(process.is_locked_by_another(a.as_fd(), 5) && !process.try_lock(a.as_fd(), 5));
        assert!(process.try_lock(a.as_fd(), 6) && seen(&a, 6) && !lock(&b, 6));
        process.unlock(a.as_fd(), 6);
        assert!(!seen(&a, 6));
        let copy = a.try_clone().unwrap();
        drop(a);
        assert!(seen(&b, 5));
        drop(copy);
        assert!(!seen(&b, 5) && lock(&b, 5));
        own.unlock(b.as_fd(), 5);
    }
}
