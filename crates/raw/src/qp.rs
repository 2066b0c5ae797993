//! Queue pairs of type RAW_PACKET.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use anyverbs_locks::{Mutex, rank};
use anyverbs_objects::async_event::{AsyncEventKind, EventElement};
use anyverbs_objects::base::Ticket;
use anyverbs_objects::context_cell::ContextCell;
use anyverbs_objects::cq::{Cq, CqCell};
use anyverbs_objects::error::{CreateError, DestroyError, ModifyObjectError, PostError, Useless};
use anyverbs_objects::event_queue::Acks;
use anyverbs_objects::holders::{Held, Holdable, Holder, Holders};
use anyverbs_objects::pd::{Pd, PdCell};
use anyverbs_objects::persona::Feature;
use anyverbs_objects::srq::{Srq, SrqCell};
use anyverbs_proto::qp::SqCredit;
use anyverbs_proto::qp::attr::{QpAttr, QpAttrMask, QpCap, QpState};
use anyverbs_proto::qp::pacing::RateLimit;
use anyverbs_proto::raw::rss::RxHash;
use anyverbs_proto::raw::transition;
use anyverbs_proto::raw::tso::MAX_HEADER;
use anyverbs_proto::recv_queue::RecvQueue;
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wr::RecvWr;
use anyverbs_queue_memory::Queue;
use anyverbs_transport::qp::{check_sizes, held, held_cqs, inline_room};

use super::ind_table::{RwqIndTable, TableCell};
use super::number::Number;
use super::receive::{Arrived, Mode, ReceiveFlags, ReceiveQueue};
use super::send::{RawPoster, Sends, pacing};
use super::switch::{CqUser, Switch};

/// Parameters of a raw queue pair.
#[derive(Clone, Copy, Debug)]
pub struct RawQpInit<'a> {
    /// Where sends complete.
    pub send_cq: &'a Cq,
    /// Where receives complete.
    pub recv_cq: &'a Cq,
    /// Where receives come from, instead of the queue pair's own queue.
    pub srq: Option<&'a Srq>,
    /// Sizes asked for.
    pub cap: QpCap,
    /// Every send makes a completion.
    pub sq_sig_all: bool,
    /// Bytes of the longest header of a request that leaves in segments; 0 for none.
    pub max_tso_header: u32,
    /// Actions on received frames.
    pub flags: ReceiveFlags,
    /// The program's cookie; see [`RawQp::set_cookie`].
    pub cookie: u64,
}

/// Parameters of a queue pair that spreads frames over work queues. It sends nothing.
#[derive(Clone, Debug)]
pub struct HashQpInit<'a> {
    /// The work queues.
    pub table: &'a RwqIndTable,
    /// The choice of one of them for a frame.
    pub hash: RxHash,
    /// The program's cookie.
    pub cookie: u64,
}

/// Queue pair for raw packets (`IBV_QPT_RAW_PACKET`). It receives the frames that flow rules lead to it
/// ([`create_flow`](Self::create_flow)). Destroyed when dropped, unless a rule leads to it.
#[derive(Debug)]
pub struct RawQp(pub(super) Arc<RawCell>);

#[derive(Debug)]
pub(super) struct RawCell {
    switch: &'static Switch,
    context: Arc<ContextCell>,
    /// The place of its port among those of all devices. It counts there; the first one's until INIT.
    port: AtomicUsize,
    pub(super) sends: Mutex<rank::RawQueuePair, Sends>,
    pub(super) send_cq: Option<Arc<CqCell>>,
    pub(super) pd: u32,
    receives: Receives,
    cookie: AtomicU64,
    acks: Arc<Acks>,
    holders: Holders,
    hold: Mutex<rank::ObjectHold, Option<Hold>>,
    number: Number,
}

#[derive(Debug)]
enum Receives {
    Own(Box<ReceiveQueue>),
    Spread(Arc<TableCell>, RxHash),
}

