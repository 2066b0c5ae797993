//! Device memory, and DMA handles.

use std::{
    ffi::{c_int, c_uint, c_void},
    os::fd::IntoRawFd,
    sync::Arc,
};

use anyverbs::{DmahAttr, copy_guarded};
use anyverbs_sanitizers as sanitizers;

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, in_use, minus_one, pointer, value},
    object::{self, Object, deref},
    verbs::{Context, Pd, access, activity, context, publish_mr},
};

pub(crate) type Dm = Object<ibv_dm>;

/// The device's part of device memory.
pub(crate) struct DmInner {
    device: anyverbs::Dm,
    /// `ibv_dm.context` during its life.
    context: Arc<Context>,
}

/// Slot of `ibv_alloc_dm`: NULL with `errno` on failure; `ENOMEM` when there is no more.
///
/// # Safety
/// `attr` is NULL or readable.
pub(crate) unsafe extern "C" fn alloc_dm(
    context_: *mut ibv_context,
    attr: *mut ibv_alloc_dm_attr,
) -> *mut ibv_dm {
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_alloc_dm");
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    pointer(
        "ibv_alloc_dm",
        context(context_).and_then(|context| {
            let attr = attr
                .filter(|attr| attr.comp_mask == 0)
                .ok_or(Errno::invalid("attr is NULL, or comp_mask is not 0"))?;
            let device = context.inner.device.alloc_dm(attr.length as u64, attr.log_align_req)?;
            Ok(publish(device, context))
        }),
    )
}

fn publish(device: anyverbs::Dm, context: Arc<Context>) -> *mut ibv_dm {
    let handle = device.handle();
    let public = ibv_dm {
        context: context.pointer(),
        memcpy_to_dm: Some(memcpy_to_dm),
        memcpy_from_dm: Some(memcpy_from_dm),
        comp_mask: IBV_DM_MASK_HANDLE,
        handle,
    };
    object::publish(public, handle, DmInner { device, context })
}

/// Slot of `ibv_free_dm`: 0, or the errno value; `EBUSY` while a memory region uses it.
pub(crate) unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_free_dm",
        object::find(dm).and_then(|dm: Arc<Dm>| {
            let end = || dm.inner.device.destroy().map_err(in_use);
            check::ending(dm.public(), activity, end)?;
            object::retire(&dm)
        }),
    )
}

/// `ibv_import_dm`: NULL with `errno` on failure; `EINVAL` for an unknown handle. The memory is shared with its
/// exporter, in this process or another.
pub(crate) unsafe extern "C" fn ibv_import_dm(
    context_: *mut ibv_context,
    handle: u32,
) -> *mut ibv_dm {
    let _uncancelled = Uncancelled::new();
    pointer(
        "ibv_import_dm",
        context(context_).and_then(|context| {
            let device = context.inner.device.import_dm(handle)?;
            Ok(publish(device, context))
        }),
    )
}

/// `ibv_unimport_dm`: the memory itself stays.
pub(crate) unsafe extern "C" fn ibv_unimport_dm(dm: *mut ibv_dm) {
    let _uncancelled = Uncancelled::new();
    if let Ok(dm) = object::find(dm) {
        let _: Result<(), Errno> = object::retire::<ibv_dm>(&dm);
    }
}

/// Behind `ibv_memcpy_to_dm`: 0, or the errno value; `EINVAL` beyond the memory or where offset or length is no multiple of 4.
///
/// # Safety
/// `dm` is NULL or live.
unsafe extern "C" fn memcpy_to_dm(
    dm: *mut ibv_dm,
    offset: u64,
    host: *const c_void,
    length: usize,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let dm = unsafe { deref(dm) };
    value(
        "ibv_memcpy_to_dm",
        dm.ok_or(Errno::NULL).and_then(|dm| {
            let to = dm.inner.device.at(offset, length as u64)?;
            // SAFETY: device memory, to which no references exist. An unmapped range on the other side ends in an error.
            unsafe { copy_guarded(to, host.cast(), length) }
                .map_err(|_| Errno::because(libc::EFAULT, "part of the memory is not mapped"))
        }),
    )
}

