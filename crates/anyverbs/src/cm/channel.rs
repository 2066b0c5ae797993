//! Event channel: where ids tell what happens.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::error::CmError;
use super::event::Event;
use crate::error::EventError;
use crate::event_queue::EventQueue;

/// Event channel (`rdma_create_event_channel(3)`). Its descriptor is readable exactly while an event waits, and may be set to
/// `O_NONBLOCK`.
#[derive(Debug)]
pub struct EventChannel(pub(crate) Arc<ChannelCell>);

#[derive(Debug)]
pub(crate) struct ChannelCell {
    pub(crate) events: EventQueue<Event>,
}

impl EventChannel {
    /// A new channel; starts the device.
    ///
    /// # Errors
    /// [`CmError::System`].
    pub fn new() -> Result<Self, CmError> {
        Err(CmError::Unsupported("connection manager"))
    }

    /// The oldest event (`rdma_get_cm_event`). Waits for one unless the program set `O_NONBLOCK`; holds no lock meanwhile.
    ///
    /// # Errors
    /// [`EventError`].
    pub fn get_event(&self) -> Result<Event, EventError> {
        Err(EventError::Forked)
    }
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.events.fd()
    }
}
