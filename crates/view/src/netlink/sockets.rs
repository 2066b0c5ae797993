//! The descriptors that are RDMA netlink sockets: as many as a program opens.
//!
//! `rdma` opens a socket for each question, and closes none. There is a place for each descriptor that there can be. The places of
//! neighbours are made together, with the first of them, and stay.

use core::ffi::c_int;
use core::mem::{size_of, zeroed};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use super::dump::Rest;
use crate::answer::set_errno;

/// Descriptors are below this number: the most that Linux lets a process have, if nobody raises `fs.nr_open`.
const DESCRIPTORS: usize = 1 << 20;
/// Places that are made together.
const TOGETHER: usize = 256;

/// The knowledge of a descriptor. It is all zeros if there is none.
pub(super) struct Socket {
    /// Descriptor and inode, so that a number which was closed and given out again is not taken for the socket. 0: none.
    entry: AtomicU64,
    /// The rest of its dump.
    pub(super) rest: Rest,
}

type Together = [Socket; TOGETHER];

static PLACES: [AtomicPtr<Together>; DESCRIPTORS / TOGETHER] =
    [const { AtomicPtr::new(null_mut()) }; DESCRIPTORS / TOGETHER];

pub(super) const fn entry(fd: c_int, inode: u64) -> u64 {
    (inode << 20) | (fd as u64 & 0xf_ffff)
}

pub(super) fn inode(fd: c_int) -> Option<u64> {
    // SAFETY: `stat` is plain data, and fstat writes one.
    unsafe {
        let mut stat: libc::stat = zeroed();
        (libc::fstat(fd, &raw mut stat) == 0).then_some(stat.st_ino)
    }
}

/// The place of a descriptor, if it was made.
#[inline]
pub(super) fn place(fd: c_int) -> Option<&'static Socket> {
    let at = usize::try_from(fd).ok()?;
    let together = PLACES.get(at / TOGETHER)?.load(Ordering::Acquire);
    // SAFETY: what is published is whole, and nobody frees it.
    unsafe { Some(&together.as_ref()?[at % TOGETHER]) }
}

/// The place of a descriptor, made if it is the first of its neighbours.
fn make_place(fd: c_int) -> Option<&'static Socket> {
    let at = usize::try_from(fd).ok()?;
    let places = PLACES.get(at / TOGETHER)?;
    if places.load(Ordering::Acquire).is_null() {
        let (len, access) = (size_of::<Together>(), libc::PROT_READ | libc::PROT_WRITE);
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new memory, whose zeros are places of which nothing is known. What another thread has published first stays.
        unsafe {
            let new = libc::mmap(null_mut(), len, access, kind, -1, 0);
            if new == libc::MAP_FAILED {
                return None;
            }
            let order = (Ordering::AcqRel, Ordering::Acquire);
            if places.compare_exchange(null_mut(), new.cast(), order.0, order.1).is_err() {
                libc::munmap(new, len);
            }
        }
    }
    place(fd)
}

/// Whether a descriptor is such a socket. Keeps `errno`.
#[inline]
pub(super) fn is_ours(fd: c_int) -> bool {
    let Some(socket) = place(fd) else { return false };
    let known = socket.entry.load(Ordering::Relaxed);
    known != 0 && (is_still(fd, known) || forget(socket, known))
}

/// The socket was closed, and its number is another file's. False, for this one is not ours.
#[cold]
fn forget(socket: &Socket, known: u64) -> bool {
    // Another thread may have got the number back for a new one.
    let (done, order) = (Ordering::Relaxed, Ordering::Relaxed);
    if socket.entry.compare_exchange(known, 0, done, order).is_ok() {
        socket.rest.drop_of(known);
    }
    false
}

#[cold]
pub(super) fn is_still(fd: c_int, known: u64) -> bool {
    // SAFETY: libc gives every thread a valid errno.
    let errno = unsafe { *libc::__errno_location() };
    let found = inode(fd).map(|inode| entry(fd, inode));
    set_errno(errno);
    found == Some(known)
}

/// Remembers a new socket. False: there is no memory for it.
pub(super) fn remember(fd: c_int) -> bool {
    let (Some(inode), Some(socket)) = (inode(fd), make_place(fd)) else { return false };
    // The one that had this number before.
    let old = socket.entry.swap(entry(fd, inode), Ordering::Relaxed);
    if old != 0 {
        socket.rest.drop_of(old);
    }
    true
}
