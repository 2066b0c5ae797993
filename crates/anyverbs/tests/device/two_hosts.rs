//! A thousand queue pairs between two hosts, which are network namespaces with a cable between them, and between two
//! processes of one host.

use std::process::Command;
use std::time::{Duration, Instant};

use anyverbs::*;

use crate::endpoint::*;
use crate::host::{ip, succeeds};
use crate::same_host::{Peer, turn};
use crate::two_links::There;

const ROLE: &str = "ANYVERBS_TEST_TWO_HOSTS";
const QPS: usize = 1000;
const LEN: usize = 1024;
const AREA: usize = QPS * LEN;
/// WRITEs of each queue pair, beside a READ and a SEND.
const WRITES: usize = 4;
/// Places in a host's memory. The peer writes into the first, reads the second, and sends to the third.
const WRITTEN: usize = 0;
const OFFERED: usize = AREA;
const RECEIVED: usize = 2 * AREA;
/// As long as a person waits. It took 200 s when all queue pairs of a path shared its window.
const LIMIT: Duration = Duration::from_secs(5);

#[test]
fn a_thousand_queue_pairs_talk_at_once() {
    if anyverbs_testing::unshare_or_skip() {
        let output = Command::new("unshare")
            .arg("-Urn")
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "two_hosts::here", "--nocapture", "--test-threads=1"])
            .env(ROLE, "here")
            .envs([
                ("ANYVERBS_REGISTRY", "two-hosts"),
                ("ANYVERBS_INTERFACES", ""),
                ("ANYVERBS_UDP_PORT", "4791"),
            ])
            .output()
            .unwrap();
        println!("{}", String::from_utf8_lossy(&output.stdout));
        succeeds(&output);
    }
}

struct Host {
    e: Endpoint,
    qps: Vec<Qp>,
    buffer: Buffer,
}

impl Host {
    fn new() -> Self {
        let cqe = (QPS * (WRITES + 2)) as u32;
        let e = Endpoint::with(QpType::Rc, CAP, cqe);
        let qps = (0..QPS).map(|_| e.another()).collect();
        let buffer = Buffer::new(&e.pd, 3 * AREA);
        Self { e, qps, buffer }
    }

    fn recv(&self, n: usize) {
        let sges = [self.buffer.sge(RECEIVED + n * LEN, LEN)];
        self.qps[n].post_recv(&[RecvWr { wr_id: n as u64, sges: &sges }]).unwrap();
    }

    fn introduce(&self) -> String {
        let numbers: Vec<_> = self.qps.iter().map(|qp| qp.qpn().get().to_string()).collect();
        let (gid, remote) = (self.e.address().gid, self.buffer.remote(0));
        format!("@ {gid} {} {} {}", remote.va, remote.rkey, numbers.join(" "))
    }

    /// Connects all with the queue pairs of the other; its memory.
    fn connect(&self, introduction: &str) -> RemoteAddr {
        let words: Vec<&str> = introduction.split_whitespace().skip(1).collect();
        let [gid, va, rkey, numbers @ ..] = &words[..] else { panic!("{introduction}") };
        let gid = Gid(gid.parse::<std::net::Ipv6Addr>().unwrap().octets());
        assert_eq!(numbers.len(), QPS);
        for (qp, number) in self.qps.iter().zip(numbers) {
            let qpn = Qpn::new(number.parse().unwrap());
            // The ACK timeout is that of programs, 67 ms.
            self.e.connect_at(qp, Address { gid, qpn }, (14, 7), (Mtu::Mtu1024, Psn::new(100)));
        }
        RemoteAddr { va: va.parse().unwrap(), rkey: rkey.parse().unwrap() }
    }
}

/// The end in a process of [`Peer`]: with memory to read, and a receive on each queue pair.
fn meet() -> Host {
    let host = Host::new();
    println!("{}", host.introduce());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    host.connect(&line);
    for n in 0..QPS {
        host.buffer.write(OFFERED + n * LEN, &pattern(LEN, n as u8 ^ 0x55));
        host.recv(n);
    }
    println!("@ connected");
    host
}

/// In a process of [`Peer`]: takes SENDs until it is killed.
pub(crate) fn take_all() {
    let host = meet();
    loop {
        let mut wcs = [Wc::default(); 64];
        let n = host.e.cq.poll(&mut wcs).unwrap();
        for wc in &wcs[..n] {
            assert_eq!(wc.status, WcStatus::Success);
            host.recv(wc.wr_id as usize);
        }
    }
}

/// The time that WRITEs, a READ and a SEND of each queue pair take, all at once.
fn exchange(host: &Host, remote: RemoteAddr, len: usize) -> Duration {
    let begin = Instant::now();
    for (n, qp) in host.qps.iter().enumerate() {
        let theirs = |area: usize| RemoteAddr { va: remote.va + (area + n * LEN) as u64, ..remote };
        let mut all = vec![(SendOp::Write(theirs(WRITTEN)), WRITTEN); WRITES];
        all.extend([(SendOp::Read(theirs(OFFERED)), RECEIVED), (SendOp::Send, WRITTEN)]);
        for (op, area) in all {
            let sges = [host.buffer.sge(area + n * LEN, len)];
            let flags = SendFlags::SIGNALED;
            let wr = SendWr { wr_id: 0, op, flags, sges: &sges, ud: None, xrc_srqn: 0 };
            qp.post_send(&[wr]).unwrap();
        }
    }
    let all = host.e.poll_for(QPS * (WRITES + 2), Duration::from_secs(60));
    assert!(all.iter().all(|wc| wc.status == WcStatus::Success));
    begin.elapsed()
}

