//! Memory region.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use anyverbs_locks::{Mutex, rank};
use anyverbs_proto::mr::{Access, Keepers, Keys, Region, RetireError, index};

use crate::base::{Core, Ticket};
use crate::buf::Buf;
use crate::dm::{Dm, DmCell};
use crate::dmah::{Dmah, DmahCell};
use crate::error::{DestroyError, RegisterError};
use crate::features::Feature;
use crate::holders::{Held, Holder};
use crate::limits;
use crate::memory::mapping::{Mapping, Needs, Unfit, dmabuf};
use crate::pd::{Pd, PdCell};

/// Memory region (`ibv_reg_mr`). Its pages are not pinned.
#[derive(Debug)]
pub struct Mr {
    core: &'static Core,
    keys: Keys,
    state: Mutex<rank::MemoryRegion, Option<State>>,
}

#[derive(Debug)]
struct State {
    pd: Held<PdCell>,
    region: Region,
    backing: Backing,
    _dmah: Option<Held<DmahCell>>,
    _ticket: Ticket,
}

/// The region's memory, and the object that keeps it there.
#[derive(Debug)]
enum Backing {
    /// The program's memory: it keeps it.
    Program,
    /// The whole address space.
    AddressSpace,
    /// There are none.
    Null,
    #[expect(dead_code, reason = "held for its drop")]
    Device(Held<DmCell>),
    #[expect(dead_code, reason = "held for its drop")]
    Buf(Arc<Mapping>),
    #[expect(dead_code, reason = "held for its drop")]
    DmaBuf(DmaBuf),
}

/// A mapped dma-buf, in use by this processor.
#[derive(Debug)]
struct DmaBuf {
    fd: OwnedFd,
    _mapping: Mapping,
}

impl Drop for DmaBuf {
    fn drop(&mut self) {
        use std::os::fd::AsFd;
        dmabuf::sync(self.fd.as_fd(), false);
    }
}

/// The changes of a re-registration (`ibv_rereg_mr`).
#[derive(Clone, Copy, Debug, Default)]
pub struct Rereg<'a> {
    /// New address and length; the region is then named by its address.
    pub translation: Option<(u64, u64)>,
    /// New protection domain.
    pub pd: Option<&'a Pd>,
    /// New rights.
    pub access: Option<Access>,
}

fn check_access(
    core: &'static Core,
    device: usize,
    access: Access,
) -> Result<Access, RegisterError> {
    if access.contains(Access::ON_DEMAND) && core.attr_of(device).lacks.has(Feature::Odp) {
        let persona = core.persona_name(device);
        return Err(RegisterError::Persona { persona, lacks: Feature::Odp });
    }
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

/// Whether the program's memory is as the region needs it. Memory that is paged on demand may come later.
fn check_memory(
    core: &'static Core,
    addr: u64,
    len: u64,
    access: Access,
) -> Result<(), RegisterError> {
    if !core.is_current() {
        return Err(RegisterError::Forked);
    }
    let on_demand = access.contains(Access::ON_DEMAND);
    let needs = Needs {
        writable: access.contains(Access::LOCAL_WRITE),
        huge: on_demand && access.contains(Access::HUGETLB),
        persistent: access.contains(Access::FLUSH_PERSISTENT),
    };
    if on_demand && !needs.huge && !needs.persistent {
        return Ok(());
    }
    core.memory.maps.check(addr, len, needs).map_err(|unfit| match unfit {
        Unfit::NotMapped(at) => RegisterError::NotMapped(at),
        Unfit::Protected(at) => RegisterError::Protected(at),
        Unfit::NotHuge => RegisterError::Invalid("memory: not all pages are huge"),
        Unfit::Volatile => RegisterError::Invalid("memory: not all of it is of a persistent file"),
    })
}

fn check_range(addr: u64, len: u64, iova: u64) -> Result<(), RegisterError> {
    let wraps = addr.checked_add(len).is_none() || iova.checked_add(len).is_none();
    if wraps { Err(RegisterError::Range) } else { Ok(()) }
}

/// A region before it is entered.
struct Draft<'a> {
    addr: u64,
    len: u64,
    iova: u64,
    access: Access,
    dmah: Option<&'a Dmah>,
    backing: Backing,
}

