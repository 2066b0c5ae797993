//! Protection domain.

use std::sync::Arc;

use anyverbs_locks::{Mutex, rank};
use anyverbs_queue_memory::QueueMemory;

use crate::base::{Core, Ticket};
use crate::context_cell::ContextCell;
use crate::error::{CreateError, DestroyError};
use crate::holders::{Held, Holdable, Holder, Holders};
use crate::td::{Td, TdCell};

/// Protection domain (`ibv_alloc_pd`): queue pairs reach only memory of their own. Or a parent domain, which is another
/// name for one and takes its place everywhere ([`Pd::parent_domain`]).
#[derive(Debug)]
pub struct Pd {
    #[doc(hidden)]
    pub cell: Arc<PdCell>,
    /// Objects made through it report their events there.
    pub context: Arc<ContextCell>,
}

/// A protection domain, as its objects hold it.
#[derive(Debug)]
pub struct PdCell {
    /// The core that the devices of the process share.
    pub core: &'static Core,
    /// The number of its device.
    pub device: usize,
    /// Identifies it to the machines, and in memory keys.
    pub number: u32,
    /// None of a parent domain, which has that of another.
    _taken: Option<Taken>,
    pub(crate) holders: Holders,
    /// The domain behind a parent domain, until that is destroyed.
    parent_of: Option<Mutex<rank::ParentDomain, Option<ParentOf>>>,
    /// The memory for the queues of objects made on it.
    pub memory: QueueMemory,
    _ticket: Ticket,
}

/// A number that was taken from [`Core::pd_numbers`].
#[derive(Debug)]
struct Taken {
    core: &'static Core,
    number: u32,
}

impl Drop for Taken {
    fn drop(&mut self) {
        // A forked child has no such domain.
        if self.core.is_current() {
            self.core.pd_numbers.give_back(self.number);
        }
    }
}

#[derive(Debug)]
#[expect(dead_code, reason = "held for their drop")]
struct ParentOf(Held<PdCell>, Option<Held<TdCell>>);

impl PdCell {
    fn new(
        core: &'static Core,
        device: usize,
        number: u32,
        taken: Option<Taken>,
    ) -> Result<Self, CreateError> {
        let ticket = core.take(device, |all| &all.pd)?;
        Ok(Self {
            core,
            device,
            number,
            _taken: taken,
            holders: Holders::default(),
            parent_of: None,
            memory: QueueMemory::HEAP,
            _ticket: ticket,
        })
    }
}

impl PdCell {
    /// Whether it belongs to this device of the process.
    #[must_use]
    pub fn is_of(&self, core: &Core, device: usize) -> bool {
        std::ptr::eq(self.core, core) && self.device == device
    }
}

impl Holdable for PdCell {
    fn holders(&self) -> &Holders {
        &self.holders
    }
}

impl Pd {
    #[doc(hidden)]
    pub fn new(core: &'static Core, context: &Arc<ContextCell>) -> Result<Self, CreateError> {
        let number = core.pd_numbers.take(context.device);
        let cell = PdCell::new(core, context.device, number, Some(Taken { core, number }))?;
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

    /// Makes a parent domain of this protection domain (`ibv_alloc_parent_domain`). Objects made on either belong to
    /// the same one. But the parent domain can be destroyed only when no object made on it is left, and this one and
    /// `td` only after it. The queues of queue pairs, SRQs, work queues and completion queues that are made on it lie
    /// in `memory`, and are given back when those are destroyed.
    ///
    /// # Errors
    /// [`CreateError::Invalid`] if this is a parent domain itself, [`CreateError::Foreign`], [`CreateError::Full`],
    /// [`CreateError::Forked`].
    pub fn parent_domain(&self, td: Option<&Td>, memory: QueueMemory) -> Result<Self, CreateError> {
        let pd = &self.cell;
        pd.core.may_make(pd.device)?;
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
            ..PdCell::new(pd.core, pd.device, pd.number, None)?
        };
        Ok(Self { cell: Arc::new(cell), context: Arc::clone(&self.context) })
    }

    /// Destroys it (`ibv_dealloc_pd`).
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while an MR, MW, AH, QP, SRQ, CQ, buffer or parent domain uses it.
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.cell.core.is_current() {
            return Ok(());
        }
        self.cell.holders.retire().inspect_err(|e| {
            crate::say_again!(
                error,
                self.cell.number.into(),
                "protection domain {} is not destroyed: {e}; see `anyverbs explain AV8009`",
                self.cell.number & 0xff_ffff
            )
        })?;
        if let Some(parent_of) = &self.cell.parent_of {
            drop(parent_of.lock().take());
        }
        Ok(())
    }
}
