//! A descriptor that wakes threads.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::errno::{Errno, Result};

/// An `eventfd(2)`. Readable from `set` to `clear`.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(Errno::last());
        }
        // SAFETY: a descriptor that the kernel has just made and that has no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(crate) fn set(&self) {
        let count = 1u64;
        // SAFETY: a live number, of the length that an eventfd takes.
        let n = unsafe { libc::write(self.0.as_raw_fd(), (&raw const count).cast(), 8) };
        Self::check(n);
    }

    pub(crate) fn clear(&self) {
        let mut count = 0u64;
        // SAFETY: as above, and it may be written.
        let n = unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
        Self::check(n);
    }

    /// Neither can fail while the descriptor is ours.
    fn check(n: isize) {
        if n < 0 {
            let errno = Errno::last();
            tracing::error!("rsocket: the program closed a descriptor of the library: {errno}");
        }
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
