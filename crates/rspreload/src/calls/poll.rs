//! Waiting: `poll` and `select`, in all their forms.

use core::ffi::c_int;
use std::time::{Duration, Instant};

use libc::{fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};

use super::setup::fall_back;
use crate::rdma::rdma;
use crate::real::{libc_call, set_errno};
use crate::table;

/// Sets up to this size need no memory.
const FEW: usize = 64;

/// A timeout as `poll` takes it; a part of a millisecond counts as a whole one.
fn millis(timeout: Option<Duration>) -> c_int {
    timeout.map_or(-1, |timeout| {
        let micros = timeout.as_micros();
        c_int::try_from(micros.div_ceil(1000)).unwrap_or(c_int::MAX)
    })
}

/// `poll` of a set in which there is an rsocket.
fn poll_beside(fds: &mut [pollfd], timeout: Option<Duration>) -> c_int {
    let Some(rdma) = rdma() else {
        set_errno(libc::EBADF);
        return -1;
    };
    let mut few = [pollfd { fd: -1, events: 0, revents: 0 }; FEW];
    let mut many = Vec::new();
    let set = if fds.len() <= FEW {
        &mut few[..fds.len()]
    } else {
        many.resize(fds.len(), few[0]);
        &mut many[..]
    };
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        for (entry, fd) in set.iter_mut().zip(&*fds) {
            let beside = table::get(fd.fd).unwrap_or(fd.fd);
            *entry = pollfd { fd: beside, events: fd.events, revents: 0 };
        }
        let left = match (timeout, deadline) {
            (Some(_), Some(deadline)) => Some(deadline.saturating_duration_since(Instant::now())),
            (timeout, _) => timeout,
        };
        // SAFETY: live entries, of the given number.
        let mut found =
            unsafe { (rdma.rpoll)(set.as_mut_ptr(), set.len() as nfds_t, millis(left)) };
        if found < 0 {
            return found;
        }
        let mut fell_back = false;
        for (entry, fd) in set.iter().zip(&mut *fds) {
            fd.revents = entry.revents;
            if fd.revents != 0 && table::is_connecting(fd.fd) {
                let failed = fd.revents & (libc::POLLERR | libc::POLLHUP) != 0;
                if failed && fall_back(fd.fd) {
                    fd.revents = 0;
                    found -= 1;
                    fell_back = true;
                } else {
                    table::set_connecting(fd.fd, false);
                }
            }
        }
        if found > 0 || !fell_back {
            return found;
        }
    }
}

fn any_beside(fds: &[pollfd]) -> bool {
    fds.iter().any(|fd| table::get(fd.fd).is_some())
}

