//! Carries out what [`LossRecovery`] decides: goes back N, or sends a single packet again.

use crate::counters::Counter;
use crate::env::Env;
use crate::types::{Psn, timer_code};
use crate::wc::WcStatus;

use super::super::Qp;
use super::super::attr::QpType;
use super::super::timers::{Expired, Timer};
use super::recovery::{Decision, LossRecovery, Moment};

impl Qp {
    #[inline]
    fn recovery<'a, E: Env>(&'a mut self, env: &'a E) -> (&'a mut LossRecovery, Moment<'a, E>) {
        let in_flight = self.awaits_answer();
        let requester = &mut self.requester;
        let moment = Moment {
            timers: &mut self.timers,
            clock: env,
            attr: &self.attr,
            link: env.props(),
            una: requester.una,
            max_sent: requester.max_sent,
            in_flight,
        };
        (&mut requester.recovery, moment)
    }

    fn carry_out<E: Env>(&mut self, decision: Decision, env: &mut E) {
        match decision {
            Decision::Wait => {}
            Decision::SelectiveRetransmit => self.retransmit_oldest(env),
            Decision::GoBackN => self.go_back(self.requester.una),
            Decision::Fail(status) => {
                let is_rnr = status == WcStatus::RnrRetryExcErr;
                let counter =
                    if is_rnr { Counter::RnrRetryExceeded } else { Counter::RetryExceeded };
                env.count(counter, 1);
                self.fail_oldest(status, env);
            }
        }
    }

    /// As [`carry_out`](Self::carry_out), of an event that counts unless there is nothing to do.
    fn count_and_carry_out<E: Env>(&mut self, counter: Counter, decision: Decision, env: &mut E) {
        if decision != Decision::Wait {
            env.count(counter, 1);
            let repeats = &mut self.requester.repeats;
            match counter {
                Counter::RnrNakReceived => repeats.rnr_naks += 1,
                _ => repeats.retries += 1,
            }
        }
        self.carry_out(decision, env);
    }

    /// Sends packet `una` again, and goes on where the requester was.
    fn retransmit_oldest<E: Env>(&mut self, env: &mut E) {
        let resume = self.cursor_psn();
        self.move_cursor(self.requester.una);
        let sent = self.send_packet(0, env) == Ok(true);
        let end = sent.then(|| self.cursor_psn());
        self.move_cursor(resume);
        let (recovery, moment) = self.recovery(env);
        let decision = recovery.on_selective_retransmit(end, moment);
        self.carry_out(decision, env);
    }

    /// Moves the cursor back to `psn`, which lies between `una` and the cursor. All behind it is sent again.
    pub(super) fn go_back(&mut self, psn: Psn) {
        self.move_cursor(psn);
        while self.requester.responses.back().is_some_and(|end| end.since(psn) > 0) {
            self.requester.responses.pop_back();
        }
    }

    /// Requests were sent.
    #[inline]
    pub(super) fn note_sent<E: Env>(&mut self, env: &E) {
        if !self.timers.is_running(Timer::Ack) || !self.timers.is_running(Timer::Probe) {
            let (recovery, moment) = self.recovery(env);
            recovery.on_send(moment);
        }
    }

    /// The peer answered something new.
    #[inline]
    pub(super) fn note_progress<E: Env>(&mut self, cost: u64, env: &E) {
        let (recovery, moment) = self.recovery(env);
        recovery.on_answer(cost, moment);
    }

    /// An ACK came, and `una` has moved behind what it acknowledges.
    #[inline]
    pub(super) fn note_ack<E: Env>(&mut self, env: &mut E) {
        let (recovery, moment) = self.recovery(env);
        let decision = recovery.on_ack(moment);
        self.carry_out(decision, env);
    }

    /// The peer says that packet `una` is missing.
    pub(super) fn receive_sequence_nak<E: Env>(&mut self, env: &mut E) {
        let requester = &mut self.requester;
        let was_to_fetch =
            requester.last_fetched.is_some_and(|last| last.since(requester.una) >= 0);
        if was_to_fetch && !std::mem::replace(&mut requester.sends_all, true) {
            let (recovery, moment) = self.recovery(env);
            let decision = recovery.on_not_fetched(moment);
            return self.carry_out(decision, env);
        }
        // A request with an answer of its own forbids it, since the order of the answers counts. So does an XRC target,
        // which keeps no packets. Where payloads are fetched, links lose nothing, and nobody keeps packets.
        let alone = self.init.qp_type == QpType::Rc
            && !env.props().immediate
            && self.requester.responses.is_empty()
            && self.cursor_psn().since(self.requester.una) > 1;
        let (recovery, moment) = self.recovery(env);
        let decision = recovery.on_sequence_nak(alone, moment);
        self.count_and_carry_out(Counter::PacketSeqErr, decision, env);
    }

    /// An answer shows that the one to `una` is missing.
    pub(super) fn receive_implied_nak<E: Env>(&mut self, env: &mut E) {
        let (recovery, moment) = self.recovery(env);
        let decision = recovery.on_implied_nak(moment);
        self.count_and_carry_out(Counter::ImpliedNakSeqErr, decision, env);
    }

    /// The receiver was not ready for packet `una` (IBA 9.7.5.2.8).
    pub(super) fn receive_rnr_nak<E: Env>(&mut self, code: u8, is_ours: bool, env: &mut E) {
        let (recovery, moment) = self.recovery(env);
        let decision = recovery.on_rnr_nak(timer_code::rnr(code), moment);
        self.note_not_ready(self.requester.una, env.now());
        if matches!(decision, Decision::Fail(_)) {
            self.tell_given_up(is_ours, env);
        }
        self.count_and_carry_out(Counter::RnrNakReceived, decision, env);
    }

    /// See [`Qp::sound`].
    fn look_into_silence<E: Env>(&mut self, silence: Expired, is_late: bool, env: &mut E) {
        let since = (self.requester.una, silence.since);
        // A peer that has answered meanwhile is not silent.
        if !self.requester.recovery.has_answered() && self.awaits_answer() {
            self.sound(since, is_late, env);
        }
    }

    pub(in crate::qp) fn on_probe_timeout<E: Env>(&mut self, silence: Expired, env: &mut E) {
        // The ACK timeout that comes ends it.
        let is_late = self.requester.recovery.retries_left() == 0;
        if is_late || self.was_never_answered() {
            self.look_into_silence(silence, is_late, env);
        }
        let (recovery, moment) = self.recovery(env);
        let decision = recovery.on_probe_timeout(silence, moment);
        if decision == Decision::GoBackN {
            self.requester.window_closed = false;
            self.requester.repeats.retries += 1;
        }
        self.carry_out(decision, env);
    }

    pub(in crate::qp) fn on_ack_timeout<E: Env>(&mut self, silence: Expired, env: &mut E) {
        let is_late = self.requester.recovery.retries_left() <= 1;
        self.look_into_silence(silence, is_late, env);
        let (recovery, moment) = self.recovery(env);
        let decision = recovery.on_ack_timeout(silence, moment);
        self.count_and_carry_out(Counter::LocalAckTimeoutErr, decision, env);
    }

    /// This process has not run in time, so a timer that is due says nothing of the peer. Call it before
    /// [`on_timer`](Self::on_timer).
    pub fn on_late_wakeup<E: Env>(&mut self, env: &mut E) {
        let (recovery, moment) = self.recovery(env);
        recovery.on_late_wakeup(moment);
    }

    /// The link loses packets from now on, or does so no more: its timers run for requests that have left before.
    pub fn watch_for_silence<E: Env>(&mut self, env: &mut E) {
        let (recovery, moment) = self.recovery(env);
        recovery.on_send(moment);
    }

    /// The network marked packets of this queue pair.
    pub(in crate::qp) fn note_congestion<E: Env>(&mut self, env: &E) {
        let (recovery, moment) = self.recovery(env);
        recovery.on_congestion(moment);
    }
}
