//! Events that the CM reports to the program.

use super::id::{CommId, ServiceId};
use super::ip::IpHeader;
use super::listener::ListenerId;
use super::message::code::{About, RejReason, SidrStatus};
use super::message::ece::Ece;
use super::params::Transport;
use crate::types::{Gid, Mtu, Psn, QKey, Qpn};

/// The contents of a REQ (`RDMA_CM_EVENT_CONNECT_REQUEST`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectRequest {
    /// The service that was asked for.
    pub service_id: ServiceId,
    /// The addresses of the IP CM header.
    pub addresses: Option<IpHeader>,
    /// Our port.
    pub sgid: Gid,
    /// The peer's.
    pub dgid: Gid,
    /// The interface of the peer's link, if it is link-local and not of this host; else 0.
    pub interface: u32,
    /// The peer's node GUID.
    pub remote_ca_guid: u64,
    /// Transport.
    pub transport: Transport,
    /// The peer's queue pair.
    pub remote_qpn: Qpn,
    /// The PSN with which our send queue starts.
    pub sq_psn: Psn,
    /// Path MTU.
    pub mtu: Mtu,
    /// READs and atomics that the peer wants outstanding at a time. We should take that many.
    pub responder_resources: u8,
    /// READs and atomics that the peer takes at a time. We may have that many outstanding.
    pub initiator_depth: u8,
    /// The peer keeps end-to-end flow control.
    pub flow_control: bool,
    /// Transport retries of our send queue.
    pub retry_count: u8,
    /// RNR retries of our send queue.
    pub rnr_retry_count: u8,
    /// The peer's queue pair has an SRQ.
    pub srq: bool,
    /// XRC: the SRQ that is wanted.
    pub xrc_srqn: u32,
    /// The peer's options.
    pub ece: Ece,
    /// The user's part, with its padding: 56 bytes, or 92 without addresses.
    pub private_data: Box<[u8]>,
}

/// The contents of a REP (`RDMA_CM_EVENT_CONNECT_RESPONSE`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectResponse {
    /// The peer's node GUID.
    pub remote_ca_guid: u64,
    /// The peer's queue pair.
    pub remote_qpn: Qpn,
    /// The PSN with which our send queue starts.
    pub sq_psn: Psn,
    /// READs and atomics that the peer wants outstanding at a time. We take that many.
    pub responder_resources: u8,
    /// READs and atomics that the peer takes at a time. We may have that many outstanding.
    pub initiator_depth: u8,
    /// Code of the time that the peer may take to acknowledge.
    pub target_ack_delay: u8,
    /// The peer keeps end-to-end flow control.
    pub flow_control: bool,
    /// RNR retries of our send queue.
    pub rnr_retry_count: u8,
    /// The peer's queue pair has an SRQ.
    pub srq: bool,
    /// The peer's options.
    pub ece: Ece,
    /// Private data with its padding: 196 bytes.
    pub private_data: Box<[u8]>,
}

/// A rejection (`RDMA_CM_EVENT_REJECTED`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rejection {
    /// The reason, which is the event's status.
    pub reason: RejReason,
    /// The message that was rejected.
    pub about: About,
    /// Additional information: a value that would be accepted.
    pub info: Box<[u8]>,
    /// Private data with its padding: 148 bytes; none if the rejection is our own CM's.
    pub private_data: Box<[u8]>,
}

/// The contents of a SIDR_REQ (`RDMA_CM_EVENT_CONNECT_REQUEST` of a UD id).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SidrRequest {
    /// The service that was asked for.
    pub service_id: ServiceId,
    /// The addresses of the IP CM header.
    pub addresses: Option<IpHeader>,
    /// Our port.
    pub sgid: Gid,
    /// The peer's.
    pub dgid: Gid,
    /// The interface of the peer's link, if it is link-local and not of this host; else 0.
    pub interface: u32,
    /// The user's part, with its padding: 180 bytes, or 216 without addresses.
    pub private_data: Box<[u8]>,
}

/// The contents of a SIDR_REP (`RDMA_CM_EVENT_ESTABLISHED` of a UD id, or `UNREACHABLE`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SidrResponse {
    /// Whether there is a queue pair.
    pub status: SidrStatus,
    /// The queue pair.
    pub qpn: Qpn,
    /// Its key.
    pub qkey: QKey,
    /// The peer's options.
    pub ece: Ece,
    /// Additional information: a value that would be accepted.
    pub info: Box<[u8]>,
    /// Private data with its padding: 136 bytes.
    pub private_data: Box<[u8]>,
}

/// The way in which a connection ended (`RDMA_CM_EVENT_DISCONNECTED`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Disconnected {
    /// The peer asks for it, with 220 bytes of private data: [`super::Cm::disconnect`] answers.
    Requested(Box<[u8]>),
    /// The peer agreed, with 224 bytes of private data, or asked at the same time.
    Acknowledged(Box<[u8]>),
    /// The peer does not know the connection, or gave it up.
    Rejected(RejReason),
    /// The peer does not answer: the event's status is `-ETIMEDOUT`.
    TimedOut,
}

/// Something happened to a connection or a SIDR request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CmEvent {
    /// A peer wants to connect. Call [`super::Cm::take_request`], then accept, reject or destroy `id`.
    ConnectRequest {
        /// The listener that was asked.
        listener: ListenerId,
        /// The new connection.
        id: CommId,
        /// The contents of the request.
        request: Box<ConnectRequest>,
    },
    /// The peer accepts: move the queue pair, then [`super::Cm::ready`].
    ConnectResponse {
        /// The connection.
        id: CommId,
        /// The contents of the peer's answer.
        response: Box<ConnectResponse>,
    },
    /// The peer is ready (passive side).
    Established {
        /// The connection.
        id: CommId,
        /// Private data of the RTU with its padding, 224 bytes. It is empty if data came before the RTU.
        private_data: Box<[u8]>,
    },
    /// The peer says no.
    Rejected {
        /// The connection; all that is left is to destroy it.
        id: CommId,
        /// The reason.
        rejection: Box<Rejection>,
    },
    /// The peer does not answer: status `-ETIMEDOUT` (`RDMA_CM_EVENT_UNREACHABLE`).
    Unreachable {
        /// The connection or SIDR request; all that is left is to destroy it.
        id: CommId,
    },
    /// The connection is no more.
    Disconnected {
        /// The connection.
        id: CommId,
        /// The reason.
        how: Disconnected,
    },
    /// No packet of the connection is about any more: its queue pair may be used again.
    TimewaitExit {
        /// The connection; all that is left is to destroy it.
        id: CommId,
    },
    /// A peer asks for a queue pair. Call [`super::Cm::take_request`], then answer or destroy `id`.
    SidrRequest {
        /// The listener that was asked.
        listener: ListenerId,
        /// The new request.
        id: CommId,
        /// The contents of the request.
        request: Box<SidrRequest>,
    },
    /// The answer to a SIDR request.
    SidrResponse {
        /// The request; all that is left is to destroy it.
        id: CommId,
        /// The answer.
        response: Box<SidrResponse>,
    },
}

impl CmEvent {
    /// The connection or request that the event is about.
    #[must_use]
    pub const fn id(&self) -> CommId {
        match self {
            Self::ConnectRequest { id, .. }
            | Self::ConnectResponse { id, .. }
            | Self::Established { id, .. }
            | Self::Rejected { id, .. }
            | Self::Unreachable { id }
            | Self::Disconnected { id, .. }
            | Self::TimewaitExit { id }
            | Self::SidrRequest { id, .. }
            | Self::SidrResponse { id, .. } => *id,
        }
    }
}
