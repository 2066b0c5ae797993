//! Answers of the responder: to READs, to what came again, and the count of messages.

use super::*;
use crate::wire::atomic::AtomicEth;
use crate::wire::xrceth::XrcEth;

/// The path MTU of these tests: the device keeps the bytes of its packets.
const SMALL: u32 = SHORT as u32;

fn world(depth: u8) -> World {
    World::with(QpType::Rc, LinkProps::new(1 << 20), |attr| {
        (attr.path_mtu, attr.max_dest_rd_atomic) = (Mtu::Mtu256, depth);
    })
}

impl World {
    /// The peer asks for bytes from `at` on, beginning with this PSN.
    fn read(&mut self, psn: u32, at: u64, len: u32) {
        let mut headers = self.headers(Operation::ReadRequest, psn);
        headers.reth = Some(Reth { va: IOVA + at, rkey: self.device.keys.rkey, len });
        self.receive(headers, &[]);
    }

    /// The answers sent since the last call: operation, PSN, and the place of its bytes.
    #[track_caller]
    fn answers(&mut self) -> Vec<(Operation, u32, usize)> {
        let sent = std::mem::take(&mut self.device.sent);
        let answer = |sent: &Sent| {
            let bth = &sent.headers.bth;
            let middle = bth.opcode.operation == Operation::ReadResponseMiddle;
            assert_eq!(sent.headers.aeth.is_none(), middle);
            let at = self.device.memory.at(0, 40_000);
            let at = at.windows(sent.len.max(1)).position(|bytes| bytes == sent.bytes);
            (bth.opcode.operation, bth.psn.get(), at.unwrap_or(usize::MAX))
        };
        sent.iter().map(answer).collect()
    }

    /// The PSNs of the answers sent since the last call.
    fn psns(&mut self) -> Vec<u32> {
        self.sent().iter().map(|(psn, _)| *psn).collect()
    }

    /// The link has room for so many packets.
    fn give_room(&mut self, packets: usize) {
        self.device.room = packets;
        self.qp.transmit(&mut self.device);
    }
}

#[test]
fn a_read_is_answered_packet_by_packet() {
    use Operation::{ReadResponseFirst, ReadResponseLast, ReadResponseMiddle, ReadResponseOnly};
    // The memory repeats every 251 bytes, so that a packet's place is known up to that.
    let place = |at: u32| at as usize % 251;
    for packets in [1, 2, 3, 4, 9] {
        for cut in [0, 1, SMALL - 1] {
            let mut world = world(4);
            let (at, len) = (1000, packets * SMALL - cut);
            world.read(0, at, len);
            let answers = world.answers();
            assert_eq!(answers.len(), packets as usize, "{len}");
            for (k, (operation, psn, found)) in (0..).zip(answers) {
                let wanted = match (k == 0, k + 1 == packets) {
                    (true, true) => ReadResponseOnly,
                    (true, false) => ReadResponseFirst,
                    (false, false) => ReadResponseMiddle,
                    (false, true) => ReadResponseLast,
                };
                assert_eq!((operation, psn), (wanted, k), "{len}");
                // The shortest packet lies in many places.
                let last = k + 1 == packets;
                if !last || cut == 0 {
                    assert_eq!(found, place(at as u32 + k * SMALL), "{len}");
                }
            }
            let middles = packets.saturating_sub(2);
            assert_eq!(world.device.runs, if middles < 2 { vec![] } else { vec![middles] });
            // The next request has the PSN behind.
            world.read(packets, 0, 1);
            assert_eq!(world.psns(), [packets]);
        }
    }
}

#[test]
fn a_read_of_nothing_is_one_empty_packet() {
    let mut world = world(4);
    world.read(0, 0, 0);
    assert_eq!(world.sent(), [(0, 0)]);
    // It needs no key, but the right of the queue pair.
    let mut headers = world.headers(Operation::ReadRequest, 1);
    headers.reth = Some(Reth { va: 0, rkey: 0, len: 0 });
    world.receive(headers, &[]);
    assert_eq!(world.sent(), [(1, 0)]);
}

