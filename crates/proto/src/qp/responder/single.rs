//! The short way for the next request of one packet: a SEND that finds a receive of one element, as programs that
//! answer messages send it, or a WRITE. A requester may cut a long WRITE into those. The request is executed as the
//! general way would, without the checks that cannot fail.

use crate::env::{Env, Side};
use crate::mr::Access;
use crate::wc::{Wc, WcOpcode};
use crate::wire::opcode::{Opcode, Operation, Service};

use super::super::attr::QpState;
use super::super::{Incoming, Qp};
use super::{ACK_BYTES, Inbound, Turn};

const SEND: Opcode = Opcode::new(Service::Rc, Operation::SendOnly);
const WRITE: Opcode = Opcode::new(Service::Rc, Operation::WriteOnly);

impl Qp {
    /// Executes a request if it is such a one, and nothing is wrong with it. False: nothing has changed, but for bytes of the
    /// memory that it is about.
    #[inline]
    pub(in crate::qp) fn execute_single<E: Env>(
        &mut self,
        packet: &Incoming<'_>,
        env: &mut E,
    ) -> bool {
        let responder = &self.responder;
        let is_plain = self.may_shorten()
            && packet.headers.bth.psn == responder.expected
            && responder.inbound == Inbound::None
            && !responder.recv_taken
            && !responder.nak_sent
            && responder.out_of_order.is_none()
            && packet.packets == 1
            && packet.payload.len() <= self.mtu() as usize
            && self.tag_matching.is_none()
            && self.counted.is_empty()
            && (self.established || self.attr.state != QpState::Rtr);
        is_plain
            && match packet.headers.bth.opcode {
                SEND => self.execute_single_send(packet, env),
                WRITE => self.execute_single_write(packet, env),
                _ => false,
            }
    }

    #[inline]
    fn execute_single_write<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) -> bool {
        let Some(reth) = packet.headers.reth else { return false };
        let len = packet.payload.len();
        if reth.len as usize != len || !self.attr.access.contains(Access::REMOTE_WRITE) {
            return false;
        }
        if len > 0 {
            let range = (reth.va, len as u64);
            let (reach, right) = (self.reach(), Access::REMOTE_WRITE);
            let written = env.with_remote(reth.rkey, reach, range, right, |memory, to| {
                packet.payload.write(to, memory).is_ok()
            });
            if written != Ok(true) {
                return false;
            }
        }
        let turn = match self.responder.turn {
            Turn::Theirs => Turn::Ours,
            _ => Turn::None,
        };
        self.end_single(packet, turn, env);
        true
    }

    /// The request was executed.
    #[inline]
    fn end_single<E: Env>(&mut self, packet: &Incoming<'_>, turn: Turn, env: &mut E) {
        let bth = &packet.headers.bth;
        let responder = &mut self.responder;
        responder.expected = bth.psn.plus(1);
        responder.msn = (responder.msn + 1) & 0xff_ffff;
        responder.turn = turn;
        responder.ack_owed |= bth.ack_req;
        responder.unacknowledged =
            responder.unacknowledged.saturating_add(packet.payload.len() as u32);
        if responder.ack_owed && responder.unacknowledged >= ACK_BYTES {
            self.send_owed_ack(env);
        }
    }

    #[inline]
    fn execute_single_send<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) -> bool {
        let Some((wr_id, sge)) = self.rq.as_ref().and_then(|rq| rq.single()) else {
            return false;
        };
        let len = packet.payload.len();
        if len > sge.len as usize {
            return false;
        }
        if len > 0 {
            let mut part = *sge;
            part.len = len as u32;
            let pd = self.srq_pd.unwrap_or(self.responder.pd);
            let written = env.with_local(pd, &part, Access::LOCAL_WRITE, |memory, to| {
                to.is_none_or(|to| packet.payload.write(to, memory).is_ok())
            });
            if written != Ok(true) {
                return false;
            }
        }
        if let Some(rq) = &mut self.rq {
            rq.skip();
        }
        let wc = Wc {
            wr_id,
            opcode: WcOpcode::Recv,
            byte_len: len as u32,
            qpn: self.qpn,
            src_qpn: self.attr.dest_qpn,
            ..Wc::default()
        };
        env.complete(Side::Recv, wc, packet.headers.bth.solicited);
        self.end_single(packet, Turn::None, env);
        true
    }
}
