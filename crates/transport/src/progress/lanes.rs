//! Lanes: short SENDs of other processes of this host, and the answers to ours.

use std::sync::Arc;

use anyverbs_links::shm::{self, Keeper, LaneCall};
use anyverbs_locks::{FastMutexGuard, rank};
use anyverbs_net::shm::{Channel, Poller, Spot};
use anyverbs_objects::base::Caller;
use anyverbs_objects::memory::Guard;
use anyverbs_proto::env::Side;
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::qp::lane::{Found, LanePayload, Rest, Ring, ShortLanes};
use anyverbs_proto::types::{Psn, Qpn};
use anyverbs_proto::wc::Wc;
use anyverbs_proto::wr::Sge;

use super::Driver;
use super::own::completes_for;
use crate::probes;
use crate::qp::arrivals::{Arrivals, reborrow};
use crate::qp::env::Call;
use crate::qp::{QpCell, State};

/// The short ways of a queue pair's lanes.
struct ShortWay<'a, 'c> {
    cell: &'a QpCell,
    lanes: &'a mut shm::Lanes,
    guard: Guard,
    into: &'a mut Option<&'c mut dyn Caller>,
}

impl ShortLanes for ShortWay<'_, '_> {
    type Ends = shm::Lanes;

    #[inline(always)]
    fn ends(&mut self) -> &mut shm::Lanes {
        self.lanes
    }

    #[inline]
    fn received(&mut self, psn: Psn, len: usize) {
        probes::receive_short(self.cell.qpn, psn, len);
    }

    #[inline]
    fn write(&mut self, pd: u32, to: &Sge, payload: LanePayload) -> bool {
        let of = Keeper { qpn: self.cell.qpn, pd };
        self.lanes.write(self.cell.transport.links, (of, self.guard), to, (payload, true))
    }

    /// Gives it to the thread that polls for it, or to its queue.
    #[inline]
    fn complete(&mut self, side: Side, wc: Wc, solicited: bool) {
        let Some(cq) = self.cell.cq(side) else { return };
        if let Some(into) = self.into
            && into.take(Arc::as_ptr(cq).cast(), &wc)
        {
            if side == Side::Send {
                self.cell.sq_credit.release(wc.sq_count);
            }
        } else if cq.push(wc, solicited) {
            let progress = self.cell.transport.core.progress();
            progress.note_overrun(Arc::clone(cq) as _, self.cell.qpn);
        }
    }
}

/// The finds of one look into all lanes.
#[derive(Clone, Copy, Default)]
pub(super) struct FoundInAll {
    /// SENDs that were taken.
    pub(super) taken: usize,
    /// One of them had SENDs or an answer.
    pub(super) any: bool,
    /// The next SEND of one is behind packets that come by the ring.
    pub(super) is_out_of_turn: bool,
}

impl FoundInAll {
    /// How much it is: SENDs, or something else.
    pub(super) fn number(&self) -> usize {
        self.taken.max(usize::from(self.any))
    }
}

/// The finding of a look at the lanes of one queue pair.
pub(super) struct Served {
    /// `None`: neither SENDs nor an answer.
    pub(super) found: Option<Found>,
    /// There may be more that this look has left.
    pub(super) has_more: bool,
    /// The queue pair is destroyed.
    pub(super) is_over: bool,
}

impl Driver {
    /// Executes what has come by the lanes, and takes answers. `last` is the queue pair of the last one.
    #[inline]
    pub(super) fn receive_lanes(
        &'static self,
        poller: &mut Poller,
        last: &mut Option<Arc<QpCell>>,
        ring: Ring,
        mut into: Option<&mut dyn Caller>,
    ) -> FoundInAll {
        let mut all = FoundInAll::default();
        let mut look = poller.look_at_lanes();
        let guard = self.core.memory.guard();
        while let Some(lane) = poller.next_lane(&mut look) {
            let qpn = Qpn::new(lane.tag);
            let known = last.take().filter(|cell| cell.qpn == qpn);
            let cell = known.or_else(|| self.transport.qps.find(qpn));
            let serve = |cell| self.serve(cell, guard, Some(ring), reborrow(&mut into)).found;
            let found = cell.as_ref().and_then(serve);
            let Some(found) = found else {
                // Its queue pair has ended, or has left it.
                poller.forget_lane(lane);
                continue;
            };
            if found.is_broken {
                poller.break_lane(lane);
            }
            poller.end_lane(lane);
            if let (Some(cell), Some(into)) = (&cell, &into)
                && completes_for(cell, *into)
            {
                Self::note_own(Some(cell));
            }
            all.taken += found.taken;
            (all.any, all.is_out_of_turn) = (true, all.is_out_of_turn | found.is_out_of_turn);
            *last = cell;
        }
        all
    }

