//! The network between the devices.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use anyverbs_proto::direct::Place;
use anyverbs_proto::qp::{Arrival, ShortRequest};
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Gid, Psn, Qpn};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::carried_ack;
use anyverbs_proto::wire::opcode::{Opcode, Operation, Service};
use anyverbs_proto::wire::packet::{Headers, Packet};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::DeviceId;
use crate::link::{Link, LinkState, Passage};
use crate::trace::{Record, Trace};

/// A packet that a rule looks at, before the link does.
#[derive(Clone, Copy, Debug)]
pub struct Passing<'a> {
    /// Sender.
    pub from: DeviceId,
    /// Receiver.
    pub to: DeviceId,
    /// Headers.
    pub headers: &'a Headers,
    /// Payload.
    pub payload: &'a [u8],
}

impl Passing<'_> {
    /// The operation of the packet.
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.headers.bth.opcode.operation
    }
}

/// The decision of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Left to the link.
    Pass,
    /// Arrives with the mark of a congested network.
    Mark,
    /// Lost.
    Drop,
    /// Arrives this much later; others pass it.
    Delay(Duration),
    /// Arrives, and once more this much later.
    Again(Duration),
    /// These bytes arrive in its place.
    Replace(Vec<u8>),
}

type Rule = Box<dyn FnMut(&Passing<'_>) -> Fate>;

struct InFlight {
    at: Time,
    /// Ties are broken by the order of sending.
    number: u64,
    to: DeviceId,
    arrival: Arrival,
    bytes: Vec<u8>,
}

impl PartialEq for InFlight {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for InFlight {}
impl PartialOrd for InFlight {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for InFlight {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// A packet that has arrived.
pub(crate) struct Delivery {
    pub(crate) to: DeviceId,
    pub(crate) arrival: Arrival,
    pub(crate) bytes: Vec<u8>,
    pub(crate) beside: Beside,
}

/// The things that a link carries beside a packet's own bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Beside {
    /// A piggybacked ACK.
    pub(crate) acks: Option<Psn>,
    /// Place and length of a payload that is to be fetched.
    pub(crate) elsewhere: Option<(Place, u32)>,
}

/// Links, and the packets on them.
pub struct Net {
    rng: SmallRng,
    /// The link between devices without one of their own.
    pub default_link: Link,
    links: BTreeMap<(DeviceId, DeviceId), Link>,
    states: BTreeMap<(DeviceId, DeviceId), LinkState>,
    rules: Vec<Rule>,
    queue: BinaryHeap<Reverse<InFlight>>,
    sent: u64,
    /// Everything that was sent.
    pub trace: Trace,
    dead: Vec<DeviceId>,
    /// A packet may stand for several of the path MTU.
    pub(crate) segments: bool,
    /// The numbers of the packets that the last request has become.
    last: Option<RangeInclusive<u64>>,
    /// By the number of the packet.
    beside: BTreeMap<u64, Beside>,
}

impl fmt::Debug for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Net").field("in_flight", &self.queue.len()).finish_non_exhaustive()
    }
}

impl Net {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            rng: SmallRng::seed_from_u64(seed),
            default_link: Link::default(),
            links: BTreeMap::new(),
            states: BTreeMap::new(),
            rules: Vec::new(),
            queue: BinaryHeap::new(),
            sent: 0,
            trace: Trace::default(),
            dead: Vec::new(),
            segments: false,
            last: None,
            beside: BTreeMap::new(),
        }
    }

    /// Sets one direction of a link.
    pub fn set_link(&mut self, from: DeviceId, to: DeviceId, link: Link) {
        self.links.insert((from, to), link);
    }

    /// Adds a rule, which sees every packet after the earlier rules let it pass.
    pub fn rule(&mut self, rule: impl FnMut(&Passing<'_>) -> Fate + 'static) {
        self.rules.push(Box::new(rule));
    }

    /// The first packet that `picks` picks has this fate.
    pub fn once(&mut self, mut picks: impl FnMut(&Passing<'_>) -> bool + 'static, fate: Fate) {
        let mut fate = Some(fate);
        self.rule(move |p| match fate.take_if(|_| picks(p)) {
            Some(fate) => fate,
            None => Fate::Pass,
        });
    }

    /// Removes all rules.
    pub fn clear_rules(&mut self) {
        self.rules.clear();
    }

    /// Everything to and from this device is lost from now on, also packets on the way.
    pub fn kill(&mut self, device: DeviceId) {
        if !self.dead.contains(&device) {
            self.dead.push(device);
        }
    }

    /// Packets on the way.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.queue.len()
    }

    /// Sends; the bytes from BTH to pad. An error is the time until which the sender has to wait.
    pub(crate) fn send(
        &mut self,
        now: Time,
        from: DeviceId,
        to: Option<DeviceId>,
        arrival: Arrival,
        bytes: Vec<u8>,
    ) -> Result<(), Time> {
        let packet = Packet::parse(carried_ack::split(&bytes).0);
        let packet = packet.expect("devices send well-formed packets");
        let mut record = Record {
            at: now,
            from,
            to,
            headers: packet.headers,
            payload_len: packet.payload.len(),
            fate: "",
        };
        let Some(to) = to.filter(|to| !self.dead.contains(to) && !self.dead.contains(&from)) else {
            record.fate = "no such device";
            self.trace.push(record);
            return Ok(());
        };
        let link = self.links.get(&(from, to)).unwrap_or(&self.default_link);
        let passing = Passing { from, to, headers: &packet.headers, payload: packet.payload };
        let fate = self
            .rules
            .iter_mut()
            .map(|rule| rule(&passing))
            .find(|fate| *fate != Fate::Pass)
            .unwrap_or(Fate::Pass);
        let mut arrivals = [None, None];
        let mut arrival = arrival;
        let mut bytes = bytes;
        match fate {
            Fate::Pass => {
                assert!(link.delay > Duration::ZERO, "a link takes time");
                let state = self.states.entry((from, to)).or_default();
                match state.pass(link, now, bytes.len(), &mut self.rng) {
                    Passage::Arrives(first, second) => {
                        if second.is_some() {
                            record.fate = "twice";
                        }
                        arrivals = [Some(first), second];
                    }
                    Passage::Damaged(at) => {
                        mutate(&mut bytes, &mut self.rng);
                        record.fate = "mutated";
                        arrivals = [Some(at), None];
                    }
                    Passage::Lost(why) => record.fate = why,
                    Passage::Blocked(until) => return Err(until),
                }
            }
            Fate::Mark => {
                record.fate = "marked";
                arrival.traffic_class |= 3;
                arrivals[0] = Some(now + link.delay);
            }
            Fate::Drop => record.fate = "dropped",
            Fate::Delay(by) => {
                record.fate = "delayed";
                arrivals[0] = Some(now + link.delay + by);
            }
            Fate::Again(by) => {
                record.fate = "twice";
                arrivals = [Some(now + link.delay), Some(now + link.delay + by)];
            }
            Fate::Replace(with) => {
                record.fate = "replaced";
                bytes = with;
                arrivals[0] = Some(now + link.delay);
            }
        }
        let is_request = record.headers.bth.opcode.is_request();
        self.trace.push(record);
        let first = self.sent + 1;
        for at in arrivals.into_iter().flatten() {
            self.enqueue(at, to, arrival, bytes.clone());
        }
        self.last = is_request.then_some(first..=self.sent);
        Ok(())
    }

    /// Whether everything to and from this device is lost.
    pub(crate) fn is_dead(&self, device: DeviceId) -> bool {
        self.dead.contains(&device)
    }

    /// The link from a device to another.
    pub(crate) fn link(&self, from: DeviceId, to: DeviceId) -> &Link {
        self.links.get(&(from, to)).unwrap_or(&self.default_link)
    }

    /// Shows a SEND in the trace that took a lane.
    pub(crate) fn note_by_lane(
        &mut self,
        at: Time,
        (from, to): (DeviceId, Option<DeviceId>),
        (qpn, send): (Qpn, &ShortRequest),
        payload_len: usize,
    ) {
        let opcode = Opcode::new(Service::Rc, Operation::SendOnly);
        let headers = Headers::new(Bth::new(opcode, qpn, send.psn));
        self.trace.push(Record { at, from, to, headers, payload_len, fate: "by a lane" });
    }

    /// The last request carries an ACK, which is lost or doubled with it.
    pub(crate) fn carry(&mut self, beside: Beside) {
        self.beside.extend(self.last.take().into_iter().flatten().map(|number| (number, beside)));
    }

    pub(crate) fn enqueue(&mut self, at: Time, to: DeviceId, arrival: Arrival, bytes: Vec<u8>) {
        self.sent += 1;
        self.queue.push(Reverse(InFlight { at, number: self.sent, to, arrival, bytes }));
    }

    /// When the next packet arrives.
    pub(crate) fn next(&self) -> Option<Time> {
        self.queue.peek().map(|Reverse(p)| p.at)
    }

    /// A packet that has arrived by now.
    pub(crate) fn deliver(&mut self, now: Time) -> Option<Delivery> {
        loop {
            let due = self.next()? <= now;
            let Reverse(p) = due.then(|| self.queue.pop()).flatten()?;
            if !self.dead.contains(&p.to) {
                let beside = self.beside.remove(&p.number).unwrap_or_default();
                return Some(Delivery { to: p.to, arrival: p.arrival, bytes: p.bytes, beside });
            }
        }
    }
}

