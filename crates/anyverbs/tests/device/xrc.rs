//! Extended reliable connections in one process.

use std::time::{Duration, Instant};

use anyverbs::error::*;
use anyverbs::*;

use crate::endpoint::*;

/// Connects a queue pair with one of this host.
pub(crate) fn set_up(qp: &Qp, context: &Context, dest: Qpn) {
    set_up_with(qp, context, dest, 7);
}

/// As [`set_up`], with so many repeats for a peer that is not ready.
pub(crate) fn set_up_with(qp: &Qp, context: &Context, dest: Qpn, rnr_retry: u8) {
    use QpAttrMask as M;
    let send = qp.query().unwrap().1.qp_type == QpType::XrcSend;
    let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
    let attr = QpAttr { state: QpState::Init, port: 1, access, ..QpAttr::default() };
    qp.modify(&attr, M::STATE | M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS).unwrap();
    let gid = context.gid(1, 0).unwrap().unwrap().gid;
    let path = AhAttr { dgid: gid, hop_limit: 64, is_global: true, port: 1, ..AhAttr::default() };
    let attr = QpAttr {
        state: QpState::Rtr,
        av: context.resolve(&path).unwrap(),
        path_mtu: Mtu::Mtu1024,
        dest_qpn: dest,
        max_dest_rd_atomic: 4,
        min_rnr_timer: 1,
        ..QpAttr::default()
    };
    let more = if send { M::empty() } else { M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER };
    let mask = M::STATE | M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | more;
    qp.modify(&attr, mask).unwrap();
    let attr = QpAttr {
        state: QpState::Rts,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry,
        max_rd_atomic: 4,
        ..QpAttr::default()
    };
    let more = if send { M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC } else { M::empty() };
    qp.modify(&attr, M::STATE | M::TIMEOUT | M::SQ_PSN | more).unwrap();
}

struct World {
    context: Context,
    pd: Pd,
    send_cq: Cq,
    xrcd: Xrcd,
    initiator: Qp,
    target: Qp,
    buffer: Buffer,
}

fn world() -> World {
    let context = context();
    let pd = context.alloc_pd().unwrap();
    let send_cq = context.create_cq(256, None, 0, 0).unwrap();
    let xrcd = context.open_xrcd(XrcdInitAttr::default()).unwrap();
    let init = XrcSendInitAttr { send_cq: &send_cq, cap: CAP, sq_sig_all: true, cookie: 0 };
    let initiator = context.create_xrc_send_qp(&pd, &init).unwrap();
    let target = xrcd.create_qp(0).unwrap();
    set_up(&target, &context, initiator.qpn());
    set_up(&initiator, &context, target.qpn());
    let buffer = Buffer::new(&pd, 1 << 16);
    World { context, pd, send_cq, xrcd, initiator, target, buffer }
}

impl World {
    fn srq(&self) -> (Srq, Cq) {
        let cq = self.context.create_cq(256, None, 0, 0).unwrap();
        let init = SrqInitAttr { max_wr: 64, max_sge: 1, cookie: 0 };
        (self.xrcd.create_srq(&self.pd, &cq, &init).unwrap(), cq)
    }

    fn send(&self, srqn: u32, wr_id: u64, len: usize) -> Result<(), (usize, PostError)> {
        let sges = [self.buffer.sge(0, len)];
        let wr = SendWr {
            wr_id,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            sges: &sges,
            ud: None,
            xrc_srqn: srqn,
        };
        self.initiator.post_send(&[wr])
    }

    fn sent(&self) -> Wc {
        let begin = Instant::now();
        let mut wcs = [Wc::default()];
        while self.send_cq.poll(&mut wcs).unwrap() == 0 {
            assert!(begin.elapsed() < Duration::from_secs(60));
        }
        wcs[0]
    }
}

