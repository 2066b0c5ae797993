//! The sockets by descriptor.

use std::os::fd::RawFd;
use std::sync::{Arc, Once};
use std::time::Instant;

use anyverbs::AT_EXIT;
use parking_lot::RwLock;

use crate::dgram::Dgram;
use crate::errno::{Errno, Result};
use crate::fork::{Handlers, OfProcess};
use crate::repoll::Repoll;
use crate::socket::{Kind, Socket};
use crate::stream::{AF_IB, Stream};

#[derive(Clone, Debug)]
enum Entry {
    Socket(Arc<Socket>),
    Epoll(Arc<Repoll>),
}

/// The sockets by descriptor.
type Table = RwLock<Vec<Option<Entry>>>;

static TABLE: OfProcess<Table> = OfProcess::new();

/// A forked child has the descriptors as well, and closes them.
fn table() -> &'static Table {
    TABLE.get(Handlers {
        before: Some(before_fork),
        in_parent: Some(after_fork),
        in_child: Some(in_child),
    })
}

/// Keeps the table whole across the fork. Nothing else is locked while a thread has it.
unsafe extern "C" fn before_fork() {
    std::mem::forget(table().write());
}

unsafe extern "C" fn after_fork() {
    // SAFETY: `before_fork` locked it, in this thread.
    unsafe { table().force_unlock_write() };
}

unsafe extern "C" fn in_child() {
    // SAFETY: `before_fork` holds the lock, and the child has no other thread.
    let entries = std::mem::take(unsafe { &mut *table().data_ptr() });
    TABLE.begin_anew(RwLock::new(entries));
}

fn find(fd: RawFd) -> Option<Entry> {
    table().read().get(usize::try_from(fd).ok()?)?.clone()
}

fn insert(fd: RawFd, entry: Entry) {
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(|| {
        // SAFETY: a function without preconditions. Registered after the device's own, it runs before that.
        unsafe { libc::atexit(at_exit) };
    });
    let at = usize::try_from(fd).expect("an open descriptor is not negative");
    let mut table = table().write();
    if table.len() <= at {
        table.resize(at + 1, None);
    }
    let old = table[at].replace(entry);
    drop(table);
    // Its descriptor was closed behind our back: dropping it would close ours.
    if let Some(Entry::Socket(old)) = old {
        std::mem::forget(old);
    }
}

/// Disconnects the streams that are still open, as the system does for a process that ends. Waits until peers have all
/// data sent, for [`AT_EXIT`] at most.
extern "C" fn at_exit() {
    let deadline = Instant::now() + AT_EXIT;
    // The caller may hold it.
    let Some(mut table) = table().try_write_until(deadline) else { return };
    let entries = std::mem::take(&mut *table);
    drop(table);
    for entry in entries.into_iter().flatten() {
        if let Entry::Socket(socket) = &entry
            && !socket.is_inherited()
        {
            socket.close_by(deadline);
        }
        // Other threads may be in the middle of a call.
        std::mem::forget(entry);
    }
}

/// `socket(2)`: `AF_INET` and `AF_INET6`, `SOCK_STREAM` and `SOCK_DGRAM`; streams of `AF_IB` too. `SOCK_NONBLOCK` and
/// `SOCK_CLOEXEC` may be added.
///
/// # Errors
/// `EAFNOSUPPORT`, `EPROTONOSUPPORT`, `EMFILE`, and the device's error if it cannot be opened.
pub fn socket(domain: i32, kind: i32, protocol: i32) -> Result<RawFd> {
    let close_on_exec = kind & libc::SOCK_CLOEXEC != 0;
    let nonblocking = kind & libc::SOCK_NONBLOCK != 0;
    let kind = kind & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK);
    if !matches!(domain, libc::AF_INET | libc::AF_INET6 | AF_IB) {
        return Err(Errno(libc::EAFNOSUPPORT));
    }
    let kind = match (kind, protocol) {
        (libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) => {
            Kind::Stream(Stream::new(domain, close_on_exec)?)
        }
        (libc::SOCK_DGRAM, 0 | libc::IPPROTO_UDP) if domain != AF_IB => {
            Kind::Dgram(Dgram::new(domain, close_on_exec)?)
        }
        _ => return Err(Errno(libc::EPROTONOSUPPORT)),
    };
    let socket = Socket::new(kind);
    socket.set_nonblocking(nonblocking);
    let fd = socket.fd();
    insert(fd, Entry::Socket(Arc::new(socket)));
    Ok(fd)
}

/// The socket that a descriptor names.
///
/// # Errors
/// `EBADF`.
pub fn get(fd: RawFd) -> Result<Arc<Socket>> {
    match find(fd) {
        Some(Entry::Socket(socket)) => Ok(socket),
        _ => Err(Errno(libc::EBADF)),
    }
}

/// Whether a descriptor names a socket of ours.
#[must_use]
pub fn is_socket(fd: RawFd) -> bool {
    matches!(find(fd), Some(Entry::Socket(_)))
}

/// `accept4(2)`, with the flags of [`socket`]: the new socket's descriptor.
///
/// # Errors
/// As that call's.
pub fn accept(socket: &Socket, flags: i32) -> Result<RawFd> {
    if flags & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) != 0 {
        return Err(Errno(libc::EINVAL));
    }
    let Kind::Stream(listener) = &socket.kind else { return Err(Errno(libc::EOPNOTSUPP)) };
    let new = Socket::new(Kind::Stream(listener.accept(flags & libc::SOCK_CLOEXEC != 0)?));
    new.set_nonblocking(flags & libc::SOCK_NONBLOCK != 0);
    let fd = new.fd();
    insert(fd, Entry::Socket(Arc::new(new)));
    Ok(fd)
}

/// `close(2)`. A connected stream sends its disconnect message and waits until the peer's device has all data sent. The
/// wait is as long as `SO_LINGER` says, or ten seconds.
///
/// # Errors
/// `EBADF`.
pub fn close(fd: RawFd) -> Result<()> {
    let at = usize::try_from(fd).map_err(|_| Errno(libc::EBADF))?;
    let entry = table().write().get_mut(at).and_then(Option::take);
    match entry.ok_or(Errno(libc::EBADF))? {
        Entry::Socket(socket) if socket.is_inherited() => {
            // The parent's objects: their locks may be held for ever here.
            std::mem::forget(socket);
            // SAFETY: the descriptor was the socket's, which is gone from the table and never dropped.
            unsafe { libc::close(fd) };
        }
        Entry::Socket(socket) => socket.close(),
        Entry::Epoll(epoll) if epoll.is_inherited() => {
            for fd in epoll.descriptors() {
                // SAFETY: the set is gone from the table and never dropped.
                unsafe { libc::close(fd) };
            }
            std::mem::forget(epoll);
        }
        Entry::Epoll(epoll) => drop(epoll),
    }
    Ok(())
}

/// `epoll_create1(2)`: the descriptor of a new [`Repoll`].
///
/// # Errors
/// `EMFILE`, `ENFILE`.
pub fn make_epoll(close_on_exec: bool) -> Result<RawFd> {
    let epoll = Arc::new(Repoll::new(close_on_exec)?);
    let fd = epoll.fd();
    insert(fd, Entry::Epoll(epoll));
    Ok(fd)
}

/// The [`Repoll`] that a descriptor names.
///
/// # Errors
/// `EBADF`.
pub fn get_epoll(fd: RawFd) -> Result<Arc<Repoll>> {
    match find(fd) {
        Some(Entry::Epoll(epoll)) => Ok(epoll),
        _ => Err(Errno(libc::EBADF)),
    }
}
