//! The responder of RC, XRC and UC: a chain of checks in the order of IBA 9.7.4 and 9.8.3, then the execution.

mod answers;
mod execute;
pub mod lending;
mod out_of_order;
mod receives;
pub(super) mod single;
mod start;
pub(super) mod tag_matching;

use anyverbs_causes::Cause;

use crate::counters::Counter;
use crate::env::Env;
use crate::event::QpEvent;
use crate::mr::Access;
use crate::reason::{KeyOf, MemoryRange, Reason, Told};
use crate::recv_queue::RecvWqe;
use crate::time::Time;
use crate::types::Psn;
use crate::wc::{Wc, WcStatus};
use crate::wire::aeth::{NakCode, Syndrome};
use crate::wire::bth::Bth;
use crate::wire::carried_ack;
use crate::wire::opcode::Operation;

use super::attr::QpType;
use super::trouble::{in_words, request_name};
use super::{Arrival, Incoming, Qp};
use answers::{Answer, AnswerKind, Answers};
use out_of_order::OutOfOrder;
pub use out_of_order::OutOfOrderBytes;

/// An ACK is no longer delayed once it covers this many bytes: a sender whose window is small would wait.
const ACK_BYTES: u32 = 96 << 10;

/// Requests with a wrong key or address that end a UC queue pair. The IBA lets it drop them (IBA 9.9.3, class E), but
/// no sequence number protects it, and a key would be guessed in a second. On RC a single guess ends the queue pair.
const WRONG_KEYS: u8 = 8;

/// Gaps of which a requester that was seen to go back N gets no NAK.
const GOES_BACK: u8 = 16;

/// The message that is coming in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Inbound {
    /// Between messages.
    #[default]
    None,
    /// A SEND: bytes so far.
    Send { received: u64 },
    /// A WRITE: where the rest goes.
    Write { va: u64, rkey: u32, left: u32, received: u32 },
}

impl Inbound {
    /// Bytes so far.
    fn received(self) -> u64 {
        match self {
            Self::None => 0,
            Self::Send { received } => received,
            Self::Write { received, .. } => received.into(),
        }
    }
}

/// Which side sends next, where the programs of both ends answer each other's messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum PingPong {
    /// The program has sent, the peer has not answered.
    Theirs,
    /// The peer has answered with one WRITE, which only the memory shows to the program.
    Ours,
    /// The program has sent nothing between two messages of the peer.
    #[default]
    None,
}

/// The responder's state.
#[derive(Debug, Default)]
pub(super) struct Responder {
    /// The PSN that comes next.
    expected: Psn,
    /// `COMM_EST` was raised.
    pub(super) established: bool,
    /// Before RTR: the PSN of the last request that was dropped.
    before_rtr: Option<Psn>,
    /// Messages completed, and READs and atomics begun, and the bytes of them.
    executed: u64,
    executed_bytes: u64,
    inbound: Inbound,
    /// The receive WQE in use, if `recv_taken`.
    recv: RecvWqe,
    recv_taken: bool,
    /// Protection domain that requests may touch: on XRC that of the request's SRQ (IBA A14).
    pd: u32,
    /// On XRC the SRQ of the message that is coming in, or of the last one.
    srqn: u32,
    /// UC: how many requests named memory that they may not touch.
    wrong_keys: u8,
    /// A NAK went out: silence until the packet that it asked for comes (IBA 9.7.5.2.8).
    nak_sent: bool,
    /// The request that was refused last, or the last READ, came from a device of this make.
    is_ours: bool,
    /// The peer takes ACKs that requests carry, as its last request said that was executed.
    pub(super) takes_acks: bool,
    /// The out-of-order buffer: packets that came after a missing one, or a note that they came.
    out_of_order: Option<Box<OutOfOrder>>,
    /// Further gaps for which the requester counts as one that goes back N.
    goes_back: u8,
    acks: Acks,
    answers: Answers,
}

