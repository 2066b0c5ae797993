//! Registered memory that vanishes for the device alone.

use anyverbs::raw::{RawQpInit, RawSendWr, ReceiveFlags};

use super::*;

const PAGE: usize = 4096;

/// The memory that vanishes, for the scenes of [`all_scenes`] in their order. Each registers two regions.
const SCRIPT: &str = "
    page 3 of region 2 vanishes
    page 2 of region 3 vanishes
    region 6 vanishes
    page 2 of region 8 vanishes; page 2 of region 10 vanishes; page 2 of region 12 vanishes
    page 2 of region 13 vanishes; page 2 of region 15 vanishes; page 2 of region 17 vanishes
    region 19 vanishes
";

/// A region that begins with a page.
fn pages(pd: &Pd, count: usize) -> Buffer {
    let words = Box::leak(vec![0u64; (count + 1) * PAGE / 8].into_boxed_slice());
    let begin = words.as_mut_ptr().cast::<u8>();
    let all =
        Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    // SAFETY: leaked memory, used by raw pointer only.
    unsafe { Buffer::of(pd, begin.add(begin.align_offset(PAGE)), count * PAGE, all) }
}

/// Two connected endpoints, each with a region of four pages.
fn scene() -> ([Endpoint; 2], [Buffer; 2]) {
    let (a, b) = pair(QpType::Rc);
    let buffers = [&a, &b].map(|e| pages(&e.pd, 4));
    ([a, b], buffers)
}

/// Status and cause.
fn end(e: &Endpoint) -> (WcStatus, u32) {
    let wc = e.poll(1)[0];
    (wc.status, wc.vendor_err)
}

fn all_scenes() {
    a_write_arrives_up_to_the_page();
    a_send_fails_at_its_own_end();
    a_receive_fails_at_both_ends();
    let ops: [fn(&Buffer) -> SendOp; 3] = [
        |dst| SendOp::Read(dst.remote(PAGE)),
        |dst| SendOp::FetchAdd { at: dst.remote(PAGE), add: 1 },
        |dst| SendOp::CompareSwap { at: dst.remote(PAGE), compare: 0, swap: 1 },
    ];
    for status in [WcStatus::RemAccessErr, WcStatus::LocProtErr] {
        for op in ops {
            let ([a, _b], [src, dst]) = scene();
            a.send(1, op(&dst), &[src.sge(PAGE, 8)]);
            assert_eq!(end(&a), (status, 9901));
            assert_eq!(src.read(PAGE, 8), [0; 8]);
        }
    }
    inline_data_is_no_dma();
    let context = Context::open(&devices().unwrap()[0].name).unwrap();
    assert_eq!(injected(&context), 9);
}

fn a_write_arrives_up_to_the_page() {
    let ([a, b], [src, dst]) = scene();
    let data = pattern(4 * PAGE, 7);
    src.write(0, &data);
    // An access that does not touch the page is done.
    a.send(1, SendOp::Write(dst.remote(3 * PAGE)), &[src.sge(0, PAGE)]);
    assert_eq!(end(&a), (WcStatus::Success, 0));
    a.send(2, SendOp::Write(dst.remote(0)), &[src.sge(0, 4 * PAGE)]);
    assert_eq!(end(&a), (WcStatus::RemAccessErr, 9901));
    assert_eq!(event(&b.context), AsyncEventKind::QpAccessErr);
    assert_eq!(dst.read(0, 2 * PAGE), data[..2 * PAGE]);
    assert_eq!(dst.read(2 * PAGE, PAGE), vec![0; PAGE], "the program still has it");
    assert_eq!(dst.read(3 * PAGE, PAGE), data[..PAGE]);
}

fn a_send_fails_at_its_own_end() {
    let ([a, b], [src, dst]) = scene();
    b.recv(9, &[dst.sge(0, 4 * PAGE)]);
    a.send(1, SendOp::Write(dst.remote(0)), &[src.sge(0, PAGE), src.sge(2 * PAGE, PAGE)]);
    assert_eq!(end(&a), (WcStatus::Success, 0));
    a.send(2, SendOp::Send, &[src.sge(PAGE - 1, 2)]);
    assert_eq!(end(&a), (WcStatus::LocProtErr, 9901));
    assert_eq!(b.cq.poll(&mut [Wc::default()]).unwrap(), 0, "the peer sees nothing");
}

fn a_receive_fails_at_both_ends() {
    let ([a, b], [src, dst]) = scene();
    b.recv(9, &[dst.sge(100, 64)]);
    a.send(1, SendOp::Send, &[src.sge(0, 64)]);
    assert_eq!(end(&b), (WcStatus::LocProtErr, 9901));
    assert_eq!(end(&a).0, WcStatus::RemOpErr);
}

fn inline_data_is_no_dma() {
    let ([a, _b], [src, dst]) = scene();
    src.write(0, &[7; 8]);
    let (op, flags) = (SendOp::Write(dst.remote(0)), SendFlags::SIGNALED | SendFlags::INLINE);
    let sges = &[src.sge(0, 8)];
    a.qp.post_send(&[SendWr { wr_id: 1, op, flags, sges, ud: None, xrc_srqn: 0 }]).unwrap();
    assert_eq!(end(&a), (WcStatus::Success, 0));
    assert_eq!(dst.read(0, 8), [7; 8]);
}

