//! A gap in the PSNs is answered by one NAK, then silence until it is closed (IBA 9.7.5.2.8).

use super::prelude::*;
use anyverbs_proto::wire::aeth::{NakCode, Syndrome};
use anyverbs_proto::wire::reth::Reth;

fn naks(t: &Pair, end: End) -> usize {
    let nak = Syndrome::Nak(NakCode::PsnSequence);
    let sent = t.net.trace.iter().filter(|r| r.from == end.device);
    sent.filter(|r| r.headers.aeth.is_some_and(|aeth| aeth.syndrome == nak)).count()
}

#[test]
fn one_for_each_gap() {
    let (mut t, a, b) = rc(QpOptions::rc());
    let first = QpOptions::rc().sq_psn;
    t.net.once(psn(first.plus(2)), Fate::Drop);
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 30_000)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!(naks(&t, b), 1);
    assert_eq!(t.counter(a.device, Counter::PacketSeqErr), 1);
    assert_eq!(t.counter(b.device, Counter::OutOfSequence), 27);

    t.net.once(nth(3, is(O::WriteMiddle)), Fate::Drop);
    t.post(a, 2, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 30_000)]);
    t.run();
    assert_eq!(t.sent(a), [(2, Success)]);
    assert_eq!(naks(&t, b), 2);
    assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 0);
    assert_eq!(t.bytes(b.mr, 0, 30_000), t.bytes(a.mr, 0, 30_000));
}

#[test]
fn a_lost_packet_that_ends_the_retries_is_no_silence() {
    let (mut t, a, b) = rc(QpOptions { retry_cnt: 0, ..QpOptions::rc() });
    t.net.once(psn(QpOptions::rc().sq_psn.plus(2)), Fate::Drop);
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 30_000)]);
    t.run();
    let wc = t.sends(a)[0];
    assert_eq!((wc.status, wc.vendor_err), (RetryExcErr, 1214));
}

#[test]
fn it_acknowledges_what_came_before() {
    let (mut t, a, b) = rc(QpOptions::rc());
    let lost = QpOptions::rc().sq_psn.plus(1);
    t.net.rule(move |p| {
        let ack = p.headers.aeth.is_some_and(|a| matches!(a.syndrome, Syndrome::Ack { .. }));
        let request = p.from == a.device && p.headers.bth.psn == lost;
        if ack || request { Fate::Drop } else { Fate::Pass }
    });
    for i in 0..3 {
        t.post(a, i, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 10)]);
    }
    t.run_for(Duration::from_millis(1));
    assert_eq!(t.sent(a), [(0, Success)]);
    t.net.clear_rules();
    t.run();
    assert_eq!(t.sent(a), [(1, Success), (2, Success)]);
}

#[test]
fn a_lost_nak_is_made_good_by_the_timeout() {
    let (mut t, a, b) = rc(QpOptions::rc());
    let first = QpOptions::rc().sq_psn;
    t.net.once(psn(first.plus(2)), Fate::Drop);
    t.net.once(is(O::Ack), Fate::Drop);
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 10_000)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 1);
    assert_eq!(t.bytes(b.mr, 0, 10_000), t.bytes(a.mr, 0, 10_000));
}

#[test]
fn reordered_packets_cost_time_and_nothing_else() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.net.once(is(O::WriteFirst), Fate::Delay(Duration::from_micros(3)));
    t.net.once(nth(7, is(O::WriteMiddle)), Fate::Delay(Duration::from_micros(40)));
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 30_000)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!(t.bytes(b.mr, 0, 30_000), t.bytes(a.mr, 0, 30_000));
}

#[test]
fn a_nak_that_arrives_twice_counts_once() {
    for later in [1, 4, 30] {
        let (mut t, a, b) = rc(QpOptions { retry_cnt: 1, ..QpOptions::rc() });
        let first = QpOptions::rc().sq_psn;
        t.net.once(psn(first.plus(2)), Fate::Drop);
        t.net.rule(move |p| {
            let nak = p.headers.aeth.is_some_and(|a| matches!(a.syndrome, Syndrome::Nak(_)));
            if nak { Fate::Again(Duration::from_micros(later)) } else { Fate::Pass }
        });
        t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 10_000)]);
        t.run();
        assert_eq!(t.sent(a), [(1, Success)]);
        assert_eq!(t.counter(a.device, Counter::Retransmitted), 8, "{later} us later");
    }
}

/// A NAK acknowledges the requests before it. If it overtook the rest of an answer, that would count as lost.
#[test]
fn a_nak_does_not_overtake_an_answer_in_progress() {
    const LEN: usize = 600 << 10;
    let (mut t, a, b) = rc(QpOptions::rc());
    let from = t.mr(b.device, b.pd, LEN, Access::REMOTE_READ);
    let first = QpOptions::rc().sq_psn;
    // A peer that asks for all at once: it gets that burst by burst, with pauses.
    let mut headers = forged(&t, b, O::ReadRequest, first);
    let RemoteAddr { va, rkey, .. } = from.remote(0);
    headers.reth = Some(Reth { va, rkey, len: LEN as u32 });
    t.inject(a.device, b.device, headers, &[]);
    t.run_for(Duration::from_micros(60));
    let sent = |t: &Pair| t.net.trace.iter().filter(|r| r.from == b.device).count();
    let begun = sent(&t);
    assert!(begun > 0 && begun < LEN / 1024, "{begun}");
    let next = first.plus((LEN / 1024) as u32);
    let headers = forged(&t, b, O::SendOnly, next.plus(5));
    t.inject(a.device, b.device, headers, &[1; 16]);
    t.run();
    assert_eq!(t.counter(b.device, Counter::OutOfSequence), 1);
    assert_eq!((naks(&t, b), sent(&t)), (0, LEN / 1024));
    // Afterwards it is due.
    let headers = forged(&t, b, O::SendOnly, next.plus(6));
    t.inject(a.device, b.device, headers, &[1; 16]);
    t.run();
    assert_eq!(naks(&t, b), 1);
}
