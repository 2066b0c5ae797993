//! The machine: its tables, and how it is driven.

use std::collections::{BTreeMap, VecDeque};

use super::connection::{Connection, ConnectionState, Names};
use super::counters::{CmCounters, DropReason};
use super::error::CmError;
use super::event::CmEvent;
use super::id::CommId;
use super::listener::{ListenerId, Listeners};
use super::mad::{Mad, Malformed};
use super::message::Attribute;
use super::message::Message;
use super::message::code::About;
use super::message::private_data::PrivateData;
use super::outbox::{MadQueue, Transmit, asks};
use super::params::Listen;
use super::qp_attr::QpParams;
use super::record::Record;
use super::repeats::Repeats;
use super::sidr::Sidrs;
use super::timeout;
use super::timers::Timers;
use crate::qp::Arrival;
use crate::time::Time;
use crate::types::Gid;

/// The settings of a [`Cm`].
#[derive(Clone, Copy, Debug)]
pub struct CmConfig {
    /// The process's slot: the top byte of the IDs that it gives.
    pub slot: u8,
    /// The start of its IDs, drawn at random: the peers of a slot's former owner should not meet their IDs again.
    pub first_id: u32,
    /// The device's node GUID.
    pub ca_guid: u64,
    /// Code of the time that the device may take to acknowledge (`local_ca_ack_delay`).
    pub ack_delay: u8,
    /// Most READs and atomics that a queue pair may have outstanding, in either direction.
    pub max_rd_atomic: u8,
    /// Most connections and SIDR requests that the program has not destroyed.
    pub max_connections: usize,
    /// The most connections that may be destroyed and not gone yet. Further ones are forgotten at once.
    pub max_orphans: usize,
    /// Code of the time that our MRAs ask for; the kernel takes 24.
    pub service_timeout: u8,
    /// Repeats a message without an answer up to three times within the first wait, besides the repetitions that the
    /// program asks for.
    pub quick_repeats: bool,
    /// Keeps records of connections, which must be polled: [`Cm::poll_record`].
    pub records: bool,
}

impl Default for CmConfig {
    fn default() -> Self {
        Self {
            slot: 0,
            first_id: 1,
            ca_guid: 0,
            ack_delay: 15,
            max_rd_atomic: 16,
            max_connections: 64 * 1024,
            max_orphans: 16 * 1024,
            service_timeout: 24,
            quick_repeats: false,
            records: false,
        }
    }
}

/// The number of entries in the tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Listeners.
    pub listeners: usize,
    /// Connections, orphans included.
    pub connections: usize,
    /// SIDR requests of both sides, orphans included.
    pub sidrs: usize,
    /// Connections and SIDR requests that the program has destroyed.
    pub orphans: usize,
    /// Names that peers have for them.
    pub names: usize,
    /// Timers that run.
    pub timers: usize,
    /// Datagrams that wait.
    pub outbox: usize,
    /// Events that wait.
    pub events: usize,
}

/// The connection manager of one device in one process.
#[derive(Debug)]
pub struct Cm {
    pub(super) config: CmConfig,
    next: NextIds,
    pub(super) listeners: Listeners,
    pub(super) connections: BTreeMap<CommId, Box<Connection>>,
    pub(super) sidrs: Sidrs,
    pub(super) names: Names,
    pub(super) timers: Timers,
    pub(super) outbox: MadQueue,
    pub(super) events: VecDeque<CmEvent>,
    pub(super) orphans: usize,
    pub(super) repeats: Repeats,
    pub(super) records: VecDeque<(CommId, Option<Record>)>,
}

/// The IDs that are given out next.
#[derive(Debug)]
struct NextIds {
    id: u32,
    transaction: u32,
}

/// IDs that fit below the slot.
const ID_SPACE: u32 = 1 << 24;

