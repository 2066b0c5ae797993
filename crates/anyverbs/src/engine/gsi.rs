//! QP1, the general services interface: the connection manager's machine in the device.
//!
//! One lock guards the machine and the table of ids. It is taken after the receive path's lock and before the queues of event channels; no queue
//! pair is locked under it.

use anyverbs_proto::cm::{Cm, CmConfig};
use anyverbs_proto::time::Time;
use parking_lot::Mutex;

use super::Engine;
use crate::cm::Ids;

/// What the lock guards.
#[derive(Debug)]
struct State {
    machine: Cm,
    ids: Ids,
}

/// QP1.
#[derive(Debug)]
pub(crate) struct Gsi(Mutex<State>);

impl Gsi {
    pub(crate) fn new(config: CmConfig) -> Self {
        Self(Mutex::new(State { machine: Cm::new(config), ids: Ids::default() }))
    }
}

impl Engine {
    /// Calls the machine. Then, still under the lock, its events go to the ids, in their order; what it has to send leaves after that.
    pub(crate) fn with_cm<R>(&'static self, f: impl FnOnce(&mut Cm, &mut Ids, Time) -> R) -> R {
        let mut state = self.gsi.0.lock();
        let State { machine, ids } = &mut *state;
        let result = f(machine, ids, self.now());
        while let Some(event) = machine.poll_event() {
            ids.deliver(event);
        }
        result
    }
}
