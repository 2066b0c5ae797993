//! Making, naming, connecting and accepting sockets.

use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, Ordering};

use libc::{sockaddr, sockaddr_storage, socklen_t};

use super::beside;
use crate::config;
use crate::rdma::{self, Rdma, SOL_RDMA};
use crate::real::{errno, libc_call, set_errno};
use crate::table::{self, Address, Plan};

fn real_socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    libc_call!(socket(domain => c_int, kind => c_int, protocol => c_int) -> c_int)
}

fn real_close(fd: c_int) -> c_int {
    libc_call!(close(fd => c_int) -> c_int)
}

fn real_connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    libc_call!(connect(fd => c_int, address => *const sockaddr, len => socklen_t) -> c_int)
}

/// Bytes of the receive buffer of an rsocket, unless somebody has set it.
const DEFAULT_BUFFER: c_int = 128 << 10;

/// Half of the receive buffer of a stream that replaces a TCP socket: `SO_RCVBUF` is doubled. The kernel lets the buffer of a busy TCP
/// socket grow to as much (`tcp_rmem`). With a small one programs wait for each half that is full or empty.
const STREAM_BUFFER: c_int = 2 << 20;

/// Gives a new stream a buffer like that of a TCP socket, if it has the default of programs for rsockets.
fn enlarge(rdma: &Rdma, socket: c_int) {
    let (mut size, mut len): (c_int, socklen_t) = (0, 4);
    let value = core::ptr::from_mut(&mut size).cast();
    // SAFETY: a live integer and its length.
    let got =
        unsafe { (rdma.rgetsockopt)(socket, libc::SOL_SOCKET, libc::SO_RCVBUF, value, &mut len) };
    if got == 0 && size == DEFAULT_BUFFER {
        let value = core::ptr::from_ref(&STREAM_BUFFER).cast();
        // SAFETY: a live integer. If it is refused the buffer stays as it is.
        unsafe { (rdma.rsetsockopt)(socket, libc::SOL_SOCKET, libc::SO_RCVBUF, value, 4) };
    }
}

/// Gives a new rsocket the settings of the environment.
fn apply_sizes(rdma: &Rdma, socket: c_int) {
    for (option, size) in config::sizes() {
        let value = core::ptr::from_ref(size).cast();
        // SAFETY: a live integer. A refused option keeps its default.
        unsafe { (rdma.rsetsockopt)(socket, SOL_RDMA, *option, value, 4) };
    }
}

