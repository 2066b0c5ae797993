//! Many queue pairs on one path by UDP: its window carries some of them at a time. Each test runs in a process of its
//! own, whose queue pairs talk by UDP.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use anyverbs::*;
use anyverbs_proto::wire::aeth::{Aeth, Syndrome};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::opcode::{Opcode, Operation, Service};
use anyverbs_proto::wire::packet::{Headers, ICRC_LEN, Packet};
use anyverbs_testing::UdpPort;
use socket2::{Domain, Socket, Type};

use crate::endpoint::*;
use crate::forged::Forged;
use crate::host::succeeds;

const ROLE: &str = "ANYVERBS_TEST_CROWD";
const LEN: usize = 1024;

/// Runs [`crowd`] in a child.
fn run(role: &str) {
    run_with(role, &[]);
}

fn run_with(role: &str, variables: &[(&str, &str)]) {
    isolate();
    let port = UdpPort::reserve();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "crowd::crowd", "--nocapture", "--test-threads=1"])
        .env("ANYVERBS_REGISTRY", format!("anyverbs-crowd-{}-{role}", std::process::id()))
        .env("ANYVERBS_UDP_PORT", port.number().to_string())
        .env("ANYVERBS_INPROC", "0")
        // A socket without privileges gets as much.
        .env("ANYVERBS_RECEIVE_BUFFER", "212992")
        .env(ROLE, role)
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    print!("{}", String::from_utf8_lossy(&output.stdout));
    succeeds(&output);
}

#[test]
fn many_queue_pairs_of_one_path_lose_nothing() {
    run("everybody");
}

#[test]
fn a_turn_ending_within_a_message_asks_for_an_ack() {
    // Two places, whose packets always fit the peer's buffer.
    run_with("messages", &[("ANYVERBS_WINDOW", "8400")]);
}

#[test]
fn an_endless_stream_starves_nobody() {
    run("stream");
}

#[test]
fn one_that_ends_leaves_its_place_to_others() {
    run("ends");
}

#[test]
fn peers_that_never_answer_keep_no_places() {
    run("silence");
}

struct Crowd {
    all: Endpoint,
    /// Pairs that are connected to each other.
    qps: Vec<(Qp, Qp)>,
    buffer: Buffer,
}

impl Crowd {
    fn new(pairs: usize) -> Self {
        let all = Endpoint::with(QpType::Rc, CAP, 32 << 10);
        let qps: Vec<_> = (0..pairs).map(|_| (all.another(), all.another())).collect();
        let buffer = Buffer::new(&all.pd, 1 << 20);
        let crowd = Self { all, qps, buffer };
        for (a, b) in &crowd.qps {
            crowd.connect(a, b.qpn());
            crowd.connect(b, a.qpn());
        }
        crowd
    }

    fn connect(&self, qp: &Qp, to: Qpn) {
        // The ACK timeout is that of programs, 67 ms.
        self.all.connect_qp(qp, Address { qpn: to, ..self.all.address() }, 14, 7);
    }

    fn write(&self, qp: &Qp, wr_id: u64, len: usize) {
        let sges = [self.buffer.sge(0, len)];
        let op = SendOp::Write(self.buffer.remote(0));
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { wr_id, op, flags, sges: &sges, ud: None, xrc_srqn: 0 };
        qp.post_send(&[wr]).unwrap();
    }

    fn retransmitted(&self) -> u64 {
        self.all.context.counters().unwrap().read(Counter::Retransmitted)
    }
}

/// The child's part.
#[test]
fn crowd() {
    match std::env::var(ROLE).as_deref() {
        Ok("everybody") => everybody(),
        Ok("messages") => messages(),
        Ok("stream") => stream(),
        Ok("ends") => ends(),
        Ok("silence") => silence(),
        _ => {}
    }
}

