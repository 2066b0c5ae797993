//! SIDR: which queue pair serves datagrams for a service.

use std::collections::BTreeMap;
use std::time::Duration;

use super::counters::DropReason;
use super::error::{CmError, private_data};
use super::event::{CmEvent, SidrRequest, SidrResponse};
use super::id::CommId;
use super::ip::IpHeader;
use super::listener::ListenerId;
use super::machine::Cm;
use super::mad::Mad;
use super::message::Attribute;
use super::message::code::SidrStatus;
use super::message::ece::{Ece, SidrRepVendorId};
use super::message::sidr::{SidrRep, SidrReq};
use super::outbox::{Destination, Peer};
use super::params::{Serves, SidrAnswer, SidrParams};
use super::repeats::Attempt;
use super::request::{split_addresses, with_addresses};
use super::timeout;
use crate::qp::Arrival;
use crate::time::Time;
use crate::types::{QKey, Qpn};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// We asked.
    Sent,
    /// The program shall answer.
    Rcvd,
    /// The program has answered. The answer is kept for a peer that asks again.
    Answered,
    /// Over.
    Closed,
}

#[derive(Debug)]
pub(super) struct Sidr {
    state: State,
    orphan: bool,
    /// The listener whose backlog counts it.
    pub(super) waiting: Option<ListenerId>,
    /// The peer's name of a request that it made.
    request_id: CommId,
    transaction_id: u64,
    service_id: super::id::ServiceId,
    to: Destination,
    /// The request that waits for an answer, or the answer that is kept.
    message: Option<Box<Mad>>,
    timeout: Duration,
    retries: u8,
    attempt: Attempt,
    max_retries: u8,
    deadline: Option<Time>,
    named: bool,
}

/// SIDR requests of both sides.
#[derive(Debug, Default)]
pub(super) struct Sidrs {
    by_id: BTreeMap<CommId, Box<Sidr>>,
    /// Requests of peers, by the name that the peer gave them.
    by_request: BTreeMap<(Peer, CommId), CommId>,
}

impl Sidrs {
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn names(&self) -> usize {
        self.by_request.len()
    }

    pub(super) fn contains(&self, id: CommId) -> bool {
        self.by_id.contains_key(&id)
    }

    pub(super) fn is_live(&self, id: CommId) -> bool {
        self.by_id.get(&id).is_some_and(|s| !s.orphan)
    }

    /// Finds a request that the program may act on.
    pub(super) fn live(&mut self, id: CommId) -> Option<&mut Sidr> {
        self.by_id.get_mut(&id).filter(|s| !s.orphan).map(|s| &mut **s)
    }

    pub(super) fn waiting_for(&self, listener: ListenerId) -> impl Iterator<Item = CommId> {
        self.by_id.iter().filter(move |(_, s)| s.waiting == Some(listener)).map(|(id, _)| *id)
    }

    pub(super) fn all_live(&self) -> impl Iterator<Item = CommId> {
        self.by_id.iter().filter(|(_, s)| !s.orphan).map(|(id, _)| *id)
    }

    pub(super) fn of_request(&self, peer: Peer, request: CommId) -> Option<CommId> {
        self.by_request.get(&(peer, request)).copied()
    }

    /// The peer does not ask for this any more.
    fn leave(&mut self, id: CommId) {
        if let Some(s) = self.by_id.get_mut(&id)
            && std::mem::take(&mut s.named)
        {
            self.by_request.remove(&(s.to.peer(), s.request_id));
        }
    }
}

impl Cm {
    /// Asks for the queue pair behind a service (`rdma_connect(3)` of a UD id). The answer is [`CmEvent::SidrResponse`] or
    /// [`CmEvent::Unreachable`].
    ///
    /// # Errors
    /// [`CmError::Value`], [`CmError::PrivateDataTooLong`], [`CmError::Full`].
    pub fn sidr_request(&mut self, now: Time, params: &SidrParams<'_>) -> Result<CommId, CmError> {
        if !params.path.is_valid() {
            return Err(CmError::Value);
        }
        let private_data = with_addresses(params.addresses, params.private_data)?;
        if self.is_full() {
            return Err(CmError::Full);
        }
        let id = self.new_id();
        let transaction_id = self.new_transaction(id);
        let req = SidrReq {
            request_id: id,
            pkey: params.path.pkey,
            service_id: params.service_id,
            private_data,
        };
        let to = params.path.destination();
        let sent = self.outbox.send(to, transaction_id, req);
        let mut sidr = Sidr {
            state: State::Sent,
            orphan: false,
            waiting: None,
            request_id: id,
            transaction_id,
            service_id: params.service_id,
            to,
            message: Some(sent),
            timeout: params.timeout.max(timeout::SHORTEST),
            retries: 0,
            attempt: Attempt::default(),
            max_retries: params.max_retries,
            deadline: None,
            named: false,
        };
        sidr.attempt = self.repeats.begin(sidr.timeout, self.outbox.took_last());
        let next = sidr.attempt.deadline(now);
        self.timers.set(id, &mut sidr.deadline, Some(next));
        self.sidrs.by_id.insert(id, Box::new(sidr));
        Ok(id)
    }

