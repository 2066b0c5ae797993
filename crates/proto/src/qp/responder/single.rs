//! The short way for the next request of one packet: a SEND that finds a receive of one element, as programs that
//! answer messages send it, or a WRITE. A requester may cut a long WRITE into those. The request is executed as the
//! general way would, without the checks that cannot fail.

use crate::env::{Env, Side};
use crate::mr::Access;
use crate::payload::Data;
use crate::types::Psn;
use crate::wc::{Wc, WcOpcode};
use crate::wire::opcode::{Opcode, Operation, Service};
use crate::wr::Sge;

use super::super::attr::{QpState, QpType};
use super::super::{Arrival, Incoming, Qp};
use super::{Inbound, PingPong};

const SEND: Opcode = Opcode::new(Service::Rc, Operation::SendOnly);
const WRITE: Opcode = Opcode::new(Service::Rc, Operation::WriteOnly);

/// The messages that a WRITE or SEND of one packet stands for, and the bytes of each.
fn messages(packet: &Incoming<'_>) -> (u32, usize) {
    match packet.payload {
        Data::Joined(joined) => (packet.packets, joined.each()),
        _ => (1, packet.payload.len()),
    }
}

/// A SEND in one packet, without immediate data, as a link knows it that carries no other header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShortRequest {
    /// Its PSN.
    pub psn: Psn,
    /// The completion of the receive is a solicited event.
    pub solicited: bool,
    /// It asks for an ACK.
    pub ack_req: bool,
    /// A piggybacked ACK of everything up to this PSN.
    pub acks: Option<Psn>,
}

impl Qp {
    /// Tells whether a request of one packet with this PSN is next, and nothing is unusual.
    #[inline]
    fn is_plain_next(&self, psn: Psn, len: usize) -> bool {
        let responder = &self.responder;
        self.may_shorten()
            && psn == responder.expected
            && responder.inbound == Inbound::None
            && !responder.recv_taken
            && !responder.nak_sent
            && responder.out_of_order.is_none()
            && len <= self.mtu() as usize
            && self.srq.tag_matching.is_none()
            && self.attached.counted.is_empty()
            && (self.responder.established || self.attr.state != QpState::Rtr)
    }

    /// Takes a SEND from the peer, if it is next and nothing is unusual. If not, only what it acknowledges may have been taken,
    /// and [`receive`](Qp::receive) takes the packet. Call [`transmit_rest`](Qp::transmit_rest) after the last one.
    #[inline]
    pub fn receive_short_send<E: Env>(
        &mut self,
        send: &ShortRequest,
        payload: Data<'_>,
        env: &mut E,
    ) -> bool {
        let fits = |sge: &Sge| payload.len() <= sge.len as usize;
        let has_receive =
            || self.rq.as_ref().is_some_and(|rq| rq.single().is_some_and(|(_, sge)| fits(sge)));
        let is_plain = self.init.qp_type == QpType::Rc
            && self.attr.state.receives()
            && self.is_plain_next(send.psn, payload.len())
            && has_receive();
        if !is_plain {
            return false;
        }
        if let Some(psn) = send.acks {
            self.receive_executed(psn, env);
            if !self.attr.state.receives() {
                return false;
            }
        }
        self.execute_single_send(send, payload, env)
    }

    /// Tells whether nothing is unusual that only the general way changes.
    pub(in crate::qp) fn may_receive_short(&self) -> bool {
        let responder = &self.responder;
        self.may_shorten()
            && self.init.qp_type == QpType::Rc
            && self.attr.state.receives()
            && (self.responder.established || self.attr.state != QpState::Rtr)
            && self.rq.is_some()
            && responder.is_between_messages()
            && !responder.acks.owed
            && self.srq.tag_matching.is_none()
            && self.attached.counted.is_empty()
            && self.executed().is_some()
    }

    /// Executes a SEND of `len` bytes where the [short way](Self::short_ways) is open, and makes its completion. It counts as so many
    /// packets from this PSN on.
    /// `write` copies the data to an element of a protection domain. `None`: nothing has changed, but for bytes of that
    /// element, and the general way takes it. The peer has to be told of everything [`executed`](Self::executed).
    #[inline(always)]
    pub(in crate::qp) fn execute_short(
        &mut self,
        (psn, packets): (Psn, u32),
        len: u32,
        write: impl FnOnce(u32, &Sge) -> bool,
    ) -> Option<Wc> {
        debug_assert!(self.may_receive_short(), "the short way of receives is open");
        let responder = &mut self.responder;
        let rq = self.rq.as_mut()?;
        let (wr_id, &sge) = rq.single()?;
        let fits = psn == responder.expected
            && len <= sge.len
            && len <= packets * self.attr.path_mtu.bytes();
        let part = Sge { len, ..sge };
        if !fits || (len > 0 && !write(responder.pd, &part)) {
            return None;
        }
        rq.skip();
        responder.expected = psn.plus(packets);
        responder.note_executed(1, len.into());
        responder.acks.ping_pong = PingPong::None;
        Some(Wc {
            wr_id,
            opcode: WcOpcode::Recv,
            byte_len: len,
            qpn: self.qpn,
            src_qpn: self.attr.dest_qpn,
            ..Wc::default()
        })
    }

    /// The peer has done a WRITE or READ of `len` bytes by itself, without a PSN.
    #[inline]
    pub fn note_done_by_peer(&mut self, len: u32) {
        self.responder.note_executed(1, len.into());
    }

