//! The responder's half of loss recovery: a packet is missing, those behind it are kept, a NAK asks for it.
//!
//! The out-of-order buffer keeps requests that came before their turn, since a packet before them was lost or is
//! late. So a requester with selective retransmit loses little. Most requesters go back N: their repeats of the kept
//! packets are duplicates.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::attr::QpType;
use super::super::{Incoming, Qp};
use super::Responder;
use crate::counters::Counter;
use crate::env::Env;
use crate::payload::Data;
use crate::types::Psn;
use crate::wire::aeth::{NakCode, Syndrome};
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
pub struct OutOfOrderBytes(AtomicUsize);

impl OutOfOrderBytes {
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
pub(super) struct OutOfOrder {
    packets: VecDeque<Kept>,
    /// Their part of `all`.
    bytes: usize,
    /// The bytes that all queue pairs of the device keep.
    all: Arc<OutOfOrderBytes>,
    /// The highest that has come within the bounds, kept or not.
    last: Option<Psn>,
    /// Further packets have come beyond that.
    more: bool,
    /// The packet that was missing and came last. Kept packets behind it have been executed.
    filled: Option<Psn>,
    /// The requester should get a NAK for the packet that is missing after them.
    owes_nak: bool,
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

impl OutOfOrder {
    pub(super) fn new(all: &Arc<OutOfOrderBytes>) -> Self {
        Self {
            packets: VecDeque::new(),
            bytes: 0,
            all: Arc::clone(all),
            last: None,
            more: false,
            filled: None,
            owes_nak: false,
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

    /// Notes that `filled` came and that kept packets behind it have been executed. With `owes_nak` the requester is to
    /// get a NAK of a packet that is missing after them.
    fn note_executed(&mut self, filled: Psn, owes_nak: bool) {
        (self.filled, self.owes_nak) = (Some(filled), owes_nak);
    }

    /// Notes a duplicate of an executed request. Tells whether it shows a requester that goes back N: then the missing
    /// packet comes unasked.
    pub(super) fn goes_back(&mut self, psn: Psn) -> bool {
        let goes_back = self.filled.is_some_and(|filled| psn.since(filled) > 0);
        self.owes_nak &= !goes_back;
        goes_back
    }

    /// Tells, once, whether the requester is to hear now that `expected` is missing.
    pub(super) fn take_owed_nak(&mut self, expected: Psn) -> bool {
        let tells = self.owes_nak && self.goes_beyond(expected);
        self.note_nak();
        tells
    }

    /// The requester gets a NAK for the missing packet.
    pub(super) fn note_nak(&mut self) {
        (self.owes_nak, self.more) = (false, false);
    }
}

impl Drop for OutOfOrder {
    fn drop(&mut self) {
        self.all.remove(self.bytes);
    }
}

impl Qp {
    /// Takes the request that comes next, and kept requests behind it.
    pub(super) fn receive_next<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) {
        let buffer = self.responder.out_of_order.take();
        let taken = self.take_next(packet, env);
        if let Some(buffer) = buffer {
            self.receive_kept(taken.then_some(packet.headers.bth.psn), buffer, env);
        }
    }

    /// Takes the kept requests whose turn has come, if the one before them was `taken`.
    fn receive_kept<E: Env>(
        &mut self,
        taken: Option<Psn>,
        mut buffer: Box<OutOfOrder>,
        env: &mut E,
    ) {
        let mut goes_on = taken.is_some();
        let mut any = false;
        while goes_on && let Some(kept) = buffer.next(self.responder.expected) {
            goes_on = self.take_next(&kept.packet(), env);
            // Whoever goes back for them all need not go on with that.
            self.responder.acks.owed |= goes_on;
            any = true;
        }
        // A requester that goes back sends a further missing packet unasked.
        let goes_back = &mut self.responder.goes_back;
        if let Some(psn) = taken.filter(|_| any) {
            buffer.note_executed(psn, *goes_back == 0);
        }
        *goes_back = goes_back.saturating_sub(any.into());
        let comes_again = !goes_on && self.responder.answers.are_pending();
        if (goes_on || comes_again) && buffer.goes_beyond(self.responder.expected) {
            self.responder.out_of_order = Some(buffer);
        }
    }

    /// Sends, in place of an ACK, the NAK of a packet that is missing after some that were kept. False if there is
    /// none.
    pub(super) fn send_further_nak<E: Env>(&mut self, env: &mut E) -> bool {
        let Responder { expected, nak_sent, out_of_order, .. } = &mut self.responder;
        let owes = out_of_order.as_mut().is_some_and(|buffer| buffer.take_owed_nak(*expected))
            && !*nak_sent;
        if owes {
            self.send_sequence_nak(env);
        }
        owes
    }

    /// A request that is not the next one: a packet before it was lost, or is late.
    pub(super) fn receive_out_of_order<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) {
        env.count(Counter::OutOfSequence, 1);
        // A NAK must not overtake answers that were held back: the requester would miss them.
        if !self.responder.nak_sent && !self.responder.answers.are_pending() {
            // The place of a request to an XRC target is found out when its turn has come.
            if self.init.qp_type == QpType::Rc {
                let all = &self.attached.out_of_order_bytes;
                self.responder.out_of_order.get_or_insert_with(|| Box::new(OutOfOrder::new(all)));
            }
            self.send_sequence_nak(env);
        }
        let expected = self.responder.expected;
        if let Some(buffer) = &mut self.responder.out_of_order {
            buffer.keep(packet, expected, env.props().out_of_order_room);
        }
    }

