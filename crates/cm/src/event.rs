//! The events of an event channel (`rdma_get_cm_event(3)`).

use std::sync::Arc;

use anyverbs_objects::ah::AhAttr;
use anyverbs_proto::cm::message::ece::Ece;
use anyverbs_proto::types::{QKey, Qpn};

use super::id::{Id, IdCell};

/// `enum rdma_cm_event_type`, with its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum EventKind {
    /// [`Id::resolve_addr`] is done.
    AddrResolved = 0,
    /// It failed.
    AddrError = 1,
    /// [`Id::resolve_route`] is done.
    RouteResolved = 2,
    /// It failed.
    RouteError = 3,
    /// Somebody asks a listener; the event carries a new id.
    ConnectRequest = 4,
    /// The peer accepts, and the queue pair is the program's to move.
    ConnectResponse = 5,
    /// Something failed after the peer's answer.
    ConnectError = 6,
    /// The peer does not answer, or does not exist.
    Unreachable = 7,
    /// The peer says no; the status is its reason.
    Rejected = 8,
    /// The connection is there.
    Established = 9,
    /// The connection is no more.
    Disconnected = 10,
    /// The device is no more.
    DeviceRemoval = 11,
    /// [`Id::join`] is done.
    MulticastJoin = 12,
    /// It failed, or the group is lost.
    MulticastError = 13,
    /// The address that the id is bound to changed its device.
    AddrChange = 14,
    /// The queue pair may be used again.
    TimewaitExit = 15,
    /// `rdma_resolve_addrinfo` is done.
    AddrinfoResolved = 16,
    /// It failed.
    AddrinfoError = 17,
    /// `rdma_write_cm_event`.
    User = 18,
    /// Internal to librdmacm; never handed out.
    Internal = 19,
}

impl EventKind {
    /// Its name in C.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AddrResolved => "RDMA_CM_EVENT_ADDR_RESOLVED",
            Self::AddrError => "RDMA_CM_EVENT_ADDR_ERROR",
            Self::RouteResolved => "RDMA_CM_EVENT_ROUTE_RESOLVED",
            Self::RouteError => "RDMA_CM_EVENT_ROUTE_ERROR",
            Self::ConnectRequest => "RDMA_CM_EVENT_CONNECT_REQUEST",
            Self::ConnectResponse => "RDMA_CM_EVENT_CONNECT_RESPONSE",
            Self::ConnectError => "RDMA_CM_EVENT_CONNECT_ERROR",
            Self::Unreachable => "RDMA_CM_EVENT_UNREACHABLE",
            Self::Rejected => "RDMA_CM_EVENT_REJECTED",
            Self::Established => "RDMA_CM_EVENT_ESTABLISHED",
            Self::Disconnected => "RDMA_CM_EVENT_DISCONNECTED",
            Self::DeviceRemoval => "RDMA_CM_EVENT_DEVICE_REMOVAL",
            Self::MulticastJoin => "RDMA_CM_EVENT_MULTICAST_JOIN",
            Self::MulticastError => "RDMA_CM_EVENT_MULTICAST_ERROR",
            Self::AddrChange => "RDMA_CM_EVENT_ADDR_CHANGE",
            Self::TimewaitExit => "RDMA_CM_EVENT_TIMEWAIT_EXIT",
            Self::AddrinfoResolved => "RDMA_CM_EVENT_ADDRINFO_RESOLVED",
            Self::AddrinfoError => "RDMA_CM_EVENT_ADDRINFO_ERROR",
            Self::User => "RDMA_CM_EVENT_USER",
            Self::Internal => "RDMA_CM_EVENT_INTERNAL",
        }
    }
}

/// The peer's parameters of a connection (`rdma_conn_param` of an event).
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ConnEvent {
    /// With the message's padding, as the manual page says.
    pub private_data: Box<[u8]>,
    /// READs and atomics that the peer wants outstanding. We should take that many.
    pub responder_resources: u8,
    /// READs and atomics that the peer takes. We may have that many outstanding.
    pub initiator_depth: u8,
    /// The peer keeps end-to-end flow control.
    pub flow_control: bool,
    /// Transport retries.
    pub retry_count: u8,
    /// RNR retries.
    pub rnr_retry_count: u8,
    /// The peer's queue pair has an SRQ.
    pub srq: bool,
    /// The peer's queue pair, or, XRC, the SRQ.
    pub qpn: Qpn,
}

/// The properties of a datagram peer or group (`rdma_ud_param` of an event).
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct UdEvent {
    /// With the message's padding.
    pub private_data: Box<[u8]>,
    /// Where datagrams go.
    pub ah: AhAttr,
    /// The queue pair, or [`Qpn::MULTICAST`].
    pub qpn: Qpn,
    /// Its key.
    pub qkey: QKey,
}

/// The further contents of an event.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum EventParam {
    /// No contents.
    #[default]
    None,
    /// Parameters of a connection.
    Conn(ConnEvent),
    /// Parameters of a datagram peer or a group.
    Ud(UdEvent),
    /// The argument of `rdma_write_cm_event`.
    Arg(u64),
}

/// Something happened to an id. Acknowledge it ([`Id::ack_events`]): [`Id::destroy`] waits for that.
#[derive(Debug)]
pub struct Event {
    /// The event's kind.
    pub kind: EventKind,
    /// 0, a negative errno, or the reason of a rejection.
    pub status: i32,
    /// Cookie of the id; of the *listener* for a request.
    pub cookie: u64,
    /// The new id of a request. It is on the listener's channel, and its cookie is for the receiver to set.
    pub new_id: Option<Id>,
    /// The peer's parameters.
    pub param: EventParam,
    /// For a multicast event, the cookie of the join; else 0.
    pub join_cookie: u64,
    /// The peer's options.
    pub ece: Ece,
}

/// An event that waits in its id's mailbox.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) kind: EventKind,
    pub(super) status: i32,
    /// The new id of a request.
    pub(super) new_id: Option<Arc<IdCell>>,
    pub(super) param: EventParam,
    pub(super) join_cookie: u64,
    /// The join that it is about.
    pub(super) join_serial: u64,
    pub(super) ece: Ece,
}

impl Pending {
    pub(super) fn new(kind: EventKind) -> Self {
        Self {
            kind,
            status: 0,
            new_id: None,
            param: EventParam::None,
            join_cookie: 0,
            join_serial: u64::MAX,
            ece: Ece::default(),
        }
    }

    /// `errno`: 0, or why it failed.
    pub(super) fn failed(kind: EventKind, errno: i32) -> Self {
        Self { status: -errno, ..Self::new(kind) }
    }
}
