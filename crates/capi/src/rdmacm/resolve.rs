//! Resolving addresses to a device and a route, and listening.

use std::{ffi::c_int, sync::Arc};

use anyverbs::cm::Address;
use libc::sockaddr;

use crate::{
    abi::*,
    cancel::Uncancelled,
    errno::Errno,
    faults,
    rdmacm::{Id, address, complete, id, zero},
};

/// `rdma_bind_addr`: 0, or -1 with `errno`.
///
/// # Safety
/// `addr` is NULL or an address.
pub(crate) unsafe extern "C" fn rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int {
    faults::may_fail!("rdma_bind_addr", zero);
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    zero("rdma_bind_addr", id::find(id).and_then(|id| bind(&id, &unsafe { address(addr) }?)))
}

pub(crate) fn bind(id: &Id, address: &Address) -> Result<(), Errno> {
    id.inner.device.bind_addr(address)?;
    id::refresh(id)
}

/// `rdma_resolve_addr`: 0, or -1 with `errno`. It takes no time, so the timeout does not count.
///
/// # Safety
/// `src_addr` and `dst_addr` are NULL or addresses.
pub(crate) unsafe extern "C" fn rdma_resolve_addr(
    id: *mut rdma_cm_id,
    src_addr: *mut sockaddr,
    dst_addr: *mut sockaddr,
    _timeout_ms: c_int,
) -> c_int {
    faults::may_fail!("rdma_resolve_addr", zero);
    zero(
        "rdma_resolve_addr",
        id::find(id).and_then(|id| {
            let source = if src_addr.is_null() {
                None
            } else {
                // SAFETY: the caller's promise.
                Some(unsafe { address(src_addr) }?)
            };
            // SAFETY: the caller's promise.
            let destination = unsafe { address(dst_addr) }?;
            resolve_addr(&id, source.as_ref(), &destination)
        }),
    )
}

pub(crate) fn resolve_addr(
    id: &Arc<Id>,
    source: Option<&Address>,
    destination: &Address,
) -> Result<(), Errno> {
    let uncancelled = Uncancelled::new();
    id.inner.device.resolve_addr(source, destination)?;
    // The peer's address is there before the event.
    id::refresh(id)?;
    drop(uncancelled);
    complete(id)
}

/// `rdma_resolve_route`: 0, or -1 with `errno`. It takes no time, so the timeout does not count.
pub(crate) unsafe extern "C" fn rdma_resolve_route(
    id: *mut rdma_cm_id,
    _timeout_ms: c_int,
) -> c_int {
    faults::may_fail!("rdma_resolve_route", zero);
    zero("rdma_resolve_route", id::find(id).and_then(|id| resolve_route(&id)))
}

pub(crate) fn resolve_route(id: &Arc<Id>) -> Result<(), Errno> {
    let uncancelled = Uncancelled::new();
    id.inner.device.resolve_route()?;
    drop(uncancelled);
    complete(id)
}

/// `rdma_listen`: 0, or -1 with `errno`. A backlog that is not positive is the largest.
pub(crate) unsafe extern "C" fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    faults::may_fail!("rdma_listen", zero);
    let _uncancelled = Uncancelled::new();
    zero(
        "rdma_listen",
        id::find(id).and_then(|id| {
            id.inner.device.listen(usize::try_from(backlog).unwrap_or(0))?;
            // An id that was not bound is now.
            id::refresh(&id)
        }),
    )
}
