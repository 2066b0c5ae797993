//! Rules about the packets of one end alone.

use super::*;

/// Two endpoints, of which the first is the process's first queue pair and gives up soon.
fn impatient_pair() -> (Endpoint, Endpoint) {
    let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
    a.connect_with(b.address(), 8, 1);
    b.connect(a.address());
    (a, b)
}

/// Nothing that `a` sends comes to `b`, retries and probes included.
fn lose_all(op: fn(RemoteAddr) -> SendOp) {
    let (a, b) = impatient_pair();
    let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 4096));
    b.recv(1, &[dst.sge(0, 64)]);
    src.write(0, &pattern(64, 9));
    let before = dst.read(0, 64);
    a.send(2, op(dst.remote(0)), &[src.sge(0, 64)]);
    let sent = a.poll(1)[0];
    assert_eq!((sent.wr_id, sent.status), (2, WcStatus::RetryExcErr));
    assert_eq!(b.cq.poll(&mut [Wc::default()]).unwrap(), 0);
    assert_eq!(dst.read(0, 64), before);
}

#[test]
fn a_requester_whose_packets_are_lost_reaches_nobody() {
    let name = "one_end::a_requester_whose_packets_are_lost_reaches_nobody";
    let way: fn(RemoteAddr) -> SendOp = |at| SendOp::WriteImm(at, 5);
    with(name, "on qp 1: drop packets", &[], || lose_all(way));
}

#[test]
fn a_requester_whose_packets_are_lost_reaches_nobody_by_udp() {
    let name = "one_end::a_requester_whose_packets_are_lost_reaches_nobody_by_udp";
    with(name, "on qp 1: drop request packets", &BY_UDP, || lose_all(|_| SendOp::Send));
}

#[test]
fn packets_that_one_rule_delays_keep_their_order() {
    let name = "one_end::packets_that_one_rule_delays_keep_their_order";
    with(name, "delay packets by 0.1ms to 20ms", &[], || {
        let (a, b) = pair(QpType::Ud);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 4096));
        let to = UdDest { av: a.av(b.address()), qpn: b.qp.qpn(), qkey: QKEY, pd: a.pd.number() };
        for n in 0..20 {
            b.recv(n, &[dst.sge(n as usize * 64, 64)]);
        }
        for n in 0..20 {
            src.write(0, &[n]);
            a.send_to(n.into(), SendOp::Send, &[src.sge(0, 1)], Some(to));
            a.poll(1);
        }
        b.poll(20);
        let arrived: Vec<u8> = (0..20).map(|n| dst.read(n * 64 + 40, 1)[0]).collect();
        assert_eq!(arrived, (0..20).collect::<Vec<u8>>());
    });
}
