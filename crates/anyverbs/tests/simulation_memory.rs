//! A long simulation needs no more memory than a short one.

#![allow(clippy::unwrap_used, reason = "a test")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "every block below does what the one line says"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyverbs::prelude::*;
use anyverbs::simulation::{Cq, Host, Qp, Simulation, Slice};

struct Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const SOON: Duration = Duration::from_secs(60);
const CONNECTIONS: u32 = 300;
/// More regions than keys that rest before they come again.
const REGIONS: u32 = 5000;

struct End {
    host: Host,
    cq: Cq,
    qp: Qp,
    memory: Slice,
    endpoint: Endpoint,
}

fn end(host: &Host) -> Result<End, Box<dyn Error>> {
    let (pd, cq) = (host.alloc_pd()?, host.create_default_cq(16)?);
    let qp = host.create_default_qp(&pd, &cq, QpType::Rc)?;
    let memory = host.alloc(&pd, 64 << 10, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    let endpoint = host.endpoint(&qp)?;
    Ok(End { host: host.clone(), cq, qp, memory, endpoint })
}

/// Messages on a connection of their own, which ends with them.
async fn talk(a: Host, b: Host, messages: u32) -> Result<(), Box<dyn Error>> {
    let (a, b) = (end(&a)?, end(&b)?);
    a.host.connect(&a.qp, &a.endpoint, &b.endpoint)?;
    b.host.connect(&b.qp, &b.endpoint, &a.endpoint)?;
    let (from, to) = (a.memory.slice(..64), b.memory.slice(..64));
    for _ in 0..messages {
        b.qp.recv(1, &to)?;
        a.qp.send(2, &from)?;
        b.host.completion(&b.cq, SOON).await?;
        a.host.completion(&a.cq, SOON).await?;
        // A wait that is given up leaves nothing.
        a.host.completion(&a.cq, Duration::from_nanos(1)).await.unwrap_err();
    }
    Ok(())
}

/// Connections one after another; the bytes that are allocated at the end.
fn bytes_after(
    simulation: &mut Simulation,
    hosts: &(Host, Host),
    connections: u32,
    messages: u32,
) -> usize {
    for _ in 0..connections {
        simulation.spawn(talk(hosts.0.clone(), hosts.1.clone(), messages));
        simulation.run().unwrap();
    }
    BYTES.load(Ordering::Relaxed)
}

#[test]
fn a_long_run_needs_no_more_memory_than_a_short_one() {
    let mut simulation = Simulation::new(1);
    let hosts = (simulation.host(), simulation.host());
    let given = std::env::var("MESSAGES").ok().and_then(|text| text.parse().ok());
    let messages: u32 = given.unwrap_or(40_000);
    for host in [&hosts.0, &hosts.1] {
        let pd = host.alloc_pd().unwrap();
        for _ in 0..REGIONS {
            host.alloc(&pd, 1, Access::empty()).unwrap();
        }
    }
    let early = bytes_after(&mut simulation, &hosts, CONNECTIONS, 1);
    let connections = bytes_after(&mut simulation, &hosts, 2 * CONNECTIONS, 1);
    let long = bytes_after(&mut simulation, &hosts, 1, messages);
    println!(
        "{early} bytes, {connections} after more connections, {long} after {messages} messages"
    );
    assert!(simulation.packets().0 >= messages as usize, "all were counted");
    assert!(connections < early + 4096 && long < early + 4096);
}
