//! The same-host link: packets to other processes of this user, through shared memory.
//!
//! A message of the ring is a packet without pad and ICRC. In front of its headers are the addresses that it would have
//! on the wire, and room for a piggybacked ACK. So the ACK that the responder owes goes along with its program's reply,
//! in the same cache line. Its payload may be as long as [`SEGMENT`]; the packet then stands for as many as it fills at
//! the path MTU, which it says. So PSNs are the same on every link, and the two ends of a connection need not agree on
//! one. A long SEND may say where its payload lies instead ([`super::direct`]).
//!
//! No packet is lost on the way, unless the peer has not read for [`SILENCE`]. Packets to it then vanish, and
//! connections end by their retries, as they would on a network.

mod lanes;
mod message;
mod route;
mod traffic;
mod unflushed;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyverbs_locks::{Mutex, rank};
use anyverbs_net::Slot;
use anyverbs_net::shm::{Channel, Closed, Config, ConnectError, Endpoint, Poller};
use anyverbs_objects::base::directory::{self, Directory};
use anyverbs_objects::base::{HOUSEKEEPING, LATE, NEVER};
use anyverbs_proto::time::Time;
use anyverbs_proto::types::Qpn;

use super::direct;
use super::mapped::MappedRegions;
use super::times::{ASK_AGAIN, GRACE, SILENCE};
pub use anyverbs_net::shm::lane::LONGEST as LONGEST_IN_LANE;
pub use anyverbs_objects::base::Digest;
pub use lanes::{Keeper, Lanes};
pub use message::{Inbox, LaneCall, Received};
pub use route::ShmRoute;
use traffic::Traffic;
pub use unflushed::{Spare, Unflushed};

/// Bytes that a connected queue pair may have in flight here: half a ring.
pub const WINDOW: u32 = 256 << 10;
/// Longest payload of a packet.
pub const SEGMENT: u32 = 32 << 10;
/// Bytes after which the peer is shown the messages so far, though more follows under the same lock.
const SHOW_AFTER: usize = 16 << 10;
/// Why a peer is not one any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gone {
    /// The process has ended, or might as well have.
    Dead,
    /// It does not want this link.
    Unwilling,
}

/// Another process that has this link.
#[derive(Debug)]
pub struct Peer {
    channel: Arc<Channel>,
    waiting: Mutex<rank::RingWaiting, RoomWait>,
    mapped: MappedRegions,
}

#[derive(Debug, Default)]
struct RoomWait {
    /// Since when an answer to a question for room is awaited.
    asked: Option<Time>,
    /// The answer did not come in time: packets vanish until it comes.
    stalled: bool,
    blocked: Vec<Qpn>,
    gone: Option<Gone>,
    /// Until when requests to a process that has ended vanish; then they fail.
    grace: Option<Time>,
}

impl RoomWait {
    /// The process has ended, or declines.
    fn end(&mut self, gone: Gone, now: Time) {
        self.gone = Some(gone);
        self.grace.get_or_insert(now + GRACE);
    }

    /// Whether requests to the process, which has ended, fail now.
    fn is_grace_over(&self, now: Time) -> bool {
        self.grace.is_some_and(|until| now >= until)
    }

    /// Gives up if the answer takes too long. Returns when to look again.
    fn look(&mut self, now: Time) -> Option<Time> {
        let until = self.asked.filter(|_| !self.stalled)? + SILENCE;
        if until > now {
            return Some(until);
        }
        if now.since(until) > LATE {
            self.asked = Some(now);
            return Some(now + SILENCE);
        }
        self.stalled = true;
        None
    }
}

impl Peer {
    /// Whether this is the process at the other end of a channel.
    pub fn is(&self, channel: &Arc<Channel>) -> bool {
        Arc::ptr_eq(&self.channel, channel)
    }

