//! Completion counters (`ibv_create_comp_cntr` of rdma-core 65).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyverbs_proto::comp_cntr::CompCntrOps;

use crate::base::{Core, Ticket};
use crate::context_cell::ContextCell;
use crate::error::{AttachError, CreateError, DestroyError};
use crate::holders::{Held, Holdable, Holder, Holders};

/// The unit of a counter (`enum ibv_comp_cntr_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum CompCntrKind {
    /// Operations.
    #[default]
    Wrs = 0,
    /// Bytes of operations.
    Bytes = 1,
}

/// Counts operations of queue pairs that completed, whether or not they make completions: those that went well, by number or
/// bytes, and those that failed, by number. Both counts wrap at 2^64.
#[derive(Debug)]
pub struct CompCntr(pub(crate) Arc<CompCntrCell>);

#[derive(Debug)]
pub(crate) struct CompCntrCell {
    core: &'static Core,
    context: Arc<ContextCell>,
    kind: CompCntrKind,
    completed: AtomicU64,
    failed: AtomicU64,
    holders: Holders,
    _ticket: Ticket,
}

impl Holdable for CompCntrCell {
    fn holders(&self) -> &Holders {
        &self.holders
    }
}

/// The counters of one queue pair, under its lock.
#[derive(Debug, Default)]
pub struct Attached(Vec<(CompCntrOps, Held<CompCntrCell>)>);

impl Attached {
    /// An operation has completed.
    pub fn count(&self, op: CompCntrOps, bytes: u32, failed: bool) {
        let Some((_, cntr)) = self.0.iter().find(|(ops, _)| ops.contains(op)) else { return };
        if failed {
            cntr.failed.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let n = match cntr.kind {
            CompCntrKind::Wrs => 1,
            CompCntrKind::Bytes => bytes.into(),
        };
        cntr.completed.fetch_add(n, Ordering::Relaxed);
    }

    /// Has `cntr` count these operations; `is_late`: the queue pair has left RESET and INIT.
    pub fn attach(
        &mut self,
        context: &Arc<ContextCell>,
        cntr: &CompCntr,
        ops: CompCntrOps,
        is_late: bool,
    ) -> Result<(), AttachError> {
        if !Arc::ptr_eq(context, &cntr.0.context) {
            return Err(AttachError::Foreign("completion counter"));
        }
        if ops.is_empty() {
            return Err(AttachError::NoOperation);
        }
        if is_late {
            return Err(AttachError::TooLate);
        }
        if self.0.iter().any(|(taken, _)| taken.intersects(ops)) {
            return Err(AttachError::Counted);
        }
        let held = Held::new(&cntr.0, Holder::Qp).ok_or(AttachError::Gone)?;
        self.0.push((ops, held));
        Ok(())
    }
}

impl CompCntr {
    #[doc(hidden)]
    pub fn create(
        core: &'static Core,
        context: &Arc<ContextCell>,
        kind: CompCntrKind,
    ) -> Result<Self, CreateError> {
        let ticket = core.take(context.device, |all| &all.comp_cntr)?;
        Ok(Self(Arc::new(CompCntrCell {
            core,
            context: Arc::clone(context),
            kind,
            completed: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            holders: Holders::default(),
            _ticket: ticket,
        })))
    }

    /// The count of successes (`ibv_read_comp_cntr`).
    #[must_use]
    pub fn completed(&self) -> u64 {
        self.0.completed.load(Ordering::Relaxed)
    }

    /// The count of failures (`ibv_read_err_comp_cntr`).
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.0.failed.load(Ordering::Relaxed)
    }

    /// Sets the count of successes (`ibv_set_comp_cntr`).
    pub fn set_completed(&self, value: u64) {
        self.0.completed.store(value, Ordering::Relaxed);
    }

    /// Sets the count of failures (`ibv_set_err_comp_cntr`).
    pub fn set_failed(&self, value: u64) {
        self.0.failed.store(value, Ordering::Relaxed);
    }

    /// Adds to the count of successes (`ibv_inc_comp_cntr`).
    pub fn add_completed(&self, amount: u64) {
        self.0.completed.fetch_add(amount, Ordering::Relaxed);
    }

    /// Adds to the count of failures (`ibv_inc_err_comp_cntr`).
    pub fn add_failed(&self, amount: u64) {
        self.0.failed.fetch_add(amount, Ordering::Relaxed);
    }

    /// Asks the network first. A program that waits for a count to change need not poll a completion queue as well.
    pub fn progress(&self) {
        if self.0.core.is_current() {
            self.0.core.progress().poll(None);
        }
    }

    /// Destroys it (`ibv_destroy_comp_cntr`).
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while a queue pair has it.
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.0.core.is_current() {
            return Ok(());
        }
        self.0.holders.retire().inspect_err(|e| {
            crate::say_again!(
                error,
                self.0.holders.id(),
                "a completion counter is not destroyed: {e}; see `anyverbs explain AV8009`"
            )
        })
    }
}
