//! Dependencies between objects, refusals, and reports.

use anyverbs::error::*;
use anyverbs::*;

use crate::endpoint::*;

#[test]
fn a_pd_is_busy_while_it_is_used() {
    let context = context();
    let pd = context.alloc_pd().unwrap();
    let buffer = Buffer::new(&pd, 64);
    let attr = AhAttr {
        dgid: context.gid(1, 0).unwrap().unwrap().gid,
        is_global: true,
        port: 1,
        ..AhAttr::default()
    };
    let ah = pd.create_ah(&attr).unwrap();
    let srq = pd.create_srq(&SrqInitAttr { max_wr: 4, max_sge: 1, cookie: 0 }).unwrap();
    let cq = context.create_cq(4, None, 0, 0).unwrap();
    let init = QpInitAttr {
        send_cq: &cq,
        recv_cq: &cq,
        srq: Some(&srq),
        cap: CAP,
        qp_type: QpType::Rc,
        sq_sig_all: true,
        cookie: 0,
    };
    let qp = context.create_qp(&pd, &init).unwrap();
    assert_eq!(qp.cap().max_recv_wr, 0);
    assert_eq!(pd.destroy(), Err(DestroyError::Busy("1 MR, 1 AH, 1 QP, 1 SRQ".into())));
    assert_eq!(srq.destroy(), Err(DestroyError::Busy("1 QP".into())));
    let refused = qp.post_recv(&[RecvWr { wr_id: 0, sges: &[] }]).unwrap_err();
    assert_eq!((refused.0, refused.1.errno()), (0, libc::EINVAL));
    qp.destroy().unwrap();
    assert_eq!(qp.destroy(), Err(DestroyError::Gone));
    assert!(matches!(qp.post(), Err(PostError::Gone)));
    srq.destroy().unwrap();
    assert!(matches!(srq.post(), Err(PostError::Gone)));
    ah.destroy().unwrap();
    buffer.mr.destroy().unwrap();
    pd.destroy().unwrap();
    assert!(matches!(pd.create_ah(&attr), Err(CreateError::Foreign(_))));
    cq.destroy().unwrap();
}

static CODE: u64 = 7;

#[test]
fn regions_are_checked() {
    let context = context();
    let pd = context.alloc_pd().unwrap();
    let reg = |addr, len, access| {
        // SAFETY: registering alone touches nothing.
        unsafe { pd.reg_mr(addr, len, addr, access) }.map(|_| ())
    };
    let place = 0u64;
    let at = &raw const place as u64;
    assert_eq!(reg(at, 8, Access::REMOTE_WRITE), Err(RegisterError::Access));
    assert_eq!(reg(at, 8, Access::REMOTE_ATOMIC), Err(RegisterError::Access));
    assert_eq!(reg(at, 8, Access::REMOTE_READ), Ok(()));
    assert_eq!(reg(0, 0, Access::empty()), Ok(()));
    assert_eq!(reg(u64::MAX, 2, Access::empty()), Err(RegisterError::Range));
    assert_eq!(reg(8, 8, Access::empty()), Err(RegisterError::NotMapped(8)));
    assert_eq!(reg(8, 8, Access::ON_DEMAND), Ok(()));
    assert_eq!(reg(0, u64::MAX, Access::ON_DEMAND), Ok(()));
    assert_eq!(reg(0, u64::MAX, Access::empty()), Err(RegisterError::NotMapped(0)));
    let unsupported = Access::NULL;
    assert_eq!(reg(at, 8, unsupported), Err(RegisterError::Unsupported(unsupported.bits())));
    let everything = Access::ON_DEMAND | Access::FLUSH_PERSISTENT;
    for volatile in [reg(at, 8, Access::FLUSH_PERSISTENT), reg(0, u64::MAX, everything)] {
        assert!(matches!(volatile, Err(RegisterError::Invalid(_))), "{volatile:?}");
    }
    // Memory that may not be written is not registered for writing.
    let code = &raw const CODE as u64;
    assert_eq!(reg(code, 8, Access::empty()), Ok(()));
    assert_eq!(reg(code, 8, Access::LOCAL_WRITE), Err(RegisterError::Protected(code)));
}

