//! Where the short ways of frequent requests are open.

use super::*;
use crate::mr::{Bind, WindowType};

fn open(world: &World) -> [bool; 3] {
    let ways = world.qp.short_ways(&world.device.props);
    [ways.sends, ways.receives, ways.directs]
}

/// On a link that loses nothing, after a message each way. No timer has to run.
fn plain(change: impl FnOnce(&mut QpAttr)) -> World {
    let props = LinkProps { immediate: true, ..LinkProps::new(1 << 20) };
    let mut world = World::with(QpType::Rc, props, |attr| {
        attr.timeout = 0;
        change(attr);
    });
    world.recv(10);
    world.receive_message(Operation::SendOnly, 0, 10);
    world.qp.acknowledge(&mut world.device);
    world.post(SendOp::Send, 10);
    world.answer(0, Syndrome::ACK);
    world
}

#[test]
fn they_are_open_unless_something_is_unusual() {
    assert_eq!(open(&plain(|_| {})), [true; 3]);
    type Change = fn(&mut World);
    let cases: [(Change, [bool; 3], &str); 12] = [
        (|w| w.qp.count(CompCntrOps::SEND), [false; 3], "counted"),
        (
            |w| w.qp.limit_rate(&RateLimit { kbps: 8, ..RateLimit::default() }),
            [false, true, false],
            "limited",
        ),
        (
            |w| {
                let attr = w.qp.attr();
                w.go(QpState::Sqd, &attr);
            },
            [false, true, false],
            "SQD",
        ),
        (
            |w| {
                let attr = w.qp.attr();
                w.go(QpState::Err, &attr);
            },
            [false; 3],
            "ERR",
        ),
        (|w| w.device.props.immediate = false, [false, true, true], "a link that may lose packets"),
        (|w| w.post(SendOp::Send, 10), [true; 3], "a request under way"),
        (
            |w| {
                w.device.room = 0;
                w.post(SendOp::Send, 10);
            },
            [false, true, true],
            "no room",
        ),
        (
            |w| {
                w.post(SendOp::Send, 10);
                w.answer(1, Syndrome::RnrNak { timer: 1 });
            },
            [false, true, true],
            "no receive",
        ),
        (
            |w| {
                w.post(SendOp::Send, 10);
                w.post(SendOp::Send, 10);
                w.answer(1, Syndrome::Nak(NakCode::PsnSequence));
            },
            [false, true, true],
            "a loss",
        ),
        (
            |w| {
                w.recv(2 * MTU);
                let headers = w.headers(Operation::SendFirst, 1);
                w.receive(headers, &[1; MTU as usize]);
            },
            [true, false, true],
            "the middle of a message",
        ),
        (
            |w| {
                let headers = w.headers(Operation::WriteMiddle, 2);
                w.receive(headers, &[1; MTU as usize]);
            },
            [true, false, true],
            "a missing packet",
        ),
        (|w| w.receive_message(Operation::WriteOnly, 1, 8), [true, false, true], "an ACK owed"),
    ];
    for (change, wanted, what) in cases {
        let mut world = plain(|_| {});
        change(&mut world);
        assert_eq!(open(&world), wanted, "{what}");
    }
    for qp_type in [QpType::Uc, QpType::Ud] {
        let props = LinkProps { immediate: true, ..LinkProps::new(1 << 20) };
        assert_eq!(open(&World::with(qp_type, props, |_| {})), [false; 3], "{qp_type:?}");
    }
}

/// A READ that the peer does not grant, and what is too long, leave as a message or not at all.
#[test]
fn an_operation_that_is_not_granted_is_not_done_directly() {
    use Direction::{Read, Write};
    for granted in [0, 1] {
        let world = plain(|attr| attr.max_rd_atomic = granted);
        let may = |direction, flags, len| world.qp.may_do_directly(direction, flags, len);
        let (none, inline) = (SendFlags::empty(), SendFlags::INLINE);
        assert_eq!(may(Read, none, 8), granted > 0);
        assert!(!may(Read, inline, 8) && may(Write, none, 8) && !may(Write, none, 0));
        assert!(may(Write, inline, 64) && !may(Write, inline, 65));
    }
}

