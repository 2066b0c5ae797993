//! Explains failures: packets that nobody takes to their senders, refusals that come, and completion queues that have overrun.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use anyverbs_causes::Cause;
use anyverbs_links::shm::Digest;
use anyverbs_net::Datagram;
use anyverbs_objects::Repeats;
use anyverbs_objects::cq::CqCell;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::payload::Data;
use anyverbs_proto::qp::{Arrival, Incoming};
use anyverbs_proto::types::Gid;
use anyverbs_proto::wire::aeth::{Aeth, Syndrome};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::reason::ReasonPacket;

use super::Driver;
use super::deliver::Source;
use crate::qp::State;
use crate::qp::transport::Overrun;

/// A reason that came ahead of a NAK, or alone.
#[derive(Clone, Copy)]
pub(super) struct ReasonAhead<'d> {
    pub(super) arrival: Arrival,
    pub(super) packet: ReasonPacket,
    /// The bytes of the reason.
    pub(super) bytes: &'d [u8],
}

impl<'d> ReasonAhead<'d> {
    /// No NAK comes behind it: the peer has given up a message, since there was no receive for it.
    pub(super) fn is_given_up(&self) -> bool {
        self.packet.told.cause == Cause::NoReceive
    }

    /// Gives it to the packet behind, if that is its NAK and comes from the same peer.
    pub(super) fn join(&self, arrival: &Arrival, packet: &mut Incoming<'d>) {
        let headers = &packet.headers;
        let is_nak =
            |aeth: Aeth| matches!(aeth.syndrome, Syndrome::Nak(_) | Syndrome::RnrNak { .. });
        let is_nak = headers.aeth.is_some_and(is_nak);
        if is_nak
            && (headers.bth.dest_qpn, headers.bth.psn) == (self.packet.dest, self.packet.psn)
            && (arrival.source, arrival.destination)
                == (self.arrival.source, self.arrival.destination)
            && packet.payload.is_empty()
        {
            packet.payload = Data::Bytes(self.bytes);
        }
    }
}

impl Driver {
    /// A packet came for a queue pair that is not here.
    #[cold]
    pub(super) fn drop_unclaimed<S: Source>(&self, source: &S) {
        let (arrival, packet) = source.packet();
        let bth = &packet.headers.bth;
        let device = match source.digest() {
            // It came from this host, and its addresses are not in it.
            Some(_) => 0,
            None => self.core.gids.port_of(arrival.destination, arrival.interface),
        };
        self.core.count(device, Counter::DropNoQp, 1);
        if bth.opcode.is_response() {
            let of_udp = || Digest::new(arrival.source, arrival.destination);
            let from = source.digest().unwrap_or_else(of_udp);
            self.transport.aftermath.note_stray(from, bth.psn, bth.dest_qpn);
        }
        self.tell_why(arrival, bth, Cause::PeerHasNoQp);
        self.say_unclaimed(arrival, bth);
    }

    /// Says once of each number that its sender is about to give up. A sender can ask about many: they share what a second has of lines.
    fn say_unclaimed(&self, arrival: &Arrival, bth: &Bth) {
        static ASKED: Repeats = Repeats::new();
        if !is_question(bth) || ASKED.count(bth.dest_qpn.get().into()) != Some(1) {
            return;
        }
        let from = match arrival.source.is_zero() {
            true => "this host".to_owned(),
            false => arrival.source.to_ip().to_string(),
        };
        self.transport.aftermath.log(
            self.core.now(),
            format!(
                "packets from {from} for queue pair {:#08x} are dropped: this process has no queue pair of that number; \
                 see `anyverbs explain {}`",
                bth.dest_qpn.get(),
                Cause::PeerHasNoQp
            ),
        );
    }

    /// A peer says that it has given up a message. No queue pair is locked here. The caller does what follows
    /// ([`after_unlock`](Self::after_unlock)) once it has released the receive path.
    #[cold]
    pub(super) fn take_given_up(&'static self, reason: &ReasonAhead<'_>) {
        let ReasonAhead { arrival, packet, .. } = reason;
        self.with_qp(packet.dest, |State { machine, link, .. }, call| {
            machine.note_given_up(arrival, packet, &mut call.env(link));
        });
    }

    /// A datagram that came for a process of this host which has ended: if it asks for the reason, this is it.
    #[cold]
    pub(super) fn answer_for_dead(&self, datagram: &Datagram<'_>) {
        let gid = |ip: IpAddr| Gid::from(ip.to_canonical());
        let arrival = Arrival {
            source: gid(datagram.source.ip()),
            destination: gid(datagram.destination),
            interface: match datagram.source {
                SocketAddr::V6(source) => source.scope_id(),
                SocketAddr::V4(_) => 0,
            },
            port: datagram.source.port(),
            ..Arrival::default()
        };
        if let Some(Ok(bth)) = datagram.bytes.first_chunk().map(Bth::parse) {
            self.tell_why(&arrival, &bth, Cause::PeerEnded);
        }
    }

