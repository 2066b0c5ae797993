//! One direction of a link: its delay and its faults.

use std::collections::VecDeque;
use std::time::Duration;

use anyverbs_proto::time::Time;
use rand::Rng;
use rand::rngs::SmallRng;
use thiserror::Error;

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

/// A link that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{field} of a link is {value}, and it has to be {rule}")]
pub struct LinkError {
    /// The field of [`Link`].
    pub field: &'static str,
    /// Its value.
    pub value: String,
    /// The values that it can have.
    pub rule: &'static str,
}

impl Link {
    /// Checks its fields.
    ///
    /// # Errors
    /// [`LinkError`] names the first field that has an impossible value.
    pub fn check(&self) -> Result<(), LinkError> {
        let no = |field, value, rule| Err(LinkError { field, value, rule });
        let probabilities = [
            ("loss", self.loss),
            ("duplicate", self.duplicate),
            ("reorder", self.reorder),
            ("corrupt", self.corrupt),
            ("burst.loss", self.burst.map_or(0.0, |burst| burst.loss)),
        ];
        for (field, value) in probabilities {
            if !(0.0..=1.0).contains(&value) {
                return no(field, value.to_string(), "from 0 to 1");
            }
        }
        let mut times = vec![("delay", self.delay)];
        if let Some(burst) = self.burst {
            times.extend([("burst.good", burst.good), ("burst.bad", burst.bad)]);
        }
        for (field, value) in times {
            if value.is_zero() {
                return no(field, format!("{value:?}"), "more than zero");
            }
        }
        let Some(rate) = self.rate else { return Ok(()) };
        let sizes = [("rate.bytes_per_sec", rate.bytes_per_sec), ("rate.queue", rate.queue as u64)];
        match sizes.into_iter().find(|(_, value)| *value == 0) {
            Some((field, value)) => no(field, value.to_string(), "more than zero"),
            None => Ok(()),
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
    /// When `bad` was decided.
    decided: Time,
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
        // The Markov chain at this moment, by what it was at the packet before: any time costs one draw.
        let (good, bad) = (burst.good.as_secs_f64(), burst.bad.as_secs_f64());
        let share = bad / (good + bad);
        let passed = now.since(self.decided).as_secs_f64();
        let kept = (-passed * (1.0 / good + 1.0 / bad)).exp();
        let was = if self.bad { 1.0 } else { 0.0 };
        self.bad = rng.random_bool((share + (was - share) * kept).clamp(0.0, 1.0));
        self.decided = now;
        self.bad
    }
}

fn up_to(most: Duration, rng: &mut SmallRng) -> Duration {
    match u64::try_from(most.as_nanos()).unwrap_or(u64::MAX) {
        0 => Duration::ZERO,
        most => Duration::from_nanos(rng.random_range(0..=most)),
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
    fn bursts_cost_nothing_while_no_packet_comes() {
        let burst =
            Burst { good: Duration::from_nanos(1), bad: Duration::from_nanos(1), loss: 0.5 };
        let link = Link { burst: Some(burst), ..Link::default() };
        let mut rng = SmallRng::seed_from_u64(1);
        let mut state = LinkState::default();
        for hour in 1..=1000 {
            let now = Time::default() + Duration::from_secs(3600 * hour);
            state.pass(&link, now, 1000, &mut rng);
        }
    }

    #[test]
    fn an_impossible_link_is_refused_by_its_field() {
        let (fine, ns) = (Link::default(), Duration::from_nanos(1));
        let burst = Some(Burst { good: ns, bad: ns, loss: 1.0 });
        let rate = Some(Rate { bytes_per_sec: 1, queue: 1, full: Full::Drop });
        let all = Link { loss: 1.0, delay: ns, burst, rate, ..fine.clone() };
        assert_eq!(all.check(), Ok(()));
        let refused = |link: Link| link.check().unwrap_err().to_string();
        for bad in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            let burst = burst.map(|burst| Burst { loss: bad, ..burst });
            for (field, link) in [
                ("loss", Link { loss: bad, ..fine.clone() }),
                ("duplicate", Link { duplicate: bad, ..fine.clone() }),
                ("reorder", Link { reorder: bad, ..fine.clone() }),
                ("corrupt", Link { corrupt: bad, ..fine.clone() }),
                ("burst.loss", Link { burst, ..fine.clone() }),
            ] {
                let text = format!("{field} of a link is {bad}, and it has to be from 0 to 1");
                assert_eq!(refused(link), text);
            }
        }
        let (good, bad) = (Duration::ZERO, Duration::ZERO);
        for (field, link) in [
            ("delay", Link { delay: Duration::ZERO, ..fine.clone() }),
            (
                "burst.good",
                Link { burst: burst.map(|burst| Burst { good, ..burst }), ..fine.clone() },
            ),
            (
                "burst.bad",
                Link { burst: burst.map(|burst| Burst { bad, ..burst }), ..fine.clone() },
            ),
        ] {
            let text = format!("{field} of a link is 0ns, and it has to be more than zero");
            assert_eq!(refused(link), text);
        }
        let rate = |bytes_per_sec, queue| Some(Rate { bytes_per_sec, queue, full: Full::Block });
        for (field, rate) in [("bytes_per_sec", rate(0, 1)), ("queue", rate(1, 0))] {
            let text = format!("rate.{field} of a link is 0, and it has to be more than zero");
            assert_eq!(refused(Link { rate, ..fine.clone() }), text);
        }
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
