//! Memory regions: keys, and the check of every access (IBA 10.6).
//!
//! Readers take no lock. A slot's one state word holds a valid bit and the number of accesses in progress: an access
//! adds itself, then looks at the bit; deregistration clears the bit, then waits for the number to fall to
//! zero. The other fields change only while the bit is clear and the number is zero, so whoever counted
//! itself in and saw the bit may read them.

use std::hint;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use bitflags::bitflags;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

bitflags! {
    /// `enum ibv_access_flags`.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct Access: u32 {
        /// The local device may write.
        const LOCAL_WRITE = 1;
        /// Peers may WRITE.
        const REMOTE_WRITE = 2;
        /// Peers may READ.
        const REMOTE_READ = 4;
        /// Peers may do atomics.
        const REMOTE_ATOMIC = 8;
        /// Memory windows may be bound to it.
        const MW_BIND = 16;
        /// Remote addresses count from 0.
        const ZERO_BASED = 32;
        /// On-demand paging.
        const ON_DEMAND = 64;
        /// Made of huge pages.
        const HUGETLB = 128;
        /// Peers may FLUSH to global visibility.
        const FLUSH_GLOBAL = 256;
        /// Peers may FLUSH to persistence.
        const FLUSH_PERSISTENT = 512;
        /// A hint: order among accesses may be relaxed.
        const RELAXED_ORDERING = 1 << 20;
        /// No flag of the verbs: a peer may invalidate the rkey (SEND with invalidate).
        const INVALIDATABLE = 1 << 30;
    }
}

/// A memory region as registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    /// Number of its protection domain.
    pub pd: u32,
    /// Rights.
    pub access: Access,
    /// The address by which work requests and peers name its first byte.
    pub iova: u64,
    /// Bytes.
    pub len: u64,
    /// Where it lies in this process.
    pub addr: u64,
}

/// The two keys of a region; never equal, so that a program which swaps them is found out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Keys {
    /// For our own scatter/gather elements.
    pub lkey: u32,
    /// For the peers.
    pub rkey: u32,
}

/// Why an access was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyError {
    /// No such key.
    Key,
    /// Of another protection domain.
    Pd,
    /// Not within the region.
    Range,
    /// The region does not grant it.
    Access,
}

const VALID: u64 = 1 << 63;
/// A key is index and tag: the low bits are random, anew at each registration.
const TAG_BITS: u32 = 14;
const TAG_MASK: u32 = (1 << TAG_BITS) - 1;
const CHUNK: usize = 1024;
/// How many regions keys can tell apart.
pub const MAX_REGIONS: usize = 1 << (32 - TAG_BITS);

/// Which of the regions a key names: less than [`MAX_REGIONS`].
#[must_use]
pub fn index(key: u32) -> usize {
    (key >> TAG_BITS) as usize
}

#[derive(Default)]
struct Slot {
    state: AtomicU64,
    lkey: AtomicU32,
    rkey: AtomicU32,
    pd: AtomicU32,
    access: AtomicU32,
    iova: AtomicU64,
    len: AtomicU64,
    addr: AtomicU64,
}

/// The device's memory keys.
pub struct MrTable {
    chunks: Box<[OnceLock<Box<[Slot]>>]>,
    free: Mutex<Free>,
}

struct Free {
    rng: SmallRng,
    /// Indices given back, oldest first, so that a dead key stays dead for long.
    returned: std::collections::VecDeque<u32>,
    /// Indices never used begin here.
    fresh: u32,
    capacity: u32,
}

impl MrTable {
    /// A table for `capacity` regions (at most 2^18); tags come from `seed`.
    #[must_use]
    pub fn new(capacity: u32, seed: u64) -> Self {
        let capacity = (capacity as usize).min(MAX_REGIONS - 1);
        Self {
            chunks: (0..=capacity / CHUNK).map(|_| OnceLock::new()).collect(),
            free: Mutex::new(Free {
                rng: SmallRng::seed_from_u64(seed),
                returned: std::collections::VecDeque::new(),
                fresh: 1, // key 0 never names a region
                capacity: capacity as u32,
            }),
        }
    }

    /// Enters a region; `None` when the table is full.
    pub fn register(&self, region: Region) -> Option<Keys> {
        let mut free = self.free();
        let index = if free.fresh <= free.capacity {
            free.fresh += 1;
            free.fresh - 1
        } else {
            free.returned.pop_front()?
        };
        let tag = free.rng.random::<u32>() & TAG_MASK;
        let other = tag ^ free.rng.random_range(1..=TAG_MASK);
        drop(free);
        let keys = Keys { lkey: index << TAG_BITS | tag, rkey: index << TAG_BITS | other };
        let slot = &self.chunks[index as usize / CHUNK]
            .get_or_init(|| (0..CHUNK).map(|_| Slot::default()).collect())[index as usize % CHUNK];
        // The slot is ours: its index was on no list, its bit is clear and nobody reads its fields.
        slot.lkey.store(keys.lkey, Ordering::Relaxed);
        slot.rkey.store(keys.rkey, Ordering::Relaxed);
        slot.store(region);
        slot.state.fetch_or(VALID, Ordering::Release);
        Some(keys)
    }

