//! The facts about completion queues, for those who look at them.

use std::sync::Arc;
use std::time::Duration;

use anyverbs_proto::types::Qpn;

use super::{Cq, CqCell};
use crate::base::Core;

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

impl Cq {
    /// Its number among those of the process, as `anyverbs show` and the log have it.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.0.number
    }
}

impl CqCell {
    /// The completion queues of a device that were not destroyed, in the order of their creation.
    #[must_use]
    pub fn all(core: &Core) -> Vec<Arc<Self>> {
        let mut all = core.cqs.all::<Self>();
        all.retain(|cell| !cell.holders.is_dead());
        all
    }

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

    /// The queue pairs of up to `most` of the oldest completions that wait, each as often as it has some. Empty if another
    /// thread keeps it locked.
    #[must_use]
    pub fn queue_pairs(&self, most: usize, within: Duration) -> Vec<Qpn> {
        // No memory is asked for under the lock.
        let mut all = Vec::with_capacity(most);
        if let Some(state) = self.state.try_lock_for(within) {
            all.extend(state.queue.queue_pairs().take(most));
        }
        all
    }
}