    /// Answers a SIDR request (`rdma_accept(3)`, `rdma_reject(3)` of a UD id).
    ///
    /// # Errors
    /// [`CmError::State`] where it was answered, or the peer has stopped asking; [`CmError::PrivateDataTooLong`],
    /// [`CmError::Value`].
    pub fn sidr_reply(
        &mut self,
        now: Time,
        id: CommId,
        answer: &SidrAnswer<'_>,
    ) -> Result<(), CmError> {
        let s = self.sidrs.live(id).ok_or(CmError::UnknownId)?;
        if s.state != State::Rcvd {
            return Err(CmError::State);
        }
        if answer.ece.vendor_id >= 1 << 24 {
            return Err(CmError::Value);
        }
        let rep = SidrRep {
            request_id: s.request_id,
            status: answer.status,
            vendor_id: SidrRepVendorId(answer.ece.vendor_id),
            qpn: answer.qpn,
            service_id: s.service_id,
            qkey: answer.qkey,
            private_data: private_data(answer.private_data)?,
            ..SidrRep::default()
        };
        let options = answer.ece.options;
        s.message = Some(self.outbox.send_with(s.to, s.transaction_id, options, rep));
        s.state = State::Answered;
        self.timers.set(id, &mut s.deadline, Some(now + timeout::HOLD));
        let waiting = s.waiting.take();
        self.release_backlog(waiting);
        Ok(())
    }

    pub(super) fn on_sidr_req(&mut self, now: Time, arrival: &Arrival, tid: u64, req: &SidrReq) {
        let peer = Peer::of(arrival);
        if req.request_id.is_none() {
            return self.drop(DropReason::Malformed);
        }
        if let Some(id) = self.sidrs.of_request(peer, req.request_id) {
            let s = self.sidrs.by_id.get_mut(&id).expect("found by its name");
            if s.transaction_id == tid && s.service_id == req.service_id {
                self.outbox.counters.rx_duplicates.add(Attribute::SidrReq);
                if let (State::Answered, Some(answer)) = (s.state, &s.message) {
                    self.outbox.replay(s.to, answer);
                }
                return;
            }
            // The peer gives its ID anew, and does not wait for the old answer.
            self.close_sidr(id);
        }
        let to = Destination::answering(arrival);
        let (listener, addresses, user) = match self.find_datagram_listener(arrival, req) {
            Ok(found) => found,
            Err(status) => {
                let rep = SidrRep {
                    request_id: req.request_id,
                    service_id: req.service_id,
                    status,
                    ..SidrRep::default()
                };
                self.outbox.send(to, tid, rep);
                return;
            }
        };
        let found = self.listeners.get_mut(listener).expect("just found");
        // The request is not refused: the peer asks again, when there may be room.
        if found.is_full() {
            return self.drop(DropReason::Backlog);
        }
        found.waiting += 1;
        if self.is_full() {
            self.release_backlog(Some(listener));
            return self.drop(DropReason::Backlog);
        }
        let id = self.new_id();
        let mut sidr = Sidr {
            state: State::Rcvd,
            orphan: false,
            waiting: Some(listener),
            request_id: req.request_id,
            transaction_id: tid,
            service_id: req.service_id,
            to,
            message: None,
            timeout: Duration::ZERO,
            retries: 0,
            attempt: Attempt::default(),
            max_retries: 0,
            deadline: None,
            named: true,
        };
        self.timers.set(id, &mut sidr.deadline, Some(now + timeout::LONGEST));
        self.sidrs.by_request.insert((peer, req.request_id), id);
        self.sidrs.by_id.insert(id, Box::new(sidr));
        let request = SidrRequest {
            service_id: req.service_id,
            addresses,
            sgid: arrival.destination,
            dgid: arrival.source,
            interface: arrival.interface,
            private_data: user,
        };
        self.raise(CmEvent::SidrRequest { listener, id, request: Box::new(request) });
    }

