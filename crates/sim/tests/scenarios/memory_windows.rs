//! Memory windows and local invalidation: work requests that send nothing (IBA 10.6.7, 11.4.1.1).

use super::prelude::*;
use anyverbs_proto::mr::{Bind, WindowType};

/// A connection, and the bind of a window of this type to the second kilobyte of a region of `b`.
fn windowed(options: QpOptions, kind: WindowType) -> (Pair, End, End, Bind) {
    let mut t = Pair::new(1, options);
    let (a, b) = t.ends();
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    let mr = t.register(b.device, b.pd, b.mr.addr, 4096, access);
    let window = t.mrs(b.device).alloc_window(b.pd, kind).unwrap();
    let bind = Bind {
        window,
        rkey: window.wrapping_add(1),
        lkey: mr.lkey,
        access: Access::REMOTE_WRITE | Access::REMOTE_READ,
        addr: mr.addr + 1024,
        len: 1024,
    };
    (t, a, b, bind)
}

fn of_type_2(options: QpOptions) -> (Pair, End, End, Bind) {
    windowed(options, WindowType::Type2)
}

/// The address for the peer after the bind.
fn bound(bind: &Bind) -> RemoteAddr {
    RemoteAddr { va: bind.addr, rkey: bind.window & !0xff | bind.rkey & 0xff }
}

#[test]
fn a_bind_opens_and_an_invalidation_closes() {
    for kind in [WindowType::Type1, WindowType::Type2] {
        let (mut t, a, b, bind) = windowed(QpOptions::rc(), kind);
        t.post(b, 1, SendOp::BindMw(bind), &[]);
        t.post(a, 2, SendOp::Write(bound(&bind)), &[a.mr.sge(0, 1024)]);
        t.run();
        let wc = t.sends(b)[0];
        assert_eq!((wc.wr_id, wc.status, wc.opcode), (1, Success, WcOpcode::BindMw));
        assert_eq!(t.sent(a), [(2, Success)]);
        assert_eq!(t.bytes(b.mr, 1024, 1024), t.bytes(a.mr, 0, 1024));
        if kind == WindowType::Type2 {
            t.post(b, 3, SendOp::LocalInv(bound(&bind).rkey), &[]);
            t.run();
            assert_eq!(t.sends(b)[0].opcode, WcOpcode::LocalInv);
        } else {
            let unbind = Bind { len: 0, rkey: bind.rkey + 1, ..bind };
            t.post(b, 3, SendOp::BindMw(unbind), &[]);
            t.run();
            assert_eq!(t.sent(b), [(3, Success)]);
        }
        t.post(a, 4, SendOp::Write(bound(&bind)), &[a.mr.sge(0, 8)]);
        t.run();
        assert_eq!(t.sent(a), [(4, RemAccessErr)]);
    }
}

#[test]
fn beyond_its_ends_a_window_is_closed() {
    for (offset, len) in [(0u64, 1025), (u64::MAX, 1), (1024, 1)] {
        let (mut t, a, b, bind) = of_type_2(QpOptions::rc());
        t.post(b, 1, SendOp::BindMw(bind), &[]);
        let at = bound(&bind);
        let at = RemoteAddr { va: at.va.wrapping_add(offset), ..at };
        t.post(a, 2, SendOp::Write(at), &[a.mr.sge(0, len)]);
        t.run();
        assert_eq!(t.sent(a), [(2, RemAccessErr)]);
    }
}

/// A bind between two messages is done after the first was sent and before the second; it completes in its turn.
#[test]
fn local_requests_complete_in_order_whatever_is_lost() {
    for lost in 0..12 {
        let (mut t, a, b, bind) = of_type_2(QpOptions::rc());
        t.net.once(nth(lost, |_| true), Fate::Drop);
        let other = t.mrs(b.device).alloc_window(b.pd, WindowType::Type2).unwrap();
        let other = Bind { window: other, rkey: other, ..bind };
        for i in 0..3 {
            t.recv(a, 100 + i, &[a.mr.sge(0, 4096)]);
        }
        t.post(b, 1, SendOp::Send, &[b.mr.sge(0, 3000)]);
        t.post(b, 2, SendOp::BindMw(bind), &[]);
        t.post(b, 3, SendOp::Send, &[b.mr.sge(0, 100)]);
        t.post(b, 4, SendOp::Read(a.mr.remote(0)), &[b.mr.sge(50_000, 3000)]);
        t.post(b, 5, SendOp::BindMw(other), &[]);
        t.post(b, 6, SendOp::LocalInv(bound(&bind).rkey), &[]);
        t.post(b, 7, SendOp::Send, &[b.mr.sge(0, 100)]);
        t.run();
        let all: Vec<_> = (1..8).map(|i| (i, Success)).collect();
        assert_eq!(t.sent(b), all, "lost {lost}");
        assert_eq!(t.recvs(a).len(), 3);
        t.post(a, 8, SendOp::Write(bound(&other)), &[a.mr.sge(0, 8)]);
        t.run();
        assert_eq!(t.sent(a), [(8, Success)]);
    }
}

