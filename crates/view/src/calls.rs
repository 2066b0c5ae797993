//! The libc functions that this object defines. Each passes its arguments on, the path possibly changed.
//!
//! `open` and its like are variadic in C. Here they take the mode as a fixed argument. On x86-64 and AArch64 Linux a
//! variadic integer travels in the same register. Its content is ignored when the flags ask for no mode.

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::mem::transmute;
use core::ptr::null_mut;

use libc::{AT_FDCWD, mode_t, size_t, ssize_t};

use crate::answer::{in_tree, inside, set_errno, strip, translated};
use crate::real;

type Path = *const c_char;

/// Finds libc's function or fails the call with `ENOSYS`.
macro_rules! libc_function {
    ($name:ident: fn($($ty:ty),*) -> $ret:ty, $fails:expr) => {{
        let address = real::$name.address();
        if address.is_null() {
            set_errno(libc::ENOSYS);
            return $fails;
        }
        // SAFETY: libc's function of this name has this signature; the address is not null.
        unsafe { transmute::<*mut c_void, unsafe extern "C" fn($($ty),*) -> $ret>(address) }
    }};
}

pub(crate) use libc_function;

/// Functions with one path and nothing else to change. A name in brackets is the directory that the path starts from.
macro_rules! by_path {
    ($(fn $name:ident $(<$before:ident: $before_ty:ty>)? (path $([$at:expr])? $(, $after:ident: $after_ty:ty)*) -> $ret:ty, fails $fails:expr;)*) => {$(
        /// # Safety
        /// As the libc function of this name.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($before: $before_ty,)? path: Path $(, $after: $after_ty)*) -> $ret {
            let real = libc_function!($name: fn($($before_ty,)? Path $(, $after_ty)*) -> $ret, $fails);
            #[allow(unused_mut, unused_assignments)]
            let mut at = AT_FDCWD;
            $(at = $at;)?
            // SAFETY: the caller keeps libc's contract, and a translated path is NUL-terminated.
            unsafe { translated(at, path, $fails, |path| real($($before,)? path $(, $after)*)) }
        }
    )*};
}

by_path! {
    fn open(path, flags: c_int, mode: mode_t) -> c_int, fails -1;
    fn open64(path, flags: c_int, mode: mode_t) -> c_int, fails -1;
    fn openat<at: c_int>(path[at], flags: c_int, mode: mode_t) -> c_int, fails -1;
    fn openat64<at: c_int>(path[at], flags: c_int, mode: mode_t) -> c_int, fails -1;
    fn __open_2(path, flags: c_int) -> c_int, fails -1;
    fn __open64_2(path, flags: c_int) -> c_int, fails -1;
    fn __openat_2<at: c_int>(path[at], flags: c_int) -> c_int, fails -1;
    fn __openat64_2<at: c_int>(path[at], flags: c_int) -> c_int, fails -1;
    fn creat(path, mode: mode_t) -> c_int, fails -1;
    fn creat64(path, mode: mode_t) -> c_int, fails -1;

    fn fopen(path, mode: *const c_char) -> *mut libc::FILE, fails null_mut();
    fn fopen64(path, mode: *const c_char) -> *mut libc::FILE, fails null_mut();
    fn freopen(path, mode: *const c_char, stream: *mut libc::FILE) -> *mut libc::FILE, fails null_mut();
    fn freopen64(path, mode: *const c_char, stream: *mut libc::FILE) -> *mut libc::FILE, fails null_mut();

    fn opendir(path) -> *mut libc::DIR, fails null_mut();
    fn scandir(path, list: *mut c_void, filter: *const c_void, order: *const c_void) -> c_int, fails -1;
    fn scandir64(path, list: *mut c_void, filter: *const c_void, order: *const c_void) -> c_int, fails -1;
    fn scandirat<at: c_int>(path[at], list: *mut c_void, filter: *const c_void, order: *const c_void) -> c_int, fails -1;
    fn scandirat64<at: c_int>(path[at], list: *mut c_void, filter: *const c_void, order: *const c_void) -> c_int, fails -1;

    fn stat(path, buf: *mut c_void) -> c_int, fails -1;
    fn stat64(path, buf: *mut c_void) -> c_int, fails -1;
    fn __xstat<version: c_int>(path, buf: *mut c_void) -> c_int, fails -1;
    fn __xstat64<version: c_int>(path, buf: *mut c_void) -> c_int, fails -1;
    fn statfs(path, buf: *mut c_void) -> c_int, fails -1;
    fn statfs64(path, buf: *mut c_void) -> c_int, fails -1;
    fn statvfs(path, buf: *mut c_void) -> c_int, fails -1;
    fn statvfs64(path, buf: *mut c_void) -> c_int, fails -1;

    fn access(path, mode: c_int) -> c_int, fails -1;
    fn eaccess(path, mode: c_int) -> c_int, fails -1;
    fn euidaccess(path, mode: c_int) -> c_int, fails -1;
    fn faccessat<at: c_int>(path[at], mode: c_int, flags: c_int) -> c_int, fails -1;

    fn readlink(path, buf: *mut c_char, len: size_t) -> ssize_t, fails -1;
    fn readlinkat<at: c_int>(path[at], buf: *mut c_char, len: size_t) -> ssize_t, fails -1;
    fn __readlink_chk(path, buf: *mut c_char, len: size_t, size: size_t) -> ssize_t, fails -1;
    fn __readlinkat_chk<at: c_int>(path[at], buf: *mut c_char, len: size_t, size: size_t) -> ssize_t, fails -1;

    fn chdir(path) -> c_int, fails -1;

    fn getxattr(path, name: *const c_char, value: *mut c_void, size: size_t) -> ssize_t, fails -1;
    fn lgetxattr(path, name: *const c_char, value: *mut c_void, size: size_t) -> ssize_t, fails -1;
    fn listxattr(path, list: *mut c_char, size: size_t) -> ssize_t, fails -1;
    fn llistxattr(path, list: *mut c_char, size: size_t) -> ssize_t, fails -1;
}

