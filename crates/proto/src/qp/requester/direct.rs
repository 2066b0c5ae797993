//! WRITEs and READs that the device does by itself, without a message ([`Env::direct`]).
//!
//! That keeps the order only when everything before was executed, and a program that keeps its queue full never comes to
//! that point once messages are in flight: the first of a stream, or those before it. So after some WRITEs and READs in a
//! row that went as messages the queue pair comes to rest, if the link says that it is worth it
//! ([`Env::is_worth_rest`]): the next one waits until all are answered, and if it is done then, so are those behind it.
//! Where it has to be a message all the same, it is asked again after twice as many.

use crate::direct::{Direct, Direction, Local, MAX_DIRECT};
use crate::env::Env;
use crate::wc::WcStatus;
use crate::wr::{SendFlags, SendOp};

use super::super::Qp;
use super::super::attr::QpState;

/// WRITEs and READs that go as messages before the queue pair comes to rest: at first, and at most.
const FIRST_REST: u32 = 16;
const LAST_REST: u32 = 4096;

/// What becomes of the WQE `next`.
pub(super) enum Way {
    /// It was done.
    Done,
    /// It has to be a message.
    Message,
    /// It may be done as soon as everything before it is answered.
    Wait,
}

/// When the queue pair comes to rest.
#[derive(Debug)]
pub(super) struct Rest {
    /// Messages in a row that might have been done without.
    row: u32,
    /// How many make it rest.
    after: u32,
}

impl Default for Rest {
    fn default() -> Self {
        Self { row: 0, after: FIRST_REST }
    }
}

impl Rest {
    /// Something that is a message in any case comes next.
    #[inline]
    pub(super) fn interrupt(&mut self) {
        self.row = 0;
    }

    /// A message that might have been done without, for the answers to others are missing. Whether it waits for them.
    fn begins(&mut self) -> bool {
        if self.row < self.after {
            self.row += 1;
        }
        self.row == self.after
    }

    fn done(&mut self) {
        *self = Self::default();
    }

    /// Everything was answered, and it had to be a message all the same.
    fn refused(&mut self) {
        if self.row == self.after {
            self.after = (self.after * 2).min(LAST_REST);
        }
        self.row = 0;
    }
}

impl Qp {
    /// Has the device do the WQE `next` without a message, where that keeps the order: everything before it was executed. It
    /// takes no PSNs. What is wrong with one is found out as it goes the ordinary way.
    pub(super) fn send_direct<E: Env>(&mut self, env: &mut E) -> Way {
        let position = self.sq.next;
        let sqe = self.sq.at(position);
        let (direction, remote) = match sqe.op {
            SendOp::Write(remote) => (Direction::Write, remote),
            SendOp::Read(remote) => (Direction::Read, remote),
            _ => {
                self.requester.rest.interrupt();
                return Way::Message;
            }
        };
        if self.attr.state != QpState::Rts
            || self.is_paced()
            || !(1..=MAX_DIRECT).contains(&sqe.len)
            || (direction == Direction::Read && self.attr.max_rd_atomic == 0)
        {
            return Way::Message;
        }
        let reliable = self.init.qp_type.is_reliable();
        if reliable && self.requester.una != self.requester.fresh_psn {
            if !self.requester.rest.begins() {
                return Way::Message;
            }
            if env.is_worth_rest(self.attr.dest_qpn, direction, remote, sqe.len) {
                return Way::Wait;
            }
            self.requester.rest.refused();
            return Way::Message;
        }
        // Without answers nobody tells when the peer has executed what was sent.
        let in_order = reliable || self.requester.fresh_cost == 0;
        if !in_order || self.sq.done != position {
            return Way::Message;
        }
        let inline = sqe.flags.contains(SendFlags::INLINE);
        let operation = Direct {
            dest_qpn: self.attr.dest_qpn,
            direction,
            remote,
            len: sqe.len,
            local: if inline {
                Local::Inline(self.sq.inline(position))
            } else {
                Local::Sges(self.sq.sges(position))
            },
            pd: self.init.pd,
        };
        if !env.direct(&operation) {
            self.requester.rest.refused();
            return Way::Message;
        }
        self.requester.rest.done();
        let next = position.wrapping_add(1);
        (self.sq.next, self.sq.started) = (next, next);
        self.complete_oldest(WcStatus::Success, env);
        Way::Done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages in a row until it rests.
    fn row(rest: &mut Rest) -> u32 {
        (1..).find(|_| rest.begins()).expect("it rests some time")
    }

    #[test]
    fn what_is_refused_rests_less_often() {
        let mut rest = Rest::default();
        for expected in [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 4096] {
            assert_eq!(row(&mut rest), expected);
            assert!(rest.begins(), "it waits for all answers");
            rest.refused();
        }
        rest.refused();
        assert_eq!(row(&mut rest), 4096, "a refusal without a rest changes nothing");
        rest.done();
        assert_eq!(row(&mut rest), FIRST_REST);
    }

    #[test]
    fn others_between_them_keep_it_from_resting() {
        let mut rest = Rest::default();
        for _ in 0..100 {
            assert!((1..FIRST_REST).all(|_| !rest.begins()));
            rest.interrupt();
        }
    }
}
