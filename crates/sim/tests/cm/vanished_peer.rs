//! Peers that vanished.

use anyverbs_proto::cm::ConnectionState as S;
use anyverbs_proto::cm::event::{CmEvent, Disconnected};
use anyverbs_proto::cm::message::Attribute;

use crate::world::{Dial, World};

#[test]
fn a_server_that_is_not_there_is_unreachable() {
    for retries in [0, 1, 7, 15] {
        let mut w = World::new(1, 2);
        w.kill(1);
        let a = w.dial(0, 1, Dial { max_cm_retries: retries, ..Dial::default() });
        w.run_out();
        assert!(matches!(w.event(0), CmEvent::Unreachable { id } if id == a));
        let sent = w.hosts[0].cm.counters().tx_msgs.of(Attribute::Req);
        assert_eq!(sent, u64::from(retries) + 1);
        w.tear_down();
    }
}

#[test]
fn a_client_vanishes_after_its_request() {
    let mut w = World::new(1, 2);
    w.listen(1);
    w.connect(0, 1);
    let b = w.take_request(1);
    w.kill(0);
    w.accept(1, b);
    w.run_out();
    assert!(matches!(w.event(1), CmEvent::Unreachable { id } if id == b));
    assert!(matches!(w.event(1), CmEvent::TimewaitExit { id } if id == b));
    w.tear_down();
}

#[test]
fn a_client_vanishes_after_the_reply() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let a = w.connect(0, 1);
    let b = w.take_request(1);
    w.accept(1, b);
    w.run();
    assert_eq!(w.state(0, a), S::RepRcvd);
    w.kill(0);
    w.run_out();
    assert!(matches!(w.event(1), CmEvent::Unreachable { id } if id == b));
    w.tear_down();
}

#[test]
fn a_server_vanishes_after_the_reply() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let a = w.connect(0, 1);
    let b = w.take_request(1);
    w.accept(1, b);
    w.run();
    w.kill(1);
    w.event(0);
    w.hosts[0].cm.ready(w.now, a, &[]).unwrap();
    let now = w.now;
    w.hosts[0].cm.disconnect(now, a, &[]).unwrap();
    w.run_out();
    assert!(matches!(w.event(0), CmEvent::Disconnected { how: Disconnected::TimedOut, .. }));
    w.tear_down();
}

#[test]
fn a_peer_vanishes_in_the_connection() {
    for program_waits in [false, true] {
        let mut w = World::new(1, 2);
        w.listen(1);
        let (a, _) = w.pair(0, 1);
        w.kill(1);
        let now = w.now;
        if program_waits {
            w.hosts[0].cm.disconnect(now, a, &[]).unwrap();
            w.run_out();
            assert!(matches!(
                w.event(0),
                CmEvent::Disconnected { how: Disconnected::TimedOut, .. }
            ));
            assert!(matches!(w.event(0), CmEvent::TimewaitExit { .. }));
            assert_eq!(w.state(0, a), S::Closed);
        } else {
            w.hosts[0].cm.destroy(now, a).unwrap();
        }
        w.tear_down();
    }
}
