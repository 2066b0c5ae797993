//! A queue pair's posts, packets and timers, each by itself.

use super::*;
use crate::wire::carried_ack;

#[test]
fn marked_packets_are_those_with_both_bits() {
    for (traffic_class, marked) in [(0, false), (1, false), (2, false), (3, true), (0xff, true)] {
        let arrival = Arrival { traffic_class, ..Arrival::default() };
        assert_eq!(arrival.is_marked(), marked, "{traffic_class}");
    }
}

#[test]
fn a_packet_of_the_peer_has_its_addresses_and_link() {
    let av = AddressVector { scope_id: 3, ..av() };
    let arrival = from_peer();
    assert!(arrival.is_from(&av));
    assert!(Arrival { interface: 3, ..arrival }.is_from(&av));
    assert!(!Arrival { interface: 4, ..arrival }.is_from(&av));
    assert!(!Arrival { source: gid(9), ..arrival }.is_from(&av));
    assert!(!Arrival { destination: gid(9), ..arrival }.is_from(&av));
    assert!(!Arrival { source: gid(1), destination: gid(2), ..arrival }.is_from(&av));
}

#[test]
fn a_packet_read_in_place_is_as_one_read_alone() {
    let world = World::new(QpType::Rc);
    let mut headers = world.headers(Operation::SendOnly, 9);
    headers.bth.pad = 1;
    let mut bytes = vec![0; headers.len()];
    headers.emit(&mut bytes);
    bytes.extend([1, 2, 3, 0]);
    let mut incoming = Incoming { packets: 5, acks: Some(Psn::new(1)), ..Incoming::default() };
    incoming.parse_next(&mut Beginning::default(), &bytes).unwrap();
    assert_eq!((incoming.headers, incoming.packets, incoming.acks), (headers, 1, None));
    assert_eq!(incoming.payload.len(), 3);
    assert_eq!(incoming.len(), bytes.len());
    assert!(incoming.parse_next(&mut Beginning::default(), &bytes[..11]).is_err());
}

#[test]
fn each_operation_is_counted_once_with_its_bytes() {
    use CompCntrOps as C;
    for asked in [C::all(), C::SEND | C::RECV, C::RDMA_WRITE | C::REMOTE_RDMA_WRITE, C::empty()] {
        let mut world = World::in_reset(QpType::Rc, LinkProps::new(1 << 20));
        world.qp.count(asked);
        let attr = World::new(QpType::Rc).qp.attr();
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            world.go(state, &attr);
        }
        world.post(SendOp::Send, 100);
        world.post(SendOp::Write(world.remote()), 200);
        world.answer(1, Syndrome::ACK);
        world.recv(50);
        world.receive_message(Operation::SendOnly, 0, 50);
        world.receive_message(Operation::WriteOnly, 1, 60);
        let all = [(C::SEND, 100), (C::RDMA_WRITE, 200), (C::RECV, 50), (C::REMOTE_RDMA_WRITE, 60)];
        let wanted: Vec<_> = all
            .into_iter()
            .filter(|(op, _)| asked.contains(*op))
            .map(|(op, bytes)| (op, bytes, false))
            .collect();
        assert_eq!(world.device.counted, wanted, "{asked:?}");
    }
}

#[test]
fn a_queue_pair_drains_in_sqd_until_all_is_answered() {
    let mut world = World::new(QpType::Rc);
    let sqd = QpAttr { state: QpState::Sqd, en_sqd_async_notify: true, ..QpAttr::default() };
    assert!(!world.qp.is_draining());
    world.post(SendOp::Send, 10);
    assert!(!world.qp.is_draining(), "in RTS");
    world.modify(&sqd, QpAttrMask::STATE | QpAttrMask::EN_SQD_ASYNC_NOTIFY);
    assert!(world.qp.is_draining());
    assert_eq!(world.device.events, []);
    world.answer(0, Syndrome::ACK);
    assert!(!world.qp.is_draining());
    assert_eq!(world.device.events, [QpEvent::SqDrained]);
    let mut idle = World::new(QpType::Rc);
    idle.modify(&sqd, QpAttrMask::STATE | QpAttrMask::EN_SQD_ASYNC_NOTIFY);
    assert!(!idle.qp.is_draining());
    assert_eq!(idle.device.events, [QpEvent::SqDrained]);
}

