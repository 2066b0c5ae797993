//! Finds the process of a host that a MAD is for.

use super::connection::ConnectionState as S;
use super::id::{CommId, ServiceId};
use super::machine::Cm;
use super::mad::Mad;
use super::message::Message;
use super::outbox::Peer;
use crate::qp::Arrival;

/// The process that a MAD is for, among those that share a host's QP1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recipient {
    /// To the process of this slot. If there is none, any process gives the right answer.
    Slot(u8),
    /// To the process that listens at the address that it came to: its IP CM header, if any, names the same. If there is none, any process gives the right answer.
    Service(ServiceId),
    /// To all processes: its sender never learned our ID, and one of us knows its.
    Everyone,
}

/// Finds the process that a MAD is for.
#[must_use]
pub fn recipient(mad: &Mad) -> Recipient {
    let ours = match &mad.message {
        Message::Req(req) => return Recipient::Service(req.service_id),
        Message::SidrReq(req) => return Recipient::Service(req.service_id),
        Message::Rej(rej) if rej.remote_comm_id == CommId::NONE => return Recipient::Everyone,
        Message::Mra(mra) => mra.remote_comm_id,
        Message::Rej(rej) => rej.remote_comm_id,
        Message::Rep(rep) => rep.remote_comm_id,
        Message::Rtu(rtu) => rtu.remote_comm_id,
        Message::Dreq(dreq) => dreq.remote_comm_id,
        Message::Drep(drep) => drep.remote_comm_id,
        Message::SidrRep(rep) => rep.request_id,
        Message::Lap(lap) => lap.remote_comm_id,
        Message::Apr(apr) => apr.remote_comm_id,
    };
    Recipient::Slot(ours.slot())
}

impl Cm {
    /// Tells whether this process was asked this request before. If so it belongs here, even if the listener is gone.
    #[must_use]
    pub fn knows_request(&self, arrival: &Arrival, mad: &Mad) -> bool {
        let peer = Peer::of(arrival);
        match &mad.message {
            Message::Req(req) => self.names.of_remote_id(peer, req.local_comm_id).is_some(),
            Message::SidrReq(req) => self.sidrs.of_request(peer, req.request_id).is_some(),
            _ => false,
        }
    }

    /// Tells whether a request gets another answer here than that there is no listener.
    #[must_use]
    pub fn awaits_request(&self, arrival: &Arrival, mad: &Mad) -> bool {
        let service_id = match &mad.message {
            Message::Req(req) => req.service_id,
            Message::SidrReq(req) => req.service_id,
            _ => return true,
        };
        self.listeners.any_of(service_id).is_some() || self.knows_request(arrival, mad)
    }

    /// Tells whether peers may repeat requests to this process because they have no answer yet.
    #[must_use]
    pub fn may_be_asked_again(&self) -> bool {
        let is_open =
            |state| matches!(state, S::ReqRcvd | S::MraReqSent | S::RepSent | S::MraRepRcvd);
        self.sidrs.names() > 0 || self.connections.values().any(|c| is_open(c.state))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cm::id::PortSpace;
    use crate::cm::message::rej::Rej;
    use crate::cm::message::rep::Rep;
    use crate::cm::message::req::Req;

    fn of(message: impl Into<Message>) -> Recipient {
        recipient(&Mad { transaction_id: 1, modifier: 0, message: message.into() })
    }

    #[test]
    fn messages_find_their_process() {
        let service_id = ServiceId::of_port(PortSpace::Tcp, 7);
        let req = Req { service_id, ..Req::default() };
        assert_eq!(of(req), Recipient::Service(service_id));
        let rep = Rep { remote_comm_id: CommId(0x0501_0203), ..Rep::default() };
        assert_eq!(of(rep), Recipient::Slot(5));
        assert_eq!(of(Rej::default()), Recipient::Everyone);
        let rej = Rej { remote_comm_id: CommId(0x0601_0203), ..Rej::default() };
        assert_eq!(of(rej), Recipient::Slot(6));
    }
}
