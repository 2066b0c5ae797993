//! A peer that writes nonsense into any memory that it shares with this process. That includes rings in use, its
//! published keys and states, the cells and rooms of lanes, and the words by which processes wake each other.
//!
//! `ANYVERBS_SPOILER_ROUNDS=N` runs N rounds, of a seed each, instead of [`ROUNDS`].

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use anyverbs::*;
use anyverbs_testing::in_own_process;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::endpoint::*;
use crate::same_host::{OFFERED, Peer, beside_a_talk, is_on};

const ROUNDS: u32 = 24;
/// The time of a spoiler.
const ROUND: Duration = Duration::from_millis(60);
const TIMEOUT: Duration = Duration::from_secs(10);
/// Requests of either side at a time.
const AT_ONCE: usize = 16;
const LEN: usize = 20_000;

/// Operations of all kinds, a few bytes or many.
fn post(e: &Endpoint, buffer: &Buffer, remote: RemoteAddr, random: &mut SmallRng) {
    let op = match random.random_range(0..8) {
        0..3 => SendOp::Write(remote),
        3..5 => SendOp::Read(remote),
        5 => SendOp::FetchAdd { at: remote, add: 1 },
        _ => SendOp::Send,
    };
    let len = match op {
        SendOp::FetchAdd { .. } => 8,
        _ if random.random() => random.random_range(1..64),
        _ => random.random_range(64..LEN),
    };
    e.send(0, op, &[buffer.sge(0, len)]);
}

/// The peer's work until it is killed.
pub(crate) fn serve(e: &Endpoint, buffer: &Buffer, remote: RemoteAddr, seed: u64) -> ! {
    let mut random = SmallRng::seed_from_u64(!seed);
    receive(e, buffer, AT_ONCE);
    spawn(move || spoil(seed));
    loop {
        for _ in 0..AT_ONCE {
            post(e, buffer, remote, &mut random);
        }
        // It may have spoilt the words that would tell of them.
        finish(e, buffer, Duration::MAX);
    }
}

fn receive(e: &Endpoint, buffer: &Buffer, n: usize) {
    for _ in 0..n {
        e.recv(1, &[buffer.sge(0, LEN)]);
    }
}

/// Polls until the requests have ended, somehow; how many have.
fn finish(e: &Endpoint, buffer: &Buffer, timeout: Duration) -> usize {
    let (begin, mut done) = (Instant::now(), 0);
    while done < AT_ONCE && begin.elapsed() < timeout {
        let mut wcs = [Wc::default(); AT_ONCE];
        let n = e.cq.poll(&mut wcs).unwrap();
        let ended = wcs[..n].iter().filter(|wc| wc.wr_id == 0).count();
        done += ended;
        receive(e, buffer, n - ended);
    }
    done
}

/// Writes to words of the shared memory for ever: a few or many, at once or one after the other.
fn spoil(seed: u64) {
    let mut random = SmallRng::seed_from_u64(seed);
    let at_once = 1 << (seed % 4 * 4);
    for burst in 0.. {
        sleep(Duration::from_micros(random.random_range(0..2000)));
        let shared = shared();
        if burst == 0 {
            assert_ne!(shared, []);
            println!("@ spoils");
        }
        for _ in 0..at_once {
            let (word, old) = used(&shared, &mut random);
            let nonsense = match random.random_range(0..6) {
                0 => random.random(),
                1 => old ^ 1 << random.random_range(0..64),
                2 => old.wrapping_add(random.random_range(0..256)).wrapping_sub(128),
                3 => u64::MAX,
                4 => random.random_range(0..1 << 20),
                _ => 0,
            };
            word.store(nonsense, Ordering::Release);
        }
    }
}

/// A word of these ranges, likely one that is used, and its value.
fn used<'a>(shared: &[(usize, usize)], random: &mut SmallRng) -> (&'a AtomicU64, u64) {
    loop {
        let &(start, len) = &shared[random.random_range(0..shared.len())];
        // The words that govern the rest stand in front.
        let end = if random.random() { len.min(4096) } else { len };
        let at = start + random.random_range(0..end / 8) * 8;
        // SAFETY: an aligned word of a mapping that may be written to, and that no thread unmaps. The test wants to
        // surprise its owner, or to kill this process.
        let word = unsafe { AtomicU64::from_ptr(at as *mut u64) };
        let value = word.load(Ordering::Relaxed);
        if value != 0 || random.random_ratio(1, 512) {
            return (word, value);
        }
    }
}

/// Start and length of the mappings that this process shares and may write to. The header of the host's table is left
/// out: without it no further process of the user gets a device (SECURITY.md).
fn shared() -> Vec<(usize, usize)> {
    const TABLE_HEADER: usize = 16;
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let ours = maps.lines().filter(|map| map.contains(" rw-s ") && map.contains("/memfd:anyverbs"));
    let range = |map: &str| {
        let (range, rest) = map.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let [start, end] = [start, end].map(|n| usize::from_str_radix(n, 16).unwrap());
        let is_table = !rest.contains("/memfd:anyverbs (deleted)");
        let skip = if is_table { TABLE_HEADER } else { 0 };
        (start + skip, end - start - skip)
    };
    ours.map(range).collect()
}

#[test]
fn a_peer_that_spoils_shared_memory_harms_no_other() {
    isolate();
    if is_on() {
        let name = "spoiler::a_peer_that_spoils_shared_memory_harms_no_other";
        in_own_process(name, while_others_talk);
    }
}

fn while_others_talk() {
    let rounds = std::env::var("ANYVERBS_SPOILER_ROUNDS").ok();
    let rounds = rounds.map_or(ROUNDS, |n| n.parse().expect("ANYVERBS_SPOILER_ROUNDS is a number"));
    let mut third = Peer::spawn("rc", &[]);
    let f = Endpoint::new(QpType::Rc);
    let [src, dst, sink] = [(); 3].map(|()| Buffer::new(&f.pd, OFFERED));
    let (_, to_third) = third.connect(&f, &sink);
    beside_a_talk(&f, [&src, &dst], to_third, 0..rounds, TIMEOUT, |round| {
        beside_a_spoiler(round.into());
    });
    assert_eq!(f.qp.state().unwrap(), QpState::Rts);
}

/// Each request ends, even if the peer spoils it, and only the offered memory changes.
fn beside_a_spoiler(seed: u64) {
    let mut peer = Peer::spawn(&format!("rc spoiler {seed}"), &[]);
    let e = Endpoint::new(QpType::Rc);
    let (offered, own) = (Buffer::new(&e.pd, OFFERED), Buffer::new(&e.pd, 2 * LEN));
    let untouched = pattern(LEN, seed as u8);
    own.write(LEN, &untouched);
    let (_, remote) = peer.connect(&e, &offered);
    let mut random = SmallRng::seed_from_u64(seed);
    receive(&e, &offered, AT_ONCE);
    let begin = Instant::now();
    while begin.elapsed() < ROUND {
        for _ in 0..AT_ONCE {
            post(&e, &own, remote, &mut random);
        }
        assert_eq!(finish(&e, &offered, TIMEOUT), AT_ONCE, "seed {seed}");
    }
    assert_eq!(peer.hear(), "@ spoils");
    peer.signal(libc::SIGKILL);
    for _ in 0..AT_ONCE {
        post(&e, &own, remote, &mut random);
    }
    assert_eq!(finish(&e, &offered, TIMEOUT), AT_ONCE, "seed {seed}");
    assert!(own.read(LEN, LEN) == untouched, "seed {seed}");
}
