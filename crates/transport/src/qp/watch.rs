//! The watch of a queue pair tells a capture and a trace what it does, and asks a script of faults. It is absent unless there is any, or the
//! device has partitions.
//!
//! [`DeviceEnv`](super::env::DeviceEnv) tells of packets that leave, completions and counts, [`Poster`](super::Poster) of work requests, and the
//! receiving thread of packets that come. Datagrams are captured by their port, where damaged and unclaimed ones are seen as well.

use std::cell::Cell;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use anyverbs_links::Links;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::env::Side;
use anyverbs_proto::event::QpEvent;
use anyverbs_proto::payload::Payload;
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::qp::{Arrival, Incoming};
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Mtu, Psn, Qpn};
use anyverbs_proto::wc::{Wc, WcStatus};
use anyverbs_proto::wire::aeth::{Aeth, Syndrome};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::icrc::Flow;
use anyverbs_proto::wire::opcode::{Opcode, Operation, Service};
use anyverbs_proto::wire::packet::{Headers, ICRC_LEN};
use anyverbs_proto::wr::{AddressVector, RecvWr, SendOp, SendWr};
use anyverbs_record::capture::{Frame, Way};
use anyverbs_record::trace::{Moment, Object, Span, Trace};
use tracing::Level;

use super::faults::{Injected, QpFaults};
use super::transport::Transport;

/// The source ports that RoCEv2 suggests.
const SOURCE_PORTS: u16 = 0xc000;

/// A queue pair that is watched, under its lock.
#[derive(Debug)]
pub(crate) struct Watch {
    qpn: Qpn,
    qp_type: QpType,
    /// `None` in a test of the books.
    links: Option<&'static Links>,
    /// Receives that are not complete; none of an SRQ.
    receives: VecDeque<(u64, Option<Span>)>,
    /// It waits, since then.
    wait: Cell<Option<(&'static str, Moment)>>,
    /// Sends that are not complete, the oldest first.
    sends: VecDeque<Posted>,
    /// The PSN after the highest that was sent, or asked for.
    fresh: Option<Psn>,
    /// The path MTU.
    mtu: u32,
    /// A script of faults.
    pub(super) faults: Option<Box<QpFaults>>,
}

/// A send.
#[derive(Debug)]
struct Posted {
    wr_id: u64,
    op: SendOp,
    len: u32,
    /// Its place in the send queue.
    position: u32,
    packets: u32,
    /// The PSN of its first packet, once that has left.
    first: Option<Psn>,
    /// In a trace.
    span: Option<Span>,
}

impl Posted {
    fn has(&self, psn: Psn) -> bool {
        self.first.is_some_and(|first| (0..self.packets as i32).contains(&psn.since(first)))
    }
}

/// The name of an operation, as programs know it.
pub(super) fn name(op: &SendOp) -> &'static str {
    match op {
        SendOp::Send => "SEND",
        SendOp::SendImm(_) => "SEND with immediate",
        SendOp::SendInv(_) => "SEND with invalidate",
        SendOp::Write(_) => "RDMA WRITE",
        SendOp::WriteImm(..) => "RDMA WRITE with immediate",
        SendOp::Read(_) => "RDMA READ",
        SendOp::CompareSwap { .. } => "compare and swap",
        SendOp::FetchAdd { .. } => "fetch and add",
        SendOp::AtomicWrite { .. } => "ATOMIC WRITE",
        SendOp::Flush { .. } => "FLUSH",
        SendOp::BindMw(_) => "bind memory window",
        SendOp::LocalInv(_) => "local invalidate",
    }
}

impl Watch {
    /// The watch of a new queue pair, if somebody wants to see it.
    pub(super) fn new(
        links: &'static Links,
        device: usize,
        qpn: Qpn,
        qp_type: QpType,
    ) -> Option<Box<Self>> {
        if !links.needs_packets() {
            return None;
        }
        if let Some(trace) = &links.trace {
            let kind = format!("{qp_type:?}").to_uppercase();
            trace.name_track(qpn.get(), &format!("QP {:#08x} ({kind})", qpn.get()));
        }
        let faults = links.faults.as_ref().map(|plan| Box::new(QpFaults::new(plan, device, qpn)));
        Some(Box::new(Self { faults, ..Self::of(Some(links), qpn, qp_type) }))
    }

