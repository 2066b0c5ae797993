//! Locks of single bytes of a file that belong to an *open file description* (fcntl(2)): who opened the file for itself has them until
//! the last copy of that descriptor is closed, however the process ends. A forked child that keeps the descriptor keeps them.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Whether the byte is now locked by this description; false if another has it.
pub(crate) fn try_lock(file: impl AsFd, byte: u64) -> bool {
    call(file, libc::F_OFD_SETLK, &mut lock_of(libc::F_WRLCK, byte)).is_ok()
}

pub(crate) fn unlock(file: impl AsFd, byte: u64) {
    // What is not locked can be unlocked.
    let _ = call(file, libc::F_OFD_SETLK, &mut lock_of(libc::F_UNLCK, byte));
}

/// Whether another description has the byte locked.
///
/// # Errors
/// Those of fcntl(2).
#[cfg(test)]
pub(crate) fn is_locked_by_another(file: impl AsFd, byte: u64) -> io::Result<bool> {
    let mut lock = lock_of(libc::F_WRLCK, byte);
    call(file, libc::F_OFD_GETLK, &mut lock)?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
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

fn call(file: impl AsFd, command: i32, lock: &mut libc::flock) -> io::Result<()> {
    // SAFETY: a live descriptor, and a lock that the kernel reads and may write.
    let done = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), command, &raw mut *lock) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};

    use super::*;
    use crate::shm::memfd;

    #[test]
    fn a_description_has_its_locks_until_its_last_descriptor_is_closed() {
        let a = File::from(memfd().unwrap());
        let path = format!("/proc/self/fd/{}", a.as_raw_fd());
        let b = OpenOptions::new().read(true).write(true).open(path).unwrap();
        assert!(try_lock(&a, 5) && try_lock(&a, 5), "its own is none");
        assert!(!try_lock(&b, 5) && try_lock(&b, 4));
        let seen = |file: &File, byte| is_locked_by_another(file, byte).unwrap();
        assert!(seen(&b, 5) && seen(&a, 4) && !seen(&a, 5) && !seen(&b, 4) && !seen(&b, 6));
        let copy = a.try_clone().unwrap();
        drop(a);
        assert!(seen(&b, 5));
        drop(copy);
        assert!(!seen(&b, 5) && try_lock(&b, 5));
        unlock(&b, 5);
    }
}
