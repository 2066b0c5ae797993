//! RTU: ready to use (IBA 12.6.9).

use std::fmt;

use super::field::{at, message};
use super::private_data::PrivateData;
use crate::cm::id::CommId;

message! {
    /// Ready to use: answers a REP.
    Rtu {
        /// The sender's name of the connection.
        local_comm_id: CommId = at(0),
        /// The recipient's.
        remote_comm_id: CommId = at(4),
        /// For the side that accepted.
        private_data: PrivateData<{ Rtu::PRIVATE_DATA }> = at(8),
    }
}

impl Rtu {
    /// Bytes of private data.
    pub const PRIVATE_DATA: usize = 224;
}

impl fmt::Display for Rtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RTU {} for {}", self.local_comm_id, self.remote_comm_id)
    }
}
