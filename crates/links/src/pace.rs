//! Credit of unreliable traffic. No ACK tells the peer's position there.
//!
//! Now and then the sender adds a datagram that is a [probe](anyverbs_proto::wire::credit), with an opcode from the range that the IBA leaves to
//! manufacturers. It carries the number of bytes sent so far on the path, and of messages to one queue pair. The
//! receiving device answers with the same count of bytes, and with the number of messages for which that queue pair has
//! receives. So there are two limits. The sender keeps at most [`CREDIT`] bytes ahead of the answers, as many as the
//! receiver's socket holds. It sends no more messages than there are receives, and the receiving *program* must have
//! had the processor to post those.
//!
//! A waiting sender probes again every [`PROBE_AFTER`]: probes and answers may be lost, and receives be posted. Waiting ends
//! after [`STRANGER`] for a peer that has never answered (another make of device). It ends after [`SILENCE`] for one
//! that has, and after [`NOT_READING`] for a program that posts no receives. Then the sender goes on without credit for
//! a time that doubles, and messages are lost as on any network.

use std::collections::HashMap;
use std::time::Duration;

use anyverbs_proto::time::Time;
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wire::credit::CreditCounts;

use crate::times::{ASK_AGAIN, LAST_PAUSE, NOT_READING, PROBE_AFTER, SILENCE, STRANGER};

/// The answer for a queue pair that takes no receives or is not known: messages to it are not limited.
pub const NO_LIMIT: u64 = u64::MAX;

pub(super) const PROBE_EVERY: u64 = 24 << 10;
pub(super) const CREDIT: u64 = 96 << 10;
/// Messages between probes, at most.
const MESSAGES: u64 = 64;
/// Messages before the first answer.
const FIRST_MESSAGES: u64 = 16;
/// Receivers of one path are forgotten when there are more than this.
const MANY: usize = 4096;

/// The decision on an unreliable packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Credit {
    /// Send it, and the probe behind it.
    Send(Option<CreditCounts>),
    /// Send the probe only; the queue pair is on the path's list, to ask again at this time at the latest.
    Blocked(Option<CreditCounts>, Time),
}

/// Waiting for one kind of credit.
#[derive(Debug, Default)]
struct Wait {
    since: Option<Time>,
    probe_at: Option<Time>,
    /// Credit is not asked for until then.
    free_until: Option<Time>,
    /// The length of the next time without credit.
    pause: Option<Duration>,
}

/// The next step of a waiting sender.
enum Step {
    GiveUp,
    Probe(Time),
    Wait(Time),
}

impl Wait {
    /// There is credit.
    fn end(&mut self) {
        *self = Self::default();
    }

    /// There is none. `probed`: a probe is on its way.
    fn step(&mut self, now: Time, longest: Duration, probed: bool) -> Step {
        let since = *self.since.get_or_insert(now);
        if now.since(since) >= longest {
            let pause = self.pause.unwrap_or(ASK_AGAIN);
            *self = Self {
                free_until: Some(now + pause),
                pause: Some((pause * 2).min(LAST_PAUSE)),
                ..Self::default()
            };
            return Step::GiveUp;
        }
        match self.probe_at {
            None if probed => {}
            Some(at) if now < at => return Step::Wait(at),
            _ => {
                let next = now + PROBE_AFTER;
                self.probe_at = Some(next);
                return Step::Probe(next);
            }
        }
        let next = now + PROBE_AFTER;
        self.probe_at = Some(next);
        Step::Wait(next)
    }

    /// Whether credit is not asked for now; `None` at the moment at which that ends.
    fn is_free(&mut self, now: Time) -> Option<bool> {
        match self.free_until {
            None => Some(false),
            Some(until) if now < until => Some(true),
            Some(_) => {
                self.free_until = None;
                None
            }
        }
    }
}

