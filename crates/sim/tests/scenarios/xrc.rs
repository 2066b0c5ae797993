//! Extended reliable connections: any target of a domain receives for every SRQ of it (IBA A14).

use super::prelude::*;
use anyverbs_proto::recv_queue::PostRecvError;
use anyverbs_sim::{CqId, DeviceId, Mr, QpId, SrqId};

/// An SRQ with its completion queue, its protection domain, and memory in it.
#[derive(Clone, Copy)]
struct Receiver {
    srq: SrqId,
    cq: CqId,
    mr: Mr,
}

/// Two initiators on device `x`, each with its target in one domain of device `y`, which has three SRQs: two in the
/// domain, one in another.
struct World {
    sim: Sim,
    x: DeviceId,
    y: DeviceId,
    initiators: Vec<QpId>,
    targets: Vec<QpId>,
    send_cq: CqId,
    from: Mr,
    receivers: [Receiver; 3],
}

fn world() -> World {
    let mut sim = Sim::new(1);
    let (x, y) = (sim.device(), sim.device());
    let (pd, send_cq) = (sim.pd(x), sim.cq(x, 100));
    let from = sim.mr(x, pd, 65536, Access::VERBS);
    sim.fill(from, 1);
    let receivers = [(); 3].map(|()| {
        let (pd, cq) = (sim.pd(y), sim.cq(y, 100));
        let xrcd = if pd == 3 { 8 } else { 7 };
        let srq = sim.xrc_srq(pd, xrcd, cq, 16, 4);
        let mr = sim.mr(y, pd, 65536, Access::VERBS);
        sim.fill(mr, pd.into());
        Receiver { srq, cq, mr }
    });
    let (mine, theirs) = (QpOptions::xrc_send(), QpOptions::xrc_recv());
    let (mut initiators, mut targets) = (vec![], vec![]);
    for _ in 0..2 {
        let a = sim.qp(pd, send_cq, send_cq, None, &mine);
        let b = sim.xrc_target(7, receivers[0].cq, &theirs);
        sim.connect((a, &mine), (b, &theirs));
        initiators.push(a);
        targets.push(b);
    }
    World { sim, x, y, initiators, targets, send_cq, from, receivers }
}

impl World {
    fn recv(&mut self, r: usize, wr_id: u64) {
        let Receiver { srq, mr, .. } = self.receivers[r];
        let sges = [mr.sge(wr_id as usize % 8 * 4096, 4096)];
        self.sim.post_srq_recv(srq, &RecvWr { wr_id, sges: &sges }).unwrap();
    }

    /// Posts a request for the SRQ of a receiver.
    fn post(&mut self, i: usize, r: usize, wr_id: u64, op: SendOp, len: usize) {
        let xrc_srqn = self.sim.srqn(self.receivers[r].srq);
        self.post_to(i, xrc_srqn, wr_id, op, len);
    }

    fn post_to(&mut self, i: usize, xrc_srqn: u32, wr_id: u64, op: SendOp, len: usize) {
        let sges = [self.from.sge(0, len)];
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { wr_id, op, flags, sges: &sges, ud: None, xrc_srqn };
        self.sim.post_send(self.initiators[i], &wr).unwrap();
    }

    fn sent(&mut self) -> Vec<(u64, WcStatus)> {
        self.sim.poll(self.send_cq).iter().map(|wc| (wc.wr_id, wc.status)).collect()
    }

    fn received(&mut self, r: usize) -> Vec<(u64, WcStatus)> {
        self.sim.poll(self.receivers[r].cq).iter().map(|wc| (wc.wr_id, wc.status)).collect()
    }

    fn qp_events(&mut self, device: DeviceId, qp: QpId) -> Vec<QpEvent> {
        let of_it = |event| match event {
            Event::Qp(id, event) if id == qp => Some(event),
            _ => None,
        };
        self.sim.events(device).into_iter().filter_map(of_it).collect()
    }
}

#[test]
fn every_request_takes_from_the_srq_that_it_names() {
    let mut w = world();
    for (r, wr_id) in [(0, 1), (0, 2), (1, 3), (1, 4)] {
        w.recv(r, wr_id);
    }
    for (i, r, len) in [(0, 1, 3000), (1, 0, 100), (0, 0, 2000), (1, 1, 0)] {
        w.post(i, r, 10, SendOp::SendImm(r as u32), len);
        w.sim.run();
    }
    let qpn = |i: usize| w.sim.get(w.targets[i]).qpn();
    let peer = |i: usize| w.sim.get(w.initiators[i]).qpn();
    let expected = [
        [(1, 100, qpn(1), peer(1), 0), (2, 2000, qpn(0), peer(0), 0)],
        [(3, 3000, qpn(0), peer(0), 1), (4, 0, qpn(1), peer(1), 1)],
    ];
    for (r, expected) in expected.into_iter().enumerate() {
        let wcs = w.sim.poll(w.receivers[r].cq);
        let got: Vec<_> =
            wcs.iter().map(|wc| (wc.wr_id, wc.byte_len, wc.qpn, wc.src_qpn, wc.imm)).collect();
        assert_eq!(got, expected);
    }
    assert_eq!(w.sent(), [(10, Success); 4]);
    let (to, from) = (w.receivers[1].mr, w.from);
    assert_eq!(w.sim.bytes(to, 3 * 4096, 3000), w.sim.bytes(from, 0, 3000));
}

