//! Connections that come about, or are refused.

use anyverbs_proto::cm::event::CmEvent;
use anyverbs_proto::cm::message::code::{About, RejReason};
use anyverbs_proto::cm::qp_attr::{LocalPort, Side};
use anyverbs_proto::cm::{CmError, ConnectionState as S, Transport};
use anyverbs_proto::qp::attr::QpState;
use anyverbs_proto::types::{Mtu, Psn, Qpn};

use crate::world::{Dial, World, accept_params, gid, header, path};

fn padded(bytes: &[u8], len: usize) -> Vec<u8> {
    let mut padded = bytes.to_vec();
    padded.resize(len, 0);
    padded
}

#[test]
fn both_sides_learn_what_the_other_said() {
    let mut w = World::new(1, 2);
    let listener = w.listen(1);
    let a = w.connect(0, 1);
    assert_eq!(w.state(0, a), S::ReqSent);
    w.run();
    let CmEvent::ConnectRequest { listener: asked, id: b, request } = w.event(1) else { panic!() };
    assert_eq!(asked, listener);
    assert_eq!(request.addresses, Some(header(0, 1)));
    assert_eq!((request.sgid, request.dgid), (gid(1), gid(0)));
    assert_eq!((request.remote_qpn, request.sq_psn), (Qpn::new(17), Psn::new(85)));
    // Seen from the other side.
    assert_eq!((request.responder_resources, request.initiator_depth), (5, 4));
    assert_eq!((request.retry_count, request.rnr_retry_count, request.mtu), (7, 4, Mtu::Mtu1024));
    assert!(request.flow_control && !request.srq);
    assert_eq!((request.ece.vendor_id, request.ece.options), (0x65_4321, 5));
    assert_eq!((request.transport, request.remote_ca_guid), (Transport::Rc, 0x100));
    assert_eq!(request.private_data[..], padded(b"hello", 56));
    assert_eq!(w.state(1, b), S::ReqRcvd);

    w.accept(1, b);
    assert_eq!(w.state(1, b), S::RepSent);
    w.run();
    let CmEvent::ConnectResponse { id, response } = w.event(0) else { panic!() };
    assert_eq!(id, a);
    assert_eq!((response.responder_resources, response.initiator_depth), (2, 3));
    assert_eq!((response.rnr_retry_count, response.remote_ca_guid), (6, 0x101));
    assert_eq!((response.ece.vendor_id, response.ece.options), (0x12_3456, 9));
    assert_eq!(response.private_data[..], padded(b"welcome", 196));
    assert_eq!(w.state(0, a), S::RepRcvd);

    w.hosts[0].cm.ready(w.now, a, b"go").unwrap();
    w.run();
    let CmEvent::Established { private_data, .. } = w.event(1) else { panic!() };
    assert_eq!(private_data[..], padded(b"go", 224));
    assert_eq!((w.state(0, a), w.state(1, b)), (S::Established, S::Established));
    assert!(w.poll_event(0).is_none() && w.poll_event(1).is_none());
    w.tear_down();
}

#[test]
fn queue_pairs_of_both_sides_fit_together() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let (a, b) = w.pair(0, 1);
    let (pa, pb) = (w.hosts[0].cm.qp_params(a).unwrap(), w.hosts[1].cm.qp_params(b).unwrap());
    assert_eq!((pa.side, pb.side), (Side::Active, Side::Passive));
    for (x, y) in [(pa, pb), (pb, pa)] {
        assert_eq!((x.sgid, x.qpn, x.rq_psn), (y.dgid, y.dest_qpn, y.sq_psn));
        assert!(x.initiator_depth <= y.responder_resources);
    }
    assert_eq!((pa.rnr_retry_count, pb.rnr_retry_count), (6, 4), "each what the other asks for");
    assert_eq!((pa.retry_count, pb.retry_count), (7, 7));
    assert_eq!((pa.rate, pb.rate), (path(0, 1).rate, 0), "nobody is paced by what its peer says");
    let port = LocalPort { port: 1, sgid_index: 0, pkey_index: 0, scope_id: 0 };
    for to in [QpState::Init, QpState::Rtr, QpState::Rts] {
        assert_eq!(pa.attr(to, &port).unwrap().1, pb.attr(to, &port).unwrap().1);
    }
    w.tear_down();
}

fn too_long(len: usize, room: usize) -> CmError {
    CmError::PrivateDataTooLong { len, room }
}

