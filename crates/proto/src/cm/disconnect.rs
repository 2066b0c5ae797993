//! DREQ and DREP: how a connection ends, and how the program lets go of it.

use super::connection::{Connection, ConnectionState as S};
use super::counters::DropReason;
use super::error::{CmError, private_data};
use super::event::{CmEvent, Disconnected, Rejection};
use super::id::CommId;
use super::machine::Cm;
use super::message::Attribute;
use super::message::code::{About, ApStatus, RejReason};
use super::message::disconnect::{Drep, Dreq};
use super::message::lap::{Apr, Lap};
use super::message::private_data::PrivateData;
use super::outbox::Destination;
use super::timeout;
use crate::qp::Arrival;
use crate::time::{LAST_ANSWER, Time};
use crate::types::Qpn;

impl Cm {
    /// Disconnects (`rdma_disconnect(3)`), or agrees to the peer's wish. Private data: 220 bytes, in an answer 224.
    ///
    /// # Errors
    /// [`CmError::State`] where there is no connection, [`CmError::PrivateDataTooLong`].
    pub fn disconnect(&mut self, now: Time, id: CommId, private: &[u8]) -> Result<(), CmError> {
        match Self::live_mut(&mut self.connections, id)?.state {
            S::Established => self.send_dreq(now, id, private_data(private)?),
            S::DreqRcvd => self.send_drep(now, id, private_data(private)?),
            _ => return Err(CmError::State),
        }
        Ok(())
    }

    /// Drops a connection or SIDR request, whatever its state, and tells the peer as far as it has to know. It raises
    /// no further event.
    ///
    /// # Errors
    /// [`CmError::UnknownId`].
    pub fn destroy(&mut self, now: Time, id: CommId) -> Result<(), CmError> {
        if self.sidrs.is_live(id) {
            self.destroy_sidr(now, id);
            return Ok(());
        }
        let c = Self::live_mut(&mut self.connections, id)?;
        match c.state {
            // The connection goes on: an XRC target outlives its id, as on Linux. Its peer's DREQ will be answered.
            S::Established if c.is_xrc_target() => {}
            S::ReqSent | S::MraReqRcvd => {
                self.give_up(id, About::No);
                self.close(now, id);
            }
            S::ReqRcvd
            | S::MraReqSent
            | S::RepRcvd
            | S::MraRepSent
            | S::RepSent
            | S::MraRepRcvd => {
                self.reject(now, id, RejReason::Consumer, &[], &[])?;
            }
            S::Established => self.send_dreq(now, id, PrivateData::EMPTY),
            S::DreqRcvd => self.send_drep(now, id, PrivateData::EMPTY),
            S::DreqSent | S::Timewait | S::Closed => {}
        }
        self.abandon(id);
        Ok(())
    }

    /// Starts to disconnect an established connection.
    pub(super) fn send_dreq(
        &mut self,
        now: Time,
        id: CommId,
        private_data: PrivateData<{ Dreq::PRIVATE_DATA }>,
    ) {
        let transaction_id = self.new_transaction(id);
        let Some(c) = self.connections.get_mut(&id) else { return };
        let dreq = Dreq {
            local_comm_id: id,
            remote_comm_id: c.remote(),
            remote_qpn: c.qp.dest_qpn.unwrap_or_default(),
            private_data,
        };
        c.sent = Some(self.outbox.send_if(c.may_send(), c.to, transaction_id, dreq));
        // A rejection that the peer may have missed is still the answer to its request.
        c.answer = c.answer.take_if(|_| c.quiet);
        c.retries = 0;
        c.state = S::DreqSent;
        c.attempt = self.repeats.begin(c.timeout, self.outbox.took_last());
        let next = c.attempt.deadline(now);
        self.timers.set(id, &mut c.deadline, Some(next));
    }

    fn send_drep(
        &mut self,
        now: Time,
        id: CommId,
        private_data: PrivateData<{ Drep::PRIVATE_DATA }>,
    ) {
        let Some(c) = self.connections.get_mut(&id) else { return };
        let drep = Drep { local_comm_id: id, remote_comm_id: c.remote(), private_data };
        c.answer = Some(self.outbox.send(c.to, c.dreq_transaction, drep));
        self.enter_timewait(now, id);
    }

    pub(super) fn disconnected_by_timeout(&mut self, now: Time, id: CommId) {
        self.enter_timewait(now, id);
        self.raise(CmEvent::Disconnected { id, how: Disconnected::TimedOut });
    }

