//! Work requests that name memory wrongly on their own side (IBA 10.7.3, 9.9.2.1).

use super::prelude::*;

fn bad_sges(t: &mut Pair) -> Vec<(&'static str, Sge)> {
    let a = t.a;
    let other = t.pd(a.device);
    let foreign = t.register(a.device, other, a.mr.addr, 4096, Access::VERBS);
    let dead = t.register(a.device, a.pd, a.mr.addr, 4096, Access::VERBS);
    t.deregister(dead);
    let good = a.mr.sge(0, 100);
    vec![
        ("no such key", Sge { lkey: good.lkey ^ 1, ..good }),
        ("the remote key", Sge { lkey: a.mr.rkey, ..good }),
        ("key 0", Sge { lkey: 0, ..good }),
        ("another domain's", foreign.sge(0, 100)),
        ("deregistered", dead.sge(0, 100)),
        ("over the end", a.mr.sge(a.mr.len - 99, 100)),
        ("before the start", Sge { addr: a.mr.addr - 1, ..good }),
        ("beyond everything", Sge { addr: u64::MAX - 10, ..good }),
        ("too long", Sge { len: 1 << 29, ..good }),
    ]
}

#[test]
fn a_send_with_a_bad_element() {
    for i in 0..9 {
        let (mut t, a, b) = rc(QpOptions::rc());
        let (what, sge) = bad_sges(&mut t)[i];
        t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 3000)]);
        let flags = SendFlags::empty();
        t.try_post(a, 2, SendOp::Send, flags, &[a.mr.sge(0, 10), sge]).unwrap();
        t.post(a, 3, SendOp::Write(b.mr.remote(10_000)), &[a.mr.sge(0, 3000)]);
        let before = t.bytes(b.mr, 10_000, 3000);
        t.run();
        assert_eq!(t.sent(a), [(1, Success), (2, LocProtErr), (3, WrFlushErr)], "{what}");
        assert_eq!(t.state(a), QpState::Err);
        assert_eq!(t.state(b), QpState::Rts);
        assert_eq!(t.bytes(b.mr, 0, 3000), t.bytes(a.mr, 0, 3000));
        assert_eq!(t.bytes(b.mr, 10_000, 3000), before);
    }
}

#[test]
fn the_target_of_read_or_atomic_must_be_writable() {
    for op in [4, 5, 6] {
        let (mut t, a, b) = rc(QpOptions::rc());
        let op = every_op(b)[op];
        let readable = t.register(a.device, a.pd, a.mr.addr, 4096, Access::empty());
        t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[readable.sge(0, 100)]);
        t.run();
        assert_eq!(t.sent(a), [(1, Success)], "to send, no right is needed");
        t.post(a, 2, op, &[readable.sge(0, len_of(&op))]);
        t.run();
        assert_eq!(t.sent(a), [(2, LocProtErr)]);
    }
}

#[test]
fn where_an_answer_goes_is_looked_at_when_it_comes() {
    let nowhere = |a: End, op: &SendOp| Sge { lkey: 0, ..a.mr.sge(0, len_of(op)) };
    for lost in [None, Some(O::AtomicAck), Some(O::ReadResponseFirst)] {
        for (op, word) in [(4, 1_u64), (5, 2), (6, 4)] {
            let (mut t, a, b) = rc(QpOptions::rc());
            let op = every_op(b)[op];
            t.write(b.mr, 0, &1_u64.to_ne_bytes());
            if let Some(lost) = lost {
                t.net.once(is(lost), Fate::Drop);
            }
            t.post(a, 1, op, &[nowhere(a, &op)]);
            t.run();
            assert_eq!((t.sent(a), t.state(b)), (vec![(1, LocProtErr)], QpState::Rts), "{op:?}");
            assert_eq!(t.word(b.mr, 0), word, "{op:?} is done, and once");
        }
    }
    // The peer's refusal comes first.
    for op in [4, 5, 6] {
        let (mut t, a, b) = rc(QpOptions::rc());
        t.deregister(b.mr);
        let op = every_op(b)[op];
        t.post(a, 1, op, &[nowhere(a, &op)]);
        t.run();
        assert_eq!(t.sent(a), [(1, RemAccessErr)], "{op:?}");
    }
}