#[derive(Debug)]
#[expect(dead_code, reason = "held for their drop")]
struct Hold {
    pd: Held<PdCell>,
    cqs: [Option<Held<CqCell>>; 2],
    srq: Option<Held<SrqCell>>,
    table: Option<Held<TableCell>>,
    ticket: Ticket,
}

impl Holdable for RawCell {
    fn holders(&self) -> &Holders {
        &self.holders
    }
}

/// Opens the way to frames for a queue pair of `pd`.
fn open_switch(switch: &'static Switch, pd: &Pd) -> Result<(), CreateError> {
    if !std::ptr::eq(pd.cell.core, switch.core()) {
        return Err(CreateError::Forked);
    }
    switch.core().may_make(pd.cell.device)?;
    switch.core().offers(pd.cell.device, Feature::RawPackets)?;
    switch.open()
}

impl RawQp {
    /// See `Context::create_raw_qp`.
    #[doc(hidden)]
    pub fn create(
        switch: &'static Switch,
        pd: &Pd,
        init: &RawQpInit<'_>,
    ) -> Result<RawQp, CreateError> {
        open_switch(switch, pd)?;
        let cap = actual_cap(switch, pd.cell.device, init)?;
        let foreign = |what| CreateError::Foreign(what);
        if [init.send_cq, init.recv_cq].iter().any(|cq| !cq.0.is_of(switch.core(), &pd.context)) {
            return Err(foreign("completion queue"));
        }
        if init.srq.is_some_and(|srq| !srq.0.is_of(switch.core(), &pd.context)) {
            return Err(foreign("SRQ"));
        }
        if init.srq.is_some_and(|srq| srq.number().is_some()) {
            return Err(CreateError::Invalid("SRQ: one of type XRC is for targets"));
        }
        let hold = Hold {
            pd: Held::new(&pd.cell, Holder::Qp).ok_or(foreign("protection domain"))?,
            cqs: held_cqs([Some(&init.send_cq.0), Some(&init.recv_cq.0)])?,
            srq: held(init.srq.map(|srq| &srq.0), "SRQ")?,
            table: None,
            ticket: switch.core().take(pd.cell.device, |all| &all.qp)?,
        };
        let number = Number::take(switch.transport)?;
        let memory = pd.cell.memory.of(Queue::Qp);
        let queue = RecvQueue::in_memory(cap.max_recv_wr, cap.max_recv_sge, &memory)?;
        let (cq, srq) = (&init.recv_cq.0, init.srq.map(|srq| &srq.0));
        let queue =
            ReceiveQueue::new(switch.core(), number.qpn(), pd.number(), cq, srq, queue, init.flags);
        let credit = Arc::new(SqCredit::default());
        init.send_cq.0.attach(number.qpn(), Arc::clone(&credit));
        let sends = Sends::new(cap, init.sq_sig_all, init.max_tso_header, credit);
        let send_cq = Some(Arc::clone(&init.send_cq.0));
        let queues = (sends, send_cq, Receives::Own(Box::new(queue)));
        Ok(Self::plug_in(switch, pd, number, queues, hold, init.cookie))
    }

    /// See `Context::create_hash_qp`.
    #[doc(hidden)]
    pub fn create_hash(
        switch: &'static Switch,
        pd: &Pd,
        init: &HashQpInit<'_>,
    ) -> Result<RawQp, CreateError> {
        open_switch(switch, pd)?;
        if !pd.cell.is_of(init.table.0.core, init.table.0.device) {
            return Err(CreateError::Foreign("indirection table"));
        }
        let hold = Hold {
            pd: Held::new(&pd.cell, Holder::Qp).ok_or(CreateError::Foreign("protection domain"))?,
            cqs: [None, None],
            srq: None,
            table: held(Some(&init.table.0), "indirection table")?,
            ticket: switch.core().take(pd.cell.device, |all| &all.qp)?,
        };
        let number = Number::take(switch.transport)?;
        let sends = Sends::none();
        let receives = Receives::Spread(Arc::clone(&init.table.0), init.hash.clone());
        Ok(Self::plug_in(switch, pd, number, (sends, None, receives), hold, init.cookie))
    }