impl Mr {
    /// Registers the program's memory.
    pub(crate) fn register(
        pd: &Arc<PdCell>,
        (addr, len, iova): (u64, u64, u64),
        access: Access,
        dmah: Option<&Dmah>,
    ) -> Result<Self, RegisterError> {
        let access = check_access(pd.core, pd.device, access)?;
        if access.contains(Access::ON_DEMAND) && addr == 0 && len == u64::MAX {
            if iova != 0 {
                return Err(RegisterError::Range);
            }
            if access.contains(Access::FLUSH_PERSISTENT) {
                return Err(RegisterError::Invalid(
                    "access: not all memory is of a persistent file",
                ));
            }
            let backing = Backing::AddressSpace;
            return Self::enter(pd, Draft { addr, len, iova, access, dmah, backing });
        }
        let iova = if access.contains(Access::ZERO_BASED) { 0 } else { iova };
        check_range(addr, len, iova)?;
        check_memory(pd.core, addr, len, access)?;
        Self::enter(pd, Draft { addr, len, iova, access, dmah, backing: Backing::Program })
    }

    /// Registers part of a buffer that the device allocated in the same protection domain.
    pub(crate) fn of_buf(
        pd: &Arc<PdCell>,
        buf: &Buf,
        (addr, len, iova): (u64, u64, u64),
        access: Access,
        dmah: Option<&Dmah>,
    ) -> Result<Self, RegisterError> {
        let access = check_access(pd.core, pd.device, access)?;
        if !Arc::ptr_eq(buf.pd.arc(), pd) {
            return Err(RegisterError::Foreign("buffer"));
        }
        if !buf.covers(addr, len) {
            return Err(RegisterError::Range);
        }
        let iova = if access.contains(Access::ZERO_BASED) { 0 } else { iova };
        check_range(addr, len, iova)?;
        check_memory(pd.core, addr, len, access)?;
        let backing = Backing::Buf(Arc::clone(&buf.mapping));
        Self::enter(pd, Draft { addr, len, iova, access, dmah, backing })
    }

    /// Makes a region without memory.
    pub(crate) fn null(pd: &Arc<PdCell>) -> Result<Self, RegisterError> {
        let access = Access::LOCAL_WRITE | Access::NULL;
        let (addr, len, iova, dmah) = (0, u64::MAX, 0, None);
        Self::enter(pd, Draft { addr, len, iova, access, dmah, backing: Backing::Null })
    }

    /// Registers device memory.
    pub(crate) fn of_dm(
        pd: &Arc<PdCell>,
        dm: &Dm,
        offset: u64,
        len: u64,
        access: Access,
    ) -> Result<Self, RegisterError> {
        let access = check_access(pd.core, pd.device, access)?;
        if !access.contains(Access::ZERO_BASED) {
            return Err(RegisterError::Invalid("access: a region of device memory is zero-based"));
        }
        let pointless = Access::ON_DEMAND | Access::HUGETLB | Access::FLUSH_PERSISTENT;
        if access.intersects(pointless) {
            return Err(RegisterError::Unsupported(access.intersection(pointless).bits()));
        }
        if !pd.is_of(dm.cell.core, dm.cell.context.device) {
            return Err(RegisterError::Foreign("device memory"));
        }
        if offset.checked_add(len).is_none_or(|end| end > dm.cell.len()) {
            return Err(RegisterError::Range);
        }
        let gone = RegisterError::Foreign("device memory");
        let backing = Backing::Device(Held::new(&dm.cell, Holder::Mr).ok_or(gone)?);
        let addr = dm.cell.addr() + offset;
        Self::enter(pd, Draft { addr, len, iova: 0, access, dmah: None, backing })
    }