#[test]
fn the_peer_may_do_what_the_responder_would_execute() {
    let all = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    for qp_type in [QpType::Rc, QpType::Uc] {
        let mut world = World::in_reset(qp_type, LinkProps::new(1 << 20));
        let attr = World::new(qp_type).qp.attr();
        let write_only = qp_type == QpType::Uc;
        let open = if write_only { attr.access - Access::REMOTE_READ } else { attr.access };
        assert_eq!(world.qp.open_to_direct(), None);
        world.go(QpState::Init, &attr);
        assert_eq!(world.qp.open_to_direct(), None);
        world.go(QpState::Rtr, &attr);
        assert_eq!(world.qp.open_to_direct(), None, "the first message raises an event");
        world.receive_message(Operation::WriteOnly, 0, 8);
        assert_eq!(world.device.events, [QpEvent::CommEst]);
        assert_eq!(world.qp.open_to_direct(), Some(open));
        world.go(QpState::Rts, &attr);
        assert_eq!(world.qp.open_to_direct(), Some(open));
        world.go(QpState::Err, &attr);
        assert_eq!(world.qp.open_to_direct(), None);
    }
    assert_eq!(World::new(QpType::Ud).qp.open_to_direct(), None);
    // The rights are those that the queue pair gives, and READs want room for their answers.
    let props = LinkProps::new(1 << 20);
    let with = |change: fn(&mut QpAttr)| World::with(QpType::Rc, props, change).qp.open_to_direct();
    assert_eq!(with(|_| {}), Some(all));
    assert_eq!(with(|attr| attr.max_dest_rd_atomic = 1), Some(all));
    assert_eq!(with(|attr| attr.max_dest_rd_atomic = 0), Some(all - Access::REMOTE_READ));
    assert_eq!(with(|attr| attr.access = Access::REMOTE_WRITE), Some(Access::REMOTE_WRITE));
    assert_eq!(with(|attr| attr.access = Access::empty()), Some(Access::empty()));
    // The device has to see operations that it counts.
    for (op, is_open) in [
        (CompCntrOps::REMOTE_RDMA_READ, false),
        (CompCntrOps::REMOTE_RDMA_WRITE, false),
        (CompCntrOps::SEND | CompCntrOps::RECV | CompCntrOps::RDMA_WRITE, true),
    ] {
        let mut world = World::new(QpType::Rc);
        world.qp.count(op);
        assert_eq!(world.qp.open_to_direct().is_some(), is_open, "{op:?}");
    }
}

#[test]
fn a_write_that_answers_a_message_expects_a_reply() {
    let after = |sends: bool, operation| {
        let mut world = World::new(QpType::Rc);
        if sends {
            world.post(SendOp::Send, 10);
        }
        world.recv(100);
        assert!(!world.qp.may_piggyback());
        world.receive_message(operation, 0, 8);
        assert!(world.qp.owes_ack());
        world.qp.may_piggyback()
    };
    assert!(after(true, Operation::WriteOnly));
    assert!(!after(false, Operation::WriteOnly));
    assert!(!after(true, Operation::WriteOnlyImm));
    assert!(!after(true, Operation::SendOnly));
    // Twice in a row is no conversation, and without an ACK nothing is to be carried.
    let mut world = World::new(QpType::Rc);
    world.post(SendOp::Send, 10);
    world.receive_message(Operation::WriteOnly, 0, 8);
    world.receive_message(Operation::WriteOnly, 1, 8);
    assert!(!world.qp.may_piggyback());
    let mut world = World::new(QpType::Rc);
    world.post(SendOp::Send, 10);
    world.receive_message(Operation::WriteOnly, 0, 8);
    world.qp.acknowledge(&mut world.device);
    assert!(!world.qp.may_piggyback());
    // A long WRITE may come in pieces, of which the last asks for the ACK.
    let mut world = World::new(QpType::Rc);
    world.post(SendOp::Send, 10);
    for psn in 0..3 {
        let mut headers = world.headers(Operation::WriteOnly, psn);
        headers.bth.ack_req = psn == 2;
        headers.reth = Some(Reth { va: IOVA, rkey: world.device.keys.rkey, len: 8 });
        assert!(!world.qp.may_piggyback());
        world.receive(headers, &[3; 8]);
    }
    assert!(world.qp.may_piggyback());
}

