//! Completion counters, of rdma-core 65.

use std::{ffi::c_int, mem::size_of, sync::Arc};

use anyverbs::{CompCntrKind, CompCntrOps};

use crate::{
    abi::*,
    check,
    errno::{Errno, give, pointer, value},
    object::{self, Object},
    verbs::{Context, answering, context, qp, write_sized},
};

pub(crate) type CompCntr = Object<ibv_comp_cntr>;

/// The device's part of a completion counter.
pub(crate) struct CompCntrInner {
    device: anyverbs::CompCntr,
    /// `ibv_comp_cntr.context` during its life.
    _context: Arc<Context>,
}

/// More than any version of a struct of capabilities has.
const MOST_CAPS: usize = 4096;

/// `ibv_query_comp_cntr_caps`: 0, or the errno value.
///
/// # Safety
/// `caps` is NULL or has `size` writable bytes.
pub(crate) unsafe extern "C" fn _ibv_query_comp_cntr_caps(
    context_: *mut ibv_context,
    caps: *mut ibv_comp_cntr_caps,
    size: usize,
) -> c_int {
    value(
        "ibv_query_comp_cntr_caps",
        answering(context_).and_then(|context| {
            if caps.is_null() || !(size_of::<ibv_comp_cntr_caps>()..MOST_CAPS).contains(&size) {
                return Err(Errno::invalid("caps is NULL, or its size is wrong"));
            }
            let ours = ibv_comp_cntr_caps {
                max_value: u64::MAX,
                max_counters: context.inner.device.device_attr()?.max_comp_cntr,
                supported_qp_attach_ops: CompCntrOps::all().bits().into(),
            };
            // SAFETY: the caller's promise.
            unsafe { write_sized(caps, &ours, size) };
            Ok(())
        }),
    )
}

/// `ibv_create_comp_cntr`: NULL with `errno` on failure.
///
/// # Safety
/// `attr` is NULL or readable.
pub(crate) unsafe extern "C" fn ibv_create_comp_cntr(
    context_: *mut ibv_context,
    attr: *mut ibv_comp_cntr_init_attr,
) -> *mut ibv_comp_cntr {
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    pointer(
        "ibv_create_comp_cntr",
        context(context_).and_then(|context| {
            let attr = attr
                .filter(|a| a.comp_mask == 0 && a.flags == 0)
                .ok_or(Errno::invalid("attr is NULL, or comp_mask or flags is not 0"))?;
            let kind = match attr.r#type {
                IBV_COMP_CNTR_TYPE_WRS => CompCntrKind::Wrs,
                IBV_COMP_CNTR_TYPE_BYTES => CompCntrKind::Bytes,
                _ => {
                    return Err(Errno::lacks(
                        "type is neither IBV_COMP_CNTR_TYPE_WRS nor IBV_COMP_CNTR_TYPE_BYTES",
                    ));
                }
            };
            let device = context.inner.device.create_comp_cntr(kind)?;
            let handle = object::new_handle();
            let public = ibv_comp_cntr { context: context.pointer(), handle };
            Ok(object::publish(public, handle, CompCntrInner { device, _context: context }))
        }),
    )
}

/// `ibv_destroy_comp_cntr`: 0, or the errno value; `EBUSY` while a QP has it.
pub(crate) unsafe extern "C" fn ibv_destroy_comp_cntr(cntr: *mut ibv_comp_cntr) -> c_int {
    value(
        "ibv_destroy_comp_cntr",
        object::find(cntr).and_then(|cntr: Arc<CompCntr>| {
            cntr.inner.device.destroy()?;
            object::retire(&cntr)
        }),
    )
}

/// `ibv_qp_attach_comp_cntr`: 0, or the errno value. `EINVAL` unless the QP is in RESET or INIT, `EBUSY` if one of the
/// operations has a counter already, `EOPNOTSUPP` for unknown ones.
///
/// # Safety
/// `attr` is NULL or readable.
pub(crate) unsafe extern "C" fn ibv_qp_attach_comp_cntr(
    qp_: *mut ibv_qp,
    cntr: *mut ibv_comp_cntr,
    attr: *mut ibv_qp_attach_comp_cntr_attr,
) -> c_int {
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    value(
        "ibv_qp_attach_comp_cntr",
        qp(qp_).and_then(|qp| {
            qp.inner.context.answers()?;
            let cntr: Arc<CompCntr> = object::find(cntr)?;
            let attr = attr
                .filter(|a| a.comp_mask == 0)
                .ok_or(Errno::invalid("attr is NULL, or comp_mask is not 0"))?;
            let ops = u8::try_from(attr.op_mask).ok().and_then(CompCntrOps::from_bits);
            let ops = ops.ok_or(Errno::lacks("op_mask has an operation that is not known here"))?;
            qp.inner.device.transport()?.attach_comp_cntr(&cntr.inner.device, ops)?;
            // The program learns of completions by a count.
            check::unwatch(qp.public());
            Ok(())
        }),
    )
}

macro_rules! change {
    ($($name:ident $method:ident;)*) => { $(
        pub(crate) unsafe extern "C" fn $name(cntr: *mut ibv_comp_cntr, value_: u64) -> c_int {
            value(stringify!($name), object::find(cntr).map(|cntr: Arc<CompCntr>| cntr.inner.device.$method(value_)))
        }
    )* };
}

change! {
    ibv_set_comp_cntr set_completed;
    ibv_set_err_comp_cntr set_failed;
    ibv_inc_comp_cntr add_completed;
    ibv_inc_err_comp_cntr add_failed;
}

macro_rules! read {
    ($($name:ident $method:ident;)*) => { $(
        /// Looks at the network first, as a poll does.
        ///
        /// # Safety
        /// `count` is NULL or writable.
        pub(crate) unsafe extern "C" fn $name(cntr: *mut ibv_comp_cntr, count: *mut u64) -> c_int {
            value(stringify!($name), object::find(cntr).and_then(|cntr: Arc<CompCntr>| {
                if count.is_null() {
                    return Err(Errno::NULL);
                }
                cntr.inner.device.progress();
                // SAFETY: the caller's promise.
                unsafe { give(count, cntr.inner.device.$method()) };
                Ok(())
            }))
        }
    )* };
}

read! {
    ibv_read_comp_cntr completed;
    ibv_read_err_comp_cntr failed;
}
