//! Two connected queue pairs, and a sequence of events: verbs of the program, requests and answers that a peer forged, as
//! packets or by a lane, losses, pages that vanish.
//!
//! In no case does anything panic or loop. Completions come once each, in order, and after the first error only
//! flushes. Memory that no key names stays as it is. In the end both queue pairs can be flushed.

use std::time::Duration;

use anyverbs_proto::mr::Access;
use anyverbs_proto::qp::ShortRequest;
use anyverbs_proto::qp::attr::{QpAttr, QpAttrMask, QpState, QpType};
use anyverbs_proto::types::{Mtu, PKey, Psn, QKey};
use anyverbs_proto::wc::{Wc, WcStatus};
use anyverbs_proto::wire::aeth::{Aeth, Syndrome};
use anyverbs_proto::wire::atomic::{AtomicAckEth, AtomicEth};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::deth::Deth;
use anyverbs_proto::wire::feth::Feth;
use anyverbs_proto::wire::opcode::Opcode;
use anyverbs_proto::wire::packet::Headers;
use anyverbs_proto::wire::reth::Reth;
use anyverbs_proto::wire::xrceth::XrcEth;
use anyverbs_proto::wr::{RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge};
use anyverbs_sim::net::{Fate, Passing};
use anyverbs_sim::{End, Mr, PAGE, Pair, QpOptions};

use super::input::Input;

/// Actions of one input.
const MAX_ACTIONS: usize = 200;

/// The completions on one queue.
#[derive(Default)]
struct Queue {
    posted: u64,
    /// The next completion is this one or a later one.
    next: u64,
    failed: bool,
}

impl Queue {
    fn completed(&mut self, wc: &Wc, may_skip: bool) {
        assert!(wc.wr_id < self.posted, "never posted: {wc:?}");
        assert!(wc.wr_id >= self.next, "completed twice, or out of order: {wc:?}");
        assert!(wc.wr_id == self.next || (may_skip && !self.failed), "skipped: {wc:?}");
        if wc.status == WcStatus::Success {
            assert!(!self.failed, "success after an error: {wc:?}");
        } else {
            let first = !std::mem::replace(&mut self.failed, true);
            assert!(first || wc.status == WcStatus::WrFlushErr, "the second error: {wc:?}");
        }
        self.next = wc.wr_id + 1;
    }
}

struct Side {
    end: End,
    sends: Queue,
    recvs: Queue,
    /// Memory around the region that the keys name.
    guard: Mr,
}

struct Run<'a> {
    input: Input<'a>,
    options: QpOptions,
    lanes: bool,
    t: Pair,
    sides: [Side; 2],
    /// The last PSNs that were forged for each side, or are likely.
    psn: [Psn; 2],
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let first = input.byte();
    let options = match first & 3 {
        0 => QpOptions::rc(),
        1 => QpOptions::xrc_send(),
        2 => QpOptions::uc(),
        _ => QpOptions::ud(),
    };
    let [second, third] = [input.byte(), input.byte()];
    // Both on one host, where short SENDs take lanes.
    let lanes = third >> 2 & 7 == 5 && options.qp_type == QpType::Rc;
    let options = QpOptions {
        mtu: Mtu::ALL[usize::from(first >> 2) % 5],
        timeout: 1,
        retry_cnt: first >> 5,
        rnr_retry: second & 7,
        window: if first & 0x10 != 0 { 3000 } else { 1 << 20 },
        srq: (third & 3 == 3).then_some(8),
        segment: if lanes { 4096 } else { 0 },
        sq_psn: Psn::new(u32::from(input.word()).wrapping_sub(0x7fff)),
        max_rd_atomic: 2,
        max_dest_rd_atomic: 2,
        ..options
    };
    let mut t = match options.qp_type {
        QpType::XrcSend => {
            let target = QpOptions { qp_type: QpType::XrcRecv, srq: Some(8), ..options };
            Pair::with(1, options, target)
        }
        _ => Pair::new(1, options),
    };
    t.use_lanes(if lanes { 0.8 } else { 0.0 });
    let sides = [t.a, t.b].map(|end| {
        let pd = t.pd(end.device);
        let guard = t.mr(end.device, pd, PAGE, Access::empty());
        t.fill(guard, 3);
        Side { end, sends: Queue::default(), recvs: Queue::default(), guard }
    });
    let guards = sides.each_ref().map(|side| t.bytes(side.guard, 0, PAGE));
    let mut run = Run { input, options, lanes, t, sides, psn: [options.sq_psn; 2] };
    for _ in 0..MAX_ACTIONS {
        if run.input.0.is_empty() {
            break;
        }
        run.act();
    }
    run.end();
    for (side, guard) in run.sides.iter().zip(guards) {
        assert_eq!(run.t.bytes(side.guard, 0, PAGE), guard);
    }
}