#[test]
fn a_final_local_request_does_not_wait_for_the_timer() {
    let (mut t, a, b, bind) = of_type_2(QpOptions::rc());
    t.recv(a, 1, &[a.mr.sge(0, 4096)]);
    t.post(b, 1, SendOp::Send, &[b.mr.sge(0, 3000)]);
    t.post(b, 2, SendOp::BindMw(bind), &[]);
    let start = t.now();
    t.run();
    assert_eq!(t.sent(b), [(1, Success), (2, Success)]);
    assert!(t.now().since(start) < Duration::from_millis(1));
    assert_eq!(t.net.trace.count(b.device, O::SendFirst), 1);
}

#[test]
fn an_impossible_request_ends_the_queue_pair_in_turn() {
    type Spoil = fn(Bind) -> SendOp;
    let cases: [(Spoil, WcStatus); 6] = [
        (|b| SendOp::BindMw(Bind { len: 4096, ..b }), MwBindErr),
        (|b| SendOp::BindMw(Bind { lkey: 0, ..b }), MwBindErr),
        (|b| SendOp::BindMw(Bind { window: 0, ..b }), MwBindErr),
        (|b| SendOp::BindMw(Bind { access: Access::FLUSH_GLOBAL, ..b }), MwBindErr),
        (|b| SendOp::LocalInv(b.window), MwBindErr),
        (|_| SendOp::LocalInv(0), MwBindErr),
    ];
    for (spoil, status) in cases {
        let (mut t, a, b, bind) = of_type_2(QpOptions::rc());
        t.recv(a, 1, &[a.mr.sge(0, 4096)]);
        t.post(b, 1, SendOp::Send, &[b.mr.sge(0, 3000)]);
        t.post(b, 2, spoil(bind), &[]);
        t.post(b, 3, SendOp::BindMw(bind), &[]);
        t.post(b, 4, SendOp::Send, &[b.mr.sge(0, 10)]);
        t.run();
        assert_eq!(t.sent(b), [(1, Success), (2, status), (3, WrFlushErr), (4, WrFlushErr)]);
        assert_eq!(t.state(b), QpState::Err);
    }
}

#[test]
fn a_fenced_invalidation_waits_for_the_read_into_it() {
    let (mut t, a, b, bind) = of_type_2(QpOptions::rc());
    t.post(b, 1, SendOp::BindMw(bind), &[]);
    t.post(b, 2, SendOp::Read(a.mr.remote(0)), &[b.mr.sge(0, 3000)]);
    let fenced = SendFlags::FENCE | SendFlags::SIGNALED;
    t.try_post(b, 3, SendOp::LocalInv(bound(&bind).rkey), fenced, &[]).unwrap();
    // Not yet: the READ is on its way.
    assert!(t.mrs(b.device).invalidate(bound(&bind).rkey, b.pd + 1, None).is_err());
    let qpn = t.get(b.qp).qpn();
    let at = bound(&bind);
    assert!(
        t.mrs(b.device).remote(at.rkey, (b.pd, qpn.get()), at.va, 8, Access::REMOTE_READ).is_ok()
    );
    t.run();
    assert_eq!(t.sent(b), [(1, Success), (2, Success), (3, Success)]);
    assert!(
        t.mrs(b.device).remote(at.rkey, (b.pd, qpn.get()), at.va, 8, Access::REMOTE_READ).is_err()
    );
}

#[test]
fn a_peer_invalidates_a_window_of_type_2_alone() {
    for kind in [WindowType::Type1, WindowType::Type2] {
        let (mut t, a, b, bind) = windowed(QpOptions::rc(), kind);
        t.post(b, 1, SendOp::BindMw(bind), &[]);
        t.recv(b, 2, &[b.mr.sge(50_000, 100)]);
        t.post(a, 3, SendOp::SendInv(bound(&bind).rkey), &[a.mr.sge(0, 10)]);
        t.run();
        if kind == WindowType::Type1 {
            assert_eq!(t.sent(a), [(3, RetryExcErr)]);
            assert_eq!(t.state(b), QpState::Err);
            continue;
        }
        let wc = t.recvs(b)[0];
        assert_eq!((wc.flags, wc.imm), (WcFlags::WITH_INV, bound(&bind).rkey));
        // It can be bound again, with another key.
        let again = Bind { rkey: bind.rkey + 1, ..bind };
        t.post(b, 4, SendOp::BindMw(again), &[]);
        t.post(a, 5, SendOp::Read(bound(&again)), &[a.mr.sge(0, 1024)]);
        t.run();
        assert_eq!(t.sent(a), [(3, Success), (5, Success)]);
    }
}