/// A WRITE or READ of the peer is done at once where this queue pair would execute it, and all of its own requests are answered.
#[test]
fn the_peer_does_by_itself_what_is_granted() {
    use Direction::{Read, Write};
    type Change = fn(&mut World);
    // Both ends have come as far.
    let admits = |w: &World| [Write, Read].map(|way| w.qp.admits_within(&w.qp, way).is_some());
    let world = plain(|_| {});
    assert_eq!(world.qp.admits_within(&world.qp, Write), Some((PD, world.qp.qpn())));
    let other = World::with(QpType::Rc, LinkProps::new(1 << 20), |_| {});
    assert_eq!(world.qp.admits_within(&other.qp, Write), None, "another PSN is next");
    assert_eq!(admits(&plain(|attr| attr.max_dest_rd_atomic = 0)), [true, false]);
    for (access, wanted) in [
        (Access::empty(), [false; 2]),
        (Access::REMOTE_WRITE, [true, false]),
        (Access::REMOTE_READ, [false, true]),
    ] {
        let mut world = plain(|_| {});
        let attr = QpAttr { access, ..world.qp.attr() };
        world.modify(&attr, QpAttrMask::ACCESS_FLAGS);
        assert_eq!(admits(&world), wanted, "{access:?}");
    }
    let cases: [(Change, bool, &str); 5] = [
        (|w| w.qp.count(CompCntrOps::REMOTE_RDMA_WRITE), false, "counted"),
        (|w| w.qp.count(CompCntrOps::SEND), true, "its own sends are counted"),
        (|w| w.post(SendOp::Send, 10), false, "a request under way"),
        (
            |w| {
                let attr = w.qp.attr();
                w.go(QpState::Sqd, &attr);
            },
            true,
            "SQD",
        ),
        (
            |w| {
                let attr = w.qp.attr();
                w.go(QpState::Err, &attr);
            },
            false,
            "ERR",
        ),
    ];
    for (change, wanted, what) in cases {
        let mut world = plain(|_| {});
        change(&mut world);
        assert_eq!(admits(&world), [wanted; 2], "{what}");
    }
    let uc = World::with(QpType::Uc, LinkProps::new(1 << 20), |_| {});
    assert_eq!(admits(&uc), [false; 2]);
}

/// A local operation completes behind the requests before it. Those behind it have left and do not leave again.
#[test]
fn requests_behind_a_local_operation_leave_once() {
    let mut world = World::new(QpType::Rc);
    let keys = world.device.mrs.register(Region {
        pd: PD,
        access: Access::MW_BIND | Access::LOCAL_WRITE,
        iova: IOVA,
        len: 64,
        addr: 0,
    });
    let window = world.device.mrs.alloc_window(PD, WindowType::Type2).unwrap();
    let (lkey, access) = (keys.unwrap().lkey, Access::REMOTE_READ);
    let bind = Bind { window, rkey: window ^ 1, lkey, access, addr: IOVA, len: 8 };
    for op in [SendOp::Send, SendOp::BindMw(bind), SendOp::Send, SendOp::Send] {
        world.post(op, if op == SendOp::Send { 10 } else { 0 });
    }
    assert_eq!(world.sent(), [(0, 10), (1, 10), (2, 10)]);
    world.answer(0, Syndrome::ACK);
    world.qp.transmit(&mut world.device);
    assert_eq!((world.statuses(), world.sent()), (vec![WcStatus::Success; 2], vec![]));
    world.answer(2, Syndrome::ACK);
    assert_eq!(world.statuses(), [WcStatus::Success; 2]);
}

/// A request takes its slot until its completion was polled, though it left while it was posted.
#[test]
fn a_full_queue_takes_no_request_the_short_way() {
    let mut world = plain(|_| {});
    let sges = [Sge { addr: IOVA, len: 8, lkey: world.device.keys.lkey }];
    let flags = SendFlags::SIGNALED;
    let wr = SendWr { wr_id: 1, op: SendOp::Send, flags, sges: &sges, ud: None, xrc_srqn: 0 };
    // One of the 100 slots has the request of before.
    for psn in 1..100 {
        assert_eq!(world.qp.post_send(&wr, &mut world.device), Ok(()), "{psn}");
        world.answer(psn, Syndrome::ACK);
    }
    world.sent();
    assert!(open(&world)[0]);
    assert_eq!(world.qp.post_send(&wr, &mut world.device), Err(PostSendError::Full));
    assert_eq!(world.sent(), []);
}

