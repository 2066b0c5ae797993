//! The requester of RC, XRC and UC: cuts work requests into packets, sends them again where a reliable one has to
//! (IBA 9.7.3, 9.8.2).
//!
//! The send queue's `next` and the packet count `k` are the cursor: the packet that goes out next. Going back after a
//! loss moves the cursor only. A WQE keeps the PSNs that it got when it was started.

mod accepted;
mod completer;
mod direct;
mod local;
mod opcodes;
mod recovery;
mod retransmit;
mod row;
pub(super) mod single;
mod stream;
mod within;

use std::collections::VecDeque;
use std::time::Duration;

use crate::comp_cntr::CompCntrOps;
use crate::counters::Counter;
use crate::direct::{MAX_DIRECT, MAX_FETCH, Place, WORTH_FETCHING};
use crate::env::{Env, Side, TransmitError};
use crate::mr::Access;
use crate::payload::{Payload, hold_local};
use crate::types::Psn;
use crate::wc::{Wc, WcStatus};
use crate::wire::atomic::AtomicEth;
use crate::wire::bth::Bth;
use crate::wire::opcode::Opcode;
use crate::wire::packet::Headers;
use crate::wire::reth::Reth;
use crate::wire::xrceth::XrcEth;
use crate::wr::{RemoteAddr, SendFlags, SendOp};

use self::recovery::LossRecovery;
use super::Qp;
use super::attr::{QpState, QpType};
use super::send_queue::{PACKET_COST, Sqe};
use super::timers::Timer;
use accepted::Accepted;
use direct::Directly;
use opcodes::{operation, wc_opcode};
use single::Single;

/// A READ is asked for in pieces of this many bytes (a multiple of every MTU), so that our window also bounds the
/// responses. READ responses have no acknowledgement that could pace them.
///
/// The first and the last response to one request are longer than those between them. Where a link wants packets of one length, and
/// the peer lets enough READs be outstanding, two packets are asked for at a time.
const READ_PIECE: u32 = 64 << 10;

/// The most full packets of a batch with which a READ is asked for two packets at a time. With more, the requests cost more than
/// the batches that FIRST and LAST break.
const FEW_PACKETS: u32 = 16;

/// An ACK is asked for this often inside a message that is longer, so that it can clock the window.
const ACK_EVERY: u32 = 16;

/// PSNs that may be outstanding when a further message starts. With those of the longest message they stay within half
/// the number space, or serial comparison breaks down (IBA 9.7.1).
const MAX_PSNS: u32 = 1 << 22;

/// Most packets in one go of a link ([`LinkProps::batch`](crate::env::LinkProps::batch)).
pub(super) const BATCH_PACKETS: u32 = 64;
/// Headers and trailer of a WRITE's packet.
pub(super) const WRITE_OVERHEAD: u32 = 32;

/// The requester's state.
#[derive(Debug, Default)]
pub(super) struct Requester {
    /// Packets of the WQE `next` that went out.
    k: u32,
    /// The oldest PSN without an answer. [`Requester::answered`] alone moves it (`docs/design/ordering.md`).
    una: Psn,
    /// Window cost of everything answered.
    una_cost: u64,
    /// The PSN after the highest that was ever sent.
    max_sent: Psn,
    /// PSN and cost for the WQE that is started next: the cost is 0 as long as none was.
    fresh_psn: Psn,
    fresh_cost: u64,
    /// PSNs after the last response of each READ piece, and of all else that has one, that is outstanding.
    responses: VecDeque<Psn>,
    /// Requests with a response of their own that are started and not complete.
    unfenced: u32,
    /// Local operations that are done but may not complete yet.
    local: u32,
    recovery: LossRecovery,
    /// The WQE at this position cannot be sent; completed with this status once all before it are.
    halted: Option<(u32, WcStatus)>,
    /// The window ended the last sending: the packets in flight include one that asks for an ACK.
    window_closed: bool,
    /// `SQ_DRAINED` was raised since the move to SQD.
    drained: bool,
    /// The peer has executed everything up to this PSN, and said so before the response to a request among that has come.
    executed: Option<Psn>,
    accepted: Accepted,
    /// The PSN of the last packet whose payload the peer was to fetch.
    last_fetched: Option<Psn>,
    /// It could not: all payloads are sent.
    sends_all: bool,
    repeats: Repeats,
    /// PSN of the next datagram.
    pub(super) next_datagram: Psn,
}

