//! Synchronous mode: an id without an event channel waits in each call for its event, and shows it as `id->event` until
//! the next call.

use std::{ffi::c_int, ptr, sync::Arc};

use anyverbs::undone_if_cancelled;

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, give},
    rdmacm::{Id, acknowledge, event, id, qp, zero},
};

/// Acknowledges the event that a synchronous id shows.
pub(crate) fn release_event(id: &Id) {
    let shown = show_event(id, ptr::null_mut());
    if !shown.is_null() {
        // Refused if the program acknowledged it itself.
        let _ = acknowledge(shown);
    }
}

/// Sets `id->event`; returns its old value.
fn show_event(id: &Id, event: *mut rdma_cm_event) -> *mut rdma_cm_event {
    // SAFETY: the object is live.
    unsafe { (&raw mut (*id.public()).event).replace(event) }
}

/// In synchronous mode, waits for the outcome of a call that was begun. A rejection is `ECONNREFUSED`.
pub(crate) fn complete(id: &Arc<Id>) -> Result<(), Errno> {
    let Some(channel) = id.inner.own_channel() else { return Ok(()) };
    release_event(id);
    // A cancelled thread gives up its hold of the id. SAFETY: the caller's hold, which it uses no more.
    let undo = || unsafe { Arc::decrement_strong_count(Arc::as_ptr(id)) };
    let event = undone_if_cancelled(undo, || event::next(channel))?;
    show_event(id, event);
    // SAFETY: published by `next`; only the program could acknowledge it, and does not know it yet.
    let (kind, status) = unsafe { ((*event).event, (*event).status) };
    match status {
        0 => Ok(()),
        _ if kind == RDMA_CM_EVENT_REJECTED => Err(Errno::said(libc::ECONNREFUSED)),
        _ => Err(Errno::said(status.saturating_abs())),
    }
}

/// `rdma_get_request`: 0, or -1 with `errno`; `EINVAL` for an id on a program's channel. With attributes from
/// `rdma_create_ep` the new id has a queue pair.
///
/// # Safety
/// `id` is NULL or writable.
pub(crate) unsafe extern "C" fn rdma_get_request(
    listen: *mut rdma_cm_id,
    id: *mut *mut rdma_cm_id,
) -> c_int {
    zero(
        "rdma_get_request",
        id::find(listen).and_then(|listener| {
            if id.is_null() {
                return Err(Errno::NULL);
            }
            let request = request(&listener)?;
            // SAFETY: the caller's promise.
            unsafe { give(id, request) };
            Ok(())
        }),
    )
}

fn request(listener: &Arc<Id>) -> Result<*mut rdma_cm_id, Errno> {
    let channel = listener
        .inner
        .own_channel()
        .ok_or(Errno::invalid("the listener has an event channel, which tells of requests"))?;
    release_event(listener);
    // As in `complete`. SAFETY: as there.
    let undo = || unsafe { Arc::decrement_strong_count(Arc::as_ptr(listener)) };
    let event = undone_if_cancelled(undo, || event::next(channel))?;
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("rdma_get_request");
    // SAFETY: as in `complete`.
    let (kind, status, new) = unsafe { ((*event).event, (*event).status, (*event).id) };
    if status != 0 || kind != RDMA_CM_EVENT_CONNECT_REQUEST {
        show_event(listener, event);
        return Err(if status == 0 {
            Errno::invalid("another event than a request has come")
        } else {
            Errno::said(status.saturating_abs())
        });
    }
    let new = id::find(new)?;
    let template = listener.inner.state.lock().requests_qp.as_ref().map(|template| template.0);
    if let Some(mut init) = template
        && let Err(error) = qp::create(&new, id::fields(listener).pd, &mut init)
    {
        // The program cannot see this id. Its peer is told so.
        let _ = id::destroy(&new);
        show_event(listener, event);
        return Err(error);
    }
    show_event(&new, event);
    Ok(new.public())
}
