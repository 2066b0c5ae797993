//! What the device gives a queue pair's machine for the time of one call.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use anyverbs_net::MAX_PAYLOAD_V6;
use anyverbs_proto::comp_cntr::CompCntrOps;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::direct::{Direct, Direction, Worth};
use anyverbs_proto::env::{Env, Side, TransmitError};
use anyverbs_proto::event::QpEvent;
use anyverbs_proto::mr::{Access, KeyError, LastLocal, MrTable};
use anyverbs_proto::payload::Payload;
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::recv_queue::RecvWqe;
use anyverbs_proto::tag_list::{Tagged, Taken};
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Psn, Qpn};
use anyverbs_proto::wc::{TmInfo, Wc};
use anyverbs_proto::wire::packet::Headers;
use anyverbs_proto::wr::{AddressVector, RemoteAddr, Sge};
use parking_lot::MutexGuard;

use super::Engine;
use super::arrivals::Arrivals;
use super::owed::Debt;
use super::timers::Registered;
use super::xrc::Share;
use crate::base::directory::{PublishedQp, publish_qp};
use crate::comp_cntr::Attached;
use crate::link::direct::{self, LastTarget};
use crate::link::shm::{self, Peer, Refused, ShmRoute, Spare};
use crate::link::udp::{Asked, Outbox, UdpRoute};
use crate::memory::ProcessMemory;
use crate::qp::{QpCell, State};
use crate::srq::SrqCell;

/// After what silence of a peer on another host packets are sent again: longer than it takes a process to be woken, and
/// than the kernel's tick: a nearer timer is programmed whenever the worker sleeps, which costs an event 8 us.
const PROBE_AFTER: Duration = Duration::from_millis(8);

/// Bytes of early requests that a queue pair may keep: a window of a peer like this one.
const EARLY_ROOM: usize = 256 << 10;

/// How a packet leaves.
#[derive(Clone, Debug)]
pub(crate) enum Route {
    /// To a queue pair of this process.
    Inproc,
    /// To another process of this host, through shared memory.
    Shm(ShmRoute),
    /// By UDP.
    Udp(UdpRoute),
    /// To a multicast group that the kernel does not deliver: through the queue of this process, and whoever drains that hands
    /// it on to the others.
    HandingOn,
}

impl Route {
    /// `mtu` of a connected queue pair.
    fn new(engine: &'static Engine, av: &AddressVector, dest: Qpn, mtu: Option<u32>) -> Self {
        if is_to_group(av, dest) {
            // The kernel gives copies to the members on this host, too, but where it cannot.
            return if is_handed_on(av, dest) {
                Self::HandingOn
            } else {
                Self::Udp(UdpRoute::new(engine, av, dest.slot()))
            };
        }
        let slot = dest.slot();
        if slot == engine.core.slot {
            if engine.core.config.inproc && engine.core.gids.contains(av.dgid) {
                return Self::Inproc;
            }
        } else if let Some(link) = &engine.shm
            && slot != 0
            && engine.core.gids.contains(av.dgid)
            && let Some(route) = ShmRoute::new(engine, link, av, slot, mtu)
        {
            return Self::Shm(route);
        }
        Self::Udp(UdpRoute::new(engine, av, slot))
    }
}

fn is_to_group(av: &AddressVector, dest: Qpn) -> bool {
    dest == Qpn::MULTICAST && av.dgid.is_multicast()
}

fn is_handed_on(av: &AddressVector, dest: Qpn) -> bool {
    is_to_group(av, dest) && anyverbs_net::is_handed_on(av.dgid.to_ip(), av.scope_id)
}

/// What the engine keeps for each queue pair, under its lock.
#[derive(Debug, Default)]
pub(crate) struct Link {
    /// Of a connected queue pair, pinned when its address is set.
    route: Option<Route>,
    /// Of the last datagram.
    last: Option<(AddressVector, u8, Route)>,
    /// For sending through shared memory.
    spare: Spare,
    /// Of one-sided operations without a message.
    last_target: LastTarget,
    /// Counted as in flight on its path.
    in_flight: bool,
    /// The entries among the timers that count.
    pub(crate) timers: Registered,
    /// A timer waits for the link to catch up: in the process from this round on; it looks again at this time.
    pub(crate) catch_up: (Option<u64>, Option<Time>),
    /// Its peer's process has ended: what still waits for it then fails.
    pub(crate) doomed: Option<Time>,
    /// It owes an ACK, or has small sends to gather.
    pub(crate) debt: Debt,
    /// As `debt`, to queue pairs of this process.
    pub(crate) owed_inproc: bool,
    /// Has small sends to gather.
    pub(crate) gathers: bool,
    /// A credit probe that found no receives: the answer changes when some are posted.
    pub(crate) starved: Option<Asked>,
    /// On a list of those that wait for room.
    pub(crate) blocked: bool,
    /// Of a target: the SRQ that its last request named.
    pub(crate) xrc_srq: Option<Arc<SrqCell>>,
    /// Of a target whose responder has been in other processes.
    pub(crate) share: Option<Box<Share>>,
    /// Who counts its completions.
    pub(crate) comp_cntrs: Attached,
    /// What peers are told that they may do without a message.
    pub(crate) published: PublishedQp,
}