impl Cm {
    /// A connection manager without listeners and connections.
    #[must_use]
    pub fn new(config: CmConfig) -> Self {
        // There is always a free ID.
        let most = ID_SPACE as usize / 4;
        let config = CmConfig {
            max_connections: config.max_connections.min(most),
            max_orphans: config.max_orphans.min(most),
            ..config
        };
        Self {
            config,
            next: NextIds { id: config.first_id % ID_SPACE, transaction: config.first_id },
            listeners: Listeners::default(),
            connections: BTreeMap::new(),
            sidrs: Sidrs::default(),
            names: Names::default(),
            timers: Timers::default(),
            outbox: MadQueue::default(),
            events: VecDeque::new(),
            orphans: 0,
            repeats: Repeats::new(config.quick_repeats),
            records: VecDeque::new(),
        }
    }

    /// Takes the payload of a datagram to QP1 whose Q_Key is right. At worst it causes an answer and a count. Only its
    /// own peer's address can touch a connection.
    pub fn handle(&mut self, now: Time, arrival: &Arrival, payload: &[u8]) {
        match Mad::parse(payload) {
            Ok(mad) => self.handle_mad(now, arrival, &mad),
            Err(error) => self.handle_malformed(arrival, payload, error),
        }
    }

    /// As [`handle`](Self::handle), for a payload that is no MAD for this reason.
    pub fn handle_malformed(&mut self, arrival: &Arrival, payload: &[u8], error: Malformed) {
        match error {
            _ if !is_between_ports(arrival) => self.drop(DropReason::Address),
            Malformed::ClassVersion => self.refuse_class_version(arrival, payload),
            error => self.drop(error.into()),
        }
    }

    /// As [`handle`](Self::handle), for a payload that was parsed.
    pub fn handle_mad(&mut self, now: Time, arrival: &Arrival, mad: &Mad) {
        if !is_between_ports(arrival) {
            return self.drop(DropReason::Address);
        }
        let &Mad { transaction_id: tid, modifier, ref message } = mad;
        self.outbox.counters.rx_msgs.add(message.attribute());
        match message {
            Message::Req(req) => self.on_req(now, arrival, tid, modifier, req),
            Message::Mra(mra) => self.on_mra(now, arrival, mra),
            Message::Rej(rej) => self.on_rej(now, arrival, rej),
            Message::Rep(rep) => self.on_rep(now, arrival, tid, modifier, rep),
            Message::Rtu(rtu) => self.on_rtu(now, arrival, tid, rtu),
            Message::Dreq(dreq) => self.on_dreq(now, arrival, tid, dreq),
            Message::Drep(drep) => self.on_drep(now, arrival, tid, drep),
            Message::SidrReq(req) => self.on_sidr_req(now, arrival, tid, req),
            Message::SidrRep(rep) => self.on_sidr_rep(arrival, modifier, rep),
            Message::Lap(lap) => self.on_lap(arrival, tid, lap),
            // We load no alternate paths, so there is none to answer for.
            Message::Apr(_) => self.drop(DropReason::State),
        }
    }

    /// The next datagram to send. It leaves now, and the wait for its answer begins now.
    pub fn poll_transmit(&mut self, now: Time) -> Option<Transmit> {
        let transmit = self.outbox.pop()?;
        if let Some((attribute, id)) = asks(&transmit.mad) {
            self.leaves(now, attribute, id);
        }
        Some(transmit)
    }

    /// A message leaves that wants an answer.
    fn leaves(&mut self, now: Time, attribute: Attribute, id: CommId) {
        use ConnectionState as S;
        let Some(c) = self.connections.get_mut(&id) else { return self.sidr_leaves(now, id) };
        let waits = match c.state {
            S::ReqSent => attribute == Attribute::Req,
            S::RepSent => attribute == Attribute::Rep,
            S::DreqSent => attribute == Attribute::Dreq,
            _ => false,
        };
        if waits && let Some(next) = c.attempt.leave(now) {
            self.timers.set(id, &mut c.deadline, Some(next));
        }
    }

