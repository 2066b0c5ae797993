//! WRITEs and READs to a queue pair of the same process, which are done while they are posted. What is unusual is a packet, and
//! ends as one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyverbs::*;
use anyverbs_proto::counters::Counter;

use crate::endpoint::*;

const NONE: SendFlags = SendFlags::empty();

/// Runs a test in a process of its own. It counts exactly, and no other test makes queue pairs or holds them locked meanwhile.
fn alone(name: &str, test: impl FnOnce()) {
    anyverbs_testing::in_own_process(&format!("within::{name}"), test);
}

/// Posts a request by a short way, or else by the general one. Whether the first took it.
fn post(e: &Endpoint, wr_id: u64, op: SendOp, flags: SendFlags, sge: Sge) -> bool {
    let flags = flags | SendFlags::SIGNALED;
    let is_done = e.qp.post_short(wr_id, op, flags, sge);
    if !is_done {
        let wr = SendWr { wr_id, op, flags, sges: &[sge], ud: None, xrc_srqn: 0 };
        e.qp.post_send(&[wr]).unwrap();
    }
    is_done
}

fn write_and_read(remote: RemoteAddr) -> [SendOp; 2] {
    [SendOp::Write(remote), SendOp::Read(remote)]
}

fn status(e: &Endpoint) -> WcStatus {
    e.poll(1)[0].status
}

fn go(e: &Endpoint, state: QpState) {
    e.qp.modify(&QpAttr { state, ..QpAttr::default() }, QpAttrMask::STATE).unwrap();
}

/// Packets and bytes out and in, and ACKs.
fn moved(e: &Endpoint) -> [u64; 5] {
    use Counter::*;
    let counters = e.context.counters().unwrap();
    [SentPkts, SentBytes, RcvdPkts, RcvdBytes, AcksSent].map(|counter| counters.read(counter))
}

/// A queue pair that is connected to itself.
fn own() -> Endpoint {
    let own = Endpoint::new(QpType::Rc);
    own.connect(own.address());
    own
}

#[test]
fn writes_and_reads_are_done_while_they_are_posted() {
    alone("writes_and_reads_are_done_while_they_are_posted", || {
        const MOST: usize = 1 << 20;
        let (a, b) = pair(QpType::Rc);
        let own = own();
        for (from, to) in [(&a, &b), (&b, &a), (&own, &own)] {
            let [src, back] = [(); 2].map(|()| Buffer::new(&from.pd, MOST + 8));
            let dst = Buffer::new(&to.pd, MOST + 8);
            for (i, len) in [1, 3, 8, 63, 64, 65, 4096, 4097, 65_536, MOST].into_iter().enumerate()
            {
                let (data, before) = (pattern(len, i as u8), moved(from));
                src.write(3, &data);
                dst.write(0, &[0xee; MOST + 8]);
                let at = dst.remote(5);
                assert!(post(from, 1, SendOp::Write(at), NONE, src.sge(3, len)), "{len} bytes");
                // It is there, though nobody has polled.
                assert!(dst.read(5, len) == data, "{len} bytes");
                assert_eq!((dst.read(0, 5), dst.read(5 + len, 1)), (vec![0xee; 5], vec![0xee]));
                assert!(post(from, 2, SendOp::Read(at), SendFlags::FENCE, back.sge(1, len)));
                assert!(back.read(1, len) == data, "{len} bytes");
                let wcs = from.poll(2);
                let wcs =
                    wcs.iter().map(|wc| (wc.wr_id, wc.status, wc.opcode, wc.byte_len, wc.qpn));
                let (ok, len, qpn) = (WcStatus::Success, len as u32, from.qp.qpn());
                assert_eq!(
                    wcs.collect::<Vec<_>>(),
                    [(1, ok, WcOpcode::RdmaWrite, len, qpn), (2, ok, WcOpcode::RdmaRead, len, qpn)]
                );
                let after = moved(from);
                let more: [u64; 5] = std::array::from_fn(|i| after[i] - before[i]);
                let bytes = 2 * u64::from(len);
                assert_eq!(more, [2, bytes, 2, bytes, 0], "{len} bytes");
            }
            // Without a key, since it is inline.
            src.write(0, &pattern(40, 9));
            let sge = Sge { lkey: 0, ..src.sge(0, 40) };
            assert!(post(from, 3, SendOp::Write(dst.remote(0)), SendFlags::INLINE, sge));
            assert_eq!((status(from), dst.read(0, 40)), (WcStatus::Success, pattern(40, 9)));
        }
    });
}

