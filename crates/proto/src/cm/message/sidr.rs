//! SIDR_REQ and SIDR_REP: the queue pair behind a service, for datagrams (IBA 12.11).

use std::fmt;

use super::code::SidrStatus;
use super::ece::{Ece, SidrRepVendorId};
use super::field::{at, message};
use super::private_data::PrivateData;
use crate::cm::id::{CommId, ServiceId};
use crate::types::{PKey, QKey, Qpn};

message! {
    /// Service ID resolution request.
    SidrReq {
        /// The sender's name of the request.
        request_id: CommId = at(0),
        /// Partition.
        pkey: PKey = at(4),
        /// The service that is to answer.
        service_id: ServiceId = at(8),
        /// For the listener; behind the IP CM header, if there is one.
        private_data: PrivateData<{ SidrReq::PRIVATE_DATA }> = at(16),
    }
}

impl SidrReq {
    /// Bytes of private data, an IP CM header included.
    pub const PRIVATE_DATA: usize = 216;
}

impl fmt::Display for SidrReq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SIDR_REQ {} service {}", self.request_id, self.service_id)
    }
}

message! {
    /// Service ID resolution response.
    SidrRep {
        /// The value from the request.
        request_id: CommId = at(0),
        /// The answer.
        status: SidrStatus = at(4),
        /// Bytes of additional information that count.
        info_len: u8 = at(5),
        /// Vendor of the sender's ECE options; see [`Ece`].
        vendor_id: SidrRepVendorId = at(6),
        /// The queue pair.
        qpn: Qpn = at(8),
        /// The value from the request.
        service_id: ServiceId = at(12),
        /// The queue pair's key.
        qkey: QKey = at(20),
        /// Additional information: a value that would be accepted.
        info: [u8; SidrRep::INFO] = at(24),
        /// For the side that asked.
        private_data: PrivateData<{ SidrRep::PRIVATE_DATA }> = at(96),
    }
}

impl SidrRep {
    /// Bytes of private data.
    pub const PRIVATE_DATA: usize = 136;
    /// Bytes of additional information.
    pub const INFO: usize = 72;

    /// The sender's ECE options, with the MAD's attribute modifier.
    #[must_use]
    pub const fn ece(&self, modifier: u32) -> Ece {
        Ece { vendor_id: self.vendor_id.0, options: modifier }
    }
}

impl fmt::Display for SidrRep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { request_id, status, qpn, qkey, service_id, .. } = self;
        write!(
            f,
            "SIDR_REP {request_id} service {service_id} {status} qp {qpn} qkey {:#010x}",
            qkey.0
        )
    }
}
