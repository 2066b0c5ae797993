//! Datagrams that a queue pair drops. No completion tells of them, at neither end.

use crate::counters::Counter;
use crate::env::Env;
use crate::types::{Gid, PKey, QKey, Qpn};
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
