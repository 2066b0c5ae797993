//! Lanes: short SENDs of other processes of this host, and the answers to ours.

use std::sync::Arc;

use anyverbs_links::shm::{Keeper, LaneCall, MOST_IN_LANE, Short};
use anyverbs_net::shm::{Channel, Poller, Spot};
use anyverbs_objects::base::Caller;
use anyverbs_proto::env::Side;
use anyverbs_proto::payload::Data;
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::qp::{Incoming, ShortWays};
use anyverbs_proto::types::{Psn, Qpn};
use anyverbs_proto::wc::Wc;
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::opcode::{Opcode, Operation, Service};
use anyverbs_proto::wire::packet::Headers;
use anyverbs_proto::wr::Sge;

use super::Driver;
use crate::probes;
use crate::qp::arrivals::{Arrivals, reborrow};
use crate::qp::env::Call;
use crate::qp::{QpCell, State};

const SEND: Opcode = Opcode::new(Service::Rc, Operation::SendOnly);

/// Most SENDs of a lane that are executed in one go.
const BATCH: usize = 64;

/// The finds of one look into a lane, or into all.
#[derive(Clone, Copy, Default)]
pub(super) struct Found {
    /// SENDs that were taken.
    pub(super) taken: usize,
    /// One of all lanes had SENDs or an answer.
    pub(super) any: bool,
    /// The next SEND is behind packets that come by the ring.
    pub(super) is_out_of_turn: bool,
    /// The peer has written nonsense.
    is_broken: bool,
}

impl Found {
    /// How much it is: SENDs, or something else.
    pub(super) fn number(&self) -> usize {
        self.taken.max(usize::from(self.any))
    }
}