/// `lstat` and its like: an entry of `/dev/infiniband` is a device to the program, although it is another kind of file
/// in the tree.
macro_rules! link_stat {
    ($(fn $name:ident $(<$version:ident: $version_ty:ty>)? = $follow:ident;)*) => {$(
        /// # Safety
        /// As the libc function of this name.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($version: $version_ty,)? path: Path, buf: *mut c_void) -> c_int {
            // SAFETY: the caller passes a NUL-terminated path.
            if unsafe { inside(AT_FDCWD, path) }.is_some_and(|(_, inside)| inside.is_device_node()) {
                // SAFETY: same contract as this function's.
                return unsafe { $follow($($version,)? path, buf) };
            }
            let real = libc_function!($name: fn($($version_ty,)? Path, *mut c_void) -> c_int, -1);
            // SAFETY: the caller keeps libc's contract, and a translated path is NUL-terminated.
            unsafe { translated(AT_FDCWD, path, -1, |path| real($($version,)? path, buf)) }
        }
    )*};
}

link_stat! {
    fn lstat = stat;
    fn lstat64 = stat64;
    fn __lxstat<version: c_int> = __xstat;
    fn __lxstat64<version: c_int> = __xstat64;
}

/// The stat calls with flags, where "do not follow" is one of them.
macro_rules! stat_at {
    ($(fn $name:ident $(<$version:ident: $version_ty:ty>)?;)*) => {$(
        /// # Safety
        /// As the libc function of this name.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($version: $version_ty,)? at: c_int, path: Path, buf: *mut c_void, flags: c_int) -> c_int {
            let real = libc_function!($name: fn($($version_ty,)? c_int, Path, *mut c_void, c_int) -> c_int, -1);
            // SAFETY: the caller keeps libc's contract, and a translated path is NUL-terminated.
            unsafe { stat_with_flags(at, path, flags, |path, flags| real($($version,)? at, path, buf, flags)) }
        }
    )*};
}

