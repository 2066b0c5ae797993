//! Draining the send queue (S5.11; IBA 10.3.1.5).

use super::prelude::*;

fn drain(t: &mut Pair, end: End, notify: bool) {
    let attr = QpAttr { state: QpState::Sqd, en_sqd_async_notify: notify, ..QpAttr::default() };
    let mask = QpAttrMask::STATE | QpAttrMask::EN_SQD_ASYNC_NOTIFY;
    t.modify(end.qp, &attr, mask).unwrap();
}

#[test]
fn begun_requests_finish_and_later_ones_wait() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 30_000)]);
    drain(&mut t, a, true);
    t.post(a, 2, SendOp::Write(b.mr.remote(50_000)), &[a.mr.sge(0, 3000)]);
    assert_eq!(t.qp_events(a), [], "not yet");
    let before = t.bytes(b.mr, 50_000, 3000);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!(t.qp_events(a), [QpEvent::SqDrained]);
    assert_eq!(t.bytes(b.mr, 0, 30_000), t.bytes(a.mr, 0, 30_000));
    assert_eq!(t.bytes(b.mr, 50_000, 3000), before);

    t.to_state(a.qp, QpState::Rts);
    t.run();
    assert_eq!(t.sent(a), [(2, Success)]);
    assert_eq!(t.bytes(b.mr, 50_000, 3000), t.bytes(a.mr, 0, 3000));
}

#[test]
fn an_empty_queue_is_drained_at_once() {
    for options in [QpOptions::rc(), QpOptions::uc(), QpOptions::ud()] {
        let mut t = Pair::new(1, options);
        let (a, _) = t.ends();
        drain(&mut t, a, true);
        t.run();
        assert_eq!(t.qp_events(a), [QpEvent::SqDrained], "{:?}", options.qp_type);
    }
}

#[test]
fn nobody_is_told_who_did_not_ask() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 10)]);
    drain(&mut t, a, false);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!(t.qp_events(a), []);
}

#[test]
fn losses_are_made_good_while_draining() {
    for op in [2, 4, 6] {
        let (mut t, a, b) = rc(QpOptions::rc());
        t.net.once(|_| true, Fate::Drop);
        let op = every_op(b)[op];
        t.post(a, 1, op, &[a.mr.sge(0, len_of(&op))]);
        drain(&mut t, a, true);
        t.run();
        assert_eq!(t.sent(a), [(1, Success)]);
        assert_eq!(t.qp_events(a), [QpEvent::SqDrained]);
    }
}

#[test]
fn the_responder_goes_on() {
    let (mut t, a, b) = rc(QpOptions::rc());
    drain(&mut t, b, true);
    for op in every_op(b) {
        do_one(&mut t, op);
    }
    let _ = a;
}

#[test]
fn twice() {
    let (mut t, a, b) = rc(QpOptions::rc());
    for i in 0..2 {
        drain(&mut t, a, true);
        t.run();
        assert_eq!(t.qp_events(a), [QpEvent::SqDrained]);
        t.to_state(a.qp, QpState::Rts);
        t.post(a, i, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 10)]);
        t.run();
        assert_eq!(t.sent(a), [(i, Success)]);
    }
}

#[test]
fn to_err_from_there() {
    let (mut t, a, b) = rc(QpOptions::rc());
    drain(&mut t, a, true);
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 10)]);
    t.to_state(a.qp, QpState::Err);
    assert_eq!(t.sent(a), [(1, WrFlushErr)]);
}
