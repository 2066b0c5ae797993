//! The connection manager: ids and their events.

mod channels;
mod connections;
mod datagrams;
mod groups;
mod hostile;
mod many;
mod places;
mod processes;
mod storms;
mod unserved;

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use anyverbs::cm::{Address, *};
use anyverbs::*;

use crate::endpoint::{CAP, Endpoint, isolate};

pub(crate) const SECOND: Duration = Duration::from_secs(1);

/// An id with its own channel, and a queue pair once it has a device.
pub(crate) struct Node {
    pub(crate) channel: EventChannel,
    pub(crate) id: Id,
    pub(crate) endpoint: Option<Endpoint>,
}

pub(crate) fn at(ip: &str, port: u16) -> Address {
    Address::Ip(SocketAddr::new(ip.parse().unwrap(), port))
}

pub(crate) fn poll(channel: &EventChannel, ms: i32) -> bool {
    let mut pfd =
        libc::pollfd { fd: channel.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one live pollfd.
    unsafe { libc::poll(&raw mut pfd, 1, ms) == 1 }
}

pub(crate) fn set_nonblocking(channel: &EventChannel) {
    // SAFETY: fcntl on a descriptor of ours, no pointers.
    let rc = unsafe { libc::fcntl(channel.as_fd().as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
    assert_eq!(rc, 0);
}

pub(crate) fn poll_until_readable(channel: &EventChannel) {
    assert!(poll(channel, 10_000), "no event");
}

/// The next event, which must be this one.
pub(crate) fn expect(channel: &EventChannel, kind: EventKind) -> Event {
    assert!(poll(channel, 10_000), "no {kind:?}");
    let event = channel.get_event().unwrap();
    assert_eq!(event.kind, kind, "{event:?}");
    event
}

pub(crate) fn is_quiet(channel: &EventChannel) -> bool {
    !poll(channel, 0)
}

/// No event comes within a while.
pub(crate) fn stays_quiet(channel: &EventChannel) {
    assert!(!poll(channel, 100), "{:?}", channel.get_event());
}

pub(crate) fn conn(event: &Event) -> &ConnEvent {
    match &event.param {
        EventParam::Conn(conn) => conn,
        other => panic!("{other:?}"),
    }
}

impl Node {
    pub(crate) fn new(space: PortSpace, qp_type: QpType) -> Self {
        isolate();
        let channel = create_event_channel().unwrap();
        let id = Id::create(&channel, space, qp_type, 5).unwrap();
        Self { channel, id, endpoint: None }
    }

    pub(crate) fn tcp() -> Self {
        Self::new(PortSpace::Tcp, QpType::Rc)
    }

    pub(crate) fn listener(at: &Address) -> Self {
        Self::tcp().listening(at)
    }

    pub(crate) fn listening(self, at: &Address) -> Self {
        self.id.bind_addr(at).unwrap();
        self.id.listen(0).unwrap();
        self
    }

    pub(crate) fn port(&self) -> u16 {
        match self.id.info().local.unwrap() {
            Address::Ip(a) => a.port(),
            Address::Ib(a) => a.sid as u16,
        }
    }

    /// An event that must be this one, read and acknowledged.
    pub(crate) fn expect(&self, kind: EventKind) -> Event {
        let event = expect(&self.channel, kind);
        assert_eq!((event.status, event.cookie), (0, 5));
        self.id.ack_events(1);
        event
    }

    pub(crate) fn resolve(&self, to: &Address) {
        self.id.resolve_addr(None, to).unwrap();
        self.expect(EventKind::AddrResolved);
        self.id.resolve_route().unwrap();
        self.expect(EventKind::RouteResolved);
    }

    pub(crate) fn attach(&mut self, qp_type: QpType) {
        let endpoint = Endpoint::with(qp_type, CAP, 64);
        self.id.attach_qp(&endpoint.qp).unwrap();
        self.endpoint = Some(endpoint);
    }

    pub(crate) fn e(&self) -> &Endpoint {
        self.endpoint.as_ref().unwrap()
    }

    /// An active side that has come as far as it can before it connects, with a queue pair.
    pub(crate) fn towards(to: &Address) -> Self {
        let mut node = Self::tcp();
        node.resolve(to);
        node.attach(QpType::Rc);
        node
    }

    /// The address of this listener on `ip`.
    pub(crate) fn on(&self, ip: &str) -> Address {
        at(ip, self.port())
    }

    /// The next request at this listener, on a channel of its own.
    pub(crate) fn request(&self) -> (Self, Event) {
        let mut event = self.expect(EventKind::ConnectRequest);
        let id = event.new_id.take().unwrap();
        let channel = create_event_channel().unwrap();
        id.migrate(&channel).unwrap();
        id.set_cookie(5);
        (Self { channel, id, endpoint: None }, event)
    }
}

pub(crate) const PARAM: ConnParam<'_> = ConnParam {
    private_data: &[],
    responder_resources: 4,
    initiator_depth: 3,
    flow_control: true,
    retry_count: 7,
    rnr_retry_count: 6,
    srq: false,
    qpn: Qpn::new(0),
};

/// Connects, and returns a listener and an active side whose request has come.
pub(crate) fn asked() -> (Node, Node, Node) {
    let listener = Node::listener(&at("127.0.0.1", 0));
    let active = Node::towards(&listener.on("127.0.0.1"));
    active.id.connect(&PARAM).unwrap();
    let (passive, _) = listener.request();
    (listener, active, passive)
}

/// A listener, the side that asked, and the one that answered: connected.
pub(crate) fn connected() -> (Node, Node, Node) {
    let (listener, active, mut passive) = asked();
    passive.attach(QpType::Rc);
    passive.id.accept(Some(&PARAM)).unwrap();
    active.expect(EventKind::Established);
    passive.expect(EventKind::Established);
    (listener, active, passive)
}
