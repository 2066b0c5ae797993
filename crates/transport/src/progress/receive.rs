//! Receiving, and everything that has to be done at some time by somebody.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyverbs_links::pace::{NO_LIMIT, Probe};
use anyverbs_links::shm::{self, Gone, Inbox};
use anyverbs_links::udp::{Asked, CreditPacket, Outbox};
use anyverbs_net::fault::Fault;
use anyverbs_net::forward::{ForwardBuffer, Forwarded};
use anyverbs_net::shm::{Channel, Closed, Event, Poller};
use anyverbs_net::{Datagram, RxBatch};
use anyverbs_objects::config::Config;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::Qpn;
use parking_lot::MutexGuard;

use super::Driver;
use super::datagrams::{Received, Senders, Tally};
use super::deliver::Arrived;
use super::worker::Shared;
use crate::qp::env::Call;
use crate::qp::{QpCell, State};

/// Receive buffers of 64 KiB.
const BUFFERS: usize = 8;
/// Packets received after which ACKs leave although more packets wait.
const ACK_EVERY: usize = 128;
/// Datagrams handed on by other processes that are read in one go.
const FORWARD_BUDGET: usize = 32;
/// A caller that finds nothing looks at the clock, and for forwarded datagrams, once in this many polls. Reading the
/// clock costs a tenth of an empty poll.
const CLOCK_EVERY: u32 = 16;

/// Empty looks at the sockets after which a caller looks only every [`LOOK_EVERY`], as long as the same-host link is
/// busy. A look is two system calls, and costs more than a message there.
const QUIET_AFTER: u32 = 64;
/// Interval of looks at quiet sockets.
const LOOK_EVERY: Duration = Duration::from_micros(25);
/// Polls without a message after which the same-host link is not busy any more.
const IDLE_AFTER: u32 = 4096;

/// State of the receiving thread.
#[derive(Debug)]
pub struct RxState {
    batch: RxBatch,
    /// Poller of the same-host link.
    poller: Option<Poller>,
    /// The queue pair of its last message.
    last: Option<Arc<QpCell>>,
    /// Where its messages are read to.
    inbox: Inbox,
    /// Processes that it has lost.
    closed: Vec<(Arc<Channel>, Closed)>,
    /// Calls since its last message.
    since_shm: u32,
    /// Empty looks at the sockets in a row.
    empty_looks: u32,
    /// When the sockets were last looked at.
    looked_at: Time,
    forwarded: ForwardBuffer,
    calls: u32,
    /// Receiving failed, and the log says so.
    failed: bool,
    since_acks: usize,
    /// Queue pairs with room on their path again.
    resume: Vec<Qpn>,
    /// Credit probes, to be answered when earlier messages are delivered.
    probes: Vec<Asked>,
    senders: Senders,
}

impl RxState {
    /// Nothing received yet.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn new(config: &Config, poller: Option<Poller>) -> io::Result<Self> {
        let mut batch = RxBatch::new(BUFFERS)?;
        batch.set_fault(config.fault.map(Fault::new));
        Ok(Self {
            batch,
            poller,
            last: None,
            inbox: Inbox::default(),
            closed: Vec::new(),
            since_shm: u32::MAX,
            empty_looks: 0,
            looked_at: Time::from_nanos(0),
            forwarded: ForwardBuffer::new(),
            calls: 0,
            failed: false,
            since_acks: 0,
            resume: Vec::with_capacity(64),
            probes: Vec::with_capacity(64),
            senders: Senders::new(),
        })
    }

    /// The likely poll of a program that waits for a message through shared memory. False if there is one, or if it is time
    /// for something else: then nothing was done.
    #[inline]
    fn finds_nothing(&mut self, worker: &Shared) -> bool {
        let Some(poller) = &mut self.poller else { return false };
        let calls = self.calls.wrapping_add(1);
        let is_quiet = self.since_shm < IDLE_AFTER
            && self.empty_looks >= QUIET_AFTER
            && !calls.is_multiple_of(CLOCK_EVERY)
            && !(poller.is_armed() && worker.is_shm_spent());
        if !is_quiet || !poller.finds_nothing() {
            return false;
        }
        self.calls = calls;
        self.since_shm += 1;
        self.since_acks = 0;
        true
    }
}

/// Progress of a call to receive.
#[derive(Clone, Copy)]
struct Done {
    /// It is its turn to look at everything.
    thorough: bool,
    now: Option<Time>,
    /// Messages through shared memory.
    by_shm: usize,
    /// Sockets are not to be looked at.
    quiet: bool,
}

