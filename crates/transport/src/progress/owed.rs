//! Debts of queue pairs: delayed ACKs, and small sends that were gathered. Both leave with the program's next sending,
//! or a little later on their own.

use std::time::Duration;

use anyverbs_proto::types::Qpn;

use super::Driver;
use crate::qp::State;
use crate::qp::env::Call;

/// Longest wait of the end of the process for a lock.
const EXIT_PATIENCE: Duration = Duration::from_millis(2);

/// The ACKs that leave.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Acks {
    All,
    /// Not those that the program's next request is likely to carry.
    Unawaited,
}

/// Pays the debt of a queue pair.
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

impl Driver {
    /// Sends the ACK that a queue pair owes, and the small sends that it has gathered.
    pub(crate) fn acknowledge(&'static self, qpn: Qpn) {
        self.with_qp(qpn, |state, call| pay(state, call, Acks::All));
    }

    fn pay_all(&'static self, acks: Acks) {
        if !self.transport.owed.now().is_any() {
            return;
        }
        let listed = self.transport.owed.len();
        for _ in 0..listed {
            let Some(qpn) = self.transport.owed.pop() else { break };
            self.with_qp(qpn, |state, call| pay(state, call, acks));
            self.transport.owed.done(qpn);
        }
        self.after_unlock();
    }

    /// Sends all that is owed.
    pub(super) fn flush_owed(&'static self) {
        self.pay_all(Acks::All);
    }

    /// As [`flush_owed`](Self::flush_owed), but does not leave it to another thread that has begun. That one may have
    /// been preempted, and the program's next answer must not overtake the ACK.
    pub fn flush_owed_at_once(&'static self) {
        self.flush_owed();
        let begun = self.transport.owed.begun();
        for qpn in begun {
            self.acknowledge(qpn);
        }
        self.after_unlock();
    }

    /// Pays debts except the ACKs that the program's next request is likely to carry. The caller makes sure that
    /// [`flush_owed`](Self::flush_owed) is called soon.
    pub(super) fn flush_unawaited(&'static self) {
        self.pay_all(Acks::Unawaited);
    }

    /// As [`flush_owed`](Self::flush_owed), but does not wait long for a queue pair: the caller of exit(3) may have
    /// locked it.
    pub fn flush_owed_at_exit(&'static self) {
        let Some(owed) = self.transport.owed.take_all(EXIT_PATIENCE) else { return };
        for cell in owed.into_iter().filter_map(|qpn| self.transport.qps.find(qpn)) {
            let Some(mut state) = cell.state.try_lock_for(EXIT_PATIENCE) else { continue };
            if !state.is_dead() {
                let mut call = Call::new(&cell);
                pay(&mut state, &mut call, Acks::All);
                call.settle(&mut state);
            }
        }
        // A packet lost from now on is lost for good.
        self.transport.qps.each(EXIT_PATIENCE, |cell| {
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
