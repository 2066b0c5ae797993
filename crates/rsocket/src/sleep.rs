//! Sleeping on descriptors.

use std::cell::Cell;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyverbs::{Uncancelled, cancellable};
use anyverbs_sanitizers::Quiet;

use crate::errno::{Errno, Result};

thread_local! {
    /// The thread is in a [`Call`] that it may be cancelled in.
    static CANCELLABLE: Cell<bool> = const { Cell::new(false) };
}

/// A call of the program that may wait. The thread can be cancelled (`pthread_cancel(3)`) while it waits and nowhere else, if it
/// could be before.
///
/// The caller gives up what it holds itself: a cancelled thread runs no destructors.
#[derive(Debug)]
pub struct Call {
    _uncancelled: Uncancelled,
    outer: bool,
}

impl Call {
    /// Begins until it is dropped.
    #[must_use]
    pub fn begin() -> Self {
        let uncancelled = Uncancelled::new();
        // Within another call this one is made by a signal's handler.
        let outer = CANCELLABLE.try_with(|c| c.replace(uncancelled.was_cancellable()));
        Self { _uncancelled: uncancelled, outer: outer.unwrap_or(false) }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let _ = CANCELLABLE.try_with(|c| c.set(self.outer));
    }
}

/// The reason why a sleep ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wake {
    Ready,
    TimedOut,
}

/// Waits until a descriptor is readable, or for a deadline. A signal ends it with `EINTR` unless system calls go
/// on after it. If the thread is cancelled, it calls `undo`.
pub(crate) fn wait_readable(
    fd: BorrowedFd<'_>,
    deadline: Option<Instant>,
    undo: impl Fn(),
) -> Result<Wake> {
    let mut set = [libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
    loop {
        match wait(&mut set, deadline.map(until), &undo) {
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

/// As [`poll`]. The thread may be cancelled in it, and calls `undo` then.
pub(crate) fn wait(
    fds: &mut [libc::pollfd],
    timeout: Option<Duration>,
    undo: impl FnOnce(),
) -> Result<usize> {
    if CANCELLABLE.try_with(Cell::get).unwrap_or(false) {
        let undo = || {
            undo();
            // `poll` has begun this.
            anyverbs_sanitizers::cancelled();
        };
        cancellable(undo, || poll(fds, timeout))
    } else {
        poll(fds, timeout)
    }
}

/// `ppoll(2)`; without a timeout for ever.
pub(crate) fn poll(fds: &mut [libc::pollfd], timeout: Option<Duration>) -> Result<usize> {
    let spec = timeout.map(|t| libc::timespec {
        tv_sec: libc::time_t::try_from(t.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: t.subsec_nanos().into(),
    });
    let spec = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let _quiet = Quiet::new();
    // SAFETY: live pollfds of the given number, a live timespec or null, and no signal mask.
    let n =
        unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, spec, std::ptr::null()) };
    usize::try_from(n).map_err(|_| Errno::last())
}
