//! A queue pair in its host: the environment that `anyverbs_proto` asks for, and the pacing of a network interface.
//!
//! A host's port takes one packet at a time. Queue pairs that have more wait for their turn: to them the path has no room
//! ([`TransmitError::Blocked`]). A sender under DCQCN waits for its rate in the same way, so the machine of the queue pair
//! knows nothing of either.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use anyverbs_proto::arrival::Arrival;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::env::{
    CompletionEnv, Env, LinkEnv, LinkProps, MemoryEnv, ReasonEnv, Side, TransmitError,
};
use anyverbs_proto::event::QpEvent;
use anyverbs_proto::memory::{Fault, Memory};
use anyverbs_proto::mr::{Access, Keys, MrTable, Region};
use anyverbs_proto::payload::{Data, Payload};
use anyverbs_proto::qp::attr::{ModifyLimits, QpAttr, QpAttrMask, QpCap, QpInit, QpState, QpType};
use anyverbs_proto::qp::{Incoming, Qp, SqCredit};
use anyverbs_proto::recv_queue::RecvWqe;
use anyverbs_proto::time::{Clock, Time};
use anyverbs_proto::types::{Gid, Mtu, PKey, Psn, Qpn};
use anyverbs_proto::wc::{Wc, WcStatus};
use anyverbs_proto::wire::aeth::Syndrome;
use anyverbs_proto::wire::opcode::Service;
use anyverbs_proto::wire::packet::Headers;
use anyverbs_proto::wr::{AddressVector, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge};

use crate::dcqcn::Dcqcn;
use crate::file::{Control, Recovery, Transport};
use crate::net::{Event, NS, Net, OnWire};

/// The protection domain of everything.
const PD: u32 = 1;
/// Most requests that a queue pair holds.
pub(crate) const DEPTH: u32 = 16;
/// The bytes of every payload.
static ZEROES: [u8; 4096] = [0; 4096];
/// ECN-capable, of the two low bits of the traffic class (RFC 3168).
const ECT: u8 = 2;
/// Bytes of the out-of-order buffer, as on the wire.
const OUT_OF_ORDER_ROOM: usize = 256 << 10;

/// Memory that holds nothing: it takes every byte, and its bytes are zero.
#[derive(Debug)]
pub(crate) struct Nothing;

impl Memory for Nothing {
    fn read(&self, _addr: u64, dst: &mut [u8]) -> Result<(), Fault> {
        dst.fill(0);
        Ok(())
    }

    fn write(&self, _addr: u64, _src: &[u8]) -> Result<(), Fault> {
        Ok(())
    }

    fn copy(&self, _to: u64, _from: u64, _len: usize) -> Result<(), Fault> {
        Ok(())
    }

    fn compare_swap(&self, _addr: u64, _compare: u64, _swap: u64) -> Result<u64, Fault> {
        Ok(0)
    }

    fn store(&self, _addr: u64, _value: u64) -> Result<(), Fault> {
        Ok(())
    }

    fn persist(&self, _addr: u64, _len: u64) -> Result<(), Fault> {
        Ok(())
    }

    fn fetch_add(&self, _addr: u64, _add: u64) -> Result<u64, Fault> {
        Ok(0)
    }
}

/// A completion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    pub(crate) qp: u32,
    pub(crate) side: Side,
    pub(crate) succeeded: bool,
}

/// State that all hosts have in common. One region stands for the memory of each.
#[derive(Debug)]
pub(crate) struct Common {
    mrs: MrTable,
    keys: Keys,
    props: LinkProps,
    transport: Transport,
    done: Vec<Done>,
}

/// The place of a queue pair.
#[derive(Debug)]
struct Place {
    number: u32,
    host: u32,
    peer: u32,
    /// Chooses among ways of one length.
    flow: u32,
    credit: Arc<SqCredit>,
    /// It waits for its turn or for its rate.
    is_waiting: bool,
    /// One packet may leave although others wait.
    has_turn: bool,
    rate: Option<Dcqcn>,
    /// When the rate lets the next packet leave.
    next_allowed: u64,
    /// When its timer event comes that counts.
    timer_at: Option<u64>,
}

