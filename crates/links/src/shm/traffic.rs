//! Counts of packets through rings, without a locked instruction: each place has one writer at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyverbs_locks::{Mutex, rank};
use anyverbs_proto::counters::{Counter, Counters};

/// Packets, their bytes, and piggybacked ACKs. A thread that adds holds a lock, always the same.
#[derive(Debug, Default)]
pub(super) struct Tally {
    packets: AtomicU64,
    bytes: AtomicU64,
    acks: AtomicU64,
}

impl Tally {
    #[inline]
    pub(super) fn add(&self, packets: u64, bytes: u64, acks: u64) {
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
    /// Each lane counts under its queue pair's lock. A place that nobody else holds is free.
    lanes: Mutex<rank::Lanes, Vec<Arc<Tally>>>,
    /// Under that of the receive path.
    received: Tally,
    /// The part that is in the port's counters.
    counted: Mutex<rank::TrafficCounted, [[u64; 3]; 3]>,
}

impl Traffic {
    pub(super) fn new() -> Self {
        let sent = (0..256).map(|_| Tally::default()).collect();
        let used = Default::default();
        let (received, lanes) = (Tally::default(), Mutex::default());
        Self { sent, used, lanes, received, counted: Mutex::default() }
    }

    /// A place for the packets that leave by a lane.
    pub(super) fn of_lane(&self) -> Arc<Tally> {
        let mut lanes = self.lanes.lock();
        let free = lanes.iter().find(|tally| Arc::strong_count(tally) == 1);
        free.cloned().unwrap_or_else(|| {
            let tally = Arc::<Tally>::default();
            lanes.push(Arc::clone(&tally));
            tally
        })
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

    /// Packets, bytes and ACKs out, in, and out by lanes.
    fn read(&self) -> [[u64; 3]; 3] {
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
        let mut by_lane = [0; 3];
        for tally in &*self.lanes.lock() {
            let more = tally.read();
            by_lane = std::array::from_fn(|i| by_lane[i] + more[i]);
        }
        sent = std::array::from_fn(|i| sent[i] + by_lane[i]);
        [sent, self.received.read(), by_lane]
    }

    /// Bytes out and in that are not in the port's counters.
    pub fn uncounted(&self) -> u64 {
        let counted = self.counted.lock();
        let bytes = |traffic: [[u64; 3]; 3]| traffic[0][1].wrapping_add(traffic[1][1]);
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
        counters.add(Counter::ShmLanePkts, now[2][0].wrapping_sub(past[2][0]));
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
        traffic.of_lane().add(3, 30, 0);
        assert!(traffic.of_lane().read() == [3, 30, 0], "nobody has it any more");
        assert_eq!(traffic.read(), [[10, 100, 4], [5, 50, 0], [3, 30, 0]]);
        assert_eq!(traffic.uncounted(), 150);
        *traffic.counted.lock() = traffic.read();
        traffic.note_received(1, 9);
        assert_eq!(traffic.uncounted(), 9);
    }
}
