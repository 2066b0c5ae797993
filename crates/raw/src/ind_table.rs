//! Indirection table: the work queue for each hash (`ibv_create_rwq_ind_table(3)`).

use std::sync::Arc;

use anyverbs_locks::{Mutex, rank};
use anyverbs_objects::base::{Core, Ticket};
use anyverbs_objects::error::{CreateError, DestroyError};
use anyverbs_objects::holders::{Held, Holdable, Holder, Holders};

use super::wq::{Wq, WqCell};

/// Indirection table (`ibv_create_rwq_ind_table`).
#[derive(Debug)]
pub struct RwqIndTable(pub(super) Arc<TableCell>);

#[derive(Debug)]
pub(super) struct TableCell {
    pub(super) core: &'static Core,
    /// The number of its device.
    pub(super) device: usize,
    /// A power of two of them.
    pub(super) wqs: Vec<Arc<WqCell>>,
    holders: Holders,
    hold: Mutex<rank::ObjectHold, Option<Hold>>,
}

#[derive(Debug)]
#[expect(dead_code, reason = "held for their drop")]
struct Hold(Vec<Held<WqCell>>, Ticket);

impl Holdable for TableCell {
    fn holders(&self) -> &Holders {
        &self.holders
    }
}

impl TableCell {
    /// The queue for a hash.
    pub(super) fn queue(&self, hash: u32) -> &WqCell {
        &self.wqs[hash as usize & (self.wqs.len() - 1)]
    }
}

impl RwqIndTable {
    /// See `Context::create_rwq_ind_table`.
    #[doc(hidden)]
    pub fn create(core: &'static Core, device: usize, wqs: &[&Wq]) -> Result<Self, CreateError> {
        let most = core.attr_of(device).max_rwq_ind_table_size as usize;
        if !wqs.len().is_power_of_two() || wqs.len() > most {
            return Err(CreateError::Invalid("size of an indirection table"));
        }
        if !wqs.iter().all(|wq| wq.0.is_of(core, device)) {
            return Err(CreateError::Foreign("work queue"));
        }
        let ticket = core.take(device, |all| &all.ind_table)?;
        let held: Option<Vec<_>> =
            wqs.iter().map(|wq| Held::new(&wq.0, Holder::IndTable)).collect();
        let hold = Hold(held.ok_or(CreateError::Foreign("work queue"))?, ticket);
        Ok(RwqIndTable(Arc::new(TableCell {
            core,
            device,
            wqs: wqs.iter().map(|wq| Arc::clone(&wq.0)).collect(),
            holders: Holders::default(),
            hold: Mutex::new(Some(hold)),
        })))
    }
}

impl RwqIndTable {
    /// Destroys it (`ibv_destroy_rwq_ind_table`).
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while a queue pair uses it.
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.0.core.is_current() {
            return Ok(());
        }
        self.0.holders.retire().inspect_err(|e| {
            anyverbs_objects::say_again!(
                error,
                self.0.holders.id(),
                "an indirection table is not destroyed: {e}; see `anyverbs explain AV8009`"
            )
        })?;
        drop(self.0.hold.lock().take());
        Ok(())
    }
}

impl Drop for RwqIndTable {
    fn drop(&mut self) {
        if self.0.core.is_current() && self.0.holders.retire().is_ok() {
            drop(self.0.hold.lock().take());
        }
    }
}
