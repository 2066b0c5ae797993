//! Everything that the program has made or posted, and that has not ended.

use std::collections::{HashMap, VecDeque};

use crate::catalogue::Check;
use crate::facts::{Completion, Kind, Piece, QueuePair, Region, Work};
use crate::memory::checksum;
use crate::report::{Finding, Reporter};
use crate::stack::Stack;

/// Bytes in front of a datagram for its GRH.
const GRH: u64 = 40;

/// Leaked objects that are reported one by one.
const MOST_LEAKS: usize = 20;

/// A work request without a completion.
#[derive(Debug)]
struct Posted {
    work: Work,
    stack: Stack,
    /// The checksum of its elements, if nothing may change them.
    checksum: Option<u32>,
}

#[derive(Debug)]
struct Object {
    kind: Kind,
    stack: Stack,
}

/// The queues of a queue pair, or of an SRQ.
#[derive(Debug, Default)]
struct Queues {
    qp: Option<QueuePair>,
    sends: VecDeque<Posted>,
    receives: VecDeque<Posted>,
    /// Its completions do not say that they are its own, so nothing is known of what is outstanding.
    is_unwatched: bool,
    /// The send queue is full for good, and this was reported.
    is_stuck: bool,
}

/// See the [crate].
#[derive(Debug)]
pub struct Ledger {
    reporter: Reporter,
    /// By the address that the program knows.
    objects: HashMap<usize, Object>,
    regions: HashMap<usize, Region>,
    queues: HashMap<usize, Queues>,
    numbers: HashMap<u32, usize>,
    uses_cm: bool,
}

impl Ledger {
    pub(crate) fn new(reporter: Reporter) -> Self {
        Self {
            reporter,
            objects: HashMap::new(),
            regions: HashMap::new(),
            queues: HashMap::new(),
            numbers: HashMap::new(),
            uses_cm: false,
        }
    }

    pub(crate) fn has_findings(&self) -> bool {
        self.reporter.findings > 0
    }

    /// The program made an object.
    pub fn made(&mut self, address: usize, kind: Kind) {
        self.uses_cm |= kind == Kind::CmId;
        self.objects.insert(address, Object { kind, stack: Stack::here() });
    }

    /// Facts about a queue pair that was made.
    pub fn made_qp(&mut self, address: usize, qp: QueuePair) {
        self.numbers.insert(qp.number, address);
        self.queues.entry(address).or_default().qp = Some(qp);
    }

    /// An SRQ was made whose completions do not say that they are its own: one of XRC, or one that matches tags.
    pub fn made_unwatched_srq(&mut self, address: usize) {
        self.queues.entry(address).or_default().is_unwatched = true;
    }

    /// Facts about a memory region that was made, or changed.
    pub fn made_region(&mut self, address: usize, region: Region) {
        self.regions.insert(address, region);
    }

    /// The program ends an object. `works` tells of the address of a queue pair whether it still works on what was posted.
    pub fn ends(&mut self, address: usize, works: impl Fn(usize) -> bool) {
        let kind = self.objects.get(&address).map(|object| object.kind);
        match kind {
            Some(Kind::Qp) if works(address) => self.check_qp(address),
            Some(Kind::Mr) => self.check_region(address, works),
            Some(Kind::Ah) => self.check_ah(address, works),
            _ => {}
        }
    }

    /// It has ended.
    pub fn ended(&mut self, address: usize) {
        self.objects.remove(&address);
        self.regions.remove(&address);
        if let Some(queues) = self.queues.remove(&address)
            && let Some(qp) = queues.qp
            && self.numbers.get(&qp.number) == Some(&address)
        {
            self.numbers.remove(&qp.number);
        }
    }

    /// The queue pair forgets what was posted to it.
    pub fn reset(&mut self, address: usize) {
        if let Some(queues) = self.queues.get_mut(&address) {
            queues.sends.clear();
            queues.receives.clear();
        }
    }

