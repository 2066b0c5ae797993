//! A run: the workload's messages, and what became of them.

use std::collections::VecDeque;

use anyverbs_proto::counters::Counter;
use anyverbs_proto::env::Side;
use serde::Serialize;

use crate::file::{Kind, Plan, Transport, Workload};
use crate::net::{FRAME_BYTES, Net};
use crate::nic::{DEPTH, Done, Hosts};
use crate::topology::mix;

/// Peers to which a host sends at a time in `all-to-all`, unless the file says otherwise.
const PARALLEL: u32 = 4;

/// The results of a run. Times are in microseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// The name of the setting.
    pub setting: String,
    /// Messages that were written whole.
    pub messages: usize,
    /// Connections that gave up.
    pub failed: usize,
    /// From the first post to the last completion.
    pub total_us: f64,
    /// The least time that the busiest link of a host needs for its bytes, with all headers.
    pub bound_us: f64,
    /// Flow completion times (from the post of a message to its completion): their mean.
    pub mean_us: f64,
    /// The time within which half of them were complete.
    pub median_us: f64,
    /// The time within which 99 % were.
    pub p99_us: f64,
    /// The longest.
    pub max_us: f64,
    /// Bytes of all messages over the total time, in Gbit/s.
    pub goodput_gbps: f64,
    /// Packets that found the queue of a switch full.
    pub drops: u64,
    /// Packets that links lost by chance.
    pub losses: u64,
    /// Packets that switches marked.
    pub marks: u64,
    /// Notifications of congestion.
    pub notifications: u64,
    /// Requests that were sent, those that were sent again among them.
    pub packets: u64,
    /// Requests that were sent again.
    pub retransmitted: u64,
    /// Most bytes in a queue of a switch.
    pub longest_queue_bytes: u64,
    /// The longest wait of a packet in a queue of a switch.
    pub longest_wait_us: f64,
    /// Events of the simulation.
    pub events: u64,
    /// All flow completion times, the shortest first.
    #[serde(skip)]
    pub times_us: Vec<f64>,
}

/// A connection of the workload.
#[derive(Debug)]
struct Connection {
    /// The queue pair of its sender. The receiver's has the next number.
    qp: u32,
    from: u32,
    /// Messages that are not posted yet, and how many of them may be.
    left: u32,
    allowed: u32,
    /// When the messages that are not complete were posted.
    posted: VecDeque<u64>,
    /// Whether receives tell the next host to go on.
    notifies: bool,
}

struct Run<'a> {
    plan: &'a Plan,
    hosts: Hosts,
    connections: Vec<Connection>,
    /// For `all-to-all`, the number of peers that each host has begun with.
    begun: Vec<u32>,
    times: Vec<u64>,
    failed: usize,
    /// Connections that are not done.
    open: usize,
    last: u64,
}

impl Plan {
    /// Runs the workload with these settings. The same seed gives the same outcome.
    #[must_use]
    pub fn run(&self, name: &str, transport: Transport) -> Outcome {
        let net = Net::new(self.topology.clone(), self.seed);
        let mut run = Run {
            plan: self,
            hosts: Hosts::new(net, transport),
            connections: Vec::new(),
            begun: vec![0; self.topology.hosts()],
            times: Vec::new(),
            failed: 0,
            open: 0,
            last: 0,
        };
        run.begin();
        let mut done = Vec::new();
        loop {
            run.hosts.take_done(&mut done);
            for done in done.drain(..) {
                run.complete(done);
            }
            if run.open == 0 || !run.hosts.step() {
                return run.outcome(name, transport);
            }
        }
    }

    /// The bytes that a host sends or receives, whichever is more, without headers.
    fn bytes_of(&self, host: u32) -> f64 {
        let Workload { kind, size, count, senders, .. } = self.workload;
        let (hosts, size) = (self.topology.hosts() as f64, size as f64 * f64::from(count));
        let senders = senders.map_or(hosts - 1.0, f64::from);
        match kind {
            Kind::Incast if host == 0 => size * senders,
            Kind::Incast if f64::from(host) > senders => 0.0,
            Kind::Incast => size,
            Kind::AllToAll => size * (hosts - 1.0),
            Kind::RingAllReduce => size * 2.0 * (hosts - 1.0) / hosts,
        }
    }

    /// The least time, in picoseconds, that the links of the hosts need for all bytes with their headers.
    fn bound(&self, message: u32, transport: Transport) -> f64 {
        // A base header and a frame for each packet, and once a message what names the place in memory.
        let packets = f64::from(message.div_ceil(transport.mtu.bytes()));
        let headers = packets * f64::from(FRAME_BYTES + 12) + 16.0;
        let with_headers = 1.0 + headers / f64::from(message);
        let of_host = |host| {
            let link = self.topology.ports[self.topology.host_port(host)].link;
            self.bytes_of(host) * with_headers * link.ps_per_byte()
        };
        (0..self.topology.hosts() as u32).map(of_host).fold(0.0, f64::max)
    }
}

