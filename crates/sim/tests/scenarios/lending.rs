//! The responder of an XRC target moves between messages, and takes its state along.

use super::prelude::*;
use anyverbs_sim::{CqId, Mr, QpId, SrqId};

struct World {
    sim: Sim,
    initiator: QpId,
    target: QpId,
    send_cq: CqId,
    from: Mr,
    recv_cq: CqId,
    srqs: [SrqId; 2],
    to: [Mr; 2],
}

fn world(seed: u64, loss: f64) -> World {
    let mut sim = Sim::new(seed);
    sim.net.default_link = Link { loss, duplicate: loss, ..Link::default() };
    let (x, y) = (sim.device(), sim.device());
    let (pd, send_cq) = (sim.pd(x), sim.cq(x, 1000));
    let from = sim.mr(x, pd, 65536, Access::VERBS);
    sim.fill(from, 1);
    let recv_cq = sim.cq(y, 1000);
    let mut of = || {
        let pd = sim.pd(y);
        (sim.xrc_srq(pd, 7, recv_cq, 512, 1), sim.mr(y, pd, 65536, Access::VERBS))
    };
    let [(a, a_mr), (b, b_mr)] = [of(), of()];
    let (mine, theirs) = (QpOptions::xrc_send(), QpOptions::xrc_recv());
    let initiator = sim.qp(pd, send_cq, send_cq, None, &mine);
    let target = sim.xrc_target(7, recv_cq, &theirs);
    sim.connect((initiator, &mine), (target, &theirs));
    World { sim, initiator, target, send_cq, from, recv_cq, srqs: [a, b], to: [a_mr, b_mr] }
}

impl World {
    fn post(&mut self, wr_id: u64, to: usize, op: SendOp, at: usize, len: usize) {
        let sges = [self.from.sge(at, len)];
        let xrc_srqn = self.sim.srqn(self.srqs[to]);
        let wr = SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges: &sges, ud: None, xrc_srqn };
        self.sim.post_send(self.initiator, &wr).unwrap();
    }

    fn sent(&mut self) -> Vec<(u64, WcStatus)> {
        self.sim.poll(self.send_cq).iter().map(|wc| (wc.wr_id, wc.status)).collect()
    }

    fn remote(&self, to: usize, offset: usize) -> RemoteAddr {
        self.to[to].remote(offset)
    }
}

#[test]
fn a_responder_that_moves_does_everything_once_and_in_order() {
    let mut moves = 0;
    for seed in 0..40 {
        let mut w = world(seed, 0.05);
        const ROUNDS: u64 = 24;
        for i in 0..ROUNDS {
            for srq in w.srqs {
                let mr = w.to[w.srqs.iter().position(|s| *s == srq).unwrap()];
                let sges = [mr.sge(8192, 4096)];
                w.sim.post_srq_recv(srq, &RecvWr { wr_id: i, sges: &sges }).unwrap();
            }
        }
        let (mut done, mut received) = (vec![], 0);
        for i in 0..ROUNDS {
            let to = (i % 2) as usize;
            w.post(i * 4, to, SendOp::SendImm(i as u32), 0, 3000);
            let counter = w.remote(to, 0);
            w.post(i * 4 + 1, to, SendOp::FetchAdd { at: counter, add: 1 }, 40_000, 8);
            w.post(i * 4 + 2, 1 - to, SendOp::Write(w.remote(1 - to, 4096)), 0, 2500);
            w.post(i * 4 + 3, to, SendOp::Read(w.remote(to, 4096)), 48_000, 4000);
            // Within a message, and between two.
            for _ in 0..12 {
                moves += u32::from(w.sim.move_responder(w.target));
                w.sim.run_for(Duration::from_micros(3));
            }
            done.extend(w.sent());
            while w.sim.get(w.initiator).send_room() < 4 {
                w.sim.run_for(Duration::from_micros(100));
                done.extend(w.sent());
            }
        }
        w.sim.run();
        done.extend(w.sent());
        let expected: Vec<_> = (0..ROUNDS * 4).map(|id| (id, Success)).collect();
        assert_eq!(done, expected, "seed {seed}");
        for wc in w.sim.poll(w.recv_cq) {
            assert_eq!((wc.status, wc.byte_len, wc.imm), (Success, 3000, received), "seed {seed}");
            received += 1;
        }
        assert_eq!(u64::from(received), ROUNDS, "seed {seed}");
        assert_eq!(w.to.map(|mr| w.sim.word(mr, 0)), [ROUNDS / 2; 2], "seed {seed}");
    }
    assert!(moves > 1000, "{moves}");
}

#[test]
fn within_a_message_a_responder_stays() {
    let mut w = world(1, 0.0);
    // So that they do not all come at one instant.
    w.sim.net.default_link.jitter = Duration::from_micros(5);
    let sges = [w.to[0].sge(0, 65536)];
    w.sim.post_srq_recv(w.srqs[0], &RecvWr { wr_id: 1, sges: &sges }).unwrap();
    w.post(1, 0, SendOp::Send, 0, 60_000);
    w.sim.run_until(|sim| sim.get(w.target).is_within_message());
    assert!(!w.sim.move_responder(w.target));
    w.sim.run();
    assert!(w.sim.move_responder(w.target));
    assert_eq!(w.sim.poll(w.recv_cq).len(), 1);
}
