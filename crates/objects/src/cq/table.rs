//! The completion queues of a device, for those who look at them.

use std::sync::{Arc, Weak};
use std::time::Duration;

use anyverbs_locks::{Mutex, rank};

use super::CqCell;

/// The completion queues that exist. Nothing but a look from outside needs it.
#[derive(Debug, Default)]
pub struct CqTable(Mutex<rank::CompletionQueues, Entries>);

#[derive(Debug, Default)]
struct Entries {
    last: u32,
    all: Vec<Weak<CqCell>>,
    /// Entries of queues that have ended are taken out when there are as many as this.
    sweep_at: usize,
}

/// The facts about a completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqFacts {
    /// Completions that it holds.
    pub capacity: usize,
    /// Completions that wait.
    pub len: usize,
    /// The place of the oldest, which changes when one is taken.
    pub place: usize,
    /// A completion was lost.
    pub overrun: bool,
    /// It has a completion channel.
    pub has_channel: bool,
    /// Events that were read and not acknowledged.
    pub unacknowledged: u64,
}

impl CqTable {
    /// Enters a queue under a new number.
    pub(super) fn enter(&self, make: impl FnOnce(u32) -> CqCell) -> Arc<CqCell> {
        let mut entries = self.0.lock();
        entries.last = entries.last.wrapping_add(1).max(1);
        let cell = Arc::new(make(entries.last));
        if entries.all.len() >= entries.sweep_at {
            entries.all.retain(|entry| entry.strong_count() > 0);
            entries.sweep_at = (2 * entries.all.len()).max(64);
        }
        entries.all.push(Arc::downgrade(&cell));
        cell
    }

    /// Those that were not destroyed, in the order of their creation.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<CqCell>> {
        let all: Vec<_> = self.0.lock().all.iter().filter_map(Weak::upgrade).collect();
        all.into_iter().filter(|cell| !cell.holders.is_dead()).collect()
    }
}

impl CqCell {
    /// The facts now; None if another thread keeps it locked.
    #[must_use]
    pub fn facts(&self, within: Duration) -> Option<CqFacts> {
        let notices = &self.notices;
        let unacknowledged = notices.acks.unacknowledged() + notices.comp_acks.unacknowledged();
        let state = self.state.try_lock_for(within)?;
        let queue = &state.queue;
        Some(CqFacts {
            capacity: queue.capacity(),
            len: queue.len(),
            place: queue.place(),
            overrun: queue.is_overrun(),
            has_channel: notices.channel.is_some(),
            unacknowledged,
        })
    }
}
