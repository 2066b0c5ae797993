//! Datagrams (S5.4, S5.8, S5.9; IBA 9.8.4, 10.2.5, 11.4.2.1; RoCEv2 annex 17 for the GRH area).

use std::net::IpAddr;

use super::prelude::*;
use anyverbs_proto::qp::drops::{DropReason, Drops};
use anyverbs_proto::types::{Gid, Qpn};

fn ud() -> (Pair, End, End) {
    rc(QpOptions::ud())
}

#[test]
fn the_grh_area_holds_the_ip_header() {
    // S5.8: 40 bytes in front; of IPv4, 20 of zero and then the header.
    for v6 in [false, true] {
        let mut sim = Sim::new(1);
        let ips: [IpAddr; 2] = if v6 {
            ["fd00::1".parse().unwrap(), "fd00::2".parse().unwrap()]
        } else {
            ["10.1.2.3".parse().unwrap(), "10.4.5.6".parse().unwrap()]
        };
        let devices = ips.map(|ip| sim.device_at(ip));
        let options = QpOptions::ud();
        let mut t = Pair::on(sim, devices, options, options);
        let (a, b) = t.ends();
        let mut dest = t.dest(a.qp, b.qp);
        dest.av.hop_limit = 33;
        dest.av.traffic_class = 0x48;
        dest.av.flow_label = 0x54321;
        t.recv(b, 1, &[b.mr.sge(0, 20), b.mr.sge(20, 220)]);
        let sges = [a.mr.sge(0, 200)];
        let flags = SendFlags::SIGNALED;
        let wr = SendWr {
            wr_id: 2,
            op: SendOp::SendImm(3),
            flags,
            sges: &sges,
            ud: Some(dest),
            xrc_srqn: 0,
        };
        t.post_send(a.qp, &wr).unwrap();
        t.run();
        let wc = t.recvs(b)[0];
        // Where hardware has the service level: UDP, and the version of IP.
        assert_eq!(wc.sl, if v6 { 0b1001 } else { 0b1010 });
        assert_eq!((wc.wr_id, wc.status, wc.byte_len), (1, Success, 240));
        assert_eq!(wc.flags, WcFlags::GRH | WcFlags::WITH_IMM);
        assert_eq!((wc.imm, wc.src_qpn), (3, t.get(a.qp).qpn()));
        assert_eq!(t.bytes(b.mr, 40, 200), t.bytes(a.mr, 0, 200));
        // Its length: the headers of UDP (8 bytes), BTH (12), DETH (8) and immediate data (4), the payload, and the ICRC (4).
        let grh = t.bytes(b.mr, 0, 40);
        match ips {
            [IpAddr::V6(from), IpAddr::V6(to)] => {
                assert_eq!(grh[..4], [0x64, 0x85, 0x43, 0x21]);
                assert_eq!((&grh[4..6], grh[7]), (&236u16.to_be_bytes()[..], 33));
                assert_eq!((&grh[8..24], &grh[24..]), (&from.octets()[..], &to.octets()[..]));
            }
            [IpAddr::V4(from), IpAddr::V4(to)] => {
                assert_eq!(grh[..20], [0; 20]);
                assert_eq!((grh[20], grh[21], grh[28]), (0x45, 0x48, 33));
                assert_eq!(grh[22..24], 256u16.to_be_bytes());
                assert_eq!((&grh[32..36], &grh[36..]), (&from.octets()[..], &to.octets()[..]));
            }
            _ => unreachable!(),
        }
    }
}

#[test]
fn another_qkey_is_dropped_silently_and_counted() {
    // S5.4.
    let (mut t, a, b) = ud();
    t.recv(b, 1, &[b.mr.sge(0, 240)]);
    let mut dest = t.dest(a.qp, b.qp);
    dest.qkey = QKey(dest.qkey.0 ^ 1);
    let sges = [a.mr.sge(0, 200)];
    let flags = SendFlags::SIGNALED;
    let wr = SendWr { wr_id: 2, op: SendOp::Send, flags, sges: &sges, ud: Some(dest), xrc_srqn: 0 };
    t.post_send(a.qp, &wr).unwrap();
    t.run();
    assert_eq!(t.sent(a), [(2, Success)]);
    assert_eq!(t.recvs(b), []);
    assert_eq!(t.counter(b.device, Counter::DropQkey), 1);
    assert_eq!(drops(&t), [Some(drop_of(&t, dest.qkey, 200, 0)), None, None, None]);
    do_send(&mut t, 200);
}

/// The datagrams that `b` has dropped.
fn drops(t: &Pair) -> [Option<Drops>; 4] {
    DropReason::ALL.map(|reason| t.get(t.ends().1.qp).drops(reason))
}

/// One datagram of `a` with so many bytes of payload.
fn drop_of(t: &Pair, qkey: QKey, len: u64, room: u64) -> Drops {
    let (a, b) = t.ends();
    let source = t.dest(b.qp, a.qp).av.dgid;
    let (qkeys, pkeys) = ([QpOptions::ud().qkey, qkey], [PKey::DEFAULT; 2]);
    Drops { count: 1, source, src_qpn: t.get(a.qp).qpn(), qkeys, pkeys, len: 40 + len, room }
}

