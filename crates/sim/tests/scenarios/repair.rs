//! Where one packet is missing it alone is sent again, if the peer keeps those that came after it.

use super::prelude::*;

const LEN: usize = 30_000;
const PACKETS: u64 = 30;

/// Two ends that keep requests which come before their turn, up to so many bytes.
fn keeping(early_room: usize) -> (Pair, End, End) {
    rc(QpOptions { early_room, ..QpOptions::rc() })
}

/// Loses these packets of a message, counted from its first, once, and looks whether it comes all the same. How many packets
/// were sent again.
fn lose(t: &mut Pair, lost: &[u32]) -> u64 {
    let (a, b) = t.ends();
    let before = t.counter(a.device, Counter::Retransmitted);
    let trace = t.net.trace.iter().filter(|r| r.from == a.device).count() as u64;
    let first = QpOptions::rc().sq_psn.plus((trace - before) as u32);
    for n in lost {
        t.net.once(psn(first.plus(*n)), Fate::Drop);
    }
    t.fill(a.mr, trace);
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
fn several_in_a_row_are_sent_again_with_all_behind_them() {
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
    // Nothing follows that would make it say more than the ACK of the one packet.
    assert_eq!(lose(&mut t, &[9]), PACKETS - 9);
    assert_eq!(t.counter(a.device, Counter::PacketSeqErr), 1);
    assert_eq!(lose(&mut t, &[9]), PACKETS - 9);
    assert_eq!(t.counter(a.device, Counter::PacketSeqErr), 2);
}

#[test]
fn what_finds_no_room_is_sent_again() {
    // Some ten packets.
    let (mut t, _, b) = keeping(12_000);
    let again = lose(&mut t, &[9]);
    assert!((PACKETS - 9 - 11..PACKETS - 9).contains(&again), "{again}");
    assert_eq!(t.counter(b.device, Counter::DuplicateRequest), 0);
}

#[test]
fn what_was_overtaken_is_no_loss() {
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
    // The answer of its own that one has forbids the short way.
    assert_eq!(t.counter(a.device, Counter::Retransmitted), 7);
}

#[test]
fn one_that_finds_no_receive_comes_again() {
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
fn a_number_far_ahead_is_not_kept() {
    let (mut t, a, b) = keeping(1 << 20);
    let far = forged(&t, b, O::SendOnly, QpOptions::rc().sq_psn.plus(1000));
    t.inject(a.device, b.device, far, b"no packet of the peer's");
    t.run();
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, LEN)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    // The number is asked for when it comes, and not after each packet before it.
    assert_eq!(t.counter(a.device, Counter::DropStaleAck), 1);
    assert_eq!(t.counter(a.device, Counter::PacketSeqErr), 0);
}

#[test]
fn what_is_kept_goes_with_the_queue_pair() {
    let (mut t, a, b) = keeping(1 << 20);
    t.net.once(psn(QpOptions::rc().sq_psn), Fate::Drop);
    for i in 0..4 {
        t.recv(b, 100 + i, &[b.mr.sge(64 * i as usize, 64)]);
        t.post(a, i, SendOp::Send, &[a.mr.sge(64 * i as usize, 64)]);
    }
    t.net.rule(move |p| if p.from == b.device { Fate::Drop } else { Fate::Pass });
    t.run_for(Duration::from_micros(100));
    assert_eq!(t.counter(b.device, Counter::OutOfSequence), 3);
    let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
    t.modify(b.qp, &error, QpAttrMask::STATE).unwrap();
    assert_eq!(t.recvs(b).iter().filter(|wc| wc.status == WrFlushErr).count(), 4);
}
