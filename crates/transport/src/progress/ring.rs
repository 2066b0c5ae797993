//! Receiving from other processes of this host.
//!
//! Each packet is read into one place and handed to its queue pair from there. Its headers are remembered: the next one is
//! likely to be of the same kind.

use std::sync::Arc;

use anyverbs_links::shm::{Digest, Inbox, Received, ShortArrival};
use anyverbs_links::udp::Asked;
use anyverbs_net::shm::{Batch, Channel, Message, Poller};
use anyverbs_objects::base::Caller;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::payload::Data;
use anyverbs_proto::qp::{Arrival, Incoming};
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wire::bth::Bth;

use super::Driver;
use super::deliver::Source;
use super::receive::Deferred;
use crate::qp::arrivals::{Arrivals, reborrow};
use crate::qp::env::Call;
use crate::qp::{QpCell, State};

/// Bytes of one ring that are delivered before their place is given back to its writer.
const RING_BYTES: usize = 64 << 10;

/// Messages that are being taken out of one ring.
struct Intake<'a> {
    driver: &'static Driver,
    batch: Batch<'a>,
    channel: &'a Arc<Channel>,
    /// Slots of the writer and of this process.
    slots: (u8, u8),
    inbox: &'a mut Inbox,
    deferred: &'a mut Deferred,
    /// A message that was looked at and not taken.
    next: Option<Message<'a>>,
    /// Bytes of payload so far.
    taken: usize,
    packets: u64,
    bytes: u64,
}

impl Driver {
    /// Takes messages of other processes of this host, and returns their number. `last` is the queue pair of the last
    /// one.
    #[inline]
    pub(super) fn receive_ring(
        &'static self,
        poller: &mut Poller,
        (last, inbox): (&mut Option<Arc<QpCell>>, &mut Inbox),
        deferred: &mut Deferred,
        mut into: Option<&mut dyn Caller>,
    ) -> usize {
        poller.poll(|channel, batch| {
            let mut intake = Intake {
                driver: self,
                batch,
                channel,
                slots: (channel.slot(), self.core.slot),
                inbox,
                deferred,
                next: None,
                taken: 0,
                packets: 0,
                bytes: 0,
            };
            self.deliver_short(&mut intake, last, &mut into);
            self.deliver(&mut intake, last, reborrow(&mut into));
            if let Some(shm) = &self.links.shm {
                shm.traffic().note_received(intake.packets, intake.bytes);
            }
        })
    }
}

impl Intake<'_> {
    /// The next message, if it is a short SEND. It is not taken yet.
    #[inline]
    fn peek_short(&mut self) -> Option<ShortArrival> {
        if self.taken >= RING_BYTES {
            return None;
        }
        if self.next.is_none() {
            self.next = self.batch.next();
        }
        ShortArrival::read(self.next.as_ref()?, self.slots)
    }

    /// The payload of the next message.
    #[inline]
    fn payload(&self) -> Data<'static> {
        self.next.as_ref().map_or(Data::Bytes(&[]), |message| Data::Shared {
            addr: message.payload_ptr() as u64,
            len: message.payload_len(),
        })
    }

    /// Takes the next message.
    #[inline]
    fn take_short(&mut self) {
        let len = self.next.take().map_or(0, |message| message.payload_len());
        self.taken += len;
        self.packets += 1;
        self.bytes += (Bth::LEN + len) as u64;
    }
}

impl Driver {
    /// Gives short SENDs to their queue pairs as long as one follows the other and nothing is unusual. It does what
    /// [`deliver`](Self::deliver) would do, which takes all others.
    #[inline]
    fn deliver_short(
        &'static self,
        intake: &mut Intake<'_>,
        last: &mut Option<Arc<QpCell>>,
        into: &mut Option<&mut dyn Caller>,
    ) {
        let mut next = intake.peek_short();
        while let Some(mut arrival) = next.take() {
            let known = last.take().filter(|cell| cell.qpn == arrival.dest);
            let Some(cell) = known.or_else(|| self.transport.qps.find(arrival.dest)) else {
                return;
            };
            let mut state = cell.state.lock();
            if state.is_dead() {
                return;
            }
            let mut call = Call::new(&cell);
            let mut arrivals = Arrivals::new(&cell, reborrow(into));
            let State { machine, link, .. } = &mut *state;
            let mut any = false;
            // The general way takes an answer first.
            while link.is_from_peer(arrival.digest) && !link.same_host.lanes.has_answer() {
                let mut env = call.env_with(link, &mut arrivals);
                if !machine.receive_short_send(&arrival.send, intake.payload(), &mut env) {
                    break;
                }
                any = true;
                intake.take_short();
                next = intake.peek_short();
                match next {
                    Some(more) if more.dest == arrival.dest => arrival = more,
                    _ => break,
                }
            }
            if next.is_some_and(|next| next.dest == arrival.dest) {
                // The general way takes it.
                next = None;
            }
            machine.transmit_rest(&mut call.env_with(link, &mut arrivals));
            arrivals.end();
            call.settle(&mut state);
            drop(state);
            *last = Some(cell);
            if !any {
                return;
            }
        }
    }
}

impl Source for Intake<'_> {
    const HAS_LANES: bool = true;

    /// Reads messages up to the next packet for a queue pair.
    #[inline]
    fn advance(&mut self) -> bool {
        let core = self.driver.core;
        while self.taken < RING_BYTES {
            let message = self.next.take().or_else(|| self.batch.next());
            let Some(message) = message else { return false };
            self.taken += message.payload_len();
            match self.inbox.read(&message, self.slots, |source| core.gids.is_of_host(source)) {
                Some(Received::Packet) => {
                    let bth = &self.inbox.packet.headers.bth;
                    if matches!(bth.dest_qpn, Qpn::GSI | Qpn::MULTICAST) {
                        // These come by UDP.
                        core.count(Counter::DropMalformed, 1);
                        continue;
                    }
                    self.packets += 1;
                    self.bytes += (self.inbox.headers_len + message.payload_len()) as u64;
                    if bth.opcode.is_one_sided() {
                        self.driver.worker.note_one_sided();
                    }
                    return true;
                }
                Some(Received::Credit(packet)) => {
                    let Arrival { source, destination, .. } = self.inbox.arrival;
                    let (from, to_us) = (source.to_ip(), destination.to_ip());
                    let asked = Asked { packet, from, scope_id: 0, to_us, by_ring: true };
                    self.driver.take_credit(asked, self.deferred);
                }
                Some(Received::Lane(call)) => {
                    self.deferred.lanes.push((Arc::clone(self.channel), call));
                }
                None => core.count(Counter::DropMalformed, 1),
            }
        }
        false
    }

    #[inline]
    fn packet(&self) -> (&Arrival, &Incoming<'_>) {
        (&self.inbox.arrival, &self.inbox.packet)
    }

    #[inline]
    fn digest(&self) -> Option<Digest> {
        self.inbox.digest
    }
}