#[test]
fn private_data_of_every_size_goes_through_whole() {
    let pattern: Vec<u8> = (1..=255).collect();
    for len in 0..=56 {
        let mut w = World::new(1, 2);
        w.listen(1);
        w.dial(0, 1, Dial { private_data: &pattern[..len], ..Dial::default() });
        w.run();
        let CmEvent::ConnectRequest { id, request, .. } = w.event(1) else { panic!() };
        assert_eq!(request.private_data[..], padded(&pattern[..len], 56));
        let no = RejReason::Consumer;
        let cm = &mut w.hosts[1].cm;
        assert_eq!(cm.reject(w.now, id, no, &[], &[1; 149]), Err(too_long(149, 148)));
        assert_eq!(cm.reject(w.now, id, no, &[1; 73], &[]), Err(CmError::Value));
        cm.reject(w.now, id, no, &pattern[..72], &pattern[..148 - len]).unwrap();
        w.run();
        let CmEvent::Rejected { rejection, .. } = w.event(0) else { panic!() };
        assert_eq!(rejection.private_data[..], padded(&pattern[..148 - len], 148));
        assert_eq!(rejection.info[..], pattern[..72]);
        assert_eq!((rejection.reason, rejection.about), (no, About::Req));
        w.tear_down();
    }
}

#[test]
fn too_much_private_data_is_refused_and_changes_nothing() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let a = w.connect(0, 1);
    let b = w.take_request(1);
    let qpn = w.qpn(1);
    let long = anyverbs_proto::cm::AcceptParams { private_data: &[1; 197], ..accept_params(qpn) };
    let now = w.now;
    let accepted = w.hosts[1].cm.accept(now, b, &long);
    assert!(matches!(accepted, Err(CmError::PrivateDataTooLong { .. })));
    w.accept(1, b);
    w.run();
    w.event(0);
    assert_eq!(w.hosts[0].cm.ready(w.now, a, &[1; 225]), Err(too_long(225, 224)));
    w.hosts[0].cm.ready(w.now, a, &[1; 224]).unwrap();
    w.run();
    let now = w.now;
    let disconnected = w.hosts[0].cm.disconnect(now, a, &[1; 221]);
    assert!(matches!(disconnected, Err(CmError::PrivateDataTooLong { .. })));
    w.hosts[0].cm.disconnect(now, a, &[1; 220]).unwrap();
    w.tear_down();
}

#[test]
fn nobody_listens() {
    let mut w = World::new(1, 2);
    let a = w.connect(0, 1);
    w.run();
    let CmEvent::Rejected { id, rejection } = w.event(0) else { panic!() };
    assert_eq!((id, rejection.reason), (a, RejReason::InvalidServiceId));
    assert_eq!(w.state(0, a), S::Closed);
    assert_eq!(w.hosts[1].cm.usage().connections, 0, "a stranger costs nothing");
    w.tear_down();
}

/// A connection from a host with jumbo frames to one without.
#[test]
fn a_too_large_mtu_becomes_the_proposed_one() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let reject = |w: &mut World, would_do: Mtu| {
        let b = w.take_request(1);
        let now = w.now;
        let (cm, info) = (&mut w.hosts[1].cm, [would_do as u8]);
        cm.reject(now, b, RejReason::InvalidMtu, &info, &[]).unwrap();
    };
    let a = w.connect(0, 1);
    reject(&mut w, Mtu::Mtu512);
    w.run();
    assert!(w.poll_event(0).is_none(), "the program does not hear of it");
    let CmEvent::ConnectRequest { id: b, request, .. } = w.event(1) else { panic!() };
    assert_eq!(request.mtu, Mtu::Mtu512);
    assert_eq!((&request.private_data[..5], request.ece.options), (&b"hello"[..], 5));
    w.accept(1, b);
    w.run();
    assert!(matches!(w.event(0), CmEvent::ConnectResponse { id, .. } if id == a));
    for (host, id) in [(0, a), (1, b)] {
        assert_eq!(w.hosts[host].cm.qp_params(id).unwrap().path_mtu, Mtu::Mtu512);
    }
    // A proposal that is not smaller is no help.
    let a = w.connect(0, 1);
    reject(&mut w, Mtu::Mtu1024);
    w.run();
    let CmEvent::Rejected { id, rejection } = w.event(0) else { panic!() };
    assert_eq!((id, rejection.reason), (a, RejReason::InvalidMtu));
    assert!(w.poll_event(1).is_none());
    w.tear_down();
}

#[test]
fn the_active_side_may_say_no_at_last() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let a = w.connect(0, 1);
    let b = w.take_request(1);
    w.accept(1, b);
    w.run();
    let now = w.now;
    w.hosts[0].cm.reject(now, a, RejReason::Consumer, &[], b"sorry").unwrap();
    w.run();
    let CmEvent::Rejected { rejection, .. } = w.event(1) else { panic!() };
    assert_eq!((rejection.reason, rejection.about), (RejReason::Consumer, About::Rep));
    assert_eq!(rejection.private_data[..5], *b"sorry");
    w.tear_down();
}