#[test]
fn the_protection_domain_of_the_srq_counts() {
    let mut w = world();
    let (first, second) = (w.receivers[0].mr, w.receivers[1].mr);
    for (r, mr) in [(0, first), (1, second)] {
        w.post(0, r, 1, SendOp::Read(mr.remote(0)), 5000);
        w.sim.run();
        assert_eq!(w.sim.bytes(w.from, 0, 5000), w.sim.bytes(mr, 0, 5000));
        w.post(0, r, 2, SendOp::Write(mr.remote(8192)), 3000);
        w.post(0, r, 3, SendOp::FetchAdd { at: mr.remote(0), add: 1 }, 8);
        w.sim.run();
        assert_eq!(w.sent(), [(1, Success), (2, Success), (3, Success)]);
    }
    let at = first.remote(0);
    let ops = [
        SendOp::Read(at),
        SendOp::Write(at),
        SendOp::FetchAdd { at, add: 1 },
        SendOp::CompareSwap { at, compare: 0, swap: 1 },
    ];
    for op in ops {
        // The SRQ is in the domain, but the memory is another SRQ's.
        let mut w = world();
        w.post(0, 1, 1, op, if op.is_atomic() { 8 } else { 3000 });
        w.sim.run();
        assert_eq!(w.sent(), [(1, RemAccessErr)], "{op:?}");
    }
}

#[test]
fn an_srq_that_the_domain_does_not_have() {
    for number in [0, 5, 0xff_ffff, u32::MAX] {
        refused(|_| number);
    }
    refused(|w| w.sim.srqn(w.receivers[2].srq));
    refused(|w| {
        let srq = w.receivers[1].srq;
        let number = w.sim.srqn(srq);
        w.sim.destroy_xrc_srq(srq);
        number
    });
    refused(|w| {
        let srq = w.sim.srq(w.y, 10, 1);
        w.sim.srqn(srq)
    });
}

/// Every operation for an SRQ that must not be found: remote access error.
fn refused(srqn: impl Fn(&mut World) -> u32) {
    for op in 0..6 {
        let mut w = world();
        let number = srqn(&mut w);
        let at = w.receivers[0].mr.remote(0);
        let op = [
            SendOp::Send,
            SendOp::Write(at),
            SendOp::WriteImm(at, 1),
            SendOp::Read(at),
            SendOp::CompareSwap { at, compare: 1, swap: 2 },
            SendOp::FetchAdd { at, add: 3 },
        ][op];
        w.recv(0, 1);
        w.sim.events(w.y);
        let before = w.sim.bytes(w.receivers[0].mr, 0, 65536);
        w.post_to(0, number, 2, op, if op.is_atomic() { 8 } else { 3000 });
        w.post(0, 0, 3, SendOp::Send, 10);
        w.sim.run();
        assert_eq!(w.sent(), [(2, RemAccessErr), (3, WrFlushErr)], "{op:?} {number:#x}");
        assert_eq!(w.received(0), []);
        assert_eq!(w.sim.bytes(w.receivers[0].mr, 0, 65536), before);
        let events = w.qp_events(w.y, w.targets[0]);
        assert!(events.contains(&QpEvent::AccessErr), "{events:?}");
        assert_eq!(w.sim.counter(w.y, Counter::RespXrcSrqErrors), 1);
        // The other target serves on.
        w.post(1, 0, 4, SendOp::Send, 10);
        w.sim.run();
        assert_eq!((w.sent(), w.received(0)), (vec![(4, Success)], vec![(1, Success)]));
    }
}

#[test]
fn an_empty_srq_is_not_ready_and_the_others_are() {
    let mut w = world();
    w.recv(1, 1);
    w.post(0, 0, 10, SendOp::Send, 100);
    w.post(1, 1, 11, SendOp::Send, 100);
    w.sim.run_for(Duration::from_micros(100));
    assert_eq!(w.sent(), [(11, Success)]);
    assert_eq!(w.received(1), [(1, Success)]);
    assert_eq!(w.sim.counter(w.y, Counter::RnrNakSent), 1);
    w.recv(0, 2);
    w.sim.run();
    assert_eq!(w.sent(), [(10, Success)]);
    assert_eq!(w.received(0), [(2, Success)]);
}