    fn plug_in(
        switch: &'static Switch,
        pd: &Pd,
        number: Number,
        (sends, send_cq, receives): (Sends, Option<Arc<CqCell>>, Receives),
        hold: Hold,
        cookie: u64,
    ) -> RawQp {
        let cell = Arc::new(RawCell {
            switch,
            context: Arc::clone(&pd.context),
            port: AtomicUsize::new(pd.context.device),
            sends: Mutex::new(sends),
            send_cq,
            pd: pd.number(),
            receives,
            cookie: AtomicU64::new(cookie),
            acks: Arc::default(),
            holders: Holders::default(),
            hold: Mutex::new(Some(hold)),
            number,
        });
        let member: Weak<dyn CqUser> = Arc::<RawCell>::downgrade(&cell);
        switch.join(member);
        if let Some(faults) = &switch.transport.links.faults {
            faults.add_raw_qp(cell.device());
        }
        RawQp(cell)
    }
}

/// Checks the requested sizes; returns those that the device gives.
fn actual_cap(switch: &Switch, device: usize, init: &RawQpInit<'_>) -> Result<QpCap, CreateError> {
    let mut cap = init.cap;
    if init.srq.is_some() {
        cap.max_recv_wr = 0;
        cap.max_recv_sge = 0;
    }
    check_sizes(switch.core(), device, &cap)?;
    CreateError::check("max_tso_header", init.max_tso_header, MAX_HEADER as u32)?;
    cap.max_inline_data = cap.max_inline_data.max(inline_room(&cap));
    Ok(cap)
}

impl CqUser for RawCell {
    fn uses(&self, which: &dyn Fn(&Arc<CqCell>) -> bool) -> bool {
        self.send_cq.as_ref().is_some_and(which) || self.own_queue().is_some_and(|q| which(q.cq()))
    }

    fn belongs_to(&self, device: usize) -> bool {
        self.context.device == device
    }

    fn fail(&self) {
        let mut sends = self.sends.lock();
        if !matches!(self.current(&sends), QpState::Reset | QpState::Err) {
            self.raise(AsyncEventKind::QpFatal);
            self.enter(&mut sends, QpState::Err);
        }
    }
}

