//! Registered memory as the machines see it: addresses, and an owner that may touch them.

use thiserror::Error;

/// The memory behind an address is gone: unmapped, or beyond the end of its file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the memory is not mapped")]
pub struct Fault;

/// Copies to and from registered memory.
///
/// The program and the peer may touch the same bytes at the same time, so the bytes are never borrowed. Callers have
/// checked key, bounds and rights ([`crate::mr::MrTable`]) and hold the region while they copy. After a [`Fault`] any
/// part of the copy may have been done.
pub trait Memory {
    /// Copies `dst.len()` bytes from `addr`.
    fn read(&self, addr: u64, dst: &mut [u8]) -> Result<(), Fault>;

    /// Copies `src` to `addr`.
    fn write(&self, addr: u64, src: &[u8]) -> Result<(), Fault>;

    /// Copies `len` bytes from one address to another; the two ranges do not overlap. The bytes are copied as they are
    /// at that moment, even if another thread is writing them.
    fn copy(&self, to: u64, from: u64, len: usize) -> Result<(), Fault> {
        let mut buffer = [0; 256];
        let mut done = 0;
        while done < len {
            let here = &mut buffer[..(len - done).min(256)];
            self.read(from.wrapping_add(done as u64), here)?;
            self.write(to.wrapping_add(done as u64), here)?;
            done += here.len();
        }
        Ok(())
    }

    /// Swaps the 8-byte word at `addr`, aligned to 8, for `swap` if it equals `compare`. Returns its value before.
    fn compare_swap(&self, addr: u64, compare: u64, swap: u64) -> Result<u64, Fault>;

    /// Writes the 8-byte word at `addr`, aligned to 8, as a whole: a reader never sees a mixture. A reader that sees
    /// this write sees every write before it.
    fn store(&self, addr: u64, value: u64) -> Result<(), Fault>;

    /// Whether part of these bytes is mapped without the permission to be read, or to be written if the access `writes`. Asked
    /// after a [`Fault`].
    fn is_protected(&self, addr: u64, len: u64, writes: bool) -> bool {
        let _ = (addr, len, writes);
        false
    }

    /// Makes earlier writes visible to all processes of this host.
    fn publish(&self) {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// Makes earlier writes to these bytes survive a loss of power. Only called on regions that were registered for
    /// that ([`Access::FLUSH_PERSISTENT`](crate::mr::Access::FLUSH_PERSISTENT)).
    fn persist(&self, addr: u64, len: u64) -> Result<(), Fault>;

    /// Adds to the 8-byte word at `addr`, aligned to 8, wrapping. Returns its value before.
    fn fetch_add(&self, addr: u64, add: u64) -> Result<u64, Fault>;
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Memory from address 0 on.
    pub(crate) struct Bytes(pub(crate) RefCell<Vec<u8>>);

    impl Bytes {
        /// So many bytes, each as its address modulo 251.
        pub(crate) fn counted(len: usize) -> Self {
            Self(RefCell::new((0..len).map(|at| (at % 251) as u8).collect()))
        }

        fn update(&self, addr: u64, new: impl FnOnce(u64) -> u64) -> Result<u64, Fault> {
            let mut word = [0; 8];
            self.read(addr, &mut word)?;
            let old = u64::from_ne_bytes(word);
            self.write(addr, &new(old).to_ne_bytes())?;
            Ok(old)
        }

        /// The bytes at an address.
        pub(crate) fn at(&self, addr: usize, len: usize) -> Vec<u8> {
            self.0.borrow()[addr..addr + len].to_vec()
        }
    }

    impl Memory for Bytes {
        fn read(&self, addr: u64, dst: &mut [u8]) -> Result<(), Fault> {
            let at = addr as usize;
            dst.copy_from_slice(self.0.borrow().get(at..at + dst.len()).ok_or(Fault)?);
            Ok(())
        }

        fn write(&self, addr: u64, src: &[u8]) -> Result<(), Fault> {
            let at = addr as usize;
            self.0.borrow_mut().get_mut(at..at + src.len()).ok_or(Fault)?.copy_from_slice(src);
            Ok(())
        }

        fn compare_swap(&self, addr: u64, compare: u64, swap: u64) -> Result<u64, Fault> {
            self.update(addr, |old| if old == compare { swap } else { old })
        }

        fn store(&self, addr: u64, value: u64) -> Result<(), Fault> {
            self.update(addr, |_| value).map(drop)
        }

        fn persist(&self, _: u64, _: u64) -> Result<(), Fault> {
            Err(Fault)
        }

        fn fetch_add(&self, addr: u64, add: u64) -> Result<u64, Fault> {
            self.update(addr, |old| old.wrapping_add(add))
        }
    }

    #[test]
    fn a_copy_has_all_bytes_and_no_more() {
        for len in [0, 1, 255, 256, 257, 511, 512, 700] {
            let memory = Bytes::counted(3000);
            memory.copy(2000, 10, len).unwrap();
            let before = Bytes::counted(3000);
            assert_eq!(memory.at(2000, len), before.at(10, len), "{len}");
            assert_eq!(memory.at(0, 2000), before.at(0, 2000), "{len}");
            assert_eq!(memory.at(2000 + len, 1000 - len), before.at(2000 + len, 1000 - len));
        }
    }

    #[test]
    fn a_copy_ends_where_memory_does() {
        let memory = Bytes::counted(1000);
        assert_eq!(memory.copy(0, 900, 101), Err(Fault));
        assert_eq!(memory.copy(900, 0, 101), Err(Fault));
        assert_eq!(memory.copy(900, 0, 100), Ok(()));
    }
}