#[test]
fn an_srq_is_destroyed_in_the_middle_of_a_message() {
    let mut w = world();
    w.recv(0, 1);
    w.sim.net.once(is(O::SendLast), Fate::Delay(Duration::from_millis(1)));
    w.post(0, 0, 2, SendOp::Send, 3000);
    w.sim.run_for(Duration::from_micros(500));
    w.sim.destroy_xrc_srq(w.receivers[0].srq);
    w.sim.run();
    assert_eq!(w.received(0), []);
    assert_eq!(w.sent(), [(2, RemAccessErr)]);
}

#[test]
fn a_message_is_for_one_srq() {
    let mut w = world();
    w.recv(0, 1);
    w.recv(1, 2);
    let qpn = w.sim.get(w.targets[0]).qpn();
    for (i, (operation, r)) in [(O::SendFirst, 0), (O::SendLast, 1)].into_iter().enumerate() {
        let psn = QpOptions::rc().sq_psn.plus(i as u32);
        let mut headers = Headers::new(Bth::new(Opcode::new(Service::Xrc, operation), qpn, psn));
        headers.xrceth = Some(XrcEth { srqn: w.sim.srqn(w.receivers[r].srq) });
        let len = if operation == O::SendFirst { 1024 } else { 10 };
        w.sim.inject(w.x, w.y, headers, &vec![0; len]);
    }
    w.sim.run();
    // Completed where it was taken.
    assert_eq!(w.received(0), [(1, RemInvReqErr)]);
    assert_eq!(w.received(1), []);
    let events = w.qp_events(w.y, w.targets[0]);
    assert!(events.contains(&QpEvent::ReqErr), "{events:?}");
}

#[test]
fn a_repeated_read_belongs_to_its_own_srq() {
    let mut w = world();
    w.recv(1, 1);
    w.sim.net.once(is(O::ReadResponseLast), Fate::Drop);
    // The next message is for the other SRQ, and the READ comes again in its middle.
    w.sim.net.once(is(O::SendLast), Fate::Delay(Duration::from_millis(1)));
    let mr = w.receivers[0].mr;
    w.post(0, 0, 2, SendOp::Read(mr.remote(0)), 3000);
    let xrc_srqn = w.sim.srqn(w.receivers[1].srq);
    let sges = [w.from.sge(8192, 3000)];
    let wr = SendWr {
        wr_id: 3,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        sges: &sges,
        ud: None,
        xrc_srqn,
    };
    w.sim.post_send(w.initiators[0], &wr).unwrap();
    w.sim.run();
    assert_eq!(w.sent(), [(2, Success), (3, Success)]);
    assert_eq!(w.received(1), [(1, Success)]);
    assert_eq!(w.sim.bytes(w.from, 0, 3000), w.sim.bytes(mr, 0, 3000));
    assert!(w.sim.counter(w.y, Counter::DuplicateRequest) >= 1);
}

#[test]
fn initiators_do_not_receive_and_targets_do_not_send() {
    let (mut t, a, b) = {
        let t = Pair::with(1, QpOptions::xrc_send(), QpOptions::xrc_recv());
        let (a, b) = t.ends();
        (t, a, b)
    };
    let wr = RecvWr { wr_id: 1, sges: &[] };
    assert_eq!(t.post_recv(a.qp, &wr), Err(PostRecvError::NoQueue));
    assert_eq!(t.post_recv(b.qp, &wr), Err(PostRecvError::NoQueue));
    let flags = SendFlags::SIGNALED;
    let refused = Err(PostSendError::NoSendQueue);
    assert_eq!(t.try_post(b, 1, SendOp::Send, flags, &[]), refused);
    // Requests to an initiator, answers to a target.
    let psn = QpOptions::rc().sq_psn;
    for (from, to, operation) in [(b, a, O::SendOnly), (b, a, O::ReadRequest), (a, b, O::Ack)] {
        let before = t.counter(to.device, Counter::DropQpState);
        let mut headers = forged(&t, to, operation, psn);
        headers.reth = Some(anyverbs_proto::wire::reth::Reth { va: 0, rkey: 0, len: 0 });
        headers.aeth = Some(anyverbs_proto::wire::aeth::Aeth {
            syndrome: anyverbs_proto::wire::aeth::Syndrome::ACK,
            msn: 1,
        });
        t.inject(from.device, to.device, headers, &[]);
        t.run();
        assert_eq!(t.counter(to.device, Counter::DropQpState), before + 1, "{operation:?}");
    }
    assert_eq!((t.state(a), t.state(b)), (QpState::Rts, QpState::Rts));
    for op in every_op(b) {
        do_one(&mut t, op);
    }
}

