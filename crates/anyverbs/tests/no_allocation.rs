//! A stream of messages allocates nothing.

#![allow(clippy::unwrap_used, reason = "a test")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "every block below does what the one line says"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use anyverbs::*;

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

/// By UDP when the environment says so, else within the process. What the host does meanwhile (an address that changes, a
/// process that ends) costs the worker some allocations, which have nothing to do with the stream: so the stream is
/// cut in pieces, and the median piece counts. An allocation per message, or per hundred, is in all of them.
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
