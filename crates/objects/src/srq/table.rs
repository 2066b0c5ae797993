//! SRQs of type XRC by number.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use anyverbs_locks::{RwLock, rank};

use super::SrqCell;

/// The SRQs of this process that requests can name. Their numbers are its slot in the top byte and a counter, as those
/// of queue pairs are.
#[derive(Debug)]
pub struct SrqTable {
    slot: u8,
    inner: RwLock<rank::SharedReceiveQueues, Inner>,
}

#[derive(Debug)]
struct Inner {
    srqs: HashMap<u32, Arc<SrqCell>>,
    next: u16,
}

impl SrqTable {
    /// The table of a slot; numbers begin at `start`.
    pub fn new(slot: u8, start: u16) -> Self {
        Self { slot, inner: RwLock::new(Inner { srqs: HashMap::new(), next: start }) }
    }

    /// Enters an SRQ under a new number. None when all are taken.
    pub(crate) fn insert(&self, make: impl FnOnce(u32) -> SrqCell) -> Option<Arc<SrqCell>> {
        let mut inner = self.inner.write();
        for _ in 0..=u16::MAX {
            let number = u32::from(self.slot) << 16 | u32::from(inner.next);
            inner.next = inner.next.wrapping_add(1);
            if let Entry::Vacant(entry) = inner.srqs.entry(number) {
                let cell = Arc::new(make(number));
                entry.insert(Arc::clone(&cell));
                return Some(cell);
            }
        }
        None
    }

    /// The SRQ of a number.
    pub fn find(&self, number: u32) -> Option<Arc<SrqCell>> {
        self.inner.read().srqs.get(&number).cloned()
    }

    pub(crate) fn remove(&self, number: u32) {
        self.inner.write().srqs.remove(&number);
    }

    /// The SRQs for which `which` holds.
    pub fn filter(&self, which: impl Fn(&SrqCell) -> bool) -> Vec<Arc<SrqCell>> {
        self.inner.read().srqs.values().filter(|srq| which(srq)).cloned().collect()
    }
}