/// How often something went wrong, for those who watch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repeats {
    /// Timeouts and NAKs after which packets were sent again.
    pub retries: u32,
    /// RNR NAKs of the peer.
    pub rnr_naks: u32,
}

impl Requester {
    /// How often packets were sent again.
    pub(super) fn repeats(&self) -> Repeats {
        self.repeats
    }

    /// The PSN of the next new packet.
    pub(super) fn fresh_psn(&self) -> Psn {
        self.fresh_psn
    }

    /// Retries that a modify grants anew.
    pub(super) fn set_retries(&mut self, retry_cnt: Option<u8>, rnr_retry: Option<u8>) {
        self.recovery.set_retries(retry_cnt, rnr_retry);
    }

    /// All packets before `psn` are answered, or have left where nobody answers. `cost` is what they cost the window.
    #[inline]
    fn answered(&mut self, psn: Psn, cost: u64) {
        (self.una, self.una_cost) = (psn, cost);
    }

    /// The queue pair has moved to SQD: requests that have begun are finished.
    pub(super) fn begin_drain(&mut self) {
        self.drained = false;
    }

    /// Tells whether that is done.
    pub(super) fn is_drained(&self) -> bool {
        self.drained
    }
}

impl Qp {
    /// Begins to send at `psn`, in RTS.
    pub(super) fn start_requester(&mut self, psn: Psn) {
        let depth = usize::from(self.attr.max_rd_atomic);
        self.requester = Requester {
            una: psn,
            max_sent: psn,
            fresh_psn: psn,
            next_datagram: psn,
            responses: VecDeque::with_capacity(depth),
            recovery: LossRecovery::new(self.attr.retry_cnt, self.attr.rnr_retry),
            ..Requester::default()
        };
    }

    /// Whether the peer has answered since the ACK timer began.
    pub(super) fn has_answered_lately(&self) -> bool {
        self.requester.recovery.has_answered()
    }

    /// The PSN of the packet under the cursor.
    fn cursor_psn(&self) -> Psn {
        if self.sq.next == self.sq.started {
            self.requester.fresh_psn
        } else {
            self.sq.at(self.sq.next).first_psn.plus(self.requester.k)
        }
    }

    fn cursor_cost(&self) -> u64 {
        if self.sq.next == self.sq.started {
            self.requester.fresh_cost
        } else {
            self.sq.at(self.sq.next).cost_at(self.requester.k, self.mtu())
        }
    }

    /// The oldest PSN without an answer.
    pub(super) fn first_unanswered(&self) -> Psn {
        self.requester.una
    }

    /// Whether packets without an answer are out.
    pub(super) fn awaits_answer(&self) -> bool {
        self.init.qp_type.is_reliable() && self.requester.una != self.cursor_psn()
    }

    /// Sends requests while state, window, peer and link let it. Returns whether anything went out.
    pub(super) fn send_requests<E: Env>(&mut self, env: &mut E) -> bool {
        if !matches!(self.attr.state, QpState::Rts | QpState::Sqd)
            || self.timers.is_running(Timer::RnrWait)
            || self.sq.next == self.sq.head()
        {
            return false;
        }
        let Some(window) = self.open_window(env) else { return false };
        self.requester.window_closed = false;
        let mut sent = false;
        let mut copied = 0;
        while !self.is_halted_here() && self.sq.next != self.sq.head() {
            if self.sq.next == self.sq.started {
                match self.send_direct(env) {
                    Directly::Done(len) => {
                        copied += len;
                        if copied < MAX_DIRECT {
                            continue;
                        }
                        self.timers.start(Timer::Rate, env.now(), Duration::ZERO);
                        break;
                    }
                    Directly::Waits => break,
                    Directly::No => {}
                }
                let (row, end) = self.send_row(window, env);
                sent |= row > 0;
                let fate = match end {
                    Err(error) => Single::Stopped(error),
                    Ok(()) if row > 0 => Single::Sent,
                    Ok(()) => self.send_single(window, env),
                };
                match fate {
                    Single::Sent => {
                        sent = true;
                        continue;
                    }
                    Single::Stopped(TransmitError::Fault(_)) => {
                        self.halt(WcStatus::LocProtErr);
                        continue;
                    }
                    Single::Stopped(TransmitError::PeerGone) => {
                        self.peer_gone(env);
                        break;
                    }
                    Single::Stopped(TransmitError::Blocked) => break,
                    Single::Other => {}
                }
                if !self.start_wqe(env) {
                    break;
                }
                if self.sq.next == self.sq.started {
                    // The WQE was no message.
                    continue;
                }
            } else if self.sq.at(self.sq.next).op.is_local() {
                // Done before the cursor went back.
                self.sq.next = self.sq.next.wrapping_add(1);
                continue;
            }
            let streamed = self.send_stream(window, &mut sent, env);
            match streamed.and_then(|()| self.send_packet(window, env)) {
                Ok(true) => sent = true,
                Ok(false) | Err(TransmitError::Blocked) => break,
                Err(TransmitError::Fault(_)) => self.halt(WcStatus::LocProtErr),
                Err(TransmitError::PeerGone) => {
                    self.peer_gone(env);
                    break;
                }
            }
        }
        if sent {
            self.note_sent(env);
        }
        self.complete_halted(env);
        self.note_drained(env);
        sent
    }

