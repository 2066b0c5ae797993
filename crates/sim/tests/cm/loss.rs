//! Messages that are lost, come twice or come late.

use std::time::Duration;

use anyverbs_proto::cm::event::{CmEvent, Disconnected};
use anyverbs_proto::cm::message::code::{About, RejReason};
use anyverbs_proto::cm::message::{Attribute, Message};
use anyverbs_proto::cm::{CmConfig, ConnectionState as S, Transport};
use anyverbs_proto::time::Time;

use crate::messages::watch;
use crate::world::{Dial, Fate, World};

const SECOND: Duration = Duration::from_secs(1);

fn is(attribute: Attribute) -> impl Fn(usize, &Message) -> bool {
    move |_, message| message.attribute() == attribute
}

/// Connects and disconnects with the rules in force; each event must come, and once.
fn connects(w: &mut World) {
    w.listen(1);
    let a = w.connect(0, 1);
    let CmEvent::ConnectRequest { id: b, .. } = w.wait_event(1) else { panic!() };
    w.hosts[1].cm.take_request(b).unwrap();
    w.accept(1, b);
    assert!(matches!(w.wait_event(0), CmEvent::ConnectResponse { id, .. } if id == a));
    w.hosts[0].cm.ready(w.now, a, b"go").unwrap();
    assert!(matches!(w.wait_event(1), CmEvent::Established { id, .. } if id == b));
    let now = w.now;
    w.hosts[0].cm.disconnect(now, a, b"bye").unwrap();
    let CmEvent::Disconnected { how, .. } = w.wait_event(1) else { panic!() };
    let Disconnected::Requested(data) = how else { panic!("{how:?}") };
    assert_eq!((data.len(), &data[..3]), (220, &b"bye"[..]));
    let now = w.now;
    w.hosts[1].cm.disconnect(now, b, b"yes").unwrap();
    let CmEvent::Disconnected { how, .. } = w.wait_event(0) else { panic!() };
    let Disconnected::Acknowledged(data) = how else { panic!("{how:?}") };
    // A second DREP, when the first is lost, says the same.
    assert_eq!((data.len(), &data[..3]), (224, &b"yes"[..]));
    assert!(w.now.since(Time::default()) < 10 * SECOND, "{:?}", w.now);
    w.run_for(10 * SECOND);
    assert!(matches!(w.event(0), CmEvent::TimewaitExit { id } if id == a));
    assert!(matches!(w.event(1), CmEvent::TimewaitExit { id } if id == b));
    assert!(w.poll_event(0).is_none() && w.poll_event(1).is_none());
    w.tear_down();
}

fn early() -> World {
    World::with_config(1, 2, CmConfig { quick_repeats: true, ..CmConfig::default() })
}

#[test]
fn early_repetitions_make_a_loss_cheap() {
    for attribute in [Attribute::Req, Attribute::Rep, Attribute::Rtu] {
        // 4.3 s.
        let dial = Dial { response_timeout: 20, ..Dial::default() };
        let mut w = early();
        w.next(1, is(attribute), Fate::Drop);
        w.listen(1);
        let a = w.dial(0, 1, dial);
        let CmEvent::ConnectRequest { id: b, .. } = w.wait_event(1) else { panic!() };
        w.accept(1, b);
        assert!(matches!(w.wait_event(0), CmEvent::ConnectResponse { .. }));
        w.hosts[0].cm.ready(w.now, a, &[]).unwrap();
        assert!(matches!(w.wait_event(1), CmEvent::Established { .. }));
        let took = w.now.since(Time::default());
        assert!(took > SECOND / 20 && took < SECOND / 10, "{attribute:?}: {took:?}");
        w.tear_down();
    }
}

#[test]
fn early_repetitions_make_a_lost_question_cheap() {
    for attribute in [Attribute::SidrReq, Attribute::SidrRep] {
        let mut w = early();
        w.next(1, is(attribute), Fate::Drop);
        let id = w.ask(0, 1);
        // There is no listener, which is an answer.
        let event = w.wait_event(0);
        assert!(matches!(event, CmEvent::SidrResponse { id: of, .. } if of == id), "{event:?}");
        // Less than the timeout of 100 ms.
        assert!(w.now.since(Time::default()) < Duration::from_millis(3), "{:?}", w.now);
        w.tear_down();
    }
}

