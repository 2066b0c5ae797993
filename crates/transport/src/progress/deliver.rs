//! Gives packets to their queue pairs.

use std::mem;
use std::sync::Arc;

use anyverbs_links::shm::Digest;
use anyverbs_objects::base::Caller;
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::qp::{Arrival, Incoming};
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Gid, Qpn};
use anyverbs_proto::wire::opcode::Operation;
use anyverbs_proto::wire::packet::{Beginning, Malformed};

use super::Driver;
use crate::probes;
use crate::qp::arrivals::{Arrivals, reborrow};
use crate::qp::env::Call;
use crate::qp::{QpCell, State};

/// Packets that came one after the other.
pub(super) trait Source {
    /// A packet is read before the one in front of it is executed.
    const LOOKS_AHEAD: bool = false;

    /// The senders may have lanes as well.
    const HAS_LANES: bool = false;

    /// When they came. `None`: the first look at the clock tells.
    fn now(&self) -> Option<Time> {
        None
    }

    /// Goes on to the next packet; false if there is none. Call it once before the first packet.
    fn advance(&mut self) -> bool;

    /// The present packet, and where it came from.
    fn packet(&self) -> (&Arrival, &Incoming<'_>);

    /// The digest that stands for the addresses of the present packet, if it has one.
    fn digest(&self) -> Option<Digest> {
        None
    }

    /// The packet behind it, if that is known.
    fn ahead(&self) -> Option<(&Arrival, &Incoming<'_>)> {
        None
    }

    /// Takes out the packet behind the present one.
    fn skip_ahead(&mut self) {}

    /// Packets in a row were for a queue pair of this device. With `more`, the present packet is for another one.
    #[inline]
    fn end_run(&mut self, _device: u8, _more: bool) {}
}

/// Where a packet is read to. Packets are long to move about, so places are used again.
#[derive(Default)]
pub(super) struct Arrived<'a> {
    pub(super) arrival: Arrival,
    pub(super) packet: Incoming<'a>,
    /// Beginning of the packet, if [`read`](Self::read) has read it.
    beginning: Beginning,
}

impl<'a> Arrived<'a> {
    /// Reads a packet, without its ICRC, to this place.
    #[inline]
    pub(super) fn read(&mut self, bytes: &'a [u8]) -> Result<(), Malformed> {
        self.packet.parse_next(&mut self.beginning, bytes)
    }
}

/// A source of packets that `read` reads to a place, one in advance.
pub(super) struct Ahead<'s, 'p, R> {
    now: Time,
    present: &'s mut Arrived<'p>,
    next: &'s mut Arrived<'p>,
    /// Whether there is one in `next`. `None` before the first.
    more: Option<bool>,
    read: R,
}

impl<'s, 'p, R: FnMut(&mut Arrived<'p>) -> bool> Ahead<'s, 'p, R> {
    pub(super) fn new(now: Time, places: &'s mut [Arrived<'p>; 2], read: R) -> Self {
        let [present, next] = places;
        Self { now, present, next, more: None, read }
    }
}

impl<'p, R: FnMut(&mut Arrived<'p>) -> bool> Source for Ahead<'_, 'p, R> {
    const LOOKS_AHEAD: bool = true;

    fn now(&self) -> Option<Time> {
        Some(self.now)
    }

    #[inline]
    fn advance(&mut self) -> bool {
        let more = self.more.unwrap_or_else(|| (self.read)(self.next));
        mem::swap(&mut self.present, &mut self.next);
        self.more = Some(more && (self.read)(self.next));
        more
    }

    #[inline]
    fn packet(&self) -> (&Arrival, &Incoming<'_>) {
        (&self.present.arrival, &self.present.packet)
    }

    #[inline]
    fn ahead(&self) -> Option<(&Arrival, &Incoming<'_>)> {
        (self.more == Some(true)).then_some((&self.next.arrival, &self.next.packet))
    }

    #[inline]
    fn skip_ahead(&mut self) {
        self.more = Some((self.read)(self.next));
    }
}

/// Packets in a row for one queue pair.
#[derive(Clone, Copy)]
struct Run {
    qpn: Qpn,
    /// The multicast group to which the datagrams came.
    group: Option<Gid>,
}

