//! Queue pairs of one process.

use anyverbs_testing::Stopwatch;
use std::time::{Duration, Instant};

use anyverbs::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

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

/// Packets and bytes out and in, and ACKs.
fn moved(e: &Endpoint) -> [u64; 5] {
    let counters = e.context.counters().unwrap();
    use anyverbs_proto::counters::Counter::*;
    [SentPkts, SentBytes, RcvdPkts, RcvdBytes, AcksSent].map(|counter| counters.read(counter))
}

/// A SEND is executed while it is posted. It counts as the packets that it fills, and nothing answers it.
#[test]
fn a_send_makes_no_other_packet() {
    // It counts exactly.
    let name = "one_process::a_send_makes_no_other_packet";
    anyverbs_testing::in_own_process(name, send_all_lengths);
}

fn send_all_lengths() {
    const MOST: usize = 1_000_000;
    let own = Endpoint::new(QpType::Rc);
    own.connect(own.address());
    let (a, b) = pair(QpType::Rc);
    for (from, to) in [(&a, &b), (&b, &a), (&own, &own)] {
        let (src, dst) = (Buffer::new(&from.pd, MOST), Buffer::new(&to.pd, MOST));
        for len in [0, 1, 64, 4096, 4097, 8192, MOST] {
            let (data, before) = (pattern(len, len as u8), moved(from));
            src.write(0, &data);
            to.recv(1, &[dst.sge(0, MOST)]);
            from.send(2, SendOp::Send, &[src.sge(0, len)]);
            let packets = len.div_ceil(4096).max(1) as u64;
            let bytes = 12 * packets + len as u64;
            let after = moved(from);
            let more: [u64; 5] = std::array::from_fn(|i| after[i] - before[i]);
            assert_eq!(more, [packets, bytes, packets, bytes, 0], "{len} bytes");
            let both = || {
                let mut wcs = to.poll(1);
                if wcs.len() < 2 {
                    wcs.extend(from.poll(1));
                }
                let what = |wc: &Wc| (wc.wr_id, wc.status, wc.opcode, wc.byte_len);
                wcs.iter().map(what).collect::<Vec<_>>()
            };
            let wcs = both();
            let len = len as u32;
            let received = (1, WcStatus::Success, WcOpcode::Recv, len);
            let sent = (2, WcStatus::Success, WcOpcode::Send, len);
            assert_eq!(wcs, [received, sent]);
            assert!(dst.read(0, data.len()) == data, "{len} bytes");
            // A packet has the next PSN.
            to.recv(3, &[]);
            from.send(4, SendOp::SendImm(5), &[]);
            assert!(both().iter().all(|wc| wc.1 == WcStatus::Success));
        }
    }
}

/// SENDs that a short way does not take: what is wrong with them is found as ever.
#[test]
fn a_short_send_that_is_wrong_fails_at_its_end() {
    let wrong_key = |sge: Sge| Sge { lkey: sge.lkey ^ 0x100, ..sge };
    for (what, room, sends, expected) in [
        ("the key of the data", 64, true, [WcStatus::LocProtErr, WcStatus::WrFlushErr]),
        ("the key of the receive", 64, false, [WcStatus::RemOpErr, WcStatus::LocProtErr]),
        ("the length of the receive", 7, false, [WcStatus::RemInvReqErr, WcStatus::LocLenErr]),
    ] {
        let (a, b) = pair(QpType::Rc);
        let (src, dst) = (Buffer::new(&a.pd, 64), Buffer::new(&b.pd, 64));
        let (from, to) = (src.sge(0, 8), dst.sge(0, room));
        let is_long = room < 8;
        b.recv(1, &[if sends || is_long { to } else { wrong_key(to) }]);
        a.send(2, SendOp::Send, &[if sends { wrong_key(from) } else { from }]);
        assert_eq!(a.poll(1)[0].status, expected[0], "{what}");
        let err = QpAttr { state: QpState::Err, ..QpAttr::default() };
        b.qp.modify(&err, QpAttrMask::STATE).unwrap();
        assert_eq!(b.poll(1)[0].status, expected[1], "{what}");
    }
}

