//! The lanes of a connected queue pair: one to its peer, and one from it.
//!
//! A SEND of one packet leaves by a cell of the lane, if one is open. All other packets take the ring. Both have their place
//! in the one sequence of PSNs. So the reader takes what is next, whichever way it came, and what a lane loses is repeated
//! as packets.

use std::sync::Arc;

use anyverbs_net::shm::lane::{CELL_PAYLOAD, CELLS, Cell, LONGEST};
use anyverbs_net::shm::{Channel, LaneReader, LaneWriter, Spot};
use anyverbs_objects::memory::Guard;
use anyverbs_proto::mr::{Access, LastLocal};
use anyverbs_proto::qp::lane::{LaneData, LaneEnds, LanePayload, LaneSend, NotASend};
use anyverbs_proto::qp::{ShortRequest, ShortSend};
use anyverbs_proto::types::{Psn, Qpn};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wr::Sge;

use super::message::LaneCall;
use super::route::ShmRoute;
use super::traffic::LaneTally;
use super::{Shm, Spare, Unflushed};
use crate::Links;

/// A lane that was refused is asked for again after this many SENDs. The peer needs packets, or is not
/// connected that far. A question is a message and an answer. So among so many it costs little, and a program that goes
/// on for long still gets its lane. Without a bound each SEND would ask.
const ASK_AGAIN_AFTER: u32 = 1024;
/// The same for one that found no room in the ring, or no free lane. That costs no message, only a look at each lane. A ring
/// has room soon, mostly.
const TRY_AGAIN_AFTER: u32 = 64;

/// The acknowledged PSN is there, in the low half of a cell's first word.
const ACKS: u32 = 1 << 31;
/// The length, in a cell's second word.
const LEN: u64 = 0x1fff;
const SOLICITED: u64 = 1 << 13;
/// The number of SENDs of that length behind the first.
const MORE_AT: u32 = 14;
const MOST_MORE: u64 = 0xf;
/// The line of the lane's room at which a payload lies that is longer than the cell.
const LINE_AT: u32 = 18;
const LINE: u64 = 0x3fff;
const PSN_AT: u32 = 32;

/// The queue pair of the lanes, and its protection domain.
#[derive(Clone, Copy, Debug)]
pub struct Keeper {
    /// Its number.
    pub qpn: Qpn,
    /// The protection domain.
    pub pd: u32,
}

