//! Asynchronous events.

use std::{ffi::c_int, sync::Arc};

use anyverbs::{AsyncEventKind, EventElement};
use anyverbs_sanitizers::Quiet;

use crate::{
    abi::*,
    cancel, check,
    errno::{give, minus_one},
    object,
    verbs::{Cq, Qp, Srq, Wq, context},
};

/// `ibv_get_async_event`: 0, or -1 with `errno`. Waits for an event unless the program made the descriptor
/// non-blocking.
///
/// # Safety
/// `event` is NULL or writable.
pub(crate) unsafe extern "C" fn ibv_get_async_event(
    context_: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    minus_one(
        "ibv_get_async_event",
        context(context_).and_then(|context| {
            if event.is_null() {
                return Err(crate::errno::Errno::NULL);
            }
            let read = loop {
                let context = Arc::clone(&context);
                let read =
                    cancel::holding(context, |context| context.inner.device.get_async_event())?;
                // While a thread still makes the object, no program can use its pointer, or acknowledge its event.
                if !is_of_new_object(read.element()) {
                    break read;
                }
            };
            let element = match read.element() {
                EventElement::Qp { cookie, .. } => {
                    ibv_async_event_element { qp: cookie as *mut ibv_qp }
                }
                EventElement::Cq { cookie } => {
                    if read.kind() == AsyncEventKind::CqErr {
                        check::overrun(cookie as *const ibv_cq_ex);
                    }
                    ibv_async_event_element { cq: cookie as *mut ibv_cq }
                }
                EventElement::Srq { cookie } => {
                    ibv_async_event_element { srq: cookie as *mut ibv_srq }
                }
                EventElement::Wq { cookie } => {
                    ibv_async_event_element { wq: cookie as *mut ibv_wq }
                }
                EventElement::Port(port) => {
                    // SAFETY: integers and NULL pointers.
                    let mut element: ibv_async_event_element = unsafe { std::mem::zeroed() };
                    element.port_num = port.into();
                    element
                }
                // SAFETY: as above. The device has nothing else that events are about.
                _ => unsafe { std::mem::zeroed() },
            };
            // SAFETY: the cookie of an object is its address; the others are found in no table.
            check::read_event(
                unsafe { element.qp } as usize,
                read.kind() as u32,
                read.kind().name(),
            );
            // SAFETY: the caller's promise.
            unsafe { give(event, ibv_async_event { element, event_type: read.kind() as u32 }) };
            read.leave_unacknowledged();
            Ok(0)
        }),
    )
}

/// Whether the event is of an object that has no address yet: the call that makes it has not returned.
fn is_of_new_object(element: EventElement) -> bool {
    match element {
        EventElement::Qp { cookie, .. }
        | EventElement::Cq { cookie }
        | EventElement::Srq { cookie }
        | EventElement::Wq { cookie } => cookie == 0,
        _ => false,
    }
}

/// `ibv_ack_async_event`. A pointer that is not an event that was read is ignored.
///
/// # Safety
/// `event` is NULL or readable.
pub(crate) unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: the caller's promise.
    let Some(event) = (unsafe { event.as_ref() }) else { return };
    // A thread may wait for this to destroy the object. If it is done before the look-up below ends, the object's memory ends here,
    // and ThreadSanitizer does not know the count of its users.
    let _quiet = Quiet::new();
    // SAFETY: any bytes are a pointer, which is looked up and not followed.
    let pointer = unsafe { event.element.qp };
    check::acknowledged(pointer as usize, event.event_type, 1);
    match event.event_type {
        IBV_EVENT_CQ_ERR => {
            let _ = object::lookup(pointer.cast())
                .map(|cq: Arc<Cq>| cq.inner.device.ack_async_events(1));
        }
        IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => {
            let _ = object::lookup(pointer.cast())
                .map(|srq: Arc<Srq>| srq.inner.device.ack_async_events(1));
        }
        IBV_EVENT_WQ_FATAL => {
            let _ = object::lookup(pointer.cast())
                .map(|wq: Arc<Wq>| wq.inner.device.ack_async_events(1));
        }
        IBV_EVENT_QP_FATAL
        | IBV_EVENT_QP_REQ_ERR
        | IBV_EVENT_QP_ACCESS_ERR
        | IBV_EVENT_COMM_EST
        | IBV_EVENT_SQ_DRAINED
        | IBV_EVENT_PATH_MIG
        | IBV_EVENT_PATH_MIG_ERR
        | IBV_EVENT_QP_LAST_WQE_REACHED => {
            let _ = object::lookup(pointer.cast())
                .map(|qp: Arc<Qp>| qp.inner.device.ack_async_events(1));
        }
        // Events of the port and the device belong to no object.
        _ => {}
    }
}

// The kinds carry the values of C.
const _: () = assert!(AsyncEventKind::GidChange as u32 == IBV_EVENT_GID_CHANGE);
const _: () = assert!(AsyncEventKind::QpLastWqeReached as u32 == IBV_EVENT_QP_LAST_WQE_REACHED);
const _: () = assert!(AsyncEventKind::SrqLimitReached as u32 == IBV_EVENT_SRQ_LIMIT_REACHED);
const _: () = assert!(AsyncEventKind::WqFatal as u32 == IBV_EVENT_WQ_FATAL);
const _: () = assert!(AsyncEventKind::PortErr as u32 == IBV_EVENT_PORT_ERR);
