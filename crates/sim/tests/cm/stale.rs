//! One side has forgotten a connection that the other believes in (IBA 12.9.8.3.1).

use std::time::Duration;

use anyverbs_proto::cm::event::{CmEvent, Disconnected};
use anyverbs_proto::cm::id::CommId;
use anyverbs_proto::cm::message::Message;
use anyverbs_proto::cm::message::code::{About, RejReason};
use anyverbs_proto::cm::{CmConfig, ConnectionState as S};

use crate::world::{Dial, Fate, World, accept_params};

/// A client connects, and starts anew with the same queue pair.
fn restarted_client(config: CmConfig) -> (World, CommId, Dial<'static>) {
    let mut w = World::new(1, 2);
    w.listen(1);
    let (a, b) = w.pair(0, 1);
    let qpn = w.hosts[0].cm.qp_params(a).unwrap().qpn;
    w.restart(0, config);
    (w, b, Dial { qpn, ..Dial::default() })
}

/// The next request at host 1, after ends of others.
fn wait_request(w: &mut World) -> CommId {
    let begin = w.now;
    loop {
        match w.wait_event(1) {
            CmEvent::ConnectRequest { id, .. } => {
                assert!(w.now.since(begin) < Duration::from_secs(1));
                return id;
            }
            CmEvent::TimewaitExit { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

fn served_at_once(first_id: u32) {
    let config = CmConfig { first_id, ..CmConfig::default() };
    let (mut w, b, dial) = restarted_client(config);
    let again = w.dial(0, 1, dial);
    w.run();
    // The new client says that it knows nothing of the old connection, and repeats its request.
    let CmEvent::Disconnected { id, how } = w.event(1) else { panic!() };
    assert!(id == b && matches!(how, Disconnected::Acknowledged(_)));
    assert_eq!(w.state(1, b), S::Timewait);
    let new = wait_request(&mut w);
    w.accept(1, new);
    w.run();
    assert!(matches!(w.event(0), CmEvent::ConnectResponse { id, .. } if id == again));
    w.hosts[0].cm.ready(w.now, again, &[]).unwrap();
    // The old connection's end leaves the names of the new one alone.
    w.run_for(Duration::from_secs(5));
    while w.poll_event(1).is_some() {}
    assert_ne!(w.state(1, b), S::Timewait);
    // A queue pair that is connected is refused, and its connection stays.
    let third = w.dial(0, 1, dial);
    let CmEvent::Rejected { id, rejection } = w.wait_event(0) else { panic!() };
    assert_eq!((id, rejection.reason, rejection.about), (third, RejReason::StaleConn, About::Req));
    assert_eq!((w.state(0, again), w.state(1, new)), (S::Established, S::Established));
    assert!(w.poll_event(1).is_none());
    w.tear_down();
}

#[test]
fn a_queue_pair_in_timewait_connects_anew() {
    let mut w = World::new(1, 2);
    w.listen(1);
    // The REQ once more, when all is over.
    let is_req = |_, m: &Message| matches!(m, Message::Req(_));
    w.next(1, is_req, Fate::Again(Duration::from_millis(40)));
    let (a, b) = w.pair(0, 1);
    let qpn = w.hosts[0].cm.qp_params(a).unwrap().qpn;
    let now = w.now;
    w.hosts[0].cm.disconnect(now, a, &[]).unwrap();
    w.run();
    let now = w.now;
    w.hosts[1].cm.disconnect(now, b, &[]).unwrap();
    w.run();
    assert_eq!((w.state(0, a), w.state(1, b)), (S::Timewait, S::Timewait));
    while w.poll_event(0).is_some() || w.poll_event(1).is_some() {}
    let again = w.dial(0, 1, Dial { qpn, ..Dial::default() });
    let new = w.take_request(1);
    assert_ne!(new, b);
    w.run_for(Duration::from_millis(40));
    assert!(w.poll_event(1).is_none(), "a late duplicate opens no connection");
    assert_ne!(w.state(1, new), S::Closed, "and ends none");
    w.accept(1, new);
    w.run();
    assert!(
        std::iter::from_fn(|| w.poll_event(0))
            .any(|e| matches!(e, CmEvent::ConnectResponse { id, .. } if id == again))
    );
    w.tear_down();
}

/// A client that starts anew may give an ID that it gave before.
#[test]
fn an_id_of_a_connection_in_timewait_is_given_anew() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let (a, b) = w.pair(0, 1);
    let now = w.now;
    w.hosts[1].cm.disconnect(now, b, &[]).unwrap();
    w.run();
    let now = w.now;
    w.hosts[0].cm.destroy(now, a).unwrap();
    w.run();
    assert_eq!(w.state(1, b), S::Timewait);
    while w.poll_event(1).is_some() {}
    w.restart(0, CmConfig { first_id: a.0 & 0xff_ffff, ..CmConfig::default() });
    assert_eq!(w.connect(0, 1), a, "the very same name");
    let new = w.take_request(1);
    w.accept(1, new);
    w.run();
    assert!(matches!(w.event(0), CmEvent::ConnectResponse { .. }));
    w.tear_down();
}

#[test]
fn a_restarted_client_is_served_at_once() {
    served_at_once(0x55_0000);
}

#[test]
fn a_restarted_client_with_its_old_ids_too() {
    let mut w = World::new(1, 2);
    let first = w.hosts[0].cm.usage();
    assert_eq!(first.connections, 0);
    w.listen(1);
    let (a, b) = w.pair(0, 1);
    let qpn = w.hosts[0].cm.qp_params(a).unwrap().qpn.unwrap();
    w.restart(0, CmConfig { first_id: a.0 & 0xff_ffff, ..CmConfig::default() });
    let again = w.dial(
        0,
        1,
        Dial { qpn: Some(anyverbs_proto::types::Qpn::new(qpn.get() + 1)), ..Dial::default() },
    );
    assert_eq!(again, a, "the very same name");
    w.run();
    assert!(matches!(w.event(1), CmEvent::Disconnected { id, .. } if id == b));
    let new = wait_request(&mut w);
    w.accept(1, new);
    w.run();
    assert!(matches!(w.event(0), CmEvent::ConnectResponse { id, .. } if id == again));
    w.tear_down();
}

#[test]
fn a_request_that_was_not_answered_yet_is_answered_first() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let qpn = w.qpn(0);
    let dial = Dial { qpn: Some(qpn), ..Dial::default() };
    w.dial(0, 1, dial);
    let old = w.take_request(1);
    w.restart(0, CmConfig { first_id: 0x77_0000, ..CmConfig::default() });
    let new = w.dial(0, 1, dial);
    w.run();
    assert!(w.poll_event(0).is_none() && w.poll_event(1).is_none(), "the new request waits");
    w.accept(1, old);
    w.run();
    let CmEvent::Rejected { id, rejection } = w.event(1) else { panic!() };
    assert_eq!((id, rejection.reason), (old, RejReason::InvalidCommId));
    let b = wait_request(&mut w);
    w.accept(1, b);
    w.run();
    assert!(matches!(w.event(0), CmEvent::ConnectResponse { id, .. } if id == new));
    w.tear_down();
}

#[test]
fn a_restarted_server_may_answer_with_an_old_queue_pair() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let (a, b) = w.pair(0, 1);
    let qpn = w.hosts[1].cm.qp_params(b).unwrap().qpn.unwrap();
    // No repeated RTU finds out that the server has forgotten the connection: its answer has to.
    w.run_for(Duration::from_secs(1));
    assert_eq!(w.hosts[0].cm.deadline(), None);
    w.restart(1, CmConfig { first_id: 0x77_0000, ..CmConfig::default() });
    w.listen(1);
    let second = w.connect(0, 1);
    let b = w.take_request(1);
    let now = w.now;
    w.hosts[1].cm.accept(now, b, &accept_params(qpn)).unwrap();
    w.run();
    assert!(matches!(w.event(0), CmEvent::Disconnected { id, .. } if id == a));
    assert!(matches!(w.wait_event(0), CmEvent::TimewaitExit { id } if id == a));
    // The answer is repeated, and found good.
    assert!(matches!(w.wait_event(0), CmEvent::ConnectResponse { id, .. } if id == second));
    w.hosts[0].cm.ready(w.now, second, &[]).unwrap();
    w.run();
    assert!(matches!(w.event(1), CmEvent::Established { id, .. } if id == b));
    w.tear_down();
}

#[test]
fn a_rejected_queue_pair_may_ask_again_at_once() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let dial = Dial { qpn: Some(w.qpn(0)), ..Dial::default() };
    for _ in 0..3 {
        w.dial(0, 1, dial);
        let b = w.take_request(1);
        let now = w.now;
        w.hosts[1].cm.reject(now, b, RejReason::Consumer, &[], &[]).unwrap();
        w.run();
        assert!(
            matches!(w.event(0), CmEvent::Rejected { rejection, .. } if rejection.reason == RejReason::Consumer)
        );
    }
    w.tear_down();
}