    pub(super) fn send_sequence_nak<E: Env>(&mut self, env: &mut E) {
        self.responder.nak_sent = true;
        if let Some(buffer) = &mut self.responder.out_of_order {
            buffer.note_nak();
        }
        let expected = self.responder.expected;
        self.send_nak(expected, Syndrome::Nak(NakCode::PsnSequence), env);
    }

    /// Empties the out-of-order buffer.
    pub(in crate::qp) fn clear_out_of_order_buffer(&mut self) {
        self.responder.out_of_order = None;
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

    fn keep(buffer: &mut OutOfOrder, ahead: u32, bytes: &[u8], room: usize) {
        let send = Opcode::new(Service::Rc, Operation::SendOnly);
        let headers = Headers::new(Bth::new(send, Qpn::default(), EXPECTED.plus(ahead)));
        let payload = Data::Bytes(bytes);
        let packet = Incoming { headers, payload, packets: 1, acks: None };
        buffer.keep(&packet, EXPECTED, room);
    }

    /// The packets that follow in order from there.
    fn rest(buffer: &mut OutOfOrder, ahead: u32) -> Vec<u8> {
        let mut all = Vec::new();
        let mut next = EXPECTED.plus(ahead);
        while let Some(kept) = buffer.next(next) {
            all.push(kept.payload[0]);
            next = next.plus(1);
        }
        all
    }

    #[test]
    fn they_come_in_their_order_and_once() {
        let mut buffer = OutOfOrder::new(&Arc::default());
        for n in [8, 2, 7, 3, 2, 6, 17] {
            keep(&mut buffer, n, &[n as u8], ROOM);
        }
        // The second of a number is no other, and takes no room.
        keep(&mut buffer, 3, &[99], ROOM);
        assert_eq!(buffer.packets.len(), 6);
        assert_eq!(rest(&mut buffer, 1), []);
        assert_eq!(rest(&mut buffer, 2), [2, 3]);
        assert!(buffer.goes_beyond(EXPECTED.plus(4)));
        // Packets that a longer request has passed are forgotten.
        assert_eq!(rest(&mut buffer, 7), [7, 8]);
        assert_eq!(rest(&mut buffer, 17), [17]);
        assert!(!buffer.goes_beyond(EXPECTED.plus(18)));
        assert_eq!((buffer.packets.len(), buffer.bytes), (0, 0));
    }

    #[test]
    fn the_distance_to_the_others_is_bounded() {
        let mut buffer = OutOfOrder::new(&Arc::default());
        let most = MOST_MISSING as u32;
        keep(&mut buffer, most + 1, &[], ROOM);
        assert_eq!((buffer.packets.len(), buffer.goes_beyond(EXPECTED)), (0, false));
        for n in [most, 2 * most + 1, 3 * most + 3, 1] {
            keep(&mut buffer, n, &[], ROOM);
        }
        assert_eq!(buffer.packets.len(), 3);
    }

    #[test]
    fn the_bytes_of_one_queue_pair_are_bounded() {
        let bytes = [0; 4096];
        let mut buffer = OutOfOrder::new(&Arc::default());
        for n in 1..20 {
            keep(&mut buffer, n, &bytes, 10_000);
        }
        assert_eq!(buffer.packets.len(), 2);
        assert!(buffer.goes_beyond(EXPECTED.plus(19)), "the others came, too");
    }

    #[test]
    fn the_bytes_of_all_queue_pairs_are_bounded() {
        let bytes = [0; 4096];
        let shared = Arc::default();
        let mut all: Vec<_> = (0..20).map(|_| OutOfOrder::new(&shared)).collect();
        for buffer in &mut all {
            for n in 1..=256 {
                keep(buffer, n, &bytes, usize::MAX);
            }
        }
        let kept = shared.0.load(Ordering::Relaxed);
        assert!(kept <= MOST_KEPT && kept > MOST_KEPT - 8192, "{kept}");
        drop(all);
        assert_eq!(shared.0.load(Ordering::Relaxed), 0);
    }
}
