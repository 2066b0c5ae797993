//! Work that waits because a script of faults says so: packets that leave later, and completions. Both are bounded.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use anyverbs_links::faults::InLine;
use anyverbs_proto::env::Side;
use anyverbs_proto::time::Time;
use anyverbs_proto::wc::{Wc, WcStatus};
use anyverbs_proto::wire::packet::Headers;
use anyverbs_proto::wr::AddressVector;

/// The most packets of a queue pair that wait. Another one is lost, as at the end of a full queue: if it took the place of the oldest,
/// none would ever leave where the queue is always full.
pub(in crate::qp) const MOST_PARKED: usize = anyverbs_faults::MOST_WAITING as usize;

/// A packet that leaves later.
#[derive(Debug)]
pub(in crate::qp) struct Parked {
    pub(in crate::qp) av: AddressVector,
    pub(in crate::qp) headers: Headers,
    pub(in crate::qp) payload: Vec<u8>,
}

/// How a packet waits.
#[derive(Debug, Default)]
pub(in crate::qp) struct Wait {
    /// It leaves, or leaves its line.
    pub(in crate::qp) due: Time,
    /// The next packet may let it leave earlier.
    pub(in crate::qp) behind_next: bool,
    /// Its place in the queue of a slow line.
    pub(in crate::qp) in_line: Option<InLine>,
    /// It leaves at this time, when it has left its line.
    pub(in crate::qp) then: Option<Time>,
}

/// Packets that leave later.
#[derive(Debug, Default)]
pub(in crate::qp) struct ParkedPackets {
    /// The one that is due first on top. Those of one time leave as they came.
    late: BinaryHeap<Late>,
    /// These leave earlier if another one does. All wait equally long, so the first is due first.
    overtaken: VecDeque<(Time, Parked)>,
    /// So many were ever late.
    count: u64,
}

#[derive(Debug)]
struct Late {
    place: Reverse<(Time, u64)>,
    packet: Parked,
    /// Its place in the queue of a line, and its time behind that.
    line: (Option<InLine>, Option<Time>),
}

impl PartialEq for Late {
    fn eq(&self, other: &Self) -> bool {
        self.place == other.place
    }
}

impl Eq for Late {}

impl PartialOrd for Late {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Late {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.place.cmp(&other.place)
    }
}

impl ParkedPackets {
    pub(in crate::qp) fn len(&self) -> usize {
        self.late.len() + self.overtaken.len()
    }

    pub(in crate::qp) fn is_full(&self) -> bool {
        self.len() >= MOST_PARKED
    }

    /// Adds one, if there is room.
    pub(in crate::qp) fn add(&mut self, wait: Wait, packet: Parked) {
        if self.is_full() {
            return;
        }
        let Wait { due, behind_next, in_line, then } = wait;
        if behind_next {
            self.overtaken.push_back((due, packet));
        } else {
            self.count += 1;
            let place = Reverse((due, self.count));
            self.late.push(Late { place, packet, line: (in_line, then) });
        }
    }

    /// Whether a packet waits to be overtaken.
    pub(in crate::qp) fn keeps_overtaken(&self) -> bool {
        !self.overtaken.is_empty()
    }

    /// Takes the oldest of those that wait to be overtaken.
    pub(in crate::qp) fn take_overtaken(&mut self) -> Option<Parked> {
        self.overtaken.pop_front().map(|(_, packet)| packet)
    }

    /// Takes the one that is due first, if it is due.
    pub(in crate::qp) fn take_due(&mut self, now: Time) -> Option<Parked> {
        loop {
            let due = self.next_due().filter(|due| *due <= now)?;
            if self.overtaken.front().is_some_and(|(at, _)| *at == due) {
                return self.take_overtaken();
            }
            let Late { packet, line: (_left, then), .. } = self.late.pop()?;
            let Some(due) = then else { return Some(packet) };
            self.add(Wait { due, ..Wait::default() }, packet);
        }
    }

    /// When the first of them is due.
    pub(in crate::qp) fn next_due(&self) -> Option<Time> {
        let late = self.late.peek().map(|late| late.place.0.0);
        late.into_iter().chain(self.overtaken.front().map(|(due, _)| *due)).min()
    }

