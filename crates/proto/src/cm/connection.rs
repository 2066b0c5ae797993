//! One connection.

use std::collections::BTreeMap;
use std::time::Duration;

use super::id::CommId;
use super::listener::ListenerId;
use super::mad::Mad;
use super::message::Attribute;
use super::outbox::{Destination, Peer};
use super::params::Transport;
use super::qp_attr::{QpParams, Side};
use super::repeats::Attempt;
use crate::qp::Arrival;
use crate::time::Time;
use crate::types::Qpn;

/// State of a connection (IBA 12.9.5 to 12.9.7).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum ConnectionState {
    /// Active: waits for the answer to a REQ.
    ReqSent,
    /// Active: the answer takes longer.
    MraReqRcvd,
    /// Passive: the program shall accept or reject.
    ReqRcvd,
    /// Passive: the same, and the peer knows that it takes longer.
    MraReqSent,
    /// Active: the program shall get ready.
    RepRcvd,
    /// Active: the same, and the peer knows that it takes longer.
    MraRepSent,
    /// Passive: waits for the answer to a REP.
    RepSent,
    /// Passive: the answer takes longer.
    MraRepRcvd,
    /// Connected.
    Established,
    /// Waits for the answer to a DREQ.
    DreqSent,
    /// The program shall disconnect too.
    DreqRcvd,
    /// Packets may still be about.
    Timewait,
    /// Over: rejected, unreachable, or out of timewait.
    Closed,
}

/// A connection that the peer may have forgotten.
#[derive(Clone, Copy, Debug)]
pub(super) struct Doubt {
    /// Transaction ID of the question.
    pub(super) transaction_id: u64,
    /// Transaction ID of the last message that raised the doubt.
    pub(super) raised_by: u64,
    /// How many times that message came.
    pub(super) times: u8,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) state: ConnectionState,
    /// The program destroyed it: no more events, and it goes when it can.
    pub(super) orphan: bool,
    /// The program was told that the connection is over, even if messages with the peer go on.
    pub(super) quiet: bool,
    /// The listener whose backlog counts it.
    pub(super) waiting: Option<ListenerId>,
    pub(super) local_id: CommId,
    pub(super) remote_id: Option<CommId>,
    /// Transaction ID of the REQ. All answers repeat it.
    pub(super) transaction_id: u64,
    pub(super) to: Destination,
    pub(super) qp: QpParams,
    /// Time to wait for an answer.
    pub(super) timeout: Duration,
    pub(super) max_retries: u8,
    pub(super) retries: u8,
    pub(super) attempt: Attempt,
    /// When the message that waits for an answer was sent, or repeated because no answer came.
    pub(super) asked: Time,
    pub(super) deadline: Option<Time>,
    /// Waits for an answer, and is repeated on the timer.
    pub(super) sent: Option<Box<Mad>>,
    /// Our answer to the last message. It is repeated for duplicates.
    pub(super) answer: Option<Box<Mad>>,
    /// Active: of the path, to know the ACK timeout once the peer said its delay.
    pub(super) packet_life_time: u8,
    /// Transaction ID of the last DREQ that came.
    pub(super) dreq_transaction: u64,
    /// The longest time for which the peer keeps asking.
    pub(super) peer_asks_for: Duration,
    /// It is found by the peer's ID.
    pub(super) named_id: bool,
    /// It is found by the peer's queue pair.
    pub(super) named_qpn: bool,
    /// Other processes know it: see [`super::record`].
    pub(super) is_recorded: bool,
    /// The peer may have forgotten it: see [`super::challenge`].
    pub(super) doubt: Option<Doubt>,
    /// Passive, until a message comes that names our ID: how many datagrams may still be sent to the address of the REQ,
    /// which may be forged.
    pub(super) unproven: Option<u8>,
}

/// Most datagrams that one REQ brings an address that has not answered.
pub(super) const MOST_UNPROVEN: u8 = 3;

impl Connection {
    /// Whether messages of this peer's connection `remote` belong here.
    pub(super) fn is_with(&self, arrival: &Arrival, remote: CommId) -> bool {
        self.is_between(arrival) && self.remote_id.is_none_or(|id| id == remote)
    }

    /// Whether a message went between the addresses of this connection.
    pub(super) fn is_between(&self, arrival: &Arrival) -> bool {
        self.to.is_of(arrival)
    }

    pub(super) fn is_xrc_target(&self) -> bool {
        self.qp.transport == Transport::Xrc && !self.is_active()
    }

    pub(super) fn is_xrc_initiator(&self) -> bool {
        self.qp.transport == Transport::Xrc && self.is_active()
    }

    /// Tells whether a datagram may be sent that the peer did not just ask for, and counts it.
    pub(super) fn may_send(&mut self) -> bool {
        match &mut self.unproven {
            Some(0) => false,
            Some(left) => {
                *left -= 1;
                true
            }
            None => true,
        }
    }

    pub(super) fn is_active(&self) -> bool {
        self.qp.side == Side::Active
    }

    /// Whether the answer that is repeated for duplicates is this message.
    pub(super) fn answered_with(&self, attribute: Attribute) -> bool {
        self.answer.as_deref().is_some_and(|mad| mad.message.attribute() == attribute)
    }

    /// The remote ID as messages carry it.
    pub(super) fn remote(&self) -> CommId {
        self.remote_id.unwrap_or(CommId::NONE)
    }
}

/// Connections by the names that peers give them.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// Passive sides, by the peer's ID: to know duplicates.
    by_remote_id: BTreeMap<(Peer, CommId), CommId>,
    /// By the peer's queue pair: to know stale connections (IBA 12.9.8.3).
    by_remote_qpn: BTreeMap<(Peer, u32), CommId>,
}

impl Names {
    /// Enters a connection. No other connection may have its names.
    pub(super) fn enter(&mut self, connection: &mut Connection) {
        let (peer, id) = (connection.to.peer(), connection.local_id);
        if let (false, Some(remote)) = (connection.is_active(), connection.remote_id) {
            self.by_remote_id.insert((peer, remote), id);
            connection.named_id = true;
        }
        if let Some(qpn) = connection.qp.dest_qpn {
            self.by_remote_qpn.insert((peer, qpn.get()), id);
            connection.named_qpn = true;
        }
    }

    /// The peer's queue pair may be in another connection.
    pub(super) fn leave_qpn(&mut self, connection: &mut Connection) {
        if let (true, Some(qpn)) = (connection.named_qpn, connection.qp.dest_qpn) {
            self.by_remote_qpn.remove(&(connection.to.peer(), qpn.get()));
            connection.named_qpn = false;
        }
    }

    /// The connection is no more.
    pub(super) fn leave(&mut self, connection: &mut Connection) {
        self.leave_qpn(connection);
        if let (true, Some(remote)) = (connection.named_id, connection.remote_id) {
            self.by_remote_id.remove(&(connection.to.peer(), remote));
            connection.named_id = false;
        }
    }

    pub(super) fn of_remote_id(&self, peer: Peer, remote: CommId) -> Option<CommId> {
        self.by_remote_id.get(&(peer, remote)).copied()
    }

    pub(super) fn of_remote_qpn(&self, peer: Peer, qpn: Qpn) -> Option<CommId> {
        self.by_remote_qpn.get(&(peer, qpn.get())).copied()
    }

    pub(super) fn len(&self) -> usize {
        self.by_remote_id.len() + self.by_remote_qpn.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection may cost 24 KiB. The CM takes no more than one of them, with the two messages that it keeps.
    #[test]
    fn a_connection_is_small() {
        assert!(size_of::<Connection>() + 2 * size_of::<Mad>() <= 1024);
    }
}