#[derive(Debug)]
struct Slot {
    qp: Qp,
    place: Place,
}

/// The environment of one call.
struct Around<'a> {
    net: &'a mut Net,
    common: &'a mut Common,
    place: &'a mut Place,
}

impl Clock for Around<'_> {
    fn now(&self) -> Time {
        self.net.time()
    }
}

impl Env for Around<'_> {
    fn count(&self, counter: Counter, n: u64) {
        self.net.counters.add(counter, n);
    }
}

impl ReasonEnv for Around<'_> {}

impl LinkEnv for Around<'_> {
    fn props(&self) -> &LinkProps {
        &self.common.props
    }

    fn transmit(
        &mut self,
        av: &AddressVector,
        headers: &Headers,
        payload: &Payload<'_>,
        _acks: Option<Psn>,
    ) -> Result<(), TransmitError> {
        // Answers are short, and nothing but the port holds them back.
        let is_request = headers.bth.opcode.is_request();
        if is_request && !self.may_leave() {
            return Err(TransmitError::Blocked);
        }
        let packet = OnWire {
            headers: *headers,
            payload: payload.len() as u32,
            to: self.place.peer,
            flow: self.place.flow,
            traffic_class: if is_request { av.traffic_class } else { 0 },
        };
        let bytes = self.net.leave(self.place.host, packet);
        if is_request && let Some(rate) = &mut self.place.rate {
            let start = self.place.next_allowed.max(self.net.now);
            self.place.next_allowed = start + rate.spacing(bytes, self.net.now);
        }
        Ok(())
    }
}

impl Around<'_> {
    /// Whether a request may leave now. If not, the queue pair is called when it may.
    fn may_leave(&mut self) -> bool {
        if std::mem::take(&mut self.place.has_turn) {
            return true;
        }
        let Place { number, host, next_allowed, .. } = *self.place;
        if self.place.is_waiting {
            return false;
        }
        if next_allowed > self.net.now {
            self.net.schedule(next_allowed, Event::RateAllows { qp: number });
        } else if self.net.is_idle(host) {
            return true;
        } else {
            self.net.wait_for_turn(host, number);
        }
        self.place.is_waiting = true;
        false
    }
}

impl MemoryEnv for Around<'_> {
    type Memory = Nothing;

    fn memory(&self) -> &Nothing {
        &Nothing
    }

    fn mrs(&self) -> &MrTable {
        &self.common.mrs
    }
}

impl CompletionEnv for Around<'_> {
    fn complete(&mut self, side: Side, wc: Wc, _solicited: bool) {
        if side == Side::Send {
            self.place.credit.release(wc.sq_count);
        }
        let succeeded = wc.status == WcStatus::Success;
        self.common.done.push(Done { qp: self.place.number, side, succeeded });
    }

    fn take_srq(&mut self, _into: &mut RecvWqe) -> bool {
        false
    }

    fn raise(&mut self, _event: QpEvent) {}
}

fn gid(host: u32) -> Gid {
    Gid::from(IpAddr::from(Ipv4Addr::from_bits(0x0a00_0001 + host)))
}

/// All hosts with their queue pairs, and the network between them.
#[derive(Debug)]
pub(crate) struct Hosts {
    pub(crate) net: Net,
    common: Common,
    /// Queue pairs by number; a closed one leaves its place empty.
    slots: Vec<Option<Box<Slot>>>,
}

impl Hosts {
    pub(crate) fn new(net: Net, transport: Transport) -> Self {
        let mrs = MrTable::new(1, 1);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let region = Region { pd: PD, access, iova: 0, len: 1 << 40, addr: 0 };
        let keys = mrs.register(region).expect("an empty table has room");
        let props = LinkProps {
            probe_after: Some(Duration::from_secs_f64(transport.probe_us / 1e6)),
            out_of_order_room: match transport.recovery {
                Recovery::Selective => OUT_OF_ORDER_ROOM,
                Recovery::GoBackN => 0,
            },
            ..LinkProps::new(transport.window_bytes)
        };
        let common = Common { mrs, keys, props, transport, done: Vec::new() };
        Self { net, common, slots: Vec::new() }
    }

