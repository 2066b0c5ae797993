//! Receiving, and everything that has to be done at some time by somebody.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyverbs_causes::Cause;
use anyverbs_links::pace::NO_LIMIT;
use anyverbs_links::route::Outbox;
use anyverbs_links::shm::{self, Gone, Inbox, LaneCall};
use anyverbs_links::times;
use anyverbs_links::udp::Asked;
use anyverbs_locks::{FastMutexGuard, fast, rank};
use anyverbs_net::fault::Fault;
use anyverbs_net::forward::{ForwardBuffer, Forwarded};
use anyverbs_net::shm::{Channel, Closed, Event, Poller};
use anyverbs_net::{Datagram, RxBatch};
use anyverbs_objects::base::Caller;
use anyverbs_objects::config::Config;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::qp::lane::Ring;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wire::credit::{CreditCounts, CreditPacket};

use super::Driver;
use super::datagrams::{Received, Senders};
use super::deliver::{Ahead, Arrived};
use super::owed::Debts;
use super::own::OwnLook;
use super::why::ReasonAhead;
use super::worker::{Shared, WAKE_UP};
use crate::qp::arrivals::reborrow;
use crate::qp::env::Call;
use crate::qp::{QpCell, State};

/// Receive buffers of 64 KiB.
const BUFFERS: usize = 8;
/// Packets received after which ACKs leave although more packets wait.
const ACK_EVERY: usize = 128;
/// Datagrams handed on by other processes that are read in one go.
const FORWARD_BUDGET: usize = 32;

/// Empty looks at the sockets after which a caller looks only every [`WAKE_UP`], as long as the same-host link is
/// busy. A look is two system calls, and costs more than a message there.
const QUIET_AFTER: u32 = 64;
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
    /// Receiving failed, and the log says so.
    failed: bool,
    since_acks: usize,
    deferred: Deferred,
    senders: Senders,
}

/// Work for after the packets.
#[derive(Debug)]
pub(super) struct Deferred {
    /// Queue pairs with room on their path again.
    resume: Vec<Qpn>,
    /// Credit probes, to be answered when earlier messages are delivered.
    probes: Vec<Asked>,
    /// Lanes that other processes have opened.
    pub(super) lanes: Vec<(Arc<Channel>, LaneCall)>,
    /// Other processes that have said what they do to packets.
    manners: Vec<Arc<Channel>>,
}

impl Deferred {
    fn is_empty(&self) -> bool {
        self.resume.is_empty() && self.probes.is_empty() && self.manners.is_empty()
    }
}

/// A credit packet that came by UDP, and from where.
fn asked(packet: CreditPacket, datagram: &Datagram<'_>) -> Asked {
    let from = datagram.source.ip().to_canonical();
    let scope_id = match from {
        IpAddr::V6(ip) if ip.is_unicast_link_local() => datagram.interface,
        _ => 0,
    };
    Asked { packet, from, scope_id, to_us: datagram.destination.to_canonical(), by_ring: false }
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
            failed: false,
            since_acks: 0,
            deferred: Deferred {
                resume: Vec::with_capacity(64),
                probes: Vec::with_capacity(64),
                lanes: Vec::new(),
                manners: Vec::new(),
            },
            senders: Senders::new(),
        })
    }

    /// The likely poll of a program that waits for a message through shared memory. False if there is one, or if it is time
    /// for something else: then nothing was done.
    #[inline]
    fn finds_nothing(&mut self, worker: &Shared) -> bool {
        let Some(poller) = &mut self.poller else { return false };
        let is_quiet = self.since_shm < IDLE_AFTER
            && self.empty_looks >= QUIET_AFTER
            && !(poller.is_armed() && worker.is_shm_spent());
        if !is_quiet || !poller.finds_nothing() {
            return false;
        }
        self.since_shm += 1;
        self.since_acks = 0;
        true
    }

    /// The likely poll of a program to which a message or an answer comes by a lane. False if none has come, or more is to
    /// be done.
    #[inline]
    fn receive_by_lane(&mut self, driver: &'static Driver, into: Option<&mut dyn Caller>) -> bool {
        let Some(poller) = &mut self.poller else { return false };
        let found = driver.receive_lanes(poller, &mut self.last, Ring::Unread, into);
        if found.any {
            self.since_shm = 0;
        }
        found.any && !found.is_out_of_turn
    }

    /// Whether ACKs are to leave after `n` more packets; `if_empty`: also after none.
    #[inline]
    fn are_acks_due(&mut self, n: usize, if_empty: bool) -> bool {
        self.since_acks += n;
        let are_due = self.since_acks >= ACK_EVERY || (n == 0 && if_empty);
        if are_due {
            self.since_acks = 0;
        }
        are_due
    }
}