#[test]
fn answers_carry_the_number_of_their_message() {
    let mut world = world(4);
    let msn = |world: &mut World| {
        let sent = std::mem::take(&mut world.device.sent);
        sent.iter().filter_map(|sent| sent.headers.aeth).map(|aeth| aeth.msn).collect::<Vec<_>>()
    };
    world.recv(10);
    world.receive_message(Operation::SendOnly, 0, 8);
    world.qp.acknowledge(&mut world.device);
    assert_eq!(msn(&mut world), [1]);
    world.read(1, 0, 3 * SMALL);
    assert_eq!(msn(&mut world), [2, 2]);
    // A message of two packets is one.
    let mut first = world.headers(Operation::WriteFirst, 4);
    first.reth = Some(Reth { va: IOVA, rkey: world.device.keys.rkey, len: SMALL + 4 });
    world.receive(first, &[1; SHORT]);
    let mut last = world.headers(Operation::WriteLast, 5);
    last.bth.ack_req = true;
    world.receive(last, &[1; 4]);
    world.qp.acknowledge(&mut world.device);
    assert_eq!(msn(&mut world), [3]);
    world.qp.advance(Psn::new(6), 0xff_ffff);
    world.read(6, 0, 1);
    assert_eq!(msn(&mut world), [0], "24 bits");
}

#[test]
fn a_repeated_read_is_answered_from_where_it_asks() {
    let mut world = world(4);
    world.read(0, 1000, 4 * SMALL);
    assert_eq!(world.psns(), [0, 1, 2, 3]);
    let part = |psn: u32, len| (psn, 1000 + u64::from(psn * SMALL), len);
    for (psn, at, len) in [part(0, 4 * SMALL), part(2, 2 * SMALL), part(3, SMALL), part(1, 5)] {
        world.read(psn, at, len);
        let packets = len.div_ceil(SMALL);
        assert_eq!(world.psns(), (psn..psn + packets).collect::<Vec<_>>());
    }
    // A range that does not lie in an earlier READ is no part of it.
    let (psn, at, len) = part(2, 2 * SMALL);
    for (psn, at, len) in [(psn, at + 1, len), (psn, at, len + 1), (psn + 1, at, len), (0, at, len)]
    {
        world.read(psn, at, len);
        assert_eq!(world.psns(), []);
    }
    let mut headers = world.headers(Operation::ReadRequest, 0);
    let other = world.device.keys.rkey ^ 1;
    headers.reth = Some(Reth { va: IOVA + 1000, rkey: other, len: 4 * SMALL });
    world.receive(headers, &[]);
    assert_eq!(world.psns(), []);
}

#[test]
fn what_waits_is_not_answered_twice() {
    // Nothing of it has left: asked for once more, it is sent once; asked for in part, no less is sent.
    for again in [4 * SMALL, 2 * SMALL, 1] {
        let mut world = world(4);
        world.give_room(0);
        world.read(0, 1000, 4 * SMALL);
        world.read(0, 1000, again);
        world.give_room(99);
        assert_eq!(world.psns(), [0, 1, 2, 3], "{again}");
    }
    // Some of it has left: it begins anew, from where it is asked for.
    let rest = |world: &mut World| world.read(2, 1000 + 2 * u64::from(SMALL), 2 * SMALL);
    for (left, from_middle, wanted) in [
        (1, false, &[0, 0, 1, 2, 3][..]),
        (3, false, &[0, 1, 2, 0, 1, 2, 3]),
        (1, true, &[0, 2, 3]),
        (0, true, &[2, 3]),
    ] {
        let mut world = world(4);
        world.give_room(left);
        world.read(0, 1000, 4 * SMALL);
        if from_middle {
            rest(&mut world)
        } else {
            world.read(0, 1000, 4 * SMALL)
        }
        world.give_room(99);
        assert_eq!(world.psns(), wanted, "{left} {from_middle}");
    }
}