impl Link {
    /// Pins a connected queue pair to its path.
    pub(crate) fn pin(&mut self, engine: &'static Engine, machine: &anyverbs_proto::qp::Qp) {
        self.leave_path();
        let attr = machine.attr();
        if machine.init().qp_type != QpType::Ud {
            let mtu = attr.path_mtu.bytes();
            self.route = Some(Route::new(engine, &attr.av, attr.dest_qpn, Some(mtu)));
        }
    }

    /// Forgets the path.
    pub(crate) fn leave_path(&mut self) {
        self.set_in_flight(false);
        self.route = None;
        self.last = None;
        self.spare = Spare::default();
        self.last_target = LastTarget::default();
        self.blocked = false;
        self.doomed = None;
    }

    fn set_in_flight(&mut self, in_flight: bool) {
        if self.in_flight != in_flight {
            self.in_flight = in_flight;
            if let Some(Route::Udp(udp)) = &self.route {
                udp.path.set_in_flight(in_flight);
            }
        }
    }

    /// The other process at the end of its route, if that goes through shared memory.
    pub(crate) fn shm_peer(&self) -> Option<&Arc<Peer>> {
        match (&self.route, &self.last) {
            (Some(Route::Shm(shm)), _) | (None, Some((_, _, Route::Shm(shm)))) => Some(&shm.peer),
            _ => None,
        }
    }

    /// Leaves shared memory for UDP.
    pub(crate) fn reroute(&mut self, engine: &'static Engine, av: &AddressVector, dest: Qpn) {
        self.set_in_flight(false);
        if self.route.is_some() {
            self.route = Some(Route::Udp(UdpRoute::new(engine, av, dest.slot())));
        }
        self.last = None;
        self.spare = Spare::default();
    }

    pub(crate) fn is_inproc(&self) -> bool {
        matches!(self.route, Some(Route::Inproc))
    }
}

/// One call into a queue pair's machine, or several under one hold of its lock. Ends with [`finish`](Self::finish), or with
/// [`settle`](Self::settle) under the lock and [`Engine::after_unlock`] behind it.
pub(crate) struct Call<'a> {
    cell: &'a QpCell,
    now: Cell<Option<Time>>,
    out: Outbox,
}

impl<'a> Call<'a> {
    pub(crate) fn new(cell: &'a QpCell) -> Self {
        Self { cell, now: Cell::new(None), out: Outbox::default() }
    }

    pub(crate) fn at(cell: &'a QpCell, now: Time) -> Self {
        Self { cell, now: Cell::new(Some(now)), out: Outbox::default() }
    }

    pub(crate) fn env<'b, 'c>(&'b mut self, link: &'b mut Link) -> DeviceEnv<'b, 'c> {
        DeviceEnv {
            engine: self.cell.engine,
            cell: self.cell,
            now: &self.now,
            out: &mut self.out,
            link,
            arrivals: None,
        }
    }

    /// As [`env`](Self::env), for one of several packets that share what they can.
    pub(super) fn env_with<'b, 'c>(
        &'b mut self,
        link: &'b mut Link,
        arrivals: &'b mut Arrivals<'c>,
    ) -> DeviceEnv<'b, 'c> {
        DeviceEnv { arrivals: Some(arrivals), ..self.env(link) }
    }

    /// Sends what was posted, or lets it wait for more where that makes fuller batches: then false, and there is nothing to
    /// settle.
    pub(crate) fn send(&mut self, state: &mut State) -> bool {
        let State { machine, link, .. } = state;
        let env = self.env(link);
        if !machine.may_gather(env.batch()) {
            link.gathers = false;
            machine.transmit(&mut self.env(link));
            return true;
        }
        if !std::mem::replace(&mut link.gathers, true) {
            self.cell.engine.note_owing(self.cell.qpn, &mut link.debt, true);
            self.cell.engine.look_after_owed();
        }
        false
    }

