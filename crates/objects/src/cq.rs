//! Completion queue.

mod facts;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use anyverbs_locks::{FastMutex, Mutex, rank};
use anyverbs_proto::cq::{CqOptions, Moderation, Pushed};
use anyverbs_proto::qp::SqCredit;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wc::{TmInfo, Wc, WcDetail, WcEx, WcStatus};
use anyverbs_queue_memory::{Queue, QueueMemory};
use bitflags::bitflags;
use tracing::Level;

use crate::async_event::{AsyncEventKind, EventElement};
use crate::base::{Caller, Core, Ticket, Timed};
use crate::clock;
use crate::comp_channel::{ChannelCell, CompChannel};
use crate::context_cell::ContextCell;
use crate::error::{CqError, CreateError, DestroyError, ModifyObjectError, Useless};
use crate::event_queue::Acks;
use crate::holders::{Held, Holdable, Holder, Holders};
use crate::limits::bound;
use crate::pd::{Pd, PdCell};

bitflags! {
    /// The fields of a completion that a completion queue keeps beside the [`Wc`] (of `enum ibv_create_cq_wc_flags`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct CqFields: u8 {
        /// [`WcDetail::timestamp`].
        const TIMESTAMP = 1;
        /// [`WcDetail::wallclock`].
        const WALLCLOCK = 2;
        /// [`WcDetail::tm`].
        const TM_INFO = 4;
    }
}

/// Parameters of a completion queue (`struct ibv_cq_init_attr_ex`).
#[derive(Clone, Copy, Debug)]
pub struct CqInitAttr<'a> {
    /// Completions that it must hold.
    pub cqe: u32,
    /// Where events go.
    pub channel: Option<&'a CompChannel>,
    /// Completion vector.
    pub comp_vector: u32,
    /// The program's cookie; see [`Cq::set_cookie`].
    pub cookie: u64,
    /// The further fields that are kept; [`Cq::poll_ex`] gives them.
    pub fields: CqFields,
    /// Where there is no room a completion takes the place of the oldest, and the queue does not fail.
    pub ignore_overrun: bool,
    /// A parent domain that is not to go before this queue.
    pub pd: Option<&'a Pd>,
}

impl CqInitAttr<'_> {
    /// A plain one.
    #[must_use]
    pub fn new(cqe: u32) -> Self {
        Self {
            cqe,
            channel: None,
            comp_vector: 0,
            cookie: 0,
            fields: CqFields::empty(),
            ignore_overrun: false,
            pd: None,
        }
    }
}

/// Completion queue (`ibv_create_cq`).
#[derive(Debug)]
pub struct Cq(#[doc(hidden)] pub Arc<CqCell>);

/// A completion queue, as queue pairs hold it.
#[derive(Debug)]
pub struct CqCell {
    /// The device.
    pub core: &'static Core,
    /// Tells it from the others of its process.
    pub number: u32,
    context: Arc<ContextCell>,
    state: FastMutex<rank::CompletionQueue, State>,
    /// There are completions; written under the lock. A poller without any need not take it.
    any: AtomicBool,
    /// [`anyverbs_proto::cq::Cq::is_plain`]; written under the lock.
    plain: AtomicBool,
    pub(crate) notices: Notices,
    holders: Holders,
    hold: Mutex<rank::CompletionQueueHold, Option<Hold>>,
    fields: CqFields,
    empty_polls: EmptyPolls,
}

/// How a queue tells its program of completions and errors.
#[derive(Debug)]
pub(crate) struct Notices {
    /// The queue holds it ([`Hold`]) until it is destroyed. References to the queue that outlast this keep no descriptor open.
    channel: Option<Weak<ChannelCell>>,
    /// The program's, in each event.
    cookie: AtomicU64,
    /// Acknowledgements of events on the channel.
    pub(crate) comp_acks: Acks,
    /// Acknowledgements of asynchronous events.
    acks: Arc<Acks>,
}

impl Notices {
    fn channel(&self) -> Option<Arc<ChannelCell>> {
        self.channel.as_ref().and_then(Weak::upgrade)
    }
}

/// A poll of a queue for at most `left` completions.
struct Call<'a, F> {
    cq: &'a CqCell,
    left: usize,
    each: F,
}

