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
        let to = a.dest(b.address());
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

/// Only the messages to one of two peers lose a packet.
fn lose_those_to_a_peer() {
    let open = |n: usize| Context::open(&devices().unwrap()[n].name).unwrap();
    let [a, b, c] = [0, 0, 1].map(|n| Endpoint::on(open(n), QpType::Ud));
    let ip = c.address().gid.to_ip();
    assert_eq!(ip, std::net::Ipv4Addr::new(127, 0, 0, 2), "the script names it");
    [(&a, &b), (&b, &a), (&c, &a)].iter().for_each(|(e, peer)| e.connect(peer.address()));
    let src = Buffer::new(&a.pd, 64);
    let to = |e: &Endpoint| a.dest(e.address());
    let dsts = [&b, &c].map(|e| Buffer::new(&e.pd, 512));
    for n in 0..4 {
        for (e, dst) in [&b, &c].into_iter().zip(&dsts) {
            e.recv(n, &[dst.sge(n as usize * 64, 64)]);
            a.send_to(n, SendOp::SendImm(n as u32), &[src.sge(0, 8)], Some(to(e)));
            a.poll(1);
        }
    }
    let found = |e: &Endpoint, n| e.poll(n).iter().map(|wc| wc.imm).collect::<Vec<_>>();
    assert_eq!(found(&b, 4), [0, 1, 2, 3]);
    assert_eq!(found(&c, 2), [0, 3], "packets 2 and 3 to it are lost");
    assert_eq!(injected(&a.context), 2);
}

const TO_A_PEER: &str = "on peer 127.0.0.2: drop packets 2 to 3";

#[test]
fn packets_to_one_peer_are_lost_and_those_to_others_are_not() {
    let name = "one_end::packets_to_one_peer_are_lost_and_those_to_others_are_not";
    let devices = [("ANYVERBS_DEVICES", "2"), ("ANYVERBS_INTERFACES", "")];
    with(name, TO_A_PEER, &devices, lose_those_to_a_peer);
}

#[test]
fn packets_to_one_peer_are_lost_by_udp() {
    let name = "one_end::packets_to_one_peer_are_lost_by_udp";
    let devices = [&BY_UDP[..], &[("ANYVERBS_DEVICES", "2"), ("ANYVERBS_INTERFACES", "")]].concat();
    with(name, TO_A_PEER, &devices, lose_those_to_a_peer);
}

/// A rule in each direction loses packets of one opcode, among three SENDs and three WRITEs.
fn lose_single_opcodes() {
    let (a, b) = pair(QpType::Rc);
    let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 10_000));
    for id in 1..=3 {
        b.recv(id, &[dst.sge(0, 10_000)]);
        a.send(id, SendOp::Send, &[src.sge(0, 10_000)]);
        a.send(id, SendOp::Write(dst.remote(0)), &[src.sge(0, 64)]);
        a.send(id, SendOp::Read(dst.remote(0)), &[src.sge(0, 64)]);
        assert!(a.poll(3).iter().all(|wc| wc.status == WcStatus::Success));
        assert_eq!(b.poll(1)[0].status, WcStatus::Success);
    }
    assert_eq!(injected(&a.context), 3);
    assert!(a.context.counters().unwrap().read(Counter::Retransmitted) > 0);
}

const SINGLE: &str =
    "on qp 1: drop RC_SEND_LAST packet 2; on qp 1: drop RC_RDMA_WRITE_ONLY packet 1
    on qp 1: drop received RC_RDMA_READ_RESPONSE_ONLY packet 3; on qp 1: drop UC_SEND_LAST packets";

#[test]
fn packets_of_one_opcode_are_lost() {
    with("one_end::packets_of_one_opcode_are_lost", SINGLE, &[], lose_single_opcodes);
}

#[test]
fn packets_of_one_opcode_are_lost_by_udp() {
    with("one_end::packets_of_one_opcode_are_lost_by_udp", SINGLE, &BY_UDP, lose_single_opcodes);
}

