//! Each failure has its cause: in `vendor_err`, in the log, and in what the peer is told.

use super::*;
use crate::mr::{Bind, WindowType};
use crate::qp::facts::Waits;
use crate::wire::atomic::AtomicEth;
use crate::wire::feth::{Feth, Placement, Selectivity};

impl World {
    /// Posts one element.
    fn post_sge(&mut self, op: SendOp, sge: Sge) {
        let (flags, sges) = (SendFlags::SIGNALED, std::slice::from_ref(&sge));
        let wr = SendWr { wr_id: 0xabc, op, flags, sges, ud: None, xrc_srqn: 0 };
        self.qp.post_send(&wr, &mut self.device).unwrap();
        self.qp.transmit(&mut self.device);
    }

    pub(super) fn region(&self, pd: u32, access: Access, len: u64) -> Keys {
        let region = Region { pd, access, iova: IOVA, len, addr: 0 };
        self.device.mrs.register(region).unwrap()
    }

    /// The first failed completion: its status and the number of its cause. The log has one line about it.
    #[track_caller]
    pub(super) fn failure(&mut self) -> (WcStatus, u32) {
        let (_, wc, _) = *self
            .device
            .completions
            .iter()
            .find(|(_, wc, _)| wc.status != WcStatus::Success)
            .unwrap();
        let [line] = &self.device.lines[..] else { panic!("{:?}", self.device.lines) };
        let code = format!("AV{:04}", wc.vendor_err);
        assert!(line.contains(&code) && line.starts_with("queue pair 0x000011: "), "{line}");
        (wc.status, wc.vendor_err)
    }
}

pub(super) fn cause(cause: Cause) -> u32 {
    cause.number().into()
}

