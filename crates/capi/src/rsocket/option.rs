//! Options of sockets.

use std::ffi::{c_int, c_void};

use anyverbs_sanitizers as sanitizers;
use libc::socklen_t;

use super::zero;
use crate::cancel::Uncancelled;
use crate::errno::{Errno, minus_one};

/// `rsetsockopt`.
pub(crate) unsafe extern "C" fn rsetsockopt(
    socket: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    zero(
        "rsetsockopt",
        (|| {
            let socket = anyverbs_rsocket::get(socket)?;
            if value.is_null() && len > 0 {
                return Err(Errno::said(libc::EFAULT));
            }
            // Bytes beyond the length of any option's value are not read.
            let len = (len as usize).min(4096);
            let value = match len {
                0 => &[],
                // SAFETY: the program passes a value of that length.
                _ => unsafe { std::slice::from_raw_parts(value.cast::<u8>(), len) },
            };
            Ok(socket.set_option(level, name, value)?)
        })(),
    )
}

/// `rgetsockopt`.
pub(crate) unsafe extern "C" fn rgetsockopt(
    socket: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    zero(
        "rgetsockopt",
        (|| {
            let socket = anyverbs_rsocket::get(socket)?;
            if value.is_null() || len.is_null() {
                return Err(Errno::said(libc::EFAULT));
            }
            // SAFETY: the program passes a live length.
            let room = unsafe { len.read_unaligned() } as usize;
            if level == anyverbs_rsocket::SOL_RDMA
                && name == anyverbs_rsocket::RDMA_ROUTE
                && room < 72
            {
                return Err(Errno::said(libc::EINVAL));
            }
            let found = socket.option(level, name)?;
            let n = found.bytes().len().min(room);
            // SAFETY: `value` has that room.
            unsafe {
                std::ptr::copy_nonoverlapping(found.bytes().as_ptr(), value.cast(), n);
                len.write_unaligned(n as socklen_t);
            }
            sanitizers::initialised_bytes(value.cast_const().cast(), n);
            sanitizers::initialised(len);
            Ok(())
        })(),
    )
}

/// `rfcntl`: the status and descriptor flags. A duplicate would not be a socket: `EOPNOTSUPP`.
///
/// Variadic in C; a variadic integer travels in the same register as a fixed one.
pub(crate) unsafe extern "C" fn rfcntl(socket: c_int, cmd: c_int, arg: c_int) -> c_int {
    let _uncancelled = Uncancelled::new();
    minus_one(
        "rfcntl",
        (|| {
            let socket = anyverbs_rsocket::get(socket)?;
            match cmd {
                libc::F_GETFL => {
                    let nonblocking = if socket.is_nonblocking() { libc::O_NONBLOCK } else { 0 };
                    Ok(libc::O_RDWR | nonblocking)
                }
                libc::F_SETFL => {
                    socket.set_nonblocking(arg & libc::O_NONBLOCK != 0);
                    Ok(0)
                }
                libc::F_GETFD | libc::F_SETFD => {
                    // SAFETY: no pointers.
                    match unsafe { libc::fcntl(socket.fd(), cmd, arg) } {
                        -1 => Err(anyverbs_rsocket::Errno(
                            std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
                        )
                        .into()),
                        flags => Ok(flags),
                    }
                }
                _ => Err(Errno::lacks("the command of fcntl is none that an rsocket has")),
            }
        })(),
    )
}
