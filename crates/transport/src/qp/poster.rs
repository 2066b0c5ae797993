//! Posting under one hold of the queue pair's lock.

use std::fmt;
use std::sync::Arc;

use anyverbs_links::Links;
use anyverbs_links::direct::{self, MappedMemory, Within};
use anyverbs_links::shm::{Keeper, LONGEST_IN_LANE};
use anyverbs_locks::{FastMutexGuard, rank};
use anyverbs_objects::error::PostError;
use anyverbs_objects::memory::Guard;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::direct::{Direct, Direction, Local};
use anyverbs_proto::env::Side;
use anyverbs_proto::qp::attr::QpState;
use anyverbs_proto::qp::lane::{LaneEnds as _, LanePayload};
use anyverbs_proto::types::{Psn, Qpn};
use anyverbs_proto::wc::Wc;
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wr::{RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge};

use super::env::Call;
use super::qp_context::QpContext;
use super::{QpCell, State};
use crate::probes;

/// Posts to a queue pair; see [`Qp::post`](super::Qp::post).
pub struct Poster<'a> {
    pub(super) cell: &'a QpCell,
    /// Some until the drop.
    pub(super) state: Option<FastMutexGuard<'a, rank::QueuePair, State>>,
    /// From the first request on that is more than a receive that is queued.
    pub(super) call: Option<Call<'a>>,
    pub(super) sends: bool,
    /// SENDs have left by a lane.
    pub(super) by_lane: bool,
    /// The guard of the copies by this poster.
    pub(super) guard: Option<Guard>,
    /// The peer, if it is of this process. It may be destroyed meanwhile, and is dropped after the lock is released.
    pub(super) peer: Option<Arc<QpCell>>,
}

impl State {
    /// Posts a SEND of one element and sends it by the lane, where that is open. Its reader is to be told.
    #[inline]
    pub(super) fn send_short(
        &mut self,
        (links, guard): (&'static Links, Guard),
        (wr_id, flags, sge): (u64, SendFlags, Sge),
    ) -> bool {
        let State { machine, link, .. } = self;
        if !link.same_host.short_ways.sends {
            return false;
        }
        let of = Keeper { qpn: machine.qpn(), pd: machine.init().pd };
        let solicited = flags.contains(SendFlags::SOLICITED);
        let (lanes, props) = (&mut link.same_host.lanes, &link.to.props);
        let memory = &links.core.memory;
        machine.send_by_lane((wr_id, flags, sge), props, memory, |data, planned, acks| {
            let sent = lanes.send(links, (of, guard), (data, solicited), planned, acks);
            if sent {
                // Here, where the values are at hand: they need not be kept for it.
                probes::post_as(probes::SEND, of.qpn, wr_id, sge.len);
                probes::transmit_short(of.qpn, planned.psn, sge.len);
            }
            sent
        })
    }

    /// Posts a WRITE or READ of one element and does it without a message, where that is open.
    #[inline]
    pub(super) fn do_directly(
        &mut self,
        cell: &QpCell,
        operation: (Direction, RemoteAddr),
        request: (u64, SendFlags, Sge),
    ) -> bool {
        let ((direction, _), (_, flags, sge)) = (operation, request);
        self.link.same_host.short_ways.directs
            && self.machine.may_do_directly(direction, flags, sge.len)
            && self.copy_directly(cell, operation, request, |link, operation| {
                let (links, this) = (cell.transport.links, (cell.qpn, cell.port.counters()));
                let (to, last) = (&link.to, &mut link.same_host.last_copy);
                to.route.as_ref().is_some_and(|route| route.direct(links, last, this, operation))
            })
    }

    /// As [`do_directly`](Self::do_directly), with a queue pair of this process. `peer` gets that, and is dropped without a lock.
    #[inline(never)]
    pub(super) fn do_within(
        &mut self,
        (cell, peer): (&QpCell, &mut Option<Arc<QpCell>>),
        operation: (Direction, RemoteAddr),
        request: (u64, SendFlags, Sge),
    ) -> bool {
        let Self { machine, link, .. } = self;
        let ((direction, _), (_, flags, sge)) = (operation, request);
        let may_leave = link.is_open_within()
            && machine.may_post_direct()
            && machine.may_do_directly(direction, flags, sge.len);
        if !may_leave {
            return false;
        }
        // The peer stays locked until the copy is done, so nobody takes back what it grants meanwhile.
        let Some(mut locked) = self.try_lock_peer(cell, peer) else { return false };
        let (peer, machine) = match &locked {
            Some((peer, state)) => (*peer, &state.machine),
            None => (cell, &self.machine),
        };
        let Some(reach) = machine.admits_within(&self.machine, direction) else { return false };
        let peer = Within { reach, counters: peer.port.counters() };
        let done = self.copy_directly(cell, operation, request, |link, operation| {
            let (links, this) = (cell.transport.links, (cell.qpn, cell.port.counters()));
            direct::perform_within(links, &mut link.same_host.last_copy, this, &peer, operation)
        });
        if done {
            let machine = locked.as_mut().map_or(&mut self.machine, |(_, peer)| &mut peer.machine);
            machine.note_done_by_peer(sge.len);
        }
        done
    }

    /// Posts a WRITE or READ for which [`may_do_directly`](anyverbs_proto::qp::Qp::may_do_directly) holds, and does it by `copy`.
    #[inline]
    fn copy_directly(
        &mut self,
        cell: &QpCell,
        (direction, remote): (Direction, RemoteAddr),
        (wr_id, flags, sge): (u64, SendFlags, Sge),
        copy: impl FnOnce(&mut QpContext, &Direct<'_>) -> bool,
    ) -> bool {
        let State { machine, link, .. } = self;
        let (links, dest_qpn, pd) = (cell.transport.links, machine.dest_qpn(), machine.init().pd);
        let local = if flags.contains(SendFlags::INLINE) {
            let Some(bytes) = machine.copy_inline(&sge, &links.core.memory) else { return false };
            Local::Inline(bytes)
        } else {
            Local::Sges(std::slice::from_ref(&sge))
        };
        let (payload_of, len) = (None, sge.len);
        let operation = Direct { dest_qpn, direction, payload_of, remote, len, local, pd };
        if !copy(link, &operation) {
            return false;
        }
        let opcode = match direction {
            Direction::Write => probes::WRITE,
            Direction::Read => probes::READ,
        };
        probes::post_as(opcode, cell.qpn, wr_id, sge.len);
        if let Some(wc) = machine.book_direct(wr_id, direction, flags, sge.len) {
            complete(cell, Side::Send, wc, false);
        }
        true
    }
}

/// A queue pair of this process that is locked, beside its peer.
type LockedPeer<'a> = (&'a QpCell, FastMutexGuard<'a, rank::QueuePair, State>);

impl State {
    /// Locks the peer of a queue pair that is [open](QpContext::is_open_within) within the process. `Some(None)`: it is the same.
    /// `None`: the peer cannot be had at once, or needs packets.
    fn try_lock_peer<'p>(
        &self,
        cell: &QpCell,
        peer: &'p mut Option<Arc<QpCell>>,
    ) -> Option<Option<LockedPeer<'p>>> {
        let dest = self.machine.dest_qpn();
        if dest == cell.qpn {
            return self.machine.is_peer_of(&self.machine).then_some(None);
        }
        if peer.is_none() {
            *peer = cell.transport.qps.try_find(dest);
        }
        let peer = peer.as_deref()?;
        // Two queue pairs are locked together here alone. Whoever finds the second one locked does not wait for it.
        let state = peer.state.try_lock()?;
        let is_open = !state.is_dead()
            && state.link.is_open_within()
            && self.machine.is_peer_of(&state.machine);
        is_open.then_some(Some((peer, state)))
    }
}

