//! The table: each measurement, its peer, and the ratio that it should have.

use std::fmt;

use super::contender::{
    Contender, GBITS, MICROSECONDS, PORT, RATE, UcxOver, Verb, bare_ring, checked, cmtime, copy,
    latency, rstream, stream, tcp, ucx, udp_latency, udp_stream, write_to_shared,
};
use super::place::{Mtu, Place};
use super::readings::{Column, Reading, Ucx};

/// A line of the table, or several where there is more than one peer.
pub(super) struct Row {
    /// Without its place.
    pub(super) what: String,
    pub(super) place: Place,
    pub(super) unit: &'static str,
    pub(super) ours: Contender,
    pub(super) against: Vec<Against>,
    /// One run is enough, in any state of the machine, since it counts bytes or takes long.
    pub(super) once: bool,
}

/// A target.
pub(super) struct Against {
    /// Without one the target is about the figure itself.
    pub(super) peer: Option<Contender>,
    pub(super) target: Target,
}

/// The ratio of ours to theirs that is wanted, or the figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Target {
    AtLeast(f64),
    AtMost(f64),
    /// No target: for comparison.
    Open,
}

impl Target {
    pub(super) fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtLeast(x) => value >= x,
            Self::AtMost(x) => value <= x,
            Self::Open => true,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtLeast(x) => write!(f, ">= {x}"),
            Self::AtMost(x) => write!(f, "<= {x}"),
            Self::Open => f.write_str("-"),
        }
    }
}

impl Row {
    fn new(place: Place, what: impl Into<String>, unit: &'static str, ours: Contender) -> Self {
        Row { what: what.into(), place, unit, ours, against: Vec::new(), once: false }
    }

    fn beside(mut self, peer: Contender, target: Target) -> Self {
        self.against.push(Against { peer: Some(peer), target });
        self
    }

    fn target(mut self, target: Target) -> Self {
        self.against.push(Against { peer: None, target });
        self
    }

    fn once(mut self) -> Self {
        self.once = true;
        self
    }

    /// The name by which it is chosen.
    pub(super) fn name(&self) -> String {
        format!("{}, {}", self.place, self.what)
    }
}

/// Every row; `seconds` is how long a bandwidth is measured.
pub(super) fn all(seconds: u32) -> Vec<Row> {
    let mut rows = same_host(seconds);
    rows.extend(two_hosts_bandwidth(seconds));
    rows.extend(two_hosts_latency(seconds));
    rows.push(two_hosts_ethernet(seconds));
    rows.extend(loss(seconds));
    rows.extend(process(seconds));
    rows
}

use Target::{AtLeast, AtMost, Open};

/// Small messages on one host are quick.
const MANY: u64 = 100_000;
const SOME: u64 = 20_000;
const KIB_64: u64 = 64 << 10;
const MIB: u64 = 1 << 20;

fn same_host(seconds: u32) -> Vec<Row> {
    let row = |what: &str, unit, ours| Row::new(Place::SameHost, what, unit, ours);
    let shm = UcxOver::SharedMemory;
    let mut rows = vec![
        row("SEND 2 B latency", MICROSECONDS, latency(Verb::Send, 2, MANY, "", Column::Latency))
            .beside(ucx(shm, "tag_lat", 2, MANY, Ucx::Latency), AtMost(1.4)),
        row("WRITE 2 B latency", MICROSECONDS, latency(Verb::Write, 2, MANY, "", Column::Latency))
            .beside(copy("write", "latency", 2), AtMost(1.2)),
        row("READ 2 B latency", MICROSECONDS, latency(Verb::Read, 2, MANY, "", Column::Latency))
            .beside(copy("read", "latency", 2), AtMost(1.15)),
    ];
    for (size, text) in [(KIB_64, "64 KiB"), (MIB, "1 MiB")] {
        for (verb, name, direction) in
            [(Verb::Write, "WRITE", "write"), (Verb::Read, "READ", "read")]
        {
            let ours = stream(verb, seconds, &format!("-s {size}"), Column::Gbits);
            rows.push(
                row(&format!("{name} {text}"), GBITS, ours)
                    .beside(copy(direction, "bandwidth", size), AtLeast(0.95))
                    .beside(tcp(seconds, ""), AtLeast(3.5)),
            );
        }
    }
    let send = stream(Verb::Send, seconds, "-s 65536", Column::Gbits);
    let batches = stream(Verb::Send, seconds, "-s 8 -l 16", Column::Rate);
    rows.extend([
        row("SEND 64 KiB", GBITS, send)
            .beside(ucx(shm, "tag_bw", KIB_64, 100_000, Ucx::Gbits), AtLeast(1.0))
            .beside(copy("write", "bandwidth", KIB_64), Open)
            .beside(bare_ring(KIB_64), Open),
        row("SEND 8 B rate, batches of 16", RATE, batches)
            .beside(ucx(shm, "tag_bw", 8, 5_000_000, Ucx::Rate), AtLeast(1.3)),
        row("WRITE 64 KiB into shared memory", GBITS, write_to_shared(seconds, KIB_64))
            .beside(ucx(shm, "ucp_put_bw", KIB_64, 100_000, Ucx::Gbits), AtLeast(0.9)),
        many_queue_pairs(Place::SameHost, seconds),
    ]);
    rows.extend(unreliable(seconds));
    rows.extend(several_devices(seconds));
    rows
}

