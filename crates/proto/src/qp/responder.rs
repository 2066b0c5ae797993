//! The responder of RC, XRC and UC: a chain of checks in the order of IBA 9.7.4 and 9.8.3, then the execution.

mod early;
pub mod lending;
mod single;
mod start;
pub(super) mod tag_matching;

use crate::comp_cntr::CompCntrOps;
use crate::counters::Counter;
use crate::env::{Env, Side};
use crate::event::QpEvent;
use crate::memory::Memory;
use crate::mr::Access;
use crate::payload::{ScatterError, scatter_by};
use crate::recv_queue::RecvWqe;
use crate::time::Time;
use crate::types::{Psn, Qpn};
use crate::wc::{Wc, WcFlags, WcOpcode, WcStatus};
use crate::wire::aeth::{NakCode, Syndrome};
use crate::wire::atomic::AtomicEth;
use crate::wire::feth::{Placement, Selectivity};
use crate::wire::opcode::{Opcode, Operation};
use crate::wire::reth::Reth;
use crate::wr::MAX_MESSAGE;

use super::answers::{Answer, AnswerKind, Answers};
use super::attr::QpType;
use super::{Incoming, Qp};
use early::Early;
pub use early::EarlyBytes;

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

/// The side that has the turn, where the programs of both ends answer each other's messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Turn {
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
    /// Before RTR: the PSN of the last request that was dropped.
    too_early: Option<Psn>,
    /// Messages completed, and READs and atomics begun: 24 bits.
    pub(super) msn: u32,
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
    /// The out-of-order buffer: packets that came after a missing one, or a note that they came.
    early: Option<Box<Early>>,
    /// Further gaps for which the requester counts as one that goes back N.
    goes_back: u8,
    /// An ACK is owed for everything before `expected`.
    pub(super) ack_owed: bool,
    /// An ACK or NAK for which the path had no room: it goes before further requests.
    pub(super) held: Option<(Psn, Syndrome)>,
    unacknowledged: u32,
    /// When the last answer left, if that was an ACK and the link may have lost it.
    pub(super) last_ack: Option<Time>,
    pub(super) turn: Turn,
    pub(super) answers: Answers,
}

/// A request that cannot be executed: the NAK for the peer, the error on our side.
struct Refusal {
    /// None: the peer notices by its retries.
    nak: Option<NakCode>,
    /// Completion of the receive in use.
    recv: WcStatus,
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
}

