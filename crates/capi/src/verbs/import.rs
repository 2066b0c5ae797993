//! `ibv_import_*`: the objects of a context under further pointers, found by the `handle` that they carry.
//!
//! An import is an object of its own that shares the device's object: either may destroy that, `unimport` gives only the
//! import back. In another process than its own a context and its device memory can be imported, and nothing else.

use std::{
    ffi::{c_int, c_void},
    os::fd::{BorrowedFd, FromRawFd, OwnedFd},
    ptr,
    sync::Arc,
};

use crate::{
    abi::*,
    cancel::Uncancelled,
    errno::{Errno, pointer},
    object,
    verbs::{Context, Mr, MrInner, Pd, PdInner, answering, devices, publish_context},
};

/// `ibv_import_device`: NULL with `errno` on failure; `EBADF`, `EINVAL` for a descriptor of something else, or for one that
/// is some context's own and no duplicate. The context takes the descriptor over.
pub(crate) unsafe extern "C" fn ibv_import_device(cmd_fd: c_int) -> *mut ibv_context {
    let _uncancelled = Uncancelled::new();
    pointer("ibv_import_device", import_device(cmd_fd))
}

fn import_device(cmd_fd: c_int) -> Result<*mut ibv_context, Errno> {
    if cmd_fd < 0 {
        return Err(Errno::because(libc::EBADF, "cmd_fd is no descriptor"));
    }
    // SAFETY: the live contexts' fields are C's, and only read.
    let own = |c: &Context| unsafe { (&raw const (*c.pointer()).cmd_fd).read() == cmd_fd };
    if object::any(own).is_some() {
        return Err(Errno::invalid("cmd_fd is that of a context of this process"));
    }
    // SAFETY: borrowed for a duplication, which fails (`EBADF`) for a number that is no descriptor.
    let passed = unsafe { BorrowedFd::borrow_raw(cmd_fd) };
    let duplicate = passed.try_clone_to_owned();
    let duplicate = duplicate.map_err(|e| {
        Errno::because(e.raw_os_error().unwrap_or(libc::EBADF), "cmd_fd cannot be duplicated")
    })?;
    let device = anyverbs::Context::import(duplicate)?;
    let found = devices()
        .into_iter()
        .nth(device.number())
        .ok_or(Errno::because(libc::ENODEV, "the device of cmd_fd is not here"))?;
    // SAFETY: the program passes the descriptor on: from here on it is the context's.
    let passed = unsafe { OwnedFd::from_raw_fd(cmd_fd) };
    publish_context(found, device, Some(passed))
}

/// The reason why no handle is found here: objects that another process made on its context stay there.
fn nothing(context: &Context) -> Errno {
    if context.inner.device.is_own() {
        Errno::because(libc::ENOENT, "the context has no object of this handle")
    } else {
        Errno::lacks("objects that another process made cannot be imported")
    }
}

/// `ibv_import_pd`: NULL with `errno` on failure; for a handle that names none here `ENOENT`, or `EOPNOTSUPP` where the context's
/// descriptor is another process's.
pub(crate) unsafe extern "C" fn ibv_import_pd(
    context_: *mut ibv_context,
    handle: u32,
) -> *mut ibv_pd {
    let _uncancelled = Uncancelled::new();
    pointer(
        "ibv_import_pd",
        answering(context_).and_then(|context| {
            let identity = context.inner.device.identity();
            let same = |pd: &Pd| {
                pd.handle() == handle && pd.inner.context.inner.device.identity() == identity
            };
            let pd = object::any(same).ok_or_else(|| nothing(&context))?;
            let device = context.inner.device.import_pd(&pd.inner.device);
            let public = ibv_pd { context: context.pointer(), handle };
            Ok(object::publish(public, handle, PdInner { device, context }))
        }),
    )
}

/// `ibv_unimport_pd`: the protection domain stays.
pub(crate) unsafe extern "C" fn ibv_unimport_pd(pd: *mut ibv_pd) {
    let _uncancelled = Uncancelled::new();
    if let Ok(pd) = object::find::<ibv_pd>(pd) {
        let _: Result<(), Errno> = object::retire(&pd);
    }
}

/// `ibv_import_mr`: NULL with `errno` on failure, as `ibv_import_pd`. `addr` is NULL.
pub(crate) unsafe extern "C" fn ibv_import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr {
    let _uncancelled = Uncancelled::new();
    pointer(
        "ibv_import_mr",
        object::find(pd).and_then(|pd: Arc<Pd>| {
            let context = Arc::clone(&pd.inner.context);
            context.answers()?;
            let identity = context.inner.device.identity();
            let same = |mr: &Mr| {
                mr.handle() == handle && mr.inner.context.inner.device.identity() == identity
            };
            let mr = object::any(same).ok_or_else(|| nothing(&context))?;
            let device = Arc::clone(&mr.inner.device);
            let public = ibv_mr {
                context: context.pointer(),
                pd: pd.public(),
                addr: ptr::null_mut::<c_void>(),
                length: device.len() as usize,
                handle,
                lkey: device.lkey(),
                rkey: device.rkey(),
            };
            Ok(object::publish(public, handle, MrInner { device, context }))
        }),
    )
}

/// `ibv_unimport_mr`: the memory region stays.
pub(crate) unsafe extern "C" fn ibv_unimport_mr(mr: *mut ibv_mr) {
    let _uncancelled = Uncancelled::new();
    if let Ok(mr) = object::find::<ibv_mr>(mr) {
        let _: Result<(), Errno> = object::retire(&mr);
    }
}
