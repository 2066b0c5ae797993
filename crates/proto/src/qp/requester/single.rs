//! A SEND or WRITE of one packet that nothing holds back: the likely request of a program that answers messages, or sends many
//! short ones. It leaves as the general way would send it, without the cursor inside a message and the headers that it cannot
//! have.

use crate::env::{Env, LinkProps, TransmitError};
use crate::memory::Memory;
use crate::payload::Payload;
use crate::types::Psn;
use crate::wc::{Wc, WcOpcode};
use crate::wire::bth::Bth;
use crate::wire::opcode::{Opcode, Operation, Service};
use crate::wire::packet::Headers;
use crate::wr::{SendFlags, SendOp, SendWr, Sge};

use super::super::Qp;
use super::super::attr::{QpState, QpType};
use super::super::send_queue::PACKET_COST;
use super::super::timers::Timer;
use super::{MAX_PSNS, has_room, reth};

/// A SEND that leaves while it is posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShortSend {
    /// Its PSN.
    pub psn: Psn,
    /// Bytes.
    pub len: u32,
    /// The ACK that it carries, of everything up to this PSN.
    pub acks: Option<Psn>,
}

/// The ways of short messages that are open.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ShortWays {
    /// SENDs, and their completions, may take it.
    pub sends: bool,
    /// Receives may take it.
    pub receives: bool,
    /// WRITEs and READs that the device does by itself may take it.
    pub directs: bool,
}

/// The flags that such a SEND may have.
pub(super) const SHORT_FLAGS: SendFlags =
    SendFlags::SIGNALED.union(SendFlags::SOLICITED).union(SendFlags::INLINE);

const SEND_ONLY: Opcode = Opcode::new(Service::Rc, Operation::SendOnly);

/// The fate of the WQE `next`.
pub(super) enum Single {
    Sent,
    /// It has to go the general way.
    Other,
    Stopped(TransmitError),
}

impl Qp {
    /// Tells which short ways are open, on a link with these properties. A short way leaves that as it is.
    #[must_use]
    pub fn short_ways(&self, props: &LinkProps) -> ShortWays {
        ShortWays {
            sends: self.may_send_short(props),
            receives: self.may_receive_short(),
            directs: self.may_post_direct() && self.is_known_to_peer(),
        }
    }

    /// Tells whether nothing is unusual that only the general way changes.
    fn may_send_short(&self, props: &LinkProps) -> bool {
        // Where the ACK timer does not run, the general way starts it.
        let is_timed = self.timers.is_running(Timer::Ack) || self.attr.timeout == 0;
        props.immediate && is_timed && self.may_send_at_once()
    }

    /// As [`may_send_short`](Self::may_send_short), of a SEND that is answered while it is posted.
    pub(super) fn may_send_at_once(&self) -> bool {
        let (sq, requester) = (&self.sq, &self.requester);
        self.may_shorten()
            && self.attr.state == QpState::Rts
            && self.init.qp_type == QpType::Rc
            && sq.next == sq.head()
            && sq.next == sq.started
            && requester.max_sent == requester.fresh_psn
            && sq.max_sge() > 0
            && !self.timers.is_running(Timer::RnrWait)
            && requester.halted.is_none()
            && !requester.window_closed
            && requester.recovery.is_calm(&self.attr)
            && self.srq.tag_matching.is_none()
            && self.attached.counted.is_empty()
            && !self.keeps_any()
            && !self.rate.is_limited()
    }

    /// Plans a SEND of one element and `len` bytes that leaves while it is posted, on a link with this window. `None`: it
    /// has to be queued, and to leave the general way.
    #[inline]
    fn plan_short_send(&self, flags: SendFlags, len: u32, props: &LinkProps) -> Option<ShortSend> {
        if !self.may_send_short(props) {
            return None;
        }
        let acks = self.piggybacked_ack(len, props);
        self.plan_open(flags, len, props).map(|planned| ShortSend { acks, ..planned })
    }

    /// Plans a SEND of one element and `len` bytes that leaves while it is posted, where the [short way](Self::short_ways) is
    /// open. It carries no ACK.
    #[inline]
    pub(in crate::qp) fn plan_open(
        &self,
        flags: SendFlags,
        len: u32,
        props: &LinkProps,
    ) -> Option<ShortSend> {
        debug_assert!(self.may_send_short(props), "the short way of sends is open");
        let (sq, requester) = (&self.sq, &self.requester);
        let psn = requester.fresh_psn;
        let in_flight = requester.fresh_cost.wrapping_sub(requester.una_cost);
        let cost = u64::from(len) + PACKET_COST;
        let may_leave = SHORT_FLAGS.contains(flags)
            && !sq.is_full(self.attached.credit.released())
            && (!flags.contains(SendFlags::INLINE) || len as usize <= sq.max_inline())
            && len <= self.mtu()
            && in_flight + cost <= props.window.into()
            && (psn.since(requester.una) as u32) < MAX_PSNS;
        may_leave.then_some(ShortSend { psn, len, acks: None })
    }