#[test]
fn an_srq_is_destroyed_under_traffic() {
    for _ in 0..20 {
        let w = world();
        let (srq, cq) = w.srq();
        let number = srq.number().unwrap();
        for i in 0..64 {
            srq.post_recv(&[RecvWr { wr_id: i, sges: &[w.buffer.sge(8192, 8192)] }]).unwrap();
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // It goes on until the target refuses. The messages have several packets, so that some are cut in two.
                for i in 0..64 {
                    w.send(number, i, 5000).unwrap();
                    if w.sent().status != WcStatus::Success {
                        return;
                    }
                }
            });
            let mut wcs = [Wc::default(); 4];
            while cq.poll(&mut wcs).unwrap() == 0 {}
            srq.destroy().unwrap();
            // No operation completes there any more: the queue may go.
            cq.destroy().unwrap();
        });
        assert_eq!(srq.destroy(), Err(DestroyError::Gone));
        // Unless all was through, the connection is at its end.
        let _ = w.send(number, 100, 10);
        let wc = w.sent();
        assert!(matches!(wc.status, WcStatus::RemAccessErr | WcStatus::WrFlushErr), "{wc:?}");
        w.target.destroy().unwrap();
        w.xrcd.close().unwrap();
    }
}

#[test]
fn a_dropped_srq_is_not_found_and_keeps_nobody_busy() {
    let w = world();
    let (srq, cq) = w.srq();
    let number = srq.number().unwrap();
    srq.post_recv(&[RecvWr { wr_id: 1, sges: &[w.buffer.sge(8192, 100)] }]).unwrap();
    w.send(number, 1, 100).unwrap();
    assert_eq!(w.sent().status, WcStatus::Success);
    assert_eq!(cq.destroy(), Err(DestroyError::Busy("1 SRQ".into())));
    drop(srq);
    cq.destroy().unwrap();
    w.send(number, 2, 100).unwrap();
    assert_eq!(w.sent().status, WcStatus::RemAccessErr);
    assert_eq!(w.xrcd.close(), Err(DestroyError::Busy("1 QP".into())));
    drop(w.target);
    w.xrcd.close().unwrap();
    assert_eq!(w.xrcd.close(), Err(DestroyError::Gone));
    assert!(matches!(w.xrcd.create_qp(0), Err(CreateError::Foreign(_))));
}

#[test]
fn completions_of_a_target_outlive_it() {
    let w = world();
    let (srq, cq) = w.srq();
    srq.post_recv(&[RecvWr { wr_id: 7, sges: &[w.buffer.sge(8192, 100)] }]).unwrap();
    w.send(srq.number().unwrap(), 1, 100).unwrap();
    assert_eq!(w.sent().status, WcStatus::Success);
    let qpn = w.target.qpn();
    w.target.destroy().unwrap();
    let mut wcs = [Wc::default(); 4];
    assert_eq!(cq.poll(&mut wcs), Ok(1));
    assert_eq!((wcs[0].wr_id, wcs[0].qpn, wcs[0].status), (7, qpn, WcStatus::Success));
}

#[test]
fn types_have_calls_of_their_own() {
    let w = world();
    for qp_type in [QpType::XrcSend, QpType::XrcRecv] {
        let init = QpInitAttr {
            send_cq: &w.send_cq,
            recv_cq: &w.send_cq,
            srq: None,
            cap: CAP,
            qp_type,
            sq_sig_all: false,
            cookie: 0,
        };
        assert_eq!(w.context.create_qp(&w.pd, &init).unwrap_err().errno(), libc::EINVAL);
    }
    assert_eq!(w.target.cap(), QpCap::default());
    let cap = w.initiator.cap();
    assert_eq!((cap.max_send_wr, cap.max_recv_wr), (CAP.max_send_wr, 0));
    let opened = w.xrcd.open_qp(w.target.qpn(), Some(3)).unwrap();
    w.target.destroy().unwrap();
    assert!(matches!(w.target.query(), Err(ModifyObjectError::Gone)));
    assert_eq!(opened.state().unwrap(), QpState::Rts);
}
