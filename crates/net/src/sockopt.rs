//! Socket options that `socket2` does not offer, by `setsockopt(2)` and `getsockopt(2)`.

use std::ffi::c_int;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use crate::sys;

/// Sets an integer option.
pub(crate) fn set(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    // SAFETY: the option value is a live c_int and its size is passed with it; the fd is open.
    let rc = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of::<c_int>() as libc::socklen_t,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Attaches a classic BPF program: `SO_ATTACH_FILTER` or `SO_ATTACH_REUSEPORT_CBPF`.
pub(crate) fn attach_bpf(
    fd: BorrowedFd<'_>,
    option: c_int,
    program: &[libc::sock_filter],
) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    /// `struct sock_fprog` with its padding named: the kernel copies that too, and memory checkers mind.
    #[repr(C)]
    struct Program {
        len: u16,
        padding: [u16; 3],
        filter: *const libc::sock_filter,
    }
    const { assert!(size_of::<Program>() == size_of::<libc::sock_fprog>()) };
    let prog = Program { len, padding: [0; 3], filter: program.as_ptr() };
    // SAFETY: `prog` describes a live array of `len` instructions, which the kernel copies and does not write.
    let rc = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw const prog).cast(),
            size_of::<Program>() as libc::socklen_t,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Datagrams that this socket dropped since it was opened, mostly because its receive buffer was full
/// (`SO_MEMINFO`, `SK_MEMINFO_DROPS`).
pub(crate) fn drops(fd: BorrowedFd<'_>) -> io::Result<u32> {
    const SK_MEMINFO_DROPS: usize = 8; // include/uapi/linux/sock_diag.h
    const SK_MEMINFO_VARS: usize = 9;
    let mut info = MaybeUninit::<[u32; SK_MEMINFO_VARS]>::zeroed();
    let mut len = size_of::<[u32; SK_MEMINFO_VARS]>() as libc::socklen_t;
    // SAFETY: the buffer is live and `len` holds its size.
    let rc = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MEMINFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zero-initialised integers, in part overwritten by the kernel, are valid integers.
    Ok(unsafe { info.assume_init() }[SK_MEMINFO_DROPS])
}

/// The process at the other end of a Unix socket, whichever side connected (`SO_PEERCRED`, unix(7)).
pub(crate) fn credentials(socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
    let mut who = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: a live ucred, and its size.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut who).cast(),
            &raw mut len,
        )
    };
    if rc == 0 { Ok(who) } else { Err(io::Error::last_os_error()) }
}

/// Waits until `fd` is ready for `events` or `timeout_ms` have passed; whether it became ready.
pub(crate) fn poll(fd: BorrowedFd<'_>, events: i16, timeout_ms: c_int) -> io::Result<bool> {
    let mut pfd = libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
    loop {
        let n = sys::poll(std::slice::from_mut(&mut pfd), timeout_ms);
        if n >= 0 {
            return Ok(n > 0);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Waits until some of the sockets are readable or `timeout` has passed, rounded up to milliseconds. Returns the places of
/// those that are, in ascending order.
pub(crate) fn poll_all(sockets: &[impl AsFd], timeout: std::time::Duration) -> Vec<usize> {
    let entry = |socket: &_| libc::pollfd {
        fd: AsFd::as_fd(socket).as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    let mut set: Vec<_> = sockets.iter().map(entry).collect();
    sys::poll(&mut set, timeout.as_micros().div_ceil(1000).min(1000) as c_int);
    (0..set.len()).filter(|&at| set[at].revents != 0).collect()
}

/// Waits until one of some descriptors (up to 8) is readable or `timeout` has passed, rounded up to milliseconds.
/// Returning early is harmless to the callers, so errors are too.
pub(crate) fn poll_any<'a>(
    fds: impl Iterator<Item = BorrowedFd<'a>>,
    timeout: std::time::Duration,
) {
    let mut set = [libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; 8];
    for (entry, fd) in set.iter_mut().zip(fds) {
        entry.fd = fd.as_raw_fd();
    }
    let timeout_ms = timeout.as_micros().div_ceil(1000).min(1000) as c_int;
    // Negative descriptors are skipped by the kernel.
    sys::poll(&mut set, timeout_ms);
}
