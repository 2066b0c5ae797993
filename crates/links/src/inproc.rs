//! Packets between queue pairs of one process: a queue, because no thread waits for a second queue pair's lock.
//!
//! A thread that produced packets drains the queue once it has released its queue pair. One thread at a time drains,
//! and looks again after it said that it stopped, so that no packet is left behind. Packets lie in an arena that is
//! swapped with the drainer's: nothing is allocated in the steady state.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use anyverbs_locks::{Mutex, rank};
use anyverbs_proto::counters::Counter;
use anyverbs_proto::env::TransmitError;
use anyverbs_proto::qp::Arrival;
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::packet::{Headers, Packet};

use crate::Links;
use crate::outgoing::Outgoing;

/// Bytes that a connected queue pair may have in flight here.
pub const WINDOW: u32 = 256 << 10;
/// Bytes in the queue beyond which unreliable senders wait; reliable ones have their window.
const UNRELIABLE_LIMIT: usize = 1 << 20;
/// Packets after which a caller leaves the rest to the worker.
const CALLER_BUDGET: usize = 4096;
/// Memory that an arena keeps when it is empty.
const KEEP: usize = 4 << 20;

/// The receiver of what the link delivers.
pub trait Inbound {
    /// Gives packets to their queue pairs.
    fn deliver<'p>(&self, packets: impl Iterator<Item = (Arrival, Packet<'p>)>);

    /// Hands packets of groups on to the other processes of the host.
    fn hand_on<'p>(&self, packets: impl Iterator<Item = (Arrival, Packet<'p>)>);

    /// Sends the ACK that a queue pair owes.
    fn acknowledge(&self, qpn: Qpn);

    /// A queue pair may send again.
    fn resume(&self, qpn: Qpn);
}

/// The in-process link.
#[derive(Debug, Default)]
pub struct Inproc {
    queue: Mutex<rank::InprocQueue, Arena>,
    /// Packets in the queue.
    len: AtomicUsize,
    draining: AtomicBool,
    /// The drainer's.
    spare: Mutex<rank::InprocDrain, Arena>,
    /// Rounds of delivery so far.
    rounds: AtomicU64,
    waiting: Mutex<rank::InprocWaiting, WaitingQps>,
    /// The drainer's.
    spare_waiting: Mutex<rank::InprocDrainWaiting, WaitingQps>,
    any_waiting: AtomicBool,
}

/// Queue pairs that want to be called when the queued packets are delivered.
#[derive(Debug, Default)]
struct WaitingQps {
    /// They owe an ACK.
    owed: Vec<Qpn>,
    /// They have more to send.
    blocked: Vec<Qpn>,
}

#[derive(Debug, Default)]
struct Arena {
    packets: Vec<Entry>,
    bytes: Vec<u8>,
    used: usize,
}

#[derive(Debug)]
struct Entry {
    arrival: Arrival,
    headers: Headers,
    /// It is for a group, and the thread that delivers it here forwards it to the other processes.
    hand_on: bool,
    start: usize,
    len: usize,
}

impl Arena {
    fn clear(&mut self) {
        self.packets.clear();
        self.used = 0;
        if self.bytes.len() > KEEP {
            self.bytes = Vec::new();
        }
    }
}

