//! libc's own functions behind the ones that this object defines.

use core::ffi::{CStr, c_void};
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
    open open64 openat openat64 __open_2 __open64_2 __openat_2 __openat64_2 creat creat64
    fopen fopen64 freopen freopen64
    opendir scandir scandir64 scandirat scandirat64 glob glob64
    stat stat64 lstat lstat64 fstatat fstatat64 statx
    __xstat __xstat64 __lxstat __lxstat64 __fxstatat __fxstatat64
    statfs statfs64 statvfs statvfs64
    access eaccess euidaccess faccessat
    readlink readlinkat __readlink_chk __readlinkat_chk
    realpath __realpath_chk canonicalize_file_name
    chdir getcwd __getcwd_chk get_current_dir_name
    getxattr lgetxattr listxattr llistxattr
}