    fn of(links: Option<&'static Links>, qpn: Qpn, qp_type: QpType) -> Self {
        let (sends, receives) = (VecDeque::new(), VecDeque::new());
        Self {
            qpn,
            qp_type,
            links,
            receives,
            wait: Cell::new(None),
            sends,
            fresh: None,
            mtu: 256,
            faults: None,
        }
    }

    fn trace(&self) -> Option<&'static Trace> {
        self.links.and_then(|links| links.trace.as_ref())
    }

    /// The queue pair got this port, among those of all devices.
    pub(super) fn moves_to(&mut self, port: usize, now: anyverbs_proto::time::Time) {
        if let Some(faults) = &mut self.faults {
            faults.moves_to(port, now);
        }
    }

    /// Whether a rule of a script of faults holds something of the queue pair.
    pub(super) fn is_held_by_rule(&self, una: Psn, now: Time) -> bool {
        self.faults.as_ref().is_some_and(|faults| faults.holds(una, now))
    }

    /// Tells log, counters and trace of a fault that a script asked for.
    pub(super) fn injected(&mut self, transport: &Transport, port: usize, injected: &Injected) {
        let Injected { rule, what, .. } = injected;
        let Some(faults) = &mut self.faults else { return };
        let (number, said) = (faults.place.of_process, faults.is_said(injected));
        rule.fired.set();
        transport.core.count(port, Counter::InjectedFaults, 1);
        let qpn = self.qpn.get();
        let line =
            format!("injected fault ({}): queue pair {number} ({qpn:#08x}): {what}", rule.named());
        self.instant("fault", what, |args| args.text("rule", &rule.text).number("qp", number));
        // Each rule has a bound of its own.
        if let Some(is_last) = said {
            let further = if is_last { "; further ones are counted" } else { "" };
            transport.aftermath.log_each(Level::ERROR, format!("{line}{further}"));
        }
    }

    fn instant(&self, kind: &str, name: &str, args: impl FnOnce(Object) -> Object) {
        if let Some(trace) = self.trace() {
            trace.instant(self.qpn.get(), kind, name, &args(Object::default()));
        }
    }

    /// Begins a work request's span. Its name has the queue pair: readers make a track of each name.
    fn begin(&self, operation: &str, wr_id: u64, bytes: u32) -> Option<Span> {
        let trace = self.trace()?;
        let args = Object::default().text("operation", operation);
        let args = args.number("wr_id", wr_id).number("bytes", bytes);
        Some(trace.begin(self.qpn.get(), format!("QP {:#08x} {operation}", self.qpn.get()), &args))
    }

    fn end(&self, span: Option<&Span>, status: &str, bytes: Option<u32>) {
        if let (Some(trace), Some(span)) = (self.trace(), span) {
            let args = Object::default().text("status", status);
            let args = match bytes {
                Some(bytes) => args.number("bytes", bytes),
                None => args,
            };
            trace.end(self.qpn.get(), span, &args);
        }
    }

    /// A send is about to be posted at this place of the send queue.
    pub(super) fn posts_send(
        &mut self,
        wr: &SendWr<'_>,
        (position, now): (u32, impl FnOnce() -> Time),
        mtu: u32,
    ) {
        self.mtu = mtu;
        if let Some(faults) = &mut self.faults {
            faults.posts_send(position, now());
        }
        let len = wr.sges.iter().fold(0_u32, |len, sge| len.saturating_add(sge.len));
        let packets = match self.qp_type {
            QpType::Ud => 1,
            _ if wr.op.is_atomic() => 1,
            _ => len.div_ceil(mtu).max(1),
        };
        let (wr_id, op, span) = (wr.wr_id, wr.op, self.begin(name(&wr.op), wr.wr_id, len));
        self.sends.push_back(Posted { wr_id, op, len, position, packets, first: None, span });
    }

    /// It was not posted after all.
    pub(super) fn takes_back(&mut self) {
        if let Some(send) = self.sends.pop_back() {
            if let Some(faults) = &mut self.faults {
                faults.takes_back(send.position);
            }
            self.end(send.span.as_ref(), "not posted", None);
        }
    }

    /// A receive was posted.
    pub(super) fn posts_receive(&mut self, wr: &RecvWr<'_>) {
        let len = wr.sges.iter().fold(0_u32, |len, sge| len.saturating_add(sge.len));
        let span = self.begin("RECV", wr.wr_id, len);
        self.receives.push_back((wr.wr_id, span));
    }

    /// A completion was made. A send's is also that of all sends before it.
    pub(super) fn completed(&mut self, side: Side, wc: &Wc) {
        let status = wc.status.name();
        if !matches!(wc.status, WcStatus::Success | WcStatus::WrFlushErr) {
            self.instant("error", status, |args| {
                args.number("wr_id", wc.wr_id).number("vendor_err", wc.vendor_err)
            });
        }
        if side == Side::Recv {
            let is_first = self.receives.front().is_some_and(|(wr_id, _)| *wr_id == wc.wr_id);
            let span = match self.receives.pop_front().filter(|_| is_first) {
                Some((_, span)) => span,
                // The SRQ's.
                None => self.begin("RECV", wc.wr_id, wc.byte_len),
            };
            return self.end(span.as_ref(), status, Some(wc.byte_len));
        }
        while let Some(send) = self.sends.front() {
            let status = match wc.sq_count.wrapping_sub(send.position).cast_signed() {
                ..=0 => break,
                1 => status,
                _ => "unsignaled",
            };
            self.end(send.span.as_ref(), status, None);
            self.sends.pop_front();
        }
    }

    /// All work ends without a completion, and the next PSN is another.
    pub(super) fn ends(&mut self, status: &str) {
        let sends = std::mem::take(&mut self.sends).into_iter().map(|send| send.span);
        let receives = std::mem::take(&mut self.receives).into_iter().map(|(_, span)| span);
        for span in sends.chain(receives) {
            self.end(span.as_ref(), status, None);
        }
        self.fresh = None;
        self.wait.set(None);
        if let Some(faults) = &mut self.faults {
            faults.forget();
        }
    }

    /// Something was counted: a retry, a drop, an error. `age` tells how old the time is that the machine goes by.
    pub(super) fn counted(&self, counter: Counter, n: u64, age: impl FnOnce() -> Duration) {
        use Counter as C;
        if counter == C::RnrNakReceived {
            // As long as the machine waits, which began before this thread came here.
            let now = Moment::now();
            self.waits("waits for a receive (RNR)", now.before(age()));
        }
        let kind = match counter {
            C::Retransmitted
            | C::LocalAckTimeoutErr
            | C::RnrNakReceived
            | C::RnrNakSent
            | C::PacketSeqErr
            | C::ImpliedNakSeqErr
            | C::OutOfSequence
            | C::DuplicateRequest => "retry",
            C::RetryExceeded
            | C::RnrRetryExceeded
            | C::RespRemoteAccessErrors
            | C::RespXrcSrqErrors
            | C::ReqRemoteAccessErrors
            | C::ReqRemoteInvalidRequest => "error",
            counter if counter.name().starts_with("drop_") => "drop",
            _ => return,
        };
        self.instant(kind, counter.name(), |args| args.number("n", n));
    }

    /// A packet cannot leave since this moment.
    pub(super) fn waits(&self, why: &'static str, since: Moment) {
        if self.trace().is_some() && self.wait.get().is_none() {
            self.wait.set(Some((why, since)));
        }
    }

    /// An asynchronous event was raised.
    pub(super) fn raised(&self, event: QpEvent) {
        self.instant("event", &format!("{event:?}"), |args| args);
    }

    /// The send that a packet of a request belongs to, and whether the packet was sent before.
    fn send_of(&mut self, bth: &Bth) -> Option<(&Posted, bool)> {
        if !bth.opcode.is_request() {
            return None;
        }
        let known = self.sends.iter().position(|send| send.has(bth.psn));
        // Requests leave in the order in which they were posted.
        let begins =
            || self.sends.iter().position(|send| send.first.is_none() && !send.op.is_local());
        let at = known.or_else(begins)?;
        let is_again = self.is_again(bth);
        let send = &mut self.sends[at];
        send.first.get_or_insert(bth.psn);
        Some((send, is_again))
    }

    /// Describes a packet that is about to leave.
    pub(super) fn describe(&mut self, bth: &Bth) -> String {
        let qpn = self.qpn.get();
        match self.send_of(bth) {
            Some((Posted { wr_id, op, len, .. }, is_again)) => format!(
                "QP {qpn} ({qpn:#08x}), wr_id {wr_id} ({wr_id:#x}), {}, {len} bytes{}",
                name(op),
                if is_again { ", again" } else { "" },
            ),
            None => format!("QP {qpn} ({qpn:#08x})"),
        }
    }

    /// Tells the trace of a packet.
    pub(super) fn packet(&self, direction: &str, way: Way, headers: &Headers, bytes: usize) {
        let Headers { bth, aeth, .. } = headers;
        self.instant("packet", &bth.opcode.to_string(), |args| {
            let again = direction == "out" && self.is_again(bth);
            let args = args.text("direction", direction).text("way", way.name());
            let args = args.number("dest", bth.dest_qpn.get()).number("psn", bth.psn.get());
            let args = args.number("bytes", bytes as u64).flag("again", again);
            match aeth {
                Some(aeth) => args.text("says", &aeth.syndrome.to_string()),
                None => args,
            }
        });
    }

    pub(super) fn is_again(&self, bth: &Bth) -> bool {
        bth.opcode.is_request() && self.fresh.is_some_and(|fresh| bth.psn.since(fresh) < 0)
    }

    pub(super) fn note_sent(&mut self, Headers { bth, reth, .. }: &Headers) {
        if bth.opcode.is_request() && !self.is_again(bth) {
            // A READ has the PSNs of its answer.
            let packets = match (bth.opcode.operation, reth) {
                (Operation::ReadRequest, Some(reth)) => reth.len.div_ceil(self.mtu).max(1),
                _ => 1,
            };
            self.fresh = Some(bth.psn.plus(packets));
        }
    }

    /// A packet has left.
    pub(super) fn sent(
        &mut self,
        way: Way,
        av: &AddressVector,
        (headers, payload): (&Headers, &Payload<'_>),
        note: &str,
    ) {
        let Some(links) = self.links else { return };
        // It is requests that wait. Answers and ACKs leave all the same.
        if headers.bth.opcode.is_request()
            && let (Some((why, since)), Some(trace)) = (self.wait.take(), self.trace())
        {
            trace.lasted(self.qpn.get(), "wait", why, since);
        }
        self.packet("out", way, headers, payload.len());
        self.note_sent(headers);
        // Its port captures a datagram as it is.
        if way == Way::Udp || links.capture.is_none() {
            return;
        }
        let mut bytes = vec![0; payload.len()];
        if payload.copy_to(&links.core.mrs, &links.core.memory, &mut bytes).is_err() {
            // Its memory has gone since.
            return;
        }
        let from = Arrival {
            source: av.sgid,
            destination: av.dgid,
            traffic_class: av.traffic_class,
            hop_limit: av.hop_limit,
            flow_label: av.flow_label,
            ..Arrival::default()
        };
        record(links, (way, true), &from, (headers, &bytes), note);
    }

    /// A packet has come. A peer that is not watched sends long ones by rings, and ACKs with its requests: they are shown as the
    /// packets that they stand for.
    pub(crate) fn received(&self, by_ring: bool, arrival: &Arrival, packet: &Incoming<'_>) {
        let Some(links) = self.links.filter(|links| links.is_recorded()) else { return };
        let mut bytes = vec![0; packet.payload.len()];
        if packet.payload.read(&links.core.memory, &mut bytes).is_err() {
            return;
        }
        let way = match (by_ring, arrival.port) {
            (true, _) => Way::Ring,
            (false, 0) => Way::InProcess,
            (false, _) => Way::Udp,
        };
        let qpn = self.qpn.get();
        let show = |headers: &Headers, part: &[u8], how: &str| {
            self.packet("in", way, headers, part.len());
            if by_ring {
                let note = format!("QP {qpn} ({qpn:#08x}){how}");
                record(links, (way, false), arrival, (headers, part), &note);
            }
        };
        if let Some(psn) = packet.acks {
            let ack = Opcode::new(Service::Rc, Operation::Ack);
            let aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: 0 });
            let headers = Headers { aeth, ..Headers::new(Bth::new(ack, self.qpn, psn)) };
            show(&headers, &[], ", came with the request behind it");
        }
        // No other path MTU makes so many packets of it.
        let fits = |mtu: &usize| bytes.len().div_ceil(*mtu) == packet.packets as usize;
        match Mtu::ALL.map(|mtu| mtu.bytes() as usize).into_iter().find(fits) {
            Some(mtu) if packet.packets > 1 => {
                for (i, part) in bytes.chunks(mtu).enumerate() {
                    let is_last = i + 1 == packet.packets as usize;
                    show(&part_of(&packet.headers, i as u32, is_last), part, "");
                }
            }
            _ => show(&packet.headers, &bytes, ""),
        }
    }
}

