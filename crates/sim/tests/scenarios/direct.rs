//! WRITEs and READs without a message come after earlier messages.

use anyverbs_proto::direct::WORTH_WAITING;

use super::prelude::*;

/// The peer answers an atomic, which is a message.
fn become_known(t: &mut Pair, (a, b): (End, End)) {
    t.post(a, 1001, SendOp::FetchAdd { at: b.mr.remote(0), add: 1 }, &[a.mr.sge(0, 8)]);
    while t.sent(a).is_empty() {
        t.run_for(Duration::from_nanos(500));
    }
}

/// 400 WRITEs of `len` bytes by a program that keeps the queue full, with an atomic before the first, if `behind_an_atomic`.
/// Returns the number of packets that asked for a WRITE.
fn stream(t: &mut Pair, (a, b): (End, End), len: usize, behind_an_atomic: bool) -> usize {
    let at = b.mr.remote(8);
    let (mut posted, mut done) = (0, 0);
    while done < 400 {
        while posted < 400 && posted < done + 20 {
            if posted == 0 && behind_an_atomic {
                let add = SendOp::FetchAdd { at: b.mr.remote(0), add: 1 };
                t.post(a, 1000, add, &[a.mr.sge(0, 8)]);
            }
            t.post(a, posted, SendOp::Write(at), &[a.mr.sge(64, len)]);
            posted += 1;
        }
        t.run_for(Duration::from_nanos(500));
        for (wr_id, status) in t.sent(a) {
            if wr_id != 1000 {
                assert_eq!((wr_id, status), (done, Success), "in order");
                done += 1;
            }
        }
    }
    assert_eq!(t.bytes(a.mr, 64, len), t.bytes(b.mr, 8, len));
    t.net.trace.count(a.device, O::WriteOnly) + t.net.trace.count(a.device, O::WriteFirst)
}

#[test]
fn a_stream_that_begins_without_messages_needs_none() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.do_directly(1.0);
    become_known(&mut t, (a, b));
    assert_eq!(stream(&mut t, (a, b), 1000, false), 0);
}

/// A copy shows no PSN.
#[test]
fn a_connection_begins_with_messages_until_the_first_answer() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.do_directly(1.0);
    // One ACK answers all that the queue holds.
    assert_eq!(stream(&mut t, (a, b), 1000, false), 20);
}

#[test]
fn writes_are_messages_until_all_before_are_answered() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.do_directly(1.0);
    // One ACK answers all that the queue holds.
    assert_eq!(stream(&mut t, (a, b), 1000, true), 20);
}

#[test]
fn long_writes_wait_until_all_before_are_answered() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.do_directly(1.0);
    assert_eq!(stream(&mut t, (a, b), WORTH_WAITING as usize, true), 0);
}

#[test]
fn writes_that_nobody_does_directly_are_messages() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.do_directly(f64::MIN_POSITIVE);
    assert_eq!(stream(&mut t, (a, b), 1000, false), 400);
}
