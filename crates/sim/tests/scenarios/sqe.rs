//! A send error on UC and UD stops the send queue alone (S5.11; IBA 10.3.1.6, SQE).

use super::prelude::*;

fn in_sqe(options: QpOptions) -> (Pair, End, End) {
    let mut t = Pair::new(1, options);
    let (a, b) = t.ends();
    t.recv(b, 10, &[b.mr.sge(0, 200)]);
    t.recv(b, 11, &[b.mr.sge(200, 200)]);
    t.post(a, 1, SendOp::Send, &[a.mr.sge(0, 100)]);
    let bad = Sge { lkey: 0, ..a.mr.sge(0, 100) };
    t.try_post(a, 2, SendOp::Send, SendFlags::empty(), &[bad]).unwrap();
    t.run();
    assert_eq!(t.sent(a), [(1, Success), (2, LocProtErr)]);
    assert_eq!(t.received(b), [(10, Success)]);
    assert_eq!(t.state(a), QpState::Sqe);
    (t, a, b)
}

#[test]
fn requests_behind_the_bad_one_are_flushed() {
    for options in [QpOptions::uc(), QpOptions::ud()] {
        let (mut t, a, b) = in_sqe(options);
        t.post(a, 3, SendOp::Send, &[a.mr.sge(0, 100)]);
        t.run();
        assert_eq!(t.sent(a), [(3, WrFlushErr)]);
        assert_eq!(t.received(b), []);
    }
}

#[test]
fn the_receive_queue_goes_on() {
    for options in [QpOptions::uc(), QpOptions::ud()] {
        let (mut t, a, b) = in_sqe(options);
        t.recv(a, 4, &[a.mr.sge(1000, 200)]);
        t.post(b, 5, SendOp::Send, &[b.mr.sge(0, 100)]);
        t.run();
        assert_eq!(t.sent(b), [(5, Success)]);
        assert_eq!(t.received(a), [(4, Success)]);
    }
}

#[test]
fn back_to_rts() {
    for options in [QpOptions::uc(), QpOptions::ud()] {
        let (mut t, a, b) = in_sqe(options);
        t.to_state(a.qp, QpState::Rts);
        t.post(a, 3, SendOp::Send, &[a.mr.sge(0, 100)]);
        t.run();
        assert_eq!(t.sent(a), [(3, Success)]);
        assert_eq!(t.received(b), [(11, Success)]);
        let grh = if options.qp_type == QpType::Ud { 40 } else { 0 };
        assert_eq!(t.bytes(b.mr, 200 + grh, 100), t.bytes(a.mr, 0, 100));
    }
}

#[test]
fn flushed_in_order_and_each_once() {
    // A list that is posted in one call: the bad one is found while those behind it are queued.
    for options in [QpOptions::uc(), QpOptions::ud()] {
        let mut t = Pair::new(1, options);
        let (a, b) = t.ends();
        let good = [a.mr.sge(0, 100)];
        let bad = [Sge { lkey: 0, ..good[0] }];
        let ud = (options.qp_type == QpType::Ud).then(|| t.dest(a.qp, b.qp));
        for (wr_id, sges) in [(0, &good), (1, &bad), (2, &good), (3, &good)] {
            let flags = SendFlags::empty();
            t.queue_send(a.qp, &SendWr { wr_id, op: SendOp::Send, flags, sges, ud, xrc_srqn: 0 })
                .unwrap();
        }
        t.transmit(a.qp);
        t.run();
        assert_eq!(t.sent(a), [(1, LocProtErr), (2, WrFlushErr), (3, WrFlushErr)]);
    }
}

#[test]
fn a_message_that_fails_in_its_middle_leaves_no_trace() {
    let mut t = Pair::new(1, QpOptions::uc());
    let (a, b) = t.ends();
    t.memory(a.device).unmap(a.mr.addr + 4096, 4096);
    t.recv(b, 10, &[b.mr.sge(0, 20_000)]);
    t.post(a, 1, SendOp::Send, &[a.mr.sge(0, 12_000)]);
    t.run();
    assert_eq!(t.sent(a), [(1, LocProtErr)]);
    assert!(t.net.trace.count(a.device, O::SendMiddle) > 0, "it began");
    t.to_state(a.qp, QpState::Rts);
    t.post(a, 2, SendOp::SendImm(2), &[a.mr.sge(8192, 5000)]);
    t.run();
    assert_eq!(t.sent(a), [(2, Success)]);
    assert_eq!(t.recvs(b).iter().map(|wc| (wc.wr_id, wc.imm)).collect::<Vec<_>>(), [(10, 2)]);
    assert_eq!(t.bytes(b.mr, 0, 5000), t.bytes(a.mr, 8192, 5000));
}