impl<F: FnMut(&Wc)> Caller for Call<'_, F> {
    #[inline]
    fn take(&mut self, cq: *const (), wc: &Wc) -> bool {
        let takes = std::ptr::addr_eq(self.cq, cq)
            && self.left > 0
            && !self.cq.any.load(Ordering::Acquire)
            && self.cq.plain.load(Ordering::Acquire);
        if takes {
            self.left -= 1;
            (self.each)(wc);
        }
        takes
    }

    #[inline]
    fn queue(&self) -> *const () {
        std::ptr::from_ref(self.cq).cast()
    }
}

/// Empty polls in a row, long ones counted twice, after which a poller offers its core to others: some tens of
/// microseconds. Where pollers outnumber the cores, the peer that it waits for may be one of them, and would else wait for
/// the end of a time slice.
const PATIENT_POLLS: u32 = 200;

/// Where a poll looks for completions.
#[derive(Clone, Copy)]
enum Look {
    Queue,
    Network,
}

/// Empty polls in a row. Long ones count twice.
#[derive(Debug, Default)]
struct EmptyPolls(AtomicU32);

impl EmptyPolls {
    /// Polls with `look`, which says how many completions there were, and of the network whether that was short. Where the
    /// queue has none, the network is asked, and then the queue once more.
    #[inline]
    fn poll(&self, mut look: impl FnMut(Look) -> (usize, bool)) -> usize {
        let (mut n, mut is_short) = look(Look::Queue);
        if n == 0 {
            (n, is_short) = look(Look::Network);
        }
        if n == 0 {
            n = look(Look::Queue).0;
        }
        if n == 0 {
            self.yield_when_idle(if is_short { 1 } else { 2 });
            // Other threads may have had the processor for long. The program may learn of later events before it polls
            // again.
            n = look(Look::Queue).0;
        }
        if n > 0 && self.0.load(Ordering::Relaxed) != 0 {
            self.0.store(0, Ordering::Relaxed);
        }
        n
    }

    /// Yields after an empty poll that was as long as this many short ones.
    #[inline]
    fn yield_when_idle(&self, polls: u32) {
        let before = self.0.load(Ordering::Relaxed);
        if before < PATIENT_POLLS {
            self.0.store(before + polls, Ordering::Relaxed);
        } else {
            std::thread::yield_now();
        }
    }
}

#[derive(Debug)]
#[expect(dead_code, reason = "held for their drop")]
struct Hold(Option<Held<ChannelCell>>, Option<Held<PdCell>>, Ticket);

#[derive(Debug)]
struct State {
    queue: anyverbs_proto::cq::Cq,
    /// Where the send slots of each queue pair go back to, by number in ascending order.
    credits: Vec<(Qpn, Arc<SqCredit>)>,
    /// Place in `credits` of the last completion.
    last: usize,
    /// The time at which a moderated queue notifies its channel.
    tell_at: Option<Time>,
    /// When [`CqCell::period_over`] is called: not after `tell_at`.
    called_at: Option<Time>,
    /// A completion that was overwritten was noted in the log.
    said_overwrote: bool,
    /// The log says that it has overrun.
    said_overrun: bool,
}

/// Gives the send slots of a queue pair back, up to a completion's count. `last` is the place of the last one's queue pair in
/// `credits`.
#[inline]
fn release(credits: &[(Qpn, Arc<SqCredit>)], last: &mut usize, of: Qpn, count: u32) {
    if credits.get(*last).is_none_or(|(qpn, _)| *qpn != of) {
        match credits.binary_search_by_key(&of, |(qpn, _)| *qpn) {
            Ok(at) => *last = at,
            // Completions of a destroyed queue pair are purged, so all others are here.
            Err(_) => return,
        }
    }
    credits[*last].1.release(count);
}