/// A WRITE or READ that is wrong. The responder finds what is wrong with it, or the requester, as ever.
#[test]
fn what_is_wrong_with_a_request_is_found_as_ever() {
    alone("what_is_wrong_with_a_request_is_found_as_ever", || {
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let faults = [
            ("key", WcStatus::RemAccessErr),
            ("before the beginning", WcStatus::RemAccessErr),
            ("past the end", WcStatus::RemAccessErr),
            ("protection domain", WcStatus::RemAccessErr),
            ("right of the region", WcStatus::RemAccessErr),
            ("right of the queue pair", WcStatus::RemInvReqErr),
            ("memory that vanished", WcStatus::RemAccessErr),
            ("local key", WcStatus::LocProtErr),
            ("local range", WcStatus::LocProtErr),
            ("local right", WcStatus::LocProtErr),
        ];
        for (fault, expected) in faults {
            for is_read in [false, true] {
                if fault == "local right" && !is_read {
                    // A WRITE needs none.
                    continue;
                }
                let (a, b) = pair(QpType::Rc);
                let other_pd = b.context.alloc_pd().unwrap();
                let right = if is_read { Access::REMOTE_READ } else { Access::REMOTE_WRITE };
                let lacks = if fault == "right of the region" { right } else { Access::empty() };
                let pd = if fault == "protection domain" { &other_pd } else { &b.pd };
                let dst = Buffer::with_access(pd, 4096, all.difference(lacks));
                let local = if fault == "local right" { Access::REMOTE_READ } else { all };
                let src = Buffer::with_access(&a.pd, 4096, local);
                let (mut remote, mut sge) = (dst.remote(8), src.sge(8, 16));
                match fault {
                    "key" => remote.rkey ^= 1,
                    "before the beginning" => remote.va -= 9,
                    "past the end" => remote.va += 4096 - 23,
                    "right of the queue pair" => {
                        let attr = QpAttr { access: all.difference(right), ..QpAttr::default() };
                        b.qp.modify(&attr, QpAttrMask::ACCESS_FLAGS).unwrap();
                    }
                    "memory that vanished" => {
                        let (gone, mr) = vanished(&b.pd);
                        remote = RemoteAddr { va: gone, rkey: mr.rkey() };
                        std::mem::forget(mr);
                    }
                    "local key" => sge.lkey ^= 1,
                    "local range" => sge.addr += 4096,
                    _ => {}
                }
                let op = write_and_read(remote)[usize::from(is_read)];
                assert!(!post(&a, 7, op, NONE, sge), "{fault}");
                let wc = a.poll(1)[0];
                assert_eq!((wc.wr_id, wc.status), (7, expected), "{fault}, READ: {is_read}");
                assert_eq!(a.qp.state().unwrap(), QpState::Err, "{fault}");
                assert_eq!(dst.read(0, 4096), [0; 4096], "{fault}");
                let event = (!fault.starts_with("local"))
                    .then(|| b.context.get_async_event().unwrap().kind());
                let expected = match expected {
                    WcStatus::RemAccessErr => Some(AsyncEventKind::QpAccessErr),
                    WcStatus::RemInvReqErr => Some(AsyncEventKind::QpReqErr),
                    _ => None,
                };
                assert_eq!(event, expected, "{fault}");
            }
        }
    });
}

/// A region whose memory was unmapped.
fn vanished(pd: &Pd) -> (u64, Mr) {
    let (len, all) = (4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ);
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at a place of the kernel's choice, which nothing else uses.
    unsafe {
        let p = libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0);
        assert_ne!(p, libc::MAP_FAILED);
        let mr = pd.reg_mr(p as u64, len as u64, p as u64, all).unwrap();
        // No other mapping of this test comes to this place.
        let none = libc::MAP_FIXED | flags;
        assert_eq!(libc::mmap(p, len, libc::PROT_NONE, none, -1, 0), p);
        (p as u64, mr)
    }
}

