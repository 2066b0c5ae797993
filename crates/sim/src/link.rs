//! One direction of a link: its delay and its faults.

use std::collections::VecDeque;
use std::time::Duration;

use anyverbs_proto::time::Time;
use rand::Rng;
use rand::rngs::SmallRng;

/// The effects of a link on packets. Probabilities are from 0 to 1, of each packet.
#[derive(Clone, Debug)]
pub struct Link {
    /// Time that every packet takes; more than zero.
    pub delay: Duration,
    /// Up to this is added; the order is kept.
    pub jitter: Duration,
    /// Lost.
    pub loss: f64,
    /// Arrives a second time, up to `spread` later.
    pub duplicate: f64,
    /// Is held back for up to `spread`, while later ones pass.
    pub reorder: f64,
    /// See `duplicate` and `reorder`.
    pub spread: Duration,
    /// Is damaged.
    pub corrupt: f64,
    /// The fate of damaged packets.
    pub corruption: Corruption,
    /// Times of heavy loss.
    pub burst: Option<Burst>,
    /// Speed and queue; none: as fast as one likes.
    pub rate: Option<Rate>,
}

/// The fate of a damaged packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Corruption {
    /// The ICRC finds it: dropped.
    Dropped,
    /// It is mutated, and arrives as if its ICRC were right, as a malicious or broken peer may send it.
    Mutated,
}

/// Gilbert-Elliott loss: the link is good or bad for exponentially distributed times.
#[derive(Clone, Copy, Debug)]
pub struct Burst {
    /// Mean time between bad times.
    pub good: Duration,
    /// Mean length of a bad time.
    pub bad: Duration,
    /// Loss in a bad time.
    pub loss: f64,
}

/// A bottleneck with a queue before it.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// Bytes per second.
    pub bytes_per_sec: u64,
    /// Packets that wait at most.
    pub queue: usize,
    /// The fate of a packet that finds the queue full.
    pub full: Full,
}

/// The behaviour of a full queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Full {
    /// Drops: the bottleneck lies in the network.
    Drop,
    /// It refuses: the packet stays in the sender, which is told to wait (`TransmitError::Blocked`).
    Block,
}

impl Default for Link {
    /// 5 us, and nothing goes wrong.
    fn default() -> Self {
        Self {
            delay: Duration::from_micros(5),
            jitter: Duration::ZERO,
            loss: 0.0,
            duplicate: 0.0,
            reorder: 0.0,
            spread: Duration::from_micros(20),
            corrupt: 0.0,
            corruption: Corruption::Dropped,
            burst: None,
            rate: None,
        }
    }
}

/// The effects of a link on one packet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Passage {
    /// The packet arrives at these times: one, or two if it was duplicated.
    Arrives(Time, Option<Time>),
    /// As `Arrives`, once, with damage.
    Damaged(Time),
    /// The packet is lost, for this reason.
    Lost(&'static str),
    /// The sender has to wait until then.
    Blocked(Time),
}

/// A link at work.
#[derive(Debug, Default)]
pub(crate) struct LinkState {
    last_arrival: Time,
    bad: bool,
    burst_until: Time,
    /// When the packets that wait before the bottleneck will have left it.
    departures: VecDeque<Time>,
}

