//! Protection domains.

use std::{ffi::c_int, sync::Arc};

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, pointer, value},
    faults,
    object::{self, Object},
    verbs::{Context, context, watched::activity},
};

pub(crate) type Pd = Object<ibv_pd>;

/// The device's part of a PD.
pub(crate) struct PdInner {
    pub(crate) device: anyverbs::Pd,
    pub(crate) context: Arc<Context>,
}

/// `ibv_alloc_pd`: NULL with `errno` on failure.
pub(crate) unsafe extern "C" fn ibv_alloc_pd(context_: *mut ibv_context) -> *mut ibv_pd {
    faults::may_fail!("ibv_alloc_pd", pointer);
    let _uncancelled = Uncancelled::new();
    pointer(
        "ibv_alloc_pd",
        context(context_).and_then(|context| {
            let device = context.inner.device.alloc_pd()?;
            Ok(publish_pd(PdInner { device, context }))
        }),
    )
}

/// Gives a protection domain or a parent domain to the program.
pub(crate) fn publish_pd(inner: PdInner) -> *mut ibv_pd {
    // Imports use this handle; a parent domain cannot be imported.
    let parent = inner.device.is_parent_domain();
    let handle = if parent { object::new_handle() } else { inner.device.number() };
    let public = ibv_pd { context: inner.context.pointer(), handle };
    let number = inner.device.number();
    let published = object::publish(public, handle, inner);
    check::numbered(published, number);
    published
}

/// `ibv_dealloc_pd`: 0, or the errno value; `EBUSY` while anything uses it, `ENOENT` if the program says that it is another
/// context's.
pub(crate) unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_dealloc_pd",
        object::find(pd).and_then(|pd| {
            // SAFETY: the object is live.
            let said = unsafe { (&raw const (*pd.public()).context).read() };
            if said != pd.inner.context.pointer() {
                return Err(Errno::because(
                    libc::ENOENT,
                    "the program has changed the context of the protection domain",
                ));
            }
            check::ending(pd.public(), activity, || Ok(pd.inner.device.destroy()?))?;
            object::retire(&pd)
        }),
    )
}
