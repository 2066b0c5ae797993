//! Completion channel: tells a program that sleeps that a CQ has completions.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Weak};

use crate::base::AdaptiveSpin;
use crate::base::Core;
use crate::context_cell::ContextCell;
use crate::cq::CqCell;
use crate::error::{CreateError, DestroyError, EventError};
use crate::event_queue::{COMPLETION, EventQueue};
use crate::holders::{Holdable, Holders};

/// Completion channel (`ibv_create_comp_channel`).
///
/// Its descriptor is readable exactly while an event waits, may be polled together with others, and may be set to
/// `O_NONBLOCK`.
#[derive(Debug)]
pub struct CompChannel(pub(crate) Arc<ChannelCell>);

#[derive(Debug)]
pub(crate) struct ChannelCell {
    pub(crate) core: &'static Core,
    /// The number of its device.
    device: usize,
    /// They do not hold their CQs, which hold the channel.
    events: EventQueue<Weak<CqCell>>,
    pub(crate) spin: AdaptiveSpin,
    holders: Holders,
}

impl Holdable for ChannelCell {
    fn holders(&self) -> &Holders {
        &self.holders
    }
}

impl ChannelCell {
    fn new(core: &'static Core, device: usize) -> std::io::Result<Self> {
        Ok(Self {
            core,
            device,
            events: EventQueue::new()?,
            spin: AdaptiveSpin::default(),
            holders: Holders::default(),
        })
    }

    pub(crate) fn is_of(&self, core: &Core, context: &ContextCell) -> bool {
        std::ptr::eq(self.core, core) && self.device == context.device
    }

    pub(crate) fn notify(&self, cq: &Arc<CqCell>) {
        self.spin.note_event();
        self.events.push(Arc::downgrade(cq));
    }

    pub(crate) fn withdraw(&self, cq: &CqCell) {
        self.events.withdraw(|event| std::ptr::eq(event.as_ptr(), cq));
    }
}

/// A completion event that was read: which CQ has completions. It is acknowledged when dropped: destroying the CQ waits for that.
///
/// So a thread drops the event before it destroys the CQ. In the head of a `match` or an `if let` the event lives until the end of that.
#[derive(Debug)]
pub struct CompEvent {
    cq: Arc<CqCell>,
    is_left: bool,
}

impl CompEvent {
    /// The value that the program gave at the CQ's creation or by [`crate::cq::Cq::set_cookie`].
    #[must_use]
    pub fn cookie(&self) -> u64 {
        self.cq.cookie()
    }

    /// Leaves it unacknowledged. The CQ cannot be destroyed before [`crate::cq::Cq::ack_events`] has counted it.
    pub fn leave_unacknowledged(mut self) {
        self.is_left = true;
    }
}

impl Drop for CompEvent {
    fn drop(&mut self) {
        if !self.is_left {
            self.cq.notices.comp_acks.acknowledge(1);
        }
    }
}

impl CompChannel {
    /// A new one, of the device with this number.
    ///
    /// # Errors
    /// [`CreateError::System`] when the system refuses a descriptor.
    #[doc(hidden)]
    pub fn create(core: &'static Core, device: usize) -> Result<Self, CreateError> {
        let cell = ChannelCell::new(core, device)
            .map_err(|e| CreateError::System(e.raw_os_error().unwrap_or(libc::EMFILE)))?;
        Ok(Self(Arc::new(cell)))
    }

    /// Reads the oldest event (`ibv_get_cq_event`). Waits for one unless the program set `O_NONBLOCK`, and receives
    /// from the network meanwhile. Holds no lock while it sleeps, so that the thread may be cancelled.
    ///
    /// # Errors
    /// [`EventError`].
    pub fn get_event(&self) -> Result<CompEvent, EventError> {
        if !self.0.core.is_current() {
            return Err(EventError::Forked);
        }
        let ChannelCell { core, events, spin, .. } = &*self.0;
        // `None`: it is being dropped, and withdraws the rest.
        let read = |cq: Weak<CqCell>| {
            let cq = cq.upgrade()?;
            cq.notices.comp_acks.read(COMPLETION);
            Some(CompEvent { cq, is_left: false })
        };
        if let Some(event) = events.try_pop_with(read) {
            spin.note_found();
            return Ok(event);
        }
        if !events.may_wait() {
            spin.note_polled();
            core.progress().end_polling();
            return events.pop_with(read);
        }
        let mut event = None;
        let mut found = || {
            event = events.try_pop_with(read);
            event.is_some()
        };
        core.progress().wait_for_event(spin, events.fd(), &mut found).map_err(EventError::Io)?;
        if let Some(event) = event {
            return Ok(event);
        }
        let event = events.pop_with(read);
        core.progress().end_wait();
        event
    }

    /// Destroys the channel.
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while a CQ uses it.
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.0.core.is_current() {
            return Ok(());
        }
        self.0.holders.retire().inspect_err(|e| {
            crate::say_again!(
                error,
                self.0.holders.id(),
                "a completion channel is not destroyed: {e}; see `anyverbs explain AV8009`"
            )
        })
    }
}

impl AsFd for CompChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.events.fd()
    }
}