impl Drop for CqCell {
    fn drop(&mut self) {
        // Inherited locks belong to threads of the parent.
        if let Some(channel) = self.notices.channel()
            && self.core.is_current()
        {
            channel.withdraw(self);
        }
    }
}

impl Timed for CqCell {
    /// The period of its moderation is over.
    fn on_time(self: Arc<Self>, now: Time) {
        let mut state = self.state.lock();
        state.called_at = None;
        if self.holders.is_dead() {
            return;
        }
        // Another count was full meanwhile, or the period has changed.
        if state.tell_at.take_if(|at| *at <= now).is_none() {
            state.called_at = state.tell_at;
            if let Some(at) = state.tell_at {
                self.call_at(at);
            }
            return;
        }
        if state.queue.expire()
            && let Some(channel) = self.notices.channel()
        {
            channel.notify(&self);
        }
        self.note_plain(&state);
    }
}

impl Holdable for CqCell {
    fn holders(&self) -> &Holders {
        &self.holders
    }
}

impl CqCell {
    /// Whether it belongs to the device of a context.
    #[must_use]
    pub fn is_of(&self, core: &Core, context: &ContextCell) -> bool {
        std::ptr::eq(self.core, core) && self.context.device == context.device
    }

    /// The place of its device among those of the process.
    #[must_use]
    pub fn device(&self) -> usize {
        self.context.device
    }
}

impl CqCell {
    /// Completions that it can hold.
    pub fn capacity(&self) -> usize {
        self.state.lock().queue.capacity()
    }

    pub(crate) fn cookie(&self) -> u64 {
        self.notices.cookie.load(Ordering::Relaxed)
    }

    /// Adds a completion. True if it was lost for want of room, for the first time: the queue pairs must fail.
    #[must_use]
    pub fn push(self: &Arc<Self>, wc: Wc, solicited: bool) -> bool {
        self.push_all(&[(wc, solicited)])
    }

    /// As [`push`](Self::push), of several, each with whether it is solicited. The queue pairs must fail if one was lost.
    #[inline]
    #[must_use]
    pub fn push_all(self: &Arc<Self>, completions: &[(Wc, bool)]) -> bool {
        self.push_locked(&mut self.state.lock(), completions)
    }

    /// As [`push`](Self::push), if there is room; `None` if there is none. A queue that has overrun takes it, and it is lost.
    pub fn push_into_room(self: &Arc<Self>, wc: Wc, solicited: bool) -> Option<bool> {
        let mut state = self.state.lock();
        let queue = &state.queue;
        let takes = queue.is_overrun() || queue.len() < queue.capacity();
        takes.then(|| self.push_locked(&mut state, &[(wc, solicited)]))
    }

    #[inline]
    fn push_locked(self: &Arc<Self>, state: &mut State, completions: &[(Wc, bool)]) -> bool {
        if state.queue.push_plain(completions) {
            // The likely case.
            self.any.store(true, Ordering::Release);
            return false;
        }
        let mut lost = false;
        for (wc, solicited) in completions {
            lost |= if self.fields.is_empty() {
                let pushed = state.queue.push(*wc, *solicited);
                pushed != Pushed::default() && self.pushed(state, pushed)
            } else {
                self.push_detailed(state, *wc, TmInfo::default(), *solicited)
            };
        }
        self.any.store(true, Ordering::Release);
        lost
    }

    /// Whether the log has still to say that this queue has overrun. True once.
    #[must_use]
    pub fn is_overrun_to_be_said(&self) -> bool {
        !std::mem::replace(&mut self.state.lock().said_overrun, true)
    }

    /// As [`push`](Self::push), of a message that has matched a tag.
    #[must_use]
    pub fn push_tagged(self: &Arc<Self>, wc: Wc, tm: TmInfo, solicited: bool) -> bool {
        self.push_detailed(&mut self.state.lock(), wc, tm, solicited)
    }

