//! A peer whose process ended without sending anything, as another process reports.

use super::connection::{Connection, ConnectionState as S};
use super::id::CommId;
use super::machine::Cm;
use super::message::code::{About, RejReason};
use super::message::disconnect::{Drep, Dreq};
use super::message::rej::Rej;
use crate::qp::Arrival;
use crate::time::Time;
use crate::types::Gid;

/// A message that a peer's CM would have sent.
enum Word {
    Rej(About, RejReason),
    Dreq,
    Drep,
}

impl Connection {
    /// The message that a peer sends when it destroys its side of this connection.
    fn last_word(&self) -> Option<Word> {
        match self.state {
            S::ReqRcvd | S::MraReqSent => Some(Word::Rej(About::No, RejReason::Timeout)),
            S::RepSent | S::MraRepRcvd => Some(Word::Rej(About::Rep, RejReason::Consumer)),
            S::RepRcvd | S::MraRepSent => Some(Word::Rej(About::No, RejReason::Consumer)),
            S::Established => Some(Word::Dreq),
            S::DreqSent => Some(Word::Drep),
            // Its ID is not known yet, and the REQ is still asked; or it is over anyhow.
            S::ReqSent | S::MraReqRcvd | S::DreqRcvd | S::Timewait | S::Closed => None,
        }
    }
}

impl Cm {
    /// Address and communication ID of every peer that is expected to say something some time.
    pub fn peers(&self) -> impl Iterator<Item = (Gid, CommId)> {
        let waiting = self.connections.values().filter(|c| c.last_word().is_some());
        waiting.filter_map(|c| Some((c.to.dgid, c.remote_id?)))
    }

    /// These peers were killed: their connections end as if each had rejected or disconnected.
    pub fn peers_gone(&mut self, now: Time, gone: impl Fn(Gid, CommId) -> bool) {
        let is_gone = |c: &&Connection| c.remote_id.is_some_and(|id| gone(c.to.dgid, id));
        let theirs: Vec<_> = self
            .connections
            .values()
            .map(|c| &**c)
            .filter(is_gone)
            .filter_map(|c| Some((c.local_id, c.last_word()?)))
            .collect();
        for (id, word) in theirs {
            let Some(c) = self.connections.get(&id) else { continue };
            let arrival = Arrival {
                source: c.to.dgid,
                destination: c.to.sgid,
                traffic_class: c.to.traffic_class,
                hop_limit: c.to.hop_limit,
                flow_label: c.to.flow_label,
                interface: c.to.interface,
                port: 0,
            };
            let (local_comm_id, remote_comm_id) = (c.remote(), id);
            let tid = c.transaction_id;
            match word {
                Word::Rej(about, reason) => {
                    let rej =
                        Rej { local_comm_id, remote_comm_id, about, reason, ..Rej::default() };
                    self.on_rej(now, &arrival, &rej);
                }
                Word::Dreq => {
                    let remote_qpn = c.qp.qpn.unwrap_or_default();
                    let dreq =
                        Dreq { local_comm_id, remote_comm_id, remote_qpn, ..Dreq::default() };
                    self.on_dreq(now, &arrival, tid, &dreq);
                }
                Word::Drep => {
                    let drep = Drep { local_comm_id, remote_comm_id, ..Drep::default() };
                    self.on_drep(now, &arrival, tid, &drep);
                }
            }
        }
    }
}
