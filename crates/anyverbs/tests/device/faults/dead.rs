//! Raw packets on a device that fails for good.

use anyverbs::raw::{RawQpInit, RawSendWr, ReceiveFlags, WqAttr, WqInit, WqState};

use super::*;

#[test]
fn raw_queue_pairs_and_work_queues_fail_with_their_device() {
    let name = "dead::raw_queue_pairs_and_work_queues_fail_with_their_device";
    let devices = [("ANYVERBS_DEVICES", "2"), ("ANYVERBS_INTERFACES", "")];
    // The test has made its objects by then, on a busy machine too.
    with(name, "on device anyverbs1: fatal after 2s", &devices, || {
        let contexts = [0, 1].map(|n| {
            let name = &anyverbs::devices().unwrap()[n].name;
            Context::open(name).unwrap()
        });
        let mut made = Vec::new();
        for context in &contexts {
            let pd = context.alloc_pd().unwrap();
            let cq = context.create_cq(16, None, 0, 0).unwrap();
            let init = RawQpInit {
                send_cq: &cq,
                recv_cq: &cq,
                srq: None,
                cap: CAP,
                sq_sig_all: true,
                max_tso_header: 0,
                flags: ReceiveFlags::empty(),
                cookie: 0,
            };
            let qp = match context.create_raw_qp(&pd, &init) {
                Err(CreateError::NotPermitted) => return anyverbs_testing::skip("no CAP_NET_RAW"),
                qp => qp.unwrap(),
            };
            let attr = QpAttr { state: QpState::Init, port: 1, ..QpAttr::default() };
            qp.modify(&attr, QpAttrMask::STATE | QpAttrMask::PORT).unwrap();
            let rtr = QpAttr { state: QpState::Rtr, ..attr };
            qp.modify(&rtr, QpAttrMask::STATE).unwrap();
            let flags = ReceiveFlags::empty();
            let init = WqInit { cq: &cq, max_wr: 4, max_sge: 1, flags, cookie: 0 };
            let wq = context.create_wq(&pd, &init).unwrap();
            let ready = WqAttr { state: Some(WqState::Ready), current: None, flags: None };
            wq.modify(&ready).unwrap();
            let buffer = Buffer::new(&pd, 64);
            qp.recv(&RecvWr { wr_id: 7, sges: &[buffer.sge(0, 64)] }).unwrap();
            made.push((pd, cq, qp, wq, buffer));
        }
        let (_, cq, qp, wq, _) = &made[1];
        let begin = Instant::now();
        while wq.state().unwrap() != WqState::Error || qp.state().unwrap() != QpState::Err {
            assert!(begin.elapsed() < Duration::from_secs(10));
            std::thread::yield_now();
        }
        let mut wcs = [Wc::default()];
        assert_eq!(cq.poll(&mut wcs).unwrap(), 1);
        let flushed = |wc: &Wc| (wc.wr_id, wc.status, wc.vendor_err);
        assert_eq!(flushed(&wcs[0]), (7, WcStatus::WrFlushErr, 9901));
        let (_, _, _, _, buffer) = &made[1];
        let sges = [buffer.sge(0, 64)];
        let wr = RawSendWr {
            wr_id: 8,
            flags: SendFlags::SIGNALED,
            fill_in_checksums: false,
            segmentation: None,
            sges: &sges,
        };
        qp.post().unwrap().send(&wr).unwrap();
        assert_eq!(cq.poll(&mut wcs).unwrap(), 1);
        assert_eq!(flushed(&wcs[0]), (8, WcStatus::WrFlushErr, 9901));
        // As `ibv_modify_wq`, whatever the state.
        for state in [WqState::Reset, WqState::Ready, WqState::Error] {
            let attr = WqAttr { state: Some(state), current: None, flags: None };
            assert_eq!(wq.modify(&attr), Err(ModifyObjectError::Failed));
        }
        // It may be reset, and not be used again.
        let attr = QpAttr { state: QpState::Reset, ..QpAttr::default() };
        qp.modify(&attr, QpAttrMask::STATE).unwrap();
        let attr = QpAttr { state: QpState::Init, port: 1, ..QpAttr::default() };
        let again = qp.modify(&attr, QpAttrMask::STATE | QpAttrMask::PORT);
        assert_eq!(again, Err(ModifyObjectError::Failed));
        let (_, _, qp, wq, _) = &made[0];
        assert_eq!((qp.state().unwrap(), wq.state().unwrap()), (QpState::Rtr, WqState::Ready));
    });
}