/// A SEND to a queue pair of the same process.
struct Message {
    /// The queue pair that posts it.
    source: Qpn,
    wr_id: u64,
    /// Its PSN, and the packets that it counts as.
    planned: (Psn, u32),
    /// The address of its bytes.
    from: u64,
    len: u32,
    solicited: bool,
}

impl State {
    /// Posts a SEND of one element to a queue pair of this process, and has that execute it. False if nothing was posted: it has
    /// to be a packet. `peer` gets that queue pair, and is dropped without a lock.
    #[inline(never)]
    pub(super) fn send_within(
        &mut self,
        (cell, peer): (&QpCell, &mut Option<Arc<QpCell>>),
        guard: Guard,
        (wr_id, flags, sge): (u64, SendFlags, Sge),
    ) -> bool {
        let State { machine, link, .. } = self;
        if !link.is_open_within() {
            return false;
        }
        let len = sge.len;
        let Some(planned) = machine.plan_within(flags, len) else { return false };
        let of = Keeper { qpn: cell.qpn, pd: machine.init().pd };
        let from = if len == 0 || flags.contains(SendFlags::INLINE) {
            Some(sge.addr)
        } else {
            link.same_host.lanes.source(cell.transport.links, of, &sge)
        };
        let Some(from) = from else { return false };
        let solicited = flags.contains(SendFlags::SOLICITED);
        let message = Message { source: cell.qpn, wr_id, planned, from, len, solicited };
        let executed = match self.try_lock_peer(cell, peer) {
            Some(Some((peer, mut state))) => state.execute_within(peer, guard, &message),
            Some(None) => self.execute_within(cell, guard, &message),
            None => false,
        };
        if !executed {
            return false;
        }
        count(cell, [Counter::SentPkts, Counter::SentBytes], (planned.1, len));
        if let Some(wc) = self.machine.book_within(planned, (wr_id, flags), len) {
            complete(cell, Side::Send, wc, false);
        }
        true
    }

