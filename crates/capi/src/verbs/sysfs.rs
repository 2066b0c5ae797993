//! `ibv_get_sysfs_path` and `ibv_read_sysfs_file`.

use anyverbs_sanitizers as sanitizers;
use std::{
    ffi::{CStr, CString, OsStr, c_char, c_int},
    fs::File,
    io::Read,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::Path,
    sync::OnceLock,
};

use anyverbs::persona::Persona;

use crate::{
    cancel::Uncancelled,
    errno::Errno,
    verbs::{DeviceObject, device_of_path},
};

/// `ibv_get_sysfs_path`: `$SYSFS_PATH` without its trailing slashes, or `/sys`. The string lives for ever.
pub(crate) unsafe extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    let _uncancelled = Uncancelled::new();
    static PATH: OnceLock<CString> = OnceLock::new();
    PATH.get_or_init(|| {
        let mut path = anyverbs_environment::variable("SYSFS_PATH")
            .map_or_else(Vec::new, OsStringExt::into_vec);
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

/// The board and the type of the device without a persona.
const OURS: &str = "anyverbs";

/// The version of the firmware.
pub(crate) fn firmware(persona: Option<&Persona>) -> &str {
    persona.map_or(env!("CARGO_PKG_VERSION"), |persona| &persona.fw_ver)
}

/// A file in the sysfs directory of a device, for a process that sees none. No kernel driver makes one here.
fn attribute(device: &DeviceObject, file: &[u8]) -> Option<String> {
    let guid = |guid: u64| {
        let [a, b, c, d] = [48, 32, 16, 0].map(|shift| (guid >> shift) as u16);
        format!("{a:04x}:{b:04x}:{c:04x}:{d:04x}")
    };
    Some(match file {
        b"board_id" => device.persona.as_ref().map_or(Some(OURS.into()), |p| p.board_id.clone())?,
        b"hca_type" => device.persona.as_ref().map_or(Some(OURS.into()), |p| p.hca_type.clone())?,
        b"fw_ver" => firmware(device.persona.as_deref()).into(),
        b"node_type" => "1: CA".into(),
        b"node_desc" => device.name.clone(),
        b"node_guid" => guid(device.node_guid),
        b"sys_image_guid" => guid(device.sys_image_guid),
        _ => return None,
    })
}

/// `ibv_read_sysfs_file`: reads `dir/file` into `buf` as a C string without its newline. Returns its length, or -1
/// with `errno`, also when it does not fit. The directory of one of our devices need not exist.
///
/// # Safety
/// `dir` and `file` are NULL or C strings; `buf` is NULL or has `size` writable bytes.
pub(crate) unsafe extern "C" fn ibv_read_sysfs_file(
    dir: *const c_char,
    file: *const c_char,
    buf: *mut c_char,
    size: usize,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    if dir.is_null()
        || file.is_null()
        || buf.is_null()
        || size == 0
        || isize::try_from(size).is_err()
    {
        Errno::said(libc::EINVAL).set();
        return -1;
    }
    // SAFETY: not NULL, so C strings by the caller's promise.
    let (dir, file) = unsafe { (CStr::from_ptr(dir), CStr::from_ptr(file)) };
    let dir = Path::new(OsStr::from_bytes(dir.to_bytes()));
    let path = dir.join(OsStr::from_bytes(file.to_bytes()));
    let mut text = Vec::new();
    let read = File::open(path).and_then(|f| f.take(size as u64).read_to_end(&mut text));
    if let Err(e) = read {
        let known = device_of_path(dir).and_then(|d| attribute(d, file.to_bytes()));
        if let Some(known) = known {
            text = known.into_bytes();
        } else {
            Errno::said(e.raw_os_error().unwrap_or(libc::EIO)).set();
            return -1;
        }
    }
    if text.last() == Some(&b'\n') {
        text.pop();
    }
    let Some(length) = c_int::try_from(text.len()).ok().filter(|_| text.len() < size) else {
        Errno::said(libc::EMSGSIZE).set();
        return -1;
    };
    text.push(0);
    // SAFETY: `text` with its terminator has at most `size` bytes.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buf, text.len()) };
    sanitizers::initialised_bytes(buf.cast(), text.len());
    length
}