/// The kinds of threads that receive.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reader {
    /// A poll. It looks at quiet sockets and at the clock only when it is due.
    Poll { is_due: bool },
    /// A thread of the program that was woken, or waits for others. It looks at everything.
    Wait,
    /// The worker. It looks at everything, and leaves that to another thread that is at it already.
    Worker,
}

impl Reader {
    fn is_poll(self) -> bool {
        matches!(self, Self::Poll { .. })
    }
}

/// The parts of a batch that were received, and are to be received.
#[derive(Clone, Copy)]
struct Step {
    reader: Reader,
    /// Before anything was read: queues that are found empty were so no earlier than this. `None` if the reader has not
    /// looked at the clock.
    now: Option<Time>,
    /// Messages through shared memory.
    by_ring: usize,
    /// Sockets are not to be looked at.
    quiet: bool,
}

impl Driver {
    /// A caller's poll found nothing: serves the network and the clock. Tells whether that was next to nothing.
    pub(crate) fn poll_progress(&'static self, mut into: Option<&mut dyn Caller>) -> bool {
        let (is_due, has_found) = match self.look_at_own(reborrow(&mut into)) {
            OwnLook::Nothing => return true,
            OwnLook::Something => {
                self.end_batch(Reader::Poll { is_due: false }, 1, false);
                return false;
            }
            OwnLook::LookAtAll { is_due, has_found } => (is_due, has_found),
        };
        self.poll_looks.note();
        let reader = Reader::Poll { is_due };
        self.drain_inproc(false);
        let mut rx = self.rx.try_lock();
        if has_found && let Some(rx) = &mut rx {
            rx.since_shm = 0;
        }
        if !is_due && rx.as_mut().is_some_and(|rx| rx.receive_by_lane(self, reborrow(&mut into))) {
            drop(rx);
            if !self.worker.is_left_to_reader() {
                self.end_batch(reader, 1, false);
                return false;
            }
            // The worker has left the sockets to this poll.
            rx = self.rx.try_lock();
        }
        let nothing_came = !is_due && self.is_end_of_poll(&mut rx);
        if !nothing_came && self.receive_with(rx, reader, into) == 0 {
            self.flush(Debts::All);
        }
        if is_due {
            self.run_timers();
        }
        nothing_came
    }

    /// Whether there is nothing to do for a poll, as for most while a message is on its way. Otherwise `rx` is locked still.
    #[inline]
    fn is_end_of_poll(
        &'static self,
        rx: &mut Option<FastMutexGuard<'static, rank::Receive, RxState>>,
    ) -> bool {
        let is_end = !self.transport.owed.now().is_any()
            && !self.above().management.keeps_disconnects()
            && !self.worker.watches_frames()
            && rx.as_mut().is_some_and(|rx| rx.finds_nothing(&self.worker));
        if is_end {
            *rx = None;
            // The worker may have left the sockets to this poll.
            if self.worker.is_left_to_reader() {
                *rx = self.rx.try_lock();
            }
        }
        is_end && rx.is_none()
    }

    /// The program is about to sleep: ACKs leave, and the worker is on duty again.
    pub(crate) fn end_polling(&'static self) {
        self.worker.end_polling(self.poll_looks.sum());
        self.flush(Debts::AtOnce);
        self.worker.rearm_if_disarmed(self.links);
        self.let_shm_wake();
    }

