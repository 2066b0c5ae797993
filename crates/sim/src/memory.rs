//! The memory of a simulated host.

use std::cell::{Cell, RefCell};

use anyverbs_proto::memory::{Fault, Memory};

/// Bytes of a page: the unit of mapping.
pub const PAGE: usize = 4096;

/// Addresses from a base upwards. Allocations start on a page and have an unmapped page behind them, so that an overrun is
/// a [`Fault`] and no luck.
#[derive(Debug)]
pub struct Arena {
    base: u64,
    bytes: RefCell<Vec<u8>>,
    mapped: RefCell<Vec<bool>>,
    faults: Cell<u64>,
    persisted: RefCell<Vec<(u64, u64)>>,
}

impl Arena {
    /// An arena of holes, from `base` (a multiple of [`PAGE`]) on.
    #[must_use]
    pub fn new(base: u64) -> Self {
        Self {
            base,
            bytes: RefCell::default(),
            mapped: RefCell::default(),
            faults: Cell::new(0),
            persisted: RefCell::default(),
        }
    }

    /// Maps `len` new bytes, all zero, and returns their address.
    pub fn alloc(&self, len: usize) -> u64 {
        let mut bytes = self.bytes.borrow_mut();
        let mut mapped = self.mapped.borrow_mut();
        let start = bytes.len();
        let pages = start / PAGE + len.div_ceil(PAGE);
        mapped.resize(pages, true);
        mapped.push(false);
        bytes.resize((pages + 1) * PAGE, 0);
        self.base + start as u64
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

    /// Address and length of each range that was made persistent, in order.
    #[must_use]
    pub fn persisted(&self) -> Vec<(u64, u64)> {
        self.persisted.borrow().clone()
    }

    fn set_mapped(&self, addr: u64, len: usize, to: bool) {
        let start = (addr - self.base) as usize;
        for page in start / PAGE..(start + len).div_ceil(PAGE) {
            self.mapped.borrow_mut()[page] = to;
        }
    }

    /// The place of the bytes in `self.bytes`, if all of them are mapped.
    fn locate(&self, addr: u64, len: usize) -> Result<usize, Fault> {
        let found = (|| {
            let start = usize::try_from(addr.checked_sub(self.base)?).ok()?;
            let end = start.checked_add(len)?;
            let mapped = self.mapped.borrow();
            let pages = mapped.get(start / PAGE..end.div_ceil(PAGE))?;
            pages.iter().all(|mapped| *mapped).then_some(start)
        })();
        found.ok_or_else(|| {
            self.faults.set(self.faults.get() + 1);
            Fault
        })
    }

    fn update(&self, addr: u64, new: impl FnOnce(u64) -> u64) -> Result<u64, Fault> {
        assert_eq!(addr % 8, 0, "an atomic at an address that is not aligned");
        let at = self.locate(addr, 8)?;
        let mut bytes = self.bytes.borrow_mut();
        let word: &mut [u8; 8] =
            (&mut bytes[at..at + 8]).try_into().expect("a slice of 8 bytes is an array of 8");
        let old = u64::from_ne_bytes(*word);
        *word = new(old).to_ne_bytes();
        Ok(old)
    }
}

impl Memory for Arena {
    fn read(&self, addr: u64, dst: &mut [u8]) -> Result<(), Fault> {
        let at = self.locate(addr, dst.len())?;
        dst.copy_from_slice(&self.bytes.borrow()[at..at + dst.len()]);
        Ok(())
    }

    fn write(&self, addr: u64, src: &[u8]) -> Result<(), Fault> {
        let at = self.locate(addr, src.len())?;
        self.bytes.borrow_mut()[at..at + src.len()].copy_from_slice(src);
        Ok(())
    }

    fn compare_swap(&self, addr: u64, compare: u64, swap: u64) -> Result<u64, Fault> {
        self.update(addr, |old| if old == compare { swap } else { old })
    }

    fn store(&self, addr: u64, value: u64) -> Result<(), Fault> {
        self.update(addr, |_| value).map(drop)
    }

    fn persist(&self, addr: u64, len: u64) -> Result<(), Fault> {
        self.locate(addr, len as usize)?;
        self.persisted.borrow_mut().push((addr, len));
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
        let a = arena.alloc(PAGE + 1);
        let b = arena.alloc(8);
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
    fn words_swap_and_add() {
        let arena = Arena::new(0x10000);
        let a = arena.alloc(8);
        assert_eq!(arena.fetch_add(a, 5), Ok(0));
        assert_eq!(arena.compare_swap(a, 4, 9), Ok(5));
        assert_eq!(arena.compare_swap(a, 5, u64::MAX), Ok(5));
        assert_eq!(arena.fetch_add(a, 2), Ok(u64::MAX));
        let mut word = [0; 8];
        arena.read(a, &mut word).unwrap();
        assert_eq!(u64::from_ne_bytes(word), 1);
    }
}
