//! Sending and receiving.

use std::ffi::{c_int, c_void};

use libc::{iovec, msghdr, size_t, sockaddr, socklen_t, ssize_t};

use anyverbs_rsocket::Call;
use anyverbs_sanitizers as sanitizers;

use super::{names::give_address, size};
use crate::{cancel::holding, errno::Errno, rdmacm::sockaddr::address_of_length};

/// A program's list of buffers.
///
/// # Safety
/// `iov` is NULL, or readable for `count` entries.
unsafe fn list<'a>(iov: *const iovec, count: usize) -> Result<&'a [iovec], Errno> {
    match count {
        0 => Ok(&[]),
        // `UIO_MAXIOV`
        1025.. => Err(Errno::said(libc::EMSGSIZE)),
        _ if iov.is_null() => Err(Errno::said(libc::EFAULT)),
        _ if !iov.is_aligned() => Err(Errno::said(libc::EINVAL)),
        // SAFETY: the caller's promise.
        _ => Ok(unsafe { std::slice::from_raw_parts(iov, count) }),
    }
}

fn one(buf: *const c_void, len: size_t) -> [iovec; 1] {
    [iovec { iov_base: buf.cast_mut(), iov_len: len }]
}

/// # Safety
/// The buffers are the program's to be read; `to` is NULL or an address of that length.
unsafe fn send(
    socket: c_int,
    buffers: &[iovec],
    flags: c_int,
    to: *const sockaddr,
    to_len: socklen_t,
) -> Result<usize, Errno> {
    let socket = anyverbs_rsocket::get(socket)?;
    let to = if to.is_null() || socket.is_stream() {
        None
    } else {
        // SAFETY: the caller's promise.
        Some(unsafe { address_of_length(to, to_len) }?)
    };
    // SAFETY: the caller's promise.
    Ok(holding(socket, |s| unsafe { s.send_message(buffers, flags, to.as_ref()) })?)
}

/// # Safety
/// The buffers are the program's to be written.
unsafe fn recv(
    socket: c_int,
    buffers: &[iovec],
    flags: c_int,
    name: bool,
) -> Result<anyverbs_rsocket::Received, Errno> {
    let socket = anyverbs_rsocket::get(socket)?;
    // SAFETY: the caller's promise.
    let received = holding(socket, |s| unsafe { s.recv_message(buffers, flags, name) })?;
    let mut left = received.len;
    for buffer in buffers {
        let len = left.min(buffer.iov_len);
        sanitizers::initialised_bytes(buffer.iov_base, len);
        left -= len;
    }
    Ok(received)
}

/// The result of a call: with `MSG_TRUNC` the whole length of a datagram.
fn length(received: &anyverbs_rsocket::Received, flags: c_int) -> usize {
    if flags & libc::MSG_TRUNC != 0 { received.full } else { received.len }
}

/// `rsend`.
pub(crate) unsafe extern "C" fn rsend(
    socket: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    let _call = Call::begin();
    // SAFETY: the program passes a buffer of that length.
    size(unsafe { send(socket, &one(buf, len), flags, std::ptr::null(), 0) })
}

/// `rsendto`.
pub(crate) unsafe extern "C" fn rsendto(
    socket: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    to: *const sockaddr,
    to_len: socklen_t,
) -> ssize_t {
    let _call = Call::begin();
    // SAFETY: the program passes a buffer and an address of these lengths.
    size(unsafe { send(socket, &one(buf, len), flags, to, to_len) })
}

/// `rsendmsg`. Control messages are not looked at.
pub(crate) unsafe extern "C" fn rsendmsg(
    socket: c_int,
    msg: *const msghdr,
    flags: c_int,
) -> ssize_t {
    let _call = Call::begin();
    size((|| {
        if msg.is_null() {
            return Err(Errno::said(libc::EFAULT));
        }
        // SAFETY: the program passes a message header, and promises that its fields are valid.
        unsafe {
            let msg = msg.read_unaligned();
            let buffers = list(msg.msg_iov, msg.msg_iovlen)?;
            send(socket, buffers, flags, msg.msg_name.cast(), msg.msg_namelen)
        }
    })())
}

/// `rwrite`.
pub(crate) unsafe extern "C" fn rwrite(socket: c_int, buf: *const c_void, len: size_t) -> ssize_t {
    let _call = Call::begin();
    // SAFETY: the program passes a buffer of that length.
    size(unsafe { send(socket, &one(buf, len), 0, std::ptr::null(), 0) })
}

/// `rwritev`.
pub(crate) unsafe extern "C" fn rwritev(socket: c_int, iov: *const iovec, count: c_int) -> ssize_t {
    let _call = Call::begin();
    size((|| {
        let count = usize::try_from(count).map_err(|_| Errno::said(libc::EINVAL))?;
        // SAFETY: the program passes a list of that length.
        unsafe { send(socket, list(iov, count)?, 0, std::ptr::null(), 0) }
    })())
}

/// `rrecv`.
pub(crate) unsafe extern "C" fn rrecv(
    socket: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    let _call = Call::begin();
    // SAFETY: the program passes a buffer of that length.
    let received = unsafe { recv(socket, &one(buf, len), flags, false) };
    size(received.map(|received| length(&received, flags)))
}

/// `rrecvfrom`.
pub(crate) unsafe extern "C" fn rrecvfrom(
    socket: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
    from: *mut sockaddr,
    from_len: *mut socklen_t,
) -> ssize_t {
    let _call = Call::begin();
    size((|| {
        // SAFETY: the program passes a buffer of that length.
        let received = unsafe { recv(socket, &one(buf, len), flags, !from.is_null()) }?;
        if !from.is_null()
            && let Some(address) = &received.from
        {
            // SAFETY: the program passes an address with its length.
            unsafe { give_address(address, from, from_len) }?;
        }
        Ok(length(&received, flags))
    })())
}

/// `rrecvmsg`. There are no control messages.
pub(crate) unsafe extern "C" fn rrecvmsg(socket: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t {
    let _call = Call::begin();
    size((|| {
        if msg.is_null() || !msg.is_aligned() {
            return Err(Errno::said(libc::EFAULT));
        }
        // SAFETY: the program passes a message header that is its own to be written, and its fields are valid as it says.
        unsafe {
            let buffers = list((*msg).msg_iov, (*msg).msg_iovlen)?;
            let name = !(*msg).msg_name.is_null();
            let received = recv(socket, buffers, flags, name)?;
            match &received.from {
                Some(address) if name => {
                    give_address(address, (*msg).msg_name.cast(), &raw mut (*msg).msg_namelen)?;
                }
                _ => (*msg).msg_namelen = 0,
            }
            (*msg).msg_controllen = 0;
            let cut = received.full > received.len;
            (*msg).msg_flags = if cut { libc::MSG_TRUNC } else { 0 };
            Ok(length(&received, flags))
        }
    })())
}

/// `rread`.
pub(crate) unsafe extern "C" fn rread(socket: c_int, buf: *mut c_void, len: size_t) -> ssize_t {
    let _call = Call::begin();
    // SAFETY: the program passes a buffer of that length.
    size(unsafe { recv(socket, &one(buf, len), 0, false) }.map(|received| received.len))
}

/// `rreadv`.
pub(crate) unsafe extern "C" fn rreadv(socket: c_int, iov: *const iovec, count: c_int) -> ssize_t {
    let _call = Call::begin();
    size((|| {
        let count = usize::try_from(count).map_err(|_| Errno::said(libc::EINVAL))?;
        // SAFETY: the program passes a list of that length.
        Ok(unsafe { recv(socket, list(iov, count)?, 0, false) }?.len)
    })())
}
