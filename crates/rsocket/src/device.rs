//! The process's device, which all its sockets share.

use std::sync::Arc;

use anyverbs::{Context, Pd};
use parking_lot::Mutex;

use crate::errno::{Errno, Result};

/// The open device and its protection domain.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) pd: Pd,
    pub(crate) context: Context,
}

/// The process that opened it: a forked child opens its own.
static DEVICE: Mutex<Option<(u32, Arc<Device>)>> = Mutex::new(None);

/// The device, opened at first use.
pub(crate) fn device() -> Result<Arc<Device>> {
    let me = std::process::id();
    let mut slot = DEVICE.lock();
    match &*slot {
        Some((owner, device)) if *owner == me => return Ok(Arc::clone(device)),
        _ => {}
    }
    let name = anyverbs::devices()?.into_iter().next().ok_or(Errno(libc::ENODEV))?.name;
    let context = Context::open(&name)?;
    let pd = context.alloc_pd()?;
    let device = Arc::new(Device { pd, context });
    if let Some(inherited) = slot.replace((me, Arc::clone(&device))) {
        // The parent's: its locks may be held for ever here.
        std::mem::forget(inherited);
    }
    Ok(device)
}
