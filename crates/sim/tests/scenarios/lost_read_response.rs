//! READ responses get lost: the requester asks again for the missing ones (IBA 9.7.5.2.4, implied NAK; 9.7.6.1.3).

use super::prelude::*;

fn one_lost(len: usize, lost: usize) -> (Pair, End) {
    let (mut t, a, b) = rc(QpOptions::rc());
    let response = |p: &Passing<'_>| p.headers.bth.opcode.is_response() && p.operation() != O::Ack;
    t.net.once(nth(lost, response), Fate::Drop);
    t.post(a, 1, SendOp::Read(b.mr.remote(0)), &[a.mr.sge(0, len)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!(t.bytes(a.mr, 0, len), t.bytes(b.mr, 0, len), "response {lost} of {len} bytes");
    (t, a)
}

#[test]
fn the_only_one() {
    one_lost(100, 0);
    one_lost(0, 0);
}

#[test]
fn first_middle_and_last() {
    for lost in 0..5 {
        let (t, a) = one_lost(5000, lost);
        let asked = t.net.trace.count(a.device, O::ReadRequest);
        assert_eq!(asked, 2, "asks once more");
        // The first three are missed when the next one comes, the last one when nothing comes.
        assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), u64::from(lost == 4));
    }
}

#[test]
fn only_what_is_missing_is_sent_again() {
    let (t, _) = one_lost(5000, 3);
    let responses = t.net.trace.iter().filter(|r| r.payload_len > 0).count();
    // Five, the last of which was of no use, and two more.
    assert_eq!(responses, 7);
}

#[test]
fn an_ack_behind_a_missing_response_completes_nothing() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.net.once(is(O::ReadResponseLast), Fate::Drop);
    t.post(a, 1, SendOp::Read(b.mr.remote(0)), &[a.mr.sge(0, 5000)]);
    t.post(a, 2, SendOp::Write(b.mr.remote(10_000)), &[a.mr.sge(10_000, 3000)]);
    let start = t.now();
    t.run();
    assert_eq!(t.sent(a), [(1, Success), (2, Success)]);
    assert_eq!(t.bytes(a.mr, 0, 5000), t.bytes(b.mr, 0, 5000));
    assert_eq!(t.counter(a.device, Counter::ImpliedNakSeqErr), 1);
    assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 0);
    assert!(t.now().since(start) < Duration::from_millis(1));
}

#[test]
fn each_of_several_reads_in_turn() {
    for lost in 0..12 {
        let (mut t, a, b) = rc(QpOptions::rc());
        let response = |p: &Passing<'_>| p.headers.bth.opcode.is_response();
        t.net.once(nth(lost, response), Fate::Drop);
        for i in 0..4 {
            let offset = i as usize * 3000;
            t.post(a, i, SendOp::Read(b.mr.remote(offset)), &[a.mr.sge(offset, 3000)]);
        }
        t.run();
        assert_eq!(t.sent(a), (0..4).map(|i| (i, Success)).collect::<Vec<_>>());
        assert_eq!(t.bytes(a.mr, 0, 12_000), t.bytes(b.mr, 0, 12_000));
    }
}
