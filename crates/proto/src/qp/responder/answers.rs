//! Answers that a responder gives to single requests: READs, atomics, ATOMIC WRITEs and FLUSHes. They are kept for
//! replay, and sent in the order of their PSNs (IBA 9.7.5.1.3, 9.7.5.2.7).

use std::collections::VecDeque;
use std::time::Duration;

use crate::counters::Counter;
use crate::env::{Env, LinkProps, TransmitError};
use crate::payload::Payload;
use crate::reason::Told;
use crate::run::Run;
use crate::time::{LAST_ANSWER, Time};
use crate::types::Psn;
use crate::wire::aeth::{Aeth, Syndrome};
use crate::wire::atomic::AtomicAckEth;
use crate::wire::bth::Bth;
use crate::wire::carried_ack;
use crate::wire::opcode::{Opcode, Operation};
use crate::wire::packet::Headers;
use crate::wire::reth::Reth;

use super::super::Qp;
use super::super::congestion;
use super::super::timers::Timer;

/// READ response bytes that go out in one call: a peer that asks for more in one request gets the rest piece by piece.
const BURST: u64 = 128 << 10;

/// The pause between two bursts: a notification of congestion can come before the next. With [`BURST`] it bounds the
/// responses to one request to 21 Gbit/s (`the_responses_to_one_request_leave_in_bursts` of the scenarios).
const PACE: Duration = congestion::INTERVAL;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerKind {
    Read {
        va: u64,
        rkey: u32,
        len: u32,
        pd: u32,
        /// On XRC the SRQ that the request named.
        srqn: u32,
    },
    Atomic {
        original: u64,
    },
    /// To an ATOMIC WRITE or a FLUSH: a READ response without data.
    Placed,
}

/// The answer to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// PSN of the request, and of the first packet of the answer.
    pub(super) psn: Psn,
    pub(super) packets: u32,
    pub(super) msn: u32,
    pub(super) kind: AnswerKind,
}

/// An answer that is still to be sent, at least in part.
#[derive(Debug)]
struct Pending {
    answer: Answer,
    /// Packets that went out.
    sent: u32,
}

/// Answers that are remembered, and answers that are still to be sent.
#[derive(Debug, Default)]
pub(super) struct Answers {
    /// The last `depth` requests, oldest first.
    remembered: VecDeque<Answer>,
    depth: usize,
    /// In the order of their PSNs.
    pending: VecDeque<Pending>,
}

impl Answers {
    pub(super) fn new(depth: u8) -> Self {
        let depth = usize::from(depth);
        Self {
            remembered: VecDeque::with_capacity(depth),
            depth,
            pending: VecDeque::with_capacity(depth),
        }
    }

    /// A request was executed.
    pub(super) fn add(&mut self, answer: Answer) {
        // At a depth of 0 no request should come. This one was executed, and its answer is kept.
        while self.remembered.len() >= self.depth.max(1) {
            self.remembered.pop_front();
        }
        self.remembered.push_back(answer);
        self.pending.push_back(Pending { answer, sent: 0 });
    }

    pub(super) fn set_depth(&mut self, depth: u8) {
        self.depth = depth.into();
    }

    /// Tells whether one more request may come: the peer agreed to `depth` at a time (IBA 9.7.4.1.3).
    pub(super) fn have_room(&self) -> bool {
        self.pending.len() < self.depth
    }

    /// The answers that were given, oldest first.
    pub(super) fn remembered(&self) -> impl Iterator<Item = &Answer> {
        self.remembered.iter()
    }

    /// Remembers these answers in place of its own.
    pub(super) fn remember(&mut self, answers: impl Iterator<Item = Answer>) {
        self.remembered.clear();
        self.remembered.extend(answers.take(self.depth));
    }

