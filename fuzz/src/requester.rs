//! A sequence of answers that comes to a queue pair with requests outstanding. Its peer is silent: all answers are
//! forged.
//!
//! A request succeeds only if an answer covered it, a READ only if a response came for each of its packets. Only the
//! buffers of READs and atomics are written. Completions come once each and in order, after the first error only
//! flushes. Retries end.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use anyverbs_proto::mr::Access;
use anyverbs_proto::qp::attr::{QpAttr, QpAttrMask, QpState, QpType};
use anyverbs_proto::types::{Mtu, Psn};
use anyverbs_proto::wc::{Wc, WcStatus};
use anyverbs_proto::wire::aeth::{Aeth, Syndrome};
use anyverbs_proto::wire::atomic::AtomicAckEth;
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::opcode::{Opcode, Operation};
use anyverbs_proto::wire::packet::Headers;
use anyverbs_proto::wr::{SendFlags, SendOp, SendWr};
use anyverbs_sim::net::Fate;
use anyverbs_sim::{End, Mr, PAGE, Pair, QpOptions};

use super::input::Input;

const MAX_STEPS: usize = 200;
const FORGED: u8 = 0xee;

/// A request that was posted.
struct Request {
    wr_id: u64,
    first: u32,
    last: u32,
    is_read: bool,
}

struct Run<'a> {
    input: Input<'a>,
    mtu: usize,
    options: QpOptions,
    t: Pair,
    victim: End,
    /// The region that is sent, and the one that READs and atomics may change.
    source: Mr,
    target: Mr,
    outstanding: VecDeque<Request>,
    posted: u64,
    /// PSNs count from the first one here, without end.
    next_psn: u32,
    /// Everything before this PSN may count as acknowledged.
    covered: u32,
    /// PSNs for which a READ response, or an atomic one, came.
    responses: HashSet<u32>,
    failed: bool,
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let first = input.byte();
    let qp_type = if first & 1 == 0 { QpType::Rc } else { QpType::XrcSend };
    let options = QpOptions {
        qp_type,
        mtu: Mtu::ALL[usize::from(first >> 1) % 5],
        timeout: 1,
        retry_cnt: first >> 5,
        rnr_retry: input.byte() & 7,
        sq_sig_all: true,
        sq_psn: Psn::new(u32::from(input.word()).wrapping_sub(0x7fff)),
        max_rd_atomic: 3,
        window: if first & 0x10 == 0 { 1 << 20 } else { 5000 },
        ..QpOptions::rc()
    };
    let mut t = match qp_type {
        QpType::XrcSend => {
            let target = QpOptions { qp_type: QpType::XrcRecv, srq: Some(8), ..options };
            Pair::with(1, options, target)
        }
        _ => Pair::new(1, options),
    };
    let victim = t.a;
    // The peer gets no packet, so it answers none.
    t.net.rule(move |packet| if packet.from == victim.device { Fate::Drop } else { Fate::Pass });
    let source = t.mr(victim.device, victim.pd, 4 * PAGE, Access::empty());
    let target = t.mr(victim.device, victim.pd, 4 * PAGE, Access::LOCAL_WRITE);
    t.write(target, 0, &[0; 4 * PAGE]);
    t.fill(source, 7);
    let before = t.bytes(source, 0, 4 * PAGE);
    let own = t.bytes(victim.mr, 0, victim.mr.len);
    let mut run = Run {
        input,
        mtu: options.mtu.bytes() as usize,
        options,
        t,
        victim,
        source,
        target,
        outstanding: VecDeque::new(),
        posted: 0,
        next_psn: 0,
        covered: 0,
        responses: HashSet::new(),
        failed: false,
    };
    for _ in 0..MAX_STEPS {
        if run.input.is_empty() {
            break;
        }
        run.step();
    }
    run.end();
    assert!(run.t.bytes(source, 0, 4 * PAGE) == before, "what is sent was written");
    assert!(run.t.bytes(victim.mr, 0, victim.mr.len) == own, "written without a request");
    let written = run.t.bytes(target, 0, 4 * PAGE);
    assert!(written.iter().all(|b| [0, FORGED].contains(b)), "not what was answered");
}