    fn push_detailed(
        self: &Arc<Self>,
        state: &mut State,
        wc: Wc,
        tm: TmInfo,
        solicited: bool,
    ) -> bool {
        let has = |field| self.fields.contains(field);
        let detail = WcDetail {
            timestamp: if has(CqFields::TIMESTAMP) { clock::raw() } else { 0 },
            wallclock: if has(CqFields::WALLCLOCK) { clock::wall() } else { 0 },
            tm,
        };
        let pushed = state.queue.push_detailed(wc, &detail, solicited);
        self.pushed(state, pushed)
    }

    /// Acts on a new completion. True if it was lost.
    fn pushed(self: &Arc<Self>, state: &mut State, pushed: Pushed) -> bool {
        self.any.store(true, Ordering::Release);
        self.note_plain(state);
        if pushed.notify || pushed.wait {
            self.tell(state, pushed);
        }
        if pushed.overwrote && !std::mem::replace(&mut state.said_overwrote, true) {
            let cqe = state.queue.capacity();
            let line = format!(
                "a CQ of {cqe} entries, which ignores overruns, has overrun: the oldest completions are lost"
            );
            self.core.progress().say(Level::WARN, line);
        }
        if pushed.overrun {
            let element = EventElement::Cq { cookie: self.cookie() };
            self.context.events.raise(AsyncEventKind::CqErr, element, Some(&self.notices.acks));
        }
        pushed.lost
    }

    /// Tells the channel, now or when the period of the moderation is over.
    fn tell(self: &Arc<Self>, state: &mut State, pushed: Pushed) {
        if self.notices.channel.is_none() {
            return;
        }
        if pushed.notify {
            let Some(channel) = self.notices.channel() else { return };
            state.tell_at = None;
            // Under the lock, so that destroying the queue finds every event of it.
            channel.notify(self);
        } else if pushed.wait {
            let period = Duration::from_micros(state.queue.moderation().period.into());
            let at = self.core.now() + period;
            state.tell_at = Some(at);
            // A call that is due earlier is left over from an earlier notification; it puts itself off.
            if state.called_at.is_none_or(|called| at < called) {
                state.called_at = Some(at);
                self.call_at(at);
            }
        }
    }

    /// Has [`on_time`](Timed::on_time) called at this time.
    fn call_at(self: &Arc<Self>, at: Time) {
        let this = Arc::downgrade(self);
        self.core.progress().call_at(at, this);
    }

    /// A queue pair uses this CQ for its sends.
    pub fn attach(&self, qpn: Qpn, credit: Arc<SqCredit>) {
        let mut state = self.state.lock();
        let at = state.credits.partition_point(|(q, _)| *q < qpn);
        state.credits.insert(at, (qpn, credit));
        state.last = 0;
    }

    /// Whether completions of a queue pair wait here.
    pub fn holds_of(&self, qpn: Qpn) -> bool {
        self.any.load(Ordering::Acquire) && self.state.lock().queue.holds_of(qpn)
    }

    /// Removes a queue pair's completions.
    pub fn purge(&self, qpn: Qpn) {
        self.state.lock().queue.purge(qpn);
    }

    /// Removes a queue pair and its completions.
    pub fn detach(&self, qpn: Qpn) {
        let mut state = self.state.lock();
        state.queue.purge(qpn);
        if let Ok(at) = state.credits.binary_search_by_key(&qpn, |(q, _)| *q) {
            state.credits.remove(at);
        }
        state.last = 0;
    }

    /// Looks without a lock, where most polls end.
    #[inline(always)]
    fn take(&self, most: usize, each: &mut impl FnMut(&Wc)) -> usize {
        if self.any.load(Ordering::Acquire) { self.take_locked(most, each) } else { 0 }
    }

