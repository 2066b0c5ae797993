//! Paths: one for each receiving process of each address. Those who send on a path share the receiver's socket buffer.
//!
//! Reliable queue pairs share it by window. Unreliable ones have no ACK to clock them, so the devices clock them: after
//! each [`PROBE_EVERY`] bytes the sender adds a datagram with the opcode [`PROBE`], from the range that the IBA leaves
//! to manufacturers, that carries the number of bytes so far; the receiving device sends the number back, and the
//! sender keeps at most [`CREDIT`] bytes ahead of it. A peer that does not answer is another make of device: the sender
//! gives up for a while.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use anyverbs_proto::time::Time;
use anyverbs_proto::types::Qpn;
use parking_lot::{Mutex, RwLock};

use super::timers::NEVER;

/// Opcode of a credit probe: BTH (PSN: the sender's QPN), then the count of bytes, 8 bytes big-endian.
pub(crate) const PROBE: u8 = 0xc1;
/// Opcode of the answer: the same count; PSN: the QPN that the probe was sent to.
pub(crate) const ECHO: u8 = 0xc2;

const PROBE_EVERY: u64 = 24 << 10;
const CREDIT: u64 = 96 << 10;
const ECHO_TIMEOUT: Duration = Duration::from_millis(10);
/// Probes in a row without an answer after which the sender goes on without, for a time that doubles.
const MAX_MISSES: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(64);
/// Paths are forgotten, where nobody uses them, when there are more than this.
const MANY: usize = 4096;
/// A packet of the largest MTU with its overhead always fits.
const MIN_WINDOW: u32 = 4096 + 64;

#[derive(Debug)]
pub(crate) struct Path {
    in_flight: AtomicU32,
    pace: Mutex<Pace>,
}

/// Credit of unreliable traffic.
#[derive(Debug, Default)]
struct Pace {
    sent: u64,
    echoed: u64,
    probed: u64,
    /// When the oldest bytes without an answer were probed for.
    probed_at: Option<Time>,
    misses: u32,
    free_until: Option<Time>,
    pause: Duration,
    blocked: Vec<Qpn>,
}

/// What to do with an unreliable packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Credit {
    /// Send it.
    Send,
    /// Send it, and a probe with this count behind it.
    SendAndProbe(u64),
    /// Wait; the queue pair is on the path's list.
    Blocked,
}

impl Path {
    fn new() -> Self {
        Self {
            in_flight: AtomicU32::new(0),
            pace: Mutex::new(Pace { pause: FIRST_PAUSE, ..Pace::default() }),
        }
    }