#[test]
fn requests_fail_when_the_peer_has_ended() {
    let mut world = World::new(QpType::Rc);
    world.qp.peer_gone(&mut world.device);
    assert_eq!((world.qp.state(), world.statuses()), (QpState::Rts, vec![]), "nothing waits");
    world.post(SendOp::Send, 10);
    world.post(SendOp::Send, 10);
    world.counters();
    world.qp.peer_gone(&mut world.device);
    assert_eq!(world.statuses(), [WcStatus::RetryExcErr, WcStatus::WrFlushErr]);
    assert_eq!(world.qp.state(), QpState::Err);
    assert_eq!(world.counters().iter().filter(|c| **c == Counter::RetryExceeded).count(), 1);
    world.qp.peer_gone(&mut world.device);
    assert_eq!((world.statuses(), world.counters()), (vec![], vec![]), "told once");
    // In SQD begun requests still wait.
    let mut world = World::new(QpType::Rc);
    world.post(SendOp::Send, 10);
    world.modify(&QpAttr { state: QpState::Sqd, ..QpAttr::default() }, QpAttrMask::STATE);
    world.qp.peer_gone(&mut world.device);
    assert_eq!(world.statuses(), [WcStatus::RetryExcErr]);
    // Nobody answers on UC.
    let mut world = World::with(QpType::Uc, LinkProps::new(1 << 20), |_| {});
    world.device.room = 0;
    world.post(SendOp::Send, 10);
    world.qp.peer_gone(&mut world.device);
    assert_eq!((world.statuses(), world.qp.state()), (vec![], QpState::Rts));
}

#[test]
fn a_notification_counts_from_the_peer_alone() {
    let notify = |world: &mut World, arrival: Arrival| {
        let opcode = Opcode::new(Service::Cnp, Operation::Cnp);
        let headers = Headers::new(Bth::new(opcode, Qpn::new(OURS), Psn::default()));
        let incoming = Incoming::from(Packet { headers, payload: &[0; 16] });
        world.counters();
        world.qp.receive(&arrival, &incoming, &mut world.device);
        world.counters()
    };
    let mut world = World::new(QpType::Rc);
    assert_eq!(notify(&mut world, from_peer()), [Counter::CnpHandled]);
    for foreign in
        [Arrival { source: gid(9), ..from_peer() }, Arrival { destination: gid(9), ..from_peer() }]
    {
        assert_eq!(notify(&mut world, foreign), [Counter::DropForeign]);
    }
    world.modify(&QpAttr { state: QpState::Sqd, ..QpAttr::default() }, QpAttrMask::STATE);
    assert_eq!(notify(&mut world, from_peer()), [Counter::CnpHandled]);
    assert_eq!(notify(&mut World::new(QpType::Uc), from_peer()), [Counter::DropQpState]);
    let mut world = World::in_reset(QpType::Rc, LinkProps::new(1 << 20));
    let attr = World::new(QpType::Rc).qp.attr();
    world.go(QpState::Init, &attr);
    world.go(QpState::Rtr, &attr);
    assert_eq!(notify(&mut world, from_peer()), [Counter::DropQpState]);
}

/// Small sends wait for more only while an answer will send them.
#[test]
fn small_sends_gather_while_an_answer_is_due() {
    const BATCH: u32 = 10_000;
    // `first` leaves and waits for its answer; then `count` sends of this kind are posted.
    let waits = |first: bool, count: usize, op: fn(RemoteAddr) -> SendOp, len: u32| {
        let mut world = World::new(QpType::Rc);
        if first {
            world.post(SendOp::Send, 10);
        }
        let remote = world.remote();
        for _ in 0..count {
            let sges = [Sge { addr: IOVA, len, lkey: world.device.keys.lkey }];
            let flags = SendFlags::empty();
            let op = op(remote);
            let wr = SendWr { wr_id: 1, op, flags, sges: &sges, ud: None, xrc_srqn: 0 };
            world.qp.post_send(&wr, &mut world.device).unwrap();
        }
        assert_eq!(world.qp.has_unsent(), count > 0);
        world.qp.may_gather(BATCH)
    };
    let send: fn(RemoteAddr) -> SendOp = |_| SendOp::Send;
    let write: fn(RemoteAddr) -> SendOp = SendOp::Write;
    for op in [send, write] {
        assert!(waits(true, 1, op, 100));
        assert!(!waits(false, 1, op, 100), "no answer is on its way");
        assert!(!waits(true, 0, op, 100), "nothing is to be sent");
        // Each of them, and one more, take 1000 bytes with their headers.
        assert!(waits(true, 9, op, 968) && !waits(true, 10, op, 968));
        // At most a packet: two of 1024 bytes fit, but longer ones are no small sends.
        assert!(waits(true, 1, op, MTU) && !waits(true, 1, op, MTU + 1));
        assert!(waits(true, 63, op, 1) && !waits(true, 64, op, 1));
    }
    assert!(!waits(true, 1, SendOp::Read, 100));
    assert!(!waits(true, 1, |at| SendOp::FetchAdd { at, add: 1 }, 8));
    let invalidate = waits(true, 1, |at| SendOp::LocalInv(at.rkey), 0);
    assert!(!invalidate);
}

