//! `rpoll`.

use std::{ffi::c_int, time::Duration};

use anyverbs_rsocket::Call;
use anyverbs_sanitizers as sanitizers;
use libc::{nfds_t, pollfd};

use crate::errno::{Errno, minus_one};

/// A timeout in milliseconds; negative: for ever.
pub(super) fn timeout(millis: c_int) -> Option<Duration> {
    u64::try_from(millis).ok().map(Duration::from_millis)
}

/// `rpoll`.
pub(crate) unsafe extern "C" fn rpoll(fds: *mut pollfd, nfds: nfds_t, millis: c_int) -> c_int {
    let _call = Call::begin();
    minus_one(
        "rpoll",
        (|| {
            let count = usize::try_from(nfds).map_err(|_| Errno::said(libc::EINVAL))?;
            let fds = match count {
                0 => &mut [],
                _ if fds.is_null() || !fds.is_aligned() => return Err(Errno::said(libc::EFAULT)),
                // More descriptors than there can be.
                _ if count > 1 << 24 => return Err(Errno::said(libc::EINVAL)),
                // SAFETY: the program passes an array of that length, its own to be written.
                _ => unsafe { std::slice::from_raw_parts_mut(fds, count) },
            };
            let found = anyverbs_rsocket::poll(fds, timeout(millis))?;
            sanitizers::initialised_bytes(fds.as_ptr().cast(), size_of_val(fds));
            Ok(c_int::try_from(found).unwrap_or(c_int::MAX))
        })(),
    )
}
