//! Loss recovery of a reliable requester: answers that do not come, or that say that a packet is missing (IBA 9.7.5,
//! 9.7.6.1.3).

use std::time::Duration;

use crate::counters::Counter;
use crate::env::Env;
use crate::time::Time;
use crate::types::timer_code;
use crate::wc::WcStatus;

use super::super::Qp;
use super::super::send_queue::PACKET_COST;
use super::super::timers::{Expired, Timer};
use super::{LOSSY_PROBE, MIN_WINDOW_PACKETS, Requester};

/// The shortest ACK timeout. A responder is a process among others: it may not run for a time slice or two.
const MIN_ACK_TIMEOUT: Duration = Duration::from_millis(16);

/// ACK timeouts in a row, each of which doubles the interval. IBA 9.7.6.1.3 allows up to four times the interval. A
/// silent peer gets all of it, since a host may be busy for half a second. It is not used where the link makes silence
/// certain ([`LinkProps::certain`](crate::env::LinkProps::certain)).
const MAX_DOUBLINGS: u32 = 2;

impl Qp {
    /// Goes back, at the price of a retry. False if none is left.
    pub(in super::super) fn retry<E: Env>(&mut self, env: &mut E) -> bool {
        if self.requester.retries_left == 0 {
            env.count(Counter::RetryExceeded, 1);
            self.fail_oldest(WcStatus::RetryExcErr, env);
            return false;
        }
        self.requester.retries_left -= 1;
        self.send_again(env);
        true
    }

    pub(super) fn send_again<E: Env>(&mut self, env: &mut E) {
        self.requester.repair.give_up();
        self.go_back(self.requester.una);
        self.restart_ack_timer(env.now(), env);
    }

    /// An answer shows that the one to `una` is missing.
    pub(in super::super) fn implied_nak<E: Env>(&mut self, env: &mut E) {
        if self.is_new_gap(Counter::ImpliedNakSeqErr, env) {
            self.go_back_for_gap(env);
        }
    }

    /// Packet `una` or its answer is missing: whether that was not known. Once for each (IBA 9.7.5.1.4): the network may deliver
    /// a NAK twice, and further answers show the same gap.
    pub(super) fn is_new_gap<E: Env>(&mut self, counter: Counter, env: &E) -> bool {
        let una = Some(self.requester.una);
        let is_new = self.requester.asked_for != una;
        if is_new {
            env.count(counter, 1);
            self.requester.asked_for = una;
        }
        is_new
    }

    pub(super) fn go_back_for_gap<E: Env>(&mut self, env: &mut E) {
        self.reduce_window(2, env);
        self.retry(env);
    }

    /// Packets were lost, or the network marked them: the window shrinks by this part. It grows by one packet for every
    /// eight that are answered. So it finds the size at which a handful of packets pass for each loss, as going back
    /// sends the whole window again.
    pub(in super::super) fn reduce_window<E: Env>(&mut self, part: u64, env: &E) {
        let least = MIN_WINDOW_PACKETS * (u64::from(self.mtu()) + PACKET_COST);
        let window = u64::from(env.props().window);
        let limit = self.requester.congestion.map_or(window, |limit| limit.min(window));
        self.requester.congestion = Some((limit - limit / part).max(least));
    }

    /// The peer is silent: its answer may be lost, or the packet that would have shown it a gap.
    pub(super) fn probe<E: Env>(&mut self, after: Duration, env: &E) {
        let una = self.requester.una;
        // A NAK that is still on its way asks for the same.
        self.requester.asked_for = Some(una);
        self.requester.repair.give_up();
        self.go_back(una);
        self.requester.window_closed = false;
        if after < LOSSY_PROBE * 2 {
            // One more loss among others.
            self.reduce_window(2, env);
        } else {
            let least = MIN_WINDOW_PACKETS * (u64::from(self.mtu()) + PACKET_COST);
            self.requester.congestion = Some(least);
        }
        self.timers.start(Timer::Probe, env.now(), after * 2);
    }

    /// The receiver was not ready for packet `una` (IBA 9.7.5.2.8).
    pub(in super::super) fn receiver_not_ready<E: Env>(&mut self, timer: u8, env: &mut E) {
        if self.timers.is_running(Timer::RnrWait) {
            // The network delivered the NAK twice.
            return;
        }
        env.count(Counter::RnrNakReceived, 1);
        if self.attr.rnr_retry != 7 {
            if self.requester.rnr_left == 0 {
                env.count(Counter::RnrRetryExceeded, 1);
                self.fail_oldest(WcStatus::RnrRetryExcErr, env);
                return;
            }
            self.requester.rnr_left -= 1;
        }
        self.requester.repair.give_up();
        self.go_back(self.requester.una);
        self.timers.stop(Timer::Ack);
        self.timers.start(Timer::RnrWait, env.now(), timer_code::rnr(timer));
    }

