//! `rselect`.

use std::{
    ffi::c_int,
    time::{Duration, Instant},
};

use anyverbs_rsocket::Call;
use libc::{fd_set, pollfd, timeval};

use crate::errno::{Errno, minus_one};

/// The words of the system's `fd_set`, which programs make longer than `FD_SETSIZE` bits when they need more.
type Word = libc::c_ulong;

/// A program's set; none where it passes NULL.
#[derive(Clone, Copy)]
struct Set(*mut Word);

impl Set {
    fn place(fd: usize) -> (usize, Word) {
        let bits = Word::BITS as usize;
        (fd / bits, 1 << (fd % bits))
    }

    /// # Safety
    /// The set has a bit for `fd`.
    unsafe fn has(self, fd: usize) -> bool {
        let (at, bit) = Self::place(fd);
        // SAFETY: the caller's promise.
        !self.0.is_null() && unsafe { *self.0.add(at) } & bit != 0
    }

    /// # Safety
    /// As for [`Set::has`], and it may be written.
    unsafe fn put(self, fd: usize, on: bool) {
        let (at, bit) = Self::place(fd);
        if !self.0.is_null() {
            // SAFETY: the caller's promise.
            unsafe {
                let word = self.0.add(at);
                *word = if on { *word | bit } else { *word & !bit };
            }
        }
    }
}

const SETS: [(i16, i16); 3] = [
    (libc::POLLIN, libc::POLLIN | libc::POLLRDNORM | libc::POLLHUP | libc::POLLERR),
    (libc::POLLOUT, libc::POLLOUT | libc::POLLWRNORM | libc::POLLERR),
    (libc::POLLPRI, libc::POLLPRI),
];

/// `rselect`. As the system's, it leaves the rest of the time in `timeout`.
pub(crate) unsafe extern "C" fn rselect(
    nfds: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    let _call = Call::begin();
    minus_one(
        "rselect",
        (|| {
            let nfds = usize::try_from(nfds).map_err(|_| Errno::said(libc::EINVAL))?;
            if nfds > 1 << 24 {
                return Err(Errno::said(libc::EINVAL));
            }
            let wait = if timeout.is_null() {
                None
            } else {
                // SAFETY: the program passes a live timeval.
                let time = unsafe { timeout.read_unaligned() };
                let seconds = u64::try_from(time.tv_sec).map_err(|_| Errno::said(libc::EINVAL))?;
                let micros = u64::try_from(time.tv_usec).map_err(|_| Errno::said(libc::EINVAL))?;
                let wait = Duration::from_secs(seconds).checked_add(Duration::from_micros(micros));
                Some(wait.ok_or(Errno::said(libc::EINVAL))?)
            };
            let sets = [read, write, except].map(|set| Set(set.cast()));
            let mut fds: Vec<pollfd> = Vec::new();
            for fd in 0..nfds {
                let mut events = 0;
                for (set, (ask, _)) in sets.iter().zip(SETS) {
                    // SAFETY: the program's sets have bits up to `nfds`.
                    if unsafe { set.has(fd) } {
                        events |= ask;
                    }
                }
                if events != 0 {
                    fds.push(pollfd { fd: fd as c_int, events, revents: 0 });
                }
            }
            let begin = Instant::now();
            let result = anyverbs_rsocket::poll(&mut fds, wait);
            if let Some(wait) = wait {
                let left = wait.saturating_sub(begin.elapsed());
                let left = timeval {
                    tv_sec: left.as_secs() as libc::time_t,
                    tv_usec: left.subsec_micros().into(),
                };
                // SAFETY: as above.
                unsafe { timeout.write_unaligned(left) };
            }
            result?;
            if fds.iter().any(|fd| fd.revents & libc::POLLNVAL != 0) {
                return Err(Errno::said(libc::EBADF));
            }
            let mut count = 0;
            for fd in &fds {
                for (set, (ask, means)) in sets.iter().zip(SETS) {
                    if fd.events & ask != 0 {
                        let on = fd.revents & means != 0;
                        count += c_int::from(on);
                        // SAFETY: as above; the sets are the program's to be written.
                        unsafe { set.put(fd.fd as usize, on) };
                    }
                }
            }
            Ok(count)
        })(),
    )
}
