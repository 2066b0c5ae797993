//! Compares the same-host link with the best that the machine can do. Both are measured in turn, with one line each for
//! the median and the best.
//!
//! `cargo bench -p anyverbs-net --bench shm`. Two threads on two processors stand for two processes; they share only
//! the memory that the link maps.

#![allow(clippy::unwrap_used, reason = "a measurement that fails has failed")]

use std::hint::{black_box, spin_loop};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use anyverbs_net::shm::{Channel, Config, Endpoint, Local, Poller, Remote};
use anyverbs_net::{Registry, Slot};

const ROUNDS: usize = 60;
const CHUNK: usize = 64 << 10;

struct Party {
    endpoint: Endpoint,
    poller: Poller,
    _slot: Slot,
}

impl Party {
    fn new(registry: &Registry, slot: u8) -> Self {
        let slot = Slot::claim_number(registry, slot).unwrap();
        let config = match std::env::var("SHM_RING") {
            Ok(ring) => Config { ring: ring.parse().unwrap(), ..Config::default() },
            Err(_) => Config::default(),
        };
        let (endpoint, poller) = Endpoint::new(&slot, config).unwrap();
        Self { endpoint, poller, _slot: slot }
    }
}

fn pin(cpu: usize) {
    // SAFETY: zero is a valid cpu_set_t, and the call gets a live one.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set);
    }
}

/// Runs `other` beside `here` until `here` returns. Returns its result.
fn beside<T>(other: impl FnOnce(&AtomicBool) + Send, here: impl FnOnce() -> T) -> T {
    let (begin, end) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            pin(1);
            begin.store(true, Ordering::Release);
            other(&end);
        });
        while !begin.load(Ordering::Acquire) {
            spin_loop();
        }
        let result = here();
        end.store(true, Ordering::Release);
        other.join().unwrap();
        result
    })
}

#[repr(align(128))]
struct Line(AtomicU64);

/// Nanoseconds that a changed cache line takes to the other processor.
fn cache_line() -> f64 {
    const N: u64 = 5000;
    let (ping, pong) = (Line(AtomicU64::new(0)), Line(AtomicU64::new(0)));
    beside(
        |_| {
            for n in 1..=N {
                while ping.0.load(Ordering::Acquire) != n {
                    spin_loop();
                }
                pong.0.store(n, Ordering::Release);
            }
        },
        || {
            let begin = Instant::now();
            for n in 1..=N {
                ping.0.store(n, Ordering::Release);
                while pong.0.load(Ordering::Acquire) != n {
                    spin_loop();
                }
            }
            begin.elapsed().as_nanos() as f64 / N as f64 / 2.0
        },
    )
}

#[inline]
fn push(channel: &Arc<Channel>, payload: &[u8], batch: usize) -> usize {
    let mut sender = channel.sender();
    let mut n = 0;
    while n < batch {
        let Ok(mut reservation) = sender.reserve(28, payload.len()) else { break };
        reservation.write_header(&[7; 28]);
        reservation.write_payload(0, payload);
        reservation.commit();
        n += 1;
    }
    sender.flush();
    n
}

/// Reads all messages that are there, and copies their bytes to `into`.
#[inline]
fn pull(poller: &mut Poller, into: &mut [u8]) -> usize {
    poller.poll(|_, batch| {
        for message in batch {
            let mut header = [0; 120];
            black_box(message.header(&mut header));
            message.read_payload(0, &mut into[..message.payload_len()]);
        }
    })
}

/// Nanoseconds of a small message one way, both sides polling.
fn latency(a: &mut Party, b: &mut Party, to_b: &Arc<Channel>, to_a: &Arc<Channel>) -> f64 {
    const N: usize = 5000;
    beside(
        |end| {
            let mut bytes = [0; 64];
            while !end.load(Ordering::Relaxed) {
                let n = pull(&mut b.poller, &mut bytes);
                if n > 0 {
                    push(to_a, &bytes[..2], n);
                }
            }
        },
        || {
            let mut bytes = [0; 64];
            let begin = Instant::now();
            for _ in 0..N {
                push(to_b, &[1, 2], 1);
                while pull(&mut a.poller, &mut bytes) == 0 {}
            }
            begin.elapsed().as_nanos() as f64 / N as f64 / 2.0
        },
    )
}

/// Nanoseconds for each of many messages one way.
fn stream(b: &mut Party, to_b: &Arc<Channel>, len: usize, batch: usize, total: usize) -> f64 {
    let from = vec![3u8; len];
    let done = AtomicBool::new(false);
    beside(
        |_| {
            let mut bytes = vec![0; CHUNK];
            let mut n = 0;
            while n < total {
                n += pull(&mut b.poller, &mut bytes);
            }
            done.store(true, Ordering::Release);
        },
        || {
            let begin = Instant::now();
            let mut sent = 0;
            while sent < total {
                sent += push(to_b, &from, batch.min(total - sent));
            }
            while !done.load(Ordering::Acquire) {
                spin_loop();
            }
            begin.elapsed().as_nanos() as f64 / total as f64
        },
    )
}