/// The ACKs that the responder owes, and when they leave.
#[derive(Debug, Default)]
struct Acks {
    /// An ACK is owed for everything before [`Responder::expected`].
    owed: bool,
    /// An ACK or NAK for which the path had no room: it goes before further requests.
    held: Option<(Psn, Syndrome)>,
    /// Bytes received since the last ACK.
    bytes: u32,
    /// When the last answer left, if that was an ACK and the link may have lost it.
    last: Option<Time>,
    ping_pong: PingPong,
}

impl Responder {
    /// The program has sent a request: the peer sends next.
    #[inline]
    pub(super) fn note_request_sent(&mut self) {
        self.acks.ping_pong = PingPong::Theirs;
    }

    /// The low bits of the number of messages, as an ACK has it (IBA 9.7.7.1.4).
    #[inline]
    fn msn(&self) -> u32 {
        self.executed as u32 & 0xff_ffff
    }

    /// Messages of the peer, or a READ or atomic of it, were executed. `len`: their bytes, or those that were not counted yet.
    #[inline]
    fn note_executed(&mut self, messages: u64, len: u64) {
        self.executed += messages;
        self.executed_bytes = self.executed_bytes.wrapping_add(len);
    }

    /// A datagram of `len` bytes was received.
    pub(super) fn note_datagram(&mut self, len: u32) {
        self.note_executed(1, len.into());
    }

    /// Messages that were executed, and their bytes.
    pub(super) fn executed(&self) -> (u64, u64) {
        (self.executed, self.executed_bytes)
    }

    /// A modify has changed how many READs and atomics the peer may have outstanding.
    pub(super) fn set_depth(&mut self, max_dest_rd_atomic: u8) {
        self.answers.set_depth(max_dest_rd_atomic);
    }

    /// Tells whether an ACK is owed, at once or behind answers.
    #[inline]
    pub(super) fn owes_ack(&self) -> bool {
        self.acks.owed
    }

    /// Tells whether an ACK is owed that may leave before any answer.
    #[inline]
    pub(super) fn may_acknowledge(&self) -> bool {
        self.acks.owed && !self.answers.are_pending()
    }

    /// Tells whether the next request begins a message, and none was refused.
    #[inline]
    pub(super) fn is_between_messages(&self) -> bool {
        self.inbound == Inbound::None && !self.recv_taken && !self.nak_sent
    }

    /// Tells whether an ACK is owed, and the program's next message is likely to carry it.
    #[inline]
    pub(super) fn may_piggyback(&self) -> bool {
        self.acks.owed && self.acks.ping_pong == PingPong::Ours
    }
}

/// A request that cannot be executed: the NAK for the peer, the error on our side.
pub(super) struct Refusal {
    /// None: the peer notices by its retries.
    pub(super) nak: Option<NakCode>,
    /// Completion of the receive in use.
    pub(super) recv: WcStatus,
    event: QpEvent,
}

impl Refusal {
    const INVALID: Self = Self {
        nak: Some(NakCode::InvalidRequest),
        recv: WcStatus::RemInvReqErr,
        event: QpEvent::ReqErr,
    };
    const ACCESS: Self = Self {
        nak: Some(NakCode::RemoteAccess),
        recv: WcStatus::LocAccessErr,
        event: QpEvent::AccessErr,
    };
    /// The key that a SEND names cannot be invalidated (IBA 9.9.6.3, class J).
    const INVALIDATE: Self = Self { nak: None, ..Self::ACCESS };
    /// The message does not fit the receive.
    const TOO_LONG: Self = Self {
        nak: Some(NakCode::InvalidRequest),
        recv: WcStatus::LocLenErr,
        event: QpEvent::ReqErr,
    };
    /// The receive buffer cannot be written.
    const RECEIVE: Self = Self {
        nak: Some(NakCode::RemoteOperational),
        recv: WcStatus::LocProtErr,
        event: QpEvent::ReqErr,
    };

