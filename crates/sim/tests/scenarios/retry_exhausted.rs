//! The peer is gone (IBA 9.9.2.1.2 transport timer, 9.9.2.4.1 retries).

use super::prelude::*;

#[test]
fn in_bounded_time_and_with_the_right_count() {
    for (retry_cnt, timeout) in [(0, 14), (2, 14), (7, 15), (1, 17)] {
        let options = QpOptions { retry_cnt, timeout, ..QpOptions::rc() };
        let Some((mut t, a, b)) = both_ways(options) else { return };
        t.net.kill(b.device);
        t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 10)]);
        t.post(a, 2, SendOp::Send, &[a.mr.sge(0, 10)]);
        t.recv(a, 3, &[a.mr.sge(0, 10)]);
        let start = t.now();
        t.run_until(|t| t.get(a.qp).state() == QpState::Err);
        assert_eq!(t.sent(a), [(1, RetryExcErr), (2, WrFlushErr)]);
        assert_eq!(t.received(a), [(3, WrFlushErr)]);
        // IBA: at least the interval, at most four times of it.
        let tries = u32::from(retry_cnt) + 1;
        let interval = Duration::from_nanos(4096 << timeout);
        let took = t.now().since(start);
        assert!(took >= interval * tries && took <= interval * tries * 4, "{took:?}");
        assert_eq!(t.net.trace.count(a.device, O::WriteOnly), tries as usize);
        assert_eq!(t.counter(a.device, Counter::RetryExceeded), 1);
    }
}

#[test]
fn certain_silence_keeps_all_intervals_as_short_as_the_first() {
    let options = QpOptions { retry_cnt: 5, certain: true, ..QpOptions::rc() };
    let (mut t, a, b) = rc(options);
    t.to_state(b.qp, QpState::Reset);
    t.post(a, 1, SendOp::Send, &[a.mr.sge(0, 10)]);
    let start = t.now();
    t.run_until(|t| t.get(a.qp).state() == QpState::Err);
    assert_eq!(t.sent(a), [(1, RetryExcErr)]);
    assert_eq!(t.now().since(start), Duration::from_nanos(4096 << 14) * 6);
}

#[test]
fn for_a_read_and_an_atomic_as_well() {
    for op in [4, 5, 6] {
        let (mut t, a, b) = rc(QpOptions { retry_cnt: 1, ..QpOptions::rc() });
        t.net.kill(b.device);
        let op = every_op(b)[op];
        t.post(a, 1, op, &[a.mr.sge(0, len_of(&op))]);
        t.run();
        assert_eq!(t.sent(a), [(1, RetryExcErr)]);
    }
}

#[test]
fn timeout_zero_waits_for_ever() {
    let (mut t, a, b) = rc(QpOptions { timeout: 0, ..QpOptions::rc() });
    t.net.kill(b.device);
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 10)]);
    t.run();
    assert_eq!(t.sent(a), []);
    assert_eq!(t.state(a), QpState::Rts);
    t.to_state(a.qp, QpState::Err);
    assert_eq!(t.sent(a), [(1, WrFlushErr)]);
}

#[test]
fn the_peer_dies_in_the_middle() {
    let (mut t, a, b) = rc(QpOptions { retry_cnt: 2, ..QpOptions::rc() });
    let mut packets = 0;
    t.net.rule(move |p| {
        let from_a = p.from == a.device;
        packets += usize::from(from_a);
        if from_a && packets > 40 { Fate::Drop } else { Fate::Pass }
    });
    for i in 0..3 {
        t.post(a, i, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 30_000)]);
    }
    t.run();
    assert_eq!(t.sent(a), [(0, Success), (1, RetryExcErr), (2, WrFlushErr)]);
}

#[test]
fn the_peer_was_destroyed() {
    let (mut t, a, b) = rc(QpOptions { retry_cnt: 2, ..QpOptions::rc() });
    t.destroy(b.qp);
    t.post(a, 1, SendOp::Send, &[a.mr.sge(0, 10)]);
    t.run();
    assert_eq!(t.sent(a), [(1, RetryExcErr)]);
    assert_eq!(t.counter(b.device, Counter::DropNoQp), 3);
}

#[test]
fn a_slow_peer_is_not_a_dead_one() {
    // Every answer takes most of the interval.
    let (mut t, a, b) = rc(QpOptions { retry_cnt: 1, ..QpOptions::rc() });
    let slow = Link { delay: Duration::from_millis(60), ..Link::default() };
    t.net.set_link(b.device, a.device, slow);
    for i in 0..20 {
        t.post(a, i, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 3000)]);
    }
    t.run();
    assert_eq!(t.sent(a), (0..20).map(|i| (i, Success)).collect::<Vec<_>>());
    assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 0);
}

#[test]
fn half_a_second_of_silence_is_survived() {
    // The setting of the pingpongs: 67 ms, seven times more. A peer under emulation was seen to pause for 640 ms.
    let (mut t, a, b) = rc(QpOptions { retry_cnt: 7, timeout: 14, ..QpOptions::rc() });
    t.net.rule(|_| Fate::Drop);
    t.recv(b, 1, &[b.mr.sge(0, 100)]);
    t.post(a, 2, SendOp::Send, &[a.mr.sge(0, 100)]);
    t.run_for(Duration::from_millis(640));
    t.net.clear_rules();
    t.run();
    assert_eq!(t.sent(a), [(2, Success)]);
    assert_eq!(t.received(b), [(1, Success)]);
}