    /// The peer answered something new.
    pub(in super::super) fn progressed<E: Env>(&mut self, answered: u64, env: &E) {
        if let Some(limit) = &mut self.requester.congestion {
            *limit = limit.saturating_add(answered / 8);
        }
        let Requester { una, max_sent, .. } = self.requester;
        if self.requester.retransmit_delay.progressed(una, max_sent, || env.now()) {
            self.requester.congestion_before = None;
        }
        self.timers.stop(Timer::Probe);
        self.requester.retries_left = self.attr.retry_cnt;
        self.requester.ack_timeouts = 0;
        self.requester.excused = false;
        self.requester.rnr_left = self.attr.rnr_retry;
        self.requester.asked_for = None;
        if self.requester.una == self.cursor_psn() {
            self.timers.stop(Timer::Ack);
        } else {
            self.restart_ack_timer(env.soon(), env);
            self.restart_probe(env);
        }
    }

    pub(super) fn restart_probe<E: Env>(&mut self, env: &E) {
        match self.probe_after(env) {
            Some(after) => self.timers.start(Timer::Probe, env.now(), after),
            None => self.timers.stop(Timer::Probe),
        }
    }

    /// The silence of the peer after which it is asked again.
    pub(super) fn probe_after<E: Env>(&self, env: &E) -> Option<Duration> {
        let after = env.props().probe_after?;
        let after =
            if self.requester.congestion.is_some() { after.min(LOSSY_PROBE) } else { after };
        Some(after.max(self.requester.retransmit_delay.least()))
    }

    pub(super) fn restart_ack_timer<E: Env>(&mut self, now: Time, env: &E) {
        let doublings = self.requester.ack_timeouts.min(MAX_DOUBLINGS);
        let Some(t) = timer_code::ack(self.attr.timeout) else {
            return self.timers.stop(Timer::Ack);
        };
        let t = t.max(MIN_ACK_TIMEOUT);
        let doubled = if doublings == 0 { t } else { t * (1 << doublings) };
        // A peer that is known to take longer gets that, too.
        let least = self.requester.retransmit_delay.least();
        let after = if env.props().certain {
            t
        } else if least <= doubled {
            doubled
        } else {
            least.min(t * (1 << MAX_DOUBLINGS)).max(doubled)
        };
        self.timers.start(Timer::Ack, now, after);
    }

    /// Notes that the unanswered packets are sent again after this silence. The answers may show that it was spurious.
    /// The peer must not have said that they were lost, for a peer that has kept later packets answers such repeats
    /// twice.
    fn note_repeat(&mut self, expired: Expired) {
        let lost = self.requester.asked_for == Some(self.requester.una);
        if lost && !self.requester.retransmit_delay.has_asked() {
            return;
        }
        let (una, end) = (self.requester.una, self.requester.max_sent);
        if self.requester.retransmit_delay.asked_again(una, end, expired.since, expired.length) {
            self.requester.congestion_before = Some(self.requester.congestion);
        }
    }

    /// This process has not run, so an ACK timer that is due says nothing of the peer: it begins anew. Once: a process
    /// that never runs in time would wait for ever.
    pub fn excuse_silence<E: Env>(&mut self, env: &mut E) {
        let is_due = self.timers.is_due(Timer::Ack, env.now());
        if is_due && !std::mem::replace(&mut self.requester.excused, true) {
            self.restart_ack_timer(env.now(), env);
        }
    }

    pub(in super::super) fn on_probe_timeout<E: Env>(&mut self, expired: Expired, env: &E) {
        if self.awaits_answer() && !self.timers.is_running(Timer::RnrWait) {
            self.note_repeat(expired);
            self.probe(expired.length, env);
        }
    }

    /// IBA 9.7.6.1.3.
    pub(in super::super) fn on_ack_timeout<E: Env>(&mut self, expired: Expired, env: &mut E) {
        if self.awaits_answer() {
            self.note_repeat(expired);
            env.count(Counter::LocalAckTimeoutErr, 1);
            self.requester.asked_for = None;
            self.requester.ack_timeouts = self.requester.ack_timeouts.saturating_add(1);
            self.retry(env);
        }
    }
}
