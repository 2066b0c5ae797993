//! Short SENDs that take a lane, among packets.

use super::prelude::*;

/// Two ends on a link of one host with open lanes both ways: every short SEND takes one if it can.
fn pair(options: QpOptions) -> (Pair, End, End) {
    // Lanes are short ways.
    let (mut t, a, b) = rc(QpOptions { segment: 4096, short_ways: true, ..options });
    t.use_lanes(1.0);
    for (from, to) in [(a, b), (b, a)] {
        t.recv(to, 0, &[to.mr.sge(0, 8)]);
        t.post(from, 0, SendOp::Send, &[from.mr.sge(0, 8)]);
        rest(&mut t);
        assert_eq!((t.sent(from), t.received(to)), (vec![(0, Success)], vec![(0, Success)]));
    }
    assert_eq!(t.sent_by_lane(), 0, "the first of each is a packet");
    (t, a, b)
}

/// Runs until all is answered. The ACK timer runs on, without which the next SEND is a packet.
fn rest(t: &mut Pair) {
    t.run_for(Duration::from_micros(100));
}

fn recvs(t: &mut Pair, end: End, wr_ids: std::ops::Range<u64>) {
    for wr_id in wr_ids {
        t.recv(end, wr_id, &[end.mr.sge(64 * wr_id as usize, 64)]);
    }
}

/// Posts a SEND of 16 bytes of the sender's memory, from another place for each.
fn send(t: &mut Pair, end: End, wr_id: u64) {
    t.post(end, wr_id, SendOp::Send, &[end.mr.sge(16 * wr_id as usize, 16)]);
}

fn packets(t: &Pair, end: End) -> usize {
    let of_end = t.net.trace.iter().filter(|r| r.from == end.device && r.fate != "by a lane");
    of_end.count()
}

fn all(wr_ids: std::ops::Range<u64>, status: WcStatus) -> Vec<(u64, WcStatus)> {
    wr_ids.map(|wr_id| (wr_id, status)).collect()
}

#[test]
fn short_sends_need_no_packet_and_no_ack() {
    let (mut t, a, b) = pair(QpOptions::rc());
    let before = packets(&t, a) + packets(&t, b);
    for wr_id in 1..20 {
        recvs(&mut t, b, wr_id..wr_id + 1);
        send(&mut t, a, wr_id);
        t.run_for(Duration::from_micros(50));
    }
    assert_eq!(t.sent(a), all(1..20, Success));
    let got = t.recvs(b);
    for (i, wc) in got.iter().enumerate() {
        let at = i + 1;
        assert_eq!((wc.wr_id, wc.byte_len), (at as u64, 16));
        assert_eq!(t.bytes(b.mr, 64 * at, 16), t.bytes(a.mr, 16 * at, 16));
    }
    assert_eq!(got.len(), 19);
    assert_eq!(packets(&t, a) + packets(&t, b), before);
    assert_eq!(t.sent_by_lane(), 19);
    assert_eq!(t.net.trace.counts().1, 0, "none of them was lost");
}

/// Lanes have every short SEND, as in the pass over all scenarios.
#[test]
fn a_pair_that_begins_with_lanes_keeps_the_psns_of_its_options() {
    let options = QpOptions { lanes: true, short_ways: true, ..QpOptions::rc() };
    let (mut t, a, b) = rc(options);
    assert_eq!(packets(&t, a) + packets(&t, b), 0);
    for (wr_id, (from, to)) in [(1, (a, b)), (2, (b, a))] {
        t.recv(to, wr_id, &[to.mr.sge(0, 1024)]);
        t.post(from, wr_id, SendOp::Send, &[from.mr.sge(0, 1024)]);
        assert_eq!(t.sent_by_lane(), wr_id, "the first, and a long one");
        let sent = t.net.trace.iter().last().map(|record| record.headers.bth.psn);
        assert_eq!(sent, Some(options.sq_psn));
        rest(&mut t);
        assert_eq!(
            (t.sent(from), t.received(to)),
            (all(wr_id..wr_id + 1, Success), all(wr_id..wr_id + 1, Success))
        );
    }
    assert_eq!(packets(&t, a) + packets(&t, b), 0);
}

