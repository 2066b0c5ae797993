//! Messages that a call has put into a ring.

use std::mem;
use std::sync::Arc;

use anyverbs_net::shm::{Channel, Committed, Sender};
use anyverbs_proto::mr::LastLocal;
use anyverbs_proto::types::Psn;

use super::message::{RIDER, RIDES};
use super::{Peer, SHOW_AFTER};
use crate::Links;

/// Messages that are committed to a ring and not shown to its reader. The ring stays locked from the first message on.
#[derive(Debug, Default)]
pub struct Unflushed {
    sender: Option<Sender>,
    bytes: usize,
    /// The last message, if an ACK of its queue pair may go along.
    carrier: Option<Committed>,
    /// Packets and bytes that are to be counted.
    packets: u64,
    counted: u64,
    /// ACKs that they carry.
    acks: u64,
    /// The region of the last element that was sent, while the ring is locked.
    region: LastLocal<'static>,
    /// The reference of the last sender, for the next one.
    spare: Spare,
}

/// A reference to a channel that its queue pair has sent by and is likely to send by again: counting one costs as much as a
/// lock.
#[derive(Debug, Default)]
pub struct Spare(Option<Arc<Channel>>);

impl Unflushed {
    #[inline]
    pub(crate) fn flush(&mut self, links: &Links) {
        if let Some(mut sender) = self.sender.take() {
            sender.flush();
            self.end(sender, links);
        }
    }

    /// The counting happens while the ring is locked.
    #[inline]
    fn end(&mut self, sender: Sender, links: &Links) {
        if let Some(shm) = &links.shm {
            let (packets, bytes) = (mem::take(&mut self.packets), mem::take(&mut self.counted));
            let acks = mem::take(&mut self.acks);
            shm.traffic().note_sent(sender.slot(), packets, bytes, acks);
        }
        self.spare = Spare(Some(sender.release()));
        self.region.release();
        self.bytes = 0;
        self.carrier = None;
    }

    /// The reference that the queue pair keeps for the next time.
    #[inline]
    pub fn take_spare(&mut self) -> Option<Spare> {
        self.spare.0.is_some().then(|| mem::take(&mut self.spare))
    }

    /// The sending side to `peer`, and the region of the last payload; `spare` may be a reference to the former.
    #[inline]
    pub(super) fn sender(
        &mut self,
        links: &Links,
        peer: &Peer,
        spare: &mut Spare,
    ) -> (&mut Sender, &mut LastLocal<'static>) {
        if self.sender.as_ref().is_some_and(|sender| !sender.is_of(&peer.channel))
            && let Some(mut other) = self.sender.take()
        {
            other.flush();
            self.end(other, links);
        }
        self.carrier = None;
        let sender = self.sender.get_or_insert_with(|| match spare.0.take() {
            Some(channel) if peer.is(&channel) => channel.into_sender(),
            _ => peer.channel.sender(),
        });
        (sender, &mut self.region)
    }

    /// Notes a packet, `bytes` of it with headers, `payload` without, as the last message. An ACK may go along with it
    /// if it is a `carrier`.
    #[inline]
    pub(super) fn note(&mut self, bytes: usize, payload: usize, carrier: Option<Committed>) {
        self.carrier = carrier;
        self.packets += 1;
        self.counted += bytes as u64;
        self.bytes += payload;
        if self.bytes >= SHOW_AFTER
            && let Some(sender) = &mut self.sender
        {
            self.bytes = 0;
            sender.flush();
        }
    }

    /// Adds an ACK of everything up to `psn` to the last request; whether that could be.
    #[inline]
    pub fn ride(&mut self, psn: Psn) -> bool {
        let (Some(sender), Some(carrier)) = (&mut self.sender, self.carrier.take()) else {
            return false;
        };
        let [_, a, b, c] = psn.get().to_be_bytes();
        let rides = sender.amend(carrier, RIDER, &[RIDES, a, b, c]);
        self.acks += u64::from(rides);
        rides
    }
}
