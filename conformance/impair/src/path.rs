//! One direction of the bridge, without I/O: the frames that leave, their times and their changes. Time is an argument.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::frame::Roce;

/// The faults. Probabilities are from 0 to 1, of each RoCE packet; delay, rate and outage concern every frame.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Faults {
    /// Packets that vanish
    #[arg(long, default_value_t = 0.0, value_name = "P")]
    pub loss: f64,
    /// Packets that arrive twice, the second time up to `--spread-us` later
    #[arg(long, default_value_t = 0.0, value_name = "P")]
    pub duplicate: f64,
    /// Packets that are held back for up to `--spread-us` while others pass
    #[arg(long, default_value_t = 0.0, value_name = "P")]
    pub reorder: f64,
    /// See `--duplicate` and `--reorder`
    #[arg(long, default_value_t = 500, value_name = "US")]
    pub spread_us: u64,
    /// Packets with one flipped bit: the UDP checksum tells
    #[arg(long, default_value_t = 0.0, value_name = "P")]
    pub corrupt: f64,
    /// Packets with two flipped bits: only the ICRC tells
    #[arg(long, default_value_t = 0.0, value_name = "P")]
    pub corrupt_unseen: f64,
    /// Packets that are cut short, half of them with headers that say so
    #[arg(long, default_value_t = 0.0, value_name = "P")]
    pub truncate: f64,
    /// Delay of every frame
    #[arg(long, default_value_t = 0, value_name = "MS")]
    pub delay_ms: u64,
    /// The speed; none: as fast as it goes
    #[arg(long, value_name = "MBIT")]
    pub rate_mbit: Option<u64>,
    /// Frames that wait for their turn at that speed; more are dropped
    #[arg(long, default_value_t = 64, value_name = "FRAMES")]
    pub queue: usize,
    /// No frame passes from this long after the first RoCE packet
    #[arg(long, value_name = "MS")]
    pub down_after_ms: Option<u64>,
    /// ... for this long
    #[arg(long, default_value_t = 2000, value_name = "MS")]
    pub down_ms: u64,
}

impl Faults {
    /// The time in which nothing passes, after the first RoCE packet.
    #[must_use]
    pub fn outage(&self, first: Duration) -> Option<std::ops::Range<Duration>> {
        let start = first + Duration::from_millis(self.down_after_ms?);
        Some(start..start + Duration::from_millis(self.down_ms))
    }
}

/// Counts of each fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// RoCE packets that came.
    pub packets: u64,
    /// See [`Faults`].
    pub lost: u64,
    /// See [`Faults`].
    pub duplicated: u64,
    /// See [`Faults`].
    pub reordered: u64,
    /// See [`Faults`].
    pub corrupted: u64,
    /// See [`Faults`].
    pub corrupted_unseen: u64,
    /// See [`Faults`].
    pub truncated: u64,
    /// Dropped since the queue was full.
    pub queue_full: u64,
    /// Dropped while nothing passed.
    pub outage: u64,
    /// A batch and not one packet: the segmentation offloads of the hosts are not off.
    pub too_long: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.packets += other.packets;
        self.lost += other.lost;
        self.duplicated += other.duplicated;
        self.reordered += other.reordered;
        self.corrupted += other.corrupted;
        self.corrupted_unseen += other.corrupted_unseen;
        self.truncated += other.truncated;
        self.queue_full += other.queue_full;
        self.outage += other.outage;
        self.too_long += other.too_long;
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "packets={} lost={} duplicated={} reordered={} corrupted={} corrupted_unseen={} truncated={} queue_full={} \
             outage={} too_long={}",
            self.packets,
            self.lost,
            self.duplicated,
            self.reordered,
            self.corrupted,
            self.corrupted_unseen,
            self.truncated,
            self.queue_full,
            self.outage,
            self.too_long
        )
    }
}

