//! A single missing packet is repeated alone, if the peer keeps those that came after it.

use super::prelude::*;

const LEN: usize = 30_000;
const PACKETS: u64 = 30;

/// Two ends with an out-of-order buffer of this size.
fn keeping(out_of_order_room: usize) -> (Pair, End, End) {
    rc(QpOptions { out_of_order_room, ..QpOptions::rc() })
}

/// Packets that the end has sent, those that it has sent again among them.
fn sent_by(t: &Pair, end: End) -> usize {
    t.net.trace.iter().filter(|r| r.from == end.device).count()
}

/// The number of the first packet of the end's next message.
fn next_psn(t: &Pair, end: End) -> Psn {
    let new = sent_by(t, end) as u64 - t.counter(end.device, Counter::Retransmitted);
    QpOptions::rc().sq_psn.plus(new as u32)
}

/// Loses these packets of a message once, counted from its first, and checks that it arrives all the same. Returns the
/// number of retransmissions.
fn lose(t: &mut Pair, lost: &[u32]) -> u64 {
    let (a, b) = t.ends();
    let before = t.counter(a.device, Counter::Retransmitted);
    let first = next_psn(t, a);
    for n in lost {
        t.net.once(psn(first.plus(*n)), Fate::Drop);
    }
    t.fill(a.mr, first.get().into());
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, LEN)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)], "{lost:?}");
    assert_eq!(t.bytes(b.mr, 0, LEN), t.bytes(a.mr, 0, LEN), "{lost:?}");
    assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 0, "{lost:?}");
    t.counter(a.device, Counter::Retransmitted) - before
}

#[test]
fn one_for_each_that_is_missing() {
    let (mut t, a, b) = keeping(1 << 20);
    for lost in [&[0][..], &[1], &[28], &[3, 7], &[0, 2, 4, 6], &[1, 27]] {
        assert_eq!(lose(&mut t, lost), lost.len() as u64, "{lost:?}");
    }
    assert_eq!(t.counter(a.device, Counter::PacketSeqErr), 11);
    assert_eq!(t.counter(b.device, Counter::DuplicateRequest), 0);
}

#[test]
fn several_losses_in_a_row_make_it_go_back() {
    let (mut t, a, b) = keeping(1 << 20);
    // The first by itself; that the second is missing, too, the ACK of the first shows.
    assert_eq!(lose(&mut t, &[3, 4, 5]), PACKETS - 3);
    assert_eq!(lose(&mut t, &[9]), 1);
    // The more often that goes wrong the longer all is sent again at once.
    let mut again = |lost: &[u32]| lose(&mut t, lost) > 1;
    assert!(again(&[3, 4, 5]) && again(&[3, 4, 5]));
    assert_eq!([(); 5].map(|()| again(&[9])), [true, true, true, false, false]);
    assert_eq!(t.counter(a.device, Counter::PacketSeqErr), 9);
    assert!(t.counter(b.device, Counter::DuplicateRequest) > 0);
}

#[test]
fn a_peer_that_keeps_nothing_is_found_out() {
    let (mut t, a, _) = keeping(0);
    // No packet follows that would make its answer more than the ACK of the one packet.
    assert_eq!(lose(&mut t, &[9]), PACKETS - 9);
    // However long it goes on.
    for _ in 0..200 {
        assert!(lose(&mut t, &[9]) > 1);
    }
    // An attempt costs a NAK more at most, and there are few.
    assert!(t.counter(a.device, Counter::PacketSeqErr) < 201 + 201 / 16);
}

