//! Events after a peer's silence, which lasts for minutes.

use std::net::IpAddr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyverbs_objects::cq::Cq;
use anyverbs_objects::error::AttachError;
use anyverbs_objects::pd::Pd;
use anyverbs_proto::cm::event::{CmEvent, Disconnected, SidrResponse};
use anyverbs_proto::cm::id::CommId;
use anyverbs_proto::cm::message::code::SidrStatus;
use anyverbs_proto::qp::attr::{QpCap, QpType};
use anyverbs_proto::types::{Gid, QKey, Qpn};
use anyverbs_transport::qp::{Qp, QpInitAttr};

use super::event::Pending;
use super::id::{IdCell, Phase, State};
use super::local_address::LocalAddress;
use super::*;
use crate::gsi::Events;
use crate::gsi::tests::{Device, context, cq};

/// The machine gives no such name: its slot is free.
const COMM: CommId = CommId(7);

struct Heard {
    channel: EventChannel,
    id: Id,
}

impl Heard {
    /// An id that is connecting.
    fn new(qp_type: QpType, is_silent: bool) -> Self {
        let gsi = Device::current().gsi;
        let channel = EventChannel::with(gsi).unwrap();
        let place = LocalAddress::from(gsi.core().gids.entry(0, 0).unwrap());
        let state = State {
            phase: Phase::Connect,
            comm: Some(COMM),
            place: Some(place),
            path: Some(place.path(Gid([1; 16]), 0, 0, None)),
            is_passive: is_silent,
            is_silent,
            ..State::default()
        };
        let space = if qp_type == QpType::Ud { PortSpace::Udp } else { PortSpace::Tcp };
        Self { id: Id(IdCell::new(&channel.0, space, qp_type, 3, state)), channel }
    }

    /// The program's events for these: kinds and statuses.
    fn tells(&self, events: impl IntoIterator<Item = CmEvent>) -> Vec<(EventKind, i32)> {
        let cell = Arc::clone(&self.id.0);
        cell.gsi.with_cm(|_, ids, _| {
            ids.insert(COMM, &cell);
            events.into_iter().for_each(|event| ids.deliver(event));
            ids.remove(COMM);
        });
        // Says where it ends.
        let end = Event {
            kind: EventKind::User,
            status: 0,
            cookie: 0,
            new_id: None,
            param: EventParam::None,
            join_cookie: 0,
            ece: Ece::default(),
        };
        self.id.write_event(end).unwrap();
        let events = std::iter::from_fn(|| {
            let event = self.channel.get_event().unwrap();
            (event.kind != EventKind::User).then_some((event.kind, event.status))
        });
        events.collect()
    }
}

fn disconnected(how: Disconnected) -> CmEvent {
    CmEvent::Disconnected { id: COMM, how }
}

#[test]
fn silence_is_told_as_such() {
    let timed_out = -libc::ETIMEDOUT;
    let active = Heard::new(QpType::Rc, false);
    let told = active.tells([CmEvent::Unreachable { id: COMM }]);
    assert_eq!(told, [(EventKind::Unreachable, timed_out)]);
    let active = Heard::new(QpType::Rc, false);
    let told = active.tells([
        disconnected(Disconnected::TimedOut),
        CmEvent::TimewaitExit { id: COMM },
        disconnected(Disconnected::TimedOut),
    ]);
    assert_eq!(told, [(EventKind::Disconnected, timed_out), (EventKind::TimewaitExit, 0)]);
    let active = Heard::new(QpType::Ud, false);
    let told = active.tells([CmEvent::Unreachable { id: COMM }]);
    assert_eq!(told, [(EventKind::Unreachable, timed_out)]);
}

#[test]
fn a_connection_ends_once() {
    let active = Heard::new(QpType::Rc, false);
    let told = active.tells([
        disconnected(Disconnected::Requested([1; 220].into())),
        disconnected(Disconnected::Acknowledged(Box::default())),
    ]);
    assert_eq!(told, [(EventKind::Disconnected, 0)]);
}

#[test]
fn a_request_is_silent_until_it_is_answered() {
    let passive = Heard::new(QpType::Rc, true);
    let silence = || [CmEvent::Unreachable { id: COMM }];
    assert_eq!(passive.tells(silence()), []);
    passive.id.0.state.lock().is_silent = false;
    assert_eq!(passive.tells(silence()).len(), 1);
}

#[test]
fn a_request_that_is_not_taken_hears_of_no_address() {
    let passive = Heard::new(QpType::Rc, true);
    let cell = Arc::clone(&passive.id.0);
    // No other test's.
    let gone = Gid([9; 16]);
    cell.state.lock().place.as_mut().unwrap().gid = gone;
    let change = || {
        cell.gsi.with_cm(|_, ids, _| {
            ids.place(&cell);
            ids.addresses_changed(&|gid, on| {
                cell.gsi.core().gids.find(gid, on).filter(|_| gid != gone)
            });
        });
    };
    change();
    assert_eq!(passive.tells([]), []);
    cell.state.lock().is_silent = false;
    change();
    assert_eq!(passive.tells([]), [(EventKind::AddrChange, 0)]);
}

