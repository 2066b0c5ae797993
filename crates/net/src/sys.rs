//! System calls that are no cancellation points, and that `rustix` does not have.
//!
//! In the C library's forms of these calls a thread may be cancelled (`pthread_cancel(3)`), and programs do cancel the
//! threads that serve their completions. Here callers hold locks, which would then be held for ever. None of these
//! calls waits long. Those of `rustix` are no cancellation points either: they do not go through the C library.

use std::ffi::c_void;
use std::io;
use std::marker::PhantomData;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::time::Duration;

use libc::{SYS_recvmmsg, SYS_recvmsg, SYS_sendmmsg, SYS_sendmsg, c_int, c_uint, syscall};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with};
use rustix::thread::nanosleep;
use rustix::time::Timespec;
use socket2::{Domain, Socket};

/// The timeout of a call that does not wait.
pub(crate) const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// `struct _pthread_cleanup_buffer` of glibc.
#[repr(C)]
struct CleanupBuffer {
    routine: Option<unsafe extern "C" fn(*mut c_void)>,
    argument: *mut c_void,
    cancel_type: c_int,
    previous: *mut CleanupBuffer,
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
    fn _pthread_cleanup_push(
        buffer: *mut CleanupBuffer,
        routine: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    );
    fn _pthread_cleanup_pop(buffer: *mut CleanupBuffer, execute: c_int);
}

const PTHREAD_CANCEL_ENABLE: c_int = 0;
const PTHREAD_CANCEL_DISABLE: c_int = 1;

/// Whether the calling thread may be cancelled from now on; gives what held before.
fn set_cancel_state(state: c_int) -> c_int {
    let mut before = 0;
    // SAFETY: a live integer.
    unsafe { pthread_setcancelstate(state, &raw mut before) };
    before
}

/// The calling thread is not cancelled (`pthread_cancel(3)`) while this lives: it may hold locks.
#[derive(Debug)]
pub struct Uncancelled {
    before: c_int,
    _of_this_thread: PhantomData<*const ()>,
}

impl Uncancelled {
    /// Disables cancellation until it is dropped.
    #[must_use]
    pub fn new() -> Self {
        Self { before: set_cancel_state(PTHREAD_CANCEL_DISABLE), _of_this_thread: PhantomData }
    }

    /// Whether the thread could be cancelled before.
    #[must_use]
    pub fn was_cancellable(&self) -> bool {
        self.before == PTHREAD_CANCEL_ENABLE
    }
}

impl Default for Uncancelled {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        set_cancel_state(self.before);
    }
}

/// Waits in a system call in which the thread may be cancelled, and calls `undo` if it is.
///
/// The C library unwinds the stack of a cancelled thread, and knows nothing of Rust's destructors: what the callers hold would
/// be held for ever. It does run its own cleanup handlers, so `undo` gives that up. `wait` holds nothing itself, and
/// does not panic.
pub fn undone_if_cancelled<R, F: FnOnce()>(undo: F, wait: impl FnOnce() -> R) -> R {
    /// # Safety
    /// `undo` is a live `F`, and this is its last use.
    unsafe extern "C" fn run<F: FnOnce()>(undo: *mut c_void) {
        // SAFETY: the caller's promise.
        let undo = unsafe { undo.cast::<F>().read() };
        undo();
    }
    let mut undo = ManuallyDrop::new(undo);
    let mut buffer = MaybeUninit::<CleanupBuffer>::uninit();
    // SAFETY: the buffer lies on this thread's stack until it is popped below, and so does `undo`. The handler has it alone:
    // after it no code here runs.
    let result = unsafe {
        _pthread_cleanup_push(buffer.as_mut_ptr(), run::<F>, (&raw mut undo).cast());
        let result = wait();
        _pthread_cleanup_pop(buffer.as_mut_ptr(), 0);
        result
    };
    drop(ManuallyDrop::into_inner(undo));
    result
}

/// As [`undone_if_cancelled`], below an [`Uncancelled`] of a thread that could be cancelled before.
pub fn cancellable<R>(undo: impl FnOnce(), wait: impl FnOnce() -> R) -> R {
    undone_if_cancelled(undo, || {
        set_cancel_state(PTHREAD_CANCEL_ENABLE);
        let result = wait();
        set_cancel_state(PTHREAD_CANCEL_DISABLE);
        result
    })
}

/// Takes the descriptors 0 to 2 where the program has closed them, while this lives. What is opened meanwhile gets others: a
/// program writes its messages to 2, whatever that is.
#[derive(Debug)]
pub struct StandardStreams {
    _taken: Vec<OwnedFd>,
}

impl StandardStreams {
    /// Takes those that are free.
    #[must_use]
    pub fn hold() -> Self {
        let free = || {
            let flags = OFlags::RDWR | OFlags::CLOEXEC;
            let fd = open("/dev/null", flags, Mode::empty()).ok()?;
            (fd.as_raw_fd() <= libc::STDERR_FILENO).then_some(fd)
        };
        Self { _taken: std::iter::from_fn(free).collect() }
    }
}

/// The same open file behind a descriptor above 2.
///
/// # Errors
/// Those of fcntl(2).
pub(crate) fn above_standard_streams(fd: OwnedFd) -> io::Result<OwnedFd> {
    if fd.as_raw_fd() > libc::STDERR_FILENO {
        return Ok(fd);
    }
    Ok(fcntl_dupfd_cloexec(&fd, libc::STDERR_FILENO + 1)?)
}

/// A UDP socket of this library, close-on-exec. `socket(2)` of the C library may be another object's (`LD_PRELOAD`) that makes rsockets of the
/// program's sockets.
///
/// # Errors
/// Those of socket(2).
pub fn udp_socket(domain: Domain) -> io::Result<Socket> {
    let family = AddressFamily::from_raw(i32::from(domain) as u16);
    let socket = socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, Some(ipproto::UDP))?;
    Ok(Socket::from(socket))
}