    /// Answers a credit probe again.
    pub(crate) fn echo(&mut self, asked: &Asked, limit: u64) {
        self.out.echo(self.cell.engine, asked, limit);
    }

    /// Brings the engine's books up to date and sends what is staged; the lock may be released then.
    pub(crate) fn settle(&mut self, state: &mut State) {
        let engine = self.cell.engine;
        self.out.flush(engine);
        let State { machine, link, .. } = state;
        if let Some(spare) = self.out.shm.take_spare() {
            link.spare = spare;
        }
        publish_qp(engine.core.directory.as_ref(), machine, &mut link.published);
        link.set_in_flight(machine.is_in_flight());
        let deadline = machine.deadline().map(|d| link.catch_up.1.map_or(d, |until| d.max(until)));
        let deadline = match (deadline, link.doomed) {
            (deadline, None) => deadline,
            (deadline, Some(doomed)) => Some(deadline.map_or(doomed, |d| d.min(doomed))),
        };
        if let Some(deadline) = deadline
            && link.timers.add(deadline)
        {
            engine.add_timer(deadline, self.cell.qpn);
        }
        let owes = machine.owes_ack();
        if !link.is_inproc() {
            engine.note_owing(self.cell.qpn, &mut link.debt, owes || link.gathers);
        } else if owes && !std::mem::replace(&mut link.owed_inproc, true) {
            engine.inproc.owe(self.cell.qpn);
        }
    }

    /// Sends what is staged for a queue pair that does nothing any more, and forgets its path.
    pub(crate) fn finish_last(mut self, mut state: MutexGuard<'_, State>) {
        let engine = self.cell.engine;
        self.out.flush(engine);
        if let Some(directory) = &engine.core.directory {
            directory.withdraw_qp(self.cell.qpn, &mut state.link.published);
        }
        engine.note_owing(self.cell.qpn, &mut state.link.debt, false);
        state.link.leave_path();
        let unsettled = state.link.published.take_unsettled();
        drop(state);
        engine.after_unlock();
        if unsettled {
            engine.core.settle_copies();
        }
    }

    /// Settles, unlocks, and does what had to wait for that.
    pub(crate) fn finish(mut self, mut state: MutexGuard<'_, State>) {
        self.settle(&mut state);
        drop(state);
        self.cell.engine.after_unlock();
    }
}

pub(crate) struct DeviceEnv<'a, 'c> {
    engine: &'static Engine,
    cell: &'a QpCell,
    now: &'a Cell<Option<Time>>,
    out: &'a mut Outbox,
    link: &'a mut Link,
    /// What it shares with other packets of its batch.
    arrivals: Option<&'a mut Arrivals<'c>>,
}

/// The moment of a call.
fn now(engine: &Engine, known: &Cell<Option<Time>>) -> Time {
    known.get().unwrap_or_else(|| {
        let now = engine.core.now();
        known.set(Some(now));
        now
    })
}

impl DeviceEnv<'_, '_> {
    fn is_connected(&self) -> bool {
        self.cell.qp_type != QpType::Ud
    }

    /// What comes next is not to overtake the completions that were gathered.
    fn flush_completions(&mut self) {
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.flush();
        }
    }

    /// Finds another route for a datagram. False if it would go to where the last one ended.
    fn redirect(&mut self, av: &AddressVector, dest: Qpn) -> bool {
        self.route_datagram(av, dest);
        self.link.shm_peer().is_none_or(|peer| peer.is_open())
    }

    /// Makes sure that the datagram's route stands in `last`.
    fn route_datagram(&mut self, av: &AddressVector, dest: Qpn) {
        let slot = dest.slot();
        let leads = |(last, s, route): &(AddressVector, u8, Route)| {
            *s == slot && last == av && matches!(route, Route::HandingOn) == is_handed_on(av, dest)
        };
        if !self.link.last.as_ref().is_some_and(leads) {
            self.link.last = Some((*av, slot, Route::new(self.engine, av, dest, None)));
        }
    }
}

impl Env for DeviceEnv<'_, '_> {
    type Memory = ProcessMemory;

    fn now(&self) -> Time {
        now(self.engine, self.now)
    }

    fn clock(&self) -> Time {
        self.engine.core.now()
    }

    fn soon(&self) -> Time {
        self.now.get().unwrap_or_else(|| self.engine.core.clock.soon())
    }