    #[inline(never)]
    fn take_locked(&self, most: usize, each: &mut impl FnMut(&Wc)) -> usize {
        let mut state = self.state.lock();
        let State { queue, credits, last, .. } = &mut *state;
        // One release for all completions of a queue pair that follow each other: the newest covers those before it.
        let mut newest: Option<(Qpn, u32)> = None;
        let n = queue.take(most, |wc| {
            if !wc.opcode.is_recv() {
                if let Some((qpn, count)) = newest.filter(|(qpn, _)| *qpn != wc.qpn) {
                    release(credits, last, qpn, count);
                }
                newest = Some((wc.qpn, wc.sq_count));
            }
            each(wc);
        });
        if let Some((qpn, count)) = newest {
            release(credits, last, qpn, count);
        }
        if queue.is_empty() {
            self.any.store(false, Ordering::Release);
        }
        n
    }

    fn take_ex(&self, out: &mut [WcEx]) -> usize {
        if !self.any.load(Ordering::Acquire) {
            return 0;
        }
        let mut state = self.state.lock();
        let mut n = 0;
        while n < out.len()
            && let Some(completion) = state.queue.pop()
        {
            let State { credits, last, .. } = &mut *state;
            if !completion.wc.opcode.is_recv() {
                release(credits, last, completion.wc.qpn, completion.wc.sq_count);
            }
            out[n] = completion;
            n += 1;
        }
        if state.queue.is_empty() {
            self.any.store(false, Ordering::Release);
        }
        n
    }

    /// The state of the queue may have changed in whether the next completion is plain.
    fn note_plain(&self, state: &State) {
        self.plain.store(state.queue.is_plain(), Ordering::Release);
    }

    fn check(&self) -> Result<(), Useless> {
        self.holders.check(self.core)
    }
}

impl Cq {
    #[doc(hidden)]
    pub fn create(
        core: &'static Core,
        context: &Arc<ContextCell>,
        init: &CqInitAttr<'_>,
    ) -> Result<Self, CreateError> {
        // C's number has a sign.
        if init.cqe.cast_signed() <= 0 {
            let (value, most) = (init.cqe, core.attr_of(context.device).max_cqe);
            return Err(CreateError::OutOfRange { what: "cqe", value, least: 1, most });
        }
        core.within(context.device, "cqe", init.cqe, bound!(max_cqe))?;
        let vectors = core.attr_of(context.device).num_comp_vectors;
        if init.comp_vector >= vectors {
            return Err(CreateError::OutOfRange {
                what: "comp_vector",
                value: init.comp_vector,
                least: 0,
                most: vectors - 1,
            });
        }
        let held = match init.channel {
            Some(c) if !c.0.is_of(core, context) => {
                return Err(CreateError::Foreign("completion channel"));
            }
            Some(c) => Some(
                Held::new(&c.0, Holder::Cq).ok_or(CreateError::Foreign("completion channel"))?,
            ),
            None => None,
        };
        let pd = match init.pd {
            Some(pd) if !pd.cell.is_of(core, context.device) => {
                return Err(CreateError::Foreign("parent domain"));
            }
            Some(pd) => {
                let held = Held::new(&pd.cell, Holder::Cq);
                Some(held.ok_or(CreateError::Foreign("parent domain"))?)
            }
            None => None,
        };
        let options =
            CqOptions { details: !init.fields.is_empty(), ignore_overrun: init.ignore_overrun };
        let memory = init.pd.map_or(QueueMemory::HEAP, |pd| pd.cell.memory.of(Queue::Cq));
        let queue = anyverbs_proto::cq::Cq::in_memory(init.cqe, options, &memory)?;
        let ticket = core.take(context.device, |all| &all.cq)?;
        Ok(Self(core.cqs.enter(|number| CqCell {
            core,
            number,
            context: Arc::clone(context),
            state: FastMutex::new(State {
                queue,
                credits: Vec::new(),
                last: 0,
                tell_at: None,
                called_at: None,
                said_overwrote: false,
                said_overrun: false,
            }),
            any: AtomicBool::new(false),
            plain: AtomicBool::new(init.fields.is_empty()),
            notices: Notices {
                channel: held.as_ref().map(|h| Arc::downgrade(h.arc())),
                cookie: AtomicU64::new(init.cookie),
                comp_acks: Acks::default(),
                acks: Arc::default(),
            },
            holders: Holders::default(),
            hold: Mutex::new(Some(Hold(held, pd, ticket))),
            fields: init.fields,
            empty_polls: EmptyPolls::default(),
        })))
    }

