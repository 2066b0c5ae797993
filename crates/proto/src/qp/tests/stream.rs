//! The middle of a long message leaves many packets at a time, as the general way would send it.

use super::*;

/// The packets of one request, in the short way and in the general one, and the runs of the short one.
fn both(
    qp_type: QpType,
    props: LinkProps,
    room: usize,
    op: fn(RemoteAddr) -> SendOp,
    len: u32,
) -> (Vec<Sent>, Vec<u32>) {
    let run = |general: bool| {
        let mut world = World::with(qp_type, props, |attr| attr.path_mtu = Mtu::Mtu256);
        world.qp.attached.general_way = general;
        world.device.room = room;
        world.post(op(world.remote()), len);
        // The rest leaves when the link has room, and the window.
        for _ in 0..2 {
            world.device.room = usize::MAX;
            world.qp.transmit(&mut world.device);
            if qp_type == QpType::Rc
                && let Some(last) = world.device.sent.last()
            {
                world.answer(last.headers.bth.psn.get(), Syndrome::ACK);
            }
        }
        let runs = world.device.runs.clone();
        (world.device.sent, runs)
    };
    let (short, runs) = run(false);
    let (general, none) = run(true);
    assert!(none.is_empty());
    let all = |sent: &[Sent]| {
        let all = sent.iter().map(|s| (s.headers, s.bytes.clone(), s.acks));
        all.collect::<Vec<_>>()
    };
    assert_eq!(all(&short), all(&general), "{qp_type:?}, {len} bytes, room for {room}");
    (short, runs)
}

const SMALL: u32 = SHORT as u32;

#[test]
fn full_packets_between_first_and_last_are_a_run() {
    let props = LinkProps::new(1 << 20);
    let send: fn(RemoteAddr) -> SendOp = |_| SendOp::Send;
    let write: fn(RemoteAddr) -> SendOp = SendOp::Write;
    let write_imm: fn(RemoteAddr) -> SendOp = |at| SendOp::WriteImm(at, 7);
    for op in [send, write, write_imm] {
        for (packets, runs) in [
            (1, &[][..]),
            (2, &[]),
            (3, &[1]),
            (10, &[8]),
            (66, &[64]),
            (67, &[64, 1]),
            (200, &[64, 64, 64, 6]),
        ] {
            for cut in [0, 1, SMALL - 1] {
                let (sent, found) = both(QpType::Rc, props, usize::MAX, op, packets * SMALL - cut);
                assert_eq!((sent.len(), &found[..]), (packets as usize, runs));
            }
        }
    }
}

#[test]
fn a_run_ends_where_the_link_or_the_window_does() {
    let props = LinkProps::new(1 << 20);
    for room in 0..20 {
        let (sent, _) = both(QpType::Rc, props, room, SendOp::Write, 12 * SMALL);
        assert_eq!(sent.len(), 12);
    }
    for packets in 1..14 {
        for more in [0, 1, 319] {
            let props = LinkProps::new(packets * (SMALL + 64) + more);
            both(QpType::Rc, props, usize::MAX, SendOp::Write, 12 * SMALL);
        }
    }
}

#[test]
fn other_links_and_requests_have_no_runs() {
    let plain = LinkProps::new(1 << 20);
    let none = |qp_type, props, op: fn(RemoteAddr) -> SendOp| {
        let (_, runs) = both(qp_type, props, usize::MAX, op, 12 * SMALL);
        assert_eq!(runs, [] as [u32; 0], "{qp_type:?}");
    };
    none(QpType::Uc, plain, SendOp::Write);
    none(QpType::Rc, plain, SendOp::Read);
    none(QpType::Rc, LinkProps { segment: 1024, ..plain }, SendOp::Write);
    none(QpType::Rc, LinkProps { immediate: true, ..plain }, SendOp::Write);
    let mut world = World::with(QpType::Rc, plain, |attr| {
        (attr.path_mtu, attr.av.static_rate) = (Mtu::Mtu256, 2);
    });
    world.post(SendOp::Write(world.remote()), 12 * SMALL);
    assert_eq!((world.device.sent.len(), world.device.runs.len()), (12, 0));
}

/// A packet that is sent again goes the general way, which counts it.
#[test]
fn repeated_packets_are_no_run() {
    let mut world = World::with(QpType::Rc, LinkProps::new(1 << 20), |attr| {
        attr.path_mtu = Mtu::Mtu256;
    });
    world.post(SendOp::Write(world.remote()), 12 * SMALL);
    assert_eq!(world.device.runs, [10]);
    world.sent();
    while world.device.sent.is_empty() {
        world.device.now = world.qp.deadline().unwrap();
        world.qp.on_timer(&mut world.device);
    }
    assert_eq!(world.device.runs, [10]);
    assert!(world.counters().contains(&Counter::Retransmitted));
}