#[test]
fn another_connection_cannot_use_a_window_of_type_2() {
    let (mut t, a, b, bind) = of_type_2(QpOptions::rc());
    let options = QpOptions::rc();
    let second = t.end(a.device, &options);
    let theirs = t.end(b.device, &options);
    let theirs_in_pd = t.qp(b.pd, theirs.send_cq, theirs.recv_cq, None, &options);
    t.connect((second.qp, &options), (theirs_in_pd, &options));
    t.post(b, 1, SendOp::BindMw(bind), &[]);
    let wr = SendWr {
        wr_id: 2,
        op: SendOp::Write(bound(&bind)),
        flags: SendFlags::SIGNALED,
        sges: &[second.mr.sge(0, 8)],
        ud: None,
        xrc_srqn: 0,
    };
    t.post_send(second.qp, &wr).unwrap();
    t.run();
    assert_eq!(t.sent(second), [(2, RemAccessErr)]);
    t.post(a, 3, SendOp::Write(bound(&bind)), &[a.mr.sge(0, 8)]);
    t.run();
    assert_eq!(t.sent(a), [(3, Success)]);
}

#[test]
fn another_queue_pair_cannot_invalidate_a_window_of_type_2() {
    let (mut t, a, b, bind) = of_type_2(QpOptions::rc());
    let options = QpOptions::rc();
    let second = t.end(a.device, &options);
    let other = t.end(b.device, &options);
    let in_pd = End { qp: t.qp(b.pd, other.send_cq, other.recv_cq, None, &options), ..other };
    t.connect((second.qp, &options), (in_pd.qp, &options));
    t.post(b, 1, SendOp::BindMw(bind), &[]);
    let wr = SendWr {
        wr_id: 2,
        op: SendOp::LocalInv(bound(&bind).rkey),
        flags: SendFlags::SIGNALED,
        sges: &[],
        ud: None,
        xrc_srqn: 0,
    };
    t.post_send(in_pd.qp, &wr).unwrap();
    t.run();
    assert_eq!(t.sent(in_pd), [(2, MwBindErr)]);
    t.post(a, 3, SendOp::Write(bound(&bind)), &[a.mr.sge(0, 8)]);
    t.run();
    assert_eq!(t.sent(a), [(3, Success)]);
    t.post(b, 4, SendOp::LocalInv(bound(&bind).rkey), &[]);
    t.run();
    assert_eq!(t.sent(b), [(1, Success), (4, Success)]);
}

#[test]
fn unreliable_connections_have_windows_too() {
    let (mut t, a, b, bind) = of_type_2(QpOptions::uc());
    t.post(b, 1, SendOp::BindMw(bind), &[]);
    t.post(a, 2, SendOp::Write(bound(&bind)), &[a.mr.sge(0, 1024)]);
    t.run();
    assert_eq!((t.sent(b), t.sent(a)), (vec![(1, Success)], vec![(2, Success)]));
    assert_eq!(t.bytes(b.mr, 1024, 1024), t.bytes(a.mr, 0, 1024));
    t.post(b, 3, SendOp::LocalInv(0), &[]);
    t.run();
    assert_eq!((t.sent(b), t.state(b)), (vec![(3, MwBindErr)], QpState::Sqe));
}

#[test]
fn datagrams_have_none() {
    for op in
        [SendOp::LocalInv(1), SendOp::AtomicWrite { at: RemoteAddr { va: 0, rkey: 0 }, data: None }]
    {
        let mut t = Pair::new(1, QpOptions::ud());
        let (a, _) = t.ends();
        t.post(a, 1, op, &[]);
        t.run();
        assert_eq!(t.sent(a), [(1, LocQpOpErr)]);
    }
}

#[test]
fn the_initiator_of_an_xrc_binds_for_other_targets() {
    let (mut t, a, _) = super::over_xrc::prelude::rc(QpOptions::rc());
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    let mr = t.register(a.device, a.pd, a.mr.addr, 4096, access);
    let window = t.mrs(a.device).alloc_window(a.pd, WindowType::Type1).unwrap();
    let (addr, access) = (mr.addr, Access::REMOTE_READ);
    let bind = Bind { window, rkey: window, lkey: mr.lkey, access, addr, len: 16 };
    t.post(a, 1, SendOp::BindMw(bind), &[]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    let found = t.mrs(a.device).remote(window, (a.pd, t.get(a.qp).qpn().get()), addr, 16, access);
    assert!(found.is_ok());
}