/// A program that signals every hundredth send waits for that one.
#[test]
fn a_signaled_send_behind_a_whole_batch_of_others_does_not_wait() {
    let waits = |signaled: &[bool]| {
        let mut world = World::new(QpType::Rc);
        for (n, is_signaled) in (1..).zip(signaled) {
            let sges = [Sge { addr: IOVA, len: 1, lkey: world.device.keys.lkey }];
            let flags = if *is_signaled { SendFlags::SIGNALED } else { SendFlags::empty() };
            let op = SendOp::Send;
            let wr = SendWr { wr_id: 1, op, flags, sges: &sges, ud: None, xrc_srqn: 0 };
            world.qp.post_send(&wr, &mut world.device).unwrap();
            if n == 60 {
                world.qp.transmit(&mut world.device);
            }
        }
        world.qp.may_gather(60_000)
    };
    let group = |others: usize| [vec![false; others], vec![true]].concat();
    assert!(!waits(&group(64)) && !waits(&group(80)));
    assert!(waits(&group(63)), "a batch has others that are signaled, or will have");
    assert!(waits(&[group(61), group(3), group(3)].concat()), "it signals short groups");
    assert!(waits(&[false; 80]) && waits(&[true; 80]));
}

/// Where a link sends batches of packets of one length, a requester whose window was full waits for room for a whole batch.
#[test]
fn a_full_window_opens_by_whole_batches() {
    // 9 packets of 1024 bytes, each with 64 more in the window.
    let batch = 9 * (MTU + 32) + 20;
    let per_packet = MTU + 64;
    let props = LinkProps { batch, ..LinkProps::new(25 * per_packet) };
    let mut world = World::with(QpType::Rc, props, |_| {});
    world.post(SendOp::Write(world.remote()), 200 * MTU);
    // Two whole batches and no part of a third.
    assert_eq!(world.sent().len(), 18);
    // 25 - 18 + n packets are free: after the second answer it is a batch, and that leaves whole.
    world.answer(0, Syndrome::ACK);
    assert_eq!(world.sent(), []);
    world.answer(1, Syndrome::ACK);
    assert_eq!(world.sent().len(), 9);
    world.answer(9, Syndrome::ACK);
    assert_eq!(world.sent(), []);
    world.answer(10, Syndrome::ACK);
    assert_eq!(world.sent().len(), 9);
    world.answer(35, Syndrome::ACK);
    assert_eq!(world.sent().len(), 18, "two at once");
}

#[test]
fn a_full_window_without_batches_opens_by_a_quarter() {
    let per_packet = MTU + 64;
    for (props, first) in [
        (LinkProps::new(16 * per_packet), 16),
        // A window of less than two batches is no room for batches.
        (LinkProps { batch: 9 * (MTU + 32), ..LinkProps::new(16 * per_packet) }, 16),
    ] {
        let mut world = World::with(QpType::Rc, props, |_| {});
        world.post(SendOp::Write(world.remote()), 200 * MTU);
        assert_eq!(world.sent().len(), first);
        for psn in 0..3 {
            world.answer(psn, Syndrome::ACK);
            assert_eq!(world.sent(), [], "{psn}");
        }
        world.answer(3, Syndrome::ACK);
        assert_eq!(world.sent().len(), 4);
    }
}

