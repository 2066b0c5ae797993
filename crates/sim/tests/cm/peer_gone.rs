//! Peers that a third process reports as gone.

use anyverbs_proto::cm::ConnectionState as S;
use anyverbs_proto::cm::event::{CmEvent, Disconnected};

use crate::world::World;

/// Host 0 connects to host 1 up to some step, then `survivor` is told that the other is gone. Returns its event and its
/// state.
fn told(step: usize, survivor: usize) -> (CmEvent, S) {
    let mut w = World::new(1, 2);
    w.listen(1);
    let a = w.connect(0, 1);
    let b = w.take_request(1);
    if step > 0 {
        w.accept(1, b);
        w.run();
        assert!(matches!(w.event(0), CmEvent::ConnectResponse { .. }));
    }
    if step > 1 {
        w.hosts[0].cm.ready(w.now, a, &[]).unwrap();
        w.run();
        assert!(matches!(w.event(1), CmEvent::Established { .. }));
    }
    let (now, other) = (w.now, 1 - survivor);
    let (id, gone) = if survivor == 0 { (a, b) } else { (b, a) };
    if step > 2 {
        w.kill(other);
        w.hosts[survivor].cm.disconnect(now, id, &[]).unwrap();
    }
    w.kill(other);
    let gid = w.hosts[other].gid;
    let cm = &mut w.hosts[survivor].cm;
    assert_eq!(cm.peers().collect::<Vec<_>>(), [(gid, gone)]);
    cm.peers_gone(now, |g, i| (g, i) == (gid, id));
    assert!(cm.poll_event().is_none(), "another peer");
    cm.peers_gone(now, |g, i| (g, i) == (gid, gone));
    let event = w.event(survivor);
    assert_eq!(event.id(), id);
    let state = w.state(survivor, id);
    // Said once.
    w.hosts[survivor].cm.peers_gone(now, |_, _| true);
    assert!(w.poll_event(survivor).is_none());
    w.tear_down();
    (event, state)
}

#[test]
fn connections_end_as_if_the_peer_had_said_so() {
    for (step, survivor, expected) in [
        (0, 1, S::Closed),
        (1, 0, S::Timewait),
        (1, 1, S::Timewait),
        (2, 0, S::DreqRcvd),
        (2, 1, S::DreqRcvd),
        (3, 0, S::Timewait),
        (3, 1, S::Timewait),
    ] {
        let (event, state) = told(step, survivor);
        assert_eq!(state, expected, "{step} {survivor}");
        let right = match step {
            0 | 1 => matches!(event, CmEvent::Rejected { .. }),
            2 => {
                matches!(event, CmEvent::Disconnected { how: Disconnected::Requested(_), .. })
            }
            _ => matches!(event, CmEvent::Disconnected { how: Disconnected::Acknowledged(_), .. }),
        };
        assert!(right, "{step} {survivor}: {event:?}");
    }
}

#[test]
fn a_request_that_nobody_has_answered_is_still_asked() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let a = w.connect(0, 1);
    assert_eq!(w.hosts[0].cm.peers().count(), 0);
    let now = w.now;
    w.hosts[0].cm.peers_gone(now, |_, _| true);
    assert_eq!(w.state(0, a), S::ReqSent);
    w.tear_down();
}