/// One direction.
#[derive(Debug)]
pub struct Path {
    faults: Faults,
    port: u16,
    /// The longest frame of the link.
    longest: usize,
    rng: SmallRng,
    /// Frames by the time when they leave; ties in the order of arrival.
    waiting: BinaryHeap<Reverse<(Duration, u64, Vec<u8>)>>,
    number: u64,
    /// The times at which waiting frames will have left.
    turns: VecDeque<Duration>,
    /// Counts of each fault.
    pub counts: Counts,
    /// When the first RoCE packet came.
    pub first: Option<Duration>,
}

impl Path {
    /// A direction with a seed of its own.
    #[must_use]
    pub fn new(faults: Faults, port: u16, longest: usize, seed: u64) -> Self {
        Self {
            faults,
            port,
            longest,
            rng: SmallRng::seed_from_u64(seed),
            waiting: BinaryHeap::new(),
            number: 0,
            turns: VecDeque::new(),
            counts: Counts::default(),
            first: None,
        }
    }

    fn happens(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.rng.random_bool(probability.min(1.0))
    }

    /// A frame comes.
    pub fn offer(&mut self, now: Duration, mut frame: Vec<u8>) {
        self.counts.too_long += u64::from(frame.len() > self.longest);
        let roce = Roce::parse(&frame, self.port);
        if roce.is_some() {
            self.counts.packets += 1;
            self.first.get_or_insert(now);
        }
        let outage = self.first.and_then(|first| self.faults.outage(first));
        if outage.is_some_and(|outage| outage.contains(&now)) {
            self.counts.outage += u64::from(roce.is_some());
            return;
        }
        let Some(mut leaves) = self.turn(now, frame.len()) else {
            self.counts.queue_full += 1;
            return;
        };
        leaves += Duration::from_millis(self.faults.delay_ms);
        let Some(roce) = roce else { return self.wait(leaves, frame) };
        if self.happens(self.faults.loss) {
            self.counts.lost += 1;
            return;
        }
        let spread = Duration::from_micros(self.faults.spread_us.max(1));
        if self.happens(self.faults.duplicate) {
            self.counts.duplicated += 1;
            let later = self.rng.random_range(Duration::ZERO..spread);
            self.wait(leaves + later, frame.clone());
        }
        if self.happens(self.faults.corrupt) {
            self.counts.corrupted += 1;
            roce.flip(&mut frame, &mut self.rng);
        } else if self.happens(self.faults.corrupt_unseen) {
            self.counts.corrupted_unseen += u64::from(roce.flip_unseen(&mut frame, &mut self.rng));
        } else if self.happens(self.faults.truncate) {
            self.counts.truncated += 1;
            let lengths = self.rng.random_bool(0.5);
            roce.cut(&mut frame, lengths, &mut self.rng);
        }
        if self.happens(self.faults.reorder) {
            self.counts.reordered += 1;
            leaves += self.rng.random_range(Duration::ZERO..spread);
        }
        self.wait(leaves, frame);
    }

    /// When a frame's turn at the link's speed is over; none if too many wait.
    fn turn(&mut self, now: Duration, len: usize) -> Option<Duration> {
        let Some(rate) = self.faults.rate_mbit else { return Some(now) };
        while self.turns.front().is_some_and(|turn| *turn <= now) {
            self.turns.pop_front();
        }
        if self.turns.len() >= self.faults.queue {
            return None;
        }
        let start = self.turns.back().copied().unwrap_or(now);
        let end = start + Duration::from_nanos(len as u64 * 8_000 / rate.max(1));
        self.turns.push_back(end);
        Some(end)
    }

    fn wait(&mut self, leaves: Duration, frame: Vec<u8>) {
        self.number += 1;
        self.waiting.push(Reverse((leaves, self.number, frame)));
    }

    /// When the next frame leaves.
    #[must_use]
    pub fn next(&self) -> Option<Duration> {
        self.waiting.peek().map(|Reverse((leaves, ..))| *leaves)
    }

