//! The table of memory keys: regions, windows, and the check of every access (IBA 10.6).
//!
//! Readers take no lock ([`uses`]).
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![forbid(unsafe_code)]

mod diagnosis;
#[doc(hidden)]
pub mod uses;
mod vanishing;
mod window;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use anyverbs_locks::{Mutex, rank};
use bitflags::bitflags;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use thiserror::Error;

use self::diagnosis::Ended;
pub use self::diagnosis::{Finding, Unbinding};
use self::uses::{Use, Uses};
pub use vanishing::Vanishing;
pub use window::{Bind, BindError, WindowType};

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
        const INVALIDATABLE = 1 << 16;
        /// No flag of the verbs: there is no memory; reads give zeros, writes go nowhere.
        const NULL = 1 << 17;
        /// No flag of the verbs: a memory window.
        const WINDOW = 1 << 18;
        /// No flag of the verbs: a memory window of type 2.
        const WINDOW_2 = 1 << 19;
        /// No flag of the verbs: part of it may have vanished ([`Vanishing`]).
        const MAY_VANISH = 1 << 21;
    }
}

impl Access {
    /// The flags that the verbs know.
    pub const VERBS: Self = Self::all()
        .difference(Self::INVALIDATABLE)
        .difference(Self::NULL)
        .difference(Self::WINDOW)
        .difference(Self::WINDOW_2)
        .difference(Self::MAY_VANISH);
}

/// The reason why a region was not taken back or changed. It is as before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum RetireError {
    /// No such key.
    #[error("no such memory region")]
    Key,
    /// Memory windows are bound to it (IBA 10.6.7.1).
    #[error("memory windows are bound to the region")]
    Bound,
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
    /// Its address in this process.
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

/// The reason why an access was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyError {
    /// No such key.
    Key,
    /// The key belongs to another protection domain.
    Pd,
    /// The range is not within the region.
    Range,
    /// The region does not grant it.
    Access,
}

/// A key is index and tag: the low bits are random, anew at each registration.
const TAG_BITS: u32 = 14;
const TAG_MASK: u32 = (1 << TAG_BITS) - 1;
const CHUNK: usize = 1024;
/// Indices that rest before the oldest is used again, while there are new ones. A dead key stays dead for long, and the
/// table of a program that registers and deregisters all the time does not grow.
const RESTING: usize = 4096;
/// The number of regions that keys can tell apart.
pub const MAX_REGIONS: usize = 1 << (32 - TAG_BITS);

/// The index of the region that a key names: less than [`MAX_REGIONS`].
#[must_use]
pub fn index(key: u32) -> usize {
    (key >> TAG_BITS) as usize
}

/// Queue pairs that may keep a region in use ([`LastLocal::find_kept`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keepers {
    /// The one with this number.
    One(u32),
    /// All that there are.
    All,
}

/// The effect of a bound window on the end of its region.
#[derive(Clone, Copy)]
enum Bound {
    Refuses,
    Unbinds,
}

#[derive(Default)]
struct Slot {
    uses: Uses,
    lkey: AtomicU32,
    rkey: AtomicU32,
    pd: AtomicU32,
    access: AtomicU32,
    iova: AtomicU64,
    len: AtomicU64,
    addr: AtomicU64,
    /// Remote accesses to a region whose rkey can be invalidated. They are counted in `uses`, too. Open as long as the
    /// rkey is good.
    peers: Uses,
    /// The queue pair that alone may use this window; 0 for all.
    qpn: AtomicU32,
    /// In a region: the number of windows that are bound to it. In a window: the lkey of the region that it is bound
    /// to, or 0. It changes under the lock of `bindings`.
    bound: AtomicU32,
    /// The queue pair that was the last to keep the region in use.
    keeper: AtomicU32,
}

/// The device's memory keys, of regions and windows.
pub struct MrTable {
    chunks: Box<[OnceLock<Box<[Slot]>>]>,
    free: Mutex<rank::FreeKeys, Free>,
    /// Guards changes of the bindings of windows, and holds the number of windows that are bound to a queue pair. Taken
    /// before `free`.
    bindings: Mutex<rank::KeyBindings, u32>,
    /// For those who ask why a key is none.
    ended: Mutex<rank::EndedKeys, Ended>,
    /// The memory that is gone, where somebody lets it vanish.
    vanishing: OnceLock<&'static dyn Vanishing>,
}

struct Free {
    /// Keys are secrets that keep others out: one key tells nothing about another.
    rng: StdRng,
    /// Indices given back, oldest first.
    returned: std::collections::VecDeque<u32>,
    /// The last index that was new. Key 0 never names a region.
    used: u32,
    capacity: u32,
}