/// A path whose queue pairs send more than the peer's buffer takes loses packets in each round. On a busy machine a timer may fire
/// in a round, so one has to pass without.
fn everybody() {
    const PAIRS: usize = 300;
    const AT_ONCE: usize = 16;
    const ROUNDS: usize = 2;
    const MOST_ROUNDS: usize = 20;
    let crowd = Crowd::new(PAIRS);
    // One in a hundred.
    let few = (PAIRS * AT_ONCE / 100) as u64;
    let (mut rounds, mut least) = (0, u64::MAX);
    while rounds < ROUNDS || least > few && rounds < MOST_ROUNDS {
        let (begin, before) = (Instant::now(), crowd.retransmitted());
        for n in 0..PAIRS * AT_ONCE {
            crowd.write(&crowd.qps[n % PAIRS].0, (n % PAIRS) as u64, LEN);
        }
        let mut done = [0; PAIRS];
        for wc in crowd.all.poll_for(PAIRS * AT_ONCE, Duration::from_secs(60)) {
            assert_eq!(wc.status, WcStatus::Success);
            done[wc.wr_id as usize] += 1;
        }
        assert_eq!(done, [AT_ONCE; PAIRS]);
        let again = crowd.retransmitted() - before;
        println!("{} in {:?}, {again} packets sent again", PAIRS * AT_ONCE, begin.elapsed());
        (rounds, least) = (rounds + 1, least.min(again));
    }
    assert!(least <= few, "{least} packets were sent again in the best of {rounds} rounds");
}

/// Long messages of small packets, whose turns end anywhere in them. The peer is a socket that answers what asks for it.
/// A slow machine sends packets again as well, but only behind one that asks.
fn messages() {
    const QPS: u32 = 20;
    const EACH: u32 = 4;
    // The first turn ends with the first packet of a message, which leaves alone, and the second one within a message.
    const LONG: u32 = 31;
    const MTU: usize = 1024;
    const PEER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
    let crowd = Crowd::new(0);
    let port: u16 = std::env::var("ANYVERBS_UDP_PORT").unwrap().parse().unwrap();
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
    socket.set_reuse_port(true).unwrap();
    socket.bind(&SocketAddr::from((PEER, port)).into()).unwrap();
    let socket = UdpSocket::from(socket);
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();

    // No process of this host has such queue pairs.
    let there = |n: u32| Qpn::new(0xee_0100 + n);
    let first = |n: u32| Psn::new(101 + 7 * n);
    let qps: Vec<_> = (0..QPS).map(|_| crowd.all.another()).collect();
    for (n, qp) in (0..).zip(&qps) {
        let peer = Address { gid: IpAddr::from(PEER).into(), qpn: there(n) };
        crowd.all.connect_at(qp, peer, (14, 7), (Mtu::Mtu1024, first(n)));
    }
    for _ in 0..EACH {
        qps.iter().for_each(|qp| crowd.write(qp, 0, LONG as usize * MTU));
    }
    // The packets that came of each, and whether the last one asked for an ACK.
    let mut came = [(0, true); QPS as usize];
    while came.iter().any(|(packets, _)| *packets < EACH * LONG) {
        let mut bytes = [0; 2 * MTU];
        let len = socket.recv(&mut bytes).unwrap();
        // By an empty datagram a sender of this host finds out its IPv4 ID.
        if len == 0 {
            continue;
        }
        let bth = Packet::parse(&bytes[..len - ICRC_LEN]).unwrap().headers.bth;
        let n = bth.dest_qpn.get() - there(0).get();
        let (packets, asked) = &mut came[n as usize];
        if bth.psn == first(n).plus(*packets) {
            (*packets, *asked) = (*packets + 1, bth.ack_req);
        } else {
            assert!(*asked, "{n}: it stopped behind packet {packets} without asking for an ACK");
        }
        if bth.ack_req {
            let ack = Opcode::new(Service::Rc, Operation::Ack);
            let aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: 0 });
            let bth = Bth::new(ack, qps[n as usize].qpn(), first(n).plus(*packets - 1));
            Forged::from(PEER).send(Headers { aeth, ..Headers::new(bth) }, &[]);
        }
    }
    let all = crowd.all.poll((QPS * EACH) as usize);
    assert!(all.iter().all(|wc| wc.status == WcStatus::Success));
}

