//! Protection domain.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use anyverbs_proto::mr::{Access, WindowType};
use anyverbs_proto::wr::Sge;
use anyverbs_queue_memory::QueueMemory;
use parking_lot::Mutex;

use crate::advise::Advice;
use crate::ah::{Ah, AhAttr};
use crate::buf::Buf;
use crate::context::ContextCell;
use crate::dm::Dm;
use crate::dmah::Dmah;
use crate::engine::{Engine, Ticket};
use crate::error::{AdviseError, CreateError, DestroyError, RegisterError};
use crate::holders::{Held, Holdable, Holder, Holders};
use crate::mr::Mr;
use crate::mw::Mw;
use crate::qp::{Qp, QpInitAttr, XrcSendInitAttr};
use crate::srq::tag_matching::TmSrqInitAttr;
use crate::srq::{Srq, SrqInitAttr};
use crate::td::{Td, TdCell};

/// Protection domain (`ibv_alloc_pd`): queue pairs reach only memory of their own. Or a parent domain, which is another
/// name for one and takes its place everywhere ([`Pd::parent_domain`]).
#[derive(Debug)]
pub struct Pd {
    pub(crate) cell: Arc<PdCell>,
    /// What is made through it tells its events there.
    pub(crate) context: Arc<ContextCell>,
}

#[derive(Debug)]
pub(crate) struct PdCell {
    pub(crate) engine: &'static Engine,
    /// Identifies it to the machines, and in memory keys.
    pub(crate) number: u32,
    /// None of a parent domain, which has that of another.
    _taken: Option<Taken>,
    pub(crate) holders: Holders,
    /// What a parent domain stands for, until it is destroyed.
    parent_of: Option<Mutex<Option<ParentOf>>>,
    /// Where the queues of what is made on it lie.
    pub(crate) memory: QueueMemory,
    _ticket: Ticket,
}

/// A number that was taken from the engine.
#[derive(Debug)]
struct Taken {
    engine: &'static Engine,
    number: u32,
}

impl Drop for Taken {
    fn drop(&mut self) {
        // A forked child has no such domain.
        if self.engine.is_current() {
            self.engine.give_back_pd(self.number);
        }
    }
}

#[derive(Debug)]
#[expect(dead_code, reason = "held for their drop")]
struct ParentOf(Held<PdCell>, Option<Held<TdCell>>);