/// Tells why sockets stay TCP's, the first time.
fn say_once(errno: c_int) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        let why = std::io::Error::from_raw_os_error(errno);
        let line = format!("librspreload: no RDMA for a socket, which stays TCP: {why}\n");
        // SAFETY: live bytes.
        unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let fd = real_socket(domain, kind, protocol);
    if fd < 0 || !config::wants(domain, kind, protocol) {
        return fd;
    }
    let before = errno();
    if let Some(rdma) = rdma::load() {
        // SAFETY: no pointers.
        let socket = unsafe { (rdma.rsocket)(domain, kind | libc::SOCK_CLOEXEC, 0) };
        if socket >= 0 {
            if kind & 0xf == libc::SOCK_STREAM {
                enlarge(rdma, socket);
            }
            apply_sizes(rdma, socket);
            if !table::put(fd, socket) {
                // SAFETY: it has no other user.
                unsafe { (rdma.rclose)(socket) };
            }
        } else {
            say_once(errno());
        }
    }
    set_errno(before);
    fd
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    if let Some((rdma, socket)) = beside(fd) {
        // SAFETY: the caller keeps libc's contract.
        let result = unsafe { (rdma.rbind)(socket, address, len) };
        if result == 0 {
            // SAFETY: as above; the library has read that many bytes.
            let bound = unsafe { copied(address, len) };
            table::set_plan(fd, Plan { bound, ..table::plan(fd) });
            return 0;
        }
        if !matches!(errno(), libc::EADDRNOTAVAIL | libc::ENODEV) {
            return result;
        }
        // An address that no RDMA device has.
        table::remove(fd);
    }
    libc_call!(bind(fd => c_int, address => *const sockaddr, len => socklen_t) -> c_int)
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    match beside(fd) {
        // SAFETY: no pointers.
        Some((rdma, socket)) => unsafe { (rdma.rlisten)(socket, backlog) },
        None => libc_call!(listen(fd => c_int, backlog => c_int) -> c_int),
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn accept(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    match beside(fd) {
        // SAFETY: the caller keeps libc's contract.
        Some((rdma, socket)) => unsafe { accept_beside(rdma, socket, address, len, 0) },
        None => {
            libc_call!(accept(fd => c_int, address => *mut sockaddr, len => *mut socklen_t) -> c_int)
        }
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn accept4(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    match beside(fd) {
        // SAFETY: the caller keeps libc's contract.
        Some((rdma, socket)) => unsafe { accept_beside(rdma, socket, address, len, flags) },
        None => {
            libc_call!(accept4(fd => c_int, address => *mut sockaddr, len => *mut socklen_t, flags => c_int) -> c_int)
        }
    }
}

/// # Safety
/// `address` and `len` as for `accept`.
unsafe fn accept_beside(
    rdma: &Rdma,
    listener: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    if flags & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) != 0 {
        set_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: the caller's promise.
    let socket = unsafe { (rdma.raccept)(listener, address, len) };
    if socket < 0 {
        return -1;
    }
    // SAFETY: no pointers. The descriptor itself is not the program's.
    unsafe { (rdma.rfcntl)(socket, libc::F_SETFD, libc::FD_CLOEXEC) };
    if flags & libc::SOCK_NONBLOCK != 0 {
        // SAFETY: as above.
        unsafe { (rdma.rfcntl)(socket, libc::F_SETFL, libc::O_NONBLOCK) };
    }
    // SAFETY: a live storage with its length.
    let domain = unsafe {
        let mut own: sockaddr_storage = core::mem::zeroed();
        let mut len = size_of::<sockaddr_storage>() as socklen_t;
        (rdma.rgetsockname)(socket, (&raw mut own).cast(), &raw mut len);
        c_int::from(own.ss_family)
    };
    let fd = real_socket(domain, libc::SOCK_STREAM | flags, 0);
    if fd >= 0 && table::put(fd, socket) {
        return fd;
    }
    let why = if fd >= 0 {
        real_close(fd);
        libc::EMFILE
    } else {
        errno()
    };
    // SAFETY: it has no other user.
    unsafe { (rdma.rclose)(socket) };
    set_errno(why);
    -1
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn connect(
    fd: c_int,
    address: *const sockaddr,
    len: socklen_t,
) -> c_int {
    let Some((rdma, socket)) = beside(fd) else { return real_connect(fd, address, len) };
    // SAFETY: the caller keeps libc's contract.
    let result = unsafe { (rdma.rconnect)(socket, address, len) };
    if result == 0 {
        table::set_connecting(fd, false);
        return 0;
    }
    let why = errno();
    match why {
        libc::EINPROGRESS => {
            // SAFETY: the program's address has `len` bytes.
            let to = unsafe { copied(address, len) };
            table::set_plan(fd, Plan { to, ..table::plan(fd) });
            table::set_connecting(fd, true);
            -1
        }
        // Errors of the call and not of the peer.
        libc::EISCONN
        | libc::EALREADY
        | libc::EINTR
        | libc::EBADF
        | libc::EFAULT
        | libc::EINVAL
        | libc::EAFNOSUPPORT => -1,
        _ if is_stream(rdma, socket) => {
            let plan = table::plan(fd);
            table::remove(fd);
            bind_as(fd, &plan);
            real_connect(fd, address, len)
        }
        _ => -1,
    }
}

fn is_stream(rdma: &Rdma, socket: c_int) -> bool {
    let (mut kind, mut len): (c_int, socklen_t) = (0, 4);
    // SAFETY: a live integer with its length.
    let result = unsafe {
        let kind = (&raw mut kind).cast();
        (rdma.rgetsockopt)(socket, libc::SOL_SOCKET, libc::SO_TYPE, kind, &raw mut len)
    };
    result == 0 && kind == libc::SOCK_STREAM
}

/// A copy of the program's address.
///
/// # Safety
/// `address` has `len` bytes.
unsafe fn copied(address: *const sockaddr, len: socklen_t) -> Address {
    // SAFETY: all-zero is a valid storage, which has room for the copied bytes; the caller's promise.
    unsafe {
        let mut storage: sockaddr_storage = core::mem::zeroed();
        let len = (len as usize).min(size_of::<sockaddr_storage>());
        let to = (&raw mut storage).cast::<u8>();
        core::ptr::copy_nonoverlapping(address.cast::<u8>(), to, len);
        Address { storage, len: len as socklen_t }
    }
}

/// Binds a TCP socket as its rsocket was. If that fails, the system chooses.
fn bind_as(fd: c_int, plan: &Plan) {
    let Address { storage, len } = &plan.bound;
    if *len > 0 {
        let address = core::ptr::from_ref(storage).cast::<sockaddr>();
        libc_call!(bind(fd => c_int, address => *const sockaddr, *len => socklen_t) -> c_int);
    }
}

/// An RDMA connect that was under way has failed: connects by TCP. True: that is under way, or done.
pub(super) fn fall_back(fd: c_int) -> bool {
    let Some((rdma, socket)) = beside(fd) else { return false };
    let plan = table::plan(fd);
    table::set_connecting(fd, false);
    if !is_stream(rdma, socket) {
        return false;
    }
    if plan.epoll > 0 {
        let (epfd, mut event) = (plan.epoll - 1, plan.event);
        if let Some(set) = table::set(epfd) {
            // SAFETY: a live event.
            unsafe { (rdma.repoll_ctl)(set, libc::EPOLL_CTL_DEL, socket, &raw mut event) };
        }
        libc_call!(epoll_ctl(epfd => c_int, libc::EPOLL_CTL_ADD => c_int, fd => c_int, &raw mut event => *mut libc::epoll_event) -> c_int);
    }
    table::remove(fd);
    bind_as(fd, &plan);
    let to = (&raw const plan.to.storage).cast::<sockaddr>();
    real_connect(fd, to, plan.to.len) == 0 || errno() == libc::EINPROGRESS
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    match beside(fd) {
        // SAFETY: no pointers.
        Some((rdma, socket)) => unsafe { (rdma.rshutdown)(socket, how) },
        None => libc_call!(shutdown(fd => c_int, how => c_int) -> c_int),
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn getpeername(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    match beside(fd) {
        // SAFETY: the caller keeps libc's contract.
        Some((rdma, socket)) => unsafe { (rdma.rgetpeername)(socket, address, len) },
        None => {
            libc_call!(getpeername(fd => c_int, address => *mut sockaddr, len => *mut socklen_t) -> c_int)
        }
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn getsockname(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    match beside(fd) {
        // SAFETY: the caller keeps libc's contract.
        Some((rdma, socket)) => unsafe { (rdma.rgetsockname)(socket, address, len) },
        None => {
            libc_call!(getsockname(fd => c_int, address => *mut sockaddr, len => *mut socklen_t) -> c_int)
        }
    }
}