/// Copies `len` bytes of a SEND's data to an address of this process. False where its key or its memory does not allow that.
#[inline]
fn copy(
    links: &'static Links,
    (of, region): (Keeper, &mut LastLocal<'static>),
    guard: Guard,
    data: LaneData<'_>,
    (to, len): (u64, usize),
) -> bool {
    let from = match data {
        _ if len == 0 => return true,
        LaneData::Inline(bytes) => bytes.as_ptr() as u64,
        LaneData::Element(sge) => {
            let (mrs, range) = (&links.core.mrs, (sge.addr, len as u64));
            let need = Access::empty();
            let from = region.find_kept(mrs, of.qpn.get(), sge.lkey, of.pd, range, need);
            let Ok(Some(from)) = from else { return false };
            from
        }
    };
    links.core.memory.copy_by(guard, to, from, len).is_ok()
}

/// The lane to the peer.
#[derive(Debug, Default)]
enum ToPeer {
    #[default]
    Untried,
    /// The peer has not answered.
    Asked(Arc<LaneWriter>),
    Open(Arc<LaneWriter>),
    /// There is none. It is asked for again after this many SENDs.
    None(u32),
}

/// A cell that is not shown yet: more SENDs of the same length may follow in it.
#[derive(Clone, Copy, Debug, Default)]
struct Filling {
    /// There is one.
    is_open: bool,
    /// Its words.
    low: u32,
    word: u64,
    /// Bytes of payload in it.
    end: usize,
}

impl Filling {
    /// Bytes of each SEND.
    #[inline]
    fn len(&self) -> usize {
        (self.word & LEN) as usize
    }

    /// SENDs behind the first.
    #[inline]
    fn more(&self) -> u64 {
        self.word >> MORE_AT & MOST_MORE
    }

    /// The place in the payload of a SEND with these words, if that may follow in it.
    #[inline]
    fn next(&self, low: u32, word: u64, len: usize) -> Option<usize> {
        const SAME: u64 = LEN | SOLICITED;
        const FULL: u64 = MOST_MORE << MORE_AT;
        let is_like = self.low == low && (self.word ^ word) & SAME == 0 && word & SOLICITED == 0;
        let has_room = self.word & FULL != FULL && self.end + len <= CELL_PAYLOAD;
        (is_like && has_room).then_some(self.end)
    }

    /// Shows it, and counts its SENDs.
    #[inline]
    fn show(&mut self, lane: &LaneWriter, tally: Option<&LaneTally>) {
        self.is_open = false;
        lane.show(self.low, self.word);
        if let Some(tally) = tally {
            let sends = self.more() + 1;
            tally.sent.add(sends, sends * (Bth::LEN + self.len()) as u64, 0);
        }
    }
}

/// The lanes of a queue pair.
#[derive(Debug, Default)]
pub struct Lanes {
    to_peer: ToPeer,
    from_peer: Option<Arc<LaneReader>>,
    /// The channels of both. There are two where both processes connected at once.
    channels: [Option<Arc<Channel>>; 2],
    /// The cell that the present call fills.
    filling: Filling,
    /// SENDs of the next cell from the peer that were taken.
    taken: u64,
    /// Counts what goes by them.
    tally: Option<Arc<LaneTally>>,
    /// The PSN of a SEND from the peer that was there before its turn.
    out_of_turn: Option<Psn>,
    /// The regions of the last SEND and of the last receive, which it keeps in use.
    regions: [LastLocal<'static>; 2],
}

impl Lanes {
    /// Whether there is one.
    #[inline]
    #[must_use]
    pub fn are_any(&self) -> bool {
        self.tally.is_some() || self.from_peer.is_some()
    }

    /// Whether there is a lane from the peer.
    #[inline]
    #[must_use]
    pub fn are_read(&self) -> bool {
        self.from_peer.is_some()
    }

    /// Puts a SEND that was planned into a cell, if there is a lane and room in it, and nothing is wrong with its data. It
    /// acknowledges everything up to `acks`. The SENDs of one call may share a cell. [`tell_cell`](Self::tell_cell) shows the last.
    #[inline]
    pub fn send(
        &mut self,
        links: &'static Links,
        (of, guard): (Keeper, Guard),
        (data, solicited): (LaneData<'_>, bool),
        planned: &ShortSend,
        acks: Option<Psn>,
    ) -> bool {
        let ToPeer::Open(lane) = &self.to_peer else { return false };
        let len = planned.len as usize;
        let low = acks.map_or(0, |psn| ACKS | psn.get());
        let flags = if solicited { SOLICITED } else { 0 };
        let mut word = len as u64 | flags | u64::from(planned.psn.get()) << PSN_AT;
        let filling = &mut self.filling;
        let mut at = 0;
        if filling.is_open {
            at = filling.next(low, word, len).unwrap_or_default();
            if at == 0 {
                filling.show(lane, self.tally.as_deref());
            }
        }
        if len > LONGEST || !lane.has_room() {
            return false;
        }
        let [region, _] = &mut self.regions;
        let to = if len <= CELL_PAYLOAD {
            lane.payload_ptr() as u64 + at as u64
        } else {
            let Some((line, to)) = lane.room_ptr(len) else { return false };
            word |= u64::from(line) << LINE_AT;
            to as u64
        };
        if !copy(links, (of, region), guard, data, (to, len)) {
            return false;
        }
        if at > 0 {
            filling.word += 1 << MORE_AT;
            filling.end += len;
        } else {
            *filling = Filling { is_open: true, low, word, end: len };
        }
        true
    }

    /// The address of the bytes of a SEND's element. `None` where its key or its memory does not allow that.
    #[inline]
    pub fn source(&mut self, links: &'static Links, of: Keeper, sge: &Sge) -> Option<u64> {
        let [region, _] = &mut self.regions;
        let (mrs, range) = (&links.core.mrs, (sge.addr, sge.len.into()));
        region.find_kept(mrs, of.qpn.get(), sge.lkey, of.pd, range, Access::empty()).ok()?
    }

    /// Copies the payload of a SEND to its receive. False where the key or the memory of that does not allow it.
    /// `is_apart`: the payload lies where no receive can be. Otherwise a receive that it overlaps is not written.
    #[inline(always)]
    pub fn write(
        &mut self,
        links: &'static Links,
        (of, guard): (Keeper, Guard),
        sge: &Sge,
        (payload, is_apart): (LanePayload, bool),
    ) -> bool {
        let [_, region] = &mut self.regions;
        let (mrs, range) = (&links.core.mrs, (sge.addr, sge.len.into()));
        let need = Access::LOCAL_WRITE;
        let to = region.find_kept(mrs, of.qpn.get(), sge.lkey, of.pd, range, need);
        let LanePayload { addr, len } = payload;
        let copy = |to: u64| {
            (is_apart || to.abs_diff(addr) >= len as u64)
                && links.core.memory.copy_by(guard, to, addr, len).is_ok()
        };
        to.is_ok_and(|to| to.is_none_or(copy))
    }

    /// Lets go of the regions that it keeps in use.
    pub fn release_regions(&mut self) {
        self.regions = Default::default();
    }

    /// Asks for a lane, if there is none and it is time.
    #[inline]
    pub fn ask(
        &mut self,
        links: &'static Links,
        route: &ShmRoute,
        out: &mut Unflushed,
        spare: &mut Spare,
        (from, dest): (Qpn, Qpn),
    ) {
        match &mut self.to_peer {
            ToPeer::Asked(_) | ToPeer::Open(_) => {}
            ToPeer::None(n) if *n > 0 => *n -= 1,
            _ if !route.peer.channel().is_established() => {}
            ToPeer::None(_) | ToPeer::Untried => {
                let asked = self.open(links, route, out, spare, (from, dest));
                self.to_peer = asked.map_or(ToPeer::None(TRY_AGAIN_AFTER), ToPeer::Asked);
            }
        }
    }

    #[cold]
    fn open(
        &mut self,
        links: &'static Links,
        route: &ShmRoute,
        out: &mut Unflushed,
        spare: &mut Spare,
        (from, dest): (Qpn, Qpn),
    ) -> Option<Arc<LaneWriter>> {
        debug_assert!(!links.needs_packets(), "a SEND in a lane has the default P_Key");
        let shm = links.shm.as_ref()?;
        let lane = route.peer.channel().open_lane()?;
        let (index, first) = (lane.index() as u8, lane.next());
        let call = LaneCall { index, first, digest: route.digest(), from, dest };
        let told = out.sender(links, &route.peer, spare).0.reserve(LaneCall::LEN, 0);
        let Ok(mut room) = told else {
            lane.give_up();
            return None;
        };
        room.write_header(&call.emit());
        room.commit();
        lane.note_told();
        let channel = route.peer.channel();
        shm.endpoint().watch_lane(channel, &lane, from.get());
        self.channels[0] = Some(Arc::clone(channel));
        self.tally.get_or_insert_with(|| shm.traffic().of_lanes(out.device));
        Some(lane)
    }

    /// Whether the peer has answered since.
    #[inline]
    #[must_use]
    pub fn has_answer(&self) -> bool {
        match &self.to_peer {
            ToPeer::Asked(lane) | ToPeer::Open(lane) => lane.has_answer(),
            ToPeer::Untried | ToPeer::None(_) => false,
        }
    }

    /// Reads a lane that the peer has opened to a queue pair of `device`.
    pub fn accept(
        &mut self,
        shm: &Shm,
        device: u8,
        channel: &Arc<Channel>,
        call: &LaneCall,
    ) -> Option<Arc<LaneReader>> {
        self.close();
        let lane = Arc::new(channel.accept_lane(call.index.into(), call.first)?);
        self.tally.get_or_insert_with(|| shm.traffic().of_lanes(device));
        self.from_peer = Some(Arc::clone(&lane));
        self.channels[1] = Some(Arc::clone(channel));
        Some(lane)
    }

    /// Notes that the next SEND is there before its turn.
    pub fn note_out_of_turn(&mut self, psn: Psn) {
        self.out_of_turn = Some(psn);
    }

    /// Whether that was noted of the SEND with this PSN.
    #[must_use]
    pub fn was_out_of_turn(&self, psn: Psn) -> bool {
        self.out_of_turn == Some(psn)
    }

    /// Shows the last cell, and tells the peer of those that were filled.
    #[inline]
    pub fn tell_cell(&mut self) {
        if let (ToPeer::Open(lane), [Some(channel), _]) = (&self.to_peer, &self.channels) {
            if self.filling.is_open {
                self.filling.show(lane, self.tally.as_deref());
            }
            channel.tell(Spot::Cells(lane.index()));
        }
    }

    /// Tells the peer that there is an answer.
    #[inline]
    pub fn tell_answer(&self) {
        if let (Some(lane), [_, Some(channel)]) = (&self.from_peer, &self.channels) {
            channel.tell(Spot::Answers(lane.index()));
        }
    }

    fn close(&mut self) {
        if let Some(lane) = &self.from_peer {
            lane.close();
            self.tell_answer();
        }
        (self.from_peer, self.channels[1], self.taken) = (None, None, 0);
    }

    /// The peer has written nonsense to its lane: closes the channel of that.
    #[cold]
    pub fn break_off(&self) {
        if let [_, Some(channel)] = &self.channels {
            channel.break_off();
        }
    }

    /// Gives both up.
    pub fn leave(&mut self) {
        if let ToPeer::Asked(lane) | ToPeer::Open(lane) = std::mem::take(&mut self.to_peer) {
            lane.give_up();
        }
        self.channels[0] = None;
        self.close();
        (self.tally, self.out_of_turn) = (None, None);
        self.release_regions();
    }
}

impl LaneEnds for Lanes {
    const MOST: usize = CELLS as usize * (MOST_MORE as usize + 1);

    #[inline(always)]
    fn peek(&mut self) -> Result<Option<LaneSend>, NotASend> {
        let Some((lane, cell)) = self.from_peer.as_ref().and_then(|l| Some((l, l.peek()?))) else {
            return Ok(None);
        };
        let Cell { low, word } = cell;
        let (len, more) = ((word & LEN) as usize, word >> MORE_AT & MOST_MORE);
        let (mut psn, mut addr) = ((word >> PSN_AT) as u32, lane.payload_ptr() as u64);
        let mut end = len;
        if more > 0 {
            psn = psn.wrapping_add(self.taken as u32);
            addr += self.taken * len as u64;
            end += more as usize * len;
        }
        // The peer may have put another cell there since the last look.
        if self.taken > more {
            return Err(NotASend);
        }
        if end > CELL_PAYLOAD {
            // Several do not lie in the room.
            let line = (word >> LINE_AT & LINE) as u32;
            let alone = if more == 0 { lane.room_ptr(line, len) } else { None };
            addr = alone.ok_or(NotASend)? as u64;
        }
        let send = ShortRequest {
            psn: Psn::new(psn & 0xff_ffff),
            solicited: word & SOLICITED != 0,
            ack_req: true,
            acks: (low & ACKS != 0).then(|| Psn::new(low & 0xff_ffff)),
        };
        let payload = LanePayload { addr, len };
        Ok(Some(LaneSend { send, payload, is_last: self.taken == more }))
    }

    #[inline]
    fn take(&mut self, sent: &LaneSend) {
        self.taken += 1;
        if sent.is_last
            && let Some(lane) = &self.from_peer
        {
            lane.take();
            self.taken = 0;
        }
    }

    #[inline]
    fn answer(&mut self, (sends, bytes): (usize, u64), executed: Option<Psn>) {
        if let Some(tally) = &self.tally {
            tally.received.add(sends as u64, bytes, 0);
        }
        if let Some(lane) = &self.from_peer {
            lane.answer(executed.map(Psn::get));
        }
        self.tell_answer();
    }

    #[inline]
    fn take_answer(&mut self) -> Option<Option<Psn>> {
        let (ToPeer::Asked(lane) | ToPeer::Open(lane)) = &self.to_peer else { return None };
        let answer = lane.take_answer()?;
        if !answer.is_open {
            lane.give_up();
            self.to_peer = ToPeer::None(ASK_AGAIN_AFTER);
        } else if let ToPeer::Asked(lane) = &self.to_peer {
            self.to_peer = ToPeer::Open(Arc::clone(lane));
        }
        Some(answer.executed.map(Psn::new))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The places of SENDs that follow in one cell.
    fn places(sends: &[(u32, usize, bool)]) -> Vec<Option<usize>> {
        let word = |len: usize, solicited| len as u64 | if solicited { SOLICITED } else { 0 };
        let (low, len, solicited) = sends[0];
        let mut filling = Filling { is_open: true, low, word: word(len, solicited), end: len };
        let follow = sends[1..].iter().map(|&(low, len, solicited)| {
            let place = filling.next(low, word(len, solicited), len);
            if place.is_some() {
                filling.word += 1 << MORE_AT;
                filling.end += len;
            }
            place
        });
        follow.collect()
    }

    #[test]
    fn a_cell_takes_sends_of_one_kind_until_it_is_full() {
        assert_eq!(places(&[(1, 16, false); 4]), [Some(16), Some(32), None]);
        assert_eq!(places(&[(1, 24, false); 3]), [Some(24), None]);
        assert_eq!(places(&[(1, 25, false); 2]), [None]);
        let short = places(&[(1, 1, false); 18]);
        assert_eq!(short[..15], (1..16).map(Some).collect::<Vec<_>>());
        assert_eq!(short[15..], [None, None], "as many as it counts");
        for other in [(2, 8, false), (1, 9, false), (1, 8, true), (1, 8 + 4096, false)] {
            assert_eq!(places(&[(1, 8, false), other]), [None], "{other:?}");
        }
        assert_eq!(places(&[(1, 8, true), (1, 8, true)]), [None], "two events");
    }
}
