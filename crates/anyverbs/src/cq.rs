//! Completion queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use anyverbs_proto::qp::SqCredit;
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wc::Wc;
use parking_lot::Mutex;

use crate::async_event::{AsyncEventKind, EventElement};
use crate::comp_channel::{ChannelCell, CompChannel};
use crate::context::ContextCell;
use crate::engine::{Engine, Ticket};
use crate::error::{CqError, CreateError, DestroyError, ModifyObjectError};
use crate::event_queue::Acks;
use crate::holders::{Held, Holdable, Holder, Holders};

/// Completion queue (`ibv_create_cq`).
#[derive(Debug)]
pub struct Cq(pub(crate) Arc<CqCell>);

#[derive(Debug)]
pub(crate) struct CqCell {
    pub(crate) engine: &'static Engine,
    context: Arc<ContextCell>,
    state: Mutex<State>,
    /// There are completions; written under the lock. A poller without any need not take it.
    any: AtomicBool,
    channel: Option<Arc<ChannelCell>>,
    cookie: AtomicU64,
    pub(crate) comp_acks: Acks,
    acks: Arc<Acks>,
    holders: Holders,
    hold: Mutex<Option<(Option<Held<ChannelCell>>, Ticket)>>,
    /// Polls in a row that found nothing.
    empty_polls: AtomicU32,
}

/// Empty polls in a row, some tens of microseconds, after which a poller offers its core to others. Where pollers
/// outnumber the cores, the peer that it waits for may be one of them, and would else wait for the end of a time
/// slice.
const PATIENT_POLLS: u32 = 100;

#[derive(Debug)]
struct State {
    queue: anyverbs_proto::cq::Cq,
    /// Where the send slots of each queue pair go back to, by number in ascending order.
    credits: Vec<(Qpn, Arc<SqCredit>)>,
    /// Place in `credits` of the last completion.
    last: usize,
}

/// Gives the send slot of a completion back. `last` is the place of the last one's queue pair in `credits`.
#[inline]
fn release(credits: &[(Qpn, Arc<SqCredit>)], last: &mut usize, wc: &Wc) {
    if wc.opcode.is_recv() {
        return;
    }
    if credits.get(*last).is_none_or(|(qpn, _)| *qpn != wc.qpn) {
        match credits.binary_search_by_key(&wc.qpn, |(qpn, _)| *qpn) {
            Ok(at) => *last = at,
            // Completions of a destroyed queue pair are purged, so all others are here.
            Err(_) => return,
        }
    }
    credits[*last].1.release(wc.sq_count);
}

impl Holdable for CqCell {
    fn holders(&self) -> &Holders {
        &self.holders
    }
}

impl CqCell {
    fn yield_when_idle(&self) {
        let polls = self.empty_polls.load(Ordering::Relaxed);
        if polls < PATIENT_POLLS {
            self.empty_polls.store(polls + 1, Ordering::Relaxed);
        } else {
            std::thread::yield_now();
        }
    }

    pub(crate) fn cookie(&self) -> u64 {
        self.cookie.load(Ordering::Relaxed)
    }

    /// Adds a completion. True if it was lost for want of room, for the first time: the queue pairs must fail.
    #[must_use]
    pub(crate) fn push(self: &Arc<Self>, wc: Wc, solicited: bool) -> bool {
        let mut state = self.state.lock();
        let pushed = state.queue.push(wc, solicited);
        self.any.store(true, Ordering::Release);
        if pushed.notify
            && let Some(channel) = &self.channel
        {
            // Under the lock, so that destroying the queue finds every event of it.
            channel.notify(Arc::clone(self));
        }
        if pushed.overrun {
            tracing::warn!(cqe = state.queue.capacity(), "CQ overrun: a completion is lost");
            let element = EventElement::Cq { cookie: self.cookie() };
            self.context.events.raise(AsyncEventKind::CqErr, element, Some(&self.acks));
        }
        pushed.lost
    }

    /// A queue pair uses this CQ for its sends.
    pub(crate) fn attach(&self, qpn: Qpn, credit: Arc<SqCredit>) {
        let mut state = self.state.lock();
        let at = state.credits.partition_point(|(q, _)| *q < qpn);
        state.credits.insert(at, (qpn, credit));
        state.last = 0;
    }

    /// Removes a queue pair's completions.
    pub(crate) fn purge(&self, qpn: Qpn) {
        self.state.lock().queue.purge(qpn);
    }

    /// Removes a queue pair and its completions.
    pub(crate) fn detach(&self, qpn: Qpn) {
        let mut state = self.state.lock();
        state.queue.purge(qpn);
        if let Ok(at) = state.credits.binary_search_by_key(&qpn, |(q, _)| *q) {
            state.credits.remove(at);
        }
        state.last = 0;
    }

    #[inline]
    fn take(&self, most: usize, mut each: impl FnMut(&Wc)) -> usize {
        if !self.any.load(Ordering::Acquire) {
            return 0;
        }
        let mut state = self.state.lock();
        let State { queue, credits, last } = &mut *state;
        let n = queue.take(most, |wc| {
            release(credits, last, wc);
            each(wc);
        });
        if queue.is_empty() {
            self.any.store(false, Ordering::Release);
        }
        n
    }

