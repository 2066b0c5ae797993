//! Paths: one for each receiving process of each address. The senders on a path share the receiver's socket buffer:
//! reliable queue pairs by window, unreliable ones by the credit of [`super::pace`].

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use anyverbs_locks::{Mutex, RwLock, rank};
use anyverbs_objects::base::NEVER;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::Qpn;

use super::pace::{Credit, Pace};

/// Unused paths are forgotten when there are more than this.
const MANY: usize = 4096;
/// A packet of the largest MTU with its overhead always fits.
const MIN_WINDOW: u32 = 4096 + 64;

/// A path to another host, for all queue pairs that use it.
#[derive(Debug)]
pub struct Path {
    in_flight: AtomicU32,
    pace: Mutex<rank::PathPace, Pace>,
}

impl Path {
    /// `ours`: to a process of this host.
    fn new(ours: bool) -> Self {
        Self { in_flight: AtomicU32::new(0), pace: Mutex::new(Pace::new(ours)) }
    }

    /// A queue pair begins or ends to have requests in flight here.
    pub fn set_in_flight(&self, in_flight: bool) {
        if in_flight {
            self.in_flight.fetch_add(1, Ordering::Relaxed);
        } else {
            self.in_flight.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// One queue pair's share of the window; `counted`: it is among those in flight.
    pub fn window(&self, whole: u32, counted: bool) -> u32 {
        let sharers = self.in_flight.load(Ordering::Relaxed) + u32::from(!counted);
        (whole / sharers.max(1)).max(MIN_WINDOW)
    }

    /// Asks to send an unreliable packet; see [`Pace::ask`].
    pub(crate) fn ask(
        &self,
        len: usize,
        from: Qpn,
        to: Qpn,
        takes_recv: bool,
        now: Time,
    ) -> Credit {
        self.pace.lock().ask(len, from, to, takes_recv, now)
    }
}

/// All paths.
#[derive(Debug)]
pub struct Paths {
    paths: RwLock<rank::Paths, HashMap<(IpAddr, u32, u8), Arc<Path>>>,
    /// When [`expire`](Self::expire) has something to do, in nanoseconds.
    next: AtomicU64,
}

impl Default for Paths {
    fn default() -> Self {
        Self { paths: RwLock::default(), next: AtomicU64::new(NEVER) }
    }
}

impl Paths {
    /// The path to the process `slot` at an address; `ours`: of this host.
    pub(crate) fn path(&self, ip: IpAddr, scope_id: u32, slot: u8, ours: bool) -> Arc<Path> {
        let key = (ip, scope_id, slot);
        if let Some(path) = self.paths.read().get(&key) {
            return Arc::clone(path);
        }
        let mut paths = self.paths.write();
        if paths.len() > MANY {
            paths.retain(|_, path| Arc::strong_count(path) > 1);
        }
        Arc::clone(paths.entry(key).or_insert_with(|| Arc::new(Path::new(ours))))
    }

    /// An answer came from `ip`, about its queue pair `receiver`.
    pub fn echo(&self, ip: IpAddr, receiver: Qpn, bytes: u64, limit: u64, resume: &mut Vec<Qpn>) {
        for ((path_ip, _, slot), path) in self.paths.read().iter() {
            if (*path_ip, *slot) == (ip, receiver.slot()) {
                path.pace.lock().echo(bytes, receiver, limit, resume);
            }
        }
    }

    /// Somebody waits until `at`.
    pub(crate) fn wait_until(&self, at: Time) {
        self.next.fetch_min(at.as_nanos(), Ordering::SeqCst);
    }

    /// When [`run`](Self::run) has something to do, in nanoseconds.
    pub fn next(&self) -> u64 {
        self.next.load(Ordering::SeqCst)
    }

    /// Lets queue pairs that have waited long enough ask again.
    pub fn expire(&self, now: Time, resume: &mut Vec<Qpn>) {
        if now.as_nanos() < self.next() {
            return;
        }
        self.next.store(NEVER, Ordering::SeqCst);
        for path in self.paths.read().values() {
            if let Some(at) = path.pace.lock().expire(now, resume) {
                self.next.fetch_min(at.as_nanos(), Ordering::SeqCst);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_is_shared_and_never_less_than_a_packet() {
        let path = Path::new(false);
        assert_eq!(path.window(128 << 10, false), 128 << 10);
        path.set_in_flight(true);
        assert_eq!(path.window(128 << 10, true), 128 << 10);
        assert_eq!(path.window(128 << 10, false), 64 << 10);
        for _ in 0..1000 {
            path.set_in_flight(true);
        }
        assert_eq!(path.window(128 << 10, true), MIN_WINDOW);
    }
}
