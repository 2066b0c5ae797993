//! Lanes: between queue pairs on links of one host, a SEND of few bytes may leave without a packet (`docs/design/lanes.md`).
//! The queue pairs execute them by their own code; here are the cells, the answers and the moments of looking. A cell has one
//! SEND here: the sharing of cells is the link's affair.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use anyverbs_proto::env::{CompletionEnv, MemoryEnv, Side};
use anyverbs_proto::memory::Memory;
use anyverbs_proto::mr::{Access, MrTable};
use anyverbs_proto::payload::{Payload, hold_local};
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::qp::lane::{
    LaneData, LaneEnds, LaneEnv, LanePayload, LaneSend, NotASend, Rest, Ring, ShortLanes,
};
use anyverbs_proto::qp::{Arrival, ShortRequest};
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Gid, Psn};
use anyverbs_proto::wc::Wc;
use anyverbs_proto::wr::{SendFlags, SendOp, SendWr, Sge};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::device::{Around, DeviceId, QpId, QpPlace};
use crate::memory::Arena;
use crate::net;
use crate::sim::Sim;

/// Bytes that a SEND in a lane may have.
const MOST_BYTES: usize = 48;
/// SENDs that a lane holds. They are few, so that lanes fill.
const ROOM: u64 = 20;

/// All lanes of a simulation.
#[derive(Debug)]
pub(crate) struct AllLanes {
    rng: SmallRng,
    /// The probability that a SEND takes a lane if it can.
    pub(crate) probability: f64,
    /// SENDs that took one.
    pub(crate) sends: u64,
    opened: u64,
    lanes: BTreeMap<u64, Lane>,
}

/// A queue pair's ends of lanes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ends {
    /// The numbers of its lanes among all.
    to_peer: Option<u64>,
    from_peer: Option<u64>,
    /// The peer's address, and where the payload of the next SEND from it lies.
    peer: Option<(Gid, u64)>,
}

/// A lane from one queue pair to another.
#[derive(Debug)]
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

#[derive(Debug)]
struct Cell {
    /// It can be seen from then on.
    at: Time,
    /// None is nonsense.
    send: Option<ShortRequest>,
    bytes: Vec<u8>,
}

impl AllLanes {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            rng: SmallRng::seed_from_u64(seed),
            probability: 0.0,
            sends: 0,
            opened: 0,
            lanes: BTreeMap::new(),
        }
    }

    /// When somebody looks who can see something from this moment on.
    fn look_after(&mut self, at: Time, delay: Duration) -> Time {
        at + Duration::from_nanos(self.rng.random_range(0..=delay.as_nanos() as u64))
    }

    /// Gives up the lanes of a queue pair. What is in them is lost.
    pub(crate) fn leave(&mut self, place: &mut QpPlace) {
        let Ends { to_peer, from_peer, .. } = &mut place.lanes;
        for lane in [to_peer.take(), from_peer.take()].into_iter().flatten() {
            self.lanes.remove(&lane);
        }
    }

    fn get(&mut self, number: Option<u64>) -> Option<&mut Lane> {
        self.lanes.get_mut(&number?)
    }

    /// When the queue pair there looks at its lanes next.
    pub(crate) fn next(&self, place: &QpPlace) -> Option<Time> {
        let get = |number: Option<u64>| self.lanes.get(&number?);
        let look = get(place.lanes.from_peer).and_then(|lane| lane.look).map(|(at, _)| at);
        let answer = get(place.lanes.to_peer).and_then(|lane| lane.look_for_answer);
        look.into_iter().chain(answer).min()
    }

    /// The look that is due: into the lane, or for an answer alone.
    fn take_look(&mut self, place: &QpPlace, now: Time) -> Option<Ring> {
        let to_peer = self.get(place.lanes.to_peer);
        let for_answer = to_peer.and_then(|lane| lane.look_for_answer.take_if(|at| *at <= now));
        let from_peer = self.get(place.lanes.from_peer);
        let look = from_peer.and_then(|lane| lane.look.take_if(|(at, _)| *at <= now));
        look.map(|(_, ring)| ring).or(for_answer.map(|_| Ring::Unread))
    }

    /// A packet of the ring was received, for which a SEND of the lane may have waited.
    pub(crate) fn look_soon(&mut self, place: &QpPlace, now: Time) {
        let Some(lane) = self.get(place.lanes.from_peer) else { return };
        let (delay, waits) = (lane.delay, matches!(lane.look, Some((_, Ring::Read))));
        if waits {
            let at = self.look_after(now, delay);
            if let Some(lane) = self.get(place.lanes.from_peer) {
                lane.look = Some((at, Ring::Unread));
            }
        }
    }

    /// Says when the lane is looked into again, after a look.
    fn look_again(&mut self, place: &QpPlace, now: Time, after: Ring, is_out_of_turn: bool) {
        let Some(lane) = self.get(place.lanes.from_peer) else { return };
        lane.look = match lane.cells.front() {
            None => None,
            Some(cell) if cell.at > now => Some((cell.at, Ring::Unread)),
            Some(_) if is_out_of_turn && after == Ring::Unread => {
                Some((now + lane.ring_delay, Ring::Read))
            }
            Some(_) => Some((now + lane.delay, Ring::Unread)),
        };
    }
}

