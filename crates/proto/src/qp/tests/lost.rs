//! UC: each cause for which messages are dropped is told once, and counted.

use super::*;

/// The causes that were told, each with its count, and the lines of the log.
fn told(world: &mut World) -> (Vec<(Cause, u64)>, Vec<String>) {
    let lost = world.qp.lost().iter().map(|lost| (lost.cause, lost.count)).collect();
    (lost, std::mem::take(&mut world.device.lines))
}

/// A WRITE of 8 bytes with this key, at this distance from the region's beginning.
fn write(world: &mut World, psn: u32, rkey: u32, offset: u64) {
    let mut headers = world.headers(Operation::WriteOnly, psn);
    headers.reth = Some(Reth { va: IOVA + offset, rkey, len: 8 });
    world.receive(headers, &[7; 8]);
}

#[test]
fn a_message_that_is_dropped_is_told_once_for_each_cause() {
    let mut world = World::new(QpType::Uc);
    let keys = world.device.keys;
    for psn in [0, 1] {
        world.receive_message(Operation::SendOnly, psn, 8);
    }
    world.recv(8);
    for psn in [2, 3] {
        world.receive_message(Operation::SendOnly, psn, 9);
    }
    let (lost, lines) = told(&mut world);
    assert_eq!(lost, [(Cause::UcNoReceive, 2), (Cause::MessageTooLong, 2)]);
    let peer = "a SEND of queue pair 0x000022 at 202:202:202:202:202:202:202:202";
    let end = "UC tells the sender nothing; see `anyverbs explain";
    assert_eq!(
        lines,
        [
            format!(
                "queue pair 0x000011: {peer} was dropped: no receive was posted; {end} AV6001`"
            ),
            format!(
                "queue pair 0x000011: {peer} was dropped: the message has 9 bytes or more, and the receive buffer 8; {end} AV0101`"
            ),
        ]
    );
    write(&mut world, 4, keys.rkey ^ 0x100, 0);
    write(&mut world, 5, keys.lkey, 0);
    write(&mut world, 6, keys.rkey, 1 << 40);
    let (lost, lines) = told(&mut world);
    assert_eq!(lost[2..], [(Cause::RkeyUnknown, 1), (Cause::LkeyAsRkey, 1), (Cause::RkeyRange, 1)]);
    assert!(lines.iter().all(|line| line.contains("a WRITE of queue pair")), "{lines:?}");
    // A message that fits is taken, and nothing is said.
    world.receive_message(Operation::SendOnly, 7, 8);
    assert_eq!(world.device.completions.len(), 1);
    assert_eq!(told(&mut world).1, [""; 0]);
    assert_eq!(world.qp.attr().state, QpState::Rts);
}

#[test]
fn a_right_that_the_queue_pair_lacks_is_told() {
    let change = |attr: &mut QpAttr| attr.access = Access::REMOTE_READ;
    let mut world = World::with(QpType::Uc, LinkProps::new(1 << 20), change);
    let rkey = world.device.keys.rkey;
    write(&mut world, 0, rkey, 0);
    let (lost, lines) = told(&mut world);
    assert_eq!(lost, [(Cause::QpRight, 1)]);
    assert!(lines[0].contains("IBV_ACCESS_REMOTE_WRITE"), "{lines:?}");
}

#[test]
fn a_gap_is_told_with_both_numbers() {
    let mut world = World::new(QpType::Uc);
    (0..4).for_each(|_| world.recv(2 * MTU));
    world.receive_message(Operation::SendOnly, 3, 8);
    let (lost, lines) = told(&mut world);
    assert_eq!(lost, [(Cause::UcGap, 1)]);
    let what = "were lost on the way: PSN 0x3 came, and 0x0, which is rq_psn, was to come;";
    assert!(lines.len() == 1 && lines[0].contains(what), "{lines:?}");
    // The rest of a message whose first packet was lost counts with it.
    world.receive_message(Operation::SendLast, 5, 8);
    world.receive_message(Operation::SendOnly, 6, 8);
    assert_eq!(told(&mut world), (vec![(Cause::UcGap, 2)], vec![]));
    assert_eq!(world.device.completions.len(), 2);
    // After RESET everything is new.
    let attr = world.qp.attr();
    world.go(QpState::Reset, &attr);
    assert_eq!(told(&mut world).0, []);
}

#[test]
fn a_difference_of_the_two_ends_is_told_though_nobody_asks() {
    let mut world = World::new(QpType::Uc);
    world.recv(8);
    let headers = world.headers(Operation::SendOnly, 0);
    let stranger = Arrival { source: gid(9), ..from_peer() };
    for _ in 0..2 {
        world.receive_from(&stranger, headers, &[1; 8]);
    }
    let lines = told(&mut world).1;
    assert!(lines.len() == 1 && lines[0].contains("`anyverbs explain AV1209`"), "{lines:?}");
    // RC asks, so a stranger cannot fill the log.
    let mut world = World::new(QpType::Rc);
    let headers = world.headers(Operation::SendOnly, 0);
    world.receive_from(&stranger, headers, &[1; 8]);
    assert_eq!(told(&mut world).1, [""; 0]);
}
