//! Memory windows: the slots of `ibv_alloc_mw`, `ibv_bind_mw` and `ibv_dealloc_mw`, and the bind requests.

use std::{
    ffi::{c_int, c_uint},
    sync::Arc,
};

use anyverbs::{Access, BindInfo, SendFlags, SendOp, SendWr, WindowType};

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, pointer, value},
    faults,
    object::{self, Object, deref},
    verbs::{Context, Mr, Pd, access},
};

pub(crate) type Mw = Object<ibv_mw>;

/// The device's part of a memory window.
pub(crate) struct MwInner {
    device: anyverbs::Mw,
    /// `ibv_mw.context` during its life.
    _context: Arc<Context>,
}

/// Slot of `ibv_alloc_mw`: NULL with `errno` on failure.
pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: c_uint) -> *mut ibv_mw {
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_alloc_mw");
    faults::may_fail!("ibv_alloc_mw", pointer);
    pointer(
        "ibv_alloc_mw",
        object::find(pd).and_then(|pd: Arc<Pd>| {
            let device = pd.inner.device.alloc_mw(match kind {
                IBV_MW_TYPE_1 => WindowType::Type1,
                IBV_MW_TYPE_2 => WindowType::Type2,
                _ => {
                    return Err(Errno::invalid(
                        "the type is neither IBV_MW_TYPE_1 nor IBV_MW_TYPE_2",
                    ));
                }
            })?;
            let handle = object::new_handle();
            let context = Arc::clone(&pd.inner.context);
            let public = ibv_mw {
                context: context.pointer(),
                pd: pd.public(),
                rkey: device.rkey(),
                handle,
                r#type: kind,
            };
            let inner = MwInner { device, _context: context };
            let published = object::publish(public, handle, inner);
            check::made_of(published, &[pd.public() as usize]);
            Ok(published)
        }),
    )
}

/// Slot of `ibv_dealloc_mw`: 0, or the errno value.
pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_dealloc_mw",
        object::find(mw).and_then(|mw: Arc<Mw>| {
            mw.inner.device.destroy()?;
            object::retire(&mw)
        }),
    )
}

/// The request that binds a window of this type, and the key that it has then. Binds are posted, and as elsewhere on
/// the data path handles are not compared.
fn request(
    mw: &Mw,
    kind: WindowType,
    rkey: u32,
    info: &ibv_mw_bind_info,
) -> Result<(SendOp, u32), Errno> {
    if mw.inner.device.kind() != kind {
        return Err(Errno::invalid(
            "the type of the memory window goes with another way to bind it",
        ));
    }
    let mr: Option<Arc<Mr>> = if info.mr.is_null() { None } else { Some(object::lookup(info.mr)?) };
    let info = BindInfo {
        mr: mr.as_ref().map(|mr| &*mr.inner.device),
        addr: info.addr,
        len: info.length,
        access: access(info.mw_access_flags)?,
    };
    Ok(mw.inner.device.bind(rkey, &info)?)
}

/// The operation of `IBV_WR_BIND_MW`, for windows of type 2 only.
pub(crate) fn bind(mw: *mut ibv_mw, rkey: u32, info: &ibv_mw_bind_info) -> Result<SendOp, Errno> {
    let mw = object::lookup(mw)?;
    Ok(request(&mw, WindowType::Type2, rkey, info)?.0)
}

/// A bind of a window of type 2 was posted: `mw->rkey` is the key that it has then, as after `ibv_bind_mw`.
pub(crate) fn name_bound(mw: *mut ibv_mw, rkey: u32) {
    if let Ok(mw) = object::lookup(mw) {
        let key = mw.inner.device.bound_key(rkey);
        // SAFETY: the object is live.
        unsafe { (&raw mut (*mw.public()).rkey).write(key) };
    }
}

/// Slot of `ibv_bind_mw`, for windows of type 1: 0, or the errno value. `mw->rkey` is the key after the bind, which is
/// done, or not, when its completion says so.
///
/// # Safety
/// `qp` is NULL or live; `mw_bind` is NULL or readable.
pub(crate) unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    mw_bind: *mut ibv_mw_bind,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let (qp, mw_bind) = unsafe { (deref::<ibv_qp_ex>(qp.cast()), mw_bind.as_ref()) };
    value(
        "ibv_bind_mw",
        qp.zip(mw_bind).ok_or(Errno::NULL).and_then(|(qp, mw_bind)| {
            let mw: Arc<Mw> = object::lookup(mw)?;
            let public = mw.public();
            // SAFETY: the object is live. The program may have set it back after a bind that failed.
            let now = unsafe { (&raw const (*public).rkey).read() };
            let info = &mw_bind.bind_info;
            let (op, rkey) = request(&mw, WindowType::Type1, now.wrapping_add(1), info)?;
            let flags = SendFlags::from_bits(mw_bind.send_flags)
                .ok_or(Errno::invalid("send_flags has a bit that is no flag"))?;
            let flags = flags & (SendFlags::FENCE | SendFlags::SIGNALED);
            let wr_id = mw_bind.wr_id;
            let wr = SendWr { wr_id, op, flags, sges: &[], ud: None, xrc_srqn: 0 };
            qp.inner.device.transport()?.post()?.send(&wr)?;
            // SAFETY: as above.
            unsafe { (&raw mut (*public).rkey).write(rkey) };
            Ok(())
        }),
    )
}

/// Access flags of a queue pair, as C has them.
pub(crate) fn qp_access(flags: c_uint) -> Result<Access, Errno> {
    let access = Access::from_bits(flags).filter(|access| Access::VERBS.contains(*access));
    access.ok_or(Errno::invalid(
        "access flags have a bit that is no flag of a queue pair or a window",
    ))
}
