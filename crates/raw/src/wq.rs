//! Work queue of receives (`ibv_create_wq(3)`).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use anyverbs_locks::{Mutex, rank};
use anyverbs_objects::async_event::{AsyncEventKind, EventElement};
use anyverbs_objects::base::Ticket;
use anyverbs_objects::context_cell::ContextCell;
use anyverbs_objects::cq::{Cq, CqCell};
use anyverbs_objects::error::{CreateError, DestroyError, ModifyObjectError, PostError, Useless};
use anyverbs_objects::event_queue::Acks;
use anyverbs_objects::holders::{Held, Holdable, Holder, Holders};
use anyverbs_objects::limits::bound;
use anyverbs_objects::pd::{Pd, PdCell};
use anyverbs_objects::persona::Feature;
use anyverbs_proto::recv_queue::RecvQueue;
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wr::RecvWr;
use anyverbs_queue_memory::Queue;

use super::number::Number;
use super::receive::{Mode, ReceiveFlags, ReceiveQueue};
use super::switch::{CqUser, Switch};

/// Parameters of a work queue (`struct ibv_wq_init_attr`).
#[derive(Clone, Copy, Debug)]
pub struct WqInit<'a> {
    /// Where receives complete.
    pub cq: &'a Cq,
    /// Requests, at least one.
    pub max_wr: u32,
    /// Elements of a request; at least one is made.
    pub max_sge: u32,
    /// Actions on frames.
    pub flags: ReceiveFlags,
    /// The program's cookie; see [`Wq::set_cookie`].
    pub cookie: u64,
}

/// `enum ibv_wq_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(u32)]
pub enum WqState {
    /// Takes no requests.
    #[default]
    Reset = 0,
    /// Receives.
    Ready = 1,
    /// Requests are flushed.
    Error = 2,
}

/// Changes of a work queue (`struct ibv_wq_attr`).
#[derive(Clone, Copy, Debug, Default)]
pub struct WqAttr {
    /// Where to go.
    pub state: Option<WqState>,
    /// Where the program believes that the queue is.
    pub current: Option<WqState>,
    /// Values of flags, and which of them count.
    pub flags: Option<(ReceiveFlags, ReceiveFlags)>,
}

/// Work queue (`ibv_create_wq`).
#[derive(Debug)]
pub struct Wq(pub(super) Arc<WqCell>);

#[derive(Debug)]
pub(super) struct WqCell {
    pub(super) switch: &'static Switch,
    context: Arc<ContextCell>,
    sizes: (u32, u32),
    pub(super) queue: ReceiveQueue,
    /// Control.
    state: Mutex<rank::WorkQueue, WqState>,
    cookie: AtomicU64,
    acks: Arc<Acks>,
    holders: Holders,
    hold: Mutex<rank::ObjectHold, Option<Hold>>,
    number: Number,
}

#[derive(Debug)]
#[expect(dead_code, reason = "held for their drop")]
struct Hold(Held<PdCell>, Held<CqCell>, Ticket);

impl Holdable for WqCell {
    fn holders(&self) -> &Holders {
        &self.holders
    }
}

impl CqUser for WqCell {
    fn uses(&self, which: &dyn Fn(&Arc<CqCell>) -> bool) -> bool {
        which(self.queue.cq())
    }

    fn belongs_to(&self, device: usize) -> bool {
        self.context.device == device
    }

    /// A receive that failed may have moved it before, and have overrun the CQ with what it flushed.
    fn fail(&self) {
        let mut state = self.state.lock();
        if self.current(&state) == WqState::Ready {
            *state = WqState::Error;
            self.queue.set_mode(Mode::Error);
            self.raise_fatal();
        }
    }
}

impl WqCell {
    /// Whether it belongs to this device of the process.
    pub(super) fn is_of(&self, core: &anyverbs_objects::base::Core, device: usize) -> bool {
        std::ptr::eq(self.switch.core(), core) && self.context.device == device
    }

    fn raise_fatal(&self) {
        let element = EventElement::Wq { cookie: self.cookie.load(Ordering::Relaxed) };
        self.context.events.raise(AsyncEventKind::WqFatal, element, Some(&self.acks));
    }

    /// Takes a frame of a queue pair that spreads them.
    pub(super) fn receive(&self, arrived: &super::receive::Arrived<'_>, tag: u32) {
        if self.queue.deliver(arrived, tag) {
            self.raise_fatal();
        }
    }
}