/// Source and destination may overlap. The destination gets the bytes that were there before.
#[test]
fn a_request_onto_its_own_data_gets_the_old_bytes() {
    alone("a_request_onto_its_own_data_gets_the_old_bytes", || {
        let own = own();
        let buffer = Buffer::new(&own.pd, 4096);
        for (from, to, overlap) in
            [(0, 8, true), (8, 0, true), (0, 0, true), (0, 999, true), (0, 1000, false)]
        {
            for is_read in [false, true] {
                let data = pattern(4096, 3);
                buffer.write(0, &data);
                let (far, near) = if is_read { (from, to) } else { (to, from) };
                let op = write_and_read(buffer.remote(far))[usize::from(is_read)];
                assert_eq!(post(&own, 1, op, NONE, buffer.sge(near, 1000)), !overlap);
                assert_eq!(status(&own), WcStatus::Success);
                assert_eq!(buffer.read(to, 1000), data[from..from + 1000], "{from} to {to}");
            }
        }
    });
}

/// Nothing overtakes a request that is a packet, and what comes behind its end is done at once again.
#[test]
fn order_with_packets_is_kept() {
    alone("order_with_packets_is_kept", || {
        for fence in [NONE, SendFlags::FENCE] {
            let (a, b) = pair(QpType::Rc);
            let [src, back] = [(); 2].map(|()| Buffer::new(&a.pd, 64));
            let dst = Buffer::new(&b.pd, 64);
            // It waits for a receive.
            a.send(1, SendOp::Send, &[src.sge(0, 8)]);
            src.write(0, &[5; 8]);
            assert!(!post(&a, 2, SendOp::Write(dst.remote(0)), NONE, src.sge(0, 8)));
            assert!(!post(&a, 3, SendOp::Read(dst.remote(0)), fence, back.sge(0, 8)));
            assert_eq!(dst.read(0, 8), [0; 8]);
            b.recv(4, &[dst.sge(32, 8)]);
            let wcs = a.poll(3);
            assert!(
                wcs.iter()
                    .map(|wc| (wc.wr_id, wc.status))
                    .eq((1..4).map(|n| (n, WcStatus::Success)))
            );
            assert_eq!((dst.read(0, 8), back.read(0, 8)), (vec![5; 8], vec![5; 8]));
            b.poll(1);
            // Atomics are packets, and order is kept across.
            for add in 1..100u8 {
                let at = dst.remote(0);
                dst.write(0, &[0; 8]);
                let add_there = SendOp::FetchAdd { at, add: add.into() };
                a.send(5, add_there, &[back.sge(8, 8)]);
                post(&a, 6, SendOp::Read(at), fence, back.sge(0, 8));
                src.write(0, &[!add; 8]);
                post(&a, 7, SendOp::Write(at), fence, src.sge(0, 8));
                assert!(a.poll(3).iter().all(|wc| wc.status == WcStatus::Success));
                assert_eq!(back.read(0, 8), u64::from(add).to_ne_bytes());
                assert_eq!(dst.read(0, 8), [!add; 8]);
                assert!(post(&a, 8, SendOp::Read(at), fence, back.sge(0, 8)));
                assert_eq!((status(&a), back.read(0, 8)), (WcStatus::Success, vec![!add; 8]));
            }
        }
    });
}

/// Requests within the process that change nothing but bytes: SENDs go on with the next PSN.
#[test]
fn sends_come_between() {
    alone("sends_come_between", || {
        let (a, b) = pair(QpType::Rc);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 20_000));
        for n in 0..200u8 {
            src.write(0, &pattern(20_000, n));
            assert!(post(&a, 1, SendOp::Write(dst.remote(0)), NONE, src.sge(0, 100)));
            b.recv(2, &[dst.sge(100, 19_000)]);
            // One has a packet, the other several.
            let len = if n % 2 == 0 { 10 } else { 19_000 };
            a.send(3, SendOp::Send, &[src.sge(100, len)]);
            assert_eq!(a.poll(2).iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [1, 3]);
            assert_eq!(b.poll(1)[0].byte_len as usize, len);
            assert_eq!(dst.read(0, 100 + len), pattern(100 + len, n));
        }
    });
}

