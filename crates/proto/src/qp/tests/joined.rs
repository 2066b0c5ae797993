//! Packets that are received as one are executed as if they had come one by one.

use proptest::prelude::*;

use super::*;
use crate::payload::Data;
use crate::wire::packet::ICRC_LEN;

const SMALL: u32 = SHORT as u32;

/// Packets of one kind, with PSNs in a row.
#[derive(Clone, Debug)]
struct Row {
    operation: Operation,
    packets: u32,
    /// Bytes of each.
    each: u32,
    /// PSNs between the one before it and its first, or fewer than none.
    gap: i32,
    /// Where its memory begins, and how far the memory of the next packet lies behind that of one.
    at: u64,
    step: u32,
    /// A bit for each packet that asks for an ACK.
    asks: u32,
}

fn row(operation: Operation, packets: u32) -> Row {
    let asks = 1 << (packets - 1);
    Row { operation, packets, each: SMALL, gap: 0, at: IOVA, step: SMALL, asks }
}

/// A message of so many packets.
fn message(op: [Operation; 3], packets: u32) -> Vec<Row> {
    [row(op[0], 1), row(op[1], packets - 2), row(op[2], 1)].into()
}

const SEND: [Operation; 3] = [Operation::SendFirst, Operation::SendMiddle, Operation::SendLast];
const WRITE: [Operation; 3] = [Operation::WriteFirst, Operation::WriteMiddle, Operation::WriteLast];

/// The visible state of a queue pair.
#[derive(PartialEq, Debug)]
struct Seen {
    memory: Vec<u8>,
    completions: Vec<(Side, Wc, bool)>,
    counters: Vec<Counter>,
    events: Vec<QpEvent>,
    counted: Vec<(CompCntrOps, u32, bool)>,
    sent: Vec<Sent>,
    expected: Psn,
    executed: (u64, u64),
    owes: bool,
    may_piggyback: bool,
}

/// The program has sent something just before.
fn after_a_send() -> World {
    let mut world = world();
    world.post(SendOp::Send, 8);
    world
}

/// Receives the rows, each packet by itself or as many as can be joined at a time. How many came at a time.
fn received(world: &mut World, rows: &[Row], joined: bool) -> Vec<u32> {
    let (mut psn, mut fill, mut numbers) = (0, 0, Vec::new());
    let whole: u32 = rows.iter().map(|row| row.packets * row.each).sum();
    for row in rows {
        psn += row.gap;
        let mut all = Vec::new();
        for i in 0..row.packets {
            let mut headers = world.headers(row.operation, (psn & 0xff_ffff) as u32);
            headers.bth.ack_req = row.asks >> i & 1 != 0;
            let (first, rkey) = (headers.bth.opcode.starts_message(), world.device.keys.rkey);
            if headers.bth.opcode.is_write() && first {
                let len = if headers.bth.opcode.is_only() { row.each } else { whole };
                let va = row.at + u64::from(i * row.step);
                headers.reth = Some(Reth { va, rkey, len });
            }
            let payload: Vec<u8> = (0..row.each).map(|n| (n + fill) as u8).collect();
            fill += 7;
            psn += 1;
            let packet = Packet::new(headers, &payload);
            let at = all.len();
            all.resize(at + packet.len() + ICRC_LEN, 0);
            packet.emit(&mut all[at..]);
        }
        let stride = all.len() / row.packets as usize;
        let mut rest = &all[..];
        while !rest.is_empty() {
            let packet = Packet::parse(&rest[..stride - ICRC_LEN]).unwrap();
            let mut packet = Incoming::from(packet);
            let n = if joined { packet.join(rest, stride, |_, _| true) } else { 1 };
            assert_eq!(packet.packets as usize, n);
            numbers.push(packet.packets);
            world.qp.receive(&from_peer(), &packet, &mut world.device);
            rest = &rest[n * stride..];
        }
    }
    numbers
}

