//! The environment that the device gives a queue pair's machine for the time of one call.

use std::cell::Cell;
use std::sync::Arc;

use anyverbs_causes::Cause;
use anyverbs_locks::{FastMutexGuard, rank};
use anyverbs_proto::comp_cntr::CompCntrOps;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::direct::{Direct, Place};
use anyverbs_proto::env::{
    CompletionEnv, Env, LinkEnv, LinkProps, MemoryEnv, ReasonEnv, Side, TransmitError,
};
use anyverbs_proto::event::QpEvent;
use anyverbs_proto::mr::{Access, KeyError, LastLocal, MrTable};
use anyverbs_proto::payload::Payload;
use anyverbs_proto::qp::Arrival;
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::qp::lane::{LaneEnds as _, LaneEnv};
use anyverbs_proto::reason::Told;
use anyverbs_proto::recv_queue::RecvWqe;
use anyverbs_proto::run::Run;
use anyverbs_proto::tag_list::{Tagged, Taken};
use anyverbs_proto::time::{Clock, Time};
use anyverbs_proto::types::{Psn, Qpn};
use anyverbs_proto::wc::{TmInfo, Wc, WcStatus};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::packet::Headers;
use anyverbs_proto::wire::reason::ReasonPacket;
use anyverbs_proto::wr::{AddressVector, Sge};

use super::arrivals::Arrivals;
use super::faults::Meddling;
use super::qp_context::{Destination, QpContext, SameHost};
use super::transport::Transport;
use super::{QpCell, State};
use crate::probes;
use anyverbs_links::route::{Outbox, Outgoing, Refused, Route};
use anyverbs_links::shm::{Digest, Lanes};
use anyverbs_links::udp::Asked;
use anyverbs_links::why::{Sounding, tell_given_up};
use anyverbs_objects::base::directory::publish_qp;
use anyverbs_objects::memory::ProcessMemory;
use anyverbs_record::capture::Way;
use anyverbs_record::trace::Moment;

/// One call into a queue pair's machine, or several under one hold of its lock. Ends with [`finish`](Self::finish), or with
/// [`settle`](Self::settle) under the lock and [`Transport::after_unlock`] behind it.
pub struct Call<'a> {
    cell: &'a QpCell,
    now: Cell<Option<Time>>,
    out: Outbox,
}

impl<'a> Call<'a> {
    /// A call at the moment of its first look at the clock.
    pub fn new(cell: &'a QpCell) -> Self {
        Self::at(cell, None)
    }

    /// A call at a moment that may be known.
    pub(crate) fn at(cell: &'a QpCell, now: Option<Time>) -> Self {
        Self { cell, now: Cell::new(now), out: Outbox::of(cell.port.number()) }
    }

    /// The environment for the machine.
    pub fn env<'b, 'c>(&'b mut self, link: &'b mut QpContext) -> DeviceEnv<'b, 'c> {
        link.renew_window();
        DeviceEnv {
            transport: self.cell.transport,
            cell: self.cell,
            now: &self.now,
            out: &mut self.out,
            link,
            arrivals: None,
        }
    }

    /// As [`env`](Self::env), for one of several packets that share state.
    pub(crate) fn env_with<'b, 'c>(
        &'b mut self,
        link: &'b mut QpContext,
        arrivals: &'b mut Arrivals<'c>,
    ) -> DeviceEnv<'b, 'c> {
        DeviceEnv { arrivals: Some(arrivals), ..self.env(link) }
    }

    /// Sends posted requests, or lets them wait for more where that makes fuller batches. In the second case it returns
    /// false, and there is nothing to settle.
    pub(crate) fn send(&mut self, state: &mut State) -> bool {
        let State { machine, link, .. } = state;
        if !machine.may_gather(link.to.props.batch) {
            link.owed.gathers = false;
            machine.transmit(&mut self.env(link));
            return true;
        }
        if !std::mem::replace(&mut link.owed.gathers, true) {
            self.cell.transport.owed.note(self.cell.qpn, &mut link.owed.debt, true);
            self.cell.transport.look_after_owed();
        }
        false
    }

    /// Asks the peer for a lane, where the link has such and none is open.
    #[inline]
    pub(crate) fn ask_for_lane(&mut self, machine: &anyverbs_proto::qp::Qp, link: &mut QpContext) {
        let may_have = link.may_have_lanes();
        if let (Some(route), QpType::Rc, true) = (&link.to.route, self.cell.qp_type, may_have) {
            let SameHost { spare, lanes, .. } = &mut link.same_host;
            let (from, dest) = (machine.qpn(), machine.dest_qpn());
            route.ask_for_lane(
                &mut self.out,
                (spare, lanes),
                self.cell.transport.links,
                (from, dest),
            );
        }
    }