impl Sim {
    /// The probability that a SEND of few bytes takes a lane if it can. It can on links with segments, as within one host. It
    /// is 0 unless this was called.
    pub fn use_lanes(&mut self, probability: f64) {
        self.lanes.probability = probability;
    }

    /// The number of SENDs that took a lane.
    #[must_use]
    pub fn sent_by_lane(&self) -> u64 {
        self.lanes.sends
    }

    /// Posts a SEND that takes a lane. False: nothing was posted.
    pub(crate) fn post_by_lane(&mut self, qp: QpId, wr: &SendWr<'_>) -> bool {
        let probability = self.lanes.probability;
        let &[sge] = wr.sges else { return false };
        let is_short = wr.op == SendOp::Send && sge.len as usize <= MOST_BYTES;
        if probability == 0.0 || !is_short || !self.lanes.rng.random_bool(probability) {
            return false;
        }
        let slot = self.slot(qp);
        let (place, machine) = (&slot.place, &slot.qp);
        let may_have = machine.init().qp_type == QpType::Rc
            && place.link.immediate
            && place.next_link.is_none()
            && place.blocked_until.is_none();
        if !may_have {
            return false;
        }
        let is_open = machine.short_ways(&place.link).sends;
        let number = place.lanes.to_peer;
        let dest = machine.dest_qpn();
        let peer = self.gids.iter().position(|gid| *gid == machine.attr().av.dgid).map(DeviceId);
        match self.lanes.get(number) {
            None => {
                // As on the device, the SEND in front of an open lane is a packet.
                self.open_lane(qp);
                false
            }
            Some(_) if !is_open => false,
            Some(lane) if lane.written.saturating_sub(lane.known_taken) >= ROOM => false,
            Some(_) => self.with(qp, |machine, env| {
                let Around { now, shared, place, lanes, net, .. } = env;
                let (mrs, memory, pd) = (&shared.mrs, &shared.memory, machine.init().pd);
                let request = (wr.wr_id, wr.flags, sge);
                let solicited = wr.flags.contains(SendFlags::SOLICITED);
                machine.send_by_lane(request, &place.link, memory, |data, planned, acks| {
                    let Some(bytes) = bytes(data, (mrs, pd), memory) else { return false };
                    let send = ShortRequest { psn: planned.psn, solicited, ack_req: true, acks };
                    lanes.sends += 1;
                    lanes.send(*now, number, Some(send), bytes);
                    net.note_by_lane(*now, (shared.id, peer), (dest, &send), sge.len as usize);
                    true
                })
            }),
        }
    }

    /// A queue pair's process writes any SEND into the lane to its peer, or nonsense.
    pub fn forge_by_lane(&mut self, from: QpId, send: Option<ShortRequest>, bytes: &[u8]) {
        let bytes = bytes[..bytes.len().min(MOST_BYTES)].to_vec();
        if self.slot(from).place.lanes.to_peer.is_none() {
            self.open_lane(from);
        }
        let (now, number) = (self.now, self.slot(from).place.lanes.to_peer);
        self.lanes.send(now, number, send, bytes);
    }