/// A queue pair of the peer.
#[derive(Debug)]
struct Receiver {
    /// Messages sent to it.
    sent: u64,
    /// `sent` at the last probe.
    probed: u64,
    /// The number of messages that may be sent in all.
    limit: u64,
    wait: Wait,
}

impl Default for Receiver {
    fn default() -> Self {
        Self { sent: 0, probed: 0, limit: FIRST_MESSAGES, wait: Wait::default() }
    }
}

/// Credit of one path.
#[derive(Debug, Default)]
pub(super) struct Pace {
    sent: u64,
    echoed: u64,
    probed: u64,
    /// The peer is a device of this make: it has answered a probe, or lives on this host.
    answers: bool,
    wait: Wait,
    receivers: HashMap<Qpn, Receiver>,
    blocked: Vec<Qpn>,
    /// The time at which waiting senders ask again.
    retry_at: Option<Time>,
}

impl Pace {
    /// `ours`: the peer is a process of this host, hence a device of this make, though it may be long in answering first.
    pub(super) fn new(ours: bool) -> Self {
        Self { answers: ours, ..Self::default() }
    }

    /// Asks to send `len` bytes from queue pair `from` to `to`. `takes_recv`: the packet uses up a receive.
    pub(super) fn ask(
        &mut self,
        len: usize,
        from: Qpn,
        to: Qpn,
        takes_recv: bool,
        now: Time,
    ) -> Credit {
        match self.wait.is_free(now) {
            Some(true) => return Credit::Send(None),
            Some(false) => {}
            None => (self.echoed, self.probed) = (self.sent, self.sent),
        }
        if self.receivers.len() > MANY {
            self.receivers.clear();
        }
        let receiver = self.receivers.entry(to).or_default();
        let here = CreditCounts { bytes: self.sent, messages: receiver.sent };
        let free = match receiver.wait.is_free(now) {
            None => {
                receiver.limit = receiver.sent + FIRST_MESSAGES;
                false
            }
            Some(free) => free,
        };
        let mut step = None;
        let (silence, no_receives) =
            if self.answers { (SILENCE, NOT_READING) } else { (STRANGER, STRANGER) };
        if self.sent - self.echoed + len as u64 > CREDIT {
            step = Some(self.wait.step(now, silence, true));
        } else if takes_recv && !free && receiver.sent >= receiver.limit {
            let probed = receiver.probed == receiver.sent;
            // A stranger that gives no limit leaves it open for all its queue pairs.
            let wait = if self.answers { &mut receiver.wait } else { &mut self.wait };
            step = Some(wait.step(now, no_receives, probed));
        }
        let (probe, at) = match step {
            None | Some(Step::GiveUp) => (None, None),
            Some(Step::Wait(at)) => (None, Some(at)),
            Some(Step::Probe(at)) => (Some(here), Some(at)),
        };
        if let Some(at) = at {
            if probe.is_some() {
                (self.probed, receiver.probed) = (self.sent, receiver.sent);
            }
            self.blocked.push(from);
            self.retry_at = Some(self.retry_at.map_or(at, |earlier| earlier.min(at)));
            return Credit::Blocked(probe, at);
        }

        // No sender waits any more, or the one that did is gone.
        let gave_up = step.is_some();
        (self.wait.since, self.wait.probe_at) = (None, None);
        (receiver.wait.since, receiver.wait.probe_at) = (None, None);
        self.sent += len as u64;
        receiver.sent += u64::from(takes_recv);
        let unprobed = receiver.sent - receiver.probed;
        // Sooner when there is little left.
        let every = (receiver.limit.saturating_sub(receiver.probed) / 2).clamp(1, MESSAGES);
        let due = !free && takes_recv && unprobed >= every;
        if gave_up || (self.sent - self.probed < PROBE_EVERY && !due) {
            return Credit::Send(None);
        }
        (self.probed, receiver.probed) = (self.sent, receiver.sent);
        Credit::Send(Some(CreditCounts { bytes: self.sent, messages: receiver.sent }))
    }

