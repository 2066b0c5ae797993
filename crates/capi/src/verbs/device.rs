//! The device list and the attributes of a device before it is opened.

use std::{
    ffi::{c_char, c_int, c_void},
    mem::{offset_of, size_of},
    ptr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use anyverbs::DeviceInfo;
use anyverbs::persona::Persona;
use anyverbs_sanitizers as sanitizers;

use crate::{
    abi::*,
    cancel::Uncancelled,
    errno::{Errno, give, pointer},
    log,
    verbs::node::look_for_node,
};

/// A device as this library hands it out. It lives as long as the process, so that no pointer into a freed list can
/// dangle.
#[repr(C)]
pub(crate) struct DeviceObject {
    pub(crate) public: ibv_device,
    /// rdma-core keeps its `verbs_device_ops` here. A real provider library compares the pointer with its own to learn
    /// whether a device is its own. So this one must be readable and equal to none.
    driver: *const c_void,
    pub(crate) name: String,
    pub(crate) node_guid: u64,
    pub(crate) sys_image_guid: u64,
    pub(crate) persona: Option<Arc<Persona>>,
}

const _: () = assert!(offset_of!(DeviceObject, driver) == size_of::<ibv_device>());

// SAFETY: written once, before it is published.
unsafe impl Send for DeviceObject {}
// SAFETY: as above.
unsafe impl Sync for DeviceObject {}

/// The target of `DeviceObject::driver`: as large as any table of operations that might be read there.
static NO_DRIVER: [usize; 64] = [0; 64];

/// Most devices of a process that a program sees.
pub(crate) const MOST_DEVICES: usize = 72;

/// Devices that were ever listed, in the order of their first appearance. More than the configuration may name
/// (`ANYVERBS_DEVICES`), since that may change under a process.
static DEVICES: [OnceLock<DeviceObject>; MOST_DEVICES] = [const { OnceLock::new() }; MOST_DEVICES];

/// Copies as much of `text` as fits, and a terminator.
fn fill<const N: usize>(field: &mut [c_char; N], text: &str) {
    for (to, from) in field[..N - 1].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

impl DeviceObject {
    fn new(info: &DeviceInfo, index: usize) -> Self {
        // SAFETY: integers, character arrays and empty slots.
        let mut public: ibv_device = unsafe { std::mem::zeroed() };
        public.node_type = IBV_NODE_CA;
        public.transport_type = IBV_TRANSPORT_IB;
        fill(&mut public.name, &info.name);
        fill(&mut public.dev_name, &format!("uverbs{index}"));
        fill(&mut public.dev_path, &format!("/sys/class/infiniband_verbs/uverbs{index}"));
        fill(&mut public.ibdev_path, &format!("/sys/class/infiniband/{}", info.name));
        Self {
            public,
            driver: NO_DRIVER.as_ptr().cast(),
            name: info.name.clone(),
            node_guid: info.node_guid,
            sys_image_guid: info.sys_image_guid,
            persona: info.persona.clone(),
        }
    }

    pub(crate) fn pointer(&self) -> *mut ibv_device {
        ptr::from_ref(self).cast_mut().cast()
    }
}

/// The object of a device that was just found.
fn object(info: &DeviceInfo) -> Option<&'static DeviceObject> {
    DEVICES
        .iter()
        .enumerate()
        .map(|(i, slot)| slot.get_or_init(|| DeviceObject::new(info, i)))
        .inspect(|device| sanitizers::initialised(&raw const device.public))
        .find(|d| d.name == info.name && d.node_guid == info.node_guid)
}

/// The devices of this process, none of which is opened, with those that a script of faults has removed: each has its number for good. If there is none, the reason goes to the log, once for each
/// reason.
pub(crate) fn devices() -> Vec<&'static DeviceObject> {
    log::init();
    match anyverbs::all_devices() {
        Ok(found) => {
            for (index, info) in found.iter().enumerate() {
                look_for_node(index, &info.name);
            }
            found.iter().filter_map(object).collect()
        }
        Err(error) => {
            static SAID: AtomicU32 = AtomicU32::new(0);
            let errno = error.errno().unsigned_abs();
            if SAID.swap(errno, Ordering::Relaxed) != errno {
                tracing::error!("no RDMA device: {error}");
            }
            Vec::new()
        }
    }
}

