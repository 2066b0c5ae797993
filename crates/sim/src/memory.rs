//! The memory of a simulated host.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};

use anyverbs_proto::memory::{Fault, Memory};

/// Bytes of a page: the unit of mapping.
pub const PAGE: usize = 4096;

/// Addresses from a base upwards. Allocations start on a page and have an unmapped page behind them, so that an overrun is
/// a [`Fault`] and no luck. An address that was freed is never used again.
#[derive(Debug)]
pub struct Arena {
    /// The address of the next allocation.
    next: Cell<u64>,
    /// By the address of the first byte.
    blocks: RefCell<BTreeMap<u64, Block>>,
    faults: Cell<u64>,
    persisted: RefCell<VecDeque<(u64, u64)>>,
}

/// An allocation: whole pages.
#[derive(Debug)]
struct Block {
    bytes: Vec<u8>,
    /// For each page, whether it is mapped.
    mapped: Vec<bool>,
}

impl Block {
    /// These bytes, if all of them are mapped.
    fn mapped(&mut self, start: u64, len: usize) -> Option<&mut [u8]> {
        let start = usize::try_from(start).ok()?;
        let end = start.checked_add(len)?;
        let pages = self.mapped.get(start / PAGE..end.div_ceil(PAGE))?;
        pages.iter().all(|mapped| *mapped).then_some(())?;
        self.bytes.get_mut(start..end)
    }
}

impl Arena {
    const PERSISTED: usize = 100;

    /// An arena of holes, from `base` (a multiple of [`PAGE`]) on.
    #[must_use]
    pub fn new(base: u64) -> Self {
        Self {
            next: Cell::new(base),
            blocks: RefCell::default(),
            faults: Cell::new(0),
            persisted: RefCell::default(),
        }
    }

    /// Maps `len` new bytes, all zero, and returns their address. None if the process has no such memory.
    pub fn alloc(&self, len: usize) -> Option<u64> {
        let len = len.checked_next_multiple_of(PAGE)?;
        let start = self.next.get();
        self.next.set(start.checked_add(len as u64)?.checked_add(PAGE as u64)?);
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).ok()?;
        bytes.resize(len, 0);
        let block = Block { bytes, mapped: vec![true; len / PAGE] };
        self.blocks.borrow_mut().insert(start, block);
        Some(start)
    }

    /// Gives back what was allocated at this address.
    pub fn free(&self, addr: u64) {
        self.blocks.borrow_mut().remove(&addr);
    }

    /// Takes the pages away that hold any of these bytes.
    pub fn unmap(&self, addr: u64, len: usize) {
        self.set_mapped(addr, len, false);
    }

    /// Gives the pages back, with their old contents.
    pub fn map(&self, addr: u64, len: usize) {
        self.set_mapped(addr, len, true);
    }

    /// The number of refused accesses.
    #[must_use]
    pub fn faults(&self) -> u64 {
        self.faults.get()
    }

    /// Address and length of the ranges that were made persistent, in order: the last 100 of them.
    #[must_use]
    pub fn persisted(&self) -> Vec<(u64, u64)> {
        self.persisted.borrow().iter().copied().collect()
    }

    fn set_mapped(&self, addr: u64, len: usize, to: bool) {
        let mut blocks = self.blocks.borrow_mut();
        let (first, block) = blocks.range_mut(..=addr).next_back().expect("it was allocated");
        let start = (addr - first) as usize;
        block.mapped[start / PAGE..(start + len).div_ceil(PAGE)].fill(to);
    }

    /// Does something to these bytes, if all of them are mapped.
    fn with<R>(
        &self,
        addr: u64,
        len: usize,
        access: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, Fault> {
        let mut blocks = self.blocks.borrow_mut();
        let block = blocks.range_mut(..=addr).next_back();
        let bytes = block.and_then(|(first, block)| block.mapped(addr - first, len));
        bytes.map(access).ok_or_else(|| {
            self.faults.set(self.faults.get() + 1);
            Fault
        })
    }

    fn update(&self, addr: u64, new: impl FnOnce(u64) -> u64) -> Result<u64, Fault> {
        assert_eq!(addr % 8, 0, "an atomic at an address that is not aligned");
        self.with(addr, 8, |bytes| {
            let word: &mut [u8; 8] = bytes.try_into().expect("a slice of 8 bytes is an array of 8");
            let old = u64::from_ne_bytes(*word);
            *word = new(old).to_ne_bytes();
            old
        })
    }
}

