//! Memory regions.

use std::{
    ffi::{c_int, c_uint, c_void},
    os::fd::BorrowedFd,
    sync::Arc,
};

use anyverbs::{Access, Advice, Rereg, Sge, error::RegisterError};

use anyverbs_check::Region;
use anyverbs_sanitizers as sanitizers;

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, in_use, no_value, pointer, say, value},
    faults,
    object::{self, Object},
    verbs::{Buf, Context, Dmah, Pd, watched::activity},
};

pub(crate) type Mr = Object<ibv_mr>;

/// The device's part of an MR.
pub(crate) struct MrInner {
    /// Imports share it.
    pub(crate) device: Arc<anyverbs::Mr>,
    /// `ibv_mr.context` during its life.
    pub(crate) context: Arc<Context>,
}

/// Flags that a device may ignore (`IBV_ACCESS_OPTIONAL_RANGE`).
const OPTIONAL: c_uint = 0x3ff0_0000;

/// Access flags of C: `EINVAL` for a bit that does not exist, unless it is optional.
pub(crate) fn access(flags: c_uint) -> Result<Access, Errno> {
    let known = Access::from_bits_truncate(flags) & Access::VERBS;
    let unknown = flags & !known.bits() & !OPTIONAL;
    if unknown == 0 {
        return Ok(known);
    }
    let what = format_args!("access is {flags:#x}, and {unknown:#x} is no access flag");
    Err(no_value(&what))
}

fn reg(
    call: &str,
    pd_: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    flags: c_uint,
) -> *mut ibv_mr {
    faults::may_fail!("ibv_reg_mr", pointer);
    pointer(
        call,
        object::find(pd_).and_then(|pd: Arc<Pd>| {
            let access = access(flags)?;
            // SAFETY: the program promises the same to `ibv_reg_mr`: until the region is deregistered the device may
            // read and write the range.
            let device =
                unsafe { pd.inner.device.reg_mr(addr as u64, length as u64, iova, access) };
            let device = device.map_err(|error| refused(addr as u64, length, access, error))?;
            Ok(publish_memory(&pd, device, addr, length, iova, access))
        }),
    )
}

/// Says why memory was not registered. If the range is wrong, the whole of it helps to see why.
#[cold]
fn refused(addr: u64, length: usize, access: Access, error: RegisterError) -> Errno {
    match error {
        RegisterError::NotMapped(_) | RegisterError::Protected(_) | RegisterError::Range => {
            let what = format!("a region of {length} bytes at {addr:#x}: ");
            say(&what, &error, error.cause());
        }
        RegisterError::Access => {
            let what = format!("registering memory with access {:#x}: ", access.bits());
            say(&what, &error, error.cause());
        }
        _ => return error.into(),
    }
    Errno::said(error.errno())
}

/// Gives a region of the program's own memory to the program.
fn publish_memory(
    pd: &Pd,
    device: anyverbs::Mr,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: Access,
) -> *mut ibv_mr {
    let region = Region {
        addr: addr as u64,
        iova,
        len: length as u64,
        lkey: device.lkey(),
        rkey: device.rkey(),
        pd: pd.public() as usize,
        access: access.bits(),
    };
    let published = publish_mr(pd, device, addr, length);
    if access.contains(Access::LOCAL_WRITE) {
        // The device may write it at any time, also by a copy that another process makes.
        sanitizers::initialised_bytes(addr, length);
    }
    check::made_region(published, region);
    published
}

/// Gives a memory region to the program.
pub(crate) fn publish_mr(
    pd: &Pd,
    device: anyverbs::Mr,
    addr: *mut c_void,
    length: usize,
) -> *mut ibv_mr {
    // Imports use this handle.
    let handle = device.lkey();
    let context = Arc::clone(&pd.inner.context);
    let public = ibv_mr {
        context: context.pointer(),
        pd: pd.public(),
        addr,
        length,
        handle,
        lkey: device.lkey(),
        rkey: device.rkey(),
    };
    let published = object::publish(public, handle, MrInner { device: Arc::new(device), context });
    check::made_of(published, &[pd.public() as usize]);
    published
}

/// Slot of `ibv_alloc_null_mr`: NULL with `errno` on failure. The region has no rkey: it is 0.
pub(crate) unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    let _uncancelled = Uncancelled::new();
    pointer(
        "ibv_alloc_null_mr",
        object::find(pd).and_then(|pd: Arc<Pd>| {
            let device = pd.inner.device.alloc_null_mr()?;
            Ok(publish_mr(&pd, device, std::ptr::null_mut(), usize::MAX))
        }),
    )
}

/// A program's descriptor of a dma-buf, for the time of a call.
fn dmabuf<'a>(fd: c_int) -> Result<BorrowedFd<'a>, Errno> {
    if fd == -1 {
        // UCX asks by this whether the call is there.
        tracing::debug!("refused: ibv_reg_dmabuf_mr: fd is -1");
        Err(Errno::said(libc::EBADF))
    } else if fd < 0 {
        Err(Errno::because(libc::EBADF, "fd is no descriptor"))
    } else {
        // SAFETY: every call on it fails (`EBADF`) for a number that is no descriptor; -1 is none of those.
        Ok(unsafe { BorrowedFd::borrow_raw(fd) })
    }
}