/// Or destroying its id would wait for ever.
#[test]
fn an_event_that_is_not_the_programs_is_acknowledged() {
    let heard = Heard::new(QpType::Rc, false);
    let cell = Arc::clone(&heard.id.0);
    cell.post(Pending::new(EventKind::AddrChange));
    cell.post(Pending::new(EventKind::TimewaitExit));
    let told =
        heard.channel.get_event_with(|e| (e.kind != EventKind::AddrChange).then_some(e.kind));
    assert_eq!(told.unwrap(), EventKind::TimewaitExit);
    heard.id.ack_events(1);
    heard.id.destroy().unwrap();
}

/// A queue pair for datagrams.
fn datagrams(cq: &Cq) -> QpInitAttr<'_> {
    QpInitAttr {
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        cap: QpCap {
            max_send_wr: 1,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            ..QpCap::default()
        },
        qp_type: QpType::Ud,
        sq_sig_all: true,
        cookie: 0,
    }
}

/// The program leaves while another thread reads of the join.
#[test]
fn a_group_that_is_left_meanwhile_is_not_heard() {
    let heard = Heard::new(QpType::Ud, false);
    let place = heard.id.0.state.lock().place;
    let id = Id::create(&heard.channel, PortSpace::Udp, QpType::Ud, 3).unwrap();
    {
        let mut state = id.0.state.lock();
        (state.phase, state.place) = (Phase::Bound, place);
    }
    let gsi = Device::current().gsi;
    let (pd, cq) = (Pd::new(gsi.core(), &context()).unwrap(), cq(gsi));
    let group = Address::Ip("239.7.7.9:0".parse().unwrap());
    let qp = Qp::create(gsi.transport, &pd, &datagrams(&cq)).unwrap();
    id.attach_qp(&qp).unwrap();
    id.join(&Join { group, send_only: false, cookie: 0 }).unwrap();
    let serial = id.0.state.lock().groups[0].serial;
    let groups = &gsi.transport.groups;
    // The id has left when the queue pair is attached, and waits for that.
    thread::scope(|scope| {
        let leaves = || {
            scope.spawn(|| id.leave(&group).unwrap());
            while !id.0.state.lock().groups.is_empty() {
                thread::yield_now();
            }
            true
        };
        assert!(groups.attach_if(&qp.0, group.gid(), 0, leaves).unwrap());
    });
    assert!(groups.members(group.gid()).is_none());
    assert_eq!(id.0.joined(serial), None);
    // The id leaves before, and its queue pair ends.
    id.join(&Join { group, send_only: false, cookie: 0 }).unwrap();
    let serial = id.0.state.lock().groups[0].serial;
    id.leave(&group).unwrap();
    assert_eq!(id.0.joined(serial), None);
    id.detach_qp();
    qp.destroy().unwrap();
    assert!(!groups.attach_if(&qp.0, group.gid(), 0, || false).unwrap());
    let attached = groups.attach_if(&qp.0, group.gid(), 0, || true);
    assert!(matches!(attached, Err(AttachError::Gone)), "{attached:?}");
}

#[test]
fn a_queue_pair_that_is_dropped_while_it_is_attached_is_in_no_group() {
    let gsi = Device::current().gsi;
    let (pd, cq) = (Pd::new(gsi.core(), &context()).unwrap(), cq(gsi));
    let qp = Qp::create(gsi.transport, &pd, &datagrams(&cq)).unwrap();
    let (cell, groups) = (Arc::clone(&qp.0), &gsi.transport.groups);
    let gid = Gid::from("239.7.7.10".parse::<IpAddr>().unwrap());
    thread::scope(|scope| {
        let drops = || {
            let dropped = scope.spawn(move || drop(qp));
            let end = Instant::now() + Duration::from_millis(100);
            while !dropped.is_finished() && Instant::now() < end {
                thread::yield_now();
            }
            true
        };
        assert!(groups.attach_if(&cell, gid, 0, drops).unwrap());
    });
    assert!(groups.members(gid).is_none());
}

#[test]
fn a_datagram_peer_must_have_our_key() {
    let answer = |qkey| {
        let response = SidrResponse {
            status: SidrStatus::Valid,
            qpn: Qpn::new(9),
            qkey,
            ece: Ece::default(),
            info: Box::default(),
            private_data: [0; 136].into(),
        };
        [CmEvent::SidrResponse { id: COMM, response: Box::new(response) }]
    };
    // An id without a key takes the peer's.
    let id = Heard::new(QpType::Ud, false);
    assert_eq!(id.tells(answer(QKey(5))), [(EventKind::Established, 0)]);
    assert_eq!(id.tells(answer(QKey(6))), [(EventKind::AddrError, -libc::EINVAL)]);
    let (attr, _) = id.id.init_qp_attr(anyverbs_proto::qp::attr::QpState::Init).unwrap();
    assert_eq!(attr.qkey, QKey(5));
}