/// As [`stream`] of 64 KiB, with nothing but flags and copies.
fn bare_stream(total: usize) -> f64 {
    const SLOTS: usize = 8;
    let ring = vec![1u8; SLOTS * CHUNK];
    let base = ring.as_ptr() as usize;
    let (tail, head) = (Line(AtomicU64::new(0)), Line(AtomicU64::new(0)));
    let total = total as u64;
    let place = |n: u64| (base + (n as usize % SLOTS) * CHUNK) as *mut u8;
    let copy = |from: *const u8, to: *mut u8| {
        // SAFETY: both are buffers of CHUNK bytes, and the flags keep the two threads apart.
        unsafe { ptr::copy_nonoverlapping(from, to, CHUNK) };
    };
    beside(
        |_| {
            let mut bytes = vec![0u8; CHUNK];
            for n in 0..total {
                while tail.0.load(Ordering::Acquire) <= n {
                    spin_loop();
                }
                copy(place(n), bytes.as_mut_ptr());
                head.0.store(n + 1, Ordering::Release);
            }
            black_box(&bytes);
        },
        || {
            let from = vec![5u8; CHUNK];
            let begin = Instant::now();
            for n in 0..total {
                while n - head.0.load(Ordering::Acquire) >= SLOTS as u64 {
                    spin_loop();
                }
                copy(from.as_ptr(), place(n));
                tail.0.store(n + 1, Ordering::Release);
            }
            while head.0.load(Ordering::Acquire) < total {
                spin_loop();
            }
            begin.elapsed().as_nanos() as f64 / total as f64
        },
    )
}

/// Nanoseconds of a cross-process copy of `len` bytes: through the channel, and by the bare system call.
fn remote_copy(channel: &Arc<Channel>, len: usize, total: usize) -> [f64; 2] {
    let mut from = vec![1u8; len];
    let to = vec![0u8; len];
    let local = [Local { iov_base: from.as_mut_ptr().cast(), iov_len: len }];
    let remote = [Remote::new(to.as_ptr() as u64, len)];
    let begin = Instant::now();
    for _ in 0..total {
        // SAFETY: both are buffers of this function.
        unsafe { channel.write_remote(&local, &remote) }.unwrap();
    }
    let ours = begin.elapsed().as_nanos() as f64 / total as f64;
    let far = [Local { iov_base: to.as_ptr().cast_mut().cast(), iov_len: len }];
    let begin = Instant::now();
    for _ in 0..total {
        // SAFETY: as above.
        let n = unsafe {
            libc::process_vm_writev(channel.pid(), local.as_ptr(), 1, far.as_ptr(), 1, 0)
        };
        assert_eq!(n, len as isize);
    }
    [ours, begin.elapsed().as_nanos() as f64 / total as f64]
}

/// Nanoseconds of a poll that finds nothing.
fn empty_poll(party: &mut Party) -> f64 {
    const N: u32 = 100_000;
    let begin = Instant::now();
    for _ in 0..N {
        black_box(party.poller.poll(|_, _| {}));
    }
    begin.elapsed().as_nanos() as f64 / f64::from(N)
}

fn main() {
    pin(0);
    let registry = Registry::new(&format!("shm-bench-{}", std::process::id())).unwrap();
    let (mut a, mut b) = (Party::new(&registry, 1), Party::new(&registry, 2));
    let to_b: Arc<Channel> = a.endpoint.connect(2).unwrap();
    while !to_b.is_established() {
        for party in [&mut a, &mut b] {
            party.endpoint.control().unwrap();
            party.poller.poll(|_, _| {});
        }
    }
    let to_a = b.endpoint.connect(1).unwrap();
    let mut results: Vec<(&str, Vec<f64>)> = Vec::new();
    let mut note =
        |name: &'static str, value: f64| match results.iter_mut().find(|(n, _)| *n == name) {
            Some((_, values)) => values.push(value),
            None => results.push((name, vec![value])),
        };
    for _ in 0..ROUNDS {
        note("cache line, one way, ns", cache_line());
        note("2 B one way, both polling, ns", latency(&mut a, &mut b, &to_b, &to_a));
        let rate = |ns: f64| 1000.0 / ns;
        note("8 B in batches of 16, M/s", rate(stream(&mut b, &to_b, 8, 16, 40_000)));
        note("8 B one by one, M/s", rate(stream(&mut b, &to_b, 8, 1, 20_000)));
        let bandwidth = |len: usize, ns: f64| len as f64 / ns;
        note("4 KiB, GB/s", bandwidth(4096, stream(&mut b, &to_b, 4096, 1, 5_000)));
        note("32 KiB, GB/s", bandwidth(CHUNK / 2, stream(&mut b, &to_b, CHUNK / 2, 1, 1000)));
        note("64 KiB, GB/s", bandwidth(CHUNK, stream(&mut b, &to_b, CHUNK, 1, 500)));
        note("64 KiB, bare flags and copies, GB/s", bandwidth(CHUNK, bare_stream(500)));
        note("empty poll, ns", empty_poll(&mut a));
        for (len, names) in [
            (8, ["copy 8 B, ns", "process_vm_writev 8 B, ns"]),
            (CHUNK, ["copy 64 KiB, ns", "process_vm_writev 64 KiB, ns"]),
        ] {
            let [ours, bare] = remote_copy(&to_b, len, 500);
            note(names[0], ours);
            note(names[1], bare);
        }
    }
    println!("{:40} {:>9} {:>9}", "", "median", "best");
    for (name, mut values) in results {
        values.sort_by(f64::total_cmp);
        if name.ends_with("/s") {
            values.reverse();
        }
        // The best is the one least disturbed by others.
        println!("{name:40} {:9.2} {:9.2}", values[ROUNDS / 2], values[0]);
    }
}
