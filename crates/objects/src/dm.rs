//! Device memory: memory that belongs to the device and not to the program.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use anyverbs_proto::memory::{Fault, Memory};

use crate::base::Core;
use crate::command::{CommandFile, Piece};
use crate::context_cell::ContextCell;
use crate::error::{CreateError, DestroyError, DmError};
use crate::features::Feature;
use crate::holders::{Holdable, Holders};
use crate::limits::MAX_DM_SIZE;
use crate::memory::mapping::Mapping;

/// Offsets and lengths of copies are multiples of this, as on devices that have such memory.
const UNIT: u64 = 4;
/// Alignment that every piece has.
const MAX_LOG_ALIGN: u32 = 12;

/// Device memory (`ibv_alloc_dm`). Freed when dropped, unless it was imported.
#[derive(Debug)]
pub struct Dm {
    pub(crate) cell: Arc<DmCell>,
    imported: bool,
}

#[derive(Debug)]
pub(crate) struct DmCell {
    pub(crate) core: &'static Core,
    pub(crate) context: Arc<ContextCell>,
    piece: Piece,
    mapping: Mapping,
    holders: Holders,
}

impl Holdable for DmCell {
    fn holders(&self) -> &Holders {
        &self.holders
    }
}

impl DmCell {
    fn file(&self) -> &CommandFile {
        &self.context.command
    }

    pub(crate) fn len(&self) -> u64 {
        self.piece.len.into()
    }

    pub(crate) fn addr(&self) -> u64 {
        self.mapping.addr()
    }
}

impl Dm {
    #[doc(hidden)]
    pub fn alloc(
        core: &'static Core,
        context: &Arc<ContextCell>,
        len: u64,
        log_align: u32,
    ) -> Result<Self, CreateError> {
        core.offers(context.device, Feature::DeviceMemory)?;
        if log_align > MAX_LOG_ALIGN {
            return Err(CreateError::Invalid("alignment of device memory"));
        }
        if len == 0 {
            return Err(CreateError::Invalid("length of device memory"));
        }
        let none = CreateError::Exhausted("device memory");
        let len = u32::try_from(len).ok().filter(|len| u64::from(*len) <= MAX_DM_SIZE);
        let piece = context.command.alloc(len.ok_or(none.clone())?).ok_or(none.clone())?;
        let dm = Self::of(core, context, piece, false);
        if dm.is_err() {
            context.command.free(&piece);
        }
        dm
    }

    #[doc(hidden)]
    pub fn import(
        core: &'static Core,
        context: &Arc<ContextCell>,
        handle: u32,
    ) -> Result<Self, CreateError> {
        let piece = context.command.find(handle).ok_or(CreateError::Foreign("device memory"))?;
        Self::of(core, context, piece, true)
    }

    fn of(
        core: &'static Core,
        context: &Arc<ContextCell>,
        piece: Piece,
        imported: bool,
    ) -> Result<Self, CreateError> {
        let mapping =
            context.command.map(&piece).map_err(|_| CreateError::Exhausted("device memory"))?;
        let context = Arc::clone(context);
        let holders = Holders::default();
        Ok(Self { cell: Arc::new(DmCell { core, context, piece, mapping, holders }), imported })
    }

    /// By which others import it (`Context::import_dm`).
    #[must_use]
    pub fn handle(&self) -> u32 {
        self.cell.piece.handle
    }

    /// Bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    #[must_use]
    pub fn len(&self) -> u64 {
        self.cell.len()
    }

    /// Where `len` bytes from `offset` on lie, for a copy (`ibv_memcpy_to_dm`). Peers may write them at the same time.
    ///
    /// # Errors
    /// [`DmError::Range`].
    pub fn at(&self, offset: u64, len: u64) -> Result<*mut u8, DmError> {
        let end = offset.checked_add(len).ok_or(DmError::Range)?;
        if end > self.len() || !offset.is_multiple_of(UNIT) || !len.is_multiple_of(UNIT) {
            return Err(DmError::Range);
        }
        Ok(self.cell.mapping.as_ptr().cast::<u8>().wrapping_add(offset as usize))
    }

    /// Copies `data` to it.
    ///
    /// # Errors
    /// [`DmError`].
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), DmError> {
        let to = self.at(offset, data.len() as u64)?;
        self.cell.core.memory.write(to as u64, data).map_err(|Fault| DmError::Fault)
    }

    /// Copies from it.
    ///
    /// # Errors
    /// [`DmError`].
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), DmError> {
        let from = self.at(offset, into.len() as u64)?;
        self.cell.core.memory.read(from as u64, into).map_err(|Fault| DmError::Fault)
    }

    /// A dma-buf of it (`ibv_dm_export_dmabuf_fd`).
    ///
    /// # Errors
    /// [`DmError::Export`]: `EOPNOTSUPP` where the system has no `/dev/udmabuf`.
    pub fn export_dmabuf(&self) -> Result<OwnedFd, DmError> {
        let exported = self.cell.file().export(&self.cell.piece);
        exported.map_err(|e| DmError::Export(e.raw_os_error().unwrap_or(libc::EOPNOTSUPP)))
    }

    /// Frees it, wherever else it was imported (`ibv_free_dm`).
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while a memory region uses it, [`DestroyError::Gone`] if it was freed by another.
    pub fn destroy(&self) -> Result<(), DestroyError> {
        // Whoever forked uses it.
        if !self.cell.core.is_current() {
            return Ok(());
        }
        self.cell.holders.retire()?;
        if self.cell.file().free(&self.cell.piece) { Ok(()) } else { Err(DestroyError::Gone) }
    }
}

impl Drop for Dm {
    fn drop(&mut self) {
        if !self.imported {
            let _ = self.destroy();
        }
    }
}