#[test]
fn early_repetitions_come_on_top_and_end_no_sooner() {
    let messages = |w: &World| w.hosts[0].cm.counters().tx_msgs.of(Attribute::Req);
    let unreachable = |w: &mut World| {
        w.kill(1);
        w.dial(0, 1, Dial { max_cm_retries: 3, ..Dial::default() });
        assert!(matches!(w.wait_event(0), CmEvent::Unreachable { .. }));
        w.now.since(Time::default())
    };
    let (mut plain, mut early) = (World::new(1, 2), early());
    assert_eq!(unreachable(&mut early), unreachable(&mut plain));
    assert_eq!((messages(&plain), messages(&early)), (4, 7));
}

#[test]
fn a_slow_program_is_asked_twice_and_no_more() {
    let mut w = early();
    w.listen(1);
    w.connect(0, 1);
    let b = w.take_request(1);
    w.run_for(5 * SECOND);
    let counters = |w: &World, host: usize| w.hosts[host].cm.counters().tx_msgs;
    assert_eq!(counters(&w, 0).of(Attribute::Req), 2);
    assert_eq!(counters(&w, 1).of(Attribute::Mra), 1);
    w.accept(1, b);
    w.run();
    assert!(matches!(w.event(0), CmEvent::ConnectResponse { .. }));
    w.tear_down();
}

#[test]
fn a_queued_message_is_not_repeated() {
    let mut w = early();
    w.connect(0, 1);
    w.ask(0, 1);
    let cm = &mut w.hosts[0].cm;
    let mut now = Time::default();
    while now < Time::default() + 10 * SECOND {
        now = cm.deadline().unwrap();
        cm.on_timer(now);
    }
    assert_eq!(cm.usage().outbox, 2);
    // The wait for its answer begins when it leaves.
    for _ in 0..2 {
        cm.poll_transmit(now).unwrap();
    }
    let first = cm.deadline().unwrap();
    assert!(first > now && first.since(now) < Duration::from_millis(3), "{first:?}, {now:?}");
    cm.on_timer(first);
    assert!(cm.usage().outbox > 0);
    w.tear_down();
}

#[test]
fn a_late_rtu_that_is_lost_is_said_again() {
    let mut w = early();
    w.listen(1);
    let a = w.connect(0, 1);
    let b = w.take_request(1);
    w.accept(1, b);
    // The program is slow, so the peer repeats its REP and is told to wait.
    w.run_for(SECOND);
    assert!(matches!(w.event(0), CmEvent::ConnectResponse { .. }));
    assert_eq!(w.state(0, a), S::MraRepSent);
    w.next(1, is(Attribute::Rtu), Fate::Drop);
    let before = w.now;
    w.hosts[0].cm.ready(w.now, a, &[]).unwrap();
    assert!(matches!(w.wait_event(1), CmEvent::Established { .. }));
    assert!(w.now.since(before) < SECOND / 10);
    w.run_for(20 * SECOND);
    assert_eq!(w.hosts[0].cm.deadline(), None, "not for ever");
    w.tear_down();
}

#[test]
fn any_one_message_may_be_lost_a_few_times() {
    use Attribute as A;
    for attribute in [A::Req, A::Rep, A::Rtu, A::Dreq, A::Drep, A::Mra] {
        for times in 1..5 {
            for mut w in [World::new(1, 2), early()] {
                w.next(times, is(attribute), Fate::Drop);
                connects(&mut w);
            }
        }
    }
}

#[test]
fn any_message_may_come_twice() {
    use Attribute as A;
    for attribute in [A::Req, A::Rep, A::Rtu, A::Dreq, A::Drep, A::Mra] {
        for after in [0, 100, 3_000, 300_000, 1_500_000] {
            let mut w = World::new(1, 2);
            w.next(1, is(attribute), Fate::Again(Duration::from_micros(after)));
            connects(&mut w);
        }
    }
}

#[test]
fn any_message_may_be_late() {
    use Attribute as A;
    for attribute in [A::Req, A::Rep, A::Rtu, A::Dreq, A::Drep] {
        for after in [200, 90_000, 500_000, 900_000] {
            let mut w = World::new(1, 2);
            w.next(1, is(attribute), Fate::Delay(Duration::from_micros(after)));
            connects(&mut w);
        }
    }
}