#[test]
fn an_xrc_target_keeps_nothing_and_is_not_tried() {
    let out_of_order_room = 1 << 20;
    let initiator = QpOptions { out_of_order_room, ..QpOptions::xrc_send() };
    let mut t = Pair::with(1, initiator, QpOptions { out_of_order_room, ..QpOptions::xrc_recv() });
    assert_eq!(lose(&mut t, &[9]), PACKETS - 9);
    assert_eq!(t.counter(t.b.device, Counter::DuplicateRequest), 0);
    let again = t.net.trace.iter().filter(|r| r.from == t.a.device).skip(PACKETS as usize);
    let mut times: Vec<_> = again.map(|r| r.at).collect();
    times.dedup();
    assert_eq!(times.len(), 1, "all at once");
}

#[test]
fn single_losses_leave_the_window_open() {
    let window = 30_000;
    let (mut t, a, b) = rc(QpOptions { out_of_order_room: 1 << 20, window, ..QpOptions::rc() });
    let mut at_once = |lost: &[u32]| {
        let before = sent_by(&t, a);
        t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, LEN)]);
        let sent = sent_by(&t, a) - before;
        t.run();
        assert_eq!(t.sent(a), [(1, Success)]);
        for _ in 0..20 {
            lose(&mut t, lost);
        }
        sent
    };
    let whole = at_once(&[9]);
    assert!(at_once(&[9, 10, 11]) >= whole - 3);
    assert!(at_once(&[]) < whole - 6);
}

#[test]
fn packets_without_room_are_sent_again() {
    // Some ten packets.
    let (mut t, _, b) = keeping(12_000);
    let again = lose(&mut t, &[9]);
    assert!((PACKETS - 9 - 11..PACKETS - 9).contains(&again), "{again}");
    assert_eq!(t.counter(b.device, Counter::DuplicateRequest), 0);
}

#[test]
fn an_overtaken_packet_is_no_loss() {
    let (mut t, a, b) = keeping(1 << 20);
    t.net.once(nth(7, is(O::WriteMiddle)), Fate::Delay(Duration::from_micros(8)));
    assert!(lose(&mut t, &[]) <= 1);
    assert!(t.counter(b.device, Counter::OutOfSequence) > 0);
    assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 0);
}

#[test]
fn messages_are_executed_in_order_and_once() {
    let (mut t, a, b) = keeping(1 << 20);
    let first = QpOptions::rc().sq_psn;
    for lost in [2, 5] {
        t.net.once(psn(first.plus(lost)), Fate::Drop);
    }
    for i in 0..8 {
        t.recv(b, 100 + i, &[b.mr.sge(64 * i as usize, 64)]);
    }
    t.write(b.mr, 1024, &5u64.to_ne_bytes());
    for i in 0..8 {
        t.post(a, i, SendOp::Send, &[a.mr.sge(64 * i as usize, 64)]);
    }
    t.post(a, 8, SendOp::FetchAdd { at: b.mr.remote(1024), add: 3 }, &[a.mr.sge(2048, 8)]);
    t.run();
    let sent: Vec<_> = (0..9).map(|i| (i, Success)).collect();
    assert_eq!(t.sent(a), sent);
    let recvs: Vec<_> = t.recvs(b).iter().map(|wc| wc.wr_id).collect();
    assert_eq!(recvs, (100..108).collect::<Vec<_>>());
    assert_eq!(t.bytes(b.mr, 0, 512), t.bytes(a.mr, 0, 512));
    assert_eq!((t.word(a.mr, 2048), t.word(b.mr, 1024)), (5, 8));
    // A request with an answer of its own forbids selective retransmit.
    assert_eq!(t.counter(a.device, Counter::Retransmitted), 7);
}

