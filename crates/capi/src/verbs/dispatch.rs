//! The tables of functions in a device context, through which the inlines of `verbs.h` call.
//!
//! `ibv_context_ops` holds the data path. Its slots are called unchecked: all are filled. `verbs_context` lies before
//! `ibv_context` and grows at its front; an empty slot makes the inline refuse with `EOPNOTSUPP` (only `close_xrcd`
//! is called unchecked). `ibv_context.abi_compat` of all ones says that it is there, and `sz` how far it reaches.

use std::{
    ffi::c_void,
    mem::{offset_of, size_of},
    ptr,
};

use crate::{
    abi::*,
    errno::Errno,
    verbs::{self, sanitized, watched},
};

/// `ibv_context.abi_compat` of a context that is embedded in a `verbs_context`.
pub(crate) const IS_EXTENDED: *mut c_void = ptr::without_provenance_mut(usize::MAX);

/// The extended context that a program's `ibv_context` is embedded in.
pub(crate) fn extended(context: *mut ibv_context) -> *mut verbs_context {
    context.wrapping_byte_sub(offset_of!(verbs_context, context)).cast()
}

/// A context with every slot that is built; device, descriptors and mutex are the caller's to fill in.
pub(crate) fn new_context() -> verbs_context {
    // SAFETY: integers, NULL pointers, empty slots and a zeroed mutex (PTHREAD_MUTEX_INITIALIZER) are valid.
    let mut context: verbs_context = unsafe { std::mem::zeroed() };
    context.sz = size_of::<verbs_context>();
    context.alloc_td = Some(verbs::alloc_td);
    context.dealloc_td = Some(verbs::dealloc_td);
    context.alloc_parent_domain = Some(verbs::alloc_parent_domain);
    context.modify_cq = Some(verbs::modify_cq);
    context.query_rt_values = Some(verbs::query_rt_values);
    context.modify_qp_rate_limit = Some(verbs::modify_qp_rate_limit);
    context.alloc_dm = Some(verbs::alloc_dm);
    context.free_dm = Some(verbs::free_dm);
    context.reg_dm_mr = Some(verbs::reg_dm_mr);
    context.alloc_null_mr = Some(verbs::alloc_null_mr);
    context.advise_mr = Some(verbs::advise_mr);
    context.open_xrcd = Some(verbs::open_xrcd);
    context.close_xrcd = Some(verbs::close_xrcd);
    context.query_port = Some(verbs::query_port);
    context.query_device_ex = Some(verbs::query_device_ex);
    context.create_cq_ex = Some(verbs::create_cq_ex);
    context.create_qp_ex = Some(verbs::create_qp_ex);
    context.open_qp = Some(verbs::open_qp);
    context.create_srq_ex = Some(verbs::create_srq_ex);
    context.post_srq_ops = Some(verbs::post_srq_ops);
    context.get_srq_num = Some(verbs::get_srq_num);
    context.create_wq = Some(verbs::create_wq);
    context.modify_wq = Some(verbs::modify_wq);
    context.destroy_wq = Some(verbs::destroy_wq);
    context.create_rwq_ind_table = Some(verbs::create_rwq_ind_table);
    context.destroy_rwq_ind_table = Some(verbs::destroy_rwq_ind_table);
    context.ibv_create_flow = Some(verbs::create_flow);
    context.ibv_destroy_flow = Some(verbs::destroy_flow);
    context.create_flow_action_esp = Some(verbs::create_flow_action_esp);
    context.modify_flow_action_esp = Some(verbs::modify_flow_action_esp);
    context.destroy_flow_action = Some(verbs::destroy_flow_action);
    context.create_counters = Some(verbs::create_counters);
    context.destroy_counters = Some(verbs::destroy_counters);
    context.attach_counters_point_flow = Some(verbs::attach_counters_point_flow);
    context.read_counters = Some(verbs::read_counters);
    context.context.ops = ops();
    watched::watch(&mut context.context.ops);
    sanitized::sanitize(&mut context.context.ops);
    crate::faults::watch(&mut context.context.ops);
    context.context.cmd_fd = -1;
    context.context.async_fd = -1;
    context.context.abi_compat = IS_EXTENDED;
    context
}