/// Compares both ways; the numbers of packets that came at a time.
fn both(prepare: impl Fn() -> World, rows: &[Row]) -> Vec<u32> {
    let seen = |joined| {
        let mut world = prepare();
        let numbers = received(&mut world, rows, joined);
        let (owes, may_piggyback) = (world.qp.owes_ack(), world.qp.may_piggyback());
        world.qp.acknowledge(&mut world.device);
        let (expected, executed) = (world.qp.expected(), world.qp.responder.executed());
        let counters = world.counters();
        let Device { memory, completions, events, counted, sent, .. } = world.device;
        let memory = memory.0.into_inner();
        let seen = Seen {
            memory,
            completions,
            counters,
            events,
            counted,
            sent,
            expected,
            executed,
            owes,
            may_piggyback,
        };
        (seen, numbers)
    };
    let ((one, numbers), (other, _)) = (seen(true), seen(false));
    assert_eq!(one, other, "{rows:?}");
    numbers
}

fn world() -> World {
    World::with(
        QpType::Rc,
        LinkProps { out_of_order_room: 1 << 16, ..LinkProps::new(1 << 20) },
        |a| {
            a.path_mtu = Mtu::Mtu256;
        },
    )
}

fn with_receive(len: u32) -> World {
    let mut world = world();
    world.recv(len);
    world
}

#[test]
fn writes_in_a_row_and_the_middle_of_a_message_come_as_one() {
    let writes = Row { asks: 0b1001, ..row(Operation::WriteOnly, 20) };
    assert_eq!(both(world, std::slice::from_ref(&writes)), [20]);
    assert_eq!(both(world, &[Row { each: 100, step: 100, ..writes.clone() }]), [20]);
    assert_eq!(both(world, &[Row { each: 7, step: 7, ..writes }]), [20], "with a pad");
    assert_eq!(both(world, &message(WRITE, 12)), [1, 10, 1]);
    assert_eq!(both(|| with_receive(12 * SMALL), &message(SEND, 12)), [1, 10, 1]);
    // Others do not.
    let sends = Row { each: 8, ..row(Operation::SendOnly, 3) };
    assert_eq!(both(|| with_receive(8), &[sends]), [1; 3]);
}

#[test]
fn they_are_one_message_or_several_whichever_way_they_come() {
    for asks in 0..16 {
        let writes = Row { asks, ..row(Operation::WriteOnly, 4) };
        both(after_a_send, std::slice::from_ref(&writes));
        both(after_a_send, &[writes.clone(), writes]);
    }
}

#[test]
fn writes_whose_addresses_grow_by_equal_steps_come_as_one() {
    let writes = |each, step, packets| Row { each, step, ..row(Operation::WriteOnly, packets) };
    for (each, step) in [(8, 64), (8, 0), (8, 3), (7, 8), (SMALL, 4000)] {
        assert_eq!(both(world, &[writes(each, step, 12)]), [12], "{each} {step}");
    }
    // Behind the first step that is another one.
    let around = Row { at: IOVA, ..writes(8, 64, 5) };
    let all = [Row { at: IOVA + 900, ..writes(8, 64, 6) }, around];
    assert_eq!(both(world, &all), [6, 5]);
}

/// Wherever the receive, the memory or the right ends.
#[test]
fn the_first_packet_that_is_wrong_is_refused() {
    for len in 0..=12 {
        both(|| with_receive(len * SMALL + 9), &message(SEND, 12));
    }
    let two_elements = || {
        let mut world = world();
        let lkey = world.device.keys.lkey;
        let sge = |at, len| Sge { addr: IOVA + at, len, lkey };
        let sges = [sge(9000, 3 * SMALL + 5), sge(100, 9 * SMALL)];
        world.qp.post_recv(&RecvWr { wr_id: 2, sges: &sges }, &mut world.device).unwrap();
        world
    };
    both(two_elements, &message(SEND, 12));
    for packets in 0..=12 {
        // Behind the last byte of the device's memory.
        let at = IOVA + (64 << 10) - u64::from(packets * SMALL);
        both(world, &[Row { at, ..row(Operation::WriteOnly, 12) }]);
        let step = 64;
        let at = IOVA + (64 << 10) - u64::from(packets * step) + 56;
        both(world, &[Row { at, each: 8, step, ..row(Operation::WriteOnly, 12) }]);
        let mut rows = message(WRITE, 12);
        rows.iter_mut().for_each(|row| row.at = at);
        both(world, &rows);
    }
    let without_right = || {
        World::with(QpType::Rc, LinkProps::new(1 << 20), |attr| {
            (attr.path_mtu, attr.access) = (Mtu::Mtu256, Access::empty());
        })
    };
    both(without_right, &[row(Operation::WriteOnly, 3)]);
}

