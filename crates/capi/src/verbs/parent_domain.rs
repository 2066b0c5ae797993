//! Thread domains and parent domains.

use std::{ffi::c_int, sync::Arc};

use crate::{
    abi::*,
    errno::{Errno, pointer, value},
    object::{self, Object},
    verbs::{Context, Pd, PdInner, context, publish_pd},
};

pub(crate) type Td = Object<ibv_td>;

/// What a thread domain holds of the device.
pub(crate) struct TdInner {
    device: anyverbs::Td,
    context: Arc<Context>,
}

/// Slot of `ibv_alloc_td`: NULL with `errno` on failure.
///
/// # Safety
/// `init` is NULL or readable.
pub(crate) unsafe extern "C" fn alloc_td(
    context_: *mut ibv_context,
    init: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    // SAFETY: the caller's promise.
    let init = unsafe { init.as_ref() };
    pointer(context(context_).and_then(|context| {
        if init.is_none_or(|init| init.comp_mask != 0) {
            return Err(Errno::EINVAL);
        }
        let device = context.inner.device.alloc_td()?;
        let public = ibv_td { context: context.pointer() };
        Ok(object::publish(public, 0, TdInner { device, context }))
    }))
}

/// Slot of `ibv_dealloc_td`: 0, or the errno value; `EBUSY` while a parent domain uses it.
pub(crate) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    value(object::find(td).and_then(|td: Arc<Td>| {
        td.inner.device.destroy()?;
        object::retire(&td).ok_or(Errno::EINVAL)
    }))
}

const KNOWN: u32 = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS
    | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT
    | IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC;

/// Slot of `ibv_alloc_parent_domain`: NULL with `errno` on failure, `EINVAL` for a parent domain of a parent domain.
///
/// # Safety
/// `attr` is NULL or readable.
pub(crate) unsafe extern "C" fn alloc_parent_domain(
    context_: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    pointer(context(context_).and_then(|context| {
        let attr = attr.ok_or(Errno::EINVAL)?;
        let has = |bit| attr.comp_mask & bit != 0;
        let allocators = has(IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS);
        if attr.comp_mask & !KNOWN != 0
            || allocators && (attr.alloc.is_none() || attr.free.is_none())
        {
            return Err(Errno::EINVAL);
        }
        let pd: Arc<Pd> = object::find(attr.pd)?;
        let td: Option<Arc<Td>> =
            if attr.td.is_null() { None } else { Some(object::find(attr.td)?) };
        let contexts = [Some(&pd.inner.context), td.as_ref().map(|td| &td.inner.context)];
        if contexts.into_iter().flatten().any(|c| !Arc::ptr_eq(c, &context)) {
            return Err(Errno::EINVAL);
        }
        let device = pd.inner.device.parent_domain(td.as_ref().map(|td| &td.inner.device))?;
        Ok(publish_pd(PdInner { device, context }))
    }))
}