#[test]
fn a_local_fault_names_its_cause() {
    let sge = |keys: Keys| Sge { addr: IOVA, len: 8, lkey: keys.lkey };
    // The queue pair's type, the request, and its element.
    type Case = fn(&mut World) -> (SendOp, Sge);
    let cases: [(QpType, Case, WcStatus, Cause, &str); 12] = [
        (
            QpType::Uc,
            |w| (SendOp::Read(w.remote()), Sge { addr: IOVA, len: 8, lkey: w.device.keys.lkey }),
            WcStatus::LocQpOpErr,
            Cause::NoSuchOperation,
            "READ",
        ),
        (
            QpType::Rc,
            |w| {
                let op = SendOp::FetchAdd { at: w.remote(), add: 1 };
                (op, Sge { addr: IOVA, len: 7, lkey: w.device.keys.lkey })
            },
            WcStatus::LocLenErr,
            Cause::FixedLength,
            "atomic",
        ),
        (
            QpType::Rc,
            |w| (SendOp::Send, Sge { addr: IOVA, len: 8, lkey: w.device.keys.lkey ^ 1 << 20 }),
            WcStatus::LocProtErr,
            Cause::LkeyUnknown,
            "SEND",
        ),
        (
            QpType::Rc,
            |w| (SendOp::Send, Sge { addr: IOVA, len: 8, lkey: w.device.keys.rkey }),
            WcStatus::LocProtErr,
            Cause::RkeyAsLkey,
            "SEND",
        ),
        (
            QpType::Rc,
            |w| {
                (
                    SendOp::Write(w.remote()),
                    Sge { addr: IOVA - 1, len: 8, lkey: w.device.keys.lkey },
                )
            },
            WcStatus::LocProtErr,
            Cause::LkeyRange,
            "begins 1 bytes before",
        ),
        (
            QpType::Rc,
            |w| {
                let keys = w.region(PD + 1, Access::LOCAL_WRITE, 64);
                (SendOp::Send, Sge { addr: IOVA, len: 8, lkey: keys.lkey })
            },
            WcStatus::LocProtErr,
            Cause::LkeyOfOtherPd,
            "SEND",
        ),
        (
            QpType::Rc,
            |w| {
                let keys = w.region(PD, Access::LOCAL_WRITE, 64);
                w.device.mrs.deregister(keys.lkey, |_| ()).unwrap();
                (SendOp::Send, Sge { addr: IOVA, len: 8, lkey: keys.lkey })
            },
            WcStatus::LocProtErr,
            Cause::LkeyDeregistered,
            "SEND",
        ),
        (
            QpType::Rc,
            |w| {
                // The key is good, and nothing lies there.
                (SendOp::Send, Sge { addr: IOVA + (1 << 30), len: 8, lkey: w.device.keys.lkey })
            },
            WcStatus::LocProtErr,
            Cause::LocalMemoryGone,
            "SEND",
        ),
        (
            QpType::Rc,
            |w| {
                let op = SendOp::LocalInv(w.device.keys.rkey);
                (op, Sge { addr: IOVA, len: 0, lkey: 0 })
            },
            WcStatus::MwBindErr,
            Cause::KeyNotInvalidated,
            "local invalidation",
        ),
        (
            QpType::Rc,
            |w| {
                let window = w.device.mrs.alloc_window(PD, WindowType::Type2).unwrap();
                let lkey = w.device.keys.lkey;
                let (access, addr) = (Access::REMOTE_READ, IOVA);
                let bind = Bind { window, rkey: 1, lkey, access, addr, len: 8 };
                (SendOp::BindMw(bind), Sge { addr: IOVA, len: 0, lkey: 0 })
            },
            WcStatus::MwBindErr,
            Cause::WindowNotBound,
            "bind of a memory window",
        ),
        (
            QpType::Uc,
            |w| {
                let op = SendOp::AtomicWrite { at: w.remote(), data: None };
                (op, Sge { addr: IOVA, len: 8, lkey: w.device.keys.lkey })
            },
            WcStatus::LocQpOpErr,
            Cause::NoSuchOperation,
            "ATOMIC WRITE",
        ),
        (
            QpType::Rc,
            |w| {
                let op = SendOp::CompareSwap { at: w.remote(), compare: 1, swap: 2 };
                (op, Sge { addr: IOVA, len: 9, lkey: w.device.keys.lkey })
            },
            WcStatus::LocLenErr,
            Cause::FixedLength,
            "wr_id 0xabc",
        ),
    ];
    for (n, (qp_type, case, status, wanted, word)) in cases.into_iter().enumerate() {
        let mut world = World::new(qp_type);
        let (op, sge) = case(&mut world);
        world.post_sge(op, sge);
        assert_eq!(world.failure(), (status, cause(wanted)), "{n}");
        assert!(world.device.lines[0].contains(word), "{n}: {}", world.device.lines[0]);
        assert!(world.device.lines[0].contains("to queue pair 0x000022 at "), "{n}");
    }
    let mut world = World::with(QpType::Rc, LinkProps::new(1 << 20), |attr| attr.max_rd_atomic = 0);
    let keys = world.device.keys;
    world.post_sge(SendOp::Read(world.remote()), sge(keys));
    assert_eq!(world.failure(), (WcStatus::LocQpOpErr, cause(Cause::NoReadsGranted)));
    // The place of an answer wants another right.
    let mut world = World::new(QpType::Rc);
    let keys = world.region(PD, Access::empty(), 64);
    world.post_sge(SendOp::Read(world.remote()), sge(keys));
    let mut answer = world.headers(Operation::ReadResponseOnly, 0);
    answer.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: 1 });
    world.receive(answer, &[1; 8]);
    assert_eq!(world.failure(), (WcStatus::LocProtErr, cause(Cause::LkeyRight)));
    assert!(world.device.lines[0].contains("IBV_ACCESS_LOCAL_WRITE"));
    // An answer of another length.
    let mut world = World::new(QpType::Rc);
    let keys = world.device.keys;
    world.post_sge(SendOp::Read(world.remote()), sge(keys));
    world.receive(answer, &[1; 4]);
    assert_eq!(world.failure(), (WcStatus::BadRespErr, cause(Cause::BadResponse)));
}

