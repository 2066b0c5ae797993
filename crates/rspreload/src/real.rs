//! libc's own functions behind the ones that this object defines.

use core::ffi::{CStr, c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

/// A libc function found with `dlsym(RTLD_NEXT)`.
pub(crate) struct Real {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Real {
    const fn new(name: &'static CStr) -> Self {
        Real { name, address: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The function's address, or null if this libc has no such function.
    pub(crate) fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if known.is_null() { self.resolve() } else { known }
    }

    /// Looks the function up and remembers it. Idempotent: racing threads store the same value.
    #[cold]
    pub(crate) fn resolve(&self) -> *mut c_void {
        // SAFETY: the name is a NUL-terminated string; dlsym may be called at any time after relocation.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Ordering::Relaxed);
        found
    }
}

macro_rules! reals {
    ($($name:ident)*) => {
        $(
            #[expect(non_upper_case_globals, reason = "named as the function that it stands for")]
            pub(crate) static $name: Real = Real::new(match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a Rust identifier holds no NUL"),
            });
        )*
        /// Every function above.
        pub(crate) static ALL: &[&Real] = &[$(&$name),*];
    };
}

reals! {
    socket bind listen accept accept4 connect shutdown close
    recv recvfrom recvmsg recvmmsg read readv send sendto sendmsg sendmmsg write writev sendfile
    poll ppoll select pselect epoll_ctl epoll_wait epoll_pwait epoll_pwait2
    getpeername getsockname getsockopt setsockopt fcntl ioctl dup dup2 dup3 close_range
}

pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: glibc gives every thread a valid `errno` location.
    unsafe { *libc::__errno_location() = errno };
}

pub(crate) fn errno() -> c_int {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() }
}

/// Calls libc's function, or fails the call with `ENOSYS` where there is none.
macro_rules! libc_call {
    ($name:ident($($arg:expr => $ty:ty),*) -> $ret:ty) => {{
        let address = $crate::real::$name.address();
        if address.is_null() {
            $crate::real::set_errno(libc::ENOSYS);
            -1
        } else {
            // SAFETY: libc's function of this name has this signature; the address is not null. The caller keeps its contract.
            unsafe {
                let f = core::mem::transmute::<*mut core::ffi::c_void, unsafe extern "C" fn($($ty),*) -> $ret>(address);
                f($($arg),*)
            }
        }
    }};
}
pub(crate) use libc_call;