impl MrTable {
    /// A table whose tags follow from `seed`, for simulations.
    #[must_use]
    pub fn new(capacity: u32, seed: u64) -> Self {
        Self::with_rng(capacity, StdRng::seed_from_u64(seed))
    }

    /// A table for `capacity` regions and windows (at most 2^18); tags come from `rng`.
    #[must_use]
    pub fn with_rng(capacity: u32, rng: StdRng) -> Self {
        let capacity = (capacity as usize).min(MAX_REGIONS - 1);
        Self {
            chunks: (0..=capacity / CHUNK).map(|_| OnceLock::new()).collect(),
            free: Mutex::new(Free {
                rng,
                returned: std::collections::VecDeque::new(),
                used: 0,
                capacity: capacity as u32,
            }),
            bindings: Mutex::new(0),
            ended: Mutex::default(),
            vanishing: OnceLock::new(),
        }
    }

    /// Enters a region; `None` when the table is full. A null region ([`Access::NULL`]) has no rkey.
    pub fn register(&self, region: Region) -> Option<Keys> {
        let (mut keys, slot) = self.take_slot()?;
        if region.access.contains(Access::NULL) {
            keys.rkey = 0;
        }
        slot.lkey.store(keys.lkey, Ordering::Relaxed);
        slot.rkey.store(keys.rkey, Ordering::Relaxed);
        slot.store(self.marked(region));
        slot.uses.open();
        Some(keys)
    }

    /// The number of regions, and their bytes. A snapshot, for people: regions may come and go meanwhile. One of the whole address space
    /// has none.
    #[must_use]
    pub fn totals(&self) -> (u32, u64) {
        let all = self.chunks.iter().filter_map(OnceLock::get).flat_map(|chunk| chunk.iter());
        let is_region = |slot: &&Slot| {
            slot.lkey.load(Ordering::Relaxed) != 0 && !slot.access().contains(Access::WINDOW)
        };
        all.filter(is_region).fold((0, 0), |(regions, bytes), slot| {
            let len = slot.len.load(Ordering::Relaxed);
            (regions + 1, bytes.saturating_add(if len >> 48 == 0 { len } else { 0 }))
        })
    }

