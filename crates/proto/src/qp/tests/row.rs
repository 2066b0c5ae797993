//! Messages of one packet leave many at a time, as the general way would send them one by one.

use super::*;

const INLINE: SendFlags = SendFlags::SIGNALED.union(SendFlags::INLINE);
const SOLICITED: SendFlags = SendFlags::SIGNALED.union(SendFlags::SOLICITED);

/// A request of one element: its kind, flags, bytes, and where its data lies.
#[derive(Clone, Copy)]
struct Request {
    op: fn(RemoteAddr) -> SendOp,
    flags: SendFlags,
    len: u32,
    at: u64,
    /// Its key is not one.
    is_wrong: bool,
}

fn write(at: RemoteAddr) -> SendOp {
    SendOp::Write(at)
}

/// Under another key.
fn write_elsewhere(at: RemoteAddr) -> SendOp {
    SendOp::Write(RemoteAddr { rkey: at.rkey + 1, ..at })
}

fn send(_: RemoteAddr) -> SendOp {
    SendOp::Send
}

fn send_imm(_: RemoteAddr) -> SendOp {
    SendOp::SendImm(9)
}

fn read(at: RemoteAddr) -> SendOp {
    SendOp::Read(at)
}

const WRITE: Request =
    Request { op: write, flags: SendFlags::SIGNALED, len: 8, at: 0, is_wrong: false };

/// The requests, whose data and targets lie in no order.
fn requests(of: &[(Request, usize)]) -> Vec<Request> {
    let all = of.iter().flat_map(|(request, n)| std::iter::repeat_n(*request, *n));
    all.enumerate().map(|(i, r)| Request { at: i as u64 * 7919 % 4096, ..r }).collect()
}

/// Compares the packets and completions of the short way with those of the general one. Returns the runs of the short one.
fn runs(props: LinkProps, room: usize, requests: &[Request]) -> Vec<u32> {
    let run = |general: bool| {
        let mut world = World::with(QpType::Rc, props, |_| {});
        world.qp.attached.general_way = general;
        world.device.room = room;
        for (wr_id, request) in (0..).zip(requests) {
            let Request { op, flags, len, at, is_wrong } = *request;
            let lkey = world.device.keys.lkey + u32::from(is_wrong);
            let sges = [Sge { addr: IOVA + at, len, lkey }];
            let sges = if flags.contains(SendFlags::INLINE) {
                [Sge { addr: at, ..sges[0] }]
            } else {
                sges
            };
            let remote = RemoteAddr { va: IOVA + 5 * at, ..world.remote() };
            let wr = SendWr { wr_id, op: op(remote), flags, sges: &sges, ud: None, xrc_srqn: 0 };
            world.qp.post_send(&wr, &mut world.device).unwrap();
        }
        world.qp.transmit(&mut world.device);
        let mut answered = 0;
        // The rest leaves when the link has room, and the window.
        while let Some(last) = world.device.sent.get(answered..).and_then(<[Sent]>::last) {
            let psn = last.headers.bth.psn.get();
            answered = world.device.sent.len();
            world.device.room = usize::MAX;
            world.qp.transmit(&mut world.device);
            world.answer(psn, Syndrome::ACK);
        }
        (world.device.sent, world.device.completions, world.device.runs)
    };
    let (short, completed, runs) = run(false);
    let (general, expected, none) = run(true);
    assert!(none.is_empty());
    assert_eq!(short, general);
    assert_eq!(completed, expected);
    runs
}

fn batches() -> LinkProps {
    LinkProps { batch: 60_000, ..LinkProps::new(1 << 20) }
}

#[test]
fn requests_that_are_alike_are_a_run() {
    for len in [0, 1, 2, 3, 4, 8, 64, MTU] {
        for op in [write, send] {
            let one = Request { op, len, ..WRITE };
            for (n, expected) in
                [(1, &[][..]), (2, &[2]), (64, &[64]), (65, &[64]), (66, &[64, 2]), (90, &[64, 26])]
            {
                assert_eq!(runs(batches(), usize::MAX, &requests(&[(one, n)])), expected, "{len}");
            }
        }
    }
    let inline = Request { flags: INLINE, ..WRITE };
    assert_eq!(runs(batches(), usize::MAX, &requests(&[(inline, 9)])), [9]);
    // The flag concerns the data alone.
    let both = requests(&[(inline, 3), (WRITE, 3), (inline, 3)]);
    assert_eq!(runs(batches(), usize::MAX, &both), [9]);
}

