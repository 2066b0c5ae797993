//! Random scripts of faults over reliable connections: all requests are done once and in their order, or an error comes in time. Nothing
//! hangs that no rule lets hang.
//!
//! A round is a process with a script of its own. It has 100 connections, each end of which has up to two rules of its own. So a round is one
//! script and many small ones, which share the process, its port and its timers.
//!
//! - `ANYVERBS_FAULT_ROUNDS=N` runs N rounds instead of [`ROUNDS`]; `ANYVERBS_FAULT_ROUND=R` runs that one alone.
//! - `ANYVERBS_FAULT_CONNECTIONS=N` gives a round N connections instead of [`CONNECTIONS`].
//! - `ANYVERBS_FAULT_AT_ONCE=N` runs N rounds at a time. A round waits most of the time.
//!
//! Ten thousand scripts, in a network namespace with a loopback interface that is up. `--nocapture` shows how many of them differ:
//!
//! ```sh
//! ANYVERBS_FAULT_ROUNDS=10000 ANYVERBS_FAULT_CONNECTIONS=10 ANYVERBS_FAULT_AT_ONCE=12 \
//!     cargo test -p anyverbs --test device -- --nocapture --exact random_faults::random_scripts_lose_nothing_and_let_nothing_hang
//! ```

use std::collections::HashSet;
use std::fmt::Write as _;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyverbs::*;

use crate::endpoint::*;

/// Rounds of an ordinary run.
const ROUNDS: u64 = 8;
/// Connections of a round.
const CONNECTIONS: usize = 100;
const REQUESTS: usize = 24;
const SLOT: usize = 4096;
/// A request that is not complete by then hangs. The longest chain of retries takes some seconds.
const DEADLINE: Duration = Duration::from_secs(20);

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

/// The outcomes that the rules of a queue pair allow.
#[derive(Clone, Copy, Debug, Default)]
struct Allows {
    /// Requests or receives that do not complete.
    hangs: bool,
    /// The error state.
    fails: bool,
    /// Some rule holds.
    is_ruled: bool,
}

/// A rule for a queue pair.
fn rule(random: &mut Random, allows: &mut Allows) -> String {
    let first = 1 + random.below(30);
    let last = first + random.below(4);
    let number = format!("{first} to {last}");
    let ms = 1 + random.below(30);
    let kinds = ["", "", "request ", "send ", "write ", "read ", "atomic ", "response ", "ack "];
    let opcodes =
        ["RC_SEND_FIRST ", "RC_SEND_LAST ", "RC_RDMA_WRITE_ONLY ", "RC_RDMA_READ_RESPONSE_ONLY "];
    let kind = match random.below(8) {
        0 => random.one_of(&opcodes),
        _ => random.one_of(&kinds),
    };
    let way = random.one_of(&["", "sent ", "received "]);
    let chance = 1 + random.below(20);
    let spans = ["", "", " for 200ms", " after 50ms", " after 20ms for 100ms"];
    let span = random.one_of(&spans);
    let side = random.one_of(&["send", "send", "receive"]);
    match random.below(19) {
        0..=2 => format!("drop {way}{kind}packets {number}"),
        3 => format!("drop {chance}% of {way}{kind}packets{span}"),
        4 => format!("drop {way}{kind}packets after {ms}ms for 100ms"),
        5 => format!("duplicate {way}{kind}packets {number}"),
        6 => format!("duplicate {chance}% of {way}{kind}packets{span}"),
        7 => format!("corrupt received {kind}packets {number}"),
        8 => format!("reorder {kind}packets {number}"),
        9 => format!("reorder {chance}% of {kind}packets{span}"),
        10 => format!("delay {kind}packets {number} by {ms}ms"),
        11 => format!("delay {chance}% of {kind}packets by 100us to {ms}ms{span}"),
        12 => format!("{side}s {number} complete after {ms}ms"),
        13 if random.below(2) == 0 => {
            allows.hangs = true;
            format!("{side} {first} never completes")
        }
        13 | 14 => {
            allows.fails = true;
            let late = random.one_of(&["", " after 20ms"]);
            if side == "receive" {
                let statuses = ["LOC_LEN_ERR", "LOC_PROT_ERR", "WR_FLUSH_ERR", "GENERAL_ERR"];
                let status = random.one_of(&statuses);
                let n = 1 + random.below(6);
                return format!("receive {n}{span} completes with {status}{late}");
            }
            let statuses = ["RETRY_EXC_ERR", "REM_ACCESS_ERR", "WR_FLUSH_ERR", "GENERAL_ERR"];
            let status = random.one_of(&statuses);
            format!("send {first}{span} completes with {status}{late}")
        }
        15 => format!("mark {chance}% of received {kind}packets{span}"),
        16 => {
            let kind = random.one_of(&["", "request ", "send ", "write "]);
            format!("rnr received {kind}packets {number}")
        }
        17 => {
            let (rate, queue) = (50 + 10 * random.below(10), random.one_of(&["", " queue 20"]));
            format!("limit {kind}packets to {rate}Mb/s{queue}{span}")
        }
        _ => {
            allows.fails = true;
            format!("fails after {}ms", 100 + random.below(300))
        }
    }
}