/// The first request to a queue pair in RTR is a packet: its program hears of it.
#[test]
fn a_peer_in_rtr_hears_of_the_first_request() {
    alone("a_peer_in_rtr_hears_of_the_first_request", || {
        let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        b.to_init();
        b.to_rtr(a.address());
        a.connect(b.address());
        let op = SendOp::Write(dst.remote(0));
        assert!(!post(&a, 1, op, NONE, src.sge(0, 8)));
        assert_eq!(status(&a), WcStatus::Success);
        assert_eq!(b.context.get_async_event().unwrap().kind(), AsyncEventKind::CommEst);
        assert!(post(&a, 2, op, NONE, src.sge(0, 8)));
        assert_eq!(status(&a), WcStatus::Success);
    });
}

/// Ends that do not count the same packets exchange packets.
#[test]
fn ends_of_different_mtus_exchange_packets() {
    alone("ends_of_different_mtus_exchange_packets", || {
        let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
        a.connect_at(&a.qp, b.address(), (14, 7), (Mtu::Mtu4096, Psn::new(100)));
        b.connect_at(&b.qp, a.address(), (14, 7), (Mtu::Mtu1024, Psn::new(100)));
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        b.recv(1, &[dst.sge(0, 8)]);
        for op in [SendOp::Send, SendOp::Write(dst.remote(0)), SendOp::Read(dst.remote(0))] {
            assert!(!post(&a, 2, op, NONE, src.sge(0, 8)), "{op:?}");
            assert_eq!(status(&a), WcStatus::Success, "{op:?}");
        }
    });
}

/// A peer that takes no requests, and one that is connected elsewhere.
#[test]
fn a_peer_that_takes_nothing_gets_nothing() {
    alone("a_peer_that_takes_nothing_gets_nothing", || {
        for what in ["in ERR", "in RESET", "destroyed", "of another", "of other PSNs"] {
            let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
            let other = Endpoint::new(QpType::Rc);
            let psn = Psn::new(if what == "of other PSNs" { 200 } else { 100 });
            a.connect_at(&a.qp, b.address(), (1, 1), (Mtu::Mtu4096, psn));
            b.connect(if what == "of another" { other.address() } else { a.address() });
            let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
            let op = SendOp::Write(dst.remote(0));
            if !what.starts_with("of") {
                assert!(post(&a, 1, op, NONE, src.sge(0, 8)), "{what}");
                assert_eq!(status(&a), WcStatus::Success);
            }
            match what {
                "in ERR" => go(&b, QpState::Err),
                "in RESET" => go(&b, QpState::Reset),
                "destroyed" => b.qp.destroy().unwrap(),
                _ => {}
            }
            src.write(0, &[7; 8]);
            assert!(!post(&a, 2, op, NONE, src.sge(0, 8)), "{what}");
            assert_eq!(status(&a), WcStatus::RetryExcErr, "{what}");
            if what != "of another" {
                // That one executes the packets, and answers to the other.
                assert_eq!(dst.read(0, 8), [0; 8], "{what}");
            }
        }
    });
}

/// When a queue pair is destroyed, its peer's WRITEs have ended.
#[test]
fn no_write_comes_behind_the_end_of_a_queue_pair() {
    alone("no_write_comes_behind_the_end_of_a_queue_pair", || {
        for round in 0..30 {
            let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
            a.connect_with(b.address(), 1, 1);
            b.connect(a.address());
            let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 4096));
            let (has_begun, has_ended) = (AtomicBool::new(false), AtomicBool::new(false));
            std::thread::scope(|threads| {
                let writer = threads.spawn(|| {
                    let mut n = 0;
                    loop {
                        src.write(0, &u64::to_ne_bytes(n));
                        let had_ended = has_ended.load(Ordering::SeqCst);
                        let is_done =
                            post(&a, n, SendOp::Write(dst.remote(0)), NONE, src.sge(0, 4096));
                        assert!(!(had_ended && is_done), "round {round}: a WRITE behind the end");
                        if status(&a) != WcStatus::Success {
                            return;
                        }
                        has_begun.store(true, Ordering::SeqCst);
                        n += 1;
                    }
                });
                while !has_begun.load(Ordering::SeqCst) && !writer.is_finished() {
                    std::thread::yield_now();
                }
                b.qp.destroy().unwrap();
                let there = dst.read(0, 8);
                has_ended.store(true, Ordering::SeqCst);
                writer.join().unwrap();
                assert_eq!(dst.read(0, 8), there, "round {round}");
            });
        }
    });
}