    #[expect(clippy::type_complexity, reason = "three things, taken apart at once")]
    fn find_datagram_listener(
        &mut self,
        arrival: &Arrival,
        req: &SidrReq,
    ) -> Result<(ListenerId, Option<IpHeader>, Box<[u8]>), SidrStatus> {
        let nobody = SidrStatus::UnsupportedService;
        let listener = self.listeners.any_of(req.service_id).ok_or(nobody)?;
        let (addresses, user) = split_addresses(&req.private_data.0, listener.listen.ip_header)
            .ok_or(SidrStatus::Rejected)?;
        let is_it = |header: IpHeader| header.between(arrival.source, arrival.destination);
        let addresses =
            addresses.map(|header| is_it(header).ok_or(SidrStatus::Rejected)).transpose()?;
        let destination = arrival.destination.to_ip();
        let (id, found) = self.listeners.find(req.service_id, destination).ok_or(nobody)?;
        if found.listen.serves != Serves::Datagrams {
            return Err(nobody);
        }
        Ok((id, addresses, user))
    }

    pub(super) fn on_sidr_rep(&mut self, arrival: &Arrival, modifier: u32, rep: &SidrRep) {
        let id = rep.request_id;
        let Some(s) = self.sidrs.by_id.get_mut(&id) else { return self.drop(DropReason::Unknown) };
        if s.to.peer() != Peer::of(arrival) || s.request_id != id {
            return self.drop(DropReason::Foreign);
        }
        if s.state != State::Sent {
            return self.outbox.counters.rx_duplicates.add(Attribute::SidrRep);
        }
        let info = usize::from(rep.info_len).min(SidrRep::INFO);
        let response = SidrResponse {
            status: rep.status,
            qpn: rep.qpn,
            qkey: rep.qkey,
            ece: rep.ece(modifier),
            info: rep.info[..info].into(),
            private_data: rep.private_data.0.into(),
        };
        self.close_sidr(id);
        self.raise(CmEvent::SidrResponse { id, response: Box::new(response) });
    }

    /// A request leaves.
    pub(super) fn sidr_leaves(&mut self, now: Time, id: CommId) {
        if let Some(s) = self.sidrs.by_id.get_mut(&id).filter(|s| s.state == State::Sent)
            && let Some(next) = s.attempt.leave(now)
        {
            self.timers.set(id, &mut s.deadline, Some(next));
        }
    }

    pub(super) fn sidr_timer(&mut self, now: Time, id: CommId) {
        let s = self.sidrs.by_id.get_mut(&id).expect("what has a timer is in a table");
        if let (State::Sent, Some(sent)) = (s.state, &s.message)
            && (s.attempt.is_queued() || s.attempt.repeat(s.timeout))
        {
            if !s.attempt.is_queued() {
                self.outbox.retry(s.to, sent);
                s.attempt.queue(self.outbox.took_last());
            }
            let next = s.attempt.deadline(now);
            return self.timers.set(id, &mut s.deadline, Some(next));
        }
        match (s.state, &s.message) {
            (State::Sent, Some(sent)) if s.retries < s.max_retries => {
                s.retries += 1;
                self.outbox.retry(s.to, sent);
                s.attempt.retry(s.timeout);
                s.attempt.queue(self.outbox.took_last());
                self.timers.set(id, &mut s.deadline, Some(now + s.timeout));
            }
            (State::Sent | State::Rcvd, _) => {
                self.close_sidr(id);
                self.raise(CmEvent::Unreachable { id });
            }
            (State::Answered | State::Closed, _) => self.close_sidr(id),
        }
    }

    pub(super) fn destroy_sidr(&mut self, now: Time, id: CommId) {
        let no = SidrAnswer {
            status: SidrStatus::Rejected,
            qpn: Qpn::default(),
            qkey: QKey::default(),
            ece: Ece::default(),
            private_data: &[],
        };
        // An error: there is nothing to answer any more.
        let _ = self.sidr_reply(now, id, &no);
        let Some(s) = self.sidrs.live(id) else { return };
        s.orphan = true;
        let keep = s.state == State::Answered;
        let waiting = s.waiting.take();
        self.orphans += 1;
        self.release_backlog(waiting);
        if !keep || self.orphans > self.config.max_orphans {
            self.close_sidr(id);
        }
    }

    /// The request is over; it goes if the program does not hold it.
    fn close_sidr(&mut self, id: CommId) {
        self.sidrs.leave(id);
        let Some(s) = self.sidrs.by_id.get_mut(&id) else { return };
        s.state = State::Closed;
        s.message = None;
        self.timers.set(id, &mut s.deadline, None);
        if s.orphan {
            self.sidrs.by_id.remove(&id);
            self.orphans -= 1;
        }
    }
}
