//! Selective retransmit. When one packet is missing at the peer, the requester sends that packet alone again. It hopes
//! that the peer keeps the packets behind it (as [`LinkProps::early_room`](crate::env::LinkProps::early_room) lets a responder), and that no other is missing.
//! If that proves wrong, the requester goes back N.

use crate::counters::Counter;
use crate::env::Env;
use crate::types::Psn;

use super::super::Qp;
use super::super::attr::QpType;
use super::super::timers::Timer;

/// The greatest number of losses for which the requester goes back at once, after selective retransmit did not help. An
/// attempt costs a round trip, which a peer that keeps no packets never makes good.
const MOST_WHOLE: u8 = 64;

/// A single loss makes the window smaller by this part of it.
const PART: u64 = 8;

/// Predicts from recent losses whether a single packet is likely to be enough.
#[derive(Debug, Default)]
pub(super) struct Repair {
    /// Behind the packet that was sent again alone, until more than it is acknowledged, or all is sent again.
    end: Option<Psn>,
    /// The next losses for which all is sent again.
    whole: u8,
    /// The length of the last such run of losses; 0 since a single packet was enough.
    last_whole: u8,
}

impl Repair {
    /// Tells whether a single packet may suffice for the loss of `una`.
    fn may_suffice(&mut self, una: Psn) -> bool {
        match self.end.take() {
            Some(end) if end == una => {
                self.fell_short();
                return false;
            }
            Some(_) => self.last_whole = 0,
            None => {}
        }
        let may = self.whole == 0;
        self.whole = self.whole.saturating_sub(1);
        may
    }

    /// The packets behind the one that was sent again are missing, too.
    fn fell_short(&mut self) {
        self.last_whole = self.last_whole.saturating_mul(4).clamp(1, MOST_WHOLE);
        self.whole = self.last_whole - 1;
    }

    /// All is sent again, for another reason.
    pub(super) fn give_up(&mut self) {
        self.end = None;
    }
}

impl Qp {
    /// The peer says that packet `una` is missing.
    pub(in crate::qp) fn sequence_nak<E: Env>(&mut self, env: &mut E) {
        if !self.is_new_gap(Counter::PacketSeqErr, env) {
            // It was sent again already. A peer that was not ready then is there now, so its silence begins anew.
            return self.restart_probe(env);
        }
        if self.requester.retries_left == 0 && self.requester.una == self.attr.sq_psn {
            // Nothing was answered yet: the peer may only now receive. That ends no connection.
            return self.send_again(env);
        }
        let alone = self.requester.repair.may_suffice(self.requester.una);
        if !alone || !self.send_missing(env) {
            self.go_back_for_gap(env);
        }
    }

    /// Sends packet `una` again, and goes on where the requester was. False, and nothing has changed, if that is
    /// impossible. It is if a request from there on has an answer of its own, whose order counts, or if no packet may
    /// leave now.
    fn send_missing<E: Env>(&mut self, env: &mut E) -> bool {
        let (una, resume) = (self.requester.una, self.cursor_psn());
        let is_plain = self.init.qp_type == QpType::Rc
            && self.requester.responses.is_empty()
            && !self.timers.is_running(Timer::RnrWait)
            && self.requester.retries_left > 0
            && resume.since(una) > 1;
        if !is_plain {
            return false;
        }
        self.move_cursor(una);
        let sent = self.send_packet(0, env) == Ok(true);
        let end = self.cursor_psn();
        self.move_cursor(resume);
        if sent {
            self.requester.retries_left -= 1;
            self.requester.repair.end = Some(end);
            self.reduce_window(PART, env);
            self.restart_ack_timer(env.now(), env);
            self.restart_probe(env);
        }
        sent
    }

    /// Packets up to `una` were acknowledged. If that covers the packet that was sent again and no more, the peer has
    /// kept no packet behind it, and need not say so.
    pub(in crate::qp) fn check_repair<E: Env>(&mut self, env: &mut E) {
        let (una, repair) = (self.requester.una, &mut self.requester.repair);
        let Some(end) = repair.end else { return };
        if una.since(end) > 0 {
            (repair.end, repair.last_whole) = (None, 0);
        } else if end == una && self.awaits_answer() {
            self.requester.repair.fell_short();
            self.requester.asked_for = Some(una);
            self.go_back_for_gap(env);
        }
    }
}