/// Two threads write to each other's memory and wait for the last byte. Behind that, all others are there.
#[test]
fn the_last_byte_comes_last() {
    alone("the_last_byte_comes_last", || {
        const ROUNDS: u64 = 3000;
        const MOST: usize = 20_000;
        let (a, b) = pair(QpType::Rc);
        let [to_a, to_b] = [&a, &b].map(|e| Buffer::new(&e.pd, MOST));
        let work = |e: &Endpoint, inbox: &Buffer, outbox: &Buffer, is_first: bool| {
            let src = Buffer::new(&e.pd, MOST);
            let mut done = 0;
            for round in 0..ROUNDS {
                let len = 9 + (round as usize * 977) % (MOST - 9);
                let is_there = |round: u64| {
                    let begin = Instant::now();
                    let last = (inbox.addr() + len as u64 - 1) as *const u8;
                    // SAFETY: inside the buffer, which outlives the threads.
                    let now = || unsafe { last.read_volatile() };
                    while now() != (round % 255) as u8 + 1 {
                        assert!(begin.elapsed() < Duration::from_secs(60), "round {round}");
                        // The request may be a packet.
                        done_of(e);
                    }
                    std::sync::atomic::fence(Ordering::Acquire);
                    let data = inbox.read(0, len);
                    assert!(data.iter().all(|byte| *byte == data[len - 1]), "round {round}");
                    inbox.write(0, &vec![0; len]);
                };
                if !is_first {
                    is_there(round);
                }
                src.write(0, &vec![(round % 255) as u8 + 1; len]);
                done += u64::from(post(
                    e,
                    round,
                    SendOp::Write(outbox.remote(0)),
                    NONE,
                    src.sge(0, len),
                ));
                done_of(e);
                if is_first {
                    is_there(round);
                }
            }
            assert!(done > 0, "none was done at once");
        };
        std::thread::scope(|threads| {
            threads.spawn(|| work(&a, &to_a, &to_b, true));
            threads.spawn(|| work(&b, &to_b, &to_a, false));
        });
    });
}

/// Takes completions that are there.
fn done_of(e: &Endpoint) {
    let mut wcs = [Wc::default(); 8];
    let n = e.cq.poll(&mut wcs).unwrap();
    assert!(wcs[..n].iter().all(|wc| wc.status == WcStatus::Success));
}

/// A WRITE takes a slot of the send queue until its completion was polled, and may overrun its completion queue.
#[test]
fn queues_are_full_as_ever() {
    alone("queues_are_full_as_ever", || {
        let (a, b) = pair(QpType::Rc);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        let op = SendOp::Write(dst.remote(0));
        let room = a.qp.cap().max_send_wr;
        for n in 0..room {
            assert!(post(&a, n.into(), op, NONE, src.sge(0, 8)));
        }
        assert!(!a.qp.post_short(99, op, SendFlags::SIGNALED, src.sge(0, 8)));
        let sges = &[src.sge(0, 8)];
        let wr = SendWr { wr_id: 99, op, flags: SendFlags::SIGNALED, sges, ud: None, xrc_srqn: 0 };
        assert!(a.qp.post_send(&[wr]).is_err());
        let wcs = a.poll(room as usize);
        assert!(wcs.iter().map(|wc| wc.wr_id).eq(0..u64::from(room)));
        assert!(post(&a, 0, op, NONE, src.sge(0, 8)));

        let a = Endpoint::with(QpType::Rc, CAP, 2);
        a.connect(a.address());
        let buffer = Buffer::new(&a.pd, 64);
        for n in 0..8 {
            let _ = a.qp.post_short(
                n,
                SendOp::Write(buffer.remote(32)),
                SendFlags::SIGNALED,
                buffer.sge(0, 8),
            );
        }
        let begin = Instant::now();
        while a.qp.state().unwrap() != QpState::Err {
            assert!(begin.elapsed() < Duration::from_secs(60), "nobody hears of the overrun");
            std::thread::yield_now();
        }
    });
}

