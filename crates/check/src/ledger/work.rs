//! Work that the program posts, and the completions that it polls.

use smallvec::SmallVec;

use crate::catalogue::Check;
use crate::facts::{Completion, Elements, Piece, Pieces, Work, Works};
use crate::memory::checksum;
use crate::stack::Stack;

use super::{Abandoned, Ledger, Posted, here};

/// Requests of one call, most of which have one.
type Few<T> = SmallVec<[T; 1]>;

/// Bytes in front of a datagram for its GRH.
const GRH: u64 = 40;

impl Ledger {
    /// The program posts sends; `post` posts them and tells how many were taken, and whether the queue has no room for the next.
    pub fn post_sends(&mut self, qp: usize, works: Works, post: impl FnOnce() -> (usize, bool)) {
        for ah in works.iter().map(|work| work.ah).filter(|ah| *ah != 0) {
            if !self.objects.contains_key(&ah) && self.uses_dead(ah) {
                break;
            }
        }
        let stack = Stack::here();
        let Some(facts) = self.queues.get(&qp).and_then(|queues| queues.qp) else {
            post();
            return;
        };
        for work in works.iter().filter(|work| work.is_inline) {
            let len = work.pieces.iter().map(|piece| u64::from(piece.len)).sum();
            self.check_inline(qp, work.name, work.wr_id, len, &stack);
        }
        let offered = works.len();
        let mut posted = Few::with_capacity(offered);
        for work in works {
            self.check_order(qp, &work, &posted, &stack);
            let checksum = if work.elements == Elements::Read && !work.is_inline {
                self.ranges(&work.pieces).and_then(|ranges| checksum(&ranges, self.read))
            } else {
                None
            };
            let is_signaled = work.is_signaled || facts.signals_all;
            posted.push(Posted {
                work: Work { is_signaled, ..work },
                stack: stack.clone(),
                checksum,
            });
        }
        // A completion may be polled before this returns; it finds the ledger locked.
        let (taken, is_full) = post();
        let queues = self.queues.entry(qp).or_default();
        if queues.is_unwatched {
            return;
        }
        let before = queues.sends.len();
        queues.sends.extend(posted.into_iter().take(taken.min(offered)));
        let signaled =
            queues.sends.range(before..).filter(|posted| posted.work.is_signaled).count();
        let fits = offered <= facts.max_sends as usize;
        if is_full && fits && !queues.is_stuck {
            self.check_full(qp, &stack);
        }
        self.expects(facts.send_cq, signaled, &stack);
    }

    /// The source of a request is not the destination of a READ or an atomic before it, unless the request waits for that. `posted`
    /// stands between the queue and the request.
    fn check_order(&mut self, qp: usize, work: &Work, posted: &[Posted], stack: &Stack) {
        // A fence comes too late for data that is copied when it is posted.
        if work.elements != Elements::Read || work.is_fenced && !work.is_inline {
            return;
        }
        let Some(queues) = self.queues.get(&qp).filter(|queues| !queues.is_unwatched) else {
            return;
        };
        let overlaps = |a: &Piece, b: &Piece| {
            a.len > 0
                && b.len > 0
                && a.addr < b.addr.saturating_add(b.len.into())
                && b.addr < a.addr.saturating_add(a.len.into())
                && (work.is_inline || a.lkey == b.lkey)
        };
        let fills = |before: &&Posted| {
            let filled = &before.work.pieces;
            before.work.elements == Elements::Written
                && work.pieces.iter().any(|a| filled.iter().any(|b| overlaps(a, b)))
        };
        let Some(before) = queues.sends.iter().chain(posted).find(fills) else { return };
        let (name, wr_id) = (before.work.name, before.work.wr_id);
        let what = format!(
            "a {} (wr_id {:#x}) of queue pair {:#x} takes its data from where an unfinished {name} (wr_id {wr_id:#x}) puts its own, {}",
            work.name,
            work.wr_id,
            queues.qp.map_or(0, |qp| qp.number),
            if work.is_inline { "and is inline" } else { "and has no fence" }
        );
        let before = (format!("The {name} was posted here"), before.stack.clone());
        self.report(Check::NoFence, what, vec![here(stack), before]);
    }

    /// More completions can come to a completion queue.
    fn expects(&mut self, address: usize, n: usize, stack: &Stack) {
        let Some(cq) = self.cqs.get_mut(&address) else { return };
        cq.expected += n;
        let Some(capacity) = cq.capacity.filter(|_| !cq.is_reported) else { return };
        if cq.expected <= capacity as usize {
            return;
        }
        cq.is_reported = true;
        let what = format!(
            "the completion queue at {address:#x} holds {capacity} completions, and {} can come before the program polls",
            cq.expected
        );
        let made = self.origin(address, "The completion queue was made here");
        self.report(Check::CqTooSmall, what, vec![here(stack), made]);
    }

    /// The program gives inline data to the last of the requests that it has built since `ibv_wr_start`. The data is copied now, from
    /// these pieces of memory.
    pub fn sets_inline(&mut self, qp: usize, pieces: Pieces, built: Works) {
        let Some(last) = built.last() else { return };
        let stack = Stack::here();
        let work = Work { is_inline: true, pieces, ..last.clone() };
        let len = work.pieces.iter().map(|piece| u64::from(piece.len)).sum();
        self.check_inline(qp, work.name, work.wr_id, len, &stack);
        let as_posted = |work| Posted { work, stack: stack.clone(), checksum: None };
        let built: Few<_> = built.into_iter().map(as_posted).collect();
        self.check_order(qp, &work, &built, &stack);
    }