/// The PSNs of what is outstanding stay within half of all numbers.
#[test]
fn a_message_waits_until_enough_numbers_are_free() {
    const LONGEST: u32 = 1 << 30;
    // Pieces of 256 MiB, each of a million packets.
    let segment = 1 << 28;
    let props = LinkProps { segment, ..LinkProps::new(u32::MAX) };
    let mut world = World::with(QpType::Rc, props, |attr| attr.path_mtu = Mtu::Mtu256);
    // 2^22 packets leave as four pieces.
    world.post(SendOp::Write(world.remote()), LONGEST);
    assert_eq!(world.sent().len(), 4);
    world.post(SendOp::Write(world.remote()), 257);
    assert_eq!(world.sent(), []);
    world.answer(0, Syndrome::ACK);
    assert_eq!(world.sent(), [], "one number is free, and two are needed");
    world.answer(1, Syndrome::ACK);
    assert_eq!(world.sent(), [(1 << 22, 257)]);
    // A message of any length begins where nothing is outstanding.
    world.answer((1 << 22) + 1, Syndrome::ACK);
    world.post(SendOp::Write(world.remote()), LONGEST);
    assert_eq!(world.sent().len(), 4);
}

#[test]
fn acks_are_asked_for_at_intervals_and_the_end() {
    let asks = |world: &mut World| {
        let sent = std::mem::take(&mut world.device.sent);
        let asks = sent.iter().filter(|sent| sent.headers.bth.ack_req);
        asks.map(|sent| sent.headers.bth.psn.get()).collect::<Vec<_>>()
    };
    let mut world = World::new(QpType::Rc);
    world.post(SendOp::Write(world.remote()), 40 * MTU);
    assert_eq!(asks(&mut world), [15, 31, 39]);
    // And where the window ends, so that it opens again: of ten packets nine are followed by one that fits.
    let mut world = World::with(QpType::Rc, LinkProps::new(10 * (MTU + 64)), |_| {});
    world.post(SendOp::Write(world.remote()), 40 * MTU);
    assert_eq!((world.device.sent.len(), asks(&mut world)), (10, vec![9]));
    let mut world = World::new(QpType::Uc);
    world.post(SendOp::Write(world.remote()), 40 * MTU);
    assert_eq!(asks(&mut world), []);
}

/// A WRITE to a place that the peer has taken one of goes out as a message for each packet, where lengths matter.
#[test]
fn a_write_is_split_after_one_was_taken_whole() {
    let whole = |qp_type, batch, first: u32, second: (u64, u32)| {
        let props = LinkProps { batch, ..LinkProps::new(1 << 20) };
        let mut world = World::with(qp_type, props, |_| {});
        let at = world.remote();
        world.post(SendOp::Write(at), first);
        assert!(first <= MTU || world.device.sent[0].headers.bth.opcode.starts_message());
        let last = world.device.sent.last().unwrap().headers.bth.psn.get();
        if qp_type == QpType::Rc {
            world.answer(last, Syndrome::ACK);
        }
        world.sent();
        world.post(SendOp::Write(RemoteAddr { va: at.va + second.0, ..at }), second.1);
        let sent = std::mem::take(&mut world.device.sent);
        assert_eq!(sent.iter().map(|sent| sent.len as u32).sum::<u32>(), second.1);
        let only = sent.iter().filter(|s| s.headers.bth.opcode.operation == Operation::WriteOnly);
        let split = sent.len() > 1 && only.count() == sent.len();
        if split {
            for (n, sent) in sent.iter().enumerate() {
                let va = at.va + second.0 + n as u64 * u64::from(MTU);
                let len = sent.len as u32;
                assert_eq!(sent.headers.reth, Some(Reth { va, rkey: at.rkey, len }));
            }
        }
        !split
    };
    const BATCH: u32 = 60_000;
    assert!(!whole(QpType::Rc, BATCH, 4 * MTU, (0, 4 * MTU)));
    assert!(!whole(QpType::Rc, BATCH, 4 * MTU, (100, 2 * MTU)));
    assert!(whole(QpType::Rc, BATCH, 4 * MTU, (100, 4 * MTU)), "its end was never taken");
    assert!(whole(QpType::Rc, 0, 4 * MTU, (0, 4 * MTU)), "lengths do not matter");
    assert!(whole(QpType::Rc, BATCH, MTU, (0, MTU)), "a single packet");
    assert!(whole(QpType::Uc, BATCH, 4 * MTU, (0, 4 * MTU)), "nobody says what was taken");
}

