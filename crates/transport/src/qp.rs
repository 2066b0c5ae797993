//! Queue pair.

pub(crate) mod arrivals;
mod cell;
pub mod env;
mod faults;
mod faulty;
mod handles;
pub mod owed;
mod poster;
pub mod qp_context;
pub mod sharing;
pub mod table;
pub mod timers;
pub mod transport;
pub(crate) mod watch;

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyverbs_locks::{FastMutexGuard, Mutex, rank};
use anyverbs_objects::base::Core;
use anyverbs_objects::comp_cntr::CompCntr;
use anyverbs_objects::context_cell::ContextCell;
use anyverbs_objects::cq::{Cq, CqCell};
use anyverbs_objects::errno::Errno;
use anyverbs_objects::error::{
    AttachError, CreateError, DestroyError, ModifyObjectError, PostError,
};
use anyverbs_objects::event_queue::Acks;
use anyverbs_objects::holders::{Held, Holdable, Holder};
use anyverbs_objects::limits::bound;
use anyverbs_objects::pd::{Pd, PdCell};
use anyverbs_objects::persona::Feature;
use anyverbs_objects::srq::Srq;
use anyverbs_proto::comp_cntr::CompCntrOps;
use anyverbs_proto::qp::attr::{QpAttr, QpAttrMask, QpCap, QpInit, QpState, QpType};
use anyverbs_proto::qp::drops::{DropReason, Drops, Failed, Lost};
use anyverbs_proto::qp::pacing::RateLimit;
use anyverbs_proto::types::{Gid, Qpn};
use anyverbs_proto::wr::{RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge};
use anyverbs_proto::xrc_message::FileId;
use anyverbs_queue_memory::{Queue, QueueMemory};

use cell::{Hold, NO_DOMAIN, OwnPort, XrcPlace};
pub use cell::{QpCell, State};
use env::Call;
use handles::Handles;
pub use poster::Poster;
use qp_context::QpContext;
use transport::Transport;
use watch::Watch;

/// Parameters of a queue pair (`struct ibv_qp_init_attr`).
#[derive(Clone, Copy, Debug)]
pub struct QpInitAttr<'a> {
    /// Where sends complete.
    pub send_cq: &'a Cq,
    /// Where receives complete.
    pub recv_cq: &'a Cq,
    /// Where receives come from, instead of the queue pair's own queue.
    pub srq: Option<&'a Srq>,
    /// Sizes asked for; [`Qp::cap`] has the actual ones.
    pub cap: QpCap,
    /// Transport type.
    pub qp_type: QpType,
    /// Every send makes a completion.
    pub sq_sig_all: bool,
    /// The program's cookie; see [`Qp::set_cookie`].
    pub cookie: u64,
}

/// Parameters of the initiator of an extended reliable connection. It has no receives.
#[derive(Clone, Copy, Debug)]
pub struct XrcSendInitAttr<'a> {
    /// Where sends complete.
    pub send_cq: &'a Cq,
    /// Sizes asked for; those of receives do not count.
    pub cap: QpCap,
    /// Every send makes a completion.
    pub sq_sig_all: bool,
    /// The program's cookie; see [`Qp::set_cookie`].
    pub cookie: u64,
}