    /// The cost that may be in flight after this sending. A trickle of single packets behind each ACK would cost a
    /// system call each. So the requester waits for a good piece, whole batches of the link where it has them. `None`
    /// means that it waits.
    fn open_window<E: Env>(&mut self, env: &E) -> Option<u64> {
        let window = self.requester.recovery.window(env.props().window.into());
        let in_flight = self.cursor_cost().wrapping_sub(self.requester.una_cost);
        let batch = u64::from(self.batch_packets(env)) * (u64::from(self.mtu()) + PACKET_COST);
        if batch > 0 && window >= 2 * batch {
            let free = window.saturating_sub(in_flight);
            if free >= batch {
                return Some(in_flight + free / batch * batch);
            }
            return (!self.requester.window_closed).then_some(window);
        }
        // Where the window has shrunk, fewer packets than these may be in flight that ask for no ACK. The next one does.
        let unasked = match self.requester.recovery.is_window_reduced() {
            true => u64::from(ACK_EVERY - 1) * (u64::from(self.mtu()) + PACKET_COST),
            false => 0,
        };
        let is_open =
            !self.requester.window_closed || in_flight <= (window - window / 4).max(unasked);
        is_open.then_some(window)
    }

    /// Full packets that leave in one go of the link; 0 if it sends each by itself.
    fn batch_packets<E: Env>(&self, env: &E) -> u32 {
        match env.props().batch {
            // This avoids a division, which costs as much as the rest of a short message's way here.
            0 => 0,
            bytes => (bytes / (self.mtu() + WRITE_OVERHEAD)).min(BATCH_PACKETS),
        }
    }

    /// Checks the WQE `next` and gives it PSNs. False if it has to wait or cannot be sent at all.
    fn start_wqe<E: Env>(&mut self, env: &mut E) -> bool {
        // In SQD begun requests are finished, and no new one begins (IBA 10.3.1.5).
        if self.attr.state == QpState::Sqd {
            return false;
        }
        let position = self.sq.next;
        let sqe = *self.sq.at(position);
        if sqe.flags.contains(SendFlags::FENCE) && self.requester.unfenced != 0 {
            return false;
        }
        if sqe.op.is_local() {
            return self.do_locally(position, &sqe, env);
        }
        let mtu = self.mtu();
        let packets = self.packets(sqe.len);
        let ahead = self.requester.fresh_psn.since(self.requester.una);
        if ahead as u32 + packets > MAX_PSNS && ahead > 0 {
            return false;
        }
        if let Err(status) = self.check_wqe(position, &sqe, env) {
            self.halt(status);
            return false;
        }
        let in_batch = self.batch_packets(env);
        let requester = &mut self.requester;
        let entry = self.sq.at_mut(position);
        entry.split = match sqe.op {
            SendOp::Write(at) if packets > 1 && self.init.qp_type.is_reliable() => {
                env.props().batch > 0 && requester.accepted.covers(at, sqe.len)
            }
            // Room for two batches.
            SendOp::Read(_) if packets > 2 => {
                (1..=FEW_PACKETS).contains(&in_batch)
                    && u32::from(self.attr.max_rd_atomic) >= in_batch
            }
            _ => false,
        };
        entry.first_psn = requester.fresh_psn;
        entry.packets = if sqe.op.is_atomic() { 1 } else { packets };
        entry.cost_before = requester.fresh_cost;
        requester.fresh_psn = entry.end_psn();
        requester.fresh_cost = entry.cost_at(entry.packets, mtu);
        requester.unfenced += u32::from(sqe.op.has_response());
        requester.k = 0;
        self.sq.started = position.wrapping_add(1);
        self.responder.note_request_sent();
        true
    }