stat_at! {
    fn fstatat;
    fn fstatat64;
    fn __fxstatat<version: c_int>;
    fn __fxstatat64<version: c_int>;
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn statx(
    at: c_int,
    path: Path,
    flags: c_int,
    mask: c_uint,
    buf: *mut c_void,
) -> c_int {
    let real = libc_function!(statx: fn(c_int, Path, c_int, c_uint, *mut c_void) -> c_int, -1);
    // SAFETY: the caller keeps libc's contract, and a translated path is NUL-terminated.
    unsafe { stat_with_flags(at, path, flags, |path, flags| real(at, path, flags, mask, buf)) }
}

/// Calls `f` with the path in the tree and without `AT_SYMLINK_NOFOLLOW` for an entry of `/dev/infiniband`.
///
/// # Safety
/// `path` is null or NUL-terminated.
unsafe fn stat_with_flags(
    at: c_int,
    path: Path,
    flags: c_int,
    f: impl FnOnce(Path, c_int) -> c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    match unsafe { inside(at, path) } {
        None => f(path, flags),
        Some((dir, inside)) => {
            let flags =
                if inside.is_device_node() { flags & !libc::AT_SYMLINK_NOFOLLOW } else { flags };
            in_tree(dir, inside, -1, |path| f(path, flags))
        }
    }
}

/// Functions that answer with a path. A path in the tree becomes its name in the view, so that the program can hand it
/// back.
macro_rules! answers_path {
    ($(fn $name:ident($($arg:ident: $ty:ty),*);)*) => {$(
        /// # Safety
        /// As the libc function of this name.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($arg: $ty),*) -> *mut c_char {
            let real = libc_function!($name: fn($($ty),*) -> *mut c_char, null_mut());
            // SAFETY: the caller keeps libc's contract.
            let answer = unsafe { real($($arg),*) };
            // SAFETY: libc wrote a NUL-terminated string into memory that the caller gave or will own.
            unsafe { strip(answer) };
            answer
        }
    )*};
}

answers_path! {
    fn getcwd(buf: *mut c_char, size: size_t);
    fn __getcwd_chk(buf: *mut c_char, size: size_t, room: size_t);
    fn get_current_dir_name();
}

/// The same for functions that resolve a given path.
macro_rules! resolves_path {
    ($(fn $name:ident(path $(, $after:ident: $ty:ty)*);)*) => {$(
        /// # Safety
        /// As the libc function of this name.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(path: Path $(, $after: $ty)*) -> *mut c_char {
            let real = libc_function!($name: fn(Path $(, $ty)*) -> *mut c_char, null_mut());
            // SAFETY: the caller keeps libc's contract, and a translated path is NUL-terminated.
            let answer = unsafe { translated(AT_FDCWD, path, null_mut(), |path| real(path $(, $after)*)) };
            // SAFETY: libc wrote a NUL-terminated string into memory that the caller gave or will own.
            unsafe { strip(answer) };
            answer
        }
    )*};
}

resolves_path! {
    fn realpath(path, resolved: *mut c_char);
    fn __realpath_chk(path, resolved: *mut c_char, room: size_t);
    fn canonicalize_file_name(path);
}

macro_rules! globs {
    ($(fn $name:ident;)*) => {$(
        /// # Safety
        /// As the libc function of this name.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(pattern: Path, flags: c_int, on_error: *const c_void, out: *mut libc::glob_t) -> c_int {
            let real = libc_function!($name: fn(Path, c_int, *const c_void, *mut libc::glob_t) -> c_int, libc::GLOB_ABORTED);
            // SAFETY: the caller keeps libc's contract, and a translated path is NUL-terminated.
            let result = unsafe { translated(AT_FDCWD, pattern, libc::GLOB_ABORTED, |pattern| real(pattern, flags, on_error, out)) };
            // SAFETY: the pattern is still the caller's.
            if result == 0 && unsafe { inside(AT_FDCWD, pattern) }.is_some() {
                // SAFETY: on success libc filled `gl_pathc` strings behind `gl_offs` reserved entries, when it was asked
                // for those.
                unsafe {
                    let reserved = if flags & libc::GLOB_DOOFFS != 0 { (*out).gl_offs } else { 0 };
                    for index in 0..(*out).gl_pathc {
                        strip(*(*out).gl_pathv.add(reserved + index));
                    }
                }
            }
            result
        }
    )*};
}

// `glob_t` and `glob64_t` are the same type on 64-bit Linux.
globs! {
    fn glob;
    fn glob64;
}
