//! Posting under one hold of the queue pair's lock.

use std::fmt;
use std::sync::Arc;

use anyverbs_links::Links;
use anyverbs_links::direct::MappedMemory;
use anyverbs_links::shm::{Keeper, LONGEST_IN_LANE};
use anyverbs_locks::{FastMutexGuard, rank};
use anyverbs_objects::error::PostError;
use anyverbs_objects::memory::Guard;
use anyverbs_proto::direct::{Direct, Direction, Local};
use anyverbs_proto::qp::attr::QpState;
use anyverbs_proto::qp::lane::LaneEnds as _;
use anyverbs_proto::wr::{RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge};

use super::env::Call;
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
        self.link.same_host.short_ways.directs && self.copy_directly(cell, operation, request)
    }

    fn copy_directly(
        &mut self,
        cell: &QpCell,
        (direction, remote): (Direction, RemoteAddr),
        (wr_id, flags, sge): (u64, SendFlags, Sge),
    ) -> bool {
        let State { machine, link, .. } = self;
        if !machine.may_do_directly(direction, flags, sge.len) {
            return false;
        }
        let Some(route) = &link.to.route else { return false };
        let (links, dest_qpn, pd) = (cell.transport.links, machine.dest_qpn(), machine.init().pd);
        let local = if flags.contains(SendFlags::INLINE) {
            let Some(bytes) = machine.copy_inline(&sge, &links.core.memory) else { return false };
            Local::Inline(bytes)
        } else {
            Local::Sges(std::slice::from_ref(&sge))
        };
        let (payload_of, len) = (None, sge.len);
        let operation = Direct { dest_qpn, direction, payload_of, remote, len, local, pd };
        let this = (cell.qpn, cell.port.counters());
        if !route.direct(links, &mut link.same_host.last_copy, this, &operation) {
            return false;
        }
        let opcode = match direction {
            Direction::Write => probes::WRITE,
            Direction::Read => probes::READ,
        };
        probes::post_as(opcode, cell.qpn, wr_id, sge.len);
        if let (Some(wc), Some(cq)) =
            (machine.book_direct(wr_id, direction, flags, sge.len), &cell.send_cq)
            && cq.push(wc, false)
        {
            cell.transport.core.progress().note_overrun(Arc::clone(cq) as _, cell.qpn);
        }
        true
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
                state.do_directly(self.cell, operation, (wr_id, flags, sge))
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
        sent
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
        // Receives that were queued, and that no sender waits for.
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