    /// The refusal of a message whose receive completes with this status.
    fn with(recv: WcStatus) -> Self {
        match recv {
            WcStatus::LocLenErr => Self::TOO_LONG,
            WcStatus::RemInvReqErr => Self::INVALID,
            WcStatus::LocAccessErr => Self::ACCESS,
            _ => Self { recv, ..Self::RECEIVE },
        }
    }
}

/// Whether a packet has the mark of a device of this make.
pub(super) fn is_ours(packet: &Incoming<'_>) -> bool {
    packet.headers.bth.reserved & Bth::OURS != 0
}

/// The reason why the chain of checks stopped.
enum Stop {
    /// No receive is posted.
    NotReady,
    /// The payload lies with the peer and cannot be fetched: the peer is to send it.
    NotFetched,
    Refused(Refusal),
}

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl Qp {
    /// Takes a request on a connected queue pair.
    pub(super) fn receive_request<E: Env>(
        &mut self,
        arrival: &Arrival,
        packet: &Incoming<'_>,
        env: &mut E,
    ) {
        if !self.init.qp_type.has_responder() {
            return env.count(Counter::DropQpState, 1);
        }
        self.note_established(env);
        if self.init.qp_type == QpType::Uc {
            return self.receive_unreliable(packet, env);
        }
        match packet.headers.bth.psn.since(self.responder.expected) {
            0 => self.receive_next(packet, env),
            1.. => {
                self.explain_drop(arrival, packet, env);
                self.receive_out_of_order(packet, env);
            }
            _ => {
                self.explain_drop(arrival, packet, env);
                self.explain_duplicate(packet.headers.bth.psn, env);
                self.receive_duplicate(packet, env);
            }
        }
    }

    /// Executes the request that comes next. False if that does not go.
    fn take_next<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) -> bool {
        let psn = packet.headers.bth.psn;
        match self.execute(packet, env) {
            Ok(()) => {}
            // As for one that is early; the requester sends it again.
            Err(_) if self.responder.answers.are_pending() => return false,
            Err(Stop::NotReady) => {
                self.note_no_receive(psn, env.now());
                self.send_not_ready(psn, env);
                return false;
            }
            Err(Stop::NotFetched) => {
                self.send_sequence_nak(env);
                return false;
            }
            Err(Stop::Refused(refusal)) => {
                let reason = self.reason_of_refusal(&refusal, packet, env);
                self.responder.is_ours = is_ours(packet);
                self.refuse(psn, request_name(packet.headers.bth.opcode), refusal, &reason, env);
                return false;
            }
        }
        if self.responder.nak_sent {
            self.responder.nak_sent = false;
            self.responder.acks.held = None;
        }
        self.responder.takes_acks = carried_ack::takes(&packet.headers.bth);
        self.note_taken(packet.headers.bth.ack_req, packet.payload.len(), env);
        true
    }

    /// A request with `len` bytes was executed.
    fn note_taken<E: Env>(&mut self, asks_for_ack: bool, len: usize, env: &mut E) {
        let acks = &mut self.responder.acks;
        acks.owed |= asks_for_ack;
        acks.bytes = acks.bytes.saturating_add(len as u32);
        if acks.owed && acks.bytes >= ACK_BYTES {
            self.send_owed_ack(env);
        }
    }

    fn send_not_ready<E: Env>(&mut self, psn: Psn, env: &mut E) {
        self.note_not_ready_sent(env);
        let timer = self.attr.min_rnr_timer;
        self.send_nak(psn, Syndrome::RnrNak { timer }, env);
    }

    fn note_not_ready_sent<E: Env>(&mut self, env: &E) {
        env.count(Counter::RnrNakSent, 1);
        self.responder.nak_sent = true;
    }

    /// Answers a request as if no receive were posted, though one is. False if this is not the next request of the peer, or one that
    /// takes no receive: nothing happens.
    pub fn refuse_without_receive<E: Env>(
        &mut self,
        arrival: &Arrival,
        packet: &Incoming<'_>,
        env: &mut E,
    ) -> bool {
        let bth = &packet.headers.bth;
        let takes_receive = bth.opcode.is_send() && (bth.opcode.is_first() || bth.opcode.is_only())
            || bth.opcode.is_write() && bth.opcode.has_imm();
        let is_next = takes_receive
            && self.init.qp_type.is_reliable()
            && self.admits(arrival, packet)
            && bth.psn == self.responder.expected
            && !self.responder.answers.are_pending();
        if !is_next {
            return false;
        }
        if let Some(psn) = packet.acks {
            self.receive_ack(psn, env);
        }
        // The ACK may have shown that the retries ran out.
        if self.attr.state.receives() {
            self.responder.is_ours = is_ours(packet);
            self.note_not_ready_sent(env);
            let syndrome = Syndrome::RnrNak { timer: self.attr.min_rnr_timer };
            let told = Told { cause: Cause::Injected, value: 0 };
            self.send_refusal(bth.psn, syndrome, told, env);
        }
        true
    }

    /// Lets the receive fail that a request would complete, as if the device had found a fault. The queue pair goes to ERR, and a
    /// reliable peer gets the NAK of this status. False if the request completes none, or is not the next one: nothing happens.
    pub fn fail_receive<E: Env>(
        &mut self,
        status: WcStatus,
        (arrival, packet): (&Arrival, &Incoming<'_>),
        env: &mut E,
    ) -> bool {
        let (opcode, psn) = (packet.headers.bth.opcode, packet.headers.bth.psn);
        let completes =
            opcode.is_send() && opcode.ends_message() || opcode.is_write() && opcode.has_imm();
        let is_in_sequence =
            || psn == self.responder.expected && self.check_sequence(opcode).is_ok();
        let is_next = completes
            && self.srq.tag_matching.is_none()
            && self.admits(arrival, packet)
            && match self.init.qp_type {
                QpType::Ud => true,
                QpType::Uc => opcode.is_only() || is_in_sequence(),
                QpType::Rc | QpType::XrcSend | QpType::XrcRecv => is_in_sequence(),
            };
        if !is_next {
            return false;
        }
        if self.responder.answers.are_pending() {
            // The NAK would overtake them. The requester sends it again.
            return true;
        }
        let is_xrc = self.init.qp_type == QpType::XrcRecv;
        if is_xrc && self.select_srq(packet, env).is_err() || self.take_recv(env).is_err() {
            return false;
        }
        if let Some(psn) = packet.acks {
            self.receive_ack(psn, env);
        }
        // The ACK may have shown that the retries ran out.
        if !self.attr.state.receives() {
            return true;
        }
        if status == WcStatus::WrFlushErr {
            self.fail(Cause::Injected, env);
            return true;
        }
        let (what, reason) = (request_name(opcode), Reason::new(Cause::Injected));
        if self.init.qp_type.is_reliable() {
            self.responder.is_ours = is_ours(packet);
            self.refuse(psn, what, Refusal::with(status), &reason, env);
        } else {
            match self.init.qp_type {
                QpType::Ud => self.explain_refused_datagram((arrival, packet), &reason, env),
                _ => self.explain_refusal(what, &reason, env),
            }
            self.complete_recv(Wc { status, ..Wc::default() }, env);
            self.enter_error(env);
        }
        true
    }

    /// Whether a packet is one of those that this queue pair takes.
    fn admits(&self, arrival: &Arrival, packet: &Incoming<'_>) -> bool {
        let headers = &packet.headers;
        self.attr.state.receives()
            && headers.bth.opcode.service == self.init.qp_type.service()
            && headers.bth.pkey.matches(self.pkey)
            && match headers.deth {
                Some(deth) => deth.qkey == self.attr.qkey,
                None => arrival.is_from(&self.attr.av),
            }
    }

    /// UC: a packet out of order is dropped without an answer, and the next message begins anew (IBA 9.8.3).
    fn receive_unreliable<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) {
        let psn = packet.headers.bth.psn;
        let opcode = packet.headers.bth.opcode;
        if psn != self.responder.expected {
            self.note_gap(psn, env);
            self.responder.inbound = Inbound::None;
        }
        self.responder.expected = psn;
        if self.responder.inbound == Inbound::None && !opcode.starts_message() {
            // The rest of a message that was dropped, which the log has told of.
            self.responder.expected = psn.plus(packet.packets);
            return env.count(Counter::DropUcGap, 1);
        }
        if opcode.starts_message() {
            // A lost LAST: its receive is used again.
            self.responder.inbound = Inbound::None;
        }
        if let Err(stop) = self.execute(packet, env) {
            self.responder.inbound = Inbound::None;
            self.responder.expected = psn.plus(packet.packets);
            let what = request_name(opcode);
            match stop {
                Stop::NotReady => {
                    env.count(Counter::DropNoRecv, 1);
                    let of = if self.init.srq {
                        "the SRQ had no receive"
                    } else {
                        "no receive was posted"
                    };
                    self.note_lost_message((Cause::UcNoReceive, 0), what, &of, env);
                }
                Stop::NotFetched => env.count(Counter::DropMalformed, 1),
                Stop::Refused(refusal) => {
                    env.count(Counter::DropUcAccess, 1);
                    // A receive that cannot be written is the program's mistake, and is shown (IBA 9.8.3.2.5).
                    let reason = self.reason_of_refusal(&refusal, packet, env);
                    if refusal.nak == Some(NakCode::RemoteOperational) && self.responder.recv_taken
                    {
                        self.explain_refusal(what, &reason, env);
                        self.complete_recv(Wc { status: refusal.recv, ..Wc::default() }, env);
                        self.enter_error(env);
                    } else {
                        let about = (reason.cause, reason.key());
                        let why = in_words(&reason, KeyOf::Responder, env);
                        self.note_lost_message(about, what, &why, env);
                    }
                    if refusal.nak == Some(NakCode::RemoteAccess) {
                        self.note_wrong_key(what, &reason, env);
                    }
                }
            }
        }
    }

    /// UC: a request named memory that it may not touch.
    fn note_wrong_key<E: Env>(&mut self, what: &str, reason: &Reason, env: &mut E) {
        self.responder.wrong_keys += 1;
        if self.responder.wrong_keys >= WRONG_KEYS {
            self.explain_refusal(what, reason, env);
            env.count(Counter::RespRemoteAccessErrors, 1);
            env.raise(QpEvent::AccessErr);
            self.enter_error(env);
        }
    }

    /// The request cannot be executed: tells the peer, goes to ERR (IBA 9.9.3, class A to C faults; without a NAK class J).
    fn refuse<E: Env>(
        &mut self,
        psn: Psn,
        what: &str,
        refusal: Refusal,
        reason: &Reason,
        env: &mut E,
    ) {
        match refusal.nak {
            Some(nak) => self.send_refusal(psn, Syndrome::Nak(nak), reason.told(), env),
            None => {
                // A NAK would have acknowledged this. In ERR every executed request is acknowledged, asked for or not.
                self.responder.acks.owed = true;
                self.send_owed_ack(env);
                if self.responder.acks.held.is_some() {
                    // The path has no room. The request comes again.
                    return;
                }
            }
        }
        self.explain_refusal(what, reason, env);
        if refusal.event == QpEvent::AccessErr {
            env.count(Counter::RespRemoteAccessErrors, 1);
        }
        if self.responder.recv_taken {
            self.complete_recv(Wc { status: refusal.recv, ..Wc::default() }, env);
        }
        env.raise(refusal.event);
        self.enter_error(env);
    }

    /// The memory of a READ in progress went away under its responses.
    fn refuse_read<E: Env>(&mut self, psn: Psn, answer: &Answer, env: &mut E) {
        let reason = match answer.kind {
            AnswerKind::Read { va, rkey, len, .. } => {
                let place = MemoryRange { key: rkey, va, len: len.into() };
                self.remote_fault(place, Access::REMOTE_READ, env)
            }
            AnswerKind::Atomic { .. } | AnswerKind::Placed => Reason::new(Cause::PeerMemoryGone),
        };
        self.refuse(psn, "a READ", Refusal::ACCESS, &reason, env);
    }

    /// The peer was told to wait, for it has found no receive, or to repeat.
    pub(super) fn has_sent_nak(&self) -> bool {
        self.responder.nak_sent
    }

    /// Whether `psn` may be the oldest request that the peer has without an answer. A peer whose requests were executed before
    /// has the right numbers.
    pub(super) fn expects(&self, psn: Psn) -> bool {
        self.responder.expected != self.attr.rq_psn || psn == self.attr.rq_psn
    }

    /// Tells whether one more request with an answer of its own may come.
    pub(super) fn has_room_for_answers(&self) -> bool {
        self.responder.answers.have_room()
    }

    /// The bytes that a SEND has so far, with this packet, and those that the receive in hand takes.
    pub(super) fn length_of_send(&self, packet: &Incoming<'_>) -> (u32, u32) {
        let received = match self.responder.inbound {
            Inbound::Send { received } => received,
            Inbound::None | Inbound::Write { .. } => 0,
        };
        let end = received + packet.payload.len() as u64;
        let bytes = |bytes: u64| bytes.try_into().unwrap_or(u32::MAX);
        (bytes(end), bytes(self.responder.recv.room()))
    }

    /// The memory that a request names, or that the message names of which it is a part.
    pub(super) fn place_of(&self, packet: &Incoming<'_>) -> Option<MemoryRange> {
        let headers = &packet.headers;
        match (headers.reth, headers.atomic, self.responder.inbound) {
            (Some(reth), ..) => {
                Some(MemoryRange { key: reth.rkey, va: reth.va, len: reth.len.into() })
            }
            (_, Some(atomic), _) => Some(MemoryRange { key: atomic.rkey, va: atomic.va, len: 8 }),
            (.., Inbound::Write { va, rkey, .. }) => {
                Some(MemoryRange { key: rkey, va, len: packet.payload.len() as u64 })
            }
            _ => None,
        }
    }

    /// A request that was executed before (IBA 9.7.5.1.3).
    fn receive_duplicate<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) {
        env.count(Counter::DuplicateRequest, 1);
        let bth = &packet.headers.bth;
        if self.responder.out_of_order.as_mut().is_some_and(|buffer| buffer.goes_back(bth.psn)) {
            self.responder.goes_back = GOES_BACK;
        }
        match bth.opcode.operation {
            Operation::ReadRequest => {
                if let Some(reth) = packet.headers.reth
                    && let Some(answer) =
                        self.responder.answers.answer_of(bth.psn, &reth, self.mtu())
                    && let AnswerKind::Read { pd, .. } = answer.kind
                    && self.check_remote(&reth, Access::REMOTE_READ, pd, env).is_ok()
                {
                    self.responder.answers.replay(answer);
                }
            }
            Operation::CompareSwap
            | Operation::FetchAdd
            | Operation::AtomicWrite
            | Operation::Flush => self.responder.answers.replay_result(bth.psn),
            // A SEND or WRITE: all up to now is acknowledged once more.
            _ => self.responder.acks.owed = true,
        }
    }

    /// The PSN up to which everything was executed.
    fn last_executed(&self) -> Psn {
        self.responder.expected.prev()
    }

    fn acknowledged(&mut self) {
        self.responder.acks.owed = false;
        self.responder.acks.bytes = 0;
    }
}
