//! Completion queues that were made for one thread.

use crate::catalogue::Check;
use crate::facts::Kind;
use crate::stack::Stack;

use super::{Ledger, Turn, here};

/// The call that keeps a queue until `ibv_end_poll`.
const START: &str = "ibv_start_poll";

/// A number for this thread.
fn me() -> libc::pthread_t {
    // SAFETY: it has no preconditions.
    unsafe { libc::pthread_self() }
}

impl Ledger {
    /// A thread calls `call` with a completion queue that was made for one thread. True if no thread uses the queue: then
    /// [`ends_turn`](Self::ends_turn) follows, after `ibv_start_poll` at `ibv_end_poll`.
    pub fn begins_turn(&mut self, address: usize, call: &'static str) -> bool {
        let Some(cq) = self.cqs.get_mut(&address).filter(|cq| !cq.is_shared) else { return false };
        let turn = Turn { thread: me(), call, stack: Stack::here() };
        let Some(other) = &cq.turn else {
            cq.turn = Some(turn);
            return true;
        };
        if other.thread != turn.thread {
            cq.is_shared = true;
            let other = other.clone();
            self.report_turn(address, &turn, &other);
        }
        false
    }

    fn report_turn(&mut self, address: usize, turn: &Turn, other: &Turn) {
        let place = match other.call {
            START => "has begun with ibv_start_poll and not called ibv_end_poll".to_owned(),
            call => format!("is in {call}"),
        };
        let what = format!(
            "a thread calls {} for the {} while another one {place}, and the queue was made with IBV_CREATE_CQ_ATTR_SINGLE_THREADED",
            turn.call,
            self.place(Kind::Cq, address)
        );
        let call = (format!("The other thread called {} here", other.call), other.stack);
        let made = self.origin(address, "The completion queue was made here");
        self.report(Check::CqThreads, what, vec![here(turn.stack), call, made]);
    }

    /// The turn of this thread has ended.
    pub fn ends_turn(&mut self, address: usize) {
        if let Some(cq) = self.cqs.get_mut(&address) {
            cq.turn.take_if(|turn| turn.thread == me());
        }
    }
}
