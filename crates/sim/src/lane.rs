//! Lanes: between queue pairs on links of one host, a SEND of few bytes may leave without a packet (`docs/design/lanes.md`).
//! The queue pairs execute them by their own code ([`crate::by_lane`]). Here are the cells, the answers and the moments of looking.
//! A cell has one SEND: the sharing of cells is the link's affair.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use anyverbs_proto::qp::ShortRequest;
use anyverbs_proto::qp::lane::Ring;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Gid, Psn};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// SENDs that a lane holds. They are few, so that lanes fill.
pub(crate) const ROOM: u64 = 20;

/// Bytes that a SEND in a lane may have, if nothing else is said. The device's lanes take longer ones; few are enough to mix lanes
/// and packets.
const FEW_BYTES: usize = 48;

/// All lanes of a simulation.
#[derive(Debug)]
pub(crate) struct AllLanes {
    rng: SmallRng,
    /// The probability that a SEND takes a lane if it can.
    pub(crate) probability: f64,
    /// Bytes that a SEND may have that takes one.
    pub(crate) most_bytes: usize,
    /// SENDs that took one.
    pub(crate) sends: u64,
    opened: u64,
    lanes: BTreeMap<u64, Lane>,
}

/// A queue pair's ends of lanes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ends {
    /// The numbers of its lanes among all.
    pub(crate) to_peer: Option<u64>,
    pub(crate) from_peer: Option<u64>,
    /// The peer's address, and where the payload of the next SEND from it lies.
    pub(crate) peer: Option<(Gid, u64)>,
}

/// A lane from one queue pair to another.
#[derive(Debug, Default)]
struct Lane {
    /// The time after which the other side can see what one writes. A packet on the ring takes as long at least, so nobody sees
    /// one without what was written before it.
    delay: Duration,
    /// The time after which the ring has been read for certain.
    ring_delay: Duration,
    cells: VecDeque<Cell>,
    /// When its reader looks next, and whether behind a look at the ring.
    look: Option<(Time, Ring)>,
    written: u64,
    taken: u64,
    /// Answers that its writer has not seen.
    answers: VecDeque<Answer>,
    /// When its writer looks for one.
    look_for_answer: Option<Time>,
    /// SENDs that the last answer says to be taken.
    known_taken: u64,
    out_of_turn: Option<Psn>,
}

#[derive(Clone, Copy, Debug)]
struct Answer {
    /// It can be seen from then on.
    at: Time,
    /// SENDs that were taken.
    taken: u64,
    /// The PSN of the last request that was executed.
    executed: Option<Psn>,
}

/// A place of a lane with something in it.
#[derive(Debug)]
pub(crate) struct Cell {
    /// It can be seen from then on.
    at: Time,
    /// None is nonsense.
    pub(crate) send: Option<ShortRequest>,
    pub(crate) bytes: Vec<u8>,
}

