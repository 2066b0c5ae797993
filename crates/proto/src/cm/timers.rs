//! One timer for each connection and SIDR request.

use std::collections::BTreeSet;

use super::id::CommId;
use crate::time::Time;

/// The timers that run, by time.
#[derive(Debug, Default)]
pub(super) struct Timers(BTreeSet<(Time, CommId)>);

impl Timers {
    /// Sets the timer of `id` to end at `at`, or stops it. Its owner keeps the last setting in `deadline`.
    pub(super) fn set(&mut self, id: CommId, deadline: &mut Option<Time>, at: Option<Time>) {
        if let Some(old) = deadline.take() {
            self.0.remove(&(old, id));
        }
        if let Some(at) = at {
            self.0.insert((at, id));
            *deadline = Some(at);
        }
    }

    /// When the first ends.
    pub(super) fn first(&self) -> Option<Time> {
        self.0.first().map(|(at, _)| *at)
    }

    /// Gives a timer that has ended by now. It still counts as set.
    pub(super) fn due(&self, now: Time) -> Option<CommId> {
        self.0.first().filter(|(at, _)| *at <= now).map(|(_, id)| *id)
    }

    /// The number of timers that run.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}