impl RawCell {
    pub(super) fn switch(&self) -> &'static Switch {
        self.switch
    }

    pub(super) fn device(&self) -> usize {
        self.context.device
    }

    /// The place of its port among those of all devices.
    pub(super) fn port(&self) -> usize {
        self.port.load(Ordering::Relaxed)
    }

    pub(super) fn qpn(&self) -> Qpn {
        self.number.qpn()
    }

    /// Takes a frame that a rule led here.
    pub(super) fn receive(&self, arrived: &Arrived<'_>, tag: u32) {
        match &self.receives {
            Receives::Own(queue) => {
                if queue.deliver(arrived, tag) && queue.has_srq() {
                    self.raise(AsyncEventKind::QpLastWqeReached);
                }
            }
            Receives::Spread(table, hash) => {
                table.queue(hash.of(arrived.frame)).receive(arrived, tag);
            }
        }
    }

    fn own_queue(&self) -> Option<&ReceiveQueue> {
        match &self.receives {
            Receives::Own(queue) => Some(queue),
            Receives::Spread(..) => None,
        }
    }

    /// State now: a receive that failed has moved it.
    pub(super) fn current(&self, sends: &Sends) -> QpState {
        match &self.receives {
            Receives::Own(queue) if queue.has_failed() => QpState::Err,
            Receives::Own(_) => sends.state,
            Receives::Spread(..) => QpState::Rtr,
        }
    }

    fn raise(&self, kind: AsyncEventKind) {
        let cookie = self.cookie.load(Ordering::Relaxed);
        let element = EventElement::Qp { qpn: self.qpn(), cookie };
        self.context.events.raise(kind, element, Some(&self.acks));
    }

    fn enter(&self, sends: &mut Sends, to: QpState) {
        let was = self.current(sends);
        sends.state = to;
        if to == QpState::Err {
            pacing::flush(self, sends);
        }
        let Some(queue) = self.own_queue() else { return };
        queue.set_mode(match to {
            QpState::Reset => Mode::Closed,
            QpState::Init => Mode::Idle,
            QpState::Err => Mode::Error,
            _ => Mode::Ready,
        });
        match to {
            QpState::Reset => {
                // Then no poller gives slots back meanwhile.
                if let Some(cq) = &self.send_cq {
                    cq.purge(self.qpn());
                }
                sends.reset();
            }
            QpState::Err if was != QpState::Err && queue.has_srq() => {
                self.raise(AsyncEventKind::QpLastWqeReached);
            }
            _ => {}
        }
    }

    fn limit_rate(self: &Arc<Self>, sends: &mut Sends, limit: &RateLimit) {
        let mtu = self.switch.core().gids.active_mtu(self.port());
        pacing::limit(self, sends, limit, mtu.bytes());
        self.switch.flush(&mut sends.batch);
    }

    fn end(&self) {
        let mut sends = self.sends.lock();
        self.enter(&mut sends, QpState::Reset);
        drop(sends);
        if let Some(queue) = self.own_queue() {
            queue.end();
        }
        if let Some(cq) = &self.send_cq {
            cq.detach(self.qpn());
        }
        self.context.events.withdraw(&self.acks);
    }
}

