//! Addresses of regions that were imported: numbers that no address in a process is, so that what does not know of them faults
//! in the guarded copy.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyverbs_proto::memory::{Fault, Memory};
use parking_lot::RwLock;

use super::ProcessMemory;
use crate::link::imported::ImportedRegion;

/// The upper bits of such an address: not canonical on x86-64, and on AArch64 not even with its top byte ignored.
const TAG: u64 = 0xa7e5;
const TAG_AT: u32 = 48;
const PAGE: u64 = 4096;

/// Whether an address is that of an imported region.
#[inline]
pub(crate) fn is_imported(addr: u64) -> bool {
    addr >> TAG_AT == TAG
}

/// The imported regions of a process by their addresses.
#[derive(Debug, Default)]
pub(crate) struct Imports(RwLock<BTreeMap<u64, Arc<ImportedRegion>>>);

impl Imports {
    /// Gives a region an address; none is left for it where all together are too long.
    pub(crate) fn enter(&self, region: Arc<ImportedRegion>) -> Option<u64> {
        let mut regions = self.0.write();
        // A page between two, so that the end of the one is not the beginning of the other.
        let room = |len: u64| len.checked_add(2 * PAGE)?.checked_next_multiple_of(PAGE);
        let needed = room(region.len())?;
        let mut at = TAG << TAG_AT;
        for (&taken, other) in &*regions {
            if taken / PAGE * PAGE - at >= needed {
                break;
            }
            at = taken / PAGE * PAGE + room(other.len())?;
        }
        let end = (TAG + 1) << TAG_AT;
        if end - at < needed {
            return None;
        }
        let addr = at + region.page_offset();
        regions.insert(addr, region);
        Some(addr)
    }

    pub(crate) fn leave(&self, addr: u64) {
        self.0.write().remove(&addr);
    }

    /// Whether the process of the region at this address has it no more.
    pub(crate) fn is_over(&self, addr: u64) -> bool {
        let region = self.0.read().get(&addr).cloned();
        region.is_none_or(|region| !region.is_current())
    }

    /// The region that holds these bytes, and where they begin in it.
    fn find(&self, addr: u64, len: usize) -> Result<(Arc<ImportedRegion>, u64), Fault> {
        let regions = self.0.read();
        let (start, region) = regions.range(..=addr).next_back().ok_or(Fault)?;
        let offset = addr - start;
        let end = offset.checked_add(len as u64).ok_or(Fault)?;
        if end > region.len() { Err(Fault) } else { Ok((Arc::clone(region), offset)) }
    }
}

impl ProcessMemory {
    #[cold]
    pub(super) fn read_imported(&self, addr: u64, dst: &mut [u8]) -> Result<(), Fault> {
        let (region, offset) = self.imports.find(addr, dst.len())?;
        region.read(self, offset, dst.as_mut_ptr(), dst.len())
    }

    #[cold]
    pub(super) fn write_imported(&self, addr: u64, src: &[u8]) -> Result<(), Fault> {
        let (region, offset) = self.imports.find(addr, src.len())?;
        region.write(self, offset, src.as_ptr(), src.len())
    }

    #[cold]
    pub(super) fn copy_imported(&self, to: u64, from: u64, len: usize) -> Result<(), Fault> {
        match (is_imported(to), is_imported(from)) {
            (true, true) => {
                let mut piece = [0; PAGE as usize];
                for done in (0..len).step_by(piece.len()) {
                    let piece = &mut piece[..(len - done).min(PAGE as usize)];
                    self.read_imported(from + done as u64, piece)?;
                    self.write_imported(to + done as u64, piece)?;
                }
                Ok(())
            }
            (true, false) => {
                let (region, offset) = self.imports.find(to, len)?;
                region.write(self, offset, from as *const u8, len)
            }
            (false, true) => {
                let (region, offset) = self.imports.find(from, len)?;
                region.read(self, offset, to as *mut u8, len)
            }
            (false, false) => self.copy(to, from, len),
        }
    }

    #[cold]
    pub(super) fn at_imported<T>(
        &self,
        addr: u64,
        len: usize,
        f: impl FnOnce(u64) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let (region, offset) = self.imports.find(addr, len)?;
        region.with_mapped(offset, len, f)
    }
}
