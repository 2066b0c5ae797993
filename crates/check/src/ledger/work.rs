//! Work that the program posts, and the completions that it polls.

use crate::catalogue::Check;
use crate::facts::{Completion, Elements, Kind, Piece, Pieces, QueuePair, Work, Works};
use crate::map::Map;
use crate::stack::Stack;

use super::outstanding::{Posted, now};
use super::{Abandoned, Ledger, Queues, here};

/// Bytes in front of a datagram for its GRH.
const GRH: u64 = 40;

/// The bytes of the elements of a request.
fn bytes(work: &Work) -> u64 {
    work.pieces.iter().map(|piece| u64::from(piece.len)).sum()
}

/// Whether the device may take the data of a request before it has done those in front. A fence comes too late for data that is copied
/// when it is posted.
fn may_overtake(work: &Work) -> bool {
    work.elements == Elements::Read && (!work.is_fenced || work.is_inline)
}

impl Ledger {
    /// The program posts sends; `post` posts them and tells how many were taken, and whether the queue has no room for the next.
    pub fn post_sends(
        &mut self,
        qp: usize,
        works: impl Iterator<Item = Work>,
        post: impl FnOnce() -> (usize, bool),
    ) {
        let stack = Stack::here();
        let Some((mut queues, facts)) = queues_of_qp(&mut self.queues, qp) else {
            self.check_ahs(works.map(|work| work.ah));
            post();
            return;
        };
        let (before, signaled, at) = (queues.sends.len(), queues.sends.signaled(), now());
        let mut is_suspect = false;
        for mut work in works {
            work.is_signaled |= facts.signals_all;
            is_suspect |= work.ah != 0 && !self.objects.contains_key(&work.ah)
                || work.is_inline && bytes(&work) > facts.max_inline.into()
                || queues.sends.is_any_filled() && may_overtake(&work);
            let is_kept = work.elements == Elements::Read && !work.is_inline;
            let is_filled = || {
                queues.sends.is_any_filled()
                    && queues.sends.iter().any(|before| self.regions.fills(&before.work, &work))
            };
            let checksum = if is_kept && !queues.is_unwatched && !is_filled() {
                self.regions.checksum(&work.pieces, &mut self.memory).flatten()
            } else {
                None
            };
            // Its data comes when the requests before it are done.
            if work.elements == Elements::Written {
                queues.sends.forget_checksums(|before| self.regions.fills(&work, &before.work));
            }
            queues.sends.push(Posted { work, stack, checksum, at }, &mut self.users);
        }
        let offered = queues.sends.len() - before;
        if is_suspect {
            self.check_posts(qp, before, stack);
            queues = self.queues.entry(qp).or_default();
        }
        // A completion may be polled before this returns; it finds the ledger locked.
        let (taken, is_full) = post();
        if queues.is_unwatched {
            queues.sends.truncate(before, &mut self.users);
            return;
        }
        queues.sends.truncate(before + taken.min(offered), &mut self.users);
        let signaled = queues.sends.signaled() - signaled;
        let (len, room) = (queues.sends.len(), facts.max_sends as usize);
        // More than the queue holds: another thread has polled the oldest, and is about to tell of it.
        queues.sends.forget_oldest_checksums(len.saturating_sub(room));
        // A batch that does not fit is refused as a whole, and leaves room.
        if is_full && len == room && !queues.is_stuck && queues.sends.signaled() == 0 {
            self.is_stuck(qp, stack);
        }
        self.expects(facts.send_cq, signaled, (len <= room).then_some(stack));
    }

    /// Looks closely at the sends of a call, which stand in the queue from `first` on.
    #[cold]
    fn check_posts(&mut self, qp: usize, first: usize, stack: Stack) {
        let Some(queues) = self.queues.get(&qp) else { return };
        let works: Vec<_> = queues.sends.iter().skip(first).map(|p| p.work.clone()).collect();
        self.check_ahs(works.iter().map(|work| work.ah));
        for work in works.iter().filter(|work| work.is_inline) {
            self.check_inline(qp, work, stack);
        }
        for (n, work) in works.iter().enumerate() {
            self.check_order(qp, work, first + n, &[], stack);
        }
    }

