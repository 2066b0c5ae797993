//! `epoll`: beside an epoll descriptor with rsockets there is a set of these, which holds the descriptor itself as well.

use core::ffi::c_int;
use std::time::Instant;

use libc::{epoll_event, sigset_t, timespec};

use super::beside;
use super::poll::with_mask;
use super::setup::fall_back;
use crate::bell;
use crate::rdma::{Rdma, rdma};
use crate::real::{libc_call, set_errno};
use crate::table::{self, Plan};

/// In the set of rsockets: the epoll descriptor itself. No pointer and no small number, which programs use.
const ITSELF: u64 = 0xa97e_c31b_5d20_f4e7;

fn real_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    libc_call!(epoll_ctl(epfd => c_int, op => c_int, fd => c_int, event => *mut epoll_event) -> c_int)
}

fn real_wait(epfd: c_int, events: *mut epoll_event, most: c_int, timeout: c_int) -> c_int {
    libc_call!(epoll_wait(epfd => c_int, events => *mut epoll_event, most => c_int, timeout => c_int) -> c_int)
}

/// The set beside an epoll descriptor, made when its first rsocket comes.
fn set_of(rdma: &Rdma, epfd: c_int) -> Option<c_int> {
    if let Some(set) = table::set(epfd) {
        return Some(set);
    }
    // SAFETY: no pointers.
    let set = unsafe { (rdma.repoll_create)(1) };
    if set < 0 {
        return None;
    }
    let mut event = epoll_event { events: libc::EPOLLIN as u32, u64: ITSELF };
    // SAFETY: a live event.
    let added = unsafe { (rdma.repoll_ctl)(set, libc::EPOLL_CTL_ADD, epfd, &raw mut event) };
    if added != 0 || !table::put_set(epfd, set) {
        // SAFETY: it has no other user.
        unsafe { (rdma.rclose)(set) };
        // Another thread may have been faster.
        return table::set(epfd);
    }
    if !bell::ring(epfd) {
        table::remove_set(epfd);
        return None;
    }
    Some(set)
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn epoll_ctl(
    epfd: c_int,
    op: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    let Some((rdma, socket)) = beside(fd) else { return real_ctl(epfd, op, fd, event) };
    let Some(set) = set_of(rdma, epfd) else {
        set_errno(libc::EBADF);
        return -1;
    };
    // SAFETY: the caller keeps libc's contract.
    let result = unsafe { (rdma.repoll_ctl)(set, op, socket, event) };
    if result == 0 {
        // SAFETY: where an event is needed it is live.
        let told = unsafe { event.as_ref() }.filter(|_| op != libc::EPOLL_CTL_DEL);
        let none = epoll_event { events: 0, u64: 0 };
        let (epoll, event) = told.map_or((0, none), |event| (epfd + 1, *event));
        table::set_plan(fd, Plan { epoll, event, ..table::plan(fd) });
    }
    result
}

/// # Safety
/// `events` has `most` entries.
unsafe fn wait_beside(
    set: c_int,
    epfd: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: c_int,
) -> c_int {
    let Some(rdma) = rdma() else {
        set_errno(libc::EBADF);
        return -1;
    };
    let deadline = u64::try_from(timeout).ok().and_then(|millis| {
        std::time::Instant::now().checked_add(std::time::Duration::from_millis(millis))
    });
    let mut left = timeout;
    loop {
        // SAFETY: the caller's promise.
        let found = unsafe { (rdma.repoll_wait)(set, events, most, left) };
        if found <= 0 {
            return found;
        }
        let mut kept = 0;
        let mut itself = false;
        for i in 0..found {
            // SAFETY: inside the program's array.
            let event = unsafe { *events.add(i as usize) };
            let (data, bits) = ({ event.u64 }, { event.events });
            if data == ITSELF {
                itself = true;
                continue;
            }
            if let Some(fd) = table::connecting_with(epfd, data) {
                let failed = bits & (libc::EPOLLERR | libc::EPOLLHUP) as u32 != 0;
                if failed && fall_back(fd) {
                    continue;
                }
                table::set_connecting(fd, false);
            }
            // SAFETY: inside the program's array.
            unsafe { *events.add(kept as usize) = event };
            kept += 1;
        }
        if itself {
            // There is room: its own event was one of them.
            // SAFETY: inside the program's array.
            let rest = unsafe { events.add(kept as usize) };
            let found = real_wait(epfd, rest, most - kept, 0);
            // SAFETY: libc has put so many there.
            kept += unsafe { bell::strip(rest, found) }.max(0);
        }
        if kept > 0 {
            return kept;
        }
        // There is nothing for the program: a connect goes on, or another thread was faster.
        if let Some(deadline) = deadline {
            let rest = deadline.saturating_duration_since(std::time::Instant::now());
            if rest.is_zero() {
                return 0;
            }
            left = c_int::try_from(rest.as_millis() + 1).unwrap_or(c_int::MAX);
        }
    }
}

/// Waits in libc, by `in_libc`, or beside a set, by `beside`. The latter gets what is left of the timeout. A thread may begin in
/// libc and go on beside.
///
/// # Safety
/// `events` is the array of both.
unsafe fn wait(
    epfd: c_int,
    events: *mut epoll_event,
    timeout: c_int,
    in_libc: impl FnOnce() -> c_int,
    beside: impl FnOnce(c_int, c_int) -> c_int,
) -> c_int {
    if let Some(set) = table::set(epfd) {
        return beside(set, timeout);
    }
    let begin = (timeout > 0).then(Instant::now);
    if let Some(found) = bell::wait(epfd, in_libc) {
        // SAFETY: libc has put so many there.
        let kept = unsafe { bell::strip(events, found) };
        if kept != 0 || found == 0 {
            return kept;
        }
    }
    // The set may be gone again.
    let Some(set) = table::set(epfd) else { return 0 };
    let waited = begin.map_or(0, |begin| begin.elapsed().as_millis());
    let left = if timeout > 0 {
        timeout.saturating_sub(c_int::try_from(waited).unwrap_or(c_int::MAX)).max(0)
    } else {
        timeout
    };
    beside(set, left)
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn epoll_wait(
    epfd: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: c_int,
) -> c_int {
    let in_libc = || real_wait(epfd, events, most, timeout);
    // SAFETY: the caller keeps libc's contract.
    let beside = |set, left| unsafe { wait_beside(set, epfd, events, most, left) };
    // SAFETY: as above.
    unsafe { wait(epfd, events, timeout, in_libc, beside) }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn epoll_pwait(
    epfd: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    let in_libc = || libc_call!(epoll_pwait(epfd => c_int, events => *mut epoll_event, most => c_int, timeout => c_int, mask => *const sigset_t) -> c_int);
    let beside = |set, left| {
        // SAFETY: the caller keeps libc's contract.
        with_mask(mask, || unsafe { wait_beside(set, epfd, events, most, left) })
    };
    // SAFETY: as above.
    unsafe { wait(epfd, events, timeout, in_libc, beside) }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn epoll_pwait2(
    epfd: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the caller keeps libc's contract.
    let millis = unsafe { timeout.as_ref() }.map_or(-1, |time| {
        let millis = time.tv_sec.saturating_mul(1000) + (time.tv_nsec + 999_999) / 1_000_000;
        c_int::try_from(millis).unwrap_or(c_int::MAX)
    });
    let in_libc = || libc_call!(epoll_pwait2(epfd => c_int, events => *mut epoll_event, most => c_int, timeout => *const timespec, mask => *const sigset_t) -> c_int);
    let beside = |set, left| {
        // SAFETY: the caller keeps libc's contract.
        with_mask(mask, || unsafe { wait_beside(set, epfd, events, most, left) })
    };
    // SAFETY: as above.
    unsafe { wait(epfd, events, millis, in_libc, beside) }
}
