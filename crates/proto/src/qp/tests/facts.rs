//! The facts that a queue pair tells of itself: its queues, its traffic, and its wait.

use super::*;
use crate::qp::facts::{Queues, Traffic, Waits};

const MS: Duration = Duration::from_millis(1);

#[test]
fn complete_requests_count_with_their_bytes() {
    let mut world = World::new(QpType::Rc);
    for len in [10, 20, 30, 40] {
        world.post(SendOp::Send, len);
    }
    world.answer(1, Syndrome::ACK);
    let facts = world.qp.facts();
    let wanted = Traffic { sent: 2, sent_bytes: 30, received: 0, received_bytes: 0 };
    assert_eq!(facts.traffic, wanted);
    // Nobody has polled the completions.
    let wanted = Queues { send_taken: 4, outstanding: 2, ..Queues::default() };
    assert_eq!(facts.queues, wanted);
    world.recv(8);
    world.recv(8);
    world.receive_message(Operation::SendOnly, 0, 5);
    let facts = world.qp.facts();
    assert_eq!((facts.traffic.received, facts.traffic.received_bytes), (1, 5));
    assert_eq!(facts.queues.receives, 1);
}

#[test]
fn requests_that_failed_or_were_flushed_do_not_count() {
    let mut world = World::new(QpType::Rc);
    for len in [10, 20, 30] {
        world.post(SendOp::Send, len);
    }
    world.answer(0, Syndrome::ACK);
    world.answer(1, Syndrome::Nak(NakCode::RemoteOperational));
    let statuses = [WcStatus::Success, WcStatus::RemOpErr, WcStatus::WrFlushErr];
    assert_eq!(world.statuses(), statuses);
    let wanted = Traffic { sent: 1, sent_bytes: 10, received: 0, received_bytes: 0 };
    assert_eq!(world.qp.facts().traffic, wanted);
}

/// A receive in hand does not wait any more, and is not complete. Those that are flushed are.
#[test]
fn receives_that_were_posted_and_completed_count() {
    let mut world = World::new(QpType::Rc);
    let counts = |world: &World| {
        let queues = world.qp.facts().queues;
        (queues.posted, queues.receives, queues.completed)
    };
    (0..3).for_each(|_| world.recv(2 * MTU));
    assert_eq!(counts(&world), (3, 3, 0));
    world.receive_message(Operation::SendOnly, 0, 5);
    assert_eq!(counts(&world), (3, 2, 1));
    world.receive_message(Operation::SendFirst, 1, MTU as usize);
    assert_eq!(counts(&world), (3, 1, 1));
    world.receive_message(Operation::SendLast, 2, 5);
    assert_eq!(counts(&world), (3, 1, 2));
    world.go(QpState::Err, &QpAttr::default());
    assert_eq!(counts(&world), (3, 0, 3));
    world.go(QpState::Reset, &QpAttr::default());
    assert_eq!(counts(&world), (0, 0, 0));
}

/// On a link that loses nothing the ACK timer goes on after an answer. It does not tell since when the next one is missing.
#[test]
fn the_wait_for_an_answer_has_a_begin_until_one_comes() {
    let props = LinkProps { immediate: true, ..LinkProps::new(1 << 20) };
    let mut world = World::with(QpType::Rc, props, |_| {});
    assert_eq!(world.qp.facts().waits, (Waits::Nothing, None));
    let begin = world.device.now;
    world.post(SendOp::Send, 8);
    world.device.now = begin + MS;
    world.post(SendOp::Send, 8);
    assert_eq!(world.qp.facts().waits, (Waits::Answer, Some(begin)));
    world.answer(0, Syndrome::ACK);
    assert_eq!(world.qp.facts().waits, (Waits::Answer, None));
    world.answer(1, Syndrome::ACK);
    assert_eq!(world.qp.facts().waits, (Waits::Nothing, None));
}

/// The peer is told to wait, and tries again.
#[test]
fn the_wait_for_a_receive_begins_with_the_first_packet_that_finds_none() {
    let mut world = World::new(QpType::Rc);
    let begin = world.device.now;
    for again in 0..3 {
        world.device.now = begin + MS * again;
        world.receive_message(Operation::SendOnly, 0, 8);
        assert_eq!(world.qp.facts().waits, (Waits::OwnReceive, Some(begin)));
    }
    world.recv(8);
    // The program has done its part, and the peer's timer still runs.
    assert_eq!(world.qp.facts().waits, (Waits::PeerRepeat, Some(begin)));
    world.receive_message(Operation::SendOnly, 0, 8);
    assert_eq!(world.qp.facts().waits, (Waits::Nothing, None));
    world.device.now = begin + MS * 3;
    world.receive_message(Operation::SendOnly, 1, 8);
    assert_eq!(world.qp.facts().waits, (Waits::OwnReceive, Some(begin + MS * 3)));
}

#[test]
fn each_timeout_that_repeats_packets_counts() {
    for probe_after in [None, Some(MS)] {
        let props = LinkProps { probe_after, ..LinkProps::new(1 << 20) };
        let mut world = World::with(QpType::Rc, props, |_| {});
        world.post(SendOp::Send, 8);
        assert_eq!(world.sent(), [(0, 8)]);
        for timeouts in 1..4 {
            world.device.now = world.qp.deadline().unwrap();
            world.qp.on_timer(&mut world.device);
            world.qp.transmit(&mut world.device);
            assert_eq!(world.sent(), [(0, 8)]);
            assert_eq!(world.qp.facts().repeats.retries, timeouts, "{probe_after:?}");
        }
    }
}
