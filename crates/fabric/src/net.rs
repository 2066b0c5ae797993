//! The network at work: virtual time, packets on links, and the queues of switches.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use anyverbs_proto::counters::Counters;
use anyverbs_proto::time::Time;
use anyverbs_proto::wire::packet::Headers;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::topology::Topology;

/// Picoseconds of a nanosecond. At 100 Gbit/s a byte takes 80 ps.
pub(crate) const NS: u64 = 1000;

/// Bytes of a packet on the wire besides base header, extension headers and payload: preamble and gap 20, Ethernet 18,
/// IPv4 20, UDP 8, ICRC 4.
pub(crate) const FRAME_BYTES: u32 = 70;

/// Something that happens at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Event {
    /// A packet has come to a node as a whole.
    Arrival { packet: u32, node: u32 },
    /// The port of a host is free for the next packet.
    PortFree { host: u32 },
    /// The rate of a queue pair lets its next packet leave.
    RateAllows { qp: u32 },
    /// A timer of a queue pair may be due.
    Timer { qp: u32 },
}

/// A packet on its way. Payloads have a length and no bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OnWire {
    pub(crate) headers: Headers,
    pub(crate) payload: u32,
    pub(crate) to: u32,
    pub(crate) flow: u32,
    /// Traffic class: its low two bits say whether a switch may mark the packet, and whether one has.
    pub(crate) traffic_class: u8,
}

impl OnWire {
    fn bytes(&self) -> u32 {
        self.headers.len() as u32 + self.payload.next_multiple_of(4) + FRAME_BYTES
    }
}

/// Counters of the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) events: u64,
    /// Requests that left hosts.
    pub(crate) requests: u64,
    /// Packets that found a queue full.
    pub(crate) drops: u64,
    /// Packets that links lost by chance.
    pub(crate) losses: u64,
    pub(crate) marks: u64,
    /// Most bytes in a queue of a switch.
    pub(crate) longest_queue: u64,
    /// The longest wait of a packet in one.
    pub(crate) longest_wait: u64,
}

/// One direction of a link.
#[derive(Debug, Default)]
struct PortState {
    /// When all that waits for the link will have left.
    free_at: u64,
}

/// A host's network interface: queue pairs take turns, packet by packet.
#[derive(Debug, Default)]
pub(crate) struct Interface {
    /// Queue pairs with a packet that may leave.
    ready: VecDeque<u32>,
    is_waiting_for_port: bool,
}

#[derive(Debug)]
pub(crate) struct Net {
    pub(crate) topology: Topology,
    /// Picoseconds.
    pub(crate) now: u64,
    pub(crate) counts: Counts,
    pub(crate) counters: Counters,
    ports: Vec<PortState>,
    interfaces: Vec<Interface>,
    queue: BinaryHeap<Reverse<(u64, u64, Event)>>,
    /// Timers apart: most of them are stopped long before they end, and would make the queue long.
    timers: BinaryHeap<Reverse<(u64, u64, Event)>>,
    scheduled: u64,
    packets: Vec<OnWire>,
    unused: Vec<u32>,
    rng: SmallRng,
}

impl Net {
    pub(crate) fn new(topology: Topology, seed: u64) -> Self {
        Self {
            now: 0,
            counts: Counts::default(),
            counters: Counters::default(),
            ports: topology.ports.iter().map(|_| PortState::default()).collect(),
            interfaces: (0..topology.hosts()).map(|_| Interface::default()).collect(),
            queue: BinaryHeap::new(),
            timers: BinaryHeap::new(),
            scheduled: 0,
            packets: Vec::new(),
            unused: Vec::new(),
            rng: SmallRng::seed_from_u64(seed),
            topology,
        }
    }

    pub(crate) fn time(&self) -> Time {
        Time::from_nanos(self.now / NS)
    }

    /// Events of one moment happen in the order in which they were scheduled.
    pub(crate) fn schedule(&mut self, at: u64, event: Event) {
        self.scheduled += 1;
        let queue =
            if let Event::Timer { .. } = event { &mut self.timers } else { &mut self.queue };
        queue.push(Reverse((at.max(self.now), self.scheduled, event)));
    }