    /// There is room. Returns the queue pairs that waited for it.
    pub fn take_room(&self, blocked: &mut Vec<Qpn>) {
        let mut waiting = self.waiting.lock();
        waiting.asked = None;
        waiting.stalled = false;
        blocked.append(&mut waiting.blocked);
    }

    /// It is gone. Returns the queue pairs that waited for it.
    pub fn end(&self, gone: Gone, now: Time, blocked: &mut Vec<Qpn>) {
        let mut waiting = self.waiting.lock();
        waiting.end(gone, now);
        blocked.append(&mut waiting.blocked);
        self.mapped.clear();
    }

    /// The channel to it.
    pub fn channel(&self) -> &Arc<Channel> {
        &self.channel
    }

    /// Its regions that this process has mapped.
    pub(crate) fn mapped(&self) -> &MappedRegions {
        &self.mapped
    }

    /// Whether the link to it stands.
    pub fn is_open(&self) -> bool {
        self.channel.closed().is_none()
    }
}

#[derive(Debug, Default)]
enum Entry {
    #[default]
    Unknown,
    Peer(Arc<Peer>),
    Absent(Instant),
    /// It declined a channel.
    Unwilling(Instant),
}

/// The link of this process.
#[derive(Debug)]
pub struct Shm {
    endpoint: Arc<Endpoint>,
    slot: u8,
    /// One-sided operations need no message.
    direct: bool,
    /// By slot.
    entries: Mutex<rank::Peers, Vec<Entry>>,
    /// When [`expire`](Self::expire) has something to do, in nanoseconds.
    next: AtomicU64,
    traffic: Traffic,
}

impl Shm {
    /// The link of so many devices. With `direct`, one-sided operations need no message.
    pub fn new(slot: &Slot, direct: bool, devices: usize) -> io::Result<(Self, Poller)> {
        let published = if direct { directory::PUBLISHED } else { 1 };
        let (endpoint, poller) = Endpoint::new(slot, Config { published, ..Config::default() })?;
        let endpoint = Arc::new(endpoint);
        let entries = Mutex::new((0..256).map(|_| Entry::default()).collect());
        let (next, traffic) = (AtomicU64::new(NEVER), Traffic::new(devices));
        let slot = slot.number();
        Ok((Self { endpoint, slot, direct, entries, next, traffic }, poller))
    }

    /// This process's end.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Packets and bytes that were moved.
    pub fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    /// Makes the directory of what peers may reach of so many devices without a message, unless one-sided operations go by the
    /// rings. To be called once.
    pub fn directory(&self, devices: usize) -> Option<Directory> {
        self.direct.then(|| Directory::new(Arc::clone(&self.endpoint), self.slot, devices))
    }

    /// Accepts and ends connections.
    pub fn control(&self) {
        if let Err(error) = self.endpoint.control() {
            tracing::debug!(%error, "the same-host link's connections");
        }
    }

    /// The process that holds `slot`, if it has this link. `thorough`: it lives now, and is asked in any case.
    fn peer(&self, slot: u8, thorough: bool) -> Option<Arc<Peer>> {
        let mut entries = self.entries.lock();
        let entry = &mut entries[usize::from(slot)];
        match entry {
            Entry::Peer(peer)
                if peer.channel.closed().is_none() && (!thorough || peer.channel.is_alive()) =>
            {
                return Some(Arc::clone(peer));
            }
            Entry::Absent(since) if !thorough && since.elapsed() < ASK_AGAIN => return None,
            // If it were asked again at once, it would decline again, and packets sent meanwhile would be lost.
            Entry::Unwilling(since) if since.elapsed() < ASK_AGAIN => return None,
            _ => {}
        }
        // Twice: the slot's last owner may have ended, and not be known to have.
        for _ in 0..2 {
            match self.endpoint.connect(slot) {
                Ok(channel) if channel.max_payload() < SEGMENT as usize => break,
                Ok(channel) if channel.is_alive() => {
                    let peer = Arc::new(Peer {
                        channel,
                        waiting: Mutex::default(),
                        mapped: MappedRegions::default(),
                    });
                    *entry = Entry::Peer(Arc::clone(&peer));
                    return Some(peer);
                }
                Ok(_) => self.control(),
                Err(ConnectError::Nobody | ConnectError::NotAnother) => break,
                Err(error) => {
                    tracing::debug!(%error, slot, "no same-host link");
                    break;
                }
            }
        }
        *entry = Entry::Absent(Instant::now());
        None
    }