    /// A queue pair's process says of the lane from its peer that everything up to this PSN is executed.
    pub fn forge_lane_answer(&mut self, from: QpId, executed: Option<Psn>) {
        self.with(from, |_, env| env.answer((0, 0), executed));
    }

    /// Opens a lane to the peer, if that is connected to this queue pair and on the same kind of link.
    fn open_lane(&mut self, qp: QpId) {
        let from = self.slot(qp);
        let (qpn, attr) = (from.place.qpn, from.qp.attr());
        let peer = self.qps().find(|slot| {
            let theirs = slot.qp.attr();
            slot.place.qpn == attr.dest_qpn
                && slot.qp.init().qp_type == QpType::Rc
                && theirs.state.receives()
                && theirs.dest_qpn == qpn
                && self.gid(slot.place.id.device) == attr.av.dgid
                && theirs.av.dgid == attr.av.sgid
                && slot.place.link.immediate
        });
        let Some(peer) = peer.map(|slot| slot.place.id).filter(|peer| *peer != qp) else { return };
        let link = self.net.link(qp.device, peer.device);
        let delay = link.delay;
        let ring_delay = link.delay + link.jitter + link.spread;
        self.lanes.opened += 1;
        let number = self.lanes.opened;
        self.lanes.lanes.insert(
            number,
            Lane {
                delay,
                ring_delay,
                cells: VecDeque::new(),
                look: None,
                written: 0,
                taken: 0,
                answers: VecDeque::new(),
                look_for_answer: None,
                known_taken: 0,
                out_of_turn: None,
            },
        );
        self.place_mut(qp).lanes.to_peer = Some(number);
        let memory = &self.devices[peer.device.0].shared.memory;
        let room = match self.slot(peer).place.lanes.peer {
            Some((_, room)) => room,
            None => memory.alloc(MOST_BYTES).expect("tests need little memory"),
        };
        let reader = &mut self.place_mut(peer).lanes;
        reader.peer = Some((attr.av.sgid, room));
        if let Some(before) = reader.from_peer.replace(number) {
            self.lanes.lanes.remove(&before);
        }
    }

    /// Looks at the lanes of a queue pair, if it is time.
    pub(crate) fn look_at_lanes(&mut self, qp: QpId) {
        let now = self.now;
        let place = &self.devices[qp.device.0].qps[qp.index].as_ref().expect("it lives").place;
        let Some(ring) = self.lanes.take_look(place, now) else { return };
        let is_dead = self.net.is_dead(qp.device);
        self.with(qp, |machine, env| {
            if is_dead {
                env.lanes.leave(env.place);
                return;
            }
            let open = machine.short_ways(&env.place.link);
            let (_, rest) = machine.read_lane_short(open, env);
            let mut is_out_of_turn = false;
            if let Rest::Lane(answer) = rest {
                if let Some(psn) = answer {
                    machine.receive_executed(psn, env);
                }
                let found = machine.read_lane(ring, env).unwrap_or_default();
                is_out_of_turn = found.is_out_of_turn;
                machine.transmit_rest(env);
            }
            env.lanes.look_again(env.place, now, ring, is_out_of_turn);
        });
    }

    fn place_mut(&mut self, qp: QpId) -> &mut QpPlace {
        &mut self.devices[qp.device.0].qps[qp.index].as_mut().expect("it lives").place
    }
}

/// The bytes of a SEND, if its key allows reading them.
fn bytes(data: LaneData<'_>, (mrs, pd): (&MrTable, u32), memory: &Arena) -> Option<Vec<u8>> {
    match data {
        LaneData::Inline(bytes) => Some(bytes.to_vec()),
        LaneData::Element(sge) => {
            let mut bytes = vec![0; sge.len as usize];
            if sge.len > 0 {
                hold_local(mrs, pd, sge, Access::empty()).ok()?;
                let payload = Payload::gather(std::slice::from_ref(sge), 0, bytes.len(), pd);
                payload.copy_to(mrs, memory, &mut bytes).ok()?;
            }
            Some(bytes)
        }
    }
}