/// `ibv_reg_dmabuf_mr`: NULL with `errno` on failure; `EINVAL` for a descriptor of something else than a dma-buf.
pub(crate) unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    flags: c_int,
) -> *mut ibv_mr {
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_reg_dmabuf_mr");
    pointer(
        "ibv_reg_dmabuf_mr",
        object::find(pd).and_then(|pd: Arc<Pd>| {
            let access = access(flags as c_uint)?;
            let range = (offset, length as u64, iova);
            let device = pd.inner.device.reg_dmabuf_mr(dmabuf(fd)?, range, access, None)?;
            Ok(publish_mr(&pd, device, std::ptr::null_mut(), length))
        }),
    )
}

/// `ibv_reg_mr_ex`: all the ways to register. NULL with `errno` on failure: `EINVAL` unless one of address and descriptor is
/// given, or for a buffer with a descriptor.
///
/// # Safety
/// `attr` is NULL or readable.
pub(crate) unsafe extern "C" fn ibv_reg_mr_ex(
    pd: *mut ibv_pd,
    attr: *mut ibv_mr_init_attr,
) -> *mut ibv_mr {
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_reg_mr_ex");
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    pointer("ibv_reg_mr_ex", attr.ok_or(Errno::NULL).and_then(|attr| reg_ex(pd, attr)))
}

fn reg_ex(pd: *mut ibv_pd, attr: &ibv_mr_init_attr) -> Result<*mut ibv_mr, Errno> {
    const IBV_REG_MR_MASK_IOVA: c_uint = 1;
    const KNOWN: c_uint = IBV_REG_MR_MASK_IOVA
        | IBV_REG_MR_MASK_ADDR
        | IBV_REG_MR_MASK_FD
        | IBV_REG_MR_MASK_FD_OFFSET
        | IBV_REG_MR_MASK_DMAH
        | IBV_REG_MR_MASK_BUF;
    let pd: Arc<Pd> = object::find(pd)?;
    let has = |bit: c_uint| attr.comp_mask & u64::from(bit) != 0;
    let (of_file, at_addr) = (has(IBV_REG_MR_MASK_FD), has(IBV_REG_MR_MASK_ADDR));
    let offset_alone = has(IBV_REG_MR_MASK_FD_OFFSET) && !of_file;
    if attr.comp_mask & !u64::from(KNOWN) != 0
        || of_file == at_addr
        || offset_alone
        || has(IBV_REG_MR_MASK_BUF) && of_file
    {
        return Err(Errno::invalid(
            "comp_mask has a bit that is not known here, or bits that do not go together",
        ));
    }
    let access = access(attr.access as c_uint)?;
    let dmah: Option<Arc<Dmah>> =
        if has(IBV_REG_MR_MASK_DMAH) { Some(object::find(attr.dmah)?) } else { None };
    if dmah.is_some() && access.contains(Access::ON_DEMAND) {
        return Err(Errno::lacks("a DMA handle and on-demand paging do not go together"));
    }
    let dmah = dmah.as_ref().map(|dmah| &dmah.inner.device);
    let iova = has(IBV_REG_MR_MASK_IOVA).then_some(attr.iova);
    let len = attr.length as u64;
    if of_file {
        let offset = if has(IBV_REG_MR_MASK_FD_OFFSET) { attr.fd_offset } else { 0 };
        let range = (offset, len, iova.unwrap_or(offset));
        let device = pd.inner.device.reg_dmabuf_mr(dmabuf(attr.fd)?, range, access, dmah)?;
        return Ok(publish_mr(&pd, device, std::ptr::null_mut(), attr.length));
    }
    let addr = attr.addr as u64;
    let iova = iova.unwrap_or(addr);
    let device = if has(IBV_REG_MR_MASK_BUF) {
        let buf: Arc<Buf> = object::find(attr.buf)?;
        // SAFETY: the program's promise, as for `reg`.
        unsafe { pd.inner.device.reg_buf_mr(&buf.inner.device, (addr, len, iova), access, dmah) }?
    } else {
        // SAFETY: as above.
        unsafe { pd.inner.device.reg_mr_with(addr, len, iova, access, dmah) }?
    };
    Ok(publish_memory(&pd, device, attr.addr, attr.length, iova, access))
}

/// Most elements that one call of `ibv_advise_mr` takes.
const MAX_ADVISED: u32 = 1 << 16;

