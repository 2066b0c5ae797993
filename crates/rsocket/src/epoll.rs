//! The descriptor of a socket: an epoll set of all that it must look at.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::errno::{Errno, Result};

/// An epoll set. Readable when one of its descriptors is.
#[derive(Debug)]
pub(crate) struct Epoll(OwnedFd);

impl Epoll {
    pub(crate) fn new(close_on_exec: bool) -> Result<Self> {
        let flags = if close_on_exec { libc::EPOLL_CLOEXEC } else { 0 };
        // SAFETY: takes no pointers.
        let fd = unsafe { libc::epoll_create1(flags) };
        if fd < 0 {
            return Err(Errno::last());
        }
        // SAFETY: a descriptor that the kernel has just made and that has no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Adds a descriptor, for input.
    pub(crate) fn add(&self, fd: BorrowedFd<'_>) -> Result<()> {
        let event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        self.control(libc::EPOLL_CTL_ADD, fd.as_raw_fd(), event)
    }

    pub(crate) fn control(&self, op: i32, fd: RawFd, mut event: libc::epoll_event) -> Result<()> {
        // SAFETY: a live event; the descriptor need not be open.
        let rc = unsafe { libc::epoll_ctl(self.0.as_raw_fd(), op, fd, &raw mut event) };
        if rc == 0 { Ok(()) } else { Err(Errno::last()) }
    }

    /// The descriptors that are ready now, up to the length of `events`.
    pub(crate) fn look(&self, events: &mut [libc::epoll_event]) -> Result<usize> {
        let most = i32::try_from(events.len()).unwrap_or(i32::MAX);
        if most == 0 {
            return Ok(0);
        }
        // SAFETY: live events, of the given number.
        let n = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), most, 0) };
        usize::try_from(n).map_err(|_| Errno::last())
    }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Epoll {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
