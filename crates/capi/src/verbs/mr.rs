//! Memory regions.

use std::{
    ffi::{c_int, c_uint, c_void},
    sync::Arc,
};

use anyverbs::{Access, Rereg};

use crate::{
    abi::*,
    errno::{Errno, pointer},
    object::{self, Object},
    verbs::{Context, Pd},
};

pub(crate) type Mr = Object<ibv_mr>;

/// What an MR holds of the device.
pub(crate) struct MrInner {
    device: anyverbs::Mr,
    /// For its life: `ibv_mr.context`.
    _context: Arc<Context>,
}

/// Flags that a device may ignore (`IBV_ACCESS_OPTIONAL_RANGE`).
const OPTIONAL: c_uint = 0x3ff0_0000;

/// Access flags of C: `EINVAL` for a bit that does not exist, unless it is optional.
fn access(flags: c_uint) -> Result<Access, Errno> {
    let known = Access::from_bits_truncate(flags);
    if flags & !known.bits() & !OPTIONAL == 0 { Ok(known) } else { Err(Errno::EINVAL) }
}

fn reg(
    pd_: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    flags: c_uint,
) -> *mut ibv_mr {
    pointer(object::find(pd_).and_then(|pd: Arc<Pd>| {
        let access = access(flags)?;
        // SAFETY: the program promises the same to `ibv_reg_mr`: until the region is deregistered the device may
        // read and write the range.
        let device = unsafe { pd.inner.device.reg_mr(addr as u64, length as u64, iova, access) }?;
        let handle = object::new_handle();
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
        Ok(object::publish(public, handle, MrInner { device, _context: context }))
    }))
}

/// `ibv_reg_mr`: NULL with `errno` on failure.
pub(crate) unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    reg(pd, addr, length, addr as u64, access as c_uint)
}

/// `ibv_reg_mr_iova`: as `ibv_reg_mr`; keys name the region by `iova` on.
pub(crate) unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    reg(pd, addr, length, iova, access as c_uint)
}

/// `ibv_reg_mr_iova2`: as `ibv_reg_mr_iova`; what the `ibv_reg_mr` macro calls with optional flags.
pub(crate) unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    reg(pd, addr, length, iova, access)
}

/// `ibv_rereg_mr`: 0, or a value of `enum ibv_rereg_mr_err_code` with `errno`. Whatever fails, the region is as it was,
/// which is what `IBV_REREG_MR_ERR_INPUT` says.
pub(crate) unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    match rereg(mr, flags as c_uint, pd, addr, length, access as c_uint) {
        Ok(()) => 0,
        Err(e) => {
            e.set();
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
        return Err(Errno::EINVAL);
    }
    let changes = |flag| flags & flag != 0;
    let translation = changes(IBV_REREG_MR_CHANGE_TRANSLATION);
    if translation && (addr.is_null() || length == 0) {
        return Err(Errno::EINVAL);
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
        if let Some(pd) = pd {
            (&raw mut (*public).pd).write(pd.public());
        }
        if translation {
            (&raw mut (*public).addr).write(addr);
            (&raw mut (*public).length).write(length);
        }
    }
    Ok(())
}

/// `ibv_dereg_mr`: 0, or the errno value.
pub(crate) unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    crate::errno::value(object::find(mr).and_then(|mr: Arc<Mr>| {
        mr.inner.device.destroy()?;
        object::retire(&mr).ok_or(Errno::EINVAL)
    }))
}