/// A datagram of `len` bytes from `a` to `b`. Its receive is posted already.
fn do_send(t: &mut Pair, len: usize) {
    let (a, b) = t.ends();
    t.post(a, 9, SendOp::Send, &[a.mr.sge(0, len)]);
    t.run();
    assert_eq!(t.sent(a), [(9, Success)]);
    assert_eq!(t.received(b).len(), 1);
    assert_eq!(t.bytes(b.mr, 40, len), t.bytes(a.mr, 0, len));
}

#[test]
fn the_high_bit_of_a_qkey_means_the_own_one() {
    let (mut t, a, b) = ud();
    t.recv(b, 1, &[b.mr.sge(0, 240)]);
    let mut dest = t.dest(a.qp, b.qp);
    dest.qkey = QKey(0x8000_0000);
    let sges = [a.mr.sge(0, 200)];
    let flags = SendFlags::SIGNALED;
    let wr = SendWr { wr_id: 2, op: SendOp::Send, flags, sges: &sges, ud: Some(dest), xrc_srqn: 0 };
    t.post_send(a.qp, &wr).unwrap();
    t.run();
    assert_eq!(t.received(b), [(1, Success)]);
    let deth = t.net.trace.iter().next().unwrap().headers.deth.unwrap();
    assert_eq!(deth.qkey, QpOptions::ud().qkey);
}

#[test]
fn longer_than_a_datagram_may_be() {
    // S5.9. The MTU of a UD queue pair is the port's: 4096 bytes at most.
    let (mut t, a, b) = ud();
    t.recv(b, 1, &[b.mr.sge(0, 8192)]);
    t.post(a, 2, SendOp::Send, &[a.mr.sge(0, 4097)]);
    t.run();
    assert_eq!(t.sent(a), [(2, LocLenErr)]);
    assert_eq!(t.recvs(b), []);
}

#[test]
fn it_must_fit_the_receive_with_its_grh() {
    for (room, fits) in [(240, true), (239, false), (200, false), (39, false), (0, false)] {
        let (mut t, a, b) = ud();
        let before = t.bytes(b.mr, 0, 300);
        t.recv(b, 1, &[b.mr.sge(0, room)]);
        t.post(a, 2, SendOp::Send, &[a.mr.sge(0, 200)]);
        t.run();
        assert_eq!(t.sent(a), [(2, Success)]);
        // Too long for the receive: dropped, or the receive ends in a length error; never half of a message.
        let got = t.received(b);
        if fits {
            assert_eq!(got, [(1, Success)]);
        } else {
            assert!(got.is_empty() || got == [(1, LocLenErr)], "{got:?}");
            let count = |counter| t.counter(b.device, counter);
            let dropped = u64::from(got.is_empty());
            assert_eq!(count(Counter::DropRecvTooShort), dropped);
            assert_eq!(count(Counter::DropNoRecv), 0, "there was a receive");
            let drop = drop_of(&t, QpOptions::ud().qkey, 200, room as u64);
            assert_eq!(drops(&t), [None, None, None, (dropped > 0).then_some(drop)]);
            assert_eq!(t.bytes(b.mr, room, 300 - room), before[room..]);
        }
    }
}

