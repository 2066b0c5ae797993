//! WRITEs and READs that the device does by itself, without a message ([`LinkEnv::direct`](crate::env::LinkEnv::direct)).

use crate::direct::{Direct, Direction, Local, MAX_DIRECT, WORTH_WAITING};
use crate::env::Env;
use crate::wc::{Wc, WcOpcode, WcStatus};
use crate::wr::{SendFlags, SendOp};

use super::super::Qp;
use super::super::attr::{QpState, QpType};

/// The fate of a request that the device may do by itself.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Directly {
    /// It is done: so many bytes were copied.
    Done(u32),
    /// It will be, once the messages before it are answered.
    Waits,
    /// It has to be a message.
    No,
}

impl Qp {
    /// Tells whether nothing is unusual that only the general way changes.
    #[must_use]
    pub fn may_post_direct(&self) -> bool {
        self.may_shorten()
            && self.attr.state == QpState::Rts
            && self.init.qp_type == QpType::Rc
            && self.sq.max_sge() > 0
            && self.requester.halted.is_none()
            && self.srq.tag_matching.is_none()
            && self.attached.counted.is_empty()
            && !self.rate.is_limited()
    }

    /// Tells whether the peer has answered a packet of this connection. A copy shows no PSN: if the two ends differ in theirs, a message
    /// has to find it. After 2^24 packets it is false once more, for one message.
    pub(super) fn is_known_to_peer(&self) -> bool {
        self.requester.una != self.attr.sq_psn
    }

    /// Tells whether the device may write to the peer's memory in place of a WRITE that keeps no order with other requests.
    #[must_use]
    pub fn may_write_at_once(&self, len: u32) -> bool {
        self.may_post_direct() && (1..=MAX_DIRECT).contains(&len)
    }

    /// Tells whether the device may do a WRITE or READ of one element while it is posted, where the [short
    /// way](Self::short_ways) is open: everything before it was executed.
    #[inline]
    #[must_use]
    pub fn may_do_directly(&self, direction: Direction, flags: SendFlags, len: u32) -> bool {
        debug_assert!(self.may_post_direct(), "the short way of one-sided operations is open");
        let is_inline = flags.contains(SendFlags::INLINE);
        let is_valid = match direction {
            Direction::Write => !is_inline || len as usize <= self.sq.max_inline(),
            Direction::Read => !is_inline && self.attr.max_rd_atomic > 0,
        };
        is_valid
            && self.sq.done == self.sq.head()
            && self.requester.una == self.requester.fresh_psn
            && (1..=MAX_DIRECT).contains(&len)
            && !self.sq.is_full(self.attached.credit.released())
    }

    /// The device has done an operation for which [`may_do_directly`](Self::may_do_directly) holds. Makes its completion, if
    /// there is one.
    #[inline]
    pub fn book_direct(
        &mut self,
        wr_id: u64,
        direction: Direction,
        flags: SendFlags,
        len: u32,
    ) -> Option<Wc> {
        let opcode = match direction {
            Direction::Write => WcOpcode::RdmaWrite,
            Direction::Read => WcOpcode::RdmaRead,
        };
        self.complete_at_once(wr_id, opcode, flags, len)
    }

    /// A request was posted, and executed. Makes its completion, if there is one. There was none that is not complete.
    #[inline]
    pub(super) fn complete_at_once(
        &mut self,
        wr_id: u64,
        opcode: WcOpcode,
        flags: SendFlags,
        len: u32,
    ) -> Option<Wc> {
        let is_signaled = self.init.sq_sig_all || flags.contains(SendFlags::SIGNALED);
        self.sq.pass(len, is_signaled);
        is_signaled.then(|| Wc {
            wr_id,
            opcode,
            byte_len: len,
            qpn: self.qpn,
            sq_count: self.sq.done,
            ..Wc::default()
        })
    }

    /// Has the device do the WQE `next` without a message, where that keeps the order: everything before it was
    /// executed. It takes no PSNs. A faulty WQE has to be a message, and so the fault is found.
    ///
    /// A long one waits until the messages before it are answered. Short ones go on as messages until all are answered.
    #[inline]
    pub(super) fn send_direct<E: Env>(&mut self, env: &mut E) -> Directly {
        let position = self.sq.next;
        let sqe = self.sq.at(position);
        let (direction, remote) = match sqe.op {
            SendOp::Write(remote) => (Direction::Write, remote),
            SendOp::Read(remote) => (Direction::Read, remote),
            _ => return Directly::No,
        };
        let is_reliable = self.init.qp_type.is_reliable();
        let is_answered = if is_reliable {
            self.requester.una == self.requester.fresh_psn
        } else {
            // Without answers it is unknown when the peer has executed the packets.
            self.requester.fresh_cost == 0
        };
        let waits = is_reliable && !is_answered && sqe.len >= WORTH_WAITING;
        if !(is_answered && self.sq.done == position || waits)
            || is_reliable && is_answered && !self.is_known_to_peer()
            || self.attr.state != QpState::Rts
            || self.rate.is_limited()
            || !(1..=MAX_DIRECT).contains(&sqe.len)
            || (direction == Direction::Read && self.attr.max_rd_atomic == 0)
        {
            return Directly::No;
        }
        let operation = Direct {
            dest_qpn: self.attr.dest_qpn,
            direction,
            payload_of: None,
            remote,
            len: sqe.len,
            local: if sqe.flags.contains(SendFlags::INLINE) {
                Local::Inline(self.sq.inline(position))
            } else {
                Local::Sges(self.sq.sges(position))
            },
            pd: self.init.pd,
        };
        if waits {
            return if env.admits(&operation) { Directly::Waits } else { Directly::No };
        }
        if !env.direct(&operation) {
            return Directly::No;
        }
        let (next, len) = (position.wrapping_add(1), operation.len);
        (self.sq.next, self.sq.started) = (next, next);
        self.complete_oldest(WcStatus::Success, env);
        Directly::Done(len)
    }
}
