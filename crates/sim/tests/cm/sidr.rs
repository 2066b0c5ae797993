//! SIDR: a client asks for the queue pair behind a port.

use std::time::Duration;

use anyverbs_proto::cm::event::CmEvent;
use anyverbs_proto::cm::id::{CommId, PortSpace, ServiceId};
use anyverbs_proto::cm::message::Attribute;
use anyverbs_proto::cm::message::code::SidrStatus;
use anyverbs_proto::cm::message::ece::Ece;
use anyverbs_proto::cm::{
    CmConfig, CmError, Listen, ListenAddress, ListenerId, Serves, SidrAnswer, SidrParams,
};
use anyverbs_proto::types::{QKey, Qpn};

use crate::world::{Fate, PORT, World, gid, header, path};

fn listen(w: &mut World, host: usize, backlog: usize) -> ListenerId {
    let service_id = ServiceId::of_port(PortSpace::Udp, PORT);
    let address = ListenAddress::Any;
    let listen =
        Listen { service_id, address, serves: Serves::Datagrams, ip_header: true, backlog };
    w.hosts[host].cm.listen(listen).unwrap()
}

fn answer(w: &mut World, host: usize, id: CommId) -> Result<(), CmError> {
    let answer = SidrAnswer {
        status: SidrStatus::Valid,
        qpn: Qpn::new(0x123),
        qkey: QKey(0x0123_4567),
        ece: Ece { vendor_id: 0xab_cdef, options: 4 },
        private_data: b"me",
    };
    w.hosts[host].cm.sidr_reply(w.now, id, &answer)
}

fn asked(w: &mut World, host: usize) -> CommId {
    w.run();
    let CmEvent::SidrRequest { id, request, .. } = w.event(host) else { panic!() };
    assert_eq!(request.addresses, Some(header(0, 1)));
    assert_eq!((request.sgid, request.dgid), (gid(1), gid(0)));
    assert_eq!((request.private_data.len(), &request.private_data[..3]), (180, &b"who"[..]));
    id
}

fn heard(w: &mut World, a: CommId) {
    let CmEvent::SidrResponse { id, response } = w.event(0) else { panic!() };
    assert_eq!(id, a);
    assert_eq!((response.status, response.qpn), (SidrStatus::Valid, Qpn::new(0x123)));
    assert_eq!((response.qkey, response.ece.vendor_id), (QKey(0x0123_4567), 0xab_cdef));
    assert_eq!((response.private_data.len(), &response.private_data[..2]), (136, &b"me"[..]));
    assert!(w.poll_event(0).is_none());
}

#[test]
fn a_client_cannot_be_somebody_else() {
    let mut w = World::new(1, 3);
    listen(&mut w, 1, 1);
    for (named, dialed) in [(2, 1), (0, 2)] {
        let params = SidrParams {
            service_id: ServiceId::of_port(PortSpace::Udp, PORT),
            addresses: Some(header(named, dialed)),
            path: path(0, 1),
            timeout: Duration::from_millis(100),
            max_retries: 7,
            private_data: &[],
        };
        let now = w.now;
        w.hosts[0].cm.sidr_request(now, &params).unwrap();
        w.run();
        let CmEvent::SidrResponse { response, .. } = w.event(0) else { panic!() };
        assert_eq!(response.status, SidrStatus::Rejected);
        assert!(w.poll_event(1).is_none());
    }
}

#[test]
fn the_client_learns_queue_pair_and_key() {
    let mut w = World::new(1, 2);
    listen(&mut w, 1, 1);
    for _ in 0..3 {
        let a = w.ask(0, 1);
        let b = asked(&mut w, 1);
        answer(&mut w, 1, b).unwrap();
        assert_eq!(answer(&mut w, 1, b), Err(CmError::State));
        w.run();
        heard(&mut w, a);
    }
    w.tear_down();
}

#[test]
fn lost_and_doubled_messages_change_nothing() {
    for attribute in [Attribute::SidrReq, Attribute::SidrRep] {
        for fate in [Fate::Drop, Fate::Again(Duration::from_millis(150))] {
            for times in 1..4 {
                let mut w = World::new(1, 2);
                listen(&mut w, 1, 1);
                w.next(times, move |_, m| m.attribute() == attribute, fate);
                let a = w.ask(0, 1);
                w.run_for(Duration::from_millis(350));
                let b = asked(&mut w, 1);
                answer(&mut w, 1, b).unwrap();
                w.run_for(Duration::from_secs(1));
                heard(&mut w, a);
                assert!(w.poll_event(1).is_none(), "asked once");
                w.tear_down();
            }
        }
    }
}

#[test]
fn nobody_listens_for_datagrams() {
    let mut w = World::new(1, 2);
    w.ask(0, 1);
    w.run();
    let CmEvent::SidrResponse { response, .. } = w.event(0) else { panic!() };
    assert_eq!(response.status, SidrStatus::UnsupportedService);
    w.tear_down();
}

#[test]
fn destroying_or_not_listening_any_more_is_a_no() {
    for by_listener in [false, true] {
        let mut w = World::new(1, 2);
        let listener = listen(&mut w, 1, 1);
        w.ask(0, 1);
        let b = asked(&mut w, 1);
        let now = w.now;
        if by_listener {
            w.hosts[1].cm.unlisten(now, listener).unwrap();
        } else {
            w.hosts[1].cm.destroy(now, b).unwrap();
        }
        w.run();
        let CmEvent::SidrResponse { response, .. } = w.event(0) else { panic!() };
        assert_eq!(response.status, SidrStatus::Rejected);
        w.tear_down();
    }
}

#[test]
fn an_ended_peer_is_unreachable_for_both() {
    let mut w = World::new(1, 2);
    listen(&mut w, 1, 1);
    w.kill(1);
    let a = w.ask(0, 1);
    w.run_out();
    assert!(matches!(w.event(0), CmEvent::Unreachable { id } if id == a));
    w.tear_down();

    let mut w = World::new(1, 2);
    listen(&mut w, 1, 1);
    w.ask(0, 1);
    let b = asked(&mut w, 1);
    w.kill(0);
    w.run_out();
    assert!(matches!(w.event(1), CmEvent::Unreachable { id } if id == b));
    assert_eq!(answer(&mut w, 1, b), Err(CmError::State));
    w.tear_down();
}

#[test]
fn a_service_for_connections_is_none_for_datagrams() {
    let mut w = World::new(1, 2);
    listen(&mut w, 1, 1);
    w.listen(1);
    w.run();
    let a = w.dial(0, 1, crate::world::Dial::default());
    let b = w.take_request(1);
    w.accept(1, b);
    w.run();
    assert!(matches!(w.event(0), CmEvent::ConnectResponse { id, .. } if id == a));
    w.tear_down();
}

/// Answers are kept for clients that ask again, but only a limited number of those whose request the program has dropped.
#[test]
fn more_dropped_answers_than_there_may_be_are_forgotten() {
    const MOST: usize = 3;
    let config = CmConfig { max_orphans: MOST, ..CmConfig::default() };
    let mut w = World::with_config(1, 2, config);
    listen(&mut w, 1, 9);
    for n in 1..6 {
        let a = w.ask(0, 1);
        let b = asked(&mut w, 1);
        answer(&mut w, 1, b).unwrap();
        w.run();
        heard(&mut w, a);
        let now = w.now;
        w.hosts[1].cm.destroy(now, b).unwrap();
        assert_eq!(w.hosts[1].cm.usage().orphans, n.min(MOST));
    }
    w.tear_down();
}
