//! ACKs that requests carry, as on the same-host link and by UDP: each is taken once, and none is lost with the link.

use super::prelude::*;

const SEGMENT: u32 = 8192;

/// An ACK that is owed waits for this long, for a request to carry it.
const ACK_DELAY: Duration = Duration::from_millis(1);

/// `b` has received a message of `a`, whose ACK it owes.
fn owing(short_ways: bool) -> (Pair, End, End) {
    owing_by(QpOptions { segment: SEGMENT, short_ways, ..QpOptions::rc() })
}

fn owing_by(options: QpOptions) -> (Pair, End, End) {
    let (mut t, a, b) = rc(options);
    t.ack_delay = ACK_DELAY;
    // Its ACK timer runs, as the short way wants it.
    t.post(b, 10, SendOp::Write(a.mr.remote(0)), &[b.mr.sge(0, 8)]);
    t.recv(b, 1, &[b.mr.sge(0, 100)]);
    t.post(a, 2, SendOp::Send, &[a.mr.sge(0, 100)]);
    t.run_for(Duration::from_micros(6));
    assert_eq!(t.received(b), [(1, Success)]);
    assert_eq!(t.sent(a), []);
    (t, a, b)
}

/// Requests of one packet, and of several.
fn requests(a: End) -> [(SendOp, usize); 3] {
    let at = a.mr.remote(0);
    [(SendOp::Send, 100), (SendOp::Write(at), 100), (SendOp::Write(at), 40_000)]
}

#[test]
fn a_request_carries_the_ack_that_is_owed() {
    for short_ways in [true, false] {
        for (op, len) in requests(owing(true).1) {
            let (mut t, a, b) = owing(short_ways);
            t.recv(a, 3, &[a.mr.sge(0, 100)]);
            t.post(b, 4, op, &[b.mr.sge(0, len)]);
            t.run_for(Duration::from_micros(6));
            assert_eq!(t.sent(a), [(2, Success)], "{op:?}");
            assert_eq!(t.net.trace.count(b.device, O::Ack), 0, "{op:?}");
        }
    }
}

#[test]
fn a_request_by_udp_carries_it_where_it_has_room() {
    for short_ways in [true, false] {
        for (op, len) in requests(owing(true).1) {
            let (mut t, a, b) = owing_by(QpOptions { short_ways, ..QpOptions::udp() });
            t.recv(a, 3, &[a.mr.sge(0, 100)]);
            t.post(b, 4, op, &[b.mr.sge(0, len)]);
            t.run();
            assert_eq!(t.sent(a), [(2, Success)], "{op:?}");
            assert_eq!(t.sent(b).last(), Some(&(4, Success)), "{op:?}");
            // All packets of the long one are full but the last.
            assert_eq!(t.net.trace.count(b.device, O::Ack), 0, "{op:?}");
        }
    }
}

#[test]
fn an_ack_that_is_lost_with_its_request_comes_with_the_next() {
    for (fate, lost) in [(Fate::Drop, 1), (Fate::Again(Duration::from_micros(50)), 0)] {
        let (mut t, a, b) = owing_by(QpOptions::udp());
        t.recv(a, 3, &[a.mr.sge(0, 100)]);
        let device = b.device;
        t.net.once(move |p| p.from == device && is(O::SendOnly)(p), fate);
        t.post(b, 4, SendOp::Send, &[b.mr.sge(0, 100)]);
        t.run();
        assert_eq!((t.sent(a), t.received(a)), (vec![(2, Success)], vec![(3, Success)]));
        assert_eq!(t.sent(b).last(), Some(&(4, Success)));
        assert_eq!(t.counter(b.device, Counter::Retransmitted), lost);
    }
}

#[test]
fn a_peer_that_takes_none_gets_an_ack_of_its_own() {
    let (mut t, a, b) = owing_by(QpOptions { carries_acks: false, ..QpOptions::udp() });
    t.recv(a, 3, &[a.mr.sge(0, 100)]);
    t.post(b, 4, SendOp::Send, &[b.mr.sge(0, 100)]);
    t.run();
    assert_eq!((t.sent(a), t.received(a)), (vec![(2, Success)], vec![(3, Success)]));
    assert_eq!(t.net.trace.count(b.device, O::Ack), 1);
}

#[test]
fn an_ack_that_rerouting_dropped_is_still_owed() {
    for short_ways in [true, false] {
        for (op, len) in requests(owing(true).1) {
            let (mut t, a, b) = owing(short_ways);
            t.recv(a, 3, &[a.mr.sge(0, 100)]);
            t.reroute_next(b.qp);
            t.post(b, 4, op, &[b.mr.sge(0, len)]);
            t.run_for(ACK_DELAY * 2);
            assert_eq!(t.sent(a), [(2, Success)], "{op:?}, short ways: {short_ways}");
            assert_eq!(t.net.trace.count(b.device, O::Ack), 1, "{op:?}");
            t.run();
            assert_eq!(t.sent(b).last(), Some(&(4, Success)), "{op:?}");
            assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 0, "{op:?}");
        }
    }
}

#[test]
fn a_rerouted_request_has_its_new_links_probe_timeout() {
    for short_ways in [true, false] {
        let (mut t, a, b) = owing(short_ways);
        t.recv(a, 3, &[a.mr.sge(0, 100)]);
        // Nothing that arrives later starts a timer.
        let device = a.device;
        t.net.once(is(O::SendOnly), Fate::Drop);
        t.net.rule(move |p| if p.from == device { Fate::Drop } else { Fate::Pass });
        t.reroute_next(b.qp);
        t.post(b, 4, SendOp::Send, &[b.mr.sge(0, 100)]);
        // The ACK timeout is 67 ms.
        t.run_for(Duration::from_millis(20));
        assert_eq!(t.received(a), [(3, Success)], "short ways: {short_ways}");
    }
}

#[test]
fn a_request_by_the_short_way_takes_an_ack_once() {
    for short_ways in [true, false] {
        let (mut t, a, b) = owing(short_ways);
        // Too short, so the general way refuses the request that carries the ACK.
        t.recv(a, 3, &[a.mr.sge(0, 50)]);
        t.post(b, 4, SendOp::Send, &[b.mr.sge(0, 100)]);
        t.run();
        assert_eq!(t.sent(a), [(2, Success)]);
        assert_eq!(t.received(a), [(3, LocLenErr)]);
        assert_eq!(t.counter(a.device, Counter::DropStaleAck), 0, "short ways: {short_ways}");
    }
}