/// A window grants what its region does not, to its queue pair alone, until it is invalidated.
#[test]
fn windows_and_keys_that_are_invalidated() {
    alone("windows_and_keys_that_are_invalidated", || {
        let (a, b) = pair(QpType::Rc);
        let src = Buffer::new(&a.pd, 64);
        let buffer = Buffer::with_access(&b.pd, 4096, Access::LOCAL_WRITE | Access::MW_BIND);
        let access = Access::REMOTE_WRITE;
        for window in [WindowType::Type1, WindowType::Type2] {
            let mw = b.pd.alloc_mw(window).unwrap();
            let info =
                BindInfo { mr: Some(&buffer.mr), addr: buffer.addr() + 1024, len: 8, access };
            let (op, rkey) = mw.bind(mw.rkey().wrapping_add(1), &info).unwrap();
            b.send(1, op, &[]);
            assert_eq!(status(&b), WcStatus::Success);
            let at = RemoteAddr { va: buffer.addr() + 1024, rkey };
            assert!(post(&a, 2, SendOp::Write(at), NONE, src.sge(0, 8)), "{window:?}");
            assert_eq!(status(&a), WcStatus::Success);
            let (other, c) = pair(QpType::Rc);
            if window == WindowType::Type2 {
                // The window is bound to `b`. This peer has another protection domain as well.
                assert!(!post(&other, 3, SendOp::Write(at), NONE, src.sge(0, 8)));
                other.poll(1);
                b.send(4, SendOp::LocalInv(rkey), &[]);
                assert_eq!(status(&b), WcStatus::Success);
                assert!(!post(&a, 5, SendOp::Write(at), NONE, src.sge(0, 8)));
                assert_eq!(status(&a), WcStatus::RemAccessErr);
            }
            drop(c);
        }
        let (a, b) = pair(QpType::Rc);
        let src = Buffer::new(&a.pd, 64);
        let all = Access::REMOTE_WRITE | Access::LOCAL_WRITE | Access::INVALIDATABLE;
        let buffer = Buffer::with_access(&b.pd, 64, all);
        let op = SendOp::Write(buffer.remote(0));
        assert!(post(&a, 1, op, NONE, src.sge(0, 8)));
        b.recv(2, &[]);
        a.send(3, SendOp::SendInv(buffer.mr.rkey()), &[]);
        assert!(a.poll(2).iter().all(|wc| wc.status == WcStatus::Success));
        assert!(!post(&a, 4, op, NONE, src.sge(0, 8)));
        assert_eq!(status(&a), WcStatus::RemAccessErr);
    });
}

/// A region may be taken back between two requests, though a queue pair keeps it in use.
#[test]
fn a_region_ends_between_two_requests() {
    alone("a_region_ends_between_two_requests", || {
        let (a, b) = pair(QpType::Rc);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        let op = SendOp::Read(dst.remote(0));
        assert!(post(&a, 1, op, NONE, src.sge(0, 8)));
        assert_eq!(status(&a), WcStatus::Success);
        src.mr.destroy().unwrap();
        dst.mr.destroy().unwrap();
        assert!(!post(&a, 2, op, NONE, src.sge(0, 8)));
        assert_ne!(status(&a), WcStatus::Success);
    });
}

/// Whoever watches sees packets.
#[test]
fn a_process_that_is_watched_sends_packets() {
    alone("a_process_that_is_watched_sends_packets", || {
        let file = std::env::temp_dir().join(format!("anyverbs-within-{}", std::process::id()));
        // SAFETY: before the device is opened, and by the only thread that runs a test.
        unsafe { std::env::set_var("ANYVERBS_TRACE", &file) };
        let (a, b) = pair(QpType::Rc);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        for op in write_and_read(dst.remote(0)) {
            assert!(!post(&a, 1, op, NONE, src.sge(0, 8)));
            assert_eq!(status(&a), WcStatus::Success);
        }
        drop((a, b));
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(file).unwrap();
        assert!(
            text.matches("\"packet\"").count() >= 6,
            "two requests, an ACK and a response: {text}"
        );
    });
}