    /// Goes on to the next event.
    pub(crate) fn next(&mut self) -> Option<Event> {
        let is_timer = match (self.queue.peek(), self.timers.peek()) {
            (Some(Reverse(event)), Some(Reverse(timer))) => timer < event,
            (event, _) => event.is_none(),
        };
        let queue = if is_timer { &mut self.timers } else { &mut self.queue };
        let Reverse((at, _, event)) = queue.pop()?;
        self.now = at;
        self.counts.events += 1;
        Some(event)
    }

    /// A packet leaves its host. Its bytes on the wire are returned.
    pub(crate) fn leave(&mut self, from: u32, packet: OnWire) -> u32 {
        self.counts.requests += u64::from(packet.headers.bth.opcode.is_request());
        let number = self.unused.pop().unwrap_or_else(|| {
            self.packets.push(packet);
            self.packets.len() as u32 - 1
        });
        self.packets[number as usize] = packet;
        self.occupy(self.topology.host_port(from), number);
        packet.bytes()
    }

    /// A switch sends a packet on.
    pub(crate) fn forward(&mut self, switch: u32, number: u32) {
        let packet = &mut self.packets[number as usize];
        let port = self.topology.next_port(switch, packet.to, packet.flow);
        let link = &self.topology.ports[port].link;
        let backlog = self.ports[port].free_at.saturating_sub(self.now);
        let queued = (backlog as f64 / link.ps_per_byte()) as u64;
        let with_this = queued + u64::from(packet.bytes());
        if with_this > link.queue_bytes {
            self.counts.drops += 1;
            return self.unused.push(number);
        }
        self.counts.longest_queue = self.counts.longest_queue.max(with_this);
        self.counts.longest_wait = self.counts.longest_wait.max(backlog);
        let can_be_marked = packet.traffic_class & 3 != 0;
        if can_be_marked && queued >= link.kmin_bytes {
            let range = (link.kmax_bytes - link.kmin_bytes) as f64;
            let share = link.pmax * (queued - link.kmin_bytes) as f64 / range;
            if queued >= link.kmax_bytes || self.rng.random_bool(share) {
                packet.traffic_class |= 3;
                self.counts.marks += 1;
            }
        }
        self.occupy(port, number);
    }

    /// A packet waits for a port, and crosses its link.
    fn occupy(&mut self, port: usize, number: u32) {
        let bytes = self.packets[number as usize].bytes();
        let (to, link) = (self.topology.ports[port].to, self.topology.ports[port].link);
        let state = &mut self.ports[port];
        let crossing = (f64::from(bytes) * link.ps_per_byte()) as u64;
        state.free_at = state.free_at.max(self.now) + crossing;
        let at = state.free_at + (link.delay_us * 1e6) as u64;
        if link.loss > 0.0 && self.rng.random_bool(link.loss) {
            self.counts.losses += 1;
            return self.unused.push(number);
        }
        self.schedule(at, Event::Arrival { packet: number, node: to });
    }

    /// A packet is where it was sent to.
    pub(crate) fn take(&mut self, number: u32) -> OnWire {
        self.unused.push(number);
        self.packets[number as usize]
    }

    /// Whether a host could send a packet at this moment, with no queue pair before it.
    pub(crate) fn is_idle(&self, host: u32) -> bool {
        self.interfaces[host as usize].ready.is_empty()
            && self.ports[self.topology.host_port(host)].free_at <= self.now
    }

    /// A queue pair waits for its turn at the port of its host.
    pub(crate) fn wait_for_turn(&mut self, host: u32, qp: u32) {
        self.interfaces[host as usize].ready.push_back(qp);
        self.wait_for_port(host);
    }

    fn wait_for_port(&mut self, host: u32) {
        let interface = &mut self.interfaces[host as usize];
        if !interface.is_waiting_for_port && !interface.ready.is_empty() {
            interface.is_waiting_for_port = true;
            let at = self.ports[self.topology.host_port(host)].free_at;
            self.schedule(at, Event::PortFree { host });
        }
    }

    /// The queue pair whose turn it is, if the port of its host is free.
    pub(crate) fn next_turn(&mut self, host: u32) -> Option<u32> {
        let is_free = self.ports[self.topology.host_port(host)].free_at <= self.now;
        let next = is_free.then(|| self.interfaces[host as usize].ready.pop_front()).flatten();
        if next.is_none() {
            self.interfaces[host as usize].is_waiting_for_port = false;
            self.wait_for_port(host);
        }
        next
    }
}
