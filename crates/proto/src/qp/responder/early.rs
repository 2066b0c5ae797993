//! The out-of-order buffer. It keeps requests that came before their turn, since a packet before them was lost or is
//! late. So a requester with selective retransmit loses little. Most requesters go back N: their repeats of the kept
//! packets are duplicates.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::Incoming;
use crate::payload::Data;
use crate::types::Psn;
use crate::wire::packet::Headers;

/// PSNs that may be missing between a packet and the next expected one, or the highest that was noted. If more are
/// missing, a whole batch was lost, and a requester has to send more than one packet again anyway. And each of these
/// numbers is one more that a forger may hit.
const MOST_MISSING: i32 = 8;

/// Numbers are compared within this distance.
const MOST_AHEAD: i32 = 1 << 16;

/// Most bytes that all queue pairs of a device keep.
const MOST_KEPT: usize = 16 << 20;

/// The bytes in the out-of-order buffers of the queue pairs that share this.
#[derive(Debug, Default)]
pub struct EarlyBytes(AtomicUsize);

impl EarlyBytes {
    /// Adds `cost` bytes, if they are not too many.
    fn add(&self, cost: usize) -> bool {
        let fits = self.0.fetch_add(cost, Ordering::Relaxed) + cost <= MOST_KEPT;
        if !fits {
            self.remove(cost);
        }
        fits
    }

    fn remove(&self, cost: usize) {
        self.0.fetch_sub(cost, Ordering::Relaxed);
    }
}

/// Ordered by PSN.
#[derive(Debug)]
pub(super) struct Early {
    packets: VecDeque<Kept>,
    /// Their part of `all`.
    bytes: usize,
    /// The bytes that all queue pairs of the device keep.
    all: Arc<EarlyBytes>,
    /// The highest that has come within the bounds, kept or not.
    last: Option<Psn>,
    /// Further packets have come beyond that.
    more: bool,
    /// Packets that were kept have been executed, behind this one.
    closed: Option<Psn>,
    /// The requester should get a NAK for the packet that is missing after them.
    tell: bool,
}

/// A kept packet.
#[derive(Debug)]
pub(super) struct Kept {
    headers: Headers,
    payload: Box<[u8]>,
}

impl Kept {
    pub(super) fn packet(&self) -> Incoming<'_> {
        let payload = Data::Bytes(&self.payload);
        Incoming { headers: self.headers, payload, packets: 1, acks: None }
    }

    fn cost(&self) -> usize {
        mem::size_of::<Self>() + self.payload.len()
    }
}

impl Early {
    pub(super) fn new(all: &Arc<EarlyBytes>) -> Self {
        Self {
            packets: VecDeque::new(),
            bytes: 0,
            all: Arc::clone(all),
            last: None,
            more: false,
            closed: None,
            tell: false,
        }
    }

    /// Keeps a packet, if it is a single one in a plain buffer and there is room: `room` is the limit of this queue
    /// pair.
    pub(super) fn keep(&mut self, packet: &Incoming<'_>, expected: Psn, room: usize) {
        let psn = packet.headers.bth.psn;
        let before = self.last.filter(|last| last.since(expected) > 0).unwrap_or(expected.prev());
        if psn.since(before) > MOST_MISSING + 1 || psn.since(expected) > MOST_AHEAD {
            self.more |= !self.packets.is_empty();
            return;
        }
        if psn.since(before) > 0 {
            self.last = Some(psn);
        }
        let Data::Bytes(bytes) = packet.payload else { return };
        let cost = mem::size_of::<Kept>() + bytes.len();
        if packet.packets != 1 || self.bytes + cost > room {
            return;
        }
        let at = self.packets.partition_point(|kept| kept.headers.bth.psn.since(psn) < 0);
        if self.packets.get(at).is_some_and(|kept| kept.headers.bth.psn == psn) {
            return;
        }
        if !self.all.add(cost) {
            return;
        }
        self.bytes += cost;
        self.packets.insert(at, Kept { headers: packet.headers, payload: bytes.into() });
    }

    /// The one with this PSN, and those before it are forgotten.
    pub(super) fn next(&mut self, expected: Psn) -> Option<Kept> {
        while let Some(kept) = self.packets.front() {
            let ahead = kept.headers.bth.psn.since(expected);
            if ahead > 0 {
                return None;
            }
            let kept = self.packets.pop_front()?;
            self.bytes -= kept.cost();
            self.all.remove(kept.cost());
            if ahead == 0 {
                return Some(kept);
            }
        }
        None
    }

    /// Tells whether packets later than the next one have come.
    pub(super) fn goes_beyond(&self, expected: Psn) -> bool {
        self.more || self.last.is_some_and(|last| last.since(expected) >= 0)
    }

