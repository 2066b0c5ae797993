//! Loss recovery of a reliable requester: what it knows of packets that may be lost, and what it does about them (IBA
//! 9.7.5, 9.7.6.1.3).
//!
//! [`LossRecovery`] decides, `retransmit.rs` carries out. Nothing here sends, and the time comes in as an argument.

mod congestion_window;
mod retransmit_delay;
#[cfg(test)]
mod tests;

use std::time::Duration;

use crate::env::LinkProps;
use crate::time::{Clock, TIME_SLICE, Time};
use crate::types::{Psn, timer_code};
use crate::wc::WcStatus;

use self::congestion_window::CongestionWindow;
use self::retransmit_delay::RetransmitDelay;
use super::super::attr::QpAttr;
use super::super::send_queue::PACKET_COST;
use super::super::timers::{Expired, Timer, Timers};

/// Packets that may be in flight however many are lost.
const MIN_WINDOW_PACKETS: u64 = 16;

/// Probe timeout where packets were lost lately, in microseconds. The answer was probably lost, or the packet that was sent again
/// (`where_packets_were_lost_lately_silence_is_short` of the scenarios).
const LOSSY_PROBE: Duration = Duration::from_micros(400);

/// The shortest ACK timeout. A responder is a process among others: it may not run for a time slice or two
/// (`an_ack_timeout_is_no_shorter_than_two_time_slices`).
const MIN_ACK_TIMEOUT: Duration = TIME_SLICE.saturating_mul(2);

/// ACK timeouts in a row, each of which doubles the interval. IBA 9.7.6.1.3 allows up to four times the interval. A
/// silent peer gets all of it, since a host may be busy for half a second. It is not used where the link makes silence
/// certain ([`LinkProps::certain`]).
const MAX_DOUBLINGS: u32 = 2;

/// The greatest number of losses for which the requester goes back at once, after selective retransmit did not help. An
/// attempt costs a round trip, which a peer that keeps no packets never makes good.
const MOST_SKIPPED: u8 = 64;

/// The requester's next step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(super) enum Decision {
    /// Nothing is to be done now.
    Wait,
    /// To send packet `una` alone, then to report it by [`LossRecovery::on_selective_retransmit`].
    SelectiveRetransmit,
    /// To send everything from `una` on.
    GoBackN,
    /// To end the connection with this status: no retry is left.
    Fail(WcStatus),
}

/// The state of recovery: the packets that are known to be missing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum State {
    /// No packet.
    #[default]
    Open,
    /// Packet `psn` was sent again, alone. The next PSN behind it is `end`. It lasts until more than `end` is
    /// acknowledged.
    SelectiveRetransmit { psn: Psn, end: Psn },
    /// Everything from `una` on was sent again, since `una` or its answer is missing. It lasts until something new is
    /// answered.
    GoBackN,
}

/// The requester, its queue pair and its link at the moment of an event.
pub(super) struct Moment<'a, C> {
    pub(super) timers: &'a mut Timers,
    pub(super) clock: &'a C,
    pub(super) attr: &'a QpAttr,
    pub(super) link: &'a LinkProps,
    /// The oldest PSN without an answer.
    pub(super) una: Psn,
    /// The PSN after the highest that was ever sent.
    pub(super) max_sent: Psn,
    /// Tells whether packets without an answer are out.
    pub(super) in_flight: bool,
}

impl<C> Moment<'_, C> {
    /// The least congestion window.
    fn least_window(&self) -> u64 {
        MIN_WINDOW_PACKETS * (u64::from(self.attr.path_mtu.bytes()) + PACKET_COST)
    }
}

/// The state of loss recovery. The deadlines are in [`Timers`]: RNR wait, probe timeout, ACK timeout.
#[derive(Debug, Default)]
pub(super) struct LossRecovery {
    state: State,
    retries_left: u8,
    rnr_left: u8,
    /// ACK timeouts since the peer last answered something new.
    ack_timeouts: u32,
    /// The ACK timer began anew, for this process had not run. Not once more until the peer answers something new.
    was_late: bool,
    /// The same of the probe timeout.
    was_late_to_probe: bool,
    /// The peer has answered something new since the ACK timer began.
    has_answered: bool,
    selective: SelectiveHistory,
    delay: RetransmitDelay,
    window: CongestionWindow,
}

impl LossRecovery {
    pub(super) fn new(retry_cnt: u8, rnr_retry: u8) -> Self {
        Self { retries_left: retry_cnt, rnr_left: rnr_retry, ..Self::default() }
    }

    /// Whether the peer has answered something new since the ACK timer began.
    pub(super) fn has_answered(&self) -> bool {
        self.has_answered
    }