    /// Removes a region and waits until no access to it is in progress. False if the key names none.
    pub fn deregister(&self, lkey: u32) -> bool {
        let Some(slot) = self.retire(lkey) else { return false };
        slot.lkey.store(0, Ordering::Relaxed);
        slot.rkey.store(0, Ordering::Relaxed);
        self.free().returned.push_back(lkey >> TAG_BITS);
        true
    }

    /// Changes a region in place, keys kept; no access sees a mixture. False if the key names none.
    pub fn replace(&self, lkey: u32, region: Region) -> bool {
        let Some(slot) = self.retire(lkey) else { return false };
        slot.store(region);
        slot.state.fetch_or(VALID, Ordering::Release);
        true
    }

    /// A peer or the program invalidates an rkey (IBA 9.4.1.1.3, 10.6.5): remote accesses end here, the local key stays.
    ///
    /// # Errors
    /// No such key, another protection domain, or a key that cannot be invalidated.
    pub fn invalidate(&self, rkey: u32, pd: u32) -> Result<(), KeyError> {
        let held = self.slot(rkey).and_then(Slot::hold).ok_or(KeyError::Key)?;
        let slot = held.0;
        if slot.pd.load(Ordering::Relaxed) != pd {
            return Err(KeyError::Pd);
        }
        let access = Access::from_bits_retain(slot.access.load(Ordering::Relaxed));
        if !access.contains(Access::INVALIDATABLE) {
            return Err(KeyError::Access);
        }
        // Only one of several invalidations finds the key.
        slot.rkey
            .compare_exchange(rkey, 0, Ordering::Relaxed, Ordering::Relaxed)
            .map(|_| ())
            .map_err(|_| KeyError::Key)
    }

    /// Clears the valid bit of the region and waits for the accesses in progress.
    fn retire(&self, lkey: u32) -> Option<&Slot> {
        let slot = self.slot(lkey)?;
        {
            let _writers = self.free();
            let held = slot.hold()?;
            if held.0.lkey.load(Ordering::Relaxed) != lkey {
                return None;
            }
            slot.state.fetch_and(!VALID, Ordering::AcqRel);
        }
        let mut spins = 0u32;
        while slot.state.load(Ordering::Acquire) & !VALID != 0 {
            spins += 1;
            if spins.is_multiple_of(64) { std::thread::yield_now() } else { hint::spin_loop() }
        }
        Some(slot)
    }

    /// Finds the memory behind a local scatter/gather element: `len` bytes at `va`.
    pub fn local(
        &self,
        lkey: u32,
        pd: u32,
        va: u64,
        len: u64,
        need: Access,
    ) -> Result<Hold<'_>, KeyError> {
        self.find(lkey, |s| s.lkey.load(Ordering::Relaxed), pd, va, len, need)
    }

    /// Finds the memory that a peer names: `len` bytes at `va`.
    pub fn remote(
        &self,
        rkey: u32,
        pd: u32,
        va: u64,
        len: u64,
        need: Access,
    ) -> Result<Hold<'_>, KeyError> {
        self.find(rkey, |s| s.rkey.load(Ordering::Relaxed), pd, va, len, need)
    }

    #[inline]
    fn find(
        &self,
        key: u32,
        key_of: impl Fn(&Slot) -> u32,
        pd: u32,
        va: u64,
        len: u64,
        need: Access,
    ) -> Result<Hold<'_>, KeyError> {
        let held = self.slot(key).and_then(Slot::hold).ok_or(KeyError::Key)?;
        let slot = held.0;
        if key_of(slot) != key {
            return Err(KeyError::Key);
        }
        if slot.pd.load(Ordering::Relaxed) != pd {
            return Err(KeyError::Pd);
        }
        if !Access::from_bits_retain(slot.access.load(Ordering::Relaxed)).contains(need) {
            return Err(KeyError::Access);
        }
        let offset = va.checked_sub(slot.iova.load(Ordering::Relaxed)).ok_or(KeyError::Range)?;
        let end = offset.checked_add(len).ok_or(KeyError::Range)?;
        if end > slot.len.load(Ordering::Relaxed) {
            return Err(KeyError::Range);
        }
        let addr = slot.addr.load(Ordering::Relaxed).wrapping_add(offset);
        Ok(Hold { addr, _held: held })
    }

    fn slot(&self, key: u32) -> Option<&Slot> {
        let index = index(key);
        Some(&self.chunks.get(index / CHUNK)?.get()?[index % CHUNK])
    }

    fn free(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for MrTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MrTable").finish_non_exhaustive()
    }
}

