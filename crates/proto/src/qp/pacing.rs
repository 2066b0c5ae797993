//! Packet pacing: the highest rate at which a queue pair sends. The program's limit (`ibv_modify_qp_rate_limit(3)`) and
//! the static rate of the path or address handle (IBA 9.11) set it. Answers to the peer's requests are not held back:
//! the requester paces them.

use std::time::Duration;

use crate::time::Time;

/// A limit of the rate at which a queue pair sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RateLimit {
    /// Kilobits of packets a second; 0: no limit.
    pub kbps: u32,
    /// Most bytes of a burst; 0: the device chooses.
    pub max_burst: u32,
    /// Bytes of a typical packet: a burst is no smaller. 0: the path MTU.
    pub typical_packet: u16,
}

/// The port's own rate, in Mb/s: a path that is as fast holds nothing back.
pub const PORT_MBPS: u32 = 100_000;

/// Megabits a second of a static rate (`enum ibv_rate`); `None` for 0, the port's own, and for a code that does not exist.
#[must_use]
pub fn static_rate_mbps(code: u8) -> Option<u32> {
    Some(match code {
        2 => 2_500,
        3 => 10_000,
        4 => 30_000,
        5 => 5_000,
        6 => 20_000,
        7 => 40_000,
        8 => 60_000,
        9 => 80_000,
        10 => 120_000,
        11 => 14_062,
        12 => 56_250,
        13 => 112_500,
        14 => 168_750,
        15 => 25_781,
        16 => 103_125,
        17 => 206_250,
        18 => 309_375,
        19 => 28_125,
        20 => 53_125,
        21 => 425_000,
        22 => 637_500,
        23 => 850_000,
        24 => 1_275_000,
        _ => return None,
    })
}

/// The burst that may leave at once if the program does not give one, in milliseconds: a late timer loses no rate
/// (`the_rate_is_kept_however_late_the_clock_is_read`).
const BURST: Duration = Duration::from_millis(2);

/// The state of a limit: a bucket of `burst` that fills at the rate.
#[derive(Clone, Copy, Debug)]
pub struct Pacing {
    kbps: u32,
    burst: Duration,
    /// When everything that was sent would have left at the rate.
    drained_at: Time,
}

impl Pacing {
    /// Makes the pacing for a limit; `None` if there is none. A packet has `packet` bytes at most.
    #[must_use]
    pub fn new(limit: &RateLimit, packet: u32) -> Option<Self> {
        let RateLimit { kbps, max_burst, typical_packet } = *limit;
        if kbps == 0 {
            return None;
        }
        let packet = if typical_packet == 0 { packet } else { typical_packet.into() };
        let burst = if max_burst == 0 { BURST } else { duration(max_burst, kbps) };
        Some(Self {
            kbps,
            burst: burst.max(duration(packet, kbps)),
            drained_at: Time::from_nanos(0),
        })
    }

    /// The pacing for a path with this static rate. `None` if that is no slower than the port.
    pub(super) fn of_path(static_rate: u8, packet: u32) -> Option<Self> {
        let mbps = static_rate_mbps(static_rate).filter(|mbps| *mbps < PORT_MBPS)?;
        Self::new(&RateLimit { kbps: mbps * 1000, ..RateLimit::default() }, packet)
    }

    /// Changes to the path of the next datagram, which may have another rate. The bytes that left before still have to
    /// drain.
    pub(super) fn turns_to(&mut self, path: &Self) {
        (self.kbps, self.burst) = (path.kbps, path.burst);
    }

    /// How long sends have to wait from now, until half of the burst is free again. `None`: a packet may leave now.
    #[must_use]
    pub fn wait(&self, now: Time) -> Option<Duration> {
        // A packet goes out whole. If it needs more than there is, the next ones wait for the rest.
        let admits = self.drained_at < now + self.burst;
        (!admits).then(|| self.drained_at.since(now).saturating_sub(self.burst / 2))
    }

    /// A packet of this many bytes leaves now.
    pub fn note_sent(&mut self, bytes: u32, now: Time) {
        self.drained_at = self.drained_at.max(now) + duration(bytes, self.kbps);
    }
}

/// The time that so many bytes take.
fn duration(bytes: u32, kbps: u32) -> Duration {
    Duration::from_nanos(u64::from(bytes) * 8_000_000 / u64::from(kbps.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends as fast as it may for `micros`, looking every `step`; how many bytes.
    fn sent(limit: &RateLimit, micros: u64, step: u64) -> u64 {
        let mut pacing = Pacing::new(limit, 1000).unwrap();
        let mut bytes = 0;
        let mut wait_until = Time::default();
        for now in (0..micros).step_by(step as usize) {
            let now = Time::from_nanos(1_000_000_000 + now * 1000);
            if wait_until > now {
                continue;
            }
            wait_until = loop {
                if let Some(wait) = pacing.wait(now) {
                    break now + wait;
                }
                pacing.note_sent(1000, now);
                bytes += 1000;
            };
        }
        bytes
    }

    #[test]
    fn the_rate_is_kept_however_late_the_clock_is_read() {
        // 80 Mbit/s: 10 bytes a microsecond.
        let limit = RateLimit { kbps: 80_000, ..RateLimit::default() };
        for step in [1, 50, 700] {
            let bytes = sent(&limit, 1_000_000, step);
            assert!((9_900_000..=10_040_000).contains(&bytes), "{bytes} bytes, step {step}");
        }
    }

    #[test]
    fn a_burst_has_the_programs_length_or_one_packet() {
        let burst = |max_burst| sent(&RateLimit { kbps: 80, max_burst, typical_packet: 0 }, 1, 1);
        assert_eq!(burst(5000), 5000);
        assert_eq!(burst(1), 1000);
        assert!(Pacing::new(&RateLimit::default(), 1000).is_none());
    }

    #[test]
    fn static_rates_are_lanes_of_a_speed() {
        // Kilobits a second of a lane, then codes and lanes.
        let lanes: [(u64, &[(u8, u64)]); 5] = [
            (
                2_500_000,
                &[(2, 1), (5, 2), (3, 4), (6, 8), (4, 12), (7, 16), (8, 24), (9, 32), (10, 48)],
            ),
            (14_062_500, &[(11, 1), (12, 4), (13, 8), (14, 12)]),
            (25_781_250, &[(15, 1), (16, 4), (17, 8), (18, 12)]),
            (28_125_000, &[(19, 1)]),
            (53_125_000, &[(20, 1), (21, 8), (22, 12), (23, 16), (24, 24)]),
        ];
        for (of_lane, codes) in lanes {
            for &(code, lanes) in codes {
                let mbps = (of_lane * lanes / 1000) as u32;
                assert_eq!(static_rate_mbps(code), Some(mbps), "{code}");
            }
        }
        assert_eq!([0, 1, 25, 255].map(static_rate_mbps), [None; 4]);
    }
}
