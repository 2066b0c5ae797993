//! Enhanced connection establishment: options of vendors, which travel with REQ and REP.

use std::ffi::c_int;

use anyverbs::cm::Ece;

use crate::{
    abi::*,
    cancel::Uncancelled,
    errno::{Errno, give},
    rdmacm::{id, zero},
};

/// `rdma_set_local_ece`: 0, or -1 with `errno`.
///
/// # Safety
/// `ece` is NULL or readable.
pub(crate) unsafe extern "C" fn rdma_set_local_ece(
    id: *mut rdma_cm_id,
    ece: *mut ibv_ece,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let ece = unsafe { ece.as_ref() };
    zero(
        "rdma_set_local_ece",
        id::find(id).and_then(|id| {
            let ece = ece.filter(|ece| ece.vendor_id != 0 && ece.comp_mask == 0);
            let ece = ece.ok_or(Errno::NULL)?;
            let ece = Ece { vendor_id: ece.vendor_id, options: ece.options };
            Ok(id.inner.device.set_local_ece(ece)?)
        }),
    )
}

/// `rdma_get_remote_ece`: 0, or -1 with `errno`. Zeros: the peer sent none.
///
/// # Safety
/// `ece` is NULL or writable.
pub(crate) unsafe extern "C" fn rdma_get_remote_ece(
    id: *mut rdma_cm_id,
    ece: *mut ibv_ece,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    zero(
        "rdma_get_remote_ece",
        id::find(id).and_then(|id| {
            if ece.is_null() {
                return Err(Errno::NULL);
            }
            let remote = id.inner.device.remote_ece()?;
            let c = ibv_ece { vendor_id: remote.vendor_id, options: remote.options, comp_mask: 0 };
            // SAFETY: the caller's promise.
            unsafe { give(ece, c) };
            Ok(())
        }),
    )
}
