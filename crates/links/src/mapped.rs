//! Regions of peers that this process has mapped: one-sided operations on them are a copy in memory.
//!
//! A region qualifies if it is, whole, one shared mapping of a file in memory. That is memory that the device allocates
//! (`ibv_alloc_buf`, `ibv_alloc_dm`), and memory that programs share anyway (memfd, `/dev/shm`, huge pages). Memory is not
//! converted for it. The checks in the published memory are the same as for any copy ([`super::direct`]); only the way of the
//! bytes differs. A mapping belongs to one validity of an entry. When that ends, by deregistration, it is not used again, and
//! goes within a second. A file that its owner makes shorter ends in a fault of the guarded copy, and then in a message, which
//! the owner answers.

use std::os::fd::AsFd;
use std::sync::Arc;

use anyverbs_locks::{Mutex, rank};
use anyverbs_net::Uncancelled;
use anyverbs_net::shm::Copying;
use anyverbs_objects::memory::mapping::Mapping;
use anyverbs_proto::mr::Access;

/// Regions of one peer that are kept in mind.
const MOST: usize = 64;
/// Operations on a region after which its mapping is looked for, since that takes as long as this many of them.
const WORTH: u32 = 4;

/// A region of a peer, as its published memory has it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Target {
    pub(super) rkey: u32,
    /// The first word of its entry, another for each validity.
    pub(super) state: u64,
    pub(super) addr: u64,
    pub(super) len: u64,
    pub(super) access: Access,
}

#[derive(Debug)]
struct Known {
    target: Target,
    uses: u32,
    mapped: Option<Arc<Mapped>>,
}

/// A mapping of a region's pages.
#[derive(Debug)]
pub(super) struct Mapped {
    mapping: Mapping,
    /// Where the region's first byte lies in it.
    skip: u64,
    /// The region's length when it was mapped: the published memory is the peer's own memory, and may say more by now.
    len: u64,
}

impl Mapped {
    /// Where a part of the region lies in this process.
    pub(super) fn addr(&self, offset: u64, bytes: usize) -> Option<u64> {
        let end = offset.checked_add(bytes as u64)?;
        (end <= self.len).then(|| self.mapping.addr() + self.skip + offset)
    }

    /// Maps a region, if it is, whole, one shared mapping of a file.
    fn new(copying: &Copying<'_>, target: &Target, write: bool) -> Option<Self> {
        let range = copying.shared_range(target.addr, target.len, write)?;
        // Both sides have pages of one size, or huge ones: those of the mapping.
        let page = anyverbs_objects::memory::mapping::block_size(range.file.as_fd())?;
        let skip = range.offset % page;
        let bytes = (skip + target.len).checked_next_multiple_of(page)?;
        let len = usize::try_from(bytes).ok()?;
        let mapping = Mapping::of_file(range.file.as_fd(), range.offset - skip, len, write).ok()?;
        let mapping = mapping.keep_from_children().ok()?;
        Some(Self { mapping, skip, len: target.len })
    }
}

/// The result of a look for a region.
pub(super) enum Lookup {
    Mapped {
        region: Arc<Mapped>,
        /// Since now.
        is_new: bool,
    },
    /// It was tried, and could not be.
    Private,
    /// It was not tried yet.
    NotYet,
}

/// The regions of one peer.
#[derive(Debug, Default)]
pub(crate) struct MappedRegions(Mutex<rank::MappedRegions, Vec<Known>>);

impl MappedRegions {
    /// Looks for the mapping of a region. The result is to be used under the mark of `copying`.
    pub(super) fn get(&self, copying: &Copying<'_>, target: &Target) -> Lookup {
        // Opens, maps and closes below locks.
        let _uncancelled = Uncancelled::new();
        let mut known = self.0.lock();
        let new = || Known { target: *target, uses: 0, mapped: None };
        let at = known.iter().position(|k| k.target.rkey == target.rkey);
        let at = at.unwrap_or_else(|| {
            if known.len() == MOST {
                // The oldest that is not mapped, if there is one.
                let oldest = known.iter().position(|k| k.mapped.is_none()).unwrap_or(0);
                known.remove(oldest);
            }
            known.push(new());
            known.len() - 1
        });
        let entry = &mut known[at];
        if entry.target != *target {
            *entry = new();
        }
        let mut is_new = false;
        if entry.uses < WORTH {
            entry.uses += 1;
            if entry.uses == WORTH {
                let write = target.access.contains(Access::REMOTE_WRITE);
                entry.mapped = Mapped::new(copying, target, write).map(Arc::new);
                is_new = entry.mapped.is_some();
            }
        }
        match &entry.mapped {
            Some(region) if copying.is_current() => {
                Lookup::Mapped { region: Arc::clone(region), is_new }
            }
            None if entry.uses == WORTH => Lookup::Private,
            _ => Lookup::NotYet,
        }
    }

    /// Drops mappings whose entry has ended; tells whether any is left. `state` gives the state of a key's entry.
    pub(super) fn sweep(&self, state: impl Fn(u32) -> u64) -> bool {
        let mut known = self.0.lock();
        known.retain(|k| k.mapped.is_none() || state(k.target.rkey) == k.target.state);
        known.iter().any(|k| k.mapped.is_some())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().iter().all(|k| k.mapped.is_none())
    }

    /// Forgets all.
    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_beyond_the_mapped_region_have_no_address() {
        let mapping = Mapping::anonymous(8192).unwrap();
        let base = mapping.addr();
        let mapped = Mapped { mapping, skip: 100, len: 5000 };
        assert_eq!(mapped.addr(0, 5000), Some(base + 100));
        assert_eq!(mapped.addr(4999, 1), Some(base + 5099));
        for (offset, bytes) in [(0, 5001), (5000, 1), (u64::MAX, 1), (1, usize::MAX)] {
            assert_eq!(mapped.addr(offset, bytes), None, "{bytes} at {offset}");
        }
    }
}
