//! Threads that wait in libc for an epoll descriptor without rsockets, when it gets its first one.
//!
//! Such a thread does not know of the set that stands beside the descriptor from then on. So the descriptor gets a bell, an
//! eventfd that is readable, until the last of these threads has left libc.
//!
//! No thread stays behind. A thread is counted before it looks for a set; the set is put down before the count is read. So
//! either the thread sees the set, or it is counted, and the bell stays until it has left.

use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use libc::epoll_event;

use crate::real::{errno, libc_call, set_errno};
use crate::table::{self, MAX, at};

/// The bell's data in its epoll descriptor. No pointer and no small number, which programs use.
const BELL: u64 = 0xb311_5d20_a97e_c31b;

/// Threads that wait in libc, by epoll descriptor.
static WAITING: [AtomicU32; MAX] = [const { AtomicU32::new(0) }; MAX];
/// The bell of an epoll descriptor, plus one; 0: none.
static BELLS: [AtomicI32; MAX] = [const { AtomicI32::new(0) }; MAX];

/// `struct _pthread_cleanup_buffer` of glibc.
#[repr(C)]
struct CleanupBuffer {
    routine: Option<unsafe extern "C" fn(*mut c_void)>,
    argument: *mut c_void,
    cancel_type: c_int,
    previous: *mut CleanupBuffer,
}

unsafe extern "C" {
    fn _pthread_cleanup_push(
        buffer: *mut CleanupBuffer,
        routine: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    );
    fn _pthread_cleanup_pop(buffer: *mut CleanupBuffer, execute: c_int);
}

/// Waits in libc; `None` if a set stands beside the descriptor. A thread may be cancelled in it.
pub(crate) fn wait(epfd: c_int, wait: impl FnOnce() -> c_int) -> Option<c_int> {
    let Some(waiting) = at(&WAITING, epfd) else { return Some(wait()) };
    waiting.fetch_add(1, Ordering::SeqCst);
    if table::set(epfd).is_some() {
        leave(epfd);
        return None;
    }
    let mut buffer = MaybeUninit::<CleanupBuffer>::uninit();
    // SAFETY: the buffer lies on this thread's stack until it is popped. The handler runs instead of what follows, or not.
    let found = unsafe {
        _pthread_cleanup_push(buffer.as_mut_ptr(), cancelled, epfd as usize as *mut c_void);
        let found = wait();
        _pthread_cleanup_pop(buffer.as_mut_ptr(), 0);
        found
    };
    leave(epfd);
    Some(found)
}

unsafe extern "C" fn cancelled(epfd: *mut c_void) {
    leave(epfd as usize as c_int);
}

fn leave(epfd: c_int) {
    let Some(waiting) = at(&WAITING, epfd) else { return };
    // A signal handler may fork while the thread waits, and the child forgets the count.
    let less = |count: u32| count.checked_sub(1);
    if waiting.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less) == Ok(1) {
        silence(epfd);
    }
}

/// The descriptor has got its set, which is put down. False: there is no descriptor for a bell.
pub(crate) fn ring(epfd: c_int) -> bool {
    let (Some(waiting), Some(bell)) = (at(&WAITING, epfd), at(&BELLS, epfd)) else { return true };
    if waiting.load(Ordering::SeqCst) == 0 {
        return true;
    }
    // SAFETY: no pointers.
    let fd = unsafe { libc::eventfd(1, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return false;
    }
    let rung = control(epfd, libc::EPOLL_CTL_ADD, fd) == 0;
    bell.store(fd + 1, Ordering::SeqCst);
    // The last one may have left before there was anything to silence.
    if !rung || waiting.load(Ordering::SeqCst) == 0 {
        silence(epfd);
    }
    rung
}

fn control(epfd: c_int, op: c_int, fd: c_int) -> c_int {
    let mut event = epoll_event { events: libc::EPOLLIN as u32, u64: BELL };
    libc_call!(epoll_ctl(epfd => c_int, op => c_int, fd => c_int, &raw mut event => *mut epoll_event) -> c_int)
}

fn silence(epfd: c_int) {
    let Some(bell) = at(&BELLS, epfd) else { return };
    let fd = bell.swap(0, Ordering::SeqCst) - 1;
    if fd < 0 {
        return;
    }
    let before = errno();
    // Closing it is not enough: a forked child may have it too.
    control(epfd, libc::EPOLL_CTL_DEL, fd);
    libc_call!(close(fd => c_int) -> c_int);
    set_errno(before);
}

/// Takes the bell out of the events that libc found. Returns the number of the others.
///
/// # Safety
/// `events` has `found` entries.
pub(crate) unsafe fn strip(events: *mut epoll_event, found: c_int) -> c_int {
    let mut kept = 0;
    for i in 0..found.max(0) {
        // SAFETY: the caller's promise.
        let event = unsafe { *events.add(i as usize) };
        if { event.u64 } != BELL {
            // SAFETY: as above; `kept` is not above `i`.
            unsafe { *events.add(kept as usize) = event };
            kept += 1;
        }
    }
    if found < 0 { found } else { kept }
}

/// In a forked child, which has counts of its parent's threads. It has no other thread yet: one that it counts itself is never forgotten.
/// Memory that nobody has written to stays so, and takes no room.
pub(crate) fn forget_all() {
    for waiting in WAITING.iter().filter(|waiting| waiting.load(Ordering::Relaxed) != 0) {
        waiting.store(0, Ordering::Relaxed);
    }
    for bell in BELLS.iter().filter(|bell| bell.load(Ordering::Relaxed) != 0) {
        bell.store(0, Ordering::Relaxed);
    }
}
