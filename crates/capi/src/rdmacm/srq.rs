//! Shared receive queues of ids.

use anyverbs_sanitizers as sanitizers;
use std::{ffi::c_int, ptr};

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::Errno,
    rdmacm::{
        Id,
        cqs::{self, Cqs},
        id, zero,
    },
    verbs,
};

/// `rdma_create_srq`: 0, or -1 with `errno`; `EINVAL` for an id without a device, or with an SRQ. The SRQ is of kind
/// XRC for an id that is `IBV_QPT_XRC_RECV`.
///
/// # Safety
/// `attr` is NULL, or readable and writable.
pub(crate) unsafe extern "C" fn rdma_create_srq(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attr: *mut ibv_srq_init_attr,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("rdma_create_srq");
    sanitizers::initialised(attr);
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_mut() };
    zero(
        "rdma_create_srq",
        id::find(id).and_then(|id| {
            let attr = attr.ok_or(Errno::NULL)?;
            // SAFETY: integers and NULL pointers.
            let mut ex: ibv_srq_init_attr_ex = unsafe { std::mem::zeroed() };
            ex.srq_context = attr.srq_context;
            ex.attr = attr.attr;
            ex.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD;
            let xrc = id::fields(&id).qp_type == IBV_QPT_XRC_RECV;
            ex.srq_type = if xrc { IBV_SRQT_XRC } else { IBV_SRQT_BASIC };
            ex.pd = pd;
            create(&id, &mut ex)?;
            attr.attr = ex.attr;
            Ok(())
        }),
    )
}

/// `rdma_create_srq_ex`: as `rdma_create_srq`, of the kind that `attr` must name. A missing domain or completion queue
/// of an XRC SRQ is made.
///
/// # Safety
/// `attr` is NULL, or readable and writable.
pub(crate) unsafe extern "C" fn rdma_create_srq_ex(
    id: *mut rdma_cm_id,
    attr: *mut ibv_srq_init_attr_ex,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("rdma_create_srq_ex");
    sanitizers::initialised(attr);
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_mut() };
    zero("rdma_create_srq_ex", id::find(id).and_then(|id| create(&id, attr.ok_or(Errno::NULL)?)))
}

fn create(id: &Id, attr: &mut ibv_srq_init_attr_ex) -> Result<(), Errno> {
    let public = id::fields(id);
    let named = attr.comp_mask & IBV_SRQ_INIT_ATTR_TYPE != 0;
    if !named || public.verbs.is_null() || !public.srq.is_null() {
        return Err(Errno::invalid(
            "srq_type is not given, or the id has no device yet, or an SRQ already",
        ));
    }
    let before = Cqs::of(id);
    let mut asked = *attr;
    if asked.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 || asked.pd.is_null() {
        asked.comp_mask |= IBV_SRQ_INIT_ATTR_PD;
        asked.pd = public.pd;
    }
    if asked.srq_type == IBV_SRQT_XRC {
        if asked.comp_mask & IBV_SRQ_INIT_ATTR_XRCD == 0 || asked.xrcd.is_null() {
            asked.xrcd = id::device_of(id)?.xrcd()?;
        }
        if asked.comp_mask & IBV_SRQ_INIT_ATTR_CQ == 0 || asked.cq.is_null() {
            if before.recv().is_null() {
                cqs::create(id, [None, Some(asked.attr.max_wr)])?;
            }
            asked.cq = Cqs::of(id).recv();
        }
        asked.comp_mask |= IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
    }
    // SAFETY: `asked` is readable and writable; the call looks up the rest.
    let srq = unsafe { verbs::create_srq_ex(public.verbs, &raw mut asked) };
    if srq.is_null() {
        let error = Errno::last();
        cqs::destroy_since(id, &before);
        return Err(error);
    }
    // SAFETY: the object is live.
    unsafe { (&raw mut (*id.public()).srq).write(srq) };
    *attr = asked;
    Ok(())
}

/// `rdma_destroy_srq`: with the completion queues that the id shows, if it has no queue pair. Does nothing without an
/// SRQ, or while a queue pair uses it.
pub(crate) unsafe extern "C" fn rdma_destroy_srq(id: *mut rdma_cm_id) {
    let _uncancelled = Uncancelled::new();
    if let Ok(id) = id::find(id) {
        destroy(&id);
    }
}

pub(crate) fn destroy(id: &Id) {
    let public = id::fields(id);
    // SAFETY: the call looks its argument up.
    if public.srq.is_null() || unsafe { verbs::ibv_destroy_srq(public.srq) } == libc::EBUSY {
        return;
    }
    // SAFETY: the object is live.
    unsafe { (&raw mut (*id.public()).srq).write(ptr::null_mut()) };
    if public.qp.is_null() {
        cqs::destroy(id);
    }
}
