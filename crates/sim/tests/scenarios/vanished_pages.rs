//! Registered memory that was unmapped is a protection error, never a crash and never a hang.

use super::prelude::*;
use anyverbs_sim::PAGE;

/// Unmaps the second page of an end's region.
fn tear(t: &Pair, end: End) {
    t.memory(end.device).unmap(end.mr.addr + PAGE as u64, PAGE);
}

#[test]
fn under_a_send() {
    for op in [SendOp::Send, SendOp::SendImm(3)] {
        let (mut t, a, b) = rc(QpOptions::rc());
        tear(&t, a);
        t.recv(b, 1, &[b.mr.sge(0, 3 * PAGE)]);
        t.post(a, 2, op, &[a.mr.sge(0, 3 * PAGE)]);
        t.post(a, 3, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 10)]);
        t.run();
        assert_eq!(t.sent(a), [(2, LocProtErr), (3, WrFlushErr)]);
        assert_eq!(t.recvs(b), [], "the peer waits for the rest");
    }
}

#[test]
fn under_a_write_that_follows_others() {
    let (mut t, a, b) = rc(QpOptions::rc());
    tear(&t, a);
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 100)]);
    t.post(a, 2, SendOp::Write(b.mr.remote(1000)), &[a.mr.sge(PAGE, 100)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success), (2, LocProtErr)], "the first one is done first");
}

#[test]
fn under_a_second_try() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.net.once(|_| true, Fate::Drop);
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(PAGE, 100)]);
    t.run_for(Duration::from_micros(100));
    tear(&t, a);
    t.run();
    assert_eq!(t.sent(a), [(1, LocProtErr)]);
}

#[test]
fn under_the_answer_of_a_read_or_atomic() {
    for op in 4..7 {
        let (mut t, a, b) = rc(QpOptions::rc());
        tear(&t, a);
        let op = every_op(b)[op];
        t.post(a, 1, op, &[a.mr.sge(PAGE + 8, len_of(&op))]);
        t.run();
        assert_eq!(t.sent(a), [(1, LocProtErr)], "{op:?}");
    }
}

#[test]
fn under_a_receive() {
    let (mut t, a, b) = rc(QpOptions::rc());
    tear(&t, b);
    t.recv(b, 1, &[b.mr.sge(0, 3 * PAGE)]);
    t.recv(b, 2, &[b.mr.sge(0, 10)]);
    t.post(a, 3, SendOp::Send, &[a.mr.sge(0, 3 * PAGE)]);
    t.run();
    assert_eq!(t.received(b), [vec![(1, LocProtErr)], flushed(b, &[2])].concat());
    assert_eq!(t.sent(a), [(3, RemOpErr)]);
}

#[test]
fn under_a_remote_access() {
    let at = |b: End| b.mr.remote(PAGE - 8);
    for i in 0..4 {
        let (mut t, a, b) = rc(QpOptions::rc());
        tear(&t, b);
        let (op, len) = match i {
            0 => (SendOp::Write(at(b)), 3000),
            1 => (SendOp::Read(at(b)), 3000),
            2 => (SendOp::FetchAdd { at: b.mr.remote(PAGE), add: 1 }, 8),
            _ => (SendOp::CompareSwap { at: b.mr.remote(PAGE), compare: 1, swap: 1 }, 8),
        };
        t.post(a, 1, op, &[a.mr.sge(0, len)]);
        t.run();
        let sent = t.sent(a);
        assert!(matches!(sent[..], [(1, RemAccessErr | RemOpErr)]), "{op:?}: {sent:?}");
    }
}

#[test]
fn in_the_middle_of_a_read() {
    // The first responses arrive; the rest cannot be read any more.
    let (mut t, a, b) = rc(QpOptions::rc());
    t.memory(b.device).unmap(b.mr.addr + 5 * PAGE as u64, PAGE);
    t.post(a, 1, SendOp::Read(b.mr.remote(0)), &[a.mr.sge(0, 10 * PAGE)]);
    t.post(a, 2, SendOp::Read(b.mr.remote(0)), &[a.mr.sge(0, 10)]);
    t.run();
    let sent = t.sent(a);
    assert!(matches!(sent[..], [(1, RemAccessErr | RemOpErr), (2, WrFlushErr)]), "{sent:?}");
    assert_eq!(t.state(b), QpState::Err);
}

#[test]
fn a_region_is_deregistered_under_its_work() {
    // The payload for the retransmission is gone, and so is the source of the peer's READ.
    let (mut t, a, b) = rc(QpOptions::rc());
    let mr = t.register(a.device, a.pd, a.mr.addr, 4096, Access::VERBS);
    t.net.once(|_| true, Fate::Drop);
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[mr.sge(0, 100)]);
    t.run_for(Duration::from_micros(100));
    t.deregister(mr);
    t.run();
    assert_eq!(t.sent(a), [(1, LocProtErr)]);
}

#[test]
fn on_uc_and_ud() {
    for options in [QpOptions::uc(), QpOptions::ud()] {
        let mut t = Pair::new(1, options);
        let (a, b) = t.ends();
        tear(&t, a);
        t.recv(b, 1, &[b.mr.sge(0, 3 * PAGE)]);
        t.post(a, 2, SendOp::Send, &[a.mr.sge(PAGE, 1000)]);
        t.run();
        assert_eq!(t.sent(a), [(2, LocProtErr)]);
        assert_eq!(t.state(a), QpState::Sqe);
        assert_eq!(t.recvs(b), []);

        let mut t = Pair::new(1, options);
        let (a, b) = t.ends();
        tear(&t, b);
        t.recv(b, 1, &[b.mr.sge(PAGE, 1500)]);
        t.post(a, 2, SendOp::Send, &[a.mr.sge(0, 1000)]);
        t.run();
        assert_eq!(t.sent(a), [(2, Success)]);
        assert_eq!(t.received(b), [(1, LocProtErr)]);
    }
}