/// A message that came by a lane, as the device executes it.
#[test]
fn a_short_message_takes_the_next_receive_that_it_fits() {
    let mut world = plain(|_| {});
    let psn = world.qp.expected();
    let execute = |world: &mut World, psn, len| {
        let mut written = None;
        let wc = world.qp.execute_short((psn, 1), len, |pd, sge| {
            written = Some((pd, sge.addr, sge.len));
            true
        });
        (wc, written)
    };
    assert_eq!(execute(&mut world, psn, 8), (None, None), "no receive");
    world.recv(8);
    assert_eq!(execute(&mut world, psn.plus(1), 8), (None, None), "not its turn");
    assert_eq!(execute(&mut world, psn, 9), (None, None), "too long");
    assert_eq!(world.qp.execute_short((psn, 1), 8, |_, _| false), None, "the memory has gone");
    let wanted = Wc {
        wr_id: 2,
        opcode: WcOpcode::Recv,
        byte_len: 8,
        qpn: Qpn::new(OURS),
        src_qpn: Qpn::new(PEER),
        ..Wc::default()
    };
    assert_eq!(execute(&mut world, psn, 8), (Some(wanted), Some((PD, IOVA, 8))));
    assert_eq!((world.qp.expected(), world.qp.executed()), (psn.plus(1), Some(psn)));
    // A message of nothing needs no memory.
    world.recv(8);
    let (wc, written) = execute(&mut world, psn.plus(1), 0);
    assert_eq!((wc.map(|wc| wc.byte_len), written), (Some(0), None));
    // One that is longer than a packet came by no lane.
    world.recv(2 * MTU);
    assert_eq!(execute(&mut world, psn.plus(2), MTU + 1), (None, None));
}

#[test]
fn what_a_peer_executed_completes_up_to_there() {
    let mut world = plain(|_| {});
    (0..3).for_each(|_| world.post(SendOp::Send, 10));
    let complete = |world: &mut World, psn| {
        let mut all = Vec::new();
        let done = world.qp.complete_short(Psn::new(psn), |wc| all.push(wc));
        (done, all.iter().map(|wc| (wc.opcode, wc.byte_len, wc.sq_count)).collect::<Vec<_>>())
    };
    assert_eq!(complete(&mut world, 4), (false, vec![]), "it was not sent");
    let send = |count| (WcOpcode::Send, 10, count);
    assert_eq!(complete(&mut world, 2), (true, vec![send(2), send(3)]));
    assert_eq!(complete(&mut world, 2), (true, vec![]), "told twice");
    world.post(SendOp::Write(world.remote()), 10);
    assert_eq!(complete(&mut world, 4), (false, vec![send(4)]), "the general way takes the WRITE");
}

/// A queue pair that only receives is never moved to RTS, and its peer acknowledges all the same what it never sent.
#[test]
fn nothing_is_awaited_where_all_is_answered() {
    let mut world = plain(|_| {});
    let any = [0, 1, 2, 0x7f_ffff, 0x80_0000, 0xff_ffff].map(Psn::new);
    assert!(!any.iter().any(|psn| world.qp.awaits(*psn)));
    world.post(SendOp::Send, 10);
    assert!(any.iter().any(|psn| world.qp.awaits(*psn)), "a request is out");
}

/// A program expects its own sends to be complete when it sees the reply.
#[test]
fn a_send_within_a_process_is_a_packet_while_its_receiver_has_requests_outstanding() {
    let mut world = plain(|_| {});
    world.recv(10);
    let expected = world.qp.expected();
    world.post(SendOp::Send, 10);
    assert!(world.qp.execute_within((expected, 1), 4, |_, _| true).is_none());
    world.answer(1, Syndrome::ACK);
    let wc =
        world.qp.execute_within((expected, 1), 4, |_, _| true).expect("it is the next request");
    assert_eq!((wc.opcode, wc.byte_len), (WcOpcode::Recv, 4));
    assert_eq!(world.qp.expected(), expected.plus(1));
}

/// A SEND within a process may be longer than a packet. Both ends count as many packets as it fills.
#[test]
fn a_long_send_within_a_process_takes_the_psns_of_its_packets() {
    let mut world = plain(|_| {});
    for (len, packets) in [(0, 1), (1, 1), (MTU, 1), (MTU + 1, 2), (3 * MTU, 3)] {
        world.recv(4 * MTU);
        let planned = world.qp.plan_within(SendFlags::empty(), len).expect("nothing is unusual");
        assert_eq!(planned.1, packets, "{len} bytes");
        assert_eq!(world.qp.expected(), planned.0, "it is connected to itself, so to say");
        let mut written = None;
        let write = |_: u32, sge: &Sge| {
            written = Some(sge.len);
            true
        };
        let wc = world.qp.execute_within(planned, len, write);
        assert_eq!(wc.map(|wc| wc.byte_len), Some(len));
        assert_eq!(written, (len > 0).then_some(len));
        let sent = world.qp.book_within(planned, (5, SendFlags::SIGNALED), len);
        assert_eq!(sent.map(|wc| (wc.wr_id, wc.byte_len)), Some((5, len)));
        assert_eq!(world.qp.expected(), planned.0.plus(packets));
    }
    world.recv(4 * MTU);
    let planned = world.qp.plan_within(SendFlags::empty(), 5 * MTU).expect("nothing is unusual");
    assert_eq!(
        world.qp.execute_within(planned, 5 * MTU, |_, _| true),
        None,
        "the receive is short"
    );
    assert_eq!(world.qp.expected(), planned.0);
}
