//! REP, RTU and MRA: how the peer's yes comes in and is confirmed.

use super::connection::ConnectionState as S;
use super::counters::DropReason;
use super::error::{CmError, private_data};
use super::event::{CmEvent, ConnectResponse, Rejection};
use super::id::CommId;
use super::machine::Cm;
use super::message::Attribute;
use super::message::code::{About, RejReason};
use super::message::mra::Mra;
use super::message::private_data::PrivateData;
use super::message::rej::Rej;
use super::message::rep::Rep;
use super::message::rtu::Rtu;
use super::outbox::{Destination, Peer};
use super::request::rep_qpn;
use super::timeout;
use crate::qp::Arrival;
use crate::time::Time;

/// The first repetition of an RTU comes after this fraction of a wait. Each further one takes twice as long as the
/// last.
const FIRST_RTU_AGAIN: u32 = 64;
/// Times that an RTU is repeated: as many as fit into the wait.
const RTUS_AGAIN: u8 = 6;

impl Cm {
    /// Confirms a connection that the peer has accepted (`rdma_establish(3)`, active side): the queue pair is in RTS by now.
    ///
    /// # Errors
    /// [`CmError::State`] where the peer has given up, [`CmError::PrivateDataTooLong`].
    pub fn ready(&mut self, now: Time, id: CommId, private: &[u8]) -> Result<(), CmError> {
        let c = Self::live_mut(&mut self.connections, id)?;
        if !matches!(c.state, S::RepRcvd | S::MraRepSent) {
            return Err(CmError::State);
        }
        let rtu = Rtu {
            local_comm_id: id,
            remote_comm_id: c.remote(),
            private_data: private_data(private)?,
        };
        c.answer = Some(self.outbox.send(c.to, c.transaction_id, rtu));
        c.state = S::Established;
        c.retries = 0;
        // The target of an XRC connection may drop its ID, and then it rejects an RTU.
        let again = (!c.is_xrc_initiator()).then(|| now + c.timeout / FIRST_RTU_AGAIN);
        self.timers.set(id, &mut c.deadline, again);
        Ok(())
    }

    /// Sends an RTU again that may be lost. No message answers an RTU. The peer asks for it only a few times before it
    /// has heard of us, or not at all for as long as our MRA said.
    pub(super) fn repeat_rtu(&mut self, now: Time, id: CommId) {
        let Some(c) = self.connections.get_mut(&id) else { return };
        if let Some(rtu) = c.answer.as_deref() {
            self.outbox.replay(c.to, rtu);
        }
        c.retries += 1;
        let is_last = c.answer.is_none() || c.retries >= RTUS_AGAIN;
        let next = now + c.timeout * (1 << c.retries) / FIRST_RTU_AGAIN;
        self.timers.set(id, &mut c.deadline, (!is_last).then_some(next));
    }

    /// Data came before the RTU (`IBV_EVENT_COMM_EST`, `rdma_notify(3)`, passive side): the peer must be ready.
    ///
    /// # Errors
    /// [`CmError::State`] where no RTU is expected.
    pub fn establish(&mut self, id: CommId) -> Result<(), CmError> {
        let c = Self::live_mut(&mut self.connections, id)?;
        if !matches!(c.state, S::RepSent | S::MraRepRcvd) {
            return Err(CmError::State);
        }
        self.established(id, Box::default());
        Ok(())
    }

    fn established(&mut self, id: CommId, private_data: Box<[u8]>) {
        let Some(c) = self.connections.get_mut(&id) else { return };
        c.state = S::Established;
        c.unproven = None;
        c.sent = None;
        self.timers.set(id, &mut c.deadline, None);
        self.raise(CmEvent::Established { id, private_data });
    }

