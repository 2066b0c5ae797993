//! A queue pair with a bare device around it, call by call.

mod answers;
mod by_rule;
mod calls;
mod direct;
mod facts;
mod given_up;
mod joined;
mod lending;
mod lost;
mod receives;
#[cfg(feature = "general-way")]
mod row;
mod short_ways;
mod silence;
#[cfg(feature = "general-way")]
mod stream;
mod trouble;

use std::cell::RefCell;
use std::fmt;

use super::attr::{ModifyLimits, QpAttrMask};
use super::*;
use crate::comp_cntr::CompCntrOps;
use crate::direct::{Direct, Direction};
use crate::env::{CompletionEnv, LinkEnv, LinkProps, MemoryEnv, ReasonEnv, Side, TransmitError};
use crate::memory::tests::Bytes;
use crate::mr::{Keys, MrTable, Region};
use crate::payload::Payload;
use crate::reason::Told;
use crate::recv_queue::RecvWqe;
use crate::run::Run;
use crate::time::Clock;
use crate::types::{Gid, Mtu, PKey};
use crate::wc::{Wc, WcOpcode, WcStatus};
use crate::wire::aeth::{Aeth, NakCode, Syndrome};
use crate::wire::packet::Packet;
use crate::wire::reason::ReasonPacket;
use crate::wire::reth::Reth;
use crate::wr::{RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge};

const PD: u32 = 7;
const OURS: u32 = 0x11;
const PEER: u32 = 0x22;
const IOVA: u64 = 0x10_0000;
const MTU: u32 = 1024;
/// Payloads up to this length are copied, the smallest path MTU.
const SHORT: usize = 256;

/// A packet that was sent.
#[derive(Clone, PartialEq, Debug)]
struct Sent {
    headers: Headers,
    len: usize,
    acks: Option<Psn>,
    /// The payload of a short one.
    bytes: Vec<u8>,
}

/// The device: it takes every packet, and keeps the headers.
struct Device {
    memory: Bytes,
    mrs: MrTable,
    props: LinkProps,
    now: Time,
    sent: Vec<Sent>,
    /// Packets that it got at a time.
    runs: Vec<u32>,
    /// Packets that it takes before it has no room.
    room: usize,
    completions: Vec<(Side, Wc, bool)>,
    counted: Vec<(CompCntrOps, u32, bool)>,
    counters: RefCell<Vec<Counter>>,
    events: Vec<QpEvent>,
    /// Whether it does WRITEs and READs by itself, whether it admits those that wait, and those that it did.
    does_directly: bool,
    admits: bool,
    direct: Vec<(Direction, RemoteAddr, u32)>,
    keys: Keys,
    /// Lines for the log, and reasons that went with NAKs, each with whether the peer is of this make.
    lines: Vec<String>,
    told: Vec<(Told, bool)>,
    /// The words to the peer about requests that were given up, each with whether it is of this make.
    given_up: Vec<(ReasonPacket, bool)>,
    /// Packets without an answer that went out once more for the reason.
    soundings: Vec<(AddressVector, Sent)>,
    /// The reason that they bring, and the calls that ask for it.
    says: Option<Cause>,
    /// Packets of which the peer's host reports that nobody holds the port. It says nothing of later ones.
    reported: usize,
    listened: Vec<(AddressVector, Psn)>,
    /// The reasons that the senders of dropped packets are told.
    reasons: Vec<(Arrival, Bth, Cause)>,
    /// The answers to packets that were not sent.
    strays: RefCell<Vec<(AddressVector, Psn)>>,
    /// The receives of a shared queue.
    shared: Vec<RecvWqe>,
}

impl Device {
    fn bytes(&self, payload: &Payload<'_>) -> Result<Vec<u8>, TransmitError> {
        let mut bytes = Vec::new();
        if payload.len() <= SHORT {
            bytes.resize(payload.len(), 0);
            payload.copy_to(&self.mrs, &self.memory, &mut bytes)?;
        }
        Ok(bytes)
    }
}

impl Clock for Device {
    fn now(&self) -> Time {
        self.now
    }
}

impl Env for Device {
    fn count(&self, counter: Counter, n: u64) {
        self.counters.borrow_mut().extend((0..n).map(|_| counter));
    }

    fn log(&mut self, line: fmt::Arguments<'_>) {
        self.lines.push(line.to_string());
    }
}

impl LinkEnv for Device {
    fn props(&self) -> &LinkProps {
        &self.props
    }

    fn transmit(
        &mut self,
        _: &AddressVector,
        headers: &Headers,
        payload: &Payload<'_>,
        acks: Option<Psn>,
    ) -> Result<(), TransmitError> {
        if self.room == 0 {
            return Err(TransmitError::Blocked);
        }
        let bytes = self.bytes(payload)?;
        self.room -= 1;
        self.sent.push(Sent { headers: *headers, len: payload.len(), acks, bytes });
        Ok(())
    }