impl AllLanes {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            rng: SmallRng::seed_from_u64(seed),
            probability: 0.0,
            most_bytes: FEW_BYTES,
            sends: 0,
            opened: 0,
            lanes: BTreeMap::new(),
        }
    }

    /// Whether a SEND that can take a lane is to take one.
    pub(crate) fn wants_one(&mut self) -> bool {
        self.probability > 0.0 && self.rng.random_bool(self.probability)
    }

    /// A new lane; its number.
    pub(crate) fn open(&mut self, delay: Duration, ring_delay: Duration) -> u64 {
        self.opened += 1;
        self.lanes.insert(self.opened, Lane { delay, ring_delay, ..Lane::default() });
        self.opened
    }

    /// Ends a lane. What is in it is lost.
    pub(crate) fn close(&mut self, number: u64) {
        self.lanes.remove(&number);
    }

    /// Gives up the lanes of a queue pair.
    pub(crate) fn leave(&mut self, ends: &mut Ends) {
        for number in [ends.to_peer.take(), ends.from_peer.take()].into_iter().flatten() {
            self.close(number);
        }
    }

    /// Whether a lane has room for one more, if it is open.
    pub(crate) fn has_room(&self, number: Option<u64>) -> Option<bool> {
        self.look_at(number).map(|lane| lane.written - lane.known_taken < ROOM)
    }

    /// Writes a cell, of which a lane has more room than a sender uses.
    pub(crate) fn write(
        &mut self,
        now: Time,
        number: Option<u64>,
        send: Option<ShortRequest>,
        bytes: Vec<u8>,
    ) {
        let Some(delay) = self.look_at(number).map(|lane| lane.delay) else { return };
        let at = now + delay;
        let look = self.look_after(at, delay);
        let Some(lane) = self.get(number) else { return };
        lane.written += 1;
        lane.cells.push_back(Cell { at, send, bytes });
        lane.look = lane.look.or(Some((look, Ring::Unread)));
    }

    /// The next cell from the peer, if it can be seen.
    pub(crate) fn peek(&self, ends: Ends, now: Time) -> Option<&Cell> {
        self.look_at(ends.from_peer)?.cells.front().filter(|cell| cell.at <= now)
    }

    pub(crate) fn take(&mut self, ends: Ends) {
        if let Some(lane) = self.get(ends.from_peer) {
            lane.cells.pop_front();
            lane.taken += 1;
        }
    }

    /// Answers the peer.
    pub(crate) fn answer(&mut self, ends: Ends, now: Time, executed: Option<Psn>) {
        let Some(delay) = self.look_at(ends.from_peer).map(|lane| lane.delay) else { return };
        let at = now + delay;
        let look = self.look_after(at, delay);
        if let Some(lane) = self.get(ends.from_peer) {
            lane.answers.push_back(Answer { at, taken: lane.taken, executed });
            lane.look_for_answer = lane.look_for_answer.or(Some(look));
        }
    }

    /// Takes the peer's answer. It is one word: only the last is seen.
    pub(crate) fn take_answer(&mut self, ends: Ends, now: Time) -> Option<Option<Psn>> {
        let lane = self.get(ends.to_peer)?;
        let mut last = None;
        while let Some(&Answer { at, taken, executed }) = lane.answers.front()
            && at <= now
        {
            lane.answers.pop_front();
            lane.known_taken = taken;
            last = Some(executed);
        }
        let behind = lane.answers.front().map(|answer| answer.at);
        lane.look_for_answer = lane.look_for_answer.filter(|at| *at > now).or(behind);
        last
    }

    pub(crate) fn has_answer(&self, ends: Ends, now: Time) -> bool {
        let answer = self.look_at(ends.to_peer).and_then(|lane| lane.answers.front());
        answer.is_some_and(|answer| answer.at <= now)
    }

    pub(crate) fn note_out_of_turn(&mut self, ends: Ends, psn: Psn) {
        if let Some(lane) = self.get(ends.from_peer) {
            lane.out_of_turn = Some(psn);
        }
    }

    pub(crate) fn was_out_of_turn(&self, ends: Ends, psn: Psn) -> bool {
        self.look_at(ends.from_peer).is_some_and(|lane| lane.out_of_turn == Some(psn))
    }

    /// When a queue pair looks at its lanes next.
    pub(crate) fn next(&self, ends: Ends) -> Option<Time> {
        let look = self.look_at(ends.from_peer).and_then(|lane| lane.look).map(|(at, _)| at);
        let answer = self.look_at(ends.to_peer).and_then(|lane| lane.look_for_answer);
        look.into_iter().chain(answer).min()
    }

    /// The look that is due: into the lane, or for an answer alone.
    pub(crate) fn take_look(&mut self, ends: Ends, now: Time) -> Option<Ring> {
        let to_peer = self.get(ends.to_peer);
        let for_answer = to_peer.and_then(|lane| lane.look_for_answer.take_if(|at| *at <= now));
        let from_peer = self.get(ends.from_peer);
        let look = from_peer.and_then(|lane| lane.look.take_if(|(at, _)| *at <= now));
        look.map(|(_, ring)| ring).or(for_answer.map(|_| Ring::Unread))
    }

    /// A packet of the ring was received, for which a SEND of the lane may have waited.
    pub(crate) fn look_soon(&mut self, ends: Ends, now: Time) {
        let Some(lane) = self.look_at(ends.from_peer) else { return };
        let (delay, waits) = (lane.delay, matches!(lane.look, Some((_, Ring::Read))));
        if waits {
            let at = self.look_after(now, delay);
            if let Some(lane) = self.get(ends.from_peer) {
                lane.look = Some((at, Ring::Unread));
            }
        }
    }

    /// Says when the lane is looked into again, after a look.
    pub(crate) fn look_again(&mut self, ends: Ends, now: Time, after: Ring, is_out_of_turn: bool) {
        let Some(lane) = self.get(ends.from_peer) else { return };
        lane.look = match lane.cells.front() {
            None => None,
            Some(cell) if cell.at > now => Some((cell.at, Ring::Unread)),
            Some(_) if is_out_of_turn && after == Ring::Unread => {
                Some((now + lane.ring_delay, Ring::Read))
            }
            Some(_) => Some((now + lane.delay, Ring::Unread)),
        };
    }

    /// When somebody looks who can see something from this moment on.
    fn look_after(&mut self, at: Time, delay: Duration) -> Time {
        at + Duration::from_nanos(self.rng.random_range(0..=delay.as_nanos() as u64))
    }

    fn get(&mut self, number: Option<u64>) -> Option<&mut Lane> {
        self.lanes.get_mut(&number?)
    }

    fn look_at(&self, number: Option<u64>) -> Option<&Lane> {
        self.lanes.get(&number?)
    }
}