/// Queue pair (`ibv_create_qp`). Destroyed when dropped. A target of an extended reliable connection may have several
/// handles (`Xrcd::open_qp`), and is destroyed with the last.
#[derive(Debug)]
pub struct Qp(#[doc(hidden)] pub Arc<QpCell>, Arc<Handle>);

/// A maker or opener of a queue pair, which gets its events.
#[derive(Debug)]
struct Handle {
    context: Arc<ContextCell>,
    cookie: AtomicU64,
    /// It has its cookie: events may come.
    listens: AtomicBool,
    acks: Arc<Acks>,
    /// The domain of a target, which is held until the handle is destroyed.
    xrcd: Mutex<rank::ObjectHold, Option<HeldDomain>>,
}

/// Keeps an XRC domain from being closed until it is dropped.
pub(crate) type HeldDomain = Box<dyn Any + Send + Sync>;

/// The XRC domain of a target.
#[derive(Clone, Copy)]
pub struct XrcDomain {
    /// Its number on the host.
    pub number: u64,
    /// The file of the domain, which other processes may share.
    pub file: Option<FileId>,
}

/// All that a queue pair of any type is made of.
#[derive(Clone, Copy)]
pub struct QpParts<'a> {
    /// Transport type.
    pub qp_type: QpType,
    /// Protection domain.
    pub pd: Option<&'a Arc<PdCell>>,
    /// Where sends complete.
    pub send_cq: Option<&'a Cq>,
    /// Where receives complete.
    pub recv_cq: Option<&'a Cq>,
    /// Where receives come from.
    pub srq: Option<&'a Srq>,
    /// XRC domain of a target.
    pub xrc: Option<XrcDomain>,
    /// Sizes.
    pub cap: QpCap,
    /// Every send makes a completion.
    pub sq_sig_all: bool,
    /// The program's cookie.
    pub cookie: u64,
}

impl QpParts<'_> {
    /// Parts with none of them.
    pub fn new(qp_type: QpType) -> Self {
        Self {
            qp_type,
            pd: None,
            send_cq: None,
            recv_cq: None,
            srq: None,
            xrc: None,
            cap: QpCap::default(),
            sq_sig_all: false,
            cookie: 0,
        }
    }
}

impl Handle {
    fn new(context: &Arc<ContextCell>, cookie: Option<u64>, xrcd: Option<HeldDomain>) -> Arc<Self> {
        Arc::new(Self {
            context: Arc::clone(context),
            cookie: AtomicU64::new(cookie.unwrap_or_default()),
            listens: AtomicBool::new(cookie.is_some()),
            acks: Arc::default(),
            xrcd: Mutex::new(xrcd),
        })
    }
}

impl Qp {
    #[doc(hidden)]
    pub fn create(
        transport: &'static Transport,
        pd: &Pd,
        init: &QpInitAttr<'_>,
    ) -> Result<Self, CreateError> {
        match init.qp_type {
            QpType::Uc if init.srq.is_some() => {
                return Err(CreateError::Invalid("SRQ on an unreliable connection"));
            }
            QpType::XrcSend | QpType::XrcRecv => {
                return Err(CreateError::Invalid("type of the queue pair"));
            }
            _ => {}
        }
        let parts = QpParts {
            qp_type: init.qp_type,
            pd: Some(&pd.cell),
            send_cq: Some(init.send_cq),
            recv_cq: Some(init.recv_cq),
            srq: init.srq,
            xrc: None,
            cap: init.cap,
            sq_sig_all: init.sq_sig_all,
            cookie: init.cookie,
        };
        Self::assemble(transport, &pd.context, &parts, None)
    }

    #[doc(hidden)]
    pub fn create_xrc_send(
        transport: &'static Transport,
        pd: &Pd,
        init: &XrcSendInitAttr<'_>,
    ) -> Result<Self, CreateError> {
        let parts = QpParts {
            pd: Some(&pd.cell),
            send_cq: Some(init.send_cq),
            cap: QpCap { max_recv_wr: 0, max_recv_sge: 0, ..init.cap },
            sq_sig_all: init.sq_sig_all,
            cookie: init.cookie,
            ..QpParts::new(QpType::XrcSend)
        };
        Self::assemble(transport, &pd.context, &parts, None)
    }

