//! Requests get lost (IBA 9.7.5.2.8: PSN sequence NAK; 9.7.6.1.3: transport timer).

use super::prelude::*;

#[test]
fn the_only_packet() {
    for op in 0..8 {
        let (mut t, _, b) = rc(QpOptions { mtu: Mtu::Mtu4096, ..QpOptions::rc() });
        t.net.once(|_| true, Fate::Drop);
        let (a, op) = (t.a, every_op(b)[op]);
        do_one(&mut t, op);
        assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 1, "{op:?}");
    }
}

#[test]
fn first_middle_or_last_of_a_message() {
    let count = 5;
    for lost in 0..count {
        for write in [false, true] {
            let (mut t, a, b) = rc(QpOptions::rc());
            let first = QpOptions::rc().sq_psn;
            t.net.once(psn(first.plus(lost)), Fate::Drop);
            t.recv(b, 1, &[b.mr.sge(0, 5000)]);
            let op = if write { SendOp::Write(b.mr.remote(0)) } else { SendOp::Send };
            t.post(a, 2, op, &[a.mr.sge(0, 5000)]);
            let start = t.now();
            t.run();
            assert_eq!(t.sent(a), [(2, Success)]);
            assert_eq!(t.bytes(b.mr, 0, 5000), t.bytes(a.mr, 0, 5000));
            assert_eq!(t.received(b).len(), usize::from(!write));
            let by_timeout = lost == count - 1;
            assert_eq!(
                t.counter(a.device, Counter::LocalAckTimeoutErr),
                u64::from(by_timeout),
                "packet {lost}"
            );
            if !by_timeout {
                assert!(t.now().since(start) < Duration::from_millis(1), "a NAK is quicker");
            }
        }
    }
}

#[test]
fn the_same_packet_again_and_again() {
    let (mut t, a, b) = rc(QpOptions { retry_cnt: 3, ..QpOptions::rc() });
    let lost = QpOptions::rc().sq_psn.plus(2);
    let mut left = 3;
    t.net.rule(move |p| {
        if p.headers.bth.psn == lost && p.operation() == O::WriteMiddle && left > 0 {
            left -= 1;
            return Fate::Drop;
        }
        Fate::Pass
    });
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 5000)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!(t.bytes(b.mr, 0, 5000), t.bytes(a.mr, 0, 5000));
}

#[test]
fn a_request_that_arrives_late_is_a_duplicate() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.net.once(is(O::SendOnly), Fate::Delay(Duration::from_secs(1)));
    t.recv(b, 1, &[b.mr.sge(0, 10)]);
    t.recv(b, 2, &[b.mr.sge(10, 10)]);
    t.post(a, 3, SendOp::Send, &[a.mr.sge(0, 10)]);
    t.run_for(Duration::from_millis(500));
    assert_eq!(t.received(b), [(1, Success)]);
    assert_eq!(t.sent(a), [(3, Success)]);
    t.run();
    assert_eq!(t.received(b), []);
    assert_eq!(t.counter(b.device, Counter::DuplicateRequest), 1);
}
