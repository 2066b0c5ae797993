//! A channel that is armed for solicited completions gets those, and errors (IBA 11.4.2.2).

use super::prelude::*;

#[test]
fn only_the_marked_message_is_told() {
    for op in [SendOp::Send, SendOp::SendImm(1)] {
        let (mut t, a, b) = rc(QpOptions::rc());
        t.arm(b.recv_cq, true);
        for i in 0..3 {
            t.recv(b, i, &[b.mr.sge(0, 3000)]);
        }
        t.post(a, 1, op, &[a.mr.sge(0, 3000)]);
        t.run();
        assert_eq!((t.recvs(b).len(), t.notified(b.recv_cq)), (1, 0));
        let flags = SendFlags::SOLICITED;
        t.try_post(a, 2, op, flags, &[a.mr.sge(0, 3000)]).unwrap();
        t.run();
        assert_eq!((t.recvs(b).len(), t.notified(b.recv_cq)), (1, 1));
        t.try_post(a, 3, op, flags, &[a.mr.sge(0, 3000)]).unwrap();
        t.run();
        assert_eq!(t.notified(b.recv_cq), 1, "armed once, told once");
    }
}

#[test]
fn errors_are_told() {
    let Some((mut t, _, b)) = both_ways(QpOptions::rc()) else { return };
    t.recv(b, 1, &[]);
    t.arm(b.recv_cq, true);
    t.to_state(b.qp, QpState::Err);
    assert_eq!(t.notified(b.recv_cq), 1);
}

#[test]
fn a_channel_that_wants_all_is_told_of_all() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.recv(b, 1, &[b.mr.sge(0, 10)]);
    t.arm(b.recv_cq, false);
    t.arm(a.send_cq, false);
    t.post(a, 2, SendOp::Send, &[a.mr.sge(0, 10)]);
    t.run();
    assert_eq!((t.notified(b.recv_cq), t.notified(a.send_cq)), (1, 1));
}

#[test]
fn only_the_last_packet_bears_the_mark() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.recv(b, 1, &[b.mr.sge(0, 3000)]);
    let flags = SendFlags::SOLICITED;
    t.try_post(a, 2, SendOp::Send, flags, &[a.mr.sge(0, 3000)]).unwrap();
    t.run();
    let marks: Vec<_> = t
        .net
        .trace
        .iter()
        .filter(|r| r.from == a.device)
        .map(|r| r.headers.bth.solicited)
        .collect();
    assert_eq!(marks, [false, false, true]);
}
