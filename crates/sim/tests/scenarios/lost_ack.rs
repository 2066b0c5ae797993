//! ACKs get lost (IBA 9.7.6.1.3: transport timer; 9.7.5.1.3: duplicate requests).

use super::prelude::*;

#[test]
fn the_timeout_sends_again_and_nothing_is_done_twice() {
    for op in [SendOp::Send, SendOp::SendImm(1)] {
        let (mut t, a, b) = rc(QpOptions::rc());
        t.net.once(is(O::Ack), Fate::Drop);
        t.recv(b, 1, &[b.mr.sge(0, 3000)]);
        t.recv(b, 2, &[b.mr.sge(4096, 3000)]);
        t.post(a, 3, op, &[a.mr.sge(0, 3000)]);
        t.run();
        assert_eq!(t.sent(a), [(3, Success)]);
        assert_eq!(t.received(b), [(1, Success)]);
        assert_eq!(t.bytes(b.mr, 0, 3000), t.bytes(a.mr, 0, 3000));
        assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 1);
        assert!(t.counter(b.device, Counter::DuplicateRequest) >= 1);
    }
}

#[test]
fn a_duplicate_write_does_not_write_again() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.net.once(is(O::Ack), Fate::Drop);
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 100)]);
    t.run_for(Duration::from_millis(1));
    assert_eq!(t.bytes(b.mr, 0, 100), t.bytes(a.mr, 0, 100));
    // The program at the target has read the data and uses its memory for something else.
    t.write(b.mr, 0, &[9; 100]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!(t.bytes(b.mr, 0, 100), [9; 100]);
}

#[test]
fn a_later_ack_covers_it() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.net.once(is(O::Ack), Fate::Drop);
    for i in 0..2 {
        t.recv(b, i, &[b.mr.sge(0, 10)]);
        t.post(a, i, SendOp::Send, &[a.mr.sge(0, 10)]);
        t.run_for(Duration::from_millis(1));
    }
    assert_eq!(t.sent(a), [(0, Success), (1, Success)]);
    t.run();
    assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 0);
    assert_eq!(t.net.trace.count(a.device, O::SendOnly), 2);
}

#[test]
fn a_read_response_acknowledges_what_came_before() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.net.once(is(O::Ack), Fate::Drop);
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 10)]);
    t.run_for(Duration::from_millis(1));
    t.post(a, 2, SendOp::Read(b.mr.remote(0)), &[a.mr.sge(4096, 10)]);
    t.run_for(Duration::from_millis(1));
    assert_eq!(t.sent(a), [(1, Success), (2, Success)]);
}

/// A connection over a link that loses packets. Its receiver has got one SEND, and the sender its ACK unless `lost`.
fn received_one(lost: bool) -> (Pair, End, End) {
    let options =
        QpOptions { probe_after: Some(Duration::from_millis(8)), retry_cnt: 2, ..QpOptions::rc() };
    let (mut t, a, b) = rc(options);
    if lost {
        t.net.once(is(O::Ack), Fate::Drop);
    }
    t.recv(b, 1, &[b.mr.sge(0, 10)]);
    t.post(a, 2, SendOp::Send, &[a.mr.sge(0, 10)]);
    t.run_for(Duration::from_millis(1));
    assert_eq!(t.received(b), [(1, Success)]);
    assert_eq!(t.net.trace.count(b.device, O::Ack), 1);
    (t, a, b)
}

#[test]
fn the_last_ack_is_repeated_when_its_queue_pair_ends() {
    let (mut t, a, b) = received_one(true);
    t.destroy(b.qp);
    t.run();
    assert_eq!(t.sent(a), [(2, Success)]);
    assert_eq!(t.net.trace.count(b.device, O::Ack), 2);
}

#[test]
fn the_repeated_last_ack_is_a_duplicate_without_loss() {
    let (mut t, a, b) = received_one(false);
    assert_eq!(t.sent(a), [(2, Success)]);
    t.destroy(b.qp);
    t.run();
    assert_eq!(t.sent(a), []);
    assert_eq!(t.state(a), QpState::Rts);
}

#[test]
fn old_acks_and_acks_before_answers_are_not_repeated() {
    let (mut t, _, b) = received_one(false);
    t.run_for(Duration::from_secs(2));
    t.destroy(b.qp);
    t.run();
    assert_eq!(t.net.trace.count(b.device, O::Ack), 1);

    let (mut t, a, b) = received_one(false);
    t.post(a, 3, SendOp::Read(b.mr.remote(0)), &[a.mr.sge(4096, 10)]);
    t.run_for(Duration::from_millis(1));
    assert_eq!(t.sent(a), [(2, Success), (3, Success)]);
    // An ACK of a READ would say that its response is missing.
    t.destroy(b.qp);
    t.run();
    assert_eq!(t.net.trace.count(b.device, O::Ack), 1);
}
