//! The move to ERR flushes both queues (S1.3, S5.7; IBA 10.3.1.6).

use super::prelude::*;

fn with_work_outstanding(options: QpOptions) -> (Pair, End, End) {
    let t = Pair::new(1, options);
    let (a, b) = t.ends();
    let mut t = t;
    for i in 0..3 {
        t.recv(a, 10 + i, &[a.mr.sge(0, 10)]);
    }
    (t, a, b)
}

#[test]
fn in_posting_order_and_whether_signaled_or_not() {
    let (mut t, a, b) = with_work_outstanding(QpOptions::rc());
    t.net.kill(b.device);
    for i in 0..4 {
        let flags = if i % 2 == 0 { SendFlags::SIGNALED } else { SendFlags::empty() };
        t.try_post(a, i, SendOp::Send, flags, &[a.mr.sge(0, 3000)]).unwrap();
    }
    t.run_for(Duration::from_micros(20));
    t.to_state(a.qp, QpState::Err);
    assert_eq!(t.sent(a), (0..4).map(|i| (i, WrFlushErr)).collect::<Vec<_>>());
    assert_eq!(t.received(a), [(10, WrFlushErr), (11, WrFlushErr), (12, WrFlushErr)]);
    t.run();
    assert_eq!((t.sent(a), t.received(a)), (vec![], vec![]), "each once");
}

#[test]
fn one_more_is_flushed_as_well() {
    for options in [QpOptions::rc(), QpOptions::uc(), QpOptions::ud()] {
        let (mut t, a, _) = with_work_outstanding(options);
        t.to_state(a.qp, QpState::Err);
        t.recv(a, 20, &[a.mr.sge(0, 10)]);
        // Unsignaled, with unknown keys: they are not looked at.
        let sge = Sge { addr: 1, len: 2, lkey: 3 };
        t.try_post(a, 21, SendOp::Send, SendFlags::empty(), &[sge]).unwrap();
        let flushed = |ids: &[u64]| ids.iter().map(|i| (*i, WrFlushErr)).collect::<Vec<_>>();
        assert_eq!(t.received(a), flushed(&[10, 11, 12, 20]));
        assert_eq!(t.sent(a), flushed(&[21]));
    }
}

#[test]
fn completed_requests_stay_completed() {
    let (mut t, a, b) = with_work_outstanding(QpOptions::rc());
    t.post(b, 1, SendOp::Send, &[b.mr.sge(0, 10)]);
    t.post(a, 2, SendOp::Write(b.mr.remote(100)), &[a.mr.sge(0, 10)]);
    t.run();
    t.to_state(a.qp, QpState::Err);
    assert_eq!(t.received(a), [(10, Success), (11, WrFlushErr), (12, WrFlushErr)]);
    assert_eq!(t.sent(a), [(2, Success)]);
}

#[test]
fn a_message_half_received_is_flushed_in_its_place() {
    let (mut t, a, b) = with_work_outstanding(QpOptions::rc());
    t.net.rule(|p| if p.operation() == O::SendLast { Fate::Drop } else { Fate::Pass });
    let large = [a.mr.sge(0, 4000)];
    t.recv(b, 1, &[b.mr.sge(0, 4000)]);
    t.recv(b, 2, &[b.mr.sge(0, 4000)]);
    t.post(a, 3, SendOp::Send, &large);
    t.run_for(Duration::from_micros(100));
    t.to_state(b.qp, QpState::Err);
    assert_eq!(t.received(b), [(1, WrFlushErr), (2, WrFlushErr)]);
}

#[test]
fn packets_that_still_come_are_ignored() {
    let (mut t, a, b) = with_work_outstanding(QpOptions { retry_cnt: 1, ..QpOptions::rc() });
    t.to_state(a.qp, QpState::Err);
    t.received(a);
    t.post(b, 1, SendOp::Write(a.mr.remote(0)), &[b.mr.sge(0, 10)]);
    let before = t.bytes(a.mr, 0, 10);
    t.run();
    assert_eq!(t.bytes(a.mr, 0, 10), before);
    assert_eq!(t.sent(b), [(1, RetryExcErr)]);
    assert!(t.counter(a.device, Counter::DropQpState) > 0);
}

#[test]
fn empty_queues_flush_nothing_and_err_may_come_again() {
    let (mut t, a, _) = rc(QpOptions::rc());
    t.to_state(a.qp, QpState::Err);
    t.to_state(a.qp, QpState::Err);
    assert_eq!((t.sent(a), t.received(a)), (vec![], vec![]));
    assert_eq!(t.next(), None, "no timer is left");
}
