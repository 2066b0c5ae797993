//! Buffers that the device allocates for the program (`ibv_alloc_buf`): whole pages, of a file in memory, so that peers on this
//! host can map them. A forked child shares them.

use std::sync::Arc;

use crate::error::CreateError;
use crate::holders::{Held, Holder};
use crate::memory::mapping::Mapping;
use crate::pd::{Pd, PdCell};

/// A buffer. Its memory goes when it is dropped and no region of it is left.
#[derive(Debug)]
pub struct Buf {
    pub(crate) pd: Held<PdCell>,
    pub(crate) mapping: Arc<Mapping>,
    len: u64,
}

impl Buf {
    pub(crate) fn alloc(pd: &Arc<PdCell>, len: u64) -> Result<Self, CreateError> {
        pd.core.may_make(pd.device)?;
        let size = usize::try_from(len).ok().filter(|len| *len > 0 && *len <= isize::MAX as usize);
        let size = size.ok_or(CreateError::Invalid("length of a buffer"))?;
        let pd = Held::new(pd, Holder::Buf).ok_or(CreateError::Foreign("protection domain"))?;
        let mapping = Mapping::shared(size)
            .or_else(|_| Mapping::anonymous(size))
            .map_err(|_| CreateError::Exhausted("memory"))?;
        Ok(Self { pd, mapping: Arc::new(mapping), len })
    }

    /// Its first byte.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_ptr().cast()
    }

    /// Bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether a range lies within it.
    pub(crate) fn covers(&self, addr: u64, len: u64) -> bool {
        let offset = addr.checked_sub(self.mapping.addr());
        offset.and_then(|o| o.checked_add(len)).is_some_and(|end| end <= self.len)
    }
}

impl Pd {
    /// Allocates a buffer (`ibv_alloc_buf`).
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn alloc_buf(&self, len: u64) -> Result<Buf, CreateError> {
        Buf::alloc(&self.cell, len)
    }
}
