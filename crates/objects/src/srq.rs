//! Shared receive queue.

pub mod table;
pub mod tag_matching;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyverbs_locks::{FastMutex, FastMutexGuard, Mutex, rank};
use anyverbs_proto::recv_queue::{RecvQueue, RecvWqe};
use anyverbs_proto::tag_list::TagList;
use anyverbs_proto::wc::Wc;
use anyverbs_proto::wr::RecvWr;
use anyverbs_queue_memory::Queue;

use crate::async_event::{AsyncEventKind, EventElement};
use crate::base::{Core, Ticket};
use crate::context_cell::ContextCell;
use crate::cq::{Cq, CqCell};
use crate::error::{CreateError, DestroyError, ModifyObjectError, PostError, Useless};
use crate::event_queue::Acks;
use crate::features::Feature;
use crate::holders::{Held, Holdable, Holder, Holders};
use crate::limits::bound;
use crate::pd::{Pd, PdCell};
use table::SrqTable;

/// Parameters of an SRQ (`struct ibv_srq_init_attr`).
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

/// Shared receive queue (`ibv_create_srq`; of type XRC: `Xrcd::create_srq`, tag matching:
/// `Pd::create_tm_srq`). One of type XRC is destroyed when dropped.
#[derive(Debug)]
pub struct Srq(#[doc(hidden)] pub Arc<SrqCell>);

/// A shared receive queue, as queue pairs hold it.
#[derive(Debug)]
pub struct SrqCell {
    /// The device.
    pub core: &'static Core,
    context: Arc<ContextCell>,
    /// Protection domain of its receives.
    pub pd: u32,
    state: FastMutex<rank::SharedReceiveQueue, State>,
    cookie: AtomicU64,
    acks: Arc<Acks>,
    holders: Holders,
    hold: Mutex<rank::ObjectHold, Option<Hold>>,
    xrc: Option<Xrc>,
    /// Completion queue of the receives of an SRQ that matches tags.
    tm_cq: Option<Arc<CqCell>>,
}

#[derive(Debug)]
#[expect(dead_code, reason = "held for their drop")]
struct Hold(Held<PdCell>, Option<Box<dyn Any + Send + Sync>>, Option<Held<CqCell>>, Ticket);

/// The part of an XRC domain that its SRQs hold.
pub struct XrcPart {
    /// The XRC domain.
    pub domain: u64,
    /// The domain is not closed before this is dropped.
    pub held: Box<dyn Any + Send + Sync>,
    /// The table that it stands in.
    pub table: &'static SrqTable,
}

/// The further state of an SRQ of type XRC.
#[derive(Debug)]
struct Xrc {
    number: u32,
    /// Protection domain of the memory that requests may touch.
    pd: u32,
    domain: u64,
    /// Where requests find it.
    table: &'static SrqTable,
    cq: Arc<CqCell>,
    /// Its CQ has overrun, or it was destroyed: requests no longer find it.
    closed: AtomicBool,
}

#[derive(Debug)]
struct State {
    queue: RecvQueue,
    max_sge: u32,
    limit: u32,
    /// It was destroyed: receives taken from it do not complete.
    gone: bool,
    tags: Option<TagList>,
}

impl Holdable for SrqCell {
    fn holders(&self) -> &Holders {
        &self.holders
    }
}

/// The name of an SRQ in the log. Only one of type XRC has a number. To be shown it takes no lock.
#[derive(Clone, Copy, Debug)]
pub struct SrqName {
    number: Option<u32>,
    pd: u32,
    max_wr: u32,
}

impl fmt::Display for SrqName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, pd, max_wr } = self;
        match number {
            Some(number) => write!(f, "SRQ {number:#x}"),
            None => {
                write!(f, "the SRQ of protection domain {} ({max_wr} requests)", pd & 0xff_ffff)
            }
        }
    }
}

impl SrqCell {
    /// Whether it belongs to the device of a context.
    #[must_use]
    pub fn is_of(&self, core: &Core, context: &ContextCell) -> bool {
        std::ptr::eq(self.core, core) && self.context.device == context.device
    }
}

impl SrqCell {
    fn new(
        pd: &Pd,
        init: &SrqInitAttr,
        queue: RecvQueue,
        hold: Hold,
        xrc: Option<Xrc>,
        tm: Option<(Arc<CqCell>, TagList)>,
    ) -> Self {
        let (tm_cq, tags) = tm.unzip();
        Self {
            core: pd.cell.core,
            context: Arc::clone(&pd.context),
            pd: pd.number(),
            state: FastMutex::new(State {
                queue,
                max_sge: init.max_sge,
                limit: 0,
                gone: false,
                tags,
            }),
            cookie: AtomicU64::new(init.cookie),
            acks: Arc::default(),
            holders: Holders::default(),
            hold: Mutex::new(Some(hold)),
            xrc,
            tm_cq,
        }
    }

