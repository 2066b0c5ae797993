//! Multicast groups.

use std::{
    ffi::{c_int, c_void},
    sync::Arc,
};

use anyverbs::cm::Join;
use libc::sockaddr;

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::Errno,
    rdmacm::{Id, address, complete, id, zero},
};

/// # Safety
/// `addr` is NULL or an address.
unsafe fn join(
    id: &Arc<Id>,
    addr: *const sockaddr,
    send_only: bool,
    context: *mut c_void,
) -> Result<(), Errno> {
    let uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let group = unsafe { address(addr) }?;
    id.inner.device.join(&Join { group, send_only, cookie: context as u64 })?;
    if !send_only {
        check::joined(id::fields(id).qp, id.public(), group.gid());
    }
    drop(uncancelled);
    complete(id)
}

/// `rdma_join_multicast`: 0, or -1 with `errno`. The event carries `context` as its private data.
///
/// # Safety
/// `addr` is NULL or an address.
pub(crate) unsafe extern "C" fn rdma_join_multicast(
    id: *mut rdma_cm_id,
    addr: *mut sockaddr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    zero(
        "rdma_join_multicast",
        id::find(id).and_then(|id| unsafe { join(&id, addr, false, context) }),
    )
}

/// `rdma_join_multicast_ex`: 0, or -1 with `errno`. `ENOTSUP` for an attribute that does not exist yet, `EINVAL` without
/// address or flags.
///
/// # Safety
/// `attr` is NULL or readable, and its address is NULL or an address.
pub(crate) unsafe extern "C" fn rdma_join_multicast_ex(
    id: *mut rdma_cm_id,
    attr: *mut rdma_cm_join_mc_attr_ex,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    zero(
        "rdma_join_multicast_ex",
        id::find(id).and_then(|id| {
            let attr = attr.ok_or(Errno::NULL)?;
            let needed = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
            if attr.comp_mask >= RDMA_CM_JOIN_MC_ATTR_RESERVED {
                return Err(Errno::lacks("comp_mask has a bit that is not known here"));
            }
            if attr.comp_mask & needed != needed || attr.join_flags >= RDMA_MC_JOIN_FLAG_RESERVED {
                return Err(Errno::invalid(
                    "comp_mask needs both the address and the flags, or join_flags is wrong",
                ));
            }
            let send_only = attr.join_flags == RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER;
            // SAFETY: the caller's promise.
            unsafe { join(&id, attr.addr, send_only, context) }
        }),
    )
}

/// `rdma_leave_multicast`: 0, or -1 with `errno`; `EADDRNOTAVAIL` for a group that was not joined.
///
/// # Safety
/// `addr` is NULL or an address.
pub(crate) unsafe extern "C" fn rdma_leave_multicast(
    id: *mut rdma_cm_id,
    addr: *mut sockaddr,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    zero(
        "rdma_leave_multicast",
        id::find(id).and_then(|id| {
            // SAFETY: the caller's promise.
            let group = unsafe { address(addr) }?;
            id.inner.device.leave(&group)?;
            check::left(id::fields(&id).qp, id.public(), group.gid());
            Ok(())
        }),
    )
}
