//! libc's own functions behind the ones that this object defines.

use core::ffi::c_int;

anyverbs_interpose::reals! {
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