    /// Makes a queue pair of parts that fit its type.
    #[doc(hidden)]
    pub fn assemble(
        transport: &'static Transport,
        context: &Arc<ContextCell>,
        parts: &QpParts<'_>,
        xrcd: Option<HeldDomain>,
    ) -> Result<Self, CreateError> {
        transport.core.may_make(context.device)?;
        if let Some(feature) = feature_of(parts.qp_type) {
            transport.core.offers(context.device, feature)?;
        }
        let cqs = [parts.send_cq, parts.recv_cq];
        // A forked child has a context of its own, and may name what its parent made.
        let of_parent = |core: &'static Core| !core.is_current();
        if parts.pd.is_some_and(|pd| of_parent(pd.core))
            || cqs.into_iter().flatten().any(|cq| of_parent(cq.0.core))
            || parts.srq.is_some_and(|srq| of_parent(srq.0.core))
        {
            return Err(CreateError::Forked);
        }
        if cqs.into_iter().flatten().any(|cq| !cq.0.is_of(transport.core, context)) {
            return Err(CreateError::Foreign("completion queue"));
        }
        if parts.srq.is_some_and(|srq| !srq.0.is_of(transport.core, context)) {
            return Err(CreateError::Foreign("SRQ"));
        }
        if parts.srq.is_some_and(|srq| srq.number().is_some()) {
            return Err(CreateError::Invalid("SRQ: one of type XRC is for targets"));
        }
        let tm_cq = parts.srq.and_then(|srq| srq.0.tm_cq());
        if let Some(srq) = parts.srq.filter(|_| tm_cq.is_some()) {
            let same_pd = parts.pd.is_some_and(|pd| pd.number == srq.0.pd);
            if parts.qp_type != QpType::Rc || parts.cap.max_send_wr != 0 || !same_pd {
                return Err(CreateError::Invalid(
                    "queue pair of a tag-matching SRQ: not a reliable connection of its PD without sends",
                ));
            }
        }
        let cap = actual_cap(transport.core, context.device, parts)?;
        let ticket = transport.core.take(context.device, |all| &all.qp)?;
        let hold = Hold(
            held(parts.pd, "protection domain")?,
            held_cqs([parts.send_cq, parts.recv_cq].map(|cq| cq.map(|cq| &cq.0)))?,
            held(parts.srq.map(|srq| &srq.0), "SRQ")?,
            Some(ticket),
        );
        let init = QpInit {
            qp_type: parts.qp_type,
            cap,
            sq_sig_all: parts.sq_sig_all,
            srq: parts.srq.is_some(),
            pd: parts.pd.map_or(0, |pd| pd.number),
        };
        let make = match tm_cq {
            Some(_) => anyverbs_proto::qp::Qp::with_tag_matching,
            None => anyverbs_proto::qp::Qp::in_memory,
        };
        let memory = parts.pd.map_or(QueueMemory::HEAP, |pd| pd.memory.of(Queue::Qp));
        let out_of_order_bytes = Arc::clone(&transport.out_of_order_bytes);
        let mut machine = make(&init, &memory)?.with_out_of_order_bytes(out_of_order_bytes);
        if let Some(srq) = parts.srq {
            machine = machine.with_srq_pd(srq.0.pd);
        }
        let handle = Handle::new(context, Some(parts.cookie), xrcd);
        let cell = transport
            .qps
            .insert(|qpn| {
                let machine = machine.numbered(qpn);
                if let Some(cq) = parts.send_cq {
                    cq.0.attach(qpn, machine.sq_credit());
                }
                let watch = Watch::new(transport.links, context.device, qpn, parts.qp_type);
                let state = State {
                    machine,
                    link: QpContext::new(watch),
                    groups: Vec::new(),
                    hold: Some(hold),
                };
                QpCell {
                    // There are 64 ports at most.
                    device: context.device as u8,
                    port: OwnPort::new(transport.core, context.device),
                    send_cq: parts.send_cq.map(|cq| Arc::clone(&cq.0)),
                    recv_cq: tm_cq.or(parts.recv_cq.map(|cq| &cq.0)).map(Arc::clone),
                    srq: parts.srq.map(|srq| Arc::clone(&srq.0)),
                    xrc: parts.xrc.map_or_else(XrcPlace::default, |xrc| XrcPlace {
                        domain: AtomicU64::new(xrc.number),
                        file: xrc.file,
                        ..XrcPlace::default()
                    }),
                    handles: Mutex::new(Handles {
                        own: vec![Arc::clone(&handle)],
                        others: Vec::new(),
                    }),
                    ..QpCell::bare(transport, qpn, parts.qp_type, state)
                }
            })
            .ok_or(CreateError::Exhausted("queue pair numbers"))?;
        Ok(Self(cell, handle))
    }

