//! Domains of extended reliable connections. Their SRQs are in `srq.rs`, their queue pairs in `qp.rs`.

use std::{
    ffi::c_int,
    fs::File,
    os::fd::{FromRawFd, OwnedFd},
    sync::Arc,
};

use anyverbs::XrcdInitAttr;

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, pointer, value},
    faults,
    object::{self, Object},
    verbs::{Context, context, watched::activity},
};

pub(crate) type Xrcd = Object<ibv_xrcd>;

/// The device's part of an XRC domain.
pub(crate) struct XrcdInner {
    pub(crate) device: anyverbs::Xrcd,
    pub(crate) context: Arc<Context>,
}

/// A descriptor of our own for the file of a program's descriptor.
fn file(fd: c_int) -> Result<File, Errno> {
    // SAFETY: the call takes no pointers; a number that is no descriptor is `EBADF`.
    let own = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if own < 0 {
        return Err(Errno::because(
            std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EBADF),
            "fd cannot be used",
        ));
    }
    // SAFETY: the kernel has just made it, and it has no other owner.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(own) }))
}

/// Slot of `ibv_open_xrcd`: NULL with `errno` on failure. As Linux: `EAGAIN` for a file without a domain unless
/// `O_CREAT` is given, `EINVAL` for one that has a domain if `O_EXCL` is. The domain of a file is one for all processes of the
/// user and host.
///
/// # Safety
/// `attr` is NULL or readable.
pub(crate) unsafe extern "C" fn open_xrcd(
    context_: *mut ibv_context,
    attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_open_xrcd");
    faults::may_fail!("ibv_open_xrcd", pointer);
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    pointer(
        "ibv_open_xrcd",
        context(context_).and_then(|context| {
            let attr = attr.ok_or(Errno::NULL)?;
            if attr.comp_mask >= IBV_XRCD_INIT_ATTR_RESERVED {
                return Err(Errno::lacks("comp_mask has a bit that is not known here"));
            }
            if attr.comp_mask != IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS {
                return Err(Errno::invalid(
                    "comp_mask needs both IBV_XRCD_INIT_ATTR_FD and IBV_XRCD_INIT_ATTR_OFLAGS",
                ));
            }
            let device = context.inner.device.open_xrcd(XrcdInitAttr {
                file: if attr.fd == -1 { None } else { Some(file(attr.fd)?) },
                create: attr.oflags & libc::O_CREAT != 0,
                exclusive: attr.oflags & libc::O_EXCL != 0,
            })?;
            let public = ibv_xrcd { context: context.pointer() };
            Ok(object::publish(public, 0, XrcdInner { device, context }))
        }),
    )
}

/// Slot of `ibv_close_xrcd`: 0, or the errno value; `EBUSY` while a QP or an SRQ was made through it.
pub(crate) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_close_xrcd",
        object::find(xrcd).and_then(|xrcd: Arc<Xrcd>| {
            check::ending(xrcd.public(), activity, || Ok(xrcd.inner.device.close()?))?;
            object::retire(&xrcd)
        }),
    )
}
