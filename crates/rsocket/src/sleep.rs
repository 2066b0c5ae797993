//! Sleeping on descriptors.

use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use crate::errno::{Errno, Result};

/// Why a sleep ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wake {
    Ready,
    TimedOut,
}

/// Waits until a descriptor is readable, or for a deadline, which may be past: then it only looks.
pub(crate) fn wait_readable(fd: &impl AsFd, deadline: Option<Instant>) -> Result<Wake> {
    let mut fds =
        [libc::pollfd { fd: fd.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 }];
    match poll(&mut fds, deadline.map(until))? {
        0 => Ok(Wake::TimedOut),
        _ => Ok(Wake::Ready),
    }
}

/// What is left until an instant.
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
    // SAFETY: as many live pollfds as said, a live timespec or null, and no signal mask.
    let n = unsafe {
        libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, spec, std::ptr::null())
    };
    usize::try_from(n).map_err(|_| Errno::last())
}