    /// Registers a dma-buf.
    pub(crate) fn of_dmabuf(
        pd: &Arc<PdCell>,
        fd: BorrowedFd<'_>,
        (offset, len, iova): (u64, u64, u64),
        access: Access,
        dmah: Option<&Dmah>,
    ) -> Result<Self, RegisterError> {
        let access = check_access(pd.core, pd.device, access)?;
        let unsupported = access.difference(limits::DMABUF_ACCESS);
        if !unsupported.is_empty() {
            return Err(RegisterError::Unsupported(unsupported.bits()));
        }
        let size = dmabuf::len(fd).map_err(RegisterError::System)?;
        let page = 4096;
        if offset.checked_add(len).is_none_or(|end| end > size) || iova % page != offset % page {
            return Err(RegisterError::Range);
        }
        check_range(offset, len, iova)?;
        let skipped = offset % page;
        let bytes = usize::try_from(len + skipped).map_err(|_| RegisterError::Range)?;
        let writable = access.contains(Access::LOCAL_WRITE);
        let system =
            |e: std::io::Error| RegisterError::System(e.raw_os_error().unwrap_or(libc::EOPNOTSUPP));
        let mapping = Mapping::of_file(fd, offset - skipped, bytes, writable).map_err(system)?;
        let addr = mapping.addr() + skipped;
        let kept = fd.try_clone_to_owned().map_err(system)?;
        dmabuf::sync(fd, true);
        let backing = Backing::DmaBuf(DmaBuf { fd: kept, _mapping: mapping });
        Self::enter(pd, Draft { addr, len, iova, access, dmah, backing })
    }

    fn enter(pd: &Arc<PdCell>, draft: Draft<'_>) -> Result<Self, RegisterError> {
        let core = pd.core;
        if !core.is_current() {
            return Err(RegisterError::Forked);
        }
        if core.has_failed(pd.device) {
            return Err(RegisterError::Failed);
        }
        let ticket = core.take(pd.device, |all| &all.mr)?;
        let held = Held::new(pd, Holder::Mr).ok_or(RegisterError::Foreign("protection domain"))?;
        let hold = |dmah: &Dmah| {
            Held::new(&dmah.0, Holder::Mr).ok_or(RegisterError::Foreign("DMA handle"))
        };
        let dmah = draft.dmah.map(hold).transpose()?;
        let Draft { addr, len, iova, access, backing, .. } = draft;
        let region = Region { pd: pd.number, access, iova, len, addr };
        let keys = core.mrs.register(region).ok_or(RegisterError::Exhausted)?;
        core.publish_region(keys, &region);
        if let Some(vanishing) = core.mrs.vanishing().filter(|_| !access.contains(Access::NULL)) {
            vanishing.registered(index(keys.lkey), pd.device, addr);
        }
        let state = State { pd: held, region, backing, _dmah: dmah, _ticket: ticket };
        Ok(Self { core, keys, state: Mutex::new(Some(state)) })
    }