/// The reason why the chain of checks stopped.
enum Stop {
    /// No receive is posted.
    NotReady,
    Refused(Refusal),
}

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl Qp {
    /// Takes a request on a connected queue pair.
    pub(super) fn receive_request<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) {
        if !self.init.qp_type.has_responder() {
            return env.count(Counter::DropQpState, 1);
        }
        self.note_established(env);
        if self.init.qp_type == QpType::Uc {
            return self.receive_unreliable(packet, env);
        }
        match packet.headers.bth.psn.since(self.responder.expected) {
            0 => self.receive_next(packet, env),
            1.. => self.receive_early(packet, env),
            _ => self.receive_duplicate(packet, env),
        }
    }

    /// Takes the request that comes next, and kept requests behind it.
    fn receive_next<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) {
        let early = self.responder.early.take();
        let taken = self.take_next(packet, env);
        if let Some(early) = early {
            self.receive_kept(taken.then_some(packet.headers.bth.psn), early, env);
        }
    }

    /// Takes the kept requests whose turn has come, if the one before them was `taken`.
    fn receive_kept<E: Env>(&mut self, taken: Option<Psn>, mut early: Box<Early>, env: &mut E) {
        let mut goes_on = taken.is_some();
        let mut any = false;
        while goes_on && let Some(kept) = early.next(self.responder.expected) {
            goes_on = self.take_next(&kept.packet(), env);
            // Whoever goes back for them all need not go on with that.
            self.responder.ack_owed |= goes_on;
            any = true;
        }
        // A requester that goes back sends a further missing packet unasked.
        let untold = &mut self.responder.goes_back;
        if let Some(psn) = taken.filter(|_| any) {
            early.note_executed(psn, *untold == 0);
        }
        *untold = untold.saturating_sub(any.into());
        let comes_again = !goes_on && self.responder.answers.are_pending();
        if (goes_on || comes_again) && early.goes_beyond(self.responder.expected) {
            self.responder.early = Some(early);
        }
    }

    /// Sends, in place of an ACK, the NAK of a packet that is missing after some that were kept. False if there is
    /// none.
    pub(super) fn tell_missing<E: Env>(&mut self, env: &mut E) -> bool {
        let Responder { expected, nak_sent, early, .. } = &mut self.responder;
        let tells = early.as_mut().is_some_and(|early| early.take_tell(*expected)) && !*nak_sent;
        if tells {
            self.ask_for_missing(env);
        }
        tells
    }

    /// A request that is not the next one: a packet before it was lost, or is late.
    fn receive_early<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) {
        env.count(Counter::OutOfSequence, 1);
        // A NAK must not overtake answers that were held back: the requester would miss them.
        if !self.responder.nak_sent && !self.responder.answers.are_pending() {
            // The place of a request to an XRC target is found out when its turn has come.
            if self.init.qp_type == QpType::Rc {
                let all = &self.early_bytes;
                self.responder.early.get_or_insert_with(|| Box::new(Early::new(all)));
            }
            self.ask_for_missing(env);
        }
        let expected = self.responder.expected;
        if let Some(early) = &mut self.responder.early {
            early.keep(packet, expected, env.props().early_room);
        }
    }

    fn ask_for_missing<E: Env>(&mut self, env: &mut E) {
        self.responder.nak_sent = true;
        if let Some(early) = &mut self.responder.early {
            early.note_told();
        }
        let expected = self.responder.expected;
        self.send_nak(expected, Syndrome::Nak(NakCode::PsnSequence), env);
    }

    /// Executes the request that comes next. False if that does not go.
    fn take_next<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) -> bool {
        let psn = packet.headers.bth.psn;
        match self.execute(packet, env) {
            Ok(()) => {}
            // As for one that is early; the requester sends it again.
            Err(_) if self.responder.answers.are_pending() => return false,
            Err(Stop::NotReady) => {
                env.count(Counter::RnrNakSent, 1);
                self.responder.nak_sent = true;
                let timer = self.attr.min_rnr_timer;
                self.send_nak(psn, Syndrome::RnrNak { timer }, env);
                return false;
            }
            Err(Stop::Refused(refusal)) => {
                self.refuse(psn, refusal, env);
                return false;
            }
        }
        if self.responder.nak_sent {
            self.responder.nak_sent = false;
            self.responder.held = None;
        }
        if packet.headers.bth.ack_req {
            self.responder.ack_owed = true;
        }
        self.responder.unacknowledged =
            self.responder.unacknowledged.saturating_add(packet.payload.len() as u32);
        if self.responder.ack_owed && self.responder.unacknowledged >= ACK_BYTES {
            self.send_owed_ack(env);
        }
        true
    }

    /// UC: a packet out of order is dropped without an answer, and the next message begins anew (IBA 9.8.3).
    fn receive_unreliable<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) {
        let psn = packet.headers.bth.psn;
        let opcode = packet.headers.bth.opcode;
        if psn != self.responder.expected {
            env.count(Counter::DropUcGap, 1);
            self.responder.inbound = Inbound::None;
        }
        self.responder.expected = psn;
        if self.responder.inbound == Inbound::None && !opcode.starts_message() {
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
            match stop {
                Stop::NotReady => env.count(Counter::DropNoRecv, 1),
                Stop::Refused(refusal) => {
                    env.count(Counter::DropUcAccess, 1);
                    // A receive that cannot be written is the program's mistake, and is shown (IBA 9.8.3.2.5).
                    if refusal.nak == Some(NakCode::RemoteOperational) && self.responder.recv_taken
                    {
                        self.complete_recv(Wc { status: refusal.recv, ..Wc::default() }, env);
                        self.enter_error(env);
                    }
                    if refusal.nak == Some(NakCode::RemoteAccess) {
                        self.note_wrong_key(env);
                    }
                }
            }
        }
    }

    /// UC: a request named memory that it may not touch.
    fn note_wrong_key<E: Env>(&mut self, env: &mut E) {
        self.responder.wrong_keys += 1;
        if self.responder.wrong_keys >= WRONG_KEYS {
            env.count(Counter::RespRemoteAccessErrors, 1);
            env.raise(QpEvent::AccessErr);
            self.enter_error(env);
        }
    }

    /// Checks and executes the packet that comes next.
    fn execute<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) -> Result<(), Stop> {
        let opcode = packet.headers.bth.opcode;
        self.check_sequence(opcode)?;
        if self.init.qp_type == QpType::XrcRecv {
            self.select_srq(packet, env)?;
        }
        self.check_length(packet)?;
        match opcode.operation {
            Operation::ReadRequest => return self.execute_read(packet, env),
            Operation::CompareSwap | Operation::FetchAdd => {
                return self.execute_atomic(packet, env);
            }
            _ if opcode.is_send() => self.execute_send(packet, env)?,
            _ if opcode.is_write() => self.execute_write(packet, env)?,
            Operation::AtomicWrite => return self.execute_atomic_write(packet, env),
            Operation::Flush => return self.execute_flush(packet, env),
            _ => return Err(Refusal::INVALID.into()),
        }
        self.responder.expected = self.responder.expected.plus(packet.packets);
        if opcode.ends_message() {
            if let Inbound::Write { received, .. } = self.responder.inbound {
                self.count_completion(CompCntrOps::REMOTE_RDMA_WRITE, received, false, env);
            }
            self.responder.inbound = Inbound::None;
            self.next_message();
            self.responder.turn = match self.responder.turn {
                Turn::Theirs if opcode.is_write() && !opcode.has_imm() => Turn::Ours,
                _ => Turn::None,
            };
        }
        Ok(())
    }

    fn next_message(&mut self) {
        self.responder.msn = (self.responder.msn + 1) & 0xff_ffff;
    }

    /// FIRST after LAST, MIDDLE after FIRST, and all of one kind (IBA 9.7.4.1.2).
    fn check_sequence(&self, opcode: Opcode) -> Result<(), Refusal> {
        let fits = match self.responder.inbound {
            Inbound::None => opcode.starts_message(),
            Inbound::Send { .. } => opcode.is_send() && !opcode.starts_message(),
            Inbound::Write { .. } => opcode.is_write() && !opcode.starts_message(),
        };
        if fits { Ok(()) } else { Err(Refusal::INVALID) }
    }

    /// The SRQ that the request names, even one that takes no receive: its protection domain counts (IBA A14).
    fn select_srq<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) -> Result<(), Refusal> {
        let srqn = packet.headers.xrceth.ok_or(Refusal::INVALID)?.srqn;
        let responder = &mut self.responder;
        let under_way = responder.recv_taken || responder.inbound != Inbound::None;
        if under_way && srqn != responder.srqn {
            return Err(Refusal::INVALID);
        }
        let Some(pd) = env.select_srq(srqn) else {
            env.count(Counter::RespXrcSrqErrors, 1);
            return Err(Refusal::ACCESS);
        };
        (responder.pd, responder.srqn) = (pd, srqn);
        Ok(())
    }

    /// FIRST and MIDDLE are full, LAST is not empty, none is longer than the path MTU (IBA 9.7.4.1.6). A packet that
    /// stands for several is as long as they are: both sides count with the same MTU.
    fn check_length(&self, packet: &Incoming<'_>) -> Result<(), Refusal> {
        let opcode = packet.headers.bth.opcode;
        let Ok(len) = u32::try_from(packet.payload.len()) else { return Err(Refusal::INVALID) };
        let fits = if opcode.is_only() {
            true
        } else if opcode.is_last() {
            len > 0
        } else {
            len > 0 && len & (self.mtu() - 1) == 0
        };
        if fits && self.packets(len) == packet.packets { Ok(()) } else { Err(Refusal::INVALID) }
    }

    fn execute_send<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) -> Result<(), Stop> {
        if self.tag_matching.is_some() {
            return self.execute_tagged_send(packet, env);
        }
        let received = match self.responder.inbound {
            Inbound::Send { received } => received,
            _ => {
                self.take_recv(env)?;
                0
            }
        };
        let end = received + packet.payload.len() as u64;
        let recv = &self.responder.recv;
        if end > recv.room() {
            return Err(Refusal::TOO_LONG.into());
        }
        scatter_by(&recv.sges, received, packet.payload, self.recv_pd(), env)
            .map_err(|_: ScatterError| Refusal::RECEIVE)?;
        if packet.headers.bth.opcode.ends_message() {
            let mut wc = Wc { opcode: WcOpcode::Recv, byte_len: end as u32, ..Wc::default() };
            self.invalidate_for(packet, &mut wc, env)?;
            self.finish_recv(wc, packet, env);
        }
        self.responder.inbound = Inbound::Send { received: end };
        Ok(())
    }

    /// Protection domain of receives. On XRC the same SRQ's holds for everything.
    fn recv_pd(&self) -> u32 {
        self.srq_pd.unwrap_or(self.responder.pd)
    }

    /// Invalidates the key that a SEND names. If the message is refused later, its repetition does the same again.
    fn invalidate_for<E: Env>(
        &self,
        packet: &Incoming<'_>,
        wc: &mut Wc,
        env: &mut E,
    ) -> Result<(), Refusal> {
        if let Some(rkey) = packet.headers.ieth {
            env.end_remote();
            env.mrs()
                .invalidate(rkey, self.responder.pd, Some(self.qpn.get()))
                .map_err(|_| Refusal::INVALIDATE)?;
            wc.flags |= WcFlags::WITH_INV;
            wc.imm = rkey;
        }
        Ok(())
    }

    fn execute_write<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) -> Result<(), Stop> {
        let len = packet.payload.len() as u32;
        let opcode = packet.headers.bth.opcode;
        let (va, rkey, left, received) = match (self.responder.inbound, packet.headers.reth) {
            (Inbound::Write { va, rkey, left, received }, _) => (va, rkey, left, received),
            (_, Some(reth)) => {
                if reth.len == len && !opcode.has_imm() {
                    // The key is looked up as the packet is copied.
                    self.check_right(Access::REMOTE_WRITE)?;
                } else {
                    if opcode.has_imm() {
                        if reth.len != len {
                            return Err(Refusal::INVALID.into());
                        }
                        // Before the key (IBA 9.7.4.1): the receive tells the program of one that is wrong.
                        self.take_recv(env)?;
                    }
                    self.check_remote(&reth, Access::REMOTE_WRITE, self.responder.pd, env)?;
                }
                (reth.va, reth.rkey, reth.len, 0)
            }
            (_, None) => return Err(Refusal::INVALID.into()),
        };
        // The packets hold as much as the RETH announced: no more, and at the end no less (IBA 9.7.4.1.6).
        if len > left || (opcode.ends_message() && len != left) {
            return Err(Refusal::INVALID.into());
        }
        if opcode.has_imm() {
            // The receive is taken before anything of this packet is done.
            self.take_recv(env)?;
        }
        if len > 0 {
            let (range, right) = ((va, len.into()), Access::REMOTE_WRITE);
            env.with_remote(rkey, self.reach(), range, right, |memory, to| {
                packet.payload.write(to, memory)
            })
            .map_err(|_| Refusal::ACCESS)?
            .map_err(|_| Refusal::ACCESS)?;
        }
        let received = received + len;
        self.responder.inbound =
            Inbound::Write { va: va.wrapping_add(len.into()), rkey, left: left - len, received };
        if opcode.has_imm() {
            let wc = Wc { opcode: WcOpcode::RecvRdmaWithImm, byte_len: received, ..Wc::default() };
            self.finish_recv(wc, packet, env);
        }
        Ok(())
    }

    fn execute_read<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) -> Result<(), Stop> {
        let reth = packet.headers.reth.ok_or(Refusal::INVALID)?;
        let pd = self.responder.pd;
        self.check_remote(&reth, Access::REMOTE_READ, pd, env)?;
        let psn = packet.headers.bth.psn;
        let packets = reth.len.div_ceil(self.mtu()).max(1);
        self.next_message();
        let answer = Answer {
            psn,
            packets,
            msn: self.responder.msn,
            kind: AnswerKind::Read {
                va: reth.va,
                rkey: reth.rkey,
                len: reth.len,
                pd,
                srqn: self.responder.srqn,
            },
        };
        self.responder.answers.add(answer);
        self.responder.expected = psn.plus(packets);
        self.count_completion(CompCntrOps::REMOTE_RDMA_READ, reth.len, false, env);
        Ok(())
    }

    fn execute_atomic<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) -> Result<(), Stop> {
        let AtomicEth { va, rkey, swap_add, compare } =
            packet.headers.atomic.ok_or(Refusal::INVALID)?;
        if !self.attr.access.contains(Access::REMOTE_ATOMIC) || !self.responder.answers.have_room()
        {
            return Err(Refusal::INVALID.into());
        }
        // IBA 9.4.5: an address that is not aligned is an invalid request.
        if va % 8 != 0 {
            return Err(Refusal::INVALID.into());
        }
        let (range, right) = ((va, 8), Access::REMOTE_ATOMIC);
        let original = env
            .with_remote(rkey, self.reach(), range, right, |memory, addr| {
                // iova and address may be aligned differently.
                if addr % 8 != 0 {
                    return Err(Refusal::INVALID);
                }
                if packet.headers.bth.opcode.operation == Operation::CompareSwap {
                    memory.compare_swap(addr, compare, swap_add)
                } else {
                    memory.fetch_add(addr, swap_add)
                }
                .map_err(|_| Refusal::ACCESS)
            })
            .map_err(|_| Refusal::ACCESS)??;
        self.answer(packet, AnswerKind::Atomic { original });
        Ok(())
    }

    /// IBA A19.3: 8 bytes that no reader sees half of, after everything before them.
    fn execute_atomic_write<E: Env>(
        &mut self,
        packet: &Incoming<'_>,
        env: &mut E,
    ) -> Result<(), Stop> {
        let reth = packet.headers.reth.ok_or(Refusal::INVALID)?;
        let access = self.attr.access.contains(Access::REMOTE_WRITE);
        if !access || !self.responder.answers.have_room() || reth.len != 8 || reth.va % 8 != 0 {
            return Err(Refusal::INVALID.into());
        }
        let (range, right) = ((reth.va, 8), Access::REMOTE_WRITE);
        env.with_remote(reth.rkey, self.reach(), range, right, |memory, addr| {
            // iova and address may be aligned differently.
            if addr % 8 != 0 {
                return Err(Refusal::INVALID);
            }
            let word = packet.payload.word(memory).map_err(|_| Refusal::INVALID)?;
            memory.store(addr, word).map_err(|_| Refusal::ACCESS)
        })
        .map_err(|_| Refusal::ACCESS)??;
        self.answer(packet, AnswerKind::Placed);
        Ok(())
    }

    /// IBA A19.4: earlier WRITEs are where it says before it is answered.
    fn execute_flush<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) -> Result<(), Stop> {
        let (Some(reth), Some(feth)) = (packet.headers.reth, packet.headers.feth) else {
            return Err(Refusal::INVALID.into());
        };
        let mut need = Access::empty();
        need.set(Access::FLUSH_GLOBAL, feth.placement.contains(Placement::GLOBAL));
        need.set(Access::FLUSH_PERSISTENT, feth.placement.contains(Placement::PERSISTENCE));
        let known = Placement::from_bits(feth.placement.bits()).is_some() && !need.is_empty();
        if !known || !self.attr.access.contains(need) || !self.responder.answers.have_room() {
            return Err(Refusal::INVALID.into());
        }
        {
            let (pd, qpn) = self.reach();
            let reach = (pd, qpn.get());
            let (hold, len) = match feth.selectivity {
                Selectivity::Range => {
                    let len = u64::from(reth.len);
                    let hold = env.mrs().remote(reth.rkey, reach, reth.va, len, need);
                    (hold.map_err(|_| Refusal::ACCESS)?, len)
                }
                Selectivity::Mr => {
                    let extent = env.mrs().extent(reth.rkey, reach, need);
                    extent.map_err(|_| Refusal::ACCESS)?
                }
                Selectivity::Reserved(_) => return Err(Refusal::INVALID.into()),
            };
            env.memory().publish();
            if need.contains(Access::FLUSH_PERSISTENT) {
                env.memory().persist(hold.addr(), len).map_err(|_| Refusal::ACCESS)?;
            }
        }
        self.answer(packet, AnswerKind::Placed);
        Ok(())
    }

    /// A request of one packet was executed; its answer is owed, and remembered.
    fn answer(&mut self, packet: &Incoming<'_>, kind: AnswerKind) {
        let psn = packet.headers.bth.psn;
        self.next_message();
        let msn = self.responder.msn;
        self.responder.answers.add(Answer { psn, packets: 1, msn, kind });
        self.responder.expected = psn.plus(1);
    }

    /// Protection domain and queue pair by which memory keys are checked.
    fn reach(&self) -> (u32, Qpn) {
        (self.responder.pd, self.qpn)
    }

    /// A right of the queue pair.
    fn check_right(&self, need: Access) -> Result<(), Refusal> {
        if self.attr.access.contains(need) { Ok(()) } else { Err(Refusal::INVALID) }
    }

    /// Rights of the queue pair and, unless the operation is empty (IBA 9.7.4.1.4), of the key.
    fn check_remote<E: Env>(
        &self,
        reth: &Reth,
        need: Access,
        pd: u32,
        env: &mut E,
    ) -> Result<(), Refusal> {
        let resources = need != Access::REMOTE_READ || self.responder.answers.have_room();
        self.check_right(need)?;
        if !resources || reth.len > MAX_MESSAGE {
            return Err(Refusal::INVALID);
        }
        if reth.len > 0 {
            let range = (reth.va, reth.len.into());
            env.with_remote(reth.rkey, (pd, self.qpn), range, need, |_, _| ())
                .map_err(|_| Refusal::ACCESS)?;
        }
        Ok(())
    }

    /// Makes sure that a receive WQE is in hand.
    fn take_recv<E: Env>(&mut self, env: &mut E) -> Result<(), Stop> {
        if self.responder.recv_taken {
            return Ok(());
        }
        let recv = &mut self.responder.recv;
        let taken = match &mut self.rq {
            Some(rq) => rq.pop(recv),
            None => env.take_srq(recv),
        };
        self.responder.recv_taken = taken;
        if taken { Ok(()) } else { Err(Stop::NotReady) }
    }

    fn finish_recv<E: Env>(&mut self, mut wc: Wc, packet: &Incoming<'_>, env: &mut E) {
        if let Some(imm) = packet.headers.imm {
            wc.imm = imm;
            wc.flags |= WcFlags::WITH_IMM;
        }
        wc.src_qpn = self.attr.dest_qpn;
        wc.wr_id = self.release_recv();
        wc.qpn = self.qpn;
        self.count_completion(CompCntrOps::RECV, wc.byte_len, false, env);
        env.complete(Side::Recv, wc, packet.headers.bth.solicited);
    }

    /// Completes the receive in hand in error.
    fn complete_recv<E: Env>(&mut self, wc: Wc, env: &mut E) {
        let wr_id = self.release_recv();
        let wc = Wc { wr_id, qpn: self.qpn, opcode: WcOpcode::Recv, ..wc };
        env.count(Counter::RespCqeError, 1);
        self.count_completion(CompCntrOps::RECV, 0, true, env);
        env.complete(Side::Recv, wc, true);
    }

    /// The request cannot be executed: tells the peer, goes to ERR (IBA 9.9.3, class A to C faults; without a NAK class J).
    fn refuse<E: Env>(&mut self, psn: Psn, refusal: Refusal, env: &mut E) {
        match refusal.nak {
            Some(nak) => self.send_nak(psn, Syndrome::Nak(nak), env),
            None => {
                // A NAK would have acknowledged this. In ERR every executed request is acknowledged, asked for or not.
                self.responder.ack_owed = true;
                self.send_owed_ack(env);
                if self.responder.held.is_some() {
                    // The path has no room. The request comes again.
                    return;
                }
            }
        }
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
    pub(super) fn refuse_read<E: Env>(&mut self, psn: Psn, env: &mut E) {
        self.refuse(psn, Refusal::ACCESS, env);
    }

    /// A request that was executed before (IBA 9.7.5.1.3).
    fn receive_duplicate<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) {
        env.count(Counter::DuplicateRequest, 1);
        let bth = &packet.headers.bth;
        if self.responder.early.as_mut().is_some_and(|early| early.goes_back(bth.psn)) {
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
            _ => self.responder.ack_owed = true,
        }
    }

    /// Makes sure that a datagram finds a receive.
    pub(super) fn take_datagram_recv<E: Env>(&mut self, env: &mut E) -> bool {
        self.take_recv(env).is_ok()
    }

    /// The receive in hand.
    pub(super) fn datagram_recv(&self) -> &RecvWqe {
        &self.responder.recv
    }

    /// The receive in hand is used up; returns its cookie.
    pub(super) fn release_recv(&mut self) -> u64 {
        self.responder.recv_taken = false;
        self.responder.recv.wr_id
    }

    /// The receive in hand cannot be written: the program's mistake, and the end of the queue pair.
    pub(super) fn fail_datagram_recv<E: Env>(&mut self, env: &mut E) {
        self.complete_recv(Wc { status: WcStatus::LocProtErr, ..Wc::default() }, env);
        self.enter_error(env);
    }

    /// The PSN up to which everything was executed.
    pub(super) fn last_executed(&self) -> Psn {
        self.responder.expected.prev()
    }

    pub(super) fn acknowledged(&mut self) {
        self.responder.ack_owed = false;
        self.responder.unacknowledged = 0;
    }

    /// Completes the receive in hand and all that wait as flushed, on the move to ERR.
    pub(super) fn flush_receives<E: Env>(&mut self, env: &mut E) {
        self.responder.inbound = Inbound::None;
        self.forget_early();
        self.responder.ack_owed = false;
        self.responder.answers.clear();
        let flushed = Wc { status: WcStatus::WrFlushErr, ..Wc::default() };
        if self.responder.recv_taken {
            self.complete_recv(flushed, env);
        }
        match self.rq.as_mut() {
            Some(_) => {
                while self.rq.as_mut().is_some_and(|rq| rq.pop(&mut self.responder.recv)) {
                    self.complete_recv(flushed, env);
                }
            }
            None if self.init.srq => env.raise(QpEvent::LastWqeReached),
            None => {}
        }
    }

    /// Empties the out-of-order buffer.
    pub(super) fn forget_early(&mut self) {
        self.responder.early = None;
    }
}
