//! Sleeping on descriptors.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::errno::{Errno, Result};

/// The reason why a sleep ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wake {
    Ready,
    TimedOut,
}

/// Waits until a descriptor is readable, or for a deadline. A signal ends it with `EINTR` unless system calls go
/// on after it.
pub(crate) fn wait_readable(fd: BorrowedFd<'_>, deadline: Option<Instant>) -> Result<Wake> {
    let mut set = [libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
    loop {
        match poll(&mut set, deadline.map(until)) {
            Ok(0) => return Ok(Wake::TimedOut),
            Ok(_) => return Ok(Wake::Ready),
            Err(Errno(libc::EINTR)) if signals_restart() => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Whether all handlers of signals have `SA_RESTART`.
///
/// A socket call goes on after such a signal, but poll(2) never does, and does not say which signal it was.
fn signals_restart() -> bool {
    (1..=libc::SIGRTMAX()).all(|signal| {
        // The two are the device's as well, and never come from outside while something is waited for.
        if matches!(signal, libc::SIGSEGV | libc::SIGBUS) {
            return true;
        }
        // SAFETY: all-zero is a valid sigaction, which the call fills.
        let action = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(signal, std::ptr::null(), &raw mut action) != 0 {
                return true;
            }
            action
        };
        matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN)
            || action.sa_flags & libc::SA_RESTART != 0
    })
}

/// Makes reads of a channel not wait.
pub(crate) fn set_nonblocking(fd: &impl AsFd) -> Result<()> {
    // SAFETY: fcntl on a descriptor of ours, no pointers. Its only other flag is the access mode, which stays.
    match unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } {
        0 => Ok(()),
        _ => Err(Errno::last()),
    }
}

/// The time left until an instant.
pub(crate) fn until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// `ppoll(2)`; without a timeout for ever.
pub(crate) fn poll(fds: &mut [libc::pollfd], timeout: Option<Duration>) -> Result<usize> {
    let spec = timeout.map(|t| libc::timespec {
        tv_sec: libc::time_t::try_from(t.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: t.subsec_nanos().into(),
    });
    let spec = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: live pollfds of the given number, a live timespec or null, and no signal mask.
    let n =
        unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, spec, std::ptr::null()) };
    usize::try_from(n).map_err(|_| Errno::last())
}
