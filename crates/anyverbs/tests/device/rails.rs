//! Counters of the devices of a process: each has its own traffic, whichever link that takes.

use std::io::Write as _;
use std::time::{Duration, Instant};

use anyverbs::*;

use crate::endpoint::*;
use crate::same_host::{Peer, introduce, introduced, is_on};
use crate::several::{open, three_devices};

const LEN: usize = 20_000;
const TIMEOUT: Duration = Duration::from_secs(20);

/// Packets and bytes sent, and received.
type Counted = [u64; 4];

/// The counters of the three devices.
fn counted() -> [Counted; 3] {
    [0, 1, 2].map(|number| {
        let context = open(number);
        let counters = context.counters().unwrap();
        [Counter::SentPkts, Counter::SentBytes, Counter::RcvdPkts, Counter::RcvdBytes]
            .map(|counter| counters.read(counter))
    })
}

fn since(before: [Counted; 3], now: [Counted; 3]) -> [Counted; 3] {
    std::array::from_fn(|d| std::array::from_fn(|n| now[d][n] - before[d][n]))
}

fn write(from: &Endpoint, src: &Buffer, to: RemoteAddr, len: usize) {
    from.send(1, SendOp::Write(to), &[src.sge(0, len)]);
    assert_eq!(from.poll_for(1, TIMEOUT)[0].status, WcStatus::Success);
}

/// As [`write`], in packets on each link: from two elements.
fn write_in_packets(from: &Endpoint, src: &Buffer, to: RemoteAddr, len: usize) {
    from.send(1, SendOp::Write(to), &[src.sge(0, len / 2), src.sge(len / 2, len - len / 2)]);
    assert_eq!(from.poll_for(1, TIMEOUT)[0].status, WcStatus::Success);
}

/// Endpoints on the devices 0 and 1 of this process, which are connected, and a buffer of each.
fn on_two_devices() -> ([Endpoint; 2], [Buffer; 2]) {
    let [a, b] = [0, 1].map(|number| Endpoint::on(open(number), QpType::Rc));
    a.connect(b.address());
    b.connect(a.address());
    let buffers = [&a, &b].map(|e| Buffer::new(&e.pd, LEN));
    ([a, b], buffers)
}

/// Devices 0 and 1 of this process talk, and device 2 does not.
fn two_of_a_process(receives: bool) {
    let ([a, b], [src, dst]) = on_two_devices();
    let before = counted();
    write_in_packets(&a, &src, dst.remote(0), LEN);
    // Packets may lie in the socket after the completion.
    let begin = Instant::now();
    let [one, other, idle] = loop {
        let [one, other, idle] = since(before, counted());
        let all_came = one[2..] == other[..2] && other[2..] == one[..2];
        if !receives || all_came {
            break [one, other, idle];
        }
        assert!(begin.elapsed() < TIMEOUT, "{one:?}, {other:?}");
    };
    assert!(one[0] > 1 && one[1] >= LEN as u64, "{one:?}");
    assert!(other[0] > 0 && other[1] < LEN as u64 / 2, "ACKs: {other:?}");
    assert_eq!(idle, [0; 4]);
    // The other way, and less.
    let before = counted();
    write_in_packets(&b, &dst, src.remote(0), 1000);
    let [one, other, idle] = since(before, counted());
    assert!(other[1] >= 1000, "{other:?}");
    assert!(one[1] < 500, "ACKs: {one:?}");
    assert_eq!(idle, [0; 4]);
}

#[test]
fn what_is_done_without_packets_counts_for_both_devices_of_a_process() {
    let name = "rails::what_is_done_without_packets_counts_for_both_devices_of_a_process";
    three_devices(name, &[], || {
        let ([a, _b], [src, dst]) = on_two_devices();
        let before = counted();
        write(&a, &src, dst.remote(0), LEN);
        let len = LEN as u64;
        assert_eq!(since(before, counted()), [[1, len, 0, 0], [0, 0, 1, len], [0; 4]]);
        let before = counted();
        a.send(2, SendOp::Read(dst.remote(0)), &[src.sge(0, 7000)]);
        assert_eq!(a.poll_for(1, TIMEOUT)[0].status, WcStatus::Success);
        assert_eq!(since(before, counted()), [[0, 0, 1, 7000], [1, 7000, 0, 0], [0; 4]]);
    });
}

#[test]
fn two_devices_of_a_process_count_apart() {
    let name = "rails::two_devices_of_a_process_count_apart";
    three_devices(name, &[], || two_of_a_process(false));
}