    fn check_inline(&mut self, address: usize, name: &str, wr_id: u64, len: u64, stack: &Stack) {
        let qp = self.queues.get(&address).and_then(|queues| queues.qp);
        let Some(qp) = qp.filter(|qp| len > qp.max_inline.into()) else { return };
        let what = format!(
            "an inline {name} (wr_id {wr_id:#x}) on queue pair {:#x} has {len} bytes, and max_inline_data is {}",
            qp.number, qp.max_inline
        );
        let stacks = vec![here(stack), self.origin(address, "The queue pair was made here")];
        self.report(Check::InlineTooLong, what, stacks);
    }

    /// The send queue is full. Nothing frees it if no request in it makes a completion.
    fn check_full(&mut self, address: usize, stack: &Stack) {
        let Some(queues) = self.queues.get_mut(&address) else { return };
        let is_signaled = queues.sends.iter().any(|posted| posted.work.is_signaled);
        let (Some(qp), Some(oldest)) = (queues.qp, queues.sends.front()) else { return };
        if is_signaled {
            return;
        }
        queues.is_stuck = true;
        let (n, Work { name, wr_id, .. }) = (queues.sends.len(), &oldest.work);
        let what = format!(
            "the send queue of queue pair {:#x} is full for good: none of its {n} requests since the {name} with wr_id {wr_id:#x} is signaled",
            qp.number
        );
        let posted = ("The oldest was posted here".into(), oldest.stack.clone());
        let made = self.origin(address, "The queue pair was made here");
        self.report(Check::SendQueueUnsignaled, what, vec![here(stack), posted, made]);
    }

    /// The program posts receives to a queue pair or an SRQ; `post` posts them and tells how many were taken.
    pub fn post_receives(&mut self, queue: usize, works: Works, post: impl FnOnce() -> usize) {
        let stack = Stack::here();
        let facts = self.queues.get(&queue).and_then(|queues| queues.qp);
        if let Some(facts) = facts.filter(|facts| facts.is_datagram) {
            for work in &works {
                let room: u64 = work.pieces.iter().map(|piece| u64::from(piece.len)).sum();
                if room < GRH {
                    let what = format!(
                        "a receive (wr_id {:#x}) on UD queue pair {:#x} has room for {room} bytes, and the first {GRH} are the GRH's",
                        work.wr_id, facts.number
                    );
                    let stacks =
                        vec![here(&stack), self.origin(queue, "The queue pair was made here")];
                    self.report(Check::UdReceiveRoom, what, stacks);
                }
            }
        }
        let posted = works
            .into_iter()
            .map(|work| Posted { work, stack: stack.clone(), checksum: None })
            .collect::<Few<_>>();
        let taken = post();
        let taken = taken.min(posted.len());
        let queues = self.queues.entry(queue).or_default();
        let abandoned = queues.abandoned_by.take();
        if !queues.is_unwatched {
            queues.receives.extend(posted.into_iter().take(taken));
            if let Some(facts) = facts {
                self.expects(facts.recv_cq, taken, &stack);
            }
        }
        if let Some(Abandoned { number, made, ended }) = abandoned {
            let what = format!(
                "queue pair {number:#x} was destroyed before IBV_EVENT_QP_LAST_WQE_REACHED, and its SRQ is used on: a receive may be lost"
            );
            let made = ("The queue pair was made here".into(), made);
            let used = ("The SRQ is used here".into(), stack);
            self.report(Check::LastWqe, what, vec![here(&ended), used, made]);
        }
    }

    /// The program polled a completion.
    pub fn polled(&mut self, completion: &Completion) {
        let Completion { number, wr_id, is_receive, status, .. } = *completion;
        let has_failed = status != 0;
        let Some(&address) = self.numbers.get(&number) else { return };
        let Some(queues) = self.queues.get_mut(&address) else { return };
        let Some(qp) = queues.qp else { return };
        if is_receive {
            let queue = if qp.srq == 0 { Some(queues) } else { self.queues.get_mut(&qp.srq) };
            let Some(queue) = queue else { return };
            if let Some(n) = queue.receives.iter().position(|p| p.work.wr_id == wr_id) {
                let posted = queue.receives.remove(n);
                if qp.srq == 0 {
                    self.expects_less(qp.recv_cq, 1);
                }
                if let Some(posted) = posted.filter(|_| has_failed) {
                    self.check_failure(address, completion, &posted);
                }
            }
            return;
        }
        let is_it = |p: &Posted| p.work.wr_id == wr_id && (p.work.is_signaled || has_failed);
        let Some(n) = queues.sends.iter().position(is_it) else { return };
        let done: Few<_> = queues.sends.drain(..=n).collect();
        let signaled = done.iter().filter(|posted| posted.work.is_signaled).count();
        self.expects_less(qp.send_cq, signaled);
        if !has_failed {
            for posted in done {
                self.check_source(address, &posted);
            }
        } else if let Some(posted) = done.last() {
            self.check_failure(address, completion, posted);
        }
    }

    /// The bytes of a source are those that were posted.
    fn check_source(&mut self, qp: usize, posted: &Posted) {
        let Posted { work, stack, checksum: Some(before) } = posted else { return };
        // A region that is gone meanwhile was reported.
        let Some(ranges) = self.ranges(&work.pieces) else { return };
        let now = checksum(&ranges, self.read);
        if now == Some(*before) {
            return;
        }
        let did = if now.is_some() { "changed" } else { "unmapped" };
        let number = self.queues.get(&qp).and_then(|queues| queues.qp).map_or(0, |qp| qp.number);
        let what = format!(
            "the buffer of a {} (wr_id {:#x}) of queue pair {number:#x} was {did} between its posting and its completion",
            work.name, work.wr_id
        );
        let posted = ("The work was posted here".into(), stack.clone());
        let polled = ("Its completion was polled here".into(), Stack::here());
        self.report(Check::BufferChanged, what, vec![posted, polled]);
    }
}
