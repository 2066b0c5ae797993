//! The receive in hand: how it is taken, completed and flushed.

use crate::comp_cntr::CompCntrOps;
use crate::counters::Counter;
use crate::env::{Env, Side};
use crate::event::QpEvent;
use crate::recv_queue::RecvWqe;
use crate::wc::{Wc, WcFlags, WcOpcode, WcStatus};

use super::super::{Arrival, Incoming, Qp};
use super::{Inbound, Responder, Stop};

impl Responder {
    /// Whether a receive is in hand.
    pub(in crate::qp) fn has_receive(&self) -> bool {
        self.recv_taken
    }
}

impl Qp {
    /// Makes sure that a receive WQE is in hand.
    pub(super) fn take_recv<E: Env>(&mut self, env: &mut E) -> Result<(), Stop> {
        if self.responder.recv_taken {
            return Ok(());
        }
        let recv = &mut self.responder.recv;
        let taken = match &mut self.rq {
            Some(rq) => rq.pop(recv),
            None => env.take_srq(recv),
        };
        self.responder.recv_taken = taken;
        if taken { Ok(()) } else { Err(Stop::NotReady) }
    }

    pub(super) fn finish_recv<E: Env>(&mut self, mut wc: Wc, packet: &Incoming<'_>, env: &mut E) {
        if let Some(imm) = packet.headers.imm {
            wc.imm = imm;
            wc.flags |= WcFlags::WITH_IMM;
        }
        wc.src_qpn = self.attr.dest_qpn;
        wc.wr_id = self.release_recv();
        wc.qpn = self.qpn;
        self.count_completion(CompCntrOps::RECV, wc.byte_len, false, env);
        env.complete(Side::Recv, wc, packet.headers.bth.solicited);
    }

    /// Completes the receive in hand in error.
    pub(super) fn complete_recv<E: Env>(&mut self, wc: Wc, env: &mut E) {
        let wr_id = self.release_recv();
        let vendor_err = self.vendor_err();
        let wc = Wc { wr_id, qpn: self.qpn, opcode: WcOpcode::Recv, vendor_err, ..wc };
        env.count(Counter::RespCqeError, 1);
        self.count_completion(CompCntrOps::RECV, 0, true, env);
        env.complete(Side::Recv, wc, true);
    }

    /// Makes sure that a datagram finds a receive.
    pub(in crate::qp) fn take_datagram_recv<E: Env>(&mut self, env: &mut E) -> bool {
        self.take_recv(env).is_ok()
    }

    /// The receive in hand.
    pub(in crate::qp) fn datagram_recv(&self) -> &RecvWqe {
        &self.responder.recv
    }

    /// The receive in hand is used up; returns its cookie.
    pub(in crate::qp) fn release_recv(&mut self) -> u64 {
        self.responder.recv_taken = false;
        self.responder.recv.wr_id
    }

    /// The receive in hand cannot be written: the program's mistake, and the end of the queue pair.
    pub(in crate::qp) fn fail_datagram_recv<E: Env>(
        &mut self,
        from: (&Arrival, &Incoming<'_>),
        env: &mut E,
    ) {
        let reason = self.receive_fault(env);
        self.explain_refused_datagram(from, &reason, env);
        self.complete_recv(Wc { status: WcStatus::LocProtErr, ..Wc::default() }, env);
        self.enter_error(env);
    }

    /// Completes the receive in hand and all that wait as flushed, on the move to ERR.
    pub(in crate::qp) fn flush_receives<E: Env>(&mut self, env: &mut E) {
        self.responder.inbound = Inbound::None;
        self.clear_out_of_order_buffer();
        self.responder.acks.owed = false;
        self.drop_pending_answers();
        let flushed = Wc { status: WcStatus::WrFlushErr, ..Wc::default() };
        if self.responder.recv_taken {
            self.complete_recv(flushed, env);
        }
        match self.rq.as_mut() {
            Some(_) => {
                while self.rq.as_mut().is_some_and(|rq| rq.pop(&mut self.responder.recv)) {
                    self.complete_recv(flushed, env);
                }
            }
            None if self.init.srq => env.raise(QpEvent::LastWqeReached),
            None => {}
        }
    }

    /// Receives of a queue pair that is reset are forgotten.
    pub(in crate::qp) fn forget_receives(&mut self) {
        self.responder = Responder::default();
        if let Some(rq) = &mut self.rq {
            rq.clear();
        }
    }
}
