//! Memory region.

use std::sync::Arc;

use anyverbs_proto::mr::{Access, Keys, Region};
use parking_lot::Mutex;

use crate::engine::Engine;
use crate::error::{DestroyError, RegisterError};
use crate::holders::{Held, Holder};
use crate::limits;
use crate::memory;
use crate::pd::{Pd, PdCell};

/// Memory region (`ibv_reg_mr`). Nothing is pinned.
#[derive(Debug)]
pub struct Mr {
    engine: &'static Engine,
    keys: Keys,
    state: Mutex<Option<State>>,
}

#[derive(Debug)]
struct State {
    pd: Held<PdCell>,
    region: Region,
}

/// What a re-registration changes (`ibv_rereg_mr`).
#[derive(Clone, Copy, Debug, Default)]
pub struct Rereg<'a> {
    /// New address and length; the region is then named by its address.
    pub translation: Option<(u64, u64)>,
    /// New protection domain.
    pub pd: Option<&'a Pd>,
    /// New rights.
    pub access: Option<Access>,
}

fn check_access(access: Access) -> Result<Access, RegisterError> {
    let unsupported = access.difference(limits::REGION_ACCESS);
    if !unsupported.is_empty() {
        return Err(RegisterError::Unsupported(unsupported.bits()));
    }
    if access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
        && !access.contains(Access::LOCAL_WRITE)
    {
        return Err(RegisterError::Access);
    }
    Ok(access)
}

fn check_range(addr: u64, len: u64, iova: u64) -> Result<(), RegisterError> {
    if addr.checked_add(len).is_none() || iova.checked_add(len).is_none() {
        return Err(RegisterError::Range);
    }
    if memory::is_mapped(addr, len) { Ok(()) } else { Err(RegisterError::NotMapped) }
}

impl Mr {
    pub(crate) fn register(
        pd: &Arc<PdCell>,
        addr: u64,
        len: u64,
        iova: u64,
        access: Access,
    ) -> Result<Self, RegisterError> {
        let engine = pd.engine;
        if !engine.is_current() {
            return Err(RegisterError::Forked);
        }
        let access = check_access(access)?;
        let iova = if access.contains(Access::ZERO_BASED) { 0 } else { iova };
        check_range(addr, len, iova)?;
        let held = Held::new(pd, Holder::Mr).ok_or(RegisterError::Foreign("protection domain"))?;
        let region = Region { pd: pd.number, access, iova, len, addr };
        let keys = engine.mrs.register(region).ok_or(RegisterError::Exhausted)?;
        engine.publish_region(keys.rkey, &region);
        Ok(Self { engine, keys, state: Mutex::new(Some(State { pd: held, region })) })
    }

    /// Key for our own scatter/gather elements.
    #[must_use]
    pub fn lkey(&self) -> u32 {
        self.keys.lkey
    }

    /// Key for peers.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        self.keys.rkey
    }

    /// Changes the region in place, keys kept; waits for accesses in progress (`ibv_rereg_mr`).
    ///
    /// # Safety
    /// As for [`Pd::reg_mr`], for the new range.
    ///
    /// # Errors
    /// [`RegisterError`]; the region is as before.
    pub unsafe fn rereg(&self, change: &Rereg<'_>) -> Result<(), RegisterError> {
        if !self.engine.is_current() {
            return Err(RegisterError::Forked);
        }
        let mut guard = self.state.lock();
        let state = guard.as_mut().ok_or(RegisterError::Foreign("memory region"))?;
        let mut region = state.region;
        if let Some(access) = change.access {
            region.access = check_access(access)?;
        }
        if let Some((addr, len)) = change.translation {
            let iova = if region.access.contains(Access::ZERO_BASED) { 0 } else { addr };
            check_range(addr, len, iova)?;
            region = Region { addr, len, iova, ..region };
        }
        let held = match change.pd {
            Some(pd) if !std::ptr::eq(pd.0.engine, self.engine) => {
                return Err(RegisterError::Foreign("protection domain"));
            }
            Some(pd) => Some(
                Held::new(&pd.0, Holder::Mr).ok_or(RegisterError::Foreign("protection domain"))?,
            ),
            None => None,
        };
        if let Some(pd) = &held {
            region.pd = pd.number;
        }
        self.engine.withdraw_region(self.keys.rkey);
        if !self.engine.mrs.replace(self.keys.lkey, region) {
            return Err(RegisterError::Foreign("memory region"));
        }
        self.engine.publish_region(self.keys.rkey, &region);
        state.region = region;
        if let Some(pd) = held {
            state.pd = pd;
        }
        Ok(())
    }

    /// Destroys it; waits for accesses in progress (`ibv_dereg_mr`).
    ///
    /// # Errors
    /// [`DestroyError::Gone`].
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.engine.is_current() {
            return Ok(());
        }
        let state = self.state.lock().take().ok_or(DestroyError::Gone)?;
        self.engine.withdraw_region(self.keys.rkey);
        self.engine.mrs.deregister(self.keys.lkey);
        drop(state);
        Ok(())
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // The program may reuse the memory now. An inherited region is its parent's.
        let _ = self.destroy();
    }
}
