//! Memory window.

use std::sync::Arc;

use anyverbs_locks::{Mutex, rank};
use anyverbs_proto::mr::{Access, Bind, WindowType};
use anyverbs_proto::wr::SendOp;

use crate::base::{Core, Ticket};
use crate::error::{CreateError, DestroyError, PostError};
use crate::features::Feature;
use crate::holders::{Held, Holder};
use crate::mr::Mr;
use crate::pd::{Pd, PdCell};

/// Memory window (`ibv_alloc_mw`): opens a part of a region to peers, under a key of its own, for as long as it is bound.
#[derive(Debug)]
pub struct Mw {
    core: &'static Core,
    kind: WindowType,
    /// The first key; later ones differ in the low 8 bits.
    rkey: u32,
    hold: Mutex<rank::ObjectHold, Option<(Held<PdCell>, Ticket)>>,
}

/// The target of a bind (`struct ibv_mw_bind_info`).
#[derive(Clone, Copy, Debug)]
pub struct BindInfo<'a> {
    /// The region; `None` with a length of 0.
    pub mr: Option<&'a Mr>,
    /// First byte, in the region's terms.
    pub addr: u64,
    /// Bytes; 0 unbinds a window of type 1.
    pub len: u64,
    /// Remote rights, and whether the window's addresses count from 0.
    pub access: Access,
}

impl Mw {
    pub(crate) fn alloc(pd: &Arc<PdCell>, kind: WindowType) -> Result<Self, CreateError> {
        let core = pd.core;
        core.may_make(pd.device)?;
        core.offers(pd.device, Feature::MemoryWindows)?;
        let ticket = core.take(pd.device, |all| &all.mw)?;
        let hold = Held::new(pd, Holder::Mw).ok_or(CreateError::Foreign("protection domain"))?;
        let rkey = core.mrs.alloc_window(pd.number, kind);
        let rkey = rkey.ok_or(CreateError::Exhausted("memory keys"))?;
        Ok(Self { core, kind, rkey, hold: Mutex::new(Some((hold, ticket))) })
    }

    /// The key that it was made with. The bind gives the key that it is bound under.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Its type.
    #[must_use]
    pub fn kind(&self) -> WindowType {
        self.kind
    }

    /// The request that binds it, to be posted to a queue pair, and the key by which peers name it then: its own with
    /// the low 8 bits of `rkey`. The rights of the region are checked when the request's turn has come
    /// ([`MwBindErr`](anyverbs_proto::wc::WcStatus::MwBindErr)).
    ///
    /// # Errors
    /// [`PostError::Bind`] for rights that no window can have, or a length without a region.
    pub fn bind(&self, rkey: u32, info: &BindInfo<'_>) -> Result<(SendOp, u32), PostError> {
        let foreign = info.mr.is_some_and(|mr| !std::ptr::eq(mr.core(), self.core));
        let nothing = info.mr.is_none() && info.len > 0;
        if foreign || nothing || !Access::OF_WINDOW.contains(info.access) {
            return Err(PostError::Bind);
        }
        let bind = Bind {
            window: self.rkey,
            rkey,
            lkey: info.mr.map_or(0, Mr::lkey),
            access: info.access,
            addr: info.addr,
            len: info.len,
        };
        Ok((SendOp::BindMw(bind), self.bound_key(rkey)))
    }

    /// The key that a bind under `rkey` gives it: its own, with the low 8 bits of that.
    #[must_use]
    pub fn bound_key(&self, rkey: u32) -> u32 {
        self.rkey & !0xff | rkey & 0xff
    }

    /// Destroys it, bound or not; no access through it is in progress any more (`ibv_dealloc_mw`).
    ///
    /// # Errors
    /// [`DestroyError::Gone`].
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.core.is_current() {
            return Ok(());
        }
        let hold = self.hold.lock().take().ok_or(DestroyError::Gone)?;
        self.core.mrs.free_window(self.rkey);
        drop(hold);
        Ok(())
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}

impl Pd {
    /// Makes a memory window (`ibv_alloc_mw`).
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn alloc_mw(&self, kind: WindowType) -> Result<Mw, CreateError> {
        Mw::alloc(&self.cell, kind)
    }
}
