//! SENDs that take a lane, and the queue pairs at both ends of one.

use anyverbs_proto::env::{CompletionEnv, MemoryEnv, Side};
use anyverbs_proto::memory::Memory;
use anyverbs_proto::mr::{Access, MrTable};
use anyverbs_proto::payload::{Payload, hold_local};
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::qp::lane::{
    LaneData, LaneEnds, LaneEnv, LanePayload, LaneSend, NotASend, Rest, ShortLanes,
};
use anyverbs_proto::qp::{Arrival, ShortRequest};
use anyverbs_proto::types::Psn;
use anyverbs_proto::wc::Wc;
use anyverbs_proto::wr::{SendFlags, SendOp, SendWr, Sge};

use crate::device::{Around, DeviceId, QpId, QpPlace};
use crate::lane::ROOM;
use crate::memory::Arena;
use crate::net;
use crate::sim::Sim;

/// Bytes that a SEND in a lane of the device may have.
const MOST_BYTES: usize = 1024;

impl Sim {
    /// The probability that a SEND of few bytes takes a lane if it can. It can on links with segments, as within one host. It
    /// is 0 unless this was called.
    pub fn use_lanes(&mut self, probability: f64) {
        self.lanes.probability = probability;
    }

    /// Every SEND that the device's lanes take takes a lane if it can.
    pub(crate) fn use_long_lanes(&mut self) {
        (self.lanes.probability, self.lanes.most_bytes) = (1.0, MOST_BYTES);
    }

    /// The number of SENDs that took a lane.
    #[must_use]
    pub fn sent_by_lane(&self) -> u64 {
        self.lanes.sends
    }