/// UC and UD through shared memory, beside the same by UDP over the loopback interface. The figures count messages that
/// arrive.
fn unreliable(seconds: u32) -> Vec<Row> {
    let ours = |options: &str, column| stream(Verb::Send, seconds, options, column).received();
    let by_udp = |options: &str, column| Contender {
        name: "our UDP",
        ..ours(options, column).with_environment(&[("ANYVERBS_SHM", "0")])
    };
    let row = |what: &str, unit, options: &str, column| {
        Row::new(Place::SameHost, what, unit, ours(options, column))
            .beside(by_udp(options, column), AtLeast(1.0))
    };
    vec![
        row("UC SEND 64 KiB", GBITS, "-c UC -s 65536", Column::Gbits)
            .beside(udp_stream(seconds, 4112), Open),
        row("UD SEND 4 KiB", GBITS, "-c UD -s 4096", Column::Gbits)
            .beside(udp_stream(seconds, 4112), Open),
        row("UC SEND 8 B rate, batches of 16", RATE, "-c UC -s 8 -l 16", Column::Rate),
        row("UD SEND 8 B rate, batches of 16", RATE, "-c UD -s 8 -l 16", Column::Rate),
        // perftest has IPv6 groups only: ::1.
        Row::new(
            Place::SameHost,
            "multicast SEND 4 KiB",
            GBITS,
            ours("-c UD -g -x 1 -s 4096", Column::Gbits),
        )
        .beside(udp_stream(seconds, 4112), Open),
    ]
}

const EIGHT_DEVICES: &[(&str, &str)] = &[("ANYVERBS_DEVICES", "8")];

/// One of eight devices of a process, beside the only one.
fn several_devices(seconds: u32) -> Vec<Row> {
    let row = |what, unit, ours: Contender, target| {
        let only = Contender { name: "one device", ..ours.clone() };
        let ours = ours.with_environment(EIGHT_DEVICES);
        Row::new(Place::SameHost, what, unit, ours).beside(only, target)
    };
    let send = latency(Verb::Send, 2, MANY, "", Column::Latency);
    let write = stream(Verb::Write, seconds, "-s 65536", Column::Gbits);
    vec![
        row("SEND 2 B latency, 8 devices", MICROSECONDS, send, AtMost(1.05)),
        row("WRITE 64 KiB, 8 devices", GBITS, write, AtLeast(0.95)),
    ]
}

const JUMBO: Place = Place::TwoHosts { mtu: Mtu::Jumbo };

fn two_hosts_bandwidth(seconds: u32) -> Vec<Row> {
    let write = |options: &str| stream(Verb::Write, seconds, options, Column::Gbits);
    let named = |contender: Contender| Contender { name: "our WRITE", ..contender };
    let row = |what, ours| Row::new(JUMBO, what, GBITS, ours);
    vec![
        row("WRITE 64 KiB", write("-s 65536"))
            .beside(tcp(seconds, ""), AtLeast(1.3))
            .beside(udp_stream(seconds, 4112), AtLeast(0.75)),
        row("WRITE 1 MiB", write("-s 1048576")).beside(tcp(seconds, ""), AtLeast(1.3)),
        row("SEND 64 KiB", stream(Verb::Send, seconds, "-s 65536", Column::Gbits))
            .beside(named(write("-s 65536")), AtLeast(1.0)),
        row("READ 64 KiB", stream(Verb::Read, seconds, "-s 65536", Column::Gbits))
            .beside(named(write("-s 65536")), AtLeast(0.95)),
    ]
}

fn two_hosts_latency(seconds: u32) -> Vec<Row> {
    let spinning = || udp_latency("bare UDP, spins", "");
    let blocking = || udp_latency("bare UDP, blocks", "--block --rounds 10000");
    let row = |what, unit, ours| Row::new(JUMBO, what, unit, ours);
    let write = |column| latency(Verb::Write, 2, SOME, "", column);
    vec![
        row("SEND 2 B latency", MICROSECONDS, latency(Verb::Send, 2, SOME, "", Column::Latency))
            .beside(spinning(), AtMost(1.5)),
        row("WRITE 2 B latency", MICROSECONDS, write(Column::Latency))
            .beside(spinning(), AtMost(2.5)),
        row("WRITE 2 B latency, 99.9%", MICROSECONDS, write(Column::Slowest))
            .target(AtMost(50.0))
            .beside(udp_latency("bare UDP, spins", "--percentile 99.9"), Open),
        row(
            "SEND 2 B latency, events",
            MICROSECONDS,
            latency(Verb::Send, 2, 10_000, "-e", Column::Latency),
        )
        // The first for a library that blocks at once, the second for one that looks at its queue a little longer.
        .beside(blocking(), AtMost(1.25))
        .beside(blocking(), AtMost(0.4)),
        row("WRITE 8 B rate", RATE, stream(Verb::Write, seconds, "-s 8", Column::Rate))
            .target(AtLeast(2.5)),
        many_queue_pairs(JUMBO, seconds),
    ]
}