#[test]
fn a_response_that_shows_another_path_mtu_names_both() {
    let answer = |operation, len: usize| {
        let mut world = World::new(QpType::Rc);
        let keys = world.region(PD, Access::LOCAL_WRITE, 4 * u64::from(MTU));
        let sge = Sge { addr: IOVA, len: 4 * MTU, lkey: keys.lkey };
        world.post_sge(SendOp::Read(world.remote()), sge);
        let mut headers = world.headers(operation, 0);
        headers.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: 1 });
        world.receive(headers, &vec![1; len]);
        assert_eq!(world.failure(), (WcStatus::BadRespErr, cause(Cause::BadResponse)));
        world.device.lines[0].contains(&format!(
            "it is {MTU} at the requester, and the peer sent the response in packets of {len} bytes"
        ))
    };
    assert!(answer(Operation::ReadResponseFirst, 512));
    assert!(answer(Operation::ReadResponseFirst, 2 * MTU as usize));
    // The end of a message may have any length.
    assert!(!answer(Operation::ReadResponseOnly, 512));
}

#[test]
fn flushed_work_has_the_first_cause_until_a_reset() {
    let mut world = World::new(QpType::Rc);
    world.post(SendOp::Send, 8);
    world.post(SendOp::Send, 8);
    world.answer(0, Syndrome::Nak(NakCode::RemoteOperational));
    world.recv(8);
    let vendor_errs: Vec<u32> =
        world.device.completions.iter().map(|(_, wc, _)| wc.vendor_err).collect();
    assert_eq!(vendor_errs, [cause(Cause::RemoteOperation); 3]);
    let attr = world.qp.attr();
    world.go(QpState::Reset, &attr);
    world.device.completions.clear();
    let attr = World::new(QpType::Rc).qp.attr();
    world.go(QpState::Init, &attr);
    world.go(QpState::Err, &attr);
    world.recv(8);
    assert_eq!(world.device.completions[0].1.vendor_err, cause(Cause::MovedToError));
}

#[test]
fn a_peers_reason_for_a_nak_must_fit() {
    let told = |cause, value| Told { cause, value };
    let fail = |code, psn: u32, told: Option<Told>| {
        let mut world = World::new(QpType::Rc);
        world.post(SendOp::Write(world.remote()), 8);
        // A NAK for a packet that was not sent is none.
        if let Some(told) = told {
            let mut headers = world.headers(Operation::Ack, psn);
            headers.aeth = Some(Aeth { syndrome: Syndrome::Nak(code), msn: 0 });
            let bytes = told.to_bytes();
            let incoming = Incoming::from(Packet { headers, payload: &bytes });
            world.qp.receive(&from_peer(), &incoming, &mut world.device);
        } else {
            world.answer(psn, Syndrome::Nak(code));
        }
        world.failure()
    };
    for (code, status, plain, fits, other) in [
        (
            NakCode::InvalidRequest,
            WcStatus::RemInvReqErr,
            Cause::InvalidRequest,
            Cause::QpRight,
            Cause::RkeyUnknown,
        ),
        (
            NakCode::RemoteAccess,
            WcStatus::RemAccessErr,
            Cause::RemoteAccess,
            Cause::RkeyRange,
            Cause::QpRight,
        ),
        (
            NakCode::RemoteOperational,
            WcStatus::RemOpErr,
            Cause::RemoteOperation,
            Cause::PeerReceiveUnwritable,
            Cause::PeerEnded,
        ),
    ] {
        assert_eq!(fail(code, 0, None), (status, cause(plain)));
        assert_eq!(fail(code, 0, Some(told(fits, 8))), (status, cause(fits)));
        assert_eq!(fail(code, 0, Some(told(other, 8))), (status, cause(plain)), "another status");
    }
    // The line has the memory that the request named.
    let mut world = World::new(QpType::Rc);
    let at = world.remote();
    world.post(SendOp::Write(at), 8);
    world.answer(0, Syndrome::Nak(NakCode::RemoteAccess));
    let place = format!("(key {:#x}, 8 bytes at {:#x})", at.rkey, at.va);
    assert!(world.device.lines[0].contains(&place), "{}", world.device.lines[0]);
}