fn ops() -> ibv_context_ops {
    let unused = Some(refusing::unused as unsafe extern "C" fn() -> *mut c_void);
    ibv_context_ops {
        _compat_query_device: Some(verbs::ibv_query_device),
        _compat_query_port: Some(verbs::ibv_query_port),
        _compat_alloc_pd: unused,
        _compat_dealloc_pd: unused,
        _compat_reg_mr: unused,
        _compat_rereg_mr: unused,
        _compat_dereg_mr: unused,
        alloc_mw: Some(verbs::alloc_mw),
        bind_mw: Some(verbs::bind_mw),
        dealloc_mw: Some(verbs::dealloc_mw),
        _compat_create_cq: unused,
        poll_cq: Some(verbs::poll_cq),
        req_notify_cq: Some(verbs::req_notify_cq),
        _compat_cq_event: unused,
        _compat_resize_cq: unused,
        _compat_destroy_cq: unused,
        _compat_create_srq: unused,
        _compat_modify_srq: unused,
        _compat_query_srq: unused,
        _compat_destroy_srq: unused,
        post_srq_recv: Some(verbs::post_srq_recv),
        _compat_create_qp: unused,
        _compat_query_qp: unused,
        _compat_modify_qp: unused,
        _compat_destroy_qp: unused,
        post_send: Some(verbs::post_send),
        post_recv: Some(verbs::post_recv),
        _compat_create_ah: unused,
        _compat_destroy_ah: unused,
        _compat_attach_mcast: unused,
        _compat_detach_mcast: unused,
        _compat_async_event: unused,
    }
}

/// Functions for slots that may not be empty and have no call.
mod refusing {
    use super::*;

    const REFUSED: Errno = Errno::lacks("the call has no meaning here");

    /// Slots that no header has called since 1.1.
    pub(super) unsafe extern "C" fn unused() -> *mut c_void {
        REFUSED.set();
        ptr::null_mut()
    }
}

/// One inline of `verbs.h` that calls through a context, and the slot that it uses.
#[cfg(test)]
pub(crate) struct Slot {
    pub(crate) verb: &'static str,
    pub(crate) built: bool,
    /// The way in which it refuses, if it does.
    pub(crate) refusal: &'static str,
}

/// Inlines that use `ibv_context_ops`. Their slots are all built.
#[cfg(test)]
const DATA_PATH: [&str; 8] = [
    "ibv_poll_cq",
    "ibv_req_notify_cq",
    "ibv_post_srq_recv",
    "ibv_post_send",
    "ibv_post_recv",
    "ibv_alloc_mw",
    "ibv_bind_mw",
    "ibv_dealloc_mw",
];