#[test]
fn a_second_request_before_the_answer_gets_an_mra() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let a = w.connect(0, 1);
    let b = w.take_request(1);
    // The program thinks for longer than all retries together would take.
    w.run_for(20 * SECOND);
    assert_eq!((w.state(0, a), w.state(1, b)), (S::MraReqRcvd, S::MraReqSent));
    let tx = w.hosts[0].cm.counters();
    assert_eq!((tx.tx_msgs.of(Attribute::Req), tx.tx_retries.of(Attribute::Req)), (2, 1));
    w.accept(1, b);
    w.run();
    assert!(matches!(w.event(0), CmEvent::ConnectResponse { .. }));
    // And so does the other one.
    w.run_for(20 * SECOND);
    assert_eq!((w.state(0, a), w.state(1, b)), (S::MraRepSent, S::MraRepRcvd));
    w.hosts[0].cm.ready(w.now, a, &[]).unwrap();
    w.run();
    assert!(matches!(w.event(1), CmEvent::Established { .. }));
    w.tear_down();
}

#[test]
fn a_lost_rejection_is_said_again() {
    let mut w = World::new(1, 2);
    w.listen(1);
    w.next(2, is(Attribute::Rej), Fate::Drop);
    let a = w.connect(0, 1);
    let b = w.take_request(1);
    let now = w.now;
    w.hosts[1].cm.reject(now, b, RejReason::Consumer, &[], b"no").unwrap();
    w.hosts[1].cm.destroy(now, b).unwrap();
    w.run_for(3 * SECOND);
    let CmEvent::Rejected { id, rejection } = w.event(0) else { panic!() };
    assert_eq!((id, rejection.reason, rejection.about), (a, RejReason::Consumer, About::Req));
    assert_eq!(rejection.private_data[..2], *b"no");
    assert!(w.poll_event(1).is_none(), "asked once");
    w.tear_down();
}

/// The active side says no to an answer. It repeats that, in timewait and after it, when the peer repeats its REP.
#[test]
fn a_lost_rejection_of_an_answer_is_said_again() {
    for (mut w, lost) in [(early(), 1), (World::new(1, 2), 2)] {
        w.listen(1);
        let a = w.connect(0, 1);
        let b = w.take_request(1);
        w.accept(1, b);
        assert!(matches!(w.wait_event(0), CmEvent::ConnectResponse { id, .. } if id == a));
        w.next(lost, is(Attribute::Rej), Fate::Drop);
        w.hosts[0].cm.reject(w.now, a, RejReason::Consumer, &[], b"no").unwrap();
        let CmEvent::Rejected { id, rejection } = w.wait_event(1) else { panic!() };
        assert_eq!((id, rejection.reason, rejection.about), (b, RejReason::Consumer, About::Rep));
        assert_eq!(rejection.private_data[..2], *b"no");
        w.tear_down();
    }
}

/// The program thinks for longer than all requests together would take, and the MRA that says so is lost.
#[test]
fn a_repeated_request_brings_the_lost_mra() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let a = w.connect(0, 1);
    let b = w.take_request(1);
    w.next(1, is(Attribute::Mra), Fate::Drop);
    w.run_for(20 * SECOND);
    assert_eq!((w.state(0, a), w.state(1, b)), (S::MraReqRcvd, S::MraReqSent));
    assert_eq!(w.hosts[1].cm.counters().tx_msgs.of(Attribute::Mra), 2);
    w.accept(1, b);
    assert!(matches!(w.wait_event(0), CmEvent::ConnectResponse { id, .. } if id == a));
    w.tear_down();
}

/// A peer that repeats its REP has missed the answer, and gets it again.
#[test]
fn a_repeated_rep_brings_the_lost_answer() {
    // The initiator of an XRC connection repeats its RTU only if it is asked.
    let mut w = World::new(1, 2);
    w.listen_for(1, Transport::Xrc);
    let a = w.dial(0, 1, Dial { transport: Transport::Xrc, ..Dial::default() });
    let b = w.take_request(1);
    w.accept(1, b);
    assert!(matches!(w.wait_event(0), CmEvent::ConnectResponse { id, .. } if id == a));
    w.next(1, is(Attribute::Rtu), Fate::Drop);
    w.hosts[0].cm.ready(w.now, a, b"go").unwrap();
    let CmEvent::Established { id, private_data } = w.wait_event(1) else { panic!() };
    assert_eq!((id, &private_data[..2]), (b, &b"go"[..]));
    w.tear_down();

    // The program thinks for longer than all repetitions together would take, and the MRA that says so is lost.
    let mut w = World::new(1, 2);
    w.listen(1);
    let a = w.connect(0, 1);
    let b = w.take_request(1);
    w.accept(1, b);
    w.next(1, is(Attribute::Mra), Fate::Drop);
    w.run_for(20 * SECOND);
    assert_eq!((w.state(0, a), w.state(1, b)), (S::MraRepSent, S::MraRepRcvd));
    w.tear_down();
}

