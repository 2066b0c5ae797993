//! Connections: connect, accept, reject, disconnect.

use std::{
    ffi::{c_int, c_void},
    slice,
    sync::Arc,
};

use anyverbs::{AsyncEventKind, Qpn, cm};
use cm::ConnParam;

use crate::{
    abi::*,
    cancel::Uncancelled,
    errno::Errno,
    faults,
    rdmacm::{Id, complete, id, release_event, zero},
};

/// A copy of the program's private data; none for NULL.
///
/// # Safety
/// `data` is NULL or has `len` readable bytes.
unsafe fn private_data(data: *const c_void, len: u8) -> Vec<u8> {
    if data.is_null() {
        return Vec::new();
    }
    // SAFETY: the caller's promise; copied at once.
    unsafe { slice::from_raw_parts(data.cast::<u8>(), len.into()) }.to_vec()
}

/// The program's parameters, with `private_data` in the place of the pointer. The queue pair that the id shows goes
/// before the one that the parameters name.
fn conn_param<'a>(id: &Id, param: &rdma_conn_param, private_data: &'a [u8]) -> ConnParam<'a> {
    let shown = id::queue_pair(id);
    // SAFETY: the object is live.
    let srq = shown.as_ref().map(|qp| unsafe { !(*qp.public()).qp_base.srq.is_null() });
    ConnParam {
        private_data,
        responder_resources: param.responder_resources,
        initiator_depth: param.initiator_depth,
        flow_control: param.flow_control != 0,
        retry_count: param.retry_count,
        rnr_retry_count: param.rnr_retry_count,
        srq: srq.unwrap_or(param.srq != 0),
        qpn: shown.map_or(Qpn::new(param.qp_num), |qp| qp.inner.device.qpn()),
    }
}

/// The parameters of `rdma_connect` for a program that gives none: the device's maxima, and retries for ever.
const DEFAULT: rdma_conn_param = rdma_conn_param {
    private_data: std::ptr::null(),
    private_data_len: 0,
    responder_resources: RDMA_MAX_RESP_RES as u8,
    initiator_depth: RDMA_MAX_INIT_DEPTH as u8,
    flow_control: 0,
    retry_count: 7,
    rnr_retry_count: 7,
    srq: 0,
    qp_num: 0,
};

/// `rdma_connect`: 0, or -1 with `errno`. `EINVAL` without parameters for a `RDMA_PS_TCP` id that has no queue pair.
///
/// # Safety
/// `param` is NULL or readable, and so is its private data.
pub(crate) unsafe extern "C" fn rdma_connect(
    id: *mut rdma_cm_id,
    param: *mut rdma_conn_param,
) -> c_int {
    faults::may_fail!("rdma_connect", zero);
    // SAFETY: the caller's promise.
    let param = unsafe { param.as_ref() };
    zero(
        "rdma_connect",
        id::find(id).and_then(|id| {
            let uncancelled = Uncancelled::new();
            let public = id::fields(&id);
            if param.is_none() && public.qp.is_null() && public.ps == RDMA_PS_TCP {
                return Err(Errno::invalid("conn_param is NULL, and the id has no queue pair"));
            }
            let param = param.unwrap_or(&DEFAULT);
            // SAFETY: the caller's promise.
            let own = unsafe { private_data(param.private_data, param.private_data_len) };
            let mut data = id.inner.state.lock().connect.clone();
            data.extend_from_slice(&own);
            id::attach_shown_qp(&id)?;
            let param = conn_param(&id, param, &data);
            id.inner.device.connect(&param)?;
            let mut state = id.inner.state.lock();
            state.connect.clear();
            state.names_no_qp = param.qpn == Qpn::new(0);
            drop(state);
            drop(uncancelled);
            complete(&id)
        }),
    )
}