    fn check_wqe<E: Env>(&self, position: u32, sqe: &Sqe, env: &E) -> Result<(), WcStatus> {
        let reliable = self.init.qp_type.is_reliable();
        match sqe.op {
            SendOp::Send | SendOp::SendImm(_) | SendOp::Write(_) | SendOp::WriteImm(..) => {}
            SendOp::SendInv(_) if reliable => {}
            _ if sqe.op.has_response() && reliable => {
                // With no resources granted these can never be sent (IBA 9.4.4, 9.4.5, A19.3).
                if self.attr.max_rd_atomic == 0 {
                    return Err(WcStatus::LocQpOpErr);
                }
            }
            _ => return Err(WcStatus::LocQpOpErr),
        }
        if sqe.op.fixed_len().is_some_and(|len| len != sqe.len) {
            return Err(WcStatus::LocLenErr);
        }
        // The place of the answer is checked when the answer comes. The peer's refusal comes first, and an atomic whose
        // result has no place is done all the same, as on other devices.
        if sqe.op.has_response_data() { Ok(()) } else { self.check_sges(position, env) }
    }

    /// Checks the keys of the elements that a WQE sends. Empty elements are not checked (S5.5).
    pub(super) fn check_sges<E: Env>(&self, position: u32, env: &E) -> Result<(), WcStatus> {
        for sge in self.sq.sges(position).iter().filter(|s| s.len > 0) {
            hold_local(env.mrs(), self.init.pd, sge, Access::empty())
                .map_err(|_| WcStatus::LocProtErr)?;
        }
        Ok(())
    }

    /// Sends the packet under the cursor. False if it has to wait.
    fn send_packet<E: Env>(&mut self, window: u64, env: &mut E) -> Result<bool, TransmitError> {
        if !self.paces_one_more(env) {
            return Ok(false);
        }
        let position = self.sq.next;
        let sqe = *self.sq.at(position);
        let k = self.requester.k;
        let psn = sqe.first_psn.plus(k);
        let offset = k * self.mtu();
        let at = self.fetched(&sqe, position, (psn, offset), env);
        let most = if at.is_some() { self.longest_fetched() } else { self.segment(env) };
        let (packets, bytes) = self.piece(&sqe, offset, most);
        if self.init.qp_type.is_reliable() {
            let limit = usize::from(self.attr.max_rd_atomic);
            if sqe.op.has_response() && self.requester.responses.len() >= limit {
                return Ok(false);
            }
            let in_flight = self.cursor_cost().wrapping_sub(self.requester.una_cost);
            let cost = u64::from(bytes) + u64::from(packets) * PACKET_COST;
            if !has_room(in_flight, cost, window) {
                self.requester.window_closed = true;
                return Ok(false);
            }
        }

        let last = k + packets == sqe.packets;
        let headers = self.request_headers(&sqe, psn, (offset, bytes, packets), last, window);
        let mut payload = self.payload(&sqe, position, offset, bytes);
        if let Some(at) = at {
            payload = payload.fetched_from(at);
        }
        let sent = payload.len() as u32;
        let immediate = env.props().immediate;
        let acks = self.piggybacked_ack(sent, env.props());
        env.transmit(&self.attr.av, &headers, &payload, acks)?;
        self.note_piggybacked(acks, immediate, env);
        self.note_paced(sent, env);

        let requester = &mut self.requester;
        if at.is_some() {
            requester.last_fetched = Some(psn);
        }
        if psn.since(requester.max_sent) < 0 {
            env.count(Counter::Retransmitted, 1);
        }
        let end = psn.plus(packets);
        if end.since(requester.max_sent) > 0 {
            requester.max_sent = end;
        }
        if sqe.op.has_response() {
            requester.responses.push_back(end);
        }
        requester.k += packets;
        if last {
            requester.k = 0;
            self.sq.next = position.wrapping_add(1);
            if self.init.qp_type == QpType::Uc {
                // UC gets no answers: a packet is done when it is sent.
                let cost = self.cursor_cost();
                self.requester.answered(end, cost);
                self.complete_oldest(WcStatus::Success, env);
            }
        }
        Ok(true)
    }

