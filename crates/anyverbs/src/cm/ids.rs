//! Which id an event of the machine is for.

use anyverbs_proto::cm::event::CmEvent;

/// The ids of this process by their communication IDs and listeners. Guarded by the CM's lock.
#[derive(Debug, Default)]
pub(crate) struct Ids {}

impl Ids {
    /// Queues an event on the channel of its id. Called under the CM's lock: takes leaves only.
    pub(crate) fn deliver(&mut self, event: CmEvent) {
        let _ = event;
    }
}