    /// A frame that leaves by now.
    pub fn take(&mut self, now: Duration) -> Option<Vec<u8>> {
        if self.next()? > now {
            return None;
        }
        self.waiting.pop().map(|Reverse((.., frame))| frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::tests::{PORT, frame};

    const COUNT: u64 = 10_000;

    fn us(n: u64) -> Duration {
        Duration::from_micros(n)
    }

    /// Offers packets a microsecond apart, and returns those that left in the end.
    fn pass(faults: Faults, seed: u64) -> (Vec<Vec<u8>>, Counts) {
        let mut path = Path::new(faults, PORT, 1514, seed);
        for i in 0..COUNT {
            let mut bytes = frame(64, false);
            bytes[42..50].copy_from_slice(&i.to_be_bytes());
            path.offer(us(i), bytes);
        }
        let out = std::iter::from_fn(|| path.take(us(10 * COUNT))).collect();
        (out, path.counts)
    }

    #[test]
    fn nothing_happens_by_default() {
        let (out, counts) = pass(Faults::default(), 1);
        assert_eq!(counts, Counts { packets: COUNT, ..Counts::default() });
        assert_eq!(out.len() as u64, COUNT);
        assert!(out.is_sorted());
    }

    #[test]
    fn faults_have_their_rate_and_repeat_for_a_seed() {
        let faults = Faults {
            loss: 0.1,
            duplicate: 0.1,
            reorder: 0.1,
            corrupt: 0.1,
            corrupt_unseen: 0.1,
            truncate: 0.1,
            spread_us: 100,
            ..Faults::default()
        };
        let (out, counts) = pass(faults.clone(), 7);
        assert_eq!(pass(faults.clone(), 7), (out.clone(), counts));
        assert_ne!(pass(faults, 8).0, out);
        let Counts { lost, duplicated, reordered, corrupted, corrupted_unseen, truncated, .. } =
            counts;
        for count in [lost, duplicated, reordered, corrupted, corrupted_unseen, truncated] {
            assert!((COUNT / 20..COUNT / 5).contains(&count), "{counts}");
        }
        assert_eq!(out.len() as u64, COUNT - lost + duplicated);
        assert!(!out.is_sorted());
    }

    #[test]
    fn a_slow_link_has_a_short_queue() {
        // A frame of 106 bytes takes 848 us.
        let faults = Faults { rate_mbit: Some(1), queue: 4, ..Faults::default() };
        let mut path = Path::new(faults, PORT, 1514, 1);
        for _ in 0..6 {
            path.offer(us(0), frame(64, false));
        }
        assert_eq!(path.counts.queue_full, 2);
        assert_eq!(path.next(), Some(us(848)));
        assert!(path.take(us(847)).is_none());
        assert!(path.take(us(848)).is_some());
        path.offer(us(848), frame(64, false));
        assert_eq!(path.counts.queue_full, 2);
    }

    #[test]
    fn an_outage_begins_after_the_first_packet_and_spares_nothing() {
        let faults =
            Faults { down_after_ms: Some(1), down_ms: 2, delay_ms: 1, ..Faults::default() };
        let mut path = Path::new(faults, PORT, 1514, 1);
        let mut arp = vec![0; 60];
        arp[12..14].copy_from_slice(&[0x08, 0x06]);
        path.offer(us(100), arp.clone());
        path.offer(us(10_000), frame(64, true));
        assert_eq!(path.next(), Some(us(1100)));
        for at in [11_000, 12_999] {
            path.offer(us(at), frame(64, true));
            path.offer(us(at), arp.clone());
        }
        assert_eq!((path.counts.outage, path.waiting.len()), (2, 2));
        path.offer(us(13_000), arp);
        assert_eq!(path.waiting.len(), 3);
    }

    #[test]
    fn batches_are_told() {
        let mut path = Path::new(Faults::default(), PORT, 1514, 1);
        path.offer(us(0), frame(1600, false));
        assert_eq!(path.counts.too_long, 1);
    }
}
