use super::*;
use crate::types::Mtu;

const MS: Duration = Duration::from_millis(1);
const PROBE: Duration = Duration::from_millis(8);
/// That of code 14.
const ACK: Duration = Duration::from_nanos(67_108_864);
const FIRST: u32 = 0xff_fff0;
const LINK: u64 = 200_000;
const LEAST: u64 = 16 * (1024 + 64);

struct At(Time);

impl Clock for At {
    fn now(&self) -> Time {
        self.0
    }
}

fn at(ms: u32) -> Time {
    Time::default() + MS * ms
}

/// A requester that has sent packets 0 to 9 and has an answer to those before `una`.
struct Requester {
    recovery: LossRecovery,
    timers: Timers,
    attr: QpAttr,
    link: LinkProps,
    una: u32,
    max_sent: u32,
    in_flight: bool,
}

impl Requester {
    /// It began to send at 0 ms.
    fn new() -> Self {
        let attr = QpAttr {
            retry_cnt: 3,
            rnr_retry: 1,
            timeout: 14,
            path_mtu: Mtu::Mtu1024,
            sq_psn: Psn::new(FIRST),
            ..QpAttr::default()
        };
        let mut requester = Self {
            recovery: LossRecovery::new(attr.retry_cnt, attr.rnr_retry),
            timers: Timers::default(),
            attr,
            link: LinkProps { probe_after: Some(PROBE), ..LinkProps::new(LINK as u32) },
            una: 0,
            max_sent: 10,
            in_flight: true,
        };
        requester.at(0, |recovery, m| recovery.on_send(m));
        requester
    }

