//! Completion channels and their events.

use std::{
    ffi::{c_int, c_uint, c_void},
    os::fd::{AsFd, AsRawFd},
    sync::Arc,
};

use anyverbs_sanitizers::Quiet;

use crate::{
    abi::*,
    cancel,
    cancel::Uncancelled,
    check,
    errno::{give, minus_one, pointer, value},
    faults,
    object::{self, Object},
    verbs::{Context, Cq, context, watched::activity},
};

pub(crate) type CompChannel = Object<ibv_comp_channel>;

/// The device's part of a completion channel.
pub(crate) struct CompChannelInner {
    pub(crate) device: anyverbs::CompChannel,
    pub(crate) context: Arc<Context>,
}

/// The code and the name of its events for the checker.
const CODE: u32 = u32::MAX;
const COMPLETION: &str = "completions";

/// `ibv_create_comp_channel`: NULL with `errno` on failure.
pub(crate) unsafe extern "C" fn ibv_create_comp_channel(
    context_: *mut ibv_context,
) -> *mut ibv_comp_channel {
    faults::may_fail!("ibv_create_comp_channel", pointer);
    let _uncancelled = Uncancelled::new();
    pointer(
        "ibv_create_comp_channel",
        context(context_).and_then(|context| {
            let device = context.inner.device.create_comp_channel()?;
            let public = ibv_comp_channel {
                context: context.pointer(),
                fd: device.as_fd().as_raw_fd(),
                refcnt: 0,
            };
            Ok(object::publish(public, 0, CompChannelInner { device, context }))
        }),
    )
}

/// `ibv_destroy_comp_channel`: 0, or the errno value; `EBUSY` while a CQ uses it.
pub(crate) unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_destroy_comp_channel",
        object::find(channel).and_then(|channel: Arc<CompChannel>| {
            check::ending(channel.public(), activity, || Ok(channel.inner.device.destroy()?))?;
            object::retire(&channel)
        }),
    )
}

/// `ibv_get_cq_event`: 0, or -1 with `errno`. Waits for an event unless the program made the descriptor non-blocking.
///
/// # Safety
/// `cq` and `cq_context` are NULL or writable.
pub(crate) unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    let next = |channel: &CompChannel| {
        loop {
            let event = channel.inner.device.get_event()?;
            let found = event.cookie() as *mut ibv_cq_ex;
            // Gone only if another thread acknowledged more events than it read, and destroyed the CQ.
            let Ok(found) = object::lookup(found) else { continue };
            let found: Arc<Cq> = found;
            // SAFETY: the CQ is live; `cq` and `cq_context` are the caller's promise.
            unsafe {
                if !cq.is_null() {
                    give(cq, found.public().cast());
                }
                if !cq_context.is_null() {
                    give(cq_context, (&raw const (*found.public()).cq_context).read());
                }
            }
            check::read_event(found.public() as usize, CODE, COMPLETION);
            event.leave_unacknowledged();
            return Ok(0);
        }
    };
    minus_one(
        "ibv_get_cq_event",
        object::find(channel).and_then(|channel| cancel::holding(channel, next)),
    )
}

/// `ibv_ack_cq_events`.
pub(crate) unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, events: c_uint) {
    // As in `ibv_ack_async_event`.
    let _quiet = Quiet::new();
    let found: Result<Arc<Cq>, _> = object::lookup(cq.cast());
    if let Ok(cq) = found {
        check::acknowledged(cq.public() as usize, CODE, events);
        cq.inner.device.ack_events(events);
    }
}