    /// One more handle of a target, through a domain's handle; None if either was destroyed meanwhile.
    #[doc(hidden)]
    pub fn open(
        cell: Arc<QpCell>,
        context: &Arc<ContextCell>,
        held: HeldDomain,
        cookie: Option<u64>,
    ) -> Option<Self> {
        let handle = Handle::new(context, cookie, Some(held));
        let mut handles = cell.handles.lock();
        if handles.are_none() {
            return None;
        }
        handles.own.push(Arc::clone(&handle));
        drop(handles);
        Some(Self(cell, handle))
    }

    /// A handle of a target of another process, which `open` asks, through a domain's handle. `open` gets
    /// what enters the new handle and what takes it away again.
    #[doc(hidden)]
    pub fn open_foreign(
        context: &Arc<ContextCell>,
        held: HeldDomain,
        cookie: Option<u64>,
        open: impl FnOnce(&dyn Fn(&QpCell), &dyn Fn(&QpCell)) -> Result<Arc<QpCell>, Errno>,
    ) -> Result<Self, Errno> {
        // It gets no event before it is there.
        let handle = Handle::new(context, None, Some(held));
        let enter = |cell: &QpCell| cell.handles.lock().own.push(Arc::clone(&handle));
        let leave =
            |cell: &QpCell| cell.handles.lock().own.retain(|other| !Arc::ptr_eq(other, &handle));
        let cell = open(&enter, &leave)?;
        let qp = Self(cell, handle);
        if let Some(cookie) = cookie {
            qp.set_cookie(cookie);
        }
        Ok(qp)
    }

