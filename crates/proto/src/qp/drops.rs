//! Datagrams, and messages of UC, that a queue pair drops. No completion tells of them, at neither end.

use std::fmt;

use anyverbs_causes::Cause;

use crate::counters::Counter;
use crate::env::Env;
use crate::types::{Gid, PKey, Psn, QKey, Qpn};
use crate::wire::deth::Deth;

use super::grh::GRH_LEN;
use super::{Arrival, Incoming, Qp};

/// The reason why a datagram is dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DropReason {
    /// Its Q_Key is not that of the queue pair.
    QKey,
    /// Its P_Key does not match that of the queue pair.
    PKey,
    /// There is no receive.
    NoReceive,
    /// It is longer than the receive, or than the path MTU.
    TooLong,
}

impl DropReason {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::QKey, Self::PKey, Self::NoReceive, Self::TooLong];

    /// The port's counter of them.
    #[must_use]
    pub fn counter(self) -> Counter {
        match self {
            Self::QKey => Counter::DropQkey,
            Self::PKey => Counter::DropPkey,
            Self::NoReceive => Counter::DropNoRecv,
            Self::TooLong => Counter::DropRecvTooShort,
        }
    }
}

/// Datagrams that were dropped for one reason, and the first of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Drops {
    /// How many there were.
    pub count: u64,
    /// Address of the sender.
    pub source: Gid,
    /// Queue pair of the sender.
    pub src_qpn: Qpn,
    /// The Q_Key of the queue pair, and its own.
    pub qkeys: [QKey; 2],
    /// The P_Key of the queue pair, and its own.
    pub pkeys: [PKey; 2],
    /// Bytes, with the GRH.
    pub len: u64,
    /// Bytes that the receive and the path MTU had room for; 0 without a receive.
    pub room: u64,
}

/// What a queue pair of a connection has lost for one cause. It is one of these:
///
/// - messages of UC that were dropped;
/// - packets of a peer that differs from this end;
/// - a message that the peer gave up for want of a receive;
/// - a request of the peer that was refused for want of a right, or for its protection domain.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lost {
    /// The cause.
    pub cause: Cause,
    /// How many there were.
    pub count: u64,
    /// The remote key that it is about, or 0.
    pub key: u32,
    /// The first of them, and why it was dropped: a sentence without its full stop.
    pub first: String,
}

/// Work of this end that has failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failed {
    /// The cause.
    pub cause: Cause,
    /// The request's; 0 for a receive.
    pub wr_id: u64,
    /// Why it failed, as the log has it: a clause.
    pub why: String,
}

/// Drops by reason.
pub(super) type AllDrops = [Option<Drops>; DropReason::ALL.len()];

impl Qp {
    /// Drops a packet whose P_Key does not match.
    #[cold]
    pub(super) fn drop_of_partition<E: Env>(
        &mut self,
        arrival: &Arrival,
        packet: &Incoming<'_>,
        env: &mut E,
    ) {
        if let Some(deth) = packet.headers.deth {
            return self.drop_datagram(DropReason::PKey, 0, (arrival, packet, deth), env);
        }
        self.explain_drop(arrival, packet, env);
        env.count(Counter::DropPkey, 1);
    }

    /// UC: a message of the peer is dropped. The log says so, once for each cause: its sender's work succeeds (IBA 9.8.3).
    #[cold]
    pub(super) fn note_lost<E: Env>(
        &mut self,
        (cause, key): (Cause, u32),
        first: impl FnOnce(&Self) -> String,
        env: &mut E,
    ) {
        if let Some(lost) = self.trouble().lost.iter_mut().find(|lost| lost.cause == cause) {
            lost.count += 1;
            return;
        }
        let first = first(self);
        env.log(format_args!(
            "queue pair {:#08x}: {first}; UC tells the sender nothing; see `anyverbs explain {cause}`",
            self.qpn.get()
        ));
        self.trouble().lost.push(Lost { cause, count: 1, key, first });
    }

    /// This end and the other do not fit, there was no receive, or memory may not be touched by the peer, which the log has said. The `key` is the remote
    /// key that it is about, or 0. `said` is a sentence without its full stop.
    pub(super) fn note_difference(&mut self, (cause, key): (Cause, u32), said: String) {
        let is_one = matches!(
            cause,
            Cause::PsnDiffers
                | Cause::MtuDiffers
                | Cause::GidDiffers
                | Cause::TypeDiffers
                | Cause::PkeyDiffers
                | Cause::NoReceive
                | Cause::RkeyRight
                | Cause::RkeyOfOtherPd
                | Cause::WindowRight
                | Cause::QpRight
        );
        let lost = &mut self.trouble().lost;
        if is_one && lost.iter().all(|lost| lost.cause != cause) {
            lost.push(Lost { cause, count: 1, key, first: said });
        }
    }

    /// As [`note_lost`](Self::note_lost), of one message.
    #[cold]
    pub(super) fn note_lost_message<E: Env>(
        &mut self,
        cause: (Cause, u32),
        what: &str,
        why: &dyn fmt::Display,
        env: &mut E,
    ) {
        let first = |qp: &Self| format!("{what} of {} was dropped: {why}", qp.peer(qp.sq.done));
        self.note_lost(cause, first, env);
    }

    /// UC: this packet came, and another was to come.
    #[cold]
    pub(super) fn note_gap<E: Env>(&mut self, psn: Psn, env: &mut E) {
        env.count(Counter::DropUcGap, 1);
        let expected = self.expected();
        let rule = env.taken_by_rule(expected, psn);
        let cause = if rule.is_some() { Cause::Injected } else { Cause::UcGap };
        let first = |qp: &Self| {
            let is_first = expected == qp.attr.rq_psn;
            format!(
                "messages of {} were lost {}: PSN {:#x} came, and {:#x}{} was to come",
                qp.peer(qp.sq.done),
                rule.map_or("on the way".into(), |rule| format!("by an injected fault ({rule})")),
                psn.get(),
                expected.get(),
                if is_first { ", which is rq_psn," } else { "" }
            )
        };
        self.note_lost((cause, 0), first, env);
    }

    /// Drops a datagram.
    #[cold]
    pub(super) fn drop_datagram<E: Env>(
        &mut self,
        reason: DropReason,
        room: u64,
        (arrival, packet, deth): (&Arrival, &Incoming<'_>, Deth),
        env: &mut E,
    ) {
        env.count(reason.counter(), 1);
        if packet.headers.bth.dest_qpn == Qpn::MULTICAST && deth.src_qpn == self.qpn {
            // It sends to a group of which it is a member, and wants no copies.
            return;
        }
        let qkeys = [self.attr.qkey, deth.qkey];
        let pkeys = [self.pkey, packet.headers.bth.pkey];
        let drops = self.drops_mut()[reason as usize].get_or_insert(Drops {
            count: 0,
            source: arrival.source,
            src_qpn: deth.src_qpn,
            qkeys,
            pkeys,
            len: (GRH_LEN + packet.payload.len()) as u64,
            room,
        });
        drops.count += 1;
    }
}