    /// The program posts sends; `post` posts them and tells how many were taken, and whether the queue has no room for the next.
    pub fn post_sends(
        &mut self,
        qp: usize,
        works: Vec<Work>,
        post: impl FnOnce() -> (usize, bool),
    ) {
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
        let posted: Vec<_> = works
            .into_iter()
            .map(|work| {
                let checksum = if work.is_source && !work.is_inline {
                    self.ranges(&work.pieces).and_then(|ranges| checksum(&ranges))
                } else {
                    None
                };
                let is_signaled = work.is_signaled || facts.signals_all;
                Posted { work: Work { is_signaled, ..work }, stack: stack.clone(), checksum }
            })
            .collect();
        // A completion may be polled before this returns; it finds the ledger locked.
        let (taken, is_full) = post();
        let queues = self.queues.entry(qp).or_default();
        queues.sends.extend(posted.into_iter().take(taken.min(offered)));
        let fits = offered <= facts.max_sends as usize;
        if is_full && fits && !queues.is_stuck {
            self.check_full(qp, &stack);
        }
    }

    /// The program gives inline data to a request of `ibv_wr_start`.
    pub fn sets_inline(&mut self, qp: usize, wr_id: u64, len: u64) {
        self.check_inline(qp, "request", wr_id, len, &Stack::here());
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
    pub fn post_receives(&mut self, queue: usize, works: Vec<Work>, post: impl FnOnce() -> usize) {
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
            .collect::<Vec<_>>();
        let taken = post();
        let queues = self.queues.entry(queue).or_default();
        if !queues.is_unwatched {
            queues.receives.extend(posted.into_iter().take(taken));
        }
    }

    /// The program polled a completion.
    pub fn polled(&mut self, completion: &Completion) {
        let Completion { number, wr_id, is_receive, has_failed } = *completion;
        let Some(&address) = self.numbers.get(&number) else { return };
        let Some(queues) = self.queues.get_mut(&address) else { return };
        let srq = queues.qp.map_or(0, |qp| qp.srq);
        if is_receive {
            let queue = if srq == 0 { Some(queues) } else { self.queues.get_mut(&srq) };
            let Some(queue) = queue else { return };
            if let Some(n) = queue.receives.iter().position(|p| p.work.wr_id == wr_id) {
                queue.receives.remove(n);
            }
            return;
        }
        let is_it = |p: &Posted| p.work.wr_id == wr_id && (p.work.is_signaled || has_failed);
        let Some(n) = queues.sends.iter().position(is_it) else { return };
        let done: Vec<_> = queues.sends.drain(..=n).collect();
        if !has_failed {
            for posted in done {
                self.check_source(address, &posted);
            }
        }
    }

    /// The program ends.
    pub(crate) fn end(&mut self) {
        let mut left: Vec<_> = self.objects.drain().collect();
        left.sort_by_key(|(address, _)| *address);
        let leaks = left.into_iter().filter_map(|(address, object)| {
            // The connection manager has protection domains of its own.
            let is_ours = !(self.uses_cm && object.kind == Kind::Pd);
            Some((address, object.kind.leak().filter(|_| is_ours)?, object.stack))
        });
        for (address, name, stack) in leaks.take(MOST_LEAKS).collect::<Vec<_>>() {
            let what = format!("the {name} at {address:#x} was not ended when the program did");
            self.report(Check::Leak, what, vec![("It was made here".into(), stack)]);
        }
    }

    fn check_qp(&mut self, address: usize) {
        let Some(queues) = self.queues.get(&address) else { return };
        let (Some(qp), Some(oldest)) = (queues.qp, queues.sends.front()) else { return };
        let (n, Work { name, wr_id, .. }) = (queues.sends.len(), &oldest.work);
        let what = format!(
            "queue pair {:#x} is destroyed, and {n} of its sends have no completion; the oldest is a {name} (wr_id {wr_id:#x})",
            qp.number
        );
        let posted = ("The oldest was posted here".into(), oldest.stack.clone());
        let made = self.origin(address, "The queue pair was made here");
        self.report(Check::QpDestroyed, what, vec![here(&Stack::here()), posted, made]);
    }

    fn check_region(&mut self, address: usize, works: impl Fn(usize) -> bool) {
        let Some(&Region { addr, len, lkey, .. }) = self.regions.get(&address) else { return };
        let uses = |posted: &&Posted| {
            let pieces = &posted.work.pieces;
            !posted.work.is_inline && pieces.iter().any(|p| p.lkey == lkey && p.len > 0)
        };
        let Some((_, number, posted)) = self.outstanding(&works, uses) else { return };
        let what = format!(
            "the memory region at {addr:#x} ({len} bytes, lkey {lkey:#x}) is deregistered while a {} (wr_id {:#x}) of queue pair {number:#x} uses it",
            posted.work.name, posted.work.wr_id
        );
        let work = ("The work was posted here".into(), posted.stack.clone());
        let made = self.origin(address, "The region was registered here");
        self.report(Check::MrDeregistered, what, vec![here(&Stack::here()), work, made]);
    }

    fn check_ah(&mut self, address: usize, works: impl Fn(usize) -> bool) {
        let uses = |posted: &&Posted| posted.work.ah == address;
        let Some((_, number, posted)) = self.outstanding(&works, uses) else { return };
        let what = format!(
            "the address handle at {address:#x} is destroyed while a {} (wr_id {:#x}) of queue pair {number:#x} has no completion",
            posted.work.name, posted.work.wr_id
        );
        let work = ("The work was posted here".into(), posted.stack.clone());
        let made = self.origin(address, "The address handle was made here");
        self.report(Check::AhDestroyed, what, vec![here(&Stack::here()), work, made]);
    }

    /// A work request that a queue pair works on, with the queue pair's address and number.
    fn outstanding(
        &self,
        works: impl Fn(usize) -> bool,
        fits: impl Fn(&&Posted) -> bool,
    ) -> Option<(usize, u32, &Posted)> {
        self.queues.iter().find_map(|(&address, queues)| {
            let qp = queues.qp?;
            let srq = self.queues.get(&qp.srq).into_iter().flat_map(|srq| &srq.receives);
            let all = queues.sends.iter().chain(&queues.receives).chain(srq);
            let found = all.into_iter().find(&fits)?;
            works(address).then_some((address, qp.number, found))
        })
    }

    /// The bytes of a source are those that were posted.
    fn check_source(&mut self, qp: usize, posted: &Posted) {
        let Posted { work, stack, checksum: Some(before) } = posted else { return };
        // A region that is gone meanwhile was reported.
        let Some(ranges) = self.ranges(&work.pieces) else { return };
        let now = checksum(&ranges);
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

    /// Where elements lie in memory; `None` if one of them is not within its region.
    fn ranges(&self, pieces: &[Piece]) -> Option<Vec<(u64, u32)>> {
        let place = |piece: &Piece| {
            let region = self.regions.values().find(|region| region.lkey == piece.lkey)?;
            let offset = piece.addr.checked_sub(region.iova)?;
            let fits = offset.checked_add(piece.len.into())? <= region.len;
            fits.then(|| (region.addr.wrapping_add(offset), piece.len))
        };
        pieces.iter().filter(|piece| piece.len > 0).map(place).collect()
    }

    fn origin(&self, address: usize, title: &str) -> (String, Stack) {
        let stack = self.objects.get(&address).map(|object| object.stack.clone());
        (title.to_owned(), stack.unwrap_or_else(Stack::here))
    }

    fn report(&mut self, check: Check, what: String, stacks: Vec<(String, Stack)>) {
        self.reporter.report(&Finding { check, what, stacks });
    }
}

fn here(stack: &Stack) -> (String, Stack) {
    ("It happened here".to_owned(), stack.clone())
}
