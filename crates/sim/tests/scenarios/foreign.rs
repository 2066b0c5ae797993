//! Packets that are none of the queue pair's business (IBA 9.6.1).

use super::prelude::*;
use anyverbs_proto::wire::deth::Deth;

use anyverbs_proto::wire::reth::Reth;

fn write(t: &Pair, service: Service, operation: O) -> Headers {
    let b = t.b;
    let opcode = Opcode::new(service, operation);
    let mut headers = Headers::new(Bth::new(opcode, t.get(b.qp).qpn(), QpOptions::rc().sq_psn));
    headers.reth = Some(Reth { va: b.mr.addr, rkey: b.mr.rkey, len: 100 });
    headers.deth = Some(Deth { qkey: QpOptions::ud().qkey, src_qpn: t.get(t.a.qp).qpn() });
    headers
}

#[test]
fn another_address_than_the_peers() {
    for (options, service) in [(QpOptions::rc(), Service::Rc), (QpOptions::uc(), Service::Uc)] {
        let (mut t, _, b) = rc(options);
        let stranger = t.device();
        let before = t.bytes(b.mr, 0, 100);
        let headers = write(&t, service, O::WriteOnly);
        t.inject(stranger, b.device, headers, &[7; 100]);
        t.run();
        assert_eq!(t.bytes(b.mr, 0, 100), before);
        assert_eq!(t.counter(b.device, Counter::DropForeign), 1);
        for op in
            every_op(b).into_iter().filter(|op| service == Service::Rc || !op.has_response_data())
        {
            do_one(&mut t, op);
        }
    }
}

#[test]
fn another_service() {
    let cases = [
        (QpOptions::rc(), Service::Uc, O::WriteOnly),
        (QpOptions::rc(), Service::Ud, O::SendOnly),
        (QpOptions::rc(), Service::Xrc, O::WriteOnly),
        (QpOptions::uc(), Service::Rc, O::WriteOnly),
        (QpOptions::xrc_recv(), Service::Rc, O::WriteOnly),
        (QpOptions::xrc_recv(), Service::Ud, O::SendOnly),
        (QpOptions::xrc_send(), Service::Rc, O::WriteOnly),
        (QpOptions::ud(), Service::Rc, O::WriteOnly),
        (QpOptions::ud(), Service::Uc, O::SendOnly),
    ];
    for (options, service, operation) in cases {
        let (mut t, a, b) = rc(options);
        if options.qp_type.has_responder() {
            t.recv(b, 1, &[b.mr.sge(0, 200)]);
        }
        let before = t.bytes(b.mr, 0, 200);
        let mut headers = write(&t, service, operation);
        headers.xrceth = Some(XrcEth { srqn: b.srq.map_or(0, |srq| t.srqn(srq)) });
        t.inject(a.device, b.device, headers, &[7; 100]);
        t.run();
        assert_eq!(t.bytes(b.mr, 0, 200), before);
        assert_eq!(t.recvs(b), []);
        assert_eq!(t.counter(b.device, Counter::DropQpState), 1);
    }
}

#[test]
fn a_queue_pair_that_is_not_ready() {
    for state in [QpState::Reset, QpState::Err] {
        let (mut t, a, b) = rc(QpOptions::rc());
        t.to_state(b.qp, state);
        let before = t.bytes(b.mr, 0, 100);
        let headers = write(&t, Service::Rc, O::WriteOnly);
        t.inject(a.device, b.device, headers, &[7; 100]);
        t.run();
        assert_eq!(t.bytes(b.mr, 0, 100), before);
        assert_eq!(t.counter(b.device, Counter::DropQpState), 1);
    }
}
