//! The directory of this process: what peers of the same host and user may reach without a message, in memory that they read.
//!
//! | in the published memory, in words | what |
//! |---|---|
//! | 0 | the layout |
//! | 1 to 510 | a bit for each block of 4 KiB that may be read: the others have no memory yet |
//! | 511 | 1: the process fetches the payloads of SENDs |
//! | from block 1 | regions, by the index in their keys: valid, generation, rkey · iova · length · address · PD, rights of peers |
//! | behind them | queue pairs, by their number: valid, generation, number · peer, device, rights · PD, addresses |
//!
//! An entry is a line whose first word says whether it is valid. Its owner changes the others only while it is not, and after
//! waiting for the copies that began before ([`Directory::settle`]); hence under the mark of a copy a valid entry is
//! whole. What is read there is the word of another process: it leads to addresses of that process, which the kernel checks,
//! and to nothing in this one.
//!
//! Deregistration waits for the copies in progress. So do the end of a queue pair and its move to RESET or ERR, if the
//! program asked for it. A queue pair that an error moves is taken back at once, and waited for when the program acts
//! on it. If a peer is stopped in the middle of a copy, the wait lasts until it goes on or ends: it would write the
//! rest.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyverbs_locks::{Mutex, rank};
use anyverbs_net::shm::{Copied, Endpoint};
use anyverbs_proto::counters::{Counter, Counters};
use anyverbs_proto::mr::{self, Access, Keys, MAX_REGIONS, Region};
use anyverbs_proto::qp::Qp;
use anyverbs_proto::types::Qpn;

use super::Digest;

/// Says that the rest has this layout.
pub const LAYOUT: u64 = u64::from_le_bytes(*b"avb-dir4");
pub(crate) const BITS: usize = 8;
/// The place of the word that says whether payloads are fetched.
pub const FETCHES: usize = BLOCK - 8;
pub(crate) const BLOCK: usize = 4096;
pub(crate) const ENTRY: usize = 64;
pub(crate) const REGIONS: usize = BLOCK;
pub(crate) const QUEUE_PAIRS: usize = REGIONS + MAX_REGIONS * ENTRY;
pub(crate) const LEN: usize = QUEUE_PAIRS + (1 << 16) * ENTRY;
/// In a queue pair's entry: the place of its peer and rights.
pub const PEER: usize = 8;
/// Mark of an entry that holds a queue pair or a region.
pub const VALID: u64 = 1 << 63;

const _: () = assert!(BITS + LEN / BLOCK / 8 + 8 <= FETCHES, "a bit for each block");

/// Bytes of the published memory of a process that does this.
pub const PUBLISHED: usize = LEN;

/// Where the entry of a region is.
pub fn region_at(rkey: u32) -> usize {
    REGIONS + mr::index(rkey) * ENTRY
}

/// Where the entry of a queue pair is.
pub fn qp_at(qpn: Qpn) -> usize {
    QUEUE_PAIRS + usize::from(qpn.get() as u16) * ENTRY
}

/// Where the bit of an entry's block is, and which.
pub fn bit_of(at: usize) -> (usize, u64) {
    let block = at / BLOCK;
    (BITS + block / 64 * 8, 1 << (block % 64))
}

/// The generation in the first word of a valid entry, with the mark.
#[inline]
pub fn generation_in(word: u64) -> u32 {
    (word >> 32) as u32
}

/// The entry of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpEntry {
    /// Queue pair at the other end.
    pub peer: Qpn,
    /// Rights of the peer.
    pub access: Access,
    /// Protection domain.
    pub pd: u32,
    /// The addresses that its requests come from and go to.
    pub digest: Digest,
    /// The device, among those of the process.
    pub device: u8,
}

impl QpEntry {
    /// The device that an entry's second word names.
    #[inline]
    pub fn device_in(word: u64) -> u8 {
        (word >> 24) as u8
    }

    /// As it stands in the directory.
    #[inline]
    pub fn words(&self) -> [u64; 2] {
        let peer = u64::from(self.device) << 24 | u64::from(self.peer.get());
        let peer = u64::from(self.access.bits()) << 32 | peer;
        [peer, u64::from(self.digest.0) << 32 | u64::from(self.pd)]
    }
}