/// The headers of packet `i` of those that a long one stands for.
fn part_of(long: &Headers, i: u32, is_last: bool) -> Headers {
    use Operation as O;
    let Opcode { service, operation } = long.bth.opcode;
    let [first, middle, last, only] = match operation {
        O::SendFirst | O::SendMiddle | O::SendLast | O::SendOnly => {
            [O::SendFirst, O::SendMiddle, O::SendLast, O::SendOnly]
        }
        O::SendLastImm | O::SendOnlyImm => {
            [O::SendFirst, O::SendMiddle, O::SendLastImm, O::SendOnlyImm]
        }
        O::SendLastInv | O::SendOnlyInv => {
            [O::SendFirst, O::SendMiddle, O::SendLastInv, O::SendOnlyInv]
        }
        O::WriteFirst | O::WriteMiddle | O::WriteLast | O::WriteOnly => {
            [O::WriteFirst, O::WriteMiddle, O::WriteLast, O::WriteOnly]
        }
        O::WriteLastImm | O::WriteOnlyImm => {
            [O::WriteFirst, O::WriteMiddle, O::WriteLastImm, O::WriteOnlyImm]
        }
        O::ReadResponseFirst
        | O::ReadResponseMiddle
        | O::ReadResponseLast
        | O::ReadResponseOnly => {
            [O::ReadResponseFirst, O::ReadResponseMiddle, O::ReadResponseLast, O::ReadResponseOnly]
        }
        other => [other; 4],
    };
    let begins = long.bth.opcode.starts_message();
    let ends = long.bth.opcode.ends_message();
    let operation = match (begins && i == 0, ends && is_last) {
        (true, true) => only,
        (true, false) => first,
        (false, true) => last,
        (false, false) => middle,
    };
    let bth = Bth {
        opcode: Opcode::new(service, operation),
        psn: long.bth.psn.plus(i),
        ack_req: long.bth.ack_req && is_last,
        solicited: long.bth.solicited && is_last,
        ..long.bth
    };
    Headers { bth, ..*long }
}

