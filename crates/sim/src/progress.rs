//! The passing of time.

use std::time::Duration;

use anyverbs_proto::counters::Counter;
use anyverbs_proto::env::{Env, LinkEnv};
use anyverbs_proto::payload::Data;
use anyverbs_proto::qp::{Arrival, Incoming, Qp, ShortRequest};
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Gid, PKey, Qpn};
use anyverbs_proto::wire::opcode::{Opcode, Operation, Service};
use anyverbs_proto::wire::packet::{Beginning, Headers};

use crate::device::{Around, DeviceId, QpId, QpSlot};
use crate::net::{self, Beside, Delivery};
use crate::sim::Sim;

/// Instants that one [`Sim::run`] may take.
const MAX_INSTANTS: u32 = 2_000_000;
/// Times that a timer may be due at one instant before it counts as a loop without end.
const MAX_ROUNDS: u32 = 1000;

/// Gives a queue pair a SEND by the short way, as the same-host link does. False: it takes the general way.
fn receive_short(
    qp: &mut Qp,
    arrival: &Arrival,
    packet: &Incoming<'_>,
    env: &mut Around<'_>,
) -> bool {
    let bth = &packet.headers.bth;
    let request = ShortRequest {
        psn: bth.psn,
        solicited: bth.solicited,
        ack_req: bth.ack_req,
        acks: packet.acks,
    };
    let is_short = env.props().immediate
        && bth.opcode == Opcode::new(Service::Rc, Operation::SendOnly)
        && bth.pkey == PKey::DEFAULT
        && packet.packets == 1
        && !arrival.is_marked()
        && arrival.is_from(&qp.attr().av);
    is_short && qp.receive_short_send(&request, packet.payload, env)
}

impl Sim {
    /// Injects a packet that no device sent. It arrives at once, with the address of `from`.
    pub fn inject(&mut self, from: DeviceId, to: DeviceId, headers: Headers, payload: &[u8]) {
        let arrival = net::arrival(self.gid(from), self.gid(to));
        self.net.enqueue(self.now, to, arrival, net::emit(headers, payload));
        self.instant();
    }

    /// When something happens next.
    #[must_use]
    pub fn next(&self) -> Option<Time> {
        self.qps()
            .flat_map(|QpSlot { qp, place, .. }| {
                [qp.deadline(), place.blocked_until, place.ack_at, self.lanes.next(place.lanes)]
            })
            .flatten()
            .chain(self.net.next())
            .min()
            .map(|at| at.max(self.now))
    }

    /// Goes to the next moment at which something happens, and does all of it. False if nothing will.
    pub fn step(&mut self) -> bool {
        let Some(at) = self.next() else { return false };
        self.now = at;
        self.instant();
        true
    }

    /// Everything that is due now: packets, timers, paths with room again, then ACKs that were held.
    fn instant(&mut self) {
        let mut rounds = 0;
        while self.next().is_some_and(|at| at <= self.now) {
            rounds += 1;
            assert!(rounds < MAX_ROUNDS, "a timer is due again and again at {:?}", self.now);
            while let Some(delivery) = self.net.deliver(self.now) {
                self.receive(&delivery);
            }
            let now = self.now;
            let due = |at: Option<Time>| at.is_some_and(|at| at <= now);
            let ids: Vec<QpId> = self.qps().map(|slot| slot.place.id).collect();
            for &id in &ids {
                self.look_at_lanes(id);
            }
            for &id in &ids {
                self.with(id, |qp, env| {
                    if std::mem::take(&mut env.place.more) {
                        qp.transmit_rest(env);
                    }
                });
            }
            for &id in &ids {
                if due(self.slot(id).qp.deadline()) {
                    self.with(id, |qp, env| qp.on_timer(env));
                }
                if due(self.slot(id).place.blocked_until) {
                    self.with(id, |qp, env| {
                        env.place.blocked_until = None;
                        qp.transmit(env);
                    });
                }
            }
            for &id in &ids {
                if due(self.slot(id).place.ack_at) {
                    self.with(id, |qp, env| {
                        env.place.ack_at = None;
                        qp.acknowledge(env);
                    });
                    let slot = self.slot(id);
                    assert!(
                        !slot.qp.owes_ack() || slot.place.blocked_until.is_some(),
                        "an ACK is owed after acknowledge"
                    );
                }
            }
        }
    }

    fn receive(&mut self, delivery: &Delivery) {
        let device = &self.devices[delivery.to.0];
        let counters = &device.shared.counters;
        let mut packet = Incoming::default();
        if packet.parse_next(&mut Beginning::default(), &delivery.bytes).is_err() {
            counters.add(Counter::DropMalformed, 1);
            return;
        }
        let qpn = packet.headers.bth.dest_qpn;
        let to: Vec<QpId> = if qpn == Qpn::MULTICAST {
            let group = delivery.arrival.destination;
            let is_member = |(gid, qp): &&(Gid, QpId)| *gid == group && qp.device == delivery.to;
            self.groups.iter().filter(is_member).map(|(_, qp)| *qp).collect()
        } else {
            device.by_qpn(qpn).into_iter().collect()
        };
        if to.is_empty() {
            counters.add(Counter::DropNoQp, 1);
        }
        let segments = self.net.segments;
        let more = self.net.next().is_some_and(|at| at <= self.now);
        for id in to {
            self.with(id, |qp, env| {
                env.place.more |= more;
                env.count(Counter::RcvdPkts, 1);
                // Where links carry packets that stand for several, they give the number.
                let mtu = qp.attr().path_mtu.bytes() as usize;
                let Beside { acks, elsewhere } = delivery.beside;
                let acks = acks.or(packet.acks);
                let payload = elsewhere.map_or(packet.payload, |(at, n)| Data::Elsewhere(at, n));
                let packets = if segments { payload.len().div_ceil(mtu).max(1) as u32 } else { 1 };
                let packet = Incoming { payload, packets, acks, ..packet };
                let is_beside_lane =
                    env.props().immediate && packet.headers.bth.opcode.is_request();
                if is_beside_lane {
                    qp.read_lane_before(packet.headers.bth.psn, env);
                }
                if receive_short(qp, &delivery.arrival, &packet, env) {
                    qp.transmit_rest(env);
                } else {
                    qp.receive(&delivery.arrival, &packet, env);
                }
                if is_beside_lane {
                    env.lanes.look_soon(env.place.lanes, env.now);
                }
            });
        }
    }

    /// Runs until nothing more happens.
    ///
    /// # Panics
    /// If that never comes.
    pub fn run(&mut self) {
        for _ in 0..MAX_INSTANTS {
            if !self.step() {
                return;
            }
        }
        panic!("no rest after {MAX_INSTANTS} instants");
    }

    /// Runs for a time.
    pub fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while self.next().is_some_and(|at| at <= end) {
            self.step();
        }
        self.now = end;
    }

    /// No device runs for a time. What arrives meanwhile waits to be received.
    pub fn freeze(&mut self, time: Duration) {
        self.now = self.now + time;
        let ids: Vec<QpId> = self.qps().map(|slot| slot.place.id).collect();
        for id in ids {
            self.with(id, |qp, env| qp.on_late_wakeup(env));
        }
    }

    /// Runs until a condition holds.
    ///
    /// # Panics
    /// If nothing more happens before that.
    pub fn run_until(&mut self, mut condition: impl FnMut(&Self) -> bool) {
        for _ in 0..MAX_INSTANTS {
            if condition(self) {
                return;
            }
            assert!(self.step(), "nothing more happens");
        }
        panic!("it never comes");
    }
}