    /// A queue pair begins or ends to have requests in flight here.
    pub(crate) fn set_in_flight(&self, in_flight: bool) {
        if in_flight {
            self.in_flight.fetch_add(1, Ordering::Relaxed);
        } else {
            self.in_flight.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// One queue pair's share of the window; `counted`: it is among those in flight.
    pub(crate) fn window(&self, whole: u32, counted: bool) -> u32 {
        let sharers = self.in_flight.load(Ordering::Relaxed) + u32::from(!counted);
        (whole / sharers.max(1)).max(MIN_WINDOW)
    }

    /// Asks to send `len` bytes of unreliable traffic for `qpn`.
    pub(crate) fn ask(&self, len: usize, qpn: Qpn, now: Time) -> Credit {
        let mut pace = self.pace.lock();
        if pace.free_until.is_some_and(|until| now < until) {
            return Credit::Send;
        }
        if pace.free_until.take().is_some() {
            pace.echoed = pace.sent;
            pace.probed = pace.sent;
            pace.probed_at = None;
        }
        if pace.sent - pace.echoed + len as u64 > CREDIT {
            pace.blocked.push(qpn);
            return Credit::Blocked;
        }
        pace.sent += len as u64;
        if pace.sent - pace.probed < PROBE_EVERY {
            return Credit::Send;
        }
        pace.probed = pace.sent;
        pace.probed_at.get_or_insert(now);
        Credit::SendAndProbe(pace.sent)
    }

    /// The peer has received all bytes up to `count`. Moves those who waited to `resume`.
    fn echo(&self, count: u64, now: Time, resume: &mut Vec<Qpn>) {
        let mut pace = self.pace.lock();
        if count > pace.echoed && count <= pace.sent {
            pace.echoed = count;
            pace.misses = 0;
            pace.pause = FIRST_PAUSE;
            pace.probed_at = (pace.probed > count).then_some(now);
            resume.append(&mut pace.blocked);
        }
    }

    /// Gives up waiting where an answer is overdue. When to look again.
    fn expire(&self, now: Time, resume: &mut Vec<Qpn>) -> Option<Time> {
        let mut pace = self.pace.lock();
        let overdue = pace.probed_at? + ECHO_TIMEOUT;
        if now < overdue {
            return Some(overdue);
        }
        pace.probed_at = None;
        pace.echoed = pace.sent;
        pace.probed = pace.sent;
        pace.misses += 1;
        if pace.misses >= MAX_MISSES {
            pace.misses = 0;
            pace.free_until = Some(now + pace.pause);
            pace.pause = (pace.pause * 2).min(LAST_PAUSE);
        }
        resume.append(&mut pace.blocked);
        None
    }
}

/// All paths.
#[derive(Debug)]
pub(crate) struct Paths {
    paths: RwLock<HashMap<(IpAddr, u32, u8), Arc<Path>>>,
    /// When [`expire`](Self::expire) has something to do, in nanoseconds.
    next: AtomicU64,
}

impl Default for Paths {
    fn default() -> Self {
        Self { paths: RwLock::default(), next: AtomicU64::new(NEVER) }
    }
}

impl Paths {
    /// The path to the process `slot` at an address.
    pub(crate) fn path(&self, ip: IpAddr, scope_id: u32, slot: u8) -> Arc<Path> {
        let key = (ip, scope_id, slot);
        if let Some(path) = self.paths.read().get(&key) {
            return Arc::clone(path);
        }
        let mut paths = self.paths.write();
        if paths.len() > MANY {
            paths.retain(|_, path| Arc::strong_count(path) > 1);
        }
        Arc::clone(paths.entry(key).or_insert_with(|| Arc::new(Path::new())))
    }

    /// An answer came from `ip` for bytes sent to the process `slot` there.
    pub(crate) fn echo(&self, ip: IpAddr, slot: u8, count: u64, now: Time, resume: &mut Vec<Qpn>) {
        for ((path_ip, _, path_slot), path) in self.paths.read().iter() {
            if (*path_ip, *path_slot) == (ip, slot) {
                path.echo(count, now, resume);
            }
        }
    }

    /// A probe left: look at the clock again in time. True if that is earlier than before.
    pub(crate) fn probed(&self, now: Time) -> bool {
        let at = (now + ECHO_TIMEOUT).as_nanos();
        self.next.fetch_min(at, Ordering::SeqCst) > at
    }

    pub(crate) fn next(&self) -> u64 {
        self.next.load(Ordering::SeqCst)
    }

    /// Gives up waiting for answers that are overdue.
    pub(crate) fn expire(&self, now: Time, resume: &mut Vec<Qpn>) {
        if now.as_nanos() < self.next() {
            return;
        }
        self.next.store(NEVER, Ordering::SeqCst);
        for path in self.paths.read().values() {
            if let Some(at) = path.expire(now, resume) {
                self.next.fetch_min(at.as_nanos(), Ordering::SeqCst);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QPN: Qpn = Qpn::new(0x01_0005);

    fn at(ms: u64) -> Time {
        Time::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn the_window_is_shared_and_never_less_than_a_packet() {
        let path = Path::new();
        assert_eq!(path.window(128 << 10, false), 128 << 10);
        path.set_in_flight(true);
        assert_eq!(path.window(128 << 10, true), 128 << 10);
        assert_eq!(path.window(128 << 10, false), 64 << 10);
        for _ in 0..1000 {
            path.set_in_flight(true);
        }
        assert_eq!(path.window(128 << 10, true), MIN_WINDOW);
    }

    #[test]
    fn credit_runs_out_and_comes_back_with_the_answer() {
        let path = Path::new();
        let mut probes = Vec::new();
        let mut sent = 0;
        loop {
            match path.ask(4096, QPN, at(0)) {
                Credit::Send => sent += 4096,
                Credit::SendAndProbe(count) => {
                    sent += 4096;
                    assert_eq!(count, sent);
                    probes.push(count);
                }
                Credit::Blocked => break,
            }
        }
        assert_eq!(sent, CREDIT);
        assert_eq!(probes.len() as u64, CREDIT / PROBE_EVERY);
        let mut resume = Vec::new();
        path.echo(sent + 1, at(1), &mut resume);
        assert_eq!(resume, [], "an answer to what was never sent counts for nothing");
        path.echo(probes[0], at(1), &mut resume);
        assert_eq!(resume, [QPN]);
        assert_ne!(path.ask(4096, QPN, at(1)), Credit::Blocked);
    }

    #[test]
    fn a_peer_that_never_answers_is_left_alone_for_a_while() {
        let path = Path::new();
        let mut resume = Vec::new();
        for round in 0..u64::from(MAX_MISSES) {
            while path.ask(4096, QPN, at(round * 20)) != Credit::Blocked {}
            assert!(path.expire(at(round * 20 + 5), &mut resume).is_some());
            assert_eq!(resume, []);
            assert_eq!(path.expire(at(round * 20 + 15), &mut resume), None);
            assert_eq!(std::mem::take(&mut resume), [QPN]);
        }
        for _ in 0..1000 {
            assert_eq!(path.ask(4096, QPN, at(100)), Credit::Send);
        }
        while path.ask(4096, QPN, at(3000)) != Credit::Blocked {}
    }
}