#[test]
fn a_full_lane_is_followed_by_packets_in_order() {
    let (mut t, a, b) = pair(QpOptions::rc());
    let before = packets(&t, a);
    recvs(&mut t, b, 1..61);
    for wr_id in 1..61 {
        send(&mut t, a, wr_id);
    }
    t.run();
    assert_eq!(t.sent(a), all(1..61, Success));
    assert_eq!(t.received(b), all(1..61, Success));
    assert!(t.sent_by_lane() > 0 && packets(&t, a) > before, "both ways were taken");
}

#[test]
fn packets_and_lanes_keep_one_order() {
    for seed in 0..20_u8 {
        let (mut t, a, b) = pair(QpOptions::rc());
        t.use_lanes(0.3 + 0.03 * f64::from(seed));
        recvs(&mut t, b, 1..41);
        for wr_id in 1..41 {
            let len = if wr_id % 3 == 0 { 60 } else { 16 };
            t.post(a, wr_id, SendOp::Send, &[a.mr.sge(16 * wr_id as usize, len)]);
            t.run_for(Duration::from_micros(u64::from(seed) % 7));
        }
        t.run();
        assert_eq!(t.sent(a), all(1..41, Success));
        assert_eq!(t.received(b), all(1..41, Success));
        assert_eq!(t.counter(a.device, Counter::PacketSeqErr), 0, "none was taken for lost");
    }
}

#[test]
fn a_send_behind_a_lost_packet_is_executed_after_its_repetition() {
    let (mut t, a, b) = pair(QpOptions::rc());
    recvs(&mut t, b, 1..4);
    t.net.once(is(O::SendOnly), Fate::Drop);
    t.post(a, 1, SendOp::Send, &[a.mr.sge(0, 60)]);
    t.use_lanes(1.0);
    // While the first is unanswered, these are in the lane.
    send(&mut t, a, 2);
    send(&mut t, a, 3);
    assert_eq!(t.sent_by_lane(), 2);
    let begun = t.now();
    t.run();
    assert_eq!(t.sent(a), all(1..4, Success));
    assert_eq!(t.received(b), all(1..4, Success));
    // The gap is told. The timeout is 67 ms.
    assert!(t.now().since(begun) < Duration::from_millis(200));
    assert_eq!(t.counter(a.device, Counter::PacketSeqErr), 1, "one NAK");
}

#[test]
fn a_read_in_front_completes_before_the_sends_behind_it() {
    let (mut t, a, b) = pair(QpOptions::rc());
    recvs(&mut t, b, 1..4);
    t.net.once(is(O::ReadResponseOnly), Fate::Delay(Duration::from_micros(300)));
    t.post(a, 1, SendOp::Read(b.mr.remote(4096)), &[a.mr.sge(8192, 100)]);
    send(&mut t, a, 2);
    send(&mut t, a, 3);
    assert_eq!(t.sent_by_lane(), 2);
    t.run_for(Duration::from_micros(200));
    assert_eq!(t.received(b), all(1..3, Success));
    assert_eq!(t.sent(a), [], "the answer of the lane does not complete the READ");
    t.run();
    assert_eq!(t.sent(a), all(1..4, Success));
    assert_eq!(t.bytes(a.mr, 8192, 100), t.bytes(b.mr, 4096, 100));
}

#[test]
fn a_fenced_send_waits_for_its_read() {
    let (mut t, a, b) = pair(QpOptions::rc());
    recvs(&mut t, b, 1..2);
    t.post(a, 1, SendOp::Read(b.mr.remote(4096)), &[a.mr.sge(8192, 16)]);
    let flags = SendFlags::SIGNALED | SendFlags::FENCE;
    t.try_post(a, 2, SendOp::Send, flags, &[a.mr.sge(8192, 16)]).unwrap();
    t.run();
    assert_eq!(t.sent(a), all(1..3, Success));
    assert_eq!(t.bytes(b.mr, 64, 16), t.bytes(b.mr, 4096, 16), "it sends the bytes that were read");
}