    /// Answers a credit probe again.
    pub(crate) fn echo(&mut self, asked: &Asked, limit: u64) {
        self.out.echo(self.cell.transport.links, asked, limit);
    }

    /// Brings the device's books up to date and sends what is staged; the lock may be released then.
    pub fn settle(&mut self, state: &mut State) {
        let transport = self.cell.transport;
        self.out.flush(transport.links);
        let State { machine, link, .. } = state;
        if let Some(spare) = self.out.take_spare() {
            link.same_host.spare = spare;
        }
        if link.sounding.is_some() && !machine.awaits_reason() {
            link.sounding = None;
        }
        let (directory, published) =
            (transport.core.directory.as_ref(), &mut link.same_host.published);
        publish_qp(directory, machine, self.cell.port.number(), published);
        link.settle_short_ways(machine);
        link.settle_turn(self.cell.qpn, machine.is_in_flight());
        if let Some(deadline) = link.deadline(machine.deadline())
            && link.timers.add(deadline)
        {
            transport.add_timer(deadline, self.cell.qpn);
        }
        let owes = machine.owes_ack();
        if !link.is_inproc() {
            transport.owed.note(self.cell.qpn, &mut link.owed.debt, owes || link.owed.gathers);
        } else if owes && !std::mem::replace(&mut link.owed.inproc, true) {
            transport.links.inproc.owe(self.cell.qpn);
        }
    }

    /// Sends staged packets for a queue pair that does nothing any more, and forgets its path.
    pub(crate) fn finish_last(mut self, mut state: FastMutexGuard<'_, rank::QueuePair, State>) {
        let transport = self.cell.transport;
        if state.link.watch.is_some() {
            self.env(&mut state.link).release_all();
        }
        self.out.flush(transport.links);
        if let Some(watch) = &mut state.link.watch {
            watch.ends("destroyed");
        }
        if let Some(directory) = &transport.core.directory {
            directory.withdraw_qp(self.cell.qpn, &mut state.link.same_host.published);
        }
        transport.owed.note(self.cell.qpn, &mut state.link.owed.debt, false);
        state.link.leave_path(self.cell.qpn);
        let unsettled = state.link.same_host.published.unsettled();
        drop(state);
        transport.after_unlock();
        if unsettled.is_some() {
            transport.core.settle_copies();
        }
    }

    /// Settles, unlocks, and does the work that had to wait for that.
    pub(crate) fn finish(mut self, mut state: FastMutexGuard<'_, rank::QueuePair, State>) {
        self.settle(&mut state);
        drop(state);
        self.cell.transport.after_unlock();
    }
}

/// The environment of a queue pair's machine.
pub struct DeviceEnv<'a, 'c> {
    pub(super) transport: &'static Transport,
    pub(super) cell: &'a QpCell,
    now: &'a Cell<Option<Time>>,
    out: &'a mut Outbox,
    pub(super) link: &'a mut QpContext,
    /// State that it shares with other packets of its batch.
    arrivals: Option<&'a mut Arrivals<'c>>,
}

/// The moment of a call.
fn now(transport: &Transport, known: &Cell<Option<Time>>) -> Time {
    known.get().unwrap_or_else(|| {
        let now = transport.core.now();
        known.set(Some(now));
        now
    })
}

impl DeviceEnv<'_, '_> {
    /// Whether somebody wants to see what the queue pair does, or changes it.
    #[inline]
    pub(crate) fn is_watched(&self) -> bool {
        self.link.watch.is_some()
    }

    fn is_connected(&self) -> bool {
        self.cell.qp_type != QpType::Ud
    }

    /// Adds the gathered completions, which later events must not overtake.
    pub(super) fn flush_completions(&mut self) {
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
            *s == slot && last == av && route.suits(av, dest)
        };
        if !self.link.to.last.as_ref().is_some_and(leads) {
            self.link.to.last =
                Some((*av, slot, Route::new(self.transport.links, av, dest, None, false)));
        }
    }
}

impl Clock for DeviceEnv<'_, '_> {
    fn now(&self) -> Time {
        now(self.transport, self.now)
    }

    fn soon(&self) -> Time {
        self.now.get().unwrap_or_else(|| self.transport.core.clock.soon())
    }
}

