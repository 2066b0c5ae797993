//! A stream of messages allocates nothing.

#![allow(clippy::unwrap_used, reason = "a test")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "every block below does what the one line says"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use anyverbs::*;
use anyverbs_proto::counters::Counter;

#[path = "device/endpoint.rs"]
#[allow(dead_code, reason = "shared with the other tests")]
mod endpoint;
use endpoint::*;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        unsafe { System.dealloc(p, layout) }
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        unsafe { System.realloc(p, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const LEN: usize = 16 << 10;

fn stream(a: &Endpoint, b: &Endpoint, src: &Buffer, dst: &Buffer, messages: usize) {
    let mut wcs = [Wc::default(); 16];
    for _ in 0..messages {
        b.recv(1, &[dst.sge(0, LEN)]);
        a.send(2, SendOp::Send, &[src.sge(0, LEN)]);
        a.send(3, SendOp::Write(dst.remote(0)), &[src.sge(0, LEN)]);
        a.send(4, SendOp::Read(dst.remote(0)), &[src.sge(0, LEN)]);
        for (cq, n) in [(&b.cq, 1), (&a.cq, 3)] {
            let mut got = 0;
            while got < n {
                let polled = cq.poll(&mut wcs).unwrap();
                assert!(wcs[..polled].iter().all(|wc| wc.status == WcStatus::Success));
                got += polled;
            }
        }
    }
}

/// By UDP when the environment says so, else within the process. Events of the host (an address that changes, a process
/// that ends) cost the worker some allocations, which have nothing to do with the stream. So the stream is cut in
/// pieces, and the median piece counts. An allocation per message, or per hundred, is in all of them.
fn allocations_of_a_stream() -> u64 {
    let (a, b) = pair(QpType::Rc);
    let (src, dst) = (Buffer::new(&a.pd, LEN), Buffer::new(&b.pd, LEN));
    stream(&a, &b, &src, &dst, 200);
    let mut pieces: Vec<u64> = (0..9)
        .map(|_| {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            stream(&a, &b, &src, &dst, 200);
            ALLOCATIONS.load(Ordering::Relaxed) - before
        })
        .collect();
    pieces.sort_unstable();
    pieces[pieces.len() / 2]
}

#[test]
fn a_stream_allocates_nothing() {
    if std::env::var_os("ANYVERBS_INPROC").is_some() {
        assert_eq!(allocations_of_a_stream(), 0);
        return;
    }
    // In the process, and by UDP over the loopback: each in a process of its own.
    for inproc in ["1", "0"] {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .env("ANYVERBS_INPROC", inproc)
            .status()
            .unwrap();
        assert!(status.success(), "ANYVERBS_INPROC={inproc}");
    }
}

const ROLE: &str = "ANYVERBS_TEST_NO_ALLOCATION";

/// The other process of a stream: connects, answers each SEND with one, and says how much the median piece allocated.
#[test]
fn peer() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let e = Endpoint::new(QpType::Rc);
    let buffer = Buffer::new(&e.pd, LEN);
    meet(&e, &buffer, &mut std::io::stdin().lock(), &mut std::io::stdout());
    println!("@ {}", answer(&e, &buffer));
}

/// Exchanges addresses.
fn meet(
    e: &Endpoint,
    b: &Buffer,
    from: &mut impl std::io::BufRead,
    to: &mut impl std::io::Write,
) -> RemoteAddr {
    let a = e.address();
    writeln!(to, "@ {} {} {} {}", a.gid, a.qpn.get(), b.addr(), b.mr.rkey()).unwrap();
    to.flush().unwrap();
    let words = hear(from);
    let ip: std::net::Ipv6Addr = words[0].parse().unwrap();
    let number = |i: usize| words[i].parse::<u64>().unwrap();
    e.connect(Address { gid: Gid(ip.octets()), qpn: Qpn::new(number(1) as u32) });
    for _ in 0..64 {
        e.recv(1, &[b.sge(0, 64)]);
    }
    writeln!(to, "@ ready").unwrap();
    to.flush().unwrap();
    assert_eq!(hear(from), ["ready"]);
    RemoteAddr { va: number(2), rkey: number(3) as u32 }
}

/// The words of the peer's next line.
fn hear(from: &mut impl std::io::BufRead) -> Vec<String> {
    loop {
        let mut line = String::new();
        assert_ne!(from.read_line(&mut line).unwrap(), 0, "the peer ended");
        if let Some((_, words)) = line.split_once('@') {
            return words.split_whitespace().map(str::to_owned).collect();
        }
    }
}

const ROUNDS: usize = 300;
const PIECES: usize = 9;

/// Completions of sends and of receives that there were.
#[derive(Default)]
struct Polled([usize; 2]);

impl Polled {
    /// Polls until there were that many more. Early completions count for the next time.
    fn take(&mut self, e: &Endpoint, wanted: [usize; 2]) {
        let mut wcs = [Wc::default(); 16];
        let begin = std::time::Instant::now();
        while self.0[0] < wanted[0] || self.0[1] < wanted[1] {
            let n = e.cq.poll(&mut wcs).unwrap();
            for wc in &wcs[..n] {
                assert_eq!(wc.status, WcStatus::Success);
                self.0[usize::from(wc.opcode.is_recv())] += 1;
            }
            assert!(begin.elapsed().as_secs() < 20, "the other process does not answer");
        }
        self.0 = [self.0[0] - wanted[0], self.0[1] - wanted[1]];
    }
}

/// The allocations of the median piece of `rounds`, after one that does not count.
fn median(mut rounds: impl FnMut()) -> u64 {
    rounds();
    let mut pieces: Vec<u64> = (0..PIECES)
        .map(|_| {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            rounds();
            ALLOCATIONS.load(Ordering::Relaxed) - before
        })
        .collect();
    pieces.sort_unstable();
    pieces[pieces.len() / 2]
}

fn answer(e: &Endpoint, buffer: &Buffer) -> u64 {
    let mut polled = Polled::default();
    median(|| {
        for _ in 0..ROUNDS {
            polled.take(e, [0, 1]);
            e.recv(1, &[buffer.sge(0, 64)]);
            e.send(2, SendOp::Send, &[buffer.sge(0, 64)]);
            polled.take(e, [1, 0]);
        }
    })
}

/// Through shared memory: SENDs that are answered, WRITEs and READs by the ring and straight.
fn allocations_between_processes(direct: &str) -> [u64; 2] {
    isolate();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "peer", "--nocapture", "--test-threads=1"])
        .envs([(ROLE, "1"), ("ANYVERBS_DIRECT", direct)])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut to = child.stdin.take().unwrap();
    let mut from = std::io::BufReader::new(child.stdout.take().unwrap());
    let e = Endpoint::new(QpType::Rc);
    let buffer = Buffer::new(&e.pd, LEN);
    let remote = meet(&e, &buffer, &mut from, &mut to);
    let mut polled = Polled::default();
    let ours = median(|| {
        for _ in 0..ROUNDS {
            e.send(2, SendOp::Write(remote), &[buffer.sge(0, LEN)]);
            e.send(3, SendOp::Read(remote), &[buffer.sge(0, LEN)]);
            e.send(4, SendOp::Send, &[buffer.sge(0, 64)]);
            polled.take(&e, [3, 1]);
            e.recv(1, &[buffer.sge(0, 64)]);
        }
    });
    let packets = e.context.counters().unwrap().read(Counter::ShmSentPkts);
    assert!(packets >= (ROUNDS * PIECES) as u64, "{packets} packets went by shared memory");
    let theirs = hear(&mut from)[0].parse().unwrap();
    assert!(child.wait().unwrap().success());
    [ours, theirs]
}

#[test]
fn a_stream_between_processes_allocates_nothing() {
    if std::env::var_os("ANYVERBS_INPROC").is_none() && std::env::var_os(ROLE).is_none() {
        for direct in ["0", "1"] {
            assert_eq!(allocations_between_processes(direct), [0, 0], "direct {direct}");
        }
    }
}
