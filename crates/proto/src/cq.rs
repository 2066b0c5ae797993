//! Completion queue.

use anyverbs_queue_memory::{OutOfMemory, QueueMemory};

use crate::ring::Ring;
use crate::types::Qpn;
use crate::wc::{Wc, WcDetail, WcEx};

/// The completions that a program wants to be told of (`ibv_req_notify_cq`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Armed {
    #[default]
    No,
    Solicited,
    Any,
}

/// The device's task after a completion was added.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pushed {
    /// Tell the completion channel.
    pub notify: bool,
    /// Call [`Cq::expire`] when the period of its [`Moderation`] is over.
    pub wait: bool,
    /// There was no room: the queue is in error from now on (IBA 11.6.3.1). Raise `CQ_ERR`.
    pub overrun: bool,
    /// The completion is lost, as all are after an overrun. Move the queue's queue pairs to the error state.
    pub lost: bool,
    /// It took the place of the oldest one, which is lost: the queue ignores overrun.
    pub overwrote: bool,
}

/// Fewer notifications (`ibv_modify_cq`): one for `count` completions, or one `period` microseconds after the first of
/// them. The earlier of the two counts. 0 means no limit of that kind. If both are 0, the queue is not moderated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Moderation {
    /// Completions.
    pub count: u16,
    /// Microseconds.
    pub period: u16,
}

impl Moderation {
    fn is_off(self) -> bool {
        self == Self::default()
    }
}

/// Optional features of a completion queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CqOptions {
    /// Keeps the [`WcDetail`] of each completion.
    pub details: bool,
    /// A completion that finds no room takes the place of the oldest one.
    pub ignore_overrun: bool,
}

/// A completion queue. Its memory is allocated at creation and touched as it fills.
///
/// A slot of a send queue is free again when the completion that covers it is *polled*. The poller hands
/// [`Wc::sq_count`] back to the queue pair (`SqCredit`).
#[derive(Debug)]
pub struct Cq {
    wcs: Ring<Wc>,
    /// One for each completion, where they are kept.
    details: Option<Ring<WcDetail>>,
    armed: Armed,
    overrun: bool,
    ignore_overrun: bool,
    moderation: Moderation,
    /// Completions since the queue was armed that count for the channel.
    gathered: u32,
}

impl Cq {
    /// A queue for `cqe` completions.
    #[must_use]
    pub fn new(cqe: u32) -> Self {
        Self::in_memory(cqe, CqOptions::default(), &QueueMemory::HEAP).expect("the heap has room")
    }

    /// As [`new`](Self::new), with options, and in a program's own memory.
    pub fn in_memory(
        cqe: u32,
        options: CqOptions,
        memory: &QueueMemory,
    ) -> Result<Self, OutOfMemory> {
        let capacity = cqe as usize;
        Ok(Self {
            wcs: Ring::new(capacity, memory)?,
            details: options.details.then(|| Ring::new(capacity, memory)).transpose()?,
            armed: Armed::No,
            overrun: false,
            ignore_overrun: options.ignore_overrun,
            moderation: Moderation::default(),
            gathered: 0,
        })
    }

