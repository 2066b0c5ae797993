//! Counters of flow rules.

use std::{ffi::c_int, sync::Arc};

use anyverbs::raw::{CounterKind, FlowCounters, MAX_COUNTER_INDEX};
use anyverbs_sanitizers as sanitizers;

use crate::{
    abi::*,
    cancel::Uncancelled,
    errno::{Errno, pointer, value},
    object::{self, Object},
    verbs::{Context, context},
};

pub(crate) type Counters = Object<ibv_counters>;

/// The device's part of counters.
pub(crate) struct CountersInner {
    pub(crate) device: FlowCounters,
    pub(crate) context: Arc<Context>,
}

/// Slot of `ibv_create_counters`: NULL with `errno` on failure.
///
/// # Safety
/// `attr` is NULL or readable.
pub(crate) unsafe extern "C" fn create_counters(
    context_: *mut ibv_context,
    attr: *mut ibv_counters_init_attr,
) -> *mut ibv_counters {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    pointer(
        "ibv_create_counters",
        context(context_).and_then(|context| {
            if attr.ok_or(Errno::NULL)?.comp_mask != 0 {
                return Err(Errno::invalid("comp_mask is not 0"));
            }
            let device = context.inner.device.create_counters()?;
            let public = ibv_counters { context: context.pointer() };
            Ok(object::publish(public, 0, CountersInner { device, context }))
        }),
    )
}

/// Slot of `ibv_destroy_counters`: 0, or the errno value; `EBUSY` while a flow rule uses them.
pub(crate) unsafe extern "C" fn destroy_counters(counters: *mut ibv_counters) -> c_int {
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_destroy_counters",
        object::find(counters).and_then(|counters: Arc<Counters>| {
            counters.inner.device.destroy()?;
            object::retire(&counters)
        }),
    )
}

/// Slot of `ibv_attach_counters_point_flow`: 0, or the errno value. `ENOTSUP` for an existing flow rule, and for a counter that
/// rules do not have; `EBUSY` while a rule uses the counters.
///
/// # Safety
/// `attr` is NULL or readable.
pub(crate) unsafe extern "C" fn attach_counters_point_flow(
    counters: *mut ibv_counters,
    attr: *mut ibv_counter_attach_attr,
    flow: *mut ibv_flow,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    value(
        "ibv_attach_counters_point_flow",
        object::find(counters).and_then(|counters: Arc<Counters>| {
            let attr = attr
                .filter(|attr| attr.comp_mask == 0)
                .ok_or(Errno::invalid("attr is NULL, or comp_mask is not 0"))?;
            let kind = match attr.counter_desc {
                _ if !flow.is_null() => {
                    return Err(Errno::lacks("a flow rule that lives already takes no counters"));
                }
                IBV_COUNTER_PACKETS => CounterKind::Packets,
                IBV_COUNTER_BYTES => CounterKind::Bytes,
                _ => {
                    return Err(Errno::lacks(
                        "counter_desc is neither IBV_COUNTER_PACKETS nor IBV_COUNTER_BYTES",
                    ));
                }
            };
            Ok(counters.inner.device.attach(kind, attr.index)?)
        }),
    )
}

/// Slot of `ibv_read_counters`: 0, or the errno value; `EINVAL` for more values than there are indexes.
///
/// # Safety
/// `values` is NULL or has room for `count`.
pub(crate) unsafe extern "C" fn read_counters(
    counters: *mut ibv_counters,
    values: *mut u64,
    count: u32,
    flags: u32,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    value("ibv_read_counters", object::find(counters).and_then(|counters: Arc<Counters>| {
        counters.inner.context.answers()?;
        if values.is_null()
            || flags & !IBV_READ_COUNTERS_ATTR_PREFER_CACHED != 0
            || count > MAX_COUNTER_INDEX + 1
        {
            return Err(Errno::invalid("counters_value is NULL, flags has a bit that is no flag, or ncounters is too large"));
        }
        let mut read = vec![0; count as usize];
        counters.inner.device.read(&mut read)?;
        // SAFETY: the caller's promise.
        unsafe { values.copy_from_nonoverlapping(read.as_ptr(), read.len()) };
        sanitizers::initialised_bytes(values.cast(), size_of_val(&*read));
        Ok(())
    }))
}
