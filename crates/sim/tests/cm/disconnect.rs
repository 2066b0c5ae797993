//! The end of connections.

use std::time::Duration;

use anyverbs_proto::cm::event::{CmEvent, Disconnected};
use anyverbs_proto::cm::id::CommId;
use anyverbs_proto::cm::message::{Attribute, Message};
use anyverbs_proto::cm::{CmConfig, CmError, ConnectionState as S, Record, Transport};

use crate::world::{Dial, Fate, World};

#[test]
fn both_disconnect_at_once() {
    for lost in 0..3 {
        let mut w = World::new(1, 2);
        w.listen(1);
        let (a, b) = w.pair(0, 1);
        w.next(lost, |_, m| m.attribute() == Attribute::Drep, Fate::Drop);
        let now = w.now;
        w.hosts[0].cm.disconnect(now, a, b"A").unwrap();
        w.hosts[1].cm.disconnect(now, b, b"B").unwrap();
        w.run();
        for (host, id, said) in [(0, a, b'B'), (1, b, b'A')] {
            let CmEvent::Disconnected { id: of, how } = w.event(host) else { panic!() };
            assert_eq!(of, id);
            assert!(matches!(how, Disconnected::Acknowledged(data) if data[0] == said));
            assert_eq!(w.state(host, id), S::Timewait);
        }
        w.run_for(Duration::from_secs(10));
        for host in [0, 1] {
            assert!(matches!(w.event(host), CmEvent::TimewaitExit { .. }));
            assert!(w.poll_event(host).is_none());
        }
        w.tear_down();
    }
}

#[test]
fn without_agreement_the_other_side_gives_up() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let (a, b) = w.pair(0, 1);
    let now = w.now;
    w.hosts[0].cm.disconnect(now, a, &[]).unwrap();
    w.run_for(Duration::from_secs(20));
    assert!(matches!(w.event(0), CmEvent::Disconnected { how: Disconnected::TimedOut, .. }));
    assert!(matches!(w.event(1), CmEvent::Disconnected { how: Disconnected::Requested(_), .. }));
    assert!(w.poll_event(1).is_none(), "asked once, however often it was repeated");
    assert_eq!(w.state(1, b), S::DreqRcvd);
    w.tear_down();
}

#[test]
fn an_unknown_connection_is_disconnected_at_once() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let (a, _) = w.pair(0, 1);
    w.restart(1, Default::default());
    let now = w.now;
    w.hosts[0].cm.disconnect(now, a, &[]).unwrap();
    w.run();
    assert!(matches!(w.event(0), CmEvent::Disconnected { how: Disconnected::Acknowledged(_), .. }));
    w.tear_down();
}

#[test]
fn destroying_tells_the_peer_in_every_state() {
    // Steps after which one side destroys, and the event of the other.
    for step in 0..4 {
        for destroyer in [0, 1] {
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
            if step > 2 {
                let now = w.now;
                let other = [b, a][destroyer];
                w.hosts[1 - destroyer].cm.disconnect(now, other, &[]).unwrap();
                w.run();
                assert!(matches!(w.event(destroyer), CmEvent::Disconnected { .. }));
            }
            let now = w.now;
            w.hosts[destroyer].cm.destroy(now, [a, b][destroyer]).unwrap();
            w.run();
            let heard = w.event(1 - destroyer);
            match step {
                0 | 1 => assert!(matches!(heard, CmEvent::Rejected { .. }), "{step}: {heard:?}"),
                _ => assert!(matches!(heard, CmEvent::Disconnected { .. }), "{step}: {heard:?}"),
            }
            assert!(w.poll_event(destroyer).is_none(), "no event after it");
            w.tear_down();
        }
    }
}

#[test]
fn a_connection_is_gone_soon_after_both_let_go() {
    let mut w = World::new(1, 2);
    w.listen(1);
    for _ in 0..50 {
        let (a, b) = w.pair(0, 1);
        let now = w.now;
        w.hosts[0].cm.destroy(now, a).unwrap();
        w.run();
        w.event(1);
        let now = w.now;
        w.hosts[1].cm.destroy(now, b).unwrap();
        w.run();
    }
    w.run_for(Duration::from_secs(2));
    w.assert_empty();
}

#[test]
fn an_xrc_target_outlives_its_id() {
    for ends in [false, true] {
        let mut w = World::new(1, 2);
        w.listen_for(1, Transport::Xrc);
        let a = w.dial(0, 1, Dial { transport: Transport::Xrc, ..Dial::default() });
        let b = w.take_request(1);
        w.accept(1, b);
        w.run();
        assert!(matches!(w.event(0), CmEvent::ConnectResponse { .. }));
        let now = w.now;
        w.hosts[0].cm.ready(now, a, &[]).unwrap();
        w.run();
        assert!(matches!(w.event(1), CmEvent::Established { .. }));
        let now = w.now;
        if ends {
            w.hosts[1].cm.shutdown(now);
            w.run();
            assert!(matches!(w.event(0), CmEvent::Disconnected { .. }));
        } else {
            w.hosts[1].cm.destroy(now, b).unwrap();
            w.run();
            assert_eq!(w.state(0, a), S::Established);
            assert_eq!(w.hosts[1].cm.usage().connections, 0);
            let now = w.now;
            w.hosts[0].cm.disconnect(now, a, &[]).unwrap();
            w.run();
            let CmEvent::Disconnected { how, .. } = w.event(0) else { panic!() };
            assert!(matches!(how, Disconnected::Acknowledged(_)));
        }
        w.tear_down();
    }
}

