//! MRA: message receipt acknowledged, the answer takes longer (IBA 12.6.6).

use std::fmt;

use super::code::About;
use super::field::{at, bits, message};
use super::private_data::PrivateData;
use crate::cm::id::CommId;

message! {
    /// Message receipt acknowledgement.
    Mra {
        /// The sender's name of the connection.
        local_comm_id: CommId = at(0),
        /// The recipient's.
        remote_comm_id: CommId = at(4),
        /// The message that was received.
        about: About = bits(8, 0, 2),
        /// Code of the time that the answer may take from now, 5 bits.
        service_timeout: u8 = bits(9, 0, 5),
        /// For the side that waits.
        private_data: PrivateData<{ Mra::PRIVATE_DATA }> = at(10),
    }
}

impl Mra {
    /// Bytes of private data.
    pub const PRIVATE_DATA: usize = 222;
}

impl fmt::Display for Mra {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { local_comm_id, remote_comm_id, about, service_timeout, .. } = self;
        write!(f, "MRA {local_comm_id} for {remote_comm_id} of {about} timeout {service_timeout}")
    }
}
