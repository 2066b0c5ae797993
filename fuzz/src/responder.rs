//! A sequence of packets that comes to a connected queue pair, from the address of its peer or from another.
//!
//! Memory is neither written nor read without a key and right. Packets from another address change nothing. Messages
//! are received once each and in order. In the end the queue pair can be flushed.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use anyverbs_proto::counters::Counter;
use anyverbs_proto::mr::Access;
use anyverbs_proto::qp::attr::{QpAttr, QpAttrMask, QpState, QpType};
use anyverbs_proto::types::{Mtu, PKey, Psn};
use anyverbs_proto::wc::WcStatus;
use anyverbs_proto::wire::aeth::{Aeth, Syndrome};
use anyverbs_proto::wire::atomic::{AtomicAckEth, AtomicEth};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::feth::Feth;
use anyverbs_proto::wire::opcode::Opcode;
use anyverbs_proto::wire::packet::Headers;
use anyverbs_proto::wire::reth::Reth;
use anyverbs_proto::wire::xrceth::XrcEth;
use anyverbs_proto::wr::{MAX_MESSAGE, RecvWr};
use anyverbs_sim::net::Fate;
use anyverbs_sim::{End, Mr, PAGE, Pair, QpOptions};

use super::input::Input;

const MAX_STEPS: usize = 200;
/// The byte in memory that may not be read, and in no other.
const SECRET: u8 = 0xa7;

/// A region with some of the rights.
struct Region {
    mr: Mr,
    access: Access,
    /// The region belongs to the queue pair's protection domain.
    is_ours: bool,
}

struct Run<'a> {
    input: Input<'a>,
    options: QpOptions,
    t: Pair,
    victim: End,
    /// Messages land here; of no use to a peer.
    recv: Mr,
    regions: Vec<Region>,
    psn: Psn,
    posted: u64,
    /// The next receive to complete.
    next: u64,
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let first = input.byte();
    let options = match first & 3 {
        0 => QpOptions::rc(),
        1 => QpOptions { out_of_order_room: 16 << 10, ..QpOptions::rc() },
        2 => QpOptions::uc(),
        _ => QpOptions::xrc_send(),
    };
    let options = QpOptions {
        mtu: Mtu::ALL[usize::from(first >> 2) % 5],
        sq_psn: Psn::new(u32::from(input.word()).wrapping_sub(0x7fff)),
        max_dest_rd_atomic: input.byte() % 4,
        ..options
    };
    let mut t = match options.qp_type {
        QpType::XrcSend => {
            let target = QpOptions { qp_type: QpType::XrcRecv, srq: Some(64), ..options };
            Pair::with(1, options, target)
        }
        _ => Pair::new(1, options),
    };
    let victim = t.b;
    let local = Access::LOCAL_WRITE;
    let other_pd = t.pd(victim.device);
    let regions = [
        (local, true),
        (local | Access::REMOTE_READ, true),
        (local | Access::REMOTE_WRITE, true),
        (local | Access::REMOTE_ATOMIC, true),
        (options.access, true),
        (options.access, false),
    ]
    .map(|(access, is_ours)| {
        let mr = t.mr(victim.device, if is_ours { victim.pd } else { other_pd }, PAGE, access);
        let readable = is_ours && access.contains(Access::REMOTE_READ);
        t.write(mr, 0, &[if readable { 0x11 } else { SECRET }; PAGE]);
        Region { mr, access, is_ours }
    });
    let recv = t.mr(victim.device, victim.pd, PAGE, local);
    // No more than four in a row may leave. A peer could write this byte and read it again, but does not.
    let leaked = Rc::new(Cell::new(false));
    let seen = Rc::clone(&leaked);
    t.net.rule(move |packet| {
        if packet.from == victim.device && packet.payload.windows(4).any(|w| w == [SECRET; 4]) {
            seen.set(true);
        }
        Fate::Pass
    });
    let psn = options.sq_psn;
    let regions = regions.into();
    let mut run = Run { input, options, t, victim, recv, regions, psn, posted: 0, next: 0 };
    for _ in 0..MAX_STEPS {
        if run.input.is_empty() {
            break;
        }
        run.step();
        assert!(!leaked.get(), "what no right opens was sent");
    }
    run.end();
    assert!(!leaked.get(), "what no right opens was sent");
}

