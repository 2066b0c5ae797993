//! Tail-loss probes. A link may lose an answer, or the packet that would have shown a gap. Then the requester neither
//! waits for the ACK timeout nor uses up a retry. It keeps less in flight while packets are lost.

use super::prelude::*;

const AFTER: Duration = Duration::from_millis(2);

fn options() -> QpOptions {
    QpOptions { probe_after: Some(AFTER), timeout: 14, ..QpOptions::rc() }
}

/// WRITEs with one loss; how long it took.
fn write_with(lost: impl FnMut(&Passing<'_>) -> bool + Send + 'static) -> Duration {
    let (mut t, a, b) = rc(QpOptions { retry_cnt: 0, ..options() });
    t.net.once(lost, Fate::Drop);
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 10_000)]);
    let begin = t.now();
    let mut sent = Vec::new();
    for _ in 0..200 {
        t.run_for(Duration::from_micros(500));
        sent = t.sent(a);
        if !sent.is_empty() {
            break;
        }
    }
    assert_eq!(sent, [(1, Success)]);
    assert_eq!(t.bytes(b.mr, 0, 10_000), t.bytes(a.mr, 0, 10_000));
    assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 0);
    t.now().since(begin)
}

#[test]
fn a_lost_ack() {
    assert!(write_with(is(O::Ack)) <= AFTER * 2);
}

#[test]
fn a_lost_last_packet() {
    assert!(write_with(is(O::WriteLast)) <= AFTER * 2);
}

#[test]
fn silence_ends_in_the_timeouts_all_the_same() {
    let (mut t, a, b) = rc(QpOptions { retry_cnt: 2, ..options() });
    t.net.rule(move |p| if p.from == b.device { Fate::Drop } else { Fate::Pass });
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 100)]);
    t.run();
    assert_eq!(t.sent(a), [(1, RetryExcErr)]);
    assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 3);
}

#[test]
fn losses_make_the_window_small_and_answers_large_again() {
    let (mut t, a, b) = rc(QpOptions { window: 64 << 10, ..options() });
    let in_flight = |t: &mut Pair| {
        t.net.trace.clear();
        t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 100_000)]);
        // The packets that leave before the first ACK.
        let sent = t.net.trace.iter().filter(|r| r.from == a.device).count();
        t.run();
        assert_eq!(t.sent(a), [(1, Success)]);
        sent
    };
    let whole = in_flight(&mut t);
    for _ in 0..4 {
        t.net.once(nth(10, is(O::WriteMiddle)), Fate::Drop);
        in_flight(&mut t);
    }
    let small = in_flight(&mut t);
    assert!(small < whole, "{small} of {whole}");
    for _ in 0..50 {
        in_flight(&mut t);
    }
    assert_eq!(in_flight(&mut t), whole);
}

#[test]
fn where_packets_were_lost_lately_silence_is_short() {
    let (mut t, a, b) = rc(QpOptions { window: 64 << 10, ..options() });
    t.net.once(nth(10, is(O::WriteMiddle)), Fate::Drop);
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 50_000)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    t.net.once(is(O::WriteLast), Fate::Drop);
    t.post(a, 2, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 10_000)]);
    t.run_for(AFTER / 2);
    assert_eq!(t.sent(a), [(2, Success)]);
    // And of the packet that is sent again.
    t.net.once(nth(3, is(O::WriteMiddle)), Fate::Drop);
    t.net.once(is(O::Ack), Fate::Drop);
    t.post(a, 3, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 10_000)]);
    t.run_for(AFTER / 2);
    assert_eq!(t.sent(a), [(3, Success)]);
}

#[test]
fn a_long_way_is_no_silence() {
    let (mut t, a, b) = rc(options());
    let link = Link { delay: AFTER * 8, ..Link::default() };
    t.net.set_link(a.device, b.device, link.clone());
    t.net.set_link(b.device, a.device, link);
    let mut sent = 0;
    for n in 0..20 {
        // The probe timeout may be shorter where packets are lost, but not shorter than the peer's answer time.
        if n == 10 {
            t.net.once(is(O::WriteLast), Fate::Drop);
        }
        t.net.trace.clear();
        t.post(a, n, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 2000)]);
        t.run();
        assert_eq!(t.sent(a), [(n, Success)]);
        // The first one teaches.
        if n != 0 && n != 10 {
            sent += t.net.trace.iter().filter(|r| r.from == a.device).count();
        }
    }
    assert_eq!(sent, 18 * 2, "each packet once");
}

/// A path longer than the ACK timeout: a round trip of 100 ms, against 67 ms. The first messages teach the requester.
/// Then the peer gets its time (IBA 9.7.6.1.3: up to four timeouts), and spurious retransmissions do not make the
/// window smaller.
#[test]
fn a_way_longer_than_the_timeout_costs_its_length_alone() {
    for options in [
        QpOptions {
            mtu: Mtu::Mtu256,
            probe_after: Some(Duration::from_millis(1)),
            window: 64 << 10,
            ..options()
        },
        QpOptions { mtu: Mtu::Mtu256, probe_after: None, window: 64 << 10, ..options() },
    ] {
        let (mut t, a, b) = rc(options);
        let link = Link { delay: Duration::from_millis(50), ..Link::default() };
        t.net.set_link(a.device, b.device, link.clone());
        t.net.set_link(b.device, a.device, link);
        let one_at_a_time = |t: &mut Pair, op: &dyn Fn() -> SendOp, count: u64| {
            let begin = t.now();
            t.net.trace.clear();
            for n in 0..count {
                t.post(a, n, op(), &[a.mr.sge(0, 20_000)]);
                t.run();
                assert_eq!(t.sent(a), [(n, Success)]);
            }
            let packets = t.net.trace.iter().filter(|r| r.from == a.device).count() as u64;
            (t.now().since(begin).as_millis() as u64 / count, packets / count)
        };
        let write = || SendOp::Write(b.mr.remote(0));
        let read = || SendOp::Read(b.mr.remote(0));
        one_at_a_time(&mut t, &write, 10);
        let (ms, packets) = one_at_a_time(&mut t, &write, 40);
        assert!(
            ms <= 110 && packets <= 90,
            "a WRITE of 79 packets takes {ms} ms and {packets} packets"
        );
        one_at_a_time(&mut t, &read, 10);
        let (ms, packets) = one_at_a_time(&mut t, &read, 40);
        assert!(ms <= 110 && packets <= 2, "a READ takes {ms} ms and {packets} packets");
    }
}

/// Losses on a short path do not make the probe timeout longer and longer.
#[test]
fn losses_do_not_make_a_way_longer() {
    for seed in 1..=5 {
        let (mut t, a, b) =
            rc(QpOptions { probe_after: Some(Duration::from_millis(1)), ..options() });
        let link = Link { loss: 0.05, delay: Duration::from_micros(20), ..Link::default() };
        t.net.set_link(a.device, b.device, link.clone());
        t.net.set_link(b.device, a.device, link);
        let begin = t.now();
        for n in 0..1000 {
            t.post(a, n, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 4096)]);
            t.run();
            assert_eq!(t.sent(a), [(n, Success)]);
        }
        let each = t.now().since(begin) / 1000;
        assert!(each < Duration::from_millis(2), "seed {seed}: {each:?} each");
    }
}