/// Such a socket at an address.
///
/// # Errors
/// Those of socket(2) and bind(2).
pub fn bound_udp_socket(address: impl Into<SocketAddr>) -> io::Result<UdpSocket> {
    let address = address.into();
    let socket = udp_socket(Domain::for_address(address))?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// Memory that a device needs to open, and to go on with: its threads' stacks and its buffers. The standard library ends a process that
/// has none left, so the device makes sure of it before it begins (`scarce.c` of the C programs).
pub const ROOM: usize = 8 << 20;

/// Whether the process could have so much more memory now. It is a bound that counts, as `ulimit -v` sets, not what is free.
///
/// # Errors
/// `ENOMEM`.
pub fn check_room(len: usize) -> io::Result<()> {
    let (access, flags) =
        (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: a new mapping at a place that the kernel chooses; nobody else knows it when it goes.
    unsafe {
        let at = mmap_anonymous(std::ptr::null_mut(), len, access, flags)?;
        munmap(at, len)?;
    }
    Ok(())
}

/// Whether descriptors or memory have run out, which the same call may find again later.
pub(crate) fn is_scarcity(error: &io::Error) -> bool {
    let scarce = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::ENOBUFS];
    error.raw_os_error().is_some_and(|errno| scarce.contains(&errno))
}

/// A descriptor whose closing is no cancellation point, unlike close(2) of the C library. It may be dropped below a
/// lock.
#[derive(Debug)]
pub struct Descriptor(Option<OwnedFd>);

impl From<OwnedFd> for Descriptor {
    fn from(fd: OwnedFd) -> Self {
        Self(Some(fd))
    }
}

impl AsFd for Descriptor {
    #[inline]
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("it is there until the drop").as_fd()
    }
}

impl AsRawFd for Descriptor {
    #[inline]
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        if let Some(fd) = self.0.take() {
            // SAFETY: this was its only owner.
            unsafe { syscall(libc::SYS_close, fd.into_raw_fd()) };
        }
    }
}

/// sendmsg(2).
///
/// # Safety
/// As sendmsg.
pub(crate) unsafe fn sendmsg(fd: RawFd, message: *const libc::msghdr, flags: c_int) -> isize {
    // SAFETY: the caller's promise.
    unsafe { syscall(SYS_sendmsg, fd, message, flags) as isize }
}

/// sendmmsg(2).
///
/// # Safety
/// As sendmmsg.
pub(crate) unsafe fn sendmmsg(
    fd: RawFd,
    messages: *mut libc::mmsghdr,
    n: c_uint,
    flags: c_int,
) -> isize {
    // SAFETY: the caller's promise.
    unsafe { syscall(SYS_sendmmsg, fd, messages, n, flags) as isize }
}

/// recvmsg(2).
///
/// # Safety
/// As recvmsg.
pub(crate) unsafe fn recvmsg(fd: RawFd, message: *mut libc::msghdr, flags: c_int) -> isize {
    // SAFETY: the caller's promise.
    unsafe { syscall(SYS_recvmsg, fd, message, flags) as isize }
}

/// recvmmsg(2), without a timeout.
///
/// # Safety
/// As recvmmsg.
pub(crate) unsafe fn recvmmsg(
    fd: RawFd,
    messages: *mut libc::mmsghdr,
    n: c_uint,
    flags: c_int,
) -> isize {
    // SAFETY: the caller's promise.
    unsafe {
        syscall(SYS_recvmmsg, fd, messages, n, flags, std::ptr::null_mut::<libc::timespec>())
            as isize
    }
}

/// poll(2).
pub(crate) fn poll(fds: &mut [libc::pollfd], timeout_ms: c_int) -> isize {
    // ppoll is there on every architecture.
    let timeout = libc::timespec {
        tv_sec: (timeout_ms / 1000).into(),
        tv_nsec: (timeout_ms % 1000 * 1_000_000).into(),
    };
    let timeout = if timeout_ms < 0 { std::ptr::null() } else { &raw const timeout };
    let no_mask = std::ptr::null::<libc::sigset_t>();
    // SAFETY: a live array of its own length, a timeout that lives or NULL, and no signal mask.
    unsafe {
        syscall(libc::SYS_ppoll, fds.as_mut_ptr(), fds.len(), timeout, no_mask, 0usize) as isize
    }
}

/// Sleeps, or less where a signal handler ran meanwhile.
pub(crate) fn sleep(time: Duration) {
    let tv_sec = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    let _ = nanosleep(&Timespec { tv_sec, tv_nsec: time.subsec_nanos().into() });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_of_the_standard_streams_are_left_alone() {
        // Closed in a child: the test's own are in use.
        // SAFETY: the child makes system calls only, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            (0..=2).for_each(|fd| {
                // SAFETY: nobody uses them in this child.
                unsafe { libc::close(fd) };
            });
            let held = StandardStreams::hold();
            let other = open("/dev/null", OFlags::RDWR, Mode::empty());
            let is_above = other.is_ok_and(|fd| fd.as_raw_fd() > 2);
            drop(held);
            let low = open("/dev/null", OFlags::RDWR, Mode::empty());
            let is_low = low.as_ref().is_ok_and(|fd| fd.as_raw_fd() == 0);
            let moved = low.ok().and_then(|fd| above_standard_streams(fd).ok());
            let is_moved = moved.is_some_and(|fd| fd.as_raw_fd() > 2);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!(is_above && is_low && is_moved))) };
        }
        let mut status = 0;
        // SAFETY: a child of ours, and a live integer.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
    }
}