impl PdCell {
    fn new(
        engine: &'static Engine,
        number: u32,
        taken: Option<Taken>,
    ) -> Result<Self, CreateError> {
        let ticket = engine.quotas.pd.take().ok_or(CreateError::Exhausted("protection domains"))?;
        Ok(Self {
            engine,
            number,
            _taken: taken,
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
    pub(crate) fn new(
        engine: &'static Engine,
        context: &Arc<ContextCell>,
    ) -> Result<Self, CreateError> {
        let number = engine.take_pd();
        let cell = PdCell::new(engine, number, Some(Taken { engine, number }))?;
        Ok(Self { cell: Arc::new(cell), context: Arc::clone(context) })
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.cell.number
    }

    /// Whether it is a parent domain.
    #[must_use]
    pub fn is_parent_domain(&self) -> bool {
        self.cell.parent_of.is_some()
    }

    /// Makes a parent domain of this protection domain (`ibv_alloc_parent_domain`): what is made on either belongs to the
    /// same one, but the parent domain can be destroyed only when nothing is left that was made on it, and this one and `td`
    /// only after it. The queues of queue pairs, SRQs, work queues and completion queues that are made on it lie in `memory`,
    /// and are given back when those are destroyed.
    ///
    /// # Errors
    /// [`CreateError::Invalid`] if this is a parent domain itself, [`CreateError::Foreign`], [`CreateError::Exhausted`],
    /// [`CreateError::Forked`].
    pub fn parent_domain(&self, td: Option<&Td>, memory: QueueMemory) -> Result<Self, CreateError> {
        let pd = &self.cell;
        if !pd.engine.is_current() {
            return Err(CreateError::Forked);
        }
        if pd.parent_of.is_some() {
            return Err(CreateError::Invalid("protection domain: it is a parent domain"));
        }
        let thread = match td {
            Some(td) if !Arc::ptr_eq(&td.0.context, &self.context) => {
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
        let cell = PdCell {
            parent_of: Some(Mutex::new(Some(parent_of))),
            memory,
            ..PdCell::new(pd.engine, pd.number, None)?
        };
        Ok(Self { cell: Arc::new(cell), context: Arc::clone(&self.context) })
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
        Mr::register(&self.cell, (addr, len, iova), access, None)
    }

    /// As [`reg_mr`](Self::reg_mr), with hints (`ibv_reg_mr_ex`).
    ///
    /// # Safety
    /// As for [`reg_mr`](Self::reg_mr).
    ///
    /// # Errors
    /// [`RegisterError`].
    pub unsafe fn reg_mr_with(
        &self,
        addr: u64,
        len: u64,
        iova: u64,
        access: Access,
        dmah: Option<&Dmah>,
    ) -> Result<Mr, RegisterError> {
        Mr::register(&self.cell, (addr, len, iova), access, dmah)
    }

    /// Makes a region without memory (`ibv_alloc_null_mr`): it reads as zeros, and what is written to it is lost. Peers have
    /// no key for it.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn alloc_null_mr(&self) -> Result<Mr, RegisterError> {
        Mr::null(&self.cell)
    }

    /// Registers device memory from `offset` on (`ibv_reg_dm_mr`); keys name it from 0 on, and `access` says so
    /// ([`Access::ZERO_BASED`]).
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn reg_dm_mr(
        &self,
        dm: &Dm,
        offset: u64,
        len: u64,
        access: Access,
    ) -> Result<Mr, RegisterError> {
        Mr::of_dm(&self.cell, dm, offset, len, access)
    }

    /// Registers `len` bytes of a dma-buf from `offset` on (`ibv_reg_dmabuf_mr`), which keys name by `iova` on; the two have
    /// the same offset within a page. The buffer stays mapped as long as the region.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn reg_dmabuf_mr(
        &self,
        fd: BorrowedFd<'_>,
        (offset, len, iova): (u64, u64, u64),
        access: Access,
        dmah: Option<&Dmah>,
    ) -> Result<Mr, RegisterError> {
        Mr::of_dmabuf(&self.cell, fd, (offset, len, iova), access, dmah)
    }

    /// Allocates a buffer (`ibv_alloc_buf`).
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn alloc_buf(&self, len: u64) -> Result<Buf, CreateError> {
        Buf::alloc(&self.cell, len)
    }

    /// Registers part of a buffer that was allocated in this protection domain (`ibv_reg_buf_mr`).
    ///
    /// # Safety
    /// As for [`reg_mr`](Self::reg_mr).
    ///
    /// # Errors
    /// [`RegisterError`].
    pub unsafe fn reg_buf_mr(
        &self,
        buf: &Buf,
        (addr, len, iova): (u64, u64, u64),
        access: Access,
        dmah: Option<&Dmah>,
    ) -> Result<Mr, RegisterError> {
        Mr::of_buf(&self.cell, buf, (addr, len, iova), access, dmah)
    }

    /// Says what is going to happen to ranges of regions that are paged on demand (`ibv_advise_mr`). With `flush` it has been
    /// seen to when this returns.
    ///
    /// # Errors
    /// [`AdviseError`].
    pub fn advise_mr(&self, advice: Advice, flush: bool, sges: &[Sge]) -> Result<(), AdviseError> {
        self.cell.advise(advice, flush, sges)
    }

    /// Makes a memory window (`ibv_alloc_mw`).
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn alloc_mw(&self, kind: WindowType) -> Result<Mw, CreateError> {
        Mw::alloc(&self.cell, kind)
    }

    /// Makes a queue pair (`ibv_create_qp`).
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn create_qp(&self, init: &QpInitAttr<'_>) -> Result<Qp, CreateError> {
        Qp::create(self, init)
    }

    /// Makes the initiator of an extended reliable connection: a queue pair that only sends (`ibv_create_qp_ex`).
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn create_xrc_send_qp(&self, init: &XrcSendInitAttr<'_>) -> Result<Qp, CreateError> {
        Qp::create_xrc_send(self, init)
    }

    /// Makes a shared receive queue (`ibv_create_srq`).
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn create_srq(&self, init: &SrqInitAttr) -> Result<Srq, CreateError> {
        Srq::create(self, init)
    }

    /// Makes a shared receive queue that matches tags (`ibv_create_srq_ex`, `IBV_SRQT_TM`), for reliable connections.
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn create_tm_srq(&self, init: &TmSrqInitAttr<'_>) -> Result<Srq, CreateError> {
        Srq::create_tm(self, init)
    }

    /// Makes an address handle (`ibv_create_ah`).
    ///
    /// # Errors
    /// [`CreateError::Invalid`] for a port or GID index that does not exist, or without a global route.
    pub fn create_ah(&self, attr: &AhAttr) -> Result<Ah, CreateError> {
        Ah::create(&self.cell, attr)
    }

    /// Destroys it (`ibv_dealloc_pd`).
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while an MR, MW, AH, QP, SRQ, CQ, buffer or parent domain uses it.
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.cell.engine.is_current() {
            return Ok(());
        }
        self.cell.holders.retire().inspect_err(|e| {
            crate::say_again!(
                warn,
                self.cell.number.into(),
                pd = self.cell.number,
                "PD not destroyed: {e}"
            )
        })?;
        if let Some(parent_of) = &self.cell.parent_of {
            drop(parent_of.lock().take());
        }
        Ok(())
    }
}