/// The slots of a new context that the inlines use, read from the tables themselves.
#[cfg(test)]
pub(crate) fn slots() -> Vec<Slot> {
    let context = new_context();
    // An empty slot refuses.
    macro_rules! empty {
        ($($verb:literal $slot:ident $refusal:literal;)*) => {
            [$(Slot { verb: $verb, built: context.$slot.is_some(), refusal: $refusal }),*]
        };
    }
    let mut slots: Vec<Slot> = DATA_PATH.map(|verb| Slot { verb, built: true, refusal: "" }).into();
    slots.extend(empty! {
        "ibv_alloc_dm" alloc_dm "NULL, `EOPNOTSUPP`";
        "ibv_free_dm" free_dm "returns `EOPNOTSUPP`";
        "ibv_reg_dm_mr" reg_dm_mr "NULL, `EOPNOTSUPP`";
        "ibv_alloc_null_mr" alloc_null_mr "NULL, `EOPNOTSUPP`";
        "ibv_advise_mr" advise_mr "returns `EOPNOTSUPP`";
        "ibv_alloc_td" alloc_td "NULL, `EOPNOTSUPP`";
        "ibv_dealloc_td" dealloc_td "returns `EOPNOTSUPP`";
        "ibv_alloc_parent_domain" alloc_parent_domain "NULL, `EOPNOTSUPP`";
        "ibv_open_xrcd" open_xrcd "NULL, `EOPNOTSUPP`";
        "ibv_close_xrcd" close_xrcd "";
        "ibv_query_device_ex" query_device_ex "returns `EOPNOTSUPP`";
        "ibv_query_port (with its newest fields)" query_port "falls back to the exported call";
        "ibv_query_rt_values_ex" query_rt_values "returns `EOPNOTSUPP`";
        "ibv_create_cq_ex" create_cq_ex "NULL, `EOPNOTSUPP`";
        "ibv_modify_cq" modify_cq "returns `EOPNOTSUPP`";
        "ibv_create_srq_ex" create_srq_ex "NULL, `EOPNOTSUPP`; BASIC goes to `ibv_create_srq`";
        "ibv_get_srq_num" get_srq_num "returns `EOPNOTSUPP`";
        "ibv_post_srq_ops" post_srq_ops "returns `EOPNOTSUPP`";
        "ibv_create_qp_ex" create_qp_ex "NULL, `EOPNOTSUPP`; with PD alone goes to `ibv_create_qp`";
        "ibv_open_qp" open_qp "NULL, `EOPNOTSUPP`";
        "ibv_modify_qp_rate_limit" modify_qp_rate_limit "returns `EOPNOTSUPP`";
        "ibv_create_wq" create_wq "NULL, `EOPNOTSUPP`";
        "ibv_modify_wq" modify_wq "returns `EOPNOTSUPP`";
        "ibv_destroy_wq" destroy_wq "returns `EOPNOTSUPP`";
        "ibv_create_rwq_ind_table" create_rwq_ind_table "NULL, `EOPNOTSUPP`";
        "ibv_destroy_rwq_ind_table" destroy_rwq_ind_table "returns `EOPNOTSUPP`";
        "ibv_create_flow" ibv_create_flow "NULL, `EOPNOTSUPP`";
        "ibv_destroy_flow" ibv_destroy_flow "returns `EOPNOTSUPP`";
        "ibv_create_flow_action_esp" create_flow_action_esp "NULL, `EOPNOTSUPP`";
        "ibv_modify_flow_action_esp" modify_flow_action_esp "returns `EOPNOTSUPP`";
        "ibv_destroy_flow_action" destroy_flow_action "returns `EOPNOTSUPP`";
        "ibv_create_counters" create_counters "NULL, `EOPNOTSUPP`";
        "ibv_destroy_counters" destroy_counters "returns `EOPNOTSUPP`";
        "ibv_attach_counters_point_flow" attach_counters_point_flow "returns `EOPNOTSUPP`";
        "ibv_read_counters" read_counters "returns `EOPNOTSUPP`";
    });
    slots
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extended_context_is_found_from_the_public_one() {
        let mut context = new_context();
        let found = extended(&raw mut context.context);
        assert!(ptr::eq(found, &raw const context));
        assert_eq!(context.sz, size_of::<verbs_context>());
    }

    #[test]
    fn no_slot_of_the_data_path_is_empty() {
        let ops = new_context().context.ops;
        let slots = size_of::<ibv_context_ops>() / size_of::<usize>();
        // SAFETY: a table of pointer-sized function pointers, empty ones being 0.
        let words = unsafe { std::slice::from_raw_parts((&raw const ops).cast::<usize>(), slots) };
        assert_eq!((slots, words.iter().filter(|w| **w == 0).count()), (32, 0));
    }
}
