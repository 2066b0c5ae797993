//! Queue pairs by number.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use anyverbs_locks::{RwLock, rank};
use anyverbs_proto::types::Qpn;

use super::QpCell;

const CHUNK: usize = 256;

/// The queue pairs of this process. Their numbers are its slot in the top byte and a counter. That starts at a random
/// place, so that a number is not reused at once, not even by the slot's next owner.
pub struct QpTable<Q = QpCell> {
    slot: u8,
    inner: RwLock<rank::QueuePairs, Inner<Q>>,
}

type Chunk<Q> = [Option<Arc<Q>>; CHUNK];

struct Inner<Q> {
    chunks: Box<[Option<Box<Chunk<Q>>>]>,
    next: u16,
    len: usize,
    /// Numbers of others, which count in `len`.
    reserved: HashSet<u16>,
    /// XRC targets of other processes: open or borrowed here.
    foreign: HashMap<Qpn, Arc<Q>>,
}

impl<Q> QpTable<Q> {
    /// The table of a slot; numbers begin at `start`.
    pub fn new(slot: u8, start: u16) -> Self {
        let chunks = (0..65_536 / CHUNK).map(|_| None).collect();
        Self {
            slot,
            inner: RwLock::new(Inner {
                chunks,
                next: start,
                len: 0,
                reserved: HashSet::new(),
                foreign: HashMap::new(),
            }),
        }
    }

    /// Enters a queue pair under a new number. None when all are taken.
    pub(crate) fn insert(&self, make: impl FnOnce(Qpn) -> Q) -> Option<Arc<Q>> {
        let mut inner = self.inner.write();
        if inner.len >= 65_535 {
            return None;
        }
        loop {
            let counter = inner.next;
            inner.next = inner.next.wrapping_add(1);
            let qpn = self.qpn(counter);
            if qpn == Qpn::MULTICAST || inner.is_taken(counter) {
                continue;
            }
            let cell = Arc::new(make(qpn));
            let (chunk, at) = (usize::from(counter) / CHUNK, usize::from(counter) % CHUNK);
            inner.chunks[chunk].get_or_insert_with(|| Box::new([const { None }; CHUNK]))[at] =
                Some(Arc::clone(&cell));
            inner.len += 1;
            return Some(cell);
        }
    }

    fn qpn(&self, counter: u16) -> Qpn {
        Qpn::new(u32::from(self.slot) << 16 | u32::from(counter))
    }

    /// Takes a new number that no packet of the network uses. None when all are taken.
    pub fn reserve(&self) -> Option<Qpn> {
        let mut inner = self.inner.write();
        if inner.len >= 65_535 {
            return None;
        }
        loop {
            let counter = inner.next;
            inner.next = inner.next.wrapping_add(1);
            let qpn = self.qpn(counter);
            if qpn != Qpn::MULTICAST && !inner.is_taken(counter) {
                inner.reserved.insert(counter);
                inner.len += 1;
                return Some(qpn);
            }
        }
    }

    /// Gives a reserved number back.
    pub fn release(&self, qpn: Qpn) {
        let mut inner = self.inner.write();
        inner.len -= usize::from(inner.reserved.remove(&(qpn.get() as u16)));
    }

    /// The queue pair of a number.
    pub fn find(&self, qpn: Qpn) -> Option<Arc<Q>> {
        self.inner.read().find(self.slot, qpn)
    }

    /// As [`find`](Self::find), for a thread that has a queue pair locked: nothing either where the table is being changed.
    pub(crate) fn try_find(&self, qpn: Qpn) -> Option<Arc<Q>> {
        self.inner.try_read()?.find(self.slot, qpn)
    }

    pub(crate) fn remove(&self, qpn: Qpn) {
        let counter = usize::from(qpn.get() as u16);
        let mut inner = self.inner.write();
        if qpn.slot() != self.slot {
            inner.foreign.remove(&qpn);
            return;
        }
        let next = usize::from(inner.next);
        let Some(chunk) = &mut inner.chunks[counter / CHUNK] else { return };
        let removed = chunk[counter % CHUNK].take();
        // Numbers go round: chunks that they have passed would stay for good. The next ones come into the newest chunk.
        if next / CHUNK != counter / CHUNK && chunk.iter().all(Option::is_none) {
            inner.chunks[counter / CHUNK] = None;
        }
        inner.len -= usize::from(removed.is_some());
    }

    /// The target of another process, entered if it is not there yet; `claim` gives the purpose.
    pub fn enter_foreign(
        &self,
        qpn: Qpn,
        make: impl FnOnce(Qpn) -> Q,
        claim: impl FnOnce(&Q),
    ) -> Arc<Q> {
        let mut inner = self.inner.write();
        let cell = match inner.foreign.entry(qpn) {
            Entry::Occupied(entry) => Arc::clone(entry.get()),
            Entry::Vacant(entry) => Arc::clone(entry.insert(Arc::new(make(qpn)))),
        };
        claim(&cell);
        cell
    }

    /// Forgets the target of another process if no claim here is left.
    pub fn remove_foreign(&self, qpn: Qpn, is_unclaimed: impl FnOnce(&Q) -> bool) {
        let mut inner = self.inner.write();
        if inner.foreign.get(&qpn).is_some_and(|cell| is_unclaimed(cell)) {
            inner.foreign.remove(&qpn);
        }
    }

    /// Calls `f` with each queue pair, without allocating, if the table can be had `within` a time; it stays locked.
    pub(crate) fn each(&self, within: Duration, mut f: impl FnMut(&Arc<Q>)) {
        let Some(inner) = self.inner.try_read_for(within) else { return };
        let all = inner.chunks.iter().flatten().flat_map(|chunk| chunk.iter().flatten());
        all.for_each(&mut f);
    }

    /// The queue pairs for which `which` holds.
    pub fn filter(&self, which: impl Fn(&Arc<Q>) -> bool) -> Vec<Arc<Q>> {
        let inner = self.inner.read();
        let all = inner.chunks.iter().flatten().flat_map(|chunk| chunk.iter().flatten());
        all.chain(inner.foreign.values()).filter(|cell| which(cell)).cloned().collect()
    }
}

impl<Q> Inner<Q> {
    fn find(&self, slot: u8, qpn: Qpn) -> Option<Arc<Q>> {
        if qpn.slot() == slot {
            self.get(qpn.get() as u16).cloned()
        } else {
            self.foreign.get(&qpn).cloned()
        }
    }

    fn is_taken(&self, counter: u16) -> bool {
        self.get(counter).is_some() || self.reserved.contains(&counter)
    }

    fn get(&self, counter: u16) -> Option<&Arc<Q>> {
        let counter = usize::from(counter);
        self.chunks[counter / CHUNK].as_ref()?[counter % CHUNK].as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_go_round_without_keeping_memory() {
        let table = QpTable::new(3, 65_000);
        let stays = table.insert(|qpn| qpn).unwrap();
        let mut seen = HashSet::from([*stays]);
        for _ in 1..=65_534 {
            let qpn = *table.insert(|qpn| qpn).unwrap();
            assert!(seen.insert(qpn));
            assert_eq!(table.find(qpn).as_deref(), Some(&qpn));
            table.remove(qpn);
            assert!(table.find(qpn).is_none());
            let chunks = table.inner.read().chunks.iter().flatten().count();
            assert!(chunks <= 3, "{chunks}: of the one that stays, the last and the next");
        }
        assert_eq!(table.find(*stays), Some(stays));
    }
}
