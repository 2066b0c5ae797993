//! Queue pairs of ids.

use anyverbs_sanitizers as sanitizers;
use std::{ffi::c_int, ptr, sync::Arc};

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::Errno,
    faults,
    rdmacm::{
        Id,
        cqs::{self, Cqs},
        id, zero,
    },
    verbs::{self, qp},
};

/// `rdma_create_qp`: 0, or -1 with `errno`; `EINVAL` for an id without a device, or with a queue pair. The queue pair
/// and its actual sizes go to `init`.
///
/// # Safety
/// `init` is NULL, or readable and writable.
pub(crate) unsafe extern "C" fn rdma_create_qp(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    faults::may_fail!("rdma_create_qp", zero);
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("rdma_create_qp");
    sanitizers::initialised(init);
    // SAFETY: the caller's promise.
    let init = unsafe { init.as_mut() };
    zero("rdma_create_qp", id::find(id).and_then(|id| create(&id, pd, init.ok_or(Errno::NULL)?)))
}

pub(crate) fn create(
    id: &Arc<Id>,
    pd: *mut ibv_pd,
    init: &mut ibv_qp_init_attr,
) -> Result<(), Errno> {
    // SAFETY: integers and NULL pointers.
    let mut attr: ibv_qp_init_attr_ex = unsafe { std::mem::zeroed() };
    attr.qp_context = init.qp_context;
    attr.send_cq = init.send_cq;
    attr.recv_cq = init.recv_cq;
    attr.srq = init.srq;
    attr.cap = init.cap;
    attr.qp_type = init.qp_type;
    attr.sq_sig_all = init.sq_sig_all;
    attr.comp_mask = IBV_QP_INIT_ATTR_PD;
    attr.pd = pd;
    create_ex(id, &mut attr)?;
    init.send_cq = attr.send_cq;
    init.recv_cq = attr.recv_cq;
    init.srq = attr.srq;
    init.cap = attr.cap;
    Ok(())
}

/// `rdma_create_qp_ex`: as `rdma_create_qp`, with the extensions of `ibv_create_qp_ex`.
///
/// # Safety
/// `attr` is NULL, or readable and writable.
pub(crate) unsafe extern "C" fn rdma_create_qp_ex(
    id: *mut rdma_cm_id,
    attr: *mut ibv_qp_init_attr_ex,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("rdma_create_qp_ex");
    sanitizers::initialised(attr);
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_mut() };
    zero("rdma_create_qp_ex", id::find(id).and_then(|id| create_ex(&id, attr.ok_or(Errno::NULL)?)))
}

fn create_ex(id: &Arc<Id>, attr: &mut ibv_qp_init_attr_ex) -> Result<(), Errno> {
    let public = id::fields(id);
    if !public.qp.is_null() {
        return Err(Errno::invalid("the id has a queue pair already"));
    }
    if public.verbs.is_null() {
        return Err(Errno::invalid(
            "the id has no device yet (rdma_resolve_addr or rdma_bind_addr gives it one)",
        ));
    }
    let before = Cqs::of(id);
    let differs = |shown: *mut ibv_cq, given: *mut ibv_cq| {
        !shown.is_null() && !given.is_null() && shown != given
    };
    if differs(before.send(), attr.send_cq) || differs(before.recv(), attr.recv_cq) {
        return Err(Errno::invalid("the id has other completion queues already"));
    }
    let mut asked = *attr;
    if asked.comp_mask & IBV_QP_INIT_ATTR_PD == 0 || asked.pd.is_null() {
        asked.comp_mask |= IBV_QP_INIT_ATTR_PD;
        asked.pd = public.pd;
    }
    let (sends, receives) = match asked.qp_type {
        IBV_QPT_XRC_SEND => (true, false),
        IBV_QPT_XRC_RECV => (false, false),
        _ => (true, true),
    };
    if asked.qp_type == IBV_QPT_XRC_RECV {
        if asked.comp_mask & IBV_QP_INIT_ATTR_XRCD == 0 || asked.xrcd.is_null() {
            asked.comp_mask |= IBV_QP_INIT_ATTR_XRCD;
            asked.xrcd = id::device_of(id)?.xrcd()?;
        }
    } else if asked.srq.is_null() && receives {
        asked.srq = public.srq;
    }
    let missing = |is_used: bool, given: *mut ibv_cq, shown: *mut ibv_cq, entries| {
        (is_used && given.is_null() && shown.is_null()).then_some(entries)
    };
    let send = missing(sends, asked.send_cq, before.send(), asked.cap.max_send_wr);
    let recv = missing(receives, asked.recv_cq, before.recv(), asked.cap.max_recv_wr);
    cqs::create(id, [send, recv])?;
    let shown = Cqs::of(id);
    if asked.send_cq.is_null() {
        asked.send_cq = shown.send();
    }
    if asked.recv_cq.is_null() {
        asked.recv_cq = shown.recv();
    }
    let (qp, pd) = attach(id, &mut asked).inspect_err(|_| cqs::destroy_since(id, &before))?;
    let public = id.public();
    // SAFETY: the object is live.
    unsafe {
        (&raw mut (*public).pd).write(pd);
        (&raw mut (*public).qp).write(qp);
    }
    *attr = asked;
    id::refresh_qp_state(id);
    Ok(())
}

/// Makes the queue pair and gives it to the device's id, which moves it from there on.
fn attach(id: &Id, attr: &mut ibv_qp_init_attr_ex) -> Result<(*mut ibv_qp, *mut ibv_pd), Errno> {
    // SAFETY: `attr` is readable and writable; the call looks up the rest.
    let made = unsafe { verbs::create_qp_ex(id::fields(id).verbs, attr) };
    if made.is_null() {
        return Err(Errno::last());
    }
    let attached = qp(made).and_then(|qp| id::attach_qp(id, &qp));
    if let Err(error) = attached {
        verbs::destroy_qp(made);
        return Err(error);
    }
    Ok((made, attr.pd))
}

/// `rdma_destroy_qp`: with the completion queues that the id shows. Does nothing without a queue pair.
pub(crate) unsafe extern "C" fn rdma_destroy_qp(id: *mut rdma_cm_id) {
    let _uncancelled = Uncancelled::new();
    if let Ok(id) = id::find(id) {
        destroy(&id);
    }
}

pub(crate) fn destroy(id: &Id) {
    id::detach_qp(id);
    let public = id.public();
    // SAFETY: the object is live.
    let qp = unsafe { (&raw mut (*public).qp).replace(ptr::null_mut()) };
    if !qp.is_null() {
        verbs::destroy_qp(qp);
    }
    cqs::destroy(id);
}
