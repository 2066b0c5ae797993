//! Buffers that the library allocates (`ibv_alloc_buf`).

use std::{
    ffi::{c_int, c_void},
    ptr,
    sync::Arc,
};

use crate::{
    abi::*,
    cancel::Uncancelled,
    errno::{Errno, give, minus_one, pointer},
    object::{self, Object},
    verbs::{Pd, access, publish_mr},
};

pub(crate) type Buf = Object<ibv_buf>;

/// The device's part of a buffer.
pub(crate) struct BufInner {
    pub(crate) device: anyverbs::Buf,
}

/// `ibv_alloc_buf`: where the buffer lies, with its handle in `*buf`; NULL with `errno` on failure.
///
/// # Safety
/// `buf` is NULL or writable.
pub(crate) unsafe extern "C" fn ibv_alloc_buf(
    pd: *mut ibv_pd,
    size: usize,
    buf: *mut *mut ibv_buf,
) -> *mut c_void {
    let _uncancelled = Uncancelled::new();
    pointer(
        "ibv_alloc_buf",
        object::find(pd).and_then(|pd: Arc<Pd>| {
            if buf.is_null() {
                return Err(Errno::NULL);
            }
            let device = pd.inner.device.alloc_buf(size as u64)?;
            let start = device.as_ptr();
            let published = object::publish(ibv_buf::new(), 0, BufInner { device });
            // SAFETY: the caller's promise.
            unsafe { give(buf, published) };
            Ok(start.cast())
        }),
    )
}

/// `ibv_free_buf`. Regions of the buffer keep its memory until they go.
pub(crate) unsafe extern "C" fn ibv_free_buf(buf: *mut ibv_buf) {
    let _uncancelled = Uncancelled::new();
    if let Ok(buf) = object::find::<ibv_buf>(buf) {
        let _: Result<(), Errno> = object::retire(&buf);
    }
}

/// `ibv_export_buf_dmabuf_fd`: -1 with `ENODATA`, since buffers are ordinary memory, behind which no dma-buf is.
pub(crate) unsafe extern "C" fn ibv_export_buf_dmabuf_fd(buf: *mut ibv_buf) -> c_int {
    let found: Result<Arc<Buf>, _> = object::find(buf);
    minus_one(
        "ibv_export_buf_dmabuf_fd",
        found.and(Err(Errno::because(libc::ENODATA, "no dma-buf is behind a buffer"))),
    )
}

/// `ibv_reg_buf_mr`: NULL with `errno` on failure; `EINVAL` for another protection domain than the buffer's, or beyond it.
pub(crate) unsafe extern "C" fn ibv_reg_buf_mr(
    pd: *mut ibv_pd,
    buf: *mut ibv_buf,
    addr: *mut c_void,
    length: usize,
    flags: c_int,
) -> *mut ibv_mr {
    let _uncancelled = Uncancelled::new();
    pointer(
        "ibv_reg_buf_mr",
        object::find(pd).and_then(|pd: Arc<Pd>| {
            let buf: Arc<Buf> = object::find(buf)?;
            let access = access(flags.cast_unsigned())?;
            let at = addr as u64;
            // SAFETY: the program's promise, as for `ibv_reg_mr`.
            let device = unsafe {
                pd.inner.device.reg_buf_mr(&buf.inner.device, (at, length as u64, at), access, None)
            }?;
            Ok(publish_mr(&pd, device, addr, length))
        }),
    )
}

/// A buffer's handle has nothing that a program could see.
impl ibv_buf {
    fn new() -> Self {
        // SAFETY: no bytes.
        unsafe { ptr::read(ptr::dangling()) }
    }
}