#[test]
fn the_wrong_one_of_several_elements_is_named() {
    let mut world = World::new(QpType::Rc);
    let right = Sge { addr: IOVA, len: 8, lkey: world.device.keys.lkey };
    let sges = [right, Sge { lkey: world.device.keys.rkey, ..right }];
    let (op, flags) = (SendOp::Send, SendFlags::SIGNALED);
    let wr = SendWr { wr_id: 1, op, flags, sges: &sges, ud: None, xrc_srqn: 0 };
    world.qp.post_send(&wr, &mut world.device).unwrap();
    world.qp.transmit(&mut world.device);
    assert_eq!(world.failure(), (WcStatus::LocProtErr, cause(Cause::RkeyAsLkey)));
    let line = &world.device.lines[0];
    let right = format!("the lkey of its region is {:#x} (sg_list[1] of 2, key ", right.lkey);
    assert!(line.contains(&right), "{line}");
}

#[test]
fn a_peer_without_receives_is_waited_for_so_long() {
    let mut world = World::with(QpType::Rc, LinkProps::new(1 << 20), |attr| attr.rnr_retry = 2);
    world.post(SendOp::Send, 8);
    let begin = world.device.now;
    for _ in 0..3 {
        world.answer(0, Syndrome::RnrNak { timer: 30 });
        if let Some(deadline) = world.qp.deadline() {
            world.device.now = deadline;
            world.qp.on_timer(&mut world.device);
        }
    }
    let ms = world.device.now.since(begin).as_millis();
    assert!(ms > 600);
    assert_eq!(world.failure(), (WcStatus::RnrRetryExcErr, cause(Cause::NoReceive)));
    let text = format!("for {ms} ms, and rnr_retry is 2");
    assert!(world.device.lines[0].contains(&text), "{}", world.device.lines[0]);
}

/// The peer's request: the cause at this end, the line, and what the peer is told.
#[track_caller]
fn refused(world: &mut World, headers: Headers, payload: &[u8]) -> (u32, Told) {
    world.receive(headers, payload);
    assert_eq!(world.qp.state(), QpState::Err);
    let [(told, is_ours)] = world.device.told[..] else { panic!("{:?}", world.device.told) };
    assert!(!is_ours, "the request has no mark");
    let [line] = &world.device.lines[..] else { panic!("{:?}", world.device.lines) };
    assert!(
        line.contains("of queue pair 0x000022 at ") && line.contains(" was refused: "),
        "{line}"
    );
    world.recv(8);
    (world.device.completions.last().unwrap().1.vendor_err, told)
}

