//! LAP and APR: an alternate path for a connection (IBA 12.8).

use std::fmt;

use super::code::ApStatus;
use super::field::{at, bits, message};
use super::private_data::PrivateData;
use crate::cm::id::CommId;
use crate::types::{Gid, Qpn};

message! {
    /// Load alternate path. "Local" is the sender of the message.
    Lap {
        /// The sender's name of the connection.
        local_comm_id: CommId = at(0),
        /// The recipient's.
        remote_comm_id: CommId = at(4),
        /// The recipient's queue pair.
        remote_qpn: Qpn = at(12),
        /// Code of the time in which the sender expects an answer.
        remote_response_timeout: u8 = bits(15, 0, 5),
        /// LID of the sender's port.
        local_lid: u16 = at(20),
        /// LID of the recipient's port.
        remote_lid: u16 = at(22),
        /// The sender's port.
        local_gid: Gid = at(24),
        /// The recipient's port.
        remote_gid: Gid = at(40),
        /// 20 bits.
        flow_label: u32 = bits(56, 0, 20),
        /// Traffic class.
        traffic_class: u8 = at(59),
        /// Hop limit.
        hop_limit: u8 = at(60),
        /// Static rate, 6 bits.
        packet_rate: u8 = bits(61, 2, 6),
        /// Service level, 4 bits.
        sl: u8 = bits(62, 0, 4),
        /// Both ports lie in one subnet.
        subnet_local: bool = bits(62, 4, 1),
        /// Code of the ACK timeout, 5 bits.
        ack_timeout: u8 = bits(63, 0, 5),
        /// For the peer.
        private_data: PrivateData<{ Lap::PRIVATE_DATA }> = at(64),
    }
}

impl Lap {
    /// Bytes of private data.
    pub const PRIVATE_DATA: usize = 168;
}

impl fmt::Display for Lap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { local_comm_id, remote_comm_id, local_gid, remote_gid, .. } = self;
        write!(f, "LAP {local_comm_id} for {remote_comm_id} {local_gid} > {remote_gid}")
    }
}

message! {
    /// Alternate path response.
    Apr {
        /// The sender's name of the connection.
        local_comm_id: CommId = at(0),
        /// The recipient's.
        remote_comm_id: CommId = at(4),
        /// Bytes of additional information that count.
        info_len: u8 = at(8),
        /// The answer.
        status: ApStatus = at(9),
        /// Additional information: a value that would be accepted.
        info: [u8; Apr::INFO] = at(12),
        /// For the peer.
        private_data: PrivateData<{ Apr::PRIVATE_DATA }> = at(84),
    }
}

impl Apr {
    /// Bytes of private data.
    pub const PRIVATE_DATA: usize = 148;
    /// Bytes of additional information.
    pub const INFO: usize = 72;
}

impl fmt::Display for Apr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { local_comm_id, remote_comm_id, status, .. } = self;
        write!(f, "APR {local_comm_id} for {remote_comm_id} {status}")
    }
}