/// Slot of `ibv_advise_mr`: 0, or the errno value.
///
/// # Safety
/// `list` is NULL or has `count` readable elements.
pub(crate) unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: c_uint,
    flags: u32,
    list: *mut ibv_sge,
    count: u32,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    const FLUSH: u32 = 1;
    value("ibv_advise_mr", object::find(pd).map_err(|_| Errno::invalid("the protection domain is none that lives")).and_then(|pd: Arc<Pd>| {
        pd.inner.context.answers()?;
        let advice = match advice {
            0 => Advice::Prefetch,
            1 => Advice::PrefetchWrite,
            2 => Advice::PrefetchNoFault,
            _ => return Err(Errno::lacks("advice is none that is known here")),
        };
        if flags & !FLUSH != 0 || list.is_null() || !(1..=MAX_ADVISED).contains(&count) {
            return Err(Errno::invalid("flags has a bit that is no flag, sg_list is NULL, or num_sge is out of range"));
        }
        // SAFETY: the caller's promise.
        let list = unsafe { std::slice::from_raw_parts(list, count as usize) };
        let sge = |s: &ibv_sge| Sge { addr: s.addr, len: s.length, lkey: s.lkey };
        let sges: Vec<Sge> = list.iter().map(sge).collect();
        Ok(pd.inner.device.advise_mr(advice, flags & FLUSH != 0, &sges)?)
    }))
}

/// `ibv_reg_mr`: NULL with `errno` on failure.
pub(crate) unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_reg_mr");
    reg("ibv_reg_mr", pd, addr, length, addr as u64, access as c_uint)
}

/// `ibv_reg_mr_iova`: as `ibv_reg_mr`; keys name the region by `iova` on.
pub(crate) unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_reg_mr_iova");
    reg("ibv_reg_mr_iova", pd, addr, length, iova, access as c_uint)
}

/// `ibv_reg_mr_iova2`: as `ibv_reg_mr_iova`. The `ibv_reg_mr` macro calls it for optional flags.
pub(crate) unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_reg_mr_iova2");
    reg("ibv_reg_mr_iova2", pd, addr, length, iova, access)
}

/// `ibv_rereg_mr`: 0, or a value of `enum ibv_rereg_mr_err_code` with `errno`. On any failure the region is as it was,
/// as `IBV_REREG_MR_ERR_INPUT` says; `IBV_REREG_MR_ERR_CMD` where the device has failed.
pub(crate) unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_rereg_mr");
    let asked = object::find(mr).and_then(|mr: Arc<Mr>| mr.inner.context.answers());
    if let Some(errno) = asked.err().filter(|errno| errno.0 == libc::EIO) {
        errno.refuse("ibv_rereg_mr");
        return IBV_REREG_MR_ERR_CMD as c_int;
    }
    match rereg(mr, flags as c_uint, pd, addr, length, access as c_uint) {
        Ok(()) => 0,
        Err(e) => {
            e.refuse("ibv_rereg_mr");
            IBV_REREG_MR_ERR_INPUT as c_int
        }
    }
}

fn rereg(
    mr: *mut ibv_mr,
    flags: c_uint,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access_: c_uint,
) -> Result<(), Errno> {
    let mr: Arc<Mr> = object::find(mr)?;
    if flags == 0 || flags & !IBV_REREG_MR_FLAGS_SUPPORTED != 0 {
        return Err(Errno::invalid("flags is 0, or has a bit that is no flag"));
    }
    let changes = |flag| flags & flag != 0;
    let translation = changes(IBV_REREG_MR_CHANGE_TRANSLATION);
    if translation && (addr.is_null() || length == 0) {
        return Err(Errno::invalid(
            "addr is NULL or length is 0, and IBV_REREG_MR_CHANGE_TRANSLATION asks for them",
        ));
    }
    let pd: Option<Arc<Pd>> =
        if changes(IBV_REREG_MR_CHANGE_PD) { Some(object::find(pd)?) } else { None };
    let change = Rereg {
        translation: translation.then_some((addr as u64, length as u64)),
        pd: pd.as_ref().map(|pd| &pd.inner.device),
        access: if changes(IBV_REREG_MR_CHANGE_ACCESS) { Some(access(access_)?) } else { None },
    };
    // SAFETY: the program's promise, as for `reg`.
    unsafe { mr.inner.device.rereg(&change) }?;
    let public = mr.public();
    // SAFETY: the object is live; the fields are C's to read, and written here only.
    unsafe {
        if let Some(pd) = &pd {
            (&raw mut (*public).pd).write(pd.public());
            check::made_of(public, &[pd.public() as usize]);
        }
        if translation {
            (&raw mut (*public).addr).write(addr);
            (&raw mut (*public).length).write(length);
            sanitizers::initialised_bytes(addr, length);
        }
    }
    let domain = pd.as_ref().map(|pd| pd.public() as usize);
    check::changed_region(public, change.translation, domain, change.access.map(|a| a.bits()));
    Ok(())
}

/// `ibv_dereg_mr`: 0, or the errno value; `EBUSY` while memory windows are bound to it.
pub(crate) unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    let _uncancelled = Uncancelled::new();
    faults::may_fail!("ibv_dereg_mr", value);
    value(
        "ibv_dereg_mr",
        object::find(mr).and_then(|mr: Arc<Mr>| {
            check::ending(mr.public(), activity, || mr.inner.device.destroy().map_err(in_use))?;
            object::retire(&mr)
        }),
    )
}
