//! The library's functions.

use core::ffi::{CStr, c_char, c_int, c_void};
use std::ffi::CString;
use std::sync::OnceLock;

use libc::{epoll_event, iovec, msghdr, nfds_t, pollfd, size_t, sockaddr, socklen_t, ssize_t};

macro_rules! functions {
    ($($name:ident: fn($($ty:ty),*) -> $ret:ty;)*) => {
        /// `librdmacm.so.1`, as far as it is used.
        pub(crate) struct Rdma {
            $(pub(crate) $name: unsafe extern "C" fn($($ty),*) -> $ret,)*
        }

        impl Rdma {
            fn load(library: *mut c_void) -> Option<Self> {
                Some(Self {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: a live handle and a NUL-terminated name.
                        let found = unsafe { libc::dlsym(library, name.as_ptr().cast::<c_char>()) };
                        if found.is_null() {
                            return None;
                        }
                        // SAFETY: the library's function of this name has this signature.
                        unsafe { core::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ty),*) -> $ret>(found) }
                    },)*
                })
            }
        }
    };
}

functions! {
    rsocket: fn(c_int, c_int, c_int) -> c_int;
    rbind: fn(c_int, *const sockaddr, socklen_t) -> c_int;
    rlisten: fn(c_int, c_int) -> c_int;
    raccept: fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int;
    rconnect: fn(c_int, *const sockaddr, socklen_t) -> c_int;
    rshutdown: fn(c_int, c_int) -> c_int;
    rclose: fn(c_int) -> c_int;
    rrecv: fn(c_int, *mut c_void, size_t, c_int) -> ssize_t;
    rrecvfrom: fn(c_int, *mut c_void, size_t, c_int, *mut sockaddr, *mut socklen_t) -> ssize_t;
    rrecvmsg: fn(c_int, *mut msghdr, c_int) -> ssize_t;
    rsend: fn(c_int, *const c_void, size_t, c_int) -> ssize_t;
    rsendto: fn(c_int, *const c_void, size_t, c_int, *const sockaddr, socklen_t) -> ssize_t;
    rsendmsg: fn(c_int, *const msghdr, c_int) -> ssize_t;
    rreadv: fn(c_int, *const iovec, c_int) -> ssize_t;
    rwritev: fn(c_int, *const iovec, c_int) -> ssize_t;
    rpoll: fn(*mut pollfd, nfds_t, c_int) -> c_int;
    rgetpeername: fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int;
    rgetsockname: fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int;
    rgetsockopt: fn(c_int, c_int, c_int, *mut c_void, *mut socklen_t) -> c_int;
    rsetsockopt: fn(c_int, c_int, c_int, *const c_void, socklen_t) -> c_int;
    rfcntl: fn(c_int, c_int, c_int) -> c_int;
    repoll_create: fn(c_int) -> c_int;
    repoll_ctl: fn(c_int, c_int, c_int, *mut epoll_event) -> c_int;
    repoll_wait: fn(c_int, *mut epoll_event, c_int, c_int) -> c_int;
}

/// Level of the options of RDMA.
pub(crate) const SOL_RDMA: c_int = 0x10000;
pub(crate) const RDMA_SQSIZE: c_int = 0;
pub(crate) const RDMA_RQSIZE: c_int = 1;
pub(crate) const RDMA_INLINE: c_int = 2;
/// Bytes that can be read at once: of our library, not of rdma-core's.
pub(crate) const RDMA_UNREAD: c_int = 0x100;

static RDMA: OnceLock<Option<Rdma>> = OnceLock::new();

/// The library, loaded at first use; none where it cannot be.
pub(crate) fn load() -> Option<&'static Rdma> {
    RDMA.get_or_init(|| {
        let loaded = path().and_then(|path| {
            // So that its calls of libc do not come to this object, and the device's own sockets stay its own.
            let flags = libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_DEEPBIND;
            // SAFETY: a NUL-terminated path; the library may be loaded at any time.
            let library = unsafe { libc::dlopen(path.as_ptr(), flags) };
            if library.is_null() {
                return None;
            }
            Rdma::load(library)
        });
        if loaded.is_none() {
            let line =
                b"librspreload: librdmacm.so.1 with rsockets is not beside it; sockets stay TCP\n";
            // SAFETY: live bytes.
            unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
        }
        loaded
    })
    .as_ref()
}

/// The library, if there is an rsocket: then it is loaded.
pub(crate) fn rdma() -> Option<&'static Rdma> {
    RDMA.get()?.as_ref()
}

/// The place of `librdmacm.so.1`: beside this object.
fn path() -> Option<CString> {
    // SAFETY: all-zero is a valid Dl_info.
    let mut info: libc::Dl_info = unsafe { core::mem::zeroed() };
    // SAFETY: any address, and a live structure.
    if unsafe { libc::dladdr((path as fn() -> Option<CString>) as *const c_void, &raw mut info) }
        == 0
        || info.dli_fname.is_null()
    {
        return None;
    }
    // SAFETY: dladdr gave a NUL-terminated string that lives as long as this object.
    let own = unsafe { CStr::from_ptr(info.dli_fname) }.to_bytes();
    let directory = own.iter().rposition(|byte| *byte == b'/').map_or(&b"./"[..], |at| &own[..=at]);
    CString::new([directory, b"librdmacm.so.1"].concat()).ok()
}
