//! Numbers of raw queue pairs and work queues: they are those of queue pairs.

use anyverbs_proto::types::Qpn;

use crate::engine::Engine;
use crate::error::CreateError;

/// A number that no queue pair has, given back by drop.
#[derive(Debug)]
pub(super) struct Number {
    engine: &'static Engine,
    qpn: Qpn,
}

impl Number {
    pub(super) fn take(engine: &'static Engine) -> Result<Self, CreateError> {
        let qpn =
            engine.transport.qps.reserve().ok_or(CreateError::Exhausted("queue pair numbers"))?;
        Ok(Self { engine, qpn })
    }

    pub(super) fn qpn(&self) -> Qpn {
        self.qpn
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        if self.engine.is_current() {
            self.engine.transport.qps.release(self.qpn);
        }
    }
}
