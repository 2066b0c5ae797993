//! READs and atomics outstanding (IBA 9.4.4, 9.4.5, 11.2.4.2: initiator depth, responder resources).

use super::prelude::*;

/// The most requests that were unanswered at one time, as seen on the wire.
fn most_outstanding(t: &Pair, a: End) -> usize {
    let (mut now, mut most) = (0usize, 0);
    for record in t.net.trace.iter() {
        match record.operation() {
            O::ReadRequest | O::FetchAdd | O::CompareSwap if record.from == a.device => now += 1,
            O::ReadResponseLast | O::ReadResponseOnly | O::AtomicAck => now -= 1,
            _ => {}
        }
        most = most.max(now);
    }
    most
}

#[test]
fn never_more_than_agreed() {
    for limit in [1, 2, 3, 16] {
        let options =
            QpOptions { max_rd_atomic: limit, max_dest_rd_atomic: limit, ..QpOptions::rc() };
        let (mut t, a, b) = rc(options);
        t.write(b.mr, 0, &[0; 8]);
        for i in 0..20 {
            let at = b.mr.remote(0);
            let op = if i % 2 == 0 { SendOp::Read(at) } else { SendOp::FetchAdd { at, add: 1 } };
            let offset = i as usize * 3000;
            t.post(a, i, op, &[a.mr.sge(offset, if i % 2 == 0 { 3000 } else { 8 })]);
        }
        t.run();
        assert_eq!(t.sent(a), (0..20).map(|i| (i, Success)).collect::<Vec<_>>());
        assert_eq!(most_outstanding(&t, a), usize::from(limit));
        assert_eq!(t.word(b.mr, 0), 10);
    }
}

#[test]
fn others_do_not_count() {
    let options = QpOptions { max_rd_atomic: 1, max_dest_rd_atomic: 1, ..QpOptions::rc() };
    let (mut t, a, b) = rc(options);
    t.post(a, 1, SendOp::Read(b.mr.remote(0)), &[a.mr.sge(0, 3000)]);
    for i in 0..5 {
        t.post(a, i + 2, SendOp::Write(b.mr.remote(10_000)), &[a.mr.sge(5000, 100)]);
    }
    assert_eq!(t.net.trace.count(a.device, O::WriteOnly), 5);
    t.run();
    assert_eq!(t.sent(a).len(), 6);
}

#[test]
fn none_allowed_is_an_error_and_no_hang() {
    for op in [4, 5, 6] {
        let (mut t, a, b) = rc(QpOptions { max_rd_atomic: 0, ..QpOptions::rc() });
        let op = every_op(b)[op];
        t.post(a, 1, op, &[a.mr.sge(0, len_of(&op))]);
        t.run();
        let sent = t.sent(a);
        assert!(matches!(sent[..], [(1, status)] if status != Success), "{sent:?}");
    }
}

#[test]
fn a_responder_without_resources_refuses() {
    for op in [4, 5, 6] {
        let none = QpOptions { max_dest_rd_atomic: 0, ..QpOptions::rc() };
        let mut t = Pair::with(1, QpOptions::rc(), none);
        let (a, b) = t.ends();
        let op = every_op(b)[op];
        t.post(a, 1, op, &[a.mr.sge(0, len_of(&op))]);
        t.run();
        assert_eq!(t.sent(a), [(1, RemInvReqErr)]);
    }
}