impl Env for DeviceEnv<'_, '_> {
    fn count(&self, counter: Counter, n: u64) {
        if let Some(watch) = &self.link.watch {
            watch.counted(counter, n, || self.transport.core.now().since(self.now()));
        }
        self.cell.port.counters().add(counter, n);
    }

    #[cold]
    fn log(&mut self, line: std::fmt::Arguments<'_>) {
        let now = self.now();
        self.transport.aftermath.log(now, line.to_string());
    }
}

impl LinkEnv for DeviceEnv<'_, '_> {
    fn props(&self) -> &LinkProps {
        &self.link.to.props
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
        acks: Option<Psn>,
    ) -> Result<(), TransmitError> {
        if self.link.watch.is_some() {
            return self.transmit_watched(av, headers, payload, acks);
        }
        self.hand_over(av, (headers, payload), acks, None)
    }

    fn transmit_run(
        &mut self,
        av: &AddressVector,
        run: &Run<'_>,
    ) -> (u32, Result<(), TransmitError>) {
        if self.link.watch.is_some() {
            return run.each(|headers, payload| self.transmit(av, headers, payload, None));
        }
        self.hand_over_run(av, run)
    }

    fn direct(&mut self, operation: &Direct<'_>) -> bool {
        let QpContext {
            to: Destination { route, .. }, same_host: SameHost { last_copy, .. }, ..
        } = &mut *self.link;
        let (links, this) = (self.transport.links, (self.cell.qpn, self.cell.port.counters()));
        route.as_ref().is_some_and(|route| route.direct(links, last_copy, this, operation))
    }

    fn fetched(&mut self, payload: &Payload<'_>) -> Option<Place> {
        // Whoever watches looks at the bytes as they leave.
        let route = self.link.to.route.as_ref().filter(|_| !self.is_watched())?;
        route.fetched(self.transport.links, self.cell.qpn, payload)
    }

    fn admits(&self, operation: &Direct<'_>) -> bool {
        let route = self.link.to.route.as_ref();
        route.is_some_and(|route| route.admits(self.transport.links, self.cell.qpn, operation))
    }
}

impl LaneEnv for DeviceEnv<'_, '_> {
    type Ends = Lanes;

    #[inline(always)]
    fn ends(&mut self) -> &mut Lanes {
        &mut self.link.same_host.lanes
    }

    fn answer(&mut self, taken: (usize, u64), executed: Option<Psn>) {
        self.flush_completions();
        self.ends().answer(taken, executed);
    }

    fn received(&mut self, psn: Psn, len: usize) {
        probes::receive_short(self.cell.qpn, psn, len);
    }

    #[inline]
    fn is_read(&self) -> bool {
        self.link.same_host.lanes.are_read()
    }

    #[inline]
    fn has_answer(&self) -> bool {
        self.link.same_host.lanes.has_answer()
    }

    #[cold]
    fn leave(&mut self) {
        // Here, since the lane may have been read for the sake of a packet.
        self.link.same_host.lanes.break_off();
        self.link.leave_lanes();
    }

    fn peer_arrival(&self) -> Option<Arrival> {
        self.link.peer_arrival()
    }

    fn note_out_of_turn(&mut self, psn: Psn) {
        self.link.same_host.lanes.note_out_of_turn(psn);
    }

    fn was_out_of_turn(&self, psn: Psn) -> bool {
        self.link.same_host.lanes.was_out_of_turn(psn)
    }
}