    /// The peer at the other end of a channel.
    pub fn find(&self, channel: &Arc<Channel>) -> Option<Arc<Peer>> {
        match &self.entries.lock()[usize::from(channel.slot())] {
            Entry::Peer(peer) if peer.is(channel) => Some(Arc::clone(peer)),
            _ => None,
        }
    }

    /// A channel is closed.
    pub fn forget(&self, channel: &Arc<Channel>, gone: Gone) {
        let entry = &mut self.entries.lock()[usize::from(channel.slot())];
        if matches!(entry, Entry::Peer(peer) if peer.is(channel)) {
            *entry = match gone {
                Gone::Dead => Entry::Unknown,
                Gone::Unwilling => Entry::Unwilling(Instant::now()),
            };
        }
    }

    /// When there is something to do, in nanoseconds.
    pub fn next(&self) -> u64 {
        self.next.load(Ordering::SeqCst)
    }

    /// Gives up waiting for peers whose rings have been full for too long, and drops mappings of regions that have
    /// ended.
    pub fn expire(&self, now: Time, resume: &mut Vec<Qpn>) {
        if now.as_nanos() < self.next() {
            return;
        }
        self.next.store(NEVER, Ordering::SeqCst);
        for entry in &*self.entries.lock() {
            let Entry::Peer(peer) = entry else { continue };
            if !peer.mapped.is_empty() && direct::sweep(peer) {
                self.next.fetch_min((now + HOUSEKEEPING).as_nanos(), Ordering::SeqCst);
            }
            let mut waiting = peer.waiting.lock();
            if let Some(until) = waiting.look(now) {
                self.next.fetch_min(until.as_nanos(), Ordering::SeqCst);
            } else if waiting.stalled {
                resume.append(&mut waiting.blocked);
            }
        }
    }
}

/// The reason why a closed channel's peer is gone.
pub fn reason(closed: Closed) -> Gone {
    match closed {
        Closed::Version | Closed::Refused => Gone::Unwilling,
        // The process might live, but nothing that it says can be trusted.
        _ => Gone::Dead,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_ring_is_given_up_in_time() {
        let begin = Time::from_nanos(1);
        let mut waiting = RoomWait { asked: Some(begin), ..RoomWait::default() };
        assert_eq!(waiting.look(begin), Some(begin + SILENCE));
        assert_eq!(waiting.look(begin + SILENCE + LATE), None);
        assert!(waiting.stalled);
    }

    #[test]
    fn a_full_ring_is_never_given_up_without_a_look() {
        let begin = Time::from_nanos(1);
        let mut waiting = RoomWait { asked: Some(begin), ..RoomWait::default() };
        let continued = begin + SILENCE * 6;
        assert_eq!(waiting.look(continued), Some(continued + SILENCE));
        assert_eq!(waiting.look(continued + SILENCE), None);
        assert!(waiting.stalled);
    }

    #[test]
    fn requests_to_an_ended_process_fail_after_a_while() {
        let (begin, mut waiting) = (Time::from_nanos(1), RoomWait::default());
        assert!(!waiting.is_grace_over(begin + GRACE), "it lives");
        waiting.end(Gone::Dead, begin);
        assert!(!waiting.is_grace_over(begin + GRACE / 2));
        // Another queue pair hears of it later.
        waiting.end(Gone::Dead, begin + GRACE / 2);
        assert!(waiting.is_grace_over(begin + GRACE));
    }
}
