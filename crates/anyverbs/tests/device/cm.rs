//! Connections by address, in one process.

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use anyverbs::cm::{Address, *};
use anyverbs::*;

use crate::endpoint::{Buffer, Endpoint, isolate, pattern};

pub(crate) const SECOND: Duration = Duration::from_secs(1);

/// An id with its own channel, and a queue pair once it has a device.
pub(crate) struct Node {
    pub(crate) channel: EventChannel,
    pub(crate) id: Id,
    pub(crate) endpoint: Option<Endpoint>,
}


fn at(ip: &str, port: u16) -> Address {
    Address::Ip(SocketAddr::new(ip.parse().unwrap(), port))
}

/// The next event, which must be this one and good.
pub(crate) fn expect(channel: &EventChannel, kind: EventKind) -> Event {
    let mut pfd =
        libc::pollfd { fd: channel.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one live pollfd.
    let n = unsafe { libc::poll(&raw mut pfd, 1, 10_000) };
    assert_eq!(n, 1, "no {kind:?}");
    let event = channel.get_event().unwrap();
    assert_eq!(event.kind, kind, "{event:?}");
    event
}

fn is_quiet(channel: &EventChannel) -> bool {
    let mut pfd =
        libc::pollfd { fd: channel.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one live pollfd.
    unsafe { libc::poll(&raw mut pfd, 1, 0) == 0 }
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
        let channel = EventChannel::new().unwrap();
        let id = Id::create(&channel, space, qp_type, 5).unwrap();
        Self { channel, id, endpoint: None }
    }

    pub(crate) fn tcp() -> Self {
        Self::new(PortSpace::Tcp, QpType::Rc)
    }

    pub(crate) fn listener(at: &Address) -> Self {
        let node = Self::tcp();
        node.id.bind_addr(at).unwrap();
        node.id.listen(0).unwrap();
        node
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
        self.id.resolve_addr(None, to, SECOND).unwrap();
        self.expect(EventKind::AddrResolved);
        self.id.resolve_route(SECOND).unwrap();
        self.expect(EventKind::RouteResolved);
    }

    pub(crate) fn attach(&mut self, qp_type: QpType) {
        let endpoint = Endpoint::new(qp_type);
        self.id.attach_qp(&endpoint.qp).unwrap();
        self.endpoint = Some(endpoint);
    }

    pub(crate) fn e(&self) -> &Endpoint {
        self.endpoint.as_ref().unwrap()
    }

    /// The next request at this listener, on a channel of its own.
    pub(crate) fn request(&self) -> (Self, Event) {
        let mut event = self.expect(EventKind::ConnectRequest);
        let id = event.new_id.take().unwrap();
        let channel = EventChannel::new().unwrap();
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

/// A listener, the side that asked, and the one that answered.
fn connected(to: &str) -> (Node, Node, Node) {
    let listener = Node::listener(&at(to, 0));
    let mut active = Node::tcp();
    active.resolve(&at(to, listener.port()));
    active.attach(QpType::Rc);
    active.id.connect(&ConnParam { private_data: b"hello", ..PARAM }).unwrap();
    let (mut passive, request) = listener.request();
    let told = conn(&request);
    assert_eq!(told.private_data.len(), 56);
    assert!(told.private_data.starts_with(b"hello\0"));
    assert_eq!((told.responder_resources, told.initiator_depth), (3, 4));
    assert_eq!((told.retry_count, told.rnr_retry_count, told.flow_control), (7, 6, true));
    assert_eq!(told.qpn, active.e().qp.qpn());
    passive.attach(QpType::Rc);
    passive.id.accept(Some(&ConnParam { private_data: b"welcome", ..PARAM })).unwrap();
    let established = active.expect(EventKind::Established);
    let told = conn(&established);
    assert_eq!(told.private_data.len(), 196);
    assert!(told.private_data.starts_with(b"welcome\0"));
    assert_eq!(told.qpn, passive.e().qp.qpn());
    let established = passive.expect(EventKind::Established);
    assert!(conn(&established).private_data.is_empty());
    (listener, active, passive)
}

fn exchange(from: &Node, to: &Node) {
    let (from, to) = (from.e(), to.e());
    let (src, dst) = (Buffer::new(&from.pd, 8192), Buffer::new(&to.pd, 8192));
    let data = pattern(8192, 3);
    src.write(0, &data);
    to.recv(1, &[dst.sge(0, 8192)]);
    from.send(2, SendOp::Send, &[src.sge(0, 8192)]);
    assert_eq!(from.poll(1)[0].status, WcStatus::Success);
    assert_eq!(to.poll(1)[0].status, WcStatus::Success);
    assert_eq!(dst.read(0, 8192), data);
}

fn parts(active: &Node, passive: &Node) {
    active.id.disconnect().unwrap();
    assert_eq!(active.e().qp.state().unwrap(), QpState::Err);
    passive.expect(EventKind::Disconnected);
    passive.id.disconnect().unwrap();
    active.expect(EventKind::Disconnected);
}

#[test]
fn connects_sends_and_parts() {
    for ip in ["127.0.0.1", "::1"] {
        let (listener, active, passive) = connected(ip);
        exchange(&active, &passive);
        exchange(&passive, &active);
        parts(&active, &passive);
        for id in [&listener.id, &active.id, &passive.id] {
            id.destroy().unwrap();
            assert_eq!(id.destroy(), Err(error::DestroyError::Gone));
        }
        assert!(is_quiet(&listener.channel));
    }
}
