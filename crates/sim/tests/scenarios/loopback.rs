//! Queue pairs of one device, and a queue pair with itself.

use super::prelude::*;

#[test]
fn two_queue_pairs_of_one_device() {
    let mut sim = Sim::new(1);
    let device = sim.device();
    let options = QpOptions::rc();
    let mut t = Pair::on(sim, [device, device], options, options);
    let b = t.b;
    for op in every_op(b) {
        do_one(&mut t, op);
    }
}

#[test]
fn a_queue_pair_with_itself() {
    let mut sim = Sim::new(1);
    let device = sim.device();
    let options = QpOptions::rc();
    let end = sim.end(device, &options);
    sim.to_init(end.qp, &options);
    sim.to_rtr(end.qp, &options, end.qp, &options);
    sim.to_rts(end.qp, &options);
    for (i, op) in every_op(end).into_iter().enumerate() {
        let len = len_of(&op);
        if takes_recv(&op) {
            let sges = [end.mr.sge(50_000, 3000)];
            sim.post_recv(end.qp, &RecvWr { wr_id: 1, sges: &sges }).unwrap();
        }
        let sges = [end.mr.sge(10_000, len)];
        let flags = SendFlags::SIGNALED;
        sim.post_send(
            end.qp,
            &SendWr { wr_id: i as u64, op, flags, sges: &sges, ud: None, xrc_srqn: 0 },
        )
        .unwrap();
        sim.run();
        let sent = sim.poll(end.send_cq);
        assert_eq!((sent.len(), sent[0].status), (1, Success), "{op:?}");
        let recvs = sim.poll(end.recv_cq);
        assert_eq!(recvs.len(), usize::from(takes_recv(&op)));
        if matches!(op, SendOp::Send | SendOp::SendImm(_)) {
            assert_eq!(sim.bytes(end.mr, 50_000, len), sim.bytes(end.mr, 10_000, len));
        }
    }
}