/// A WRITE of one packet announces no more than it has, so it says nothing of what a longer one may.
#[test]
fn writes_of_single_packets_split_none() {
    let props = LinkProps { batch: 60_000, ..LinkProps::new(1 << 20) };
    let mut world = World::with(QpType::Rc, props, |_| {});
    let at = world.remote();
    for (psn, skip) in [(0, 0), (1, MTU)] {
        world.post(SendOp::Write(RemoteAddr { va: at.va + u64::from(skip), ..at }), MTU);
        world.answer(psn, Syndrome::ACK);
    }
    world.device.sent.clear();
    world.post(SendOp::Write(at), 2 * MTU);
    let operation = |sent: &Sent| sent.headers.bth.opcode.operation;
    let sent: Vec<_> = world.device.sent.iter().map(operation).collect();
    assert_eq!(sent, [Operation::WriteFirst, Operation::WriteLast]);
}

#[test]
fn only_long_reads_are_asked_for_by_two_packets() {
    let requests = |batch, max_rd_atomic, len| {
        let props = LinkProps { batch, ..LinkProps::new(1 << 20) };
        let mut world = World::with(QpType::Rc, props, |attr| attr.max_rd_atomic = max_rd_atomic);
        world.post(SendOp::Read(world.remote()), len);
        let sent = std::mem::take(&mut world.device.sent);
        sent.iter().map(|sent| sent.headers.reth.unwrap().len).collect::<Vec<_>>()
    };
    let batch = |packets| packets * (MTU + 32);
    assert_eq!(requests(batch(4), 4, 5 * MTU), [2 * MTU, 2 * MTU, MTU]);
    assert_eq!(requests(batch(4), 4, 5 * MTU - 1), [2 * MTU, 2 * MTU, MTU - 1]);
    assert_eq!(requests(batch(4), 3, 5 * MTU), [5 * MTU], "too few may be outstanding");
    assert_eq!(requests(batch(16), 16, 5 * MTU), [2 * MTU, 2 * MTU, MTU]);
    assert_eq!(requests(batch(4), 4, 2 * MTU), [2 * MTU], "two are of one length anyway");
    assert_eq!(requests(0, 4, 3 * MTU), [3 * MTU]);
    assert_eq!(requests(0, 4, 200 << 10), [64 << 10, 64 << 10, 64 << 10, 8 << 10]);
    assert_eq!(requests(0, 2, 200 << 10), [64 << 10, 64 << 10]);
}

#[test]
fn a_rate_limit_holds_back_and_starts_a_timer() {
    let mut world = World::new(QpType::Rc);
    // A packet and its overhead take 1088 microseconds.
    let attr = QpAttr { rate_limit: 8000, ..QpAttr::default() };
    world.modify(&attr, QpAttrMask::RATE_LIMIT);
    world.post(SendOp::Write(world.remote()), 40 * MTU);
    let burst = world.sent().len();
    assert!((1..5).contains(&burst), "{burst}");
    let mut left = 40 - burst;
    let begin = world.device.now;
    while left > 0 {
        // Answers do not let more leave than the rate does.
        world.answer(39 - left as u32, Syndrome::ACK);
        assert_eq!(world.sent(), []);
        world.device.now = world.qp.deadline().unwrap();
        world.qp.on_timer(&mut world.device);
        left -= world.sent().len();
    }
    let took = world.device.now.since(begin);
    let least = Duration::from_micros(1088) * (40 - burst as u32 - 1);
    assert!(took >= least && took < least * 2, "{took:?}");
}