    /// Takes the oldest request; raises the limit event where due.
    pub fn take(&self, into: &mut RecvWqe) -> bool {
        self.take_locked(self.state.lock(), into)
    }

    fn take_locked(
        &self,
        mut state: FastMutexGuard<'_, rank::SharedReceiveQueue, State>,
        into: &mut RecvWqe,
    ) -> bool {
        let taken = state.queue.pop(into);
        if taken && state.limit > 0 && state.queue.len() < state.limit as usize {
            state.limit = 0;
            // Under the lock: the SRQ may be destroyed behind it.
            let element = EventElement::Srq { cookie: self.cookie.load(Ordering::Relaxed) };
            self.context.events.raise(AsyncEventKind::SrqLimitReached, element, Some(&self.acks));
        }
        taken
    }

    /// Requests that wait; None if another thread keeps it locked.
    #[must_use]
    pub fn waiting_within(&self, within: Duration) -> Option<usize> {
        Some(self.state.try_lock_for(within)?.queue.len())
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.state.lock().queue.len()
    }

    /// Requests that it has room for.
    #[must_use]
    pub fn max_wr(&self) -> u32 {
        self.state.lock().queue.capacity() as u32
    }

    /// The number by which requests name it; only one of type XRC has one.
    pub fn number(&self) -> Option<u32> {
        self.xrc.as_ref().map(|xrc| xrc.number)
    }

    /// Its XRC domain.
    pub fn xrc_domain(&self) -> Option<u64> {
        self.xrc.as_ref().map(|xrc| xrc.domain)
    }

    /// The protection domain of the requests that name it; None when it takes no more.
    pub fn pd_of_requests(&self) -> Option<u32> {
        let xrc = self.xrc.as_ref()?;
        (!xrc.closed.load(Ordering::Acquire)).then_some(xrc.pd)
    }

    /// Whether it is of type XRC and completes its receives in such a CQ.
    pub fn completes_in(&self, is_it: impl Fn(&Arc<CqCell>) -> bool) -> bool {
        self.xrc.as_ref().is_some_and(|xrc| is_it(&xrc.cq))
    }

    /// Where its receives complete, if it matches tags.
    pub fn tm_cq(&self) -> Option<&Arc<CqCell>> {
        self.tm_cq.as_ref()
    }

    /// Completes a receive that a target took. The CQ, if the completion was lost in it for the first time.
    #[must_use]
    pub fn complete(&self, wc: Wc, solicited: bool) -> Option<&Arc<CqCell>> {
        let xrc = self.xrc.as_ref()?;
        // Held over the push: once the SRQ is destroyed, its CQ may be.
        let state = self.state.lock();
        (!state.gone && xrc.cq.push(wc, solicited)).then_some(&xrc.cq)
    }

    /// Its CQ has overrun.
    pub fn fail(&self) {
        let Some(xrc) = &self.xrc else { return };
        let state = self.state.lock();
        if !state.gone && !xrc.closed.swap(true, Ordering::AcqRel) {
            let element = EventElement::Srq { cookie: self.cookie.load(Ordering::Relaxed) };
            self.context.events.raise(AsyncEventKind::SrqErr, element, Some(&self.acks));
        }
    }

    /// Requests no longer find it, and receives that targets took from it do not complete.
    fn close(&self) {
        let Some(xrc) = &self.xrc else { return };
        xrc.table.remove(xrc.number);
        let mut state = self.state.lock();
        xrc.closed.store(true, Ordering::Release);
        state.gone = true;
        // A target may remember this cell for long.
        state.queue = RecvQueue::new(0, 0);
    }

    fn check(&self) -> Result<(), Useless> {
        self.holders.check(self.core)
    }
}

impl Srq {
    pub(crate) fn create(pd: &Pd, init: &SrqInitAttr) -> Result<Self, CreateError> {
        let hold = Self::hold(&pd.cell, init)?;
        let hold = Hold(hold.0, None, None, hold.1);
        let queue = Self::queue(&pd.cell, init)?;
        Ok(Self(Arc::new(SrqCell::new(pd, init, queue, hold, None, None))))
    }

    #[doc(hidden)]
    pub fn create_xrc(
        pd: &Pd,
        XrcPart { domain, held, table }: XrcPart,
        cq: &Cq,
        init: &SrqInitAttr,
    ) -> Result<Self, CreateError> {
        let (pd_hold, ticket) = Self::hold(&pd.cell, init)?;
        let core = pd.cell.core;
        if !cq.0.is_of(core, &pd.context) {
            return Err(CreateError::Foreign("completion queue"));
        }
        let cq_hold =
            Held::new(&cq.0, Holder::Srq).ok_or(CreateError::Foreign("completion queue"))?;
        let hold = Hold(pd_hold, Some(held), Some(cq_hold), ticket);
        let queue = Self::queue(&pd.cell, init)?;
        let cell = table.insert(|number| {
            let xrc = Xrc {
                number,
                pd: pd.cell.number,
                domain,
                table,
                cq: Arc::clone(&cq.0),
                closed: AtomicBool::new(false),
            };
            SrqCell::new(pd, init, queue, hold, Some(xrc), None)
        });
        Ok(Self(cell.ok_or(CreateError::Exhausted("SRQ numbers"))?))
    }

