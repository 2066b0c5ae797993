//! Capacity of a path: windows, links without room, slow links (`LinkProps::window`, `Blocked`).

use super::prelude::*;
use anyverbs_sim::link::{Full, Rate};

fn all_ops(mut t: Pair) {
    let b = t.b;
    for _ in 0..3 {
        for op in every_op(b) {
            do_one(&mut t, op);
        }
    }
}

#[test]
fn a_window_of_hardly_a_packet() {
    for window in [1, 64, 1088, 2000] {
        all_ops(Pair::new(1, QpOptions { window, ..QpOptions::rc() }));
    }
}

#[test]
fn bytes_in_flight_stay_within_it() {
    let (mut t, a, b) = rc(QpOptions { window: 10_000, ..QpOptions::rc() });
    for i in 0..10 {
        t.post(a, i, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 5000)]);
    }
    // Before the first ACK.
    let sent: usize = t.net.trace.iter().map(|r| r.payload_len + 64).sum();
    assert!((8000..=10_000).contains(&sent), "{sent}");
    t.run();
    assert_eq!(t.sent(a).len(), 10);
    assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 0);
}

#[test]
fn a_link_without_room() {
    // One packet at a time, 10 us each. The device is told to wait, in both directions.
    let rate = Rate { bytes_per_sec: 100_000_000, queue: 1, full: Full::Block };
    let mut t = Pair::new(1, QpOptions::rc());
    t.net.default_link.rate = Some(rate);
    let (a, b) = t.ends();
    all_ops(t);

    let mut t = Pair::new(1, QpOptions::rc());
    t.net.default_link.rate = Some(rate);
    for i in 0..5 {
        t.recv(a, i, &[a.mr.sge(100_000, 4096)]);
        t.recv(b, i, &[b.mr.sge(100_000, 4096)]);
        t.post(a, i, SendOp::Send, &[a.mr.sge(0, 3000)]);
        t.post(b, i, SendOp::Send, &[b.mr.sge(0, 3000)]);
        t.post(a, 10 + i, SendOp::Read(b.mr.remote(50_000)), &[a.mr.sge(50_000, 3000)]);
    }
    t.run();
    assert_eq!((t.sent(a).len(), t.sent(b).len()), (10, 5));
    assert_eq!((t.received(a).len(), t.received(b).len()), (5, 5));
    assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 0, "nothing was lost");
    assert_eq!(t.counter(b.device, Counter::LocalAckTimeoutErr), 0, "nothing was lost");
}

#[test]
fn acknowledgements_find_room_beside_requests_that_never_end() {
    let rate = Rate { bytes_per_sec: 100_000_000, queue: 4, full: Full::Block };
    let Some((mut t, a, b)) = both_ways(QpOptions::rc()) else { return };
    t.net.default_link.rate = Some(rate);
    for i in 0..60 {
        for (from, to) in [(a, b), (b, a)] {
            t.post(from, i, SendOp::Write(to.mr.remote(0)), &[from.mr.sge(50_000, 30_000)]);
        }
    }
    t.run();
    for end in [a, b] {
        assert_eq!(t.sent(end), (0..60).map(|i| (i, Success)).collect::<Vec<_>>());
        assert_eq!(t.counter(end.device, Counter::Retransmitted), 0);
    }
}

#[test]
fn naks_find_room_beside_requests_that_never_end() {
    let rate = Rate { bytes_per_sec: 100_000_000, queue: 4, full: Full::Block };
    for op in [SendOp::Send, SendOp::Write(RemoteAddr { va: 0, rkey: 0 })] {
        let Some((mut t, a, b)) = both_ways(QpOptions::rc()) else { return };
        t.net.default_link.rate = Some(rate);
        for i in 0..60 {
            t.post(b, i, SendOp::Write(a.mr.remote(0)), &[b.mr.sge(50_000, 30_000)]);
        }
        t.run_for(Duration::from_micros(500));
        t.post(a, 1, op, &[a.mr.sge(0, 100)]);
        t.run_for(Duration::from_millis(1));
        match op {
            SendOp::Send => assert!(t.counter(a.device, Counter::RnrNakReceived) >= 1),
            _ => assert_eq!(t.sent(a), [(1, RemAccessErr)]),
        }
    }
}

#[test]
fn a_bottleneck_that_drops() {
    let rate = Rate { bytes_per_sec: 100_000_000, queue: 8, full: Full::Drop };
    let (mut t, a, b) = rc(QpOptions { window: 32 << 10, timeout: 10, ..QpOptions::rc() });
    t.net.default_link.rate = Some(rate);
    for i in 0..10 {
        t.post(a, i, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 50_000)]);
    }
    t.run();
    assert_eq!(t.sent(a), (0..10).map(|i| (i, Success)).collect::<Vec<_>>());
    assert_eq!(t.bytes(b.mr, 0, 50_000), t.bytes(a.mr, 0, 50_000));
}

#[test]
fn a_completion_queue_that_overruns() {
    // IBA 11.6.3.1: the queue pairs go to ERR.
    let (mut t, a, b) = rc(QpOptions { cqe: 2, ..QpOptions::rc() });
    for i in 0..4 {
        t.post(a, i, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 10)]);
    }
    t.run();
    let events = t.events(a.device);
    assert!(events.contains(&Event::CqErr(a.send_cq)), "{events:?}");
    assert!(events.contains(&Event::Qp(a.qp, QpEvent::Fatal)), "{events:?}");
    assert_eq!(t.state(a), QpState::Err);
}
