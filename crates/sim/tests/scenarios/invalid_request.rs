//! Requests that are not valid for the queue pair (IBA 9.7.4.1.2 to 9.7.4.1.6, 9.9.3.1).

use super::prelude::*;
use anyverbs_proto::wire::aeth::{NakCode, Syndrome};
use anyverbs_proto::wire::reth::Reth;

#[test]
fn a_message_that_does_not_fit_the_receive() {
    // In the first packet, in a later one, by one byte.
    for (room, len) in [(10, 11), (2000, 3000), (2999, 3000), (0, 1), (1024, 1025)] {
        let (mut t, a, b) = rc(QpOptions::rc());
        t.recv(b, 1, &[b.mr.sge(0, room)]);
        t.recv(b, 2, &[b.mr.sge(0, 4096)]);
        let behind = t.bytes(b.mr, room, 4096);
        t.post(a, 3, SendOp::Send, &[a.mr.sge(0, len)]);
        t.run();
        assert_eq!(t.sent(a), [(3, RemInvReqErr)], "{len} into {room}");
        let recvs = [vec![(1, LocLenErr)], flushed(b, &[2])].concat();
        assert_eq!(t.received(b), recvs, "{len} into {room}");
        assert_eq!(t.bytes(b.mr, room, 4096), behind);
        assert_eq!((t.state(a), t.state(b)), (QpState::Err, QpState::Err));
    }
}

#[test]
fn an_operation_that_the_queue_pair_does_not_allow() {
    for op in [2, 4, 5, 6] {
        let none = QpOptions { access: Access::empty(), ..QpOptions::rc() };
        let t = Pair::with(1, QpOptions::rc(), none);
        let (a, b) = t.ends();
        let mut t = t;
        let op = every_op(b)[op];
        t.post(a, 1, op, &[a.mr.sge(0, len_of(&op))]);
        t.run();
        let sent = t.sent(a);
        assert!(matches!(sent[..], [(1, RemInvReqErr | RemAccessErr)]), "{op:?}: {sent:?}");
        assert_eq!(t.state(b), QpState::Err);
    }
}

#[test]
fn an_atomic_on_an_address_that_is_not_aligned() {
    for offset in [1, 4, 7] {
        let (mut t, a, b) = rc(QpOptions::rc());
        let before = t.bytes(b.mr, 0, 16);
        t.post(a, 1, SendOp::FetchAdd { at: b.mr.remote(offset), add: 1 }, &[a.mr.sge(0, 8)]);
        t.run();
        assert_eq!(t.sent(a), [(1, RemInvReqErr)]);
        assert_eq!(t.bytes(b.mr, 0, 16), before);
    }
}

/// The answer of `b` to packets that a broken peer sends in the place of `a`.
fn answer_to(packets: &[(O, usize)]) -> Option<Syndrome> {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.recv(b, 1, &[b.mr.sge(0, 8192)]);
    let untouched = t.bytes(b.mr, 20_000, 100);
    for (i, (operation, len)) in packets.iter().enumerate() {
        let psn = QpOptions::rc().sq_psn.plus(i as u32);
        let mut headers = forged(&t, b, *operation, psn);
        headers.reth = Some(Reth { va: b.mr.addr, rkey: b.mr.rkey, len: 3000 });
        headers.imm = Some(0);
        headers.ieth = Some(0);
        t.inject(a.device, b.device, headers, &vec![1; *len]);
        t.run_for(Duration::from_micros(100));
    }
    assert_eq!(t.bytes(b.mr, 20_000, 100), untouched);
    let answers = t.net.trace.iter().filter(|r| r.from == b.device);
    let naks: Vec<_> = answers
        .filter_map(|r| r.headers.aeth)
        .map(|aeth| aeth.syndrome)
        .filter(|s| !matches!(s, Syndrome::Ack { .. }))
        .collect();
    assert!(naks.len() <= 1, "{naks:?}");
    assert_eq!(t.state(b) == QpState::Err, !naks.is_empty());
    naks.first().copied()
}

#[test]
fn packets_out_of_their_order_in_the_message() {
    let invalid = Some(Syndrome::Nak(NakCode::InvalidRequest));
    for sequence in [
        &[(O::SendMiddle, 1024)][..],
        &[(O::SendLast, 10)],
        &[(O::WriteMiddle, 1024)],
        &[(O::WriteLastImm, 10)],
        &[(O::SendFirst, 1024), (O::SendFirst, 1024)],
        &[(O::SendFirst, 1024), (O::SendOnly, 10)],
        &[(O::SendFirst, 1024), (O::WriteMiddle, 1024)],
        &[(O::SendFirst, 1024), (O::ReadRequest, 0)],
        &[(O::WriteFirst, 1024), (O::SendLast, 10)],
        &[(O::WriteFirst, 1024), (O::WriteOnly, 10)],
        &[(O::SendFirst, 1024), (O::SendLast, 10), (O::SendMiddle, 1024)],
    ] {
        assert_eq!(answer_to(sequence), invalid, "{sequence:?}");
    }
    let sound = [(O::SendFirst, 1024), (O::SendMiddle, 1024), (O::SendLast, 10)];
    assert_eq!(answer_to(&sound), None);
    let sound = [(O::WriteFirst, 1024), (O::WriteMiddle, 1024), (O::WriteLast, 952)];
    assert_eq!(answer_to(&sound), None);
}

#[test]
fn packets_of_the_wrong_length() {
    let invalid = Some(Syndrome::Nak(NakCode::InvalidRequest));
    for sequence in [
        &[(O::SendFirst, 1023)][..],
        &[(O::SendFirst, 1028)],
        &[(O::SendOnly, 1025)],
        &[(O::SendFirst, 1024), (O::SendMiddle, 512)],
        &[(O::SendFirst, 1024), (O::SendLast, 0)],
        &[(O::SendFirst, 1024), (O::SendLast, 1025)],
        // The length differs from the one that the RETH announced.
        &[(O::WriteOnly, 100)],
        &[(O::WriteFirst, 1024), (O::WriteLast, 1024)],
        &[(O::WriteFirst, 1024), (O::WriteMiddle, 1024), (O::WriteMiddle, 1024)],
        &[(O::WriteFirst, 1024), (O::WriteMiddle, 1024), (O::WriteLast, 953)],
    ] {
        assert_eq!(answer_to(sequence), invalid, "{sequence:?}");
    }
}

#[test]
fn an_atomic_write_that_announces_another_length() {
    let invalid = Some(Syndrome::Nak(NakCode::InvalidRequest));
    assert_eq!(answer_to(&[(O::AtomicWrite, 8)]), invalid);
}

#[test]
fn more_reads_than_agreed() {
    let b_options = QpOptions { max_dest_rd_atomic: 1, ..QpOptions::rc() };
    let mut t = Pair::with(1, QpOptions { max_rd_atomic: 8, ..QpOptions::rc() }, b_options);
    let (a, b) = t.ends();
    for i in 0..8 {
        t.post(a, i, SendOp::Read(b.mr.remote(0)), &[a.mr.sge(0, 50_000)]);
    }
    t.run();
    // The peer broke the agreement: it may be served or refused, but not left waiting.
    let sent = t.sent(a);
    assert_eq!(sent.len(), 8);
    assert!(sent.iter().all(|(_, s)| matches!(s, Success | RemInvReqErr | WrFlushErr)), "{sent:?}");
}