    fn transmit_run(
        &mut self,
        av: &AddressVector,
        run: &Run<'_>,
    ) -> (u32, Result<(), TransmitError>) {
        self.runs.push(run.len());
        run.each(|headers, payload| self.transmit(av, headers, payload, None))
    }

    fn direct(&mut self, operation: &Direct<'_>) -> bool {
        if self.does_directly {
            self.direct.push((operation.direction, operation.remote, operation.len));
        }
        self.does_directly
    }

    fn admits(&self, _: &Direct<'_>) -> bool {
        self.admits
    }
}

impl ReasonEnv for Device {
    fn refuse(
        &mut self,
        av: &AddressVector,
        headers: &Headers,
        told: Told,
        is_ours: bool,
    ) -> Result<(), TransmitError> {
        self.told.push((told, is_ours));
        self.transmit(av, headers, &Payload::EMPTY, None)
    }

    fn tell_given_up(&mut self, _: &AddressVector, packet: &ReasonPacket, is_ours: bool) {
        self.given_up.push((*packet, is_ours));
    }

    fn sound(&mut self, av: &AddressVector, headers: &Headers, payload: &Payload<'_>) {
        let bytes = self.bytes(payload).unwrap();
        let sent = Sent { headers: *headers, len: payload.len(), acks: None, bytes };
        self.soundings.push((*av, sent));
        if self.sent.len() < self.reported {
            self.says = Some(Cause::NobodyOnPort);
        }
    }

    fn heard(&mut self, av: &AddressVector, una: Psn) -> Option<Told> {
        self.listened.push((*av, una));
        self.says.map(|cause| Told { cause, value: 0 })
    }

    fn process_of_peer(&self) -> Option<u32> {
        Some(4711)
    }

    fn note_stray(&self, av: &AddressVector, psn: Psn) {
        self.strays.borrow_mut().push((*av, psn));
    }

    fn tell_why(&mut self, arrival: &Arrival, dropped: &Bth, cause: Cause) {
        self.reasons.push((*arrival, *dropped, cause));
    }
}

impl MemoryEnv for Device {
    type Memory = Bytes;

    fn memory(&self) -> &Bytes {
        &self.memory
    }

    fn mrs(&self) -> &MrTable {
        &self.mrs
    }
}

impl CompletionEnv for Device {
    fn complete(&mut self, side: Side, wc: Wc, solicited: bool) {
        self.completions.push((side, wc, solicited));
    }

    fn count_completion(&mut self, op: CompCntrOps, bytes: u32, failed: bool) {
        self.counted.push((op, bytes, failed));
    }

    fn take_srq(&mut self, into: &mut RecvWqe) -> bool {
        self.shared.pop().map(|wqe| *into = wqe).is_some()
    }

    fn select_srq(&mut self, srqn: u32) -> Option<u32> {
        (srqn < 10).then_some(PD)
    }

    fn raise(&mut self, event: QpEvent) {
        self.events.push(event);
    }
}

fn gid(n: u8) -> Gid {
    Gid([n; 16])
}

fn av() -> AddressVector {
    AddressVector { sgid: gid(1), dgid: gid(2), port: 1, ..AddressVector::default() }
}

fn from_peer() -> Arrival {
    Arrival { source: gid(2), destination: gid(1), ..Arrival::default() }
}

const LIMITS: ModifyLimits = ModifyLimits {
    ports: 1,
    pkeys: &[PKey::DEFAULT],
    max_mtu: Mtu::Mtu4096,
    max_rd_atomic: 16,
    max_rate_limit: 400_000_000,
};

/// A queue pair and its device.
struct World {
    qp: Qp,
    device: Device,
}

impl World {
    /// In RTS.
    fn new(qp_type: QpType) -> Self {
        Self::with(qp_type, LinkProps::new(1 << 20), |_| {})
    }

    fn with(qp_type: QpType, props: LinkProps, change: impl FnOnce(&mut QpAttr)) -> Self {
        Self::in_reset(qp_type, props).risen(change)
    }