#[test]
fn without_a_receive_the_sends_wait_and_keep_their_order() {
    let (mut t, a, b) = pair(QpOptions::rc());
    for wr_id in 1..6 {
        send(&mut t, a, wr_id);
    }
    assert_eq!(t.sent_by_lane(), 5);
    t.run_for(Duration::from_millis(3));
    assert_eq!(t.sent(a), []);
    recvs(&mut t, b, 1..6);
    t.run();
    assert_eq!(t.sent(a), all(1..6, Success));
    assert_eq!(t.received(b), all(1..6, Success));
}

#[test]
fn a_receive_that_is_too_short_ends_both_sides() {
    let (mut t, a, b) = pair(QpOptions::rc());
    t.recv(b, 1, &[b.mr.sge(0, 15)]);
    send(&mut t, a, 1);
    send(&mut t, a, 2);
    assert_eq!(t.sent_by_lane(), 2);
    t.run();
    assert_eq!(t.sent(a), [(1, RemInvReqErr), (2, WrFlushErr)]);
    assert_eq!(t.received(b), [(1, LocLenErr)]);
    assert_eq!((t.state(a), t.state(b)), (QpState::Err, QpState::Err));
}

#[test]
fn a_receive_whose_memory_has_gone_ends_both_sides() {
    let (mut t, a, b) = pair(QpOptions::rc());
    let mr = t.mr(b.device, b.pd, 64, Access::LOCAL_WRITE);
    t.recv(b, 1, &[mr.sge(0, 64)]);
    t.deregister(mr);
    send(&mut t, a, 1);
    t.run();
    assert_eq!(t.sent(a), [(1, RemOpErr)]);
    assert_eq!(t.received(b), [(1, LocProtErr)]);
}

#[test]
fn a_send_whose_key_is_wrong_does_not_leave() {
    let (mut t, a, b) = pair(QpOptions::rc());
    recvs(&mut t, b, 1..2);
    t.post(a, 1, SendOp::Send, &[Sge { lkey: a.mr.lkey ^ 0x100, ..a.mr.sge(0, 16) }]);
    t.run();
    assert_eq!(t.sent(a), [(1, LocProtErr)]);
    assert_eq!((t.received(b), t.sent_by_lane()), (vec![], 0));
}

#[test]
fn the_sends_in_the_lane_of_a_peer_that_died_fail_after_the_retries() {
    let (mut t, a, b) = pair(QpOptions { timeout: 8, retry_cnt: 2, ..QpOptions::rc() });
    recvs(&mut t, b, 1..4);
    t.net.kill(b.device);
    for wr_id in 1..4 {
        send(&mut t, a, wr_id);
    }
    t.run();
    let expected = [(1, RetryExcErr), (2, WrFlushErr), (3, WrFlushErr)];
    assert_eq!((t.sent(a), t.received(b)), (expected.to_vec(), vec![]));
}

#[test]
fn a_reset_takes_the_lanes_away() {
    let options = QpOptions { segment: 4096, ..QpOptions::rc() };
    let (mut t, a, b) = pair(options);
    recvs(&mut t, b, 1..3);
    send(&mut t, a, 1);
    send(&mut t, a, 2);
    assert_eq!(t.sent_by_lane(), 2);
    for end in [a, b] {
        t.to_state(end.qp, QpState::Reset);
    }
    let next = QpOptions { sq_psn: Psn::new(0xff_fffe), ..options };
    t.connect((a.qp, &next), (b.qp, &next));
    recvs(&mut t, b, 3..13);
    for wr_id in 3..13 {
        send(&mut t, a, wr_id);
        rest(&mut t);
    }
    assert_eq!(t.sent(a), all(3..13, Success), "nothing of before the reset is executed");
    assert_eq!(t.received(b), all(3..13, Success));
    assert_eq!(t.sent_by_lane(), 2 + 9, "a new lane was opened");
}

#[test]
fn a_lane_whose_reader_was_reset_loses_its_sends_to_the_timeout() {
    let options = QpOptions { segment: 4096, timeout: 8, retry_cnt: 1, ..QpOptions::rc() };
    let (mut t, a, b) = pair(options);
    send(&mut t, a, 1);
    t.to_state(b.qp, QpState::Reset);
    t.run();
    assert_eq!(t.sent(a), [(1, RetryExcErr)]);
}