    fn queue(pd: &PdCell, init: &SrqInitAttr) -> Result<RecvQueue, CreateError> {
        let memory = pd.memory.of(Queue::Srq);
        Ok(RecvQueue::in_memory(init.max_wr, init.max_sge, &memory)?)
    }

    /// Checks the sizes, and takes the holds of every SRQ.
    fn hold(pd: &Arc<PdCell>, init: &SrqInitAttr) -> Result<(Held<PdCell>, Ticket), CreateError> {
        let core = pd.core;
        core.may_make(pd.device)?;
        core.offers(pd.device, Feature::Srq)?;
        if init.max_wr == 0 {
            return Err(CreateError::Invalid("max_wr of an SRQ"));
        }
        core.within(pd.device, "max_wr of an SRQ", init.max_wr, bound!(max_srq_wr))?;
        core.within(pd.device, "max_sge of an SRQ", init.max_sge, bound!(max_srq_sge))?;
        let ticket = core.take(pd.device, |all| &all.srq)?;
        let hold = Held::new(pd, Holder::Srq).ok_or(CreateError::Foreign("protection domain"))?;
        Ok((hold, ticket))
    }

    /// The number by which peers name it (`ibv_get_srq_num`): one of type XRC has one.
    #[must_use]
    pub fn number(&self) -> Option<u32> {
        self.0.number()
    }

    /// Its name in the log.
    #[must_use]
    pub fn name(&self) -> SrqName {
        SrqName { number: self.number(), pd: self.0.pd, max_wr: self.0.max_wr() }
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
        if !self.0.core.is_current() {
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
        self.0.check()?;
        // A program's allocator may do anything with the queue: it is called before and after it is locked.
        let mut room = max_wr.map(|max_wr| self.room(max_wr)).transpose()?;
        let mut state = self.0.state.lock();
        self.0.check()?;
        let capacity = max_wr.unwrap_or(state.queue.capacity() as u32);
        if let Some(value) = limit.filter(|limit| *limit > capacity) {
            let what = "srq_limit";
            return Err(ModifyObjectError::OutOfRange { what, value, least: 0, most: capacity });
        }
        if let Some(room) = &mut room
            && !state.queue.resize(room)
        {
            return Err(ModifyObjectError::DoesNotFit);
        }
        state.limit = limit.unwrap_or(state.limit);
        Ok(())
    }

    /// An empty queue of another size, in memory of the same kind.
    fn room(&self, max_wr: u32) -> Result<RecvQueue, ModifyObjectError> {
        let (device, what) = (self.0.context.device, "max_wr of an SRQ");
        self.0.core.changes_within(device, what, max_wr, bound!(max_srq_wr))?;
        let (max_sge, memory) = {
            let state = self.0.state.lock();
            (state.max_sge, state.queue.memory().clone())
        };
        RecvQueue::in_memory(max_wr, max_sge, &memory).map_err(|_| ModifyObjectError::DoesNotFit)
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
        if !self.0.core.is_current() {
            return Ok(());
        }
        let name = self.name();
        self.0.holders.retire().inspect_err(|e| {
            crate::say_again!(
                error,
                self.0.holders.id(),
                "{name} is not destroyed: {e}; see `anyverbs explain AV8009`"
            )
        })?;
        self.0.close();
        self.0.context.events.withdraw(&self.0.acks);
        self.0.acks.wait(format_args!("{name}"));
        // Its memory may be a program's, which wants it back.
        let queue = std::mem::replace(&mut self.0.state.lock().queue, RecvQueue::new(0, 0));
        drop(queue);
        drop(self.0.hold.lock().take());
        Ok(())
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // Queue pairs keep one of type BASIC; nothing keeps one of type XRC. The locks of an inherited one are the
        // parent's.
        if self.0.xrc.is_some() && self.0.core.is_current() && self.0.holders.retire().is_ok() {
            self.0.close();
            self.0.context.events.withdraw(&self.0.acks);
            drop(self.0.hold.lock().take());
        }
    }
}

/// Posts receives to an SRQ; see [`Srq::post`].
#[derive(Debug)]
pub struct SrqPoster<'a> {
    state: FastMutexGuard<'a, rank::SharedReceiveQueue, State>,
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

impl Pd {
    /// Makes a shared receive queue (`ibv_create_srq`).
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn create_srq(&self, init: &SrqInitAttr) -> Result<Srq, CreateError> {
        Srq::create(self, init)
    }
}