    /// Its number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.0.qpn
    }

    /// Replaces the cookie that events carry.
    pub fn set_cookie(&self, cookie: u64) {
        self.1.cookie.store(cookie, Ordering::Relaxed);
        self.1.listens.store(true, Ordering::Release);
    }

    /// Actual sizes; zeros for an inherited queue pair.
    #[must_use]
    pub fn cap(&self) -> QpCap {
        if !self.0.transport.core.is_current() {
            return QpCap::default();
        }
        self.0.state.lock().machine.init().cap
    }

    /// Attributes and sizes now (`ibv_query_qp`).
    ///
    /// # Errors
    /// [`ModifyObjectError::Gone`], [`ModifyObjectError::Forked`].
    pub fn query(&self) -> Result<(QpAttr, QpInit), ModifyObjectError> {
        let state = self.lock()?;
        if let Some(home) = self.0.home() {
            let init = *state.machine.init();
            drop(state);
            let attr = self.0.transport.sharing().query(home, self.0.qpn);
            return Ok((attr.map_err(|Errno(errno)| ModifyObjectError::Elsewhere(errno))?, init));
        }
        Ok((state.machine.attr(), *state.machine.init()))
    }

    /// Whether it is in SQD and sends still wait for their answers (`sq_draining` of `ibv_query_qp`).
    ///
    /// # Errors
    /// [`ModifyObjectError::Gone`], [`ModifyObjectError::Forked`].
    pub fn is_draining(&self) -> Result<bool, ModifyObjectError> {
        Ok(self.lock()?.machine.is_draining())
    }

    /// Datagrams that it dropped for a reason since the last RESET. None as well if its lock cannot be had within this time: when the
    /// process ends, a thread may hold it for good.
    #[must_use]
    pub fn drops(&self, reason: DropReason, within: Duration) -> Option<Drops> {
        self.0.state.try_lock_for(within)?.machine.drops(reason)
    }

    /// Messages of UC that it dropped since the last RESET, and differences between the two ends that it found. By cause. None as well if its lock cannot be had within this time.
    #[must_use]
    pub fn lost(&self, within: Duration) -> Vec<Lost> {
        let state = self.0.state.try_lock_for(within);
        state.map(|state| state.machine.lost().to_vec()).unwrap_or_default()
    }

    /// The last work that failed since the last RESET, without what was flushed. None as well if its lock cannot be had within this time.
    #[must_use]
    pub fn failed(&self, within: Duration) -> Option<Failed> {
        self.0.state.try_lock_for(within)?.machine.failed().cloned()
    }

    /// State now.
    ///
    /// # Errors
    /// [`ModifyObjectError::Gone`], [`ModifyObjectError::Forked`].
    pub fn state(&self) -> Result<QpState, ModifyObjectError> {
        if self.0.home().is_some() {
            return Ok(self.query()?.0.cur_state);
        }
        Ok(self.lock()?.machine.state())
    }

    fn lock(&self) -> Result<FastMutexGuard<'_, rank::QueuePair, State>, ModifyObjectError> {
        self.check_open()?;
        self.0.lock()
    }

    /// Refuses where this handle of a target was destroyed; others may be left.
    fn check_open(&self) -> Result<(), ModifyObjectError> {
        let cell = &self.0;
        let closed = cell.qp_type == QpType::XrcRecv
            && cell.transport.core.is_current()
            && self.1.xrcd.lock().is_none();
        if closed { Err(ModifyObjectError::Gone) } else { Ok(()) }
    }

    /// Changes attributes and state (`ibv_modify_qp`). With [`QpAttrMask::AV`], `attr.av` is the result of
    /// `Context::resolve` for the program's address.
    ///
    /// # Errors
    /// [`ModifyObjectError`]; nothing was changed.
    pub fn modify(&self, attr: &QpAttr, mask: QpAttrMask) -> Result<(), ModifyObjectError> {
        self.check_open()?;
        let ends =
            mask.contains(QpAttrMask::STATE) && matches!(attr.state, QpState::Reset | QpState::Err);
        if !ends && self.0.transport.core.has_failed(self.1.context.device) {
            return Err(ModifyObjectError::Failed);
        }
        if mask.contains(QpAttrMask::AV) {
            let core = self.0.transport.core;
            let port = core.port(self.1.context.device, attr.av.port);
            if !port.is_some_and(|port| core.gids.has(port, attr.av.sgid)) {
                return Err(ModifyObjectError::Invalid("GID index of the address vector"));
            }
        }
        if let Some(home) = self.0.home() {
            drop(self.lock()?);
            let modified = self.0.transport.sharing().modify(home, self.0.qpn, attr, mask);
            return modified.map(drop).map_err(|Errno(errno)| ModifyObjectError::Elsewhere(errno));
        }
        self.0.modify(attr, mask)
    }
}

impl Qp {
    /// Posts sends and starts them (`ibv_post_send`).
    ///
    /// # Errors
    /// The index of the first that was refused, and why; those before it are posted and started.
    pub fn post_send(&self, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        let mut poster = self.post().map_err(|e| (0, e))?;
        wrs.iter().enumerate().try_for_each(|(i, wr)| poster.send(wr).map_err(|e| (i, e)))
    }

    /// Posts receives (`ibv_post_recv`).
    ///
    /// # Errors
    /// The index of the first that was refused, and why; those before it are posted.
    pub fn post_recv(&self, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        let mut poster = self.post().map_err(|e| (0, e))?;
        wrs.iter().enumerate().try_for_each(|(i, wr)| poster.recv(wr).map_err(|e| (i, e)))
    }

