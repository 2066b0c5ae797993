//! Latency and bandwidth over the size of a message: the curves of the plots.

use std::fmt;

use serde::Serialize;

use super::contender::{
    Contender, UcxOver, Verb, copy, fabric, latency, qperf_bandwidth, qperf_latency, stream_of, ucx,
};
use super::place::{Mtu, Place};
use super::readings::{Column, Ucx};
use super::runner::{Rounds, Runner};
use super::turns::Turns;

/// The quantity on the vertical axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Quantity {
    Latency,
    Bandwidth,
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Latency => "latency",
            Self::Bandwidth => "bandwidth",
        })
    }
}

/// A plot to be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sweep {
    pub(super) place: Place,
    pub(super) quantity: Quantity,
}

/// A plot's curves.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Chart {
    pub(super) name: String,
    pub(super) place: String,
    /// Otherwise on one host.
    pub(super) between_hosts: bool,
    pub(super) quantity: Quantity,
    pub(super) unit: &'static str,
    pub(super) curves: Vec<Curve>,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct Curve {
    pub(super) name: String,
    /// The contender runs on the device.
    pub(super) ours: bool,
    /// Bytes and the median.
    pub(super) points: Vec<(u64, f64)>,
    /// Sizes without a figure, and why.
    pub(super) failures: Vec<(u64, String)>,
}

/// Every plot.
pub(super) const ALL: [Sweep; 4] = {
    const JUMBO: Place = Place::TwoHosts { mtu: Mtu::Jumbo };
    [
        Sweep { place: Place::SameHost, quantity: Quantity::Latency },
        Sweep { place: Place::SameHost, quantity: Quantity::Bandwidth },
        Sweep { place: JUMBO, quantity: Quantity::Latency },
        Sweep { place: JUMBO, quantity: Quantity::Bandwidth },
    ]
};

/// 2 B to 8 MiB, every fourth power: 2, 8, 32, ...
pub(super) fn sizes() -> impl Iterator<Item = u64> {
    (0..12).map(|n| 2 << (2 * n))
}

/// The number of messages that move `budget` bytes, within bounds.
fn count(size: u64, budget: u64, most: u64) -> u64 {
    (budget / size).clamp(100, most)
}

impl Sweep {
    /// The name by which it is chosen.
    pub(super) fn name(self) -> String {
        format!("plot, {}, {}", self.place, self.quantity)
    }

    /// Part of its file's name.
    pub(super) fn slug(self) -> String {
        let place = if self.place == Place::SameHost { "same-host" } else { "two-hosts" };
        format!("{place}-{}", self.quantity)
    }

    /// The contenders that can carry a message of `size` bytes; each curve by its contender's name.
    fn contenders(self, size: u64) -> Vec<Contender> {
        let over = if self.place == Place::SameHost { UcxOver::SharedMemory } else { UcxOver::Tcp };
        let mut all = match self.quantity {
            Quantity::Latency => self.latencies(over, size),
            Quantity::Bandwidth => self.bandwidths(over, size),
        };
        all.retain(|contender| size <= largest(contender));
        all
    }

    fn latencies(self, over: UcxOver, size: u64) -> Vec<Contender> {
        let slow = if self.place == Place::SameHost { 1 } else { 4 };
        let count = count(size, (256 << 20) / slow, 20_000 / slow);
        let ours =
            |name, verb| Contender { name, ..latency(verb, size, count, "", Column::Latency) };
        let mut all = vec![
            ours("anyverbs SEND", Verb::Send),
            ours("anyverbs WRITE", Verb::Write),
            ucx(over, "tag_lat", size, count, Ucx::Latency),
            fabric(if over == UcxOver::Tcp { "tcp" } else { "shm" }, size, count),
            qperf_latency("TCP (qperf)", "tcp_lat", size),
        ];
        if over == UcxOver::Tcp {
            all.push(qperf_latency("UDP (qperf)", "udp_lat", size));
        }
        all
    }

    fn bandwidths(self, over: UcxOver, size: u64) -> Vec<Contender> {
        let slow = if self.place == Place::SameHost { 1 } else { 2 };
        let count = count(size, (4 << 30) / slow, 400_000 / slow);
        let ours = |name, verb| Contender { name, ..stream_of(verb, size, count) };
        let mut all = vec![
            ours("anyverbs SEND", Verb::Send),
            ours("anyverbs WRITE", Verb::Write),
            ours("anyverbs READ", Verb::Read),
            ucx(over, "tag_bw", size, count, Ucx::Gbits),
            qperf_bandwidth(size),
        ];
        if over == UcxOver::SharedMemory {
            all.push(copy("write", "bandwidth", size));
        }
        all
    }

    /// Measures every curve, size by size, the contenders in turn.
    pub(super) fn measure(self, runner: &mut Runner, runs: usize) -> anyhow::Result<Chart> {
        let mut curves: Vec<Curve> = Vec::new();
        for size in sizes() {
            let contenders = self.contenders(size);
            let references: Vec<_> = contenders.iter().collect();
            let turns = runner.in_turn(self.place, &references, Rounds::Settled(runs))?;
            for (at, contender) in contenders.iter().enumerate() {
                add(&mut curves, contender, size, &turns, at);
            }
        }
        Ok(Chart {
            name: self.slug(),
            place: self.place.to_string(),
            between_hosts: self.place != Place::SameHost,
            quantity: self.quantity,
            unit: if self.quantity == Quantity::Latency { "us" } else { "Gb/s" },
            curves,
        })
    }
}

fn add(curves: &mut Vec<Curve>, contender: &Contender, size: u64, turns: &Turns, at: usize) {
    let found = curves.iter().position(|curve| curve.name == contender.name);
    let curve = found.unwrap_or_else(|| {
        curves.push(Curve {
            name: contender.name.to_owned(),
            ours: contender.device,
            points: Vec::new(),
            failures: Vec::new(),
        });
        curves.len() - 1
    });
    match turns.median(at) {
        Ok(value) => curves[curve].points.push((size, value)),
        Err(why) => curves[curve].failures.push((size, why.to_string())),
    }
}

/// The largest message that a peer has.
fn largest(contender: &Contender) -> u64 {
    match contender.name {
        // One datagram.
        "UDP (qperf)" => 32 << 10,
        _ => u64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn from_two_bytes_to_eight_mebibytes() {
        let sizes: Vec<_> = sizes().collect();
        assert_eq!(sizes.first(), Some(&2));
        assert_eq!(sizes.last(), Some(&(8 << 20)));
    }

    #[test]
    fn curves_have_names_of_their_own() {
        for sweep in ALL {
            for size in sizes() {
                let mut names: Vec<_> = sweep.contenders(size).iter().map(|c| c.name).collect();
                names.sort_unstable();
                names.dedup();
                assert_eq!(names.len(), sweep.contenders(size).len());
            }
        }
    }

    #[test]
    fn long_messages_are_fewer() {
        assert_eq!(count(2, 1 << 30, 1000), 1000);
        assert_eq!(count(8 << 20, 1 << 30, 1000), 128);
        assert_eq!(count(64 << 20, 1 << 30, 1000), 100);
    }
}