impl Inproc {
    /// Queues a packet of a device. With `hand_on` it is for a group, and the thread that delivers it forwards it to the other
    /// processes.
    pub(crate) fn send(
        &self,
        links: &Links,
        device: u8,
        packet: &Outgoing<'_>,
        hand_on: bool,
    ) -> Result<(), TransmitError> {
        let Outgoing { from, av, headers, payload, reliable, .. } = *packet;
        let mut queue = self.queue.lock();
        if !reliable && queue.used > UNRELIABLE_LIMIT {
            drop(queue);
            let mut waiting = self.waiting.lock();
            waiting.blocked.push(from);
            self.any_waiting.store(true, Ordering::SeqCst);
            return Err(TransmitError::Blocked);
        }
        let (start, len) = (queue.used, payload.len());
        if queue.bytes.len() < start + len {
            let room = (start + len).next_power_of_two().max(64 << 10);
            queue.bytes.resize(room, 0);
        }
        payload.copy_to(
            &links.core.mrs,
            &links.core.memory,
            &mut queue.bytes[start..start + len],
        )?;
        let mut headers = *headers;
        headers.bth.pad = Bth::pad_of(len);
        let arrival = Arrival {
            source: av.sgid,
            destination: av.dgid,
            traffic_class: av.traffic_class,
            hop_limit: av.hop_limit,
            flow_label: av.flow_label,
            interface: 0,
            port: 0,
        };
        queue.packets.push(Entry { arrival, headers, hand_on, start, len });
        queue.used += len;
        self.len.store(queue.packets.len(), Ordering::SeqCst);
        drop(queue);
        links.core.count(device.into(), Counter::SentPkts, 1);
        links.core.count(device.into(), Counter::SentBytes, (headers.len() + len) as u64);
        Ok(())
    }

    /// A queue pair owes an ACK to one of this process.
    pub fn owe(&self, qpn: Qpn) {
        let mut waiting = self.waiting.lock();
        waiting.owed.push(qpn);
        self.any_waiting.store(true, Ordering::SeqCst);
    }

    /// Whether [`drain`](Self::drain) has something to do.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.len.load(Ordering::SeqCst) > 0 || self.any_waiting.load(Ordering::SeqCst)
    }

    /// Tells whether all packets are delivered that were queued when `since` was first set, with their consequences.
    /// Packets here are never lost, but their thread may not get the processor for long.
    pub fn has_caught_up(&self, since: &mut Option<u64>) -> bool {
        /// The round in progress, one that takes later packets, one for the answers, one for the ACKs.
        const ROUNDS: u64 = 4;
        let rounds = self.rounds.load(Ordering::SeqCst);
        let caught_up = rounds.wrapping_sub(*since.get_or_insert(rounds)) >= ROUNDS
            || !(self.is_pending() || self.draining.load(Ordering::SeqCst));
        if caught_up {
            *since = None;
        }
        caught_up
    }

    /// Delivers queued packets, with their consequences. The caller holds no queue pair's lock. False if packets are
    /// left because the caller's share is done.
    pub fn drain(&self, into: &impl Inbound, worker: bool) -> bool {
        let mut left = if worker { usize::MAX } else { CALLER_BUDGET };
        while self.is_pending() {
            if self.draining.swap(true, Ordering::SeqCst) {
                return true;
            }
            while self.is_pending() && left > 0 {
                left = left.saturating_sub(self.round(into).max(1));
                self.rounds.fetch_add(1, Ordering::SeqCst);
            }
            self.draining.store(false, Ordering::SeqCst);
            if left == 0 && self.is_pending() {
                return false;
            }
        }
        true
    }

    fn round(&self, into: &impl Inbound) -> usize {
        let mut arena = self.spare.lock();
        {
            let mut queue = self.queue.lock();
            std::mem::swap(&mut *queue, &mut *arena);
            self.len.store(0, Ordering::SeqCst);
        }
        let n = arena.packets.len();
        if n > 0 {
            let Arena { packets, bytes, .. } = &*arena;
            let packet = |e: &Entry| {
                let payload = &bytes[e.start..e.start + e.len];
                (e.arrival, Packet { headers: e.headers, payload })
            };
            if packets.iter().any(|e| e.hand_on) {
                let those = packets.iter().filter(|e| e.hand_on).map(packet);
                into.hand_on(those);
            }
            let all = packets.iter().map(packet);
            into.deliver(all);
            arena.clear();
        }
        drop(arena);
        if !self.any_waiting.load(Ordering::SeqCst) {
            return n;
        }
        let mut waiting = self.spare_waiting.lock();
        {
            let mut now = self.waiting.lock();
            self.any_waiting.store(false, Ordering::SeqCst);
            std::mem::swap(&mut *now, &mut *waiting);
        }
        for qpn in waiting.owed.drain(..) {
            into.acknowledge(qpn);
        }
        for qpn in waiting.blocked.drain(..) {
            into.resume(qpn);
        }
        n
    }
}
