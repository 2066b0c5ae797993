//! Shared receive queues (S1.4, S2.4; IBA 10.2.9).

use super::prelude::*;
use anyverbs_sim::{CqId, Mr, QpId, SrqId};

/// Three requesters on device A, each with a queue pair on device B that shares one SRQ.
struct Shared {
    sim: Sim,
    requesters: Vec<QpId>,
    responders: Vec<QpId>,
    srq: SrqId,
    send_cq: CqId,
    recv_cq: CqId,
    from: Mr,
    to: Mr,
}

fn shared() -> Shared {
    let mut sim = Sim::new(1);
    let (x, y) = (sim.device(), sim.device());
    let options = QpOptions::rc();
    let (pd_x, pd_y) = (sim.pd(x), sim.pd(y));
    let (send_cq, recv_cq) = (sim.cq(x, 100), sim.cq(y, 100));
    let srq = sim.srq(y, 16, 4);
    let (from, to) = (sim.mr(x, pd_x, 65536, Access::VERBS), sim.mr(y, pd_y, 65536, Access::VERBS));
    sim.fill(from, 1);
    let (mut requesters, mut responders) = (vec![], vec![]);
    for _ in 0..3 {
        let a = sim.qp(pd_x, send_cq, send_cq, None, &options);
        let b = sim.qp(pd_y, recv_cq, recv_cq, Some(srq), &options);
        sim.connect((a, &options), (b, &options));
        requesters.push(a);
        responders.push(b);
    }
    Shared { sim, requesters, responders, srq, send_cq, recv_cq, from, to }
}

impl Shared {
    fn recv(&mut self, wr_id: u64) {
        let sges = [self.to.sge(wr_id as usize * 4096, 4096)];
        self.sim.post_srq_recv(self.srq, &RecvWr { wr_id, sges: &sges }).unwrap();
    }

    fn send(&mut self, i: usize, wr_id: u64, len: usize) {
        let sges = [self.from.sge(0, len)];
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { wr_id, op: SendOp::Send, flags, sges: &sges, ud: None, xrc_srqn: 0 };
        self.sim.post_send(self.requesters[i], &wr).unwrap();
    }
}

#[test]
fn messages_take_receives_in_the_order_of_their_arrival() {
    let mut s = shared();
    for i in 0..6 {
        s.recv(i);
    }
    for i in [0, 2, 1, 1, 0, 2] {
        s.send(i, i as u64, 3000);
        s.sim.run();
    }
    let wcs = s.sim.poll(s.recv_cq);
    let got: Vec<_> = wcs.iter().map(|wc| (wc.wr_id, wc.qpn)).collect();
    let qpn = |i: usize| s.sim.get(s.responders[i]).qpn();
    let expected = [(0, qpn(0)), (1, qpn(2)), (2, qpn(1)), (3, qpn(1)), (4, qpn(0)), (5, qpn(2))];
    assert_eq!(got, expected);
    for i in 0..6 {
        assert_eq!(s.sim.bytes(s.to, i * 4096, 3000), s.sim.bytes(s.from, 0, 3000));
    }
}

#[test]
fn a_receive_is_taken_when_a_message_begins() {
    let mut s = shared();
    s.recv(0);
    s.recv(1);
    // The first message stops half way: the second one takes the next receive.
    let slow = s.sim.get(s.responders[0]).qpn();
    s.sim.net.once(
        move |p| p.headers.bth.dest_qpn == slow && p.operation() == O::SendLast,
        Fate::Delay(Duration::from_micros(500)),
    );
    s.send(0, 0, 3000);
    s.sim.run_for(Duration::from_micros(20));
    s.send(1, 1, 100);
    s.sim.run();
    let got: Vec<_> = s.sim.poll(s.recv_cq).iter().map(|wc| (wc.wr_id, wc.byte_len)).collect();
    assert_eq!(got, [(1, 100), (0, 3000)]);
}

