//! Work requests that are no messages: binds of memory windows and local invalidations (IBA 10.6.7, 11.4.1.1).

use crate::env::Env;
use crate::wc::WcStatus;
use crate::wr::SendOp;

use super::super::Qp;
use super::super::send_queue::Sqe;

impl Qp {
    /// Executes a WQE that is no message, now that everything before it has been sent. It has no PSN, and completes in its
    /// turn. False if it failed.
    pub(super) fn do_locally<E: Env>(&mut self, position: u32, sqe: &Sqe, env: &mut E) -> bool {
        env.end_remote();
        let done = match sqe.op {
            SendOp::BindMw(ref bind) => {
                let bound = env.mrs().bind(bind, self.init.pd, self.qpn.get());
                bound.map(drop).map_err(|error| {
                    self.note_bind_refused(error);
                    WcStatus::MwBindErr
                })
            }
            SendOp::LocalInv(rkey) => {
                let invalidated = env.mrs().invalidate(rkey, self.init.pd, Some(self.qpn.get()));
                // The verbs report a memory management operation error (IBA 11.6.2) as a bind error.
                invalidated.map_err(|_| WcStatus::MwBindErr)
            }
            _ => Err(WcStatus::LocQpOpErr),
        };
        if let Err(status) = done {
            self.halt(status);
            return false;
        }
        let requester = &mut self.requester;
        let entry = self.sq.at_mut(position);
        (entry.first_psn, entry.packets) = (requester.fresh_psn, 0);
        entry.cost_before = requester.fresh_cost;
        requester.k = 0;
        requester.local += 1;
        let next = position.wrapping_add(1);
        (self.sq.started, self.sq.next) = (next, next);
        self.complete_local(env);
        true
    }

    /// Completes local operations whose turn has come: all before them are complete.
    pub(super) fn complete_local<E: Env>(&mut self, env: &mut E) {
        while self.requester.local > 0
            && self.sq.done != self.sq.started
            && self.sq.at(self.sq.done).op.is_local()
        {
            // A cursor that went back to before it is not left behind.
            if self.sq.next == self.sq.done {
                self.sq.next = self.sq.done.wrapping_add(1);
                self.requester.k = 0;
            }
            self.complete_oldest(WcStatus::Success, env);
        }
    }
}
