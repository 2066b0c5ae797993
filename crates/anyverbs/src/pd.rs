//! Protection domain.

use std::sync::Arc;

use anyverbs_proto::mr::Access;
use anyverbs_queue_memory::QueueMemory;
use parking_lot::Mutex;

use crate::ah::{Ah, AhAttr};
use crate::context::ContextCell;
use crate::engine::{Engine, Ticket};
use crate::error::{CreateError, DestroyError, RegisterError};
use crate::holders::{Held, Holdable, Holder, Holders};
use crate::mr::Mr;
use crate::qp::{Qp, QpInitAttr, XrcSendInitAttr};
use crate::srq::tag_matching::TmSrqInitAttr;
use crate::srq::{Srq, SrqInitAttr};
use crate::td::{Td, TdCell};

/// Protection domain (`ibv_alloc_pd`): queue pairs reach only memory of their own. Or a parent domain, which is another
/// name for one and takes its place everywhere ([`Pd::parent_domain`]).
#[derive(Debug)]
pub struct Pd(pub(crate) Arc<PdCell>);

#[derive(Debug)]
pub(crate) struct PdCell {
    pub(crate) engine: &'static Engine,
    pub(crate) context: Arc<ContextCell>,
    /// Identifies it to the machines and in memory keys; not reused while the process lives.
    pub(crate) number: u32,
    pub(crate) holders: Holders,
    /// What a parent domain stands for, until it is destroyed.
    parent_of: Option<Mutex<Option<ParentOf>>>,
    /// Where the queues of what is made on it lie.
    pub(crate) memory: QueueMemory,
    _ticket: Ticket,
}

#[derive(Debug)]
#[expect(dead_code, reason = "held for their drop")]
struct ParentOf(Held<PdCell>, Option<Held<TdCell>>);

impl PdCell {
    pub(crate) fn new(
        engine: &'static Engine,
        context: &Arc<ContextCell>,
    ) -> Result<Self, CreateError> {
        let ticket = engine.quotas.pd.take().ok_or(CreateError::Exhausted("protection domains"))?;
        Ok(Self {
            engine,
            context: Arc::clone(context),
            number: engine.next_pd(),
            holders: Holders::default(),
            parent_of: None,
            memory: QueueMemory::HEAP,
            _ticket: ticket,
        })
    }
}

impl Holdable for PdCell {
    fn holders(&self) -> &Holders {
        &self.holders
    }
}

impl Pd {
    /// Its number.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.0.number
    }

    /// Whether it is a parent domain.
    #[must_use]
    pub fn is_parent_domain(&self) -> bool {
        self.0.parent_of.is_some()
    }

    /// Makes a parent domain of this protection domain (`ibv_alloc_parent_domain`): what is made on either belongs to the
    /// same one, but the parent domain can be destroyed only when nothing is left that was made on it, and this one and `td`
    /// only after it. The queues of queue pairs, SRQs and completion queues that are made on it lie in `memory`, and are given
    /// back when those are destroyed.
    ///
    /// # Errors
    /// [`CreateError::Invalid`] if this is a parent domain itself, [`CreateError::Foreign`], [`CreateError::Exhausted`],
    /// [`CreateError::Forked`].
    pub fn parent_domain(&self, td: Option<&Td>, memory: QueueMemory) -> Result<Self, CreateError> {
        let pd = &self.0;
        if !pd.engine.is_current() {
            return Err(CreateError::Forked);
        }
        if pd.parent_of.is_some() {
            return Err(CreateError::Invalid("protection domain: it is a parent domain"));
        }
        let thread = match td {
            Some(td) if !Arc::ptr_eq(&td.0.context, &pd.context) => {
                return Err(CreateError::Foreign("thread domain"));
            }
            Some(td) => {
                let held = Held::new(&td.0, Holder::ParentDomain);
                Some(held.ok_or(CreateError::Foreign("thread domain"))?)
            }
            None => None,
        };
        let held = Held::new(pd, Holder::ParentDomain);
        let parent_of = ParentOf(held.ok_or(CreateError::Foreign("protection domain"))?, thread);
        Ok(Self(Arc::new(PdCell {
            number: pd.number,
            parent_of: Some(Mutex::new(Some(parent_of))),
            memory,
            ..PdCell::new(pd.engine, &pd.context)?
        })))
    }

    /// Registers `len` bytes at `addr`, which keys name by `iova` on (`ibv_reg_mr`: `iova` = `addr`).
    ///
    /// The memory may be written by this process and, as `access` grants, by peers at any time, but is never
    /// borrowed: a range that is unmapped later makes protection errors.
    ///
    /// # Safety
    /// Until the region is destroyed the device writes to the range as work requests and peers with the key ask; no
    /// Rust reference to the range may be used meanwhile.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub unsafe fn reg_mr(
        &self,
        addr: u64,
        len: u64,
        iova: u64,
        access: Access,
    ) -> Result<Mr, RegisterError> {
        Mr::register(&self.0, addr, len, iova, access)
    }

    /// Makes a queue pair (`ibv_create_qp`).
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn create_qp(&self, init: &QpInitAttr<'_>) -> Result<Qp, CreateError> {
        Qp::create(&self.0, init)
    }

    /// Makes the initiator of an extended reliable connection: a queue pair that only sends (`ibv_create_qp_ex`).
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn create_xrc_send_qp(&self, init: &XrcSendInitAttr<'_>) -> Result<Qp, CreateError> {
        Qp::create_xrc_send(&self.0, init)
    }

    /// Makes a shared receive queue (`ibv_create_srq`).
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn create_srq(&self, init: &SrqInitAttr) -> Result<Srq, CreateError> {
        Srq::create(&self.0, init)
    }

    /// Makes a shared receive queue that matches tags (`ibv_create_srq_ex`, `IBV_SRQT_TM`), for reliable connections.
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn create_tm_srq(&self, init: &TmSrqInitAttr<'_>) -> Result<Srq, CreateError> {
        Srq::create_tm(&self.0, init)
    }

    /// Makes an address handle (`ibv_create_ah`).
    ///
    /// # Errors
    /// [`CreateError::Invalid`] for a port or GID index that does not exist, or without a global route.
    pub fn create_ah(&self, attr: &AhAttr) -> Result<Ah, CreateError> {
        Ah::create(&self.0, attr)
    }

    /// Destroys it (`ibv_dealloc_pd`).
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while an MR, AH, QP, SRQ, CQ or parent domain uses it.
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.0.engine.is_current() {
            return Ok(());
        }
        self.0
            .holders
            .retire()
            .inspect_err(|e| tracing::warn!(pd = self.0.number, "PD not destroyed: {e}"))?;
        if let Some(parent_of) = &self.0.parent_of {
            drop(parent_of.lock().take());
        }
        Ok(())
    }
}
