//! Registered memory as the machines see it: addresses, and someone who may touch them.

use thiserror::Error;

/// The memory behind an address is gone: unmapped, or beyond the end of its file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the memory is not mapped")]
pub struct Fault;

/// Copies to and from registered memory.
///
/// The program and the peer may touch the same bytes at the same time, so nobody ever borrows them. Callers
/// have checked key, bounds and rights ([`crate::mr::MrTable`]) and hold the region while they copy.
/// After a [`Fault`] any part of the copy may have been done.
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

    /// Swaps the 8-byte word at `addr`, aligned to 8, for `swap` if it equals `compare`; returns what it held.
    fn compare_swap(&self, addr: u64, compare: u64, swap: u64) -> Result<u64, Fault>;

    /// Writes the 8-byte word at `addr`, aligned to 8, at one go: nobody sees a mixture, and every write before it is seen by
    /// who sees this one.
    fn store(&self, addr: u64, value: u64) -> Result<(), Fault>;

    /// Makes what was written before visible to everybody on this host.
    fn publish(&self) {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// Makes what was written to these bytes survive a loss of power. Only called on regions that were registered for that
    /// ([`Access::FLUSH_PERSISTENT`](crate::mr::Access::FLUSH_PERSISTENT)).
    fn persist(&self, addr: u64, len: u64) -> Result<(), Fault>;

    /// Adds to the 8-byte word at `addr`, aligned to 8, wrapping; returns what it held.
    fn fetch_add(&self, addr: u64, add: u64) -> Result<u64, Fault>;
}
