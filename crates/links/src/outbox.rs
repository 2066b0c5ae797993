//! What one hold of a queue pair's lock has staged and not yet sent.

use anyverbs_proto::mr::LastRemote;
use anyverbs_proto::types::Psn;

use crate::Links;
use crate::shm::{Spare, Unflushed};
use crate::udp::{Asked, CreditPacket, Staged};

/// Packets that one hold of a queue pair's lock has staged, on any link.
#[derive(Debug, Default)]
pub struct Outbox {
    pub(crate) udp: Staged,
    /// Messages that the same-host link has not shown yet.
    pub(crate) shm: Unflushed,
    /// The region that the peer has named last, in use until the next flush or
    /// [`MemoryEnv::end_remote`](anyverbs_proto::env::MemoryEnv::end_remote). Meanwhile no ring is locked: a thread that has
    /// locked one may be waiting for the end of a window.
    pub target: LastRemote<'static>,
}

impl Outbox {
    /// What the queue pair keeps for the next time that it sends by the same-host link.
    #[inline]
    pub fn take_spare(&mut self) -> Option<Spare> {
        self.shm.take_spare()
    }

    /// Answers a credit probe: `limit` messages may be sent in all.
    pub fn echo(&mut self, links: &Links, asked: &Asked, limit: u64) {
        let answer = CreditPacket::answer(&asked.packet, limit);
        let by_ring = asked.by_ring
            && links.shm.as_ref().is_some_and(|shm| shm.echo(&mut self.shm, links, asked, answer));
        if !by_ring {
            self.udp.echo(links, asked, answer);
        }
    }

    /// Adds an ACK of everything up to `psn` to the last request; whether that could be.
    #[inline]
    pub fn ride(&mut self, psn: Psn) -> bool {
        self.shm.ride(psn)
    }

    /// Sends what is staged.
    #[inline]
    pub fn flush(&mut self, links: &Links) {
        self.shm.flush(links);
        self.target.release();
        self.udp.flush(links);
    }
}
