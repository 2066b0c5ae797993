//! Messages of one packet and one length in a row, as programs post them that send many short ones.

use crate::env::{Env, TransmitError};
use crate::run::Run;
use crate::types::Psn;
use crate::wire::bth::Bth;
use crate::wire::opcode::{Opcode, Operation, Service};
use crate::wire::packet::Headers;
use crate::wr::{SendFlags, SendOp};

use super::super::Qp;
use super::super::attr::{QpState, QpType};
use super::super::send_queue::{PACKET_COST, Sqe};
use super::{MAX_PSNS, reth};

/// The fields that such messages have in common.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Kind {
    /// The key of a WRITE. `None`: a SEND.
    rkey: Option<u32>,
    len: u32,
    solicited: bool,
}

impl Kind {
    #[inline]
    fn of(sqe: &Sqe) -> Option<Self> {
        let rkey = match sqe.op {
            SendOp::Send => None,
            SendOp::Write(at) => Some(at.rkey),
            _ => return None,
        };
        let solicited = sqe.flags.contains(SendFlags::SOLICITED);
        Some(Self { rkey, len: sqe.len, solicited })
    }
}

impl Qp {
    /// Sends WQEs from `next` on, which have not been started, in one run, as far as they are alike and the window has room.
    /// What leaves is what the general way would send. Returns how many left: 0 where fewer than two can.
    pub(super) fn send_row<E: Env>(
        &mut self,
        window: u64,
        env: &mut E,
    ) -> (u32, Result<(), TransmitError>) {
        let position = self.sq.next;
        let waiting = self.sq.head().wrapping_sub(position);
        // A link without batches sends each packet by itself.
        if waiting < 2 || env.props().batch == 0 || !self.may_shorten() {
            return (0, Ok(()));
        }
        let requester = &self.requester;
        let psn = requester.fresh_psn;
        let sqe = self.sq.at(position);
        let is_plain = sqe.len <= self.mtu()
            && self.init.qp_type == QpType::Rc
            && self.attr.state == QpState::Rts
            && !self.rate.is_limited()
            && requester.halted.is_none()
            && requester.max_sent == psn;
        let Some(kind) = Kind::of(sqe).filter(|_| is_plain) else { return (0, Ok(())) };
        let cost = u64::from(kind.len) + PACKET_COST;
        let in_flight = requester.fresh_cost.wrapping_sub(requester.una_cost);
        let room = (window.saturating_sub(in_flight) / cost).min(Run::MOST.into()) as u32;
        let psns = MAX_PSNS.saturating_sub(psn.since(requester.una) as u32);
        let waits = |flags: SendFlags| flags.contains(SendFlags::FENCE) && requester.unfenced != 0;
        let is_alike = |n: &u32| {
            let sqe = self.sq.at(position.wrapping_add(*n));
            Kind::of(sqe) == Some(kind) && !waits(sqe.flags)
        };
        let n = (0..waiting.min(room).min(psns)).take_while(is_alike).count() as u32;
        if n < 2 {
            return (0, Ok(()));
        }
        let of = |i: u32| {
            let position = position.wrapping_add(i);
            let sqe = self.sq.at(position);
            let va = if let SendOp::Write(at) = sqe.op { at.va } else { 0 };
            (va, self.payload(sqe, position, 0, sqe.len))
        };
        let operation =
            if kind.rkey.is_some() { Operation::WriteOnly } else { Operation::SendOnly };
        let opcode = Opcode::new(Service::Rc, operation);
        let bth = Bth { opcode, solicited: kind.solicited, ack_req: true, ..self.bth(psn) };
        let mut headers = Headers::new(bth);
        if let SendOp::Write(at) = sqe.op {
            headers.reth = Some(reth(at, 0, kind.len));
        }
        let run = Run::of_messages(headers, &of, kind.len, n);
        // The copy checks the keys. A WQE whose key is wrong is not started.
        let (taken, end) = env.transmit_run(&self.attr.av, &run);
        self.note_row(psn, cost, taken);
        (taken, end)
    }

    /// The WQEs from `next` on have left, so many.
    fn note_row(&mut self, psn: Psn, cost: u64, taken: u32) {
        for i in 0..taken {
            let cost_before = self.requester.fresh_cost.wrapping_add(u64::from(i) * cost);
            let entry = self.sq.at_mut(self.sq.next.wrapping_add(i));
            (entry.first_psn, entry.packets, entry.split) = (psn.plus(i), 1, false);
            entry.cost_before = cost_before;
        }
        if taken > 0 {
            let next = self.sq.next.wrapping_add(taken);
            (self.sq.next, self.sq.started) = (next, next);
            let requester = &mut self.requester;
            requester.fresh_cost = requester.fresh_cost.wrapping_add(u64::from(taken) * cost);
            requester.fresh_psn = psn.plus(taken);
            requester.max_sent = requester.fresh_psn;
            requester.k = 0;
            self.responder.note_request_sent();
        }
    }
}
