//! The receiver is not ready: RNR NAK, a wait, another try (IBA 9.7.5.2.8).

use super::prelude::*;

#[test]
fn the_requester_waits_and_tries_again() {
    // Code 20: 10.24 ms.
    let (mut t, a, b) = rc(QpOptions { min_rnr_timer: 20, ..QpOptions::rc() });
    t.post(a, 1, SendOp::Send, &[a.mr.sge(0, 3000)]);
    t.run_for(Duration::from_millis(1));
    assert_eq!(t.counter(b.device, Counter::RnrNakSent), 1);
    assert_eq!(t.counter(a.device, Counter::RnrNakReceived), 1);
    assert_eq!(t.sent(a), []);

    t.recv(b, 2, &[b.mr.sge(0, 3000)]);
    t.run_for(Duration::from_millis(9));
    assert_eq!(t.received(b), [], "the wait is not shorter than what the responder asked for");
    t.run_for(Duration::from_millis(2));
    assert_eq!(t.received(b), [(2, Success)]);
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!(t.bytes(b.mr, 0, 3000), t.bytes(a.mr, 0, 3000));
}

#[test]
fn requests_behind_it_wait_too_and_keep_their_order() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.post(a, 1, SendOp::Send, &[a.mr.sge(0, 10)]);
    t.post(a, 2, SendOp::Write(b.mr.remote(500)), &[a.mr.sge(0, 10)]);
    t.post(a, 3, SendOp::Send, &[a.mr.sge(10, 10)]);
    let before = t.bytes(b.mr, 500, 10);
    t.run_for(Duration::from_micros(100));
    assert_eq!(t.bytes(b.mr, 500, 10), before, "nothing overtakes the SEND");
    t.recv(b, 4, &[b.mr.sge(0, 10)]);
    t.recv(b, 5, &[b.mr.sge(10, 10)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success), (2, Success), (3, Success)]);
    assert_eq!(t.received(b), [(4, Success), (5, Success)]);
    assert_eq!(t.bytes(b.mr, 0, 20), t.bytes(a.mr, 0, 20));
    assert_eq!(t.bytes(b.mr, 500, 10), t.bytes(a.mr, 0, 10));
}

#[test]
fn seven_retries_mean_for_ever() {
    // Code 1: 10 us.
    let (mut t, a, b) = rc(QpOptions { min_rnr_timer: 1, rnr_retry: 7, ..QpOptions::rc() });
    t.post(a, 1, SendOp::Send, &[a.mr.sge(0, 10)]);
    t.run_until(|t| t.counter(a.device, Counter::RnrNakReceived) >= 100);
    t.recv(b, 2, &[b.mr.sge(0, 10)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!(t.received(b), [(2, Success)]);
}

#[test]
fn a_lost_rnr_nak_is_made_good_by_the_timeout() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.net.once(is(O::Ack), Fate::Drop);
    t.post(a, 1, SendOp::Send, &[a.mr.sge(0, 10)]);
    t.run_for(Duration::from_millis(1));
    t.recv(b, 2, &[b.mr.sge(0, 10)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!(t.received(b), [(2, Success)]);
    assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 1);
}

#[test]
fn the_other_direction_goes_on() {
    let options = QpOptions { min_rnr_timer: 20, ..QpOptions::rc() };
    let Some((mut t, a, b)) = both_ways(options) else { return };
    t.post(a, 1, SendOp::Send, &[a.mr.sge(0, 10)]);
    t.run_for(Duration::from_millis(1));
    t.recv(a, 2, &[a.mr.sge(4096, 10)]);
    t.post(b, 3, SendOp::Send, &[b.mr.sge(0, 10)]);
    t.run_for(Duration::from_millis(1));
    assert_eq!(t.received(a), [(2, Success)]);
    assert_eq!(t.sent(b), [(3, Success)]);
}
