//! REJ: rejecting, being rejected, and the end of a connection that the peer has forgotten.

use super::connection::ConnectionState as S;
use super::counters::DropReason;
use super::error::{CmError, private_data};
use super::event::{CmEvent, Disconnected, Rejection};
use super::id::CommId;
use super::machine::Cm;
use super::mad::{CLASS_VERSION, Mad};
use super::message::Message;
use super::message::code::{About, RejReason};
use super::message::private_data::PrivateData;
use super::message::rej::Rej;
use super::message::req::Req;
use super::outbox::{Destination, Peer};
use crate::qp::Arrival;
use crate::time::Time;
use crate::types::Mtu;

impl Cm {
    /// Rejects a peer that asks or has accepted (`rdma_reject(3)`). `info` gives a value that would be accepted, in up
    /// to 72 bytes. The peer's program gets up to 148 bytes of private data.
    ///
    /// # Errors
    /// [`CmError::State`] where there is nothing to reject, [`CmError::PrivateDataTooLong`], [`CmError::Value`].
    pub fn reject(
        &mut self,
        now: Time,
        id: CommId,
        reason: RejReason,
        info: &[u8],
        private: &[u8],
    ) -> Result<(), CmError> {
        let c = Self::live_mut(&mut self.connections, id)?;
        let about = match c.state {
            S::ReqRcvd | S::MraReqSent => About::Req,
            S::RepRcvd | S::MraRepSent => About::Rep,
            S::RepSent | S::MraRepRcvd => About::No,
            _ => return Err(CmError::State),
        };
        if info.len() > Rej::INFO {
            return Err(CmError::Value);
        }
        let rej = Rej {
            local_comm_id: id,
            remote_comm_id: c.remote(),
            about,
            reason,
            private_data: private_data(private)?,
            ..Rej::default()
        };
        c.answer =
            Some(self.outbox.send_if(c.may_send(), c.to, c.transaction_id, rej.with_info(info)));
        match about {
            About::Req => self.close(now, id),
            // Our queue pair may be ready to receive. The REJ is said again if the peer repeats its REP.
            About::Rep => self.enter_timewait(now, id),
            // The peer may be ready already, and repeats nothing: a DREQ will be answered.
            _ => {
                c.quiet = true;
                self.send_dreq(now, id, PrivateData::EMPTY);
            }
        }
        self.take_request(id)
    }

    /// Tells the peer that we no longer wait for it. It may not know our ID yet, so the message carries it (IBA
    /// 12.6.7.2).
    pub(super) fn give_up(&mut self, id: CommId, about: About) {
        let Some(c) = self.connections.get_mut(&id) else { return };
        let rej = Rej {
            local_comm_id: id,
            remote_comm_id: c.remote(),
            about,
            reason: RejReason::Timeout,
            ..Rej::default()
        };
        let rej = rej.with_info(&self.config.ca_guid.to_be_bytes());
        c.answer = Some(self.outbox.send_if(c.may_send(), c.to, c.transaction_id, rej));
    }

    /// Says no to a REQ for which there is no connection.
    pub(super) fn refuse(
        &mut self,
        arrival: &Arrival,
        tid: u64,
        remote: CommId,
        reason: RejReason,
        info: &[u8],
    ) {
        let rej = Rej { remote_comm_id: remote, about: About::Req, reason, ..Rej::default() };
        self.outbox.send(Destination::answering(arrival), tid, rej.with_info(info));
    }

    /// Answers a REQ of another class version with the version that we speak, and drops any other message.
    pub(super) fn refuse_class_version(&mut self, arrival: &Arrival, mad: &[u8]) {
        let Some((tid, remote)) = Mad::foreign_req(mad) else {
            return self.drop(DropReason::Malformed);
        };
        let reason = RejReason::InvalidClassVersion;
        self.refuse(arrival, tid, CommId(remote), reason, &[CLASS_VERSION]);
    }

