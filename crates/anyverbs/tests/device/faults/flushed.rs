//! Sends that are flushed by script.

use super::*;

#[test]
fn a_send_is_flushed_without_a_failure_before_it() {
    // The flush of the second one is that of the first one, and that of the other queue pair the program's own.
    let script = "on qp 1: sends 2 to 3 complete with WR_FLUSH_ERR\n\
        on qp 3: send 1 completes with WR_FLUSH_ERR after 1000s; on qp 5: send 1 completes with WR_FLUSH_ERR";
    with("flushed::a_send_is_flushed_without_a_failure_before_it", script, &[], || {
        let (a, b) = pair(QpType::Rc);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        for n in 1..=3 {
            a.send(n, SendOp::Write(dst.remote(0)), &[src.sge(0, 8)]);
        }
        use WcStatus::{Success, WrFlushErr};
        let found: Vec<_> = a.poll(3).iter().map(|wc| (wc.status, wc.vendor_err)).collect();
        assert_eq!(found[0].0, Success);
        assert_eq!(found[1..], [(WrFlushErr, 9901); 2]);
        assert_eq!(a.qp.state().unwrap(), QpState::Err);
        assert_eq!(injected(&a.context), 1);
        let (c, d) = pair(QpType::Rc);
        let [src, dst] = [&c, &d].map(|e| Buffer::new(&e.pd, 64));
        c.send(1, SendOp::Write(dst.remote(0)), &[src.sge(0, 8)]);
        let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
        c.qp.modify(&attr, QpAttrMask::STATE).unwrap();
        let wc = c.poll(1)[0];
        assert!(wc.status == WrFlushErr && wc.vendor_err != 9901, "{wc:?}");
        assert_eq!(injected(&c.context), 1, "the program has overtaken the rule");
        // A datagram that is flushed leaves the queue pair in SQE, and the next one is sent.
        let (e, f) = pair(QpType::Ud);
        let src = Buffer::new(&e.pd, 64);
        let to = e.dest(f.address());
        e.send_to(1, SendOp::Send, &[src.sge(0, 8)], Some(to));
        assert_eq!(e.poll(1)[0].status, WrFlushErr);
        assert_eq!(e.qp.state().unwrap(), QpState::Sqe);
        assert_eq!(injected(&e.context), 2);
    });
}
