//! WRITEs and READs that the device does without a message.
use super::*;
use crate::direct::WORTH_WAITING;

/// A copy shows no PSN.
#[test]
fn a_connection_begins_with_a_message() {
    for is_answered in [false, true] {
        let mut world = World::new(QpType::Rc);
        (world.device.does_directly, world.device.admits) = (true, true);
        let at = world.remote();
        world.post(SendOp::Write(at), 100);
        assert_eq!((world.sent(), world.device.direct.len()), (vec![(0, 100)], 0));
        assert!(!world.qp.short_ways(&world.device.props).directs);
        if is_answered {
            world.answer(0, Syndrome::ACK);
        }
        world.post(SendOp::Write(at), 100);
        assert_eq!(world.sent().is_empty(), is_answered);
        assert_eq!(world.device.direct.len(), usize::from(is_answered));
        assert_eq!(world.qp.short_ways(&world.device.props).directs, is_answered);
    }
}

/// WRITEs and READs without a message keep the order of the queue.
#[test]
fn a_write_behind_answered_requests_needs_no_message() {
    let mut world = World::new(QpType::Rc).known_to_peer();
    world.device.does_directly = true;
    let at = world.remote();
    world.post(SendOp::Write(at), 100);
    world.post(SendOp::Read(at), 200);
    assert_eq!(world.sent(), []);
    let done = [(Direction::Write, at, 100), (Direction::Read, at, 200)];
    assert_eq!(std::mem::take(&mut world.device.direct), done);
    assert_eq!(world.statuses(), [WcStatus::Success; 2]);
    // Behind a message it is one as well, until that is answered.
    world.post(SendOp::Send, 10);
    world.post(SendOp::Write(at), 100);
    assert_eq!(world.sent(), [(1, 10), (2, 100)]);
    world.answer(1, Syndrome::ACK);
    world.post(SendOp::Write(at), 100);
    assert_eq!(world.sent(), [(3, 100)]);
    world.answer(3, Syndrome::ACK);
    assert_eq!(world.device.direct, []);
    world.post(SendOp::Write(at), 100);
    assert_eq!((world.sent(), world.device.direct.len()), (vec![], 1));
    // Nothing has no bytes to copy, and much would hold up the others.
    for len in [0, crate::direct::MAX_DIRECT + 1] {
        let mut world = World::new(QpType::Rc).known_to_peer();
        world.device.does_directly = true;
        world.post(SendOp::Write(world.remote()), len);
        assert_eq!(world.device.direct, [], "{len}");
        assert!(!world.sent().is_empty());
    }
    let mut world = World::new(QpType::Rc).known_to_peer();
    world.device.does_directly = true;
    world.post(SendOp::Write(world.remote()), crate::direct::MAX_DIRECT);
    assert_eq!(world.device.direct.len(), 1);
    // With no READ granted it fails, as a message would.
    let mut world = World::with(QpType::Rc, LinkProps::new(1 << 20), |a| a.max_rd_atomic = 0);
    world.device.does_directly = true;
    world.post(SendOp::Read(world.remote()), 100);
    assert_eq!((world.device.direct.len(), world.statuses()), (0, vec![WcStatus::LocQpOpErr]));
    // UC never hears that a message was executed.
    let mut world = World::new(QpType::Uc);
    world.device.does_directly = true;
    world.post(SendOp::Write(world.remote()), 100);
    world.post(SendOp::Send, 10);
    world.post(SendOp::Write(world.remote()), 100);
    assert_eq!((world.device.direct.len(), world.sent().len()), (1, 2));
}