    /// Completions that it can hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.wcs.capacity()
    }

    /// Completions that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.wcs.len()
    }

    /// The place of the oldest completion, which changes when one is taken.
    #[must_use]
    pub fn place(&self) -> usize {
        self.wcs.head()
    }

    /// Tells whether the queue is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.wcs.len() == 0
    }

    /// Whether a completion was lost.
    #[must_use]
    pub fn is_overrun(&self) -> bool {
        self.overrun
    }

    /// Tells whether a completion that is added now is kept as it is, and nobody is told.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.details.is_none() && self.armed == Armed::No && !self.overrun
    }

    /// Adds a completion. `solicited`: also tells a channel that wants solicited ones only; errors always do.
    pub fn push(&mut self, wc: Wc, solicited: bool) -> Pushed {
        self.push_detailed(wc, &WcDetail::default(), solicited)
    }

    /// As [`push`](Self::push), for several completions, each with its solicited flag. False, and none was added, if the
    /// queue has no room for all, keeps details, is armed or is overrun.
    #[inline]
    #[must_use]
    pub fn push_plain(&mut self, completions: &[(Wc, bool)]) -> bool {
        let room = self.wcs.capacity() - self.wcs.len();
        let fits = self.is_plain() && completions.len() <= room;
        if fits {
            completions.iter().for_each(|(wc, _)| self.wcs.push_back(*wc));
        }
        fits
    }

    /// As [`push`](Self::push), with the further fields that a queue keeps if it was made for them.
    pub fn push_detailed(&mut self, wc: Wc, detail: &WcDetail, solicited: bool) -> Pushed {
        let full = self.wcs.len() >= self.capacity();
        if self.overrun || full && !self.ignore_overrun {
            let first = !self.overrun;
            self.overrun = true;
            return Pushed { overrun: first, lost: true, ..Pushed::default() };
        }
        if full {
            self.pop();
        }
        let error = wc.status != crate::wc::WcStatus::Success;
        self.wcs.push_back(wc);
        if let Some(details) = &mut self.details {
            details.push_back(*detail);
        }
        let told = match self.armed {
            Armed::No => false,
            Armed::Solicited => solicited || error,
            Armed::Any => true,
        };
        let mut pushed = Pushed { overwrote: full, ..Pushed::default() };
        if told {
            self.gather(&mut pushed);
        }
        pushed
    }

    /// Counts one more completion for the channel, which is notified now or together with others.
    fn gather(&mut self, pushed: &mut Pushed) {
        self.gathered += 1;
        // Into a full queue nothing more comes.
        if self.is_due() || self.wcs.len() >= self.capacity() {
            self.armed = Armed::No;
            pushed.notify = true;
        } else {
            pushed.wait = self.gathered == 1 && self.moderation.period > 0;
        }
    }

    fn is_due(&self) -> bool {
        let count = u32::from(self.moderation.count);
        self.gathered > 0
            && self.armed != Armed::No
            && (self.moderation.is_off() || count > 0 && self.gathered >= count)
    }

    /// Changes the moderation of notifications. The channel is notified at once if enough completions were gathered;
    /// else they wait for the new period.
    pub fn moderate(&mut self, moderation: Moderation) -> Pushed {
        self.moderation = moderation;
        let notify = self.is_due();
        if notify {
            self.armed = Armed::No;
        }
        let wait = self.gathered > 0 && self.armed != Armed::No && moderation.period > 0;
        Pushed { notify, wait, ..Pushed::default() }
    }

    /// The moderation of notifications.
    #[must_use]
    pub fn moderation(&self) -> Moderation {
        self.moderation
    }

    /// The period is over: whether to tell the channel.
    pub fn expire(&mut self) -> bool {
        let notify = self.gathered > 0 && self.armed != Armed::No;
        if notify {
            self.armed = Armed::No;
        }
        notify
    }

    /// Moves the oldest completions to `out`; returns how many.
    pub fn poll(&mut self, out: &mut [Wc]) -> usize {
        let mut out = out.iter_mut();
        self.take(out.len(), |wc| {
            if let Some(to) = out.next() {
                *to = *wc;
            }
        })
    }

    /// Takes up to `most` of the oldest completions; returns how many.
    #[inline]
    pub fn take(&mut self, most: usize, mut each: impl FnMut(&Wc)) -> usize {
        let n = most.min(self.wcs.len());
        let (first, second) = self.wcs.take(n);
        for wc in first {
            each(wc);
        }
        for wc in second {
            each(wc);
        }
        if let Some(details) = &mut self.details {
            details.take(n);
        }
        n
    }

    /// The oldest completion, with its further fields.
    pub fn pop(&mut self) -> Option<WcEx> {
        let wc = self.wcs.pop_front()?;
        let detail = self.details.as_mut().and_then(Ring::pop_front).unwrap_or_default();
        Some(WcEx { wc, detail })
    }

    /// Asks for one notification, at the next completion that is added. Completions that wait already do not
    /// count. Asking for any overrides asking for solicited ones.
    pub fn arm(&mut self, solicited_only: bool) {
        if self.armed == Armed::No {
            self.gathered = 0;
        }
        if !solicited_only {
            self.armed = Armed::Any;
        } else if self.armed == Armed::No {
            self.armed = Armed::Solicited;
        }
    }

    /// Tells whether completions of a queue pair are in the queue.
    #[must_use]
    pub fn holds_of(&self, qpn: Qpn) -> bool {
        self.wcs.iter().any(|wc| wc.qpn == qpn)
    }

    /// The completions that wait, the oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &Wc> {
        self.wcs.iter()
    }

    /// The queue pairs of the completions that wait, each as often as it has some.
    pub fn queue_pairs(&self) -> impl Iterator<Item = Qpn> + '_ {
        self.wcs.iter().map(|wc| wc.qpn)
    }

    /// Removes the completions of a queue pair that is destroyed or reset (S1.2).
    pub fn purge(&mut self, qpn: Qpn) {
        if let Some(details) = &mut self.details {
            let mut wcs = self.wcs.iter();
            details.retain(|_| wcs.next().is_some_and(|wc| wc.qpn != qpn));
        }
        self.wcs.retain(|wc| wc.qpn != qpn);
    }

    /// Its options and its memory.
    #[must_use]
    pub fn kind(&self) -> (CqOptions, QueueMemory) {
        let (details, ignore_overrun) = (self.details.is_some(), self.ignore_overrun);
        (CqOptions { details, ignore_overrun }, self.wcs.memory().clone())
    }

    /// Takes the capacity, and the memory, of an empty queue with the same options, and gives it the old ones. False if
    /// the completions that wait do not fit.
    pub fn resize(&mut self, room: &mut Self) -> bool {
        if self.wcs.len() > room.capacity() || self.details.is_some() != room.details.is_some() {
            return false;
        }
        self.wcs.move_to(&mut room.wcs);
        if let (Some(details), Some(room)) = (&mut self.details, &mut room.details) {
            details.move_to(room);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wc::WcStatus;

    fn wc(wr_id: u64) -> Wc {
        Wc { wr_id, qpn: Qpn::new(wr_id as u32 % 2), ..Wc::default() }
    }

    #[test]
    fn armed_once_for_the_next_completion() {
        let mut cq = Cq::new(8);
        assert!(!cq.push(wc(0), true).notify);
        cq.arm(false);
        assert!(cq.push(wc(1), false).notify);
        assert!(!cq.push(wc(2), true).notify);
        cq.arm(true);
        assert!(!cq.push(wc(3), false).notify);
        assert!(cq.push(Wc { status: WcStatus::WrFlushErr, ..wc(4) }, false).notify);
        cq.arm(true);
        cq.arm(false);
        cq.arm(true);
        assert!(cq.push(wc(5), false).notify);
    }

    #[test]
    fn several_completions_are_added_only_without_a_notification() {
        let some = |n: u64| (0..n).map(|id| (wc(id), false)).collect::<Vec<_>>();
        let mut cq = Cq::new(4);
        assert!(cq.push_plain(&some(3)) && !cq.push_plain(&some(2)));
        assert!(cq.push_plain(&some(1)) && cq.push_plain(&[]));
        let mut ids = Vec::new();
        assert_eq!(cq.take(9, |wc| ids.push(wc.wr_id)), 4);
        assert_eq!(ids, [0, 1, 2, 0]);
        for solicited_only in [true, false] {
            cq.arm(solicited_only);
            assert!(!cq.push_plain(&some(1)));
        }
        let options = CqOptions { details: true, ..CqOptions::default() };
        assert!(!Cq::in_memory(4, options, &QueueMemory::HEAP).unwrap().push_plain(&some(1)));
        let mut cq = Cq::new(1);
        assert!(cq.push(wc(0), false) == Pushed::default() && cq.push(wc(1), false).overrun);
        cq.purge(Qpn::new(0));
        assert!(cq.is_empty() && !cq.push_plain(&some(1)), "it is in error");
        assert!(cq.push(wc(2), false).lost);
    }

    #[test]
    fn overrun_is_told_once_and_stays() {
        let mut cq = Cq::new(1);
        assert_eq!(cq.push(wc(0), false), Pushed::default());
        assert!(cq.push(wc(1), false).overrun);
        assert!(!cq.push(wc(2), false).overrun);
        assert!(cq.push(wc(2), false).lost);
        assert!(cq.is_overrun());
        let mut out = [Wc::default(); 4];
        assert_eq!(cq.poll(&mut out), 1);
        assert_eq!(out[0].wr_id, 0);
        assert_eq!(cq.push(wc(3), false), Pushed { lost: true, ..Pushed::default() });
        assert!(cq.is_empty());
    }

    #[test]
    fn purge_gives_the_room_back_and_resize_keeps_what_waits() {
        let mut cq = Cq::new(4);
        for i in 0..4 {
            cq.push(wc(i), false);
        }
        cq.purge(Qpn::new(1));
        assert_eq!(cq.len(), 2);
        assert!(!cq.resize(&mut Cq::new(1)));
        assert!(cq.resize(&mut Cq::new(2)));
        assert!(cq.push(wc(9), false).overrun);
        let mut out = [Wc::default(); 4];
        assert_eq!(cq.poll(&mut out), 2);
        assert_eq!([out[0].wr_id, out[1].wr_id], [0, 2]);
    }

    #[test]
    fn a_queue_that_ignores_overrun_keeps_the_newest() {
        let options = CqOptions { details: true, ignore_overrun: true };
        let mut cq = Cq::in_memory(2, options, &QueueMemory::HEAP).unwrap();
        for i in 0..5 {
            let detail = WcDetail { timestamp: i, ..WcDetail::default() };
            let pushed = cq.push_detailed(wc(i), &detail, false);
            assert_eq!(pushed, Pushed { overwrote: i >= 2, ..Pushed::default() });
        }
        let polled = |cq: &mut Cq| cq.pop().map(|ex| (ex.wc.wr_id, ex.detail.timestamp));
        assert_eq!([polled(&mut cq), polled(&mut cq)], [Some((3, 3)), Some((4, 4))]);
        assert_eq!(polled(&mut cq), None);
    }

    #[test]
    fn details_stay_with_their_completions() {
        let options = CqOptions { details: true, ..CqOptions::default() };
        let mut cq = Cq::in_memory(8, options, &QueueMemory::HEAP).unwrap();
        for i in 0..6 {
            let detail = WcDetail { timestamp: 100 + i, ..WcDetail::default() };
            cq.push_detailed(wc(i), &detail, false);
        }
        cq.purge(Qpn::new(1));
        let mut out = [Wc::default(); 1];
        assert_eq!((cq.poll(&mut out), out[0].wr_id), (1, 0));
        for expected in [2, 4] {
            let ex = cq.pop().unwrap();
            assert_eq!((ex.wc.wr_id, ex.detail.timestamp), (expected, 100 + expected));
        }
        let (options, memory) = cq.kind();
        let mut room = Cq::in_memory(16, options, &memory).unwrap();
        assert!(cq.is_empty() && cq.resize(&mut room));
        assert_eq!((cq.capacity(), room.capacity()), (16, 8));
    }

    #[test]
    fn moderation_tells_after_a_count_or_a_period() {
        let mut cq = Cq::new(16);
        assert_eq!(cq.moderation(), Moderation::default());
        assert_eq!(cq.moderate(Moderation { count: 3, period: 50 }), Pushed::default());
        assert_eq!(cq.moderation(), Moderation { count: 3, period: 50 });
        cq.push(wc(0), false);
        cq.arm(false);
        let waits = Pushed { wait: true, ..Pushed::default() };
        let told = Pushed { notify: true, ..Pushed::default() };
        assert_eq!(cq.push(wc(1), false), waits);
        assert_eq!(cq.push(wc(2), false), Pushed::default());
        // Asked again, it goes on counting.
        cq.arm(false);
        assert_eq!(cq.push(wc(3), false), told);
        assert!(!cq.expire());
        cq.arm(true);
        assert_eq!(cq.push(wc(4), false), Pushed::default());
        assert_eq!(cq.push(wc(5), true), waits);
        assert!(cq.expire() && !cq.expire());
    }

    #[test]
    fn end_of_moderation_or_a_full_queue_notifies() {
        let mut cq = Cq::new(3);
        cq.moderate(Moderation { count: 100, period: 0 });
        cq.arm(false);
        assert_eq!(cq.push(wc(0), false), Pushed::default());
        assert!(cq.moderate(Moderation { count: 100, period: 9 }).wait);
        assert!(cq.moderate(Moderation::default()).notify);
        cq.moderate(Moderation { count: 100, period: 0 });
        cq.arm(false);
        assert!(!cq.push(wc(1), false).notify);
        assert!(cq.push(wc(2), false).notify);
    }
}
