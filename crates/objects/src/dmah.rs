//! DMA handle: hints for the memory traffic of a region (`ibv_alloc_dmah`). This device has no use for them: it checks them,
//! and keeps them as long as a region refers to them.

use std::sync::Arc;

use crate::error::{CreateError, DestroyError};
use crate::holders::{Holdable, Holders};

/// Hints (`struct ibv_dmah_init_attr`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DmahAttr {
    /// The processor that will use the memory.
    pub cpu: Option<u32>,
    /// Processing hint, 0 to 3.
    pub hint: Option<u8>,
    /// Kind of memory: 0 volatile, 1 persistent.
    pub memory: Option<u8>,
}

/// DMA handle.
#[derive(Debug)]
pub struct Dmah(pub(crate) Arc<DmahCell>);

#[derive(Debug, Default)]
pub(crate) struct DmahCell {
    holders: Holders,
}

impl Holdable for DmahCell {
    fn holders(&self) -> &Holders {
        &self.holders
    }
}

impl Dmah {
    #[doc(hidden)]
    pub fn alloc(attr: &DmahAttr) -> Result<Self, CreateError> {
        let online = std::thread::available_parallelism().map_or(1, usize::from);
        if attr.cpu.is_some_and(|cpu| cpu as usize >= online) {
            return Err(CreateError::Invalid("processor of a DMA handle"));
        }
        if attr.hint.is_some_and(|hint| hint > 3) {
            return Err(CreateError::Invalid("processing hint"));
        }
        if attr.memory.is_some_and(|memory| memory > 1) {
            return Err(CreateError::Invalid("kind of memory"));
        }
        Ok(Self(Arc::default()))
    }

    /// Destroys it (`ibv_dealloc_dmah`).
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while a memory region uses it, [`DestroyError::Gone`].
    pub fn destroy(&self) -> Result<(), DestroyError> {
        self.0.holders.retire()
    }
}
