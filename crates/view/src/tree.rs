//! The directory that the view is answered from: `ANYVERBS_VIEW`, read once.

use core::cell::UnsafeCell;
use core::ffi::{c_char, c_int};
use core::mem::{size_of, zeroed};
use core::slice;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

/// Longest accepted directory, so that directory and path fit in one `PATH_MAX` buffer.
const DIR_MAX: usize = 1024;

const UNREAD: u8 = 0;
const READING: u8 = 1;
const OFF: u8 = 2;
const ON: u8 = 3;

struct Dir {
    state: AtomicU8,
    len: AtomicUsize,
    bytes: UnsafeCell<[u8; DIR_MAX]>,
    /// Whether a PCI bus is in it.
    pci: AtomicBool,
}

// SAFETY: `bytes` is written by the one thread that moved `state` from UNREAD to READING, and read only after ON was
// seen with Acquire.
unsafe impl Sync for Dir {}

static DIR: Dir = Dir {
    state: AtomicU8::new(UNREAD),
    len: AtomicUsize::new(0),
    bytes: UnsafeCell::new([0; DIR_MAX]),
    pci: AtomicBool::new(false),
};

/// Whether a PCI bus is in the tree. It is known when [`dir`] has answered.
#[inline]
pub(crate) fn has_pci() -> bool {
    DIR.pci.load(Ordering::Relaxed)
}

/// The file in the tree that says so.
const PCI_MARK: &[u8] = b"/.pci";

/// Looks for that file. It goes past libc's functions, since this object's own would wait for this very thread. Keeps `errno`.
fn find_pci(dir: &[u8]) -> bool {
    let mut path = [0u8; DIR_MAX + PCI_MARK.len() + 1];
    path[..dir.len()].copy_from_slice(dir);
    path[dir.len()..dir.len() + PCI_MARK.len()].copy_from_slice(PCI_MARK);
    // SAFETY: errno is valid, and the path ends in a NUL.
    unsafe {
        let errno = *libc::__errno_location();
        let found =
            libc::syscall(libc::SYS_faccessat, libc::AT_FDCWD, path.as_ptr(), libc::F_OK) == 0;
        *libc::__errno_location() = errno;
        found
    }
}

/// The tree's directory without a trailing slash, or `None` when no view was asked for.
#[inline]
pub(crate) fn dir() -> Option<&'static [u8]> {
    let mut state = DIR.state.load(Ordering::Acquire);
    if state < OFF {
        state = init();
    }
    if state == ON {
        // SAFETY: ON was published after the bytes and the length were written, and neither changes again.
        Some(unsafe {
            slice::from_raw_parts(DIR.bytes.get().cast::<u8>(), DIR.len.load(Ordering::Relaxed))
        })
    } else {
        None
    }
}

/// Reads the variable, once per process.
///
/// The value is copied because programs overwrite their environment (`setproctitle`).
#[cold]
pub(crate) fn init() -> u8 {
    if DIR.state.compare_exchange(UNREAD, READING, Ordering::Acquire, Ordering::Acquire).is_err() {
        loop {
            match DIR.state.load(Ordering::Acquire) {
                READING => core::hint::spin_loop(),
                state => return state,
            }
        }
    }
    let value = if anyverbs_environment::is_privileged() {
        core::ptr::null_mut()
    } else {
        #[expect(clippy::disallowed_methods, reason = "a privileged program does not get here")]
        // SAFETY: the name is a NUL-terminated string.
        unsafe {
            libc::getenv(c"ANYVERBS_VIEW".as_ptr())
        }
    };
    let state = if value.is_null() {
        OFF
    } else {
        // SAFETY: getenv returned a NUL-terminated string, which no other thread changes this early.
        let bytes = unsafe { core::ffi::CStr::from_ptr(value) }.to_bytes();
        let mut len = bytes.len();
        while len > 1 && bytes[len - 1] == b'/' {
            len -= 1;
        }
        if bytes.is_empty() {
            OFF
        } else if bytes[0] != b'/' || len >= DIR_MAX {
            let line = b"anyverbs: ANYVERBS_VIEW must be an absolute path of less than 1024 bytes; showing no device in /sys and /dev\n";
            // SAFETY: the buffer is a constant of that length. If standard error is closed, the message is lost.
            unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
            OFF
        } else {
            // SAFETY: this thread alone is between READING and ON; `len` is below DIR_MAX.
            unsafe { (&mut *DIR.bytes.get())[..len].copy_from_slice(&bytes[..len]) };
            DIR.len.store(len, Ordering::Relaxed);
            DIR.pci.store(find_pci(&bytes[..len]), Ordering::Relaxed);
            ON
        }
    };
    DIR.state.store(state, Ordering::Release);
    state
}

/// The socket in the tree at which the launcher makes the files fresh that change.
const SOCKET: &[u8] = b"/.fresh";
/// Longest wait for that, in milliseconds.
const PATIENCE: c_int = 500;

/// Has the launcher write the files anew that change. Without an answer they are old. Keeps `errno`.
#[cold]
pub(crate) fn refresh() {
    let Some(dir) = dir() else { return };
    // SAFETY: errno is valid, and `sockaddr_un` is plain data.
    let (errno, mut address) =
        unsafe { (*libc::__errno_location(), zeroed::<libc::sockaddr_un>()) };
    address.sun_family = libc::AF_UNIX as u16;
    let path = dir.iter().chain(SOCKET);
    // A NUL has to follow.
    if dir.len() + SOCKET.len() >= address.sun_path.len() {
        return;
    }
    for (to, from) in address.sun_path.iter_mut().zip(path) {
        *to = *from as c_char;
    }
    // SAFETY: live values of their lengths; the descriptor is this function's own. `socket` keeps libc's contract.
    unsafe {
        // A launcher that is stopped, and has many questions, accepts no more.
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let fd = crate::netlink::socket(libc::AF_UNIX, kind, 0);
        if fd >= 0 {
            let len = size_of::<libc::sockaddr_un>() as libc::socklen_t;
            if libc::connect(fd, (&raw const address).cast(), len) == 0 {
                let mut entry = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
                libc::poll(&raw mut entry, 1, PATIENCE);
            }
            libc::close(fd);
        }
        *libc::__errno_location() = errno;
    }
}