#[test]
fn a_refused_request_names_its_cause_at_both_ends() {
    let told = |cause, value| Told { cause, value };
    let write = |world: &World, reth: Reth| {
        let mut headers = world.headers(Operation::WriteOnly, 0);
        headers.reth = Some(reth);
        headers
    };
    let reth = |world: &World| Reth { va: IOVA, rkey: world.device.keys.rkey, len: 8 };

    let mut world = World::new(QpType::Rc);
    world.recv(5);
    let headers = world.headers(Operation::SendOnly, 0);
    let wanted = (cause(Cause::MessageTooLong), told(Cause::PeerMessageTooLong, 8 << 32 | 5));
    assert_eq!(refused(&mut world, headers, &[1; 8]), wanted);
    assert!(world.device.lines[0].contains("a SEND"));

    // A message of two packets is too long with the second one.
    let mut world = World::new(QpType::Rc);
    world.recv(MTU + 5);
    let first = world.headers(Operation::SendFirst, 0);
    world.receive(first, &[1; MTU as usize]);
    let headers = world.headers(Operation::SendLast, 1);
    let value = u64::from(MTU + 8) << 32 | u64::from(MTU + 5);
    let wanted = (cause(Cause::MessageTooLong), told(Cause::PeerMessageTooLong, value));
    assert_eq!(refused(&mut world, headers, &[1; 8]), wanted);

    let mut world = World::new(QpType::Rc);
    let sge = Sge { addr: IOVA, len: 8, lkey: world.device.keys.rkey };
    world.qp.post_recv(&RecvWr { wr_id: 2, sges: &[sge] }, &mut world.device).unwrap();
    let headers = world.headers(Operation::SendOnly, 0);
    let wanted = (cause(Cause::RkeyAsLkey), told(Cause::PeerReceiveUnwritable, 0));
    assert_eq!(refused(&mut world, headers, &[1; 8]), wanted);

    for (change, wanted) in [
        ((|reth| reth.rkey ^= 1 << 20) as fn(&mut Reth), told(Cause::RkeyUnknown, 0)),
        (|reth| reth.va -= 3, told(Cause::RkeyRange, (-3i64) as u64)),
    ] {
        let mut world = World::new(QpType::Rc);
        let mut reth = reth(&world);
        change(&mut reth);
        let headers = write(&world, reth);
        let refused = refused(&mut world, headers, &[1; 8]);
        assert_eq!(refused, (cause(wanted.cause), wanted));
        assert!(world.device.lines[0].contains("a WRITE"));
    }
    let mut world = World::new(QpType::Rc);
    let lkey = world.device.keys.lkey;
    let headers = write(&world, Reth { rkey: lkey, ..reth(&world) });
    let wanted = (cause(Cause::LkeyAsRkey), told(Cause::LkeyAsRkey, 0));
    assert_eq!(refused(&mut world, headers, &[1; 8]), wanted);
    let mut world = World::new(QpType::Rc);
    let keys = world.region(PD, Access::REMOTE_READ, 64);
    let headers = write(&world, Reth { rkey: keys.rkey, ..reth(&world) });
    let right = Access::REMOTE_WRITE.bits().into();
    let wanted = (cause(Cause::RkeyRight), told(Cause::RkeyRight, right));
    assert_eq!(refused(&mut world, headers, &[1; 8]), wanted);

    // The queue pair gives each right by itself.
    for (operation, right, name) in [
        (Operation::WriteOnly, Access::REMOTE_WRITE, "a WRITE"),
        (Operation::ReadRequest, Access::REMOTE_READ, "a READ"),
        (Operation::FetchAdd, Access::REMOTE_ATOMIC, "an atomic"),
        (Operation::CompareSwap, Access::REMOTE_ATOMIC, "an atomic"),
        (Operation::AtomicWrite, Access::REMOTE_WRITE, "an ATOMIC WRITE"),
    ] {
        let all = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let props = LinkProps::new(1 << 20);
        let mut world = World::with(QpType::Rc, props, |attr| attr.access = all - right);
        let mut headers = world.headers(operation, 0);
        let is_atomic = right == Access::REMOTE_ATOMIC;
        if is_atomic {
            let rkey = world.device.keys.rkey;
            headers.atomic = Some(AtomicEth { va: IOVA, rkey, swap_add: 1, compare: 0 });
        } else {
            headers.reth = Some(reth(&world));
        }
        let is_read = operation == Operation::ReadRequest;
        let payload: &[u8] = if is_atomic || is_read { &[] } else { &[1; 8] };
        let wanted = (cause(Cause::QpRight), told(Cause::QpRight, right.bits().into()));
        assert_eq!(refused(&mut world, headers, payload), wanted, "{operation:?}");
        assert!(world.device.lines[0].contains(name), "{}", world.device.lines[0]);
    }

    // A FLUSH names the rights that are missing, and no other.
    let (global, persistent) = (Access::FLUSH_GLOBAL, Access::FLUSH_PERSISTENT);
    for (placement, given, lacks) in [
        (Placement::GLOBAL, persistent, global),
        (Placement::PERSISTENCE, global, persistent),
        (Placement::all(), global, persistent),
        (Placement::all(), Access::REMOTE_WRITE, global | persistent),
    ] {
        let props = LinkProps::new(1 << 20);
        let mut world = World::with(QpType::Rc, props, |attr| attr.access = given);
        let mut headers = world.headers(Operation::Flush, 0);
        headers.reth = Some(reth(&world));
        headers.feth = Some(Feth { placement, selectivity: Selectivity::Range });
        let wanted = (cause(Cause::QpRight), told(Cause::QpRight, lacks.bits().into()));
        assert_eq!(refused(&mut world, headers, &[]), wanted, "{placement:?}");
        assert!(world.device.lines[0].contains("a FLUSH"), "{}", world.device.lines[0]);
    }

    // An atomic at an odd address.
    let mut world = World::new(QpType::Rc);
    let mut headers = world.headers(Operation::FetchAdd, 0);
    let rkey = world.device.keys.rkey;
    headers.atomic = Some(AtomicEth { va: IOVA + 4, rkey, swap_add: 1, compare: 0 });
    let wanted = (cause(Cause::Unaligned), told(Cause::Unaligned, 0));
    assert_eq!(refused(&mut world, headers, &[]), wanted);
    let place = format!("(key {rkey:#x}, 8 bytes at {:#x})", IOVA + 4);
    assert!(world.device.lines[0].contains(&place), "{}", world.device.lines[0]);

    // The key of a message that has begun is gone: the log says what the packet was for.
    let mut world = World::new(QpType::Rc);
    let keys = world.region(PD, Access::REMOTE_WRITE | Access::LOCAL_WRITE, 4096);
    let mut first = world.headers(Operation::WriteFirst, 0);
    first.reth = Some(Reth { va: IOVA, rkey: keys.rkey, len: 2 * MTU });
    world.receive(first, &[1; MTU as usize]);
    world.device.mrs.deregister(keys.lkey, |_| ()).unwrap();
    let headers = world.headers(Operation::WriteLast, 1);
    assert_eq!(refused(&mut world, headers, &[1; MTU as usize]).1.cause, Cause::RkeyDeregistered);
    let place = format!("key {:#x}, {MTU} bytes at {:#x}", keys.rkey, IOVA + u64::from(MTU));
    assert!(world.device.lines[0].contains(&place), "{}", world.device.lines[0]);

    // Packets of another path MTU, at the beginning and at the end.
    for (operation, len) in [(Operation::SendFirst, 512u32), (Operation::SendOnly, MTU + 4)] {
        let mut world = World::new(QpType::Rc);
        world.recv(1 << 20);
        let headers = world.headers(operation, 0);
        let value = u64::from(MTU) << 32 | u64::from(len);
        let wanted = (cause(Cause::MtuDiffers), told(Cause::MtuDiffers, value));
        assert_eq!(refused(&mut world, headers, &vec![1; len as usize]), wanted);
    }

    // Only a message of one packet may be empty.
    for operation in [Operation::SendMiddle, Operation::SendLast] {
        let mut world = World::new(QpType::Rc);
        world.recv(4 * MTU);
        let first = world.headers(Operation::SendFirst, 0);
        world.receive(first, &[1; MTU as usize]);
        let headers = world.headers(operation, 1);
        world.receive(headers, &[]);
        assert_eq!(world.qp.state(), QpState::Err, "{operation:?}");
    }

    // More READs than were agreed on.
    let mut world = World::with(QpType::Rc, LinkProps::new(1 << 20), |a| a.max_dest_rd_atomic = 0);
    let mut headers = world.headers(Operation::ReadRequest, 0);
    headers.reth = Some(reth(&world));
    let wanted = (cause(Cause::TooManyReads), told(Cause::TooManyReads, 0));
    assert_eq!(refused(&mut world, headers, &[]), wanted);

    // The middle of a message that has not begun.
    let mut world = World::new(QpType::Rc);
    let headers = world.headers(Operation::SendMiddle, 0);
    let wanted = (cause(Cause::BadPacket), told(Cause::BadPacket, 0));
    assert_eq!(refused(&mut world, headers, &[1; MTU as usize]), wanted);
}