    /// Whether something is to be sent.
    pub(super) fn are_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// A READ came again, perhaps for the rest of an earlier one: its answer, unless it does not lie within one.
    pub(super) fn answer_of(&self, psn: Psn, reth: &Reth, mtu: u32) -> Option<Answer> {
        let packets = reth.len.div_ceil(mtu).max(1);
        let known = self.remembered.iter().find(|a| {
            let k = psn.since(a.psn);
            k >= 0 && (k as u32) < a.packets && k as u32 + packets <= a.packets
        });
        let known = known?;
        let AnswerKind::Read { va, rkey, len, pd, srqn } = known.kind else { return None };
        let skipped = u64::from(psn.since(known.psn).unsigned_abs()) * u64::from(mtu);
        let within = reth.rkey == rkey
            && reth.va == va.wrapping_add(skipped)
            && u64::from(reth.len) <= u64::from(len).saturating_sub(skipped);
        let kind = AnswerKind::Read { va: reth.va, rkey, len: reth.len, pd, srqn };
        within.then_some(Answer { psn, packets, msn: known.msn, kind })
    }

    /// An atomic, an ATOMIC WRITE or a FLUSH came again: its result is sent again, it is not executed again.
    pub(super) fn replay_result(&mut self, psn: Psn) {
        let known = self
            .remembered
            .iter()
            .find(|a| a.psn == psn && !matches!(a.kind, AnswerKind::Read { .. }));
        if let Some(known) = known.copied() {
            self.replay(known);
        }
    }

    /// Sends an answer once more, at its place among those that are pending: the requester went back to it, or the
    /// network has duplicated the request. Both look alike, so those after it stay pending. No other code sends an
    /// answer again; `docs/design/loss-recovery.md` tells how to find out why.
    pub(super) fn replay(&mut self, answer: Answer) {
        let at = self.pending.partition_point(|p| answer.psn.since(p.answer.psn) >= 0);
        let room = self.pending.len() < self.depth;
        let before = at.checked_sub(1).and_then(|i| self.pending.get_mut(i));
        match before.filter(|p| (answer.psn.since(p.answer.psn) as u32) < p.answer.packets) {
            // Asked for from its middle, it begins there with a FIRST packet.
            Some(p) if p.sent > 0 || p.answer.psn != answer.psn => *p = Pending { answer, sent: 0 },
            Some(_) => {}
            None if room => self.pending.insert(at, Pending { answer, sent: 0 }),
            // It will be asked for again.
            None => {}
        }
    }
}

impl Qp {
    /// Forgets the answers that are still to be sent.
    pub(super) fn drop_pending_answers(&mut self) {
        self.responder.answers.pending.clear();
        self.timers.stop(Timer::Responses);
    }

    /// Sends answers and ACKs that the responder has kept. Tells whether anything went out.
    #[inline]
    pub(in crate::qp) fn send_kept<E: Env>(&mut self, env: &mut E) -> bool {
        self.keeps_any() && (self.send_answers(env) | self.send_held(env))
    }

    /// Tells whether answers, or an ACK or NAK that found no room, still have to be sent.
    #[inline]
    pub(in crate::qp) fn keeps_any(&self) -> bool {
        self.responder.answers.are_pending() || self.responder.acks.held.is_some()
    }

    /// Sends the answers that are pending, in order, as far as pace and link let it. Returns whether anything went
    /// out.
    fn send_answers<E: Env>(&mut self, env: &mut E) -> bool {
        let mut bytes = 0u64;
        let mut any = false;
        if self.timers.is_running(Timer::Responses)
            && self.timers.expire(Timer::Responses, env.now()).is_none()
        {
            return false;
        }
        while let Some(&Pending { answer, sent: k }) = self.responder.answers.pending.front() {
            if !self.attr.state.receives() {
                return any;
            }
            if bytes >= BURST {
                self.timers.start(Timer::Responses, env.now(), PACE);
                return any;
            }
            let psn = answer.psn.plus(k);
            let packets = match self.send_answer(&answer, k, BURST - bytes, env) {
                Ok((len, packets)) => {
                    bytes += len;
                    packets
                }
                Err(TransmitError::Blocked | TransmitError::PeerGone) => return any,
                Err(TransmitError::Fault(_)) => {
                    self.refuse_read(psn, &answer, env);
                    return true;
                }
            };
            any = true;
            self.responder.acks.last = None;
            // An answer acknowledges all requests before it.
            if answer.psn.plus(answer.packets).prev() == self.last_executed() {
                self.acknowledged();
            }
            let answers = &mut self.responder.answers;
            if k + packets == answer.packets {
                answers.pending.pop_front();
            } else if let Some(front) = answers.pending.front_mut() {
                front.sent = k + packets;
            }
        }
        any
    }