/// 1,024 bytes took four times as long as 32 or more while all queue pairs of a path shared its window: half of the packets left twice. The
/// lengths take turns, and the best of each counts, so that others on the machine hit both. A busy machine takes more rounds to
/// show the best.
#[test]
fn lengths_of_a_thousand_queue_pairs_on_one_host_cost_the_like() {
    const ROUNDS: usize = 6;
    const MOST_ROUNDS: usize = 40;
    let _turn = turn();
    // A socket without privileges gets so small a buffer: it takes 100 packets of 1,024 bytes at a time.
    let by_udp = &[("ANYVERBS_SHM", "0"), ("ANYVERBS_RECEIVE_BUFFER", "212992")];
    for (variables, most) in [(&by_udp[..], 3), (&[("ANYVERBS_DIRECT", "0")], 2), (&[], 2)] {
        let mut peer = Peer::spawn("a thousand", variables);
        let host = Host::new();
        let remote = host.connect(&peer.hear());
        peer.say(&host.introduce());
        assert_eq!(peer.hear(), "@ connected");
        let again = || host.e.context.counters().unwrap().read(Counter::Retransmitted);
        let before = again();
        let (mut best, mut rounds) = ([Duration::MAX; 2], 0);
        let is_alike = |best: [Duration; 2]| best[1] < best[0] * most;
        while rounds < ROUNDS || !is_alike(best) && rounds < MOST_ROUNDS {
            for (best, len) in best.iter_mut().zip([32, LEN]) {
                *best = exchange(&host, remote, len).min(*best);
            }
            rounds += 1;
        }
        let (requests, again) = (2 * rounds * QPS * (WRITES + 2), again() - before);
        println!(
            "{variables:?}: {best:?} with 32 and {LEN} bytes; {again} of {requests} sent again"
        );
        assert!(is_alike(best), "{variables:?}: {best:?} in {rounds} rounds");
        assert!(again < requests as u64 / 4, "{variables:?}: {again} of {requests} sent again");
    }
}

/// The other host's part, in a process of [`Peer`].
pub(crate) fn there() {
    let host = meet();
    let Host { e, buffer, .. } = &host;
    let mut came = [false; QPS];
    for wc in e.poll_for(QPS, Duration::from_secs(60)) {
        assert_eq!((wc.status, wc.byte_len as usize), (WcStatus::Success, LEN));
        came[wc.wr_id as usize] = true;
    }
    assert_eq!(came, [true; QPS]);
    for n in 0..QPS {
        // The SEND came behind the WRITEs.
        for at in [WRITTEN, RECEIVED] {
            assert!(buffer.read(at + n * LEN, LEN) == pattern(LEN, n as u8), "queue pair {n}");
        }
    }
    println!("@ received");
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// The test itself, in a network namespace of its own.
#[test]
fn here() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let there = There::new();
    let pid = there.pid();
    ip(&format!("link add a0 type veth peer name a1 netns {pid}"));
    ip("link set a0 addrgenmode none");
    there.ip("link set a1 addrgenmode none");
    ip("addr add 10.78.0.1/24 dev a0");
    there.ip("addr add 10.78.0.2/24 dev a1");
    ip("link set a0 up");
    there.ip("link set a1 up");

    let mut peer = Peer::spawn_by(&["nsenter", "-n", "-t", &pid], "two hosts", &[]);
    let host = Host::new();
    let Host { e, qps, buffer } = &host;
    assert_eq!(e.address().gid.to_ip().to_string(), "10.78.0.1");
    let remote = host.connect(&peer.hear());
    peer.say(&host.introduce());
    assert_eq!(peer.hear(), "@ connected");

    for n in 0..QPS {
        buffer.write(WRITTEN + n * LEN, &pattern(LEN, n as u8));
    }
    let begin = Instant::now();
    for (n, qp) in qps.iter().enumerate() {
        let theirs = |area: usize| RemoteAddr { va: remote.va + (area + n * LEN) as u64, ..remote };
        let post = |op, area: usize| {
            let sges = [buffer.sge(area + n * LEN, LEN)];
            let (wr_id, flags) = (n as u64, SendFlags::SIGNALED);
            qp.post_send(&[SendWr { wr_id, op, flags, sges: &sges, ud: None, xrc_srqn: 0 }])
                .unwrap();
        };
        (0..WRITES).for_each(|_| post(SendOp::Write(theirs(WRITTEN)), WRITTEN));
        post(SendOp::Read(theirs(OFFERED)), RECEIVED);
        post(SendOp::Send, WRITTEN);
    }
    let all = e.poll_for(QPS * (WRITES + 2), Duration::from_secs(60));
    let took = begin.elapsed();
    assert!(all.iter().all(|wc| wc.status == WcStatus::Success));
    for n in 0..QPS {
        let read = buffer.read(RECEIVED + n * LEN, LEN);
        assert!(read == pattern(LEN, n as u8 ^ 0x55), "queue pair {n}");
    }
    assert_eq!(peer.hear(), "@ received");
    let again = e.context.counters().unwrap().read(Counter::Retransmitted);
    println!("{} operations of {QPS} queue pairs: {took:?}, {again} sent again", all.len());
    assert!(took < LIMIT, "{took:?}");
}
