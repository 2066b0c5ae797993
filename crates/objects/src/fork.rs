//! State that must not survive `fork`, kept in a page that the kernel gives the child empty.
//!
//! The child sees neither the parent's device nor a lock that another thread of the parent held. `MADV_WIPEONFORK` also
//! covers a raw `clone`, which `pthread_atfork` does not see; on kernels before 4.14 a handler wipes the page.

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::time::Duration;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// All zero at the start, and in every forked child.
#[derive(Debug)]
#[repr(C, align(4096))]
struct Page {
    /// The process's singleton.
    value: AtomicPtr<()>,
    /// The mark that the process's own objects carry.
    owner: AtomicPtr<()>,
    /// Held by the thread that makes it.
    lock: AtomicU32,
}

static PAGE: AtomicPtr<Page> = AtomicPtr::new(ptr::null_mut());

/// The page, made at first use and never unmapped.
fn page() -> io::Result<&'static Page> {
    let page = PAGE.load(Ordering::Acquire);
    if !page.is_null() {
        // SAFETY: only the mapping below is ever stored there, and it is never unmapped.
        return Ok(unsafe { &*page });
    }
    let len = size_of::<Page>();
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new private anonymous mapping touches no existing memory.
    let new = unsafe { mmap_anonymous(ptr::null_mut(), len, prot, MapFlags::PRIVATE) }?;
    // SAFETY: the mapping just made.
    if unsafe { madvise(new, len, Advice::LinuxWipeOnFork) }.is_err() {
        // SAFETY: the handler is an extern "C" function without preconditions.
        unsafe { libc::pthread_atfork(None, None, Some(wipe)) };
    }
    match PAGE.compare_exchange(ptr::null_mut(), new.cast(), Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: a live mapping of a page, zeroed, which is a valid `Page`; never unmapped.
        Ok(_) => Ok(unsafe { &*new.cast::<Page>() }),
        Err(theirs) => {
            // SAFETY: our mapping, which no other thread has seen; theirs is as above.
            unsafe {
                let _ = munmap(new, len);
                Ok(&*theirs)
            }
        }
    }
}

extern "C" fn wipe() {
    if let Ok(page) = page() {
        page.value.store(ptr::null_mut(), Ordering::Relaxed);
        page.owner.store(ptr::null_mut(), Ordering::Relaxed);
        page.lock.store(0, Ordering::Relaxed);
    }
}

/// Whether `owner` is what this process has set with [`set_owner`].
pub(crate) fn is_current<T>(owner: &'static T) -> bool {
    let page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        return false;
    }
    // SAFETY: as in `page`.
    let current = unsafe { &*page }.owner.load(Ordering::Acquire);
    ptr::eq(current.cast_const().cast(), owner)
}

/// Makes `owner` the mark of this process's objects. For the thread that makes the singleton.
pub fn set_owner<T>(owner: &'static T) {
    if let Ok(page) = page() {
        page.owner.store(ptr::from_ref(owner).cast_mut().cast(), Ordering::Release);
    }
}

/// This process's singleton, if it was made. `T` is that of [`singleton`].
pub fn current<T: Sync>() -> Option<&'static T> {
    let page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        return None;
    }
    // SAFETY: as in `page`.
    let value = unsafe { &*page }.value.load(Ordering::Acquire).cast_const().cast::<T>();
    // SAFETY: null, or a leaked box of this type, stored by `singleton`.
    unsafe { value.as_ref() }
}

/// Pause, in microseconds, before another look at whether another thread has made it, which takes milliseconds. A thread that looks
/// so often takes little of the processor that the other one needs (in `anyverbs`,
/// `device::tests::threads_that_start_at_once_share_the_device`).
const PAUSE: Duration = Duration::from_micros(200);

/// A singleton, and that of the parent process, if this one was forked.
struct Root<T> {
    value: T,
    _before: *mut (),
}

/// The last [`Root`]. LeakSanitizer looks for pointers in static variables, and not in the page.
static ROOT: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());

/// This process's singleton, made by `make` where there is none; it then lives until the process ends. One `T` only.
pub fn singleton<T: Sync, E: From<io::Error>>(
    make: impl FnOnce() -> Result<T, E>,
) -> Result<&'static T, E> {
    let page = page()?;
    let existing = || {
        let value = page.value.load(Ordering::Acquire).cast_const().cast::<T>();
        // SAFETY: null, or a leaked box of this type, stored below.
        unsafe { value.as_ref() }
    };
    loop {
        if let Some(value) = existing() {
            return Ok(value);
        }
        if page.lock.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    let result = match existing() {
        Some(value) => Ok(value),
        None => make().map(|value| {
            let before = ROOT.load(Ordering::Relaxed);
            let root: &'static Root<T> = Box::leak(Box::new(Root { value, _before: before }));
            ROOT.store(ptr::from_ref(root).cast_mut().cast(), Ordering::Relaxed);
            let value = &root.value;
            page.value.store(ptr::from_ref(value).cast_mut().cast(), Ordering::Release);
            value
        }),
    };
    page.lock.store(0, Ordering::Release);
    result
}
