//! libc's own functions behind the ones that a preload object defines.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

use core::ffi::{CStr, c_void};
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

/// Functions of which glibc has an older version as well, and their present ones. Before glibc 2.36 `dlsym(RTLD_NEXT)` finds the
/// older one: that `realpath` refuses to allocate its answer.
const VERSIONS: [(&CStr, &CStr); 3] =
    [(c"realpath", c"GLIBC_2.3"), (c"glob", c"GLIBC_2.27"), (c"glob64", c"GLIBC_2.27")];

/// A libc function found with `dlsym(RTLD_NEXT)`.
#[derive(Debug)]
pub struct Real {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Real {
    /// The function with this name.
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The function's address, or null if this libc has no such function.
    pub fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if known.is_null() { self.resolve() } else { known }
    }

    /// Looks the function up and remembers it. Idempotent: racing threads store the same value.
    ///
    /// `dlsym` takes locks and may allocate. So an object does this for all its functions when it is loaded, before any
    /// of them is called from a place where it must not.
    #[cold]
    pub fn resolve(&self) -> *mut c_void {
        let version = VERSIONS.iter().find(|(name, _)| *name == self.name);
        let mut found = version.map_or(ptr::null_mut(), |(_, version)| {
            // SAFETY: both are NUL-terminated strings; dlvsym may be called at any time after relocation.
            unsafe { libc::dlvsym(libc::RTLD_NEXT, self.name.as_ptr(), version.as_ptr()) }
        });
        // On some machines the function has the version that all began with.
        if found.is_null() {
            // SAFETY: as above.
            found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        }
        self.address.store(found, Ordering::Relaxed);
        found
    }
}

/// Defines a `static` [`Real`] for each name, and `ALL`, which lists them.
#[macro_export]
macro_rules! reals {
    ($($name:ident)*) => {
        $(
            #[expect(non_upper_case_globals, reason = "named as the function that it stands for")]
            pub(crate) static $name: $crate::Real = $crate::Real::new(
                match core::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!("a Rust identifier holds no NUL"),
                },
            );
        )*
        /// Every function above.
        pub(crate) static ALL: &[&$crate::Real] = &[$(&$name),*];
    };
}

#[cfg(test)]
mod tests {
    reals! { getpid realpath glob glob64 no_libc_has_a_function_of_this_name }

    #[test]
    fn finds_what_libc_has_and_nothing_else() {
        assert!(!getpid.address().is_null());
        assert_eq!(getpid.resolve(), getpid.address());
        assert!(no_libc_has_a_function_of_this_name.address().is_null());
        assert_eq!(ALL.len(), 5);
    }

    #[test]
    fn the_present_version_is_found() {
        // SAFETY: the name is a NUL-terminated string.
        let libc = unsafe { libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_NOW) };
        assert!(!libc.is_null());
        for real in [&realpath, &glob, &glob64] {
            // SAFETY: as above. A handle gives the present version on every glibc.
            let present = unsafe { libc::dlsym(libc, real.name.as_ptr()) };
            assert_eq!(real.address(), present, "{:?}", real.name);
        }
    }
}