#[test]
fn a_send_queue_that_drains_completes_what_is_in_the_lane() {
    let (mut t, a, b) = pair(QpOptions::rc());
    recvs(&mut t, b, 1..4);
    send(&mut t, a, 1);
    send(&mut t, a, 2);
    assert_eq!(t.sent_by_lane(), 2);
    t.to_state(a.qp, QpState::Sqd);
    send(&mut t, a, 3);
    t.run();
    assert_eq!(t.sent(a), all(1..3, Success));
    t.to_state(a.qp, QpState::Rts);
    t.run();
    assert_eq!(t.sent(a), all(3..4, Success));
    assert_eq!(t.received(b), all(1..4, Success));
}

#[test]
fn a_reader_that_stands_still_for_a_second_gets_each_send_once() {
    let (mut t, a, b) = pair(QpOptions::rc());
    recvs(&mut t, b, 1..6);
    for wr_id in 1..6 {
        send(&mut t, a, wr_id);
    }
    t.freeze(Duration::from_secs(1));
    t.run();
    assert_eq!(t.sent(a), all(1..6, Success));
    assert_eq!(t.received(b), all(1..6, Success));
}

#[test]
fn a_program_sees_its_own_send_complete_before_the_reply() {
    let (mut t, a, b) = pair(QpOptions::rc());
    for i in 1..50 {
        recvs(&mut t, a, i..i + 1);
        recvs(&mut t, b, i..i + 1);
        send(&mut t, a, i);
        t.run_until(|t| t.completions(b.recv_cq) > 0);
        assert_eq!(t.received(b), [(i, Success)]);
        // A reply of either way.
        let len = if i % 2 == 0 { 16 } else { 60 };
        t.post(b, i, SendOp::Send, &[b.mr.sge(0, len)]);
        t.run_until(|t| t.completions(a.recv_cq) > 0);
        assert_eq!((t.sent(a), t.received(a)), (vec![(i, Success)], vec![(i, Success)]));
        rest(&mut t);
        assert_eq!(t.sent(b), [(i, Success)]);
    }
}

#[test]
fn psns_wrap_within_a_lane() {
    let (mut t, a, b) = pair(QpOptions { sq_psn: Psn::new(0xff_fff0), ..QpOptions::rc() });
    for i in 1..60 {
        recvs(&mut t, b, i..i + 1);
        send(&mut t, a, i);
        rest(&mut t);
    }
    assert_eq!(t.sent(a), all(1..60, Success));
    assert_eq!(t.received(b), all(1..60, Success));
    assert_eq!(t.sent_by_lane(), 59);
}

#[test]
fn a_solicited_send_notifies_and_others_do_not() {
    let (mut t, a, b) = pair(QpOptions::rc());
    recvs(&mut t, b, 1..3);
    t.arm(b.recv_cq, true);
    let before = t.notified(b.recv_cq);
    for (wr_id, flags) in
        [(1, SendFlags::SIGNALED), (2, SendFlags::SIGNALED | SendFlags::SOLICITED)]
    {
        t.try_post(a, wr_id, SendOp::Send, flags, &[a.mr.sge(0, 16)]).unwrap();
        rest(&mut t);
        assert_eq!(t.notified(b.recv_cq) - before, wr_id as usize - 1);
    }
    assert_eq!(t.sent_by_lane(), 2);
}

#[test]
fn unsignaled_sends_give_their_room_back_with_the_next_completion() {
    let (mut t, a, b) = pair(QpOptions::rc());
    for wr_id in 1..300 {
        recvs(&mut t, b, wr_id % 60..wr_id % 60 + 1);
        let flags = if wr_id % 30 == 0 { SendFlags::SIGNALED } else { SendFlags::empty() };
        t.try_post(a, wr_id, SendOp::Send, flags, &[a.mr.sge(0, 16)]).unwrap();
        rest(&mut t);
        let expected: &[_] = if wr_id % 30 == 0 { &[(wr_id, Success)] } else { &[] };
        assert_eq!(t.sent(a), expected);
    }
    assert_eq!(t.received(b).len(), 299);
}