#[test]
fn a_region_changes_in_place() {
    let (a, b) = pair(QpType::Rc);
    let src = Buffer::new(&a.pd, 64);
    let dst = Buffer::with_access(&b.pd, 64, Access::LOCAL_WRITE);
    // SAFETY: the same memory.
    unsafe {
        dst.mr.rereg(&Rereg {
            access: Some(Access::LOCAL_WRITE | Access::REMOTE_WRITE),
            ..Rereg::default()
        })
    }
    .unwrap();
    a.send(1, SendOp::Write(dst.remote(0)), &[src.sge(0, 64)]);
    assert_eq!(a.poll(1)[0].status, WcStatus::Success);
    let other = b.context.alloc_pd().unwrap();
    // SAFETY: the same memory.
    unsafe { dst.mr.rereg(&Rereg { pd: Some(&other), ..Rereg::default() }) }.unwrap();
    assert_eq!(other.destroy(), Err(DestroyError::Busy("1 MR".into())));
    a.send(2, SendOp::Write(dst.remote(0)), &[src.sge(0, 64)]);
    assert_eq!(a.poll(1)[0].status, WcStatus::RemAccessErr);
}

#[test]
fn values_out_of_range_are_refused() {
    let context = context();
    let attr = context.device_attr().unwrap();
    let refused =
        |cqe, vector| context.create_cq(cqe, None, vector, 0).map(|_| ()).unwrap_err().errno();
    assert_eq!(refused(0, 0), libc::EINVAL);
    assert_eq!(refused(attr.max_cqe + 1, 0), libc::EINVAL);
    assert_eq!(refused(1, attr.num_comp_vectors), libc::EINVAL);
    let cq = context.create_cq(1, None, 0, 0).unwrap();
    assert_eq!(cq.req_notify(false), Err(CqError::NoChannel));
    assert!(context.gid(2, 0).is_err());
    assert!(context.gid(1, limits::GID_TABLE_LEN).is_err());
    assert_eq!(context.gid(1, limits::GID_TABLE_LEN - 1).unwrap(), None);
    assert_eq!(context.pkey(1, 0).unwrap(), PKey::DEFAULT);
    assert!(context.pkey(1, 1).is_err());
    let pd = context.alloc_pd().unwrap();
    let bad = |cap| {
        let init = QpInitAttr {
            send_cq: &cq,
            recv_cq: &cq,
            srq: None,
            cap,
            qp_type: QpType::Rc,
            sq_sig_all: true,
            cookie: 0,
        };
        context.create_qp(&pd, &init).map(|_| ()).unwrap_err().errno()
    };
    assert_eq!(bad(QpCap { max_send_wr: attr.max_qp_wr + 1, ..CAP }), libc::EINVAL);
    assert_eq!(bad(QpCap { max_recv_sge: attr.max_sge + 1, ..CAP }), libc::EINVAL);
    assert_eq!(bad(QpCap { max_inline_data: attr.max_inline_data + 1, ..CAP }), libc::EINVAL);
    let gid = context.gid(1, 0).unwrap().unwrap().gid;
    let good = AhAttr { dgid: gid, is_global: true, port: 1, ..AhAttr::default() };
    for bad in [
        AhAttr { port: 2, ..good },
        AhAttr { is_global: false, ..good },
        AhAttr { sgid_index: 127, ..good },
        AhAttr { sgid_index: 255, ..good },
    ] {
        assert_eq!(pd.create_ah(&bad).map(|_| ()).unwrap_err().errno(), libc::EINVAL);
    }
}

#[test]
fn numbers_of_queue_pairs_are_not_reused_at_once() {
    let context = context();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(1, None, 0, 0).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..1000 {
        let init = QpInitAttr {
            send_cq: &cq,
            recv_cq: &cq,
            srq: None,
            cap: QpCap::default(),
            qp_type: QpType::Ud,
            sq_sig_all: true,
            cookie: 0,
        };
        let qp = context.create_qp(&pd, &init).unwrap();
        assert!(seen.insert(qp.qpn().get()));
        assert_eq!(qp.qpn().slot(), context.details().unwrap().slot);
        qp.destroy().unwrap();
    }
}

#[test]
fn completions_leave_with_their_queue_pair() {
    let (a, b) = pair(QpType::Rc);
    a.recv(1, &[]);
    a.recv(2, &[]);
    a.qp.modify(&QpAttr { state: QpState::Err, ..QpAttr::default() }, QpAttrMask::STATE).unwrap();
    a.qp.destroy().unwrap();
    assert_eq!(a.cq.poll(&mut [Wc::default(); 4]), Ok(0));
    b.recv(1, &[]);
    b.qp.modify(&QpAttr { state: QpState::Err, ..QpAttr::default() }, QpAttrMask::STATE).unwrap();
    b.qp.modify(&QpAttr::default(), QpAttrMask::STATE).unwrap();
    assert_eq!(b.qp.state().unwrap(), QpState::Reset);
    assert_eq!(b.cq.poll(&mut [Wc::default(); 4]), Ok(0));
}