#[test]
fn an_answer_that_is_sent_again_keeps_its_place() {
    let mut world = world(4);
    world.read(0, 0, 2 * SMALL);
    assert_eq!(world.psns(), [0, 1]);
    world.give_room(0);
    world.read(2, 0, SMALL);
    world.read(3, 0, SMALL);
    world.read(0, 0, 2 * SMALL);
    world.give_room(99);
    assert_eq!(world.psns(), [0, 1, 2, 3]);
    // Where as many wait as the peer may ask for, it has to ask again.
    let mut world = world_of_two();
    world.read(0, 0, SMALL);
    assert_eq!(world.psns(), [0]);
    world.give_room(0);
    world.read(1, 0, SMALL);
    world.read(0, 0, SMALL);
    world.give_room(99);
    assert_eq!(world.psns(), [0, 1]);
    world.give_room(0);
    world.read(2, 0, SMALL);
    world.read(3, 0, SMALL);
    world.read(1, 0, SMALL);
    world.give_room(99);
    assert_eq!(world.psns(), [2, 3]);
}

fn world_of_two() -> World {
    world(2)
}

#[test]
fn an_atomic_that_came_again_gets_the_same_result() {
    let mut world = world(2);
    let rkey = world.device.keys.rkey;
    let add = |world: &mut World, psn| {
        let mut headers = world.headers(Operation::FetchAdd, psn);
        headers.atomic = Some(AtomicEth { va: IOVA, rkey, swap_add: 5, compare: 0 });
        world.receive(headers, &[]);
        let sent = std::mem::take(&mut world.device.sent);
        sent.iter().map(|sent| sent.headers.atomic_ack.unwrap().original).collect::<Vec<_>>()
    };
    let first = add(&mut world, 0);
    let second = vec![first[0] + 5];
    assert_eq!((add(&mut world, 1), add(&mut world, 0)), (second.clone(), first));
    assert_eq!(add(&mut world, 1), second);
    // Two are remembered.
    let third = add(&mut world, 2);
    assert_eq!((add(&mut world, 0), add(&mut world, 2)), (vec![], third));
}

#[test]
fn the_responses_to_a_long_read_leave_in_bursts() {
    const BURST: usize = 512;
    let mut world = world(4);
    // The device does not read so much memory.
    world.device.memory = Bytes::counted(400 << 10);
    world.read(0, 0, 300 << 10);
    assert_eq!(world.sent().len(), BURST, "128 KiB");
    let pause = world.qp.deadline().unwrap().since(world.device.now);
    assert_eq!(pause, Duration::from_micros(50));
    world.qp.transmit(&mut world.device);
    assert_eq!(world.sent(), []);
    for wanted in [BURST, 1200 - 2 * BURST] {
        world.device.now = world.qp.deadline().unwrap();
        world.qp.on_timer(&mut world.device);
        assert_eq!(world.sent().len(), wanted);
    }
    assert_eq!(world.qp.deadline(), None);
    // A burst ends with a READ as well as within one.
    let mut world = super::World::new(QpType::Rc);
    world.read(0, 0, 128 << 10);
    assert_eq!((world.sent().len(), world.qp.deadline()), (128, None));
    world.device.room = 0;
    world.read(128, 0, 64 << 10);
    world.read(192, 0, 64 << 10);
    world.read(256, 0, 1);
    world.give_room(999);
    assert_eq!(world.sent().len(), 128);
    assert!(world.qp.deadline().is_some());
}

#[test]
fn nothing_is_carried_where_nothing_is_owed() {
    let props = LinkProps { immediate: true, ..LinkProps::new(1 << 20) };
    let mut world = World::with(QpType::Rc, props, |_| {});
    world.post(SendOp::Write(world.remote()), 8);
    assert_eq!(world.device.sent[0].acks, None);
    // An ACK waits for the answers before it.
    world.device.room = 0;
    world.read(0, 0, MTU);
    world.recv(8);
    world.receive_message(Operation::SendOnly, 1, 8);
    assert!(!world.qp.owes_ack());
    world.device.sent.clear();
    world.give_room(1);
    world.give_room(9);
    assert!(world.device.sent.iter().all(|sent| sent.acks.is_none()));
}