#[test]
fn data_before_a_lost_rtu_establishes() {
    let mut w = World::new(1, 2);
    w.listen(1);
    w.next(usize::MAX, is(Attribute::Rtu), Fate::Drop);
    let a = w.connect(0, 1);
    let b = w.take_request(1);
    w.accept(1, b);
    w.run();
    w.event(0);
    w.hosts[0].cm.ready(w.now, a, &[]).unwrap();
    w.hosts[1].cm.establish(b).unwrap();
    let CmEvent::Established { private_data, .. } = w.event(1) else { panic!() };
    assert!(private_data.is_empty());
    w.clear_rules();
    w.run_for(20 * SECOND);
    assert_eq!((w.state(0, a), w.state(1, b)), (S::Established, S::Established));
    assert!(w.poll_event(1).is_none());
    w.tear_down();
}

#[test]
fn without_an_rtu_the_passive_side_gives_up() {
    let mut w = World::new(1, 2);
    w.listen(1);
    w.next(usize::MAX, is(Attribute::Rtu), Fate::Drop);
    let a = w.connect(0, 1);
    let b = w.take_request(1);
    w.accept(1, b);
    // The program takes its time, so that an MRA shows that the peer is there.
    w.run_for(SECOND);
    w.event(0);
    w.hosts[0].cm.ready(w.now, a, &[]).unwrap();
    assert!(matches!(w.wait_event(1), CmEvent::Unreachable { id } if id == b));
    w.run();
    let CmEvent::Disconnected { id, how } = w.event(0) else { panic!() };
    assert_eq!((id, how), (a, Disconnected::Rejected(RejReason::Timeout)));
    w.tear_down();
}

#[test]
fn a_late_answer_to_one_that_gave_up_is_rejected() {
    let mut w = World::new(1, 2);
    w.listen(1);
    // The passive side gets only the first REQ, and no REJ.
    w.next(usize::MAX, |from, m| from == 0 && m.attribute() == Attribute::Rej, Fate::Drop);
    w.next(1, is(Attribute::Req), Fate::Pass);
    w.next(usize::MAX, is(Attribute::Mra), Fate::Drop);
    let a = w.connect(0, 1);
    let b = w.take_request(1);
    let mut waited = 0;
    while w.state(0, a) != S::Closed {
        w.run_for(3 * SECOND);
        waited += 1;
        assert!(waited < 10);
    }
    assert!(matches!(w.event(0), CmEvent::Unreachable { id } if id == a));
    w.clear_rules();
    w.accept(1, b);
    w.run_for(3 * SECOND);
    let CmEvent::Rejected { id, rejection } = w.event(1) else { panic!() };
    assert_eq!((id, rejection.reason), (b, RejReason::Timeout));
    w.tear_down();
}

/// A REP that the network has held back comes once more, when the connection that it accepted has ended.
#[test]
fn a_rep_of_an_ended_connection_is_refused_after_timewait() {
    // Timewait lasts 0.3 s. Either side may have asked for the end.
    for (after, refused) in [(SECOND / 10, false), (2 * SECOND, true)] {
        for asks in [0, 1] {
            let mut w = World::new(1, 2);
            w.listen(1);
            w.next(1, is(Attribute::Rep), Fate::Again(after));
            let (a, b) = w.pair(0, 1);
            let ids = [a, b];
            for host in [asks, 1 - asks] {
                w.hosts[host].cm.disconnect(w.now, ids[host], &[]).unwrap();
                w.run();
            }
            let (before, rejs) = (w.datagrams(0), watch(&mut w, 0, Attribute::Rej));
            w.run_for(3 * SECOND);
            assert_eq!(w.hosts[0].cm.counters().rx_msgs.of(Attribute::Rep), 2);
            assert_eq!(w.datagrams(0) - before, u64::from(refused));
            let rejs = rejs.borrow();
            assert_eq!(rejs.len(), usize::from(refused));
            for rej in rejs.iter() {
                let Message::Rej(rej) = rej else { unreachable!() };
                assert_eq!((rej.local_comm_id, rej.remote_comm_id), (a, b));
                assert_eq!((rej.about, rej.reason), (About::Rep, RejReason::Timeout));
            }
        }
    }
}