/// A SEND that finds no receive waits for one, and the SEND behind it stays behind it.
#[test]
fn a_short_send_without_a_receive_waits_for_it() {
    let (a, b) = pair(QpType::Rc);
    let (src, dst) = (Buffer::new(&a.pd, 64), Buffer::new(&b.pd, 64));
    for round in 0..20 {
        src.write(0, &[round; 8]);
        a.send(1, SendOp::Send, &[src.sge(0, 8)]);
        a.send(2, SendOp::Send, &[src.sge(0, 4)]);
        b.recv(3, &[dst.sge(0, 8)]);
        b.recv(4, &[dst.sge(8, 8)]);
        let received: Vec<_> = b.poll(2).iter().map(|wc| (wc.wr_id, wc.byte_len)).collect();
        assert_eq!(received, [(3, 8), (4, 4)]);
        assert_eq!(a.poll(2).iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(dst.read(0, 12), [round; 12]);
    }
}

/// Two threads send to each other's queue pair at once, short and long messages in random order. Each finds the other one's queue
/// pair locked now and then.
#[test]
fn two_threads_send_to_each_other_in_order() {
    const MESSAGES: u64 = 20_000;
    const SLOTS: u64 = 32;
    const SLOT: usize = 9000;
    let work = |e: Endpoint, seed: u64| {
        let mut random = SmallRng::seed_from_u64(seed);
        let (src, dst) = (Buffer::new(&e.pd, SLOT), Buffer::new(&e.pd, SLOTS as usize * SLOT));
        let post = |n: u64| e.recv(n, &[dst.sge((n % SLOTS) as usize * SLOT, SLOT)]);
        (0..SLOTS).for_each(post);
        let (mut sent, mut complete, mut received) = (0, 0, 0);
        while complete < MESSAGES || received < MESSAGES {
            if sent < MESSAGES && sent == complete {
                let len = if random.random_ratio(1, 8) { SLOT } else { random.random_range(8..64) };
                src.write(0, &sent.to_ne_bytes());
                e.send(sent, SendOp::Send, &[src.sge(0, len)]);
                sent += 1;
            }
            let mut wcs = [Wc::default(); 8];
            let n = e.cq.poll(&mut wcs).unwrap();
            for wc in &wcs[..n] {
                assert_eq!(wc.status, WcStatus::Success);
                if wc.opcode == WcOpcode::Send {
                    assert_eq!(wc.wr_id, complete);
                    complete += 1;
                    continue;
                }
                let at = (wc.wr_id % SLOTS) as usize * SLOT;
                let number = dst.read(at, 8);
                assert_eq!((wc.wr_id, number), (received, received.to_ne_bytes().to_vec()));
                received += 1;
                post(wc.wr_id + SLOTS);
            }
        }
    };
    let (a, b) = pair(QpType::Rc);
    std::thread::scope(|threads| {
        threads.spawn(|| work(a, 1));
        threads.spawn(|| work(b, 2));
    });
}

/// A receive may overlap the data of its SEND. It gets the bytes that were there before.
#[test]
fn a_receive_that_overlaps_its_send_gets_the_old_bytes() {
    let own = Endpoint::new(QpType::Rc);
    own.connect(own.address());
    let buffer = Buffer::new(&own.pd, 4096);
    for (from, to) in [(0, 8), (8, 0), (0, 0), (0, 900)] {
        let data = pattern(4096, 3);
        buffer.write(0, &data);
        own.recv(1, &[buffer.sge(to, 1000)]);
        own.send(2, SendOp::Send, &[buffer.sge(from, 1000)]);
        assert!(own.poll(2).iter().all(|wc| wc.status == WcStatus::Success));
        assert_eq!(buffer.read(to, 1000), data[from..from + 1000], "{from} to {to}");
    }
}