/// Only a device of this make gets the reason.
#[test]
fn a_reason_carries_the_refused_requests_mark() {
    for (reserved, is_ours) in [
        (0, false),
        (Bth::OURS, true),
        (Bth::ASKS, false),
        (Bth::OURS | Bth::ASKS, true),
        (0x3f - Bth::OURS, false),
        (0x3f, true),
    ] {
        // The requests before have the other mark.
        let others = if is_ours { 0 } else { Bth::OURS };
        for before in [None, Some(Operation::WriteOnly), Some(Operation::ReadRequest)] {
            let mut world = World::new(QpType::Rc);
            let right = Reth { va: IOVA, rkey: world.device.keys.rkey, len: 8 };
            if let Some(operation) = before {
                let mut headers = world.headers(operation, 0);
                (headers.bth.reserved, headers.reth) = (others, Some(right));
                let is_read = operation == Operation::ReadRequest;
                world.receive(headers, if is_read { &[] } else { &[1; 8] });
            }
            let mut headers = world.headers(Operation::WriteOnly, before.is_some().into());
            headers.bth.reserved = reserved;
            headers.reth = Some(Reth { rkey: right.rkey ^ 1 << 20, ..right });
            world.receive(headers, &[1; 8]);
            let wanted = Told { cause: Cause::RkeyUnknown, value: 0 };
            assert_eq!(world.device.told, [(wanted, is_ours)], "{reserved:#x} {before:?}");
        }
    }
}

