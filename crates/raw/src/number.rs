//! Numbers of raw queue pairs and work queues: they are those of queue pairs.

use anyverbs_objects::error::CreateError;
use anyverbs_proto::types::Qpn;
use anyverbs_transport::qp::transport::Transport;

/// A number that no queue pair has, given back by drop.
#[derive(Debug)]
pub(super) struct Number {
    transport: &'static Transport,
    qpn: Qpn,
}

impl Number {
    pub(super) fn take(transport: &'static Transport) -> Result<Self, CreateError> {
        let qpn = transport.qps.reserve().ok_or(CreateError::Exhausted("queue pair numbers"))?;
        Ok(Self { transport, qpn })
    }

    pub(super) fn qpn(&self) -> Qpn {
        self.qpn
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        if self.transport.core.is_current() {
            self.transport.qps.release(self.qpn);
        }
    }
}
