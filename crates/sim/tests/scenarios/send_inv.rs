//! SEND with invalidate (IBA 9.4.1.1.3, 10.6.5).

use super::prelude::*;
use anyverbs_proto::wire::aeth::Syndrome;
use anyverbs_proto::wire::reth::Reth;

fn invalidatable(t: &mut Pair) -> anyverbs_sim::Mr {
    let b = t.b;
    let access = Access::REMOTE_WRITE | Access::INVALIDATABLE;
    t.register(b.device, b.pd, b.mr.addr, 4096, access)
}

fn naks(t: &Pair, by: End) -> usize {
    let by = t.net.trace.iter().filter(|r| r.from == by.device);
    by.filter_map(|r| r.headers.aeth)
        .filter(|a| !matches!(a.syndrome, Syndrome::Ack { .. }))
        .count()
}

#[test]
fn the_key_dies_with_the_message() {
    for len in [0, 100, 3000] {
        let (mut t, a, b) = rc(QpOptions::rc());
        let mr = invalidatable(&mut t);
        t.post(a, 1, SendOp::Write(mr.remote(0)), &[a.mr.sge(0, 10)]);
        t.recv(b, 2, &[b.mr.sge(50_000, 3000)]);
        t.post(a, 3, SendOp::SendInv(mr.rkey), &[a.mr.sge(0, len)]);
        t.run();
        assert_eq!(t.sent(a), [(1, Success), (3, Success)]);
        let wc = t.recvs(b)[0];
        assert_eq!((wc.wr_id, wc.status, wc.byte_len), (2, Success, len as u32));
        assert_eq!((wc.flags, wc.imm), (WcFlags::WITH_INV, mr.rkey));
        assert_eq!(t.bytes(b.mr, 50_000, len), t.bytes(a.mr, 0, len));
        t.post(a, 4, SendOp::Write(mr.remote(0)), &[a.mr.sge(0, 10)]);
        t.run();
        assert_eq!(t.sent(a), [(4, RemAccessErr)]);
    }
}

#[test]
fn a_lost_ack_does_not_invalidate_again() {
    let (mut t, a, b) = rc(QpOptions::rc());
    let mr = invalidatable(&mut t);
    t.net.once(is(O::Ack), Fate::Drop);
    t.recv(b, 1, &[b.mr.sge(50_000, 3000)]);
    t.post(a, 2, SendOp::SendInv(mr.rkey), &[a.mr.sge(0, 10)]);
    t.run();
    assert_eq!(t.sent(a), [(2, Success)]);
    assert_eq!(t.recvs(b).len(), 1);
}

#[test]
fn a_key_that_cannot_be_invalidated() {
    let keys: [fn(&mut Pair) -> u32; 4] = [
        |_| 0,
        |t| t.b.mr.rkey,
        |t| {
            let b = t.b;
            let pd = t.pd(b.device);
            t.register(b.device, pd, b.mr.addr, 4096, Access::INVALIDATABLE).rkey
        },
        |t| invalidatable(t).lkey,
    ];
    for key in keys {
        let (mut t, a, b) = rc(QpOptions::rc());
        let key = key(&mut t);
        t.recv(b, 1, &[b.mr.sge(0, 100)]);
        t.recv(b, 2, &[b.mr.sge(0, 100)]);
        t.post(a, 3, SendOp::Send, &[a.mr.sge(0, 10)]);
        t.post(a, 4, SendOp::SendInv(key), &[a.mr.sge(0, 10)]);
        t.run_for(Duration::from_millis(60));
        // Class J (IBA 9.9.6.3): earlier requests are acknowledged to the peer, and no more.
        assert_eq!(t.sent(a), [(3, Success)]);
        let received = t.received(b);
        assert!(matches!(received[..], [(1, Success), (2, LocAccessErr)]), "{received:?}");
        assert_eq!(t.state(b), QpState::Err);
        assert!(t.qp_events(b).contains(&QpEvent::AccessErr));
        t.run();
        assert_eq!(t.sent(a), [(4, RetryExcErr)]);
        assert_eq!(naks(&t, b), 0);
    }
}

#[test]
fn a_bad_key_to_invalidate_behind_pending_answers() {
    let (mut t, a, b) = rc(QpOptions::rc());
    let mr = t.mr(b.device, b.pd, 300_000, Access::VERBS);
    t.recv(b, 1, &[b.mr.sge(0, 100)]);
    let psn = QpOptions::rc().sq_psn;
    let mut read = forged(&t, b, O::ReadRequest, psn);
    read.reth = Some(Reth { va: mr.addr, rkey: mr.rkey, len: mr.len as u32 });
    t.inject(a.device, b.device, read, &[]);
    let mut send = forged(&t, b, O::SendOnlyInv, psn.plus(300_000_u32.div_ceil(1024)));
    send.ieth = Some(0);
    t.inject(a.device, b.device, send, &[1; 8]);
    t.run();
    // As if it had not come.
    assert_eq!((t.state(b), t.received(b)), (QpState::Rts, vec![]));
    t.inject(a.device, b.device, send, &[1; 8]);
    t.run();
    assert_eq!((t.state(b), t.received(b)), (QpState::Err, vec![(1, LocAccessErr)]));
    assert_eq!(naks(&t, b), 0);
}

#[test]
fn earlier_requests_are_acknowledged_unasked() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.recv(b, 1, &[b.mr.sge(0, 100)]);
    let psn = QpOptions::rc().sq_psn;
    let mut write = forged(&t, b, O::WriteOnly, psn);
    write.reth = Some(Reth { va: b.mr.addr, rkey: b.mr.rkey, len: 0 });
    t.inject(a.device, b.device, write, &[]);
    let mut send = forged(&t, b, O::SendOnlyInv, psn.plus(1));
    send.ieth = Some(0);
    t.inject(a.device, b.device, send, &[]);
    t.run();
    assert_eq!(t.state(b), QpState::Err);
    let answers: Vec<_> = t.net.trace.iter().filter(|r| r.from == b.device).collect();
    let [ack] = &answers[..] else { panic!("{answers:?}") };
    assert_eq!((ack.headers.bth.opcode.operation, ack.headers.bth.psn), (O::Ack, psn));
    assert_eq!(naks(&t, b), 0);
}