    /// Where the peer may fetch the rest of a SEND from that begins at `offset`. Only an RC queue pair keeps it there until the
    /// answer. A packet that is sent again has its payload with it, and so shows every fault.
    #[inline]
    fn fetched<E: Env>(
        &self,
        sqe: &Sqe,
        position: u32,
        (psn, offset): (Psn, u32),
        env: &mut E,
    ) -> Option<Place> {
        let len = sqe.len - offset;
        let may_be = len >= WORTH_FETCHING
            && self.init.qp_type == QpType::Rc
            && psn == self.requester.max_sent
            && !self.requester.sends_all
            && matches!(sqe.op, SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_))
            && !sqe.flags.contains(SendFlags::INLINE)
            && !self.rate.is_limited();
        may_be.then(|| env.fetched(&self.payload(sqe, position, offset, len)))?
    }

    /// Longest payload that the peer fetches: at most 128 packets.
    fn longest_fetched(&self) -> u32 {
        MAX_FETCH.min(self.mtu() << 7)
    }

    /// The packets and bytes of the piece of a request that begins at `offset`. A READ goes out in pieces, everything else
    /// packet by packet.
    #[inline]
    fn piece(&self, sqe: &Sqe, offset: u32, segment: u32) -> (u32, u32) {
        let left = sqe.len - offset.min(sqe.len);
        let to_multiple = |of| of - offset % of;
        let most = match sqe.op {
            SendOp::Read(_) if sqe.split => to_multiple(2 * self.mtu()),
            SendOp::Read(_) => to_multiple(READ_PIECE),
            _ => segment,
        };
        let bytes = left.min(most);
        (self.packets(bytes), bytes)
    }

    #[inline]
    fn payload<'a>(&'a self, sqe: &'a Sqe, position: u32, offset: u32, bytes: u32) -> Payload<'a> {
        match &sqe.op {
            op if op.has_response_data() => Payload::EMPTY,
            SendOp::AtomicWrite { data: Some(data), .. } => Payload::bytes(data),
            _ if sqe.flags.contains(SendFlags::INLINE) => Payload::bytes(
                &self.sq.inline(position)[offset as usize..(offset + bytes) as usize],
            ),
            _ => {
                Payload::gather(self.sq.sges(position), offset.into(), bytes as usize, self.init.pd)
            }
        }
    }

    /// Calls `f` with the oldest packet that has no answer, as a link would send it that has no long pieces.
    pub(super) fn with_oldest(&self, f: impl FnOnce(Headers, Payload<'_>)) {
        let (position, k) = self.place_of_psn(self.requester.una);
        if position == self.sq.started {
            return;
        }
        let sqe = self.sq.at(position);
        let offset = k * self.mtu();
        let (packets, bytes) = self.piece(sqe, offset, self.mtu());
        let (last, psn) = (k + packets == sqe.packets, sqe.first_psn.plus(k));
        let headers = self.request_headers(sqe, psn, (offset, bytes, packets), last, 0);
        f(headers, self.payload(sqe, position, offset, bytes));
    }

    fn request_headers(
        &self,
        sqe: &Sqe,
        psn: Psn,
        (offset, bytes, packets): (u32, u32, u32),
        last: bool,
        window: u64,
    ) -> Headers {
        let qp_type = self.init.qp_type;
        let first = offset == 0;
        let operation = operation(&sqe.op, first || sqe.split, last || sqe.split);
        let carried = if sqe.op.has_response_data() { 1 } else { packets };
        let asks = last || self.asks_for_ack(sqe, psn, carried, window);
        let mut headers = Headers::new(Bth {
            opcode: Opcode::new(qp_type.service(), operation),
            solicited: last && sqe.flags.contains(SendFlags::SOLICITED),
            ack_req: asks && qp_type.is_reliable(),
            ..self.bth(psn)
        });
        if qp_type == QpType::XrcSend {
            headers.xrceth = Some(XrcEth { srqn: sqe.xrc_srqn });
        }
        match sqe.op {
            SendOp::Write(at) if sqe.split => headers.reth = Some(reth(at, offset, bytes)),
            SendOp::Write(at) | SendOp::WriteImm(at, _) if first => {
                headers.reth = Some(reth(at, 0, sqe.len));
            }
            SendOp::Read(at) => headers.reth = Some(reth(at, offset, bytes)),
            SendOp::CompareSwap { at, compare, swap } => {
                headers.atomic =
                    Some(AtomicEth { va: at.va, rkey: at.rkey, swap_add: swap, compare });
            }
            SendOp::FetchAdd { at, add } => {
                headers.atomic =
                    Some(AtomicEth { va: at.va, rkey: at.rkey, swap_add: add, compare: 0 });
            }
            SendOp::AtomicWrite { at, .. } => headers.reth = Some(reth(at, 0, 8)),
            SendOp::Flush { at, len, feth } => {
                headers.feth = Some(feth);
                headers.reth = Some(reth(at, 0, len));
            }
            _ => {}
        }
        match sqe.op {
            SendOp::SendImm(imm) | SendOp::WriteImm(_, imm) if last => headers.imm = Some(imm),
            SendOp::SendInv(rkey) if last => headers.ieth = Some(rkey),
            _ => {}
        }
        headers
    }

    /// Tells whether packets at `psn` that do not end a message ask for an ACK. They do at intervals in a long one, and where the
    /// window ends.
    fn asks_for_ack(&self, sqe: &Sqe, psn: Psn, packets: u32, window: u64) -> bool {
        let cost = u64::from(self.mtu()) + PACKET_COST;
        let after = u64::from(psn.plus(packets).since(self.requester.una) as u32) * cost;
        sqe.packets > ACK_EVERY && psn.get() % ACK_EVERY + packets >= ACK_EVERY
            || after + u64::from(packets) * cost > window
    }

    /// Moves the cursor to `psn`, which is not answered, or was not sent yet.
    fn move_cursor(&mut self, psn: Psn) {
        (self.sq.next, self.requester.k) = self.place_of_psn(psn);
    }

    /// The place in the send queue of a packet that is not answered, or was not sent yet, and the packets of its request before
    /// it.
    fn place_of_psn(&self, psn: Psn) -> (u32, u32) {
        let mut position = self.sq.done;
        while position != self.sq.started && self.sq.at(position).end_psn().since(psn) <= 0 {
            position = position.wrapping_add(1);
        }
        let k = if position == self.sq.started {
            0
        } else {
            psn.since(self.sq.at(position).first_psn).max(0) as u32
        };
        (position, k)
    }

    /// Everything before `una` was answered meanwhile: a cursor that went back does not stay behind it.
    pub(super) fn advance_cursor(&mut self) {
        let una = self.requester.una;
        if self.sq.next.wrapping_sub(self.sq.done) > self.sq.outstanding() {
            self.sq.next = self.sq.done;
            self.requester.k = 0;
        }
        if self.sq.next != self.sq.started && self.cursor_psn().since(una) < 0 {
            self.go_back(una);
        }
    }

    pub(super) fn stop_requester(&mut self) {
        for timer in [Timer::RnrWait, Timer::Probe, Timer::Ack, Timer::Rate] {
            self.timers.stop(timer);
        }
        self.requester.halted = None;
        self.requester.executed = None;
        self.requester.responses.clear();
        self.requester.unfenced = 0;
        self.requester.local = 0;
    }

    /// The WQE under the cursor cannot be sent.
    pub(super) fn halt(&mut self, status: WcStatus) {
        self.requester.halted = Some((self.sq.next, status));
    }

    /// As [`halt`](Self::halt), of a WQE that is behind the cursor. False if one before it stops the queue.
    pub(super) fn halt_at(&mut self, position: u32, status: WcStatus) -> bool {
        self.requester.halted.get_or_insert((position, status)).0 == position
    }

    pub(super) fn is_halted_here(&self) -> bool {
        self.requester.halted.is_some_and(|(position, _)| position == self.sq.next)
    }

    /// Completes a WQE that could not be sent, when its turn has come.
    fn complete_halted<E: Env>(&mut self, env: &mut E) {
        if let Some((position, status)) = self.requester.halted
            && self.sq.done == position
            && self.spoiled() != Some((position, true))
        {
            self.requester.halted = None;
            self.fail_oldest(status, env);
        }
    }

    /// After an answer: a WQE that waited for those before it.
    pub(super) fn after_completion<E: Env>(&mut self, env: &mut E) {
        self.complete_halted(env);
        self.note_drained(env);
    }

    fn note_drained<E: Env>(&mut self, env: &mut E) {
        if self.attr.state == QpState::Sqd
            && !self.requester.drained
            && self.sq.done == self.sq.started
        {
            self.requester.drained = true;
            if self.attr.en_sqd_async_notify {
                env.raise(crate::event::QpEvent::SqDrained);
            }
        }
    }

    /// Completes the oldest WQE.
    pub(super) fn complete_oldest<E: Env>(&mut self, status: WcStatus, env: &mut E) {
        let position = self.sq.done;
        self.sq.done = position.wrapping_add(1);
        let sqe = self.sq.at(position);
        let (op, len, wr_id) = (sqe.op, sqe.len, sqe.wr_id);
        if self.srq.tag_matching.is_some() {
            return self.complete_fetch(wr_id, &op, len, status, env);
        }
        let told = self.init.sq_sig_all || sqe.flags.contains(SendFlags::SIGNALED);
        if status == WcStatus::Success
            && let SendOp::Write(at) = op
            && sqe.packets > 1
            && !sqe.split
        {
            self.requester.accepted.add(at, len);
        }
        if op.is_local() {
            self.requester.local = self.requester.local.saturating_sub(1);
        }
        if !self.attached.counted.is_empty() {
            let failed = status != WcStatus::Success;
            self.count_completion(CompCntrOps::of(&op), len, failed, env);
        }
        if status == WcStatus::Success && !told {
            return;
        }
        let wc = Wc {
            wr_id,
            status,
            opcode: wc_opcode(&op),
            byte_len: len,
            qpn: self.qpn,
            sq_count: self.sq.done,
            ..Wc::default()
        };
        if status != WcStatus::Success {
            self.sq.note_failed(len);
            env.count(Counter::ReqCqeError, 1);
            let wc = Wc { vendor_err: self.vendor_err(), ..wc };
            env.complete(Side::Send, wc, true);
        } else {
            env.complete(Side::Send, wc, false);
        }
    }

    /// The oldest WQE ends in an error: RC and XRC go to ERR, UC and UD to SQE (IBA 10.3.1, table 91).
    pub(super) fn fail_oldest<E: Env>(&mut self, status: WcStatus, env: &mut E) {
        debug_assert!(self.sq.outstanding() > 0);
        self.explain_failure(status, env);
        self.complete_oldest(status, env);
        if self.init.qp_type.is_reliable() {
            self.enter_error(env);
        } else {
            self.attr.state = QpState::Sqe;
            self.flush_sends(env);
        }
    }

    /// Completes all WQEs as flushed.
    pub(super) fn flush_sends<E: Env>(&mut self, env: &mut E) {
        self.stop_requester();
        while self.sq.outstanding() > 0 {
            self.complete_oldest(WcStatus::WrFlushErr, env);
        }
        let requester = &mut self.requester;
        requester.k = 0;
        // A later start (SQE to RTS) goes on with fresh PSNs.
        requester.fresh_psn = requester.max_sent;
        requester.answered(requester.fresh_psn, requester.fresh_cost);
        self.sq.clear();
    }
}

/// Tells whether a packet of this cost may follow those in flight. If none is in flight, any packet may.
#[inline]
fn has_room(in_flight: u64, cost: u64, window: u64) -> bool {
    in_flight == 0 || in_flight + cost <= window
}

fn reth(at: RemoteAddr, offset: u32, len: u32) -> Reth {
    Reth { va: at.va.wrapping_add(offset.into()), rkey: at.rkey, len }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_fits_the_window_or_stands_alone() {
        assert!(has_room(0, 100, 100) && has_room(0, 101, 100));
        assert!(has_room(1, 99, 100) && !has_room(1, 100, 100) && !has_room(100, 1, 100));
    }
}
