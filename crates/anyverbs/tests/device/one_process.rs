//! Queue pairs of one process.

use anyverbs_testing::Stopwatch;
use std::time::{Duration, Instant};

use anyverbs::*;

use crate::endpoint::*;

#[test]
fn rc_send_of_all_sizes() {
    let (a, b) = pair(QpType::Rc);
    let (src, dst) = (Buffer::new(&a.pd, 1 << 20), Buffer::new(&b.pd, 1 << 20));
    for (i, len) in [0usize, 1, 3, 64, 4095, 4096, 4097, 65_536, 1_000_001].into_iter().enumerate()
    {
        let data = pattern(len, i as u8);
        src.write(0, &data);
        b.recv(1, &[dst.sge(0, 1 << 20)]);
        a.send(2, SendOp::SendImm(i as u32), &[src.sge(0, len)]);
        let wc = b.poll(1)[0];
        assert_eq!(
            (wc.status, wc.opcode, wc.byte_len, wc.imm),
            (WcStatus::Success, WcOpcode::Recv, len as u32, i as u32)
        );
        assert_eq!(wc.qpn, b.qp.qpn());
        assert_eq!(dst.read(0, len), data);
        let wc = a.poll(1)[0];
        assert_eq!((wc.status, wc.wr_id), (WcStatus::Success, 2));
    }
}

#[test]
fn a_peer_in_reset_is_given_up_after_the_retries() {
    let (a, b) = pair(QpType::Rc);
    let attr = QpAttr { state: QpState::Reset, ..QpAttr::default() };
    b.qp.modify(&attr, QpAttrMask::STATE).unwrap();
    let (begin, watch) = (Instant::now(), Stopwatch::start());
    a.send(1, SendOp::Send, &[]);
    assert_eq!(a.poll(1)[0].status, WcStatus::RetryExcErr);
    // Timeout 14, 7 retries.
    let least = Duration::from_nanos(4096 << 14) * 8;
    let took = begin.elapsed();
    // The first begins by the coarse clock (`Env::soon`), whose tick is 10 ms at most. Doubling intervals would sum up
    // to 27 of them; with one retry less there would be 7.
    let tick = Duration::from_millis(10);
    assert!(took >= least - tick && watch.elapsed() < least * 3, "{took:?}");
}

#[test]
fn rc_one_sided_operations() {
    let (a, b) = pair(QpType::Rc);
    let (src, dst) = (Buffer::new(&a.pd, 300_000), Buffer::new(&b.pd, 300_000));
    let data = pattern(200_000, 5);
    src.write(0, &data);
    a.send(1, SendOp::Write(dst.remote(17)), &[src.sge(0, 200_000)]);
    assert_eq!(a.poll(1)[0].status, WcStatus::Success);
    assert_eq!(dst.read(17, 200_000), data);
    src.write(0, &[0; 200_000]);
    a.send(2, SendOp::Read(dst.remote(17)), &[src.sge(0, 100_000), src.sge(100_000, 100_000)]);
    assert_eq!(a.poll(1)[0].opcode, WcOpcode::RdmaRead);
    assert_eq!(src.read(0, 200_000), data);
    dst.write(0, &7u64.to_ne_bytes());
    a.send(3, SendOp::FetchAdd { at: dst.remote(0), add: 5 }, &[src.sge(0, 8)]);
    a.send(4, SendOp::CompareSwap { at: dst.remote(0), compare: 12, swap: 99 }, &[src.sge(8, 8)]);
    let wcs = a.poll(2);
    assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success), "{wcs:?}");
    assert_eq!(src.read(0, 8), 7u64.to_ne_bytes());
    assert_eq!(src.read(8, 8), 12u64.to_ne_bytes());
    assert_eq!(dst.read(0, 8), 99u64.to_ne_bytes());
}

#[test]
fn a_wrong_rkey_is_an_error_on_both_sides() {
    let (a, b) = pair(QpType::Rc);
    let src = Buffer::new(&a.pd, 64);
    a.send(1, SendOp::Write(RemoteAddr { va: 0, rkey: 77 }), &[src.sge(0, 64)]);
    assert_eq!(a.poll(1)[0].status, WcStatus::RemAccessErr);
    let event = b.context.get_async_event().unwrap();
    // COMM_EST comes first where the queue pair was still in RTR; here it was in RTS.
    assert_eq!(event.kind(), AsyncEventKind::QpAccessErr);
    assert_eq!(event.element(), EventElement::Qp { qpn: b.qp.qpn(), cookie: 9 });
    drop(event);
    b.qp.destroy().unwrap();
}

