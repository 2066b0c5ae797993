//! The process's device, which all its sockets share.

use std::sync::Arc;

use anyverbs::{Context, Pd};
use parking_lot::Mutex;

use crate::errno::{Errno, Result};
use crate::fork::{Handlers, OfProcess};

/// The open device and its protection domain.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) pd: Pd,
    pub(crate) context: Context,
}

/// The device, and the process that opened it: a forked child opens its own.
type Slot = Mutex<Option<(u32, Arc<Device>)>>;

static DEVICE: OfProcess<Slot> = OfProcess::new();

fn slot() -> &'static Slot {
    DEVICE.get(Handlers { in_child: Some(in_child), ..Handlers::default() })
}

/// Another thread may be opening the device, with the slot locked.
unsafe extern "C" fn in_child() {
    DEVICE.begin_anew(Slot::default());
}

/// The device, opened at first use.
pub(crate) fn device() -> Result<Arc<Device>> {
    let me = std::process::id();
    let mut slot = slot().lock();
    match &*slot {
        Some((owner, device)) if *owner == me => return Ok(Arc::clone(device)),
        _ => {}
    }
    let name = anyverbs::devices()?.into_iter().next().ok_or(Errno(libc::ENODEV))?.name;
    let context = Context::open(&name)?;
    let pd = context.alloc_pd()?;
    let device = Arc::new(Device { pd, context });
    if let Some(inherited) = slot.replace((me, Arc::clone(&device))) {
        // The parent's, after a `clone` that calls no handlers: its locks may be held for ever here.
        std::mem::forget(inherited);
    }
    Ok(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_finds_the_slot_free_while_a_thread_opens_the_device() {
        let opening = slot().lock();
        // SAFETY: the child runs only the code below, and ends without returning to the test harness.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_free = slot().try_lock().is_some_and(|slot| slot.is_none());
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!is_free)) };
        }
        drop(opening);
        let mut status = -1;
        // SAFETY: waits for our child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the slot is locked for ever");
        assert!(slot().try_lock().is_some(), "the parent's");
    }
}
