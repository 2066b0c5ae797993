//! The receiver stays not ready (IBA 9.9.2.4.2).

use super::prelude::*;

#[test]
fn as_many_tries_as_were_asked_for() {
    for rnr_retry in [0, 1, 3, 6] {
        let (mut t, a, b) = rc(QpOptions { rnr_retry, ..QpOptions::rc() });
        t.post(a, 1, SendOp::Send, &[a.mr.sge(0, 10)]);
        t.post(a, 2, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 10)]);
        t.run();
        assert_eq!(t.sent(a), [(1, RnrRetryExcErr), (2, WrFlushErr)]);
        let sends = t.net.trace.count(a.device, O::SendOnly);
        assert_eq!(sends, usize::from(rnr_retry) + 1);
        assert_eq!(t.state(a), QpState::Err);
        assert_eq!(t.state(b), QpState::Rts, "the responder did nothing wrong");
        assert_eq!(t.counter(a.device, Counter::RnrRetryExceeded), 1);
    }
}

#[test]
fn progress_begins_the_count_anew() {
    let (mut t, a, b) = rc(QpOptions { rnr_retry: 1, ..QpOptions::rc() });
    for i in 0..5 {
        t.post(a, i, SendOp::Send, &[a.mr.sge(0, 10)]);
        t.run_for(Duration::from_micros(20));
        assert_eq!(t.counter(b.device, Counter::RnrNakSent), i + 1);
        t.recv(b, i, &[b.mr.sge(0, 10)]);
        t.run();
        assert_eq!(t.sent(a), [(i, Success)]);
    }
}

#[test]
fn a_nak_that_arrives_twice_counts_once() {
    let (mut t, a, b) = rc(QpOptions { rnr_retry: 1, ..QpOptions::rc() });
    t.net.once(is(O::Ack), Fate::Again(Duration::from_micros(3)));
    t.post(a, 1, SendOp::Send, &[a.mr.sge(0, 10)]);
    t.run_for(Duration::from_micros(20));
    t.recv(b, 2, &[b.mr.sge(0, 10)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
}