    fn check(&self) -> Result<(), CqError> {
        if !self.engine.is_current() {
            return Err(CqError::Forked);
        }
        if self.holders.is_dead() { Err(CqError::Gone) } else { Ok(()) }
    }
}

impl Cq {
    pub(crate) fn create(
        engine: &'static Engine,
        context: &Arc<ContextCell>,
        cqe: u32,
        channel: Option<&CompChannel>,
        comp_vector: u32,
        cookie: u64,
    ) -> Result<Self, CreateError> {
        if cqe == 0 || cqe > engine.attr.max_cqe {
            return Err(CreateError::Invalid("cqe"));
        }
        if comp_vector >= engine.attr.num_comp_vectors {
            return Err(CreateError::Invalid("comp_vector"));
        }
        let held = match channel {
            Some(c) if !std::ptr::eq(c.0.engine, engine) => {
                return Err(CreateError::Foreign("completion channel"));
            }
            Some(c) => Some(
                Held::new(&c.0, Holder::Cq).ok_or(CreateError::Foreign("completion channel"))?,
            ),
            None => None,
        };
        let ticket = engine.quotas.cq.take().ok_or(CreateError::Exhausted("completion queues"))?;
        Ok(Self(Arc::new(CqCell {
            engine,
            context: Arc::clone(context),
            state: Mutex::new(State {
                queue: anyverbs_proto::cq::Cq::new(cqe),
                credits: Vec::new(),
                last: 0,
            }),
            any: AtomicBool::new(false),
            channel: held.as_ref().map(|h| Arc::clone(h.arc())),
            cookie: AtomicU64::new(cookie),
            comp_acks: Acks::default(),
            acks: Arc::default(),
            holders: Holders::default(),
            hold: Mutex::new(Some((held, ticket))),
            empty_polls: AtomicU32::new(0),
        })))
    }

    /// Replaces the cookie that events carry.
    pub fn set_cookie(&self, cookie: u64) {
        self.0.cookie.store(cookie, Ordering::Relaxed);
    }

    /// Completions that it can hold (`ibv_cq.cqe`).
    #[must_use]
    pub fn capacity(&self) -> u32 {
        if !self.0.engine.is_current() {
            return 0;
        }
        self.0.state.lock().queue.capacity() as u32
    }

    /// Moves the oldest completions to `out` and returns how many (`ibv_poll_cq`). When there are none, receives what
    /// the network has brought first. Never waits; allocates nothing.
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
        let mut n = self.0.take(most, &mut each);
        if n == 0 && most > 0 {
            self.0.engine.poll_progress();
            n = self.0.take(most, &mut each);
        }
        if n == 0 {
            self.0.yield_when_idle();
        } else if self.0.empty_polls.load(Ordering::Relaxed) != 0 {
            self.0.empty_polls.store(0, Ordering::Relaxed);
        }
        Ok(n)
    }

    /// Asks for one event on the channel, at the next completion that is added (`ibv_req_notify_cq`).
    ///
    /// # Errors
    /// [`CqError::NoChannel`], [`CqError::Gone`], [`CqError::Forked`].
    pub fn req_notify(&self, solicited_only: bool) -> Result<(), CqError> {
        self.0.check()?;
        if self.0.channel.is_none() {
            return Err(CqError::NoChannel);
        }
        self.0.state.lock().queue.arm(solicited_only);
        self.0.engine.end_lease();
        Ok(())
    }

    /// Acknowledges completion events that were read (`ibv_ack_cq_events`).
    pub fn ack_events(&self, n: u32) {
        self.0.comp_acks.acknowledge(n);
    }

    /// Acknowledges asynchronous events of this CQ that were read.
    pub fn ack_async_events(&self, n: u32) {
        self.0.acks.acknowledge(n);
    }

    /// Changes the capacity (`ibv_resize_cq`).
    ///
    /// # Errors
    /// [`ModifyObjectError::DoesNotFit`], [`ModifyObjectError::Invalid`].
    pub fn resize(&self, cqe: u32) -> Result<(), ModifyObjectError> {
        match self.0.check() {
            Ok(()) => {}
            Err(CqError::Forked) => return Err(ModifyObjectError::Forked),
            Err(_) => return Err(ModifyObjectError::Gone),
        }
        if cqe == 0 || cqe > self.0.engine.attr.max_cqe {
            return Err(ModifyObjectError::Invalid("cqe"));
        }
        if self.0.state.lock().queue.resize(cqe) {
            Ok(())
        } else {
            Err(ModifyObjectError::DoesNotFit)
        }
    }

    /// Destroys it (`ibv_destroy_cq`). Waits while an event of it was read and not acknowledged.
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while a queue pair uses it.
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.0.engine.is_current() {
            return Ok(());
        }
        self.0.holders.retire().inspect_err(|e| tracing::warn!("CQ not destroyed: {e}"))?;
        if let Some(channel) = &self.0.channel {
            // Who added the last completion has let go of this lock, its event included.
            drop(self.0.state.lock());
            channel.withdraw(&self.0);
        }
        self.0.context.events.withdraw(&self.0.acks);
        self.0.acks.wait(&|| "a CQ (asynchronous events)".into());
        self.0.comp_acks.wait(&|| "a CQ (completion events)".into());
        drop(self.0.hold.lock().take());
        Ok(())
    }
}
