//! A peer names memory that it may not touch: remote access error (IBA 9.7.4.1.5, 9.9.3.2), for both sides the end of
//! the connection.

use super::prelude::*;

/// Does `op` from `a`, which `b` must refuse, and looks at both sides.
fn refused(t: &mut Pair, op: SendOp, status: WcStatus, event: QpEvent) {
    let (a, b) = t.ends();
    let memory = t.bytes(b.mr, 0, b.mr.len);
    t.recv(b, 1, &[b.mr.sge(0, 100)]);
    t.events(b.device);
    t.post(a, 2, op, &[a.mr.sge(0, if op.is_atomic() { 8 } else { 3000 })]);
    t.post(a, 3, SendOp::Send, &[a.mr.sge(0, 10)]);
    t.run();
    assert_eq!(t.sent(a), [(2, status), (3, WrFlushErr)], "{op:?}");
    assert_eq!(t.state(a), QpState::Err);
    assert_eq!(t.state(b), QpState::Err);
    assert_eq!(t.received(b), flushed(b, &[1]), "{op:?}");
    let events = t.qp_events(b);
    assert!(events.iter().filter(|e| **e == event).count() == 1, "{op:?}: {events:?}");
    assert_eq!(t.bytes(b.mr, 0, b.mr.len), memory);
}

fn one_sided(at: RemoteAddr) -> [SendOp; 4] {
    [
        SendOp::Write(at),
        SendOp::Read(at),
        SendOp::FetchAdd { at, add: 1 },
        SendOp::CompareSwap { at, compare: 1, swap: 2 },
    ]
}

fn all_refused(status: WcStatus, event: QpEvent, at: impl Fn(&mut Pair) -> RemoteAddr) {
    for i in 0..4 {
        let (mut t, _, _) = rc(QpOptions::rc());
        let at = at(&mut t);
        refused(&mut t, one_sided(at)[i], status, event);
    }
}

#[test]
fn a_key_that_nobody_has() {
    all_refused(RemAccessErr, QpEvent::AccessErr, |t| RemoteAddr {
        rkey: t.b.mr.rkey ^ 1,
        ..t.b.mr.remote(0)
    });
}

#[test]
fn the_local_key() {
    all_refused(RemAccessErr, QpEvent::AccessErr, |t| RemoteAddr {
        rkey: t.b.mr.lkey,
        ..t.b.mr.remote(0)
    });
}

#[test]
fn a_region_that_was_deregistered() {
    all_refused(RemAccessErr, QpEvent::AccessErr, |t| {
        let b = t.b;
        let mr = t.mr(b.device, b.pd, 4096, Access::VERBS);
        t.deregister(mr);
        mr.remote(0)
    });
}

#[test]
fn beyond_the_end_or_before_the_start() {
    all_refused(RemAccessErr, QpEvent::AccessErr, |t| {
        let b = t.b;
        // Only the last bytes lie outside.
        let mr = t.register(b.device, b.pd, b.mr.addr + 8, 2992, Access::VERBS);
        mr.remote(2992)
    });
    all_refused(RemAccessErr, QpEvent::AccessErr, |t| {
        let b = t.b;
        let mr = t.register(b.device, b.pd, b.mr.addr + 4096, 8192, Access::VERBS);
        RemoteAddr { va: mr.addr - 8, rkey: mr.rkey }
    });
    all_refused(RemAccessErr, QpEvent::AccessErr, |t| RemoteAddr {
        va: u64::MAX - 7,
        ..t.b.mr.remote(0)
    });
}

#[test]
fn a_message_whose_last_bytes_lie_outside_changes_nothing() {
    let (mut t, _, b) = rc(QpOptions::rc());
    let mr = t.register(b.device, b.pd, b.mr.addr, 2999, Access::VERBS);
    refused(&mut t, SendOp::Write(mr.remote(0)), RemAccessErr, QpEvent::AccessErr);
}

#[test]
fn another_protection_domain() {
    all_refused(RemAccessErr, QpEvent::AccessErr, |t| {
        let b = t.b;
        let pd = t.pd(b.device);
        t.register(b.device, pd, b.mr.addr, 8192, Access::VERBS).remote(0)
    });
}

#[test]
fn a_right_that_the_region_does_not_grant() {
    let rights =
        [Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC, Access::REMOTE_ATOMIC];
    for (i, missing) in rights.into_iter().enumerate() {
        let (mut t, _, b) = rc(QpOptions::rc());
        let mr = t.register(b.device, b.pd, b.mr.addr, 8192, Access::VERBS - missing);
        refused(&mut t, one_sided(mr.remote(0))[i], RemAccessErr, QpEvent::AccessErr);
        // The others are not missed.
        let (mut t, _, b) = rc(QpOptions::rc());
        let mr = t.register(b.device, b.pd, b.mr.addr, 8192, missing);
        do_one(&mut t, one_sided(mr.remote(0))[i]);
    }
}

#[test]
fn the_peer_may_go_on_with_a_new_connection() {
    let (mut t, a, b) = rc(QpOptions::rc());
    let wrong = RemoteAddr { va: 0, rkey: 0 };
    refused(&mut t, SendOp::Write(wrong), RemAccessErr, QpEvent::AccessErr);
    t.to_state(a.qp, QpState::Reset);
    t.to_state(b.qp, QpState::Reset);
    let options = QpOptions::rc();
    t.connect((a.qp, &options), (b.qp, &options));
    if b.srq.is_some() {
        // The receive that waits in the SRQ still.
        t.post(a, 4, SendOp::Send, &[]);
        t.run();
        assert_eq!((t.sent(a), t.received(b)), (vec![(4, Success)], vec![(1, Success)]));
    }
    for op in every_op(b) {
        do_one(&mut t, op);
    }
}