impl Wq {
    /// See `Context::create_wq`.
    #[doc(hidden)]
    pub fn create(
        switch: &'static Switch,
        Pd { cell: pd, context }: &Pd,
        init: &WqInit<'_>,
    ) -> Result<Wq, CreateError> {
        if !std::ptr::eq(pd.core, switch.core()) {
            return Err(CreateError::Forked);
        }
        switch.core().may_make(pd.device)?;
        switch.core().offers(pd.device, Feature::RawPackets)?;
        if !init.cq.0.is_of(switch.core(), context) {
            return Err(CreateError::Foreign("completion queue"));
        }
        if init.max_wr == 0 {
            return Err(CreateError::Invalid("max_wr of a work queue"));
        }
        switch.core().within(
            pd.device,
            "max_wr of a work queue",
            init.max_wr,
            bound!(max_qp_wr),
        )?;
        switch.core().within(
            pd.device,
            "max_sge of a work queue",
            init.max_sge,
            bound!(max_sge),
        )?;
        let ticket = switch.core().take(pd.device, |all| &all.wq)?;
        let hold = Hold(
            Held::new(pd, Holder::Wq).ok_or(CreateError::Foreign("protection domain"))?,
            Held::new(&init.cq.0, Holder::Wq).ok_or(CreateError::Foreign("completion queue"))?,
            ticket,
        );
        let number = Number::take(switch.transport)?;
        // Without an element a receive has no place for a frame.
        let sizes = (init.max_wr, init.max_sge.max(1));
        let queue = RecvQueue::in_memory(sizes.0, sizes.1, &pd.memory.of(Queue::Wq))?;
        let cq = &init.cq.0;
        let queue =
            ReceiveQueue::new(switch.core(), number.qpn(), pd.number, cq, None, queue, init.flags);
        let cell = Arc::new(WqCell {
            switch,
            context: Arc::clone(context),
            sizes,
            queue,
            state: Mutex::new(WqState::Reset),
            cookie: AtomicU64::new(init.cookie),
            acks: Arc::default(),
            holders: Holders::default(),
            hold: Mutex::new(Some(hold)),
            number,
        });
        let member: Weak<dyn CqUser> = Arc::<WqCell>::downgrade(&cell);
        switch.join(member);
        Ok(Wq(cell))
    }
}

impl Wq {
    /// Its number, that of its completions.
    #[must_use]
    pub fn number(&self) -> Qpn {
        self.0.number.qpn()
    }

    /// Actual sizes: requests, and elements of a request.
    #[must_use]
    pub fn sizes(&self) -> (u32, u32) {
        self.0.sizes
    }

    /// Replaces the cookie that events carry.
    pub fn set_cookie(&self, cookie: u64) {
        self.0.cookie.store(cookie, Ordering::Relaxed);
    }

    fn check(&self) -> Result<(), Useless> {
        self.0.holders.check(self.0.switch.core())
    }

    /// State now.
    ///
    /// # Errors
    /// [`ModifyObjectError::Gone`], [`ModifyObjectError::Forked`].
    pub fn state(&self) -> Result<WqState, ModifyObjectError> {
        self.check()?;
        Ok(self.0.current(&self.0.state.lock()))
    }

    /// Changes state and flags (`ibv_modify_wq`). From ERR only RESET leads on.
    ///
    /// # Errors
    /// [`ModifyObjectError::Invalid`]; [`ModifyObjectError::Failed`] on a device that has failed, whatever the state. Nothing was changed.
    pub fn modify(&self, attr: &WqAttr) -> Result<(), ModifyObjectError> {
        self.check()?;
        let cell = &self.0;
        if cell.switch.core().has_failed(cell.context.device) {
            return Err(ModifyObjectError::Failed);
        }
        let mut state = cell.state.lock();
        let current = cell.current(&state);
        if attr.current.is_some_and(|assumed| assumed != current) {
            return Err(ModifyObjectError::Invalid("current state of the work queue"));
        }
        let to = attr.state.unwrap_or(current);
        if current == WqState::Error && to == WqState::Ready {
            return Err(ModifyObjectError::Invalid("state of the work queue"));
        }
        if let Some((flags, which)) = attr.flags {
            cell.queue.set_flags(flags, which);
        }
        if attr.state.is_some() {
            cell.queue.set_mode(match to {
                WqState::Reset => Mode::Closed,
                WqState::Ready => Mode::Ready,
                WqState::Error => Mode::Error,
            });
            *state = to;
        }
        drop(state);
        cell.switch.transport.after_unlock();
        Ok(())
    }

    /// Posts receives (`ibv_post_wq_recv`).
    ///
    /// # Errors
    /// The index of the first that was refused, and why; those before it are posted.
    pub fn post_recv(&self, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        wrs.iter().enumerate().try_for_each(|(i, wr)| self.recv(wr).map_err(|e| (i, e)))
    }

    /// Posts one receive.
    ///
    /// # Errors
    /// [`PostError`].
    pub fn recv(&self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        self.check()?;
        Ok(self.0.queue.post(wr)?)
    }

    /// Acknowledges asynchronous events of this queue that were read.
    pub fn ack_async_events(&self, n: u32) {
        self.0.acks.acknowledge(n);
    }

    /// Destroys it (`ibv_destroy_wq`); its completions leave the CQ. Waits while an event of it was read and not
    /// acknowledged.
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while an indirection table has it.
    pub fn destroy(&self) -> Result<(), DestroyError> {
        let cell = &self.0;
        if !cell.switch.core().is_current() {
            return Ok(());
        }
        cell.holders.retire().inspect_err(|e| {
            anyverbs_objects::say_again!(
                error,
                cell.holders.id(),
                "a work queue is not destroyed: {e}; see `anyverbs explain AV8009`"
            )
        })?;
        cell.end();
        cell.acks.wait(format_args!("a work queue"));
        drop(cell.hold.lock().take());
        Ok(())
    }
}

impl WqCell {
    /// A receive that failed has moved it.
    fn current(&self, state: &WqState) -> WqState {
        if self.queue.has_failed() { WqState::Error } else { *state }
    }

    fn end(&self) {
        // A thread that fails it later finds it so, and raises no event of it.
        *self.state.lock() = WqState::Reset;
        self.queue.end();
        self.context.events.withdraw(&self.acks);
    }
}

impl Drop for Wq {
    fn drop(&mut self) {
        let cell = &self.0;
        if cell.switch.core().is_current() && cell.holders.retire().is_ok() {
            cell.end();
            drop(cell.hold.lock().take());
        }
    }
}