    /// Posts a SEND that takes a lane. False: nothing was posted.
    pub(crate) fn post_by_lane(&mut self, qp: QpId, wr: &SendWr<'_>) -> bool {
        let &[sge] = wr.sges else { return false };
        let is_short = wr.op == SendOp::Send && sge.len as usize <= self.lanes.most_bytes;
        if !is_short || !self.lanes.wants_one() {
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
        let Some(has_room) = self.lanes.has_room(place.lanes.to_peer) else {
            // As on the device, the SEND in front of an open lane is a packet.
            self.open_lane(qp);
            return false;
        };
        if !has_room || !machine.short_ways(&place.link).sends {
            return false;
        }
        let dest = machine.dest_qpn();
        let peer = self.gids.iter().position(|gid| *gid == machine.attr().av.dgid).map(DeviceId);
        self.with(qp, |machine, env| {
            let Around { now, shared, place, lanes, net, .. } = env;
            let (mrs, memory, pd) = (&shared.mrs, &shared.memory, machine.init().pd);
            let request = (wr.wr_id, wr.flags, sge);
            let solicited = wr.flags.contains(SendFlags::SOLICITED);
            machine.send_by_lane(request, &place.link, memory, |data, planned, acks| {
                let Some(bytes) = bytes(data, (mrs, pd), memory) else { return false };
                let send = ShortRequest { psn: planned.psn, solicited, ack_req: true, acks };
                lanes.sends += 1;
                lanes.write(*now, place.lanes.to_peer, Some(send), bytes);
                net.note_by_lane(*now, (shared.id, peer), (dest, &send), sge.len as usize);
                true
            })
        })
    }

    /// A queue pair's process writes any SEND into the lane to its peer, or nonsense, if there is room.
    pub fn forge_by_lane(&mut self, from: QpId, send: Option<ShortRequest>, bytes: &[u8]) {
        if self.lanes.has_room(self.slot(from).place.lanes.to_peer).is_none() {
            self.open_lane(from);
        }
        let (now, number) = (self.now, self.slot(from).place.lanes.to_peer);
        if self.lanes.has_room(number) == Some(true) {
            let bytes = bytes[..bytes.len().min(MOST_BYTES)].to_vec();
            self.lanes.write(now, number, send, bytes);
        }
    }

    /// A queue pair's process says of the lane from its peer that everything up to this PSN is executed.
    pub fn forge_lane_answer(&mut self, from: QpId, executed: Option<Psn>) {
        let (now, ends) = (self.now, self.slot(from).place.lanes);
        self.lanes.answer(ends, now, executed);
    }

    /// Opens a lane to the peer, if that is connected to this queue pair and on the same kind of link.
    pub(crate) fn open_lane(&mut self, qp: QpId) {
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
        let number = self.lanes.open(link.delay, link.delay + link.jitter + link.spread);
        self.place_mut(qp).lanes.to_peer = Some(number);
        let memory = &self.devices[peer.device.0].shared.memory;
        let room = match self.slot(peer).place.lanes.peer {
            Some((_, room)) => room,
            None => memory.alloc(MOST_BYTES).expect("tests need little memory"),
        };
        let reader = &mut self.place_mut(peer).lanes;
        reader.peer = Some((attr.av.sgid, room));
        if let Some(before) = reader.from_peer.replace(number) {
            self.lanes.close(before);
        }
    }

    /// Looks at the lanes of a queue pair, if it is time.
    pub(crate) fn look_at_lanes(&mut self, qp: QpId) {
        let (now, ends) = (self.now, self.slot(qp).place.lanes);
        let Some(ring) = self.lanes.take_look(ends, now) else { return };
        let is_dead = self.net.is_dead(qp.device);
        self.with(qp, |machine, env| {
            if is_dead {
                env.lanes.leave(&mut env.place.lanes);
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
            env.lanes.look_again(env.place.lanes, now, ring, is_out_of_turn);
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

impl LaneEnds for Around<'_> {
    const MOST: usize = ROOM as usize;

    fn peek(&mut self) -> Result<Option<LaneSend>, NotASend> {
        let Some((_, room)) = self.place.lanes.peer else { return Ok(None) };
        let Some(cell) = self.lanes.peek(self.place.lanes, self.now) else { return Ok(None) };
        let Some(send) = cell.send else { return Err(NotASend) };
        self.shared.memory.write(room, &cell.bytes).expect("the room is mapped");
        let payload = LanePayload { addr: room, len: cell.bytes.len() };
        Ok(Some(LaneSend { send, payload, is_last: true }))
    }

    fn take(&mut self, _sent: &LaneSend) {
        self.lanes.take(self.place.lanes);
    }

    fn answer(&mut self, _taken: (usize, u64), executed: Option<Psn>) {
        self.lanes.answer(self.place.lanes, self.now, executed);
    }

    fn take_answer(&mut self) -> Option<Option<Psn>> {
        self.lanes.take_answer(self.place.lanes, self.now)
    }
}

impl ShortLanes for Around<'_> {
    type Ends = Self;

    fn ends(&mut self) -> &mut Self {
        self
    }

    fn received(&mut self, _psn: Psn, _len: usize) {}

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
    type Ends = Self;

    fn ends(&mut self) -> &mut Self {
        self
    }

    fn answer(&mut self, taken: (usize, u64), executed: Option<Psn>) {
        // Completions are in their queues at once.
        LaneEnds::answer(self, taken, executed);
    }

    fn received(&mut self, _psn: Psn, _len: usize) {}

    fn is_read(&self) -> bool {
        self.place.lanes.from_peer.is_some()
    }

    fn has_answer(&self) -> bool {
        self.lanes.has_answer(self.place.lanes, self.now)
    }

    fn leave(&mut self) {
        self.lanes.leave(&mut self.place.lanes);
    }

    fn peer_arrival(&self) -> Option<Arrival> {
        let (peer, _) = self.place.lanes.peer?;
        Some(net::arrival(peer, self.shared.gid))
    }

    fn note_out_of_turn(&mut self, psn: Psn) {
        self.lanes.note_out_of_turn(self.place.lanes, psn);
    }

    fn was_out_of_turn(&self, psn: Psn) -> bool {
        self.lanes.was_out_of_turn(self.place.lanes, psn)
    }
}
