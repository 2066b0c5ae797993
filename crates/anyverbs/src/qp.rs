//! Queue pair.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyverbs_proto::event::QpEvent;
use anyverbs_proto::qp::attr::{QpAttr, QpAttrMask, QpCap, QpInit, QpState, QpType};
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wr::{RecvWr, SendWr};
use parking_lot::{Mutex, MutexGuard};

use crate::async_event::EventElement;
use crate::context::ContextCell;
use crate::cq::{Cq, CqCell};
use crate::engine::env::{Call, Link};
use crate::engine::pace::NO_LIMIT;
use crate::engine::{Engine, Ticket};
use crate::error::{CreateError, DestroyError, ModifyObjectError, PostError};
use crate::event_queue::Acks;
use crate::holders::{Held, Holder};
use crate::link::udp::Asked;
use crate::pd::PdCell;
use crate::srq::{Srq, SrqCell};

/// What a queue pair is made with (`struct ibv_qp_init_attr`).
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

/// Queue pair (`ibv_create_qp`). Destroyed when dropped.
#[derive(Debug)]
pub struct Qp(pub(crate) Arc<QpCell>);

pub(crate) struct QpCell {
    pub(crate) engine: &'static Engine,
    pub(crate) context: Arc<ContextCell>,
    pub(crate) qpn: Qpn,
    pub(crate) qp_type: QpType,
    pub(crate) state: Mutex<State>,
    pub(crate) send_cq: Arc<CqCell>,
    pub(crate) recv_cq: Arc<CqCell>,
    pub(crate) srq: Option<Arc<SrqCell>>,
    cookie: AtomicU64,
    acks: Arc<Acks>,
}

/// What the queue pair's lock guards.
pub(crate) struct State {
    pub(crate) machine: anyverbs_proto::qp::Qp,
    pub(crate) link: Link,
    /// None once it is destroyed.
    hold: Option<Hold>,
}

#[expect(dead_code, reason = "held for their drop")]
struct Hold(Held<PdCell>, Held<CqCell>, Held<CqCell>, Option<Held<SrqCell>>, Ticket);

impl State {
    pub(crate) fn is_dead(&self) -> bool {
        self.hold.is_none()
    }
}

impl fmt::Debug for QpCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QpCell").field("qpn", &self.qpn).finish_non_exhaustive()
    }
}

impl QpCell {
    /// Ends its work: the peer gets the ACK that is still owed, nothing else happens any more. None if it was done.
    fn retire(&self) -> Option<Hold> {
        let mut state = self.state.lock();
        let hold = state.hold.take()?;
        let mut call = Call::new(self);
        let State { machine, link, .. } = &mut *state;
        machine.acknowledge(&mut call.env(link));
        call.finish_last(state);
        Some(hold)
    }

    /// The answer to a credit probe: how many messages its sender may send in all.
    pub(crate) fn message_limit(&self, state: &State, asked: &Asked) -> u64 {
        let posted = match &self.srq {
            Some(srq) => Some(srq.len()),
            None => state.machine.recvs_posted(),
        };
        posted.map_or(NO_LIMIT, |posted| asked.packet.counts.messages.saturating_add(posted as u64))
    }

    /// Raises an asynchronous event of this queue pair.
    pub(crate) fn raise(&self, event: QpEvent) {
        let element =
            EventElement::Qp { qpn: self.qpn, cookie: self.cookie.load(Ordering::Relaxed) };
        self.context.events.raise(event.into(), element, Some(&self.acks));
    }
}

impl Qp {
    pub(crate) fn create(pd: &Arc<PdCell>, init: &QpInitAttr<'_>) -> Result<Self, CreateError> {
        let engine = pd.engine;
        if !engine.is_current() {
            return Err(CreateError::Forked);
        }
        if !std::ptr::eq(init.send_cq.0.engine, engine)
            || !std::ptr::eq(init.recv_cq.0.engine, engine)
        {
            return Err(CreateError::Foreign("completion queue"));
        }
        if init.srq.is_some_and(|srq| !std::ptr::eq(srq.0.engine, engine)) {
            return Err(CreateError::Foreign("SRQ"));
        }
        if init.srq.is_some() && init.qp_type == QpType::Uc {
            return Err(CreateError::Invalid("SRQ on an unreliable connection"));
        }
        let cap = actual_cap(engine, init)?;
        let held = |h: Option<Held<CqCell>>| h.ok_or(CreateError::Foreign("completion queue"));
        let ticket = engine.quotas.qp.take().ok_or(CreateError::Exhausted("queue pairs"))?;
        let hold = Hold(
            Held::new(pd, Holder::Qp).ok_or(CreateError::Foreign("protection domain"))?,
            held(Held::new(&init.send_cq.0, Holder::Qp))?,
            held(Held::new(&init.recv_cq.0, Holder::Qp))?,
            match init.srq {
                Some(srq) => {
                    Some(Held::new(&srq.0, Holder::Qp).ok_or(CreateError::Foreign("SRQ"))?)
                }
                None => None,
            },
            ticket,
        );
        let machine = QpInit {
            qp_type: init.qp_type,
            cap,
            sq_sig_all: init.sq_sig_all,
            srq: init.srq.is_some(),
            pd: pd.number,
        };
        let cell = engine
            .qps
            .insert(|qpn| {
                let machine = anyverbs_proto::qp::Qp::new(qpn, &machine);
                init.send_cq.0.attach(qpn, machine.sq_credit());
                QpCell {
                    engine,
                    context: Arc::clone(&pd.context),
                    qpn,
                    qp_type: init.qp_type,
                    state: Mutex::new(State { machine, link: Link::default(), hold: Some(hold) }),
                    send_cq: Arc::clone(&init.send_cq.0),
                    recv_cq: Arc::clone(&init.recv_cq.0),
                    srq: init.srq.map(|srq| Arc::clone(&srq.0)),
                    cookie: AtomicU64::new(init.cookie),
                    acks: Arc::default(),
                }
            })
            .ok_or(CreateError::Exhausted("queue pair numbers"))?;
        Ok(Self(cell))
    }