/// A rule for the memory of an end of a connection. The region has a page more than the slots of the requests.
fn memory_rule(random: &mut Random, region: usize) -> String {
    let first = 1 + random.below(REQUESTS as u64 + 2);
    let last = first + random.below(3);
    let spans = ["", " for 200ms", " after 50ms", " after 20ms for 100ms"];
    let span = random.one_of(&spans);
    match random.below(3) {
        0 => format!("pages {first} to {last} of region {region} vanish{span}"),
        1 => format!("{}% of pages of region {region} vanish{span}", 1 + random.below(20)),
        _ => format!("region {region} vanishes after {}ms for 100ms", random.below(100)),
    }
}

/// The script of a round, and what it allows each end of each connection.
fn script(round: u64) -> (String, Vec<[Allows; 2]>) {
    let mut random = Random(round);
    let mut text = format!("seed {round}\n");
    if round % 3 == 2 {
        text += "down for 150ms after 250ms\n";
    }
    if round % 3 == 1 {
        text += "event SM_CHANGE after 50ms; event LID_CHANGE after 100ms\n";
    }
    let mut allows = vec![[Allows::default(); 2]; connections()];
    for (n, ends) in allows.iter_mut().enumerate() {
        for (end, allows) in ends.iter_mut().enumerate() {
            let mut is_limited = false;
            for _ in 0..random.below(3) {
                let rule = rule(&mut random, allows);
                // A second one may never do anything, and is refused then.
                if rule.starts_with("limit") && std::mem::replace(&mut is_limited, true) {
                    continue;
                }
                allows.is_ruled = true;
                // Two queue pairs come before them.
                let _ = writeln!(text, "on qp {}: {rule}", 3 + 2 * n + end);
            }
            if random.below(8) == 0 {
                (allows.is_ruled, allows.fails) = (true, true);
                let _ = writeln!(text, "{}", memory_rule(&mut random, 1 + 2 * n + end));
            }
        }
    }
    (text, allows)
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn connections() -> usize {
    variable("ANYVERBS_FAULT_CONNECTIONS").map_or(CONNECTIONS, |n| n as usize)
}

#[test]
fn random_scripts_lose_nothing_and_let_nothing_hang() {
    let rounds = match (variable("ANYVERBS_FAULT_ROUND"), variable("ANYVERBS_FAULT_ROUNDS")) {
        (Some(round), _) => round..round + 1,
        (None, rounds) => 0..rounds.unwrap_or_else(|| anyverbs_testing::seeds(ROUNDS)),
    };
    let at_once = variable("ANYVERBS_FAULT_AT_ONCE").unwrap_or(1);
    let (rounds, scripts) = (Mutex::new(rounds), Mutex::new(HashSet::new()));
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some(round) = { rounds.lock().unwrap().next() } {
                    let script = run(round);
                    let (_seed, rules) = script.split_once('\n').unwrap();
                    scripts.lock().unwrap().insert(rules.to_owned());
                }
            });
        }
    });
    let scripts = scripts.into_inner().unwrap();
    let rules: usize = scripts.iter().map(|script| script.lines().count()).sum();
    println!("{} different scripts, with {rules} rules", scripts.len());
}