    pub(super) fn on_dreq(&mut self, now: Time, arrival: &Arrival, tid: u64, dreq: &Dreq) {
        let id = dreq.remote_comm_id;
        let found = self.connections.get_mut(&id);
        // Before the answer to our REQ, the queue pair tells whether we are meant, or one that had our ID before.
        let is_it = |c: &Connection| {
            c.is_with(arrival, dreq.local_comm_id)
                && (c.remote_id.is_some() || c.qp.qpn == Some(dreq.remote_qpn))
        };
        let Some(c) = found.filter(|c| is_it(c)) else {
            // A connection that does not exist counts as disconnected: the peer may stop asking (IBA 12.9.8.1).
            let drep = Drep {
                local_comm_id: dreq.remote_comm_id,
                remote_comm_id: dreq.local_comm_id,
                ..Drep::default()
            };
            self.outbox.send(Destination::answering(arrival), tid, drep);
            return;
        };
        if c.qp.qpn != Some(dreq.remote_qpn) && dreq.remote_qpn != Qpn::default() {
            return self.drop(DropReason::Foreign);
        }
        c.dreq_transaction = tid;
        c.unproven = None;
        let private_data: Box<[u8]> = dreq.private_data.0.into();
        match c.state {
            S::Established | S::RepSent | S::MraRepRcvd | S::RepRcvd | S::MraRepSent => {
                c.state = S::DreqRcvd;
                (c.sent, c.answer) = (None, None);
                self.timers.set(id, &mut c.deadline, None);
                if c.orphan {
                    return self.send_drep(now, id, PrivateData::EMPTY);
                }
                let how = Disconnected::Requested(private_data);
                self.raise(CmEvent::Disconnected { id, how });
            }
            // The peer accepted and changed its mind, and neither its REP nor its REJ has come.
            S::ReqSent | S::MraReqRcvd => {
                let drep = Drep {
                    local_comm_id: id,
                    remote_comm_id: dreq.local_comm_id,
                    ..Drep::default()
                };
                self.outbox.send(c.to, tid, drep);
                self.close(now, id);
                let rejection = Rejection {
                    reason: RejReason::Consumer,
                    about: About::No,
                    info: Box::default(),
                    private_data: Box::default(),
                };
                self.raise(CmEvent::Rejected { id, rejection: Box::new(rejection) });
            }
            // Both sides disconnect at once: each agrees to the other's message.
            S::DreqSent => {
                self.send_drep(now, id, PrivateData::EMPTY);
                let how = Disconnected::Acknowledged(private_data);
                self.raise(CmEvent::Disconnected { id, how });
            }
            S::DreqRcvd => self.outbox.counters.rx_duplicates.add(Attribute::Dreq),
            _ => {
                self.outbox.counters.rx_duplicates.add(Attribute::Dreq);
                let drep = Drep {
                    local_comm_id: id,
                    remote_comm_id: dreq.local_comm_id,
                    ..Drep::default()
                };
                match c.answer.as_deref().filter(|_| c.answered_with(Attribute::Drep)) {
                    Some(answer) => self.outbox.replay(c.to, answer),
                    None => drop(self.outbox.send(c.to, tid, drep)),
                }
            }
        }
    }

    /// Sends each DREQ that waits for its answer once more, and each DREP that is no older than [`LAST_ANSWER`]. The first
    /// may get lost after this process has ended. A peer that misses the DREQ never hears of the end. A peer that
    /// misses the DREP repeats its DREQ for a minute. A peer that got the first counts a duplicate.
    pub(super) fn repeat_last_disconnects(&mut self, now: Time) {
        for c in self.connections.values_mut() {
            let last = match c.state {
                S::DreqSent => c.sent.as_deref(),
                S::Timewait => {
                    let since = c.deadline.map(|end| end - timeout::timewait(c.qp.ack_timeout));
                    let is_recent = since.is_some_and(|since| now.since(since) <= LAST_ANSWER);
                    let is_drep = is_recent && c.answered_with(Attribute::Drep);
                    c.answer.as_deref().filter(|_| is_drep)
                }
                _ => None,
            };
            if let Some(last) = last.cloned()
                && c.may_send()
            {
                self.outbox.replay(c.to, &last);
            }
        }
    }

    pub(super) fn on_drep(&mut self, now: Time, arrival: &Arrival, tid: u64, drep: &Drep) {
        let id = drep.remote_comm_id;
        let Some(c) = self.connections.get_mut(&id) else { return self.drop(DropReason::Unknown) };
        if !c.is_with(arrival, drep.local_comm_id) {
            return self.drop(DropReason::Foreign);
        }
        match c.state {
            S::DreqSent => {
                self.repeats.answered(&mut c.attempt, now);
                self.enter_timewait(now, id);
                let how = Disconnected::Acknowledged(drep.private_data.0.into());
                self.raise(CmEvent::Disconnected { id, how });
            }
            _ => {
                if !self.is_forgotten(now, id, tid) {
                    self.drop(DropReason::State);
                }
            }
        }
    }

    /// Alternate paths are for links that this device does not have; the answer says so.
    pub(super) fn on_lap(&mut self, arrival: &Arrival, tid: u64, lap: &Lap) {
        let known = self.connections.get(&lap.remote_comm_id);
        let known = known.filter(|c| c.is_with(arrival, lap.local_comm_id));
        let status = match known {
            Some(c) if c.qp.qpn == Some(lap.remote_qpn) => ApStatus::Unsupported,
            Some(_) => ApStatus::InvalidQpn,
            None => ApStatus::InvalidCommId,
        };
        let apr = Apr {
            local_comm_id: lap.remote_comm_id,
            remote_comm_id: lap.local_comm_id,
            status,
            ..Apr::default()
        };
        self.outbox.send(Destination::answering(arrival), tid, apr);
    }
}
