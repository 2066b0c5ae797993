//! I/O maps.

use std::ffi::{c_int, c_void};

use anyverbs_rsocket::Call;
use libc::{off_t, size_t};

use super::{size, zero};
use crate::{
    cancel::{Uncancelled, holding},
    errno::Errno,
};

/// `riomap`: the offset under which the peer writes the buffer, or -1. An `offset` of -1 chooses the buffer's address.
pub(crate) unsafe extern "C" fn riomap(
    socket: c_int,
    buf: *mut c_void,
    len: size_t,
    prot: c_int,
    _flags: c_int,
    offset: off_t,
) -> off_t {
    let _uncancelled = Uncancelled::new();
    let result = (|| {
        if prot & !libc::PROT_WRITE != 0 {
            return Err(Errno::said(libc::EINVAL));
        }
        let offset = match offset {
            -1 => None,
            _ => Some(u64::try_from(offset).map_err(|_| Errno::said(libc::EINVAL))?),
        };
        let socket = anyverbs_rsocket::get(socket)?;
        let writable = prot & libc::PROT_WRITE != 0;
        // SAFETY: the program lets the buffer be written until it unmaps it.
        let at = unsafe { socket.map(buf as u64, len as u64, writable, offset) }?;
        off_t::try_from(at).map_err(|_| Errno::said(libc::EINVAL))
    })();
    result.unwrap_or_else(|errno: Errno| {
        errno.set();
        -1
    })
}

/// `riounmap`.
pub(crate) unsafe extern "C" fn riounmap(socket: c_int, buf: *mut c_void, len: size_t) -> c_int {
    let _uncancelled = Uncancelled::new();
    let result = anyverbs_rsocket::get(socket).and_then(|s| s.unmap(buf as u64, len as u64));
    zero("riounmap", result.map_err(Errno::from))
}

/// `riowrite`: how much was written; (`size_t`) -1 with `errno`.
pub(crate) unsafe extern "C" fn riowrite(
    socket: c_int,
    buf: *const c_void,
    len: size_t,
    offset: off_t,
    flags: c_int,
) -> size_t {
    let _call = Call::begin();
    let result = (|| {
        let offset = u64::try_from(offset).map_err(|_| Errno::said(libc::EINVAL))?;
        let socket = anyverbs_rsocket::get(socket)?;
        let buffers = [libc::iovec { iov_base: buf.cast_mut(), iov_len: len }];
        // SAFETY: the program passes a buffer of that length.
        Ok(holding(socket, |s| unsafe { s.write_mapped(&buffers, offset, flags) })?)
    })();
    size(result).cast_unsigned()
}
