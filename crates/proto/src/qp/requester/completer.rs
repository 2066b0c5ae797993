//! The requester's other half: takes ACKs, NAKs and responses (IBA 9.7.5).

use crate::counters::Counter;
use crate::env::Env;
use crate::payload::{Data, scatter_by};
use crate::types::Psn;
use crate::wc::WcStatus;
use crate::wire::aeth::{NakCode, Syndrome};
use crate::wire::opcode::Operation;
use crate::wr::SendOp;

use super::super::attr::{QpState, QpType};
use super::super::responder::is_ours;
use super::super::{Incoming, Qp};

impl Qp {
    /// Takes an ACK that came with a request: of everything up to `psn`.
    pub(in crate::qp) fn receive_ack<E: Env>(&mut self, psn: Psn, env: &mut E) {
        if self.awaits_response(psn, env) {
            self.answered_before(psn.plus(1), env);
            self.note_ack(env);
            self.after_completion(env);
        }
    }

    /// Takes the word of the peer that it has executed everything up to this PSN. It may come before the responses to requests
    /// among those. So what stands behind such a request waits for its response.
    #[inline]
    pub fn receive_executed<E: Env>(&mut self, psn: Psn, env: &mut E) {
        // It says so again and again.
        if self.awaits(psn) {
            self.requester.executed = Some(psn);
            self.take_executed(env);
        }
    }

    /// Completes what the peer has said to be executed, up to the first request that has a response of its own.
    fn take_executed<E: Env>(&mut self, env: &mut E) {
        let Some(psn) = self.requester.executed else { return };
        let mut last = psn;
        let mut position = self.sq.done;
        while self.requester.unfenced > 0 && position != self.sq.started {
            let sqe = self.sq.at(position);
            if sqe.op.has_response() {
                if psn.since(sqe.first_psn) >= 0 {
                    last = sqe.first_psn.prev();
                }
                break;
            }
            position = position.wrapping_add(1);
        }
        if last == psn {
            self.requester.executed = None;
        }
        if self.awaits(last) {
            self.receive_ack(last, env);
        }
    }

    /// Tells whether an answer to this PSN is new. Nothing is where all is answered, as in RTR, where no PSN has a meaning yet.
    #[inline]
    #[must_use]
    pub fn awaits(&self, psn: Psn) -> bool {
        let requester = &self.requester;
        requester.una != requester.max_sent && psn.since(requester.una) >= 0
    }

