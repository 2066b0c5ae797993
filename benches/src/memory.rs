//! Two processors and the memory between them. Threads of one process stand for two processes: to the caches they are the same.

use std::hint::{black_box, spin_loop};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::processor::{median, pin};

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct CacheLine {
    /// One processor
    #[arg(default_value_t = 0)]
    first: usize,
    /// The other
    #[arg(default_value_t = 1)]
    second: usize,
}

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Ring {
    /// Bytes of a message
    #[arg(long, default_value_t = 65536)]
    size: usize,
    /// Messages that the ring holds
    #[arg(long, default_value_t = 8)]
    slots: usize,
    /// Duration
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    #[command(flatten)]
    processors: CacheLine,
}

/// Two lines apart: processors fetch pairs of them.
#[repr(align(128))]
struct Line(AtomicU64);

impl Line {
    const fn new() -> Self {
        Line(AtomicU64::new(0))
    }

    /// Spins until the line holds at least `n`.
    fn wait(&self, n: u64) {
        while self.0.load(Ordering::Acquire) < n {
            spin_loop();
        }
    }
}

/// Runs `other` on the second processor beside `here` on the first.
fn beside<T>(
    processors: &CacheLine,
    other: impl FnOnce() + Send,
    here: impl FnOnce() -> T,
) -> anyhow::Result<T> {
    pin(processors.first)?;
    let ready = AtomicU64::new(0);
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            let pinned = pin(processors.second);
            ready.store(if pinned.is_ok() { 1 } else { 2 }, Ordering::Release);
            pinned.map(|()| other())
        });
        let outcome = loop {
            match ready.load(Ordering::Acquire) {
                0 => thread::yield_now(),
                1 => break Some(here()),
                _ => break None,
            }
        };
        other.join().expect("the other thread does not panic")?;
        outcome.context("the other processor is not there")
    })
}

/// Batches, so that an interruption spoils one of them and not the figure.
pub(crate) fn cache_line(processors: &CacheLine) -> anyhow::Result<()> {
    const BATCHES: u64 = 41;
    const ROUNDS: u64 = 500;
    let (ping, pong) = (Line::new(), Line::new());
    let mut times = beside(
        processors,
        || {
            for n in 1..=BATCHES * ROUNDS {
                ping.wait(n);
                pong.0.store(n, Ordering::Release);
            }
        },
        || {
            let batch = |batch| {
                let begin = Instant::now();
                for n in 1 + batch * ROUNDS..=(batch + 1) * ROUNDS {
                    ping.0.store(n, Ordering::Release);
                    pong.wait(n);
                }
                begin.elapsed().as_secs_f64() * 1e9 / ROUNDS as f64 / 2.0
            };
            (0..BATCHES).map(batch).collect::<Vec<_>>()
        },
    )?;
    println!("{:.1}", median(&mut times)?);
    Ok(())
}

/// A ring with nothing but flags and two copies.
pub(crate) fn ring(options: &Ring) -> anyhow::Result<()> {
    let (size, slots) = (options.size, options.slots.max(1));
    let memory = vec![1u8; size * slots];
    let base = memory.as_ptr().expose_provenance();
    let place = |n: u64| ptr::with_exposed_provenance_mut::<u8>(base + (n as usize % slots) * size);
    let (tail, head, done) = (Line::new(), Line::new(), AtomicBool::new(false));
    let end = Duration::from_secs_f64(options.seconds);
    let bits = beside(
        &options.processors,
        || {
            let mut into = vec![0u8; size];
            for n in 0u64.. {
                while tail.0.load(Ordering::Acquire) <= n {
                    if done.load(Ordering::Acquire) {
                        return;
                    }
                    spin_loop();
                }
                // SAFETY: both are `size` bytes; the sender does not touch this slot until `head` has passed it.
                unsafe { ptr::copy_nonoverlapping(place(n), into.as_mut_ptr(), size) };
                black_box(&into);
                head.0.store(n + 1, Ordering::Release);
            }
        },
        || {
            let from = vec![2u8; size];
            let begin = Instant::now();
            let mut n = 0u64;
            while begin.elapsed() < end {
                // The clock is read once a ring.
                for _ in 0..slots {
                    head.wait((n + 1).saturating_sub(slots as u64));
                    // SAFETY: as above: the receiver is done with this slot and waits for `tail`.
                    unsafe { ptr::copy_nonoverlapping(from.as_ptr(), place(n), size) };
                    n += 1;
                    tail.0.store(n, Ordering::Release);
                }
            }
            head.wait(n);
            done.store(true, Ordering::Release);
            n as f64 * size as f64 * 8.0 / begin.elapsed().as_secs_f64()
        },
    )?;
    drop(memory);
    println!("{:.3}", bits / 1e9);
    Ok(())
}
