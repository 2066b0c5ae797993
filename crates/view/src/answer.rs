//! Turns a caller's path into the path that libc gets.

use core::ffi::{CStr, c_char, c_int};
use core::sync::atomic::{AtomicBool, Ordering};

use anyverbs_sanitizers::Quiet;

use crate::path::{self, Inside};
use crate::tree;

/// A buffer for a translated path: on the stack of a call that is known to concern the view.
const PATH_MAX: usize = libc::PATH_MAX as usize;

/// Sets `errno`.
pub(crate) fn set_errno(value: c_int) {
    // SAFETY: libc gives every thread a valid errno.
    unsafe { *libc::__errno_location() = value };
}

/// The caller's path if it lies in the view, with the view's directory.
///
/// # Safety
/// `path` is null or a NUL-terminated string that outlives the call which it was given to.
#[inline]
pub(crate) unsafe fn inside<'a>(
    at: c_int,
    path: *const c_char,
) -> Option<(&'static [u8], Inside<'a>)> {
    let dir = tree::dir()?;
    if path.is_null() {
        return None;
    }
    // MemorySanitizer does not know who has written a path that comes from a library without it.
    let _quiet = Quiet::new();
    // SAFETY: the caller's promise.
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
    let inside = path::find(bytes, tree::has_pci())?;
    // A relative path belongs to the view if it is looked up from `/` (hwloc opens `/` and goes on from there).
    if bytes[0] != b'/' && !is_root(at) {
        return None;
    }
    Some((dir, inside))
}

/// Calls `f` with `path`, or with its place in the tree.
///
/// # Safety
/// As [`inside`].
#[inline]
pub(crate) unsafe fn translated<R>(
    at: c_int,
    path: *const c_char,
    fails: R,
    f: impl FnOnce(*const c_char) -> R,
) -> R {
    // SAFETY: the caller's promise.
    match unsafe { inside(at, path) } {
        None => {
            if MAY_BE_INSIDE.load(Ordering::Relaxed) {
                // SAFETY: the caller's promise.
                unsafe { freshen(at, path) };
            }
            f(path)
        }
        Some((dir, inside)) => in_tree(dir, inside, fails, f),
    }
}

/// Whether this program began in the tree, or has changed or opened a directory of it. Else a relative path needs no look. A directory
/// that another program opened and handed over is not known.
static MAY_BE_INSIDE: AtomicBool = AtomicBool::new(false);

/// The process starts, perhaps in a directory of the tree.
pub(crate) fn init() {
    let Some(dir) = tree::dir() else { return };
    let mut buffer = [0u8; PATH_MAX];
    if place_of(libc::AT_FDCWD, &mut buffer).is_some_and(|len| buffer[..len].starts_with(dir)) {
        MAY_BE_INSIDE.store(true, Ordering::Relaxed);
    }
}

/// Makes the file fresh that a relative path names, if it lies in the tree and changes. Keeps `errno`.
///
/// # Safety
/// As [`inside`].
#[cold]
#[inline(never)]
unsafe fn freshen(at: c_int, path: *const c_char) {
    let Some(dir) = tree::dir() else { return };
    if path.is_null() {
        return;
    }
    let quiet = Quiet::new();
    // SAFETY: the caller's promise.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    if path.first() == Some(&b'/') {
        return;
    }
    let mut buffer = [0u8; PATH_MAX];
    let Some(len) = place_of(at, &mut buffer) else { return };
    let end = len + 1 + path.len();
    if !buffer[..len].starts_with(dir) || end > buffer.len() {
        return;
    }
    buffer[len] = b'/';
    buffer[len + 1..end].copy_from_slice(path);
    let changes = path::changes(&buffer[dir.len()..end]);
    // Not around a call where the thread may be cancelled.
    drop(quiet);
    if changes {
        tree::refresh();
    }
}