/// A static rate of the path counts as soon as the path is there, and goes with it.
#[test]
fn the_static_rate_belongs_to_the_path() {
    // 2.5 Gb/s: 2 ms are 625 KB.
    let slow = AddressVector { static_rate: 2, ..av() };
    let packets = |world: &mut World| {
        world.post(SendOp::Write(world.remote()), 800 << 10);
        world.sent().len()
    };
    let props = LinkProps::new(1 << 30);
    let mut world = World::with(QpType::Rc, props, |_| {});
    assert_eq!(packets(&mut world), 800);
    let mut world = World::with(QpType::Rc, props, |attr| attr.av.static_rate = 2);
    assert!((550..620).contains(&packets(&mut world)));
    // 100 Gb/s and more are no slower than the port.
    for static_rate in [16, 17] {
        let mut world = World::with(QpType::Rc, props, |attr| attr.av.static_rate = static_rate);
        assert_eq!(packets(&mut world), 800);
    }
    let mut world = World::with(QpType::Rc, props, |_| {});
    world.modify(&QpAttr { state: QpState::Sqd, ..QpAttr::default() }, QpAttrMask::STATE);
    let attr = QpAttr { state: QpState::Sqd, av: slow, ..QpAttr::default() };
    world.modify(&attr, QpAttrMask::STATE | QpAttrMask::AV);
    world.modify(&QpAttr { state: QpState::Rts, ..QpAttr::default() }, QpAttrMask::STATE);
    assert!((550..620).contains(&packets(&mut world)));
}

#[test]
fn flushed_receives_say_so_at_once() {
    let mut world = World::new(QpType::Rc);
    let attr = world.qp.attr();
    world.go(QpState::Err, &attr);
    world.recv(10);
    let (side, wc, solicited) = world.device.completions[0];
    assert_eq!((side, solicited), (Side::Recv, true));
    let wanted = Wc {
        wr_id: 2,
        status: WcStatus::WrFlushErr,
        opcode: WcOpcode::Recv,
        qpn: Qpn::new(OURS),
        vendor_err: Cause::MovedToError.number().into(),
        ..Wc::default()
    };
    assert_eq!(wc, wanted);
}

#[test]
fn a_nak_fails_the_request_that_it_names() {
    for (code, status) in [
        (NakCode::InvalidRequest, WcStatus::RemInvReqErr),
        (NakCode::RemoteAccess, WcStatus::RemAccessErr),
        (NakCode::RemoteOperational, WcStatus::RemOpErr),
    ] {
        let mut world = World::new(QpType::Rc);
        for _ in 0..3 {
            world.post(SendOp::Send, 10);
        }
        world.answer(1, Syndrome::Nak(code));
        let wanted = [WcStatus::Success, status, WcStatus::WrFlushErr];
        assert_eq!(world.statuses(), wanted, "{code:?}");
        let (mut ghost, psn) = (World::new(QpType::Rc), 7);
        ghost.post(SendOp::Send, 10);
        ghost.answer(psn, Syndrome::Nak(code));
        assert_eq!((ghost.statuses(), ghost.qp.state()), (vec![], QpState::Rts));
    }
}

#[test]
fn a_link_that_carries_acks_takes_one_with_a_request() {
    const TAKES: u8 = 0x2a;
    let (most, longer) = (MTU - carried_ack::LEN as u32, MTU - carried_ack::LEN as u32 + 1);
    for (immediate, carries_acks, resv7, len, is_carried) in [
        (true, false, 0, 4 * MTU, true),
        (false, false, TAKES, 10, false),
        (false, true, 0, 10, false),
        (false, true, TAKES, 10, true),
        (false, true, TAKES, most, true),
        (false, true, TAKES, longer, false),
        (false, true, TAKES, 4 * MTU, false),
    ] {
        let props = LinkProps { immediate, carries_acks, ..LinkProps::new(1 << 20) };
        let mut world = World::with(QpType::Rc, props, |_| {});
        world.recv(10);
        let mut headers = world.headers(Operation::SendOnly, 0);
        (headers.bth.ack_req, headers.bth.resv7) = (true, resv7);
        world.receive(headers, &[3; 10]);
        assert!(world.qp.owes_ack());
        let remote = world.remote();
        world.post(SendOp::Write(remote), len);
        assert_eq!(world.device.sent[0].acks, is_carried.then_some(Psn::new(0)), "{len} bytes");
        if !immediate && !carries_acks {
            // Alone, it comes before a reply by which the program expects its own send to be complete.
            assert_eq!(world.device.sent[0].headers.bth.opcode.operation, Operation::Ack);
        }
        // It is owed no more, and no other packet has it as well.
        assert!(!world.qp.owes_ack());
        let acks = world.device.sent.iter().filter(|sent| sent.acks.is_some()).count();
        let alone = |sent: &&Sent| sent.headers.bth.opcode.operation == Operation::Ack;
        let alone = world.device.sent.iter().filter(alone).count();
        assert_eq!((acks, alone), if is_carried { (1, 0) } else { (0, 1) });
    }
}

