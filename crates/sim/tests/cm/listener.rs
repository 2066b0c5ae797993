//! Listeners: backlog, addresses, and their end.

use std::time::Duration;

use anyverbs_proto::cm::counters::DropReason;
use anyverbs_proto::cm::event::CmEvent;
use anyverbs_proto::cm::id::{PortSpace, ServiceId};
use anyverbs_proto::cm::message::code::RejReason;
use anyverbs_proto::cm::{CmConfig, CmError, Listen, ListenAddress, Serves, Transport};

use crate::world::{Dial, Fate, PORT, World, ip};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn beyond_the_backlog_requests_wait_for_room() {
    let mut w = World::new(1, 2);
    w.listen_with(1, PORT, 2);
    for _ in 0..3 {
        w.connect(0, 1);
    }
    w.run();
    let ids: Vec<_> = std::iter::from_fn(|| w.poll_event(1)).map(|e| e.id()).collect();
    assert_eq!(ids.len(), 2);
    assert_eq!(w.hosts[1].cm.counters().dropped(DropReason::Backlog), 1);
    w.hosts[1].cm.take_request(ids[0]).unwrap();
    w.hosts[1].cm.take_request(ids[0]).unwrap();
    w.run_for(SECOND);
    let third: Vec<_> = std::iter::from_fn(|| w.poll_event(1)).collect();
    assert!(matches!(third[..], [CmEvent::ConnectRequest { .. }]), "the client asked again");
    w.tear_down();
}

#[test]
fn an_idle_listener_costs_no_more_than_its_backlog() {
    let mut w = World::new(1, 2);
    w.listen_with(1, PORT, 4);
    for _ in 0..100 {
        let a = w.dial(0, 1, Dial { max_cm_retries: 1, ..Dial::default() });
        w.run();
        let now = w.now;
        w.hosts[0].cm.destroy(now, a).unwrap();
        w.run_for(SECOND);
        assert!(w.hosts[1].cm.usage().connections <= 4);
    }
    w.tear_down();
}

#[test]
fn an_unanswered_request_ends_after_the_clients_last_retry() {
    for max_cm_retries in [0, 1, 3] {
        let mut w = World::new(1, 2);
        w.listen(1);
        // Only the first REQ arrives. The client does not hear of it, and asks as often as it wants to.
        let mut arrived = false;
        w.rule(
            move |_, _| if std::mem::replace(&mut arrived, true) { Fate::Drop } else { Fate::Pass },
        );
        let a = w.dial(0, 1, Dial { max_cm_retries, ..Dial::default() });
        let b = w.take_request(1);
        assert!(matches!(w.wait_event(0), CmEvent::Unreachable { id } if id == a));
        let client = w.now;
        assert!(w.poll_event(1).is_none(), "the client may still ask");
        assert!(matches!(w.wait_event(1), CmEvent::Unreachable { id } if id == b));
        assert_eq!(w.now, client + w.weather.delay, "{max_cm_retries}");
        w.tear_down();
    }
}

#[test]
fn unlisten_rejects_what_was_not_taken() {
    let mut w = World::new(1, 2);
    let listener = w.listen(1);
    let first = w.connect(0, 1);
    let taken = w.take_request(1);
    let second = w.connect(0, 1);
    w.run();
    let now = w.now;
    w.hosts[1].cm.unlisten(now, listener).unwrap();
    assert_eq!(w.hosts[1].cm.unlisten(now, listener), Err(CmError::UnknownId));
    w.run();
    let CmEvent::Rejected { id, rejection } = w.event(0) else { panic!() };
    assert_eq!((id, rejection.reason), (second, RejReason::Consumer));
    assert!(w.poll_event(1).is_none(), "its event is gone too");
    w.accept(1, taken);
    w.run();
    assert!(matches!(w.event(0), CmEvent::ConnectResponse { id, .. } if id == first));
    w.tear_down();
}

#[test]
fn the_address_that_was_dialed_decides() {
    let mut w = World::new(1, 2);
    let mut listen = |host: usize, address| {
        let service_id = ServiceId::of_port(PortSpace::Tcp, PORT);
        let serves = Serves::Connections(Transport::Rc);
        let listen = Listen { service_id, address, serves, ip_header: true, backlog: 5 };
        w.hosts[host].cm.listen(listen)
    };
    listen(1, ListenAddress::Ip(ip(7))).unwrap();
    listen(1, ListenAddress::AnyV6).unwrap();
    assert_eq!(listen(1, ListenAddress::AnyV6), Err(CmError::InUse));
    w.connect(0, 1);
    w.run();
    let CmEvent::Rejected { rejection, .. } = w.event(0) else { panic!() };
    assert_eq!(rejection.reason, RejReason::InvalidServiceId);
    w.tear_down();
}

#[test]
fn another_transport_is_rejected() {
    let all = [Transport::Rc, Transport::Uc, Transport::Xrc];
    for (ours, theirs) in all.into_iter().flat_map(|ours| all.map(|theirs| (ours, theirs))) {
        let mut w = World::new(1, 2);
        w.listen_for(1, ours);
        w.dial(0, 1, Dial { transport: theirs, ..Dial::default() });
        w.run();
        if ours == theirs {
            let CmEvent::ConnectRequest { request, .. } = w.event(1) else { panic!() };
            assert_eq!(request.transport, theirs);
        } else {
            let CmEvent::Rejected { rejection, .. } = w.event(0) else { panic!() };
            assert_eq!(rejection.reason, RejReason::InvalidTransport);
        }
        w.tear_down();
    }
}

#[test]
fn when_the_tables_are_full_clients_and_programs_are_told() {
    let config = CmConfig { max_connections: 3, max_orphans: 2, ..CmConfig::default() };
    let mut w = World::with_config(1, 3, config);
    w.listen(1);
    for from in [0, 0, 0, 2] {
        w.connect(from, 1);
    }
    w.run();
    let CmEvent::Rejected { rejection, .. } = w.event(2) else { panic!() };
    assert_eq!(rejection.reason, RejReason::NoResources);
    let params = anyverbs_proto::cm::SidrParams {
        service_id: ServiceId(1),
        addresses: None,
        path: crate::world::path(0, 1),
        timeout: SECOND,
        max_retries: 1,
        private_data: &[],
    };
    let now = w.now;
    assert_eq!(w.hosts[0].cm.sidr_request(now, &params), Err(CmError::Full));
    w.tear_down();
}