/// The memory of a READ goes away before its response can leave.
#[test]
fn the_end_of_a_read_carries_mark_and_reason() {
    for (reserved, is_ours) in [(0, false), (Bth::OURS, true)] {
        let mut world = World::new(QpType::Rc);
        let keys = world.region(PD, Access::REMOTE_READ, 64);
        world.device.room = 0;
        let mut read = world.headers(Operation::ReadRequest, 0);
        read.bth.reserved = reserved;
        read.reth = Some(Reth { va: IOVA, rkey: keys.rkey, len: 8 });
        world.receive(read, &[]);
        // A request behind it has the other mark.
        let mut write = world.headers(Operation::WriteOnly, 1);
        write.bth.reserved = Bth::OURS - reserved;
        write.reth = Some(Reth { va: IOVA, rkey: world.device.keys.rkey, len: 8 });
        world.receive(write, &[1; 8]);
        assert_eq!((world.device.told.len(), world.qp.state()), (0, QpState::Rts));
        world.device.mrs.deregister(keys.lkey, |_| ()).unwrap();
        world.device.room = usize::MAX;
        world.qp.transmit(&mut world.device);
        let [(told, mark)] = world.device.told[..] else { panic!("{:?}", world.device.told) };
        assert_eq!((told.cause, mark), (Cause::RkeyDeregistered, is_ours));
    }
}

#[test]
fn a_key_that_a_send_cannot_invalidate_is_the_cause() {
    let mut world = World::new(QpType::Rc);
    world.recv(8);
    let mut headers = world.headers(Operation::SendOnlyInv, 0);
    headers.ieth = Some(world.device.keys.rkey);
    world.receive(headers, &[1; 8]);
    assert_eq!(world.device.told, []);
    assert!(world.device.lines[0].contains("AV0602"), "{:?}", world.device.lines);
}

#[test]
fn a_send_queue_that_nothing_can_free_says_so_once() {
    let fill = |flags: SendFlags, count: usize| {
        let mut world = World::new(QpType::Rc);
        for n in 0..count {
            let sges = [Sge { addr: IOVA, len: 8, lkey: world.device.keys.lkey }];
            // The first one may be signaled.
            let flags = if n == 0 { flags } else { SendFlags::empty() };
            let wr =
                SendWr { wr_id: 0x77, op: SendOp::Send, flags, sges: &sges, ud: None, xrc_srqn: 0 };
            let posted = world.qp.post_send(&wr, &mut world.device);
            assert_eq!(posted.is_ok(), n < 100, "{n}");
        }
        world.device.lines
    };
    assert_eq!(fill(SendFlags::empty(), 100), [] as [String; 0]);
    let lines = fill(SendFlags::empty(), 103);
    assert_eq!(lines.len(), 1);
    assert!(lines[0].contains("none of its 100 requests, from wr_id 0x77 on,"), "{}", lines[0]);
    assert_eq!(fill(SendFlags::SIGNALED, 103), [] as [String; 0]);
}