/// Writes a packet as it would be on a network.
fn record(
    links: &Links,
    (way, sent): (Way, bool),
    at: &Arrival,
    (headers, payload): (&Headers, &[u8]),
    note: &str,
) {
    let Some(capture) = &links.capture else { return };
    // The reason of a refusal has no place in its packet.
    let is_ack = headers.bth.opcode.operation == Operation::Ack;
    let payload = if is_ack { &[] } else { payload };
    let pad = Bth::pad_of(payload.len());
    let headers = Headers { bth: Bth { pad, ..headers.bth }, ..*headers };
    let head = headers.len();
    let mut bytes = vec![0; head + payload.len() + usize::from(pad) + ICRC_LEN];
    headers.emit(&mut bytes);
    bytes[head..head + payload.len()].copy_from_slice(payload);
    let (source, destination) = (at.source.to_ip(), at.destination.to_ip());
    let from_port = SOURCE_PORTS | headers.bth.dest_qpn.get() as u16 & !SOURCE_PORTS;
    let to_port = links.core.config.udp_port;
    let (covered, icrc) = bytes.split_at_mut(head + payload.len() + usize::from(pad));
    let flow = Flow::new(source, destination, from_port, to_port);
    icrc.copy_from_slice(&flow.compute(0, covered).to_le_bytes());
    let frame = Frame {
        sent,
        source: SocketAddr::new(source, from_port),
        destination: SocketAddr::new(destination, to_port),
        traffic_class: at.traffic_class,
        hop_limit: if at.hop_limit == 0 { 64 } else { at.hop_limit },
        flow_label: at.flow_label,
        id: 0,
        bytes: &bytes,
    };
    capture.record(way, &frame, Some(note));
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyverbs_proto::wire::reth::Reth;
    use anyverbs_proto::wr::{RemoteAddr, SendFlags, Sge};

    const AT: RemoteAddr = RemoteAddr { va: 0, rkey: 1 };

    fn watch() -> Watch {
        Watch::of(None, Qpn::new(17), QpType::Rc)
    }

    fn post(watch: &mut Watch, (wr_id, op, len): (u64, SendOp, u32), position: u32) {
        let sges = [Sge { len, ..Sge::default() }];
        let flags = SendFlags::empty();
        watch.posts_send(
            &SendWr { wr_id, op, flags, sges: &sges, ud: None, xrc_srqn: 0 },
            (position, Time::default),
            1024,
        );
    }

    fn bth(operation: Operation, psn: u32) -> Bth {
        Bth::new(Opcode::new(Service::Rc, operation), Qpn::new(18), Psn::new(psn))
    }

    #[test]
    fn a_packet_is_told_with_its_work_request() {
        let mut watch = watch();
        post(&mut watch, (1, SendOp::Write(AT), 3000), 0);
        post(&mut watch, (2, SendOp::LocalInv(3), 0), 1);
        post(&mut watch, (3, SendOp::Read(AT), 2048), 2);
        post(&mut watch, (4, SendOp::Send, 0), 3);
        let mut wr = |operation, psn| {
            let told = watch.describe(&bth(operation, psn));
            let reth = Some(Reth { va: 0, rkey: 1, len: 1024 });
            watch.note_sent(&Headers { reth, ..Headers::new(bth(operation, psn)) });
            let id = told.split_once("wr_id ").map(|(_, rest)| rest.split(' ').next().unwrap());
            (id.map(|id| id.parse().unwrap()), told.contains("again"))
        };
        use Operation as O;
        assert_eq!(wr(O::WriteFirst, 0xff_fffe), (Some(1), false));
        assert_eq!(wr(O::WriteMiddle, 0xff_ffff), (Some(1), false));
        assert_eq!(wr(O::WriteLast, 0), (Some(1), false));
        assert_eq!(wr(O::ReadRequest, 1), (Some(3), false));
        assert_eq!(wr(O::ReadRequest, 2), (Some(3), false), "a READ may be asked for in pieces");
        assert_eq!(wr(O::SendOnly, 3), (Some(4), false));
        assert_eq!(wr(O::ReadRequest, 2), (Some(3), true));
        assert_eq!(wr(O::WriteMiddle, 0xff_ffff), (Some(1), true));
        assert_eq!(wr(O::Ack, 0), (None, false));
    }

    #[test]
    fn a_completion_ends_all_sends_before_it() {
        let mut watch = watch();
        (0..4_u32).for_each(|i| post(&mut watch, (i.into(), SendOp::Send, 1), i.wrapping_sub(2)));
        watch.completed(Side::Recv, &Wc { sq_count: 9, ..Wc::default() });
        assert_eq!(watch.sends.len(), 4);
        watch.completed(Side::Send, &Wc { sq_count: 1, ..Wc::default() });
        assert_eq!(watch.sends.iter().map(|send| send.wr_id).collect::<Vec<_>>(), [3]);
        post(&mut watch, (5, SendOp::Send, 1), 2);
        watch.takes_back();
        assert_eq!(watch.sends.len(), 1);
    }

    #[test]
    fn a_long_packet_is_shown_as_those_that_it_stands_for() {
        use Operation as O;
        let parts = |operation, n| {
            let long = Headers::new(Bth { ack_req: true, ..bth(operation, 5) });
            let part = |i| part_of(&long, i, i + 1 == n).bth;
            (0..n)
                .map(|i| (part(i).opcode.operation, part(i).psn.get(), part(i).ack_req))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            parts(O::SendOnlyImm, 3),
            [(O::SendFirst, 5, false), (O::SendMiddle, 6, false), (O::SendLastImm, 7, true)]
        );
        assert_eq!(parts(O::WriteFirst, 2), [(O::WriteFirst, 5, false), (O::WriteMiddle, 6, true)]);
        assert_eq!(parts(O::WriteMiddle, 1), [(O::WriteMiddle, 5, true)]);
        assert_eq!(
            parts(O::ReadResponseOnly, 2),
            [(O::ReadResponseFirst, 5, false), (O::ReadResponseLast, 6, true)]
        );
        assert_eq!(parts(O::ReadResponseLast, 1), [(O::ReadResponseLast, 5, true)]);
    }
}