fn two_hosts_ethernet(seconds: u32) -> Row {
    let place = Place::TwoHosts { mtu: Mtu::Ethernet };
    let write = stream(Verb::Write, seconds, "-s 65536", Column::Gbits);
    Row::new(place, "WRITE 64 KiB", GBITS, write)
        .beside(tcp(seconds, ""), AtLeast(1.3))
        .beside(udp_stream(seconds, 1040), AtLeast(0.75))
}

/// Beside a few: the time of a message must not grow with the number of queue pairs.
fn many_queue_pairs(place: Place, seconds: u32) -> Row {
    let rate =
        |count: u32| stream(Verb::Write, seconds, &format!("-s 8 -t 16 -q {count}"), Column::Rate);
    let few = Contender { name: "10 queue pairs", ..rate(10) };
    Row::new(place, "WRITE 8 B rate, 1000 QPs", RATE, rate(1000)).beside(few, AtLeast(0.95))
}

fn loss(seconds: u32) -> Vec<Row> {
    let mut rows = Vec::new();
    for (mtu, datagram) in [(Mtu::Jumbo, 4112), (Mtu::Ethernet, 1040)] {
        for offloads in [true, false] {
            let place = Place::Loss { mtu, offloads };
            let write = stream(Verb::Write, seconds, "-s 65536", Column::Gbits);
            rows.push(
                Row::new(place, "WRITE 64 KiB", GBITS, write)
                    .beside(tcp(seconds, ""), AtLeast(1.3))
                    .beside(udp_stream(seconds, datagram), Open),
            );
        }
    }
    // Received data is compared with the data sent. A difference is a failure.
    let place = Place::Loss { mtu: Mtu::Ethernet, offloads: true };
    rows.push(Row::new(place, "SEND 64 KiB, data checked", GBITS, checked()).target(Open));
    rows
}

/// The cost of the device to a process, and its sockets and connections.
fn process(seconds: u32) -> Vec<Row> {
    let own = |program: &str, figure| {
        let client = format!("PROGRAMS/{program}");
        Contender::alone("anyverbs", client, Reading::Named(figure)).on_device()
    };
    let row = |what, unit, ours| Row::new(Place::Loopback, what, unit, ours);
    let kib = 1.0 / 1024.0;
    let thousands = |figure| {
        // Both sides are more queue pairs than the device has by itself.
        own(&format!("connections ADDRESS {PORT} 10000"), figure)
            .with_environment(&[("ANYVERBS_MAX_QP", "32768")])
    };
    vec![
        row("CPU of an idle connected process", "%", own("footprint idle", "idle_cpu_percent"))
            .target(AtMost(0.1))
            .once(),
        row(
            "CPU of a process with 8 devices and 512 idle queue pairs",
            "%",
            own("footprint rails", "rails_cpu_percent").with_environment(EIGHT_DEVICES),
        )
        .target(AtMost(0.1))
        .once(),
        row("memory of the idle engine", "MiB", own("footprint memory", "engine_kib").scaled(kib))
            .target(AtMost(8.0))
            .once(),
        row("memory of a connected RC QP", "KiB", own("footprint memory", "qp_bytes").scaled(kib))
            .target(AtMost(16.0))
            .once(),
        row("10000 connections of one process", "/s", thousands("per_second"))
            .target(AtLeast(2000.0))
            .once(),
        row("memory of a side of a connection", "KiB", thousands("side_bytes").scaled(kib))
            .target(AtMost(24.0))
            .once(),
        row("cmtime, 1000 connections", "/s", cmtime()).target(AtLeast(2000.0)),
        row("rstream 1 MiB, both spin", GBITS, rstream("anyverbs", "").on_device())
            .beside(rstream("rstream TCP", "-T s"), AtLeast(1.5)),
        row("rstream 1 MiB, both block", GBITS, rstream("anyverbs", "-T b").on_device())
            .beside(rstream("rstream TCP", "-T b -T s"), AtLeast(1.5))
            .beside(tcp(seconds, ""), Open),
        row("iperf3 over rsockets", GBITS, tcp(seconds, "").on_rsockets("anyverbs"))
            .beside(tcp(seconds, ""), AtLeast(1.5)),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_row_is_known_by_its_name() {
        let rows = all(1);
        let names: BTreeSet<_> = rows.iter().map(Row::name).collect();
        assert_eq!(names.len(), rows.len());
    }

    #[test]
    fn every_row_has_a_target_or_a_peer() {
        assert!(all(1).iter().all(|row| !row.against.is_empty()));
    }

    #[test]
    fn targets() {
        assert!(Target::AtLeast(0.95).is_met(0.95));
        assert!(!Target::AtLeast(0.95).is_met(0.94));
        assert!(Target::AtMost(1.4).is_met(1.4));
        assert!(!Target::AtMost(1.4).is_met(1.5));
    }
}