#[test]
fn events_of_the_move_to_err() {
    let t = Pair::with(1, QpOptions::xrc_send(), QpOptions::xrc_recv());
    let (a, b) = t.ends();
    let mut t = t;
    t.recv(b, 1, &[b.mr.sge(0, 4096)]);
    t.net.rule(|p| if p.operation() == O::SendLast { Fate::Drop } else { Fate::Pass });
    t.post(a, 2, SendOp::Send, &[a.mr.sge(0, 3000)]);
    t.run_for(Duration::from_micros(100));
    t.events(b.device);
    t.to_state(b.qp, QpState::Err);
    // The receive that was taken comes back; the others belong to the SRQ.
    assert_eq!(t.received(b), [(1, WrFlushErr)]);
    assert_eq!(t.qp_events(b), [QpEvent::LastWqeReached]);
    t.to_state(a.qp, QpState::Err);
    assert_eq!(t.sent(a), [(2, WrFlushErr)]);
    assert_eq!(t.qp_events(a), []);
}

/// The bytes on the wire: BTH, then at once the XRCETH, then the others.
#[test]
fn bytes_of_the_requests() {
    let t = Pair::with(1, QpOptions::xrc_send(), QpOptions::xrc_recv());
    let (a, b) = t.ends();
    let mut t = t;
    t.net.rule(|_| Fate::Drop);
    let at = RemoteAddr { va: 0x0102_0304_0506_0708, rkey: 0x1112_1314 };
    let ops = [
        SendOp::Send,
        SendOp::SendImm(0x2122_2324),
        SendOp::SendInv(0x3132_3334),
        SendOp::Write(at),
        SendOp::WriteImm(at, 0x4142_4344),
        SendOp::Read(at),
        SendOp::CompareSwap { at, compare: 0x51, swap: 0x61 },
        SendOp::FetchAdd { at, add: 0x71 },
    ];
    for (i, op) in ops.into_iter().enumerate() {
        t.post(a, i as u64, op, &[a.mr.sge(0, 8)]);
    }
    let remote = [&0x0102_0304_0506_0708u64.to_be_bytes()[..], &[0x11, 0x12, 0x13, 0x14]].concat();
    let reth = [&remote[..], &[0, 0, 0, 8]].concat();
    let word = |n: u8| [0, 0, 0, 0, 0, 0, 0, n];
    let after = [
        (0xa4, vec![]),
        (0xa5, vec![0x21, 0x22, 0x23, 0x24]),
        (0xb7, vec![0x31, 0x32, 0x33, 0x34]),
        (0xaa, reth.clone()),
        (0xab, [&reth[..], &[0x41, 0x42, 0x43, 0x44]].concat()),
        (0xac, reth),
        (0xb3, [&remote[..], &word(0x61), &word(0x51)].concat()),
        (0xb4, [&remote[..], &word(0x71), &word(0)].concat()),
    ];
    let qpn = t.get(b.qp).qpn().get().to_be_bytes();
    let srqn = t.srqn(b.srq.unwrap()).to_be_bytes();
    let records: Vec<_> = t.net.trace.iter().filter(|r| r.from == a.device).copied().collect();
    assert_eq!(records.len(), after.len());
    for (i, (record, (opcode, after))) in records.iter().zip(after).enumerate() {
        let psn = QpOptions::rc().sq_psn.plus(i as u32).get().to_be_bytes();
        let mut bth = vec![opcode, 0x40, 0xff, 0xff, Bth::OURS, qpn[1], qpn[2], qpn[3]];
        bth.extend([0x80, psn[1], psn[2], psn[3]]);
        let expected = [&bth[..], &[0, srqn[1], srqn[2], srqn[3]], &after].concat();
        assert_eq!(emit(record.headers, &[]), expected, "{}", record.headers);
    }
}

#[test]
fn answers_have_no_xrceth() {
    let t = Pair::with(1, QpOptions::xrc_send(), QpOptions::xrc_recv());
    let (a, b) = t.ends();
    let mut t = t;
    for op in every_op(b) {
        do_one(&mut t, op);
    }
    let answers = t.net.trace.iter().filter(|r| r.from == b.device);
    let opcodes: std::collections::BTreeSet<_> = answers
        .inspect(|r| {
            assert_eq!((r.headers.xrceth, r.headers.bth.dest_qpn), (None, t.get(a.qp).qpn()))
        })
        .map(|r| r.headers.bth.opcode.code())
        .collect();
    assert_eq!(opcodes.into_iter().collect::<Vec<_>>(), [0xad, 0xae, 0xaf, 0xb1, 0xb2]);
}