    /// The slot of an `lkey`, in use.
    #[inline]
    fn hold_local(&self, lkey: u32) -> Option<Held<'_>> {
        let held = self.slot(lkey).and_then(Slot::hold)?;
        (held.slot.lkey.load(Ordering::Relaxed) == lkey).then_some(held)
    }

    /// Takes a free slot, with keys for it. Its index is on no list, its bit is clear and no thread reads its fields.
    fn take_slot(&self) -> Option<(Keys, &Slot)> {
        let mut free = self.free.lock();
        let index = if free.returned.len() < RESTING && free.used < free.capacity {
            free.used += 1;
            free.used
        } else {
            free.returned.pop_front()?
        };
        let tag = free.rng.random::<u32>() & TAG_MASK;
        let other = tag ^ free.rng.random_range(1..=TAG_MASK);
        let keys = Keys { lkey: index << TAG_BITS | tag, rkey: index << TAG_BITS | other };
        drop(free);
        let slot = &self.chunks[index as usize / CHUNK]
            .get_or_init(|| (0..CHUNK).map(|_| Slot::default()).collect())[index as usize % CHUNK];
        Some((keys, slot))
    }

    /// Removes a region and waits until no access to it is in progress. While there are such accesses, `release` is called twice at
    /// most: for the queue pair that was the last to keep the region, and then for all queue pairs.
    ///
    /// # Errors
    /// [`RetireError`].
    pub fn deregister(&self, lkey: u32, release: impl FnMut(Keepers)) -> Result<(), RetireError> {
        let slot = self.retire(lkey, Bound::Refuses, release)?;
        self.give_back(slot, lkey);
        Ok(())
    }

    /// As [`deregister`](Self::deregister), but first takes the windows that are bound to the region off it, whatever
    /// the program does meanwhile.
    ///
    /// # Errors
    /// [`RetireError::Key`].
    pub fn deregister_bound(
        &self,
        lkey: u32,
        release: impl FnMut(Keepers),
    ) -> Result<(), RetireError> {
        let slot = self.retire(lkey, Bound::Unbinds, release)?;
        self.give_back(slot, lkey);
        Ok(())
    }

    /// The slot of a dead key is free again.
    fn give_back(&self, slot: &Slot, key: u32) {
        let rkey = slot.rkey.swap(0, Ordering::Relaxed);
        let lkey = slot.lkey.swap(0, Ordering::Relaxed);
        self.ended.lock().note(lkey, rkey);
        self.free.lock().returned.push_back(key >> TAG_BITS);
    }

    /// Changes a region in place; no access sees a mixture. As after a registration both of its keys are good: a remote key
    /// that was invalidated, too. `release` is as for [`deregister`](Self::deregister).
    ///
    /// # Errors
    /// [`RetireError`].
    pub fn replace(
        &self,
        keys: Keys,
        region: Region,
        release: impl FnMut(Keepers),
    ) -> Result<(), RetireError> {
        let slot = self.retire(keys.lkey, Bound::Refuses, release)?;
        slot.rkey.store(keys.rkey, Ordering::Relaxed);
        slot.store(self.marked(region));
        if let Some(vanishing) = self.vanishing() {
            // Before it is open, or an access would be judged by the pages that it had before.
            vanishing.moved(index(keys.lkey), region.addr);
        }
        slot.uses.open();
        Ok(())
    }

    /// Invalidates an rkey for a peer or the program (IBA 9.4.1.1.3, 10.6.5). A window of type 2 is unbound. A region
    /// keeps its local key, and only remote accesses to it end. `qpn` is the queue pair on which a peer asks: it may
    /// only invalidate windows that are bound to that one. Waits until no access by the key is in progress.
    ///
    /// # Errors
    /// No such key, another protection domain, or a key that cannot be invalidated.
    pub fn invalidate(&self, rkey: u32, pd: u32, qpn: Option<u32>) -> Result<(), KeyError> {
        let mut bindings = self.bindings.lock();
        let held = self.slot(rkey).and_then(Slot::hold).ok_or(KeyError::Key)?;
        let slot = held.slot;
        if rkey == 0 || slot.rkey.load(Ordering::Relaxed) != rkey {
            return Err(KeyError::Key);
        }
        if slot.pd.load(Ordering::Relaxed) != pd {
            return Err(KeyError::Pd);
        }
        let access = slot.access();
        if access.contains(Access::WINDOW) {
            drop(held);
            return self.invalidate_window(slot, qpn, &mut bindings);
        }
        if !access.contains(Access::INVALIDATABLE) || slot.bound.load(Ordering::Relaxed) != 0 {
            return Err(KeyError::Access);
        }
        slot.rkey.store(0, Ordering::Relaxed);
        slot.peers.close();
        slot.peers.drain();
        Ok(())
    }

    /// Takes a region out of use: clears its valid bit and waits for the accesses in progress.
    fn retire(
        &self,
        lkey: u32,
        bound: Bound,
        mut release: impl FnMut(Keepers),
    ) -> Result<&Slot, RetireError> {
        let slot = self.slot(lkey).ok_or(RetireError::Key)?;
        {
            let mut bindings = self.bindings.lock();
            let held = slot.hold().ok_or(RetireError::Key)?;
            if lkey == 0 || held.slot.lkey.load(Ordering::Relaxed) != lkey {
                return Err(RetireError::Key);
            }
            if slot.bound.load(Ordering::Relaxed) != 0 {
                match bound {
                    Bound::Refuses => return Err(RetireError::Bound),
                    // Under the same lock, so that no bind comes between.
                    Bound::Unbinds => self.unbind_all(lkey, &mut bindings),
                }
            }
            slot.uses.close();
        }
        for keepers in [Keepers::One(slot.keeper.load(Ordering::Relaxed)), Keepers::All] {
            if slot.uses.are_any() {
                release(keepers);
            }
        }
        slot.uses.drain();
        Ok(slot)
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

    /// Finds the memory that a peer names to queue pair `qpn`: `len` bytes at `va`.
    pub fn remote(
        &self,
        rkey: u32,
        (pd, qpn): (u32, u32),
        va: u64,
        len: u64,
        need: Access,
    ) -> Result<Hold<'_>, KeyError> {
        let mut hold = self.find(rkey, |s| s.rkey.load(Ordering::Relaxed), pd, va, len, need)?;
        let slot = hold.held.slot;
        if hold.of_window && !slot.admits(qpn) {
            return Err(KeyError::Access);
        }
        if slot.access().contains(Access::INVALIDATABLE) {
            hold.peer = Some(slot.peers.begin().ok_or(KeyError::Key)?);
        }
        Ok(hold)
    }

    /// The length and start of a region or window that a peer names, for callers that deal with all of it.
    pub fn extent(
        &self,
        rkey: u32,
        (pd, qpn): (u32, u32),
        need: Access,
    ) -> Result<(Hold<'_>, u64), KeyError> {
        let range = self.range_of(rkey).ok_or(KeyError::Key)?;
        let hold = self.remote(rkey, (pd, qpn), range.0, range.1, need)?;
        // It may have changed before it was held.
        if self.range_of(rkey) != Some(range) {
            return Err(KeyError::Key);
        }
        Ok((hold, range.1))
    }

    /// The beginning and the length of what has this rkey.
    #[must_use]
    pub fn range_of(&self, rkey: u32) -> Option<(u64, u64)> {
        let held = self.slot(rkey).and_then(Slot::hold).filter(|held| held.is_of(rkey))?;
        let [iova, len] = [&held.slot.iova, &held.slot.len].map(|at| at.load(Ordering::Relaxed));
        Some((iova, len))
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
        if key_of(held.slot) != key {
            return Err(KeyError::Key);
        }
        let (addr, access) = held.slot.place(self, pd, (va, len), need)?;
        let (is_null, of_window) =
            (access.contains(Access::NULL), access.contains(Access::WINDOW_2));
        Ok(Hold { addr, is_null, of_window, peer: None, held })
    }

    fn slot(&self, key: u32) -> Option<&Slot> {
        let index = index(key);
        Some(&self.chunks.get(index / CHUNK)?.get()?[index % CHUNK])
    }
}