#[test]
fn an_empty_one_is_not_ready() {
    let mut s = shared();
    s.send(0, 0, 100);
    s.send(1, 1, 100);
    s.sim.run_for(Duration::from_micros(100));
    assert_eq!(s.sim.poll(s.recv_cq), []);
    s.recv(0);
    s.recv(1);
    s.sim.run();
    assert_eq!(s.sim.poll(s.recv_cq).len(), 2);
    assert_eq!(s.sim.poll(s.send_cq).len(), 2);
}

#[test]
fn the_limit_is_told_once() {
    let mut s = shared();
    for i in 0..5 {
        s.recv(i);
    }
    let device = s.srq.device;
    s.sim.arm_srq(s.srq, 3);
    for i in 0..2 {
        s.send(0, i, 10);
        s.sim.run();
        assert_eq!(s.sim.events(device), []);
    }
    s.send(1, 2, 10);
    s.sim.run();
    assert_eq!(s.sim.events(device), [Event::SrqLimitReached(s.srq)]);
    s.send(1, 3, 10);
    s.sim.run();
    assert_eq!(s.sim.events(device), [], "armed once, told once");
}

#[test]
fn last_wqe_reached_comes_once_and_after_the_last_completion() {
    let mut s = shared();
    for i in 0..3 {
        s.recv(i);
    }
    // One message is half way in when its queue pair fails.
    s.sim.net.rule(|p| if p.operation() == O::SendLast { Fate::Drop } else { Fate::Pass });
    s.send(0, 0, 3000);
    s.sim.run_for(Duration::from_micros(100));
    let (device, qp) = (s.srq.device, s.responders[0]);
    s.sim.events(device);
    s.sim.to_state(qp, QpState::Err);
    let wcs = s.sim.poll(s.recv_cq);
    assert_eq!(wcs.iter().map(|wc| (wc.wr_id, wc.status)).collect::<Vec<_>>(), [(0, WrFlushErr)]);
    assert_eq!(s.sim.events(device), [Event::Qp(qp, QpEvent::LastWqeReached)]);
    s.sim.to_state(qp, QpState::Err);
    assert_eq!(s.sim.events(device), []);
    // The rest of the SRQ serves the others.
    s.sim.net.clear_rules();
    s.send(1, 1, 3000);
    s.sim.run_for(Duration::from_millis(1));
    assert_eq!(s.sim.poll(s.recv_cq).len(), 1);
}

#[test]
fn last_wqe_reached_without_work() {
    let mut s = shared();
    s.recv(0);
    let (device, qp) = (s.srq.device, s.responders[2]);
    s.sim.to_state(qp, QpState::Err);
    assert_eq!(s.sim.events(device), [Event::Qp(qp, QpEvent::LastWqeReached)]);
    assert_eq!(s.sim.poll(s.recv_cq), []);
}

#[test]
fn the_queue_pair_itself_takes_no_receives() {
    // S2.4.
    let mut s = shared();
    let sges = [s.to.sge(0, 10)];
    assert!(s.sim.post_recv(s.responders[0], &RecvWr { wr_id: 1, sges: &sges }).is_err());
}

#[test]
fn write_with_immediate_takes_from_it_too() {
    let mut s = shared();
    let sges = [s.from.sge(0, 3000)];
    let op = SendOp::WriteImm(s.to.remote(0), 77);
    let wr =
        SendWr { wr_id: 5, op, flags: SendFlags::SIGNALED, sges: &sges, ud: None, xrc_srqn: 0 };
    s.sim.post_send(s.requesters[0], &wr).unwrap();
    s.sim.run_for(Duration::from_micros(100));
    s.recv(3);
    s.sim.run();
    let wcs = s.sim.poll(s.recv_cq);
    assert_eq!((wcs[0].wr_id, wcs[0].imm, wcs[0].byte_len), (3, 77, 3000));
    assert_eq!(wcs[0].opcode, WcOpcode::RecvRdmaWithImm);
}