impl Run<'_> {
    fn hosts(&self) -> u32 {
        self.begun.len() as u32
    }

    /// Bytes of a message.
    fn len(&self) -> u32 {
        match self.plan.workload.kind {
            Kind::RingAllReduce => self.plan.workload.size.div_ceil(self.hosts().into()) as u32,
            _ => self.plan.workload.size as u32,
        }
    }

    fn begin(&mut self) {
        let hosts = self.hosts();
        match self.plan.workload.kind {
            Kind::Incast => {
                for from in 1..=self.plan.workload.senders.unwrap_or(hosts - 1) {
                    self.open(from, 0, self.plan.workload.count);
                }
            }
            Kind::AllToAll => {
                for _ in 0..self.plan.workload.parallel.unwrap_or(PARALLEL).min(hosts - 1) {
                    (0..hosts).for_each(|from| self.open_next(from));
                }
            }
            Kind::RingAllReduce => {
                let steps = 2 * (hosts - 1) * self.plan.workload.count;
                (0..hosts).for_each(|from| self.open(from, (from + 1) % hosts, steps));
            }
        }
    }

    /// A host turns to the next of its peers: each has another one at a time.
    fn open_next(&mut self, from: u32) {
        let hosts = self.hosts();
        let begun = &mut self.begun[from as usize];
        if *begun < hosts - 1 {
            *begun += 1;
            let to = (from + *begun) % hosts;
            self.open(from, to, self.plan.workload.count);
        }
    }

    fn open(&mut self, from: u32, to: u32, left: u32) {
        let number = self.connections.len();
        self.open += 1;
        let flow = mix(self.plan.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number as u64) as u32;
        let notifies = self.plan.workload.kind == Kind::RingAllReduce;
        let qp = self.hosts.connect(from, to, flow, if notifies { DEPTH } else { 1 });
        debug_assert_eq!(qp as usize / 2, number);
        if notifies {
            (0..DEPTH).for_each(|_| self.hosts.receive(qp + 1));
        }
        let posted = VecDeque::new();
        self.connections.push(Connection { qp, from, left, allowed: 1, posted, notifies });
        self.post(number);
    }

    /// Posts what may be posted.
    fn post(&mut self, number: usize) {
        let len = self.len();
        let connection = &mut self.connections[number];
        while connection.left > 0
            && connection.allowed > 0
            && connection.posted.len() < DEPTH as usize
        {
            connection.left -= 1;
            connection.allowed -= 1;
            connection.posted.push_back(self.hosts.net.now);
            self.hosts.write(connection.qp, len, connection.notifies);
        }
    }

    /// A queue pair has completed a request.
    fn complete(&mut self, done: Done) {
        let Done { qp, side, succeeded } = done;
        let number = qp as usize / 2;
        let connection = &mut self.connections[number];
        if !succeeded {
            // Receives and further sends are flushed then.
            if side == Side::Send && !connection.posted.is_empty() {
                connection.posted.clear();
                self.failed += 1;
                self.end(number);
            }
            return;
        }
        if side == Side::Recv {
            self.hosts.receive(qp);
            // The host that has got a part passes it on.
            let next = (number + 1) % self.connections.len();
            self.connections[next].allowed += 1;
            return self.post(next);
        }
        let now = self.hosts.net.now;
        let Some(posted) = connection.posted.pop_front() else { return };
        self.times.push(now - posted);
        self.last = now;
        if !connection.notifies {
            connection.allowed += 1;
        }
        if connection.left > 0 {
            self.post(number);
        } else if connection.posted.is_empty() {
            self.end(number);
        }
    }

    /// A connection has done its work, or gave up.
    fn end(&mut self, number: usize) {
        let Connection { qp, from, .. } = self.connections[number];
        self.open -= 1;
        self.hosts.close(qp);
        if self.plan.workload.kind == Kind::AllToAll {
            self.open_next(from);
        }
    }

    fn outcome(mut self, name: &str, transport: Transport) -> Outcome {
        self.times.sort_unstable();
        let us = |ps: u64| ps as f64 / 1e6;
        let times_us: Vec<f64> = self.times.iter().map(|ps| us(*ps)).collect();
        let messages = times_us.len();
        let share = |part: f64| {
            let at = (part * messages as f64).ceil() as usize;
            times_us.get(at.saturating_sub(1)).copied().unwrap_or_default()
        };
        let total_us = us(self.last);
        let bytes = messages as f64 * f64::from(self.len());
        let net = &self.hosts.net;
        Outcome {
            setting: name.to_owned(),
            messages,
            failed: self.failed,
            total_us,
            bound_us: self.plan.bound(self.len(), transport) / 1e6,
            mean_us: times_us.iter().sum::<f64>() / (messages.max(1)) as f64,
            median_us: share(0.5),
            p99_us: share(0.99),
            max_us: share(1.0),
            goodput_gbps: bytes * 8.0 / 1000.0 / total_us.max(1e-6),
            drops: net.counts.drops,
            losses: net.counts.losses,
            marks: net.counts.marks,
            notifications: net.counters.read(Counter::CnpSent),
            packets: net.counts.requests,
            retransmitted: net.counters.read(Counter::Retransmitted),
            longest_queue_bytes: net.counts.longest_queue,
            longest_wait_us: us(net.counts.longest_wait),
            events: net.counts.events,
            times_us,
        }
    }
}