    /// Connects two hosts by a queue pair at each. Returns the number of the one at `a`; the other has the next.
    /// Each holds `depth` requests.
    pub(crate) fn connect(&mut self, a: u32, b: u32, flow: u32, depth: u32) -> u32 {
        let first = self.slots.len() as u32;
        for (number, host, peer) in [(first, a, b), (first + 1, b, a)] {
            let cap = QpCap {
                max_send_wr: depth,
                max_recv_wr: depth,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            };
            let init = QpInit { qp_type: QpType::Rc, cap, sq_sig_all: false, srq: false, pd: PD };
            let qp = Qp::new(Qpn::new(number), &init);
            let port = self.net.topology.host_port(host);
            let gbps = self.net.topology.ports[port].link.gbps;
            let place = Place {
                number,
                host,
                peer,
                flow,
                credit: qp.sq_credit(),
                is_waiting: false,
                has_turn: false,
                rate: matches!(self.common.transport.control, Control::Dcqcn)
                    .then(|| Dcqcn::new(self.common.transport.dcqcn, gbps)),
                next_allowed: 0,
                timer_at: None,
            };
            self.slots.push(Some(Box::new(Slot { qp, place })));
        }
        for (number, peer) in [(first, first + 1), (first + 1, first)] {
            self.bring_up(number, peer);
        }
        first
    }

    fn bring_up(&mut self, number: u32, peer_qp: u32) {
        use QpAttrMask as M;
        let transport = &self.common.transport;
        let mtu = transport.mtu;
        let marks = !matches!(transport.control, Control::None);
        let limits = ModifyLimits {
            ports: 1,
            pkeys: &[PKey::DEFAULT],
            max_mtu: Mtu::Mtu4096,
            max_rd_atomic: 1,
            max_rate_limit: u32::MAX,
        };
        self.with(number, |qp, env| {
            let attr = QpAttr {
                access: Access::REMOTE_WRITE,
                port: 1,
                av: AddressVector {
                    dgid: gid(env.place.peer),
                    sgid: gid(env.place.host),
                    hop_limit: 64,
                    port: 1,
                    traffic_class: if marks { ECT } else { 0 },
                    ..AddressVector::default()
                },
                path_mtu: mtu,
                dest_qpn: Qpn::new(peer_qp),
                max_rd_atomic: 1,
                max_dest_rd_atomic: 1,
                min_rnr_timer: 1,
                timeout: 14,
                retry_cnt: 7,
                rnr_retry: 7,
                ..QpAttr::default()
            };
            let to_rtr = M::AV
                | M::PATH_MTU
                | M::DEST_QPN
                | M::RQ_PSN
                | M::MAX_DEST_RD_ATOMIC
                | M::MIN_RNR_TIMER;
            let to_rts = M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC;
            for (state, mask) in [
                (QpState::Init, M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS),
                (QpState::Rtr, to_rtr),
                (QpState::Rts, to_rts),
            ] {
                let attr = QpAttr { state, ..attr };
                qp.modify(&attr, mask | M::STATE, &limits, env)
                    .expect("the attributes are those of the transition");
            }
        });
    }

    /// Gives up a connection. What is still on its way is lost.
    pub(crate) fn close(&mut self, first: u32) {
        self.slots[first as usize] = None;
        self.slots[first as usize + 1] = None;
    }

    /// Posts an RDMA WRITE of so many bytes; `notifies`: with immediate data, which takes a receive.
    pub(crate) fn write(&mut self, number: u32, len: u32, notifies: bool) {
        let Keys { lkey, rkey, .. } = self.common.keys;
        let at = RemoteAddr { va: 0, rkey };
        let op = if notifies { SendOp::WriteImm(at, 0) } else { SendOp::Write(at) };
        let sges = [Sge { addr: 0, len, lkey }];
        let wr =
            SendWr { wr_id: 0, op, flags: SendFlags::SIGNALED, sges: &sges, ud: None, xrc_srqn: 0 };
        self.with(number, |qp, env| {
            qp.post_send(&wr, env).expect("the workload keeps below the depth of the queue");
            qp.transmit(env);
        });
    }