/// The bytes of a packet from BTH to pad.
#[must_use]
pub fn emit(headers: Headers, payload: &[u8]) -> Vec<u8> {
    let packet = Packet::new(headers, payload);
    let mut bytes = vec![0; packet.len()];
    packet.emit(&mut bytes);
    bytes
}

/// The address of a device as an arrival's source, ours as its destination.
pub(crate) fn arrival(source: Gid, destination: Gid) -> Arrival {
    Arrival {
        source,
        destination,
        traffic_class: 0,
        hop_limit: 64,
        flow_label: 0,
        interface: 0,
        port: 0,
    }
}

/// Damages a packet the way that a malicious peer would: mostly in the headers, and in its length.
fn mutate(bytes: &mut Vec<u8>, rng: &mut SmallRng) {
    for _ in 0..rng.random_range(1..=3) {
        match rng.random_range(0..10) {
            0 => {
                let len = rng.random_range(0..=bytes.len() / 4) * 4;
                bytes.truncate(len);
            }
            1 => bytes.extend_from_slice(&[0x5a; 64][..4 * rng.random_range(1..=16)]),
            2 if !bytes.is_empty() => bytes[0] = rng.random(),
            3 if bytes.len() >= 12 => {
                // A PSN nearby.
                let by: u8 = rng.random_range(0..8);
                bytes[11] = bytes[11].wrapping_add(by).wrapping_sub(4);
            }
            _ if !bytes.is_empty() => {
                let at = rng.random_range(0..bytes.len().min(48));
                bytes[at] ^= 1 << rng.random_range(0..8);
            }
            _ => {}
        }
    }
}