    /// Posts a SEND, WRITE or READ of one element by a short way, if one is open. With false nothing was posted, and
    /// [`post`](Self::post) takes it.
    #[inline]
    #[must_use]
    pub fn post_short(&self, wr_id: u64, op: SendOp, flags: SendFlags, sge: Sge) -> bool {
        let transport = self.0.transport;
        if !transport.core.is_current() {
            return false;
        }
        let mut state = self.0.state.lock();
        match (op, poster::one_sided(op)) {
            (SendOp::Send, _) => {
                let guard = transport.core.memory.guard();
                if state.send_short((transport.links, guard), (wr_id, flags, sge)) {
                    state.link.same_host.lanes.tell_cell();
                    return true;
                }
                let mut peer = None;
                let with = (&*self.0, &mut peer);
                let executed = state.send_within(with, guard, (wr_id, flags, sge));
                drop(state);
                if executed {
                    // Its completions may not have found room.
                    transport.after_unlock();
                }
                executed
            }
            (_, Some(operation)) => {
                let request = (wr_id, flags, sge);
                if state.do_directly(&self.0, operation, request) {
                    drop(state);
                    // Its completion may not have found room.
                    transport.after_unlock();
                    return true;
                }
                let mut peer = None;
                let done = state.do_within((&self.0, &mut peer), operation, request);
                drop(state);
                if done {
                    transport.after_unlock();
                }
                done
            }
            _ => false,
        }
    }

    /// Copies bytes of the program to the peer's memory as a WRITE would, if this process has mapped that memory. It is done when
    /// the call returns, also before requests that are outstanding. With false nothing may be assumed of the bytes there, and
    /// the caller posts a WRITE.
    ///
    /// No lock is held meanwhile, and the peer waits for nothing: the copy may end after the peer has deregistered the region.
    /// So it is for memory that serves nothing else then.
    ///
    /// # Safety
    /// The device may read the `len` bytes from `from` on. They need not be mapped.
    #[must_use]
    pub unsafe fn write_at_once(&self, remote: RemoteAddr, from: *const u8, len: u32) -> bool {
        let transport = self.0.transport;
        if !transport.core.is_current() {
            return false;
        }
        let to = self.0.state.lock().mapped_memory(&self.0, remote, len);
        to.is_some_and(|to| to.write(&transport.core.memory, from, len as usize))
    }

    /// Queues a receive of one element, if nothing is unusual. With false nothing was posted, and [`post`](Self::post)
    /// takes it.
    #[inline]
    #[must_use]
    pub fn post_recv_short(&self, wr_id: u64, sge: Sge) -> bool {
        if !self.0.transport.core.is_current() {
            return false;
        }
        let mut state = self.0.state.lock();
        let is_usual =
            !state.is_dead() && state.link.watch.is_none() && state.link.owed.credit.is_none();
        is_usual && state.machine.queue_single(wr_id, sge)
    }

    /// Whether the device takes a READ into so many elements.
    ///
    /// # Errors
    /// [`PostError::ElementsOfRead`].
    pub fn takes_read(&self, elements: usize) -> Result<(), PostError> {
        self.0.takes_read(elements)
    }