/// The published state of a queue pair.
#[derive(Debug, Default)]
pub struct PublishedQp {
    /// The peers' rights without a message.
    access: Option<Access>,
    /// How often something was taken back.
    taken_back: u32,
    /// Copies that use what was taken back have been waited for up to this time of them.
    settled: u32,
}

/// Something was taken back, and copies that use it have not been waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the caller waits for the copies"]
pub struct Unsettled(u32);

impl PublishedQp {
    /// Says that [`Directory::settle`] is to be called, and then [`note_settled`](Self::note_settled).
    pub fn unsettled(&self) -> Option<Unsettled> {
        (self.taken_back != self.settled).then_some(Unsettled(self.taken_back))
    }

    /// The copies were waited for. What was taken back meanwhile needs another wait.
    pub fn note_settled(&mut self, Unsettled(taken_back): Unsettled) {
        if self.taken_back == taken_back {
            self.settled = taken_back;
        }
    }

    fn note_taken_back(&mut self) {
        self.taken_back = self.taken_back.wrapping_add(1);
    }
}

/// The queue pairs and regions that other processes of this user may reach without a message.
#[derive(Debug)]
pub struct Directory {
    endpoint: Arc<Endpoint>,
    slot: u8,
    /// Each validity of an entry has another generation, so that an entry that was replaced is another. It has 31 bits: who
    /// remembers an entry would have to sleep through all of them to take one for another.
    generation: AtomicU64,
    /// The part of what others copied here, and this process there, that the port's counters have.
    /// By device.
    counted: Mutex<rank::CopiesCounted, Box<[(Copied, Copied)]>>,
}

impl Directory {
    /// Opens what the endpoint of so many devices has published to readers.
    pub fn new(endpoint: Arc<Endpoint>, slot: u8, devices: usize) -> Self {
        let (at, bit) = bit_of(0);
        endpoint.published().set_bits(at, bit);
        endpoint.published().store(0, LAYOUT);
        let counted = Mutex::new(vec![Default::default(); devices].into());
        Self { endpoint, slot, generation: AtomicU64::new(0), counted }
    }

    /// Tells peers that this process fetches the payloads of their SENDs.
    pub fn offer_to_fetch(&self) {
        self.endpoint.published().store(FETCHES, 1);
    }

    /// Makes an entry valid. If the system has no memory for it, requests go by the ring.
    fn enter(&self, at: usize, name: u32, words: &[u64]) {
        let published = self.endpoint.published();
        let (bits, bit) = bit_of(at);
        if published.load(bits) & bit == 0 {
            if !published.allocate(at / BLOCK * BLOCK, BLOCK) {
                return;
            }
            published.set_bits(bits, bit);
        }
        for (n, &word) in words.iter().enumerate() {
            published.store(at + 8 * (n + 1), word);
        }
        let generation = self.generation.fetch_add(1, Ordering::Relaxed) & 0x7fff_ffff;
        published.store(at, VALID | generation << 32 | u64::from(name));
    }

    /// Takes an entry back; whether there was one.
    fn take_back(&self, at: usize) -> bool {
        let published = self.endpoint.published();
        let (bits, bit) = bit_of(at);
        if published.load(bits) & bit == 0 || published.load(at) & VALID == 0 {
            return false;
        }
        published.store(at, 0);
        true
    }

    /// Lets peers see a region: they may WRITE or READ it by their rights, and fetch from it what is sent.
    pub(crate) fn publish_region(&self, keys: Keys, region: &Region) {
        // A key that a peer can invalidate goes by the ring, as its invalidation does. Nothing lies behind a null region.
        if region.access.intersects(Access::INVALIDATABLE | Access::NULL) {
            return;
        }
        let rights = u64::from(region.pd) << 32 | u64::from(region.access.bits());
        let words = [region.iova, region.len, region.addr, rights];
        self.enter(region_at(keys.rkey), keys.rkey, &words);
    }

    /// The first word of an entry of this process, if it is valid.
    #[must_use]
    pub fn published(&self, at: usize) -> Option<u64> {
        let published = self.endpoint.published();
        let (bits, bit) = bit_of(at);
        let state = if published.load(bits) & bit != 0 { published.load(at) } else { 0 };
        (state & VALID != 0).then_some(state)
    }

    /// No copy touches a region any more when this returns.
    pub(crate) fn withdraw_region(&self, keys: Keys) {
        if self.take_back(region_at(keys.lkey)) {
            self.settle();
        }
    }

