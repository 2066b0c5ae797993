//! Parameters that a program gives when it connects, accepts or listens.

use std::net::IpAddr;
use std::time::Duration;

use super::id::ServiceId;
use super::ip::IpHeader;
use super::message::code::{ServiceType, SidrStatus};
use super::message::ece::Ece;
use super::message::req::Req;
use crate::types::{Gid, Mtu, PKey, Psn, QKey, Qpn};

/// Transport of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Transport {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Extended reliable connection: initiator on the active side, target on the passive.
    Xrc,
}

impl Transport {
    /// As a REQ says it; `None` for one that we do not know.
    pub(super) fn of(req: &Req) -> Option<Self> {
        match (req.service_type, req.extended_transport) {
            (ServiceType::Rc, _) => Some(Self::Rc),
            (ServiceType::Uc, _) => Some(Self::Uc),
            (ServiceType::Extended, Req::XRC) => Some(Self::Xrc),
            _ => None,
        }
    }

    pub(super) fn codes(self) -> (ServiceType, u8) {
        match self {
            Self::Rc => (ServiceType::Rc, 0),
            Self::Uc => (ServiceType::Uc, 0),
            Self::Xrc => (ServiceType::Extended, Req::XRC),
        }
    }
}

/// The path of a connection, as the program resolved it (`struct ibv_sa_path_rec`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Path {
    /// Our port.
    pub sgid: Gid,
    /// The peer's.
    pub dgid: Gid,
    /// The interface of the peer's link, if it is link-local and not of this host; else 0.
    pub interface: u32,
    /// Partition.
    pub pkey: PKey,
    /// Path MTU.
    pub mtu: Mtu,
    /// IPv6 flow label, 20 bits.
    pub flow_label: u32,
    /// Traffic class or TOS.
    pub traffic_class: u8,
    /// Hop limit or TTL.
    pub hop_limit: u8,
    /// Service level, 4 bits.
    pub sl: u8,
    /// Static rate, 6 bits (`enum ibv_rate`).
    pub rate: u8,
    /// Code of the time that a packet may take, 5 bits; the kernel takes 16 for RoCE.
    pub packet_life_time: u8,
}

/// Parameters of [`super::Cm::connect`] (`struct rdma_conn_param`, `rdma_connect(3)`).
#[derive(Clone, Copy, Debug)]
pub struct ConnectParams<'a> {
    /// The listener.
    pub service_id: ServiceId,
    /// Addresses for the IP CM header; `None`: there is none (`AF_IB`).
    pub addresses: Option<IpHeader>,
    /// The path of the connection.
    pub path: Path,
    /// Transport.
    pub transport: Transport,
    /// Our queue pair.
    pub qpn: Qpn,
    /// The PSN with which the peer begins to send: drawn at random.
    pub starting_psn: Psn,
    /// READs and atomics that we take at a time.
    pub responder_resources: u8,
    /// READs and atomics that we want outstanding at a time.
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// Transport retries of both send queues, 3 bits.
    pub retry_count: u8,
    /// RNR retries of the *peer's* send queue, 3 bits.
    pub rnr_retry_count: u8,
    /// Our queue pair has an SRQ.
    pub srq: bool,
    /// The vendor's options.
    pub ece: Ece,
    /// Code of the time in which we expect an answer to REQ and DREQ, and in which we promise to answer; the kernel takes 20.
    pub response_timeout: u8,
    /// Times that a message is repeated, 4 bits. The kernel takes 15.
    pub max_cm_retries: u8,
    /// For the listener: 56 bytes, or 92 without addresses.
    pub private_data: &'a [u8],
}

/// Parameters of [`super::Cm::accept`] (`rdma_accept(3)`).
#[derive(Clone, Copy, Debug)]
pub struct AcceptParams<'a> {
    /// Our queue pair.
    pub qpn: Qpn,
    /// The PSN with which the peer begins to send: drawn at random.
    pub starting_psn: Psn,
    /// READs and atomics that we take at a time.
    pub responder_resources: u8,
    /// READs and atomics that we want outstanding at a time.
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// RNR retries of the *peer's* send queue, 3 bits.
    pub rnr_retry_count: u8,
    /// Our queue pair has an SRQ.
    pub srq: bool,
    /// The vendor's options.
    pub ece: Ece,
    /// For the peer: up to 196 bytes.
    pub private_data: &'a [u8],
}

/// Parameters of [`super::Cm::sidr_request`].
#[derive(Clone, Copy, Debug)]
pub struct SidrParams<'a> {
    /// The listener.
    pub service_id: ServiceId,
    /// Addresses for the IP CM header; `None`: there is none (`AF_IB`).
    pub addresses: Option<IpHeader>,
    /// The path to the peer.
    pub path: Path,
    /// Time to wait for an answer. The kernel takes 4096 ms.
    pub timeout: Duration,
    /// Times to ask again. The kernel takes 15.
    pub max_retries: u8,
    /// For the listener: 180 bytes, or 216 without addresses.
    pub private_data: &'a [u8],
}

/// Answer to a SIDR request.
#[derive(Clone, Copy, Debug)]
pub struct SidrAnswer<'a> {
    /// Whether there is a queue pair.
    pub status: SidrStatus,
    /// The queue pair.
    pub qpn: Qpn,
    /// Its key.
    pub qkey: QKey,
    /// The vendor's options.
    pub ece: Ece,
    /// For the side that asked: up to 136 bytes.
    pub private_data: &'a [u8],
}

/// The kind of requests that a listener answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Serves {
    /// REQ for this transport.
    Connections(Transport),
    /// SIDR_REQ.
    Datagrams,
}

/// Addresses that a listener answers for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum ListenAddress {
    /// Every one (`::`).
    Any,
    /// Every IPv4 address (`0.0.0.0`).
    AnyV4,
    /// Every IPv6 address (`::`, `RDMA_OPTION_ID_AFONLY`).
    AnyV6,
    /// One.
    Ip(IpAddr),
}

impl ListenAddress {
    /// The listening addresses that match a destination, the most specific first.
    pub(super) fn candidates(destination: IpAddr) -> [Self; 3] {
        let family = if destination.is_ipv4() { Self::AnyV4 } else { Self::AnyV6 };
        [Self::Ip(destination), family, Self::Any]
    }
}

/// Parameters of [`super::Cm::listen`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Listen {
    /// The service.
    pub service_id: ServiceId,
    /// The addresses. Without an IP CM header the port's address counts.
    pub address: ListenAddress,
    /// The kind of requests that are served.
    pub serves: Serves,
    /// Private data begins with an IP CM header; not so with `AF_IB`.
    pub ip_header: bool,
    /// Requests that may wait for the program to take them ([`super::Cm::take_request`]).
    pub backlog: usize,
}