impl Run<'_> {
    fn step(&mut self) {
        match self.input.byte() {
            0..70 => self.post(),
            70..220 => self.forge(),
            220..245 => {
                let micros = u64::from(self.input.byte()).pow(2) / 8;
                self.t.run_for(Duration::from_micros(micros));
            }
            _ => self.poll(),
        }
    }

    fn post(&mut self) {
        let at = self.t.b.mr.remote(usize::from(self.input.word()) & !7);
        let op = match self.input.byte() % 7 {
            0 => SendOp::Send,
            1 => SendOp::SendImm(1),
            2 => SendOp::Write(at),
            3 => SendOp::WriteImm(at, 2),
            4 | 5 => SendOp::Read(at),
            _ => SendOp::FetchAdd { at, add: 1 },
        };
        let is_read = matches!(op, SendOp::Read(_)) || op.is_atomic();
        let len = if op.is_atomic() { 8 } else { self.input.len(self.mtu).min(4 * PAGE) };
        let from = if is_read { self.target } else { self.source };
        let sges = [from.sge(0, len)];
        let xrc_srqn = self.t.b.srq.map_or(0, |srq| self.t.srqn(srq));
        let flags = SendFlags::from_bits_truncate(self.input.byte().into()) & !SendFlags::INLINE;
        let wr = SendWr { wr_id: self.posted, op, flags, sges: &sges, ud: None, xrc_srqn };
        if self.t.post_send(self.victim.qp, &wr).is_ok() {
            let (first, packets) = (self.next_psn, len.div_ceil(self.mtu).max(1) as u32);
            self.next_psn += packets;
            let last = self.next_psn - 1;
            self.outstanding.push_back(Request { wr_id: self.posted, first, last, is_read });
            self.posted += 1;
        }
    }

    /// An answer, mostly to something that was asked.
    fn forge(&mut self) {
        let oldest = self.outstanding.front().map_or(self.next_psn, |request| request.first);
        let psn = match self.input.byte() {
            by @ 0..200 => oldest.wrapping_add(u32::from(by) % 20),
            by @ 200..240 => oldest.wrapping_sub(u32::from(by) - 200),
            _ => u32::from(self.input.word()) << 8,
        };
        use Operation as O;
        let operation = match self.input.byte() {
            0..90 => O::Ack,
            90..130 => O::ReadResponseOnly,
            130..160 => O::ReadResponseFirst,
            160..190 => O::ReadResponseMiddle,
            190..220 => O::ReadResponseLast,
            _ => O::AtomicAck,
        };
        let opcode = Opcode::new(self.options.qp_type.service(), operation);
        // On XRC answers come to the initiator as on RC, by its own number.
        let qpn = self.t.get(self.victim.qp).qpn();
        let wire = self.options.sq_psn.plus(psn);
        let mut headers = Headers::new(Bth::new(opcode, qpn, wire));
        let byte = self.input.byte();
        let syndrome =
            if byte < 100 { Syndrome::ACK } else { Syndrome::parse(byte).unwrap_or(Syndrome::ACK) };
        headers.aeth = Some(Aeth { syndrome, msn: self.input.byte().into() });
        headers.atomic_ack = Some(AtomicAckEth { original: u64::from_le_bytes([FORGED; 8]) });
        let mut len = match self.input.byte() & 3 {
            0 | 1 => self.mtu,
            2 => self.missing(psn),
            _ => self.input.len(self.mtu),
        };
        if !opcode.admits_payload(len) {
            len = 0;
        }
        // The greatest PSN that this answer may be taken to acknowledge.
        let acks = match syndrome {
            Syndrome::Ack { .. } => psn.wrapping_add(1),
            _ => psn,
        };
        if (self.covered..=self.next_psn).contains(&acks) {
            self.covered = acks;
        }
        if operation != O::Ack {
            self.responses.insert(psn);
        }
        let (to, from) = (self.victim.device, self.t.b.device);
        self.t.inject(from, to, headers, &vec![FORGED; len]);
    }

    /// Bytes of the last packet of a READ; the input names its PSN, not its length.
    fn missing(&mut self, psn: u32) -> usize {
        let request = self.outstanding.iter().find(|r| (r.first..=r.last).contains(&psn));
        request.map_or(8, |r| {
            if psn == r.last { usize::from(self.input.word()) % (self.mtu + 1) } else { self.mtu }
        })
    }

    fn poll(&mut self) {
        for wc in self.t.sends(self.victim) {
            self.completed(&wc);
        }
    }

    fn completed(&mut self, wc: &Wc) {
        let request = self.outstanding.pop_front().expect("posted, and not completed before");
        assert_eq!(wc.wr_id, request.wr_id, "out of order: {wc:?}");
        if wc.status != WcStatus::Success {
            let first = !std::mem::replace(&mut self.failed, true);
            assert!(first || wc.status == WcStatus::WrFlushErr, "the second error: {wc:?}");
            return;
        }
        assert!(!self.failed, "success after an error: {wc:?}");
        assert!(self.covered > request.last, "nobody acknowledged it: {wc:?}");
        if request.is_read {
            let all = (request.first..=request.last).all(|psn| self.responses.contains(&psn));
            assert!(all, "a READ without its responses: {wc:?}");
        }
    }

    fn end(&mut self) {
        self.t.run_for(Duration::from_secs(20));
        self.poll();
        let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
        self.t.modify(self.victim.qp, &attr, QpAttrMask::STATE).expect("from every state");
        self.poll();
        assert!(self.outstanding.is_empty(), "requests that never completed");
        self.t.run();
        assert!(self.t.sends(self.victim).is_empty(), "after the flush");
    }
}
