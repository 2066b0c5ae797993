//! WRITEs and READs that the device does by itself, without a message ([`LinkEnv::direct`](crate::env::LinkEnv::direct)).

use crate::direct::{Direct, Direction, Local, MAX_DIRECT};
use crate::env::Env;
use crate::wc::WcStatus;
use crate::wr::{SendFlags, SendOp};

use super::super::Qp;
use super::super::attr::QpState;

impl Qp {
    /// Has the device do the WQE `next` without a message, where that keeps the order: everything before it was
    /// executed. It takes no PSNs. With false it has to be a message. A faulty WQE goes that way, where the fault is
    /// found.
    ///
    /// A stream that began with messages goes on with them until all are answered: it does not wait for that. A stream
    /// that began without goes on without.
    #[inline]
    pub(super) fn send_direct<E: Env>(&mut self, env: &mut E) -> bool {
        let position = self.sq.next;
        let sqe = self.sq.at(position);
        let (direction, remote) = match sqe.op {
            SendOp::Write(remote) => (Direction::Write, remote),
            SendOp::Read(remote) => (Direction::Read, remote),
            _ => return false,
        };
        let is_answered = if self.init.qp_type.is_reliable() {
            self.requester.una == self.requester.fresh_psn
        } else {
            // Without answers it is unknown when the peer has executed the packets.
            self.requester.fresh_cost == 0
        };
        if !is_answered
            || self.sq.done != position
            || self.attr.state != QpState::Rts
            || self.rate.is_limited()
            || !(1..=MAX_DIRECT).contains(&sqe.len)
            || (direction == Direction::Read && self.attr.max_rd_atomic == 0)
        {
            return false;
        }
        let operation = Direct {
            dest_qpn: self.attr.dest_qpn,
            direction,
            remote,
            len: sqe.len,
            local: if sqe.flags.contains(SendFlags::INLINE) {
                Local::Inline(self.sq.inline(position))
            } else {
                Local::Sges(self.sq.sges(position))
            },
            pd: self.init.pd,
        };
        if !env.direct(&operation) {
            return false;
        }
        let next = position.wrapping_add(1);
        (self.sq.next, self.sq.started) = (next, next);
        self.complete_oldest(WcStatus::Success, env);
        true
    }
}