/// A long WRITE waits until what was sent before it is answered, if the peer admits it. A READ waits as well.
#[test]
fn a_long_operation_waits_for_the_answers_before_it() {
    let run = |admits: bool, len: u32, read: bool| {
        let props = LinkProps { segment: 64 << 10, ..LinkProps::new(1 << 20) };
        let mut world = World::with(QpType::Rc, props, |_| {}).known_to_peer();
        (world.device.does_directly, world.device.admits) = (true, admits);
        let at = world.remote();
        world.post(SendOp::WriteImm(at, 1), 10);
        world.post(if read { SendOp::Read(at) } else { SendOp::Write(at) }, len);
        let sent = world.sent().len();
        world.answer(1, Syndrome::ACK);
        (sent, world.device.direct.len())
    };
    for read in [false, true] {
        assert_eq!(run(true, WORTH_WAITING, read), (1, 1));
        assert_eq!(run(true, WORTH_WAITING - 1, read), (2, 0), "a short one is a message");
        assert_eq!(run(false, WORTH_WAITING, read), (2, 0), "the peer does not take it");
    }
}

/// An answer lets many long WRITEs go. Others have their turn in between.
#[test]
fn no_call_copies_more_than_the_longest_operation() {
    let mut world = World::new(QpType::Rc).known_to_peer();
    (world.device.does_directly, world.device.admits) = (true, true);
    let (at, half) = (world.remote(), crate::direct::MAX_DIRECT / 2);
    world.post(SendOp::Send, 10);
    (0..5).for_each(|_| world.post(SendOp::Write(at), half));
    world.answer(1, Syndrome::ACK);
    for done in [2, 4, 5] {
        assert_eq!(world.device.direct.len(), done);
        assert_eq!(world.qp.deadline() == Some(world.device.now), done < 5);
        world.qp.on_timer(&mut world.device);
    }
    assert_eq!(world.statuses(), [WcStatus::Success; 6]);
}

/// One-sided operations that are done while they are posted end as those that are queued.
#[test]
fn a_direct_operation_ends_alike_by_the_short_way() {
    let run = |short: bool| {
        let mut world = World::new(QpType::Rc).known_to_peer();
        world.device.does_directly = true;
        let (at, lkey) = (world.remote(), world.device.keys.lkey);
        let mut taken = 0;
        for n in 0..200 {
            // A request behind a SEND is a message, and no test answers a READ.
            let (direction, op) = match (n % 3, n % 10) {
                (0, _) | (_, 1) => (Direction::Write, SendOp::Write(at)),
                _ => (Direction::Read, SendOp::Read(at)),
            };
            let flags = if n % 4 == 0 { SendFlags::SIGNALED } else { SendFlags::empty() };
            assert!(world.qp.short_ways(&world.device.props).directs);
            if short && world.qp.may_do_directly(direction, flags, 100) {
                taken += 1;
                world.device.direct.push((direction, at, 100));
                if let Some(wc) = world.qp.book_direct(n, direction, flags, 100) {
                    world.device.complete(Side::Send, wc, false);
                }
            } else {
                let sges = &[Sge { addr: IOVA, len: 100, lkey }];
                let wr = SendWr { wr_id: n, op, flags, sges, ud: None, xrc_srqn: 0 };
                let is_full = world.qp.send_room() == 0;
                assert_eq!(world.qp.post_send(&wr, &mut world.device).is_err(), is_full);
                world.qp.transmit(&mut world.device);
            }
            // Messages are in front of some.
            if n % 10 == 0 && world.qp.send_room() > 0 {
                world.post(SendOp::Send, 10);
            } else if let Some(last) = world.device.sent.last() {
                world.answer(last.headers.bth.psn.get(), Syndrome::ACK);
            }
            if n % 50 == 0 {
                let done = world.device.completions.last().map_or(0, |(_, wc, _)| wc.sq_count);
                world.qp.sq_credit().release(done);
            }
        }
        let room = world.qp.send_room();
        (world.sent(), world.device.completions, world.device.direct, room, taken)
    };
    let (short, general) = (run(true), run(false));
    assert_eq!(
        (&short.0, &short.1, &short.2, short.3),
        (&general.0, &general.1, &general.2, general.3)
    );
    assert!(short.4 > 50 && general.4 == 0, "{}", short.4);
}
