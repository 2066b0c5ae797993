//! `rdma_resolve_addrinfo`: `rdma_getaddrinfo` behind an event.

use std::{
    ffi::{c_char, c_int},
    sync::Arc,
    thread,
};

use anyverbs::cm::{EventKind, EventParam};

use crate::{
    abi::*,
    errno::Errno,
    rdmacm::{Id, Query, complete, event, id, zero},
};

/// `rdma_resolve_addrinfo`: 0, or -1 with `errno`; an event tells the outcome. A name server is waited for in a thread.
///
/// # Safety
/// As `rdma_getaddrinfo`.
pub(crate) unsafe extern "C" fn rdma_resolve_addrinfo(
    id: *mut rdma_cm_id,
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
) -> c_int {
    zero(id::find(id).and_then(|id| {
        // SAFETY: the caller's promise.
        let query = unsafe { Query::new(node, service, hints) }?;
        if query.asks_subnet_administrator() {
            return Err(Errno::EOPNOTSUPP);
        }
        let resolver = Arc::clone(&id);
        thread::Builder::new()
            .name("av-addrinfo".into())
            .spawn(move || resolve(&resolver, &query))
            .map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EAGAIN)))?;
        complete(&id)
    }))
}

fn resolve(id: &Id, query: &Query) {
    let (kind, status) = match query.resolve() {
        Ok(found) => {
            id.inner.state.lock().resolved = Some(found);
            (EventKind::AddrinfoResolved, 0)
        }
        Err(failure) => (EventKind::AddrinfoError, -failure.errno().0),
    };
    // Refused if the id was destroyed meanwhile.
    let _ = event::write(id, kind, status, EventParam::None);
}

/// `rdma_query_addrinfo`: 0, or -1 with `errno`; `ENODATA` if nothing was resolved. For `rdma_freeaddrinfo`.
///
/// # Safety
/// `info` is NULL or writable.
pub(crate) unsafe extern "C" fn rdma_query_addrinfo(
    id: *mut rdma_cm_id,
    info: *mut *mut rdma_addrinfo,
) -> c_int {
    zero(id::find(id).and_then(|id| {
        if info.is_null() {
            return Err(Errno::EINVAL);
        }
        let found = id.inner.state.lock().resolved.clone().ok_or(Errno(libc::ENODATA))?;
        // SAFETY: the caller's promise.
        unsafe { info.write(found.to_c()?) };
        Ok(())
    }))
}