impl DeviceEnv<'_, '_> {
    /// Gives a packet to its link.
    #[inline]
    pub(super) fn hand_over(
        &mut self,
        av: &AddressVector,
        (headers, payload): (&Headers, &Payload<'_>),
        acks: Option<Psn>,
        note: Option<&str>,
    ) -> Result<(), TransmitError> {
        if self.link.blocked {
            // It is on a list already, and will be called.
            return Err(TransmitError::Blocked);
        }
        let dest = headers.bth.dest_qpn;
        if !self.is_connected() {
            self.route_datagram(av, dest);
        }
        let (qpn, reliable, bth) = (self.cell.qpn, self.cell.qp_type.is_reliable(), &headers.bth);
        if reliable && bth.opcode.is_request() && !self.link.may_request(qpn, bth.psn) {
            // Answers and ACKs leave all the same.
            return Err(TransmitError::Blocked);
        }
        let asking;
        let headers = if reliable && bth.opcode.is_request() && self.link.ends_turn(bth.psn) {
            asking = Headers { bth: Bth { ack_req: true, ..headers.bth }, ..*headers };
            &asking
        } else {
            headers
        };
        let QpContext {
            to: Destination { route, last, .. },
            same_host: SameHost { spare, .. },
            ..
        } = &mut *self.link;
        let route = match (&*route, &*last) {
            (Some(route), _) | (None, Some((_, _, route))) => route,
            // It is not connected, so it owes nothing.
            (None, None) => return Ok(()),
        };
        let transport = self.transport;
        let packet = Outgoing { from: qpn, av, headers, payload, reliable, acks, note };
        let now = || now(transport, self.now);
        match route.send(self.out, spare, transport.links, &packet, now) {
            Ok(()) => {
                probes::transmit(self.cell.qpn, &headers.bth, 1, payload.len());
                Ok(())
            }
            Err(Refused::Transmit(error)) => {
                self.link.blocked |= error == TransmitError::Blocked;
                Err(error)
            }
            Err(Refused::Reroute) => {
                let this = (self.cell.qpn, self.cell.qp_type);
                self.link.reroute(transport.links, this, av, dest);
                // Once: the next route is another one, or that to the slot's next owner.
                if self.is_connected() || self.redirect(av, dest) {
                    self.hand_over(av, (headers, payload), None, note)
                } else {
                    Ok(())
                }
            }
        }
    }

    /// Gives packets in a row to their link.
    #[inline]
    fn hand_over_run(
        &mut self,
        av: &AddressVector,
        run: &Run<'_>,
    ) -> (u32, Result<(), TransmitError>) {
        let links = self.transport.links;
        let is_request = run.headers().bth.opcode.is_request();
        let mut sent = 0;
        while sent < run.len() {
            let (psn, left) = (run.headers().bth.psn.plus(sent), run.len() - sent);
            if self.link.blocked || is_request && !self.link.may_request(self.cell.qpn, psn) {
                return (sent, Err(TransmitError::Blocked));
            }
            let (n, ends) =
                if is_request { self.link.room_in_turn(psn, left) } else { (left, false) };
            let part = run.part(sent, n, ends);
            let route = self.link.to.route.as_ref();
            let taken = route.and_then(|route| route.send_run(self.out, links, &part));
            let Some((taken, end)) = taken else {
                return run.each(|headers, payload| self.transmit(av, headers, payload, None));
            };
            probes::transmit(
                self.cell.qpn,
                &part.headers().bth,
                taken,
                taken as usize * part.payload_len(),
            );
            sent += taken;
            if end.is_err() {
                return (sent, end);
            }
        }
        (sent, Ok(()))
    }

    /// As [`hand_over`](Self::hand_over), for a queue pair that is watched.
    #[cold]
    #[inline(never)]
    fn transmit_watched(
        &mut self,
        av: &AddressVector,
        headers: &Headers,
        payload: &Payload<'_>,
        acks: Option<Psn>,
    ) -> Result<(), TransmitError> {
        let note = self.link.watch.as_mut().map(|watch| watch.describe(&headers.bth));
        let result = match self.transmit_faulty(av, (headers, payload), note.as_deref()) {
            Some(Ok(())) => return Ok(()),
            Some(result) => result,
            None => self.hand_over(av, (headers, payload), acks, note.as_deref()),
        };
        let QpContext { watch, to, .. } = &mut *self.link;
        match (watch, to.route(), note, result) {
            (Some(watch), Some(route), Some(note), Ok(())) => {
                watch.sent(route.way(), av, (headers, payload), &note);
                self.note_left(headers);
                self.count_sent(av, headers);
            }
            (Some(watch), _, _, Err(TransmitError::Blocked)) => {
                let reliable = self.cell.qp_type.is_reliable();
                let why = if reliable { "waits for room" } else { "waits for credit" };
                watch.waits(why, Moment::now());
            }
            _ => {}
        }
        result
    }
}

impl ReasonEnv for DeviceEnv<'_, '_> {
    #[cold]
    fn refuse(
        &mut self,
        av: &AddressVector,
        headers: &Headers,
        told: Told,
        is_ours: bool,
    ) -> Result<(), TransmitError> {
        if self.is_cut(av.sgid) {
            return Ok(());
        }
        let Bth { dest_qpn: dest, psn, .. } = headers.bth;
        if let Some(route) = self.link.to.route.as_ref().and_then(Route::explains_ahead) {
            if is_ours {
                self.out.explain(self.transport.links, route, &ReasonPacket { dest, psn, told });
            }
            return self.transmit(av, headers, &Payload::EMPTY, None);
        }
        self.transmit(av, headers, &Payload::bytes(&told.to_bytes()), None)
    }