/// `rdma_accept`: 0, or -1 with `errno`.
///
/// # Safety
/// `param` is NULL or readable, and so is its private data.
pub(crate) unsafe extern "C" fn rdma_accept(
    id: *mut rdma_cm_id,
    param: *mut rdma_conn_param,
) -> c_int {
    faults::may_fail!("rdma_accept", zero);
    // SAFETY: the caller's promise.
    let param = unsafe { param.as_ref() };
    zero(
        "rdma_accept",
        id::find(id).and_then(|id| {
            let uncancelled = Uncancelled::new();
            let public = id::fields(&id);
            if param.is_none() && public.qp.is_null() {
                return Err(Errno::invalid("conn_param is NULL, and the id has no queue pair"));
            }
            // SAFETY: the caller's promise.
            let data = param.map(|p| unsafe { private_data(p.private_data, p.private_data_len) });
            let param = param.zip(data.as_ref()).map(|(param, data)| conn_param(&id, param, data));
            id::attach_shown_qp(&id)?;
            let accepted = id.inner.device.accept(param.as_ref());
            id::refresh_qp_state(&id);
            accepted?;
            if public.qp_type == IBV_QPT_UD {
                // No further event follows.
                if id.inner.own_channel().is_some() {
                    release_event(&id);
                }
                return Ok(());
            }
            drop(uncancelled);
            complete(&id)
        }),
    )
}

fn reject(
    id: *mut rdma_cm_id,
    data: *const c_void,
    len: u8,
    because_of_ece: bool,
) -> Result<(), Errno> {
    let id = id::find(id)?;
    // SAFETY: the callers' promise.
    let data = unsafe { private_data(data, len) };
    Ok(id.inner.device.reject(&data, because_of_ece)?)
}

/// `rdma_reject`: 0, or -1 with `errno`.
///
/// # Safety
/// `data` is NULL or has `len` readable bytes.
pub(crate) unsafe extern "C" fn rdma_reject(
    id: *mut rdma_cm_id,
    data: *const c_void,
    len: u8,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    zero("rdma_reject", reject(id, data, len, false))
}

/// `rdma_reject_ece`: as `rdma_reject`; the reason is the peer's options.
///
/// # Safety
/// As `rdma_reject`.
pub(crate) unsafe extern "C" fn rdma_reject_ece(
    id: *mut rdma_cm_id,
    data: *const c_void,
    len: u8,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    zero("rdma_reject_ece", reject(id, data, len, true))
}

/// `rdma_establish`: 0, or -1 with `errno`; `EINVAL` for an id that has a queue pair.
pub(crate) unsafe extern "C" fn rdma_establish(id: *mut rdma_cm_id) -> c_int {
    let _uncancelled = Uncancelled::new();
    zero(
        "rdma_establish",
        id::find(id).and_then(|id| {
            if !id::fields(&id).qp.is_null() {
                return Err(Errno::invalid(
                    "the id has a queue pair, and rdma_get_cm_event has established it",
                ));
            }
            Ok(id.inner.device.establish()?)
        }),
    )
}

/// `rdma_notify`: 0, or -1 with `errno`; `EINVAL` for an event other than `IBV_EVENT_COMM_EST`, `EISCONN` if the connection
/// is there already.
pub(crate) unsafe extern "C" fn rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type) -> c_int {
    let _uncancelled = Uncancelled::new();
    zero(
        "rdma_notify",
        id::find(id).and_then(|id| {
            if event != IBV_EVENT_COMM_EST {
                return Err(Errno::invalid("event is not IBV_EVENT_COMM_EST"));
            }
            Ok(id.inner.device.notify(AsyncEventKind::CommEst)?)
        }),
    )
}

/// `rdma_disconnect`: 0, or -1 with `errno`. The queue pair goes to ERR.
pub(crate) unsafe extern "C" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    faults::may_fail!("rdma_disconnect", zero);
    zero("rdma_disconnect", id::find(id).and_then(|id| disconnect(&id)))
}

fn disconnect(id: &Arc<Id>) -> Result<(), Errno> {
    let uncancelled = Uncancelled::new();
    let done = id.inner.device.disconnect();
    id::refresh_qp_state(id);
    done?;
    drop(uncancelled);
    complete(id)
}
