//! The rsockets that stand beside descriptors.
//!
//! Fixed arrays, by descriptor. Nothing is allocated or locked, and unused pages take no memory.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

use libc::{epoll_event, sockaddr_storage, socklen_t};

use crate::bell;
use crate::rdma::rdma;

/// Descriptors from this on are never taken.
pub(crate) const MAX: usize = 1 << 16;

/// The rsocket of a descriptor, plus one; 0: none.
static SOCKETS: [AtomicI32; MAX] = [const { AtomicI32::new(0) }; MAX];
/// The number of descriptors that an rsocket stands beside.
static HOLDERS: [AtomicU32; MAX] = [const { AtomicU32::new(0) }; MAX];
/// The set of rsockets beside an epoll descriptor, plus one; 0: none.
static SETS: [AtomicI32; MAX] = [const { AtomicI32::new(0) }; MAX];
/// Its connect is under way, and TCP is tried when it fails.
static CONNECTING: [AtomicBool; MAX] = [const { AtomicBool::new(false) }; MAX];
/// A lower bound of their number.
static ANY_CONNECTING: AtomicU32 = AtomicU32::new(0);
/// Their targets, and the epoll sets that report them.
static PLANS: Plans = Plans([const { UnsafeCell::new(Plan::new()) }; MAX]);
/// Whether this process is the child of one that had rsockets: they are not its own.
static FORKED: AtomicBool = AtomicBool::new(false);
static OWNER: AtomicI32 = AtomicI32::new(0);

/// The data to connect by TCP instead. All zero where there is none, so that the array takes no room in the file.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Plan {
    pub(crate) to: Address,
    /// The address that the program bound the socket to.
    pub(crate) bound: Address,
    /// The epoll descriptor, plus one, and its registered event.
    pub(crate) epoll: c_int,
    pub(crate) event: epoll_event,
}

/// A program's address; none where the length is 0.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Address {
    pub(crate) storage: sockaddr_storage,
    pub(crate) len: socklen_t,
}

impl Plan {
    /// An empty plan.
    pub(crate) const fn new() -> Self {
        // SAFETY: integers and bytes.
        unsafe { core::mem::zeroed() }
    }
}

struct Plans([UnsafeCell<Plan>; MAX]);

// SAFETY: the thread that connects a descriptor or adds it to a set writes its entry, and the thread that waits for it
// reads it. A program that does these in several threads at once for one descriptor has no right order either way, and
// the entry is plain bytes.
unsafe impl Sync for Plans {}

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
    bell::forget_all();
}

pub(crate) fn init() {
    // SAFETY: no preconditions.
    OWNER.store(unsafe { libc::getpid() }, Ordering::Relaxed);
    // SAFETY: an extern "C" function without preconditions.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
}

/// Whether this is a child made by `vfork`, which has its parent's memory but is not it.
fn is_borrowed() -> bool {
    // SAFETY: no preconditions.
    OWNER.load(Ordering::Relaxed) != unsafe { libc::getpid() }
}

