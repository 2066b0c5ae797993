//! Completions that come out of time beside those of other queue pairs.

use super::*;

/// Two connections between two endpoints: the queue pairs of each side share a completion queue.
fn two_connections() -> ([Endpoint; 2], [Qp; 2]) {
    let (a, b) = pair(QpType::Rc);
    let more = [&a, &b].map(Endpoint::another);
    let at = |n: usize, e: &Endpoint| Address { qpn: more[n].qpn(), ..e.address() };
    a.connect_qp(&more[0], at(1, &b), 14, 7);
    b.connect_qp(&more[1], at(0, &a), 14, 7);
    ([a, b], more)
}

fn post(qp: &Qp, wr_id: u64, op: SendOp, sges: &[Sge]) {
    let flags = SendFlags::SIGNALED;
    qp.post_send(&[SendWr { wr_id, op, flags, sges, ud: None, xrc_srqn: 0 }]).unwrap();
}

#[test]
fn completions_of_another_queue_pair_pass_a_late_one_and_those_of_its_own_do_not() {
    let name =
        "beside::completions_of_another_queue_pair_pass_a_late_one_and_those_of_its_own_do_not";
    // The others are complete by then, on a busy machine too.
    with(name, "on qp 1: send 2 completes after 2s", &[], || {
        let ([a, b], more) = two_connections();
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        let write = |qp: &Qp, id| post(qp, id, SendOp::Write(dst.remote(0)), &[src.sge(0, 8)]);
        (1..=3).for_each(|id| write(&a.qp, id));
        (11..=18).for_each(|id| write(&more[0], id));
        let found: Vec<_> = a.poll(11).iter().map(|wc| wc.wr_id).collect();
        let wanted = [&[1][..], &[11, 12, 13, 14, 15, 16, 17, 18], &[2, 3]].concat();
        assert_eq!(found, wanted, "posted: 1, 2, 3, 11, ...");
        assert_eq!(injected(&a.context), 1);
    });
}

#[test]
fn a_receive_of_an_srq_passes_a_late_one_of_another_queue_pair() {
    let name = "beside::a_receive_of_an_srq_passes_a_late_one_of_another_queue_pair";
    with(name, "on qp 3: receive 1 completes after 2s", &[], || {
        let [a, b] = [(); 2].map(|()| Endpoint::new(QpType::Rc));
        let srq = b.pd.create_srq(&SrqInitAttr { max_wr: 8, max_sge: 1, cookie: 0 }).unwrap();
        // Queue pairs 3 and 4 of the process.
        let init = QpInitAttr { srq: Some(&srq), ..init(&b) };
        let to = [(); 2].map(|()| b.context.create_qp(&b.pd, &init).unwrap());
        let from = [(); 2].map(|()| a.another());
        for (from, to) in from.iter().zip(&to) {
            a.connect_qp(from, Address { qpn: to.qpn(), ..b.address() }, 14, 7);
            b.connect_qp(to, Address { qpn: from.qpn(), ..a.address() }, 14, 7);
        }
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        for wr_id in 1..=2 {
            srq.post_recv(&[RecvWr { wr_id, sges: &[dst.sge(0, 8)] }]).unwrap();
        }
        for (id, from) in from.iter().enumerate() {
            post(from, id as u64, SendOp::Send, &[src.sge(0, 8)]);
            a.poll(1);
        }
        let found: Vec<_> = b.poll(2).iter().map(|wc| wc.wr_id).collect();
        assert_eq!(found, [2, 1]);
    });
}