    /// The next thing that happened.
    pub fn poll_event(&mut self) -> Option<CmEvent> {
        loop {
            let event = self.events.pop_front()?;
            if self.is_live(event.id()) {
                return Some(event);
            }
        }
    }

    /// When [`on_timer`](Self::on_timer) must be called at the latest. It may move with every call.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        self.timers.first()
    }

    /// Runs the timers that are due: repeats messages, gives up, ends waits.
    pub fn on_timer(&mut self, now: Time) {
        while let Some(id) = self.timers.due(now) {
            if self.connections.contains_key(&id) {
                self.connection_timer(now, id);
            } else {
                self.sidr_timer(now, id);
            }
        }
    }

    /// Listens (`rdma_listen(3)`).
    ///
    /// # Errors
    /// [`CmError::InUse`]; a wildcard does not collide with an address.
    pub fn listen(&mut self, listen: Listen) -> Result<ListenerId, CmError> {
        self.listeners.add(listen).ok_or(CmError::InUse)
    }

    /// Stops listening. Requests that the program has not taken are rejected and destroyed.
    ///
    /// # Errors
    /// [`CmError::UnknownId`].
    pub fn unlisten(&mut self, now: Time, listener: ListenerId) -> Result<(), CmError> {
        let waits = |waiting: Option<ListenerId>| waiting == Some(listener);
        let connections =
            self.connections.values().filter(|c| waits(c.waiting)).map(|c| c.local_id);
        let mut ids: Vec<_> = connections.collect();
        ids.extend(self.sidrs.waiting_for(listener));
        if !self.listeners.remove(listener) {
            return Err(CmError::UnknownId);
        }
        for id in ids {
            self.destroy(now, id)?;
        }
        Ok(())
    }

    /// The program has heard of a request: it no longer counts against the listener's backlog. Answering does the
    /// same.
    ///
    /// # Errors
    /// [`CmError::UnknownId`].
    pub fn take_request(&mut self, id: CommId) -> Result<(), CmError> {
        let waiting = match self.connections.get_mut(&id) {
            Some(connection) if !connection.orphan => connection.waiting.take(),
            _ => self.sidrs.live(id).ok_or(CmError::UnknownId)?.waiting.take(),
        };
        self.release_backlog(waiting);
        Ok(())
    }

    /// The state of a connection.
    ///
    /// # Errors
    /// [`CmError::UnknownId`].
    pub fn state(&self, id: CommId) -> Result<ConnectionState, CmError> {
        self.live_connection(id).map(|c| c.state)
    }

    /// The attributes for a connection's queue pair: see [`QpParams::attr`].
    ///
    /// # Errors
    /// [`CmError::UnknownId`].
    pub fn qp_params(&self, id: CommId) -> Result<QpParams, CmError> {
        self.live_connection(id).map(|c| c.qp)
    }

    /// The counters.
    #[must_use]
    pub fn counters(&self) -> &CmCounters {
        &self.outbox.counters
    }

    /// The number of entries in the tables.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage {
            listeners: self.listeners.len(),
            connections: self.connections.len(),
            sidrs: self.sidrs.len(),
            orphans: self.orphans,
            names: self.names.len() + self.sidrs.names(),
            timers: self.timers.len(),
            outbox: self.outbox.len(),
            events: self.events.len(),
        }
    }

    /// Stops listening and destroys everything, as a process does when it ends. Datagrams still wait to be sent, and
    /// messages still wait for their answers.
    pub fn shutdown(&mut self, now: Time) {
        for listener in self.listeners.ids() {
            self.unlisten(now, listener).expect("it is there");
        }
        let live = self.connections.values().filter(|c| !c.orphan).map(|c| c.local_id);
        let mut ids: Vec<_> = live.collect();
        ids.extend(self.sidrs.all_live());
        for id in ids {
            // Queue pairs end with the process, even if another process keeps an id.
            if self.state(id) == Ok(ConnectionState::Established) {
                self.send_dreq(now, id, PrivateData::EMPTY);
            }
            self.destroy(now, id).expect("it is there");
        }
        self.repeat_last_disconnects(now);
    }

    /// A free ID, never [`CommId::NONE`].
    pub(super) fn new_id(&mut self) -> CommId {
        loop {
            let id = CommId(u32::from(self.config.slot) << 24 | self.next.id);
            self.next.id = (self.next.id + 1) % ID_SPACE;
            let taken = self.connections.contains_key(&id) || self.sidrs.contains(id);
            if !id.is_none() && !taken {
                return id;
            }
        }
    }

    pub(super) fn new_transaction(&mut self, id: CommId) -> u64 {
        self.next.transaction = self.next.transaction.wrapping_add(1);
        u64::from(id.0) << 32 | u64::from(self.next.transaction)
    }

    pub(super) fn is_full(&self) -> bool {
        self.connections.len() + self.sidrs.len() >= self.config.max_connections + self.orphans
    }

    fn is_live(&self, id: CommId) -> bool {
        match self.connections.get(&id) {
            Some(connection) => !connection.orphan,
            None => self.sidrs.is_live(id),
        }
    }

    fn live_connection(&self, id: CommId) -> Result<&Connection, CmError> {
        let connection = self.connections.get(&id).filter(|c| !c.orphan);
        connection.map(|c| &**c).ok_or(CmError::UnknownId)
    }

    /// A connection that the program may act on.
    pub(super) fn live_mut(
        connections: &mut BTreeMap<CommId, Box<Connection>>,
        id: CommId,
    ) -> Result<&mut Connection, CmError> {
        let connection = connections.get_mut(&id).filter(|c| !c.orphan);
        connection.map(|c| &mut **c).ok_or(CmError::UnknownId)
    }

    pub(super) fn drop(&mut self, reason: DropReason) {
        self.outbox.counters.drop(reason);
    }

    /// Tells the program, if it still cares.
    pub(super) fn raise(&mut self, event: CmEvent) {
        let is_quiet = self.connections.get(&event.id()).is_some_and(|c| c.quiet);
        if self.is_live(event.id()) && !is_quiet {
            self.events.push_back(event);
        }
    }

    pub(super) fn release_backlog(&mut self, waiting: Option<ListenerId>) {
        if let Some(listener) = waiting.and_then(|id| self.listeners.get_mut(id)) {
            listener.waiting -= 1;
        }
    }

    /// Packets may still be about: the connection waits, then is over.
    pub(super) fn enter_timewait(&mut self, now: Time, id: CommId) {
        self.unrecord(id);
        let Some(c) = self.connections.get_mut(&id) else { return };
        c.state = ConnectionState::Timewait;
        c.sent = None;
        // The peer's queue pair is free for its next connection, as Linux has it. Its ID stays, to know late duplicates.
        self.names.leave_qpn(c);
        let end = now + timeout::timewait(c.qp.ack_timeout);
        self.timers.set(id, &mut c.deadline, Some(end));
    }

    /// The connection is over; an answer that the peer may have missed is kept for a while.
    pub(super) fn close(&mut self, now: Time, id: CommId) {
        self.unrecord(id);
        let Some(c) = self.connections.get_mut(&id) else { return };
        c.state = ConnectionState::Closed;
        c.sent = None;
        if c.answer.is_some() {
            self.names.leave_qpn(c);
            self.timers.set(id, &mut c.deadline, Some(now + timeout::HOLD));
        } else {
            self.forget(id);
        }
    }

    /// The connection is past. While the program holds it, its peer's late messages still find it.
    fn forget(&mut self, id: CommId) {
        self.unrecord(id);
        let Some(c) = self.connections.get_mut(&id) else { return };
        c.state = ConnectionState::Closed;
        c.sent = None;
        self.names.leave_qpn(c);
        self.timers.set(id, &mut c.deadline, None);
        if c.orphan {
            self.names.leave(c);
            self.connections.remove(&id);
            self.orphans -= 1;
        }
    }

    /// The program is done with a connection. It goes as soon as the peer no longer needs it.
    pub(super) fn abandon(&mut self, id: CommId) {
        let Some(c) = self.connections.get_mut(&id) else { return };
        debug_assert!(!c.orphan);
        c.orphan = true;
        let waiting = c.waiting.take();
        let is_over = c.deadline.is_none();
        self.orphans += 1;
        self.release_backlog(waiting);
        if is_over || self.orphans > self.config.max_orphans {
            self.forget(id);
        }
    }

    fn connection_timer(&mut self, now: Time, id: CommId) {
        use ConnectionState as S;
        let c = self.connections.get_mut(&id).expect("the caller found it");
        let waits = matches!(c.state, S::ReqSent | S::RepSent | S::DreqSent);
        if waits && (c.attempt.is_queued() || c.attempt.repeat(c.timeout)) {
            // To an address that has not answered, the last datagram waits for the end of the first wait.
            if !c.attempt.is_queued() && c.unproven.is_none_or(|left| left > 1) && c.may_send() {
                let mad = c.sent.as_deref().expect("these states wait for an answer");
                self.outbox.retry(c.to, mad);
                c.attempt.queue(self.outbox.took_last());
            }
            let next = c.attempt.deadline(now);
            return self.timers.set(id, &mut c.deadline, Some(next));
        }
        if c.state == S::Established {
            return self.repeat_rtu(now, id);
        }
        match c.state {
            S::ReqSent | S::MraReqRcvd | S::RepSent | S::MraRepRcvd | S::DreqSent
                if c.retries < c.max_retries =>
            {
                c.retries += 1;
                c.asked = now;
                c.state = match c.state {
                    S::MraReqRcvd => S::ReqSent,
                    S::MraRepRcvd => S::RepSent,
                    state => state,
                };
                c.attempt.retry(c.timeout);
                if c.may_send() {
                    let mad = c.sent.as_deref().expect("these states wait for an answer");
                    self.outbox.retry(c.to, mad);
                    c.attempt.queue(self.outbox.took_last());
                }
                let next = now + c.timeout;
                self.timers.set(id, &mut c.deadline, Some(next));
            }
            S::ReqSent | S::MraReqRcvd => {
                self.give_up(id, About::No);
                self.close(now, id);
                self.raise(CmEvent::Unreachable { id });
            }
            S::RepSent | S::MraRepRcvd => {
                self.give_up(id, About::No);
                self.enter_timewait(now, id);
                self.raise(CmEvent::Unreachable { id });
            }
            // The peer has stopped asking.
            S::ReqRcvd | S::MraReqSent => {
                self.give_up(id, About::Req);
                self.close(now, id);
                self.raise(CmEvent::Unreachable { id });
            }
            S::DreqSent => self.disconnected_by_timeout(now, id),
            S::Timewait => {
                self.raise(CmEvent::TimewaitExit { id });
                let c = self.connections.get_mut(&id).expect("the caller found it");
                if !c.answered_with(Attribute::Rej) {
                    return self.forget(id);
                }
                self.close(now, id);
            }
            S::Closed => self.forget(id),
            // These states wait for the program, which has no timer.
            S::Established | S::RepRcvd | S::MraRepSent | S::DreqRcvd => {
                debug_assert!(false, "no timer runs in {:?}", c.state);
                self.timers.set(id, &mut c.deadline, None);
            }
        }
    }
}

/// Whether both addresses are those of single ports.
fn is_between_ports(arrival: &Arrival) -> bool {
    let is_port = |gid: Gid| !gid.is_zero() && !gid.is_multicast();
    is_port(arrival.source) && is_port(arrival.destination)
}
