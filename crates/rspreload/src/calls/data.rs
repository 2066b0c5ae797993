//! Moving bytes.

use core::ffi::{c_int, c_uint, c_void};

use libc::{iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t, timespec};

use super::beside;
use crate::real::{errno, libc_call};

/// The result of a sending call of a socket whose peer no longer reads.
fn signalled(result: ssize_t, flags: c_int) -> ssize_t {
    if result < 0 && errno() == libc::EPIPE && flags & libc::MSG_NOSIGNAL == 0 {
        let before = errno();
        // SAFETY: to this thread, as the system does.
        unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGPIPE) };
        crate::real::set_errno(before);
    }
    result
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recv(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    match beside(fd) {
        // SAFETY: the caller keeps libc's contract.
        Some((rdma, socket)) => unsafe { (rdma.rrecv)(socket, buf, len, flags) },
        None => {
            libc_call!(recv(fd => c_int, buf => *mut c_void, len => size_t, flags => c_int) -> ssize_t)
        }
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recvfrom(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
    from: *mut sockaddr,
    from_len: *mut socklen_t,
) -> ssize_t {
    match beside(fd) {
        // SAFETY: the caller keeps libc's contract.
        Some((rdma, socket)) => unsafe {
            (rdma.rrecvfrom)(socket, buf, len, flags, from, from_len)
        },
        None => {
            libc_call!(recvfrom(fd => c_int, buf => *mut c_void, len => size_t, flags => c_int, from => *mut sockaddr, from_len => *mut socklen_t) -> ssize_t)
        }
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t {
    match beside(fd) {
        // SAFETY: the caller keeps libc's contract.
        Some((rdma, socket)) => unsafe { (rdma.rrecvmsg)(socket, msg, flags) },
        None => libc_call!(recvmsg(fd => c_int, msg => *mut msghdr, flags => c_int) -> ssize_t),
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t {
    match beside(fd) {
        // SAFETY: the caller keeps libc's contract.
        Some((rdma, socket)) => unsafe { (rdma.rrecv)(socket, buf, len, 0) },
        None => libc_call!(read(fd => c_int, buf => *mut c_void, len => size_t) -> ssize_t),
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn readv(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t {
    match beside(fd) {
        // SAFETY: the caller keeps libc's contract.
        Some((rdma, socket)) => unsafe { (rdma.rreadv)(socket, iov, count) },
        None => libc_call!(readv(fd => c_int, iov => *const iovec, count => c_int) -> ssize_t),
    }
}

/// The forms with a check of the buffer's size, for programs that are compiled with `_FORTIFY_SOURCE`.
macro_rules! checked {
    ($($name:ident = $plain:ident($($arg:ident: $ty:ty),*; $len:ident; $($more:ident: $more_ty:ty),*);)*) => {$(
        /// # Safety
        /// As the libc function of this name.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($arg: $ty,)* $len: size_t, room: size_t $(, $more: $more_ty)*) -> ssize_t {
            if $len > room {
                // As libc does, short of its message.
                std::process::abort();
            }
            // SAFETY: same contract as this function's.
            unsafe { $plain($($arg,)* $len $(, $more)*) }
        }
    )*};
}

checked! {
    __read_chk = read(fd: c_int, buf: *mut c_void; len;);
    __recv_chk = recv(fd: c_int, buf: *mut c_void; len; flags: c_int);
    __recvfrom_chk = recvfrom(fd: c_int, buf: *mut c_void; len; flags: c_int, from: *mut sockaddr, from_len: *mut socklen_t);
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn send(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    match beside(fd) {
        // SAFETY: the caller keeps libc's contract.
        Some((rdma, socket)) => signalled(unsafe { (rdma.rsend)(socket, buf, len, flags) }, flags),
        None => {
            libc_call!(send(fd => c_int, buf => *const c_void, len => size_t, flags => c_int) -> ssize_t)
        }
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sendto(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    to: *const sockaddr,
    to_len: socklen_t,
) -> ssize_t {
    match beside(fd) {
        Some((rdma, socket)) => {
            // SAFETY: the caller keeps libc's contract.
            let result = unsafe { (rdma.rsendto)(socket, buf, len, flags, to, to_len) };
            signalled(result, flags)
        }
        None => {
            libc_call!(sendto(fd => c_int, buf => *const c_void, len => size_t, flags => c_int, to => *const sockaddr, to_len => socklen_t) -> ssize_t)
        }
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t {
    match beside(fd) {
        // SAFETY: the caller keeps libc's contract.
        Some((rdma, socket)) => signalled(unsafe { (rdma.rsendmsg)(socket, msg, flags) }, flags),
        None => libc_call!(sendmsg(fd => c_int, msg => *const msghdr, flags => c_int) -> ssize_t),
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t {
    match beside(fd) {
        // SAFETY: the caller keeps libc's contract.
        Some((rdma, socket)) => signalled(unsafe { (rdma.rsend)(socket, buf, len, 0) }, 0),
        None => libc_call!(write(fd => c_int, buf => *const c_void, len => size_t) -> ssize_t),
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn writev(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t {
    match beside(fd) {
        // SAFETY: the caller keeps libc's contract.
        Some((rdma, socket)) => signalled(unsafe { (rdma.rwritev)(socket, iov, count) }, 0),
        None => libc_call!(writev(fd => c_int, iov => *const iovec, count => c_int) -> ssize_t),
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recvmmsg(
    fd: c_int,
    list: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    let Some((rdma, socket)) = beside(fd) else {
        return libc_call!(recvmmsg(fd => c_int, list => *mut mmsghdr, count => c_uint, flags => c_int, timeout => *mut timespec) -> c_int);
    };
    let mut done = 0;
    while done < count {
        // After the first only messages that are there: a program that wants more waits for them in the next call.
        let more = if done > 0 { libc::MSG_DONTWAIT } else { 0 };
        let flags = flags & !libc::MSG_WAITFORONE | more;
        // SAFETY: the program's list has `count` entries.
        unsafe {
            let entry = list.add(done as usize);
            let n = (rdma.rrecvmsg)(socket, &raw mut (*entry).msg_hdr, flags);
            if n < 0 {
                break;
            }
            (*entry).msg_len = n as c_uint;
        }
        done += 1;
    }
    if done == 0 && count > 0 { -1 } else { done as c_int }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sendmmsg(
    fd: c_int,
    list: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    if beside(fd).is_none() {
        return libc_call!(sendmmsg(fd => c_int, list => *mut mmsghdr, count => c_uint, flags => c_int) -> c_int);
    }
    let mut done = 0;
    while done < count {
        // SAFETY: the program's list has `count` entries.
        unsafe {
            let entry = list.add(done as usize);
            let n = sendmsg(fd, &raw const (*entry).msg_hdr, flags);
            if n < 0 {
                break;
            }
            (*entry).msg_len = n as c_uint;
        }
        done += 1;
    }
    if done == 0 && count > 0 { -1 } else { done as c_int }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sendfile(
    out: c_int,
    input: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    let Some((rdma, socket)) = beside(out) else {
        return libc_call!(sendfile(out => c_int, input => c_int, offset => *mut off_t, count => size_t) -> ssize_t);
    };
    let mut done = 0usize;
    let mut part = [0u8; 16 << 10];
    while done < count {
        let want = part.len().min(count - done);
        // SAFETY: a live buffer of that length; the program's offset is live or null.
        let (got, sent) = unsafe {
            let at = if offset.is_null() { libc::lseek(input, 0, libc::SEEK_CUR) } else { *offset };
            let got = libc::pread(input, part.as_mut_ptr().cast(), want, at);
            if got <= 0 {
                (got, 0)
            } else {
                let sent = (rdma.rsend)(socket, part.as_ptr().cast(), got as usize, 0);
                if sent > 0 {
                    // Data that was not sent stays to be read.
                    if offset.is_null() {
                        libc::lseek(input, at + sent as off_t, libc::SEEK_SET);
                    } else {
                        *offset = at + sent as off_t;
                    }
                }
                (got, signalled(sent, 0))
            }
        };
        if got == 0 {
            break;
        }
        if got < 0 || sent < 0 {
            return if done > 0 { done as ssize_t } else { -1 };
        }
        done += sent as usize;
        if sent < got {
            break;
        }
    }
    done as ssize_t
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sendfile64(
    out: c_int,
    input: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: same contract; the two are one on 64-bit Linux.
    unsafe { sendfile(out, input, offset, count) }
}
