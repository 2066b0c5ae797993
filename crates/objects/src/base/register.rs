//! The objects of one kind that a device has, for those who look at them from outside.

use std::any::Any;
use std::sync::{Arc, Weak};

use anyverbs_locks::{Mutex, rank};

/// The completion queues that exist. The base does not know what they are.
#[derive(Debug, Default)]
pub struct Register(Mutex<rank::CompletionQueues, Entries>);

#[derive(Debug, Default)]
struct Entries {
    last: u32,
    all: Vec<Weak<dyn Any + Send + Sync>>,
    /// Entries of objects that have ended are taken out when there are as many as this.
    sweep_at: usize,
}

impl Register {
    /// Enters an object under a new number.
    pub(crate) fn enter<T: Any + Send + Sync>(&self, make: impl FnOnce(u32) -> T) -> Arc<T> {
        let mut entries = self.0.lock();
        entries.last = entries.last.wrapping_add(1).max(1);
        let object = Arc::new(make(entries.last));
        if entries.all.len() >= entries.sweep_at {
            entries.all.retain(|entry| entry.strong_count() > 0);
            entries.sweep_at = (2 * entries.all.len()).max(64);
        }
        let entry: Weak<T> = Arc::downgrade(&object);
        entries.all.push(entry);
        object
    }

    /// The objects that have not ended, in the order of their creation.
    pub(crate) fn all<T: Any + Send + Sync>(&self) -> Vec<Arc<T>> {
        let all: Vec<_> = self.0.lock().all.iter().filter_map(Weak::upgrade).collect();
        all.into_iter().filter_map(|object| object.downcast().ok()).collect()
    }
}
