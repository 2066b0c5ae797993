//! What queue pairs owe: the ACK of what came, and small sends that were gathered. Both leave with what the program sends
//! next, or a little later by themselves.

use std::sync::atomic::Ordering;
use std::time::Duration;

use anyverbs_proto::types::Qpn;

use super::env::Call;
use super::{Engine, worker};
use crate::qp::State;

/// How long the end of the process waits for a lock.
const EXIT_PATIENCE: Duration = Duration::from_millis(2);

/// What a queue pair owes, under its lock.
#[derive(Debug, Default)]
pub(crate) struct Debt {
    owes: bool,
    /// On the list. One whose debt was paid stays there until somebody looks: where programs answer each other, it will owe
    /// again with the next message, and pay with its reply.
    listed: bool,
}

/// What all queue pairs owe: in the lower half how many of them do, in the upper how often one began to. If it is the same
/// as before, so are the debts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owed(u64);

impl Owed {
    /// What a queue pair adds when it begins to owe. It takes one away when it has paid.
    const BEGUN: u64 = 1 << 32 | 1;

    pub(super) fn is_any(self) -> bool {
        self.0 as u32 > 0
    }
}

/// Which ACKs leave.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Acks {
    All,
    /// Not those that the program's next request is likely to take along.
    Unawaited,
}

/// Sends what a queue pair owes.
fn pay(state: &mut State, call: &mut Call<'_>, acks: Acks) {
    let State { machine, link, .. } = state;
    link.debt.listed = false;
    link.owed_inproc = false;
    if std::mem::take(&mut link.gathers) {
        machine.transmit(&mut call.env(link));
    }
    if acks == Acks::All || !machine.takes_turns() {
        machine.acknowledge(&mut call.env(link));
    }
}

impl Engine {
    /// Sends the ACK that a queue pair owes, and the small sends that it has gathered.
    pub(crate) fn acknowledge(&'static self, qpn: Qpn) {
        self.with_qp(qpn, |state, call| pay(state, call, Acks::All));
    }

    /// Notes whether a queue pair owes something.
    #[inline]
    pub(super) fn note_owing(&self, qpn: Qpn, debt: &mut Debt, owes: bool) {
        if owes && !debt.listed {
            debt.listed = true;
            self.owed.lock().push_back(qpn);
        }
        if std::mem::replace(&mut debt.owes, owes) != owes {
            if owes {
                self.owing.fetch_add(Owed::BEGUN, Ordering::SeqCst);
            } else {
                self.owing.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    /// The worker is to look soon whether something is still owed, if nobody polls.
    pub(super) fn look_after_owed(&self) {
        self.worker.look_before((self.core.now() + worker::ACK_DELAY).as_nanos());
    }

    pub(super) fn owes(&self) -> bool {
        self.owed().is_any()
    }

    #[inline]
    pub(super) fn owed(&self) -> Owed {
        Owed(self.owing.load(Ordering::SeqCst))
    }

    fn pop_owed(&self) -> Option<Qpn> {
        let mut owed = self.owed.lock();
        let qpn = owed.pop_front()?;
        self.acking.lock().push(qpn);
        Some(qpn)
    }

    /// What [`pop_owed`](Self::pop_owed) gave has been seen to.
    fn done_owed(&self, qpn: Qpn) {
        let mut acking = self.acking.lock();
        if let Some(at) = acking.iter().position(|q| *q == qpn) {
            acking.swap_remove(at);
        }
    }

    fn pay_all(&'static self, acks: Acks) {
        if !self.owes() {
            return;
        }
        let listed = self.owed.lock().len();
        for _ in 0..listed {
            let Some(qpn) = self.pop_owed() else { break };
            self.with_qp(qpn, |state, call| pay(state, call, acks));
            self.done_owed(qpn);
        }
        self.after_unlock();
    }

    /// Sends all that is owed.
    pub(super) fn flush_owed(&'static self) {
        self.pay_all(Acks::All);
    }

    /// As [`flush_owed`](Self::flush_owed), and does not leave to another thread what that has begun: it may have been
    /// preempted, and an answer that the program sends next must not overtake the ACK.
    pub(super) fn flush_owed_at_once(&'static self) {
        self.flush_owed();
        let begun = self.acking.lock().clone();
        for qpn in begun {
            self.acknowledge(qpn);
        }
    }

    /// Sends what is owed, but for the ACKs that the program's next request is likely to take along. Whoever calls it sees
    /// to it that [`flush_owed`](Self::flush_owed) is called soon.
    pub(super) fn flush_unawaited(&'static self) {
        self.pay_all(Acks::Unawaited);
    }

    /// As [`flush_owed`](Self::flush_owed), but does not wait long for a queue pair: whoever called exit(3) may have locked it.
    pub(super) fn flush_owed_at_exit(&'static self) {
        let Some(owed) = self.owed.try_lock_for(EXIT_PATIENCE).map(|mut o| std::mem::take(&mut *o))
        else {
            return;
        };
        for cell in owed.into_iter().filter_map(|qpn| self.qps.find(qpn)) {
            let Some(mut state) = cell.state.try_lock_for(EXIT_PATIENCE) else { continue };
            if !state.is_dead() {
                let mut call = Call::new(&cell);
                pay(&mut state, &mut call, Acks::All);
                call.settle(&mut state);
            }
        }
        // What is lost from now on is lost for good.
        self.qps.each(EXIT_PATIENCE, |cell| {
            let Some(mut state) = cell.state.try_lock() else { return };
            if !state.is_dead() {
                let mut call = Call::new(cell);
                let State { machine, link, .. } = &mut *state;
                machine.say_farewell(&mut call.env(link));
                call.settle(&mut state);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::gsi::tests::isolate;
    use anyverbs_testing::in_own_process;

    /// Alone: the worker is to find nothing else.
    #[test]
    fn a_debt_that_was_paid_and_made_anew_is_not_the_old_one() {
        let name = "engine::owed::tests::a_debt_that_was_paid_and_made_anew_is_not_the_old_one";
        in_own_process(name, || {
            isolate();
            let engine = Engine::current().unwrap();
            let nobody = Qpn::new(0x00ab_cdef);
            let mut debt = Debt::default();
            assert!(!engine.owes());
            engine.note_owing(nobody, &mut debt, true);
            let old = engine.owed();
            engine.note_owing(nobody, &mut debt, true);
            assert!(old.is_any() && old == engine.owed());
            engine.note_owing(nobody, &mut debt, false);
            assert!(!engine.owes());
            engine.note_owing(nobody, &mut debt, true);
            assert!(engine.owes() && old != engine.owed());
        });
    }
}
