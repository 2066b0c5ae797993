//! Challenges: they prove what a REQ or REP cannot, that the peer has forgotten a connection.
//!
//! A message that gives the queue pair or the ID of a connection to another one says so (IBA 12.9.8.3.1). But any host
//! can send it from the peer's address, so the CM asks the peer itself. The question is a DREQ for a queue pair that
//! the peer cannot have. A peer that has the connection drops such a DREQ. A peer that does not have it answers with a
//! DREP (IBA 12.9.8.1). That DREP names both IDs and the transaction, which no other host knows.
//!
//! The message in doubt is dropped. Its sender repeats it, and finds the connection gone by then.

use super::connection::{ConnectionState as S, Doubt};
use super::event::{CmEvent, Disconnected, Rejection};
use super::id::CommId;
use super::machine::Cm;
use super::message::code::{About, RejReason};
use super::message::disconnect::Dreq;
use crate::time::Time;
use crate::types::Qpn;

/// Questions that the peer is asked for one message. Then the message is refused: the peer still has the connection.
const QUESTIONS: u8 = 3;

impl Cm {
    /// A message of this transaction gives a name of the connection to another one. Asks the peer whether it still has the
    /// connection. Returns whether the message is to be refused.
    pub(super) fn challenge(&mut self, id: CommId, raised_by: u64) -> bool {
        let transaction_id = self.new_transaction(id);
        let Some(c) = self.connections.get_mut(&id) else { return false };
        let first = Doubt { transaction_id, raised_by, times: 0 };
        let doubt = c.doubt.get_or_insert(first);
        if doubt.raised_by != raised_by {
            (doubt.raised_by, doubt.times) = (raised_by, 0);
        }
        doubt.times = doubt.times.saturating_add(1);
        let (transaction_id, times) = (doubt.transaction_id, doubt.times);
        match c.state {
            // The target outlives its ID, so a DREP would not prove anything.
            S::Established if c.is_xrc_initiator() => return true,
            S::Established | S::RepRcvd | S::MraRepSent => {
                let dreq = Dreq {
                    local_comm_id: id,
                    remote_comm_id: c.remote(),
                    remote_qpn: Qpn::GSI,
                    ..Dreq::default()
                };
                self.outbox.send(c.to, transaction_id, dreq);
            }
            // The REP asks the same: a peer that did not send the REQ rejects it.
            S::RepSent => {
                let rep = c.sent.as_deref().expect("the REP waits for its answer");
                self.outbox.replay(c.to, rep);
            }
            // The program's answer will ask, or the end is near anyhow.
            _ => {}
        }
        times > QUESTIONS
    }

    /// Tells whether a DREP with this transaction ID answers a challenge. If it does, the connection ends.
    pub(super) fn is_forgotten(&mut self, now: Time, id: CommId, transaction_id: u64) -> bool {
        let Some(c) = self.connections.get_mut(&id) else { return false };
        let is_asked = c.doubt.is_some_and(|doubt| doubt.transaction_id == transaction_id);
        let event = match c.state {
            S::Established => {
                CmEvent::Disconnected { id, how: Disconnected::Acknowledged(Box::default()) }
            }
            S::RepRcvd | S::MraRepSent => CmEvent::Rejected {
                id,
                rejection: Box::new(Rejection {
                    reason: RejReason::StaleConn,
                    about: About::Rep,
                    info: Box::default(),
                    private_data: Box::default(),
                }),
            },
            _ => return false,
        };
        if is_asked {
            c.answer = None;
            self.enter_timewait(now, id);
            self.raise(event);
        }
        is_asked
    }
}