    /// Completes the SENDs up to `psn`, all of one packet, which the peer has executed, where the [short
    /// way](Self::short_ways) is open. False if one of them is something else: then [`receive_executed`](Self::receive_executed)
    /// takes the answer, or the rest of it.
    #[inline]
    pub(in crate::qp) fn complete_short(&mut self, psn: Psn, mut each: impl FnMut(Wc)) -> bool {
        let requester = &mut self.requester;
        let is_plain =
            requester.unfenced == 0 && requester.local == 0 && psn.since(requester.max_sent) < 0;
        if !is_plain {
            return false;
        }
        while psn.since(requester.una) >= 0 {
            let position = self.sq.done;
            let sqe = *self.sq.at(position);
            if sqe.packets != 1 || sqe.op != SendOp::Send || position == self.sq.started {
                return false;
            }
            self.sq.done = position.wrapping_add(1);
            let cost = sqe.cost_before.wrapping_add(u64::from(sqe.len) + PACKET_COST);
            requester.answered(sqe.first_psn.plus(1), cost);
            if self.init.sq_sig_all || sqe.flags.contains(SendFlags::SIGNALED) {
                each(Wc {
                    wr_id: sqe.wr_id,
                    opcode: WcOpcode::Send,
                    byte_len: sqe.len,
                    qpn: self.qpn,
                    sq_count: self.sq.done,
                    ..Wc::default()
                });
            }
        }
        requester.recovery.on_short_answer();
        true
    }

    /// Copies the data of a planned SEND that is inline. `None`: it cannot be read.
    #[inline]
    pub fn copy_inline(&mut self, sge: &Sge, memory: &impl Memory) -> Option<&[u8]> {
        let room = &mut self.sq.inline_mut()[..sge.len as usize];
        memory.read(sge.addr, room).ok()?;
        Some(room)
    }

    /// The link has taken a SEND that was planned.
    #[inline]
    pub(in crate::qp) fn book_short_send(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        sge: Sge,
        planned: ShortSend,
        link: &LinkProps,
    ) {
        let ShortSend { psn, len, acks } = planned;
        self.sq.push_sent(wr_id, flags, sge, (psn, self.requester.fresh_cost));
        self.note_single(psn, len);
        // Another link that took it has carried none.
        if acks.is_some() && link.immediate {
            self.note_carried(None);
        }
    }

    /// A request of one packet and `len` bytes has left.
    #[inline]
    pub(super) fn note_single(&mut self, psn: Psn, len: u32) {
        self.note_whole((psn, 1), len);
    }

    /// A request of so many packets from this PSN on, and of `len` bytes, has left.
    #[inline]
    pub(super) fn note_whole(&mut self, (psn, packets): (Psn, u32), len: u32) {
        let requester = &mut self.requester;
        let cost = u64::from(len) + u64::from(packets) * PACKET_COST;
        requester.fresh_cost = requester.fresh_cost.wrapping_add(cost);
        requester.fresh_psn = psn.plus(packets);
        requester.max_sent = requester.fresh_psn;
        requester.k = 0;
        self.responder.note_request_sent();
    }

    /// Posts a request and sends it in one, if it is a plain SEND and nothing is unusual. With false nothing has changed.
    #[inline]
    pub(in crate::qp) fn post_short_send<E: Env>(&mut self, wr: &SendWr<'_>, env: &mut E) -> bool {
        let &[sge] = wr.sges else { return false };
        if wr.op != SendOp::Send {
            return false;
        }
        let planned = self.plan_short_send(wr.flags, sge.len, env.props());
        let Some(planned) = planned else { return false };
        let is_inline = wr.flags.contains(SendFlags::INLINE);
        if is_inline && self.copy_inline(&sge, env.memory()).is_none() {
            return false;
        }
        let headers = Headers::new(Bth {
            opcode: SEND_ONLY,
            solicited: wr.flags.contains(SendFlags::SOLICITED),
            ack_req: true,
            ..self.bth(planned.psn)
        });
        let payload = if is_inline {
            Payload::bytes(&self.sq.inline_next()[..sge.len as usize])
        } else {
            Payload::gather(wr.sges, 0, sge.len as usize, self.init.pd)
        };
        let sent = env.transmit(&self.attr.av, &headers, &payload, planned.acks).is_ok();
        if sent {
            self.book_short_send(wr.wr_id, wr.flags, sge, planned, env.props());
            if !env.props().immediate {
                // It took another link, which has timers of its own.
                self.note_sent(env);
            }
        }
        sent
    }

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
            && !self.rate.is_limited()
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
        let immediate = env.props().immediate;
        let acks = self.piggybacked_ack(len, env.props());
        if let Err(error) = env.transmit(&self.attr.av, &headers, &payload, acks) {
            return Single::Stopped(error);
        }
        self.note_piggybacked(acks, immediate, env);
        let entry = self.sq.at_mut(position);
        (entry.first_psn, entry.packets, entry.split) = (psn, 1, false);
        entry.cost_before = self.requester.fresh_cost;
        self.note_single(psn, len);
        let next = position.wrapping_add(1);
        (self.sq.next, self.sq.started) = (next, next);
        Single::Sent
    }
}