/// Runs a round in a process of its own. Its script.
fn run(round: u64) -> String {
    let (script, _) = script(round);
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "random_faults::a_round", "--nocapture", "--test-threads=1"])
        .env("ANYVERBS_FAULT_ROUND", round.to_string())
        .env("ANYVERBS_TEST_CHILD", "1")
        .env("ANYVERBS_FAULTS", &script)
        .env_remove("ANYVERBS_REGISTRY")
        .env_remove("ANYVERBS_UDP_PORT")
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "to repeat: ANYVERBS_FAULT_ROUND={round} ANYVERBS_FAULT_CONNECTIONS={}\n{}\n{}",
        connections(),
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    script
}

/// A request of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Send(usize),
    Write(usize),
    Read(usize),
    Add,
}

struct Connection {
    qps: [Qp; 2],
    buffers: [Buffer; 2],
    ops: Vec<Op>,
    /// Completions of the requester, and of the receiver.
    found: [Vec<Wc>; 2],
}

impl Connection {
    fn sends(&self) -> impl Iterator<Item = usize> {
        (0..REQUESTS).filter(|i| matches!(self.ops[*i], Op::Send(_)))
    }

    fn start(&self) {
        let [a, b] = &self.buffers;
        for (i, op) in self.ops.iter().enumerate() {
            let data = |len| pattern(len, i as u8);
            match *op {
                Op::Send(len) | Op::Write(len) => a.write(i * SLOT, &data(len)),
                Op::Read(len) => b.write(i * SLOT, &data(len)),
                Op::Add => {}
            }
        }
        for i in self.sends() {
            let wr = RecvWr { wr_id: i as u64, sges: &[b.sge(i * SLOT, SLOT)] };
            self.qps[1].post_recv(&[wr]).unwrap();
        }
        for (i, op) in self.ops.iter().enumerate() {
            let (wr_id, flags) = (i as u64, SendFlags::SIGNALED);
            let remote = b.remote(i * SLOT);
            let (op, len) = match *op {
                Op::Send(len) => (SendOp::Send, len),
                Op::Write(len) => (SendOp::Write(remote), len),
                Op::Read(len) => (SendOp::Read(remote), len),
                Op::Add => (SendOp::FetchAdd { at: b.remote(REQUESTS * SLOT), add: 1 }, 8),
            };
            let sges = &[a.sge(i * SLOT, len)];
            let wr = SendWr { wr_id, op, flags, sges, ud: None, xrc_srqn: 0 };
            self.qps[0].post_send(&[wr]).unwrap();
        }
    }

    /// Requests that have succeeded.
    fn done(&self) -> usize {
        self.found[0].iter().take_while(|wc| wc.status == WcStatus::Success).count()
    }

    /// Whether it has all that it must have.
    fn is_over(&self, [of_a, of_b]: [Allows; 2]) -> bool {
        let received = self.found[1].iter().filter(|wc| wc.status == WcStatus::Success).count();
        let must = self.sends().filter(|i| *i < self.done()).count();
        let a = of_a.hangs || self.found[0].len() == REQUESTS;
        a && (of_b.hangs || of_b.fails || received >= must)
    }