impl Driver {
    /// A caller's poll found nothing: serves the network and the clock. Tells whether that was next to nothing.
    pub(crate) fn poll_progress(&'static self) -> bool {
        // A count that two threads make at once may be lost; it only has to move.
        let polls = self.lease.load(Ordering::Relaxed).wrapping_add(1);
        self.lease.store(polls, Ordering::Release);
        if self.links.inproc.is_pending() {
            self.links.inproc.drain(&self, false);
        }
        let received = match self.rx.try_lock() {
            Some(rx) => self.unless_nothing_came(rx).map(|rx| self.receive_by(rx, false, false)),
            // Another thread is at it.
            None => Some(0),
        };
        if received.is_some_and(|n| self.receive_more(n) == 0) {
            self.flush_owed();
        }
        if polls.is_multiple_of(CLOCK_EVERY.into()) {
            self.run_timers();
        }
        received.is_none()
    }

    /// Ends a poll for which there is nothing to do, as most are while a message is on its way.
    #[inline]
    fn unless_nothing_came<'a>(
        &'a self,
        mut rx: MutexGuard<'a, RxState>,
    ) -> Option<MutexGuard<'a, RxState>> {
        let is_done = !self.transport.owed.now().is_any()
            && !self.above().management.keeps_disconnects()
            && !self.worker.watches_frames()
            && rx.finds_nothing(&self.worker);
        if !is_done {
            return Some(rx);
        }
        drop(rx);
        // The worker may have left the sockets to this poll.
        if self.worker.is_left_to_reader() { self.rx.try_lock() } else { None }
    }

    /// The program is about to sleep: ACKs leave, and the worker is on duty again.
    pub(crate) fn end_lease(&'static self) {
        self.worker.end_lease(self.lease.load(Ordering::SeqCst));
        self.flush_owed_at_once();
        self.worker.rearm_if_disarmed(&self.links.port);
        self.let_shm_wake();
    }

    /// Has the same-host link wake the worker again, and receives earlier messages.
    pub(super) fn let_shm_wake(&'static self) {
        let mut rounds = 0;
        while !self.rearm_shm() {
            self.receive(false);
            rounds += 1;
            if rounds == ACK_EVERY {
                self.kick_worker();
                break;
            }
        }
    }

    /// Has the same-host link wake the worker again. False if there is something to receive first.
    pub(super) fn rearm_shm(&self) -> bool {
        if !self.worker.take_shm_spent() {
            return true;
        }
        let armed = self.rx.lock().poller.as_mut().is_none_or(Poller::arm);
        if !armed {
            self.worker.note_shm_spent();
        }
        armed
    }

    /// Receives one batch, and returns the number of datagrams. 0 also while another thread does. If the worker finds
    /// that, the other thread looks once more for it (see
    /// [`Shared::is_left_to_reader`](super::worker::Shared::is_left_to_reader)).
    pub(crate) fn receive(&'static self, worker: bool) -> usize {
        let n = self.receive_batch(worker, worker);
        if worker {
            return n + self.receive_before_disconnects(true) + self.receive_frames();
        }
        self.receive_more(n)
    }

    /// The work after a batch of `n` that a thread of the program has received. Returns the number of datagrams in all.
    fn receive_more(&'static self, mut n: usize) -> usize {
        if self.worker.take_left_to_reader() && n == 0 {
            // The event that woke the worker came after this thread had looked.
            n = self.receive_batch(false, false);
        }
        n + self.receive_before_disconnects(false) + self.receive_frames()
    }

    /// As [`receive`](Self::receive) of a thread of the program, at descriptors that were found ready.
    pub(super) fn receive_ready(&'static self) -> usize {
        self.receive_batch(false, true)
            + self.receive_before_disconnects(false)
            + self.receive_frames()
    }

    /// If a DREQ waits, earlier messages are received now: the caller may be about to sleep.
    fn receive_before_disconnects(&'static self, worker: bool) -> usize {
        if !self.above().management.keeps_disconnects() {
            return 0;
        }
        self.receive_batch(worker, true)
    }

    fn receive_frames(&'static self) -> usize {
        if !self.worker.watches_frames() {
            return 0;
        }
        let frames = self.above().frames.receive();
        if frames > 0 {
            self.after_unlock();
        }
        frames
    }

    /// `every`: all descriptors are looked at.
    fn receive_batch(&'static self, worker: bool, every: bool) -> usize {
        let rx = self.rx.try_lock().or_else(|| {
            // The holder of the lock sees this note, or has released it before.
            worker.then(|| self.worker.leave_to_reader())?;
            self.rx.try_lock()
        });
        let Some(rx) = rx else { return 0 };
        if worker {
            self.worker.take_left_to_reader();
        }
        self.receive_by(rx, worker, every)
    }

    /// As [`receive_batch`](Self::receive_batch), by the thread that has locked the receive path.
    fn receive_by(
        &'static self,
        mut rx: MutexGuard<'_, RxState>,
        worker: bool,
        every: bool,
    ) -> usize {
        let RxState {
            poller,
            last,
            inbox,
            closed,
            since_shm,
            empty_looks,
            looked_at,
            calls,
            since_acks,
            resume,
            probes,
            ..
        } = &mut *rx;
        *calls = calls.wrapping_add(1);
        let thorough = every || calls.is_multiple_of(CLOCK_EVERY);
        // Before anything is read: queues that are found empty were so no earlier than this.
        let now = thorough.then(|| self.core.now());
        let mut by_shm = 0;
        if let Some(poller) = poller {
            if !worker && poller.is_armed() && self.worker.is_shm_spent() {
                // The worker knows that somebody polls; the peers need not wake it.
                poller.disarm();
            }
            by_shm = self.receive_shm(poller, (last, inbox), probes, resume);
            *since_shm = if by_shm > 0 { 0 } else { since_shm.saturating_add(1) };
            while let Some(event) = poller.next_event() {
                by_shm += 1;
                match (event, &self.links.shm) {
                    (Event::Room(channel), Some(shm)) => {
                        if let Some(peer) = shm.find(&channel) {
                            peer.take_room(resume);
                        }
                    }
                    (Event::Closed(channel, why), _) => closed.push((channel, why)),
                    _ => {}
                }
            }
        }
        let quiet = !every
            && *since_shm < IDLE_AFTER
            && *empty_looks >= QUIET_AFTER
            && now.is_none_or(|now| now < *looked_at + LOOK_EVERY);
        if quiet && now.is_none() && closed.is_empty() && probes.is_empty() && resume.is_empty() {
            // Only messages through shared memory, if any: the likely case of a program that polls.
            *since_acks += by_shm;
            let acks_due = *since_acks >= ACK_EVERY || by_shm == 0;
            if acks_due {
                *since_acks = 0;
            }
            drop(rx);
            return self.end_receive(false, by_shm, acks_due);
        }
        let done = Done { thorough, now, by_shm, quiet };
        self.receive_rest(rx, worker, every, done)
    }

    /// Goes on where there may be more than messages through shared memory: with a frame of its own, which is large.
    #[inline(never)]
    fn receive_rest(
        &'static self,
        mut rx: MutexGuard<'_, RxState>,
        worker: bool,
        every: bool,
        Done { thorough, now, by_shm, quiet }: Done,
    ) -> usize {
        let RxState {
            batch,
            closed,
            empty_looks,
            looked_at,
            forwarded,
            failed,
            since_acks,
            resume,
            probes,
            senders,
            ..
        } = &mut *rx;
        let received = match (quiet, every) {
            (true, _) => Ok(0),
            (false, true) => self.links.port.receive(batch),
            (false, false) => self.links.port.poll(batch),
        };
        let messages = received.unwrap_or_else(|error| {
            // Once: a program that closed our descriptors has enough to read.
            if !std::mem::replace(failed, true) {
                tracing::error!(%error, "receiving failed");
            }
            0
        });
        *empty_looks = match messages {
            0 => empty_looks.saturating_add(u32::from(!quiet)),
            _ => 0,
        };
        let busy = messages > 0 || by_shm > 0;
        let Some(now) = now.or_else(|| busy.then(|| self.core.now())) else { return 0 };
        if !quiet {
            *looked_at = now;
        }
        let mut n = by_shm;
        let mut to_gsi = Vec::new();
        if !quiet {
            let mut datagrams = batch.datagrams();
            let mut tally = Tally::default();
            self.deliver_at(now, |into| {
                for datagram in datagrams.by_ref() {
                    n += 1;
                    match self.classify(&datagram, senders, false, &mut tally, into) {
                        Some(Received::Packet) => {
                            if worker && into.packet.headers.bth.opcode.is_one_sided() {
                                // No thread polled when it came.
                                self.worker.note_one_sided();
                            }
                            return true;
                        }
                        Some(Received::Gsi(incoming)) => to_gsi.push(*incoming),
                        Some(Received::Credit(credit)) => {
                            self.take_credit(credit, &datagram, probes, resume);
                        }
                        None => {}
                    }
                }
                false
            });
            self.count_received(tally);
        }
        if !to_gsi.is_empty() {
            // No queue pair is locked here.
            self.above().management.receive(now, &to_gsi);
        }
        if (worker && n == 0) || (thorough && !quiet) {
            for _ in 0..FORWARD_BUDGET {
                let datagram = match self.links.port.receive_forwarded(forwarded) {
                    Ok(Some(datagram)) => datagram,
                    Ok(None) => break,
                    Err(error) => {
                        tracing::debug!(%error, "reading what was handed on");
                        break;
                    }
                };
                n += 1;
                let (mut tally, mut place) = (Tally::default(), Arrived::default());
                match self.classify(&datagram, senders, true, &mut tally, &mut place) {
                    Some(Received::Packet) => {
                        let Arrived { arrival, packet, .. } = place;
                        self.deliver(now, std::iter::once((arrival, packet)));
                    }
                    Some(Received::Gsi(incoming)) => {
                        self.above().management.receive(now, &[*incoming])
                    }
                    Some(Received::Credit(credit)) => {
                        self.take_credit(credit, &datagram, probes, resume);
                    }
                    None => {}
                }
                self.count_received(tally);
            }
        }
        self.answer(probes);
        *since_acks += n;
        let is_empty = n == 0 && !quiet && batch.asked_all();
        if is_empty && !self.transport.owed.now().is_any() {
            self.rx_empty_at.store(now.as_nanos(), Ordering::Release);
        }
        let acks_due = *since_acks >= ACK_EVERY || (n == 0 && !worker);
        if acks_due {
            *since_acks = 0;
        }
        let mut resumed = std::mem::take(resume);
        let lost = std::mem::take(closed);
        drop(rx);
        if self.above().management.keeps_disconnects()
            && is_empty
            && !self.links.inproc.is_pending()
        {
            self.above().management.look_at_disconnects(now, now);
        }
        for (channel, why) in lost {
            self.lose_peer(&channel, why, &mut resumed);
        }
        if !resumed.is_empty() {
            for qpn in resumed.drain(..) {
                self.resume(qpn);
            }
            self.after_unlock();
        }
        self.end_receive(worker, n, acks_due)
    }

    /// The work after receiving `n` datagrams or messages.
    #[inline]
    fn end_receive(&'static self, worker: bool, n: usize, acks_due: bool) -> usize {
        if acks_due {
            self.flush_owed();
        } else if !worker && self.links.waker.is_asleep() {
            // If this was the program's last poll, no one would look after them soon.
            self.flush_unawaited();
        }
        if n > 0 {
            self.after_unlock();
        }
        n
    }

    /// Another process of this host has ended, or given the link up: its connections learn it.
    #[cold]
    fn lose_peer(&'static self, channel: &Arc<Channel>, why: Closed, resume: &mut Vec<Qpn>) {
        let Some(shm) = &self.links.shm else { return };
        tracing::debug!(slot = channel.slot(), %why, "the same-host link to a process has ended");
        let (gone, now) = (shm::reason(why), self.core.now());
        if let Some(peer) = shm.find(channel) {
            peer.end(gone, now, resume);
        }
        shm.forget(channel, gone);
        for cell in self.transport.qps.filter(|_| true) {
            self.with_cell(&cell, |State { machine, link, .. }, call| {
                let Some(peer) = link.shm_peer().filter(|peer| peer.is(channel)) else { return };
                // The link may have forgotten it before.
                peer.end(gone, now, resume);
                link.blocked = false;
                let attr = machine.attr();
                match gone {
                    Gone::Unwilling => {
                        let qp_type = machine.init().qp_type;
                        let this = (cell.qpn, qp_type);
                        link.reroute(self.links, this, &attr.av, attr.dest_qpn);
                    }
                    Gone::Dead => link.doomed = Some(now + shm::GRACE),
                }
                machine.transmit(&mut call.env(link));
            });
        }
    }

    /// A datagram for another process of this host, or for none.
    pub(super) fn misdelivered(&self, slot: u8, datagram: &Datagram<'_>, was_forwarded: bool) {
        // Slot 0 (QP0) names no process.
        if slot == 0 || was_forwarded {
            self.core.count(Counter::DropNoQp, 1);
            return;
        }
        match self.links.port.forward(slot, datagram) {
            Forwarded::Sent | Forwarded::Kept => {
                self.core.count(Counter::Forwarded, 1);
                self.above().management.forwarded(self.core.now());
                self.links.port.note_misdelivery();
                if self.links.port.needs_resteer() {
                    self.kick_worker();
                }
            }
            Forwarded::Dead | Forwarded::Failed => self.core.count(Counter::DropNoQp, 1),
            Forwarded::Full => self.core.count(Counter::DropSocketFull, 1),
        }
    }

    fn take_credit(
        &self,
        packet: CreditPacket,
        datagram: &Datagram<'_>,
        probes: &mut Vec<Asked>,
        resume: &mut Vec<Qpn>,
    ) {
        let from = datagram.source.ip().to_canonical();
        if packet.is_probe {
            let scope_id = match from {
                IpAddr::V6(ip) if ip.is_unicast_link_local() => datagram.interface,
                _ => 0,
            };
            let to_us = datagram.destination.to_canonical();
            probes.push(Asked { packet, from, scope_id, to_us, by_shm: false });
        } else {
            let Probe { bytes, messages } = packet.counts;
            self.links.paths.echo(from, packet.from, bytes, messages, resume);
        }
    }

    /// Answers credit probes with the receives that their queue pairs have now.
    fn answer(&self, probes: &mut Vec<Asked>) {
        let mut echoes = Outbox::default();
        for asked in probes.drain(..) {
            let Some(cell) = self.transport.qps.find(asked.packet.dest) else {
                echoes.echo(self.links, &asked, NO_LIMIT);
                continue;
            };
            let mut state = cell.state.lock();
            let limit = cell.message_limit(&state, &asked);
            state.link.starved = (limit == asked.packet.counts.messages).then_some(asked);
            // Under the lock, so that it cannot overtake the answer of the next thread that posts receives.
            echoes.echo(self.links, &asked, limit);
            echoes.flush(self.links);
        }
        echoes.flush(self.links);
    }

    /// Calls into a queue pair, if it still lives.
    pub(super) fn with_qp(&'static self, qpn: Qpn, f: impl FnOnce(&mut State, &mut Call<'_>)) {
        let Some(cell) = self.transport.qps.find(qpn) else { return };
        self.with_cell(&cell, f);
    }

    fn with_cell(&'static self, cell: &QpCell, f: impl FnOnce(&mut State, &mut Call<'_>)) {
        let mut state = cell.state.lock();
        if state.is_dead() {
            return;
        }
        let mut call = Call::new(cell);
        f(&mut state, &mut call);
        call.settle(&mut state);
    }

    /// The path of a queue pair has room again.
    pub(crate) fn resume(&'static self, qpn: Qpn) {
        self.with_qp(qpn, |State { machine, link, .. }, call| {
            link.blocked = false;
            machine.transmit(&mut call.env(link));
        });
    }

    /// The work that had to wait until no queue pair is locked.
    #[inline]
    pub(crate) fn after_unlock(&'static self) {
        if self.transport.overruns.is_any() {
            self.fail_overrun();
        }
        if self.links.inproc.is_pending() && !self.links.inproc.drain(&self, false) {
            self.kick_worker();
        }
        if self.links.paths.any_admitted() {
            self.call_admitted();
        }
    }

    /// Calls the queue pairs that got a place on their path.
    #[cold]
    fn call_admitted(&'static self) {
        while let Some((path, qpn)) = self.links.paths.take_admitted() {
            let mut begins = false;
            self.with_qp(qpn, |State { machine, link, .. }, call| {
                begins = link.begin_turn(&path);
                if begins {
                    machine.transmit(&mut call.env(link));
                }
            });
            if !begins {
                path.release();
            }
        }
    }

    #[cold]
    fn fail_overrun(&'static self) {
        while let Some(overrun) = self.transport.overruns.take() {
            let uses = |cell: &Arc<QpCell>| {
                let cqs = [&cell.send_cq, &cell.recv_cq];
                overrun
                    .iter()
                    .any(|o| o.qpn == cell.qpn || cqs.into_iter().flatten().any(|cq| o.is_of(cq)))
            };
            for srq in self
                .transport
                .xrc_srqs
                .filter(|srq| overrun.iter().any(|o| srq.completes_in(|cq| o.is_of(cq))))
            {
                srq.fail();
            }
            self.above().frames.fail_users(&|cq| overrun.iter().any(|o| o.is_of(cq)));
            for cell in self.transport.qps.filter(uses) {
                self.with_cell(&cell, |State { machine, link, .. }, call| {
                    machine.fail(&mut call.env(link))
                });
            }
        }
    }

    pub(crate) fn kick_worker(&self) {
        self.links.waker.kick();
    }
}