    #[cold]
    fn tell_given_up(&mut self, av: &AddressVector, packet: &ReasonPacket, is_ours: bool) {
        let is_udp =
            self.link.to.route.as_ref().is_some_and(|route| route.explains_ahead().is_some());
        // All peers on this host are of this make.
        if (is_ours || !is_udp) && !self.is_cut(av.sgid) {
            tell_given_up(self.transport.links, av, packet);
        }
    }

    #[cold]
    fn sound(&mut self, av: &AddressVector, headers: &Headers, payload: &Payload<'_>) {
        if self.is_withheld(av, headers) {
            return;
        }
        // An earlier reason counts unless another one comes now.
        let before = self.link.sounding.take().and_then(|mut sounding| sounding.verdict());
        let by = (self.transport.links, self.cell.device);
        let sounding = Sounding::new(by, av, headers, payload, before);
        if let Some(watch) = self.link.watch.as_ref().filter(|_| sounding.has_left()) {
            watch.packet("out", Way::Udp, headers, payload.len());
        }
        self.link.sounding = Some(Box::new(sounding));
    }

    #[cold]
    fn heard(&mut self, av: &AddressVector, una: Psn) -> Option<Told> {
        let verdict = self.link.sounding.take().and_then(|mut sounding| sounding.verdict());
        let digests = [Some(Digest::new(av.dgid, av.sgid)), self.link.digest_of_peer()];
        let aftermath = &self.transport.aftermath;
        let stray = || {
            let to = digests.into_iter().flatten().find_map(|peer| aftermath.stray(peer, una))?;
            let to = Some(to).filter(|to| *to != self.cell.qpn)?;
            Some(Told { cause: Cause::QpnDiffers, value: to.get().into() })
        };
        verdict.map(|cause| Told { cause, value: 0 }).or_else(stray)
    }

    #[cold]
    fn is_stopped(&self, av: &AddressVector, peer: Qpn) -> bool {
        let is_of_host = self.transport.core.gids.is_of_host(av.dgid);
        let shm = self.transport.links.shm.as_ref().filter(|_| is_of_host);
        shm.is_some_and(|shm| shm.endpoint().is_process_stopped(peer.slot()))
    }

    #[cold]
    fn process_of_peer(&self) -> Option<u32> {
        let pid = self.link.shm_peer()?.channel().pid();
        // One of another PID namespace has none here.
        u32::try_from(pid).ok().filter(|pid| *pid > 0)
    }

    #[cold]
    fn devices_of(&self, pds: [u32; 2]) -> Option<[String; 2]> {
        let core = &self.transport.core;
        let [Some(its), Some(own)] = pds.map(|pd| core.pd_numbers.device_of(pd)) else {
            return None;
        };
        (its != own).then(|| [its, own].map(|device| core.config.ports[device].name.clone()))
    }

    #[cold]
    fn note_stray(&self, av: &AddressVector, psn: Psn) {
        let from = Digest::new(av.dgid, av.sgid);
        self.transport.aftermath.note_stray(from, psn, self.cell.qpn);
    }

    #[cold]
    fn meddling(&mut self, una: Psn) -> Option<(bool, String)> {
        let now = self.now();
        let Meddling { is_cause, what } = self.faults()?.meddling(una, now)?;
        Some((is_cause, what))
    }

    #[cold]
    fn taken_by_rule(&mut self, first: Psn, next: Psn) -> Option<String> {
        self.faults()?.taken_by(first, next).map(|rule| rule.named())
    }

    #[cold]
    fn tell_why(&mut self, arrival: &Arrival, dropped: &Bth, cause: Cause) {
        self.transport.tell_why(self.now(), arrival, dropped.psn, cause);
    }
}

impl MemoryEnv for DeviceEnv<'_, '_> {
    type Memory = ProcessMemory;

    fn memory(&self) -> &ProcessMemory {
        &self.transport.core.memory
    }

    fn mrs(&self) -> &MrTable {
        &self.transport.core.mrs
    }

