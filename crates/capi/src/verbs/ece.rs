//! Enhancements of vendors (`ibv_ece`), which this device does not have.

use std::ffi::c_int;

use crate::{
    abi::*,
    cancel::Uncancelled,
    errno::{Errno, give, value},
    verbs::qp,
};

/// `ibv_query_ece`: `EOPNOTSUPP`. This device agrees on no vendor's enhancements with its peers. Zeros say so to
/// programs that do not look at the result.
///
/// # Safety
/// `ece` is NULL or writable.
pub(crate) unsafe extern "C" fn ibv_query_ece(qp_: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    let _uncancelled = Uncancelled::new();
    if !ece.is_null() {
        // SAFETY: the caller's promise.
        unsafe { give(ece, ibv_ece { vendor_id: 0, options: 0, comp_mask: 0 }) };
    }
    no_ece("ibv_query_ece", qp_, ece)
}

fn no_ece(call: &str, qp_: *mut ibv_qp, ece: *const ibv_ece) -> c_int {
    value(
        call,
        qp(qp_).and_then(|_| {
            Err(if ece.is_null() {
                Errno::NULL
            } else {
                Errno::lacks("the device has no enhancements")
            })
        }),
    )
}

/// `ibv_set_ece`: `EOPNOTSUPP`; there are no enhancements to set.
pub(crate) unsafe extern "C" fn ibv_set_ece(qp_: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    let _uncancelled = Uncancelled::new();
    no_ece("ibv_set_ece", qp_, ece)
}
