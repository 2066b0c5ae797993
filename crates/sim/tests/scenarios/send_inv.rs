//! SEND with invalidate (IBA 9.4.1.1.3, 10.6.5).

use super::prelude::*;

fn invalidatable(t: &mut Pair) -> anyverbs_sim::Mr {
    let b = t.b;
    let access = Access::REMOTE_WRITE | Access::INVALIDATABLE;
    t.register(b.device, b.pd, b.mr.addr, 4096, access)
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
        t.post(a, 2, SendOp::SendInv(key), &[a.mr.sge(0, 10)]);
        t.run();
        assert_eq!(t.sent(a), [(2, RemAccessErr)]);
        let received = t.received(b);
        assert!(matches!(received[..], [(1, status)] if status != Success), "{received:?}");
        assert_eq!(t.state(b), QpState::Err);
    }
}
