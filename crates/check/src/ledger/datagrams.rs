//! Datagrams that queue pairs have dropped.

use crate::catalogue::Check;
use crate::facts::{Dropped, DroppedDatagrams, QueuePair};
use crate::stack::Stack;

use super::Ledger;

impl Dropped {
    fn check(self) -> Check {
        match self {
            Self::QKey { .. } => Check::QkeyMismatch,
            Self::PKey { .. } => Check::PkeyMismatch,
            Self::NoReceive => Check::DatagramUnreceived,
            Self::TooLong { .. } => Check::DatagramTooLong,
        }
    }
}

impl Ledger {
    /// A queue pair has dropped datagrams. Each reason is reported once.
    pub fn dropped(&mut self, address: usize, drops: &DroppedDatagrams) {
        let DroppedDatagrams { reason, count, from } = drops;
        let check = reason.check();
        let Some(queues) = self.queues.get_mut(&address) else { return };
        let Some(qp) = queues.qp.filter(|_| !queues.dropped.contains(&check)) else { return };
        queues.dropped.push(check);
        let why = match *reason {
            Dropped::QKey { own, other } => {
                format!("with Q_Key {other:#x}, and that of the queue pair is {own:#x}")
            }
            Dropped::PKey { own, other } => {
                let both =
                    if (own ^ other) & 0x7fff == 0 { "; both are limited members" } else { "" };
                format!("with P_Key {other:#06x}, and that of the queue pair is {own:#06x}{both}")
            }
            Dropped::NoReceive if qp.srq == 0 => "and no receive was posted".to_owned(),
            Dropped::NoReceive => "and the SRQ had no receive".to_owned(),
            Dropped::TooLong { len, room } => {
                format!("with {len} bytes (40 of them the GRH), and there was room for {room}")
            }
        };
        let what = format!(
            "UD queue pair {:#x} has dropped datagrams ({count} so far); the first came from {from}, {why}",
            qp.number
        );
        let seen = ("It was seen here, later".into(), Stack::here());
        let made = self.origin(address, "The queue pair was made here");
        self.report(check, what, vec![seen, made]);
    }

    /// The addresses of the queue pairs of type UD whose receives complete in this queue, or in any.
    #[must_use]
    pub fn datagram_qps(&self, cq: Option<usize>) -> Vec<usize> {
        let is_of = |qp: QueuePair| qp.is_datagram && cq.is_none_or(|cq| qp.recv_cq == cq);
        let qps = self.queues.iter().filter(|(_, queues)| queues.qp.is_some_and(is_of));
        qps.map(|(address, _)| *address).collect()
    }
}