pub(crate) fn at<T>(array: &'static [T; MAX], fd: c_int) -> Option<&'static T> {
    array.get(usize::try_from(fd).ok()?)
}

/// The rsocket beside a descriptor.
#[inline]
pub(crate) fn get(fd: c_int) -> Option<c_int> {
    let socket = at(&SOCKETS, fd)?.load(Ordering::Acquire);
    if socket == 0 || FORKED.load(Ordering::Relaxed) { None } else { Some(socket - 1) }
}

/// Puts an rsocket beside a descriptor. False: that cannot be.
pub(crate) fn put(fd: c_int, socket: c_int) -> bool {
    let (Some(entry), Some(holders)) = (at(&SOCKETS, fd), at(&HOLDERS, socket)) else {
        return false;
    };
    // A child makes sockets of its own. Inherited ones are forgotten.
    if FORKED.swap(false, Ordering::Relaxed) {
        forget_all();
    }
    holders.fetch_add(1, Ordering::AcqRel);
    set_plan(fd, Plan::new());
    entry.store(socket + 1, Ordering::Release);
    true
}

fn forget_all() {
    // SAFETY: no preconditions.
    OWNER.store(unsafe { libc::getpid() }, Ordering::Relaxed);
    SOCKETS.iter().for_each(|entry| entry.store(0, Ordering::Relaxed));
    HOLDERS.iter().for_each(|count| count.store(0, Ordering::Relaxed));
    SETS.iter().for_each(|entry| entry.store(0, Ordering::Relaxed));
    CONNECTING.iter().for_each(|entry| entry.store(false, Ordering::Relaxed));
    ANY_CONNECTING.store(0, Ordering::Relaxed);
}

/// Another descriptor for the same socket.
pub(crate) fn share(from: c_int, to: c_int) {
    if let Some(socket) = get(from)
        && !is_borrowed()
    {
        put(to, socket);
    }
}

/// A descriptor is about to be closed, or is TCP's alone from now on: the rsocket ends with its last one.
pub(crate) fn remove(fd: c_int) {
    let Some(entry) = at(&SOCKETS, fd) else { return };
    if entry.load(Ordering::Acquire) == 0 || is_borrowed() {
        return remove_set(fd);
    }
    let socket = entry.swap(0, Ordering::AcqRel) - 1;
    set_connecting(fd, false);
    if socket < 0 || FORKED.load(Ordering::Relaxed) {
        return;
    }
    let Some(holders) = at(&HOLDERS, socket) else { return };
    if holders.fetch_sub(1, Ordering::AcqRel) == 1
        && let Some(rdma) = rdma()
    {
        // SAFETY: the rsocket is ours, and no longer used.
        unsafe { (rdma.rclose)(socket) };
    }
}

/// The set of rsockets beside an epoll descriptor.
#[inline]
pub(crate) fn set(epfd: c_int) -> Option<c_int> {
    let set = at(&SETS, epfd)?.load(Ordering::SeqCst);
    if set == 0 || FORKED.load(Ordering::Relaxed) { None } else { Some(set - 1) }
}

/// Puts a set beside an epoll descriptor. False: that cannot be, or there is one.
pub(crate) fn put_set(epfd: c_int, set: c_int) -> bool {
    at(&SETS, epfd).is_some_and(|entry| {
        entry.compare_exchange(0, set + 1, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    })
}

pub(crate) fn remove_set(epfd: c_int) {
    let Some(entry) = at(&SETS, epfd) else { return };
    if entry.load(Ordering::Acquire) == 0 || is_borrowed() {
        return;
    }
    let set = entry.swap(0, Ordering::AcqRel) - 1;
    if set >= 0
        && !FORKED.load(Ordering::Relaxed)
        && let Some(rdma) = rdma()
    {
        // SAFETY: the set is ours, and no longer used.
        unsafe { (rdma.rclose)(set) };
    }
}

/// Whether a descriptor's connect is under way.
pub(crate) fn is_connecting(fd: c_int) -> bool {
    ANY_CONNECTING.load(Ordering::Relaxed) > 0
        && at(&CONNECTING, fd).is_some_and(|entry| entry.load(Ordering::Acquire))
}

pub(crate) fn set_connecting(fd: c_int, on: bool) {
    let Some(entry) = at(&CONNECTING, fd) else { return };
    if entry.swap(on, Ordering::AcqRel) != on {
        if on {
            ANY_CONNECTING.fetch_add(1, Ordering::AcqRel);
        } else {
            ANY_CONNECTING.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// The data to connect by TCP.
pub(crate) fn plan(fd: c_int) -> Plan {
    let cell = usize::try_from(fd).ok().and_then(|fd| PLANS.0.get(fd));
    // SAFETY: see `Plans`.
    cell.map_or_else(Plan::new, |cell| unsafe { *cell.get() })
}

pub(crate) fn set_plan(fd: c_int, plan: Plan) {
    if let Some(cell) = usize::try_from(fd).ok().and_then(|fd| PLANS.0.get(fd)) {
        // SAFETY: see `Plans`.
        unsafe { *cell.get() = plan };
    }
}

/// A descriptor that connects and that this set reports with this data.
pub(crate) fn connecting_with(epfd: c_int, data: u64) -> Option<c_int> {
    let mut left = ANY_CONNECTING.load(Ordering::Relaxed);
    for (fd, entry) in CONNECTING.iter().enumerate() {
        if left == 0 {
            break;
        }
        if entry.load(Ordering::Acquire) {
            left -= 1;
            let fd = fd as c_int;
            let plan = plan(fd);
            if plan.epoll == epfd + 1 && { plan.event.u64 } == data {
                return Some(fd);
            }
        }
    }
    None
}