    /// Executes a SEND of a queue pair of this process. False: nothing has changed, but for bytes of the receive's memory.
    fn execute_within(&mut self, cell: &QpCell, guard: Guard, message: &Message) -> bool {
        let State { machine, link, .. } = self;
        let &Message { source, wr_id, planned, from, len, solicited } = message;
        let (psn, packets) = planned;
        let lanes = &mut link.same_host.lanes;
        let payload = LanePayload { addr: from, len: len as usize };
        let write = |pd, to: &Sge| {
            let of = Keeper { qpn: cell.qpn, pd };
            lanes.write(cell.transport.links, (of, guard), to, (payload, false))
        };
        let Some(wc) = machine.execute_within(planned, len, write) else { return false };
        // All three probes fire here, in the order that whoever traces expects.
        probes::post_as(probes::SEND, source, wr_id, len);
        probes::transmit_send(source, psn, packets, len);
        probes::receive_send(cell.qpn, psn, packets, len as usize);
        count(cell, [Counter::RcvdPkts, Counter::RcvdBytes], (packets, len));
        complete(cell, Side::Recv, wc, solicited);
        true
    }
}

/// Counts a SEND within the process.
fn count(cell: &QpCell, [of_packets, of_bytes]: [Counter; 2], (packets, len): (u32, u32)) {
    let (counters, packets) = (cell.port.counters(), u64::from(packets));
    counters.add(of_packets, packets);
    counters.add(of_bytes, u64::from(len) + packets * Bth::LEN as u64);
}

/// Adds a completion to its queue.
fn complete(cell: &QpCell, side: Side, wc: Wc, solicited: bool) {
    if let Some(cq) = cell.cq(side)
        && cq.push(wc, solicited)
    {
        cell.transport.core.progress().note_overrun(Arc::clone(cq) as _, cell.qpn);
    }
}

impl State {
    /// The peer's memory that a WRITE is about, if this process has mapped it.
    pub(super) fn mapped_memory(
        &mut self,
        cell: &QpCell,
        remote: RemoteAddr,
        len: u32,
    ) -> Option<MappedMemory> {
        let is_dead = self.is_dead();
        let State { machine, link, .. } = self;
        // Whoever watches sees a message.
        if is_dead || link.watch.is_some() || !machine.may_write_at_once(len) {
            return None;
        }
        let operation = Direct {
            dest_qpn: machine.dest_qpn(),
            direction: Direction::Write,
            payload_of: None,
            remote,
            len,
            local: Local::Sges(&[]),
            pd: machine.init().pd,
        };
        let this = (cell.qpn, cell.port.counters());
        link.to.route.as_ref()?.mapped_memory(cell.transport.links, this, &operation)
    }
}

/// The direction and the far side of a request that the device may do by itself.
#[inline]
pub(super) fn one_sided(op: SendOp) -> Option<(Direction, RemoteAddr)> {
    match op {
        SendOp::Write(remote) => Some((Direction::Write, remote)),
        SendOp::Read(remote) => Some((Direction::Read, remote)),
        _ => None,
    }
}

