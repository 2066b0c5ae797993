//! Regions of other processes that were imported (`ibv_import_mr`): their bytes are reached as one-sided operations reach a
//! peer's, under the mark of a copy and while the owner's board has the very same entry ([`super::direct`]). Memory that is
//! shared already is mapped; the rest is copied by the kernel, which knows no atomics: those need a mapping.
//!
//! The owner waits for copies when it deregisters, as for any. From then on, and when it has ended, every access is a fault.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyverbs_net::shm::{Copying, Local};
use anyverbs_proto::memory::{Fault, Memory};
use anyverbs_proto::mr::{Access, Keys, Region};

use super::direct;
use super::mapped::{Mapped, Target};
use super::shm::{Peer, Shm};
use crate::memory::ProcessMemory;

/// How long the owner is waited for: its worker has to be scheduled.
const PATIENCE: Duration = Duration::from_secs(2);

/// Rights that an import keeps; windows, advice and hints about pages are the owner's.
const ACCESS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::ZERO_BASED)
    .union(Access::FLUSH_GLOBAL)
    .union(Access::RELAXED_ORDERING);
/// And those where it is mapped.
const MAPPED_ACCESS: Access = Access::REMOTE_ATOMIC.union(Access::FLUSH_PERSISTENT);

/// A region of another process.
#[derive(Debug)]
pub(crate) struct ImportedRegion {
    peer: Arc<Peer>,
    target: Target,
    mapped: Option<Mapped>,
    /// Its keys in its own process.
    pub(crate) keys: Keys,
    iova: u64,
}

impl ImportedRegion {
    /// The region of protection domain `pd` that the process `pid` with this slot has under this lkey. `Ok(None)`: there is
    /// none. `Err`: its memory cannot be reached from here.
    pub(crate) fn find(
        shm: &Shm,
        memory: &ProcessMemory,
        (slot, pid): (u8, i32),
        pd: u32,
        lkey: u32,
    ) -> Result<Option<Self>, Unreachable> {
        let peer = reach(shm, slot, pid)?;
        let copying = begin(&peer).map_err(|Fault| Unreachable)?;
        let Some((target, entry)) = direct::region(&copying, lkey) else { return Ok(None) };
        if entry.lkey != lkey || entry.pd != pd {
            return Ok(None);
        }
        let writable = target.access.contains(Access::LOCAL_WRITE);
        let mapped = Mapped::new(&copying, &target, writable);
        drop(copying);
        let keys = Keys { lkey, rkey: target.rkey };
        let region = Self { peer, target, mapped, keys, iova: entry.iova };
        // Somebody may forbid it.
        let mut byte = [0];
        let probe = region.target.len.min(1) as usize;
        region.read(memory, 0, byte.as_mut_ptr(), probe).map_err(|Fault| Unreachable)?;
        Ok(Some(region))
    }

    /// As what it is entered here, at an address where it is found again.
    pub(crate) fn region(&self, pd: u32, addr: u64) -> Region {
        let kept = if self.mapped.is_some() { ACCESS | MAPPED_ACCESS } else { ACCESS };
        let access = self.target.access & kept;
        Region { pd, access, iova: self.iova, len: self.target.len, addr }
    }

    pub(crate) fn len(&self) -> u64 {
        self.target.len
    }

    /// Where it begins within a page, as in its own process.
    pub(crate) fn page_offset(&self) -> u64 {
        self.target.addr % 4096
    }

    /// Whether its process still has it.
    pub(crate) fn is_current(&self) -> bool {
        self.begin().is_ok()
    }

    /// Begins an access.
    fn begin(&self) -> Result<Copying<'_>, Fault> {
        let copying = begin(&self.peer)?;
        let same = direct::region(&copying, self.keys.lkey).is_some_and(|(t, _)| t == self.target);
        // A mapping outlives the process.
        if same && copying.is_current() { Ok(copying) } else { Err(Fault) }
    }

    /// Copies bytes from it.
    pub(crate) fn read(
        &self,
        memory: &ProcessMemory,
        offset: u64,
        to: *mut u8,
        len: usize,
    ) -> Result<(), Fault> {
        let copying = self.begin()?;
        if let Some(from) = self.mapped_at(offset, len) {
            return memory.copy(to as u64, from, len);
        }
        let local = [Local { iov_base: to.cast(), iov_len: len }];
        let from = self.target.addr.wrapping_add(offset);
        if memory.read_remote(&copying, &local, from, len) { Ok(()) } else { Err(Fault) }
    }

    /// Copies bytes to it.
    pub(crate) fn write(
        &self,
        memory: &ProcessMemory,
        offset: u64,
        from: *const u8,
        len: usize,
    ) -> Result<(), Fault> {
        let copying = self.begin()?;
        if let Some(to) = self.mapped_at(offset, len) {
            return memory.copy(to, from as u64, len);
        }
        let local = [Local { iov_base: from.cast_mut().cast(), iov_len: len }];
        let to = self.target.addr.wrapping_add(offset);
        if memory.write_remote(&copying, &local, to, len) { Ok(()) } else { Err(Fault) }
    }

    /// Does something with `len` bytes where they are mapped; a fault where they are not.
    pub(crate) fn with_mapped<T>(
        &self,
        offset: u64,
        len: usize,
        f: impl FnOnce(u64) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let _copying = self.begin()?;
        f(self.mapped_at(offset, len).ok_or(Fault)?)
    }

    fn mapped_at(&self, offset: u64, len: usize) -> Option<u64> {
        self.mapped.as_ref()?.addr(offset, len)
    }
}

/// Whether that process has the slot, and its memory can be reached.
pub(crate) fn is_reachable(shm: &Shm, (slot, pid): (u8, i32)) -> bool {
    reach(shm, slot, pid).is_ok()
}

/// The memory of that process cannot be reached from here.
#[derive(Debug)]
pub(crate) struct Unreachable;

/// The channel to a process, which answers.
fn reach(shm: &Shm, slot: u8, pid: i32) -> Result<Arc<Peer>, Unreachable> {
    let peer = shm.peer_of(slot).filter(|peer| peer.channel().pid() == pid).ok_or(Unreachable)?;
    let deadline = Instant::now() + PATIENCE;
    while !peer.channel().is_established() {
        if peer.channel().closed().is_some() || Instant::now() > deadline {
            return Err(Unreachable);
        }
        shm.control();
        std::thread::sleep(Duration::from_micros(100));
    }
    peer.channel().can_copy().map_err(|_| Unreachable)?;
    // Either may have said that it goes by messages alone (`ANYVERBS_DIRECT=0`).
    let published = shm.published().is_some()
        && begin(&peer).is_ok_and(|copying| direct::is_laid_out(&copying));
    if published { Ok(peer) } else { Err(Unreachable) }
}

/// Begins a copy. Where too many threads are at it, it is waited for one of them.
fn begin(peer: &Peer) -> Result<Copying<'_>, Fault> {
    loop {
        if let Some(copying) = peer.channel().begin_copy() {
            return Ok(copying);
        }
        if !peer.channel().is_open_to_copies() {
            return Err(Fault);
        }
        std::thread::yield_now();
    }
}