    /// Retries before the next failure.
    pub(super) fn retries_left(&self) -> u8 {
        self.retries_left
    }

    /// Retries that a modify grants anew.
    pub(super) fn set_retries(&mut self, retry_cnt: Option<u8>, rnr_retry: Option<u8>) {
        self.retries_left = retry_cnt.unwrap_or(self.retries_left);
        self.rnr_left = rnr_retry.unwrap_or(self.rnr_left);
    }

    /// Bytes that may be in flight on a link with this window.
    #[inline]
    pub(super) fn window(&mut self, of_link: u64) -> u64 {
        self.window.within(of_link)
    }

    /// Tells whether losses or marks have reduced the window.
    #[inline]
    pub(super) fn is_window_reduced(&self) -> bool {
        self.window.is_in_force()
    }

    /// Tells whether nothing was lost lately, so that an answer changes no more than
    /// [`on_short_answer`](Self::on_short_answer) does.
    pub(super) fn is_calm(&self, attr: &QpAttr) -> bool {
        self.state == State::Open
            && self.retries_left == attr.retry_cnt
            && self.rnr_left == attr.rnr_retry
            && self.ack_timeouts == 0
            && !self.was_late
            && !self.was_late_to_probe
            && !self.is_window_reduced()
            && self.delay.is_calm()
    }

    /// The peer answered something new, while [nothing was lost](Self::is_calm), on a link where an answer leaves the timers
    /// alone.
    #[inline]
    pub(super) fn on_short_answer(&mut self) {
        self.has_answered = true;
    }

    /// Requests were sent.
    #[inline]
    pub(super) fn on_send(&mut self, m: Moment<'_, impl Clock>) {
        if !m.in_flight {
            return;
        }
        if !m.timers.is_running(Timer::Ack) {
            self.restart_ack_timer(m.clock.soon(), m.timers, m.attr, m.link);
        }
        if !m.timers.is_running(Timer::Probe) {
            self.restart_probe(m.timers, m.link, m.clock);
        }
    }

    /// The peer answered something new, which had `cost` in the window.
    #[inline]
    pub(super) fn on_answer(&mut self, cost: u64, m: Moment<'_, impl Clock>) {
        self.window.grow(cost);
        self.delay.on_answer(m.una, m.max_sent, || m.clock.now());
        m.timers.stop(Timer::Probe);
        self.retries_left = m.attr.retry_cnt;
        self.rnr_left = m.attr.rnr_retry;
        let is_short = std::mem::take(&mut self.ack_timeouts) == 0;
        (self.was_late, self.was_late_to_probe) = (false, false);
        if self.state == State::GoBackN {
            self.state = State::Open;
        }
        self.has_answered = true;
        if m.link.immediate && is_short {
            // Nothing is lost on such a link. The timer goes on, and begins anew when it has run out: no look at the clock for an
            // answer, and silence is noticed within two timeouts. IBA 9.7.6.1.3 allows four.
            return;
        }
        if m.in_flight {
            self.restart_ack_timer(m.clock.soon(), m.timers, m.attr, m.link);
            self.restart_probe(m.timers, m.link, m.clock);
        } else {
            m.timers.stop(Timer::Ack);
        }
    }

    /// An ACK of everything before `una` came. If that is the packet that was sent again alone, and no more, the peer
    /// has kept no packet behind it, and need not say so.
    #[inline]
    pub(super) fn on_ack(&mut self, m: Moment<'_, impl Clock>) -> Decision {
        let State::SelectiveRetransmit { end, .. } = self.state else { return Decision::Wait };
        if m.una.since(end) > 0 {
            self.selective.note_success();
            self.state = State::Open;
        } else if m.una == end && m.in_flight {
            self.selective.note_failure();
            return self.go_back_for_gap(m);
        }
        Decision::Wait
    }

    /// The peer gave an answer twice. If that shows that a retransmission was spurious, the window becomes what it was
    /// (RFC 4015).
    pub(super) fn on_duplicate_answer(&mut self, clock: &impl Clock) {
        if let Some(window) = self.delay.on_duplicate_answer(|| clock.now()) {
            self.window = window;
        }
    }

    /// The peer says that packet `una` is missing. `alone` tells whether the requester can send that packet by itself.
    pub(super) fn on_sequence_nak(&mut self, alone: bool, m: Moment<'_, impl Clock>) -> Decision {
        if self.knows(m.una) {
            // It was sent again already. A peer that was not ready then is there now, so its silence begins anew.
            self.restart_probe(m.timers, m.link, m.clock);
            return Decision::Wait;
        }
        if self.retries_left == 0 && m.una == m.attr.sq_psn {
            // Nothing was answered yet: the peer may only now receive. That ends no connection.
            return self.go_back_freely(m);
        }
        let waits = m.timers.is_running(Timer::RnrWait);
        if self.may_be_alone(m.una) && alone && !waits && self.retries_left > 0 {
            return Decision::SelectiveRetransmit;
        }
        self.go_back_for_gap(m)
    }

