//! DREQ and DREP: the end of a connection (IBA 12.6.10, 12.6.11).

use std::fmt;

use super::field::{at, message};
use super::private_data::PrivateData;
use crate::cm::id::CommId;
use crate::types::Qpn;

message! {
    /// Disconnect request.
    Dreq {
        /// The sender's name of the connection.
        local_comm_id: CommId = at(0),
        /// The recipient's.
        remote_comm_id: CommId = at(4),
        /// The recipient's queue pair.
        remote_qpn: Qpn = at(8),
        /// For the peer.
        private_data: PrivateData<{ Dreq::PRIVATE_DATA }> = at(12),
    }
}

impl Dreq {
    /// Bytes of private data.
    pub const PRIVATE_DATA: usize = 220;
}

impl fmt::Display for Dreq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { local_comm_id, remote_comm_id, remote_qpn, .. } = self;
        write!(f, "DREQ {local_comm_id} for {remote_comm_id} qp {remote_qpn}")
    }
}

message! {
    /// Disconnect reply.
    Drep {
        /// The sender's name of the connection.
        local_comm_id: CommId = at(0),
        /// The recipient's.
        remote_comm_id: CommId = at(4),
        /// For the peer.
        private_data: PrivateData<{ Drep::PRIVATE_DATA }> = at(8),
    }
}

impl Drep {
    /// Bytes of private data.
    pub const PRIVATE_DATA: usize = 224;
}

impl fmt::Display for Drep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DREP {} for {}", self.local_comm_id, self.remote_comm_id)
    }
}
