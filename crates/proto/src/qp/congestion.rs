//! Congestion that the network announces (IBA A17.9.3): a receiver of packets with an ECN mark notifies their sender, which
//! keeps less in flight.

use std::time::Duration;

use crate::counters::Counter;
use crate::env::Env;
use crate::payload::Payload;
use crate::time::Time;
use crate::types::Psn;
use crate::wire::bth::Bth;
use crate::wire::opcode::{Opcode, Operation, Service};
use crate::wire::packet::Headers;

use super::attr::QpState;
use super::{Arrival, Qp};

/// The least time, in microseconds, between two notifications of a queue pair, and between two that make its window smaller:
/// one congested moment marks many packets (`marked_packets_make_the_window_smaller` of the scenarios).
pub(super) const INTERVAL: Duration = Duration::from_micros(50);

/// A notification carries nothing besides its base header.
const RESERVED: [u8; 16] = [0; 16];

#[derive(Debug, Default)]
pub(super) struct Congestion {
    sent: Option<Time>,
    taken: Option<Time>,
}

/// Tells whether that much time has passed since `last`. If so, `last` is set to now.
fn is_due(last: &mut Option<Time>, now: Time) -> bool {
    let due = last.is_none_or(|last| now.since(last) >= INTERVAL);
    if due {
        *last = Some(now);
    }
    due
}

impl Qp {
    /// The network has marked a packet of the peer: notifies it.
    pub(super) fn note_mark<E: Env>(&mut self, env: &mut E) {
        if !self.init.qp_type.is_reliable() || !is_due(&mut self.rate.congestion.sent, env.now()) {
            return;
        }
        let headers = Headers::new(Bth {
            opcode: Opcode::new(Service::Cnp, Operation::Cnp),
            becn: true,
            ..self.bth(Psn::default())
        });
        if env.transmit(&self.attr.av, &headers, &Payload::bytes(&RESERVED), None).is_ok() {
            env.count(Counter::CnpSent, 1);
        }
    }

    /// The peer says that packets of this queue pair were marked.
    pub(super) fn receive_notification<E: Env>(&mut self, arrival: &Arrival, env: &mut E) {
        let av = &self.attr.av;
        if arrival.source != av.dgid || arrival.destination != av.sgid {
            return env.count(Counter::DropForeign, 1);
        }
        let sends = matches!(self.attr.state, QpState::Rts | QpState::Sqd);
        if !sends || !self.init.qp_type.is_reliable() {
            return env.count(Counter::DropQpState, 1);
        }
        env.count(Counter::CnpHandled, 1);
        if is_due(&mut self.rate.congestion.taken, env.now()) {
            self.note_congestion(env);
        }
    }
}
