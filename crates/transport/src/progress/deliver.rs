//! Gives packets to their queue pairs.

use std::mem;
use std::sync::Arc;

use anyverbs_proto::counters::Counter;
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::qp::{Arrival, Incoming};
use anyverbs_proto::time::Time;
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wire::opcode::Operation;
use anyverbs_proto::wire::packet::{Beginning, Malformed};

use super::Driver;
use crate::qp::arrivals::Arrivals;
use crate::qp::env::Call;
use crate::qp::{QpCell, State};

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

impl Driver {
    /// Gives packets to their queue pairs.
    pub(crate) fn deliver<'p>(
        &'static self,
        now: Time,
        mut packets: impl Iterator<Item = (Arrival, Incoming<'p>)>,
    ) {
        self.deliver_at(now, |into| match packets.next() {
            Some((arrival, packet)) => {
                *into = Arrived { arrival, packet, ..Arrived::default() };
                true
            }
            None => false,
        });
    }

    /// Gives packets to their queue pairs; consecutive ones for one queue pair under one hold of its lock. `read` reads the
    /// next packet, if there is one.
    #[inline]
    pub(super) fn deliver_at<'p>(
        &'static self,
        now: Time,
        mut read: impl FnMut(&mut Arrived<'p>) -> bool,
    ) {
        let mut places = (Arrived::default(), Arrived::default());
        let (mut this, mut next) = (&mut places.0, &mut places.1);
        let mut more = read(this);
        while more {
            let qpn = this.packet.headers.bth.dest_qpn;
            let group = this.arrival.destination;
            let found = if qpn == Qpn::MULTICAST {
                let members = self.transport.groups.members(group);
                match members.as_deref() {
                    Some([cell]) => Some(Arc::clone(cell)),
                    Some(members) => {
                        self.deliver_copies(now, members, &this.arrival, &this.packet);
                        more = read(this);
                        continue;
                    }
                    None => None,
                }
            } else {
                self.transport.qps.find(qpn)
            };
            let Some(cell) = found else {
                self.core.count(Counter::DropNoQp, 1);
                more = read(this);
                continue;
            };
            let mut state = cell.state.lock();
            if state.is_dead() {
                self.core.count(Counter::DropNoQp, 1);
                more = read(this);
                continue;
            }
            let mut call = Call::at(&cell, now);
            let mut arrivals = Arrivals::new(&cell);
            let is_target = cell.qp_type == QpType::XrcRecv;
            loop {
                let Arrived { arrival, packet, .. } = &*this;
                let wanted = qpn != Qpn::MULTICAST || cell.takes(&state, arrival, packet);
                let State { machine, link, .. } = &mut *state;
                more = read(next);
                if more && rides(&next.packet, packet) {
                    // It rode with the peer's answer, which a program expects to see after its own send is complete.
                    let mut env = call.env_with(link, &mut arrivals);
                    machine.receive(&next.arrival, &next.packet, &mut env);
                    more = read(next);
                }
                let goes_on = more
                    && next.packet.headers.bth.dest_qpn == qpn
                    && (qpn != Qpn::MULTICAST || next.arrival.destination == group);
                arrivals.more = goes_on;
                if is_target
                    && self
                        .transport
                        .sharing()
                        .is_elsewhere(&cell, &mut state, &mut call, arrival, packet)
                {
                    // Another process has the SRQ of the request.
                } else if wanted {
                    let State { machine, link, .. } = &mut *state;
                    machine.receive(arrival, packet, &mut call.env_with(link, &mut arrivals));
                }
                mem::swap(&mut this, &mut next);
                if !goes_on {
                    break;
                }
            }
            // The last packet may have been one that is dropped.
            let State { machine, link, .. } = &mut *state;
            machine.transmit_rest(&mut call.env_with(link, &mut arrivals));
            arrivals.end();
            if is_target {
                end_target_batch(&mut state, &mut call);
            }
            call.settle(&mut state);
        }
    }

    /// Gives a packet of a group to each of its queue pairs.
    pub(super) fn deliver_copies(
        &'static self,
        now: Time,
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
            machine.receive(arrival, packet, &mut call.env(link));
            call.settle(&mut state);
        }
    }
}

/// Ends a batch of packets for a target.
pub(super) fn end_target_batch(state: &mut State, call: &mut Call<'_>) {
    // The program's reply leaves by another queue pair: this ACK cannot go with it, and the requester
    // expects its completion before the reply.
    let State { machine, link, .. } = state;
    machine.acknowledge(&mut call.env(link));
}

/// Whether `packet` is an ACK that left with the request before it.
fn rides(packet: &Incoming<'_>, before: &Incoming<'_>) -> bool {
    let (bth, before) = (&packet.headers.bth, &before.headers.bth);
    bth.opcode.operation == Operation::Ack
        && bth.dest_qpn == before.dest_qpn
        && before.opcode.is_request()
}