impl Memory for Arena {
    fn read(&self, addr: u64, dst: &mut [u8]) -> Result<(), Fault> {
        self.with(addr, dst.len(), |bytes| dst.copy_from_slice(bytes))
    }

    fn write(&self, addr: u64, src: &[u8]) -> Result<(), Fault> {
        self.with(addr, src.len(), |bytes| bytes.copy_from_slice(src))
    }

    fn compare_swap(&self, addr: u64, compare: u64, swap: u64) -> Result<u64, Fault> {
        self.update(addr, |old| if old == compare { swap } else { old })
    }

    fn store(&self, addr: u64, value: u64) -> Result<(), Fault> {
        self.update(addr, |_| value).map(drop)
    }

    fn persist(&self, addr: u64, len: u64) -> Result<(), Fault> {
        self.with(addr, len as usize, |_| ())?;
        let mut persisted = self.persisted.borrow_mut();
        if persisted.len() >= Self::PERSISTED {
            persisted.pop_front();
        }
        persisted.push_back((addr, len));
        Ok(())
    }

    fn fetch_add(&self, addr: u64, add: u64) -> Result<u64, Fault> {
        self.update(addr, |old| old.wrapping_add(add))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_fault() {
        let arena = Arena::new(0x10000);
        let a = arena.alloc(PAGE + 1).unwrap();
        let b = arena.alloc(8).unwrap();
        assert_eq!(arena.write(a, &[7; 2 * PAGE]), Ok(()));
        assert_eq!(arena.write(a + 1, &[7; 2 * PAGE]), Err(Fault));
        assert_eq!(arena.write(b - 1, &[7; 2]), Err(Fault));
        assert_eq!(arena.read(0, &mut [0]), Err(Fault));
        assert_eq!(arena.read(u64::MAX, &mut [0; 2]), Err(Fault));
        arena.unmap(a + PAGE as u64, 1);
        assert_eq!(arena.read(a + PAGE as u64 - 1, &mut [0; 2]), Err(Fault));
        assert_eq!(arena.read(a + PAGE as u64 - 1, &mut [0; 1]), Ok(()));
        assert_eq!(arena.faults(), 5);
    }

    #[test]
    fn freed_memory_is_a_hole_for_good() {
        let arena = Arena::new(0x10000);
        let a = arena.alloc(8).unwrap();
        arena.free(a);
        assert_eq!(arena.read(a, &mut [0]), Err(Fault));
        assert_ne!(arena.alloc(8).unwrap(), a);
        assert_eq!(arena.read(a, &mut [0]), Err(Fault));
    }

    #[test]
    fn more_than_there_is_is_refused() {
        let arena = Arena::new(0x10000);
        for len in [1 << 60, usize::MAX] {
            assert_eq!(arena.alloc(len), None);
        }
    }

    #[test]
    fn words_swap_and_add() {
        let arena = Arena::new(0x10000);
        let a = arena.alloc(8).unwrap();
        assert_eq!(arena.fetch_add(a, 5), Ok(0));
        assert_eq!(arena.compare_swap(a, 4, 9), Ok(5));
        assert_eq!(arena.compare_swap(a, 5, u64::MAX), Ok(5));
        assert_eq!(arena.fetch_add(a, 2), Ok(u64::MAX));
        let mut word = [0; 8];
        arena.read(a, &mut word).unwrap();
        assert_eq!(u64::from_ne_bytes(word), 1);
    }
}