    pub(crate) fn core(&self) -> &'static Core {
        self.core
    }

    /// Key for our own scatter/gather elements.
    #[must_use]
    pub fn lkey(&self) -> u32 {
        self.keys.lkey
    }

    /// Key for peers; 0 where they have none.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        self.keys.rkey
    }

    /// Bytes; 0 once it is destroyed, and where a forked child inherited it.
    #[expect(clippy::len_without_is_empty, reason = "a region of no bytes is a region")]
    #[must_use]
    pub fn len(&self) -> u64 {
        if !self.core.is_current() {
            return 0;
        }
        self.state.lock().as_ref().map_or(0, |state| state.region.len)
    }

    /// The address of its first byte in its own terms (iova), in which elements and peers name it; 0 where [`len`](Self::len) is 0.
    #[must_use]
    pub fn start(&self) -> u64 {
        if !self.core.is_current() {
            return 0;
        }
        self.state.lock().as_ref().map_or(0, |state| state.region.iova)
    }

    /// Changes the region in place, keys kept; waits for accesses in progress (`ibv_rereg_mr`). An rkey that was invalidated
    /// is good again.
    ///
    /// # Safety
    /// As for [`Pd::reg_mr`], for the new range.
    ///
    /// # Errors
    /// [`RegisterError`]; the region is as before. A region of no memory of the program's cannot change but in its protection
    /// domain, and with windows bound to it none can ([`RegisterError::Bound`]).
    pub unsafe fn rereg(&self, change: &Rereg<'_>) -> Result<(), RegisterError> {
        if !self.core.is_current() {
            return Err(RegisterError::Forked);
        }
        let mut guard = self.state.lock();
        let state = guard.as_mut().ok_or(RegisterError::Foreign("memory region"))?;
        let fixed = !matches!(state.backing, Backing::Program);
        if fixed && (change.access.is_some() || change.translation.is_some()) {
            return Err(RegisterError::Invalid("region: not one of the program's memory"));
        }
        let mut region = state.region;
        if let Some(access) = change.access {
            region.access = check_access(self.core, state.pd.device, access)?;
        }
        if let Some((addr, len)) = change.translation {
            let iova = if region.access.contains(Access::ZERO_BASED) { 0 } else { addr };
            check_range(addr, len, iova)?;
            region = Region { addr, len, iova, ..region };
        }
        if change.access.is_some() || change.translation.is_some() {
            check_memory(self.core, region.addr, region.len, region.access)?;
        }
        let held = match change.pd {
            Some(pd) if !pd.cell.is_of(self.core, state.pd.device) => {
                return Err(RegisterError::Foreign("protection domain"));
            }
            Some(pd) => Some(
                Held::new(&pd.cell, Holder::Mr)
                    .ok_or(RegisterError::Foreign("protection domain"))?,
            ),
            None => None,
        };
        if let Some(pd) = &held {
            region.pd = pd.number;
        }
        self.core.withdraw_region(self.keys);
        let replaced = self.core.mrs.replace(self.keys, region, |keepers| self.release(keepers));
        let now = if replaced.is_ok() { region } else { state.region };
        self.core.publish_region(self.keys, &now);
        replaced.map_err(|error| match error {
            RetireError::Bound => RegisterError::Bound,
            RetireError::Key => RegisterError::Foreign("memory region"),
        })?;
        state.region = region;
        if let Some(pd) = held {
            state.pd = pd;
        }
        Ok(())
    }

    /// Destroys it; waits for accesses in progress (`ibv_dereg_mr`).
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while memory windows are bound to it, [`DestroyError::Gone`].
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.core.is_current() {
            return Ok(());
        }
        let mut guard = self.state.lock();
        let state = guard.as_ref().ok_or(DestroyError::Gone)?;
        self.core.withdraw_region(self.keys);
        let ended = self.core.mrs.deregister(self.keys.lkey, |keepers| self.release(keepers));
        if ended == Err(RetireError::Bound) {
            self.core.publish_region(self.keys, &state.region);
            return Err(DestroyError::Busy("memory windows".into()));
        }
        let state = guard.take();
        drop(guard);
        drop(state);
        Ok(())
    }

    /// Queue pairs let go of it that keep it in use.
    fn release(&self, keepers: Keepers) {
        self.core.progress().release_regions(keepers);
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // An inherited region is its parent's.
        if !self.core.is_current() {
            return;
        }
        // The program may reuse the memory now, even if windows are bound to it.
        if let Some(state) = self.state.get_mut().take() {
            self.core.withdraw_region(self.keys);
            let release = |keepers| self.release(keepers);
            let ended = self.core.mrs.deregister_bound(self.keys.lkey, release);
            debug_assert!(ended.is_ok(), "a region that was not destroyed has its keys");
            drop(state);
        }
    }
}

impl Pd {
    /// Registers `len` bytes at `addr`, which keys name by `iova` on (`ibv_reg_mr`: `iova` = `addr`).
    ///
    /// This process and, as `access` grants, peers may write the memory at any time, but it is never borrowed: a range
    /// that is unmapped later makes protection errors.
    ///
    /// # Safety
    /// Until the region is destroyed the device writes to the range for work requests and for peers with the key. No
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

    /// Makes a region without memory (`ibv_alloc_null_mr`): it reads as zeros, and writes to it are lost. Peers have no
    /// key for it.
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
}