/// Whether packets of the ring may still be in front of a SEND.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Ring {
    Unread,
    Read,
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
    ) -> Found {
        let mut all = Found::default();
        let mut look = poller.look_at_lanes();
        while let Some(lane) = poller.next_lane(&mut look) {
            let qpn = Qpn::new(lane.tag);
            let known = last.take().filter(|cell| cell.qpn == qpn);
            let cell = known.or_else(|| self.transport.qps.find(qpn));
            let found = cell.as_ref().and_then(|cell| self.serve(cell, ring, reborrow(&mut into)));
            let Some(found) = found else {
                // Its queue pair has ended, or has left it.
                poller.forget_lane(lane);
                continue;
            };
            if found.is_broken {
                poller.break_lane(lane);
            }
            poller.end_lane(lane);
            all.taken += found.taken;
            (all.any, all.is_out_of_turn) = (true, all.is_out_of_turn | found.is_out_of_turn);
            *last = cell;
        }
        all
    }

    /// Executes the SENDs of a lane that come before a packet of the ring. Takes the lane's answer first: a program expects
    /// its own send to be complete when it sees the reply. The caller has the receive path.
    pub(super) fn catch_up(
        &self,
        state: &mut State,
        call: &mut Call<'_>,
        arrivals: &mut Arrivals<'_>,
        psn: Psn,
    ) {
        let lanes = &state.link.same_host.lanes;
        if lanes.has_answer() || (lanes.are_read() && psn != state.machine.expected()) {
            // A lane holds no more. A peer that goes on meanwhile waits for the next look.
            for _ in 0..=MOST_IN_LANE / BATCH {
                let found = drain(state, call, arrivals, Ring::Unread).unwrap_or_default();
                if found.taken < BATCH {
                    break;
                }
            }
        }
    }

    /// Executes what has come by the lane of a queue pair, and takes an answer. `None`: there is nothing of either.
    #[inline]
    fn serve<'a>(
        &'static self,
        cell: &'a Arc<QpCell>,
        ring: Ring,
        mut into: Option<&'a mut dyn Caller>,
    ) -> Option<Found> {
        let mut state = cell.state.lock();
        if state.is_dead() {
            return None;
        }
        let (mut found, is_over, answer) = self.drain_short(cell, &mut state, &mut into);
        if is_over {
            return found;
        }
        let mut call = Call::new(cell);
        let mut arrivals = Arrivals::new(cell, into);
        if let (Some(psn), State { machine, link, .. }) = (answer, &mut *state) {
            machine.receive_executed(psn, &mut call.env_with(link, &mut arrivals));
        }
        if let Some(more) = drain(&mut state, &mut call, &mut arrivals, ring) {
            let found = found.get_or_insert_default();
            found.taken += more.taken;
            (found.is_out_of_turn, found.is_broken) = (more.is_out_of_turn, more.is_broken);
        }
        let State { machine, link, .. } = &mut *state;
        machine.transmit_rest(&mut call.env_with(link, &mut arrivals));
        arrivals.end();
        call.settle(&mut state);
        found
    }

    /// As [`drain`], by the short ways. False if something is left for that, and an answer if the general way has to take it. No
    /// ACK is owed for what is executed here: the lane's answer tells of it.
    #[inline]
    fn drain_short(
        &self,
        cell: &QpCell,
        state: &mut State,
        into: &mut Option<&mut dyn Caller>,
    ) -> (Option<Found>, bool, Option<Psn>) {
        let State { machine, link, .. } = state;
        let (mut found, mut any, mut is_over) = (Found::default(), false, true);
        let mut bytes = 0;
        let mut left = None;
        let ShortWays { sends, receives, .. } = link.same_host.short_ways;
        let of = Keeper { qpn: cell.qpn, pd: machine.init().pd };
        let guard = self.core.memory.guard();
        while found.taken < BATCH {
            let short = match link.same_host.lanes.peek() {
                Ok(None) => break,
                Ok(Some(short)) if receives => short,
                _ => {
                    is_over = false;
                    break;
                }
            };
            let Short { send, payload, is_last } = short;
            let len = payload.len;
            if let Some(psn) = send.acks.filter(|psn| machine.awaits(*psn)) {
                let complete = |wc| self.complete_short(cell, Side::Send, wc, false, into);
                if !sends || !machine.complete_short(psn, complete) {
                    is_over = false;
                    break;
                }
            }
            let lanes = &mut link.same_host.lanes;
            let write =
                |pd, sge: &Sge| lanes.write(self.links, (Keeper { pd, ..of }, guard), sge, payload);
            let Some(wc) = machine.execute_short(send.psn, len as u32, write) else {
                is_over = false;
                break;
            };
            probes::receive_short(cell.qpn, send.psn, len);
            self.complete_short(cell, Side::Recv, wc, send.solicited, into);
            link.same_host.lanes.take(is_last);
            found.taken += 1;
            bytes += (Bth::LEN + len) as u64;
        }
        any |= found.taken > 0;
        if is_over && let Some(answer) = link.same_host.lanes.take_answer() {
            any = true;
            if let Some(psn) = answer.filter(|psn| machine.awaits(*psn)) {
                let complete = |wc| self.complete_short(cell, Side::Send, wc, false, into);
                if !sends || !machine.complete_short(psn, complete) {
                    (left, is_over) = (Some(psn), false);
                }
            }
        }
        if found.taken > 0 {
            link.same_host.lanes.count_received(found.taken, bytes);
            link.same_host.lanes.answer(machine.executed());
            link.same_host.lanes.tell_answer();
        }
        (any.then_some(found), is_over, left)
    }

    /// Gives a completion to the thread that polls for it, or to its queue.
    #[inline]
    fn complete_short(
        &self,
        cell: &QpCell,
        side: Side,
        wc: Wc,
        solicited: bool,
        into: &mut Option<&mut dyn Caller>,
    ) {
        let Some(cq) = cell.cq(side) else { return };
        if let Some(into) = into
            && into.take(Arc::as_ptr(cq).cast(), &wc)
        {
            if side == Side::Send {
                cell.sq_credit.release(wc.sq_count);
            }
        } else if cq.push(wc, solicited) {
            self.core.progress().note_overrun(Arc::clone(cq) as _, cell.qpn);
        }
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

/// Executes the SENDs of a lane that are next, and takes an answer. A SEND that is early stays until the ring is read. `None`:
/// there is nothing.
#[inline]
pub(super) fn drain(
    state: &mut State,
    call: &mut Call<'_>,
    arrivals: &mut Arrivals<'_>,
    ring: Ring,
) -> Option<Found> {
    let State { machine, link, .. } = state;
    let mut found = Found::default();
    let (mut any, mut bytes) = (false, 0);
    while found.taken < BATCH {
        let Short { send, payload, is_last } = match link.same_host.lanes.peek() {
            Ok(Some(short)) => short,
            Ok(None) => break,
            Err(_) => {
                (found.is_broken, any) = (true, true);
                link.leave_lanes();
                break;
            }
        };
        any = true;
        let payload = Data::from(payload);
        let mut env = call.env_with(link, arrivals);
        if !machine.receive_short_send(&send, payload, &mut env) {
            // A gap is one if the ring was read after the SEND was there.
            let is_out_of_turn = send.psn.since(machine.expected()) > 0;
            if is_out_of_turn
                && (ring == Ring::Unread || !link.same_host.lanes.was_out_of_turn(send.psn))
            {
                // Not behind the look at the ring: one queue pair may be served twice then, for its two lanes.
                if ring == Ring::Unread {
                    link.same_host.lanes.note_out_of_turn(send.psn);
                }
                found.is_out_of_turn = true;
                break;
            }
            // Whatever is unusual is a packet.
            let Some(arrival) = link.peer_arrival() else { break };
            if let Some(psn) = send.acks {
                machine.receive_executed(psn, &mut call.env_with(link, arrivals));
            }
            let packet = packet(machine.qpn(), send.psn, send.solicited, payload);
            machine.receive(&arrival, &packet, &mut call.env_with(link, arrivals));
        }
        // Once, though it may have been there in several looks.
        probes::receive_short(machine.qpn(), send.psn, payload.len());
        link.same_host.lanes.take(is_last);
        found.taken += 1;
        bytes += (Bth::LEN + payload.len()) as u64;
    }
    if let Some(answer) = link.same_host.lanes.take_answer() {
        any = true;
        if let Some(psn) = answer {
            machine.receive_executed(psn, &mut call.env_with(link, arrivals));
        }
    }
    if found.taken > 0 {
        link.same_host.lanes.count_received(found.taken, bytes);
        let executed = machine.executed();
        link.same_host.lanes.answer(executed);
        if executed.is_some() {
            machine.note_told();
        }
        link.same_host.lanes.tell_answer();
    }
    any.then_some(found)
}

/// A short SEND as the packet that it stands for.
#[cold]
fn packet(dest: Qpn, psn: Psn, solicited: bool, payload: Data<'static>) -> Incoming<'static> {
    let pad = Bth::pad_of(payload.len());
    let bth = Bth { solicited, migreq: true, pad, ack_req: true, ..Bth::new(SEND, dest, psn) };
    Incoming { headers: Headers::new(bth), payload, packets: 1, acks: None }
}