/// A request that is done while it is posted leaves its slot as it was.
#[test]
fn a_full_send_queue_of_requests_that_were_done_at_once_knows_who_is_signaled() {
    for signaled in [None, Some(0), Some(50), Some(99)] {
        let mut world = World::new(QpType::Rc);
        for n in 0..100 {
            let is_signaled = signaled == Some(n);
            let flags = if is_signaled { SendFlags::SIGNALED } else { SendFlags::empty() };
            let wc = world.qp.book_direct(n, Direction::Write, flags, 8);
            assert_eq!(wc.is_some(), is_signaled);
        }
        let flags = SendFlags::empty();
        let wr = SendWr { wr_id: 100, op: SendOp::Send, flags, sges: &[], ud: None, xrc_srqn: 0 };
        assert_eq!(world.qp.post_send(&wr, &mut world.device), Err(PostSendError::Full));
        let lines = world.device.lines;
        assert_eq!(lines.len(), usize::from(signaled.is_none()), "{signaled:?}: {lines:?}");
        assert!(lines.iter().all(|line| line.contains("none of its 100 requests is signaled")));
    }
}

/// Where all requests complete, and where they are flushed, polling frees the queue.
#[test]
fn a_full_send_queue_with_completions_says_nothing() {
    for sq_sig_all in [true, false] {
        let mut world = World::in_reset(QpType::Rc, LinkProps::new(1 << 20));
        let init = QpInit { sq_sig_all, ..*world.qp.init() };
        world.qp = Qp::new(Qpn::new(OURS), &init);
        let mut world = world.risen(|_| {});
        if !sq_sig_all {
            let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
            world.modify(&attr, QpAttrMask::STATE);
        }
        for n in 0..102 {
            let flags = SendFlags::empty();
            let wr = SendWr { wr_id: n, op: SendOp::Send, flags, sges: &[], ud: None, xrc_srqn: 0 };
            let posted = world.qp.post_send(&wr, &mut world.device);
            assert_eq!(posted.is_ok(), n < 100, "{n}");
        }
        assert_eq!(world.device.lines, [] as [String; 0]);
    }
}

/// A queue pair that only receives has no room for sends, and no request that could block any.
#[test]
fn a_send_queue_without_room_says_nothing() {
    let mut world = World::in_reset(QpType::Rc, LinkProps::new(1 << 20));
    let init = *world.qp.init();
    let init = QpInit { cap: QpCap { max_send_wr: 0, ..init.cap }, ..init };
    world.qp = Qp::new(Qpn::new(OURS), &init);
    let mut world = world.risen(|_| {});
    let flags = SendFlags::empty();
    let wr = SendWr { wr_id: 1, op: SendOp::Send, flags, sges: &[], ud: None, xrc_srqn: 0 };
    for _ in 0..2 {
        let posted = world.qp.post_send(&wr, &mut world.device);
        assert_eq!(posted, Err(PostSendError::Full));
        assert_eq!(world.device.lines, [] as [String; 0]);
    }
}

#[test]
fn a_send_queue_with_a_way_out_is_reexamined() {
    let mut world = World::new(QpType::Rc);
    let credit = world.qp.sq_credit();
    let post = |world: &mut World, wr_id, flags| {
        let wr = SendWr { wr_id, op: SendOp::Send, flags, sges: &[], ud: None, xrc_srqn: 0 };
        world.qp.post_send(&wr, &mut world.device).is_ok()
    };
    for n in 0..100 {
        let flags = if n == 50 { SendFlags::SIGNALED } else { SendFlags::empty() };
        assert!(post(&mut world, n, flags));
    }
    world.qp.transmit(&mut world.device);
    for _ in 0..2 {
        assert!(!post(&mut world, 100, SendFlags::empty()));
        assert_eq!(world.device.lines, [] as [String; 0]);
    }
    // The completion of that request frees those up to it.
    world.answer(50, Syndrome::ACK);
    let (_, wc, _) = world.device.completions[0];
    credit.release(wc.sq_count);
    for n in 100..151 {
        assert!(post(&mut world, n, SendFlags::empty()), "{n}");
    }
    for _ in 0..2 {
        assert!(!post(&mut world, 151, SendFlags::empty()));
        let [line] = &world.device.lines[..] else { panic!("{:?}", world.device.lines) };
        assert!(line.contains("none of its 100 requests, from wr_id 0x33 on,"), "{line}");
    }
    // Once the peer has answered all, nothing else can come.
    world.qp.transmit(&mut world.device);
    world.answer(150, Syndrome::ACK);
    assert_eq!(world.qp.facts().waits, (Waits::FullSends, None));
}