    /// Executes what has come by the lane of a queue pair, and takes an answer. Without `ring` it leaves what is unusual.
    #[inline(never)]
    pub(super) fn serve<'a>(
        &'static self,
        cell: &'a Arc<QpCell>,
        guard: Guard,
        ring: Option<Ring>,
        mut into: Option<&'a mut dyn Caller>,
    ) -> Served {
        let mut state = cell.state.lock();
        if state.is_dead() {
            return Served { found: None, has_more: true, is_over: true };
        }
        let State { machine, link, .. } = &mut *state;
        let open = link.same_host.short_ways;
        let lanes = &mut link.same_host.lanes;
        let mut short = ShortWay { cell, lanes, guard, into: &mut into };
        let (found, rest) = machine.read_lane_short(open, &mut short);
        let Rest::Lane(answer) = rest else {
            return Served { found, has_more: false, is_over: false };
        };
        if ring.is_none() && answer.is_none() {
            return Served { found, has_more: true, is_over: false };
        }
        let found = self.serve_rest(cell, (state, ring), (found, answer), into);
        Served { found, has_more: ring.is_none(), is_over: false }
    }

    /// Goes on where the short ways have left the lane of a queue pair, with an answer that they did not take.
    #[inline(never)]
    fn serve_rest<'a>(
        &'static self,
        cell: &'a Arc<QpCell>,
        (mut state, ring): (FastMutexGuard<'a, rank::QueuePair, State>, Option<Ring>),
        (mut found, answer): (Option<Found>, Option<Psn>),
        into: Option<&'a mut dyn Caller>,
    ) -> Option<Found> {
        let State { machine, link, .. } = &mut *state;
        let mut call = Call::new(cell);
        let mut arrivals = Arrivals::new(cell, into);
        let mut env = call.env_with(link, &mut arrivals);
        if let Some(psn) = answer {
            machine.receive_executed(psn, &mut env);
        }
        if let Some(ring) = ring
            && let Some(more) = machine.read_lane(ring, &mut env)
        {
            let found = found.get_or_insert_default();
            found.taken += more.taken;
            (found.is_out_of_turn, found.is_broken) = (more.is_out_of_turn, more.is_broken);
        }
        machine.transmit_rest(&mut env);
        arrivals.end();
        call.settle(&mut state);
        found
    }

    /// A process has opened a lane to one of our queue pairs.
    #[cold]
    pub(super) fn accept_lane(&self, poller: &mut Poller, channel: &Arc<Channel>, call: LaneCall) {
        let refuse = || {
            channel.refuse_lane(call.index.into(), call.first);
            channel.tell(Spot::Answers(call.index.into()));
        };
        let Some(cell) = self.transport.qps.find(call.dest) else { return refuse() };
        let mut state = cell.state.lock();
        let State { machine, link, .. } = &mut *state;
        let is_peer = cell.qp_type == QpType::Rc
            && machine.attr().state.receives()
            && machine.dest_qpn() == call.from
            && link.is_from_peer(call.digest)
            && link.shm_peer().is_some()
            && link.may_have_lanes();
        if !is_peer {
            return refuse();
        }
        let Some(shm) = &self.links.shm else { return refuse() };
        if let Some(lane) = link.same_host.lanes.accept(shm, cell.port.number(), channel, &call) {
            poller.watch_lane(channel, lane, call.dest.get());
            link.settle_short_ways(machine);
        }
        channel.tell(Spot::Answers(call.index.into()));
    }
}