impl AllLanes {
    fn send(&mut self, now: Time, number: Option<u64>, send: Option<ShortRequest>, bytes: Vec<u8>) {
        let Some(delay) = self.get(number).map(|lane| lane.delay) else { return };
        let at = now + delay;
        let look = self.look_after(at, delay);
        let Some(lane) = self.get(number) else { return };
        lane.written += 1;
        lane.cells.push_back(Cell { at, send, bytes });
        lane.look = lane.look.or(Some((look, Ring::Unread)));
    }
}

impl LaneEnds for Around<'_> {
    const MOST: usize = ROOM as usize;

    fn peek(&mut self) -> Result<Option<LaneSend>, NotASend> {
        let Some((_, room)) = self.place.lanes.peer else { return Ok(None) };
        let lane = self.lanes.get(self.place.lanes.from_peer);
        let cell = lane.and_then(|lane| lane.cells.front()).filter(|cell| cell.at <= self.now);
        let Some(cell) = cell else { return Ok(None) };
        let Some(send) = cell.send else { return Err(NotASend) };
        self.shared.memory.write(room, &cell.bytes).expect("the room is mapped");
        let payload = LanePayload { addr: room, len: cell.bytes.len() };
        Ok(Some(LaneSend { send, payload, is_last: true }))
    }

    fn take(&mut self, _sent: &LaneSend) {
        if let Some(lane) = self.lanes.get(self.place.lanes.from_peer) {
            lane.cells.pop_front();
            lane.taken += 1;
        }
    }

    fn answer(&mut self, _taken: (usize, u64), executed: Option<Psn>) {
        let number = self.place.lanes.from_peer;
        let Some(delay) = self.lanes.get(number).map(|lane| lane.delay) else { return };
        let at = self.now + delay;
        let look = self.lanes.look_after(at, delay);
        let Some(lane) = self.lanes.get(number) else { return };
        lane.answers.push_back(Answer { at, taken: lane.taken, executed });
        lane.look_for_answer = lane.look_for_answer.or(Some(look));
    }

    fn take_answer(&mut self) -> Option<Option<Psn>> {
        let now = self.now;
        let lane = self.lanes.get(self.place.lanes.to_peer)?;
        let mut last = None;
        // It is one word: only the last is seen.
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

    fn received(&mut self, _psn: Psn, _len: usize) {}
}

impl ShortLanes for Around<'_> {
    fn write(&mut self, pd: u32, to: &Sge, payload: LanePayload) -> bool {
        let written = self.with_local(pd, to, Access::LOCAL_WRITE, |memory, to| {
            to.is_none_or(|to| memory.copy(to, payload.addr, payload.len).is_ok())
        });
        written == Ok(true)
    }

    fn complete(&mut self, side: Side, wc: Wc, solicited: bool) {
        CompletionEnv::complete(self, side, wc, solicited);
    }
}

impl LaneEnv for Around<'_> {
    fn is_read(&self) -> bool {
        self.place.lanes.from_peer.is_some()
    }

    fn has_answer(&self) -> bool {
        let lane = self.place.lanes.to_peer.and_then(|number| self.lanes.lanes.get(&number));
        let answer = lane.and_then(|lane| lane.answers.front());
        answer.is_some_and(|answer| answer.at <= self.now)
    }

    fn leave(&mut self) {
        self.lanes.leave(self.place);
    }

    fn peer_arrival(&self) -> Option<Arrival> {
        let (peer, _) = self.place.lanes.peer?;
        Some(net::arrival(peer, self.shared.gid))
    }

    fn note_out_of_turn(&mut self, psn: Psn) {
        if let Some(lane) = self.lanes.get(self.place.lanes.from_peer) {
            lane.out_of_turn = Some(psn);
        }
    }

    fn was_out_of_turn(&self, psn: Psn) -> bool {
        let lane = self.place.lanes.from_peer.and_then(|number| self.lanes.lanes.get(&number));
        lane.is_some_and(|lane| lane.out_of_turn == Some(psn))
    }
}