#[test]
fn both_connect_to_each_other_at_once() {
    let mut w = World::new(1, 2);
    w.listen(0);
    w.listen(1);
    let a0 = w.connect(0, 1);
    let a1 = w.connect(1, 0);
    let (b1, b0) = (w.take_request(1), w.take_request(0));
    w.accept(0, b0);
    w.accept(1, b1);
    w.run();
    for (host, id) in [(0, a0), (1, a1)] {
        assert!(matches!(w.event(host), CmEvent::ConnectResponse { id: of, .. } if of == id));
        w.hosts[host].cm.ready(w.now, id, &[]).unwrap();
    }
    w.run();
    for (host, id) in [(0, b0), (1, b1)] {
        assert!(matches!(w.event(host), CmEvent::Established { id: of, .. } if of == id));
    }
    w.tear_down();
}

#[test]
fn a_process_connects_to_itself() {
    let mut w = World::new(1, 1);
    w.listen(0);
    let (a, b) = w.pair(0, 0);
    assert_ne!(a, b);
    let now = w.now;
    w.hosts[0].cm.disconnect(now, a, &[]).unwrap();
    w.run();
    assert!(matches!(w.event(0), CmEvent::Disconnected { id, .. } if id == b));
    w.hosts[0].cm.disconnect(w.now, b, &[]).unwrap();
    w.run();
    assert!(matches!(w.event(0), CmEvent::Disconnected { id, .. } if id == a));
    w.tear_down();
}

#[test]
fn calls_out_of_turn_are_refused() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let a = w.connect(0, 1);
    let now = w.now;
    let qpn = w.qpn(0);
    let cm = &mut w.hosts[0].cm;
    assert_eq!(cm.ready(now, a, &[]), Err(CmError::State));
    assert_eq!(cm.establish(a), Err(CmError::State));
    assert_eq!(cm.accept(now, a, &accept_params(qpn)), Err(CmError::State));
    assert_eq!(cm.disconnect(now, a, &[]), Err(CmError::State));
    assert_eq!(cm.reject(now, a, RejReason::Consumer, &[], &[]), Err(CmError::State));
    cm.destroy(now, a).unwrap();
    assert_eq!(cm.destroy(now, a), Err(CmError::UnknownId));
    assert_eq!(cm.state(a), Err(CmError::UnknownId));
    assert_eq!(cm.qp_params(a), Err(CmError::UnknownId));
    w.tear_down();
}

#[test]
fn values_out_of_range_are_refused() {
    let mut w = World::new(1, 2);
    let good = anyverbs_proto::cm::ConnectParams {
        service_id: anyverbs_proto::cm::id::ServiceId(1),
        addresses: None,
        path: crate::world::path(0, 1),
        transport: Transport::Rc,
        qpn: Qpn::new(5),
        starting_psn: Psn::new(1),
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: false,
        retry_count: 7,
        rnr_retry_count: 7,
        srq: false,
        ece: Default::default(),
        response_timeout: 31,
        max_cm_retries: 15,
        private_data: &[0; 92],
    };
    let now = w.now;
    let cm = &mut w.hosts[0].cm;
    let a = cm.connect(now, &good).unwrap();
    cm.destroy(now, a).unwrap();
    let group = std::net::IpAddr::from([224, 0, 0, 1]).into();
    for (bad, error) in [
        (anyverbs_proto::cm::ConnectParams { retry_count: 8, ..good }, CmError::Value),
        (anyverbs_proto::cm::ConnectParams { rnr_retry_count: 8, ..good }, CmError::Value),
        (anyverbs_proto::cm::ConnectParams { max_cm_retries: 16, ..good }, CmError::Value),
        (anyverbs_proto::cm::ConnectParams { response_timeout: 32, ..good }, CmError::Value),
        (
            anyverbs_proto::cm::ConnectParams {
                path: anyverbs_proto::cm::Path { dgid: group, ..good.path },
                ..good
            },
            CmError::Value,
        ),
        (anyverbs_proto::cm::ConnectParams { private_data: &[0; 93], ..good }, too_long(93, 92)),
        (
            anyverbs_proto::cm::ConnectParams {
                addresses: Some(header(0, 1)),
                private_data: &[0; 57],
                ..good
            },
            too_long(57, 56),
        ),
    ] {
        assert_eq!(cm.connect(now, &bad), Err(error), "{bad:?}");
    }
    w.tear_down();
}
