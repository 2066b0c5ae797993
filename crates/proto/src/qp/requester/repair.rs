//! One packet is missing at the peer: it alone is sent again, in the hope that the peer keeps those that came after it (as
//! [`Env::early_room`] lets a responder), and that it is the only one. All behind it follow where that proves wrong.

use crate::counters::Counter;
use crate::env::Env;
use crate::types::Psn;

use super::super::Qp;

/// For so many losses at most all is sent again, after some for which a single packet was not enough: the attempt costs a way
/// there and back, which a peer that keeps nothing never makes good.
const MOST_WHOLE: u8 = 64;

/// A single loss makes the window smaller by this part of it.
const PART: u64 = 8;

/// Whether a single packet is likely to be enough, by what was seen last.
#[derive(Debug, Default)]
pub(super) struct Repair {
    /// Behind the packet that was sent again alone.
    end: Option<Psn>,
    /// The next losses for which all is sent again.
    whole: u8,
    /// How many those were the last time.
    last_whole: u8,
}

impl Repair {
    /// For the loss of this packet.
    fn may_suffice(&mut self, una: Psn) -> bool {
        match self.end.take() {
            Some(end) if end == una => {
                self.last_whole = (4 * self.last_whole).clamp(1, MOST_WHOLE);
                self.whole = self.last_whole - 1;
                return false;
            }
            Some(_) => self.last_whole = 0,
            None => {}
        }
        let may = self.whole == 0;
        self.whole = self.whole.saturating_sub(1);
        may
    }
}

impl Qp {
    /// The peer says that packet `una` is missing.
    pub(in crate::qp) fn sequence_nak<E: Env>(&mut self, env: &mut E) {
        if !self.is_new_gap(Counter::PacketSeqErr, env) {
            return;
        }
        if self.requester.repair.may_suffice(self.requester.una) {
            self.reduce_window(PART, env);
            if self.take_retry(env) {
                self.send_missing(env);
            }
        } else {
            self.go_back_for_gap(env);
        }
    }

    /// Sends packet `una` again, and goes on where the requester was; if that does not go, back there with all.
    fn send_missing<E: Env>(&mut self, env: &mut E) {
        let (una, resume) = (self.requester.una, self.cursor_psn());
        // Requests with answers of their own keep the order in which those come.
        let is_plain = self.requester.responses.is_empty() && self.requester.rnr_until.is_none();
        self.go_back(una);
        if is_plain && resume.since(una) > 1 && self.send_packet(0, env) == Ok(true) {
            self.requester.repair.end = Some(self.cursor_psn());
            self.go_back(resume);
        }
    }

    /// Packets up to `una` were acknowledged. If that is the one that was sent again and no more, the peer has kept nothing of
    /// what came after it, and need not say so.
    pub(in crate::qp) fn check_repair<E: Env>(&mut self, env: &mut E) {
        let una = self.requester.una;
        if self.requester.repair.end == Some(una) && self.awaits_answer() {
            self.requester.repair.may_suffice(una);
            self.requester.went_back_to = Some(una);
            self.go_back_for_gap(env);
        }
    }
}
