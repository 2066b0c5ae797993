//! Counts of packets through rings, for each device, without a locked instruction: each place has one writer at a time.

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

/// Counts of the lanes of a queue pair, under its lock.
#[derive(Debug, Default)]
pub(super) struct LaneTally {
    pub(super) sent: Tally,
    pub(super) received: Tally,
}

/// Packets, bytes and ACKs: out, in, and out by lanes.
type Counts = [[u64; 3]; 3];

/// The other processes that a ring may lead to, by their slots.
const SLOTS: usize = 256;

/// Counts of all rings of the process.
#[derive(Debug)]
pub struct Traffic {
    /// By device, and by the slot of the other process, under the sending side's lock.
    sent: Box<[Tally]>,
    /// The slots in use, a bit each.
    used: [AtomicU64; SLOTS / 64],
    /// The lanes of each queue pair, with its device. A place that nobody else holds is free.
    lanes: Mutex<rank::Lanes, Vec<(u8, Arc<LaneTally>)>>,
    /// By device, under the lock of the receive path.
    received: Box<[Tally]>,
    /// The part that is in the counters, by device.
    counted: Mutex<rank::TrafficCounted, Box<[Counts]>>,
}

impl Traffic {
    /// For so many devices.
    pub(super) fn new(devices: usize) -> Self {
        let places = |n: usize| (0..n).map(|_| Tally::default()).collect();
        Self {
            sent: places(devices * SLOTS),
            used: Default::default(),
            lanes: Mutex::default(),
            received: places(devices),
            counted: Mutex::new(vec![Counts::default(); devices].into()),
        }
    }

    /// A place for the packets of a queue pair's lanes.
    pub(super) fn of_lanes(&self, device: u8) -> Arc<LaneTally> {
        let mut lanes = self.lanes.lock();
        // Unlike `strong_count`, `get_mut` also shows the counts as who gave the place up has left them.
        let free = lanes.iter_mut().find_map(|(of, tally)| {
            let is_free = *of == device && Arc::get_mut(tally).is_some();
            is_free.then(|| Arc::clone(tally))
        });
        free.unwrap_or_else(|| {
            let tally = Arc::<LaneTally>::default();
            lanes.push((device, Arc::clone(&tally)));
            tally
        })
    }

    /// Notes packets of a device sent to a process. The caller has the sending side of its ring.
    #[inline]
    pub(super) fn note_sent(&self, device: u8, slot: u8, packets: u64, bytes: u64, acks: u64) {
        let (used, bit) = (&self.used[usize::from(slot / 64)], 1 << (slot % 64));
        if used.load(Ordering::Relaxed) & bit == 0 {
            used.fetch_or(bit, Ordering::Relaxed);
        }
        self.sent[usize::from(device) * SLOTS + usize::from(slot)].add(packets, bytes, acks);
    }

    /// Notes packets that a device received. The caller has the receive path.
    #[inline]
    pub fn note_received(&self, device: u8, packets: u64, bytes: u64) {
        self.received[usize::from(device)].add(packets, bytes, 0);
    }

    fn read(&self, device: usize) -> Counts {
        let (mut sent, mut received) = ([0; 3], self.received[device].read());
        let add = |to: &mut [u64; 3], more: [u64; 3]| {
            *to = std::array::from_fn(|i| to[i].wrapping_add(more[i]));
        };
        for (i, used) in self.used.iter().enumerate() {
            let mut bits = used.load(Ordering::Relaxed);
            while bits != 0 {
                let slot = i * 64 + bits.trailing_zeros() as usize;
                add(&mut sent, self.sent[device * SLOTS + slot].read());
                bits &= bits - 1;
            }
        }
        let mut by_lane = [0; 3];
        for (_, tally) in self.lanes.lock().iter().filter(|(of, _)| usize::from(*of) == device) {
            add(&mut by_lane, tally.sent.read());
            add(&mut received, tally.received.read());
        }
        add(&mut sent, by_lane);
        [sent, received, by_lane]
    }

    /// Bytes out and in that are not in the counters, of all devices.
    pub fn uncounted(&self) -> u64 {
        let bytes = |traffic: Counts| traffic[0][1].wrapping_add(traffic[1][1]);
        let counted = self.counted.lock();
        let of = |(device, counted): (usize, &Counts)| {
            bytes(self.read(device)).wrapping_sub(bytes(*counted))
        };
        counted.iter().enumerate().map(of).fold(0, u64::wrapping_add)
    }
}

impl Traffic {
    /// Brings the counters of the devices up to date with the traffic through rings.
    pub fn count(&self, counters: &[Counters]) {
        for (device, (past, counters)) in self.counted.lock().iter_mut().zip(counters).enumerate() {
            let now = self.read(device);
            count(counters, now, std::mem::replace(past, now));
        }
    }
}

/// Adds what has come since `past`.
fn count(counters: &Counters, now: Counts, past: Counts) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_counts_traffic_to_all_processes() {
        let traffic = Traffic::new(1);
        for (slot, packets, bytes, acks) in [(3, 1, 10, 1), (200, 2, 20, 0), (3, 4, 40, 3)] {
            traffic.note_sent(0, slot, packets, bytes, acks);
        }
        traffic.note_received(0, 5, 50);
        traffic.of_lanes(0).sent.add(3, 30, 0);
        assert!(traffic.of_lanes(0).sent.read() == [3, 30, 0], "nobody has it any more");
        assert_eq!(traffic.read(0), [[10, 100, 4], [5, 50, 0], [3, 30, 0]]);
        assert_eq!(traffic.uncounted(), 150);
        traffic.count(&[Counters::default()]);
        traffic.note_received(0, 1, 9);
        assert_eq!(traffic.uncounted(), 9);
    }

    #[test]
    fn each_device_counts_what_is_its_own() {
        let traffic = Traffic::new(3);
        for device in [1, 2] {
            let n = u64::from(device);
            traffic.note_sent(device, 7, n, 10 * n, 0);
            traffic.note_received(device, 2 * n, 20 * n);
            let lanes = traffic.of_lanes(device);
            lanes.sent.add(n, n, 0);
            lanes.received.add(3 * n, n, 0);
        }
        assert_eq!(traffic.lanes.lock().len(), 2, "a place stays its device's");
        assert_eq!(traffic.uncounted(), (11 + 21) * (1 + 2));
        let counters: [Counters; 3] = Default::default();
        traffic.count(&counters);
        for (counters, n) in counters.iter().zip(0..) {
            let shown =
                [Counter::SentPkts, Counter::SentBytes, Counter::RcvdPkts, Counter::RcvdBytes];
            assert_eq!(shown.map(|c| counters.read(c)), [2 * n, 11 * n, 5 * n, 21 * n]);
        }
        assert_eq!(traffic.uncounted(), 0);
    }
}