impl Run {
    #[inline]
    fn of((arrival, packet): (&Arrival, &Incoming<'_>)) -> Self {
        let qpn = packet.headers.bth.dest_qpn;
        Self { qpn, group: (qpn == Qpn::MULTICAST).then_some(arrival.destination) }
    }

    #[inline]
    fn has(self, (arrival, packet): (&Arrival, &Incoming<'_>)) -> bool {
        packet.headers.bth.dest_qpn == self.qpn
            && self.group.is_none_or(|group| arrival.destination == group)
    }
}

impl Driver {
    /// Gives packets to their queue pairs.
    pub(super) fn deliver_all<'p>(
        &'static self,
        now: Time,
        mut packets: impl Iterator<Item = (Arrival, Incoming<'p>)>,
    ) {
        let mut places = <[Arrived<'_>; 2]>::default();
        let read = |into: &mut Arrived<'p>| match packets.next() {
            Some((arrival, packet)) => {
                *into = Arrived { arrival, packet, ..Arrived::default() };
                true
            }
            None => false,
        };
        self.deliver(&mut Ahead::new(now, &mut places, read), &mut None, None);
    }

    /// Gives packets to their queue pairs; consecutive ones for one queue pair under one hold of its lock. `last` is the queue
    /// pair of the last one: the next is likely to be for the same. Completions may go straight `into` a caller's room.
    #[inline]
    pub(super) fn deliver<S: Source>(
        &'static self,
        source: &mut S,
        last: &mut Option<Arc<QpCell>>,
        mut into: Option<&mut dyn Caller>,
    ) {
        let mut more = source.advance();
        while more {
            let run = Run::of(source.packet());
            let members = run.group.and_then(|group| self.transport.groups.members(group));
            if let Some(members @ [_, _, ..]) = members.as_deref() {
                let (arrival, packet) = source.packet();
                self.deliver_copies(source.now(), members, arrival, packet);
                more = source.advance();
                continue;
            }
            let known = last.take().filter(|cell| cell.qpn == run.qpn);
            let found = known.or_else(|| match members.as_deref() {
                Some([cell]) => Some(Arc::clone(cell)),
                _ => self.transport.qps.find(run.qpn),
            });
            let Some(cell) = found else {
                self.drop_unclaimed(source);
                more = source.advance();
                source.end_run(0, more);
                continue;
            };
            let mut state = cell.state.lock();
            if state.is_dead() {
                drop(state);
                // Its number may be another's by now.
                *last = self.transport.qps.find(run.qpn).filter(|other| !Arc::ptr_eq(other, &cell));
                if last.is_none() {
                    self.drop_unclaimed(source);
                    more = source.advance();
                    source.end_run(0, more);
                }
                continue;
            }
            let mut call = Call::at(&cell, source.now());
            let mut arrivals = Arrivals::new(&cell, reborrow(&mut into));
            let is_target = cell.qp_type == QpType::XrcRecv;
            loop {
                let (_, packet) = source.packet();
                if let Some((arrival, ack)) = source.ahead().filter(|(_, next)| rides(next, packet))
                {
                    // A program expects to see the peer's answer after its own send is complete.
                    let State { machine, link, .. } = &mut *state;
                    let mut env = call.env_with(link, &mut arrivals);
                    if env.is_watched() {
                        env.receive_watched(machine, S::HAS_LANES, (arrival, ack));
                    } else {
                        machine.receive(arrival, ack, &mut env);
                    }
                    source.skip_ahead();
                }
                arrivals.more = source.ahead().is_some_and(|next| run.has(next));
                let (arrival, packet) = source.packet();
                let has_lanes = S::HAS_LANES && state.link.same_host.lanes.are_any();
                if has_lanes && packet.headers.bth.opcode.is_request() {
                    let psn = packet.headers.bth.psn;
                    let State { machine, link, .. } = &mut *state;
                    machine.read_lane_before(psn, &mut call.env_with(link, &mut arrivals));
                }
                let is_elsewhere = is_target
                    && self
                        .transport
                        .sharing()
                        .is_elsewhere(&cell, &mut state, &mut call, arrival, packet);
                if !is_elsewhere && (run.group.is_none() || cell.takes(&state, arrival, packet)) {
                    let State { machine, link, .. } = &mut *state;
                    let by_digest = source.digest().map(|digest| link.arrival_of(digest));
                    let arrival = by_digest.as_ref().unwrap_or(arrival);
                    let len = packet.payload.len();
                    probes::receive(cell.qpn, &packet.headers.bth, packet.packets, len);
                    let mut env = call.env_with(link, &mut arrivals);
                    if env.is_watched() {
                        env.receive_watched(machine, S::HAS_LANES, (arrival, packet));
                    } else {
                        machine.receive(arrival, packet, &mut env);
                    }
                }
                more = source.advance();
                if !more || !run.has(source.packet()) {
                    break;
                }
            }
            source.end_run(cell.port.number(), more);
            let State { machine, link, .. } = &mut *state;
            if S::LOOKS_AHEAD {
                // The last packet may have been one that is dropped.
                machine.transmit_rest(&mut call.env_with(link, &mut arrivals));
            }
            arrivals.end();
            if is_target {
                // The program's reply leaves by another queue pair: this ACK cannot go with it, and the requester expects its
                // completion before the reply.
                machine.acknowledge(&mut call.env(link));
            }
            call.settle(&mut state);
            drop(state);
            *last = Some(cell);
        }
    }

    /// Gives a packet of a group to each of its queue pairs.
    fn deliver_copies(
        &'static self,
        now: Option<Time>,
        members: &[Arc<QpCell>],
        arrival: &Arrival,
        packet: &Incoming<'_>,
    ) {
        for cell in members {
            let mut state = cell.state.lock();
            if state.is_dead() || !cell.takes(&state, arrival, packet) {
                continue;
            }
            let mut call = Call::at(cell, now);
            let State { machine, link, .. } = &mut *state;
            let len = packet.payload.len();
            probes::receive(cell.qpn, &packet.headers.bth, packet.packets, len);
            let mut env = call.env(link);
            if env.is_watched() {
                env.receive_watched(machine, false, (arrival, packet));
            } else {
                machine.receive(arrival, packet, &mut env);
            }
            call.settle(&mut state);
        }
    }
}

/// Whether `packet` is an ACK that left with the request before it.
fn rides(packet: &Incoming<'_>, before: &Incoming<'_>) -> bool {
    let (bth, before) = (&packet.headers.bth, &before.headers.bth);
    bth.opcode.operation == Operation::Ack
        && bth.dest_qpn == before.dest_qpn
        && before.opcode.is_request()
}
