//! Options.

use core::ffi::{c_int, c_ulong, c_void};

use libc::socklen_t;

use super::beside;
use crate::rdma::{RDMA_UNREAD, SOL_RDMA};
use crate::real::{errno, libc_call};

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let tcp = || libc_call!(setsockopt(fd => c_int, level => c_int, name => c_int, value => *const c_void, len => socklen_t) -> c_int);
    let Some((rdma, socket)) = beside(fd) else { return tcp() };
    // SAFETY: the caller keeps libc's contract.
    let result = unsafe { (rdma.rsetsockopt)(socket, level, name, value, len) };
    // An option that an rsocket does not know may mean something to TCP, which may be used later. A later query also
    // has to return the value that was set.
    match errno() {
        libc::ENOPROTOOPT | libc::EOPNOTSUPP if result != 0 => tcp(),
        _ if result != 0 => result,
        _ => {
            tcp();
            0
        }
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    if let Some((rdma, socket)) = beside(fd) {
        // SAFETY: the caller keeps libc's contract.
        let result = unsafe { (rdma.rgetsockopt)(socket, level, name, value, len) };
        if result == 0 || !matches!(errno(), libc::ENOPROTOOPT | libc::EOPNOTSUPP) {
            return result;
        }
    }
    libc_call!(getsockopt(fd => c_int, level => c_int, name => c_int, value => *mut c_void, len => *mut socklen_t) -> c_int)
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fcntl(fd: c_int, cmd: c_int, arg: c_ulong) -> c_int {
    let result = libc_call!(fcntl(fd => c_int, cmd => c_int, arg => c_ulong) -> c_int);
    if result < 0 {
        return result;
    }
    match cmd {
        libc::F_SETFL => {
            if let Some((rdma, socket)) = beside(fd) {
                // SAFETY: no pointers.
                unsafe { (rdma.rfcntl)(socket, cmd, arg as c_int) };
            }
        }
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => crate::table::share(fd, result),
        _ => {}
    }
    result
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fcntl64(fd: c_int, cmd: c_int, arg: c_ulong) -> c_int {
    // SAFETY: same contract; the two are one on 64-bit Linux.
    unsafe { fcntl(fd, cmd, arg) }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, arg: *mut c_void) -> c_int {
    if let Some((rdma, socket)) = beside(fd)
        && !arg.is_null()
    {
        match request {
            libc::FIONBIO => {
                // SAFETY: the request's argument is an integer.
                let on = unsafe { *arg.cast::<c_int>() } != 0;
                let flags = if on { libc::O_NONBLOCK } else { 0 };
                // SAFETY: no pointers.
                unsafe { (rdma.rfcntl)(socket, libc::F_SETFL, flags) };
            }
            libc::FIONREAD => {
                let mut len = 4;
                // SAFETY: the request's argument is an integer.
                return unsafe {
                    (rdma.rgetsockopt)(socket, SOL_RDMA, RDMA_UNREAD, arg, &raw mut len)
                };
            }
            _ => {}
        }
    }
    libc_call!(ioctl(fd => c_int, request => c_ulong, arg => *mut c_void) -> c_int)
}