impl Run<'_> {
    fn act(&mut self) {
        let action = self.input.byte();
        let s = usize::from(action >> 7);
        match action & 0x7f {
            0..30 => self.post_send(s),
            30..45 => self.post_recv(s),
            45..60 if self.lanes => self.forge_by_lane(s),
            75..85 if self.lanes => self.forge_lane_answer(s),
            45..75 => self.forge_request(s),
            75..95 => self.forge_answer(s),
            95..105 => {
                let micros = u64::from(self.input.byte()).pow(2);
                self.t.run_for(Duration::from_micros(micros));
            }
            105..112 => self.poll(s),
            112..118 => {
                let mut passed = self.input.byte() & 7;
                let twice = self.input.byte() & 1 == 1;
                let fate = if twice { Fate::Again(Duration::from_micros(9)) } else { Fate::Drop };
                let nth = move |_: &Passing<'_>| {
                    let now = passed == 0;
                    passed = passed.saturating_sub(1);
                    now
                };
                self.t.net.once(nth, fate);
            }
            118..121 => {
                let mr = self.sides[s].end.mr;
                let page = usize::from(self.input.byte()) % (mr.len / PAGE);
                let memory = self.t.memory(mr.device);
                let addr = mr.addr + (page * PAGE) as u64;
                if self.input.byte() & 1 == 0 {
                    memory.unmap(addr, PAGE);
                } else {
                    memory.map(addr, PAGE);
                }
            }
            _ => self.modify(s),
        }
    }

    /// A piece of a side's region, or sometimes of nothing.
    fn sges(&mut self, s: usize, len: usize) -> Vec<Sge> {
        let mr = self.sides[s].end.mr;
        let pieces = 1 + usize::from(self.input.byte() & 3);
        let bad = self.input.rarely();
        (0..pieces)
            .map(|i| {
                let here = if i + 1 == pieces { len - len / pieces * i } else { len / pieces };
                let offset = usize::from(self.input.word()) % (mr.len - here);
                let mut sge = mr.sge(offset, here);
                if bad {
                    sge.lkey ^= u32::from(self.input.byte());
                    sge.addr = sge.addr.wrapping_add(u64::from(self.input.word()) << 1);
                }
                sge
            })
            .collect()
    }

    /// A place in the other side's region, or sometimes elsewhere.
    fn remote(&mut self, s: usize) -> RemoteAddr {
        let mr = self.sides[1 - s].end.mr;
        let mut at = mr.remote(usize::from(self.input.word()) & !7);
        if self.input.rarely() {
            at.va = at.va.wrapping_add(u64::from(self.input.byte()) << 10).wrapping_sub(0x1_0000);
            at.rkey ^= u32::from(self.input.byte() & 3);
        }
        at
    }

    fn post_send(&mut self, s: usize) {
        let at = self.remote(s);
        let op = match self.input.byte() % 9 {
            0 => SendOp::Send,
            1 => SendOp::SendImm(1),
            2 => SendOp::SendInv(at.rkey),
            3 => SendOp::Write(at),
            4 => SendOp::WriteImm(at, 2),
            5 | 6 => SendOp::Read(at),
            7 => SendOp::CompareSwap { at, compare: self.input.byte().into(), swap: 1 },
            _ => SendOp::FetchAdd { at, add: 1 },
        };
        let mtu = self.options.mtu.bytes() as usize;
        let len = if op.is_atomic() && !self.input.rarely() { 8 } else { self.input.len(mtu) };
        let sges = self.sges(s, len);
        let flags = SendFlags::from_bits_truncate(self.input.byte().into());
        let xrc_srqn = self.srqn(1 - s);
        let side = &mut self.sides[s];
        let ud = (self.options.qp_type == QpType::Ud).then(|| {
            let peer = if s == 0 { self.t.b } else { self.t.a };
            self.t.dest(side.end.qp, peer.qp)
        });
        let wr = SendWr { wr_id: side.sends.posted, op, flags, sges: &sges, ud, xrc_srqn };
        if self.t.post_send(side.end.qp, &wr).is_ok() {
            side.sends.posted += 1;
        }
    }

    /// The SRQ of a side, or sometimes another number.
    fn srqn(&mut self, s: usize) -> u32 {
        let Some(srq) = self.sides[s].end.srq else { return 1 };
        self.t.srqn(srq) + u32::from(self.input.rarely() && self.input.rarely())
    }

    fn post_recv(&mut self, s: usize) {
        let mtu = self.options.mtu.bytes() as usize;
        let len = self.input.len(mtu);
        let sges = self.sges(s, len);
        let side = &mut self.sides[s];
        let wr = RecvWr { wr_id: side.recvs.posted, sges: &sges };
        let posted = match side.end.srq {
            Some(srq) => self.t.post_srq_recv(srq, &wr),
            None => self.t.post_recv(side.end.qp, &wr),
        };
        if posted.is_ok() {
            side.recvs.posted += 1;
        }
    }

    /// A PSN near the last one.
    fn near(&mut self, s: usize) -> Psn {
        let psn = match self.input.byte() {
            // In order.
            0..160 => self.psn[s],
            by @ 160..250 => self.psn[s].plus(u32::from(by)).plus(0u32.wrapping_sub(205)),
            _ => Psn::new(u32::from(self.input.word()) << 8),
        };
        self.psn[s] = psn.plus(1);
        psn
    }

    /// Any headers, for side `s`; those that the opcode does not have are not sent.
    fn headers(&mut self, s: usize, code: u8) -> Option<Headers> {
        let service = self.options.qp_type.service();
        let base = if self.input.rarely() {
            self.input.byte()
        } else {
            Opcode::new(service, anyverbs_proto::wire::opcode::Operation::SendFirst).code()
        };
        let opcode = Opcode::parse(base & 0xe0 | code & 0x1f)?;
        let qpn = self.t.get(self.sides[s].end.qp).qpn();
        let psn = self.near(s);
        let mut headers = Headers::new(Bth::new(opcode, qpn, psn));
        let flags = self.input.byte();
        headers.bth.ack_req = flags & 1 != 0;
        headers.bth.solicited = flags & 2 != 0;
        if flags & 0xf0 == 0xf0 {
            headers.bth.pkey = PKey(self.input.word());
        }
        let RemoteAddr { va, rkey } = self.remote(1 - s);
        let mtu = self.options.mtu.bytes() as usize;
        headers.reth = Some(Reth { va, rkey, len: self.input.len(mtu) as u32 });
        headers.atomic =
            Some(AtomicEth { va, rkey, swap_add: 1, compare: self.input.byte().into() });
        let syndrome = Syndrome::parse(self.input.byte()).unwrap_or(Syndrome::ACK);
        headers.aeth = Some(Aeth { syndrome, msn: self.input.byte().into() });
        headers.atomic_ack = Some(AtomicAckEth { original: 5 });
        headers.imm = Some(7);
        headers.ieth = Some(rkey);
        headers.xrceth = Some(XrcEth { srqn: self.srqn(s) });
        headers.feth = Some(Feth::parse(&[0, 0, 0, flags]));
        let qkey = if flags & 0x0c == 0x0c { QKey(1) } else { self.options.qkey };
        headers.deth = Some(Deth { qkey, src_qpn: qpn });
        Some(headers)
    }

    fn forge(&mut self, s: usize, code: u8) {
        let Some(headers) = self.headers(s, code) else { return };
        let mtu = self.options.mtu.bytes() as usize;
        let mut len = match self.input.byte() & 3 {
            0 | 1 => mtu,
            2 => headers.reth.map_or(0, |reth| reth.len as usize % (mtu + 1)),
            _ => self.input.len(mtu),
        };
        let opcode = headers.bth.opcode;
        if !opcode.admits_payload(len) {
            len = [0, 8, 16].into_iter().find(|n| opcode.admits_payload(*n)).unwrap_or(0);
        }
        let (to, from) = (self.sides[s].end.device, self.sides[1 - s].end.device);
        self.t.inject(from, to, headers, &vec![self.input.byte(); len]);
    }

    fn forge_request(&mut self, s: usize) {
        let code = self.input.byte();
        self.forge(s, code);
    }

    fn forge_answer(&mut self, s: usize) {
        let code = 0x0d + self.input.byte() % 6;
        // Answers bear PSNs of requests.
        let asked = self.options.sq_psn;
        let saved =
            std::mem::replace(&mut self.psn[s], asked.plus(u32::from(self.input.byte() & 15)));
        self.forge(s, code);
        self.psn[s] = saved;
    }

    /// The peer of side `s` writes into its lane.
    fn forge_by_lane(&mut self, s: usize) {
        let (flags, len) = (self.input.byte(), usize::from(self.input.byte()) % 49);
        let acks = (flags & 1 != 0).then(|| self.near_asked());
        let (psn, solicited) = (self.near(s), flags & 2 != 0);
        let send = ShortRequest { psn, solicited, ack_req: true, acks };
        let bytes = vec![self.input.byte(); len];
        let from = self.sides[1 - s].end.qp;
        self.t.forge_by_lane(from, (flags & 0xf0 != 0xf0).then_some(send), &bytes);
    }

    /// The peer of side `s` answers to its lane.
    fn forge_lane_answer(&mut self, s: usize) {
        let executed = (self.input.byte() & 7 != 0).then(|| self.near_asked());
        self.t.forge_lane_answer(self.sides[1 - s].end.qp, executed);
    }

    /// A PSN of a request, or near those.
    fn near_asked(&mut self) -> Psn {
        self.options.sq_psn.plus(u32::from(self.input.byte() & 63)).plus(0xff_fff8)
    }

    fn poll(&mut self, s: usize) {
        let side = &mut self.sides[s];
        let everything = self.options.sq_sig_all;
        for wc in self.t.sends(side.end) {
            side.sends.completed(&wc, !everything);
        }
        // A reset loses the receive that was taken from a shared queue.
        let shared = side.end.srq.is_some();
        for wc in self.t.recvs(side.end) {
            side.recvs.completed(&wc, shared);
        }
    }

    fn modify(&mut self, s: usize) {
        let qp = self.sides[s].end.qp;
        match self.input.byte() % 8 {
            0 => {
                let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
                self.t.modify(qp, &attr, QpAttrMask::STATE).expect("from every state");
            }
            1 => self.reconnect(),
            by => {
                let state = if by & 1 == 0 { QpState::Sqd } else { QpState::Rts };
                let attr = QpAttr { state, ..QpAttr::default() };
                self.poll(s);
                // This fails from some states.
                if self.t.modify(qp, &attr, QpAttrMask::STATE).is_ok() {
                    // SQE has an end.
                    self.sides[s].sends.failed = false;
                }
            }
        }
    }

    /// Both ends forget all, and begin anew.
    fn reconnect(&mut self) {
        for s in 0..2 {
            self.poll(s);
            self.t.to_state(self.sides[s].end.qp, QpState::Reset);
            let side = &mut self.sides[s];
            side.sends =
                Queue { posted: side.sends.posted, next: side.sends.posted, failed: false };
            // Receives in a shared queue stay there; one that was taken is gone.
            if side.end.srq.is_none() {
                side.recvs.next = side.recvs.posted;
            }
            side.recvs.failed = false;
        }
        let [a, b] = self.sides.each_ref().map(|side| side.end.qp);
        let options = self.options;
        self.t.connect((a, &options), (b, &options));
        self.psn = [options.sq_psn; 2];
    }

    fn end(&mut self) {
        self.t.run_for(Duration::from_millis(200));
        for s in 0..2 {
            self.poll(s);
            let end = self.sides[s].end;
            self.t.to_state(end.qp, QpState::Err);
            self.poll(s);
            assert!(self.t.sends(end).is_empty());
            if end.srq.is_none() {
                let recvs = &self.sides[s].recvs;
                assert_eq!(recvs.next, recvs.posted, "receives that never completed");
            }
        }
        self.t.run();
        for s in 0..2 {
            let end = self.sides[s].end;
            assert!(
                self.t.sends(end).is_empty() && self.t.recvs(end).is_empty(),
                "after the flush"
            );
        }
    }
}