    /// All of them are due, in their order.
    pub(in crate::qp) fn release(&mut self, now: Time) {
        for (n, late) in
            std::mem::take(&mut self.late).into_sorted_vec().into_iter().rev().enumerate()
        {
            let line = (late.line.0, None);
            self.late.push(Late { place: Reverse((now, n as u64)), line, ..late });
        }
        self.overtaken.iter_mut().for_each(|(due, _)| *due = now);
    }

    pub(in crate::qp) fn clear(&mut self) {
        self.late.clear();
        self.overtaken.clear();
    }
}

/// A completion that waits.
#[derive(Clone, Copy, Debug)]
pub(in crate::qp) struct HeldWc {
    pub(in crate::qp) wc: Wc,
    pub(in crate::qp) solicited: bool,
    /// When it is given to the program; `None`: never.
    pub(in crate::qp) due: Option<Time>,
}

/// Completions that wait, of one side, the oldest first. Their number is bounded by [`DeviceEnv`](super::super::env::DeviceEnv),
/// which knows the CQ.
#[derive(Debug, Default)]
pub(in crate::qp) struct HeldCompletions {
    queue: VecDeque<HeldWc>,
    /// So many of them are never due.
    hung: usize,
}

impl HeldCompletions {
    pub(in crate::qp) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether one waits that will not come.
    pub(in crate::qp) fn is_hung(&self) -> bool {
        self.hung > 0
    }

    pub(in crate::qp) fn add(&mut self, held: HeldWc) {
        self.hung += usize::from(held.due.is_none());
        self.queue.push_back(held);
    }

    /// The oldest, if it is due.
    pub(in crate::qp) fn due(&self, now: Time) -> Option<HeldWc> {
        self.queue.front().filter(|held| held.due.is_some_and(|due| due <= now)).copied()
    }

    /// Takes the oldest.
    pub(in crate::qp) fn pop(&mut self) -> Option<HeldWc> {
        let held = self.queue.pop_front()?;
        self.hung -= usize::from(held.due.is_none());
        Some(held)
    }

    /// The oldest, which is due, waits longer.
    pub(in crate::qp) fn put_off(&mut self, until: Time) {
        if let Some(HeldWc { due: Some(due), .. }) = self.queue.front_mut() {
            *due = until;
        }
    }

    /// When the oldest is due.
    pub(in crate::qp) fn next_due(&self) -> Option<Time> {
        self.queue.front()?.due
    }

    /// The queue pair is in an error state: what hangs, and what is behind it, is flushed.
    pub(in crate::qp) fn flush_hung(&mut self, now: Time, vendor_err: u32) {
        let hung = self.queue.iter().position(|held| held.due.is_none());
        for held in self.queue.iter_mut().skip(hung.unwrap_or(usize::MAX)) {
            (held.wc.status, held.wc.vendor_err) = (WcStatus::WrFlushErr, vendor_err);
            held.due = Some(now);
        }
        self.hung = 0;
    }

    /// All are due.
    pub(in crate::qp) fn release(&mut self, now: Time) {
        self.queue.iter_mut().for_each(|held| held.due = Some(now));
        self.hung = 0;
    }

