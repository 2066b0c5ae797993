//! Counts of packets through rings, without a locked instruction: each place has one writer at a time.

use std::sync::atomic::{AtomicU64, Ordering};

use anyverbs_locks::{Mutex, rank};
use anyverbs_proto::counters::{Counter, Counters};

/// Packets, their bytes, and piggybacked ACKs. A thread that adds holds a lock, always the same.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    packets: AtomicU64,
    bytes: AtomicU64,
    acks: AtomicU64,
}

impl Tally {
    #[inline]
    fn add(&self, packets: u64, bytes: u64, acks: u64) {
        for (to, n) in [(&self.packets, packets), (&self.bytes, bytes), (&self.acks, acks)] {
            to.store(to.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
        }
    }

    fn read(&self) -> [u64; 3] {
        [&self.packets, &self.bytes, &self.acks].map(|n| n.load(Ordering::Relaxed))
    }
}

/// Counts of all rings of the process.
#[derive(Debug)]
pub struct Traffic {
    /// By the slot of the other process, under the sending side's lock.
    sent: Box<[Tally]>,
    /// The places in use, a bit each.
    used: [AtomicU64; 4],
    /// Under that of the receive path.
    received: Tally,
    /// The part that is in the port's counters.
    counted: Mutex<rank::TrafficCounted, [[u64; 3]; 2]>,
}

impl Traffic {
    pub(super) fn new() -> Self {
        let sent = (0..256).map(|_| Tally::default()).collect();
        let used = Default::default();
        Self { sent, used, received: Tally::default(), counted: Mutex::default() }
    }

    /// Notes packets sent to a process. The caller has the sending side of its ring.
    #[inline]
    pub(super) fn note_sent(&self, slot: u8, packets: u64, bytes: u64, acks: u64) {
        let (used, bit) = (&self.used[usize::from(slot / 64)], 1 << (slot % 64));
        if used.load(Ordering::Relaxed) & bit == 0 {
            used.fetch_or(bit, Ordering::Relaxed);
        }
        self.sent[usize::from(slot)].add(packets, bytes, acks);
    }

    /// Notes received packets. The caller has the receive path.
    #[inline]
    pub fn note_received(&self, packets: u64, bytes: u64) {
        self.received.add(packets, bytes, 0);
    }

    /// Packets, bytes and ACKs out, and in.
    fn read(&self) -> [[u64; 3]; 2] {
        let mut sent = [0; 3];
        for (i, used) in self.used.iter().enumerate() {
            let mut bits = used.load(Ordering::Relaxed);
            while bits != 0 {
                let [packets, bytes, acks] =
                    self.sent[i * 64 + bits.trailing_zeros() as usize].read();
                sent = [sent[0] + packets, sent[1] + bytes, sent[2] + acks];
                bits &= bits - 1;
            }
        }
        [sent, self.received.read()]
    }

    /// Bytes out and in that are not in the port's counters.
    pub fn uncounted(&self) -> u64 {
        let counted = self.counted.lock();
        let bytes = |traffic: [[u64; 3]; 2]| traffic[0][1].wrapping_add(traffic[1][1]);
        bytes(self.read()).wrapping_sub(bytes(*counted))
    }
}

impl Traffic {
    /// Brings the port's counters up to date with the traffic through rings.
    pub fn count(&self, counters: &Counters) {
        let mut counted = self.counted.lock();
        let now = self.read();
        let past = std::mem::replace(&mut *counted, now);
        let names = [
            [Counter::ShmSentPkts, Counter::SentPkts, Counter::SentBytes],
            [Counter::ShmRcvdPkts, Counter::RcvdPkts, Counter::RcvdBytes],
        ];
        for (i, [by_ring, packets, bytes]) in names.into_iter().enumerate() {
            let since = |what: usize| now[i][what].wrapping_sub(past[i][what]);
            counters.add(by_ring, since(0));
            counters.add(packets, since(0));
            counters.add(bytes, since(1));
        }
        counters.add(Counter::AcksSent, now[0][2].wrapping_sub(past[0][2]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_counts_traffic_to_all_processes() {
        let traffic = Traffic::new();
        for (slot, packets, bytes, acks) in [(3, 1, 10, 1), (200, 2, 20, 0), (3, 4, 40, 3)] {
            traffic.note_sent(slot, packets, bytes, acks);
        }
        traffic.note_received(5, 50);
        assert_eq!(traffic.read(), [[7, 70, 4], [5, 50, 0]]);
        assert_eq!(traffic.uncounted(), 120);
        *traffic.counted.lock() = traffic.read();
        traffic.note_received(1, 9);
        assert_eq!(traffic.uncounted(), 9);
    }
}
