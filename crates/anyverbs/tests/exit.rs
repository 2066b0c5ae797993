//! exit(3) may come from a signal handler that interrupted malloc(3): the thread that calls it allocates nothing.

#![allow(clippy::unwrap_used, reason = "a test")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "every block below does what the one line says"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use anyverbs_testing::UdpPort;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static EXITS: Cell<bool> = const { Cell::new(false) };
}

fn count() {
    if EXITS.get() {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        unsafe { System.dealloc(p, layout) }
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        unsafe { System.realloc(p, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const CHILD: &str = "ANYVERBS_TEST_EXITS";

extern "C" fn begin() {
    EXITS.set(true);
}

extern "C" fn end() {
    EXITS.set(false);
    if ALLOCATIONS.load(Ordering::Relaxed) > 0 {
        unsafe { libc::_exit(3) };
    }
}

#[test]
fn exit_allocates_nothing() {
    if std::env::var_os(CHILD).is_some() {
        // Exit handlers run in reverse order, with the device's between them.
        unsafe { libc::atexit(end) };
        let name = &anyverbs::devices().unwrap()[0].name;
        std::mem::forget(anyverbs::Context::open(name).unwrap());
        unsafe { libc::atexit(begin) };
        unsafe { libc::exit(0) };
    }
    let pid = std::process::id();
    let port = UdpPort::reserve();
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "exit_allocates_nothing", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .env("ANYVERBS_INTERFACES", "lo")
        .env("ANYVERBS_REGISTRY", format!("anyverbs-exit-{pid}"))
        .env("ANYVERBS_UDP_PORT", port.number().to_string())
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(0), "3: it allocates");
}
