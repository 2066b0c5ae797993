//! Calls that are exported but not built: each fails the way its manual page says that it fails.
//!
//! `refuse!` defines them group by group, by how they report an error, and lists them in a table; `coverage.rs` makes
//! `docs/coverage.md` from those tables. A call that gets a body leaves its group.

/// The way in which a refusing call reports its error, from C's side.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Convention {
    /// Returns NULL, sets `errno`.
    Null,
    /// Returns the errno value, sets `errno` too.
    Errno,
    /// Returns -1, sets `errno`.
    MinusOne,
    /// Returns the negative errno value.
    NegativeErrno,
    /// Returns nothing and does nothing.
    Void,
    /// Answers 0, which is "no" or "none".
    No,
}

/// One call that is not built.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refusal {
    pub(crate) name: &'static str,
    pub(crate) convention: Convention,
    /// The errno; 0 where the call has no way to report one.
    pub(crate) errno: std::ffi::c_int,
}

/// Logs the reason: the call is known, but not built.
#[cold]
pub(crate) fn note(name: &str) {
    tracing::debug!(call = name, "refused: not supported by this device");
}

/// Defines refusing functions and the table `REFUSED` of the module.
///
/// They take no arguments: under the C calling conventions of the supported targets a callee may ignore its arguments,
/// variadic or not.
macro_rules! refuse {
    ($($convention:ident($errno:expr): $($name:ident)*;)*) => {
        $($( refuse!(@function $convention $errno, $name); )*)*
        #[cfg(test)]
        pub(crate) const REFUSED: &[$crate::refuse::Refusal] = &[$($(
            $crate::refuse::Refusal {
                name: stringify!($name),
                convention: $crate::refuse::Convention::$convention,
                errno: $errno,
            },
        )*)*];
    };
    (@function Null $errno:expr, $name:ident) => {
        pub(crate) unsafe extern "C" fn $name() -> *mut ::std::ffi::c_void {
            $crate::refuse::note(stringify!($name));
            $crate::errno::Errno::said($errno).set();
            ::std::ptr::null_mut()
        }
    };
    (@function Errno $errno:expr, $name:ident) => { refuse!(@integer $errno, $errno, $name); };
    // 64 bits: some of these return ssize_t, and C reads no more than its own type.
    (@function MinusOne $errno:expr, $name:ident) => { refuse!(@integer $errno, -1, $name); };
    (@function NegativeErrno $errno:expr, $name:ident) => { refuse!(@integer $errno, -i64::from($errno), $name); };
    (@function Void $errno:expr, $name:ident) => {
        pub(crate) unsafe extern "C" fn $name() {
            $crate::refuse::note(stringify!($name));
        }
    };
    (@function No $errno:expr, $name:ident) => {
        pub(crate) unsafe extern "C" fn $name() -> i64 {
            0
        }
    };
    (@integer $errno:expr, $value:expr, $name:ident) => {
        pub(crate) unsafe extern "C" fn $name() -> i64 {
            $crate::refuse::note(stringify!($name));
            $crate::errno::Errno::said($errno).set();
            ($value).into()
        }
    };
}

pub(crate) use refuse;

#[cfg(test)]
mod tests {
    use crate::{private, vendor, verbs};

    /// Runs a refusing call and returns its result with the errno that it left.
    fn call<T>(f: unsafe extern "C" fn() -> T) -> (T, i32) {
        crate::errno::Errno::said(0).set();
        // SAFETY: refusing calls read nothing.
        let result = unsafe { f() };
        (result, std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }

    #[test]
    fn each_convention_reports_the_way_its_calls_do() {
        let errno = libc::EOPNOTSUPP;
        let (device, e) = call(vendor::mlx5::mlx5dv_open_device);
        assert!(device.is_null() && e == errno);
        assert_eq!(call(verbs::ibv_register_driver), (errno.into(), errno));
        assert_eq!(call(vendor::mlx5::mlx5dv_vfio_get_events_fd), ((-errno).into(), errno));
        assert_eq!(call(vendor::mlx5::mlx5dv_pp_free), ((), 0));
        assert_eq!(call(private::__ioctl_final_num_attrs), (0, 0));
    }
}