/// The program's set. `None` if it is empty or no set at all, which libc has to report.
///
/// # Safety
/// `fds` is null or has `count` entries, which are the caller's to write.
unsafe fn list<'a>(fds: *mut pollfd, count: nfds_t) -> Option<&'a mut [pollfd]> {
    let count = usize::try_from(count).ok().filter(|n| (1..=1 << 20).contains(n))?;
    // SAFETY: the caller's promise.
    (!fds.is_null()).then(|| unsafe { std::slice::from_raw_parts_mut(fds, count) })
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the caller keeps libc's contract.
    match unsafe { list(fds, count) } {
        Some(fds) if any_beside(fds) => {
            let timeout = u64::try_from(timeout).ok().map(Duration::from_millis);
            poll_beside(fds, timeout)
        }
        _ => libc_call!(poll(fds => *mut pollfd, count => nfds_t, timeout => c_int) -> c_int),
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn __poll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
    _room: size_t,
) -> c_int {
    // SAFETY: same contract as this function's.
    unsafe { poll(fds, count, timeout) }
}

/// A program's time; `None` for one that is no time.
///
/// # Safety
/// `time` is live.
unsafe fn from_timespec(time: *const timespec) -> Option<Duration> {
    // SAFETY: the caller's promise.
    let time = unsafe { *time };
    let nanos = u32::try_from(time.tv_nsec).ok().filter(|n| *n < 1_000_000_000)?;
    Some(Duration::new(u64::try_from(time.tv_sec).ok()?, nanos))
}

/// Runs `f` with another signal mask, as far as that can be done outside the system.
pub(super) fn with_mask(mask: *const sigset_t, f: impl FnOnce() -> c_int) -> c_int {
    if mask.is_null() {
        return f();
    }
    // SAFETY: all-zero is a valid set; the program's mask is live.
    unsafe {
        let mut before: sigset_t = core::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_SETMASK, mask, &raw mut before);
        let result = f();
        let errno = crate::real::errno();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, core::ptr::null_mut());
        set_errno(errno);
        result
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the caller keeps libc's contract.
    match unsafe { list(fds, count) } {
        Some(fds) if any_beside(fds) => {
            let timeout = if timeout.is_null() {
                None
            } else {
                // SAFETY: as above.
                match unsafe { from_timespec(timeout) } {
                    Some(timeout) => Some(timeout),
                    None => {
                        set_errno(libc::EINVAL);
                        return -1;
                    }
                }
            };
            with_mask(mask, || poll_beside(fds, timeout))
        }
        _ => {
            libc_call!(ppoll(fds => *mut pollfd, count => nfds_t, timeout => *const timespec, mask => *const sigset_t) -> c_int)
        }
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn __ppoll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    _room: size_t,
) -> c_int {
    // SAFETY: same contract as this function's.
    unsafe { ppoll(fds, count, timeout, mask) }
}

type Word = libc::c_ulong;

/// # Safety
/// `set` is null or has a bit for `fd`.
unsafe fn has(set: *const fd_set, fd: usize) -> bool {
    let bits = Word::BITS as usize;
    // SAFETY: the caller's promise.
    !set.is_null() && unsafe { *set.cast::<Word>().add(fd / bits) } & (1 << (fd % bits)) != 0
}

/// # Safety
/// As for `has`, and the set may be written.
unsafe fn put(set: *mut fd_set, fd: usize, on: bool) {
    let bits = Word::BITS as usize;
    if set.is_null() {
        return;
    }
    // SAFETY: the caller's promise.
    unsafe {
        let word = set.cast::<Word>().add(fd / bits);
        *word = *word & !(1 << (fd % bits)) | Word::from(on) << (fd % bits);
    }
}

/// The bits of `poll` that each of the three sets asks for, and that it means.
const SETS: [(i16, i16); 3] = [
    (libc::POLLIN, libc::POLLIN | libc::POLLRDNORM | libc::POLLHUP | libc::POLLERR),
    (libc::POLLOUT, libc::POLLOUT | libc::POLLWRNORM | libc::POLLERR),
    (libc::POLLPRI, libc::POLLPRI),
];

/// `select` of sets in which there is an rsocket; `None` where there is none.
///
/// # Safety
/// The sets are null or have `count` bits, and may be written.
unsafe fn select_beside(
    count: c_int,
    sets: [*mut fd_set; 3],
    timeout: Option<Duration>,
) -> Option<c_int> {
    let count = usize::try_from(count).ok().filter(|n| *n <= 1 << 16)?;
    let asked = |fd: usize| {
        sets.iter().zip(SETS).fold(0, |events, (set, (ask, _))| {
            // SAFETY: the caller's promise.
            if unsafe { has(*set, fd) } { events | ask } else { events }
        })
    };
    if !(0..count).any(|fd| table::get(fd as c_int).is_some() && asked(fd) != 0) {
        return None;
    }
    let mut fds: Vec<pollfd> = (0..count)
        .map(|fd| pollfd { fd: fd as c_int, events: asked(fd), revents: 0 })
        .filter(|fd| fd.events != 0)
        .collect();
    let found = poll_beside(&mut fds, timeout);
    if found < 0 {
        return Some(found);
    }
    if fds.iter().any(|fd| fd.revents & libc::POLLNVAL != 0) {
        set_errno(libc::EBADF);
        return Some(-1);
    }
    let mut found = 0;
    for fd in &fds {
        for (set, (ask, means)) in sets.iter().zip(SETS) {
            if fd.events & ask != 0 {
                let on = fd.revents & means != 0;
                found += c_int::from(on);
                // SAFETY: the caller's promise.
                unsafe { put(*set, fd.fd as usize, on) };
            }
        }
    }
    Some(found)
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    let wait = if timeout.is_null() {
        None
    } else {
        // SAFETY: the caller keeps libc's contract.
        let time = unsafe { *timeout };
        let (Ok(seconds), Ok(micros)) = (u64::try_from(time.tv_sec), u64::try_from(time.tv_usec))
        else {
            set_errno(libc::EINVAL);
            return -1;
        };
        Some(Duration::from_secs(seconds).saturating_add(Duration::from_micros(micros)))
    };
    let begin = Instant::now();
    // SAFETY: the caller keeps libc's contract.
    let Some(found) = (unsafe { select_beside(count, [read, write, except], wait) }) else {
        return libc_call!(select(count => c_int, read => *mut fd_set, write => *mut fd_set, except => *mut fd_set, timeout => *mut timeval) -> c_int);
    };
    if let Some(wait) = wait {
        // As Linux does.
        let left = wait.saturating_sub(begin.elapsed());
        // SAFETY: as above.
        unsafe {
            (*timeout).tv_sec = left.as_secs() as libc::time_t;
            (*timeout).tv_usec = left.subsec_micros().into();
        }
    }
    found
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pselect(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    let wait = if timeout.is_null() {
        None
    } else {
        // SAFETY: the caller keeps libc's contract.
        match unsafe { from_timespec(timeout) } {
            Some(wait) => Some(wait),
            None => {
                set_errno(libc::EINVAL);
                return -1;
            }
        }
    };
    let mut ours = None;
    let result = with_mask(mask, || {
        // SAFETY: the caller keeps libc's contract.
        ours = unsafe { select_beside(count, [read, write, except], wait) };
        ours.unwrap_or(0)
    });
    if ours.is_some() {
        return result;
    }
    libc_call!(pselect(count => c_int, read => *mut fd_set, write => *mut fd_set, except => *mut fd_set, timeout => *const timespec, mask => *const sigset_t) -> c_int)
}
