//! Receiving from other processes of this host.
//!
//! Each packet is read into one place and handed to its queue pair from there. Its headers are remembered: the next one is
//! likely to be of the same kind.

use std::sync::Arc;

use anyverbs_links::shm::{Digest, Inbox, Received};
use anyverbs_links::udp::Asked;
use anyverbs_net::shm::{Batch, Channel, Poller};
use anyverbs_objects::base::Caller;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::qp::{Arrival, Incoming};
use anyverbs_proto::types::Qpn;

use super::Driver;
use super::deliver::Source;
use super::receive::Deferred;
use crate::qp::QpCell;
use crate::qp::arrivals::reborrow;

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
    /// Bytes of payload so far.
    taken: usize,
    /// Packets and bytes that are not counted yet.
    packets: u64,
    bytes: u64,
    /// Whether there are several devices, which count apart.
    apart: bool,
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
                taken: 0,
                packets: 0,
                bytes: 0,
                apart: self.core.counters.len() > 1,
            };
            self.deliver(&mut intake, last, reborrow(&mut into));
            if let Some(shm) = &self.links.shm {
                shm.traffic().note_received(0, intake.packets, intake.bytes);
            }
        })
    }
}

impl Intake<'_> {
    /// Counts what is read for a device, but for the present packet if `more`: that is another's.
    #[cold]
    fn count_for(&mut self, device: u8, more: bool) {
        let present = self.inbox.headers_len + self.inbox.packet.payload.len();
        let left = if more { (1, present as u64) } else { (0, 0) };
        if let Some(shm) = &self.driver.links.shm {
            shm.traffic().note_received(device, self.packets - left.0, self.bytes - left.1);
        }
        (self.packets, self.bytes) = left;
    }
}

impl Source for Intake<'_> {
    const HAS_LANES: bool = true;

    /// Reads messages up to the next packet for a queue pair.
    #[inline]
    fn advance(&mut self) -> bool {
        let core = self.driver.core;
        while self.taken < RING_BYTES {
            let Some(message) = self.batch.next() else { return false };
            self.taken += message.payload_len();
            match self.inbox.read(&message, self.slots, |source| core.gids.is_of_host(source)) {
                Some(Received::Packet) => {
                    let bth = &self.inbox.packet.headers.bth;
                    if matches!(bth.dest_qpn, Qpn::GSI | Qpn::MULTICAST) {
                        // These come by UDP.
                        core.count_for_none(Counter::DropMalformed, 1);
                        continue;
                    }
                    let len = self.inbox.packet.payload.len();
                    // Its payload may have to be fetched.
                    self.taken += len - message.payload_len();
                    self.packets += 1;
                    self.bytes += (self.inbox.headers_len + len) as u64;
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
                None => core.count_for_none(Counter::DropMalformed, 1),
            }
        }
        false
    }

    #[inline]
    fn end_run(&mut self, device: u8, more: bool) {
        if self.apart {
            self.count_for(device, more);
        }
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