/// Writes the path of an open directory, or of the working directory for `AT_FDCWD`. It goes past libc's functions, since this
/// object's own would take the tree off the path. Keeps `errno`.
fn place_of(at: c_int, buffer: &mut [u8; PATH_MAX]) -> Option<usize> {
    // SAFETY: errno is valid, and each call gets a buffer of its length and a NUL-terminated path.
    unsafe {
        let errno = *libc::__errno_location();
        let len = if at == libc::AT_FDCWD {
            // The length has the NUL.
            libc::syscall(libc::SYS_getcwd, buffer.as_mut_ptr(), buffer.len()) - 1
        } else {
            let link = link_of(at);
            libc::syscall(
                libc::SYS_readlinkat,
                libc::AT_FDCWD,
                link.as_ptr(),
                buffer.as_mut_ptr(),
                buffer.len(),
            )
        };
        set_errno(errno);
        usize::try_from(len).ok().filter(|len| *len > 0)
    }
}

/// `/proc/self/fd/<fd>` and a NUL.
fn link_of(fd: c_int) -> [u8; 32] {
    const PREFIX: &[u8] = b"/proc/self/fd/";
    let mut link = [0; 32];
    link[..PREFIX.len()].copy_from_slice(PREFIX);
    let digits = fd.unsigned_abs().checked_ilog10().map_or(1, |log| log as usize + 1);
    let mut rest = fd.unsigned_abs();
    for digit in link[PREFIX.len()..PREFIX.len() + digits].iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    link
}

/// The slow half of [`translated`], apart from it so that other calls do not carry its buffer.
#[cold]
#[inline(never)]
pub(crate) fn in_tree<R>(
    dir: &[u8],
    inside: Inside<'_>,
    fails: R,
    f: impl FnOnce(*const c_char) -> R,
) -> R {
    MAY_BE_INSIDE.store(true, Ordering::Relaxed);
    let mut buffer = [0u8; PATH_MAX];
    // Not around the calls of libc: a thread may be cancelled there.
    let (changes, fits) = {
        let _quiet = Quiet::new();
        (path::changes(inside.rest), inside.write_below(dir, &mut buffer).is_some())
    };
    if changes {
        tree::refresh();
    }
    if !fits {
        set_errno(libc::ENAMETOOLONG);
        return fails;
    }
    f(buffer.as_ptr().cast())
}

/// Whether a directory descriptor (or the working directory, for `AT_FDCWD`) is `/`. Keeps `errno`.
#[cold]
fn is_root(at: c_int) -> bool {
    // SAFETY: errno is valid, `stat` is plain data, and each call gets a NUL-terminated path and a buffer. `fstat` is
    // not defined by this object; `stat` is, and answers for "/" and "." without coming back here.
    unsafe {
        let errno = *libc::__errno_location();
        let mut base: libc::stat = core::mem::zeroed();
        let mut root: libc::stat = core::mem::zeroed();
        let found = if at == libc::AT_FDCWD {
            libc::stat(c".".as_ptr(), &mut base)
        } else {
            libc::fstat(at, &mut base)
        };
        let same = found == 0
            && libc::stat(c"/".as_ptr(), &mut root) == 0
            && (base.st_dev, base.st_ino) == (root.st_dev, root.st_ino);
        set_errno(errno);
        same
    }
}

/// Takes the tree's directory off the front of a path that libc produced, in place.
///
/// # Safety
/// `path` is null or a NUL-terminated string in memory that may be written.
pub(crate) unsafe fn strip(path: *mut c_char) {
    let Some(dir) = tree::dir() else { return };
    if path.is_null() {
        return;
    }
    let _quiet = Quiet::new();
    // SAFETY: the caller's promise; the borrow ends before the memory is written.
    let (prefixed, len) = unsafe {
        let bytes = CStr::from_ptr(path).to_bytes();
        (
            bytes
                .strip_prefix(dir)
                .is_some_and(|rest| path::find(rest, tree::has_pci()).is_some() && rest[0] == b'/'),
            bytes.len(),
        )
    };
    if prefixed {
        // SAFETY: moves the tail, NUL included, to the front of the same string.
        unsafe { core::ptr::copy(path.add(dir.len()), path, len - dir.len() + 1) };
    }
}