    /// Begins to post. The queue pair stays locked until the poster is dropped. The drop starts the posted requests, so
    /// post a whole list through one poster. A thread that has a poster uses no other queue pair, and deregisters no region:
    /// both could wait for the end of this one. Allocates nothing.
    ///
    /// # Errors
    /// [`PostError::Gone`], [`PostError::Forked`].
    pub fn post(&self) -> Result<Poster<'_>, PostError> {
        if !self.0.transport.core.is_current() {
            return Err(PostError::Forked);
        }
        let state = self.0.state.lock();
        if state.is_dead() {
            return Err(PostError::Gone);
        }
        Ok(Poster {
            cell: &self.0,
            state: Some(state),
            call: None,
            sends: false,
            by_lane: false,
            guard: None,
            peer: None,
        })
    }

    /// Attaches it to a multicast group (`ibv_attach_mcast`). It gets a copy of all datagrams to the group on any
    /// interface of the port, also of its own. A second call with the same `gid` and `lid` changes nothing. The LID has
    /// no meaning on RoCE, but names the attachment.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn attach_mcast(&self, gid: Gid, lid: u16) -> Result<(), AttachError> {
        self.0.transport.groups.attach(&self.0, gid, lid)
    }

    /// Detaches it from a group (`ibv_detach_mcast`): no copy arrives any more.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn detach_mcast(&self, gid: Gid, lid: u16) -> Result<(), AttachError> {
        self.0.transport.groups.detach(&self.0, gid, lid)
    }

    /// From now on it gets no copy of its own datagrams to a group that it is attached to
    /// (`IBV_QP_CREATE_BLOCK_SELF_MCAST_LB`).
    pub fn block_own_multicast(&self) {
        self.0.blocks_own_multicast.store(true, Ordering::Relaxed);
    }

    /// Limits the rate of its sends (`ibv_modify_qp_rate_limit`), in any state; RESET ends the limit.
    ///
    /// # Errors
    /// [`ModifyObjectError::Invalid`] for a rate beyond the device's highest, or of a queue pair that does not send.
    pub fn limit_rate(&self, limit: &RateLimit) -> Result<(), ModifyObjectError> {
        let mut state = self.lock()?;
        if self.0.qp_type == QpType::XrcRecv {
            return Err(ModifyObjectError::Invalid("type of the queue pair: it does not send"));
        }
        if limit.kbps > self.0.transport.core.attr_of(self.0.device.into()).max_rate_limit {
            return Err(ModifyObjectError::Invalid("rate_limit"));
        }
        let mut call = Call::new(&self.0);
        let State { machine, link, .. } = &mut *state;
        machine.limit_rate(limit);
        machine.transmit(&mut call.env(link));
        call.finish(state);
        Ok(())
    }

    /// Has `cntr` count completions of these operations (`ibv_qp_attach_comp_cntr`), until the queue pair is destroyed.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn attach_comp_cntr(&self, cntr: &CompCntr, ops: CompCntrOps) -> Result<(), AttachError> {
        let mut state = self.lock().map_err(|error| match error {
            ModifyObjectError::Forked => AttachError::Forked,
            _ => AttachError::Gone,
        })?;
        let State { machine, link, .. } = &mut *state;
        let is_late = !matches!(machine.state(), QpState::Reset | QpState::Init);
        link.comp_cntrs.attach(&self.1.context, cntr, ops, is_late)?;
        machine.count(ops);
        Ok(())
    }

    /// Acknowledges asynchronous events of this queue pair that were read.
    pub fn ack_async_events(&self, n: u32) {
        self.1.acks.acknowledge(n);
    }

    /// Destroys it, in any state (`ibv_destroy_qp`): nothing outstanding is processed further, its completions leave
    /// the CQs. Waits while an event of it was read and not acknowledged.
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while it is attached to multicast groups, [`DestroyError::Gone`].
    pub fn destroy(&self) -> Result<(), DestroyError> {
        let cell = &self.0;
        if !cell.transport.core.is_current() {
            return Ok(());
        }
        let released = cell.transport.groups.unless_attached(cell, || self.release());
        let released = released.inspect_err(|error| {
            anyverbs_objects::say_again!(
                error,
                cell.qpn.get().into(),
                "queue pair {} is not destroyed: {error}; see `anyverbs explain AV8009`",
                cell.qpn
            );
        });
        let hold = released?.ok_or(DestroyError::Gone)?;
        self.1.context.events.withdraw(&self.1.acks);
        self.1.acks.wait(format_args!("queue pair {}", cell.qpn));
        drop(hold);
        drop(self.1.xrcd.lock().take());
        Ok(())
    }

    /// Gives this handle up, and with the last one ends the queue pair; returns its hold. `None` if it was done before.
    fn release(&self) -> Option<Option<Hold>> {
        let cell = &self.0;
        let mut handles = cell.handles.lock();
        let at = handles.own.iter().position(|h| Arc::ptr_eq(h, &self.1))?;
        handles.own.remove(at);
        let (others, foreign) =
            (!handles.are_none(), handles.own.is_empty() && cell.home().is_some());
        drop(handles);
        if foreign {
            cell.transport.sharing().close(cell);
        }
        if others || foreign {
            return Some(None);
        }
        Some(Some(cell.end()?))
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        let cell = &self.0;
        if !cell.transport.core.is_current() {
            // Its locks belong to threads of the parent.
            return;
        }
        let released = cell.transport.groups.detach_and(cell, || self.release());
        // Unlike destroy, a drop cannot wait for a program that dropped its events too.
        let Some(hold) = released else { return };
        self.1.context.events.withdraw(&self.1.acks);
        drop(hold);
        drop(self.1.xrcd.lock().take());
    }
}