    /// Notes that kept packets have been executed, behind `closed`. With `tell` the requester is to hear which packet
    /// is missing after them.
    pub(super) fn note_executed(&mut self, closed: Psn, tell: bool) {
        (self.closed, self.tell) = (Some(closed), tell);
    }

    /// Notes a duplicate of an executed request. Tells whether it shows a requester that goes back N: then the missing
    /// packet comes unasked.
    pub(super) fn goes_back(&mut self, psn: Psn) -> bool {
        let goes_back = self.closed.is_some_and(|closed| psn.since(closed) > 0);
        self.tell &= !goes_back;
        goes_back
    }

    /// Tells, once, whether the requester is to hear now that `expected` is missing.
    pub(super) fn take_tell(&mut self, expected: Psn) -> bool {
        let tells = self.tell && self.goes_beyond(expected);
        self.note_told();
        tells
    }

    /// The requester gets a NAK for the missing packet.
    pub(super) fn note_told(&mut self) {
        (self.tell, self.more) = (false, false);
    }
}

impl Drop for Early {
    fn drop(&mut self) {
        self.all.remove(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Qpn;
    use crate::wire::bth::Bth;
    use crate::wire::opcode::{Opcode, Operation, Service};

    const EXPECTED: Psn = Psn::new(0xff_fff0);
    const ROOM: usize = 1 << 20;

    fn keep(early: &mut Early, ahead: u32, bytes: &[u8], room: usize) {
        let send = Opcode::new(Service::Rc, Operation::SendOnly);
        let headers = Headers::new(Bth::new(send, Qpn::default(), EXPECTED.plus(ahead)));
        let payload = Data::Bytes(bytes);
        let packet = Incoming { headers, payload, packets: 1, acks: None };
        early.keep(&packet, EXPECTED, room);
    }

    /// The packets that follow in order from there.
    fn rest(early: &mut Early, ahead: u32) -> Vec<u8> {
        let mut all = Vec::new();
        let mut next = EXPECTED.plus(ahead);
        while let Some(kept) = early.next(next) {
            all.push(kept.payload[0]);
            next = next.plus(1);
        }
        all
    }

    #[test]
    fn they_come_in_their_order_and_once() {
        let mut early = Early::new(&Arc::default());
        for n in [8, 2, 7, 3, 2, 6, 17] {
            keep(&mut early, n, &[n as u8], ROOM);
        }
        // The second of a number is no other.
        keep(&mut early, 3, &[99], ROOM);
        assert_eq!(rest(&mut early, 1), []);
        assert_eq!(rest(&mut early, 2), [2, 3]);
        assert!(early.goes_beyond(EXPECTED.plus(4)));
        // Packets that a longer request has passed are forgotten.
        assert_eq!(rest(&mut early, 7), [7, 8]);
        assert_eq!(rest(&mut early, 17), [17]);
        assert!(!early.goes_beyond(EXPECTED.plus(18)));
        assert_eq!((early.packets.len(), early.bytes), (0, 0));
    }

    #[test]
    fn the_distance_to_the_others_is_bounded() {
        let mut early = Early::new(&Arc::default());
        let most = MOST_MISSING as u32;
        keep(&mut early, most + 1, &[], ROOM);
        assert_eq!((early.packets.len(), early.goes_beyond(EXPECTED)), (0, false));
        for n in [most, 2 * most + 1, 3 * most + 3, 1] {
            keep(&mut early, n, &[], ROOM);
        }
        assert_eq!(early.packets.len(), 3);
    }

    #[test]
    fn the_bytes_of_one_queue_pair_are_bounded() {
        let bytes = [0; 4096];
        let mut early = Early::new(&Arc::default());
        for n in 1..20 {
            keep(&mut early, n, &bytes, 10_000);
        }
        assert_eq!(early.packets.len(), 2);
        assert!(early.goes_beyond(EXPECTED.plus(19)), "the others came, too");
    }

    #[test]
    fn the_bytes_of_all_queue_pairs_are_bounded() {
        let bytes = [0; 4096];
        let shared = Arc::default();
        let mut all: Vec<_> = (0..20).map(|_| Early::new(&shared)).collect();
        for early in &mut all {
            for n in 1..=256 {
                keep(early, n, &bytes, usize::MAX);
            }
        }
        let kept = shared.0.load(Ordering::Relaxed);
        assert!(kept <= MOST_KEPT && kept > MOST_KEPT - 8192, "{kept}");
        drop(all);
        assert_eq!(shared.0.load(Ordering::Relaxed), 0);
    }
}
