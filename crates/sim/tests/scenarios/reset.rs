//! The move to RESET forgets everything (S1.1, S1.2; IBA 10.3.1.1).

use super::prelude::*;

#[test]
fn no_completion_follows() {
    let Some((mut t, a, b)) = both_ways(QpOptions::rc()) else { return };
    for i in 0..3 {
        t.recv(a, i, &[a.mr.sge(0, 10)]);
        t.post(a, i, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 3000)]);
    }
    t.to_state(a.qp, QpState::Reset);
    t.run();
    assert_eq!((t.sent(a), t.received(a)), (vec![], vec![]));
    assert_eq!(t.events(a.device), []);
}

#[test]
fn completions_that_wait_are_removed() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 10)]);
    t.run();
    t.to_state(a.qp, QpState::Reset);
    assert_eq!(t.sent(a), []);
}

#[test]
fn destroy_with_work_outstanding() {
    // S1.1, S1.7.
    let options = QpOptions { retry_cnt: 1, ..QpOptions::rc() };
    let Some((mut t, a, b)) = both_ways(options) else { return };
    t.recv(b, 1, &[b.mr.sge(0, 10)]);
    t.post(b, 2, SendOp::Read(a.mr.remote(0)), &[b.mr.sge(0, 3000)]);
    t.post(a, 3, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 3000)]);
    t.destroy(b.qp);
    t.run();
    assert_eq!((t.sent(b), t.received(b)), (vec![], vec![]));
    assert_eq!(t.sent(a), [(3, RetryExcErr)]);
}

#[test]
fn a_new_connection_knows_nothing_of_the_old_one() {
    for sq_psn in [QpOptions::rc().sq_psn, QpOptions::rc().sq_psn.plus(3), Psn::new(7)] {
        let (mut t, a, b) = rc(QpOptions::rc());
        // Packets of the old connection arrive after the new one was made.
        for i in 0..4 {
            let op = if i % 2 == 0 {
                SendOp::Read(b.mr.remote(0))
            } else {
                SendOp::Write(b.mr.remote(0))
            };
            t.post(a, i, op, &[a.mr.sge(0, 3000)]);
        }
        t.run_for(Duration::from_micros(7));
        for end in [a, b] {
            t.to_state(end.qp, QpState::Reset);
        }
        t.run();
        let options = QpOptions { sq_psn, ..QpOptions::rc() };
        t.connect((a.qp, &options), (b.qp, &options));
        t.fill(a.mr, 3);
        for op in every_op(b) {
            do_one(&mut t, op);
        }
    }
}

#[test]
fn from_every_state() {
    for state in [QpState::Rts, QpState::Err] {
        let (mut t, a, b) = rc(QpOptions::rc());
        if state == QpState::Err {
            t.to_state(a.qp, state);
        }
        t.to_state(a.qp, QpState::Reset);
        assert_eq!(t.state(a), QpState::Reset);
        assert_eq!(t.next(), None);
        let _ = b;
    }
}

#[test]
fn established_is_told_when_the_first_packet_meets_rtr() {
    let mut sim = Sim::new(1);
    let (x, y) = (sim.device(), sim.device());
    let options = QpOptions::rc();
    let (a, b) = (sim.end(x, &options), sim.end(y, &options));
    sim.to_init(b.qp, &options);
    sim.to_rtr(b.qp, &options, a.qp, &options);
    sim.to_init(a.qp, &options);
    sim.to_rtr(a.qp, &options, b.qp, &options);
    sim.to_rts(a.qp, &options);
    let sges = [a.mr.sge(0, 3000)];
    let (op, flags) = (SendOp::Write(b.mr.remote(0)), SendFlags::SIGNALED);
    sim.post_send(a.qp, &SendWr { wr_id: 1, op, flags, sges: &sges, ud: None, xrc_srqn: 0 })
        .unwrap();
    sim.run();
    assert_eq!(sim.poll(a.send_cq).len(), 1, "RTR answers");
    assert_eq!(sim.events(y), [Event::Qp(b.qp, QpEvent::CommEst)]);
    assert_eq!(sim.events(x), []);
}
