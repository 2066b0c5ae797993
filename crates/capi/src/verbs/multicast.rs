//! Multicast groups of datagram queue pairs.

use std::ffi::c_int;

use anyverbs::Gid;

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, value},
    verbs::qp,
};

/// A group as C has it.
///
/// # Safety
/// `gid` is NULL or readable.
unsafe fn group(gid: *const ibv_gid) -> Result<Gid, Errno> {
    // SAFETY: the caller's promise; any 16 bytes are a GID.
    unsafe { gid.as_ref().map(|gid| Gid(gid.raw)) }.ok_or(Errno::invalid("gid is NULL"))
}

/// `ibv_attach_mcast`: 0, or the errno value. Attaching twice is 0.
///
/// # Safety
/// `gid` is NULL or readable.
pub(crate) unsafe extern "C" fn ibv_attach_mcast(
    qp_: *mut ibv_qp,
    gid: *const ibv_gid,
    lid: u16,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let gid = unsafe { group(gid) };
    value(
        "ibv_attach_mcast",
        qp(qp_).and_then(|qp| {
            qp.inner.context.answers()?;
            let gid = gid?;
            qp.inner.device.transport()?.attach_mcast(gid, lid)?;
            check::attached(qp_, gid);
            Ok(())
        }),
    )
}

/// `ibv_detach_mcast`: 0, or the errno value; `EINVAL` where it is not attached.
///
/// # Safety
/// `gid` is NULL or readable.
pub(crate) unsafe extern "C" fn ibv_detach_mcast(
    qp_: *mut ibv_qp,
    gid: *const ibv_gid,
    lid: u16,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let gid = unsafe { group(gid) };
    value(
        "ibv_detach_mcast",
        qp(qp_).and_then(|qp| {
            let gid = gid?;
            qp.inner.device.transport()?.detach_mcast(gid, lid)?;
            check::detached(qp_, gid);
            Ok(())
        }),
    )
}