#[test]
fn a_receive_with_a_bad_element() {
    // The last one is long enough for the message; elements behind it are not looked at.
    for i in 0..8 {
        let Some((mut t, a, b)) = both_ways(QpOptions::rc()) else { return };
        // `b` is the one that sends here.
        let (what, sge) = bad_sges(&mut t)[i];
        t.recv(a, 1, &[sge]);
        t.recv(a, 2, &[a.mr.sge(0, 100)]);
        t.events(a.device);
        t.post(b, 3, SendOp::Send, &[b.mr.sge(0, 100)]);
        t.run();
        assert_eq!(t.sent(b), [(3, RemOpErr)], "{what}");
        assert_eq!(t.received(a), [(1, LocProtErr), (2, WrFlushErr)], "{what}");
        assert_eq!(t.qp_events(a), [QpEvent::ReqErr], "{what}");
    }
}

#[test]
fn a_receive_buffer_must_be_writable() {
    let (mut t, a, b) = rc(QpOptions::rc());
    let readable = t.register(b.device, b.pd, b.mr.addr, 4096, Access::REMOTE_READ);
    t.recv(b, 1, &[readable.sge(0, 100)]);
    t.post(a, 2, SendOp::Send, &[a.mr.sge(0, 100)]);
    t.run();
    assert_eq!(t.sent(a), [(2, RemOpErr)]);
    assert_eq!(t.received(b), [(1, LocProtErr)]);
}

#[test]
fn operations_that_the_type_does_not_have() {
    // S5.9.
    for (options, refused) in
        [(QpOptions::uc(), &[4, 5, 6][..]), (QpOptions::ud(), &[2, 3, 4, 5, 6])]
    {
        for op in refused {
            let mut t = Pair::new(1, options);
            let (a, b) = t.ends();
            let op = every_op(b)[*op];
            t.post(a, 1, op, &[a.mr.sge(0, 8)]);
            t.run();
            assert_eq!(t.sent(a), [(1, LocQpOpErr)], "{:?} {op:?}", options.qp_type);
        }
    }
}

#[test]
fn posts_that_are_refused_at_once_change_nothing() {
    let (mut t, a, b) = rc(QpOptions::rc());
    let sge = a.mr.sge(0, 1);
    let too_many = vec![sge; t.get(a.qp).init().cap.max_send_sge as usize + 1];
    let refused = t.try_post(a, 1, SendOp::Send, SendFlags::SIGNALED, &too_many);
    assert_eq!(refused, Err(PostSendError::TooManySges));
    do_one(&mut t, SendOp::Write(b.mr.remote(0)));
}

#[test]
fn posting_too_early() {
    // S5.11: sends in RESET, INIT, RTR and receives in RESET are refused at once.
    for options in [QpOptions::rc(), QpOptions::uc(), QpOptions::ud()] {
        let mut sim = Sim::new(1);
        let (x, y) = (sim.device(), sim.device());
        let (a, b) = (sim.end(x, &options), sim.end(y, &options));
        let sges = [a.mr.sge(0, 10)];
        let recv = RecvWr { wr_id: 1, sges: &sges };
        let ud = (options.qp_type == QpType::Ud).then(|| sim.dest(a.qp, b.qp));
        let send = SendWr {
            wr_id: 1,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            sges: &sges,
            ud,
            xrc_srqn: 0,
        };
        assert_eq!(sim.post_send(a.qp, &send), Err(PostSendError::State));
        assert!(sim.post_recv(a.qp, &recv).is_err());
        sim.to_init(a.qp, &options);
        assert_eq!(sim.post_send(a.qp, &send), Err(PostSendError::State));
        assert!(sim.post_recv(a.qp, &recv).is_ok());
        sim.to_rtr(a.qp, &options, b.qp, &options);
        assert_eq!(sim.post_send(a.qp, &send), Err(PostSendError::State));
        assert!(sim.post_recv(a.qp, &recv).is_ok());
        sim.to_rts(a.qp, &options);
        assert_eq!(sim.post_send(a.qp, &send), Ok(()));
    }
}