impl Poster<'_> {
    /// Posts a SEND, WRITE or READ of one element and does it in one step, if nothing is unusual. With false nothing was
    /// posted, and [`queue`](Self::queue) takes it.
    #[inline]
    pub fn post_short(&mut self, wr_id: u64, op: SendOp, flags: SendFlags, sge: Sge) -> bool {
        match (op, one_sided(op)) {
            (SendOp::Send, _) => self.send_short(wr_id, flags, sge),
            (_, Some(operation)) if self.call.is_none() => {
                let Some(state) = &mut self.state else { return false };
                let with = (self.cell, &mut self.peer);
                let request = (wr_id, flags, sge);
                state.do_directly(self.cell, operation, request)
                    || state.do_within(with, operation, request)
            }
            _ => false,
        }
    }

    #[inline]
    fn send_short(&mut self, wr_id: u64, flags: SendFlags, sge: Sge) -> bool {
        let Some(state) = &mut self.state else { return false };
        // The result of `short_ways` is stale while a call is under way.
        if self.call.is_some() {
            return false;
        }
        let links = self.cell.transport.links;
        let guard = *self.guard.get_or_insert_with(|| links.core.memory.guard());
        let sent = state.send_short((links, guard), (wr_id, flags, sge));
        self.by_lane |= sent;
        sent || state.send_within((self.cell, &mut self.peer), guard, (wr_id, flags, sge))
    }

    /// Shows the SENDs that have left by a lane to their reader.
    #[inline]
    fn end_short(&mut self) {
        if std::mem::take(&mut self.by_lane)
            && let Some(state) = &mut self.state
        {
            state.link.same_host.lanes.tell_cell();
        }
    }

    /// Posts a send. It starts when the poster is dropped, or at once.
    ///
    /// # Errors
    /// [`PostError::Send`], [`PostError::ElementsOfRead`].
    pub fn send(&mut self, wr: &SendWr<'_>) -> Result<(), PostError> {
        match wr.sges {
            &[sge] if self.post_short(wr.wr_id, wr.op, wr.flags, sge) => Ok(()),
            _ => self.queue(wr),
        }
    }

    /// As [`send`](Self::send), in the general way.
    ///
    /// # Errors
    /// [`PostError::Send`], [`PostError::ElementsOfRead`].
    pub fn queue(&mut self, wr: &SendWr<'_>) -> Result<(), PostError> {
        // Every device takes one element.
        if wr.sges.len() > 1 && matches!(wr.op, SendOp::Read(_)) {
            self.cell.takes_read(wr.sges.len())?;
        }
        self.sends = true;
        self.end_short();
        let Some(state) = &mut self.state else { return Err(PostError::Gone) };
        let State { machine, link, .. } = &mut **state;
        let call = self.call.get_or_insert_with(|| Call::new(self.cell));
        if let Some(Some(executed)) = link.same_host.lanes.take_answer() {
            // A request that has to follow those SENDs may go at once.
            machine.receive_executed(executed, &mut call.env(link));
        }
        if let Some(watch) = &mut link.watch {
            let (position, mtu) = (machine.sends_posted(), machine.attr().path_mtu.bytes());
            watch.posts_send(wr, (position, || self.cell.transport.core.now()), mtu);
        }
        if let Err(error) = machine.post_send(wr, &mut call.env(link)) {
            if let Some(watch) = &mut link.watch {
                watch.takes_back();
            }
            return Err(error.into());
        }
        if link.watch.is_some() {
            call.env(link).spoil_send(machine);
        }
        let len = wr.sges.iter().map(|sge| sge.len as usize).sum::<usize>();
        probes::post(self.cell.qpn, wr.wr_id, &wr.op, len as u32);
        if wr.op == SendOp::Send
            && len <= LONGEST_IN_LANE.min(machine.attr().path_mtu.bytes() as usize)
            && wr.sges.len() == 1
            && machine.state() == QpState::Rts
        {
            call.ask_for_lane(machine, link);
        }
        Ok(())
    }

    /// The number of sends that the queue still takes, so that a list can be posted whole or not at all.
    #[must_use]
    pub fn send_room(&self) -> u32 {
        self.state.as_ref().map_or(0, |state| state.machine.send_room())
    }

    /// Queues a receive.
    ///
    /// # Errors
    /// [`PostError::Recv`].
    #[inline]
    pub fn recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let Some(state) = &mut self.state else { return Err(PostError::Gone) };
        let State { machine, link, .. } = &mut **state;
        if let Some(queued) = machine.queue_recv(wr) {
            if let (Some(watch), Ok(())) = (&mut link.watch, queued) {
                watch.posts_receive(wr);
            }
            return Ok(queued?);
        }
        let call = self.call.get_or_insert_with(|| Call::new(self.cell));
        Ok(machine.post_recv(wr, &mut call.env(link))?)
    }
}

impl Drop for Poster<'_> {
    #[inline]
    fn drop(&mut self) {
        self.end_short();
        let owes_credit = self.state.as_ref().is_some_and(|state| state.link.owed.credit.is_some());
        if self.sends || self.call.is_some() || owes_credit {
            return self.finish();
        }
        // Receives that were queued and that no sender waits for, or SENDs that have left already.
        self.state = None;
        self.cell.transport.after_unlock();
    }
}

impl Poster<'_> {
    /// Starts the posted requests, and tells senders that wait for receives.
    fn finish(&mut self) {
        // In place: a call is long to move about.
        let Some(state) = &mut self.state else { return };
        let sent = self.sends
            && self.call.as_mut().is_some_and(|call| {
                // On some links they have left already.
                !state.machine.has_unsent() || call.send(state)
            });
        if !sent && state.link.owed.credit.is_none() {
            // Receives alone, and sends that gather, change nothing that others have to know.
            self.call = None;
            self.state = None;
            return self.cell.transport.after_unlock();
        }
        let call = self.call.get_or_insert_with(|| Call::new(self.cell));
        // Receives posted for a sender that waits for them.
        if let Some(asked) = state.link.owed.credit.take() {
            let limit = self.cell.message_limit(state, &asked);
            if limit > asked.packet.counts.messages {
                call.echo(&asked, limit);
            } else {
                state.link.owed.credit = Some(asked);
            }
        }
        call.settle(state);
        self.call = None;
        self.state = None;
        self.cell.transport.after_unlock();
    }
}

impl fmt::Debug for Poster<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poster").finish_non_exhaustive()
    }
}