#[test]
fn a_message_stays_with_its_srq() {
    let target = || {
        let mut world = World::in_reset(QpType::XrcRecv, LinkProps::new(1 << 20));
        let attr = World::new(QpType::Rc).qp.attr();
        world.go(QpState::Init, &attr);
        world.go(QpState::Rtr, &attr);
        world
    };
    let packet = |world: &World, operation, psn, srqn| {
        let mut headers = world.headers(operation, psn);
        headers.xrceth = Some(XrcEth { srqn });
        if headers.bth.opcode.starts_message() {
            let len = 2 * MTU;
            headers.reth = Some(Reth { va: IOVA, rkey: world.device.keys.rkey, len });
        }
        headers
    };
    for (srqn, state) in [(1, QpState::Rtr), (2, QpState::Err)] {
        let mut world = target();
        let first = packet(&world, Operation::WriteFirst, 0, 1);
        world.receive(first, &[1; MTU as usize]);
        let last = packet(&world, Operation::WriteLast, 1, srqn);
        world.receive(last, &[1; MTU as usize]);
        assert_eq!(world.qp.state(), state, "{srqn}");
    }
    // Between messages it may change, but there has to be one.
    let mut world = target();
    for (psn, srqn) in [(0, 1), (2, 2)] {
        let first = packet(&world, Operation::WriteFirst, psn, srqn);
        world.receive(first, &[1; MTU as usize]);
        let last = packet(&world, Operation::WriteLast, psn + 1, srqn);
        world.receive(last, &[1; MTU as usize]);
    }
    assert_eq!(world.qp.state(), QpState::Rtr);
    let unknown = packet(&world, Operation::WriteFirst, 4, 11);
    world.receive(unknown, &[1; MTU as usize]);
    assert_eq!(world.qp.state(), QpState::Err);
    assert!(world.counters().contains(&Counter::RespXrcSrqErrors));
}

/// IBA 9.7.4.1: the receive comes before the data.
#[test]
fn a_write_that_takes_a_receive_writes_nothing_without_one() {
    let mut world = World::new(QpType::Rc);
    let before = world.device.memory.at(0, 8);
    world.receive_message(Operation::WriteOnlyImm, 0, 8);
    let nak = world.device.sent.pop().unwrap().headers.aeth.unwrap();
    assert!(matches!(nak.syndrome, Syndrome::RnrNak { .. }), "{nak:?}");
    assert_eq!(world.device.memory.at(0, 8), before);
    world.recv(8);
    world.receive_message(Operation::WriteOnlyImm, 0, 8);
    assert_eq!(world.statuses(), [WcStatus::Success]);
    assert_eq!(world.device.memory.at(0, 8), [3; 8]);
}

/// The receive tells the program of it, as with a wrong key.
#[test]
fn a_write_without_the_right_fails_the_receive_that_it_takes() {
    let props = LinkProps::new(1 << 20);
    let mut world = World::with(QpType::Rc, props, |attr| attr.access = Access::REMOTE_READ);
    world.recv(8);
    world.recv(8);
    world.receive_message(Operation::WriteOnlyImm, 0, 8);
    assert_eq!(world.statuses(), [WcStatus::RemInvReqErr, WcStatus::WrFlushErr]);
}

/// Whoever has answers to send must not tell of what came after.
#[test]
fn nothing_is_told_before_the_answers_that_wait() {
    let mut world = world(4);
    world.device.room = 0;
    world.read(0, 0, 8);
    assert_eq!(world.qp.executed(), None);
    world.give_room(1);
    assert_eq!(world.qp.executed(), Some(Psn::new(0)));
    world.receive_message(Operation::WriteOnly, 2, 8);
    assert_eq!(world.qp.executed(), None, "a packet is missing");
}
