//! Protection domain.

use std::sync::Arc;

use anyverbs_proto::mr::Access;

use crate::ah::{Ah, AhAttr};
use crate::context::ContextCell;
use crate::engine::{Engine, Ticket};
use crate::error::{CreateError, DestroyError, RegisterError};
use crate::holders::{Holdable, Holders};
use crate::mr::Mr;
use crate::qp::{Qp, QpInitAttr, XrcSendInitAttr};
use crate::srq::{Srq, SrqInitAttr};

/// Protection domain (`ibv_alloc_pd`): queue pairs reach only memory of their own.
#[derive(Debug)]
pub struct Pd(pub(crate) Arc<PdCell>);

#[derive(Debug)]
pub(crate) struct PdCell {
    pub(crate) engine: &'static Engine,
    pub(crate) context: Arc<ContextCell>,
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
        self.0.number
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
    /// [`DestroyError::Busy`] while an MR, AH, QP or SRQ uses it.
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.0.engine.is_current() {
            return Ok(());
        }
        self.0
            .holders
            .retire()
            .inspect_err(|e| tracing::warn!(pd = self.0.number, "PD not destroyed: {e}"))
    }
}