#[test]
fn memory_that_vanished_is_a_protection_error() {
    let (a, b) = pair(QpType::Rc);
    let dst = Buffer::new(&b.pd, 4096);
    let len = 1 << 16;
    let map = || {
        // SAFETY: a new mapping at a place of the kernel's choice.
        let p = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(p, libc::MAP_FAILED);
        p
    };
    let p = map();
    // SAFETY: nothing else uses the mapping.
    let mr = unsafe { a.pd.reg_mr(p as u64, len as u64, p as u64, Access::LOCAL_WRITE) }.unwrap();
    // SAFETY: our mapping.
    unsafe { libc::munmap(p, len) };
    b.recv(1, &[dst.sge(0, 4096)]);
    a.send(2, SendOp::Send, &[Sge { addr: p as u64, len: 4096, lkey: mr.lkey() }]);
    assert_eq!(a.poll(1)[0].status, WcStatus::LocProtErr);
}

#[test]
fn uc_and_ud_carry_messages() {
    let (a, b) = pair(QpType::Uc);
    let (src, dst) = (Buffer::new(&a.pd, 1 << 20), Buffer::new(&b.pd, 1 << 20));
    let data = pattern(1 << 20, 1);
    src.write(0, &data);
    b.recv(1, &[dst.sge(0, 1 << 20)]);
    a.send(2, SendOp::Send, &[src.sge(0, 1 << 20)]);
    assert_eq!(b.poll(1)[0].byte_len, 1 << 20);
    assert_eq!(dst.read(0, 1 << 20), data);
    assert_eq!(a.poll(1)[0].status, WcStatus::Success);

    let (a, b) = pair(QpType::Ud);
    let (src, dst) = (Buffer::new(&a.pd, 8192), Buffer::new(&b.pd, 8192));
    src.write(0, &data[..4096]);
    b.recv(1, &[dst.sge(0, 8192)]);
    let attr = AhAttr {
        dgid: b.address().gid,
        hop_limit: 64,
        is_global: true,
        port: 1,
        ..AhAttr::default()
    };
    let ah = a.pd.create_ah(&attr).unwrap();
    a.send_to(2, SendOp::Send, &[src.sge(0, 4096)], Some(ah.dest(b.qp.qpn(), QKEY)));
    ah.destroy().unwrap();
    let wc = b.poll(1)[0];
    assert_eq!((wc.byte_len, wc.src_qpn), (4096 + 40, a.qp.qpn()));
    assert!(wc.flags.contains(WcFlags::GRH));
    assert_eq!(dst.read(40, 4096), &data[..4096]);
}

#[test]
fn uc_bursts_in_one_process_lose_nothing() {
    let (a, b) = pair(QpType::Uc);
    let (src, dst) = (Buffer::new(&a.pd, 1 << 20), Buffer::new(&b.pd, 1 << 20));
    for _ in 0..32 {
        b.recv(1, &[dst.sge(0, 1 << 20)]);
    }
    let sges = [src.sge(0, 1 << 20)];
    let wr = SendWr {
        wr_id: 0,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        sges: &sges,
        ud: None,
        xrc_srqn: 0,
    };
    a.qp.post_send(&[wr; 32]).unwrap();
    assert!(b.poll(32).iter().all(|wc| wc.status == WcStatus::Success && wc.byte_len == 1 << 20));
    a.poll(32);
}

#[test]
fn a_queue_pair_may_talk_to_itself() {
    let a = Endpoint::new(QpType::Rc);
    a.connect(a.address());
    let buffer = Buffer::new(&a.pd, 8192);
    buffer.write(0, &pattern(4096, 3));
    a.recv(1, &[buffer.sge(4096, 4096)]);
    a.send(2, SendOp::Send, &[buffer.sge(0, 4096)]);
    assert_eq!(a.poll(2).len(), 2);
    assert_eq!(buffer.read(4096, 4096), pattern(4096, 3));
}

#[test]
fn many_threads_on_many_queue_pairs() {
    std::thread::scope(|s| {
        for t in 0..4u8 {
            s.spawn(move || {
                let (a, b) = pair(QpType::Rc);
                let (src, dst) = (Buffer::new(&a.pd, 10_000), Buffer::new(&b.pd, 10_000));
                for i in 0..300usize {
                    let data = pattern(1 + i * 31 % 9_000, t ^ i as u8);
                    src.write(0, &data);
                    b.recv(1, &[dst.sge(0, 10_000)]);
                    a.send(2, SendOp::Send, &[src.sge(0, data.len())]);
                    assert_eq!(b.poll(1)[0].byte_len as usize, data.len());
                    assert_eq!(dst.read(0, data.len()), data);
                    assert_eq!(a.poll(1)[0].status, WcStatus::Success);
                }
            });
        }
    });
}