impl LinkState {
    pub(crate) fn pass(
        &mut self,
        link: &Link,
        now: Time,
        len: usize,
        rng: &mut SmallRng,
    ) -> Passage {
        let mut departure = now;
        if let Some(rate) = link.rate {
            while self.departures.front().is_some_and(|d| *d <= now) {
                self.departures.pop_front();
            }
            if self.departures.len() >= rate.queue {
                let front = self.departures.front().copied();
                match (rate.full, front) {
                    (Full::Block, Some(front)) => return Passage::Blocked(front),
                    _ => return Passage::Lost("queue full"),
                }
            }
            let nanos = len as u64 * 1_000_000_000 / rate.bytes_per_sec;
            let start = self.departures.back().copied().unwrap_or(now);
            departure = start + Duration::from_nanos(nanos.max(1));
            self.departures.push_back(departure);
        }
        if self.is_bad(link, now, rng) && rng.random_bool(link.burst.map_or(0.0, |b| b.loss)) {
            return Passage::Lost("burst");
        }
        if rng.random_bool(link.loss) {
            return Passage::Lost("lost");
        }
        let flight = departure + link.delay;
        if rng.random_bool(link.corrupt) {
            return match link.corruption {
                Corruption::Dropped => Passage::Lost("corrupt"),
                Corruption::Mutated => Passage::Damaged(flight),
            };
        }
        let arrival = if rng.random_bool(link.reorder) {
            flight + up_to(link.spread, rng)
        } else {
            let arrival = (flight + up_to(link.jitter, rng)).max(self.last_arrival);
            self.last_arrival = arrival;
            arrival
        };
        let again = rng.random_bool(link.duplicate).then(|| arrival + up_to(link.spread, rng));
        Passage::Arrives(arrival, again)
    }

    fn is_bad(&mut self, link: &Link, now: Time, rng: &mut SmallRng) -> bool {
        let Some(burst) = link.burst else { return false };
        while self.burst_until <= now {
            self.bad = !self.bad && self.burst_until != Time::default();
            let mean = if self.bad { burst.bad } else { burst.good };
            let length = mean.mul_f64(-(1.0 - rng.random::<f64>()).ln());
            self.burst_until = self.burst_until + length.max(Duration::from_nanos(1));
        }
        self.bad
    }
}

fn up_to(most: Duration, rng: &mut SmallRng) -> Duration {
    match u64::try_from(most.as_nanos()) {
        Ok(0) | Err(_) => Duration::ZERO,
        Ok(most) => Duration::from_nanos(rng.random_range(0..=most)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    fn arrivals(link: &Link, count: u64) -> Vec<Passage> {
        let mut rng = SmallRng::seed_from_u64(1);
        let mut state = LinkState::default();
        (0..count).map(|i| state.pass(link, Time::from_nanos(i * 1000), 1000, &mut rng)).collect()
    }

    fn lost(passages: &[Passage]) -> usize {
        passages.iter().filter(|p| matches!(p, Passage::Lost(_))).count()
    }

    #[test]
    fn loses_about_what_it_is_told() {
        assert_eq!(lost(&arrivals(&Link::default(), 1000)), 0);
        let n = lost(&arrivals(&Link { loss: 0.1, ..Link::default() }, 10_000));
        assert!((800..1200).contains(&n), "{n}");
    }

    #[test]
    fn jitter_keeps_the_order() {
        let link = Link { jitter: Duration::from_micros(50), ..Link::default() };
        let times: Vec<_> = arrivals(&link, 1000)
            .into_iter()
            .map(|p| match p {
                Passage::Arrives(at, None) => at,
                other => panic!("{other:?}"),
            })
            .collect();
        assert!(times.is_sorted());
    }

    #[test]
    fn bursts_take_their_share_of_the_time() {
        let us = Duration::from_micros;
        let burst = Burst { good: us(300), bad: us(100), loss: 1.0 };
        let passages = arrivals(&Link { burst: Some(burst), ..Link::default() }, 40_000);
        let n = lost(&passages);
        assert!((8_000..12_000).contains(&n), "{n}");
        let runs = passages.windows(2).filter(|w| lost(&w[..1]) < lost(&w[1..])).count();
        assert!((60..150).contains(&runs), "{runs}");
    }

    #[test]
    fn a_full_queue_drops_or_blocks() {
        // 1000 bytes every 1 us against 1000 bytes every 2 us.
        let rate = Rate { bytes_per_sec: 500_000_000, queue: 4, full: Full::Drop };
        let n = lost(&arrivals(&Link { rate: Some(rate), ..Link::default() }, 1000));
        assert!((480..510).contains(&n), "{n}");
        let rate = Rate { full: Full::Block, ..rate };
        let passages = arrivals(&Link { rate: Some(rate), ..Link::default() }, 1000);
        assert_eq!(lost(&passages), 0);
        assert!(passages.iter().any(|p| matches!(p, Passage::Blocked(_))));
    }
}
