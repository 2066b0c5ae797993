//! One ACK answers many requests (IBA 9.7.5.1.2).

use super::prelude::*;
use anyverbs_proto::wire::reth::Reth;

#[test]
fn packets_that_arrive_together() {
    let (mut t, a, b) = rc(QpOptions::rc());
    for i in 0..50 {
        t.post(a, i, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 100)]);
    }
    t.run();
    assert_eq!(t.sent(a).len(), 50);
    assert_eq!(t.net.trace.count(b.device, O::Ack), 1);
}

#[test]
fn packets_that_arrive_within_the_ack_delay() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.ack_delay = Duration::from_micros(20);
    for i in 0..50 {
        t.post(a, i, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 100)]);
        t.run_for(Duration::from_micros(1));
    }
    t.run();
    assert_eq!(t.sent(a).len(), 50);
    let acks = t.net.trace.count(b.device, O::Ack);
    assert!((2..=4).contains(&acks), "{acks}");
}

#[test]
fn a_reply_carries_the_ack_of_what_it_replies_to() {
    // "an ACK that is owed if anything else went out": the ping's ACK leaves with the pong, not later.
    let Some((mut t, a, b)) = both_ways(QpOptions::rc()) else { return };
    t.ack_delay = Duration::from_millis(1);
    t.recv(a, 1, &[a.mr.sge(0, 100)]);
    t.recv(b, 2, &[b.mr.sge(0, 100)]);
    t.post(a, 3, SendOp::Send, &[a.mr.sge(0, 100)]);
    t.run_for(Duration::from_micros(6));
    assert_eq!(t.received(b), [(2, Success)]);
    t.post(b, 4, SendOp::Send, &[b.mr.sge(0, 100)]);
    t.run_for(Duration::from_micros(6));
    assert_eq!(t.sent(a), [(3, Success)]);
    assert_eq!(t.received(a), [(1, Success)]);
}

#[test]
fn a_long_message_is_acknowledged_on_its_way() {
    let (mut t, a, b) = rc(QpOptions { window: 64 << 10, ..QpOptions::rc() });
    t.ack_delay = Duration::from_millis(1);
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 120_000)]);
    let start = t.now();
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert!(t.net.trace.count(b.device, O::Ack) >= 2);
    assert!(t.now().since(start) < Duration::from_millis(3), "held ACKs do not stop the sender");
    assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 0);
}

#[test]
fn requests_that_no_one_asked_an_ack_for() {
    // The last packet of a message asks; those before it do not, all of the time.
    let (mut t, a, b) = rc(QpOptions { sq_psn: Psn::new(0), ..QpOptions::rc() });
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 10_000)]);
    t.run();
    let asks: Vec<_> =
        t.net.trace.iter().filter(|r| r.from == a.device).map(|r| r.headers.bth.ack_req).collect();
    assert_eq!(asks.iter().filter(|asks| **asks).count(), 1);
    assert_eq!(asks.last(), Some(&true));
}

#[test]
fn an_ack_behind_paced_answers_leaves_with_the_last() {
    let (mut t, a, b) = rc(QpOptions::rc());
    let mr = t.mr(b.device, b.pd, 300_000, Access::VERBS);
    let psn = QpOptions::rc().sq_psn;
    let mut read = forged(&t, b, O::ReadRequest, psn);
    let len = mr.len as u32;
    read.reth = Some(Reth { va: mr.addr, rkey: mr.rkey, len });
    t.inject(a.device, b.device, read, &[]);
    let behind = psn.plus(len.div_ceil(1024));
    let mut write = forged(&t, b, O::WriteOnly, behind);
    write.reth = Some(Reth { va: mr.addr, rkey: mr.rkey, len: 0 });
    write.bth.ack_req = true;
    t.inject(a.device, b.device, write, &[]);
    t.run_for(Duration::from_micros(20));
    // The device could do nothing about it.
    assert!(!t.get(b.qp).owes_ack());
    t.run();
    let answers: Vec<_> = t.net.trace.iter().filter(|r| r.from == b.device).collect();
    let [.., last_response, ack] = &answers[..] else { panic!("{answers:?}") };
    assert_eq!(last_response.headers.bth.opcode.operation, O::ReadResponseLast);
    assert_eq!((ack.headers.bth.opcode.operation, ack.headers.bth.psn), (O::Ack, behind));
}