/// One endless stream for each place that a path may have, beside queue pairs that send one message each.
fn stream() {
    const STREAMS: usize = 60;
    const OTHERS: usize = 100;
    let crowd = Crowd::new(STREAMS + OTHERS);
    let (streams, others) = crowd.qps.split_at(STREAMS);
    let long = 64 << 10;
    for (n, (a, _)) in streams.iter().enumerate() {
        (0..4).for_each(|_| crowd.write(a, n as u64, long));
    }
    let (mut begin, mut left, mut streamed) = (None, OTHERS, [0; STREAMS]);
    let mut latest = Duration::ZERO;
    while left > 0 {
        for wc in crowd.all.poll(1) {
            assert_eq!(wc.status, WcStatus::Success);
            let n = wc.wr_id as usize;
            if n < STREAMS {
                streamed[n] += 1;
                crowd.write(&streams[n].0, n as u64, long);
            } else {
                left -= 1;
                latest = begin.map_or(latest, |begin: Instant| begin.elapsed());
            }
        }
        if begin.is_none() && !streamed.contains(&0) {
            // All streams flow.
            begin = Some(Instant::now());
            for (n, (a, _)) in others.iter().enumerate() {
                crowd.write(a, (STREAMS + n) as u64, LEN);
            }
        }
        assert!(begin.is_none_or(|begin| begin.elapsed() < Duration::from_secs(20)), "{left} left");
    }
    println!("{OTHERS} messages beside {STREAMS} streams: {latest:?}");
    assert!(latest < Duration::from_secs(2), "{latest:?}");
}

/// Queue pairs are destroyed, reset and broken, both with a place and without.
fn ends() {
    const PAIRS: usize = 200;
    let mut crowd = Crowd::new(PAIRS);
    for (n, (a, _)) in crowd.qps.iter().enumerate() {
        (0..8).for_each(|_| crowd.write(a, n as u64, LEN));
    }
    // Every other one is there to the end.
    let (mut lasting, mut n) = (Vec::new(), 0);
    for (a, b) in std::mem::take(&mut crowd.qps) {
        match n % 6 {
            0 => drop((a, b)),
            2 => {
                let attr = QpAttr { state: QpState::Reset, ..QpAttr::default() };
                a.modify(&attr, QpAttrMask::STATE).unwrap();
                // It comes back.
                crowd.connect(&a, b.qpn());
                let again = |qp: &Qp| {
                    qp.modify(&attr, QpAttrMask::STATE).unwrap();
                    crowd.connect(qp, a.qpn());
                };
                again(&b);
                (0..8).for_each(|_| crowd.write(&a, n, LEN));
                lasting.push((n, a, b));
            }
            4 => {
                let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
                a.modify(&attr, QpAttrMask::STATE).unwrap();
                drop((a, b));
            }
            _ => lasting.push((n, a, b)),
        }
        n += 1;
    }
    let mut done = [0; PAIRS];
    let begin = Instant::now();
    while lasting.iter().any(|(n, ..)| done[*n as usize] < 8) {
        let mut wcs = [Wc::default(); 64];
        let got = crowd.all.cq.poll(&mut wcs).unwrap();
        for wc in &wcs[..got] {
            let n = wc.wr_id as usize;
            let may_fail = [0, 4].contains(&(n % 6));
            assert!(wc.status == WcStatus::Success || may_fail, "{n}: {wc:?}");
            done[n] += 1;
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "{done:?}");
    }
    // Nobody has kept a place: as many as ever send at a time.
    let crowd = Crowd { qps: lasting.into_iter().map(|(_, a, b)| (a, b)).collect(), ..crowd };
    for (a, _) in &crowd.qps {
        crowd.write(a, 0, LEN);
    }
    let all = crowd.all.poll(crowd.qps.len());
    assert!(all.iter().all(|wc| wc.status == WcStatus::Success));
}

/// The peers of the first do not answer, and without an ACK timeout they wait for ever.
fn silence() {
    const SILENT: usize = 150;
    let crowd = Crowd::new(10);
    let silent: Vec<_> = (0..SILENT).map(|_| crowd.all.another()).collect();
    for (n, qp) in silent.iter().enumerate() {
        let nobody = Qpn::new(crowd.qps[0].0.qpn().get() ^ 0x00_8000);
        crowd.all.connect_qp(qp, Address { qpn: nobody, ..crowd.all.address() }, 0, 7);
        crowd.write(qp, 1000 + n as u64, LEN);
    }
    for (n, (a, _)) in crowd.qps.iter().enumerate() {
        (0..8).for_each(|_| crowd.write(a, n as u64, LEN));
    }
    let begin = Instant::now();
    let all = crowd.all.poll(10 * 8);
    assert!(all.iter().all(|wc| wc.status == WcStatus::Success && wc.wr_id < 10));
    println!("behind {SILENT} that get no answer: {:?}", begin.elapsed());
}