#[test]
fn a_repaired_packet_without_a_receive_comes_again() {
    let (mut t, a, b) = keeping(1 << 20);
    t.net.once(psn(QpOptions::rc().sq_psn.plus(1)), Fate::Drop);
    for i in 0..4 {
        t.recv(b, 100 + i, &[b.mr.sge(64 * i as usize, 64)]);
    }
    for i in 0..6 {
        t.post(a, i, SendOp::Send, &[a.mr.sge(64 * i as usize, 64)]);
    }
    t.run_for(Duration::from_micros(500));
    assert_eq!(t.recvs(b).len(), 4);
    assert_eq!(t.sent(a), (0..4).map(|i| (i, Success)).collect::<Vec<_>>());
    assert_eq!(t.counter(b.device, Counter::RnrNakSent), 1);
    for i in 4..6 {
        t.recv(b, 100 + i, &[b.mr.sge(64 * i as usize, 64)]);
    }
    t.run();
    assert_eq!(t.sent(a), [(4, Success), (5, Success)]);
    assert_eq!(t.bytes(b.mr, 0, 384), t.bytes(a.mr, 0, 384));
}

#[test]
fn a_refused_repaired_packet_ends_the_connection() {
    let (mut t, a, b) = keeping(1 << 20);
    t.net.once(psn(QpOptions::rc().sq_psn.plus(1)), Fate::Drop);
    for i in 0..6 {
        let len = if i == 3 { 8 } else { 64 };
        t.recv(b, 100 + i, &[b.mr.sge(64 * i as usize, len)]);
        t.post(a, i, SendOp::Send, &[a.mr.sge(64 * i as usize, 64)]);
    }
    t.run();
    let after = [(3, RemInvReqErr), (4, WrFlushErr), (5, WrFlushErr)];
    assert_eq!(t.sent(a), [&[0, 1, 2].map(|i| (i, Success))[..], &after].concat());
    let recvs: Vec<_> = t.recvs(b).iter().map(|wc| wc.status).collect();
    assert_eq!(recvs, [Success, Success, Success, LocLenErr, WrFlushErr, WrFlushErr]);
}

/// 40 SENDs of which two are lost, and behind them a request whose answer rules out selective retransmit. Returns the
/// number of NAKs, and of retransmissions.
fn go_back(t: &mut Pair) -> (u64, u64) {
    let (a, b) = t.ends();
    let before = [Counter::PacketSeqErr, Counter::Retransmitted].map(|c| t.counter(a.device, c));
    let first = next_psn(t, a);
    for lost in [5, 15] {
        t.net.once(psn(first.plus(lost)), Fate::Drop);
    }
    for i in 0..40 {
        t.recv(b, 100 + i, &[b.mr.sge(64 * i as usize, 64)]);
        t.post(a, i, SendOp::Send, &[a.mr.sge(64 * i as usize, 64)]);
    }
    t.post(a, 40, SendOp::FetchAdd { at: b.mr.remote(4096), add: 3 }, &[a.mr.sge(4096, 8)]);
    t.run();
    assert_eq!(t.sent(a), (0..41).map(|i| (i, Success)).collect::<Vec<_>>());
    assert_eq!(t.recvs(b).len(), 40);
    assert_eq!(t.bytes(b.mr, 0, 2560), t.bytes(a.mr, 0, 2560));
    let after = [Counter::PacketSeqErr, Counter::Retransmitted].map(|c| t.counter(a.device, c));
    (after[0] - before[0], after[1] - before[1])
}

#[test]
fn a_requester_that_goes_back_is_not_asked_again() {
    let (mut t, ..) = keeping(1 << 20);
    assert_eq!(go_back(&mut t), (1, 41 - 5));
}

#[test]
fn no_repair_where_answers_come_one_by_one() {
    for ack_delay in [40, 0].map(Duration::from_micros) {
        let (mut t, ..) = keeping(1 << 20);
        t.ack_delay = ack_delay;
        let rate = Rate { bytes_per_sec: 10_000_000, queue: 100, full: Full::Drop };
        t.net.default_link = Link { rate: Some(rate), ..Link::default() };
        let first = go_back(&mut t);
        // Duplicates show it. They come too late where ACKs leave at once; then it is learnt for the next time.
        assert!(first == (1, 41 - 5) || ack_delay.is_zero(), "{first:?}");
        assert_eq!(go_back(&mut t).0, 1);
    }
}