    /// Its number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.0.qpn
    }

    /// Replaces the cookie that events carry.
    pub fn set_cookie(&self, cookie: u64) {
        self.0.cookie.store(cookie, Ordering::Relaxed);
    }

    /// Actual sizes; zeros for an inherited queue pair.
    #[must_use]
    pub fn cap(&self) -> QpCap {
        if !self.0.engine.is_current() {
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
        Ok((state.machine.attr(), *state.machine.init()))
    }

    /// Whether it is in SQD and sends still wait for their answers (`sq_draining` of `ibv_query_qp`).
    ///
    /// # Errors
    /// [`ModifyObjectError::Gone`], [`ModifyObjectError::Forked`].
    pub fn is_draining(&self) -> Result<bool, ModifyObjectError> {
        Ok(self.lock()?.machine.is_draining())
    }

    /// State now.
    ///
    /// # Errors
    /// [`ModifyObjectError::Gone`], [`ModifyObjectError::Forked`].
    pub fn state(&self) -> Result<QpState, ModifyObjectError> {
        Ok(self.lock()?.machine.state())
    }

    fn lock(&self) -> Result<MutexGuard<'_, State>, ModifyObjectError> {
        self.0.lock()
    }

    /// Changes attributes and state (`ibv_modify_qp`). With [`QpAttrMask::AV`], `attr.av` is what
    /// [`crate::Context::resolve`] made of the program's address.
    ///
    /// # Errors
    /// [`ModifyObjectError`]; nothing was changed.
    pub fn modify(&self, attr: &QpAttr, mask: QpAttrMask) -> Result<(), ModifyObjectError> {
        self.0.modify(attr, mask)
    }
}