    /// The peer has received all bytes up to `bytes` and takes `limit` messages in all for its queue pair `receiver`.
    /// Moves the waiting queue pairs to `resume`.
    pub(super) fn echo(&mut self, bytes: u64, receiver: Qpn, limit: u64, resume: &mut Vec<Qpn>) {
        if bytes > self.sent {
            return;
        }
        self.answers = true;
        if bytes > self.echoed || self.wait.free_until.is_some() {
            self.echoed = self.echoed.max(bytes);
            self.wait.end();
        }
        if let Some(receiver) = self.receivers.get_mut(&receiver) {
            receiver.limit = limit;
            if limit > receiver.sent {
                receiver.wait.end();
            }
        }
        self.release(resume);
    }

    fn release(&mut self, resume: &mut Vec<Qpn>) {
        self.retry_at = None;
        resume.append(&mut self.blocked);
    }

    /// Lets waiting queue pairs ask again, where it is time. Returns the time of the next look.
    pub(super) fn expire(&mut self, now: Time, resume: &mut Vec<Qpn>) -> Option<Time> {
        if now < self.retry_at? {
            return self.retry_at;
        }
        self.release(resume);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QPN: Qpn = Qpn::new(0x01_0005);
    const PEER: Qpn = Qpn::new(0x02_0007);

    fn at(ms: u64) -> Time {
        Time::from_nanos(ms * 1_000_000)
    }

    /// Sends messages of one packet until it must wait; how many, and the probes.
    fn burst(pace: &mut Pace, len: usize, now: Time) -> (u64, Vec<CreditCounts>) {
        let (mut sent, mut probes) = (0, Vec::new());
        while sent < 10_000 {
            match pace.ask(len, QPN, PEER, true, now) {
                Credit::Send(probe) => {
                    sent += 1;
                    probes.extend(probe);
                }
                Credit::Blocked(probe, _) => {
                    probes.extend(probe);
                    break;
                }
            }
        }
        (sent, probes)
    }

    fn echo(pace: &mut Pace, bytes: u64, limit: u64) -> Vec<Qpn> {
        let mut resume = Vec::new();
        pace.echo(bytes, PEER, limit, &mut resume);
        resume
    }

    #[test]
    fn a_process_of_this_host_is_waited_for_at_once() {
        let waits = |ours, ms| {
            let mut pace = Pace::new(ours);
            burst(&mut pace, 100, at(1));
            let again = (1..=ms).step_by(10).map(|ms| pace.ask(100, QPN, PEER, true, at(ms)));
            again.last().is_some_and(|credit| matches!(credit, Credit::Blocked(..)))
        };
        assert!(waits(true, 151));
        assert!(!waits(false, 151));
    }

    #[test]
    fn bytes_run_out_and_come_back_with_the_answer() {
        let mut pace = Pace::default();
        let (sent, probes) = burst(&mut pace, 8192, at(0));
        assert_eq!(sent * 8192, CREDIT);
        assert_eq!(probes.len() as u64, CREDIT / PROBE_EVERY);
        assert_eq!(probes[3], CreditCounts { bytes: CREDIT, messages: sent });
        assert_eq!(
            echo(&mut pace, CREDIT + 1, NO_LIMIT),
            [],
            "an answer to what was never sent counts for nothing"
        );
        assert_eq!(echo(&mut pace, probes[0].bytes, NO_LIMIT), [QPN]);
        assert_eq!(burst(&mut pace, 8192, at(1)).0, PROBE_EVERY / 8192);
    }

    #[test]
    fn no_more_messages_than_receives() {
        let mut pace = Pace::default();
        assert_eq!(burst(&mut pace, 8, at(0)).0, FIRST_MESSAGES);
        echo(&mut pace, 128, FIRST_MESSAGES + 100);
        let (sent, probes) = burst(&mut pace, 8, at(1));
        assert_eq!(sent, 100);
        assert!(probes.len() < 12, "not a probe for each: {}", probes.len());
        // One more receive was posted meanwhile. The answer counts the message that it answers.
        assert_eq!(echo(&mut pace, 128, FIRST_MESSAGES + 101), [QPN]);
        assert_eq!(burst(&mut pace, 8, at(1)).0, 1);
        // A packet that needs no receive passes.
        assert!(matches!(pace.ask(8, QPN, PEER, false, at(1)), Credit::Send(_)));
        // A probe for another queue pair does so, too.
        assert!(matches!(pace.ask(8, QPN, Qpn::new(0x02_0008), true, at(1)), Credit::Send(_)));
    }

    #[test]
    fn a_sender_without_receives_asks_again_and_gives_up() {
        let mut pace = Pace::default();
        burst(&mut pace, 8, at(0));
        echo(&mut pace, 128, FIRST_MESSAGES);
        let mut probes = 0;
        let mut now = 0;
        let mut resume = Vec::new();
        while let Credit::Blocked(probe, until) = pace.ask(8, QPN, PEER, true, at(now)) {
            if let Some(probe) = probe {
                probes += 1;
                // The peer is alive, its program does not post: that is not credit.
                resume = echo(&mut pace, probe.bytes, FIRST_MESSAGES);
                assert_eq!(resume, [QPN]);
                continue;
            }
            assert_eq!(pace.expire(at(now), &mut resume), Some(until));
            now = until.as_nanos() / 1_000_000;
            assert_eq!(pace.expire(at(now), &mut resume), None);
            assert!(now <= 220, "it waits for ever");
        }
        assert!((13..=25).contains(&probes), "every 8 ms for 200: {probes}");
        assert!(now >= 200);
        for _ in 0..100 {
            assert!(matches!(pace.ask(8, QPN, PEER, true, at(now + 10)), Credit::Send(_)));
        }
        echo(&mut pace, 128, FIRST_MESSAGES + 201);
        assert_eq!(burst(&mut pace, 8, at(now + 11)).0, 100, "a program that posts again counts");
    }

    #[test]
    fn a_stranger_is_left_alone_for_a_while() {
        let mut pace = Pace::default();
        let mut resume = Vec::new();
        burst(&mut pace, 8192, at(0));
        assert_eq!(pace.expire(at(1), &mut resume), Some(at(8)));
        assert_eq!(pace.expire(at(8), &mut resume), None);
        assert!(matches!(pace.ask(8192, QPN, PEER, true, at(8)), Credit::Blocked(Some(_), _)));
        for _ in 0..1000 {
            assert_eq!(pace.ask(8192, QPN, PEER, true, at(32)), Credit::Send(None));
        }
        assert!(burst(&mut pace, 8192, at(3000)).0 < 100);
    }

    #[test]
    fn pauses_in_vain_double_up_to_a_bound() {
        let (mut wait, mut now) = (Wait::default(), at(0));
        for seconds in [1, 2, 4, 8, 16, 32, 64, 64, 64] {
            assert!(matches!(wait.step(now, STRANGER, false), Step::Probe(_)));
            now = now + STRANGER;
            assert!(matches!(wait.step(now, STRANGER, false), Step::GiveUp));
            assert_eq!(wait.is_free(now + Duration::from_millis(seconds * 1000 - 1)), Some(true));
            now = now + Duration::from_secs(seconds);
            assert_eq!(wait.is_free(now), None);
        }
    }

    #[test]
    fn a_peer_that_has_answered_is_waited_for() {
        let mut pace = Pace::default();
        burst(&mut pace, 8192, at(0));
        echo(&mut pace, CREDIT, NO_LIMIT);
        burst(&mut pace, 8192, at(1));
        for ms in (11..500).step_by(10) {
            let asked = pace.ask(8192, QPN, PEER, true, at(ms));
            assert!(matches!(asked, Credit::Blocked(Some(_), _)), "{asked:?} after {ms} ms");
        }
        assert_eq!(pace.ask(8192, QPN, PEER, true, at(502)), Credit::Send(None));
    }
}