#[test]
fn a_packet_lost_twice_comes_after_a_silence() {
    for out_of_order_room in [0, 1 << 20] {
        let probe_after = Some(Duration::from_millis(8));
        let (mut t, a, b) = rc(QpOptions { out_of_order_room, probe_after, ..QpOptions::rc() });
        let (lost, mut times) = (QpOptions::rc().sq_psn.plus(5), 0);
        t.net.rule(move |p| {
            times += u32::from(p.headers.bth.psn == lost && p.from == a.device);
            let again = p.headers.bth.psn == lost && p.from == a.device && times <= 2;
            if again { Fate::Drop } else { Fate::Pass }
        });
        for i in 0..20 {
            t.post(a, i, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 64)]);
        }
        t.run_for(Duration::from_millis(2));
        assert_eq!(t.sent(a), (0..20).map(|i| (i, Success)).collect::<Vec<_>>());
        assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 0);
        // The second one, and all behind the first.
        assert_eq!(t.counter(a.device, Counter::Retransmitted), 1 + 15);
        t.run();
    }
}

#[test]
fn a_number_far_ahead_is_not_kept() {
    for ahead in [9, 1000, 8] {
        let (mut t, a, b) = keeping(1 << 20);
        let forged = forged(&t, b, O::SendOnly, QpOptions::rc().sq_psn.plus(ahead));
        t.inject(a.device, b.device, forged, b"no packet of the peer's");
        t.run();
        t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, LEN)]);
        t.run();
        assert_eq!(t.counter(a.device, Counter::DropStaleAck), 1, "a NAK");
        // Within a message it is refused.
        let kept = ahead == 8;
        assert_eq!(t.sent(a), [(1, if kept { RemInvReqErr } else { Success })], "{ahead}");
        assert_eq!(t.counter(a.device, Counter::PacketSeqErr), 0);
    }
}

#[test]
fn a_gap_too_wide_to_keep_what_follows_is_told() {
    let (mut t, a, _) = keeping(1 << 20);
    let lost: Vec<_> = [5].into_iter().chain(10..25).collect();
    // Selective retransmit of one, and of one more before the rest.
    assert_eq!(lose(&mut t, &lost), 1 + PACKETS - 10);
    assert_eq!(t.counter(a.device, Counter::PacketSeqErr), 2);
}

#[test]
fn kept_packets_go_with_the_connection() {
    let options = QpOptions { out_of_order_room: 1 << 20, ..QpOptions::rc() };
    let (mut t, a, b) = rc(options);
    t.net.once(psn(options.sq_psn), Fate::Drop);
    for i in 0..4 {
        t.recv(b, 100 + i, &[b.mr.sge(64 * i as usize, 64)]);
        t.post(a, i, SendOp::Send, &[a.mr.sge(64 * i as usize, 64)]);
    }
    t.net.rule(move |p| if p.from == b.device { Fate::Drop } else { Fate::Pass });
    t.run_for(Duration::from_micros(100));
    assert_eq!(t.counter(b.device, Counter::OutOfSequence), 3);
    t.net.clear_rules();
    // The next connection has the same numbers.
    for end in [a, b] {
        let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
        t.modify(end.qp, &reset, QpAttrMask::STATE).unwrap();
        t.recvs(end);
        t.sent(end);
    }
    t.connect((a.qp, &options), (b.qp, &options));
    for i in 0..4 {
        t.recv(b, 200 + i, &[b.mr.sge(64 * i as usize, 64)]);
    }
    t.fill(a.mr, 99);
    for i in 0..4 {
        t.post(a, i, SendOp::Send, &[a.mr.sge(64 * i as usize, 64)]);
        t.run();
    }
    assert_eq!(t.recvs(b).iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [200, 201, 202, 203]);
    assert_eq!(t.bytes(b.mr, 0, 256), t.bytes(a.mr, 0, 256));
}
