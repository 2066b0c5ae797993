//! Answers that make no sense (IBA 9.7.5.1.5, 9.9.2.1: bad response).

use super::prelude::*;
use anyverbs_proto::wire::aeth::{Aeth, Syndrome};
use anyverbs_proto::wire::atomic::AtomicAckEth;

/// Headers of an answer to `a`.
fn answer(t: &Pair, operation: O, psn: Psn) -> Headers {
    let mut headers = forged(t, t.a, operation, psn);
    headers.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: 1 });
    headers.atomic_ack = Some(AtomicAckEth { original: 0 });
    headers
}

/// The completions of `op` if this comes as the first answer.
fn answered(op: SendOp, operation: O, len: usize) -> Vec<(u64, WcStatus)> {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.net.rule(move |p| if p.from == b.device { Fate::Drop } else { Fate::Pass });
    let behind = t.bytes(a.mr, 3000, 3000);
    t.recv(b, 1, &[b.mr.sge(0, 3000)]);
    t.post(a, 2, op, &[a.mr.sge(0, len_of(&op))]);
    let headers = answer(&t, operation, QpOptions::rc().sq_psn);
    t.inject(b.device, a.device, headers, &vec![7; len]);
    t.run_for(Duration::from_millis(1));
    assert_eq!(t.bytes(a.mr, 3000, 3000), behind);
    t.sent(a)
}

#[test]
fn of_the_wrong_length() {
    let read = |b: End| SendOp::Read(b.mr.remote(0));
    let (t, _, b) = rc(QpOptions::rc());
    drop(t);
    for len in [0, 1, 1023, 1028, 4096] {
        assert_eq!(answered(read(b), O::ReadResponseFirst, len), [(2, BadRespErr)], "{len}");
    }
    assert_eq!(answered(read(b), O::ReadResponseFirst, 1024), [], "this one is right");
}

#[test]
fn of_the_wrong_kind() {
    let (t, _, b) = rc(QpOptions::rc());
    drop(t);
    for (i, op) in every_op(b).into_iter().enumerate() {
        for (operation, len) in
            [(O::ReadResponseOnly, 8), (O::ReadResponseFirst, 1024), (O::AtomicAck, 0)]
        {
            let right = match op {
                SendOp::Read(_) => operation == O::ReadResponseFirst,
                _ if op.is_atomic() => operation == O::AtomicAck,
                _ => false,
            };
            let sent = answered(op, operation, len);
            if right {
                assert!(sent.is_empty() || sent == [(2, Success)], "{i} {operation}: {sent:?}");
            } else {
                assert_eq!(sent, [(2, BadRespErr)], "{i} {operation}");
            }
        }
    }
}

#[test]
fn to_what_was_never_asked() {
    // Ghosts: ahead of all that was sent, or behind all that was answered.
    let (mut t, a, b) = rc(QpOptions::rc());
    let first = QpOptions::rc().sq_psn;
    do_one(&mut t, SendOp::Read(b.mr.remote(0)));
    let before = t.bytes(a.mr, 0, a.mr.len);
    for psn in [first, first.plus(2), first.plus(3), first.plus(1000), first.plus(1 << 23)] {
        for operation in [O::Ack, O::AtomicAck, O::ReadResponseOnly, O::ReadResponseMiddle] {
            let len = if operation == O::ReadResponseMiddle { 1024 } else { 0 };
            let headers = answer(&t, operation, psn);
            t.inject(b.device, a.device, headers, &vec![7; len]);
        }
    }
    t.run();
    assert_eq!(t.bytes(a.mr, 0, a.mr.len), before);
    assert_eq!(t.state(a), QpState::Rts);
    assert_eq!(t.sent(a), []);
    for op in every_op(b) {
        do_one(&mut t, op);
    }
}

#[test]
fn an_ack_for_a_read_is_no_answer() {
    assert_eq!(answered(SendOp::Read(RemoteAddr { va: 0, rkey: 0 }), O::Ack, 0), []);
}
