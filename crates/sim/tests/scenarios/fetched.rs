//! Long SENDs whose payload the peer fetches from where it lies.

use anyverbs_proto::direct::{MAX_FETCH, WORTH_FETCHING};

use super::prelude::*;

/// Length of the longest SEND here: two packets that are fetched.
const LONG: usize = MAX_FETCH as usize + 20_000;

/// Two ends on a link that carries long packets, where payloads are fetched with this probability.
fn pair(probability: f64) -> (Pair, End, End) {
    let (mut t, a, b) = rc(QpOptions::rc());
    for end in [a, b] {
        t.set_segment(end.qp, 8192);
    }
    t.do_directly(probability);
    (t, a, b)
}

/// Sends `len` bytes to a receive of two elements, whole. Returns the number of packets.
fn send(t: &mut Pair, (a, b): (End, End), op: SendOp, len: usize) -> usize {
    let packets = |t: &Pair| t.net.trace.iter().filter(|r| r.from == a.device).count();
    let before = packets(t);
    t.fill(a.mr, len as u64);
    t.fill(b.mr, 1 + len as u64);
    t.recv(b, 1, &[b.mr.sge(0, 1000), b.mr.sge(2000, LONG)]);
    t.post(a, 2, op, &[a.mr.sge(64, len)]);
    t.run();
    assert_eq!(t.sent(a), [(2, Success)], "{len} bytes");
    let got = t.recvs(b);
    assert_eq!((got.len(), got[0].status, got[0].byte_len as usize), (1, Success, len));
    let data = t.bytes(a.mr, 64, len);
    assert!(t.bytes(b.mr, 0, 1000) == data[..1000], "{len} bytes: the first element");
    assert!(t.bytes(b.mr, 2000, len - 1000) == data[1000..], "{len} bytes: the second element");
    packets(t) - before
}

#[test]
fn a_long_send_takes_a_packet_for_each_fetch() {
    let (mut t, a, b) = pair(1.0);
    let worth = WORTH_FETCHING as usize;
    for op in [SendOp::Send, SendOp::SendImm(5)] {
        for (len, packets) in [(worth - 1, 2), (worth, 1), (MAX_FETCH as usize, 1), (LONG, 2)] {
            assert_eq!(send(&mut t, (a, b), op, len), packets, "{len} bytes");
        }
    }
    assert_eq!(t.counter(a.device, Counter::PacketSeqErr), 0);
}

#[test]
fn what_the_peer_cannot_fetch_is_sent() {
    for probability in [0.1, 0.5, 0.9] {
        let (mut t, a, b) = pair(probability);
        for len in (WORTH_FETCHING as usize..LONG).step_by(5_003) {
            send(&mut t, (a, b), SendOp::Send, len);
        }
        assert_eq!(t.counter(a.device, Counter::PacketSeqErr), 0, "{probability}");
    }
}

/// Nothing was lost, so it costs no retry.
#[test]
fn a_payload_that_the_peer_cannot_fetch_ends_no_connection() {
    let (mut t, a, b) = rc(QpOptions { retry_cnt: 0, ..QpOptions::rc() });
    for end in [a, b] {
        t.set_segment(end.qp, 8192);
    }
    for len in [1001, WORTH_FETCHING as usize, LONG] {
        // The probability that it may be fetched and then is.
        t.do_directly(if len == LONG { 0.5 } else { 1.0 });
        for _ in 0..20 {
            send(&mut t, (a, b), SendOp::Send, len);
        }
    }
    assert_eq!(t.counter(a.device, Counter::PacketSeqErr), 0);
}

#[test]
fn a_send_waits_for_its_receive_before_it_is_fetched() {
    let (mut t, a, b) = pair(1.0);
    t.fill(a.mr, 1);
    t.post(a, 2, SendOp::Send, &[a.mr.sge(0, LONG)]);
    t.run_for(Duration::from_micros(100));
    assert_eq!(t.counter(b.device, Counter::RnrNakSent), 1);
    t.recv(b, 1, &[b.mr.sge(0, LONG)]);
    t.run();
    assert_eq!((t.sent(a), t.received(b)), (vec![(2, Success)], vec![(1, Success)]));
    assert!(t.bytes(a.mr, 0, LONG) == t.bytes(b.mr, 0, LONG));
}

/// Faults of the receive are found as if the payload had come.
#[test]
fn faults_of_the_receive_end_the_send() {
    for (too_short, ours, theirs) in
        [(true, RemInvReqErr, LocLenErr), (false, RemOpErr, LocProtErr)]
    {
        let (mut t, a, b) = pair(1.0);
        let len = if too_short { LONG - 1 } else { LONG };
        t.recv(b, 1, &[b.mr.sge(0, len)]);
        if !too_short {
            t.deregister(b.mr);
        }
        t.post(a, 2, SendOp::Send, &[a.mr.sge(0, LONG)]);
        t.run();
        assert_eq!((t.sent(a), t.received(b)), (vec![(2, ours)], vec![(1, theirs)]));
    }
}

#[test]
fn memory_that_is_deregistered_too_early_is_a_fault_of_the_send() {
    let (mut t, a, b) = pair(1.0);
    t.recv(b, 1, &[b.mr.sge(0, LONG)]);
    t.post(a, 2, SendOp::Send, &[a.mr.sge(0, LONG)]);
    t.deregister(a.mr);
    t.run();
    assert_eq!((t.sent(a), t.received(b)), (vec![(2, LocProtErr)], vec![]));
}

#[test]
fn lost_late_and_twice() {
    for fate in
        [Fate::Drop, Fate::Delay(Duration::from_millis(1)), Fate::Again(Duration::from_millis(1))]
    {
        for n in 0..4 {
            let (mut t, a, b) = pair(1.0);
            t.net.once(nth(n, |_| true), fate.clone());
            for len in [LONG, MAX_FETCH as usize] {
                send(&mut t, (a, b), SendOp::Send, len);
            }
        }
    }
}
