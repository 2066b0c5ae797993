//! Explains failures: silent queue pairs to the devices of their peers, and completion queues that have overrun.

use std::net::SocketAddr;
use std::sync::Arc;

use anyverbs_causes::Cause;
use anyverbs_links::route::Outbox;
use anyverbs_links::why::WhyPacket;
use anyverbs_net::Datagram;
use anyverbs_objects::cq::CqCell;
use anyverbs_proto::env::Question;
use anyverbs_proto::payload::Data;
use anyverbs_proto::qp::attr::QpState;
use anyverbs_proto::qp::{Arrival, Incoming};
use anyverbs_proto::reason::Told;
use anyverbs_proto::types::{Gid, Psn, Qpn};
use anyverbs_proto::wire::aeth::Syndrome;
use anyverbs_proto::wire::packet::ICRC_LEN;
use anyverbs_proto::wr::AddressVector;

use super::Driver;
use crate::qp::QpCell;
use crate::qp::transport::Overrun;

/// Tells whether a reason answers a question. Other reasons precede a NAK.
pub(super) fn is_answer(told: Told) -> bool {
    told.cause.number() / 100 == 12
}

/// A reason that came ahead of a NAK.
#[derive(Clone, Copy)]
pub(super) struct ReasonAhead<'d> {
    pub(super) arrival: Arrival,
    pub(super) dest: Qpn,
    pub(super) psn: Psn,
    pub(super) bytes: &'d [u8],
}

impl<'d> ReasonAhead<'d> {
    /// Gives it to the packet behind, if that is its NAK and comes from the same peer.
    pub(super) fn join(&self, arrival: &Arrival, packet: &mut Incoming<'d>) {
        let headers = &packet.headers;
        let is_nak = headers.aeth.is_some_and(|aeth| matches!(aeth.syndrome, Syndrome::Nak(_)));
        if is_nak
            && (headers.bth.dest_qpn, headers.bth.psn) == (self.dest, self.psn)
            && (arrival.source, arrival.destination)
                == (self.arrival.source, self.arrival.destination)
            && packet.payload.is_empty()
        {
            packet.payload = Data::Bytes(self.bytes);
        }
    }
}

impl Driver {
    /// Answers questions and takes answers. No queue pair is locked.
    #[cold]
    pub(super) fn explain(&'static self, whys: &mut Vec<(Arrival, WhyPacket)>) {
        let mut out = Outbox::default();
        for (arrival, packet) in whys.drain(..) {
            match packet {
                WhyPacket::Question(mut question) => {
                    question.av.scope_id = arrival.interface;
                    if let Some(told) = self.reason_of_silence(&question) {
                        self.tell(&mut out, &question, told);
                    }
                }
                WhyPacket::Reason { dest, told, .. } => {
                    let Some(cell) = self.transport.qps.find(dest) else { continue };
                    let mut state = cell.state.lock();
                    if arrival.is_from(&state.machine.attr().av) {
                        state.machine.note_answer(told);
                    }
                }
            }
        }
        out.flush(self.links);
    }

    /// A datagram that came for a process of this host which has ended: if it asks for the reason, this is it.
    #[cold]
    pub(super) fn answer_for_dead(&self, datagram: &Datagram<'_>) {
        let bytes = &datagram.bytes[..datagram.bytes.len() - ICRC_LEN];
        let gid = |ip: std::net::IpAddr| Gid::from(ip.to_canonical());
        let (from, to) = (gid(datagram.source.ip()), gid(datagram.destination));
        if let Some(WhyPacket::Question(mut question)) = WhyPacket::parse(bytes, from, to) {
            if let SocketAddr::V6(source) = datagram.source {
                question.av.scope_id = source.scope_id();
            }
            let mut out = Outbox::default();
            self.tell(&mut out, &question, Told { cause: Cause::PeerEnded, value: 0 });
            out.flush(self.links);
        }
    }

    fn tell(&self, out: &mut Outbox, question: &Question, told: Told) {
        let Question { av, from, .. } = question;
        let back = AddressVector { sgid: av.dgid, dgid: av.sgid, hop_limit: 64, ..*av };
        let packet = WhyPacket::Reason { dest: *from, psn: Psn::default(), told };
        out.explain(self.links, &back, *from, &packet);
    }

    /// The reason why a queue pair does not answer another one. Both ends log a difference between them, this one once.
    fn reason_of_silence(&'static self, question: &Question) -> Option<Told> {
        let nobody = Some(Told { cause: Cause::PeerHasNoQp, value: 0 });
        let Some(cell) = self.transport.qps.find(question.dest) else { return nobody };
        let mut state = cell.state.lock();
        if state.is_dead() {
            return nobody;
        }
        let (told, line) = state.machine.answer_to(question)?;
        if let Some(line) = line {
            self.transport.overruns.log(self.core.now(), line);
        }
        Some(told)
    }

    /// Says of each completion queue that has overrun whose completion was lost, and how much feeds it.
    #[cold]
    pub(super) fn overrun_lines(&self, overruns: &[Overrun]) -> Vec<String> {
        let mut seen: Vec<Arc<CqCell>> = Vec::new();
        let mut lines = Vec::new();
        for overrun in overruns {
            let Some(loser) = self.transport.qps.find(overrun.qpn) else { continue };
            if loser.state.lock().machine.state() == QpState::Err {
                // Flushed work has overrun it again.
                continue;
            }
            let of = |cell: &QpCell| {
                let cqs = [&cell.send_cq, &cell.recv_cq]
                    .map(|cq| cq.as_ref().filter(|cq| overrun.is_of(cq)));
                cqs.map(|cq| cq.cloned())
            };
            let Some(cq) = of(&loser).into_iter().flatten().next() else { continue };
            if seen.iter().any(|other| Arc::ptr_eq(other, &cq)) {
                continue;
            }
            let (mut queue_pairs, mut requests) = (0, 0);
            for cell in self.transport.qps.filter(|_| true) {
                let [send, recv] = of(&cell).map(|cq| cq.is_some());
                let cap = cell.state.lock().machine.init().cap;
                queue_pairs += u32::from(send || recv);
                requests += if send { u64::from(cap.max_send_wr) } else { 0 };
                requests += if recv { u64::from(cap.max_recv_wr) } else { 0 };
            }
            lines.push(format!(
                "a completion queue of {} entries has overrun: a completion of queue pair {:#08x} found no room; the queues \
                 of its {queue_pairs} queue pairs hold {requests} requests; see `anyverbs explain {}`",
                cq.capacity(),
                overrun.qpn.get(),
                Cause::CqOverrun
            ));
            seen.push(cq);
        }
        lines
    }
}
