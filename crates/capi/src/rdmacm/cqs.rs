//! Completion queues and channels that are made for an id, and that its public fields show.

use std::{ffi::c_int, ptr};

use crate::{
    abi::*,
    check,
    errno::Errno,
    rdmacm::{Id, id},
    verbs,
};

/// The queues and channels in an id's public fields.
#[derive(Clone, Copy)]
pub(crate) struct Cqs {
    channels: [*mut ibv_comp_channel; 2],
    /// The queues of sends and of receives.
    cqs: [*mut ibv_cq; 2],
}

impl Cqs {
    const NONE: Self = Self { channels: [ptr::null_mut(); 2], cqs: [ptr::null_mut(); 2] };

    pub(crate) fn of(id: &Id) -> Self {
        let shown = id::fields(id);
        Self {
            channels: [shown.send_cq_channel, shown.recv_cq_channel],
            cqs: [shown.send_cq, shown.recv_cq],
        }
    }

    fn show(&self, id: &Id) {
        let public = id.public();
        // SAFETY: the object is live.
        unsafe {
            (&raw mut (*public).send_cq_channel).write(self.channels[0]);
            (&raw mut (*public).recv_cq_channel).write(self.channels[1]);
            (&raw mut (*public).send_cq).write(self.cqs[0]);
            (&raw mut (*public).recv_cq).write(self.cqs[1]);
        }
    }

    pub(crate) fn send(&self) -> *mut ibv_cq {
        self.cqs[0]
    }

    pub(crate) fn recv(&self) -> *mut ibv_cq {
        self.cqs[1]
    }

    /// Destroys all that `keep` does not have: queues first, which use the channels.
    fn destroy_but(&self, keep: &Self) {
        for cq in distinct(self.cqs).into_iter().filter(|cq| !keep.cqs.contains(cq)) {
            // SAFETY: the call looks its argument up.
            unsafe { verbs::ibv_destroy_cq(cq) };
        }
        for channel in distinct(self.channels).into_iter().filter(|c| !keep.channels.contains(c)) {
            // SAFETY: as above.
            unsafe { verbs::ibv_destroy_comp_channel(channel) };
        }
    }
}

/// Without NULL and without the second of two that are the same.
fn distinct<T>([a, b]: [*mut T; 2]) -> Vec<*mut T> {
    let mut found = vec![a, b];
    found.dedup();
    found.retain(|p| !p.is_null());
    found
}

/// Makes a completion queue with a channel for each size that is given, and shows them. Their events carry the id.
pub(crate) fn create(id: &Id, sizes: [Option<u32>; 2]) -> Result<(), Errno> {
    let before = Cqs::of(id);
    let context = id::fields(id).verbs;
    let mut made = before;
    for (i, entries) in sizes.into_iter().enumerate() {
        let Some(entries) = entries else { continue };
        let entries = c_int::try_from(entries.max(1)).unwrap_or(c_int::MAX);
        // SAFETY: the calls look their arguments up.
        let complete = unsafe {
            made.channels[i] = verbs::ibv_create_comp_channel(context);
            made.cqs[i] = if made.channels[i].is_null() {
                ptr::null_mut()
            } else {
                verbs::ibv_create_cq(context, entries, id.public().cast(), made.channels[i], 0)
            };
            !made.cqs[i].is_null()
        };
        if !complete {
            let error = Errno::last();
            made.destroy_but(&before);
            return Err(error);
        }
        check::is_own(made.cqs[i]);
    }
    made.show(id);
    Ok(())
}

/// Destroys the queues and channels that the id shows now and did not show before.
pub(crate) fn destroy_since(id: &Id, before: &Cqs) {
    let now = Cqs::of(id);
    before.show(id);
    now.destroy_but(before);
}

/// Destroys the queues and channels that the id shows, even those that the program put there. An XRC id's belong to its
/// SRQ while it has one.
pub(crate) fn destroy(id: &Id) {
    let shown = id::fields(id);
    if shown.qp_type != IBV_QPT_XRC_RECV || shown.srq.is_null() {
        destroy_since(id, &Cqs::NONE);
    }
}