/// Behind `ibv_memcpy_from_dm`, as `memcpy_to_dm`.
///
/// # Safety
/// `dm` is NULL or live; the program lets `host` be written.
unsafe extern "C" fn memcpy_from_dm(
    host: *mut c_void,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let dm = unsafe { deref(dm) };
    value(
        "ibv_memcpy_from_dm",
        dm.ok_or(Errno::NULL).and_then(|dm| {
            let from = dm.inner.device.at(offset, length as u64)?;
            // SAFETY: as in `memcpy_to_dm`; the caller's promise for the program's side.
            unsafe { copy_guarded(host.cast(), from, length) }
                .map_err(|_| Errno::because(libc::EFAULT, "part of the memory is not mapped"))?;
            sanitizers::initialised_bytes(host, length);
            Ok(())
        }),
    )
}

/// Slot of `ibv_reg_dm_mr`: NULL with `errno` on failure; `EINVAL` without `IBV_ACCESS_ZERO_BASED`.
pub(crate) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    flags: c_uint,
) -> *mut ibv_mr {
    let _uncancelled = Uncancelled::new();
    pointer(
        "ibv_reg_dm_mr",
        object::find(pd).and_then(|pd: Arc<Pd>| {
            let dm: Arc<Dm> = object::find(dm)?;
            let access = access(flags)?;
            let device =
                pd.inner.device.reg_dm_mr(&dm.inner.device, offset, length as u64, access)?;
            let published = publish_mr(&pd, device, std::ptr::null_mut(), length);
            check::made_of(published, &[pd.public() as usize, dm.public() as usize]);
            Ok(published)
        }),
    )
}

/// `ibv_dm_export_dmabuf_fd`: a descriptor, or -1 with `errno`; `EOPNOTSUPP` where the system has no `/dev/udmabuf` to
/// make such buffers.
pub(crate) unsafe extern "C" fn ibv_dm_export_dmabuf_fd(dm: *mut ibv_dm) -> c_int {
    let _uncancelled = Uncancelled::new();
    minus_one(
        "ibv_dm_export_dmabuf_fd",
        object::find(dm).and_then(|dm: Arc<Dm>| {
            dm.inner.context.answers()?;
            let fd = dm.inner.device.export_dmabuf()?;
            Ok(fd.into_raw_fd())
        }),
    )
}

pub(crate) type Dmah = Object<ibv_dmah>;

/// The device's part of a DMA handle.
pub(crate) struct DmahInner {
    pub(crate) device: anyverbs::Dmah,
    /// `ibv_dmah.context` during its life.
    _context: Arc<Context>,
}

/// `ibv_alloc_dmah`: NULL with `errno` on failure.
///
/// # Safety
/// `attr` is NULL or readable.
pub(crate) unsafe extern "C" fn ibv_alloc_dmah(
    context_: *mut ibv_context,
    attr: *mut ibv_dmah_init_attr,
) -> *mut ibv_dmah {
    let _uncancelled = Uncancelled::new();
    const KNOWN: u32 = IBV_DMAH_INIT_ATTR_MASK_CPU_ID
        | IBV_DMAH_INIT_ATTR_MASK_PH
        | IBV_DMAH_INIT_ATTR_MASK_TPH_MEM_TYPE;
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    pointer(
        "ibv_alloc_dmah",
        context(context_).and_then(|context| {
            let attr = attr.filter(|attr| attr.comp_mask & !KNOWN == 0).ok_or(Errno::invalid(
                "attr is NULL, or comp_mask has a bit that is not known here",
            ))?;
            let has = |bit| attr.comp_mask & bit != 0;
            let device = context.inner.device.alloc_dmah(&DmahAttr {
                cpu: has(IBV_DMAH_INIT_ATTR_MASK_CPU_ID).then_some(attr.cpu_id),
                hint: has(IBV_DMAH_INIT_ATTR_MASK_PH).then_some(attr.ph),
                memory: has(IBV_DMAH_INIT_ATTR_MASK_TPH_MEM_TYPE).then_some(attr.tph_mem_type),
            })?;
            let public = ibv_dmah { context: context.pointer() };
            Ok(object::publish(public, 0, DmahInner { device, _context: context }))
        }),
    )
}

/// `ibv_dealloc_dmah`: 0, or the errno value; `EBUSY` while a memory region uses it.
pub(crate) unsafe extern "C" fn ibv_dealloc_dmah(dmah: *mut ibv_dmah) -> c_int {
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_dealloc_dmah",
        object::find(dmah).and_then(|dmah: Arc<Dmah>| {
            dmah.inner.device.destroy().map_err(in_use)?;
            object::retire(&dmah)
        }),
    )
}