#[test]
fn the_values_of_attributes_are_those_of_the_mask() {
    use QpAttrMask as M;
    let attr = QpAttr {
        port: 1,
        pkey_index: 2,
        path_mtu: Mtu::Mtu2048,
        rate_limit: 3,
        timeout: 4,
        retry_cnt: 5,
        rnr_retry: 6,
        min_rnr_timer: 7,
        max_rd_atomic: 8,
        max_dest_rd_atomic: 9,
        ..QpAttr::default()
    };
    for (bit, value) in [
        (M::PORT, "port_num 1"),
        (M::PKEY_INDEX, "pkey_index 2"),
        (M::PATH_MTU, "path_mtu of 2048 bytes, more than the interface takes"),
        (M::RATE_LIMIT, "rate_limit 3"),
        (M::TIMEOUT, "timeout 4 of at most 31"),
        (M::RETRY_CNT, "retry_cnt 5 of at most 7"),
        (M::RNR_RETRY, "rnr_retry 6 of at most 7"),
        (M::MIN_RNR_TIMER, "min_rnr_timer 7 of at most 31"),
        (M::MAX_QP_RD_ATOMIC, "max_rd_atomic 8"),
        (M::MAX_DEST_RD_ATOMIC, "max_dest_rd_atomic 9"),
    ] {
        assert_eq!(attr.values(bit, "the interface takes"), value);
    }
    let both = attr.values(M::RETRY_CNT | M::TIMEOUT | M::STATE, "the interface takes");
    assert_eq!(both, "timeout 4 of at most 31, retry_cnt 5 of at most 7");
    assert_eq!(attr.values(M::empty(), "the interface takes"), "");
    let av = QpAttr { av: AddressVector { sgid_index: 3, ..av() }, ..attr }
        .values(M::AV, "the interface takes");
    assert!(av.starts_with("ah_attr with port_num 1, sgid_index 3, dgid "), "{av}");
    assert!(av.ends_with("; port_num is not that of the queue pair"), "{av}");
    let to = |dgid| QpAttr { av: AddressVector { dgid, ..AddressVector::default() }, ..attr };
    let wrong =
        |dgid| to(dgid).values(M::AV, "the interface takes").split_once("; ").unwrap().1.to_owned();
    assert_eq!(wrong(Gid::ZERO), "dgid is no address");
    let mut group = Gid::ZERO;
    group.0[0] = 0xff;
    assert_eq!(wrong(group), "dgid is a group, and the peer is one queue pair");
}

#[test]
fn a_refused_move_names_the_bits_of_the_mask() {
    use super::attr::ModifyError;
    use QpAttrMask as M;
    let error = ModifyError::Missing(M::PORT | M::QKEY).to_string();
    assert_eq!(error, "the move needs IBV_QP_PORT and IBV_QP_QKEY, which the mask lacks");
}

#[test]
fn posted_receives_count_where_packets_are_taken() {
    let mut world = World::new(QpType::Uc);
    (0..3).for_each(|_| world.recv(10));
    assert_eq!(world.qp.recvs_posted(), Some(3));
    let attr = world.qp.attr();
    world.go(QpState::Err, &attr);
    assert_eq!(world.qp.recvs_posted(), None);
}

#[test]
fn the_packets_that_a_device_keeps_are_bounded_together() {
    let shared = Arc::default();
    let make = || {
        let props = LinkProps { out_of_order_room: usize::MAX, ..LinkProps::new(1 << 20) };
        let World { qp, device } = World::with(QpType::Rc, props, |_| {});
        World { qp: qp.with_out_of_order_bytes(Arc::clone(&shared)), device }
    };
    /// The last packet that a queue pair acknowledges of two that came in the wrong order.
    fn acknowledges(mut world: World) -> Option<u32> {
        for psn in [1, 0] {
            world.receive_message(Operation::WriteOnly, psn, 1024);
        }
        world.qp.acknowledge(&mut world.device);
        world.sent().last().map(|(psn, _)| *psn)
    }
    assert_eq!(acknowledges(make()), Some(1));
    let mut full = make();
    (1..20_000).for_each(|psn| full.receive_message(Operation::WriteOnly, psn, 1024));
    assert_eq!(acknowledges(make()), Some(0));
    drop(full);
    assert_eq!(acknowledges(make()), Some(1));
}
