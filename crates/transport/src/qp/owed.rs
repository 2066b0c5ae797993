//! Which queue pairs owe something: the ACK of what came, and small sends that were gathered.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyverbs_locks::{Mutex, rank};
use anyverbs_objects::base::PROMPT_REPLY;
use anyverbs_proto::types::Qpn;

/// The debt of a queue pair, under its lock.
#[derive(Debug, Default)]
pub struct Debt {
    owes: bool,
    /// It is on the list. A queue pair whose debt was paid stays there until the next look. Where programs answer each
    /// other, it will owe again with the next message, and pay with its reply.
    pub(crate) listed: bool,
}

/// The debts of all queue pairs. The lower half counts those that owe, the upper half the times that one began to. If
/// the value is the same as before, so are the debts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owed(u64);

impl Owed {
    /// The amount that a queue pair adds when it begins to owe. It subtracts one when it has paid.
    const BEGUN: u64 = 1 << 32 | 1;

    pub(crate) fn is_any(self) -> bool {
        self.0 as u32 > 0
    }
}

/// The longest delay of an ACK that the program's next request may carry, and of small sends that gather: a program that
/// answers at once has answered by then, and its reply saves the ACK
/// (`an_ack_that_a_reply_may_carry_waits_for_it`).
pub(crate) const ACK_DELAY: Duration = PROMPT_REPLY;

/// The queue pairs that owe something.
#[derive(Debug)]
pub struct OwedList {
    /// Queue pairs that owe an ACK to a peer in another process, or did.
    listed: Mutex<rank::OwedAcks, VecDeque<Qpn>>,
    /// How many of them do, and how often one began to: see [`Owed`].
    owing: AtomicU64,
    /// Those of them that some thread is seeing to.
    acking: Mutex<rank::AcksBegun, Vec<Qpn>>,
}

impl Default for OwedList {
    fn default() -> Self {
        Self {
            listed: Mutex::new(VecDeque::with_capacity(64)),
            owing: AtomicU64::new(0),
            acking: Mutex::new(Vec::with_capacity(8)),
        }
    }
}

impl OwedList {
    /// Notes whether a queue pair owes something.
    #[inline]
    pub fn note(&self, qpn: Qpn, debt: &mut Debt, owes: bool) {
        if owes && !debt.listed {
            debt.listed = true;
            self.listed.lock().push_back(qpn);
        }
        if std::mem::replace(&mut debt.owes, owes) != owes {
            if owes {
                self.owing.fetch_add(Owed::BEGUN, Ordering::SeqCst);
            } else {
                self.owing.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    #[inline]
    pub(crate) fn now(&self) -> Owed {
        Owed(self.owing.load(Ordering::SeqCst))
    }

    /// How many queue pairs are listed.
    pub(crate) fn len(&self) -> usize {
        self.listed.lock().len()
    }

    /// Takes the queue pair that is listed longest; [`done`](Self::done) follows.
    pub fn pop(&self) -> Option<Qpn> {
        let mut listed = self.listed.lock();
        let qpn = listed.pop_front()?;
        self.acking.lock().push(qpn);
        Some(qpn)
    }

    /// The queue pair that [`pop`](Self::pop) gave has been served.
    pub(crate) fn done(&self, qpn: Qpn) {
        let mut acking = self.acking.lock();
        if let Some(at) = acking.iter().position(|q| *q == qpn) {
            acking.swap_remove(at);
        }
    }

    /// The queue pairs that some thread is serving.
    pub(crate) fn begun(&self) -> Vec<Qpn> {
        self.acking.lock().clone()
    }

    /// Takes all that are listed, where the lock is to be had within a time.
    pub(crate) fn take_all(&self, within: Duration) -> Option<VecDeque<Qpn>> {
        self.listed.try_lock_for(within).map(|mut listed| std::mem::take(&mut *listed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_debt_made_anew_is_not_the_old_one() {
        let owed = OwedList::default();
        let nobody = Qpn::new(0x00ab_cdef);
        let mut debt = Debt::default();
        assert!(!owed.now().is_any());
        owed.note(nobody, &mut debt, true);
        let old = owed.now();
        owed.note(nobody, &mut debt, true);
        assert!(old.is_any() && old == owed.now());
        owed.note(nobody, &mut debt, false);
        assert!(!owed.now().is_any());
        owed.note(nobody, &mut debt, true);
        assert!(owed.now().is_any() && old != owed.now());
    }
}