/// Holds a part, if the queue pair has it.
pub fn held<T: Holdable>(
    part: Option<&Arc<T>>,
    name: &'static str,
) -> Result<Option<Held<T>>, CreateError> {
    let hold = |part| Held::new(part, Holder::Qp).ok_or(CreateError::Foreign(name));
    part.map(hold).transpose()
}

/// Holds completion queues. One that serves both sides is held once, as it has one user.
pub fn held_cqs(
    [send, recv]: [Option<&Arc<CqCell>>; 2],
) -> Result<[Option<Held<CqCell>>; 2], CreateError> {
    let is_same = send.zip(recv).is_some_and(|(send, recv)| Arc::ptr_eq(send, recv));
    let recv = recv.filter(|_| !is_same);
    Ok([held(send, "completion queue")?, held(recv, "completion queue")?])
}

/// The feature that a persona may lack, and without which there is no queue pair of a type.
fn feature_of(qp_type: QpType) -> Option<Feature> {
    match qp_type {
        QpType::Rc => Some(Feature::Rc),
        QpType::Uc => Some(Feature::Uc),
        QpType::Ud => Some(Feature::Ud),
        QpType::XrcSend | QpType::XrcRecv => Some(Feature::Xrc),
    }
}

/// Checks the requested sizes; returns those that the device gives.
fn actual_cap(core: &Core, device: usize, parts: &QpParts<'_>) -> Result<QpCap, CreateError> {
    let mut cap = parts.cap;
    if parts.srq.is_some() {
        cap.max_recv_wr = 0;
        cap.max_recv_sge = 0;
    }
    check_sizes(core, device, &cap)?;
    let room = inline_room(&cap).min(core.attr_of(device).max_inline_data);
    cap.max_inline_data = cap.max_inline_data.max(room);
    Ok(cap)
}

/// Refuses sizes beyond a limit of the device.
///
/// # Errors
/// [`CreateError::Limit`], [`CreateError::PersonaLimit`].
pub fn check_sizes(core: &Core, device: usize, cap: &QpCap) -> Result<(), CreateError> {
    core.within(device, "max_send_wr", cap.max_send_wr, bound!(max_qp_wr))?;
    core.within(device, "max_recv_wr", cap.max_recv_wr, bound!(max_qp_wr))?;
    core.within(device, "max_send_sge", cap.max_send_sge, bound!(max_sge))?;
    core.within(device, "max_recv_sge", cap.max_recv_sge, bound!(max_sge))?;
    core.within(device, "max_inline_data", cap.max_inline_data, bound!(max_inline_data))
}

/// Inline data that every queue pair takes: as much as the elements themselves would take. Programs post a little inline
/// without having asked for it, because every device gives that.
pub fn inline_room(cap: &QpCap) -> u32 {
    cap.max_send_sge * SGE_LEN
}

/// Bytes of `struct ibv_sge`.
const SGE_LEN: u32 = 16;
