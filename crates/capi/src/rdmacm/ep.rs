//! `rdma_create_ep`: an id that is bound or resolved, with its queue pair, in one call.

use std::{ffi::c_int, ptr, slice, sync::Arc};

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, give},
    rdmacm::{
        Id, address_of_length,
        id::{self, QpTemplate},
        qp, resolve, srq, zero,
    },
};

/// `rdma_create_ep`: 0, or -1 with `errno`. The id is synchronous.
///
/// # Safety
/// `id` is NULL or writable; `res` is NULL, or from `rdma_getaddrinfo` or its like; `init` is NULL, or readable and writable.
pub(crate) unsafe extern "C" fn rdma_create_ep(
    id: *mut *mut rdma_cm_id,
    res: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("rdma_create_ep");
    // SAFETY: the caller's promise.
    let (res, init) = unsafe { (res.as_ref(), init.as_mut()) };
    zero(
        "rdma_create_ep",
        res.filter(|_| !id.is_null()).ok_or(Errno::NULL).and_then(|res| {
            let (ps, qp_type) = (res.ai_port_space as u32, res.ai_qp_type as u32);
            let created = id::create(ptr::null_mut(), ptr::null_mut(), ps, qp_type)?;
            // SAFETY: the caller's promise.
            let prepared = unsafe {
                if res.ai_flags & RAI_PASSIVE != 0 {
                    passive(&created, res, pd, init)
                } else {
                    active(&created, res, pd, init)
                }
            };
            prepared.inspect_err(|_| destroy(&created))?;
            // SAFETY: the caller's promise.
            unsafe { give(id, created.public()) };
            Ok(())
        }),
    )
}

/// # Safety
/// The addresses in `res` are NULL or as long as it says.
unsafe fn passive(
    id: &Id,
    res: &rdma_addrinfo,
    pd: *mut ibv_pd,
    init: Option<&mut ibv_qp_init_attr>,
) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    resolve::bind(id, &unsafe { address_of_length(res.ai_src_addr, res.ai_src_len) }?)?;
    if !pd.is_null() {
        // SAFETY: the object is live.
        unsafe { (&raw mut (*id.public()).pd).write(pd) };
    }
    if let Some(init) = init {
        let template = ibv_qp_init_attr { qp_type: res.ai_qp_type as u32, ..*init };
        id.inner.state.lock().requests_qp = Some(QpTemplate(template));
    }
    Ok(())
}

/// # Safety
/// The addresses and the data in `res` are NULL or as long as it says.
unsafe fn active(
    id: &Arc<Id>,
    res: &rdma_addrinfo,
    pd: *mut ibv_pd,
    init: Option<&mut ibv_qp_init_attr>,
) -> Result<(), Errno> {
    let source = if res.ai_src_addr.is_null() || res.ai_src_len == 0 {
        None
    } else {
        // SAFETY: the caller's promise.
        Some(unsafe { address_of_length(res.ai_src_addr, res.ai_src_len) }?)
    };
    // SAFETY: the caller's promise.
    let destination = unsafe { address_of_length(res.ai_dst_addr, res.ai_dst_len) }?;
    resolve::resolve_addr(id, source.as_ref(), &destination)?;
    resolve::resolve_route(id)?;
    if let Some(init) = init {
        init.qp_type = res.ai_qp_type as u32;
        qp::create(id, pd, init)?;
    }
    if !res.ai_connect.is_null() {
        if res.ai_connect_len > u8::MAX.into() {
            return Err(Errno::invalid("ai_connect_len is more than 255"));
        }
        // SAFETY: the caller's promise; copied at once.
        let data = unsafe { slice::from_raw_parts(res.ai_connect.cast(), res.ai_connect_len) };
        id.inner.state.lock().connect = data.to_vec();
    }
    Ok(())
}

/// `rdma_destroy_ep`: the id, and all objects made on it.
pub(crate) unsafe extern "C" fn rdma_destroy_ep(id: *mut rdma_cm_id) {
    let _uncancelled = Uncancelled::new();
    if let Ok(id) = id::find(id) {
        destroy(&id);
    }
}

fn destroy(id: &Arc<Id>) {
    let public = id::fields(id);
    if !public.qp.is_null() {
        qp::destroy(id);
    }
    if !public.srq.is_null() {
        srq::destroy(id);
    }
    // Whoever is refused here would be refused by `rdma_destroy_id`, which could say so.
    let _ = id::destroy(id);
}