#[test]
fn the_disconnect_of_another_queue_pair_is_ignored() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let (a, b) = w.pair(0, 1);
    let mut dreq = anyverbs_proto::cm::message::disconnect::Dreq::default();
    (dreq.local_comm_id, dreq.remote_comm_id) = (a, b);
    dreq.remote_qpn = anyverbs_proto::types::Qpn::new(77);
    let mad = anyverbs_proto::cm::mad::Mad {
        transaction_id: 1,
        modifier: 0,
        message: Message::Dreq(dreq),
    };
    w.inject(crate::world::gid(0), 1, &mad.emit());
    assert_eq!(w.state(1, b), S::Established);
    w.tear_down();
}

#[test]
fn the_last_drep_is_sent_again_when_its_process_ends() {
    let (soon, late) = (Duration::from_millis(900), Duration::from_secs(2));
    // Timewait lasts 0.3 s, or 17 s.
    let (short, long) = (12, 20);
    for (lost, packet_life_time, after, again) in [
        (true, short, Duration::ZERO, true),
        (false, short, Duration::ZERO, true),
        (false, short, late, false),
        (false, long, soon, true),
        (false, long, late, false),
    ] {
        let mut w = World::new(1, 2);
        w.listen(1);
        let (a, b) = w.pair_by(0, 1, Dial { packet_life_time, ..Dial::default() });
        if lost {
            w.next(0, |_, m| m.attribute() == Attribute::Drep, Fate::Drop);
        }
        w.hosts[0].cm.disconnect(w.now, a, &[]).unwrap();
        let CmEvent::Disconnected { id, .. } = w.wait_event(1) else { panic!() };
        w.hosts[1].cm.disconnect(w.now, id, &[]).unwrap();
        assert_eq!(id, b);
        w.run_for(after);
        let sent = |w: &World| w.hosts[1].cm.counters().tx_msgs.of(Attribute::Drep);
        let before = sent(&w);
        w.hosts[1].cm.shutdown(w.now);
        assert_eq!(sent(&w) - before, u64::from(again), "{packet_life_time} {after:?}");
        w.run_for(Duration::from_millis(1));
        w.kill(1);
        let now = w.now;
        let CmEvent::Disconnected { how, .. } = w.wait_event(0) else { panic!() };
        assert!(matches!(how, Disconnected::Acknowledged(_)), "{how:?}");
        assert!(w.now.since(now) < Duration::from_secs(1));
    }
}

#[test]
fn the_last_dreq_is_sent_again_when_its_process_ends() {
    for asked_before in [false, true] {
        let mut w = World::new(1, 2);
        w.listen(1);
        let (_, b) = w.pair(0, 1);
        w.next(1, |_, m| m.attribute() == Attribute::Dreq, Fate::Drop);
        if asked_before {
            w.hosts[1].cm.disconnect(w.now, b, &[]).unwrap();
            w.run_for(Duration::from_millis(1));
        }
        w.hosts[1].cm.shutdown(w.now);
        w.run_for(Duration::from_millis(1));
        w.kill(1);
        let now = w.now;
        let CmEvent::Disconnected { how, .. } = w.wait_event(0) else { panic!() };
        assert!(matches!(how, Disconnected::Requested(_)), "{how:?}");
        assert!(w.now.since(now) < Duration::from_secs(1));
    }
}

/// Connections that the program has dropped wait for their peers, but only a limited number.
#[test]
fn more_orphans_than_there_may_be_are_forgotten() {
    const MOST: usize = 3;
    let config = CmConfig { max_orphans: MOST, records: true, ..CmConfig::default() };
    let mut w = World::with_config(1, 2, config);
    w.listen(1);
    let ids: Vec<_> = (0..6).map(|_| w.pair(0, 1).0).collect();
    let record = w.hosts[0].cm.poll_record().unwrap().1.unwrap();
    w.kill(1);
    for (n, id) in ids.into_iter().enumerate() {
        let now = w.now;
        w.hosts[0].cm.destroy(now, id).unwrap();
        let usage = w.hosts[0].cm.usage();
        assert_eq!(usage.orphans, (n + 1).min(MOST));
        assert_eq!(usage.connections - usage.orphans, 5 - n);
    }
    // Neither are those of an ended process taken over.
    let now = w.now;
    let other = Record { id: CommId(0x77), ..record };
    assert_eq!(w.hosts[0].cm.disconnect_for(now, &other), Err(CmError::Full));
    w.run_out();
    assert_eq!(w.hosts[0].cm.usage().orphans, 0);
    let now = w.now;
    for n in 0..=MOST {
        let record = Record { id: CommId(0x100 + n as u32), ..record };
        let expected = if n < MOST { Ok(()) } else { Err(CmError::Full) };
        assert_eq!(w.hosts[0].cm.disconnect_for(now, &record), expected);
    }
}

#[test]
fn a_repeated_disconnect_waits_for_the_programs_answer() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let (a, b) = w.pair(0, 1);
    let names = |w: &World| [0, 1].map(|host| w.hosts[host].cm.usage().names);
    assert_eq!(names(&w), [1, 2], "the passive side knows the peer by its ID, too");
    w.hosts[0].cm.disconnect(w.now, a, b"bye").unwrap();
    w.run();
    assert!(matches!(w.event(1), CmEvent::Disconnected { id, .. } if id == b));
    let before = w.datagrams(1);
    // Its client asks again and again.
    w.run_for(Duration::from_secs(5));
    let again = w.hosts[1].cm.counters().rx_duplicates.of(Attribute::Dreq);
    assert!(again > 0);
    assert_eq!((w.datagrams(1), w.state(1, b)), (before, S::DreqRcvd));
    assert!(w.poll_event(1).is_none());
    w.hosts[1].cm.disconnect(w.now, b, b"so long").unwrap();
    w.run();
    assert!(matches!(w.event(0), CmEvent::Disconnected { id, .. } if id == a));
    w.tear_down();
}