    pub(super) fn on_rej(&mut self, now: Time, arrival: &Arrival, rej: &Rej) {
        let remote = rej.local_comm_id;
        // A peer that never learned our ID is found by its own ID.
        let id = if rej.remote_comm_id.is_none() {
            self.names.of_remote_id(Peer::of(arrival), remote)
        } else {
            Some(rej.remote_comm_id)
        };
        let Some((id, c)) = id.and_then(|id| Some((id, self.connections.get_mut(&id)?))) else {
            return self.drop(DropReason::Unknown);
        };
        // Only a peer that never had a connection gives no ID. Afterwards our own ID alone ends nothing, since it can
        // be guessed.
        let is_unnamed = remote.is_none() && matches!(c.state, S::ReqSent | S::MraReqRcvd);
        // Only a peer that never learned our ID leaves it out: an established connection ends by both IDs.
        let may_not_know_us =
            matches!(c.state, S::ReqRcvd | S::MraReqSent | S::RepSent | S::MraRepRcvd);
        let is_named = !rej.remote_comm_id.is_none() || may_not_know_us;
        if !c.is_between(arrival) || !is_named || !(is_unnamed || c.is_with(arrival, remote)) {
            return self.drop(DropReason::Foreign);
        }
        if let (S::ReqSent | S::MraReqRcvd, RejReason::InvalidMtu) = (c.state, rej.reason)
            && let Some(mtu) = rej.info().first().and_then(|code| Mtu::from_code((*code).into()))
            && mtu < c.qp.path_mtu
        {
            return self.ask_with_mtu(now, id, mtu);
        }
        enum End {
            Rejected,
            RejectedLate,
            Disconnected,
        }
        // A REJ names the message that it rejects, so that a late one does not hit a later message.
        let end = match (c.state, rej.about) {
            (S::ReqSent | S::MraReqRcvd, About::Req | About::No) => End::Rejected,
            (S::ReqRcvd | S::MraReqSent, About::No) => End::Rejected,
            (S::RepSent | S::MraRepRcvd, About::Rep | About::No) => End::RejectedLate,
            (S::RepRcvd | S::MraRepSent, About::No) => End::RejectedLate,
            (S::Established, About::No) => End::Disconnected,
            (S::Established, About::Rep) if !c.is_active() => End::Disconnected,
            (S::DreqSent, About::No) => End::Disconnected,
            _ => return self.drop(DropReason::State),
        };
        c.answer = None;
        match end {
            End::Rejected => self.close(now, id),
            End::RejectedLate | End::Disconnected => self.enter_timewait(now, id),
        }
        self.raise(match end {
            End::Rejected | End::RejectedLate => CmEvent::Rejected {
                id,
                rejection: Box::new(Rejection {
                    reason: rej.reason,
                    about: rej.about,
                    info: rej.info().into(),
                    private_data: rej.private_data.0.into(),
                }),
            },
            End::Disconnected => {
                CmEvent::Disconnected { id, how: Disconnected::Rejected(rej.reason) }
            }
        });
    }

    /// The peer says that a smaller MTU would do: asks for that, under another transaction, since the first is over. As it
    /// gets smaller each time there is an end to it.
    fn ask_with_mtu(&mut self, now: Time, id: CommId, mtu: Mtu) {
        let transaction_id = self.new_transaction(id);
        let Some(c) = self.connections.get_mut(&id) else { return };
        let asked = c.sent.as_deref();
        let Some(&Mad { modifier, message: Message::Req(ref req), .. }) = asked else { return };
        let req = Req { path_mtu: Some(mtu), ..req.clone() };
        c.state = S::ReqSent;
        c.remote_id = None;
        c.transaction_id = transaction_id;
        c.qp.path_mtu = mtu;
        c.asked = now;
        c.sent = Some(self.outbox.send_with(c.to, transaction_id, modifier, req));
        c.attempt = self.repeats.begin(c.timeout, self.outbox.took_last());
        let next = c.attempt.deadline(now);
        self.timers.set(id, &mut c.deadline, Some(next));
    }
}
