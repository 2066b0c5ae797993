//! REP: answers a REQ (IBA 12.6.8).

use std::fmt;

use super::ece::{Ece, RepVendorId};
use super::field::{at, bits, message};
use super::private_data::PrivateData;
use crate::cm::id::CommId;
use crate::types::{Psn, QKey, Qpn};

message! {
    /// Reply to a request for communication. "Local" is the sender of the message.
    Rep {
        /// The sender's name of the connection.
        local_comm_id: CommId = at(0),
        /// The recipient's.
        remote_comm_id: CommId = at(4),
        /// Q_Key of datagram services; else 0.
        local_qkey: QKey = at(8),
        /// The sender's queue pair; not on XRC.
        local_qpn: Qpn = at(12),
        /// Vendor of the sender's ECE options; see [`Ece`].
        vendor_id: RepVendorId = at(15),
        /// The sender's EE context; on XRC its queue pair.
        local_eecn: Qpn = at(16),
        /// The PSN with which the *recipient's* send queue starts.
        starting_psn: Psn = at(20),
        /// READs and atomics that the sender takes at a time.
        responder_resources: u8 = at(24),
        /// READs and atomics that the sender wants outstanding at a time.
        initiator_depth: u8 = at(25),
        /// Code of the time that the sender may take to acknowledge, 5 bits.
        target_ack_delay: u8 = bits(26, 0, 5),
        /// The fate of the alternate path, 2 bits.
        failover_accepted: u8 = bits(26, 5, 2),
        /// The sender keeps end-to-end flow control.
        flow_control: bool = bits(26, 7, 1),
        /// RNR retries of the recipient's send queue, 3 bits.
        rnr_retry_count: u8 = bits(27, 0, 3),
        /// The sender's queue pair has an SRQ.
        srq: bool = bits(27, 3, 1),
        /// The sender's node GUID.
        local_ca_guid: u64 = at(28),
        /// For the side that asked.
        private_data: PrivateData<{ Rep::PRIVATE_DATA }> = at(36),
    }
}

impl Rep {
    /// Bytes of private data.
    pub const PRIVATE_DATA: usize = 196;

    /// The sender's ECE options, with the MAD's attribute modifier.
    #[must_use]
    pub const fn ece(&self, modifier: u32) -> Ece {
        Ece { vendor_id: self.vendor_id.0, options: modifier }
    }
}

impl fmt::Display for Rep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "REP {} for {} qp {} psn {} res {} depth {} rnr {}",
            self.local_comm_id,
            self.remote_comm_id,
            self.local_qpn,
            self.starting_psn.get(),
            self.responder_resources,
            self.initiator_depth,
            self.rnr_retry_count,
        )
    }
}