    /// The next PSN of the peer.
    #[inline]
    #[must_use]
    pub(in crate::qp) fn expected(&self) -> Psn {
        self.responder.expected
    }

    /// The PSN of the last request that was executed, if the peer may be told now: no answer has to leave before.
    #[inline]
    #[must_use]
    pub fn executed(&self) -> Option<Psn> {
        let responder = &self.responder;
        let may_tell = !responder.answers.are_pending()
            && responder.acks.held.is_none()
            && responder.out_of_order.is_none();
        may_tell.then(|| self.last_executed())
    }

    /// The peer was told of everything [`executed`](Self::executed).
    #[inline]
    pub(in crate::qp) fn note_told(&mut self) {
        self.acknowledged();
    }

    /// Executes a request if it is such a one, and nothing is wrong with it. False: nothing has changed, but for bytes of the
    /// memory that it is about.
    #[inline]
    pub(in crate::qp) fn execute_single<E: Env>(
        &mut self,
        packet: &Incoming<'_>,
        env: &mut E,
    ) -> bool {
        let bth = &packet.headers.bth;
        let (messages, each) = messages(packet);
        let is_plain = packet.packets == messages && self.is_plain_next(bth.psn, each);
        let (psn, solicited, ack_req) = (bth.psn, bth.solicited, bth.ack_req);
        let request = ShortRequest { psn, solicited, ack_req, acks: None };
        is_plain
            && match packet.headers.bth.opcode {
                SEND => self.execute_single_send(&request, packet.payload, env),
                WRITE => self.execute_single_write(&request, packet, env),
                _ => false,
            }
    }

    #[inline]
    fn execute_single_write<E: Env>(
        &mut self,
        request: &ShortRequest,
        packet: &Incoming<'_>,
        env: &mut E,
    ) -> bool {
        let Some(reth) = packet.headers.reth else { return false };
        let (payload, (messages, each)) = (&packet.payload, messages(packet));
        let len = payload.len();
        if reth.len as usize != each || !self.attr.access.contains(Access::REMOTE_WRITE) {
            return false;
        }
        if len > 0 {
            let span = match payload {
                Data::Joined(joined) => joined.span(),
                _ => len as u64,
            };
            let (reach, right) = (self.reach(), Access::REMOTE_WRITE);
            let range = (reth.va, span);
            let written = env.with_remote(reth.rkey, reach, range, right, |memory, to| {
                let done = match payload {
                    Data::Joined(joined) => joined.write_by_steps(to, memory),
                    _ => payload.write(to, memory),
                };
                done.is_ok()
            });
            if written != Ok(true) {
                return false;
            }
        }
        let is_one = match payload {
            Data::Joined(joined) => joined.is_one(),
            _ => true,
        };
        let ping_pong = match self.responder.acks.ping_pong {
            // Others of the same WRITE follow.
            ping_pong if is_one && !request.ack_req => ping_pong,
            PingPong::Theirs if is_one => PingPong::Ours,
            _ => PingPong::None,
        };
        self.end_single(request, (messages, len), ping_pong, env);
        true
    }

    /// Executes packets that were joined, if they are next and nothing is unusual, as the general way would one by one. False:
    /// nothing has changed, but for bytes of the memory that they are for.
    pub(in crate::qp) fn execute_joined<E: Env>(
        &mut self,
        arrival: &Arrival,
        packet: &Incoming<'_>,
        env: &mut E,
    ) -> bool {
        let bth = &packet.headers.bth;
        let is_of_peer = self.init.qp_type == QpType::Rc
            && self.attr.state.receives()
            && bth.pkey.matches(self.pkey)
            && arrival.is_from(&self.attr.av)
            && !arrival.is_marked();
        if !is_of_peer || !bth.opcode.is_middle() {
            return is_of_peer && self.execute_single(packet, env);
        }
        let executed = self.may_shorten()
            && bth.psn == self.responder.expected
            && !self.responder.nak_sent
            && self.responder.out_of_order.is_none()
            && self.srq.tag_matching.is_none()
            && self.execute(packet, env).is_ok();
        if executed {
            self.note_taken(bth.ack_req, packet.payload.len(), env);
        }
        executed
    }

    /// The request was executed.
    #[inline]
    fn end_single<E: Env>(
        &mut self,
        request: &ShortRequest,
        (messages, len): (u32, usize),
        ping_pong: PingPong,
        env: &mut E,
    ) {
        let responder = &mut self.responder;
        responder.expected = request.psn.plus(messages);
        responder.note_executed(messages.into(), len as u64);
        responder.acks.ping_pong = ping_pong;
        self.note_taken(request.ack_req, len, env);
    }

    #[inline]
    fn execute_single_send<E: Env>(
        &mut self,
        request: &ShortRequest,
        payload: Data<'_>,
        env: &mut E,
    ) -> bool {
        let Some((wr_id, sge)) = self.rq.as_ref().and_then(|rq| rq.single()) else {
            return false;
        };
        let len = payload.len();
        if len > sge.len as usize {
            return false;
        }
        if len > 0 {
            let mut part = *sge;
            part.len = len as u32;
            let pd = self.srq.pd.unwrap_or(self.responder.pd);
            let written = env.with_local(pd, &part, Access::LOCAL_WRITE, |memory, to| {
                to.is_none_or(|to| payload.write(to, memory).is_ok())
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
        env.complete(Side::Recv, wc, request.solicited);
        self.end_single(request, (1, len), PingPong::None, env);
        true
    }
}
