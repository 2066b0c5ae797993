//! Receiving from other processes of this host.
//!
//! Each packet is read into one place and handed to its queue pair from there. Consecutive ones for one queue pair come
//! under one hold of its lock, and their completions under one of the completion queue's. Queue pair and headers are
//! remembered: the next message is likely to be for the same one, and of the same kind.

use std::sync::Arc;

use anyverbs_links::pace::Probe;
use anyverbs_links::shm::{Inbox, Received};
use anyverbs_links::udp::Asked;
use anyverbs_net::shm::{Batch, Poller};
use anyverbs_proto::counters::Counter;
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::types::Qpn;

use super::Driver;
use super::deliver::end_target_batch;
use crate::qp::arrivals::Arrivals;
use crate::qp::env::Call;
use crate::qp::{QpCell, State};

/// Bytes of one ring that are delivered before their place is given back to its writer.
const RING_BYTES: usize = 64 << 10;

/// Messages that are being taken out of one ring.
struct Intake<'a> {
    batch: Batch<'a>,
    taken: usize,
    packets: u64,
    bytes: u64,
}

impl Driver {
    /// Takes messages of other processes of this host, and returns their number. `last` is the queue pair of the last
    /// one.
    #[inline]
    pub(super) fn receive_shm(
        &'static self,
        poller: &mut Poller,
        (last, inbox): (&mut Option<Arc<QpCell>>, &mut Inbox),
        probes: &mut Vec<Asked>,
        resume: &mut Vec<Qpn>,
    ) -> usize {
        poller.poll(|_, batch| {
            let mut intake = Intake { batch, taken: 0, packets: 0, bytes: 0 };
            self.deliver_ring(&mut intake, last, inbox, probes, resume);
            if let Some(shm) = &self.links.shm {
                shm.traffic().note_received(intake.packets, intake.bytes);
            }
        })
    }

    fn deliver_ring(
        &'static self,
        intake: &mut Intake<'_>,
        last: &mut Option<Arc<QpCell>>,
        inbox: &mut Inbox,
        probes: &mut Vec<Asked>,
        resume: &mut Vec<Qpn>,
    ) {
        let mut more = self.next_packet(intake, inbox, probes, resume);
        while more {
            let qpn = inbox.packet.headers.bth.dest_qpn;
            let known = last.take().filter(|cell| cell.qpn == qpn);
            let Some(cell) = known.or_else(|| self.transport.qps.find(qpn)) else {
                self.core.count(Counter::DropNoQp, 1);
                more = self.next_packet(intake, inbox, probes, resume);
                continue;
            };
            let mut state = cell.state.lock();
            if state.is_dead() {
                drop(state);
                // Its number may be another's by now.
                *last = self.transport.qps.find(qpn).filter(|other| !Arc::ptr_eq(other, &cell));
                if last.is_none() {
                    self.core.count(Counter::DropNoQp, 1);
                    more = self.next_packet(intake, inbox, probes, resume);
                }
                continue;
            }
            let mut call = Call::new(&cell);
            let mut arrivals = Arrivals::new(&cell);
            let is_target = cell.qp_type == QpType::XrcRecv;
            loop {
                let (arrival, packet) = (&inbox.arrival, &inbox.packet);
                if !is_target
                    || !self
                        .transport
                        .sharing()
                        .is_elsewhere(&cell, &mut state, &mut call, arrival, packet)
                {
                    let State { machine, link, .. } = &mut *state;
                    machine.receive(arrival, packet, &mut call.env_with(link, &mut arrivals));
                }
                more = self.next_packet(intake, inbox, probes, resume);
                if !more || inbox.packet.headers.bth.dest_qpn != qpn {
                    break;
                }
            }
            arrivals.end();
            if is_target {
                end_target_batch(&mut state, &mut call);
            }
            call.settle(&mut state);
            drop(state);
            *last = Some(cell);
        }
    }

    /// Reads messages up to the next packet for a queue pair. False if there is none.
    #[inline]
    fn next_packet(
        &self,
        intake: &mut Intake<'_>,
        inbox: &mut Inbox,
        probes: &mut Vec<Asked>,
        resume: &mut Vec<Qpn>,
    ) -> bool {
        while intake.taken < RING_BYTES {
            let Some(message) = intake.batch.next() else { return false };
            intake.taken += message.payload_len();
            match inbox.read(&message, |source| self.core.gids.is_of_host(source)) {
                Some(Received::Packet) => {
                    let bth = &inbox.packet.headers.bth;
                    if bth.dest_qpn == Qpn::GSI {
                        // These come by UDP.
                        self.core.count(Counter::DropMalformed, 1);
                        continue;
                    }
                    intake.packets += 1;
                    intake.bytes += (inbox.headers_len + message.payload_len()) as u64;
                    if bth.opcode.is_one_sided() {
                        self.worker.note_one_sided();
                    }
                    return true;
                }
                Some(Received::Credit(packet)) => {
                    let (source, to_us) = (inbox.arrival.source, inbox.arrival.destination);
                    let (from, to_us) = (source.to_ip(), to_us.to_ip());
                    if packet.is_probe {
                        probes.push(Asked { packet, from, scope_id: 0, to_us, by_shm: true });
                    } else {
                        let Probe { bytes, messages } = packet.counts;
                        self.links.paths.echo(from, packet.from, bytes, messages, resume);
                    }
                }
                None => self.core.count(Counter::DropMalformed, 1),
            }
        }
        false
    }
}
