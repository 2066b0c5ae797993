//! Regions of peers that this process has mapped: one-sided operations on them are a copy in memory.
//!
//! A region qualifies if it is, whole, one shared mapping of a file in memory: what the device allocates (`ibv_alloc_buf`,
//! `ibv_alloc_dm`), and what programs share anyway (memfd, `/dev/shm`, huge pages). Nobody converts memory for it. What is
//! looked up on the board, and when, is as for any copy ([`super::direct`]); only how the bytes move is another. A mapping
//! belongs to one validity of an entry: when that ends, by deregistration, it is not used again, and goes within a second. A
//! file that its owner makes shorter ends in a fault of the guarded copy, and then in a message, which the owner answers.

use std::os::fd::AsFd;
use std::sync::Arc;

use anyverbs_net::shm::Copying;
use anyverbs_proto::mr::Access;
use parking_lot::Mutex;

use crate::memory::mapping::Mapping;

/// Regions of one peer that are kept in mind.
const MOST: usize = 64;
/// Operations on a region after which it is looked for: that takes as long as many of them.
const WORTH: u32 = 4;

/// A region of a peer, as its board has it.
#[derive(Clone, Copy, Debug)]
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
    rkey: u32,
    state: u64,
    uses: u32,
    mapped: Option<Arc<Mapped>>,
}

/// A mapping of a region's pages.
#[derive(Debug)]
pub(super) struct Mapped {
    mapping: Mapping,
    /// Where the region's first byte lies in it.
    skip: u64,
}

impl Mapped {
    /// Where a byte of the region lies in this process.
    pub(super) fn addr(&self, offset: u64) -> u64 {
        self.mapping.addr() + self.skip + offset
    }

    fn new(copying: &Copying<'_>, target: &Target) -> Option<Self> {
        let write = target.access.contains(Access::REMOTE_WRITE);
        let range = copying.shared_range(target.addr, target.len, write)?;
        // Both sides have pages of one size, or huge ones: those of the mapping.
        let page = crate::memory::mapping::block_size(range.file.as_fd())?;
        let skip = range.offset % page;
        let bytes = (skip + target.len).checked_next_multiple_of(page)?;
        let len = usize::try_from(bytes).ok()?;
        let mapping = Mapping::of_file(range.file.as_fd(), range.offset - skip, len, write).ok()?;
        Some(Self { mapping, skip })
    }
}

/// The regions of one peer.
#[derive(Debug, Default)]
pub(crate) struct MappedRegions(Mutex<Vec<Known>>);

impl MappedRegions {
    /// The mapping of a region, if it has one. To be used under the mark of `copying`. True: it is new.
    pub(super) fn get(
        &self,
        copying: &Copying<'_>,
        target: &Target,
    ) -> Option<(Arc<Mapped>, bool)> {
        let mut known = self.0.lock();
        let at = known.iter().position(|k| k.rkey == target.rkey);
        let at = at.unwrap_or_else(|| {
            if known.len() == MOST {
                known.remove(0);
            }
            known.push(Known { rkey: target.rkey, state: 0, uses: 0, mapped: None });
            known.len() - 1
        });
        let entry = &mut known[at];
        if entry.state != target.state {
            *entry = Known { rkey: target.rkey, state: target.state, uses: 0, mapped: None };
        }
        let mut is_new = false;
        if entry.uses < WORTH {
            entry.uses += 1;
            if entry.uses == WORTH {
                entry.mapped = Mapped::new(copying, target).map(Arc::new);
                is_new = entry.mapped.is_some();
            }
        }
        copying.is_current().then(|| entry.mapped.clone())?.map(|mapped| (mapped, is_new))
    }

    /// Forgets those whose entry has ended; whether any is left. `state` says what stands in the entry of a key.
    pub(super) fn sweep(&self, state: impl Fn(u32) -> u64) -> bool {
        let mut known = self.0.lock();
        known.retain(|k| k.mapped.is_none() || state(k.rkey) == k.state);
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