    fn ride(&mut self, psn: Psn) -> bool {
        self.out.shm.ride(psn)
    }

    fn memory(&self) -> &ProcessMemory {
        &self.engine.core.memory
    }

    fn mrs(&self) -> &MrTable {
        &self.engine.core.mrs
    }

    fn with_local<R>(
        &mut self,
        pd: u32,
        sge: &Sge,
        need: Access,
        f: impl FnOnce(&ProcessMemory, Option<u64>) -> R,
    ) -> Result<R, KeyError> {
        let engine = self.engine;
        match &mut self.arrivals {
            Some(arrivals) => {
                let addr = arrivals.region.find(&engine.core.mrs, pd, sge, need)?;
                Ok(f(&engine.core.memory, addr))
            }
            None => {
                // In use until `f` is done.
                let mut region = LastLocal::default();
                let addr = region.find(&engine.core.mrs, pd, sge, need)?;
                Ok(f(&engine.core.memory, addr))
            }
        }
    }

    #[inline]
    fn with_remote<R>(
        &mut self,
        rkey: u32,
        reach: (u32, Qpn),
        (va, len): (u64, u64),
        need: Access,
        f: impl FnOnce(&ProcessMemory, u64) -> R,
    ) -> Result<R, KeyError> {
        // What the program finds in its memory then is not to overtake them.
        self.flush_completions();
        let engine = self.engine;
        let addr = self.out.target.find(&engine.core.mrs, rkey, reach, va, len, need)?;
        Ok(f(&engine.core.memory, addr))
    }

    #[inline]
    fn end_remote(&mut self) {
        self.out.target.release();
    }

    #[inline]
    fn more_follow(&self) -> bool {
        self.arrivals.as_ref().is_some_and(|arrivals| arrivals.more)
    }

    fn transmit(
        &mut self,
        av: &AddressVector,
        headers: &Headers,
        payload: &Payload<'_>,
    ) -> Result<(), TransmitError> {
        if self.link.blocked {
            // It is on a list already, and will be called.
            return Err(TransmitError::Blocked);
        }
        let dest = headers.bth.dest_qpn;
        if !self.is_connected() {
            self.route_datagram(av, dest);
        }
        let Link { route, last, spare, .. } = &mut *self.link;
        let route = match (&*route, &*last) {
            (Some(route), _) | (None, Some((_, _, route))) => route,
            // Not connected, so nothing can be owed to anybody.
            (None, None) => return Ok(()),
        };
        let (engine, reliable) = (self.engine, self.cell.qp_type.is_reliable());
        if matches!(route, Route::Shm(_) | Route::HandingOn) {
            // Who has locked a ring may be waiting for the end of a window.
            self.out.target.release();
        }
        let sent = match (route, &engine.shm) {
            (Route::Shm(route), Some(shm)) => {
                let (out, qpn) = (&mut self.out.shm, self.cell.qpn);
                let now = || now(engine, self.now);
                match route.send(out, spare, engine, shm, qpn, reliable, now, headers, payload) {
                    // It counts by itself.
                    Ok(()) => return Ok(()),
                    Err(Refused::Transmit(error)) => Err(error),
                    Err(Refused::Reroute) => {
                        self.link.reroute(engine, av, dest);
                        // Once: the next route is another one, or that to the slot's next owner.
                        return if self.is_connected() || self.redirect(av, dest) {
                            self.transmit(av, headers, payload)
                        } else {
                            Ok(())
                        };
                    }
                }
            }
            (Route::Shm(_), None) => Ok(0),
            (Route::Inproc, _) => {
                let (inproc, qpn) = (&engine.inproc, self.cell.qpn);
                inproc.send(engine, qpn, reliable, false, av, headers, payload)
            }
            (Route::HandingOn, _) => {
                let (inproc, qpn) = (&engine.inproc, self.cell.qpn);
                inproc.send(engine, qpn, reliable, true, av, headers, payload)
            }
            (Route::Udp(udp), _) => {
                let now = now(engine, self.now);
                let (out, qpn) = (&mut self.out, self.cell.qpn);
                match out.send(engine, udp, qpn, reliable, now, headers, payload) {
                    // It counts by itself.
                    Ok(()) => return Ok(()),
                    Err(error) => Err(error),
                }
            }
        };
        match sent {
            Ok(bytes) => {
                self.engine.core.count(Counter::SentPkts, 1);
                self.engine.core.count(Counter::SentBytes, bytes as u64);
                Ok(())
            }
            Err(error) => {
                self.link.blocked |= error == TransmitError::Blocked;
                Err(error)
            }
        }
    }