/// UC tells its sender nothing, and its receiver not that the network lost what a rule took away.
#[test]
fn messages_of_uc_that_a_rule_takes_away_are_lost_by_an_injected_fault() {
    let name = "one_end::messages_of_uc_that_a_rule_takes_away_are_lost_by_an_injected_fault";
    with(name, "on qp 2: drop received packets 2 to 3; on qp 1: drop packet 6", &[], || {
        let (a, b) = pair(QpType::Uc);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        for n in 1..=8 {
            b.recv(n, &[dst.sge(0, 64)]);
            a.send(n, SendOp::Send, &[src.sge(0, 8)]);
            a.poll(1);
        }
        b.poll(5);
        let lost = b.qp.lost(Duration::from_secs(9));
        let causes: Vec<_> = lost.iter().map(|lost| (lost.cause.number(), lost.count)).collect();
        assert_eq!(causes, [(9901, 1), (6002, 1)]);
        let said = &lost[0].first;
        assert!(said.contains("by an injected fault (line 1 of the script, rule 1)"), "{said}");
    });
}

const LONG: usize = 32 << 10;

/// A READ of a peer that has no script: its answers come as packets, so a rule finds the third of those in the middle.
#[test]
fn a_peer_without_a_script_answers_in_packets() {
    let name = "one_end::a_peer_without_a_script_answers_in_packets";
    with(name, "drop received RC_RDMA_READ_RESPONSE_MIDDLE packet 3", &[], || {
        let mut peer = Peer::spawn("rc", &[("ANYVERBS_FAULTS", "")]);
        let e = Endpoint::new(QpType::Rc);
        let [src, dst] = [(); 2].map(|()| Buffer::new(&e.pd, OFFERED));
        let (_, remote) = peer.connect(&e, &dst);
        src.write(0, &pattern(LONG, 3));
        e.send(1, SendOp::Write(remote), &[src.sge(0, LONG)]);
        e.send(2, SendOp::Read(remote), &[dst.sge(0, LONG)]);
        assert!(e.poll(2).iter().all(|wc| wc.status == WcStatus::Success));
        assert_eq!(dst.read(0, LONG), pattern(LONG, 3));
        assert_eq!(injected(&e.context), 1);
        let counters = e.context.counters().unwrap();
        assert!(counters.read(Counter::ShmSentPkts) > 0, "it is no matter of UDP");
    });
}

/// This process has no script, and its peer's has rules about what it receives.
#[test]
fn requests_to_a_peer_with_a_script_are_packets() {
    let name = "one_end::requests_to_a_peer_with_a_script_are_packets";
    with(name, "", &[], || {
        for rule in ["RC_RDMA_WRITE_FIRST packet 1", "RC_RDMA_WRITE_MIDDLE packet 3"] {
            let script = format!("drop received {rule}");
            let mut peer = Peer::spawn("rc", &[("ANYVERBS_FAULTS", &script)]);
            let e = Endpoint::new(QpType::Rc);
            let [src, dst] = [(); 2].map(|()| Buffer::new(&e.pd, OFFERED));
            let (_, remote) = peer.connect(&e, &dst);
            let count = |counter| e.context.counters().unwrap().read(counter);
            let before = count(Counter::Retransmitted);
            src.write(0, &pattern(LONG, 5));
            e.send(1, SendOp::Write(remote), &[src.sge(0, LONG)]);
            e.send(2, SendOp::Read(remote), &[dst.sge(0, LONG)]);
            assert!(e.poll(2).iter().all(|wc| wc.status == WcStatus::Success));
            assert_eq!(dst.read(0, LONG), pattern(LONG, 5));
            assert!(count(Counter::Retransmitted) > before, "{rule} was lost");
            assert!(count(Counter::ShmSentPkts) > 0, "it is no matter of UDP");
        }
    });
}