#[test]
fn requests_fail_whose_memory_has_vanished() {
    with("memory::requests_fail_whose_memory_has_vanished", SCRIPT, &[], all_scenes);
}

#[test]
fn requests_by_udp_fail_whose_memory_has_vanished() {
    with("memory::requests_by_udp_fail_whose_memory_has_vanished", SCRIPT, &BY_UDP, all_scenes);
}

#[test]
fn a_datagram_fails_whose_memory_has_vanished_and_the_queue_goes_on() {
    let name = "memory::a_datagram_fails_whose_memory_has_vanished_and_the_queue_goes_on";
    with(name, "page 1 of region 1 vanishes", &[], || {
        let (a, b) = pair(QpType::Ud);
        let [src, dst] = [&a, &b].map(|e| pages(&e.pd, 2));
        let to = a.dest(b.address());
        b.recv(1, &[dst.sge(0, 256)]);
        a.send_to(1, SendOp::Send, &[src.sge(PAGE, 8)], Some(to));
        assert_eq!((end(&a), end(&b)), ((WcStatus::Success, 0), (WcStatus::Success, 0)));
        a.send_to(2, SendOp::Send, &[src.sge(0, 8)], Some(to));
        assert_eq!(end(&a), (WcStatus::LocProtErr, 9901));
        assert_eq!(a.qp.state().unwrap(), QpState::Sqe);
    });
}

/// The script is the peer's alone. This process would copy without a message otherwise.
#[test]
fn a_frame_fails_whose_memory_has_vanished() {
    let name = "memory::a_frame_fails_whose_memory_has_vanished";
    with(name, "page 2 of region 1 vanishes", &[], || {
        let context = context();
        let pd = context.alloc_pd().unwrap();
        let cq = context.create_cq(4, None, 0, 0).unwrap();
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
        for state in [QpState::Rtr, QpState::Rts] {
            qp.modify(&QpAttr { state, ..attr }, QpAttrMask::STATE).unwrap();
        }
        let buffer = pages(&pd, 2);
        let send = |at| {
            let wr = RawSendWr {
                wr_id: 1,
                flags: SendFlags::SIGNALED,
                fill_in_checksums: false,
                segmentation: None,
                sges: &[buffer.sge(at, 64)],
            };
            qp.post().unwrap().send(&wr).unwrap();
            let mut wcs = [Wc::default()];
            assert_eq!(cq.poll(&mut wcs).unwrap(), 1);
            (wcs[0].status, wcs[0].vendor_err)
        };
        assert_eq!(send(0), (WcStatus::Success, 0));
        assert_eq!(send(4096), (WcStatus::LocProtErr, 9901));
        assert_eq!(injected(&context), 1);
    });
}

#[test]
fn memory_of_a_peer_vanishes_through_shared_memory() {
    // The peer has a script, and so no memory that others may copy from and to.
    let mut peer = Peer::spawn("rc", &[("ANYVERBS_FAULTS", "region 1 vanishes")]);
    let e = Endpoint::new(QpType::Rc);
    let src = Buffer::new(&e.pd, OFFERED);
    let (_, remote) = peer.connect(&e, &src);
    e.send(1, SendOp::Write(remote), &[src.sge(0, OFFERED)]);
    assert_eq!(end(&e), (WcStatus::RemAccessErr, 9901), "the peer tells why");
}

#[test]
fn own_memory_vanishes_through_shared_memory() {
    let name = "memory::own_memory_vanishes_through_shared_memory";
    with(name, "region 1 vanishes", &[], || {
        let mut peer = Peer::spawn("rc", &[("ANYVERBS_FAULTS", "")]);
        let e = Endpoint::new(QpType::Rc);
        let src = Buffer::new(&e.pd, OFFERED);
        let (_, remote) = peer.connect(&e, &src);
        e.send(1, SendOp::Read(remote), &[src.sge(0, 64)]);
        assert_eq!(end(&e), (WcStatus::LocProtErr, 9901));
        assert!(e.context.counters().unwrap().read(Counter::ShmSentPkts) > 0);
    });
}

#[test]
fn a_changed_region_counts_its_pages_anew() {
    let name = "memory::a_changed_region_counts_its_pages_anew";
    with(name, "page 2 of region 2 vanishes", &[], || {
        let (a, b) = pair(QpType::Rc);
        let src = pages(&a.pd, 4);
        let words = Box::leak(vec![0u64; 5 * PAGE / 8].into_boxed_slice()).as_mut_ptr();
        let begin = words.cast::<u8>();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::MW_BIND;
        // SAFETY: leaked memory, used by raw pointer only.
        let dst =
            unsafe { Buffer::of(&b.pd, begin.add(begin.align_offset(PAGE)), 4 * PAGE, access) };
        let write = |at: usize| {
            a.send(1, SendOp::Write(dst.remote(at)), &[src.sge(0, 8)]);
            end(&a)
        };
        assert_eq!(write(0), (WcStatus::Success, 0));
        // From its second page on it is the first one that is gone no more, and the third one that is.
        let translation = Some((dst.addr() + PAGE as u64, 2 * PAGE as u64));
        // SAFETY: as above.
        unsafe { dst.mr.rereg(&Rereg { translation, ..Rereg::default() }) }.unwrap();
        assert_eq!(write(PAGE), (WcStatus::Success, 0));
        assert_eq!(write(2 * PAGE), (WcStatus::RemAccessErr, 9901));
    });
}