    pub(in crate::qp) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// The place of a side in a pair.
pub(in crate::qp) fn index(side: Side) -> usize {
    usize::from(side == Side::Recv)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use anyverbs_faults::Limit;
    use anyverbs_links::faults::Line;
    use anyverbs_proto::types::{Psn, Qpn};
    use anyverbs_proto::wire::bth::Bth;
    use anyverbs_proto::wire::opcode::{Opcode, Operation, Service};

    use super::*;

    fn at(ms: u64) -> Time {
        Time::from_nanos(ms * 1_000_000)
    }

    fn packet(n: u32) -> Parked {
        let opcode = Opcode::new(Service::Uc, Operation::SendOnly);
        let headers = Headers::new(Bth::new(opcode, Qpn::new(17), Psn::new(n)));
        Parked { av: AddressVector::default(), headers, payload: Vec::new() }
    }

    fn late(ms: u64) -> Wait {
        Wait { due: at(ms), ..Wait::default() }
    }

    fn overtaken(ms: u64) -> Wait {
        Wait { behind_next: true, ..late(ms) }
    }

    fn number(packet: Parked) -> u32 {
        packet.headers.bth.psn.get()
    }

    #[test]
    fn packets_leave_when_they_are_due_and_in_their_order() {
        let mut parked = ParkedPackets::default();
        for (n, ms) in [(0, 5), (1, 3), (2, 5), (3, 3), (4, 9)] {
            parked.add(late(ms), packet(n));
        }
        parked.add(overtaken(4), packet(5));
        assert_eq!(parked.next_due(), Some(at(3)));
        let mut due = |ms| std::iter::from_fn(|| parked.take_due(at(ms)).map(number)).collect();
        let found: [Vec<u32>; 3] = [due(2), due(5), due(5)];
        assert_eq!(found, [vec![], vec![1, 3, 5, 0, 2], vec![]]);
        parked.add(overtaken(7), packet(6));
        assert!(parked.keeps_overtaken());
        assert_eq!(parked.take_overtaken().map(number), Some(6));
        assert!(!parked.keeps_overtaken() && parked.next_due() == Some(at(9)));
        parked.add(late(8), packet(7));
        parked.add(late(9), packet(8));
        parked.release(at(6));
        parked.add(late(6), packet(9));
        let rest = std::iter::from_fn(|| parked.take_due(at(6)).map(number)).collect::<Vec<_>>();
        assert_eq!(rest, [7, 4, 8, 9]);
    }

    #[test]
    fn a_packet_that_is_late_behind_a_line_gives_its_place_there_back() {
        let line: &'static Line = Box::leak(Box::default());
        let limit = Limit { rate: 8_000_000, queue: None };
        let mut parked = ParkedPackets::default();
        // A byte takes 1 us.
        for n in 0..3 {
            let (due, in_line) = line.takes(limit, 1000, at(0));
            let then = Some(due + Duration::from_millis(10));
            parked.add(Wait { due, in_line: Some(in_line), then, behind_next: false }, packet(n));
        }
        let mut due = |ms| {
            let left: Vec<_> = std::iter::from_fn(|| parked.take_due(at(ms))).map(number).collect();
            (left, line.waiting())
        };
        assert_eq!(due(2), (vec![], 1));
        assert_eq!(due(3), (vec![], 0));
        assert_eq!(due(12), (vec![0, 1], 0));
        assert_eq!(due(13), (vec![2], 0));
        let wait = || Wait { then: Some(at(90)), ..late(20) };
        parked.add(wait(), packet(3));
        parked.release(at(14));
        assert_eq!(parked.take_due(at(14)).map(number), Some(3));
    }

    #[test]
    fn a_full_queue_of_packets_takes_none_and_goes_on() {
        let mut parked = ParkedPackets::default();
        for n in 0..2 * MOST_PARKED as u32 {
            let behind_next = n % 2 == 0;
            parked.add(Wait { behind_next, ..late(n.into()) }, packet(n));
        }
        assert!(parked.is_full());
        let rest: Vec<_> =
            std::iter::from_fn(|| parked.take_due(Time::from_nanos(u64::MAX)).map(number))
                .collect();
        assert_eq!(rest, (0..MOST_PARKED as u32).collect::<Vec<_>>());
        assert!(!parked.is_full());
    }

    #[test]
    fn a_hung_completion_keeps_those_behind_it_until_it_is_taken_or_flushed() {
        let mut held = HeldCompletions::default();
        let add = |held: &mut HeldCompletions, wr_id, due| {
            held.add(HeldWc { wc: Wc { wr_id, ..Wc::default() }, solicited: false, due });
        };
        add(&mut held, 1, Some(at(1)));
        add(&mut held, 2, None);
        add(&mut held, 3, Some(at(1)));
        assert!(held.is_hung() && held.due(at(0)).is_none());
        assert_eq!(held.due(at(1)).map(|held| held.wc.wr_id), Some(1));
        held.put_off(at(2));
        assert!(held.due(at(1)).is_none());
        assert_eq!(held.pop().map(|held| held.wc.wr_id), Some(1));
        held.put_off(at(2));
        assert!(held.due(at(9)).is_none() && held.next_due().is_none());
        held.flush_hung(at(9), 7);
        let flushed = [held.pop(), held.pop()].map(|held| held.map(|h| (h.wc.wr_id, h.wc.status)));
        assert_eq!(flushed, [2, 3].map(|id| Some((id, WcStatus::WrFlushErr))));
        assert!(!held.is_hung() && held.len() == 0);
    }
}