    pub(super) fn on_rep(
        &mut self,
        now: Time,
        arrival: &Arrival,
        tid: u64,
        modifier: u32,
        rep: &Rep,
    ) {
        let (id, remote) = (rep.remote_comm_id, rep.local_comm_id);
        let peer = Peer::of(arrival);
        let refuse = |cm: &mut Self, reason| {
            // The refusal carries the ID that the peer knows us by, which it may insist on.
            let (local_comm_id, remote_comm_id) = (id, remote);
            let about = About::Rep;
            let rej = Rej { local_comm_id, remote_comm_id, about, reason, ..Rej::default() };
            cm.outbox.send(Destination::answering(arrival), tid, rej);
        };
        let known =
            self.connections.get_mut(&id).filter(|c| c.is_between(arrival) && c.is_active());
        let Some(c) = known else { return refuse(self, RejReason::InvalidCommId) };
        if !c.is_with(arrival, remote) {
            return refuse(self, RejReason::InvalidCommInstance);
        }
        match c.state {
            S::ReqSent | S::MraReqRcvd => {}
            S::RepRcvd => {
                self.outbox.counters.rx_duplicates.add(Attribute::Rep);
                let mra = Mra {
                    local_comm_id: id,
                    remote_comm_id: remote,
                    about: About::Rep,
                    service_timeout: self.config.service_timeout & 0x1f,
                    ..Mra::default()
                };
                c.answer = Some(self.outbox.send(c.to, c.transaction_id, mra));
                c.state = S::MraRepSent;
                return;
            }
            S::MraRepSent | S::Established => {
                self.outbox.counters.rx_duplicates.add(Attribute::Rep);
                if let Some(answer) = &c.answer {
                    self.outbox.replay(c.to, answer);
                }
                return;
            }
            // We gave up before it came, or said no.
            S::Closed | S::Timewait if c.answered_with(Attribute::Rej) => {
                self.outbox.counters.rx_duplicates.add(Attribute::Rep);
                let answer = c.answer.as_deref().expect("it is a REJ");
                return self.outbox.replay(c.to, answer);
            }
            S::Closed => return refuse(self, RejReason::Timeout),
            _ => {
                self.outbox.counters.rx_duplicates.add(Attribute::Rep);
                return self.drop(DropReason::State);
            }
        }
        let Some(dest_qpn) = rep_qpn(c.qp.transport, rep) else {
            return refuse(self, RejReason::UnsupportedRequest);
        };
        if let Some(old) = self.names.of_remote_qpn(peer, dest_qpn) {
            // IBA 12.9.8.3.1: the peer has forgotten the old connection of this queue pair.
            if !self.challenge(old, tid) {
                return self.drop(DropReason::State);
            }
            refuse(self, RejReason::StaleConn);
            self.close(now, id);
            let rejection = Rejection {
                reason: RejReason::StaleConn,
                about: About::Rep,
                info: Box::default(),
                private_data: Box::default(),
            };
            return self.raise(CmEvent::Rejected { id, rejection: Box::new(rejection) });
        }
        let most = self.config.max_rd_atomic;
        self.repeats.answered(&mut c.attempt, now);
        c.state = S::RepRcvd;
        c.sent = None;
        c.remote_id = Some(remote);
        c.qp.dest_qpn = Some(dest_qpn);
        c.qp.sq_psn = Some(rep.starting_psn);
        c.qp.rnr_retry_count = rep.rnr_retry_count;
        c.qp.initiator_depth = rep.responder_resources.min(most);
        c.qp.responder_resources = rep.initiator_depth.min(most);
        // So far it allowed for our own delay, which the peer's ACK does not have.
        let packet_life_time = c.packet_life_time;
        c.qp.ack_timeout = timeout::ack_code(packet_life_time, rep.target_ack_delay);
        self.names.enter(c);
        self.timers.set(id, &mut c.deadline, None);
        self.record(id);
        let response = ConnectResponse {
            remote_ca_guid: rep.local_ca_guid,
            remote_qpn: dest_qpn,
            sq_psn: rep.starting_psn,
            responder_resources: rep.initiator_depth,
            initiator_depth: rep.responder_resources,
            target_ack_delay: rep.target_ack_delay,
            flow_control: rep.flow_control,
            rnr_retry_count: rep.rnr_retry_count,
            srq: rep.srq,
            ece: rep.ece(modifier),
            private_data: rep.private_data.0.into(),
        };
        self.raise(CmEvent::ConnectResponse { id, response: Box::new(response) });
    }

    /// Tells the peer about a connection that we dropped before it was ready. The peer believes in it, and no other
    /// message would tell it.
    fn unknown_rtu(&mut self, arrival: &Arrival, tid: u64, rtu: &Rtu) {
        let rej = Rej {
            local_comm_id: rtu.remote_comm_id,
            remote_comm_id: rtu.local_comm_id,
            about: About::No,
            reason: RejReason::InvalidCommId,
            ..Rej::default()
        };
        self.outbox.send(Destination::answering(arrival), tid, rej);
    }

    pub(super) fn on_rtu(&mut self, now: Time, arrival: &Arrival, tid: u64, rtu: &Rtu) {
        let id = rtu.remote_comm_id;
        let found = self.connections.get_mut(&id);
        let found = found.filter(|c| c.is_with(arrival, rtu.local_comm_id) && !c.is_active());
        let Some(c) = found else { return self.unknown_rtu(arrival, tid, rtu) };
        c.unproven = None;
        match c.state {
            S::RepSent | S::MraRepRcvd => {
                self.repeats.answered(&mut c.attempt, now);
                self.established(id, rtu.private_data.0.into());
            }
            S::Established => self.outbox.counters.rx_duplicates.add(Attribute::Rtu),
            // The peer believes in a connection that we gave up: our REJ was lost. A DREQ will be answered.
            S::Timewait | S::Closed if c.answered_with(Attribute::Rej) => {
                c.quiet = true;
                self.send_dreq(now, id, PrivateData::EMPTY);
            }
            _ => self.drop(DropReason::State),
        }
    }

    pub(super) fn on_mra(&mut self, now: Time, arrival: &Arrival, mra: &Mra) {
        let id = mra.remote_comm_id;
        let Some(c) = self.connections.get_mut(&id) else { return self.drop(DropReason::Unknown) };
        if !c.is_with(arrival, mra.local_comm_id) || mra.local_comm_id.is_none() {
            return self.drop(DropReason::Foreign);
        }
        c.state = match (mra.about, c.state) {
            (About::Req, S::ReqSent | S::MraReqRcvd) => S::MraReqRcvd,
            (About::Rep, S::RepSent | S::MraRepRcvd) => S::MraRepRcvd,
            _ => return self.drop(DropReason::State),
        };
        c.remote_id = Some(mra.local_comm_id);
        c.unproven = None;
        let service = timeout::decode(mra.service_timeout);
        // The wait until the message is repeated stays bounded, however many MRAs come.
        let served = (now + service).min(c.asked + timeout::LONGEST);
        self.repeats.answered(&mut c.attempt, now);
        self.timers.set(id, &mut c.deadline, Some(served + c.timeout));
    }
}
