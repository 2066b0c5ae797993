//! The watch of a queue pair tells a capture what it does. It is absent unless somebody wants to see it.
//!
//! [`DeviceEnv`](super::env::DeviceEnv) tells of packets that leave, [`Poster`](super::Poster) of work requests, and the receiving thread
//! of packets from rings. Datagrams are captured by their port, where damaged and unclaimed ones are seen as well.

use std::collections::VecDeque;
use std::net::SocketAddr;

use anyverbs_links::Links;
use anyverbs_proto::env::Side;
use anyverbs_proto::payload::Payload;
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::qp::{Arrival, Incoming};
use anyverbs_proto::types::{Psn, Qpn};
use anyverbs_proto::wc::Wc;
use anyverbs_proto::wire::aeth::{Aeth, Syndrome};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::icrc::Flow;
use anyverbs_proto::wire::opcode::{Opcode, Operation, Service};
use anyverbs_proto::wire::packet::{Headers, ICRC_LEN};
use anyverbs_proto::wr::{AddressVector, SendOp, SendWr};
use anyverbs_record::capture::{Frame, Way};

/// The source ports that RoCEv2 suggests.
const SOURCE_PORTS: u16 = 0xc000;

/// A queue pair that is watched, under its lock.
#[derive(Debug)]
pub(crate) struct Watch {
    qpn: Qpn,
    qp_type: QpType,
    /// Sends that are not complete, the oldest first.
    sends: VecDeque<Posted>,
    /// The PSN after the highest that was sent.
    fresh: Option<Psn>,
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
    pub(super) fn new(links: &Links, qpn: Qpn, qp_type: QpType) -> Option<Box<Self>> {
        links
            .capture
            .is_some()
            .then(|| Box::new(Self { qpn, qp_type, sends: VecDeque::new(), fresh: None }))
    }

    /// A send is about to be posted at this place of the send queue.
    pub(super) fn posts(&mut self, wr: &SendWr<'_>, position: u32, mtu: u32) {
        let len = wr.sges.iter().fold(0_u32, |len, sge| len.saturating_add(sge.len));
        let packets = match self.qp_type {
            QpType::Ud => 1,
            _ if wr.op.is_atomic() => 1,
            _ => len.div_ceil(mtu.max(1)).max(1),
        };
        let (wr_id, op) = (wr.wr_id, wr.op);
        self.sends.push_back(Posted { wr_id, op, len, position, packets, first: None });
    }

    /// It was not posted after all.
    pub(super) fn takes_back(&mut self) {
        self.sends.pop_back();
    }

    /// A completion was made. A send's is also that of all sends before it.
    pub(super) fn completed(&mut self, side: Side, wc: &Wc) {
        if side == Side::Send {
            let is_done = |send: &Posted| wc.sq_count.wrapping_sub(send.position).cast_signed() > 0;
            while self.sends.front().is_some_and(is_done) {
                self.sends.pop_front();
            }
        }
    }

    /// The queue pair was reset: its requests are forgotten, and its next PSN is another.
    pub(super) fn was_reset(&mut self) {
        (self.sends, self.fresh) = (VecDeque::new(), None);
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
        let is_again = self.fresh.is_some_and(|fresh| bth.psn.since(fresh) < 0);
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

    fn note_sent(&mut self, bth: &Bth) {
        if bth.opcode.is_request() && self.fresh.is_none_or(|fresh| bth.psn.since(fresh) >= 0) {
            self.fresh = Some(bth.psn.plus(1));
        }
    }

    /// A packet has left.
    pub(super) fn sent(
        &mut self,
        links: &Links,
        way: Way,
        av: &AddressVector,
        (headers, payload): (&Headers, &Payload<'_>),
        note: &str,
    ) {
        self.note_sent(&headers.bth);
        if way == Way::Udp {
            // Its port captures it as it is.
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

    /// A packet has come by a ring. A peer that is not watched sends long ones, and ACKs with its requests: they are shown as the
    /// packets that they stand for.
    pub(crate) fn received_by_ring(
        &self,
        links: &Links,
        arrival: &Arrival,
        packet: &Incoming<'_>,
        mtu: u32,
    ) {
        let (qpn, mtu) = (self.qpn.get(), mtu as usize);
        let note = format!("QP {qpn} ({qpn:#08x})");
        let mut bytes = vec![0; packet.payload.len()];
        if packet.payload.read(&links.core.memory, &mut bytes).is_err() {
            return;
        }
        if let Some(psn) = packet.acks {
            let ack = Opcode::new(Service::Rc, Operation::Ack);
            let aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: 0 });
            let headers = Headers { aeth, ..Headers::new(Bth::new(ack, self.qpn, psn)) };
            let note = format!("{note}, came with the request behind it");
            record(links, (Way::Ring, false), arrival, (&headers, &[]), &note);
        }
        if packet.packets <= 1 {
            return record(links, (Way::Ring, false), arrival, (&packet.headers, &bytes), &note);
        }
        let last = packet.packets - 1;
        for (i, part) in bytes.chunks(mtu).enumerate() {
            let i = i as u32;
            let headers = part_of(&packet.headers, i, i == last);
            record(links, (Way::Ring, false), arrival, (&headers, part), &note);
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
    use anyverbs_proto::wr::{RemoteAddr, SendFlags, Sge};

    const AT: RemoteAddr = RemoteAddr { va: 0, rkey: 1 };

    fn watch() -> Watch {
        Watch { qpn: Qpn::new(17), qp_type: QpType::Rc, sends: VecDeque::new(), fresh: None }
    }

    fn post(watch: &mut Watch, (wr_id, op, len): (u64, SendOp, u32), position: u32) {
        let sges = [Sge { len, ..Sge::default() }];
        let flags = SendFlags::empty();
        watch.posts(
            &SendWr { wr_id, op, flags, sges: &sges, ud: None, xrc_srqn: 0 },
            position,
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
            watch.note_sent(&bth(operation, psn));
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
