//! Requests that arrive before the queue pair receives. When it does, it asks the peer for them.

use super::prelude::*;

const LATE: Duration = Duration::from_millis(50);

/// A connection whose ACK timeout is a second, and which has no retries. Its target is in RESET.
fn target_in_reset(options: QpOptions) -> (Pair, End, End, QpOptions) {
    let options = QpOptions { timeout: 18, retry_cnt: 0, ..options };
    let (mut t, a, b) = rc(options);
    t.to_state(b.qp, QpState::Reset);
    (t, a, b, options)
}

#[test]
fn they_are_sent_again_when_the_target_reaches_rtr() {
    for in_init in [true, false] {
        for op in every_op(rc(QpOptions::rc()).2) {
            let (mut t, a, b, options) = target_in_reset(QpOptions::rc());
            if in_init {
                t.to_init(b.qp, &options);
            }
            t.post(a, 1, op, &[a.mr.sge(0, len_of(&op))]);
            t.post(a, 2, op, &[a.mr.sge(0, len_of(&op))]);
            t.run_for(LATE);
            assert!(t.counter(b.device, Counter::DropQpState) > 0);
            if !in_init {
                t.to_init(b.qp, &options);
            }
            t.recv(b, 3, &[b.mr.sge(0, 4096)]);
            t.recv(b, 4, &[b.mr.sge(0, 4096)]);
            t.to_rtr(b.qp, &options, a.qp, &options);
            t.run_for(Duration::from_millis(1));
            assert_eq!(t.sent(a), [(1, Success), (2, Success)], "{op:?}");
            assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 0);
        }
    }
}

/// The requester has sent the request again already, and would do so next after as long a time.
#[test]
fn they_are_sent_again_soon_where_the_requester_probes() {
    let probe = Duration::from_millis(8);
    for late in [3, 50, 550, 900].map(Duration::from_millis) {
        let probing = QpOptions { probe_after: Some(probe), ..QpOptions::rc() };
        let (mut t, a, b, options) = target_in_reset(probing);
        t.to_init(b.qp, &options);
        t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 3000)]);
        t.run_for(late);
        t.to_rtr(b.qp, &options, a.qp, &options);
        t.run_for(probe + Duration::from_millis(1));
        assert_eq!(t.sent(a), [(1, Success)], "{late:?}");
        assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 0);
    }
}

#[test]
fn a_request_of_an_older_connection_is_not_asked_for() {
    let (mut t, a, b, options) = target_in_reset(QpOptions::rc());
    t.to_init(b.qp, &options);
    let old = forged(&t, b, O::SendOnly, options.sq_psn.prev());
    t.inject(a.device, b.device, old, &[1; 16]);
    t.run();
    assert_eq!(t.counter(b.device, Counter::DropQpState), 1);
    t.net.trace.clear();
    t.to_rtr(b.qp, &options, a.qp, &options);
    t.run();
    assert_eq!(t.net.trace.iter().count(), 0);
    do_one(&mut t, SendOp::Send);
}

#[test]
fn the_note_of_them_ends_with_a_reset() {
    let (mut t, a, b, options) = target_in_reset(QpOptions::rc());
    t.to_init(b.qp, &options);
    let early = forged(&t, b, O::SendOnly, options.sq_psn);
    t.inject(a.device, b.device, early, &[1; 16]);
    t.run();
    t.to_state(b.qp, QpState::Reset);
    t.to_init(b.qp, &options);
    t.net.trace.clear();
    t.to_rtr(b.qp, &options, a.qp, &options);
    t.run();
    assert_eq!(t.net.trace.iter().count(), 0);
}