impl QpCell {
    fn lock(&self) -> Result<MutexGuard<'_, State>, ModifyObjectError> {
        if !self.engine.is_current() {
            return Err(ModifyObjectError::Forked);
        }
        let state = self.state.lock();
        if state.is_dead() { Err(ModifyObjectError::Gone) } else { Ok(state) }
    }

    /// See [`Qp::modify`].
    pub(crate) fn modify(&self, attr: &QpAttr, mask: QpAttrMask) -> Result<(), ModifyObjectError> {
        let engine = self.engine;
        let mut state = self.lock()?;
        let mut attr = *attr;
        let mut max_mtu = engine.gids.active_mtu();
        if mask.contains(QpAttrMask::AV) {
            let entry = engine
                .gids
                .entry(attr.av.sgid_index.into())
                .ok_or(ModifyObjectError::Invalid("GID index of the address vector"))?;
            attr.av.sgid = entry.gid;
            max_mtu = entry.mtu;
        } else if !state.machine.attr().av.sgid.is_zero() {
            max_mtu = engine.gids.mtu_of(state.machine.attr().av.sgid).unwrap_or(max_mtu);
        }
        let limits = engine.modify_limits(max_mtu);
        let mut call = Call::new(self);
        let State { machine, link, .. } = &mut *state;
        machine.modify(&attr, mask, &limits, &mut call.env(link))?;
        if mask.contains(QpAttrMask::STATE) && attr.state == QpState::Reset {
            link.leave_path();
            self.send_cq.purge(self.qpn);
            self.recv_cq.purge(self.qpn);
        } else if mask.contains(QpAttrMask::AV) {
            link.pin(engine, machine);
        }
        call.finish(state);
        Ok(())
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

    /// Begins to post. The queue pair stays locked until the poster is dropped; the drop starts what was posted, so
    /// post a whole list through one poster. Allocates nothing.
    ///
    /// # Errors
    /// [`PostError::Gone`], [`PostError::Forked`].
    pub fn post(&self) -> Result<Poster<'_>, PostError> {
        if !self.0.engine.is_current() {
            return Err(PostError::Forked);
        }
        let state = self.0.state.lock();
        if state.is_dead() {
            return Err(PostError::Gone);
        }
        Ok(Poster { cell: &self.0, inner: Some((state, Call::new(&self.0))), sends: false })
    }

    /// Acknowledges asynchronous events of this queue pair that were read.
    pub fn ack_async_events(&self, n: u32) {
        self.0.acks.acknowledge(n);
    }

    /// Destroys it, in any state (`ibv_destroy_qp`): nothing outstanding is processed further, its completions leave
    /// the CQs. Waits while an event of it was read and not acknowledged.
    ///
    /// # Errors
    /// [`DestroyError::Gone`].
    pub fn destroy(&self) -> Result<(), DestroyError> {
        let cell = &self.0;
        if !cell.engine.is_current() {
            return Ok(());
        }
        let hold = cell.retire().ok_or(DestroyError::Gone)?;
        cell.engine.qps.remove(cell.qpn);
        cell.send_cq.detach(cell.qpn);
        cell.recv_cq.purge(cell.qpn);
        cell.context.events.withdraw(&cell.acks);
        cell.acks.wait(&|| format!("queue pair {}", cell.qpn));
        drop(hold);
        Ok(())
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        let cell = &self.0;
        if !cell.engine.is_current() {
            // Its locks belong to threads of the parent.
            return;
        }
        // Unlike destroy, a drop cannot wait for a program that dropped its events too.
        let Some(hold) = cell.retire() else { return };
        cell.engine.qps.remove(cell.qpn);
        cell.send_cq.detach(cell.qpn);
        cell.recv_cq.purge(cell.qpn);
        cell.context.events.withdraw(&cell.acks);
        drop(hold);
    }
}

/// Checks the sizes asked for; what the device gives.
fn actual_cap(engine: &Engine, init: &QpInitAttr<'_>) -> Result<QpCap, CreateError> {
    let (mut cap, max) = (init.cap, &engine.attr);
    if init.srq.is_some() {
        cap.max_recv_wr = 0;
        cap.max_recv_sge = 0;
    }
    for (value, most, what) in [
        (cap.max_send_wr, max.max_qp_wr, "max_send_wr"),
        (cap.max_recv_wr, max.max_qp_wr, "max_recv_wr"),
        (cap.max_send_sge, max.max_sge, "max_send_sge"),
        (cap.max_recv_sge, max.max_sge, "max_recv_sge"),
        (cap.max_inline_data, max.max_inline_data, "max_inline_data"),
    ] {
        if value > most {
            return Err(CreateError::Invalid(what));
        }
    }
    Ok(cap)
}

/// Posts to a queue pair; see [`Qp::post`].
pub struct Poster<'a> {
    cell: &'a QpCell,
    /// Some until the drop.
    inner: Option<(MutexGuard<'a, State>, Call<'a>)>,
    sends: bool,
}

impl Poster<'_> {
    /// Queues a send. It starts when the poster is dropped.
    ///
    /// # Errors
    /// [`PostError::Send`].
    pub fn send(&mut self, wr: &SendWr<'_>) -> Result<(), PostError> {
        self.sends = true;
        let Some((state, call)) = &mut self.inner else { return Err(PostError::Gone) };
        let State { machine, link, .. } = &mut **state;
        Ok(machine.post_send(wr, &mut call.env(link))?)
    }

    /// How many more sends the queue takes, so that a list can be posted whole or not at all.
    #[must_use]
    pub fn send_room(&self) -> u32 {
        self.inner.as_ref().map_or(0, |(state, _)| state.machine.send_room())
    }

    /// Queues a receive.
    ///
    /// # Errors
    /// [`PostError::Recv`].
    pub fn recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let Some((state, call)) = &mut self.inner else { return Err(PostError::Gone) };
        let State { machine, link, .. } = &mut **state;
        Ok(machine.post_recv(wr, &mut call.env(link))?)
    }
}

impl Drop for Poster<'_> {
    fn drop(&mut self) {
        let Some((mut state, mut call)) = self.inner.take() else { return };
        if self.sends {
            let State { machine, link, .. } = &mut *state;
            machine.transmit(&mut call.env(link));
        }
        // Receives posted for a sender that waits for them.
        if let Some(asked) = state.link.starved.take() {
            let limit = self.cell.message_limit(&state, &asked);
            if limit > asked.packet.counts.messages {
                call.echo(&asked, limit);
            } else {
                state.link.starved = Some(asked);
            }
        }
        call.finish(state);
    }
}

impl fmt::Debug for Poster<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poster").finish_non_exhaustive()
    }
}
