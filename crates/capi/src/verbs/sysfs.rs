//! `ibv_get_sysfs_path` and `ibv_read_sysfs_file`.

use std::{
    ffi::{CStr, CString, OsStr, c_char, c_int},
    fs::File,
    io::Read,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::Path,
    sync::OnceLock,
};

use crate::errno::Errno;

/// `ibv_get_sysfs_path`: `$SYSFS_PATH` without its trailing slashes, or `/sys`. The string lives for ever.
pub(crate) unsafe extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    static PATH: OnceLock<CString> = OnceLock::new();
    PATH.get_or_init(|| {
        let mut path =
            std::env::var_os("SYSFS_PATH").map(OsStringExt::into_vec).unwrap_or_default();
        while path.last() == Some(&b'/') {
            path.pop();
        }
        if path.is_empty() {
            path = b"/sys".to_vec();
        }
        CString::new(path).unwrap_or_else(|_| c"/sys".into())
    })
    .as_ptr()
}

/// `ibv_read_sysfs_file`: reads `dir/file` into `buf` as a C string without its newline. Returns its length, or -1
/// with `errno`, also when it does not fit.
///
/// # Safety
/// `dir` and `file` are NULL or C strings; `buf` is NULL or has `size` writable bytes.
pub(crate) unsafe extern "C" fn ibv_read_sysfs_file(
    dir: *const c_char,
    file: *const c_char,
    buf: *mut c_char,
    size: usize,
) -> c_int {
    if dir.is_null()
        || file.is_null()
        || buf.is_null()
        || size == 0
        || isize::try_from(size).is_err()
    {
        Errno(libc::EINVAL).set();
        return -1;
    }
    // SAFETY: not NULL, so C strings by the caller's promise.
    let (dir, file) = unsafe { (CStr::from_ptr(dir), CStr::from_ptr(file)) };
    let path =
        Path::new(OsStr::from_bytes(dir.to_bytes())).join(OsStr::from_bytes(file.to_bytes()));
    let mut text = Vec::new();
    let read = File::open(path).and_then(|f| f.take(size as u64).read_to_end(&mut text));
    if let Err(e) = read {
        Errno(e.raw_os_error().unwrap_or(libc::EIO)).set();
        return -1;
    }
    if text.last() == Some(&b'\n') {
        text.pop();
    }
    let Some(length) = c_int::try_from(text.len()).ok().filter(|_| text.len() < size) else {
        Errno(libc::EMSGSIZE).set();
        return -1;
    };
    text.push(0);
    // SAFETY: `text` with its terminator has at most `size` bytes.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buf, text.len()) };
    length
}