#[test]
fn a_run_ends_where_a_request_differs() {
    let others = [
        Request { op: send, ..WRITE },
        Request { op: write_elsewhere, ..WRITE },
        Request { flags: SOLICITED, ..WRITE },
        Request { len: 9, ..WRITE },
        Request { is_wrong: true, ..WRITE },
    ];
    for other in others {
        for n in [1, 2, 5] {
            let expected = match (n, other.is_wrong) {
                // The run finds the key that is none.
                (_, true) => vec![4 + n],
                (1, false) => vec![4, 4],
                (n, false) => vec![4, n, 4],
            };
            let all = requests(&[(WRITE, 4), (other, n as usize), (WRITE, 4)]);
            let found = runs(batches(), usize::MAX, &all);
            if other.is_wrong {
                assert_eq!(found.len(), 1, "nothing leaves behind it");
            } else {
                assert_eq!(found, expected);
            }
        }
    }
}

#[test]
fn requests_of_other_kinds_go_the_general_way() {
    for op in [send_imm, read] {
        let other = Request { op, ..WRITE };
        assert_eq!(runs(batches(), usize::MAX, &requests(&[(other, 6)])), [] as [u32; 0]);
        assert_eq!(
            runs(batches(), usize::MAX, &requests(&[(WRITE, 3), (other, 2), (WRITE, 3)])),
            [3, 3]
        );
    }
    let long = Request { len: MTU + 1, ..WRITE };
    assert_eq!(runs(batches(), usize::MAX, &requests(&[(long, 6)])), [] as [u32; 0]);
    let alone = LinkProps { batch: 0, ..batches() };
    assert_eq!(runs(alone, usize::MAX, &requests(&[(WRITE, 6)])), [] as [u32; 0]);
}

#[test]
fn a_run_ends_where_the_link_or_the_window_does() {
    for room in 0..12 {
        runs(batches(), room, &requests(&[(WRITE, 9), (Request { op: send, ..WRITE }, 9)]));
    }
    for packets in 1..12 {
        for more in [0, 1, 71] {
            let props = LinkProps { batch: 300, ..LinkProps::new(packets * (8 + 64) + more) };
            runs(props, usize::MAX, &requests(&[(WRITE, 20)]));
        }
    }
}

/// A request with a fence waits for the answer to a READ, and so do those behind it.
#[test]
fn a_fence_ends_a_run() {
    let fenced = Request { flags: SendFlags::SIGNALED.union(SendFlags::FENCE), ..WRITE };
    let asks = Request { op: read, ..WRITE };
    let mut world = World::with(QpType::Rc, batches(), |_| {});
    for request in requests(&[(asks, 1), (WRITE, 3), (fenced, 1), (WRITE, 3)]) {
        let sges = [Sge { addr: IOVA, len: 8, lkey: world.device.keys.lkey }];
        let (op, flags) = ((request.op)(world.remote()), request.flags);
        let wr = SendWr { wr_id: 0, op, flags, sges: &sges, ud: None, xrc_srqn: 0 };
        world.qp.post_send(&wr, &mut world.device).unwrap();
    }
    world.qp.transmit(&mut world.device);
    assert_eq!(world.device.runs, [3]);
    assert_eq!(world.sent().len(), 4);
}

/// A packet that is sent again goes the general way, which counts it.
#[test]
fn repeated_requests_are_no_run() {
    let mut world = World::with(QpType::Rc, batches(), |_| {});
    for request in requests(&[(WRITE, 5)]) {
        let sges = [Sge { addr: IOVA, len: 8, lkey: world.device.keys.lkey }];
        let op = (request.op)(world.remote());
        let wr = SendWr { wr_id: 0, op, flags: request.flags, sges: &sges, ud: None, xrc_srqn: 0 };
        world.qp.post_send(&wr, &mut world.device).unwrap();
    }
    world.qp.transmit(&mut world.device);
    assert_eq!(world.device.runs, [5]);
    world.sent();
    while world.device.sent.is_empty() {
        world.device.now = world.qp.deadline().unwrap();
        world.qp.on_timer(&mut world.device);
    }
    assert_eq!(world.device.runs, [5]);
    assert!(world.counters().contains(&Counter::Retransmitted));
}