    /// Sends packet `k` of an answer, and those after it that go out in one piece with it, in all as long as `room` lets
    /// begin; returns how many bytes and packets.
    fn send_answer<E: Env>(
        &mut self,
        answer: &Answer,
        k: u32,
        room: u64,
        env: &mut E,
    ) -> Result<(u64, u32), TransmitError> {
        let psn = answer.psn.plus(k);
        let mtu = self.mtu();
        if let Some(sent) = self.send_middles(answer, k, room, env)? {
            return Ok(sent);
        }
        let (operation, payload, packets) = match answer.kind {
            AnswerKind::Atomic { .. } => (Operation::AtomicAck, Payload::EMPTY, 1),
            AnswerKind::Placed => (Operation::ReadResponseOnly, Payload::EMPTY, 1),
            AnswerKind::Read { va, rkey, len, pd, .. } => {
                let offset = k * mtu;
                let here = (len - offset.min(len)).min(self.segment(env));
                let packets = here.div_ceil(mtu).max(1);
                let at = va.wrapping_add(offset.into());
                let payload = Payload::remote(rkey, at, here as usize, (pd, self.qpn));
                let operation = match (k == 0, k + packets == answer.packets) {
                    (true, true) => Operation::ReadResponseOnly,
                    (true, false) => Operation::ReadResponseFirst,
                    (false, false) => Operation::ReadResponseMiddle,
                    (false, true) => Operation::ReadResponseLast,
                };
                (operation, payload, packets)
            }
        };
        let mut headers = Headers::new(Bth {
            opcode: Opcode::new(self.init.qp_type.service(), operation),
            ..self.bth(psn)
        });
        if operation != Operation::ReadResponseMiddle {
            headers.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: answer.msn });
        }
        if let AnswerKind::Atomic { original } = answer.kind {
            headers.atomic_ack = Some(AtomicAckEth { original });
        }
        env.transmit(&self.attr.av, &headers, &payload, None)?;
        Ok((payload.len() as u64, packets))
    }

    /// Sends the packets of a READ response from `k` on that are as long as the path MTU, up to the last one, where each
    /// leaves by itself. They differ in little but the PSN. `None`: there are not two of them.
    fn send_middles<E: Env>(
        &mut self,
        answer: &Answer,
        k: u32,
        room: u64,
        env: &mut E,
    ) -> Result<Option<(u64, u32)>, TransmitError> {
        let AnswerKind::Read { va, rkey, len, pd, .. } = answer.kind else { return Ok(None) };
        let mtu = self.mtu();
        let left = (answer.packets - k).saturating_sub(1).min(Run::MOST);
        let left = left.min(room.div_ceil(mtu.into()) as u32);
        if k == 0 || left < 2 || self.segment(env) != mtu {
            return Ok(None);
        }
        let service = self.init.qp_type.service();
        let opcode = Opcode::new(service, Operation::ReadResponseMiddle);
        let headers = Headers::new(Bth { opcode, ..self.bth(answer.psn.plus(k)) });
        let (at, rest) = (va.wrapping_add(u64::from(k * mtu)), (len - k * mtu) as usize);
        let payload = Payload::remote(rkey, at, rest, (pd, self.qpn));
        let run = Run::new(headers, payload, mtu, left, 0);
        match env.transmit_run(&self.attr.av, &run) {
            (0, Err(error)) => Err(error),
            // The reason for which it stopped is found again.
            (n, _) => Ok(Some((u64::from(n) * u64::from(mtu), n))),
        }
    }

    /// Sends the ACK that is owed, or a NAK that acknowledges as much, unless answers before it still have to leave.
    /// Tells whether the ACK is settled.
    pub(in crate::qp) fn send_owed_ack<E: Env>(&mut self, env: &mut E) -> bool {
        if !self.owes_ack() {
            return false;
        }
        if self.send_further_nak(env) {
            return true;
        }
        let sent = self.send_aeth(self.last_executed(), Syndrome::ACK, env);
        if sent {
            self.acknowledged();
            self.responder.acks.last = env.props().probe_after.map(|_| env.soon());
            env.count(Counter::AcksSent, 1);
        }
        sent
    }

    /// The ACK that the next request carries: the one that is owed, if the link carries ACKs and no answer has to leave before
    /// it. `len` is that of its payload: a longest packet has no room.
    #[inline]
    pub(in crate::qp) fn piggybacked_ack(&self, len: u32, link: &LinkProps) -> Option<Psn> {
        let responder = &self.responder;
        if !responder.may_acknowledge() || responder.out_of_order.is_some() {
            return None;
        }
        let has_room = || len + carried_ack::LEN as u32 <= self.mtu();
        let carries = link.immediate || link.carries_acks && responder.takes_acks && has_room();
        carries.then(|| self.last_executed())
    }

    /// A request was sent, which may have carried an ACK. The link counts those. If the request took another link than the one
    /// that it was made for, which was immediate or not, that has carried none.
    #[inline]
    pub(in crate::qp) fn note_piggybacked<E: Env>(
        &mut self,
        acks: Option<Psn>,
        was_immediate: bool,
        env: &E,
    ) {
        let link = env.props();
        if acks.is_some() && link.immediate == was_immediate {
            self.note_carried(link.probe_after.map(|_| env.soon()));
        }
    }

    /// An ACK has left with a request; the time of it where it may be lost.
    #[inline]
    pub(in crate::qp) fn note_carried(&mut self, at: Option<Time>) {
        (self.responder.acks.held, self.responder.acks.last) = (None, at);
        self.acknowledged();
    }

    /// Sends the last ACK once more, if it is no older than [`LAST_ANSWER`]. The peer's repeats will find no answer later.
    pub(in crate::qp) fn send_last_ack<E: Env>(&mut self, env: &mut E) {
        let is_recent = |at: Time| env.now().since(at) <= LAST_ANSWER;
        let answers = self.attr.state.receives();
        let responder = &self.responder;
        if answers && !responder.answers.are_pending() && responder.acks.last.is_some_and(is_recent)
        {
            self.send_aeth(self.last_executed(), Syndrome::ACK, env);
        }
    }

    /// Sends a NAK of `psn`. It also acknowledges the requests executed before.
    pub(super) fn send_nak<E: Env>(&mut self, psn: Psn, syndrome: Syndrome, env: &mut E) {
        self.acknowledged();
        self.responder.acks.last = None;
        self.send_aeth(psn, syndrome, env);
    }

    /// Sends the NAK of a request that is refused, with the reason. If it finds no room, the reason is lost.
    pub(super) fn send_refusal<E: Env>(
        &mut self,
        psn: Psn,
        syndrome: Syndrome,
        told: Told,
        env: &mut E,
    ) {
        self.acknowledged();
        self.responder.acks.last = None;
        let headers = self.aeth_headers(psn, syndrome);
        let result = env.refuse(&self.attr.av, &headers, told, self.responder.is_ours);
        self.responder.acks.held =
            (result == Err(TransmitError::Blocked)).then_some((psn, syndrome));
    }

    fn aeth_headers(&self, psn: Psn, syndrome: Syndrome) -> Headers {
        let opcode = Opcode::new(self.init.qp_type.service(), Operation::Ack);
        let mut headers = Headers::new(Bth { opcode, ..self.bth(psn) });
        headers.aeth = Some(Aeth { syndrome, msn: self.responder.msn() });
        headers
    }

    /// Sends the ACK or NAK that found no room before.
    fn send_held<E: Env>(&mut self, env: &mut E) -> bool {
        match self.responder.acks.held {
            Some((_, Syndrome::Ack { .. })) => self.send_owed_ack(env),
            Some((psn, syndrome)) if !self.responder.answers.are_pending() => {
                self.send_aeth(psn, syndrome, env)
            }
            _ => false,
        }
    }

    /// Tells whether it was sent. If not, it is held. If it is lost on the way, the requester's timeout makes up for
    /// it.
    fn send_aeth<E: Env>(&mut self, psn: Psn, syndrome: Syndrome, env: &mut E) -> bool {
        let headers = self.aeth_headers(psn, syndrome);
        let result = env.transmit(&self.attr.av, &headers, &Payload::EMPTY, None);
        self.responder.acks.held =
            (result == Err(TransmitError::Blocked)).then_some((psn, syndrome));
        result.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MTU: u32 = 1024;

    fn read(psn: u32, packets: u32) -> Answer {
        let va = u64::from(psn) * 4096;
        let kind = AnswerKind::Read { va, rkey: 7, len: packets * MTU, pd: 1, srqn: 0 };
        Answer { psn: Psn::new(psn), packets, msn: 1, kind }
    }

    fn again(answers: &mut Answers, psn: u32, packets: u32, va: u64) {
        let reth = Reth { va, rkey: 7, len: packets * MTU };
        if let Some(answer) = answers.answer_of(Psn::new(psn), &reth, MTU) {
            answers.replay(answer);
        }
    }

    fn shown(answers: &Answers) -> Vec<(u32, u32, u32)> {
        answers.pending.iter().map(|p| (p.answer.psn.get(), p.answer.packets, p.sent)).collect()
    }

    #[test]
    fn a_duplicated_request_takes_nothing_from_those_after_it() {
        let mut answers = Answers::new(4);
        for (psn, packets) in [(0xff_ffff, 1), (0, 4), (4, 1)] {
            answers.add(read(psn, packets));
        }
        again(&mut answers, 0, 4, 0);
        again(&mut answers, 0xff_ffff, 1, 0xff_ffff * 4096);
        assert_eq!(shown(&answers), [(0xff_ffff, 1, 0), (0, 4, 0), (4, 1, 0)]);
        // The first is answered, the second in part.
        answers.pending.pop_front();
        answers.pending[0].sent = 3;
        again(&mut answers, 0xff_ffff, 1, 0xff_ffff * 4096);
        assert_eq!(shown(&answers), [(0xff_ffff, 1, 0), (0, 4, 3), (4, 1, 0)]);
        again(&mut answers, 2, 2, 2 * u64::from(MTU));
        assert_eq!(shown(&answers), [(0xff_ffff, 1, 0), (2, 2, 0), (4, 1, 0)]);
    }

    #[test]
    fn a_repeated_read_keeps_its_key_and_place() {
        let mut answers = Answers::new(4);
        answers.add(read(10, 4));
        let reth = Reth { va: 10 * 4096, rkey: 7, len: 4 * MTU };
        let answer = |reth| answers.answer_of(Psn::new(10), &reth, MTU);
        assert_eq!(answer(reth), Some(read(10, 4)));
        assert_eq!(answer(Reth { rkey: 8, ..reth }), None);
        assert_eq!(answer(Reth { va: reth.va + 1, ..reth }), None);
        assert_eq!(answer(Reth { len: reth.len + 1, ..reth }), None);
    }

    #[test]
    fn without_responder_resources_an_answer_is_kept_all_the_same() {
        let mut answers = Answers::new(0);
        assert!(!answers.have_room());
        for psn in [1, 2] {
            answers.add(read(psn, 1));
        }
        assert_eq!(answers.remembered().map(|a| a.psn.get()).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn replays_are_in_order_and_bounded() {
        let mut answers = Answers::new(2);
        answers.add(read(1, 1));
        answers.add(read(2, 1));
        answers.pending.clear();
        for psn in [2, 1, 2, 1] {
            again(&mut answers, psn, 1, u64::from(psn) * 4096);
        }
        assert_eq!(shown(&answers), [(1, 1, 0), (2, 1, 0)]);
    }
}
