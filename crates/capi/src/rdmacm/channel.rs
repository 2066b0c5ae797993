//! Event channels.

use std::{
    os::fd::{AsFd, AsRawFd},
    sync::Arc,
};

use anyverbs::cm;
use parking_lot::Mutex;

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, pointer},
    log,
    object::{self, Object},
    rdmacm::event::LastRequest,
};

pub(crate) type Channel = Object<rdma_event_channel>;

/// The device's part of an event channel.
pub(crate) struct ChannelInner {
    pub(crate) device: cm::EventChannel,
    pub(crate) last_request: Mutex<LastRequest>,
}

/// A channel that no program made: that of an id in synchronous mode, which shows it as `id->channel`.
pub(crate) struct OwnChannel(Arc<Channel>);

impl OwnChannel {
    pub(crate) fn new() -> Result<Self, Errno> {
        let pointer = create()?;
        Ok(Self(object::lookup(pointer)?))
    }

    pub(crate) fn channel(&self) -> &Arc<Channel> {
        &self.0
    }
}

impl Drop for OwnChannel {
    fn drop(&mut self) {
        let _: Result<(), Errno> = object::retire(&self.0);
    }
}

fn create() -> Result<*mut rdma_event_channel, Errno> {
    log::init();
    let device = cm::create_event_channel()?;
    let public = rdma_event_channel { fd: device.as_fd().as_raw_fd() };
    Ok(object::publish(public, 0, ChannelInner { device, last_request: Mutex::default() }))
}

/// `rdma_create_event_channel`: NULL with `errno` on failure.
pub(crate) unsafe extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    let _uncancelled = Uncancelled::new();
    pointer("rdma_create_event_channel", create())
}

/// `rdma_destroy_event_channel`. Ids that are still on it keep working, but their events are lost.
pub(crate) unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    let _uncancelled = Uncancelled::new();
    let found: Result<Arc<Channel>, _> = object::find(channel);
    if let Ok(channel) = found {
        check::destroys_channel(channel.public());
        let _: Result<(), Errno> = object::retire(&channel);
    }
}
