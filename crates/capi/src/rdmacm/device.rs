//! The open devices that the ids of a process share.

use std::{
    ffi::c_int,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicPtr, Ordering},
    },
};

use anyverbs_sanitizers as sanitizers;

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, give, pointer},
    object,
    verbs::{self, MOST_DEVICES, Pd, Xrcd},
};

/// The parts that ids share: `id->verbs`, and the domains for programs that give none.
pub(crate) struct SharedDevice {
    pub(crate) context: *mut ibv_context,
    pub(crate) pd: *mut ibv_pd,
    /// Opened when it is wanted.
    xrcd: AtomicPtr<ibv_xrcd>,
    /// The process that made it: a forked child's ids need one of their own.
    process: u32,
}

static SHARED: [AtomicPtr<SharedDevice>; MOST_DEVICES] =
    [const { AtomicPtr::new(ptr::null_mut()) }; MOST_DEVICES];

impl SharedDevice {
    /// Whether it is this process's, and not destroyed by the program, which has the pointers.
    fn is_usable(&self) -> bool {
        let pd: Result<Arc<Pd>, _> = object::lookup(self.pd);
        self.process == std::process::id() && verbs::context(self.context).is_ok() && pd.is_ok()
    }

    /// Opens a device, which stays open.
    fn open(number: usize) -> Result<Self, Errno> {
        let device = *verbs::devices()
            .get(number)
            .ok_or(Errno::because(libc::ENODEV, "there is no such device"))?;
        // SAFETY: a device that was listed.
        let context = unsafe { verbs::ibv_open_device(device.pointer()) };
        if context.is_null() {
            return Err(Errno::last());
        }
        // SAFETY: a context that was just opened.
        let pd = unsafe { verbs::ibv_alloc_pd(context) };
        if pd.is_null() {
            let error = Errno::last();
            // SAFETY: as above.
            unsafe { verbs::ibv_close_device(context) };
            return Err(error);
        }
        check::is_own(pd);
        let xrcd = AtomicPtr::new(ptr::null_mut());
        Ok(Self { context, pd, xrcd, process: std::process::id() })
    }

    /// The XRC domain for programs that give none.
    pub(crate) fn xrcd(&self) -> Result<*mut ibv_xrcd, Errno> {
        loop {
            let current = self.xrcd.load(Ordering::Acquire);
            let found: Result<Arc<Xrcd>, _> = object::lookup(current);
            if found.is_ok() {
                return Ok(current);
            }
            let mut attr = ibv_xrcd_init_attr {
                comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
                fd: -1,
                oflags: libc::O_CREAT,
            };
            // SAFETY: the context is looked up, `attr` is readable.
            let new = unsafe { verbs::open_xrcd(self.context, &raw mut attr) };
            if new.is_null() {
                return Err(Errno::last());
            }
            match self.xrcd.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    check::is_own(new);
                    return Ok(new);
                }
                // SAFETY: the call looks its argument up.
                Err(_) => unsafe { verbs::close_xrcd(new) },
            };
        }
    }

    /// Gives up a device that no program has seen.
    fn close(&self) {
        // SAFETY: pointers of this library, checked by the calls.
        unsafe {
            verbs::ibv_dealloc_pd(self.pd);
            verbs::ibv_close_device(self.context);
        }
    }
}

/// A device of the process, opened at first use.
pub(crate) fn shared_device(number: usize) -> Result<&'static SharedDevice, Errno> {
    let shared =
        SHARED.get(number).ok_or(Errno::because(libc::ENODEV, "there is no such device"))?;
    loop {
        let current = shared.load(Ordering::Acquire);
        // SAFETY: NULL or a leaked box.
        if let Some(device) = unsafe { current.as_ref() }.filter(|d| d.is_usable()) {
            return Ok(device);
        }
        let new = Box::into_raw(Box::new(SharedDevice::open(number)?));
        // The old one stays: a thread may be looking at it, and there is a second one only after a fork or a mistake.
        match shared.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: leaked from here on.
            Ok(_) => return Ok(unsafe { &*new }),
            // SAFETY: `new` was never shared.
            Err(_) => unsafe { Box::from_raw(new) }.close(),
        }
    }
}

/// The devices that have not failed for good.
fn living_devices() -> Result<Vec<&'static SharedDevice>, Errno> {
    let listed = verbs::devices();
    let mut living = Vec::new();
    for (number, device) in listed.iter().enumerate() {
        let has_failed = || anyverbs::has_failed(&device.name);
        if has_failed() {
            continue;
        }
        match shared_device(number) {
            // A rule may take it away while it is opened.
            Err(_) if has_failed() => {}
            shared => living.push(shared?),
        }
    }
    match (listed.is_empty(), living.is_empty()) {
        (true, _) => Err(Errno::because(libc::ENODEV, "there is no such device")),
        (_, true) => Err(Errno::because(libc::ENODEV, "each device has failed")),
        _ => Ok(living),
    }
}

/// The first device that has not failed for good.
pub(crate) fn first_device() -> Result<&'static SharedDevice, Errno> {
    let listed = verbs::devices();
    let living = listed.iter().position(|device| !anyverbs::has_failed(&device.name));
    shared_device(living.unwrap_or(0))
}

/// `rdma_get_devices`: a NULL-terminated array for `rdma_free_devices`; NULL with `errno` on failure, `ENODEV` without a
/// device. The contexts are those of `id->verbs`. Devices that have failed for good are not among them.
///
/// # Safety
/// `num_devices` is NULL or writable.
pub(crate) unsafe extern "C" fn rdma_get_devices(num_devices: *mut c_int) -> *mut *mut ibv_context {
    let _uncancelled = Uncancelled::new();
    let (n, list) = match living_devices() {
        Ok(devices) => (devices.len(), context_list(&devices)),
        Err(error) => (0, Err(error)),
    };
    if !num_devices.is_null() {
        let n = if list.is_ok() { n as c_int } else { 0 };
        // SAFETY: the caller's promise.
        unsafe { give(num_devices, n) };
    }
    pointer("rdma_get_devices", list)
}

/// A NULL-terminated array of contexts.
fn context_list(devices: &[&SharedDevice]) -> Result<*mut *mut ibv_context, Errno> {
    // SAFETY: calloc has no preconditions.
    let list: *mut *mut ibv_context =
        unsafe { libc::calloc(devices.len() + 1, size_of::<*mut ibv_context>()) }.cast();
    if list.is_null() {
        return Err(Errno::because(libc::ENOMEM, "there is no memory"));
    }
    for (n, device) in devices.iter().enumerate() {
        // SAFETY: room for all entries and the terminator, which is there already.
        unsafe { list.add(n).write(device.context) };
    }
    sanitizers::initialised_bytes(list.cast(), devices.len() * size_of::<*mut ibv_context>());
    Ok(list)
}

/// `rdma_free_devices`. The devices stay open.
///
/// # Safety
/// `list` is NULL or from `rdma_get_devices`, and not used again.
pub(crate) unsafe extern "C" fn rdma_free_devices(list: *mut *mut ibv_context) {
    let _uncancelled = Uncancelled::new();
    // SAFETY: `rdma_get_devices` allocated it with calloc; free takes NULL.
    unsafe { libc::free(list.cast()) };
}