    fn risen(mut self, change: impl FnOnce(&mut QpAttr)) -> Self {
        let mut attr = QpAttr {
            port: 1,
            access: Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
            av: av(),
            path_mtu: Mtu::Mtu1024,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            dest_qpn: Qpn::new(PEER),
            ..QpAttr::default()
        };
        change(&mut attr);
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            self.go(state, &attr);
        }
        self
    }

    fn in_reset(qp_type: QpType, props: LinkProps) -> Self {
        let cap = QpCap {
            max_send_wr: 100,
            max_recv_wr: 64,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline_data: 64,
        };
        let mrs = MrTable::new(16, 1);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let access = access | Access::REMOTE_ATOMIC;
        // So much that keys are right; no test copies all of it.
        let region = Region { pd: PD, access, iova: IOVA, len: 1 << 40, addr: 0 };
        let keys = mrs.register(region).unwrap();
        let device = Device {
            memory: Bytes::counted(64 << 10),
            mrs,
            props,
            now: Time::from_nanos(1_000_000_000),
            sent: Vec::new(),
            runs: Vec::new(),
            room: usize::MAX,
            completions: Vec::new(),
            counted: Vec::new(),
            counters: RefCell::default(),
            events: Vec::new(),
            does_directly: false,
            admits: false,
            direct: Vec::new(),
            keys,
            lines: Vec::new(),
            told: Vec::new(),
            soundings: Vec::new(),
            given_up: Vec::new(),
            says: None,
            reported: 0,
            listened: Vec::new(),
            reasons: Vec::new(),
            strays: RefCell::default(),
            shared: Vec::new(),
        };
        let init = QpInit { qp_type, cap, sq_sig_all: false, srq: false, pd: PD };
        Self { qp: Qp::new(Qpn::new(OURS), &init), device }
    }

    /// Moves to the next state, with what the move needs of these attributes.
    fn go(&mut self, state: QpState, attr: &QpAttr) {
        use QpAttrMask as M;
        let qp_type = self.qp.init().qp_type;
        let connected = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
        let mask = match (state, qp_type) {
            (QpState::Init, QpType::Ud) => M::PKEY_INDEX | M::PORT | M::QKEY,
            (QpState::Init, _) => M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS,
            (QpState::Rtr, QpType::Rc | QpType::XrcRecv) => {
                connected | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER
            }
            (QpState::Rtr, QpType::Uc) => connected,
            (QpState::Rts, QpType::Rc) => {
                M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC
            }
            (QpState::Rts, _) => M::SQ_PSN,
            _ => M::empty(),
        };
        self.modify(&QpAttr { state, ..*attr }, M::STATE | mask);
    }

    fn modify(&mut self, attr: &QpAttr, mask: QpAttrMask) {
        self.qp.modify(attr, mask, &LIMITS, &mut self.device).unwrap();
    }

    fn remote(&self) -> RemoteAddr {
        RemoteAddr { va: IOVA, rkey: self.device.keys.rkey }
    }

    /// Posts and sends; `len` bytes in one element.
    fn post(&mut self, op: SendOp, len: u32) {
        let sges = [Sge { addr: IOVA, len, lkey: self.device.keys.lkey }];
        let sges = if len == 0 { &sges[..0] } else { &sges[..] };
        let wr = SendWr { wr_id: 1, op, flags: SendFlags::SIGNALED, sges, ud: None, xrc_srqn: 0 };
        self.qp.post_send(&wr, &mut self.device).unwrap();
        self.qp.transmit(&mut self.device);
    }

    fn recv(&mut self, len: u32) {
        let sges = [Sge { addr: IOVA, len, lkey: self.device.keys.lkey }];
        self.qp.post_recv(&RecvWr { wr_id: 2, sges: &sges }, &mut self.device).unwrap();
    }

    /// A packet of the peer arrives.
    fn receive(&mut self, headers: Headers, payload: &[u8]) {
        self.receive_from(&from_peer(), headers, payload);
    }

    fn receive_from(&mut self, arrival: &Arrival, headers: Headers, payload: &[u8]) {
        let incoming = Incoming::from(Packet { headers, payload });
        self.qp.receive(arrival, &incoming, &mut self.device);
    }

    fn headers(&self, operation: Operation, psn: u32) -> Headers {
        let opcode = Opcode::new(self.qp.init().qp_type.service(), operation);
        Headers::new(Bth::new(opcode, Qpn::new(OURS), Psn::new(psn)))
    }

    /// The peer sends a message of one packet that asks for an ACK.
    fn receive_message(&mut self, operation: Operation, psn: u32, len: usize) {
        let mut headers = self.headers(operation, psn);
        headers.bth.ack_req = true;
        if headers.bth.opcode.is_write() {
            headers.reth = Some(Reth { va: IOVA, rkey: self.device.keys.rkey, len: len as u32 });
        }
        if headers.bth.opcode.has_imm() {
            headers.imm = Some(5);
        }
        self.receive(headers, &vec![3; len]);
    }

    fn answer(&mut self, psn: u32, syndrome: Syndrome) {
        let mut headers = self.headers(Operation::Ack, psn);
        headers.aeth = Some(Aeth { syndrome, msn: 0 });
        self.receive(headers, &[]);
    }

    /// The peer has answered a packet.
    fn known_to_peer(mut self) -> Self {
        self.post(SendOp::Send, 1);
        self.answer(0, Syndrome::ACK);
        self.qp.sq_credit().release(1);
        (self.device.sent, self.device.completions) = (Vec::new(), Vec::new());
        self
    }

    /// The PSNs of the packets that were sent since the last call, and their lengths.
    fn sent(&mut self) -> Vec<(u32, usize)> {
        let sent = std::mem::take(&mut self.device.sent);
        sent.iter().map(|sent| (sent.headers.bth.psn.get(), sent.len)).collect()
    }

    fn statuses(&mut self) -> Vec<WcStatus> {
        std::mem::take(&mut self.device.completions).iter().map(|(_, wc, _)| wc.status).collect()
    }

    fn counters(&self) -> Vec<Counter> {
        std::mem::take(&mut *self.device.counters.borrow_mut())
    }
}
