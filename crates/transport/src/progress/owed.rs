//! Debts of queue pairs: delayed ACKs, and small sends that were gathered. Both leave with the program's next sending,
//! or a little later on their own.

use std::time::Duration;

use anyverbs_net::host::TIME_SLICES;
use anyverbs_proto::types::Qpn;

use super::Driver;
use crate::qp::State;

/// The debts that are paid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Debts {
    /// All; those that another thread is paying are left to it.
    All,
    /// All when this returns. A thread that is paying one may have been preempted, and the program's next message must not
    /// overtake the ACK.
    AtOnce,
    /// All but ACKs that the program's next request is likely to carry. [`All`](Self::All) has to follow soon.
    Unawaited,
    /// All of queue pairs that can be locked soon: the caller of exit(3) may have locked one.
    AtExit,
}

impl Driver {
    /// Sends the ACKs that queue pairs owe, and the small sends that they have gathered. The caller holds no lock.
    pub fn flush(&'static self, debts: Debts) {
        if self.pay_all(debts) && debts != Debts::AtExit {
            self.after_unlock();
        }
    }

    /// As [`flush`](Self::flush), for a caller that has locked the receive path. It does what follows (`after_unlock`) once it has
    /// released that. Tells whether any were owed.
    pub fn pay_all(&'static self, debts: Debts) -> bool {
        let owed = &self.transport.owed;
        if !owed.now().is_any() {
            return false;
        }
        if debts == Debts::AtExit {
            for qpn in owed.take_all(TIME_SLICES).into_iter().flatten() {
                self.pay(qpn, debts);
            }
            return true;
        }
        for _ in 0..owed.len() {
            let Some(qpn) = owed.pop() else { break };
            self.pay(qpn, debts);
            owed.done(qpn);
        }
        if debts == Debts::AtOnce {
            for qpn in owed.begun() {
                self.pay(qpn, debts);
            }
        }
        true
    }

    /// Pays what a queue pair owes.
    pub(super) fn pay(&'static self, qpn: Qpn, debts: Debts) {
        let Some(cell) = self.transport.qps.find(qpn) else { return };
        // The thread that has locked it may be the one that calls exit(3).
        let within = (debts == Debts::AtExit).then_some(TIME_SLICES);
        self.with_cell(&cell, within, |State { machine, link, .. }, call| {
            link.owed.debt.listed = false;
            link.owed.inproc = false;
            if std::mem::take(&mut link.owed.gathers) {
                machine.transmit(&mut call.env(link));
            }
            if debts != Debts::Unawaited || !machine.may_piggyback() {
                machine.acknowledge(&mut call.env(link));
            }
        });
    }

    /// The process ends: a packet that is lost from now on is lost for good, so the last ACKs leave once more.
    pub fn repeat_last_answers(&'static self) {
        self.transport.qps.each(TIME_SLICES, |cell| {
            self.with_cell(cell, Some(Duration::ZERO), |State { machine, link, .. }, call| {
                machine.repeat_last_answers(&mut call.env(link));
            });
        });
    }
}
