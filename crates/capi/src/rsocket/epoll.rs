//! `repoll_*` of rdma-core 65.

use std::ffi::c_int;

use anyverbs_rsocket::Call;
use anyverbs_sanitizers as sanitizers;
use libc::epoll_event;

use super::{poll::timeout, zero};
use crate::{
    cancel::{Uncancelled, holding},
    errno::{Errno, minus_one},
    log,
};

/// `repoll_create`: the descriptor of a set, to be closed by `rclose`.
pub(crate) unsafe extern "C" fn repoll_create(size: c_int) -> c_int {
    let _uncancelled = Uncancelled::new();
    log::init();
    if size <= 0 {
        Errno::said(libc::EINVAL).set();
        return -1;
    }
    minus_one("repoll_create", anyverbs_rsocket::make_epoll(false).map_err(Errno::from))
}

/// `repoll_ctl`.
pub(crate) unsafe extern "C" fn repoll_ctl(
    epfd: c_int,
    op: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    zero(
        "repoll_ctl",
        (|| {
            let set = anyverbs_rsocket::get_epoll(epfd)?;
            let (events, data) = if event.is_null() {
                if op != libc::EPOLL_CTL_DEL {
                    return Err(Errno::said(libc::EFAULT));
                }
                (0, 0)
            } else {
                // SAFETY: the program passes a live event.
                let event = unsafe { event.read_unaligned() };
                (event.events, event.u64)
            };
            Ok(set.control(op, fd, events, data)?)
        })(),
    )
}

/// `repoll_wait`.
pub(crate) unsafe extern "C" fn repoll_wait(
    epfd: c_int,
    events: *mut epoll_event,
    most: c_int,
    millis: c_int,
) -> c_int {
    let _call = Call::begin();
    minus_one(
        "repoll_wait",
        (|| {
            let set = anyverbs_rsocket::get_epoll(epfd)?;
            let most = usize::try_from(most).ok().filter(|n| (1..1 << 24).contains(n));
            let most = most.ok_or(Errno::said(libc::EINVAL))?;
            if events.is_null() || !events.is_aligned() {
                return Err(Errno::said(libc::EFAULT));
            }
            // SAFETY: the program passes an array of that length, its own to be written.
            let events = unsafe { std::slice::from_raw_parts_mut(events, most) };
            let count = holding(set, |set| set.wait(events, timeout(millis)))?;
            sanitizers::initialised_bytes(events.as_ptr().cast(), size_of_val(&events[..count]));
            Ok(count as c_int)
        })(),
    )
}