    /// `is_whole`: no rule touches it.
    fn check(&self, is_whole: bool) {
        if is_whole {
            assert_eq!((self.done(), self.found[1].len()), (REQUESTS, self.sends().count()));
        }
        for (side, found) in self.found.iter().enumerate() {
            let all: Vec<_> = match side {
                0 => (0..REQUESTS).collect(),
                _ => self.sends().collect(),
            };
            let ids: Vec<_> = found.iter().map(|wc| wc.wr_id as usize).collect();
            assert_eq!(ids, all[..ids.len()], "once, and in their order");
            let good = found.iter().take_while(|wc| wc.status == WcStatus::Success).count();
            let rest = found[good..].iter().skip(1);
            assert!(rest.clone().all(|wc| wc.status == WcStatus::WrFlushErr), "{found:?}");
        }
        let [a, b] = &self.buffers;
        for wc in self.found[1].iter().filter(|wc| wc.status == WcStatus::Success) {
            let i = wc.wr_id as usize;
            let Op::Send(len) = self.ops[i] else { panic!("no SEND") };
            assert_eq!(wc.byte_len as usize, len);
            assert_eq!(b.read(i * SLOT, len), pattern(len, i as u8));
        }
        let mut added = 0_u64;
        for (i, op) in self.ops[..self.done()].iter().enumerate() {
            match *op {
                Op::Send(len) | Op::Write(len) => {
                    assert_eq!(b.read(i * SLOT, len), pattern(len, i as u8), "request {i}");
                }
                Op::Read(len) => {
                    assert_eq!(a.read(i * SLOT, len), pattern(len, i as u8), "request {i}");
                }
                Op::Add => {
                    assert_eq!(a.read(i * SLOT, 8), added.to_ne_bytes(), "request {i}");
                    added += 1;
                }
            }
        }
        let all = self.ops.iter().filter(|op| **op == Op::Add).count() as u64;
        let sum = u64::from_ne_bytes(b.read(REQUESTS * SLOT, 8).try_into().unwrap());
        assert!((added..=all).contains(&sum), "{added} to {all}: {sum}");
    }
}

/// Not a test by itself: a round.
#[test]
fn a_round() {
    if std::env::var_os("ANYVERBS_TEST_CHILD").is_none() {
        return;
    }
    let round = variable("ANYVERBS_FAULT_ROUND").unwrap();
    let (script, allows) = script(round);
    let mut random = Random(round ^ 0xfeed);
    let ends = [(); 2].map(|()| Endpoint::with(QpType::Rc, CAP, (connections() * 64) as u32));
    let mut all: Vec<_> = (0..connections())
        .map(|_| {
            let qps = ends.each_ref().map(Endpoint::another);
            let addresses = [0, 1].map(|n| Address { qpn: qps[n].qpn(), ..ends[n].address() });
            // The PSNs of both directions; some soon begin anew.
            let first = Psn::new((0_u32.wrapping_sub(random.below(100) as u32)) & 0xff_ffff);
            for (n, end) in ends.iter().enumerate() {
                end.connect_at(&qps[n], addresses[1 - n], (12, 7), (Mtu::Mtu1024, first));
            }
            let buffers = ends.each_ref().map(|end| Buffer::new(&end.pd, (REQUESTS + 1) * SLOT));
            let mut op = || {
                let len = 1 + random.below(SLOT as u64) as usize;
                random.one_of(&[
                    Op::Send(len),
                    Op::Send(len),
                    Op::Write(len),
                    Op::Read(len),
                    Op::Add,
                ])
            };
            let ops = (0..REQUESTS).map(|_| op()).collect();
            Connection { qps, buffers, ops, found: Default::default() }
        })
        .collect();
    all.iter().for_each(Connection::start);
    let begin = Instant::now();
    loop {
        for (side, end) in ends.iter().enumerate() {
            let mut wcs = [Wc::default(); 64];
            let got = end.cq.poll(&mut wcs).unwrap();
            for wc in &wcs[..got] {
                let its = all.iter_mut().find(|c| c.qps[side].qpn() == wc.qpn);
                its.expect("a queue pair of a connection").found[side].push(*wc);
            }
        }
        let is_over =
            |(connection, allows): (&Connection, &[Allows; 2])| connection.is_over(*allows);
        if all.iter().zip(&allows).all(is_over) {
            break;
        }
        if begin.elapsed() > DEADLINE {
            let hangs: Vec<_> = all.iter().zip(&allows).map(is_over).collect();
            let hangs: Vec<_> = (0..all.len()).filter(|n| !hangs[*n]).map(|n| 3 + 2 * n).collect();
            let n = (hangs[0] - 3) / 2;
            panic!("queue pairs that hang: {hangs:?}; of the first: {:?}", all[n].found);
        }
    }
    let is_down = script.contains("down");
    for (n, connection) in all.iter().enumerate() {
        println!("connection of queue pair {}: {:?}", 3 + 2 * n, allows[n]);
        connection.check(!is_down && allows[n].iter().all(|end| !end.is_ruled));
    }
}