impl RawQp {
    /// Its number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.0.qpn()
    }

    /// Replaces the cookie that events carry.
    pub fn set_cookie(&self, cookie: u64) {
        self.0.cookie.store(cookie, Ordering::Relaxed);
    }

    /// Actual sizes; zeros for an inherited queue pair and for one that spreads frames.
    #[must_use]
    pub fn cap(&self) -> QpCap {
        if self.0.switch.core().is_current() { self.0.sends.lock().cap } else { QpCap::default() }
    }

    fn check(&self) -> Result<(), Useless> {
        self.0.holders.check(self.0.switch.core())
    }

    /// Attributes and sizes now (`ibv_query_qp`).
    ///
    /// # Errors
    /// [`ModifyObjectError::Gone`], [`ModifyObjectError::Forked`].
    pub fn query(&self) -> Result<(QpAttr, QpCap), ModifyObjectError> {
        self.check()?;
        let sends = self.0.sends.lock();
        let state = self.0.current(&sends);
        let rate_limit = sends.paced.as_ref().map_or(0, |paced| paced.kbps());
        let attr =
            QpAttr { state, cur_state: state, port: sends.port, rate_limit, ..QpAttr::default() };
        Ok((attr, sends.cap))
    }

    /// State now.
    ///
    /// # Errors
    /// [`ModifyObjectError::Gone`], [`ModifyObjectError::Forked`].
    pub fn state(&self) -> Result<QpState, ModifyObjectError> {
        Ok(self.query()?.0.state)
    }

    /// Changes port and state (`ibv_modify_qp`).
    ///
    /// # Errors
    /// [`ModifyObjectError`]; nothing was changed. [`ModifyObjectError::Unsupported`] for a queue pair that spreads frames.
    pub fn modify(&self, attr: &QpAttr, mask: QpAttrMask) -> Result<(), ModifyObjectError> {
        self.check()?;
        let cell = &self.0;
        if cell.own_queue().is_none() {
            return Err(ModifyObjectError::Unsupported(
                "a state of its own: its work queues have one",
            ));
        }
        let ends =
            mask.contains(QpAttrMask::STATE) && matches!(attr.state, QpState::Reset | QpState::Err);
        if !ends && cell.switch.core().has_failed(cell.device()) {
            return Err(ModifyObjectError::Failed);
        }
        let mut sends = cell.sends.lock();
        let limits = cell.switch.core().attr_of(cell.device());
        // Frames go to the host's processes, and by one interface: all ports of all devices are on one network.
        let (ports, max_rate) = (limits.phys_port_cnt, limits.max_rate_limit);
        let to = transition::check(cell.current(&sends), attr, mask, ports, max_rate)?;
        if mask.contains(QpAttrMask::PORT) {
            sends.port = attr.port;
            if let Some(port) = cell.switch.core().port(cell.device(), attr.port) {
                cell.port.store(port, Ordering::Relaxed);
                cell.own_queue().inspect(|queue| queue.counts_at(port));
            }
        }
        if mask.contains(QpAttrMask::STATE) {
            cell.enter(&mut sends, to);
        }
        if mask.contains(QpAttrMask::RATE_LIMIT) {
            cell.limit_rate(
                &mut sends,
                &RateLimit { kbps: attr.rate_limit, ..RateLimit::default() },
            );
        }
        drop(sends);
        cell.switch.transport.after_unlock();
        Ok(())
    }

    /// Limits the rate of its sends (`ibv_modify_qp_rate_limit`), in any state; RESET ends the limit. Frames count with the bytes that are
    /// posted.
    ///
    /// # Errors
    /// [`ModifyObjectError::Invalid`] for a rate beyond the device's highest, or of a queue pair that spreads frames.
    pub fn limit_rate(&self, limit: &RateLimit) -> Result<(), ModifyObjectError> {
        self.check()?;
        let cell = &self.0;
        if cell.own_queue().is_none() {
            return Err(ModifyObjectError::Invalid("type of the queue pair: it does not send"));
        }
        if limit.kbps > cell.switch.core().attr_of(cell.device()).max_rate_limit {
            return Err(ModifyObjectError::Invalid("rate_limit"));
        }
        cell.limit_rate(&mut cell.sends.lock(), limit);
        cell.switch.transport.after_unlock();
        Ok(())
    }

    /// Begins to post sends. The queue pair stays locked until the poster is dropped.
    ///
    /// # Errors
    /// [`PostError::Gone`], [`PostError::Forked`].
    pub fn post(&self) -> Result<RawPoster<'_>, PostError> {
        self.check()?;
        Ok(RawPoster::new(&self.0))
    }

    /// Posts one receive (`ibv_post_recv`).
    ///
    /// # Errors
    /// [`PostError`].
    pub fn recv(&self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        use anyverbs_proto::recv_queue::PostRecvError;
        self.check()?;
        let queue = self.0.own_queue().ok_or(PostRecvError::NoQueue)?;
        Ok(queue.post(wr)?)
    }

    /// Acknowledges asynchronous events of this queue pair that were read.
    pub fn ack_async_events(&self, n: u32) {
        self.0.acks.acknowledge(n);
    }

    /// Destroys it, in any state (`ibv_destroy_qp`); its completions leave the CQs. Waits while an event of it was read and
    /// not acknowledged.
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while flow rules lead to it, [`DestroyError::Gone`].
    pub fn destroy(&self) -> Result<(), DestroyError> {
        let cell = &self.0;
        if !cell.switch.core().is_current() {
            return Ok(());
        }
        cell.holders.retire().inspect_err(|error| {
            anyverbs_objects::say_again!(
                error,
                cell.qpn().get().into(),
                "queue pair {} is not destroyed: {error}; see `anyverbs explain AV8009`",
                cell.qpn()
            );
        })?;
        cell.end();
        cell.acks.wait(format_args!("queue pair {}", cell.qpn()));
        drop(cell.hold.lock().take());
        Ok(())
    }
}

impl Drop for RawQp {
    fn drop(&mut self) {
        let cell = &self.0;
        if cell.switch.core().is_current() && cell.holders.retire().is_ok() {
            cell.end();
            drop(cell.hold.lock().take());
        }
    }
}
