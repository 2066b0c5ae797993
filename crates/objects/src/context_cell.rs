//! The part of a context that the objects made through it hold.

use std::sync::{Arc, Weak};

use anyverbs_locks::{Mutex, rank};

use crate::async_event::{AsyncEventKind, AsyncQueue, EventElement};
use crate::command::CommandFile;

/// The part of a context that its objects hold.
#[derive(Debug)]
pub struct ContextCell {
    /// Its device: the place of its first port among the ports of all devices.
    pub device: usize,
    /// Asynchronous events.
    pub events: AsyncQueue,
    /// The file behind its descriptor.
    pub command: CommandFile,
}

/// The contexts that hear of events of ports.
#[derive(Debug, Default)]
pub struct PortListeners(Mutex<rank::PortListeners, Vec<Weak<ContextCell>>>);

impl PortListeners {
    /// Adds a context.
    pub fn add(&self, context: &Arc<ContextCell>) {
        let mut contexts = self.0.lock();
        contexts.retain(|c| c.strong_count() > 0);
        contexts.push(Arc::downgrade(context));
    }

    /// Raises an event of a port, by its device and its number there, in every context of that device.
    pub fn raise(&self, (device, port): (usize, u8), kind: AsyncEventKind) {
        let contexts: Vec<_> = self.0.lock().iter().filter_map(Weak::upgrade).collect();
        for context in contexts.iter().filter(|context| context.device == device) {
            context.events.raise(kind, EventElement::Port(port), None);
        }
    }
}