    /// Takes a response of the peer.
    pub(in crate::qp) fn receive_response<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) {
        let psn = packet.headers.bth.psn;
        if !self.awaits_response(psn, env) {
            return;
        }
        let operation = packet.headers.bth.opcode.operation;
        match packet.headers.aeth.map(|aeth| aeth.syndrome) {
            Some(Syndrome::Nak(code)) => {
                self.note_nak(packet, env);
                self.receive_nak(psn, code, env);
            }
            Some(Syndrome::RnrNak { timer }) => {
                if self.answered_before(psn, env) {
                    self.note_nak(packet, env);
                    self.receive_rnr_nak(timer, is_ours(packet), env);
                }
            }
            _ if operation == Operation::Ack => {
                self.answered_before(psn.plus(1), env);
                self.note_ack(env);
            }
            _ => {
                if self.answered_before(psn, env) {
                    self.receive_data(psn, packet, env);
                    self.take_executed(env);
                }
            }
        }
        self.after_completion(env);
    }

    /// Tells whether a response with this PSN can answer one of the requests sent. Counts a response that cannot.
    fn awaits_response<E: Env>(&mut self, psn: Psn, env: &E) -> bool {
        if !matches!(self.init.qp_type, QpType::Rc | QpType::XrcSend)
            || !matches!(self.attr.state, QpState::Rts | QpState::Sqd)
        {
            env.count(Counter::DropQpState, 1);
            return false;
        }
        // These answer packets that were never sent, or were answered before (IBA 9.7.5.1.1: ghost, duplicate).
        let is_duplicate = psn.since(self.requester.una) < 0;
        if is_duplicate || psn.since(self.requester.max_sent) >= 0 {
            if is_duplicate {
                self.requester.recovery.on_duplicate_answer(env);
            } else {
                env.note_stray(&self.attr.av, psn);
            }
            env.count(Counter::DropStaleAck, 1);
            return false;
        }
        true
    }

    fn receive_nak<E: Env>(&mut self, psn: Psn, code: NakCode, env: &mut E) {
        if !self.answered_before(psn, env) {
            return;
        }
        let status = match code {
            NakCode::PsnSequence => return self.receive_sequence_nak(env),
            NakCode::InvalidRequest => {
                env.count(Counter::ReqRemoteInvalidRequest, 1);
                WcStatus::RemInvReqErr
            }
            NakCode::RemoteAccess => {
                env.count(Counter::ReqRemoteAccessErrors, 1);
                WcStatus::RemAccessErr
            }
            NakCode::RemoteOperational => WcStatus::RemOpErr,
        };
        self.fail_oldest(status, env);
    }

    /// All requests before `psn` are answered: completes them. False if one of them (a READ, an atomic) has an answer
    /// of its own that never came. Then the rest of the packet means nothing yet.
    fn answered_before<E: Env>(&mut self, psn: Psn, env: &mut E) -> bool {
        let (before, cost_before) = (self.requester.una, self.requester.una_cost);
        let mut complete = true;
        while psn.since(self.requester.una) > 0 && self.sq.done != self.sq.started {
            let sqe = self.sq.at(self.sq.done);
            if sqe.op.has_response() {
                complete = false;
                break;
            }
            if psn.since(sqe.end_psn()) < 0 {
                let k = psn.since(sqe.first_psn) as u32;
                let cost = sqe.cost_at(k, self.mtu());
                self.requester.answered(psn, cost);
                break;
            }
            self.finish_oldest(env);
        }
        self.complete_local(env);
        if self.requester.una != before {
            self.advance_cursor();
            let answered = self.requester.una_cost.wrapping_sub(cost_before);
            self.note_progress(answered, env);
        }
        if !complete {
            self.receive_implied_nak(env);
        }
        complete
    }

    /// The oldest WQE is done, and `una` moves past it.
    fn finish_oldest<E: Env>(&mut self, env: &mut E) {
        let sqe = self.sq.at(self.sq.done);
        let (end, cost) = (sqe.end_psn(), sqe.cost_at(sqe.packets, self.mtu()));
        let has_response = sqe.op.has_response();
        self.requester.answered(end, cost);
        if has_response {
            self.requester.unfenced -= 1;
        }
        self.complete_oldest(WcStatus::Success, env);
    }

    /// The answer to a READ, atomic, ATOMIC WRITE or FLUSH: `psn` is the oldest that has none.
    fn receive_data<E: Env>(&mut self, psn: Psn, packet: &Incoming<'_>, env: &mut E) {
        let sqe = *self.sq.at(self.sq.done);
        let cost_before = self.requester.una_cost;
        debug_assert_eq!(psn, self.requester.una);
        let mtu = self.mtu();
        let k = psn.since(sqe.first_psn) as u32;
        let offset = k * mtu;
        let original;
        if matches!(sqe.op, SendOp::AtomicWrite { .. } | SendOp::Flush { .. }) {
            // Answered by a READ response without data (IBA A19.3.2, A19.4.3).
            let response = packet.headers.bth.opcode.operation == Operation::ReadResponseOnly;
            if !response || !packet.payload.is_empty() {
                return self.fail_oldest(WcStatus::BadRespErr, env);
            }
            self.finish_oldest(env);
            return self.note_answered(cost_before, env);
        }
        let data = match (packet.headers.atomic_ack, sqe.op) {
            (Some(answer), SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }) => {
                original = answer.original.to_ne_bytes();
                Data::Bytes(&original)
            }
            (None, SendOp::Read(_)) => packet.payload,
            // An answer of the wrong kind (IBA 9.7.5.1.5).
            _ => return self.fail_oldest(WcStatus::BadRespErr, env),
        };
        let packets = packet.packets;
        let whole = packets.checked_mul(mtu).filter(|_| packets <= sqe.packets - k);
        if whole.is_none_or(|whole| data.len() as u32 != (sqe.len - offset).min(whole)) {
            self.note_other_mtu(packet);
            return self.fail_oldest(WcStatus::BadRespErr, env);
        }
        let sges = self.sq.sges(self.sq.done);
        if scatter_by(sges, offset.into(), data, self.init.pd, env).is_err() {
            return self.fail_oldest(WcStatus::LocProtErr, env);
        }
        if k + packets == sqe.packets {
            self.finish_oldest(env);
        } else {
            let cost = sqe.cost_at(k + packets, mtu);
            self.requester.answered(psn.plus(packets), cost);
        }
        self.note_answered(cost_before, env);
    }

    /// The oldest request has got its answer, or a part of it.
    fn note_answered<E: Env>(&mut self, cost_before: u64, env: &mut E) {
        while self.requester.responses.front().is_some_and(|end| end.since(self.requester.una) <= 0)
        {
            self.requester.responses.pop_front();
        }
        self.complete_local(env);
        self.advance_cursor();
        let answered = self.requester.una_cost.wrapping_sub(cost_before);
        self.note_progress(answered, env);
    }
}