    /// The peer could not fetch the payload of packet `una`. Nothing was lost.
    pub(super) fn on_not_fetched(&mut self, m: Moment<'_, impl Clock>) -> Decision {
        if self.knows(m.una) { Decision::Wait } else { self.go_back_freely(m) }
    }

    fn go_back_freely(&mut self, m: Moment<'_, impl Clock>) -> Decision {
        self.state = State::GoBackN;
        self.restart_ack_timer(m.clock.now(), m.timers, m.attr, m.link);
        Decision::GoBackN
    }

    /// Packet `una` was sent again, alone, and `end` is the PSN behind it. With `None` the link did not take it.
    pub(super) fn on_selective_retransmit(
        &mut self,
        end: Option<Psn>,
        m: Moment<'_, impl Clock>,
    ) -> Decision {
        let Some(end) = end else { return self.go_back_for_gap(m) };
        self.retries_left -= 1;
        self.state = State::SelectiveRetransmit { psn: m.una, end };
        // One loss among many packets that came.
        self.window.reduce_for_loss(8, m.link.window.into(), m.least_window());
        self.restart_ack_timer(m.clock.now(), m.timers, m.attr, m.link);
        self.restart_probe(m.timers, m.link, m.clock);
        Decision::Wait
    }

    /// An answer shows that the one to `una` is missing.
    pub(super) fn on_implied_nak(&mut self, m: Moment<'_, impl Clock>) -> Decision {
        if self.knows(m.una) { Decision::Wait } else { self.go_back_for_gap(m) }
    }

    /// The receiver was not ready for packet `una`, and asks for this wait (IBA 9.7.5.2.8).
    pub(super) fn on_rnr_nak(&mut self, wait: Duration, m: Moment<'_, impl Clock>) -> Decision {
        if m.timers.is_running(Timer::RnrWait) {
            // The network delivered the NAK twice.
            return Decision::Wait;
        }
        if m.attr.rnr_retry != 7 {
            if self.rnr_left == 0 {
                return Decision::Fail(WcStatus::RnrRetryExcErr);
            }
            self.rnr_left -= 1;
        }
        self.state = if self.knows(m.una) { State::GoBackN } else { State::Open };
        m.timers.stop(Timer::Ack);
        m.timers.start(Timer::RnrWait, m.clock.now(), wait);
        Decision::GoBackN
    }

    /// The peer is silent: its answer may be lost, or the packet that would have shown it a gap.
    pub(super) fn on_probe_timeout(
        &mut self,
        silence: Expired,
        m: Moment<'_, impl Clock>,
    ) -> Decision {
        if !m.in_flight || m.timers.is_running(Timer::RnrWait) {
            return Decision::Wait;
        }
        self.note_repeat(silence, &m);
        // A NAK that is still on its way asks for the same.
        self.state = State::GoBackN;
        if silence.length < LOSSY_PROBE * 2 {
            // One more loss among others.
            self.window.reduce_for_loss(2, m.link.window.into(), m.least_window());
        } else {
            self.window = CongestionWindow::of(m.least_window());
        }
        m.timers.start(Timer::Probe, m.clock.now(), silence.length * 2);
        Decision::GoBackN
    }

    /// The peer is silent for as long as the program allows (IBA 9.7.6.1.3).
    pub(super) fn on_ack_timeout(
        &mut self,
        silence: Expired,
        m: Moment<'_, impl Clock>,
    ) -> Decision {
        if !m.in_flight {
            return Decision::Wait;
        }
        if self.has_answered {
            self.restart_ack_timer(m.clock.now(), m.timers, m.attr, m.link);
            return Decision::Wait;
        }
        self.note_repeat(silence, &m);
        self.state = State::Open;
        self.ack_timeouts = self.ack_timeouts.saturating_add(1);
        self.retry(m)
    }

    /// This process has not run, so a timer that is due says nothing of the peer: it begins anew. Each does so once: a
    /// process that never runs in time would wait for ever.
    pub(super) fn on_late_wakeup(&mut self, m: Moment<'_, impl Clock>) {
        let now = m.clock.now();
        let is_due = |timer| m.in_flight && m.timers.is_due(timer, now);
        let (ack, probe) = (is_due(Timer::Ack), is_due(Timer::Probe));
        if ack && !std::mem::replace(&mut self.was_late, true) {
            self.restart_ack_timer(now, m.timers, m.attr, m.link);
        }
        if probe && !std::mem::replace(&mut self.was_late_to_probe, true) {
            self.restart_probe(m.timers, m.link, m.clock);
        }
    }

