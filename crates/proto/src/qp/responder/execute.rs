//! The execution of the request that comes next, behind its checks (IBA 9.7.4, 9.9).

use crate::comp_cntr::CompCntrOps;
use crate::counters::Counter;
use crate::direct::{Direct, Direction, Local, Place};
use crate::env::Env;
use crate::memory::Memory;
use crate::mr::Access;
use crate::payload::{Data, ScatterError, pieces, scatter_by};
use crate::types::Qpn;
use crate::wc::{Wc, WcFlags, WcOpcode};
use crate::wire::atomic::AtomicEth;
use crate::wire::feth::{Placement, Selectivity};
use crate::wire::opcode::{Opcode, Operation};
use crate::wire::reth::Reth;
use crate::wr::{MAX_MESSAGE, MAX_SGE, Sge};

use super::super::attr::QpType;
use super::super::{Incoming, Qp};
use super::answers::{Answer, AnswerKind};
use super::{Inbound, PingPong, Refusal, Stop, is_ours};

impl Qp {
    /// Checks and executes the packet that comes next.
    pub(super) fn execute<E: Env>(
        &mut self,
        packet: &Incoming<'_>,
        env: &mut E,
    ) -> Result<(), Stop> {
        let opcode = packet.headers.bth.opcode;
        self.check_sequence(opcode)?;
        if self.init.qp_type == QpType::XrcRecv {
            self.select_srq(packet, env)?;
        }
        self.check_length(packet)?;
        if matches!(packet.payload, Data::Elsewhere(..)) && !self.may_fetch(opcode) {
            return Err(Stop::NotFetched);
        }
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
            let last = std::mem::take(&mut self.responder.inbound);
            self.responder.note_executed(1, last.received());
            self.responder.acks.ping_pong = match self.responder.acks.ping_pong {
                // Others of the same WRITE follow.
                ping_pong if opcode.is_only() && !packet.headers.bth.ack_req => ping_pong,
                PingPong::Theirs if opcode.is_write() && !opcode.has_imm() => PingPong::Ours,
                _ => PingPong::None,
            };
        }
        Ok(())
    }

    /// FIRST after LAST, MIDDLE after FIRST, and all of one kind (IBA 9.7.4.1.2).
    pub(super) fn check_sequence(&self, opcode: Opcode) -> Result<(), Refusal> {
        let fits = match self.responder.inbound {
            Inbound::None => opcode.starts_message(),
            Inbound::Send { .. } => opcode.is_send() && !opcode.starts_message(),
            Inbound::Write { .. } => opcode.is_write() && !opcode.starts_message(),
        };
        if fits { Ok(()) } else { Err(Refusal::INVALID) }
    }

    /// The SRQ that the request names, even one that takes no receive: its protection domain counts (IBA A14).
    pub(super) fn select_srq<E: Env>(
        &mut self,
        packet: &Incoming<'_>,
        env: &mut E,
    ) -> Result<(), Refusal> {
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
        if self.srq.tag_matching.is_some() {
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
        if let Data::Elsewhere(from, len) = packet.payload {
            self.fetch((from, len), received, env)?;
        } else {
            scatter_by(&recv.sges, received, packet.payload, self.recv_pd(), env)
                .map_err(|_: ScatterError| Refusal::RECEIVE)?;
        }
        if packet.headers.bth.opcode.ends_message() {
            let mut wc = Wc { opcode: WcOpcode::Recv, byte_len: end as u32, ..Wc::default() };
            self.invalidate_for(packet, &mut wc, env)?;
            self.finish_recv(wc, packet, env);
        }
        self.responder.inbound = Inbound::Send { received: end };
        Ok(())
    }

    /// Tells whether the payload of a request may lie with the peer.
    fn may_fetch(&self, opcode: Opcode) -> bool {
        self.init.qp_type == QpType::Rc && opcode.is_send() && self.srq.tag_matching.is_none()
    }

    /// Fetches the payload of a SEND, of which so many bytes were received before, from the peer's memory.
    fn fetch<E: Env>(
        &self,
        (place, len): (Place, u32),
        received: u64,
        env: &mut E,
    ) -> Result<(), Stop> {
        let mut sges = [Sge::default(); MAX_SGE];
        let mut n = 0;
        for piece in pieces(&self.responder.recv.sges, received, len as usize) {
            sges[n] = piece;
            n += 1;
        }
        let operation = Direct {
            dest_qpn: self.attr.dest_qpn,
            direction: Direction::Read,
            payload_of: Some(place.generation),
            remote: place.at,
            len,
            local: Local::Sges(&sges[..n]),
            pd: self.recv_pd(),
        };
        if env.direct(&operation) { Ok(()) } else { Err(Stop::NotFetched) }
    }

    /// Protection domain of receives. On XRC the same SRQ's holds for everything.
    fn recv_pd(&self) -> u32 {
        self.srq.pd.unwrap_or(self.responder.pd)
    }

    /// Invalidates the key that a SEND names. If the message is refused later, its repetition does the same again.
    pub(super) fn invalidate_for<E: Env>(
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
        self.responder.note_executed(1, reth.len.into());
        let answer = Answer {
            psn,
            packets,
            msn: self.responder.msn(),
            kind: AnswerKind::Read {
                va: reth.va,
                rkey: reth.rkey,
                len: reth.len,
                pd,
                srqn: self.responder.srqn,
            },
        };
        self.responder.answers.add(answer);
        self.responder.is_ours = is_ours(packet);
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
        let need = feth.placement.rights();
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
            // It copies nothing, and so would not notice.
            if hold.is_gone() {
                return Err(Refusal::ACCESS.into());
            }
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
        self.responder.note_executed(1, 8);
        let msn = self.responder.msn();
        self.responder.answers.add(Answer { psn, packets: 1, msn, kind });
        self.responder.expected = psn.plus(1);
    }

    /// Protection domain and queue pair by which memory keys are checked.
    pub(in crate::qp) fn reach(&self) -> (u32, Qpn) {
        (self.responder.pd, self.qpn)
    }

    /// A right of the queue pair.
    fn check_right(&self, need: Access) -> Result<(), Refusal> {
        if self.attr.access.contains(need) { Ok(()) } else { Err(Refusal::INVALID) }
    }

    /// Rights of the queue pair and, unless the operation is empty (IBA 9.7.4.1.4), of the key.
    pub(super) fn check_remote<E: Env>(
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
}
