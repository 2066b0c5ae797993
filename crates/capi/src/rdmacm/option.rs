//! Options of an id, and the attributes for a queue pair that is not the id's.

use std::{
    ffi::{c_int, c_uint, c_void},
    mem::size_of,
};

use anyverbs::{QpState, cm::IdOption};

use crate::{
    abi::*,
    cancel::Uncancelled,
    errno::{Errno, give},
    rdmacm::{id, zero},
    verbs,
};

/// An option's value: `EINVAL` unless it has this size.
///
/// # Safety
/// `value` is NULL or has `len` readable bytes.
unsafe fn value<T: Copy>(value: *const c_void, len: usize) -> Result<T, Errno> {
    if value.is_null() || len != size_of::<T>() {
        return Err(Errno::invalid("optval is NULL, or optlen is not that of the option"));
    }
    // SAFETY: the caller's promise, and `T` is an integer.
    Ok(unsafe { value.cast::<T>().read_unaligned() })
}

/// `rdma_set_option`: 0, or -1 with `errno`. `ENOSYS` for an option that does not exist, and for `RDMA_OPTION_IB_PATH`:
/// RoCE has no subnet administrator that could give records.
///
/// # Safety
/// `optval` is NULL or has `optlen` readable bytes.
pub(crate) unsafe extern "C" fn rdma_set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    optname: c_int,
    optval: *mut c_void,
    optlen: usize,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    zero(
        "rdma_set_option",
        id::find(id).and_then(|id| {
            // SAFETY: the caller's promise.
            let byte = || unsafe { value::<u8>(optval, optlen) };
            // SAFETY: as above.
            let flag = || unsafe { value::<c_int>(optval, optlen) }.map(|value| value != 0);
            let option = match (level as c_uint, optname as c_uint) {
                (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS) => IdOption::Tos(byte()?),
                (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR) => IdOption::ReuseAddr(flag()?),
                (RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY) => IdOption::AfOnly(flag()?),
                (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT) => IdOption::AckTimeout(byte()?),
                _ => return Err(Errno::because(libc::ENOSYS, "there is no such option")),
            };
            Ok(id.inner.device.set_option(option)?)
        }),
    )
}

/// `rdma_init_qp_attr`: 0, or -1 with `errno`. Reads `attr->qp_state`, and fills in the rest.
///
/// # Safety
/// `attr` is NULL, or readable and writable; `mask` is NULL or writable.
pub(crate) unsafe extern "C" fn rdma_init_qp_attr(
    id: *mut rdma_cm_id,
    attr: *mut ibv_qp_attr,
    mask: *mut c_int,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    zero(
        "rdma_init_qp_attr",
        id::find(id).and_then(|id| {
            if attr.is_null() || mask.is_null() {
                return Err(Errno::NULL);
            }
            // SAFETY: the caller's promise.
            let state = unsafe { (*attr).qp_state };
            let to = QpState::from_code(state).ok_or(Errno::invalid("qp_state is no state"))?;
            let (device, device_mask) = id.inner.device.init_qp_attr(to)?;
            // SAFETY: integers.
            let no_cap: ibv_qp_cap = unsafe { std::mem::zeroed() };
            let mut c = verbs::c_qp_attr(&device, no_cap);
            c.qp_state = state;
            // SAFETY: the caller's promise.
            unsafe {
                give(attr, c);
                give(mask, device_mask.bits() as c_int);
            }
            Ok(())
        }),
    )
}
