//! Descriptors.

use core::ffi::{c_int, c_uint};

use crate::real::libc_call;
use crate::table;

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn close(fd: c_int) -> c_int {
    table::remove(fd);
    libc_call!(close(fd => c_int) -> c_int)
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    if flags as c_uint & libc::CLOSE_RANGE_CLOEXEC == 0 {
        // Beyond the table there is nothing to remove.
        for fd in first..=last.min(1 << 16) {
            table::remove(fd as c_int);
        }
    }
    libc_call!(close_range(first => c_uint, last => c_uint, flags => c_int) -> c_int)
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dup(fd: c_int) -> c_int {
    let new = libc_call!(dup(fd => c_int) -> c_int);
    if new >= 0 {
        table::share(fd, new);
    }
    new
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dup2(fd: c_int, to: c_int) -> c_int {
    let new = libc_call!(dup2(fd => c_int, to => c_int) -> c_int);
    if new >= 0 && new != fd {
        table::remove(new);
        table::share(fd, new);
    }
    new
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    let new = libc_call!(dup3(fd => c_int, to => c_int, flags => c_int) -> c_int);
    if new >= 0 {
        table::remove(new);
        table::share(fd, new);
    }
    new
}
