//! Requests to a queue pair of the same process, which executes them while they are posted. No packet is made, and none is owed.
//!
//! A SEND has its PSN at both ends, so packets may come before it and after it. A WRITE or READ has none, as between processes
//! ([`super::direct`]).

use crate::direct::{Direction, MAX_DIRECT};
use crate::types::{Psn, Qpn};
use crate::wc::{Wc, WcOpcode};
use crate::wr::{SendFlags, Sge};

use super::super::Qp;
use super::super::attr::QpType;
use super::single::SHORT_FLAGS;

impl Qp {
    /// Tells whether both are the peers of each other, packets of one come to the other, and both count the same packets.
    #[inline]
    #[must_use]
    pub fn is_peer_of(&self, other: &Self) -> bool {
        let (ours, theirs) = (&self.attr, &other.attr);
        ours.dest_qpn == other.qpn
            && theirs.dest_qpn == self.qpn
            && ours.av.dgid == theirs.av.sgid
            && theirs.av.dgid == ours.av.sgid
            && ours.path_mtu == theirs.path_mtu
            && self.pkey.matches(other.pkey)
    }

    /// Plans a SEND of one element and `len` bytes that the peer executes while it is posted: its PSN, and the packets that it
    /// counts as. `None`: it has to be packets.
    #[inline]
    #[must_use]
    pub fn plan_within(&self, flags: SendFlags, len: u32) -> Option<(Psn, u32)> {
        let (sq, requester) = (&self.sq, &self.requester);
        let may_leave = sq.done == sq.head()
            && requester.una == requester.fresh_psn
            && self.may_send_at_once()
            && SHORT_FLAGS.contains(flags)
            && !sq.is_full(self.attached.credit.released())
            && (!flags.contains(SendFlags::INLINE) || len as usize <= sq.max_inline())
            && len <= MAX_DIRECT;
        may_leave.then(|| (requester.fresh_psn, self.packets(len)))
    }

    /// Executes a SEND that the peer has [planned](Self::plan_within), and makes its completion. `write` copies its data to an
    /// element of a protection domain. `None`: nothing has changed, but for bytes of that element.
    #[inline]
    pub fn execute_within(
        &mut self,
        planned: (Psn, u32),
        len: u32,
        write: impl FnOnce(u32, &Sge) -> bool,
    ) -> Option<Wc> {
        // A program expects its own sends to be complete when the reply comes: an ACK may be owed still, or be on its way.
        if self.requester.una != self.requester.fresh_psn || !self.may_receive_short() {
            return None;
        }
        self.execute_short(planned, len, write)
    }

    /// The protection domain and the queue pair by which the keys of the peer's WRITE or READ are checked, if it may be done while
    /// it is posted.
    #[inline]
    #[must_use]
    pub fn admits_within(&self, peer: &Self, direction: Direction) -> Option<(u32, Qpn)> {
        // A program that finds new bytes in its memory expects its own sends to be complete, as with a SEND.
        let admits = self.may_shorten()
            && self.init.qp_type == QpType::Rc
            && self.responder.is_between_messages()
            && self.requester.una == self.requester.fresh_psn
            // It takes no PSN, but would have this one.
            && self.expected() == peer.requester.fresh_psn
            && self.open_to_direct()?.contains(direction.right());
        admits.then(|| self.reach())
    }

    /// The peer has executed a SEND that was [planned](Self::plan_within). Makes its completion, if there is one.
    #[inline]
    pub fn book_within(
        &mut self,
        planned: (Psn, u32),
        (wr_id, flags): (u64, SendFlags),
        len: u32,
    ) -> Option<Wc> {
        self.note_whole(planned, len);
        let (psn, cost) = (self.requester.fresh_psn, self.requester.fresh_cost);
        self.requester.answered(psn, cost);
        self.complete_at_once(wr_id, WcOpcode::Send, flags, len)
    }
}