    /// Sends use these address handles; 0 is none. The first that has ended is reported.
    fn check_ahs(&mut self, ahs: impl Iterator<Item = usize>) {
        for ah in ahs.filter(|ah| *ah != 0) {
            if !self.objects.contains_key(&ah) && self.uses_dead(ah) {
                break;
            }
        }
    }

    /// The source of a request is not the destination of a READ or an atomic before it, unless the request waits for that. Before it
    /// are the first `n` in the queue, and those of `built`.
    fn check_order(&mut self, qp: usize, work: &Work, n: usize, built: &[Work], stack: Stack) {
        if !may_overtake(work) {
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
        let fills = |before: &Work| {
            before.elements == Elements::Written
                && work.pieces.iter().any(|a| before.pieces.iter().any(|b| overlaps(a, b)))
        };
        let posted = queues.sends.iter().take(n).map(|posted| (&posted.work, posted.stack));
        let built = built.iter().map(|work| (work, stack));
        let mut found = None;
        for (before, stack) in posted.chain(built) {
            // A request behind a fence begins behind it. Inline data is copied before.
            if before.is_fenced && !work.is_inline {
                found = None;
            }
            if found.is_none() && fills(before) {
                found = Some((before, stack));
            }
        }
        let Some((before, before_stack)) = found else { return };
        let (name, wr_id) = (before.name, before.wr_id);
        let what = format!(
            "a {} (wr_id {:#x}) of queue pair {:#08x} takes its data from where an unfinished {name} (wr_id {wr_id:#x}) puts its own, {}",
            work.name,
            work.wr_id,
            queues.qp.map_or(0, |qp| qp.number),
            if work.is_inline { "and is inline" } else { "and has no fence" }
        );
        let before = (format!("The {name} was posted here"), before_stack);
        self.report(Check::NoFence, what, vec![here(stack), before]);
    }

    /// More completions can come to a completion queue. Without a stack it is not known how many of those before were polled.
    #[inline]
    fn expects(&mut self, address: usize, n: usize, stack: Option<Stack>) {
        let Some(cq) = self.cqs.get_mut(&address) else { return };
        cq.expected += n;
        let Some(capacity) = cq.capacity.filter(|_| !cq.is_too_small) else { return };
        if cq.expected > capacity as usize
            && let Some(stack) = stack
        {
            self.is_too_small(address, capacity, stack);
        }
    }

    #[cold]
    fn is_too_small(&mut self, address: usize, capacity: u32, stack: Stack) {
        let Some(cq) = self.cqs.get_mut(&address) else { return };
        cq.is_too_small = true;
        let expected = cq.expected;
        let what = format!(
            "the {} holds {capacity} completions, and {expected} can come before the program polls",
            self.place(Kind::Cq, address)
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
        self.check_inline(qp, &work, stack);
        self.check_order(qp, &work, usize::MAX, &built, stack);
    }

    fn check_inline(&mut self, address: usize, work: &Work, stack: Stack) {
        let (Work { name, wr_id, .. }, len) = (work, bytes(work));
        let qp = self.queues.get(&address).and_then(|queues| queues.qp);
        let Some(qp) = qp.filter(|qp| len > qp.max_inline.into()) else { return };
        let what = format!(
            "an inline {name} (wr_id {wr_id:#x}) on queue pair {:#08x} has {len} bytes, and max_inline_data is {}",
            qp.number, qp.max_inline
        );
        let stacks = vec![here(stack), self.origin(address, "The queue pair was made here")];
        self.report(Check::InlineTooLong, what, stacks);
    }

    /// The send queue is full, and no request in it makes a completion: nothing frees it.
    #[cold]
    fn is_stuck(&mut self, address: usize, stack: Stack) {
        let Some(queues) = self.queues.get_mut(&address) else { return };
        let (Some(qp), Some(oldest)) = (queues.qp, queues.sends.oldest()) else { return };
        queues.is_stuck = true;
        let (n, Work { name, wr_id, .. }) = (queues.sends.len(), &oldest.work);
        let what = format!(
            "the send queue of queue pair {:#08x} is full for good: none of its {n} requests since the {name} with wr_id {wr_id:#x} is signaled",
            qp.number
        );
        let posted = ("The oldest was posted here".into(), oldest.stack);
        let made = self.origin(address, "The queue pair was made here");
        self.report(Check::SendQueueUnsignaled, what, vec![here(stack), posted, made]);
    }

    /// The program posts receives to a queue pair or an SRQ; `post` posts them and tells how many were taken.
    pub fn post_receives(
        &mut self,
        queue: usize,
        works: impl Iterator<Item = Work>,
        post: impl FnOnce() -> usize,
    ) {
        let stack = Stack::here();
        // An SRQ has none until its first receive. Seldom, so it is not looked for twice.
        let mut queues = match self.queues.get_mut(&queue) {
            Some(queues) => queues,
            None => self.queues.entry(queue).or_default(),
        };
        let (is_datagram, recv_cq) =
            queues.qp.as_ref().map_or((false, None), |qp| (qp.is_datagram, Some(qp.recv_cq)));
        let (before, at) = (queues.receives.len(), now());
        let mut too_small = None;
        for work in works {
            if is_datagram && bytes(&work) < GRH {
                too_small.get_or_insert_with(Vec::new).push((work.wr_id, bytes(&work)));
            }
            queues.receives.push(Posted { work, stack, checksum: None, at }, &mut self.users);
        }
        let offered = queues.receives.len() - before;
        for (wr_id, room) in too_small.into_iter().flatten() {
            self.has_no_room_for_grh(queue, wr_id, room, stack);
            queues = self.queues.entry(queue).or_default();
        }
        let taken = post().min(offered);
        let taken = if queues.is_unwatched { 0 } else { taken };
        queues.receives.truncate(before + taken, &mut self.users);
        let abandoned = queues.abandoned_by.take();
        if let Some(recv_cq) = recv_cq {
            self.expects(recv_cq, taken, Some(stack));
        }
        if let Some(Abandoned { number, made, ended }) = abandoned {
            let what = format!(
                "queue pair {number:#08x} was destroyed before IBV_EVENT_QP_LAST_WQE_REACHED, and its SRQ is used on: a receive may be lost"
            );
            let made = ("The queue pair was made here".into(), made);
            let used = ("The SRQ is used here".into(), stack);
            self.report(Check::LastWqe, what, vec![here(ended), used, made]);
        }
    }

    fn has_no_room_for_grh(&mut self, queue: usize, wr_id: u64, room: u64, stack: Stack) {
        let number = self.queues.get(&queue).and_then(|queues| queues.qp).map_or(0, |qp| qp.number);
        let what = format!(
            "a receive (wr_id {wr_id:#x}) on UD queue pair {number:#08x} has room for {room} bytes, and the first {GRH} are the GRH's"
        );
        let stacks = vec![here(stack), self.origin(queue, "The queue pair was made here")];
        self.report(Check::UdReceiveRoom, what, stacks);
    }

    /// The program polled a completion.
    pub fn polled(&mut self, completion: &Completion) {
        let Completion { number, wr_id, is_receive, status, send, .. } = *completion;
        let has_failed = status != 0;
        let Some(&address) = self.numbers.get(&number) else { return };
        let Some((queues, facts)) = queues_of_qp(&mut self.queues, address) else { return };
        let QueuePair { srq, send_cq, recv_cq, .. } = facts;
        if is_receive {
            let queue = if srq == 0 { Some(queues) } else { self.queues.get_mut(&srq) };
            let Some(receives) = queue.map(|queue| &mut queue.receives) else { return };
            let Some(n) = receives.position(|posted| posted.work.wr_id == wr_id) else { return };
            // A queue that may lose completions has lost those of the receives before, which come in order.
            let may_lose = self.cqs.get(&recv_cq).is_some_and(|cq| cq.capacity.is_none());
            let lost = if may_lose && srq == 0 { n } else { 0 };
            for _ in 0..lost {
                receives.take(0, &mut self.users);
            }
            let Some(posted) = receives.take(n - lost, &mut self.users) else { return };
            if srq == 0 {
                self.expects_less(recv_cq, lost + 1);
            }
            if has_failed {
                self.check_failure(address, completion, &posted);
            }
            return;
        }
        let is_it = |p: &Posted| p.work.wr_id == wr_id && (p.work.is_signaled || has_failed);
        // Another thread has polled a later one, and was faster to tell: that has spoken for this one.
        if send.is_some_and(|posted| queues.sends.has_taken(posted)) {
            return;
        }
        // Programs give several requests one number.
        let place = send.and_then(|posted| queues.sends.place_of(posted));
        let place = place.filter(|n| queues.sends.iter().nth(*n).is_some_and(is_it));
        let Some(n) = place.or_else(|| queues.sends.position(is_it)) else { return };
        let signaled = queues.sends.signaled();
        let (mut last, mut changed) = (None, Vec::new());
        for _ in 0..=n {
            let Some(posted) = queues.sends.take(0, &mut self.users) else { break };
            if has_failed {
                last = Some(posted);
            } else if let Some(before) = posted.checksum
                // A region that is gone meanwhile was reported.
                && let Some(now) = self.regions.checksum(&posted.work.pieces, &mut self.memory)
                && now != Some(before)
            {
                changed.push((posted, now));
            }
        }
        let signaled = signaled - queues.sends.signaled();
        self.expects_less(send_cq, signaled);
        for (posted, now) in changed {
            self.has_changed(address, &posted, now);
        }
        if let Some(posted) = last {
            self.check_failure(address, completion, &posted);
        }
    }

    /// The bytes of a source are not those that were posted; `now` is `None` if some are not mapped any more.
    #[cold]
    fn has_changed(&mut self, qp: usize, posted: &Posted, now: Option<u32>) {
        let Posted { work, stack, .. } = posted;
        let did = if now.is_some() { "changed" } else { "unmapped" };
        let number = self.queues.get(&qp).and_then(|queues| queues.qp).map_or(0, |qp| qp.number);
        let what = format!(
            "the buffer of a {} (wr_id {:#x}) of queue pair {number:#08x} was {did} between its posting and its completion",
            work.name, work.wr_id
        );
        let posted = ("The work was posted here".into(), *stack);
        let polled = ("Its completion was polled here".into(), Stack::here());
        self.report(Check::BufferChanged, what, vec![posted, polled]);
    }
}

/// The queues of a queue pair, and its facts.
fn queues_of_qp(all: &mut Map<usize, Queues>, address: usize) -> Option<(&mut Queues, QueuePair)> {
    let queues = all.get_mut(&address)?;
    let facts = queues.qp?;
    Some((queues, facts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Kind;
    use crate::report::Reporter;

    fn ledger(suppressions: &str) -> Ledger {
        Ledger::new(Reporter::new(suppressions, None), |_, _| false, |_, _| vec![])
    }

    /// A signaled SEND of nothing.
    fn send() -> Work {
        Work {
            name: "SEND",
            wr_id: 3,
            is_signaled: true,
            is_inline: false,
            elements: Elements::Read,
            is_fenced: false,
            ah: 0,
            pieces: Pieces::new(),
        }
    }

    /// A ledger that reads the memory of the test.
    fn reading_ledger() -> Ledger {
        let read: crate::memory::Read = |address, into| {
            // SAFETY: the test reads its own vector, which lives.
            let from = unsafe { std::slice::from_raw_parts(address as *const u8, into.len()) };
            into.copy_from_slice(from);
            true
        };
        Ledger::new(Reporter::new("", None), read, |_, _| vec![])
    }

    const QP: usize = 1;
    const CQ: usize = 2;

    fn make_qp(ledger: &mut Ledger) {
        let qp = QueuePair {
            number: 17,
            is_datagram: false,
            is_uc: false,
            is_reliable: true,
            signals_all: false,
            max_inline: 64,
            max_sends: 16,
            srq: 0,
            pd: 0,
            send_cq: CQ,
            recv_cq: CQ,
        };
        ledger.made(CQ, Kind::Cq, 0);
        ledger.sized_cq(CQ, Some(2));
        ledger.made(QP, Kind::Qp, 0);
        ledger.made_qp(QP, qp);
    }

    #[test]
    fn an_address_handle_that_has_ended_is_reported_on_an_unknown_queue_pair() {
        let mut ledger = ledger("");
        let ah = 2;
        ledger.made(ah, Kind::Ah, 0);
        ledger.ended(ah);
        let mut is_posted = false;
        ledger.post_sends(QP, [Work { ah, ..send() }].into_iter(), || {
            is_posted = true;
            (1, false)
        });
        assert!(is_posted && ledger.reporter.findings == 1);
    }

    #[test]
    fn a_queue_that_has_overrun_is_reported_behind_one_that_might() {
        for (suppressions, expected) in [("", 2), ("cq-too-small:tests", 1)] {
            let mut ledger = ledger(suppressions);
            make_qp(&mut ledger);
            ledger.post_sends(QP, (0..3).map(|_| send()), || (3, false));
            ledger.overrun(CQ);
            ledger.overrun(CQ);
            assert_eq!(ledger.reporter.findings, expected, "{suppressions}");
        }
    }

    #[test]
    fn a_queue_pair_has_the_number_that_the_log_prints() {
        let file = std::env::temp_dir().join(format!("anyverbs-number-{}", std::process::id()));
        let reporter = Reporter::new("", Some(file.clone()));
        let mut ledger = Ledger::new(reporter, |_, _| false, |_, _| vec![]);
        make_qp(&mut ledger);
        let inline = Work { is_inline: true, pieces: memory(0, 5), ..send() };
        let works = [inline.clone(), Work { pieces: [inline.pieces[0]; 2].into(), ..inline }];
        ledger.post_sends(QP, works.into_iter(), || (2, false));
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        assert!(text.contains("on queue pair 0x000011 has 128 bytes"), "{text}");
    }

    fn memory(at: u64, lkey: u32) -> Pieces {
        Pieces::from_iter([Piece { addr: at, len: 64, lkey }])
    }

    /// The device puts the data of a READ there, and the program does not touch it.
    #[test]
    fn a_buffer_that_a_read_of_the_queue_fills_is_not_a_changed_one() {
        let mut bytes = vec![0_u8; 4096];
        let base = bytes.as_ptr() as u64;
        let read = |at| Work {
            name: "READ",
            elements: Elements::Written,
            is_signaled: false,
            pieces: memory(base + at, 6),
            ..send()
        };
        let fenced = || Work { is_fenced: true, pieces: memory(base, 5), ..send() };
        let plain = || Work { is_fenced: false, ..fenced() };
        for (works, expected) in [
            (vec![read(32), fenced()], 0),
            (vec![plain(), read(32)], 0),
            (vec![read(512), fenced()], 1),
            (vec![plain(), read(512)], 1),
            (vec![fenced()], 1),
        ] {
            let mut ledger = reading_ledger();
            make_qp(&mut ledger);
            let [addr, len] = [base, 4096];
            for (address, lkey) in [(5, 5), (6, 6)] {
                let region =
                    crate::facts::Region { addr, iova: addr, len, lkey, rkey: 0, pd: 0, access: 0 };
                ledger.made_region(address, region);
            }
            bytes[40] = 0;
            ledger.post_sends(QP, works.iter().cloned(), || (works.len(), false));
            bytes[40] = 1;
            let completion = Completion {
                number: 17,
                wr_id: 3,
                is_receive: false,
                status: 0,
                cause: 0,
                send: None,
            };
            ledger.polled(&completion);
            assert_eq!(ledger.reporter.findings, expected, "{works:?}");
        }
    }

    /// The room that the poll has made is seen by a thread that posts, before the ledger learns of the poll.
    #[test]
    fn a_thread_that_posts_may_be_faster_than_the_one_that_polls() {
        for (posts, expected) in [(17, 0), (16, 1)] {
            let mut bytes = vec![0; 64];
            let addr = bytes.as_ptr() as u64;
            let mut ledger = reading_ledger();
            make_qp(&mut ledger);
            ledger.sized_cq(CQ, Some(16));
            let region = crate::facts::Region {
                addr,
                iova: addr,
                len: 64,
                lkey: 5,
                rkey: 0,
                pd: 0,
                access: 0,
            };
            ledger.made_region(5, region);
            for wr_id in 0..posts {
                let pieces = Pieces::from_iter([Piece { addr, len: 64, lkey: 5 }]);
                let work = Work { wr_id, pieces, ..send() };
                ledger.post_sends(QP, std::iter::once(work), || (1, false));
            }
            bytes[0] = 1;
            let completion = Completion {
                number: 17,
                wr_id: 0,
                is_receive: false,
                status: 0,
                cause: 0,
                send: Some(1),
            };
            ledger.polled(&completion);
            assert_eq!(ledger.reporter.findings, expected, "{posts}");
        }
    }

    #[test]
    fn a_receive_of_an_srq_goes_with_the_completions_of_its_queue_pair() {
        let mut ledger = ledger("");
        make_qp(&mut ledger);
        let srq = 7;
        ledger.queues.get_mut(&QP).unwrap().qp.as_mut().unwrap().srq = srq;
        ledger.post_receives(srq, (0..2).map(|wr_id| Work { wr_id, ..send() }), || 2);
        ledger.takes_along(QP, |cq| {
            assert_eq!(cq, CQ);
            let received = |number| Completion {
                number,
                wr_id: 1,
                is_receive: true,
                status: 0,
                cause: 0,
                send: None,
            };
            vec![received(17), received(18)]
        });
        ledger.reset(QP);
        let left: Vec<_> = ledger.queues[&srq].receives.iter().map(|p| p.work.wr_id).collect();
        assert_eq!(left, [0]);
    }

    #[test]
    fn a_completion_is_of_the_request_at_its_place() {
        let mut ledger = ledger("");
        make_qp(&mut ledger);
        ledger.sized_cq(CQ, Some(16));
        // All have one number. A reset forgets the first, and the device counts on.
        ledger.post_sends(QP, std::iter::once(send()), || (1, false));
        ledger.reset(QP);
        ledger.post_sends(QP, (0..4).map(|_| send()), || (4, false));
        // Another thread tells late of the second, of which the third has spoken.
        for (posted, left) in [(4, 1), (3, 1), (5, 0)] {
            let completion = Completion {
                number: 17,
                wr_id: send().wr_id,
                is_receive: false,
                status: 0,
                cause: 0,
                send: Some(posted),
            };
            ledger.polled(&completion);
            assert_eq!(ledger.queues[&QP].sends.len(), left);
        }
    }

    /// It begins behind the fence, which begins when the READ is complete.
    #[test]
    fn a_request_behind_a_fence_takes_what_a_read_before_it_has_brought() {
        let memory = |at| memory(at, 5);
        let read = |at| Work {
            name: "READ",
            elements: Elements::Written,
            is_signaled: false,
            pieces: memory(at),
            ..send()
        };
        let write =
            |at, is_fenced| Work { is_fenced, is_signaled: false, pieces: memory(at), ..send() };
        let inline = |at| Work { is_inline: true, ..write(at, false) };
        for (works, expected) in [
            (vec![read(0), write(512, true), write(0, false)], 0),
            (vec![read(0), write(512, false), write(0, false)], 1),
            (vec![read(0), write(512, true), read(0), write(0, false)], 1),
            (vec![read(0), write(512, true), inline(0)], 1),
            (vec![write(512, true), read(0), write(0, false)], 1),
        ] {
            for is_list in [true, false] {
                let mut ledger = ledger("");
                make_qp(&mut ledger);
                let n = if is_list { works.len() } else { 1 };
                for works in works.chunks(n) {
                    ledger.post_sends(QP, works.iter().cloned(), || (n, false));
                }
                assert_eq!(ledger.reporter.findings, expected, "{works:?}");
            }
        }
    }
}
