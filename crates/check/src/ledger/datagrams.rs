//! Datagrams, and messages of UC, that queue pairs have dropped.

use anyverbs_causes::Cause;

use crate::catalogue::Check;
use crate::facts::{Dropped, DroppedDatagrams, QueuePair};
use crate::stack::Stack;

use super::Ledger;
use super::failed::check_of;

impl Dropped {
    /// `None` for a loss that is no mistake of this program.
    fn check(&self) -> Option<Check> {
        Some(match self {
            Self::Message { cause, .. } => return check_of(Cause::from_number(*cause)?),
            Self::Work { .. } => return None,
            Self::QKey { .. } => Check::QkeyMismatch,
            Self::PKey { .. } => Check::PkeyMismatch,
            Self::NoReceive => Check::DatagramUnreceived,
            Self::TooLong { .. } => Check::DatagramTooLong,
        })
    }
}

impl Ledger {
    /// A queue pair has dropped datagrams. Each reason is reported once.
    pub fn dropped(&mut self, address: usize, drops: &DroppedDatagrams) {
        let DroppedDatagrams { reason, count, from } = drops;
        let Some(check) = reason.check() else { return };
        let Some(qp) = self.queues.get(&address).and_then(|queues| queues.qp) else { return };
        if !self.is_first_drop(address, check) {
            return;
        }
        let why = match *reason {
            Dropped::Message { ref first, key, .. } => {
                let mut what = if qp.is_uc {
                    format!(
                        "UC queue pair {:#08x} has dropped messages ({count} so far), and their sender's work succeeds: {first}",
                        qp.number
                    )
                } else if check == Check::NoReceive {
                    format!("queue pair {:#08x} had no receive: {first}", qp.number)
                } else if matches!(check, Check::Rights | Check::PdMismatch) {
                    format!("queue pair {:#08x} has refused its peer: {first}", qp.number)
                } else {
                    format!("queue pair {:#08x} does not fit the other end: {first}", qp.number)
                };
                let seen = ("It was seen here, later".into(), Stack::here());
                let mut stacks = vec![seen];
                if matches!(check, Check::Rights | Check::PdMismatch)
                    && let Some((facts, origins)) = self.region_of_rkey(key, check)
                {
                    what.push_str(&facts);
                    stacks.extend(origins);
                }
                stacks.push(self.origin(address, "The queue pair was made here"));
                return self.report(check, what, stacks);
            }
            // It has no check.
            Dropped::Work { .. } => return,
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
            "UD queue pair {:#08x} has dropped datagrams ({count} so far); the first came from {from}, {why}",
            qp.number
        );
        let seen = ("It was seen here, later".into(), Stack::here());
        let made = self.origin(address, "The queue pair was made here");
        self.report(check, what, vec![seen, made]);
    }

    /// Notes that a queue pair is reported for this check. False if it was before.
    pub(super) fn is_first_drop(&mut self, address: usize, check: Check) -> bool {
        let Some(queues) = self.queues.get_mut(&address) else { return false };
        let is_first = !queues.dropped.contains(&check);
        if is_first {
            queues.dropped.push(check);
        }
        is_first
    }

    /// The addresses of the queue pairs of types UD and UC whose receives complete in this queue.
    #[must_use]
    pub fn silent_qps(&self, cq: usize) -> Vec<usize> {
        self.qps_that(|qp| qp.drops_silently() && qp.recv_cq == cq)
    }

    /// The addresses of these queue pairs.
    pub(super) fn qps_that(&self, is_of: impl Fn(QueuePair) -> bool) -> Vec<usize> {
        let qps = self.queues.iter().filter(|(_, queues)| queues.qp.is_some_and(&is_of));
        qps.map(|(address, _)| *address).collect()
    }
}