    #[cold]
    fn republish_qp(&self, machine: &Qp, device: u8, known: &mut PublishedQp) {
        let (at, attr) = (qp_at(machine.qpn()), machine.attr());
        let Some(access) = machine.open_to_direct().filter(|_| attr.dest_qpn.slot() != self.slot)
        else {
            return self.withdraw_qp(machine.qpn(), known);
        };
        let (peer, pd) = (attr.dest_qpn, machine.init().pd);
        let digest = Digest::new(attr.av.dgid, attr.av.sgid);
        let entry = QpEntry { peer, access, pd, digest, device };
        if known.access.is_some() {
            // Only the rights change: whoever changes the peer's address withdraws the entry first.
            self.endpoint.published().store(at + PEER, entry.words()[0]);
            known.note_taken_back();
        } else if known.unsettled().is_some() {
            // A copy may have begun by the entry that was taken back, and may be reading it.
            return;
        } else {
            self.enter(at, machine.qpn().get(), &entry.words());
        }
        known.access = Some(access);
    }

    /// Takes a queue pair back. It is entered anew once copies that use it have been waited for.
    pub fn withdraw_qp(&self, qpn: Qpn, known: &mut PublishedQp) {
        if known.access.take().is_some() && self.take_back(qp_at(qpn)) {
            known.note_taken_back();
        }
    }

    /// Waits until no copy uses rights that were taken back before.
    pub(crate) fn settle(&self) {
        self.endpoint.settle();
    }

    /// Adds copies without packets to the counters of the devices.
    pub fn count(&self, counters: &[Counters]) {
        let mut counted = self.counted.lock();
        for (device, (past, counters)) in counted.iter_mut().zip(counters).enumerate() {
            self.count_of(device, counters, past);
        }
    }

    fn count_of(&self, device: usize, counters: &Counters, past: &mut (Copied, Copied)) {
        let ours = Copied {
            writes: counters.read(Counter::ShmDirectWrites),
            written: counters.read(Counter::ShmDirectWrittenBytes),
            reads: counters.read(Counter::ShmDirectReads),
            read: counters.read(Counter::ShmDirectReadBytes),
        };
        let theirs = self.endpoint.published().copied(device);
        let (our_past, their_past) = std::mem::replace(past, (ours, theirs));
        // A peer may write any number there, and its counts may shrink.
        let since = |now: u64, past: u64| now.saturating_sub(past);
        let (out, into) =
            ((our_past.writes, their_past.reads), (our_past.reads, their_past.writes));
        counters.add(Counter::SentPkts, since(ours.writes, out.0) + since(theirs.reads, out.1));
        counters.add(Counter::RcvdPkts, since(ours.reads, into.0) + since(theirs.writes, into.1));
        let sent = since(ours.written, our_past.written) + since(theirs.read, their_past.read);
        let received = since(ours.read, our_past.read) + since(theirs.written, their_past.written);
        counters.add(Counter::SentBytes, sent);
        counters.add(Counter::RcvdBytes, received);
    }
}

/// Brings what is published of a queue pair up to date. What was taken back may be in use until
/// [`Directory::settle`].
#[inline]
pub fn publish_qp(
    directory: Option<&Directory>,
    machine: &Qp,
    device: u8,
    published: &mut PublishedQp,
) {
    if published.access != machine.open_to_direct()
        && let Some(directory) = directory
    {
        directory.republish_qp(machine, device, published);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_back_during_a_wait_needs_another() {
        let mut known = PublishedQp::default();
        assert_eq!(known.unsettled(), None);
        known.note_taken_back();
        let first = known.unsettled().unwrap();
        known.note_taken_back();
        known.note_settled(first);
        let second = known.unsettled().unwrap();
        known.note_settled(second);
        assert_eq!(known.unsettled(), None);
    }

    #[test]
    fn entries_lie_apart_and_inside() {
        assert_eq!(region_at(0), BLOCK);
        assert_eq!(region_at(u32::MAX) + ENTRY, QUEUE_PAIRS);
        assert_eq!(qp_at(Qpn::new(0xff_ffff)) + ENTRY, LEN);
        assert_eq!(qp_at(Qpn::new(0xff_0000)), QUEUE_PAIRS);
        assert_eq!(bit_of(0), (BITS, 1));
        assert_eq!(bit_of(REGIONS), (BITS, 2));
        assert!(bit_of(LEN - 1).0 < BLOCK);
    }
}