impl Slot {
    fn hold(&self) -> Option<Held<'_>> {
        let before = self.state.fetch_add(1, Ordering::Acquire);
        let held = Held(self);
        (before & VALID != 0).then_some(held)
    }

    fn store(&self, region: Region) {
        self.pd.store(region.pd, Ordering::Relaxed);
        self.access.store(region.access.bits(), Ordering::Relaxed);
        self.iova.store(region.iova, Ordering::Relaxed);
        self.len.store(region.len, Ordering::Relaxed);
        self.addr.store(region.addr, Ordering::Relaxed);
    }
}

struct Held<'a>(&'a Slot);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_sub(1, Ordering::Release);
    }
}

/// An access in progress: the region cannot be deregistered while this lives.
pub struct Hold<'a> {
    addr: u64,
    _held: Held<'a>,
}

impl Hold<'_> {
    /// Where the bytes lie in this process.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.addr
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGION: Region = Region {
        pd: 7,
        access: Access::LOCAL_WRITE.union(Access::REMOTE_READ),
        iova: 0x1000,
        len: 0x100,
        addr: 0xabc0_0000,
    };

    #[test]
    fn checks_key_pd_range_and_access() {
        let table = MrTable::new(10, 1);
        let keys = table.register(REGION).unwrap();
        assert_ne!(keys.lkey, keys.rkey);
        let need = Access::LOCAL_WRITE;
        let at = |va, len| table.local(keys.lkey, 7, va, len, need).map(|h| h.addr());
        assert_eq!(at(0x1000, 0x100), Ok(0xabc0_0000));
        assert_eq!(at(0x10ff, 1), Ok(0xabc0_00ff));
        assert_eq!(at(0x1100, 0), Ok(0xabc0_0100));
        assert_eq!(at(0x10ff, 2), Err(KeyError::Range));
        assert_eq!(at(0xfff, 1), Err(KeyError::Range));
        assert_eq!(at(u64::MAX, u64::MAX), Err(KeyError::Range));
        let err = |r: Result<Hold<'_>, KeyError>| r.map(|h| h.addr()).unwrap_err();
        assert_eq!(err(table.local(keys.rkey, 7, 0x1000, 1, need)), KeyError::Key);
        assert_eq!(err(table.local(keys.lkey, 8, 0x1000, 1, need)), KeyError::Pd);
        assert_eq!(
            err(table.remote(keys.rkey, 7, 0x1000, 1, Access::REMOTE_WRITE)),
            KeyError::Access
        );
        assert_eq!(err(table.local(0, 7, 0, 0, Access::empty())), KeyError::Key);
        assert_eq!(err(table.local(u32::MAX, 7, 0, 0, Access::empty())), KeyError::Key);
    }

    #[test]
    fn bounds_hold_at_the_end_of_the_address_space() {
        let table = MrTable::new(10, 1);
        let whole = Region { iova: 0, addr: 0, len: u64::MAX, ..REGION };
        let keys = table.register(whole).unwrap();
        let at = |va, len| table.local(keys.lkey, 7, va, len, Access::empty()).map(|h| h.addr());
        assert_eq!(at(u64::MAX - 1, 1), Ok(u64::MAX - 1));
        assert_eq!(at(u64::MAX, 1), Err(KeyError::Range));
    }

    #[test]
    fn a_dead_key_stays_dead_and_the_table_fills_up() {
        let table = MrTable::new(3, 1);
        let keys: Vec<_> = (0..3).map(|_| table.register(REGION).unwrap()).collect();
        assert!(table.register(REGION).is_none());
        assert!(table.deregister(keys[1].lkey));
        assert!(!table.deregister(keys[1].lkey));
        assert!(table.local(keys[1].lkey, 7, 0x1000, 1, Access::empty()).is_err());
        let again = table.register(REGION).unwrap();
        assert_ne!(again, keys[1]);
        assert!(!table.deregister(again.rkey));
    }

    #[test]
    fn deregistration_waits_for_the_access_in_progress() {
        let table = MrTable::new(3, 1);
        let keys = table.register(REGION).unwrap();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|s| {
            let hold = table.local(keys.lkey, 7, 0x1000, 1, Access::empty()).ok();
            assert!(hold.is_some());
            s.spawn(|| {
                assert!(table.deregister(keys.lkey));
                done.store(true, Ordering::SeqCst);
            });
            while table.local(keys.lkey, 7, 0x1000, 1, Access::empty()).is_ok() {
                std::thread::yield_now();
            }
            assert!(!done.load(Ordering::SeqCst));
            drop(hold);
        });
        assert!(done.load(Ordering::SeqCst));
    }
}