    /// Has the same-host link wake the worker again, and receives earlier messages.
    pub(super) fn let_shm_wake(&'static self) {
        let mut rounds = 0;
        while !self.rearm_shm() {
            self.receive(Reader::Poll { is_due: false });
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

    /// Receives a batch, and returns the number of packets. 0 also while another thread does.
    pub(crate) fn receive(&'static self, reader: Reader) -> usize {
        self.receive_with(self.lock_rx(reader), reader, None)
    }

    fn lock_rx(&self, reader: Reader) -> Option<FastMutexGuard<'_, rank::Receive, RxState>> {
        let rx = self.rx.try_lock().or_else(|| {
            // The holder of the lock sees this note, or is seen to have released it before.
            (reader == Reader::Worker).then(|| self.worker.leave_to_reader())?;
            fast::heavy_fence();
            self.rx.try_lock()
        });
        if rx.is_some() && reader == Reader::Worker {
            self.worker.take_left_to_reader();
        }
        rx
    }

    /// As [`receive`](Self::receive), by a thread that has locked the receive path, or has found it locked.
    fn receive_with(
        &'static self,
        rx: Option<FastMutexGuard<'static, rank::Receive, RxState>>,
        reader: Reader,
        into: Option<&mut dyn Caller>,
    ) -> usize {
        let mut n = rx.map_or(0, |rx| self.receive_batch(rx, reader, into));
        let again =
            |reader| self.lock_rx(reader).map_or(0, |rx| self.receive_batch(rx, reader, None));
        if reader.is_poll() && self.worker.take_left_to_reader() && n == 0 {
            // The event that woke the worker came after this thread had looked.
            n = again(reader);
        }
        if self.above().management.keeps_disconnects() {
            // Messages from before a DREQ are received now: the caller may be about to sleep.
            n += again(if reader == Reader::Worker { reader } else { Reader::Wait });
        }
        n + self.receive_frames()
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

    /// One batch: what lies in the rings, then what lies in the sockets.
    fn receive_batch(
        &'static self,
        mut rx: FastMutexGuard<'_, rank::Receive, RxState>,
        reader: Reader,
        into: Option<&mut dyn Caller>,
    ) -> usize {
        let is_brief = reader == Reader::Poll { is_due: false };
        let now = (!is_brief).then(|| self.core.now());
        let by_ring = self.receive_rings(&mut rx, reader, into);
        let quiet = reader.is_poll()
            && rx.since_shm < IDLE_AFTER
            && rx.empty_looks >= QUIET_AFTER
            && now.is_none_or(|now| now < rx.looked_at + WAKE_UP);
        if quiet && now.is_none() && rx.closed.is_empty() && rx.deferred.is_empty() {
            // Only messages through shared memory, if any: the likely case of a program that polls.
            let acks_due = rx.are_acks_due(by_ring, true);
            drop(rx);
            return self.end_batch(reader, by_ring, acks_due);
        }
        self.receive_rest(rx, Step { reader, now, by_ring, quiet })
    }

    /// Takes messages and events of the same-host link.
    #[inline]
    fn receive_rings(
        &'static self,
        rx: &mut RxState,
        reader: Reader,
        mut into: Option<&mut dyn Caller>,
    ) -> usize {
        let RxState { poller, last, inbox, closed, since_shm, deferred, .. } = rx;
        let Some(poller) = poller else { return 0 };
        if reader != Reader::Worker && poller.is_armed() && self.worker.is_shm_spent() {
            // The worker knows that somebody polls; the peers need not wake it.
            poller.disarm();
        }
        let by_lane = self.receive_lanes(poller, last, Ring::Unread, reborrow(&mut into));
        let mut n = by_lane.number();
        let by_ring = self.receive_ring(poller, (last, inbox), deferred, reborrow(&mut into));
        if by_ring > 0 && reader.is_poll() {
            Self::note_own(None);
        }
        n += by_ring;
        if poller.has_called_lanes() {
            n += self.receive_lanes(poller, last, Ring::Unread, reborrow(&mut into)).number();
        }
        if by_lane.is_out_of_turn && !poller.has_messages() {
            n += self.receive_lanes(poller, last, Ring::Read, into).taken;
        }
        for (channel, call) in deferred.lanes.drain(..) {
            self.accept_lane(poller, &channel, call);
        }
        *since_shm = if n > 0 { 0 } else { since_shm.saturating_add(1) };
        while let Some(event) = poller.next_event() {
            n += 1;
            match (event, &self.links.shm) {
                (Event::Room(channel), Some(shm)) => {
                    if let Some(peer) = shm.find(&channel) {
                        peer.take_room(&mut deferred.resume);
                    }
                }
                (Event::Manner(channel), _) => deferred.manners.push(channel),
                (Event::Closed(channel, why), _) => closed.push((channel, why)),
                _ => {}
            }
        }
        n
    }

    /// Goes on where there may be more than messages through shared memory: with a frame of its own, which is large.
    #[inline(never)]
    fn receive_rest(
        &'static self,
        mut rx: FastMutexGuard<'_, rank::Receive, RxState>,
        step: Step,
    ) -> usize {
        let Step { reader, now, by_ring, quiet } = step;
        let datagrams = if quiet { 0 } else { self.read_sockets(&mut rx, reader) };
        let busy = datagrams > 0 || by_ring > 0;
        let is_thorough = now.is_some() && !quiet;
        let Some(now) = now.or_else(|| busy.then(|| self.core.now())) else { return 0 };
        let mut n = by_ring;
        if !quiet {
            rx.looked_at = now;
            n += self.deliver_datagrams(&mut rx, reader, now);
        }
        if is_thorough {
            n += self.receive_forwarded(&mut rx, now);
        }
        self.answer(&mut rx.deferred.probes);
        let is_empty = n == 0 && !quiet && rx.batch.asked_all();
        if is_empty && !self.transport.owed.now().is_any() {
            self.rx_empty_at.store(now.as_nanos(), Ordering::Release);
        }
        let acks_due = rx.are_acks_due(n, reader != Reader::Worker);
        let mut resumed = std::mem::take(&mut rx.deferred.resume);
        let lost = std::mem::take(&mut rx.closed);
        let manners = std::mem::take(&mut rx.deferred.manners);
        drop(rx);
        let management = self.above().management;
        if management.keeps_disconnects() && is_empty && !self.links.inproc.is_pending() {
            management.look_at_disconnects(now, now);
        }
        for (channel, why) in lost {
            self.lose_peer(&channel, why, &mut resumed);
        }
        manners.iter().for_each(|channel| self.hear_manner(channel));
        if !resumed.is_empty() {
            for qpn in resumed {
                self.resume(qpn);
            }
            self.after_unlock();
        }
        self.end_batch(reader, n, acks_due)
    }

    /// Reads datagrams from the sockets; how many buffers.
    fn read_sockets(&self, rx: &mut RxState, reader: Reader) -> usize {
        let read = match reader {
            // Timers run behind a poll that is due. They act only if all sockets were found empty.
            Reader::Poll { is_due } => self.links.port.poll(&mut rx.batch, is_due),
            Reader::Wait | Reader::Worker => self.links.port.receive(&mut rx.batch),
        };
        let buffers = read.unwrap_or_else(|error| {
            // Once: a program that closed our descriptors has enough to read.
            if !std::mem::replace(&mut rx.failed, true) {
                tracing::error!(%error, "receiving failed");
            }
            0
        });
        rx.empty_looks = if buffers > 0 { 0 } else { rx.empty_looks.saturating_add(1) };
        buffers
    }

    /// Delivers the datagrams that were read; how many.
    fn deliver_datagrams(&'static self, rx: &mut RxState, reader: Reader, now: Time) -> usize {
        let RxState { batch, deferred, senders, .. } = rx;
        let (mut n, mut tally) = (0, senders.tally());
        let (mut to_gsi, mut given_up) = (Vec::new(), Vec::new());
        let mut datagrams = batch.datagrams();
        let mut places = <[Arrived<'_>; 2]>::default();
        // The reason of the NAK that comes next.
        let mut ahead: Option<ReasonAhead<'_>> = None;
        let mut source = Ahead::new(now, &mut places, |into| {
            while let Some(datagram) = datagrams.next() {
                n += 1;
                match self.classify(&datagram, senders, false, &mut tally, into) {
                    Some(Received::Packet) => {
                        if let Some(reason) = ahead.take() {
                            reason.join(&into.arrival, &mut into.packet);
                        }
                        let equal = datagrams.equal();
                        let joined = self.join(&datagram, equal, senders, &mut tally, into) - 1;
                        datagrams.pass(joined);
                        n += joined;
                        if reader == Reader::Worker && into.packet.headers.bth.opcode.is_one_sided()
                        {
                            // No thread polled when it came.
                            self.worker.note_one_sided();
                        }
                        return true;
                    }
                    Some(Received::Gsi(mad)) => to_gsi.push(*mad),
                    Some(Received::Credit(credit)) => {
                        self.take_credit(asked(credit, &datagram), deferred);
                    }
                    Some(Received::Reason(reason)) if reason.is_given_up() => given_up.push(reason),
                    Some(Received::Reason(reason)) => ahead = Some(*reason),
                    None => {}
                }
            }
            false
        });
        // Not remembered: a queue pair that is destroyed should not keep its completion channel open.
        self.deliver(&mut source, &mut None, None);
        self.count_received(tally);
        if n > 0 && reader.is_poll() {
            Self::note_own(None);
        }
        if !to_gsi.is_empty() {
            // No queue pair is locked here.
            self.above().management.receive(now, &to_gsi);
        }
        given_up.iter().for_each(|reason| self.take_given_up(reason));
        n
    }

    /// Delivers datagrams that other processes of the host have handed on; how many.
    fn receive_forwarded(&'static self, rx: &mut RxState, now: Time) -> usize {
        for n in 0..FORWARD_BUDGET {
            let datagram = match self.links.port.receive_forwarded(&mut rx.forwarded) {
                Ok(Some(datagram)) => datagram,
                Ok(None) => return n,
                Err(error) => {
                    tracing::debug!(%error, "reading what was handed on");
                    return n;
                }
            };
            let (mut tally, mut place) = (rx.senders.tally(), Arrived::default());
            match self.classify(&datagram, &mut rx.senders, true, &mut tally, &mut place) {
                Some(Received::Packet) => {
                    let Arrived { arrival, packet, .. } = place;
                    self.deliver_all(now, std::iter::once((arrival, packet)));
                }
                Some(Received::Gsi(mad)) => self.above().management.receive(now, &[*mad]),
                Some(Received::Credit(credit)) => {
                    self.take_credit(asked(credit, &datagram), &mut rx.deferred);
                }
                Some(Received::Reason(reason)) if reason.is_given_up() => {
                    self.take_given_up(&reason);
                }
                // The reason of a NAK that comes by a detour is lost.
                Some(Received::Reason(_)) | None => {}
            }
            self.count_received(tally);
        }
        FORWARD_BUDGET
    }

    /// The work after a batch of `n` packets.
    #[inline(always)]
    fn end_batch(&'static self, reader: Reader, n: usize, acks_due: bool) -> usize {
        if acks_due {
            self.flush(Debts::All);
        } else if reader != Reader::Worker && self.links.waker.is_asleep() {
            // If this was the program's last poll, no one would look after them soon.
            self.flush(Debts::Unawaited);
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
            self.with_cell(&cell, None, |State { machine, link, .. }, call| {
                let Some(peer) = link.shm_peer().filter(|peer| peer.is(channel)) else { return };
                // The link may have forgotten it before.
                peer.end(gone, now, resume);
                link.blocked = false;
                let attr = machine.attr();
                match gone {
                    Gone::Unwilling => {
                        let this = (cell.qpn, machine.init().qp_type);
                        link.reroute(self.links, this, &attr.av, attr.dest_qpn);
                    }
                    Gone::Dead => link.peer_gone_at = Some(now + times::GRACE),
                }
                machine.transmit(&mut call.env(link));
            });
        }
    }

    /// A datagram for another process of this host, or for none.
    pub(super) fn misdelivered(&self, slot: u8, datagram: &Datagram<'_>, was_forwarded: bool) {
        // Slot 0 (QP0) names no process.
        if slot == 0 || was_forwarded {
            self.drop_datagram(datagram, Counter::DropNoQp);
            return;
        }
        match self.links.port.forward(slot, datagram) {
            Forwarded::Sent | Forwarded::Kept => {
                self.core.count_for_none(Counter::Forwarded, 1);
                self.above().management.forwarded(self.core.now());
                self.links.port.note_misdelivery();
                if self.links.port.needs_resteer() {
                    self.kick_worker();
                }
            }
            Forwarded::Dead => {
                self.answer_for_dead(datagram);
                self.drop_datagram(datagram, Counter::DropNoQp);
            }
            Forwarded::Failed => self.drop_datagram(datagram, Counter::DropNoQp),
            Forwarded::Full => self.core.count_for_none(Counter::DropSocketFull, 1),
        }
    }

    /// Takes a credit packet that came from `asked`.
    pub(super) fn take_credit(&self, asked: Asked, deferred: &mut Deferred) {
        let Asked { packet, from, .. } = asked;
        if packet.is_probe {
            deferred.probes.push(asked);
        } else {
            let CreditCounts { bytes, messages } = packet.counts;
            self.links.paths.echo(from, packet.from, bytes, messages, &mut deferred.resume);
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
            state.link.owed.credit = (limit == asked.packet.counts.messages).then_some(asked);
            // Under the lock, so that it cannot overtake the answer of the next thread that posts receives.
            echoes.echo(self.links, &asked, limit);
            echoes.flush(self.links);
        }
        echoes.flush(self.links);
    }

    /// Calls into a queue pair, if it still lives.
    pub(super) fn with_qp(&'static self, qpn: Qpn, f: impl FnOnce(&mut State, &mut Call<'_>)) {
        let Some(cell) = self.transport.qps.find(qpn) else { return };
        self.with_cell(&cell, None, f);
    }

    /// As [`with_qp`](Self::with_qp), if its lock is to be had within a time, if any is given.
    pub(super) fn with_cell(
        &'static self,
        cell: &QpCell,
        within: Option<Duration>,
        f: impl FnOnce(&mut State, &mut Call<'_>),
    ) {
        let state = match within {
            None => Some(cell.state.lock()),
            Some(within) => cell.state.try_lock_for(within),
        };
        let Some(mut state) = state.filter(|state| !state.is_dead()) else { return };
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
        if self.transport.aftermath.is_any() {
            self.fail_overrun();
        }
        if self.links.inproc.is_pending() && !self.links.inproc.drain(&self, false) {
            self.kick_worker();
        }
        if self.links.paths.any_admitted() {
            self.call_admitted();
        }
    }

    /// Delivers packets within the process; `all`: without a limit.
    #[inline]
    pub(super) fn drain_inproc(&'static self, all: bool) {
        if self.links.inproc.is_pending() {
            if !self.links.inproc.drain(&self, all) {
                self.kick_worker();
            }
            if self.links.paths.any_admitted() {
                self.call_admitted();
            }
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
        while let Some(overrun) = self.transport.aftermath.take() {
            if overrun.is_empty() {
                continue;
            }
            let uses = |cell: &Arc<QpCell>| {
                let cqs = [&cell.send_cq, &cell.recv_cq];
                overrun
                    .iter()
                    .any(|o| o.qpn == cell.qpn || cqs.into_iter().flatten().any(|cq| o.is_of(cq)))
            };
            for line in self.overrun_lines(&overrun) {
                tracing::error!(target: "anyverbs", "{line}");
            }
            for srq in self
                .transport
                .xrc_srqs
                .filter(|srq| overrun.iter().any(|o| srq.completes_in(|cq| o.is_of(cq))))
            {
                srq.fail();
            }
            self.above().frames.fail_users(&|cq| overrun.iter().any(|o| o.is_of(cq)));
            for cell in self.transport.qps.filter(uses) {
                self.with_cell(&cell, None, |State { machine, link, .. }, call| {
                    machine.fail(Cause::CqOverrun, &mut call.env(link))
                });
            }
        }
    }

    pub(crate) fn kick_worker(&self) {
        self.links.waker.kick();
    }
}

#[cfg(test)]
impl RxState {
    /// As if messages came through shared memory, and none from the sockets, which were looked at last at this time.
    pub(super) fn pretend_busy(&mut self, looked_at: Time) {
        (self.since_shm, self.empty_looks, self.looked_at) = (0, QUIET_AFTER, looked_at);
    }
}
