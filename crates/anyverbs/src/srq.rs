//! Shared receive queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyverbs_proto::recv_queue::{RecvQueue, RecvWqe};
use anyverbs_proto::wr::RecvWr;
use parking_lot::Mutex;

use crate::async_event::{AsyncEventKind, EventElement};
use crate::context::ContextCell;
use crate::engine::{Engine, Ticket};
use crate::error::{CreateError, DestroyError, ModifyObjectError, PostError};
use crate::event_queue::Acks;
use crate::holders::{Held, Holdable, Holder, Holders};
use crate::pd::PdCell;

/// What an SRQ is made with (`struct ibv_srq_init_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct SrqInitAttr {
    /// Requests.
    pub max_wr: u32,
    /// Elements of a request.
    pub max_sge: u32,
    /// The program's cookie; see [`Srq::set_cookie`].
    pub cookie: u64,
}

/// State of an SRQ (`struct ibv_srq_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqAttr {
    /// Requests that it can hold.
    pub max_wr: u32,
    /// Elements of a request.
    pub max_sge: u32,
    /// Below this many requests an event is raised, once; 0: not armed.
    pub limit: u32,
}

/// Shared receive queue (`ibv_create_srq`).
#[derive(Debug)]
pub struct Srq(pub(crate) Arc<SrqCell>);

#[derive(Debug)]
pub(crate) struct SrqCell {
    pub(crate) engine: &'static Engine,
    context: Arc<ContextCell>,
    state: Mutex<State>,
    cookie: AtomicU64,
    acks: Arc<Acks>,
    holders: Holders,
    hold: Mutex<Option<(Held<PdCell>, Ticket)>>,
}

#[derive(Debug)]
struct State {
    queue: RecvQueue,
    max_sge: u32,
    limit: u32,
}

impl Holdable for SrqCell {
    fn holders(&self) -> &Holders {
        &self.holders
    }
}

impl SrqCell {
    /// Takes the oldest request; raises the limit event where due.
    pub(crate) fn take(&self, into: &mut RecvWqe) -> bool {
        let mut state = self.state.lock();
        let taken = state.queue.pop(into);
        if taken && state.limit > 0 && state.queue.len() < state.limit as usize {
            state.limit = 0;
            drop(state);
            let element = EventElement::Srq { cookie: self.cookie.load(Ordering::Relaxed) };
            self.context.events.raise(AsyncEventKind::SrqLimitReached, element, Some(&self.acks));
        }
        taken
    }

    /// Requests that wait.
    pub(crate) fn len(&self) -> usize {
        self.state.lock().queue.len()
    }

    fn check(&self) -> Result<(), PostError> {
        if !self.engine.is_current() {
            return Err(PostError::Forked);
        }
        if self.holders.is_dead() { Err(PostError::Gone) } else { Ok(()) }
    }
}

impl Srq {
    pub(crate) fn create(pd: &Arc<PdCell>, init: &SrqInitAttr) -> Result<Self, CreateError> {
        let engine = pd.engine;
        if !engine.is_current() {
            return Err(CreateError::Forked);
        }
        if init.max_wr == 0 || init.max_wr > engine.attr.max_srq_wr {
            return Err(CreateError::Invalid("max_wr of an SRQ"));
        }
        if init.max_sge > engine.attr.max_srq_sge {
            return Err(CreateError::Invalid("max_sge of an SRQ"));
        }
        let ticket =
            engine.quotas.srq.take().ok_or(CreateError::Exhausted("shared receive queues"))?;
        let hold = Held::new(pd, Holder::Srq).ok_or(CreateError::Foreign("protection domain"))?;
        Ok(Self(Arc::new(SrqCell {
            engine,
            context: Arc::clone(&pd.context),
            state: Mutex::new(State {
                queue: RecvQueue::new(init.max_wr, init.max_sge),
                max_sge: init.max_sge,
                limit: 0,
            }),
            cookie: AtomicU64::new(init.cookie),
            acks: Arc::default(),
            holders: Holders::default(),
            hold: Mutex::new(Some((hold, ticket))),
        })))
    }

    /// Replaces the cookie that events carry.
    pub fn set_cookie(&self, cookie: u64) {
        self.0.cookie.store(cookie, Ordering::Relaxed);
    }

    /// Posts receives (`ibv_post_srq_recv`).
    ///
    /// # Errors
    /// The index of the first that was refused, and why; those before it are posted.
    pub fn post_recv(&self, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        let mut poster = self.post().map_err(|e| (0, e))?;
        wrs.iter().enumerate().try_for_each(|(i, wr)| poster.recv(wr).map_err(|e| (i, e)))
    }

    /// Begins to post receives; the queue stays locked until the poster is dropped. Allocates nothing.
    ///
    /// # Errors
    /// [`PostError::Gone`], [`PostError::Forked`].
    pub fn post(&self) -> Result<SrqPoster<'_>, PostError> {
        self.0.check()?;
        Ok(SrqPoster { state: self.0.state.lock() })
    }

    /// State now (`ibv_query_srq`).
    #[must_use]
    pub fn attr(&self) -> SrqAttr {
        if !self.0.engine.is_current() {
            return SrqAttr { max_wr: 0, max_sge: 0, limit: 0 };
        }
        let state = self.0.state.lock();
        SrqAttr {
            max_wr: state.queue.capacity() as u32,
            max_sge: state.max_sge,
            limit: state.limit,
        }
    }

    /// Arms the limit event, changes the size, or both (`ibv_modify_srq`).
    ///
    /// # Errors
    /// [`ModifyObjectError`]; nothing was changed.
    pub fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), ModifyObjectError> {
        match self.0.check() {
            Ok(()) => {}
            Err(PostError::Forked) => return Err(ModifyObjectError::Forked),
            Err(_) => return Err(ModifyObjectError::Gone),
        }
        let mut state = self.0.state.lock();
        let capacity = max_wr.unwrap_or(state.queue.capacity() as u32);
        if capacity == 0 || capacity > self.0.engine.attr.max_srq_wr {
            return Err(ModifyObjectError::Invalid("max_wr"));
        }
        if limit.is_some_and(|limit| limit > capacity) {
            return Err(ModifyObjectError::Invalid("srq_limit"));
        }
        if max_wr.is_some() && !state.queue.resize(capacity) {
            return Err(ModifyObjectError::DoesNotFit);
        }
        state.limit = limit.unwrap_or(state.limit);
        Ok(())
    }

    /// Acknowledges asynchronous events of this SRQ that were read.
    pub fn ack_async_events(&self, n: u32) {
        self.0.acks.acknowledge(n);
    }

    /// Destroys it (`ibv_destroy_srq`). Waits while an event of it was read and not acknowledged.
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while a queue pair uses it.
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.0.engine.is_current() {
            return Ok(());
        }
        self.0.holders.retire().inspect_err(|e| tracing::warn!("SRQ not destroyed: {e}"))?;
        self.0.context.events.withdraw(&self.0.acks);
        self.0.acks.wait(&|| "an SRQ".into());
        drop(self.0.hold.lock().take());
        Ok(())
    }
}

/// Posts receives to an SRQ; see [`Srq::post`].
#[derive(Debug)]
pub struct SrqPoster<'a> {
    state: parking_lot::MutexGuard<'a, State>,
}

impl SrqPoster<'_> {
    /// Posts one receive.
    ///
    /// # Errors
    /// [`PostError::Recv`].
    pub fn recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        Ok(self.state.queue.push(wr)?)
    }
}