#[test]
fn without_a_receive_it_is_dropped_and_counted() {
    let (mut t, a, b) = ud();
    t.post(a, 1, SendOp::Send, &[a.mr.sge(0, 100)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!(t.counter(b.device, Counter::DropNoRecv), 1);
    let drop = drop_of(&t, QpOptions::ud().qkey, 100, 0);
    assert_eq!(drops(&t), [None, None, Some(drop), None]);
    t.post(a, 1, SendOp::Send, &[a.mr.sge(0, 50)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!(drops(&t), [None, None, Some(Drops { count: 2, ..drop }), None]);
    t.recv(b, 2, &[b.mr.sge(0, 240)]);
    do_send(&mut t, 200);
}

#[test]
fn anyone_may_send_to_it() {
    let mut sim = Sim::new(1);
    let options = QpOptions::ud();
    let devices = [(); 3].map(|()| sim.device());
    let [a, b, c] = devices.map(|device| {
        let end = sim.end(device, &options);
        sim.to_init(end.qp, &options);
        sim.to_rtr(end.qp, &options, end.qp, &options);
        sim.to_rts(end.qp, &options);
        end
    });
    for i in 0..3 {
        let sges = [c.mr.sge(i as usize * 4096, 4096)];
        sim.post_recv(c.qp, &RecvWr { wr_id: i, sges: &sges }).unwrap();
    }
    // A queue pair may send to itself, too.
    for from in [a, b, c] {
        let ud = Some(sim.dest(from.qp, c.qp));
        let sges = [from.mr.sge(0, 100)];
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { wr_id: 1, op: SendOp::Send, flags, sges: &sges, ud, xrc_srqn: 0 };
        sim.post_send(from.qp, &wr).unwrap();
        sim.run();
    }
    let wcs = sim.poll(c.recv_cq);
    let from: Vec<_> = wcs.iter().map(|wc| wc.src_qpn).collect();
    assert_eq!(from, [a, b, c].map(|end| sim.get(end.qp).qpn()));
    for (i, from) in [a, b].into_iter().enumerate() {
        assert_eq!(sim.bytes(c.mr, i * 4096 + 40, 100), sim.bytes(from.mr, 0, 100));
    }
}

#[test]
fn a_request_without_a_destination_is_refused() {
    let (mut t, a, _) = ud();
    let sges = [a.mr.sge(0, 10)];
    let flags = SendFlags::SIGNALED;
    let wr = SendWr { wr_id: 1, op: SendOp::Send, flags, sges: &sges, ud: None, xrc_srqn: 0 };
    assert_eq!(t.post_send(a.qp, &wr), Err(PostSendError::NoDestination));
}

#[test]
fn a_lost_or_duplicated_datagram() {
    let (mut t, a, b) = ud();
    t.net.once(|_| true, Fate::Drop);
    t.net.once(|_| true, Fate::Again(Duration::from_micros(10)));
    for i in 0..3 {
        t.recv(b, i, &[b.mr.sge(i as usize * 300, 240)]);
    }
    t.post(a, 1, SendOp::SendImm(1), &[a.mr.sge(0, 100)]);
    t.post(a, 2, SendOp::SendImm(2), &[a.mr.sge(0, 100)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success), (2, Success)]);
    assert_eq!(t.recvs(b).iter().map(|wc| wc.imm).collect::<Vec<_>>(), [2, 2]);
}

#[test]
fn a_receive_that_cannot_be_written() {
    let (mut t, a, b) = ud();
    t.recv(b, 1, &[Sge { lkey: 0, ..b.mr.sge(0, 300) }]);
    t.recv(b, 2, &[b.mr.sge(0, 300)]);
    t.post(a, 3, SendOp::Send, &[a.mr.sge(0, 100)]);
    t.run();
    assert_eq!(t.received(b), [(1, LocProtErr), (2, WrFlushErr)]);
    assert_eq!(t.state(b), QpState::Err);
    assert_eq!(t.sent(a), [(3, Success)]);
}

#[test]
fn each_member_of_a_group_gets_one_copy() {
    // S5.10.
    let group = Gid::from("239.1.2.3".parse::<IpAddr>().unwrap());
    let mut sim = Sim::new(1);
    let options = QpOptions::ud();
    let [x, y] = [sim.device(), sim.device()];
    // The sender is a member; so are two queue pairs of the other device, one of them with another Q_Key.
    let ends = [(x, 1), (y, 1), (y, 1), (y, 2), (y, 1)].map(|(device, qkey)| {
        let options = QpOptions { qkey: QKey(qkey), ..options };
        let end = sim.end(device, &options);
        sim.to_init(end.qp, &options);
        sim.to_rtr(end.qp, &options, end.qp, &options);
        sim.to_rts(end.qp, &options);
        let sges = [end.mr.sge(4096, 300)];
        sim.post_recv(end.qp, &RecvWr { wr_id: 1, sges: &sges }).unwrap();
        end
    });
    for end in &ends[..4] {
        sim.attach(end.qp, group);
    }
    let [sender, ..] = ends;
    let mut dest = sim.dest(sender.qp, ends[1].qp);
    dest.av.dgid = group;
    dest.qpn = Qpn::MULTICAST;
    let sges = [sender.mr.sge(0, 100)];
    let flags = SendFlags::SIGNALED;
    let wr = SendWr { wr_id: 2, op: SendOp::Send, flags, sges: &sges, ud: Some(dest), xrc_srqn: 0 };
    sim.post_send(sender.qp, &wr).unwrap();
    sim.run();
    let got = ends.map(|end| sim.poll(end.recv_cq).len());
    assert_eq!(got, [1, 1, 1, 0, 0]);
    assert_eq!(sim.counter(y, Counter::DropQkey), 1);
    for end in &ends[..3] {
        assert_eq!(sim.bytes(end.mr, 4096 + 40, 100), sim.bytes(sender.mr, 0, 100));
        assert_eq!(sim.bytes(end.mr, 4096 + 36, 4), [239, 1, 2, 3], "the GRH names the group");
    }
    sim.detach(ends[1].qp, group);
    for end in &ends[1..3] {
        let sges = [end.mr.sge(4096, 300)];
        sim.post_recv(end.qp, &RecvWr { wr_id: 3, sges: &sges }).unwrap();
    }
    sim.post_send(sender.qp, &wr).unwrap();
    sim.run();
    assert_eq!(ends.map(|end| sim.poll(end.recv_cq).len()), [0, 0, 1, 0, 0]);
    // The sender had no receive for its own copy, and has lost nothing by that.
    assert_eq!(sim.counter(x, Counter::DropNoRecv), 1);
    assert_eq!(sim.get(sender.qp).drops(DropReason::NoReceive), None);
    sim.post_send(sender.qp, &wr).unwrap();
    sim.run();
    let lost = sim.get(ends[2].qp).drops(DropReason::NoReceive).map(|drops| drops.count);
    assert_eq!((sim.counter(x, Counter::DropNoRecv), lost), (2, Some(1)));
}
