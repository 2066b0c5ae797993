//! Protection domain.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use anyverbs_proto::mr::{Access, WindowType};
use anyverbs_proto::wr::Sge;

use crate::advise::Advice;
use crate::ah::{Ah, AhAttr};
use crate::buf::Buf;
use crate::context::ContextCell;
use crate::dm::Dm;
use crate::dmah::Dmah;
use crate::engine::{Engine, Ticket};
use crate::error::{AdviseError, CreateError, DestroyError, RegisterError};
use crate::holders::{Holdable, Holders};
use crate::mr::Mr;
use crate::mw::Mw;
use crate::qp::{Qp, QpInitAttr, XrcSendInitAttr};
use crate::srq::{Srq, SrqInitAttr};

/// Protection domain (`ibv_alloc_pd`): queue pairs reach only memory of their own.
#[derive(Debug)]
pub struct Pd {
    pub(crate) cell: Arc<PdCell>,
    /// What is made through it tells its events there.
    pub(crate) context: Arc<ContextCell>,
}

#[derive(Debug)]
pub(crate) struct PdCell {
    pub(crate) engine: &'static Engine,
    /// Identifies it to the machines and in memory keys; not reused while the process lives.
    pub(crate) number: u32,
    pub(crate) holders: Holders,
    pub(crate) _ticket: Ticket,
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
        self.cell.number
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
    /// [`DestroyError::Busy`] while an MR, MW, AH, QP, SRQ or buffer uses it.
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.cell.engine.is_current() {
            return Ok(());
        }
        self.cell
            .holders
            .retire()
            .inspect_err(|e| tracing::warn!(pd = self.cell.number, "PD not destroyed: {e}"))
    }
}