    /// Posts a receive.
    pub(crate) fn receive(&mut self, number: u32) {
        self.with(number, |qp, env| {
            qp.post_recv(&RecvWr { wr_id: 0, sges: &[] }, env)
                .expect("the workload keeps below the depth of the queue");
        });
    }

    /// Lets the next event happen. False if there is none.
    pub(crate) fn step(&mut self) -> bool {
        let Some(event) = self.net.next() else { return false };
        match event {
            Event::Arrival { packet, node } if node as usize >= self.net.topology.hosts() => {
                self.net.forward(node, packet);
            }
            Event::Arrival { packet, .. } => {
                let packet = self.net.take(packet);
                self.deliver(&packet);
            }
            Event::PortFree { host } => {
                while let Some(number) = self.net.next_turn(host) {
                    self.with(number, |qp, env| {
                        (env.place.is_waiting, env.place.has_turn) = (false, true);
                        qp.transmit(env);
                    });
                }
            }
            Event::RateAllows { qp: number } => {
                if let Some(slot) = &self.slots[number as usize] {
                    self.net.wait_for_turn(slot.place.host, number);
                }
            }
            Event::Timer { qp: number } => {
                let now = self.net.now;
                self.with(number, |qp, env| {
                    if env.place.timer_at != Some(now) {
                        return;
                    }
                    env.place.timer_at = None;
                    if qp.deadline().is_some_and(|at| at <= env.now()) {
                        qp.on_timer(env);
                    }
                });
            }
        }
        true
    }

    /// The completions since the last call.
    pub(crate) fn take_done(&mut self, into: &mut Vec<Done>) {
        into.append(&mut self.common.done);
    }

    fn deliver(&mut self, packet: &OnWire) {
        let mut headers = packet.headers;
        headers.bth.pad = (packet.payload.next_multiple_of(4) - packet.payload) as u8;
        let is_nak = matches!(headers.aeth.map(|aeth| aeth.syndrome), Some(Syndrome::Nak(_)));
        self.with(headers.bth.dest_qpn.get(), |qp, env| {
            if headers.bth.opcode.service == Service::Cnp
                && let Some(rate) = &mut env.place.rate
            {
                return rate.notify(env.net.now);
            }
            let arrival = Arrival {
                source: gid(env.place.peer),
                destination: gid(env.place.host),
                traffic_class: packet.traffic_class,
                hop_limit: 64,
                ..Arrival::default()
            };
            let payload = Data::Bytes(&ZEROES[..packet.payload as usize]);
            // The packet that a NAK asks for leaves at once. If the path had no room for it, the requester would go back N.
            env.place.has_turn = is_nak;
            qp.receive(&arrival, &Incoming { headers, payload, packets: 1, acks: None }, env);
            if qp.owes_ack() {
                qp.acknowledge(env);
            }
        });
    }

    /// Calls a queue pair, unless it is closed.
    fn with(&mut self, number: u32, f: impl FnOnce(&mut Qp, &mut Around<'_>)) {
        let Some(Slot { qp, place }) =
            self.slots.get_mut(number as usize).and_then(Option::as_deref_mut)
        else {
            return;
        };
        let (net, common) = (&mut self.net, &mut self.common);
        f(qp, &mut Around { net, common, place });
        place.has_turn = false;
        if let Some(deadline) = qp.deadline() {
            let at = (deadline.as_nanos() * NS).max(net.now);
            // A deadline that moves away is found out when its old event comes.
            if place.timer_at.is_none_or(|before| at < before) {
                place.timer_at = Some(at);
                net.schedule(at, Event::Timer { qp: number });
            }
        }
    }
}
