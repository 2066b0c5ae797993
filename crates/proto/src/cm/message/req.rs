//! REQ: asks for a connection (IBA 12.6.5).

use std::fmt;

use super::code::ServiceType;
use super::ece::Ece;
use super::field::{at, bits, message};
use super::path::PathRecord;
use super::private_data::PrivateData;
use crate::cm::id::{CommId, ServiceId};
use crate::types::{Mtu, PKey, Psn, QKey, Qpn};

message! {
    /// Request for communication. "Local" is the sender of the message.
    Req {
        /// The sender's name of the connection.
        local_comm_id: CommId = at(0),
        /// Vendor of the sender's ECE options; see [`Ece`].
        vendor_id: u32 = bits(5, 0, 24),
        /// The service that is to answer.
        service_id: ServiceId = at(8),
        /// The sender's node GUID.
        local_ca_guid: u64 = at(16),
        /// Q_Key of datagram services; else 0.
        local_qkey: QKey = at(28),
        /// The sender's queue pair.
        local_qpn: Qpn = at(32),
        /// READs and atomics that the sender takes at a time.
        responder_resources: u8 = at(35),
        /// The sender's EE context.
        local_eecn: Qpn = at(36),
        /// READs and atomics that the sender wants outstanding at a time.
        initiator_depth: u8 = at(39),
        /// EE context of an existing reliable datagram channel; XRC: the target's SRQ.
        remote_eecn: Qpn = at(40),
        /// Code of the time in which the sender expects an answer.
        remote_response_timeout: u8 = bits(43, 0, 5),
        /// Transport.
        service_type: ServiceType = bits(43, 5, 2),
        /// The sender keeps end-to-end flow control.
        flow_control: bool = bits(43, 7, 1),
        /// The PSN with which the *recipient's* send queue starts.
        starting_psn: Psn = at(44),
        /// Code of the time in which the sender answers.
        local_response_timeout: u8 = bits(47, 0, 5),
        /// Transport retries of the recipient's send queue, 3 bits.
        retry_count: u8 = bits(47, 5, 3),
        /// Partition.
        pkey: PKey = at(48),
        /// Path MTU; `None` for a code that stands for none.
        path_mtu: Option<Mtu> = bits(50, 0, 4),
        /// The reliable datagram channel exists.
        rdc_exists: bool = bits(50, 4, 1),
        /// RNR retries of the recipient's send queue, 3 bits.
        rnr_retry_count: u8 = bits(50, 5, 3),
        /// Times that either side repeats a message without an answer, 4 bits.
        max_cm_retries: u8 = bits(51, 0, 4),
        /// The sender's queue pair has an SRQ.
        srq: bool = bits(51, 4, 1),
        /// With the extended service type, 3 bits: 1 is XRC.
        extended_transport: u8 = bits(51, 5, 3),
        /// The path of the connection.
        primary: PathRecord = at(52),
        /// The path that the connection may migrate to.
        alternate: PathRecord = at(52 + PathRecord::LEN),
        /// For the listener; behind the IP CM header, if there is one.
        private_data: PrivateData<{ Req::PRIVATE_DATA }> = at(140),
    }
}

impl Req {
    /// Bytes of private data, an IP CM header included.
    pub const PRIVATE_DATA: usize = 92;

    /// The extended transport type of XRC.
    pub const XRC: u8 = 1;

    /// The sender's ECE options, with the MAD's attribute modifier.
    #[must_use]
    pub const fn ece(&self, modifier: u32) -> Ece {
        Ece { vendor_id: self.vendor_id, options: modifier }
    }
}

impl fmt::Display for Req {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "REQ {} service {} {} qp {} psn {} res {} depth {} retry {} rnr {} tries {}",
            self.local_comm_id,
            self.service_id,
            self.service_type,
            self.local_qpn,
            self.starting_psn.get(),
            self.responder_resources,
            self.initiator_depth,
            self.retry_count,
            self.rnr_retry_count,
            self.max_cm_retries,
        )?;
        match self.path_mtu {
            Some(mtu) => write!(f, " mtu {}", mtu.bytes())?,
            None => f.write_str(" mtu ?")?,
        }
        write!(f, " {} > {}", self.primary.local_gid, self.primary.remote_gid)
    }
}
