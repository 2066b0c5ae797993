//! The device list and what is known of a device before it is opened.

use std::{
    ffi::{c_char, c_int, c_void},
    mem::offset_of,
    ptr,
};

use crate::{abi::*, errno::Errno};

/// A device as this library hands it out. It lives as long as the process, so that no pointer into a freed list can
/// dangle.
#[repr(C)]
pub(crate) struct DeviceObject {
    pub(crate) public: ibv_device,
    /// rdma-core keeps its `verbs_device_ops` here, and a real provider library compares the pointer with its own to
    /// learn whether a device is its: this one must be readable and equal to none.
    driver: *const c_void,
    /// Network byte order.
    guid: u64,
    /// `ibv_get_device_index`.
    index: c_int,
}

const _: () = assert!(offset_of!(DeviceObject, driver) == size_of::<ibv_device>());

// SAFETY: written once, before it is published.
unsafe impl Sync for DeviceObject {}

/// The devices of this process: none until the engine is joined to this crate.
fn devices() -> &'static [DeviceObject] {
    &[]
}

/// The object behind a pointer that a program holds; `None` for NULL and for a pointer that we never gave out.
fn device(device: *const ibv_device) -> Option<&'static DeviceObject> {
    devices().iter().find(|d| ptr::eq(&d.public, device))
}

/// `ibv_get_device_list`: a NULL-terminated array for `ibv_free_device_list`; NULL with `errno` when out of memory.
///
/// # Safety
/// `num_devices` is NULL or writable.
pub(crate) unsafe extern "C" fn ibv_get_device_list(
    num_devices: *mut c_int,
) -> *mut *mut ibv_device {
    let found = devices();
    // SAFETY: calloc has no preconditions.
    let list: *mut *mut ibv_device =
        unsafe { libc::calloc(found.len() + 1, size_of::<*mut ibv_device>()) }.cast();
    if !list.is_null() {
        for (i, d) in found.iter().enumerate() {
            // SAFETY: the array has room for `found.len()` entries and its terminator.
            unsafe { list.add(i).write(ptr::from_ref(&d.public).cast_mut()) };
        }
    }
    let count = if list.is_null() { 0 } else { found.len() as c_int };
    if !num_devices.is_null() {
        // SAFETY: the caller's promise.
        unsafe { num_devices.write(count) };
    }
    list
}

/// `ibv_free_device_list`. The devices themselves stay valid.
///
/// # Safety
/// `list` is NULL or from `ibv_get_device_list`, and not used again.
pub(crate) unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: `ibv_get_device_list` allocated it with calloc; free takes NULL.
    unsafe { libc::free(list.cast()) };
}

/// `ibv_get_device_name`: the device's name, valid as long as the process; NULL for no device.
pub(crate) unsafe extern "C" fn ibv_get_device_name(device_: *mut ibv_device) -> *const c_char {
    device(device_).map_or_else(
        || {
            Errno(libc::EINVAL).set();
            ptr::null()
        },
        |d| d.public.name.as_ptr(),
    )
}

/// `ibv_get_device_guid`: network byte order; 0 for no device.
pub(crate) unsafe extern "C" fn ibv_get_device_guid(device_: *mut ibv_device) -> u64 {
    device(device_).map_or(0, |d| d.guid)
}

/// `ibv_get_device_index`: -1 for no device.
pub(crate) unsafe extern "C" fn ibv_get_device_index(device_: *mut ibv_device) -> c_int {
    device(device_).map_or(-1, |d| d.index)
}