impl std::fmt::Debug for MrTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MrTable").finish_non_exhaustive()
    }
}

impl Slot {
    fn hold(&self) -> Option<Held<'_>> {
        let in_use = self.uses.begin()?;
        Some(Held { slot: self, _use: in_use })
    }

    /// The address of `len` bytes at `va`, and the rights there. The slot is held, and the key is its own.
    #[inline]
    fn place(
        &self,
        table: &MrTable,
        pd: u32,
        (va, len): (u64, u64),
        need: Access,
    ) -> Result<(u64, Access), KeyError> {
        if self.pd.load(Ordering::Relaxed) != pd {
            return Err(KeyError::Pd);
        }
        let access = self.access();
        // One test for both: that memory may vanish costs an access nothing where it may not.
        if access & (need | Access::MAY_VANISH) != need {
            return self.place_of_vanishing(table, (va, len), need);
        }
        Ok((self.addr_of(va, len)?, access))
    }

    /// The address of `len` bytes at `va`.
    #[inline]
    fn addr_of(&self, va: u64, len: u64) -> Result<u64, KeyError> {
        let offset = va.checked_sub(self.iova.load(Ordering::Relaxed)).ok_or(KeyError::Range)?;
        let end = offset.checked_add(len).ok_or(KeyError::Range)?;
        if end > self.len.load(Ordering::Relaxed) {
            return Err(KeyError::Range);
        }
        Ok(self.addr.load(Ordering::Relaxed).wrapping_add(offset))
    }

    fn access(&self) -> Access {
        Access::from_bits_retain(self.access.load(Ordering::Relaxed))
    }

    /// Tells whether a window may be used through this queue pair.
    fn admits(&self, qpn: u32) -> bool {
        let bound = self.qpn.load(Ordering::Relaxed);
        bound == 0 || bound == qpn
    }

    fn store(&self, region: Region) {
        self.pd.store(region.pd, Ordering::Relaxed);
        self.access.store(region.access.bits(), Ordering::Relaxed);
        self.iova.store(region.iova, Ordering::Relaxed);
        self.len.store(region.len, Ordering::Relaxed);
        self.addr.store(region.addr, Ordering::Relaxed);
        if region.access.contains(Access::INVALIDATABLE) {
            self.peers.open();
        }
    }
}

/// A slot whose fields cannot change.
struct Held<'a> {
    slot: &'a Slot,
    _use: Use<'a>,
}

impl Held<'_> {
    /// Tells whether peers may use this key for it now.
    #[inline]
    fn is_of(&self, rkey: u32) -> bool {
        self.slot.rkey.load(Ordering::Relaxed) == rkey
    }
}

/// Accesses to local elements, one after the other. The region of the last one stays in use, as if the access were in
/// progress. So the next access to it counts itself neither in nor out, which saves two locked instructions. Deregistration
/// waits for it. So keep it for a batch at most, or as a queue pair does ([`find_kept`](Self::find_kept)).
#[derive(Default)]
pub struct LastLocal<'a>(Option<(u32, Held<'a>)>);

