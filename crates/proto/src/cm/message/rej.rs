//! REJ: says no (IBA 12.6.7).

use std::fmt;

use super::code::{About, RejReason};
use super::field::{at, bits, message};
use super::private_data::PrivateData;
use crate::cm::id::CommId;

message! {
    /// Reject.
    Rej {
        /// The sender's name of the connection; none if it never gave one.
        local_comm_id: CommId = at(0),
        /// The recipient's; none if the sender never learned it.
        remote_comm_id: CommId = at(4),
        /// The message that is rejected.
        about: About = bits(8, 0, 2),
        /// Bytes of additional information that count, 7 bits.
        info_len: u8 = bits(9, 0, 7),
        /// The reason.
        reason: RejReason = at(10),
        /// Additional reject information: a value that would be accepted.
        info: [u8; Rej::INFO] = at(12),
        /// For the side that is rejected.
        private_data: PrivateData<{ Rej::PRIVATE_DATA }> = at(84),
    }
}

impl Rej {
    /// Bytes of private data.
    pub const PRIVATE_DATA: usize = 148;
    /// Bytes of additional information.
    pub const INFO: usize = 72;

    /// Sets the additional information. It is cut if it is too long.
    #[must_use]
    pub fn with_info(mut self, info: &[u8]) -> Self {
        let len = info.len().min(Self::INFO);
        self.info = [0; Self::INFO];
        self.info[..len].copy_from_slice(&info[..len]);
        self.info_len = len as u8;
        self
    }

    /// The additional information that counts.
    #[must_use]
    pub fn info(&self) -> &[u8] {
        &self.info[..usize::from(self.info_len).min(Self::INFO)]
    }
}

impl fmt::Display for Rej {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { local_comm_id, remote_comm_id, about, reason, .. } = self;
        write!(f, "REJ {local_comm_id} for {remote_comm_id} of {about}: {reason}")
    }
}