#[test]
fn where_something_is_unusual_they_come_one_by_one() {
    let writes = [row(Operation::WriteOnly, 12)];
    let counted = || {
        let mut world = world();
        world.qp.count(CompCntrOps::REMOTE_RDMA_WRITE);
        world
    };
    both(counted, &writes);
    let closed = || {
        let mut world = world();
        let attr = world.qp.attr();
        world.go(QpState::Err, &attr);
        world
    };
    both(closed, &writes);
    for gap in -15..15 {
        let rows = [row(Operation::WriteOnly, 9), Row { gap, ..row(Operation::WriteOnly, 12) }];
        both(world, &rows);
    }
    // The message has not begun, or is another one.
    both(world, &[row(Operation::WriteMiddle, 5)]);
    both(|| with_receive(9 * SMALL), &[row(SEND[0], 1), row(WRITE[1], 5)]);
}

/// A packet that came early is missing no more.
#[test]
fn the_missing_packets_come_as_one() {
    let early = Row { gap: 4, ..row(Operation::WriteOnly, 3) };
    both(world, &[early, Row { gap: -7, ..row(Operation::WriteOnly, 6) }]);
}

#[test]
fn only_packets_that_are_right_are_joined() {
    let world = world();
    let mut all = Vec::new();
    for psn in 0..6 {
        let headers = world.headers(Operation::SendMiddle, psn);
        let mut bytes = vec![psn as u8; Bth::LEN + 8 + ICRC_LEN];
        Packet::new(headers, &[1; 8]).emit(&mut bytes);
        all.extend(bytes);
    }
    let stride = all.len() / 6;
    let join_with = |acks: Option<Psn>, all: &[u8], right: usize| {
        let packet = Packet::parse(&all[..stride - ICRC_LEN]).unwrap();
        let mut packet = Incoming { acks, ..Incoming::from(packet) };
        let mut asked = Vec::new();
        let n = packet.join(all, stride, |i, bytes| {
            assert_eq!(bytes, &all[i * stride..][..stride]);
            asked.push(i);
            i < right
        });
        assert_eq!((packet.packets as usize, packet.payload.len()), (n, 8 * n));
        assert_eq!(matches!(packet.payload, Data::Joined(_)), n > 1);
        (n, asked)
    };
    let join = |all: &[u8], right| join_with(None, all, right);
    assert_eq!(join(&all, 9), (6, vec![1, 2, 3, 4, 5]));
    assert_eq!(join_with(Some(Psn::default()), &all, 9), (1, vec![]), "it carries an ACK");
    assert_eq!(join(&all, 3), (3, vec![1, 2, 3]));
    assert_eq!(join(&all, 1), (1, vec![1]));
    assert_eq!(join(&all[..stride], 9), (1, vec![]));
    // Any other byte of the fourth packet's headers.
    for byte in 0..Bth::LEN {
        let mut other = all.clone();
        other[3 * stride + byte] ^= 1;
        assert_eq!(join(&other, 9), (3, vec![1, 2]), "byte {byte}");
    }
}

proptest! {
    #[test]
    fn any_rows_are_executed_as_single_packets_are(
        rows in prop::collection::vec(
            (0..7usize, 1..9u32, -3..3i32, 0..5u64, 0..600u32, any::<u32>()),
            1..8,
        ),
        receive in 0..3000u32,
    ) {
        use Operation as O;
        let kinds =
            [O::WriteOnly, SEND[0], SEND[1], SEND[2], WRITE[0], WRITE[1], WRITE[2]];
        let rows: Vec<_> = rows.iter().map(|&(kind, packets, gap, at, step, asks)| Row {
            // Mostly none.
            gap: if gap == 2 || gap == -3 { gap } else { 0 },
            at: IOVA + at * (15 << 10),
            step,
            asks,
            ..row(kinds[kind], packets)
        }).collect();
        both(|| with_receive(receive), &rows);
    }
}
