//! Runs the timers that are due.

use std::sync::atomic::Ordering;

use anyverbs_objects::base::{LATE, NEVER, PROMPT_REPLY};
use anyverbs_proto::time::Time;

use super::Driver;
use crate::qp::State;
use crate::qp::qp_context::QpContext;

impl Driver {
    /// When the next timer of any kind is due, in nanoseconds.
    pub fn next_deadline(&self) -> u64 {
        let others = self.above().management.next().min(self.moderated.next());
        self.transport.timers.next().min(self.links.next()).min(others)
    }

    /// Tells whether all packets from before `deadline` were delivered. A timer must not count a packet as lost that
    /// only waits for a thread without the processor. After [`LATE`] it acts in any case.
    fn has_caught_up(&self, link: &mut QpContext, deadline: Time, now: Time) -> bool {
        if link.is_inproc() {
            return self.links.inproc.has_caught_up(&mut link.catch_up.since);
        }
        self.rx_empty_at.load(Ordering::Acquire) >= deadline.as_nanos()
            || now.since(deadline) > LATE
    }

    /// Runs the timers that are due.
    pub(super) fn run_timers(&'static self) {
        let next = self.next_deadline();
        if next == NEVER {
            return;
        }
        let now = self.core.now();
        if now.as_nanos() < next {
            return;
        }
        if let Some(faults) = &self.links.faults {
            self.run_script(faults, now);
        }
        while let Some((at, qpn)) = self.transport.timers.pop(now) {
            self.with_qp(qpn, |State { machine, link, .. }, call| {
                if !link.timers.remove(at) {
                    return;
                }
                if link.watch.is_some() {
                    call.env(link).run_faults(machine, now);
                }
                link.catch_up.look_at = None;
                if link.peer_gone_at.take_if(|at| *at <= now).is_some() {
                    machine.peer_gone(&mut call.env(link));
                    return;
                }
                let due = machine.deadline().filter(|deadline| *deadline <= now);
                if due.is_some_and(|deadline| now.since(deadline.max(at)) > LATE) {
                    machine.on_late_wakeup(&mut call.env(link));
                }
                let Some(deadline) = machine.deadline().filter(|deadline| *deadline <= now) else {
                    return;
                };
                // The machine's deadline counts, not `at`, which moves with each look.
                if !self.has_caught_up(link, deadline, now) {
                    link.catch_up.look_at = Some(now + PROMPT_REPLY);
                    return;
                }
                let was_silent = machine.on_timer(&mut call.env(link));
                if was_silent && machine.is_in_flight() {
                    link.note_silence(qpn);
                }
            });
        }
        let mut resume = Vec::new();
        self.links.expire(now, &mut resume);
        for qpn in resume {
            self.resume(qpn);
        }
        self.tell_moderated(now);
        self.above().management.run(now);
        self.after_unlock();
    }
}