/// The object behind a pointer that a program holds; `EINVAL` for NULL and for a pointer that we never gave out.
pub(crate) fn device(device: *const ibv_device) -> Result<&'static DeviceObject, Errno> {
    DEVICES
        .iter()
        .filter_map(OnceLock::get)
        .find(|d| ptr::eq(&d.public, device))
        .ok_or(Errno::invalid("the device is none of ibv_get_device_list"))
}

/// The device whose directory in sysfs is `path`.
pub(crate) fn device_of_path(path: &std::path::Path) -> Option<&'static DeviceObject> {
    let name = path.strip_prefix("/sys/class/infiniband").ok()?.to_str()?;
    DEVICES.iter().filter_map(OnceLock::get).find(|d| d.name == name)
}

/// `ibv_get_device_list`: a NULL-terminated array for `ibv_free_device_list`; NULL with `errno` when out of memory.
/// It starts nothing: whether a device can be opened, `ibv_open_device` finds out. Without a configuration that can be read the
/// list is empty, and the log says why.
///
/// # Safety
/// `num_devices` is NULL or writable.
pub(crate) unsafe extern "C" fn ibv_get_device_list(
    num_devices: *mut c_int,
) -> *mut *mut ibv_device {
    let _uncancelled = Uncancelled::new();
    log::init();
    if anyverbs::check_room(log::ROOM).is_err() {
        Errno::said(libc::ENOMEM).set();
        return ptr::null_mut();
    }
    let mut found = devices();
    found.retain(|device| !anyverbs::is_removed(&device.name));
    // SAFETY: calloc has no preconditions.
    let list: *mut *mut ibv_device =
        unsafe { libc::calloc(found.len() + 1, size_of::<*mut ibv_device>()) }.cast();
    if !list.is_null() {
        for (i, d) in found.iter().enumerate() {
            // SAFETY: the array has room for `found.len()` entries and its terminator.
            unsafe { list.add(i).write(d.pointer()) };
        }
        sanitizers::initialised_bytes(list.cast(), found.len() * size_of::<*mut ibv_device>());
    }
    let count = if list.is_null() { 0 } else { found.len() as c_int };
    if !num_devices.is_null() {
        // SAFETY: the caller's promise.
        unsafe { give(num_devices, count) };
    }
    list
}

/// `ibv_free_device_list`. The devices themselves stay valid.
///
/// # Safety
/// `list` is NULL or from `ibv_get_device_list`, and not used again.
pub(crate) unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    let _uncancelled = Uncancelled::new();
    // SAFETY: `ibv_get_device_list` allocated it with calloc; free takes NULL.
    unsafe { libc::free(list.cast()) };
}

/// `ibv_get_device_name`: the device's name, valid as long as the device; NULL for NULL. It is read from the public
/// struct, so it also works for a device that a program made up (suites do, to test their own code).
pub(crate) unsafe extern "C" fn ibv_get_device_name(device_: *mut ibv_device) -> *const c_char {
    let _uncancelled = Uncancelled::new();
    if device_.is_null() {
        return pointer("ibv_get_device_name", Err(Errno::NULL));
    }
    device_.cast::<c_char>().wrapping_add(offset_of!(ibv_device, name))
}

/// `ibv_get_device_guid`: network byte order; 0 for no device.
pub(crate) unsafe extern "C" fn ibv_get_device_guid(device_: *mut ibv_device) -> u64 {
    let _uncancelled = Uncancelled::new();
    device(device_).map_or(0, |d| d.node_guid.to_be())
}

/// `ibv_get_device_index`: -1 for no device.
pub(crate) unsafe extern "C" fn ibv_get_device_index(device_: *mut ibv_device) -> c_int {
    let _uncancelled = Uncancelled::new();
    let slots = DEVICES.iter().map(OnceLock::get);
    let same = |d: Option<&DeviceObject>| d.is_some_and(|d| ptr::eq(&d.public, device_));
    slots.into_iter().position(same).map_or(-1, |i| i as c_int)
}