    fn at<R>(&mut self, ms: u32, f: impl FnOnce(&mut LossRecovery, Moment<'_, At>) -> R) -> R {
        let moment = Moment {
            timers: &mut self.timers,
            clock: &At(at(ms)),
            attr: &self.attr,
            link: &self.link,
            una: Psn::new(FIRST).plus(self.una),
            max_sent: Psn::new(FIRST).plus(self.max_sent),
            in_flight: self.in_flight,
        };
        f(&mut self.recovery, moment)
    }

    /// Packets before `una` are acknowledged, 1000 bytes.
    fn ack(&mut self, ms: u32, una: u32) -> Decision {
        if una != self.una {
            self.una = una;
            self.in_flight = una != self.max_sent;
            self.at(ms, |recovery, m| recovery.on_answer(1000, m));
        }
        self.at(ms, LossRecovery::on_ack)
    }

    fn nak(&mut self, ms: u32, una: u32) -> Decision {
        if una != self.una {
            self.una = una;
            self.at(ms, |recovery, m| recovery.on_answer(1000, m));
        }
        self.at(ms, |recovery, m| recovery.on_sequence_nak(true, m))
    }

    /// A NAK, and the missing packet goes out alone.
    fn repaired(&mut self, ms: u32, una: u32) {
        assert_eq!(self.nak(ms, una), Decision::SelectiveRetransmit);
        let end = Some(Psn::new(FIRST).plus(una + 1));
        assert_eq!(
            self.at(ms, |recovery, m| recovery.on_selective_retransmit(end, m)),
            Decision::Wait
        );
    }

    fn expire(&mut self, timer: Timer, ms: u32) -> Decision {
        let silence = self.timers.expire(timer, at(ms)).expect("the timer has run out");
        self.at(ms, |recovery, m| match timer {
            Timer::Probe => recovery.on_probe_timeout(silence, m),
            _ => recovery.on_ack_timeout(silence, m),
        })
    }

    fn window(&mut self) -> u64 {
        self.recovery.window(LINK)
    }
}

#[test]
fn a_send_starts_timers_and_the_last_answer_stops_them() {
    let mut r = Requester::new();
    assert_eq!(r.timers.next(), Some(at(0) + PROBE));
    r.at(5, |recovery, m| recovery.on_send(m));
    assert_eq!(r.timers.next(), Some(at(0) + PROBE), "they run already");
    assert_eq!(r.ack(3, 4), Decision::Wait);
    assert_eq!(r.timers.next(), Some(at(3) + PROBE));
    assert!(!r.timers.is_due(Timer::Ack, at(0) + ACK));
    assert_eq!(r.ack(4, 10), Decision::Wait);
    assert_eq!(r.timers.next(), None);
}

#[test]
fn one_missing_packet_is_sent_alone_once() {
    let mut r = Requester::new();
    r.repaired(1, 3);
    assert_eq!(r.window(), LINK - LINK / 8);
    assert_eq!(r.nak(2, 3), Decision::Wait, "the same NAK again");
    assert_eq!(r.at(2, LossRecovery::on_implied_nak), Decision::Wait);
    assert_eq!(r.ack(3, 10), Decision::Wait);
    assert_eq!(r.recovery.state, State::Open);
    // The next one as well.
    r.max_sent = 20;
    r.in_flight = true;
    r.repaired(4, 15);
}

#[test]
fn an_ack_of_less_than_the_packet_that_is_sent_alone_changes_nothing() {
    let mut r = Requester::new();
    r.repaired(1, 3);
    assert_eq!(r.ack(2, 3), Decision::Wait);
    assert_eq!(r.window(), LINK - LINK / 8);
    // Nothing is missing behind it.
    let mut r = Requester::new();
    r.repaired(1, 9);
    assert_eq!(r.ack(2, 10), Decision::Wait);
    assert_eq!(r.window(), LINK - LINK / 8 + 1000 / 8);
}

#[test]
fn each_packet_that_is_sent_alone_costs_a_retry() {
    let mut r = Requester::new();
    r.recovery.set_retries(Some(2), None);
    r.repaired(1, 0);
    assert_eq!(r.expire(Timer::Ack, 69), Decision::GoBackN);
    assert_eq!(r.expire(Timer::Ack, 300), Decision::Fail(WcStatus::RetryExcErr));
}

#[test]
fn go_back_n_follows_an_insufficient_selective_retransmit() {
    // The ACK covers the packet and no more; or a NAK asks for the next one.
    for nak in [false, true] {
        let mut r = Requester::new();
        r.repaired(1, 3);
        let decision = if nak { r.nak(2, 4) } else { r.ack(2, 4) };
        assert_eq!(decision, Decision::GoBackN);
        assert_eq!(r.nak(3, 4), Decision::Wait);
        r.max_sent = 20;
        // The second failure in a row: the next three losses are not tried.
        r.repaired(4, 10);
        assert_eq!(r.ack(5, 11), Decision::GoBackN);
        let tried = [12, 13, 14, 15].map(|una| r.nak(6, una));
        assert_eq!(tried[..3], [Decision::GoBackN; 3]);
        assert_eq!(tried[3], Decision::SelectiveRetransmit);
    }
}

#[test]
fn go_back_n_where_a_packet_cannot_be_sent_alone() {
    let mut r = Requester::new();
    r.una = 3;
    assert_eq!(r.at(1, |recovery, m| recovery.on_sequence_nak(false, m)), Decision::GoBackN);
    assert_eq!(r.window(), LINK / 2);
    // The link did not take it.
    let mut r = Requester::new();
    assert_eq!(r.nak(1, 3), Decision::SelectiveRetransmit);
    let blocked = r.at(1, |recovery, m| recovery.on_selective_retransmit(None, m));
    assert_eq!(blocked, Decision::GoBackN);
    assert_eq!(r.window(), LINK / 2);
}

#[test]
fn an_implied_nak_goes_back_once() {
    let mut r = Requester::new();
    assert_eq!(r.at(1, LossRecovery::on_implied_nak), Decision::GoBackN);
    assert_eq!(r.at(2, LossRecovery::on_implied_nak), Decision::Wait);
    assert_eq!(r.ack(3, 2), Decision::Wait);
    assert_eq!(r.at(3, LossRecovery::on_implied_nak), Decision::GoBackN);
}

#[test]
fn retries_run_out_and_come_back_with_an_answer() {
    let fail = Decision::Fail(WcStatus::RetryExcErr);
    let mut r = Requester::new();
    let mut ms = 0;
    for (length, next) in [(1, 2), (2, 4), (4, 4)] {
        ms += 68 * length;
        assert_eq!(r.expire(Timer::Ack, ms), Decision::GoBackN);
        assert!(!r.timers.is_due(Timer::Ack, at(ms - 1) + ACK * next));
        assert!(r.timers.is_due(Timer::Ack, at(ms) + ACK * next));
    }
    assert_eq!(r.expire(Timer::Ack, ms + 68 * 4), fail);
    assert_eq!(r.ack(ms, 1), Decision::Wait);
    assert_eq!(r.expire(Timer::Ack, ms + 68), Decision::GoBackN);
    // A modify grants others.
    r.recovery.set_retries(Some(0), None);
    assert_eq!(r.expire(Timer::Ack, ms + 68 * 3), fail);
}

#[test]
fn a_nak_of_the_first_packet_ends_no_connection() {
    let mut r = Requester::new();
    r.recovery.set_retries(Some(0), None);
    assert_eq!(r.nak(1, 0), Decision::GoBackN);
    assert_eq!(r.window(), LINK);
    assert_eq!(r.nak(2, 1), Decision::SelectiveRetransmit, "the answer brought retries");
    r.recovery.set_retries(Some(0), None);
    r.una = 2;
    assert_eq!(r.nak(3, 2), Decision::Fail(WcStatus::RetryExcErr));
}

#[test]
fn a_probe_goes_back_without_a_retry_and_doubles() {
    let mut r = Requester::new();
    r.recovery.set_retries(Some(0), None);
    assert_eq!(r.expire(Timer::Probe, 8), Decision::GoBackN);
    assert_eq!(r.window(), LEAST, "a long silence");
    assert!(!r.timers.is_due(Timer::Probe, at(23)));
    assert_eq!(r.expire(Timer::Probe, 24), Decision::GoBackN);
    assert_eq!(r.nak(25, 0), Decision::Wait, "a NAK that was on its way");
    // In the congestion window silence is short.
    assert_eq!(r.timers.next(), Some(at(25) + LOSSY_PROBE));
}

#[test]
fn a_probe_after_a_short_silence_halves_the_window() {
    let mut r = Requester::new();
    assert_eq!(r.at(0, LossRecovery::on_implied_nak), Decision::GoBackN);
    assert_eq!(r.window(), LINK / 2);
    assert_eq!(r.ack(1, 1), Decision::Wait);
    let before = r.window();
    assert_eq!(r.expire(Timer::Probe, 2), Decision::GoBackN);
    assert_eq!(r.window(), before - before / 2);
}

/// The queues are long where packets are marked, so answers take long.
#[test]
fn a_mark_leaves_the_probe_as_it_is() {
    let mut r = Requester::new();
    r.at(0, LossRecovery::on_congestion);
    assert_eq!(r.window(), LINK / 2);
    assert_eq!(r.ack(1, 1), Decision::Wait);
    assert_eq!(r.timers.next(), Some(at(1) + PROBE));
}

#[test]
fn a_receiver_that_is_not_ready_gets_its_wait() {
    let mut r = Requester::new();
    let rnr = |r: &mut Requester, ms| r.at(ms, |recovery, m| recovery.on_rnr_nak(5 * MS, m));
    assert_eq!(rnr(&mut r, 1), Decision::GoBackN);
    assert_eq!(r.timers.next(), Some(at(6)));
    assert!(!r.timers.is_running(Timer::Ack));
    assert_eq!(rnr(&mut r, 2), Decision::Wait, "the same NAK again");
    // The probe asks nothing meanwhile.
    assert_eq!(r.expire(Timer::Probe, 8), Decision::Wait);
    assert!(r.timers.expire(Timer::RnrWait, at(8)).is_some());
    assert_eq!(rnr(&mut r, 9), Decision::Fail(WcStatus::RnrRetryExcErr));
    // Without end.
    r.attr.rnr_retry = 7;
    assert_eq!(rnr(&mut r, 10), Decision::GoBackN);
}

#[test]
fn nothing_is_sent_alone_during_an_rnr_wait() {
    let mut r = Requester::new();
    assert_eq!(r.at(1, |recovery, m| recovery.on_rnr_nak(5 * MS, m)), Decision::GoBackN);
    assert_eq!(r.nak(2, 0), Decision::GoBackN);
}

#[test]
fn a_spurious_retransmission_restores_the_window_and_teaches_the_delay() {
    let mut r = Requester::new();
    assert_eq!(r.expire(Timer::Probe, 8), Decision::GoBackN);
    assert_eq!(r.window(), LEAST);
    // The answers to both sendings, as far apart as those.
    assert_eq!(r.ack(20, 1), Decision::Wait);
    r.recovery.on_duplicate_answer(&At(at(28)));
    assert_eq!(r.window(), LINK);
    assert_eq!(r.ack(29, 2), Decision::Wait);
    assert!(!r.timers.is_due(Timer::Probe, at(58)), "1.5 times 20 ms, less a part for the round");
    assert!(r.timers.is_due(Timer::Probe, at(59)));
}

#[test]
fn a_retransmission_that_the_peer_asked_for_is_not_spurious() {
    let mut r = Requester::new();
    r.repaired(1, 0);
    let window = r.window();
    assert_eq!(r.expire(Timer::Probe, 9), Decision::GoBackN);
    assert_eq!(r.ack(20, 1), Decision::Wait);
    r.recovery.on_duplicate_answer(&At(at(28)));
    assert!(r.window() < window);
}

#[test]
fn a_stopped_process_restarts_the_ack_timer_once() {
    let mut r = Requester::new();
    r.at(60, LossRecovery::on_late_wakeup);
    assert!(r.timers.is_due(Timer::Ack, at(68)), "it was not due");
    r.at(70, LossRecovery::on_late_wakeup);
    assert!(!r.timers.is_due(Timer::Ack, at(130)));
    r.at(140, LossRecovery::on_late_wakeup);
    assert!(r.timers.is_due(Timer::Ack, at(140)));
}

/// Answers of the peer wait to be read.
#[test]
fn a_stopped_process_restarts_the_probe_timeout_once() {
    let mut r = Requester::new();
    r.at(70, LossRecovery::on_late_wakeup);
    assert!(!r.timers.is_due(Timer::Probe, at(77)) && r.timers.is_due(Timer::Probe, at(78)));
    r.at(150, LossRecovery::on_late_wakeup);
    assert!(r.timers.is_due(Timer::Probe, at(150)), "it would wait for ever");
    // An answer allows for another stop.
    assert_eq!(r.ack(151, 4), Decision::Wait);
    r.at(240, LossRecovery::on_late_wakeup);
    assert!(!r.timers.is_due(Timer::Probe, at(247)) && r.timers.is_due(Timer::Probe, at(248)));
}

#[test]
fn without_a_timeout_and_probes_nothing_runs() {
    let mut r = Requester { timers: Timers::default(), ..Requester::new() };
    r.attr.timeout = 0;
    r.link.probe_after = None;
    r.at(1, |recovery, m| recovery.on_send(m));
    assert_eq!(r.ack(1, 1), Decision::Wait);
    assert_eq!(r.timers.next(), None);
}

#[test]
fn an_answer_renews_an_immediate_links_expired_ack_timer() {
    let mut r = Requester { timers: Timers::default(), ..Requester::new() };
    (r.link.probe_after, r.link.immediate) = (None, true);
    r.at(0, |recovery, m| recovery.on_send(m));
    assert_eq!(r.ack(50, 4), Decision::Wait);
    assert_eq!(r.timers.next(), Some(at(0) + ACK), "an answer does not touch it");
    assert_eq!(r.expire(Timer::Ack, 68), Decision::Wait, "the peer has answered meanwhile");
    assert_eq!(r.timers.next(), Some(at(68) + ACK));
    assert_eq!(r.expire(Timer::Ack, 136), Decision::GoBackN, "it has been silent since");
}

#[test]
fn an_immediate_links_long_timeout_ends_with_an_answer() {
    let mut r = Requester { timers: Timers::default(), ..Requester::new() };
    (r.link.probe_after, r.link.immediate) = (None, true);
    r.at(0, |recovery, m| recovery.on_send(m));
    assert_eq!(r.expire(Timer::Ack, 68), Decision::GoBackN);
    assert_eq!(r.timers.next(), Some(at(68) + 2 * ACK));
    assert_eq!(r.ack(70, 4), Decision::Wait);
    assert_eq!(r.timers.next(), Some(at(70) + ACK));
}

#[test]
fn an_idle_late_wakeup_costs_the_next_request_nothing() {
    let mut r = Requester { timers: Timers::default(), ..Requester::new() };
    (r.link.probe_after, r.link.immediate) = (None, true);
    r.at(0, |recovery, m| recovery.on_send(m));
    assert_eq!(r.ack(50, 10), Decision::Wait);
    r.at(500, |recovery, m| recovery.on_late_wakeup(m));
    assert_eq!(r.expire(Timer::Ack, 500), Decision::Wait);
    (r.max_sent, r.in_flight) = (11, true);
    r.at(560, |recovery, m| recovery.on_send(m));
    assert_eq!(r.timers.next(), Some(at(560) + ACK));
}

#[test]
fn an_immediate_links_idle_ack_timer_ends_by_itself() {
    let mut r = Requester { timers: Timers::default(), ..Requester::new() };
    (r.link.probe_after, r.link.immediate) = (None, true);
    r.at(0, |recovery, m| recovery.on_send(m));
    assert_eq!(r.ack(50, 10), Decision::Wait);
    assert_eq!(r.expire(Timer::Ack, 68), Decision::Wait);
    assert_eq!(r.timers.next(), None);
}

#[test]
fn an_ack_timeout_is_no_shorter_than_two_time_slices() {
    let mut r = Requester::new();
    r.attr.timeout = 1;
    assert_eq!(r.ack(1, 1), Decision::Wait);
    assert!(!r.timers.is_due(Timer::Ack, at(16)));
    assert!(r.timers.is_due(Timer::Ack, at(17)));
}

#[test]
fn where_silence_is_certain_the_ack_timeout_does_not_double() {
    let mut r = Requester::new();
    r.link.certain = true;
    assert_eq!(r.expire(Timer::Ack, 68), Decision::GoBackN);
    assert!(r.timers.is_due(Timer::Ack, at(68) + ACK));
}

#[test]
fn nothing_in_flight_is_nothing_lost() {
    let mut r = Requester::new();
    r.in_flight = false;
    assert_eq!(r.expire(Timer::Probe, 100), Decision::Wait);
    assert_eq!(r.expire(Timer::Ack, 100), Decision::Wait);
    assert_eq!(r.window(), LINK);
}