    fn with_local<R>(
        &mut self,
        pd: u32,
        sge: &Sge,
        need: Access,
        f: impl FnOnce(&ProcessMemory, Option<u64>) -> R,
    ) -> Result<R, KeyError> {
        let transport = self.transport;
        let (lkey, va, len) = (sge.lkey, sge.addr, sge.len.into());
        match &mut self.arrivals {
            Some(arrivals) => {
                let addr = arrivals.region.find(&transport.core.mrs, lkey, pd, va, len, need)?;
                Ok(f(&transport.core.memory, addr))
            }
            None => {
                // In use until `f` is done.
                let mut region = LastLocal::default();
                let addr = region.find(&transport.core.mrs, lkey, pd, va, len, need)?;
                Ok(f(&transport.core.memory, addr))
            }
        }
    }

    #[inline]
    fn with_remote<R>(
        &mut self,
        rkey: u32,
        (pd, qpn): (u32, Qpn),
        (va, len): (u64, u64),
        need: Access,
        f: impl FnOnce(&ProcessMemory, u64) -> R,
    ) -> Result<R, KeyError> {
        // Later changes of the program's memory must not overtake them.
        self.flush_completions();
        let transport = self.transport;
        let reach = (pd, qpn.get());
        let addr = self.out.target.find(&transport.core.mrs, rkey, reach, va, len, need)?;
        Ok(f(&transport.core.memory, addr))
    }

    #[inline]
    fn end_remote(&mut self) {
        self.out.target.release();
    }
}

impl DeviceEnv<'_, '_> {
    /// Gives a completion to the program.
    #[inline]
    pub(super) fn hand_completion(&mut self, side: Side, wc: Wc, solicited: bool) {
        if let Some(arrivals) = &mut self.arrivals
            && arrivals.complete(side, wc, solicited)
        {
            return;
        }
        let lost = match (self.cell.cq(side), &self.link.xrc.srq) {
            (Some(cq), _) => cq.push(wc, solicited).then_some(cq),
            (None, Some(srq)) => srq.complete(wc, solicited),
            // A target has no receive but from an SRQ that was selected.
            (None, None) => None,
        };
        if let Some(cq) = lost {
            self.transport.core.progress().note_overrun(Arc::clone(cq) as _, self.cell.qpn);
        }
    }
}

impl CompletionEnv for DeviceEnv<'_, '_> {
    #[inline]
    fn complete(&mut self, side: Side, wc: Wc, solicited: bool) {
        if self.link.watch.is_some() && self.complete_watched(side, &wc, solicited) {
            return;
        }
        if wc.status != WcStatus::Success
            && let Some(directory) = &self.transport.core.directory
        {
            // The memory of the request is the program's again: what the peer fetches from now on counts for nothing.
            directory.withdraw_qp(self.cell.qpn, &mut self.link.same_host.published);
        }
        self.hand_completion(side, wc, solicited);
    }

    fn complete_tagged(&mut self, wc: Wc, tm: TmInfo, solicited: bool) {
        if let Some(watch) = &mut self.link.watch {
            watch.completed(Side::Recv, &wc);
        }
        self.flush_completions();
        if let Some(cq) = &self.cell.recv_cq
            && cq.push_tagged(wc, tm, solicited)
        {
            self.transport.core.progress().note_overrun(Arc::clone(cq) as _, self.cell.qpn);
        }
    }

    fn count_completion(&mut self, op: CompCntrOps, bytes: u32, failed: bool) {
        self.link.comp_cntrs.count(op, bytes, failed);
    }

    fn take_srq(&mut self, into: &mut RecvWqe) -> bool {
        self.cell.srq.as_ref().or(self.link.xrc.srq.as_ref()).is_some_and(|srq| srq.take(into))
    }

    fn take_tagged(&mut self, tagged: Tagged, into: &mut RecvWqe) -> Option<Taken> {
        self.cell.srq.as_ref()?.take_tagged(tagged, into)
    }

    fn select_srq(&mut self, srqn: u32) -> Option<u32> {
        let link = &mut *self.link;
        if link.xrc.srq.as_ref().is_none_or(|srq| srq.number() != Some(srqn)) {
            let srq = self.transport.xrc_srqs.find(srqn)?;
            if srq.xrc_domain() != self.cell.xrc_domain() {
                return None;
            }
            link.xrc.srq = Some(srq);
        }
        link.xrc.srq.as_ref().and_then(|srq| srq.pd_of_requests())
    }

    fn raise(&mut self, event: QpEvent) {
        if let Some(watch) = &self.link.watch {
            watch.raised(event);
        }
        self.flush_completions();
        self.cell.raise(event);
    }
}