    /// The network marked packets.
    pub(super) fn on_congestion(&mut self, m: Moment<'_, impl Clock>) {
        self.window.reduce_for_mark(m.link.window.into(), m.least_window());
    }

    /// Tells whether `una` is known to be missing and was sent again. That happens once for each (IBA 9.7.5.1.4): the
    /// network may deliver a NAK twice, and further answers show the same gap.
    fn knows(&self, una: Psn) -> bool {
        match self.state {
            State::Open => false,
            State::SelectiveRetransmit { psn, .. } => psn == una,
            State::GoBackN => true,
        }
    }

    /// Tells whether a single packet may suffice for the loss of `una`.
    fn may_be_alone(&mut self, una: Psn) -> bool {
        match self.state {
            State::SelectiveRetransmit { end, .. } if end == una => {
                self.selective.note_failure();
                return false;
            }
            State::SelectiveRetransmit { .. } => self.selective.note_success(),
            State::Open | State::GoBackN => {}
        }
        self.selective.is_worth_trying()
    }

    /// Packet `una` or its answer is missing, and selective retransmit is no way. The window shrinks by half and grows
    /// by one packet for every eight that are answered. So it finds the size at which a handful of packets pass for each
    /// loss, as going back sends the whole window again.
    fn go_back_for_gap(&mut self, m: Moment<'_, impl Clock>) -> Decision {
        self.state = State::GoBackN;
        self.window.reduce_for_loss(2, m.link.window.into(), m.least_window());
        self.retry(m)
    }

    /// Goes back, at the price of a retry.
    fn retry(&mut self, m: Moment<'_, impl Clock>) -> Decision {
        if self.retries_left == 0 {
            return Decision::Fail(WcStatus::RetryExcErr);
        }
        self.retries_left -= 1;
        self.restart_ack_timer(m.clock.now(), m.timers, m.attr, m.link);
        Decision::GoBackN
    }

    /// Notes that the unanswered packets are sent again after this silence. The answers may show that it was spurious.
    /// The peer must not have said that they were lost, for a peer that has kept later packets answers such repeats
    /// twice.
    fn note_repeat<C>(&mut self, silence: Expired, m: &Moment<'_, C>) {
        if !self.knows(m.una) || self.delay.has_repeated() {
            self.delay.on_repeat(m.una, m.max_sent, silence, self.window);
        }
    }

    #[inline]
    fn restart_probe(&self, timers: &mut Timers, link: &LinkProps, clock: &impl Clock) {
        let Some(after) = link.probe_after else { return timers.stop(Timer::Probe) };
        let after = if self.window.is_lossy() { after.min(LOSSY_PROBE) } else { after };
        timers.start(Timer::Probe, clock.now(), after.max(self.delay.least()));
    }

    #[inline]
    fn restart_ack_timer(
        &mut self,
        now: Time,
        timers: &mut Timers,
        attr: &QpAttr,
        link: &LinkProps,
    ) {
        self.has_answered = false;
        let Some(t) = timer_code::ack(attr.timeout) else { return timers.stop(Timer::Ack) };
        let t = t.max(MIN_ACK_TIMEOUT);
        let doublings = self.ack_timeouts.min(MAX_DOUBLINGS);
        let doubled = if doublings == 0 { t } else { t * (1 << doublings) };
        let least = self.delay.least();
        let after = if link.certain {
            t
        } else if least <= doubled {
            doubled
        } else {
            // A peer that is known to take longer gets that, too.
            least.min(t * (1 << MAX_DOUBLINGS)).max(doubled)
        };
        timers.start(Timer::Ack, now, after);
    }
}

/// Predicts from recent losses whether a single packet is likely to be enough. It is where the peer keeps the packets
/// behind a missing one ([`LinkProps::out_of_order_room`]), and no other is missing.
#[derive(Debug, Default)]
struct SelectiveHistory {
    /// The next losses for which selective retransmit is not tried.
    skipped: u8,
    /// The length of the last such run of losses; 0 since a single packet was enough.
    last_run: u8,
}

impl SelectiveHistory {
    fn is_worth_trying(&mut self) -> bool {
        let is_worth = self.skipped == 0;
        self.skipped = self.skipped.saturating_sub(1);
        is_worth
    }

    /// A single packet was enough.
    fn note_success(&mut self) {
        self.last_run = 0;
    }

    /// The packets behind the one that was sent again are missing, too.
    fn note_failure(&mut self) {
        self.last_run = self.last_run.saturating_mul(4).clamp(1, MOST_SKIPPED);
        self.skipped = self.last_run - 1;
    }
}