impl Run<'_> {
    fn step(&mut self) {
        match self.input.byte() {
            0..40 => self.post_recv(),
            40..220 => {
                let packet = self.packet();
                if let Some((headers, payload)) = packet {
                    let peer = self.t.a.device;
                    self.t.inject(peer, self.victim.device, headers, &payload);
                    self.check_memory();
                }
            }
            220..235 => {
                let packet = self.packet();
                if let Some((headers, payload)) = packet {
                    self.strangers_packet(headers, &payload);
                }
            }
            235..245 => {
                let micros = u64::from(self.input.byte()).pow(2);
                self.t.run_for(Duration::from_micros(micros));
            }
            _ => self.poll(),
        }
    }

    fn post_recv(&mut self) {
        let len = self.input.len(self.options.mtu.bytes() as usize).min(PAGE);
        let sges = [self.recv.sge(PAGE - len, len)];
        let wr = RecvWr { wr_id: self.posted, sges: &sges };
        let posted = match self.victim.srq {
            Some(srq) => self.t.post_srq_recv(srq, &wr),
            None => self.t.post_recv(self.victim.qp, &wr),
        };
        self.posted += u64::from(posted.is_ok());
    }

    /// Any opcode of the service, with headers that often fit.
    fn packet(&mut self) -> Option<(Headers, Vec<u8>)> {
        let service = self.options.qp_type.service();
        let send = Opcode::new(service, anyverbs_proto::wire::opcode::Operation::SendFirst);
        let opcode = Opcode::parse(send.code() & 0xe0 | self.input.byte() & 0x1f)?;
        let psn = match self.input.byte() {
            0..180 => self.psn,
            by @ 180..250 => self.psn.plus(u32::from(by)).plus(0u32.wrapping_sub(215)),
            _ => Psn::new(u32::from(self.input.word()) << 8),
        };
        self.psn = psn.plus(1);
        let qpn = self.t.get(self.victim.qp).qpn();
        let mut headers = Headers::new(Bth::new(opcode, qpn, psn));
        let flags = self.input.byte();
        headers.bth.ack_req = flags & 1 != 0;
        headers.bth.solicited = flags & 2 != 0;
        if flags & 0xf0 == 0xf0 {
            headers.bth.pkey = PKey(self.input.word());
        }
        let at = usize::from(self.input.byte()) % self.regions.len();
        let mr = self.regions[at].mr;
        let mut va = mr.addr + u64::from(self.input.word()) % PAGE as u64;
        let mut rkey = mr.rkey;
        match self.input.byte() {
            0..180 => va &= !7,
            180..200 => rkey = rkey.wrapping_add(u32::from(self.input.byte())).wrapping_sub(0x80),
            200..210 => rkey = mr.lkey,
            210..220 => va = va.wrapping_sub(PAGE as u64),
            220..225 => va = u64::MAX - u64::from(self.input.byte()),
            _ => {}
        }
        let mtu = self.options.mtu.bytes() as usize;
        let len = match self.input.byte() {
            0..10 => u32::MAX - u32::from(self.input.byte()),
            _ => self.input.len(mtu) as u32,
        };
        headers.reth = Some(Reth { va, rkey, len });
        let compare = u64::from_le_bytes([SECRET; 8]).wrapping_add((flags >> 6).into());
        headers.atomic = Some(AtomicEth { va, rkey, swap_add: 0x0101_0101_0101_0101, compare });
        let syndrome = Syndrome::parse(self.input.byte()).unwrap_or(Syndrome::ACK);
        headers.aeth = Some(Aeth { syndrome, msn: 1 });
        headers.atomic_ack = Some(AtomicAckEth { original: 5 });
        headers.imm = Some(7);
        headers.ieth = Some(rkey);
        let srqn = self.victim.srq.map_or(1, |srq| self.t.srqn(srq));
        headers.xrceth = Some(XrcEth { srqn: srqn + u32::from(flags & 0x3c == 0x3c) });
        headers.feth = Some(Feth::parse(&[0, 0, 0, flags]));
        let mut payload = match self.input.byte() & 3 {
            0 | 1 => mtu,
            2 => len as usize % (mtu + 1),
            _ => self.input.len(mtu),
        };
        if !opcode.admits_payload(payload) {
            payload = [0, 8, 16].into_iter().find(|n| opcode.admits_payload(*n)).unwrap_or(0);
        }
        Some((headers, vec![0x5a; payload]))
    }

    /// A packet that could as well be the peer's, but for its source.
    fn strangers_packet(&mut self, headers: Headers, payload: &[u8]) {
        let everything = |run: &Self| {
            let mrs = run.regions.iter().map(|region| region.mr).chain([run.recv, run.victim.mr]);
            let memory: Vec<_> = mrs.map(|mr| run.t.bytes(mr, 0, PAGE)).collect();
            let qp = run.t.get(run.victim.qp);
            let sent = run.t.net.trace.iter().filter(|r| r.from == run.victim.device).count();
            (memory, qp.state(), sent)
        };
        self.t.run_for(Duration::from_millis(1));
        let stranger = self.t.device();
        let before = everything(self);
        let dropped = |run: &Self| {
            let counters = [Counter::DropForeign, Counter::DropPkey, Counter::DropQpState];
            counters.map(|c| run.t.counter(run.victim.device, c)).iter().sum::<u64>()
        };
        let count = dropped(self);
        self.t.inject(stranger, self.victim.device, headers, payload);
        assert_eq!(dropped(self), count + 1, "{headers}");
        assert!(everything(self) == before, "a packet of another address did something: {headers}");
    }

    /// Memory without the right is not written. WRITEs of this peer are all alike.
    fn check_memory(&self) {
        for Region { mr, access, is_ours } in &self.regions {
            let writable =
                *is_ours && access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
            if !writable {
                let bytes = self.t.bytes(*mr, 0, PAGE);
                assert!(
                    bytes.iter().all(|b| *b == bytes[0]),
                    "written without the right {access:?}"
                );
            } else if !access.contains(Access::REMOTE_ATOMIC) {
                let bytes = self.t.bytes(*mr, 0, PAGE);
                assert!(bytes.iter().all(|b| [SECRET, 0x5a].contains(b)), "not what was sent");
            }
        }
    }

    fn poll(&mut self) {
        for wc in self.t.recvs(self.victim) {
            assert!(wc.wr_id < self.posted, "never posted: {wc:?}");
            assert!(wc.wr_id >= self.next, "twice, or out of order: {wc:?}");
            self.next = wc.wr_id + 1;
            assert!(wc.status != WcStatus::Success || wc.byte_len <= MAX_MESSAGE, "{wc:?}");
        }
    }

    fn end(&mut self) {
        self.t.run_for(Duration::from_millis(200));
        self.check_memory();
        self.poll();
        let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
        self.t.modify(self.victim.qp, &attr, QpAttrMask::STATE).expect("from every state");
        self.poll();
        if self.victim.srq.is_none() {
            assert_eq!(self.next, self.posted, "receives that never completed");
        }
        self.t.run();
        assert!(self.t.recvs(self.victim).is_empty(), "after the flush");
    }
}
