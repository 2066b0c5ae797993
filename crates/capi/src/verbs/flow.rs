//! Flow rules. The filters of a rule are in `flow_spec.rs`.

use std::{ffi::c_int, sync::Arc};

use anyverbs::raw;

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, pointer, value},
    object::{self, Object},
    verbs::{Context, Counters, Device, FlowAction, FlowSpecs, qp},
};

pub(crate) type Flow = Object<ibv_flow>;

/// The device's part of a flow rule.
pub(crate) struct FlowInner {
    device: raw::Flow,
    _context: Arc<Context>,
}

/// Slot of `ibv_create_flow`: NULL with `errno` on failure. `EOPNOTSUPP` for a QP of type UD, `EINVAL` for others that
/// are not RAW_PACKET, `EPERM` without `CAP_NET_RAW`. `attr.size` is not used: each filter has a size of its own.
///
/// # Safety
/// `attr` is NULL, or readable with the `num_of_specs` filters behind it.
pub(crate) unsafe extern "C" fn create_flow(
    qp_: *mut ibv_qp,
    attr: *mut ibv_flow_attr,
) -> *mut ibv_flow {
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_create_flow");
    // SAFETY: the caller's promise.
    pointer("ibv_create_flow", unsafe { create(qp_, attr) })
}

/// # Safety
/// As for [`create_flow`].
unsafe fn create(qp_: *mut ibv_qp, attr_: *const ibv_flow_attr) -> Result<*mut ibv_flow, Errno> {
    let qp = qp(qp_)?;
    let Device::Raw(device) = &qp.inner.device else {
        let ud = qp.inner.qp_type == Some(anyverbs::QpType::Ud);
        return Err(if ud {
            Errno::lacks("the queue pair is of type UD, and flow rules go with raw packets")
        } else {
            Errno::invalid("flow rules go with raw packet queue pairs")
        });
    };
    if attr_.is_null() {
        return Err(Errno::NULL);
    }
    // SAFETY: the caller's promise; programs pack it.
    let attr = unsafe { attr_.read_unaligned() };
    let known = IBV_FLOW_ATTR_FLAGS_DONT_TRAP | IBV_FLOW_ATTR_FLAGS_EGRESS;
    let ports = qp.inner.context.inner.device.device_attr()?.phys_port_cnt;
    if attr.comp_mask != 0 || !(1..=ports).contains(&attr.port) || attr.flags & !known != 0 {
        return Err(Errno::invalid(
            "comp_mask is not 0, port is no port of the device, or flags has a bit that is no flag",
        ));
    }
    let flow_type = match attr.r#type {
        IBV_FLOW_ATTR_NORMAL => raw::FlowType::Normal,
        IBV_FLOW_ATTR_ALL_DEFAULT => raw::FlowType::AllDefault,
        IBV_FLOW_ATTR_MC_DEFAULT => raw::FlowType::McDefault,
        IBV_FLOW_ATTR_SNIFFER => raw::FlowType::Sniffer,
        _ => return Err(Errno::invalid("type is no type of a flow rule")),
    };
    // SAFETY: the caller's promise.
    let specs = unsafe { FlowSpecs::read(attr_.add(1).cast(), attr.num_of_specs)? };
    let counters: Option<Arc<Counters>> = specs.counters.map(|c| object::find(c)).transpose()?;
    let action: Option<Arc<FlowAction>> = specs.action.map(object::find).transpose()?;
    let context = Arc::clone(&qp.inner.context);
    if action.as_ref().is_some_and(|a| !Arc::ptr_eq(&a.inner.context, &context)) {
        return Err(Errno::OTHER_CONTEXT);
    }
    if counters.as_ref().is_some_and(|c| !Arc::ptr_eq(&c.inner.context, &context)) {
        return Err(Errno::OTHER_CONTEXT);
    }
    let rule = raw::FlowAttr {
        flow_type,
        priority: attr.priority,
        specs: specs.filters,
        dont_trap: attr.flags & IBV_FLOW_ATTR_FLAGS_DONT_TRAP != 0,
        egress: attr.flags & IBV_FLOW_ATTR_FLAGS_EGRESS != 0,
        drop: specs.drop,
        tag: specs.tag,
    };
    let device = device.create_flow(
        rule,
        counters.as_ref().map(|c| &c.inner.device),
        action.as_ref().map(|a| &a.inner.device),
    )?;
    let handle = object::new_handle();
    let public = ibv_flow { comp_mask: 0, context: context.pointer(), handle };
    Ok(object::publish(public, handle, FlowInner { device, _context: context }))
}

/// Slot of `ibv_destroy_flow`: 0, or the errno value.
pub(crate) unsafe extern "C" fn destroy_flow(flow: *mut ibv_flow) -> c_int {
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_destroy_flow",
        object::find(flow).and_then(|flow: Arc<Flow>| {
            flow.inner.device.destroy()?;
            object::retire(&flow)
        }),
    )
}
