//! Messages that a call has put into a ring.

use std::mem;
use std::sync::Arc;

use anyverbs_net::shm::{Channel, Sender};
use anyverbs_proto::mr::LastLocal;

use super::{Peer, SHOW_AFTER};
use crate::Links;

/// Messages that are committed to a ring and not shown to its reader. The ring stays locked from the first message on.
#[derive(Debug, Default)]
pub struct Unflushed {
    sender: Option<Sender>,
    /// The port whose messages they are, by its place.
    pub(crate) device: u8,
    bytes: usize,
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
    /// Whether a ring is locked.
    #[inline]
    #[must_use]
    pub fn is_any(&self) -> bool {
        self.sender.is_some()
    }

    /// Shows them to their reader, and unlocks the ring.
    #[inline]
    pub fn flush(&mut self, links: &Links) {
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
            shm.traffic().note_sent(self.device, sender.slot(), packets, bytes, acks);
        }
        self.spare = Spare(Some(sender.release()));
        self.region.release();
        self.bytes = 0;
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
        let sender = self.sender.get_or_insert_with(|| match spare.0.take() {
            Some(channel) if peer.is(&channel) => channel.into_sender(),
            _ => peer.channel.sender(),
        });
        (sender, &mut self.region)
    }

    /// Notes a packet, `bytes` of it with headers, `payload` without, and whether it carries an ACK.
    #[inline]
    pub(super) fn note(&mut self, bytes: usize, payload: usize, acks: bool) {
        self.packets += 1;
        self.acks += u64::from(acks);
        self.counted += bytes as u64;
        self.bytes += payload;
        if self.bytes >= SHOW_AFTER
            && let Some(sender) = &mut self.sender
        {
            self.bytes = 0;
            sender.flush();
        }
    }
}