impl<'a> LastLocal<'a> {
    /// The address of an element, `None` if it has no memory ([`Access::NULL`]). It is good until the next call, or the
    /// end of this.
    ///
    /// # Errors
    /// As [`MrTable::local`].
    #[inline]
    pub fn find(
        &mut self,
        mrs: &'a MrTable,
        lkey: u32,
        pd: u32,
        va: u64,
        len: u64,
        need: Access,
    ) -> Result<Option<u64>, KeyError> {
        if !self.is_of(lkey) {
            self.0 = Some((lkey, mrs.hold_local(lkey).ok_or(KeyError::Key)?));
        }
        self.place(mrs, pd, (va, len), need)
    }

    /// As [`find`](Self::find), for a queue pair that keeps the region in use between its calls. Its
    /// [`release`](Self::release) is asked for by [`Keepers`].
    ///
    /// # Errors
    /// As [`MrTable::local`].
    #[inline]
    pub fn find_kept(
        &mut self,
        mrs: &'a MrTable,
        keeper: u32,
        lkey: u32,
        pd: u32,
        (va, len): (u64, u64),
        need: Access,
    ) -> Result<Option<u64>, KeyError> {
        if !self.is_of(lkey) {
            self.keep(mrs, keeper, lkey)?;
        }
        self.place(mrs, pd, (va, len), need)
    }

    #[cold]
    #[inline(never)]
    fn keep(&mut self, mrs: &'a MrTable, keeper: u32, lkey: u32) -> Result<(), KeyError> {
        self.0 = None;
        let held = mrs.hold_local(lkey).ok_or(KeyError::Key)?;
        held.slot.keeper.store(keeper, Ordering::Relaxed);
        self.0 = Some((lkey, held));
        Ok(())
    }

    #[inline]
    fn is_of(&self, lkey: u32) -> bool {
        self.0.as_ref().is_some_and(|(key, _)| *key == lkey)
    }

    #[inline]
    fn place(
        &self,
        mrs: &MrTable,
        pd: u32,
        range: (u64, u64),
        need: Access,
    ) -> Result<Option<u64>, KeyError> {
        let (_, held) = self.0.as_ref().ok_or(KeyError::Key)?;
        let (addr, access) = held.slot.place(mrs, pd, range, need)?;
        Ok((!access.contains(Access::NULL)).then_some(addr))
    }

    /// Releases what is in use.
    #[inline]
    pub fn release(&mut self) {
        self.0 = None;
    }
}

/// As [`LastLocal`], for the accesses of a peer. The thread that keeps it must not take a window or a region out of
/// use: it would wait for itself.
#[derive(Default)]
pub struct LastRemote<'a>(Option<(u32, Held<'a>, Option<Use<'a>>)>);

impl<'a> LastRemote<'a> {
    /// The address of `len` bytes at `va`. It is good until the next call, or the end of this.
    ///
    /// # Errors
    /// As [`MrTable::remote`].
    #[inline]
    pub fn find(
        &mut self,
        mrs: &'a MrTable,
        rkey: u32,
        (pd, qpn): (u32, u32),
        va: u64,
        len: u64,
        need: Access,
    ) -> Result<u64, KeyError> {
        // A key may be invalidated while its region is in use.
        let held = match &self.0 {
            Some((key, held, _)) if *key == rkey && held.is_of(rkey) => held,
            _ => {
                self.release();
                let hold = mrs.remote(rkey, (pd, qpn), va, len, need)?;
                &self.0.insert((rkey, hold.held, hold.peer)).1
            }
        };
        let (addr, access) = held.slot.place(mrs, pd, (va, len), need)?;
        if access.contains(Access::WINDOW_2) && !held.slot.admits(qpn) {
            return Err(KeyError::Access);
        }
        Ok(addr)
    }

    /// Releases what is in use.
    #[inline]
    pub fn release(&mut self) {
        self.0 = None;
    }
}

impl std::fmt::Debug for LastRemote<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("LastRemote").field(&self.0.as_ref().map(|(rkey, ..)| rkey)).finish()
    }
}

impl std::fmt::Debug for LastLocal<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("LastLocal").field(&self.0.as_ref().map(|(lkey, _)| lkey)).finish()
    }
}

/// An access in progress: the region cannot be deregistered while this lives.
pub struct Hold<'a> {
    addr: u64,
    is_null: bool,
    of_window: bool,
    /// Counted among the peers' accesses, where the key can be invalidated.
    peer: Option<Use<'a>>,
    held: Held<'a>,
}

impl Hold<'_> {
    /// The address of the bytes in this process.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Tells whether no memory lies there: reads give zeros, and writes are lost ([`Access::NULL`]).
    #[must_use]
    pub fn is_null(&self) -> bool {
        self.is_null
    }
}

#[cfg(test)]
mod tests;
