//! A SEND of one packet that comes next and finds a receive of one element: the likely request of a program that answers
//! messages. It is executed as the general way would, without the checks of what it cannot be.

use crate::env::{Env, Side};
use crate::mr::Access;
use crate::wc::{Wc, WcOpcode};
use crate::wire::opcode::{Opcode, Operation, Service};

use super::super::attr::QpState;
use super::super::{Incoming, Qp};
use super::{ACK_BYTES, Inbound, Turn};

impl Qp {
    /// Executes a request if it is such a SEND, and nothing is wrong with it. False: nothing has changed, but for bytes of the
    /// receive's memory.
    #[inline]
    pub(in crate::qp) fn execute_single<E: Env>(
        &mut self,
        packet: &Incoming<'_>,
        env: &mut E,
    ) -> bool {
        const SEND: Opcode = Opcode::new(Service::Rc, Operation::SendOnly);
        let (bth, len) = (&packet.headers.bth, packet.payload.len());
        let responder = &self.responder;
        let is_plain = bth.opcode == SEND
            && bth.psn == responder.expected
            && responder.inbound == Inbound::None
            && !responder.recv_taken
            && !responder.nak_sent
            && packet.packets == 1
            && len <= self.mtu() as usize
            && self.tag_matching.is_none()
            && self.counted.is_empty()
            && (self.established || self.attr.state != QpState::Rtr);
        let Some((wr_id, sge)) = self.rq.as_ref().filter(|_| is_plain).and_then(|rq| rq.single())
        else {
            return false;
        };
        if len > sge.len as usize {
            return false;
        }
        if len > 0 {
            let mut part = *sge;
            part.len = len as u32;
            let pd = self.srq_pd.unwrap_or(responder.pd);
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
        let responder = &mut self.responder;
        responder.expected = bth.psn.plus(1);
        responder.msn = (responder.msn + 1) & 0xff_ffff;
        responder.turn = Turn::None;
        responder.ack_owed |= bth.ack_req;
        responder.unacknowledged = responder.unacknowledged.saturating_add(len as u32);
        let wc = Wc {
            wr_id,
            opcode: WcOpcode::Recv,
            byte_len: len as u32,
            qpn: self.qpn,
            src_qpn: self.attr.dest_qpn,
            ..Wc::default()
        };
        env.complete(Side::Recv, wc, bth.solicited);
        if self.responder.ack_owed && self.responder.unacknowledged >= ACK_BYTES {
            self.send_owed_ack(env);
        }
        true
    }
}