    /// Replaces the cookie that events carry.
    pub fn set_cookie(&self, cookie: u64) {
        self.0.notices.cookie.store(cookie, Ordering::Relaxed);
    }

    /// Completions that it can hold (`ibv_cq.cqe`).
    #[must_use]
    pub fn capacity(&self) -> u32 {
        if !self.0.core.is_current() {
            return 0;
        }
        self.0.state.lock().queue.capacity() as u32
    }

    /// Whether completions of it were lost, since there was no room.
    #[must_use]
    pub fn is_overrun(&self) -> bool {
        self.0.core.is_current() && self.0.state.lock().queue.is_overrun()
    }

    /// The completions that wait to be polled, the oldest first. They stay.
    #[must_use]
    pub fn waiting(&self) -> Vec<Wc> {
        if !self.0.core.is_current() {
            return Vec::new();
        }
        self.0.state.lock().queue.iter().copied().collect()
    }

    /// Moves the oldest completions to `out` and returns their number (`ibv_poll_cq`). When there are none, receives
    /// from the network first. Never waits; allocates nothing.
    ///
    /// # Errors
    /// [`CqError::Gone`], [`CqError::Forked`].
    pub fn poll(&self, out: &mut [Wc]) -> Result<usize, CqError> {
        let mut out = out.iter_mut();
        self.poll_each(out.len(), |wc| {
            if let Some(to) = out.next() {
                *to = *wc;
            }
        })
    }

    /// As [`poll`](Self::poll), of up to `most` completions. `each` must not call the device: the queue is locked.
    ///
    /// # Errors
    /// As for [`poll`](Self::poll).
    #[inline]
    pub fn poll_each(&self, most: usize, mut each: impl FnMut(&Wc)) -> Result<usize, CqError> {
        self.0.check()?;
        if most == 0 {
            return Ok(0);
        }
        let cq = &*self.0;
        let mut has_failed = false;
        let mut each = |wc: &Wc| {
            has_failed |= wc.status != WcStatus::Success;
            each(wc);
        };
        let n = cq.empty_polls.poll(|look| match look {
            Look::Queue => (cq.take(most, &mut each), false),
            Look::Network => {
                let mut call = Call { cq, left: most, each: &mut each };
                let is_short = cq.core.progress().poll(Some(&mut call));
                (most - call.left, is_short)
            }
        });
        if has_failed {
            cq.core.progress().explain_failures();
        }
        Ok(n)
    }

    /// As [`poll`](Self::poll), with the further fields that the queue was made to keep.
    ///
    /// # Errors
    /// [`CqError::Gone`], [`CqError::Forked`].
    pub fn poll_ex(&self, out: &mut [WcEx]) -> Result<usize, CqError> {
        self.0.check()?;
        if out.is_empty() {
            return Ok(0);
        }
        let n = self.0.empty_polls.poll(|look| match look {
            Look::Queue => (self.0.take_ex(out), false),
            Look::Network => (0, self.0.core.progress().poll(None)),
        });
        if out[..n].iter().any(|wc| wc.wc.status != WcStatus::Success) {
            self.0.core.progress().explain_failures();
        }
        Ok(n)
    }

    /// Gathers notifications from now on (`ibv_modify_cq`).
    ///
    /// # Errors
    /// [`ModifyObjectError::Gone`], [`ModifyObjectError::Forked`].
    pub fn moderate(&self, moderation: Moderation) -> Result<(), ModifyObjectError> {
        self.0.check()?;
        let mut state = self.0.state.lock();
        let pushed = state.queue.moderate(moderation);
        self.0.note_plain(&state);
        self.0.tell(&mut state, pushed);
        Ok(())
    }

