//! Events that acknowledge themselves.

use std::ops::Deref;

use anyverbs_objects::async_event::AsyncEvent;
use anyverbs_objects::comp_channel::{CompChannel, CompEvent};
use anyverbs_objects::error::EventError;

use crate::context::Context;

/// An event that was read, acknowledged when dropped. So no forgotten call makes the destruction of an object wait forever.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use anyverbs::prelude::*;
///
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// let pd = context.alloc_pd()?;
/// let channel = context.create_comp_channel()?;
/// let cq = context.create_cq(16, Some(&channel), 0, 7)?;
/// # let a = context.create_default_qp(&pd, &cq, QpType::Rc)?;
/// # let b = context.create_default_qp(&pd, &cq, QpType::Rc)?;
/// # let (of_a, of_b) = (context.endpoint(&a)?, context.endpoint(&b)?);
/// # context.connect(&a, &of_a, &of_b)?;
/// # context.connect(&b, &of_b, &of_a)?;
/// # let memory = pd.alloc(64, Access::LOCAL_WRITE)?;
/// # b.recv(1, &memory.slice(..8))?;
/// cq.req_notify(false)?;
/// # a.send(2, &memory.slice(8..16))?;
/// // ... a request completes ...
/// assert_eq!(channel.next_event()?.cookie(), 7); // acknowledged here
/// # drop((a, b));
/// cq.destroy()?; // does not wait
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Acknowledged<E: Acknowledge>(Option<E>);

/// An event that an object waits for when it is destroyed.
pub trait Acknowledge: Sized {
    /// Acknowledges it.
    fn acknowledge(self);
}

impl Acknowledge for CompEvent {
    fn acknowledge(self) {
        self.ack();
    }
}

impl Acknowledge for AsyncEvent {
    fn acknowledge(self) {
        self.ack();
    }
}

impl<E: Acknowledge> Acknowledged<E> {
    pub(crate) fn new(event: E) -> Self {
        Self(Some(event))
    }

    /// The event, which is then not acknowledged. Its object cannot be destroyed before `ack` or its own `ack_events` was called.
    #[must_use]
    pub fn into_unacknowledged(mut self) -> E {
        self.0.take().expect("it holds its event until it is dropped")
    }
}

impl<E: Acknowledge> Deref for Acknowledged<E> {
    type Target = E;

    fn deref(&self) -> &E {
        self.0.as_ref().expect("it holds its event until it is dropped")
    }
}

impl<E: Acknowledge> Drop for Acknowledged<E> {
    fn drop(&mut self) {
        if let Some(event) = self.0.take() {
            event.acknowledge();
        }
    }
}

/// Events of a channel that acknowledge themselves.
pub trait CompChannelExt {
    /// As [`CompChannel::get_event`]; the event is acknowledged when dropped.
    ///
    /// # Errors
    /// [`EventError`].
    fn next_event(&self) -> Result<Acknowledged<CompEvent>, EventError>;
}

impl CompChannelExt for CompChannel {
    fn next_event(&self) -> Result<Acknowledged<CompEvent>, EventError> {
        self.get_event().map(Acknowledged::new)
    }
}

impl Context {
    /// As [`get_async_event`](Self::get_async_event); the event is acknowledged when dropped.
    ///
    /// # Errors
    /// [`EventError`].
    pub fn next_async_event(&self) -> Result<Acknowledged<AsyncEvent>, EventError> {
        self.get_async_event().map(Acknowledged::new)
    }
}
