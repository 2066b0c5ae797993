//! How the worker is woken.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::event::EventfdFlags;

use crate::event_queue::{eventfd, signal};

/// Wakes the worker, and knows whether that is needed. Times are nanoseconds of the device's clock.
#[derive(Debug)]
pub struct Waker {
    kick: OwnedFd,
    kicked: AtomicBool,
    /// Until when the worker sleeps; 0 while it is awake or will soon look by itself.
    asleep_until: AtomicU64,
    /// Until when polls keep the worker away; 0 otherwise.
    away_until: AtomicU64,
}

impl Waker {
    /// Nobody sleeps.
    ///
    /// # Errors
    /// Those of epoll_create1(2) and eventfd(2).
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            kick: eventfd(EventfdFlags::NONBLOCK)?,
            kicked: AtomicBool::new(false),
            asleep_until: AtomicU64::new(0),
            away_until: AtomicU64::new(0),
        })
    }

    /// Wakes the worker.
    pub fn kick(&self) {
        if !self.kicked.swap(true, Ordering::SeqCst) {
            signal(self.kick.as_fd());
        }
    }

    /// Wakes the worker if it would sleep beyond `at`.
    pub fn wake_before(&self, at: u64) {
        if self.asleep_until.load(Ordering::SeqCst) > at {
            self.kick();
        }
    }

    /// As [`wake_before`](Self::wake_before), also if polls keep the worker away.
    pub fn look_before(&self, at: u64) {
        let until = &[&self.asleep_until, &self.away_until];
        if until.iter().any(|until| until.load(Ordering::SeqCst) > at) {
            self.kick();
        }
    }

    /// Whether the worker sleeps and would not look by itself soon.
    pub fn is_asleep(&self) -> bool {
        self.asleep_until.load(Ordering::SeqCst) != 0
    }

    /// The worker will sleep until `at`, or is awake with 0.
    pub fn set_asleep_until(&self, at: u64) {
        self.asleep_until.store(at, Ordering::SeqCst);
    }

    /// Polls keep the worker away until `at`, or no longer with 0.
    pub fn set_away_until(&self, at: u64) {
        self.away_until.store(at, Ordering::SeqCst);
    }

    /// The worker has seen that it was kicked.
    pub fn take_kick(&self) {
        // The descriptor does not block.
        let _ = rustix::io::read(&self.kick, &mut [0; 8]);
        self.kicked.store(false, Ordering::SeqCst);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.kick.as_fd()
    }
}