    /// Asks for one event on the channel, at the next completion that is added (`ibv_req_notify_cq`).
    ///
    /// # Errors
    /// [`CqError::NoChannel`], [`CqError::Gone`], [`CqError::Forked`].
    pub fn req_notify(&self, solicited_only: bool) -> Result<(), CqError> {
        self.0.check()?;
        let Some(channel) = self.0.notices.channel() else { return Err(CqError::NoChannel) };
        let mut state = self.0.state.lock();
        state.queue.arm(solicited_only);
        self.0.note_plain(&state);
        drop(state);
        if !channel.spin.waits() {
            self.0.core.progress().end_polling();
        }
        Ok(())
    }

    /// Acknowledges completion events that were read (`ibv_ack_cq_events`).
    pub fn ack_events(&self, n: u32) {
        self.0.notices.comp_acks.acknowledge(n);
    }

    /// Acknowledges asynchronous events of this CQ that were read.
    pub fn ack_async_events(&self, n: u32) {
        self.0.notices.acks.acknowledge(n);
    }

    /// Changes the capacity (`ibv_resize_cq`).
    ///
    /// # Errors
    /// [`ModifyObjectError::DoesNotFit`], [`ModifyObjectError::OutOfRange`], [`ModifyObjectError::Limit`].
    pub fn resize(&self, cqe: u32) -> Result<(), ModifyObjectError> {
        self.0.check()?;
        self.0.core.changes_within(self.0.context.device, "cqe", cqe, bound!(max_cqe))?;
        // A program's allocator may do anything with the queue: it is called before and after it is locked.
        let (options, memory) = self.0.state.lock().queue.kind();
        let room = anyverbs_proto::cq::Cq::in_memory(cqe, options, &memory);
        let mut room = room.map_err(|_| ModifyObjectError::DoesNotFit)?;
        let mut state = self.0.state.lock();
        self.0.check()?;
        let fits = state.queue.resize(&mut room);
        drop(state);
        if fits { Ok(()) } else { Err(ModifyObjectError::DoesNotFit) }
    }

    /// Destroys it (`ibv_destroy_cq`). Waits while an event of it was read and not acknowledged.
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while a queue pair uses it.
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.0.core.is_current() {
            return Ok(());
        }
        self.0.holders.retire().inspect_err(|e| {
            crate::say_again!(
                error,
                self.0.holders.id(),
                "CQ {} ({} entries) is not destroyed: {e}; see `anyverbs explain AV8009`",
                self.0.number,
                self.0.capacity()
            )
        })?;
        if let Some(channel) = self.0.notices.channel() {
            // The thread that added the last completion has released this lock, and made its event.
            drop(self.0.state.lock());
            channel.withdraw(&self.0);
        }
        self.0.context.events.withdraw(&self.0.notices.acks);
        let entries = self.0.state.lock().queue.capacity();
        let name = format_args!("CQ {} ({entries} entries)", self.0.number);
        self.0.notices.acks.wait(name);
        self.0.notices.comp_acks.wait(name);
        // Its memory may be a program's, which wants it back.
        let empty = anyverbs_proto::cq::Cq::new(0);
        let queue = std::mem::replace(&mut self.0.state.lock().queue, empty);
        drop(queue);
        drop(self.0.hold.lock().take());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_during_a_yield_are_polled_by_the_same_poll() {
        let polls = EmptyPolls::default();
        for _ in 0..=PATIENT_POLLS {
            assert_eq!(polls.poll(|_| (0, true)), 0);
        }
        let mut looks = 0;
        let comes_fourth = |_| {
            looks += 1;
            (usize::from(looks == 4), true)
        };
        assert_eq!(polls.poll(comes_fourth), 1);
        assert_eq!(polls.0.load(Ordering::Relaxed), 0);
    }
}