    fn direct(&mut self, operation: &Direct<'_>) -> bool {
        let Link { route, last_target, .. } = &mut *self.link;
        match route {
            Some(Route::Shm(route)) => {
                direct::perform(self.engine, route, last_target, self.cell.qpn, operation)
            }
            _ => false,
        }
    }

    fn worth_of_rest(
        &self,
        dest: Qpn,
        direction: Direction,
        remote: RemoteAddr,
        len: u32,
    ) -> Worth {
        match &self.link.route {
            Some(Route::Shm(route)) => {
                let qpns = (self.cell.qpn, dest);
                direct::worth_of_rest(self.engine, route, qpns, direction, remote, len)
            }
            _ => Worth::Nothing,
        }
    }

    fn segment(&self) -> u32 {
        match &self.link.route {
            Some(Route::Shm(_)) => shm::SEGMENT,
            _ => 0,
        }
    }

    fn batch(&self) -> u32 {
        match &self.link.route {
            Some(Route::Udp(_)) if self.engine.core.config.gso => MAX_PAYLOAD_V6 as u32,
            _ => 0,
        }
    }

    fn is_certain(&self) -> bool {
        // Timers wait until what was queued is delivered (`Inproc::has_caught_up`). An XRC target's responder may be in another
        // process.
        self.link.is_inproc() && self.cell.qp_type != QpType::XrcSend
    }

    fn probe_after(&self) -> Option<Duration> {
        matches!(self.link.route, Some(Route::Udp(_))).then_some(PROBE_AFTER)
    }

    fn early_room(&self) -> usize {
        match &self.link.route {
            Some(Route::Udp(_)) => EARLY_ROOM,
            _ => 0,
        }
    }

    fn window(&self) -> u32 {
        match &self.link.route {
            Some(Route::Shm(_)) => shm::WINDOW,
            Some(Route::Udp(udp)) => {
                udp.path.window(self.engine.core.config.window, self.link.in_flight)
            }
            _ => crate::link::inproc::WINDOW,
        }
    }

    #[inline]
    fn complete(&mut self, side: Side, wc: Wc, solicited: bool) {
        if let Some(arrivals) = &mut self.arrivals
            && arrivals.complete(side, wc, solicited)
        {
            return;
        }
        let lost = match (self.cell.cq(side), &self.link.xrc_srq) {
            (Some(cq), _) => cq.push(wc, solicited).then_some(cq),
            (None, Some(srq)) => srq.complete(wc, solicited),
            // A target has no receive but from an SRQ that was selected.
            (None, None) => None,
        };
        if let Some(cq) = lost {
            self.engine.core.progress().note_overrun(Arc::clone(cq) as _, self.cell.qpn);
        }
    }

    fn select_srq(&mut self, srqn: u32) -> Option<u32> {
        let link = &mut *self.link;
        if link.xrc_srq.as_ref().is_none_or(|srq| srq.number() != Some(srqn)) {
            let srq = self.engine.xrc_srqs.find(srqn)?;
            if srq.xrc_domain() != self.cell.xrc_domain() {
                return None;
            }
            link.xrc_srq = Some(srq);
        }
        link.xrc_srq.as_ref().and_then(|srq| srq.pd_of_requests())
    }

    fn take_srq(&mut self, into: &mut RecvWqe) -> bool {
        self.cell.srq.as_ref().or(self.link.xrc_srq.as_ref()).is_some_and(|srq| srq.take(into))
    }

    fn take_tagged(&mut self, tagged: Tagged, into: &mut RecvWqe) -> Option<Taken> {
        self.cell.srq.as_ref()?.take_tagged(tagged, into)
    }

    fn complete_tagged(&mut self, wc: Wc, tm: TmInfo, solicited: bool) {
        self.flush_completions();
        if let Some(cq) = &self.cell.recv_cq
            && cq.push_tagged(wc, tm, solicited)
        {
            self.engine.core.progress().note_overrun(Arc::clone(cq) as _, self.cell.qpn);
        }
    }

    fn count_completion(&mut self, op: CompCntrOps, bytes: u32, failed: bool) {
        self.link.comp_cntrs.count(op, bytes, failed);
    }

    fn raise(&mut self, event: QpEvent) {
        self.flush_completions();
        self.cell.raise(event);
    }

    fn count(&self, counter: Counter, n: u64) {
        self.engine.core.count(counter, n);
    }
}