    fn tell_why(&self, arrival: &Arrival, bth: &Bth, cause: Cause) {
        if is_question(bth) {
            self.transport.tell_why(self.core.now(), arrival, bth.psn, cause);
        }
    }

    /// Says of each completion queue that has overrun whose completion was lost, and how much feeds it.
    #[cold]
    pub(super) fn overrun_lines(&self, overruns: &[Overrun]) -> Vec<String> {
        let mut lines = Vec::new();
        for overrun in overruns {
            // Flushed work overruns it again. The program may have ended the queue pair, or moved it to ERR.
            let Some(cq) = overrun.queue().filter(|cq| cq.is_overrun_to_be_said()) else {
                continue;
            };
            let is_it = |other: &Option<Arc<CqCell>>| {
                other.as_ref().is_some_and(|other| overrun.is_of(other))
            };
            let (mut queue_pairs, mut requests) = (0, 0);
            let mut srqs =
                self.transport.xrc_srqs.filter(|srq| srq.completes_in(|cq| overrun.is_of(cq)));
            for cell in self.transport.qps.filter(|_| true) {
                let (sends, receives) = (is_it(&cell.send_cq), is_it(&cell.recv_cq));
                let cap = cell.state.lock().machine.init().cap;
                queue_pairs += u32::from(sends || receives);
                requests += if sends { u64::from(cap.max_send_wr) } else { 0 };
                match &cell.srq {
                    _ if !receives => {}
                    None => requests += u64::from(cap.max_recv_wr),
                    Some(srq) if srqs.iter().any(|other| Arc::ptr_eq(srq, other)) => {}
                    Some(srq) => srqs.push(Arc::clone(srq)),
                }
            }
            requests += srqs.iter().map(|srq| u64::from(srq.max_wr())).sum::<u64>();
            lines.push(format!(
                "a completion queue of {} entries has overrun: a completion of queue pair {:#08x} found no room; the queues \
                 that complete in it hold {requests} requests, of {queue_pairs} queue pair{}{}; see `anyverbs explain {}`",
                cq.capacity(),
                overrun.qpn.get(),
                if queue_pairs == 1 { "" } else { "s" },
                match srqs.len() {
                    0 => String::new(),
                    1 => " and 1 SRQ".to_owned(),
                    n => format!(" and {n} SRQs"),
                },
                Cause::CqOverrun
            ));
        }
        lines
    }
}

/// The sender of a request wants to know why it is not answered.
fn is_question(bth: &Bth) -> bool {
    bth.reserved & Bth::ASKS != 0 && bth.opcode.is_request()
}

#[cfg(test)]
mod tests {
    use anyverbs_proto::reason::Told;
    use anyverbs_proto::types::{Psn, Qpn};
    use anyverbs_proto::wire::aeth::{Aeth, NakCode};
    use anyverbs_proto::wire::opcode::{Opcode, Operation, Service};
    use anyverbs_proto::wire::packet::Headers;
    use anyverbs_proto::wire::reason::ReasonPacket;

    use super::*;

    #[test]
    fn a_forged_reason_does_not_go_with_a_nak() {
        let (dest, psn) = (Qpn::new(0x03_0001), Psn::new(7));
        let gids = |source| (Gid([source; 16]), Gid([9; 16]));
        let arrival = |source| {
            let (source, destination) = gids(source);
            Arrival { source, destination, ..Arrival::default() }
        };
        let told = Told { cause: Cause::RkeyUnknown, value: 0 };
        let bytes = told.to_bytes();
        let joins = |reason: ReasonPacket, from, syndrome| {
            let opcode = Opcode::new(Service::Rc, Operation::Ack);
            let mut headers = Headers::new(Bth::new(opcode, dest, psn));
            headers.aeth = Some(Aeth { syndrome, msn: 0 });
            let mut nak = Incoming { headers, ..Incoming::default() };
            let ahead = ReasonAhead { arrival: arrival(from), packet: reason, bytes: &bytes };
            ahead.join(&arrival(1), &mut nak);
            !nak.payload.is_empty()
        };
        let (good, nak) = (ReasonPacket { dest, psn, told }, Syndrome::Nak(NakCode::RemoteAccess));
        assert!(joins(good, 1, nak));
        assert!(!joins(good, 2, nak), "from another address");
        assert!(!joins(ReasonPacket { dest: Qpn::new(0x03_0002), ..good }, 1, nak));
        assert!(!joins(ReasonPacket { psn: psn.plus(1), ..good }, 1, nak));
        assert!(!joins(good, 1, Syndrome::ACK));
    }
}
