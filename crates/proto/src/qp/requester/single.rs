//! A SEND or WRITE of one packet that nothing holds back: the likely request of a program that answers messages, or sends many
//! short ones. It leaves as the general way would send it, without the cursor inside a message and the headers that it cannot
//! have.

use crate::env::{Env, TransmitError};
use crate::payload::Payload;
use crate::wire::bth::Bth;
use crate::wire::opcode::{Opcode, Operation, Service};
use crate::wire::packet::Headers;
use crate::wr::{SendFlags, SendOp};

use super::super::Qp;
use super::super::attr::{QpState, QpType};
use super::super::send_queue::PACKET_COST;
use super::{MAX_PSNS, has_room, reth};

/// The fate of the WQE `next`.
pub(super) enum Single {
    Sent,
    /// It has to go the general way.
    Other,
    Stopped(TransmitError),
}

impl Qp {
    /// Sends the WQE `next`, which was not started, if it is such a one.
    #[inline]
    pub(super) fn send_single<E: Env>(&mut self, window: u64, env: &mut E) -> Single {
        if !self.may_shorten() {
            return Single::Other;
        }
        let position = self.sq.next;
        let sqe = self.sq.at(position);
        let (len, flags) = (sqe.len, sqe.flags);
        let (operation, reth) = match sqe.op {
            SendOp::Send => (Operation::SendOnly, None),
            SendOp::Write(at) => (Operation::WriteOnly, Some(reth(at, 0, len))),
            _ => return Single::Other,
        };
        let requester = &self.requester;
        let cost = u64::from(len) + PACKET_COST;
        let in_flight = requester.fresh_cost.wrapping_sub(requester.una_cost);
        let psn = requester.fresh_psn;
        let is_plain = len <= self.mtu()
            && self.init.qp_type == QpType::Rc
            && self.attr.state == QpState::Rts
            && !self.is_paced()
            && !(flags.contains(SendFlags::FENCE) && requester.unfenced != 0);
        let has_room =
            has_room(in_flight, cost, window) && (psn.since(requester.una) as u32) < MAX_PSNS;
        // A packet that was sent before, and lost, is counted as such there.
        if !is_plain || !has_room || requester.max_sent != psn {
            return Single::Other;
        }
        let mut headers = Headers::new(Bth {
            opcode: Opcode::new(Service::Rc, operation),
            solicited: flags.contains(SendFlags::SOLICITED),
            ack_req: true,
            ..self.bth(psn)
        });
        headers.reth = reth;
        let payload = if flags.contains(SendFlags::INLINE) {
            Payload::bytes(self.sq.inline(position))
        } else {
            Payload::gather(self.sq.sges(position), 0, len as usize, self.init.pd)
        };
        // The copy checks the keys.
        if let Err(error) = env.transmit(&self.attr.av, &headers, &payload) {
            return Single::Stopped(error);
        }
        let entry = self.sq.at_mut(position);
        (entry.first_psn, entry.packets, entry.split) = (psn, 1, false);
        entry.cost_before = self.requester.fresh_cost;
        let requester = &mut self.requester;
        requester.fresh_cost = requester.fresh_cost.wrapping_add(cost);
        requester.fresh_psn = psn.plus(1);
        requester.max_sent = requester.fresh_psn;
        requester.k = 0;
        let next = position.wrapping_add(1);
        (self.sq.next, self.sq.started) = (next, next);
        self.responder.note_request_sent();
        Single::Sent
    }
}