#[test]
fn two_devices_count_apart_what_goes_by_udp() {
    let name = "rails::two_devices_count_apart_what_goes_by_udp";
    three_devices(name, &[("ANYVERBS_INPROC", "0")], || two_of_a_process(true));
}

/// Devices 1 here and 2 in another process talk, and no other.
fn two_of_two_processes(way: Counter, ask: impl Fn(&Endpoint, &Buffer, RemoteAddr)) {
    let mut peer = Peer::spawn("rails", &[]);
    let e = Endpoint::on(open(1), QpType::Rc);
    let buffer = Buffer::new(&e.pd, LEN);
    let (_, remote) = peer.connect(&e, &buffer);
    // Messages of other kinds come first, until the link has all its ways.
    let by_way = || open(1).counters().unwrap().read(way);
    let begin = Instant::now();
    while is_on() && by_way() < 3 {
        ask(&e, &buffer, remote);
        assert!(begin.elapsed() < TIMEOUT, "{}", way.name());
    }
    let theirs = |peer: &mut Peer| -> [Counted; 3] {
        peer.say("count");
        let line = peer.hear();
        let mut numbers = line[1..].split_whitespace().map(|word| word.parse().unwrap());
        [(); 3].map(|()| [(); 4].map(|()| numbers.next().unwrap()))
    };
    let settled = |peer: &mut Peer| loop {
        let (ours, them) = (counted(), theirs(peer));
        std::thread::sleep(Duration::from_millis(20));
        if (ours, them) == (counted(), theirs(peer)) {
            break (ours, them);
        }
        assert!(begin.elapsed() < TIMEOUT, "the counters do not come to rest");
    };
    let (ours, them) = settled(&mut peer);
    for _ in 0..10 {
        ask(&e, &buffer, remote);
    }
    let after = settled(&mut peer);
    let (ours, them) = (since(ours, after.0), since(them, after.1));
    assert_eq!([ours[0], ours[2]], [[0; 4]; 2]);
    assert_eq!([them[0], them[1]], [[0; 4]; 2]);
    assert!(ours[1][0] >= 10, "{ours:?}");
    let [sent, sent_bytes, received, received_bytes] = ours[1];
    assert_eq!(
        them[2],
        [received, received_bytes, sent, sent_bytes],
        "what one sends the other has"
    );
}

#[test]
fn copies_count_for_the_devices_at_both_ends() {
    three_devices("rails::copies_count_for_the_devices_at_both_ends", &[], || {
        two_of_two_processes(Counter::ShmDirectWrites, |e, buffer, remote| {
            write(e, buffer, remote, LEN);
            e.send(2, SendOp::Read(remote), &[buffer.sge(0, 7000)]);
            assert_eq!(e.poll_for(1, TIMEOUT)[0].status, WcStatus::Success);
        });
    });
}

#[test]
fn rings_count_for_the_devices_at_both_ends() {
    let variables = [("ANYVERBS_DIRECT", "0")];
    three_devices("rails::rings_count_for_the_devices_at_both_ends", &variables, || {
        two_of_two_processes(Counter::ShmSentPkts, |e, buffer, remote| {
            write(e, buffer, remote, LEN)
        });
    });
}

#[test]
fn lanes_count_for_the_devices_at_both_ends() {
    three_devices("rails::lanes_count_for_the_devices_at_both_ends", &[], || {
        two_of_two_processes(Counter::ShmLanePkts, |e, buffer, _| {
            e.send(3, SendOp::Send, &[buffer.sge(0, 8)]);
            assert_eq!(e.poll_for(1, TIMEOUT)[0].status, WcStatus::Success);
        });
    });
}

/// The other process.
pub(crate) fn there() {
    let e = Endpoint::on(open(2), QpType::Rc);
    let buffer = Buffer::new(&e.pd, LEN);
    println!("{}", introduce(&e, &buffer));
    let mut lines = std::io::stdin().lines().map(Result::unwrap);
    let (address, _) = introduced(&lines.next().unwrap());
    e.connect(address);
    for _ in 0..16 {
        e.recv(1, &[buffer.sge(0, 64)]);
    }
    println!("@ connected");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                for wc in e.wait(1) {
                    assert_eq!(wc.status, WcStatus::Success);
                    e.recv(1, &[buffer.sge(0, 64)]);
                }
            }
        });
        for _ in lines {
            let numbers: Vec<_> = counted().iter().flatten().map(u64::to_string).collect();
            println!("@ {}", numbers.join(" "));
            std::io::stdout().flush().unwrap();
        }
        std::process::exit(0);
    });
}
