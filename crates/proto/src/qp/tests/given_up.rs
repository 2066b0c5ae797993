//! A message that found no receive until its sender gave up: both ends say so.

use super::*;
use crate::qp::facts::Waits;
use anyverbs_causes::Cause;

/// A sender whose retries run out: what it tells its peer. The NAKs have this mark.
fn gives_up(rnr_retry: u8, mark: u8) -> Vec<(ReasonPacket, bool)> {
    let set = |attr: &mut QpAttr| attr.rnr_retry = rnr_retry;
    let mut world = World::with(QpType::Rc, LinkProps::new(1 << 20), set);
    world.post(SendOp::Send, 8);
    for left in (0..=rnr_retry).rev() {
        assert_eq!(world.device.given_up, []);
        let mut headers = world.headers(Operation::Ack, 0);
        headers.bth.reserved = mark;
        headers.aeth = Some(Aeth { syndrome: Syndrome::RnrNak { timer: 30 }, msn: 0 });
        world.receive(headers, &[]);
        if left > 0 {
            world.device.now = world.qp.deadline().unwrap();
            world.qp.on_timer(&mut world.device);
        }
    }
    assert_eq!(world.statuses(), [WcStatus::RnrRetryExcErr]);
    assert!(
        world.device.lines[0].contains("`anyverbs explain AV1301`"),
        "{:?}",
        world.device.lines
    );
    world.device.given_up
}

#[test]
fn the_peer_is_told_when_the_retries_have_run_out() {
    for (rnr_retry, mark, is_ours) in [(2, Bth::OURS, true), (0, Bth::OURS, true), (1, 0, false)] {
        let told = gives_up(rnr_retry, mark);
        let [(packet, to_ours)] = told[..] else { panic!("{told:?}") };
        assert_eq!((packet.dest, packet.psn, to_ours), (Qpn::new(PEER), Psn::new(0), is_ours));
        assert_eq!(packet.told.cause, Cause::NoReceive);
        let (ms, retries) = (packet.told.value >> 32, packet.told.value as u32);
        assert_eq!((ms > 0, retries), (rnr_retry > 0, rnr_retry.into()));
    }
}

/// A receiver without receives, for which one message has come.
fn without_receive() -> (World, ReasonPacket) {
    let mut world = World::new(QpType::Rc);
    world.receive_message(Operation::SendOnly, 0, 8);
    world.device.now = world.device.now + std::time::Duration::from_millis(12);
    let told = Told { cause: Cause::NoReceive, value: 9 << 32 | 3 };
    (world, ReasonPacket { dest: Qpn::new(OURS), psn: Psn::new(0), told })
}

/// The lines of the log after the peer has said this.
fn said(world: &mut World, arrival: &Arrival, packet: &ReasonPacket) -> Vec<String> {
    world.qp.note_given_up(arrival, packet, &mut world.device);
    std::mem::take(&mut world.device.lines)
}

#[test]
fn the_end_that_posted_no_receive_says_so_once() {
    let (mut world, packet) = without_receive();
    let first = "a message of queue pair 0x000022 at 202:202:202:202:202:202:202:202 was given up: \
        no receive was posted for 12 ms, and rnr_retry is 3 there; none was posted before";
    let line = format!("queue pair 0x000011: {first}; see `anyverbs explain AV1301`");
    assert_eq!(said(&mut world, &from_peer(), &packet), [line]);
    assert_eq!(said(&mut world, &from_peer(), &packet), [""; 0]);
    let lost: Vec<_> = world.qp.lost().iter().map(|lost| (lost.cause, lost.count)).collect();
    assert_eq!((lost, &*world.qp.lost()[0].first), (vec![(Cause::NoReceive, 1)], first));
    // A receive that comes too late does not change it.
    let (mut world, packet) = without_receive();
    world.recv(8);
    assert_eq!(said(&mut world, &from_peer(), &packet).len(), 1);
}

/// However late the program posts a receive, until the peer sends again.
#[test]
fn an_end_whose_peer_has_given_up_does_not_wait_for_a_receive() {
    let (mut world, packet) = without_receive();
    let waits = |world: &World| world.qp.facts().waits.0;
    assert_eq!(waits(&world), Waits::OwnReceive);
    assert_eq!(said(&mut world, &from_peer(), &packet).len(), 1);
    assert_eq!(waits(&world), Waits::PeerGaveUp);
    world.recv(8);
    assert_eq!(waits(&world), Waits::PeerGaveUp);
    let (mut world, packet) = without_receive();
    said(&mut world, &from_peer(), &packet);
    world.receive_message(Operation::SendOnly, 0, 8);
    assert_eq!(waits(&world), Waits::OwnReceive);
    // It gives up once more, which the log does not repeat.
    assert_eq!(said(&mut world, &from_peer(), &packet), [""; 0]);
    assert_eq!(waits(&world), Waits::PeerGaveUp);
}

#[test]
fn the_receives_that_were_posted_before_are_counted() {
    for (n, before) in [(1, "there; one was posted before"), (3, "there; 3 were posted before")] {
        let mut world = World::new(QpType::Rc);
        for psn in 0..n {
            world.recv(8);
            world.receive_message(Operation::SendOnly, psn, 8);
        }
        world.receive_message(Operation::SendOnly, n, 8);
        let told = Told { cause: Cause::NoReceive, value: 3 };
        let packet = ReasonPacket { dest: Qpn::new(OURS), psn: Psn::new(n), told };
        let lines = said(&mut world, &from_peer(), &packet);
        assert!(lines.len() == 1 && lines[0].contains(before), "{lines:?}");
        assert!(lines[0].contains(": no receive was posted within a millisecond, and "));
    }
}

#[test]
fn a_forged_word_of_it_changes_nothing() {
    let stranger = Arrival { source: gid(9), ..from_peer() };
    let (mut world, packet) = without_receive();
    let other = Told { cause: Cause::PeerEnded, ..packet.told };
    assert_eq!(said(&mut world, &stranger, &packet), [""; 0]);
    let later = ReasonPacket { psn: packet.psn.plus(1), ..packet };
    assert_eq!(said(&mut world, &from_peer(), &later), [""; 0]);
    let other = ReasonPacket { told: other, ..packet };
    assert_eq!(said(&mut world, &from_peer(), &other), [""; 0]);
    // Nothing came, or what came was taken.
    let mut world = World::new(QpType::Rc);
    assert_eq!(said(&mut world, &from_peer(), &packet), [""; 0]);
    let (mut world, packet) = without_receive();
    world.recv(8);
    world.receive_message(Operation::SendOnly, 0, 8);
    assert_eq!(said(&mut world, &from_peer(), &packet), [""; 0]);
    assert_eq!(world.qp.lost(), []);
}
