//! Thread domain.

use std::sync::Arc;

use crate::base::Core;
use crate::context_cell::ContextCell;
use crate::error::DestroyError;
use crate::holders::{Holdable, Holders};

/// Thread domain (`ibv_alloc_td`): a promise that one thread uses the objects made in it. This device locks all the
/// same: it has a thread of its own.
#[derive(Debug)]
pub struct Td(pub(crate) Arc<TdCell>);

#[derive(Debug)]
pub(crate) struct TdCell {
    pub(crate) core: &'static Core,
    pub(crate) context: Arc<ContextCell>,
    holders: Holders,
}

impl Holdable for TdCell {
    fn holders(&self) -> &Holders {
        &self.holders
    }
}

impl Td {
    /// A new one, of a context.
    #[doc(hidden)]
    #[must_use]
    pub fn alloc(core: &'static Core, context: &Arc<ContextCell>) -> Self {
        let context = Arc::clone(context);
        Self(Arc::new(TdCell { core, context, holders: Holders::default() }))
    }

    /// Destroys it (`ibv_dealloc_td`).
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while a parent domain uses it.
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.0.core.is_current() {
            return Ok(());
        }
        self.0.holders.retire()
    }
}
