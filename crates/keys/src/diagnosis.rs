//! Why an access was refused: a second, slow look at the table.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::window::is_same_window;
use crate::{Access, Held, MrTable, Slot};

/// Keys whose end is remembered.
const REMEMBERED: usize = 256;

/// The fault of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Finding {
    /// No region has, or recently had, this key.
    Unknown,
    /// The region was deregistered this long ago.
    Ended(Duration),
    /// The window was deallocated this long ago.
    WindowEnded(Duration),
    /// It is the other key of a region: an rkey in place of an lkey, or the reverse. This is the one that belongs there.
    OtherKey(u32),
    /// The region is of this protection domain.
    Pd(u32),
    /// The window is of this protection domain.
    WindowPd(u32),
    /// The range begins this many bytes before the region.
    Before(u64),
    /// The range ends this many bytes behind the region.
    Behind(u64),
    /// The range begins this many bytes before the window.
    BeforeWindow(u64),
    /// The range ends this many bytes behind the window.
    BehindWindow(u64),
    /// The addresses of the region or window count from 0, and the range begins behind it.
    ZeroBased,
    /// The region lacks these rights.
    Lacks(Access),
    /// The window lacks these rights.
    WindowLacks(Access),
    /// The window is bound to nothing. What has ended its last bind by this key, if one is remembered, and how long ago.
    Unbound(Option<(Unbinding, Duration)>),
    /// The window was bound anew, and has this key since.
    Rebound(u32),
    /// The window serves another queue pair, which has this number.
    OtherQp(u32),
    /// A script of faults has let the memory vanish.
    Vanished,
    /// Nothing, at this moment: the memory behind the region is gone, or the region has changed since.
    Nothing,
}

/// The event that has ended a bind of a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unbinding {
    /// An invalidation of its key.
    Invalidated,
    /// The end, or the reset, of its queue pair.
    QueuePair,
    /// The end of its region.
    Region,
}

/// The last keys that have ended, and the last windows that were unbound.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    keys: VecDeque<(u32, u32, Instant)>,
    unbound: VecDeque<(u32, Unbinding, Instant)>,
}

impl Ended {
    /// A window has no `lkey`.
    pub(crate) fn note(&mut self, lkey: u32, rkey: u32) {
        push(&mut self.keys, (lkey, rkey, Instant::now()));
    }

    pub(crate) fn note_unbound(&mut self, window: u32, by: Unbinding) {
        push(&mut self.unbound, (window, by, Instant::now()));
    }

    fn find(&self, key: u32) -> Option<Finding> {
        let mut latest = self.keys.iter().rev();
        let (lkey, _, at) = latest.find(|(lkey, rkey, _)| key == *lkey || key == *rkey)?;
        let ended = if *lkey == 0 { Finding::WindowEnded } else { Finding::Ended };
        Some(ended(at.elapsed()))
    }

    fn unbinding(&self, window: u32) -> Option<(Unbinding, Duration)> {
        let (_, by, at) = self.unbound.iter().rev().find(|(key, ..)| *key == window)?;
        Some((*by, at.elapsed()))
    }
}

fn push<T>(to: &mut VecDeque<T>, last: T) {
    if to.len() == REMEMBERED {
        to.pop_front();
    }
    to.push_back(last);
}

impl Finding {
    /// The same fault, of a window.
    fn of_window(self) -> Self {
        match self {
            Self::Pd(pd) => Self::WindowPd(pd),
            Self::Before(bytes) => Self::BeforeWindow(bytes),
            Self::Behind(bytes) => Self::BehindWindow(bytes),
            Self::Lacks(rights) => Self::WindowLacks(rights),
            other => other,
        }
    }
}

impl MrTable {
    /// Finds the fault of an access of [`local`](Self::local).
    #[cold]
    #[must_use]
    pub fn diagnose_local(&self, lkey: u32, pd: u32, range: (u64, u64), need: Access) -> Finding {
        let Some(held) = self.slot(lkey).and_then(Slot::hold) else { return self.dead(lkey) };
        let its = held.slot.lkey.load(Ordering::Relaxed);
        if its != lkey {
            let is_rkey = held.slot.rkey.load(Ordering::Relaxed) == lkey;
            return if is_rkey { Finding::OtherKey(its) } else { self.dead(lkey) };
        }
        self.fault(&held, pd, range, need)
    }

    /// Finds the fault of an access of [`remote`](Self::remote).
    #[cold]
    #[must_use]
    pub fn diagnose_remote(
        &self,
        rkey: u32,
        (pd, qpn): (u32, u32),
        range: (u64, u64),
        need: Access,
    ) -> Finding {
        let Some(held) = self.slot(rkey).and_then(Slot::hold) else { return self.dead(rkey) };
        let slot = held.slot;
        let is_window = slot.access().contains(Access::WINDOW);
        let key = slot.rkey.load(Ordering::Relaxed);
        if rkey == 0 || key != rkey {
            let is_lkey = rkey != 0 && slot.lkey.load(Ordering::Relaxed) == rkey;
            return match is_lkey {
                true => Finding::OtherKey(key),
                false if is_window && is_same_window(key, rkey) => self.rebound(slot, key),
                false => self.dead(rkey),
            };
        }
        if is_window && slot.bound.load(Ordering::Relaxed) == 0 {
            let same_pd = slot.pd.load(Ordering::Relaxed) == pd;
            return if same_pd { self.unbound(rkey) } else { self.fault(&held, pd, range, need) };
        }
        match self.fault(&held, pd, range, need) {
            Finding::Nothing if slot.access().contains(Access::WINDOW_2) && !slot.admits(qpn) => {
                Finding::OtherQp(slot.qpn.load(Ordering::Relaxed))
            }
            finding => finding,
        }
    }

    /// The fault of another key of this window, which has this one now.
    fn rebound(&self, slot: &Slot, key: u32) -> Finding {
        if slot.bound.load(Ordering::Relaxed) == 0 {
            self.unbound(0)
        } else {
            Finding::Rebound(key)
        }
    }

    fn unbound(&self, key: u32) -> Finding {
        Finding::Unbound(self.ended.lock().unbinding(key))
    }

    fn dead(&self, key: u32) -> Finding {
        let ended = self.ended.lock().find(key);
        ended.filter(|_| key != 0).unwrap_or(Finding::Unknown)
    }

    /// Finds the fault of a range of a region whose key is right.
    fn fault(&self, held: &Held<'_>, pd: u32, (va, len): (u64, u64), need: Access) -> Finding {
        let found = fault(held, pd, (va, len), need);
        let addr = held.slot.addr_of(va, len).ok().filter(|_| found == Finding::Nothing);
        let (Some(addr), Some((vanishing, place))) = (addr, held.slot.vanishing(self)) else {
            return found;
        };
        if vanishing.has_failed(place, addr, len) { Finding::Vanished } else { found }
    }
}

/// As [`MrTable::fault`], of what is there.
fn fault(held: &Held<'_>, pd: u32, (va, len): (u64, u64), need: Access) -> Finding {
    let slot = held.slot;
    let found = fault_of_slot(slot, pd, (va, len), need);
    if slot.access().contains(Access::WINDOW) { found.of_window() } else { found }
}

fn fault_of_slot(slot: &Slot, pd: u32, (va, len): (u64, u64), need: Access) -> Finding {
    let its_pd = slot.pd.load(Ordering::Relaxed);
    if its_pd != pd {
        return Finding::Pd(its_pd);
    }
    let lacks = need.difference(slot.access());
    if !lacks.is_empty() {
        return Finding::Lacks(lacks);
    }
    let first = u128::from(slot.iova.load(Ordering::Relaxed));
    let end = first + u128::from(slot.len.load(Ordering::Relaxed));
    let (from, to) = (u128::from(va), u128::from(va) + u128::from(len));
    let bytes = |bytes: u128| u64::try_from(bytes).unwrap_or(u64::MAX);
    if from < first {
        Finding::Before(bytes(first - from))
    } else if slot.access().contains(Access::ZERO_BASED) && first == 0 && from >= end && to > end {
        Finding::ZeroBased
    } else if to > end {
        Finding::Behind(bytes(to - end))
    } else {
        Finding::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bind, Region, WindowType};

    const REGION: Region = Region {
        pd: 7,
        access: Access::LOCAL_WRITE.union(Access::REMOTE_READ),
        iova: 0x1000,
        len: 0x100,
        addr: 0xabc0_0000,
    };

    #[test]
    fn each_fault_is_found() {
        let table = MrTable::new(10, 1);
        let keys = table.register(REGION).unwrap();
        let remote = |key, pd, range, need| table.diagnose_remote(key, (pd, 1), range, need);
        let read = Access::REMOTE_READ;
        assert_eq!(remote(keys.rkey, 7, (0x1000, 0x100), read), Finding::Nothing);
        assert_eq!(remote(keys.rkey, 7, (0x1080, 0x100), read), Finding::Behind(0x80));
        assert_eq!(remote(keys.rkey, 7, (0xff0, 8), read), Finding::Before(0x10));
        assert_eq!(remote(keys.rkey, 7, (0, 8), read), Finding::Before(0x1000));
        assert_eq!(remote(keys.rkey, 7, (u64::MAX, 8), read), Finding::Behind(u64::MAX - 0x10f8));
        assert_eq!(remote(keys.rkey, 8, (0x1000, 8), read), Finding::Pd(7));
        assert_eq!(remote(keys.lkey, 7, (0x1000, 8), read), Finding::OtherKey(keys.rkey));
        assert_eq!(remote(keys.rkey ^ keys.lkey, 7, (0x1000, 8), read), Finding::Unknown);
        let write = Access::REMOTE_WRITE;
        assert_eq!(remote(keys.rkey, 7, (0x1000, 8), write), Finding::Lacks(write));
        let local = |key| table.diagnose_local(key, 7, (0x1000, 8), Access::LOCAL_WRITE);
        assert_eq!(local(keys.lkey), Finding::Nothing);
        assert_eq!(local(keys.rkey), Finding::OtherKey(keys.lkey));
        assert_eq!(local(0), Finding::Unknown);
    }

    #[test]
    fn an_ended_key_is_told_from_an_unknown_one() {
        let table = MrTable::new(10, 1);
        let keys = table.register(REGION).unwrap();
        table.deregister(keys.lkey, |_| ()).unwrap();
        let remote = |key| table.diagnose_remote(key, (7, 1), (0x1000, 8), Access::REMOTE_READ);
        let local = |key| table.diagnose_local(key, 7, (0x1000, 8), Access::empty());
        assert!(matches!(remote(keys.rkey), Finding::Ended(_)));
        assert!(matches!(local(keys.lkey), Finding::Ended(_)));
        for key in [0, u32::MAX, 1 << 20] {
            assert_eq!((remote(key), local(key)), (Finding::Unknown, Finding::Unknown), "{key}");
        }
        for _ in 0..REMEMBERED {
            let keys = table.register(REGION).unwrap();
            table.deregister(keys.lkey, |_| ()).unwrap();
        }
        assert_eq!(remote(keys.rkey), Finding::Unknown, "the memory of them is bounded");
    }

    #[test]
    fn another_queue_pairs_window_is_the_last_fault_told() {
        let table = MrTable::new(10, 1);
        let access = REGION.access | Access::MW_BIND;
        let keys = table.register(Region { access, ..REGION }).unwrap();
        let bound = |kind| {
            let window = table.alloc_window(7, kind).unwrap();
            let access = Access::REMOTE_READ;
            let bind = Bind { window, rkey: 1, lkey: keys.lkey, access, addr: 0x1010, len: 0x20 };
            table.bind(&bind, 7, 5).unwrap()
        };
        let read = Access::REMOTE_READ;
        let one = bound(WindowType::Type1);
        for qpn in [5, 6] {
            let found = table.diagnose_remote(one, (7, qpn), (0x1010, 8), read);
            assert_eq!(found, Finding::Nothing, "any queue pair may use it");
        }
        let two = bound(WindowType::Type2);
        let remote = |pd, qpn, range, need| table.diagnose_remote(two, (pd, qpn), range, need);
        assert_eq!(remote(7, 5, (0x1010, 0x20), read), Finding::Nothing);
        assert_eq!(remote(7, 6, (0x1010, 0x20), read), Finding::OtherQp(5));
        assert_eq!(remote(7, 6, (0x1010, 0x21), read), Finding::BehindWindow(1));
        assert_eq!(remote(7, 6, (0x100f, 1), read), Finding::BeforeWindow(1));
        assert_eq!(remote(8, 6, (0x1010, 0x20), read), Finding::WindowPd(7));
        let write = Access::REMOTE_WRITE;
        assert_eq!(remote(7, 6, (0x1010, 0x20), write), Finding::WindowLacks(write));
    }

    #[test]
    fn a_window_that_is_not_bound_is_told_from_its_region() {
        let table = MrTable::new(10, 1);
        let access = REGION.access | Access::MW_BIND;
        let keys = table.register(Region { access, ..REGION }).unwrap();
        let read = Access::REMOTE_READ;
        let found = |key| table.diagnose_remote(key, (7, 5), (0x1010, 8), read);
        let by = |key| match found(key) {
            Finding::Unbound(Some((by, _))) => by,
            other => panic!("{other:?}"),
        };
        let bind = |window, low| {
            let bind =
                Bind { window, rkey: low, lkey: keys.lkey, access: read, addr: 0x1010, len: 0x20 };
            table.bind(&bind, 7, 5).unwrap()
        };
        let two = table.alloc_window(7, WindowType::Type2).unwrap();
        assert_eq!(found(two), Finding::Unbound(None), "it was never bound");
        let key = bind(two, 9);
        assert_eq!(found(key), Finding::Nothing);
        table.invalidate(key, 7, None).unwrap();
        assert_eq!(by(key), Unbinding::Invalidated);
        assert_eq!(table.diagnose_remote(key, (8, 5), (0x1010, 8), read), Finding::WindowPd(7));
        let next = bind(two, 10);
        assert_eq!((found(key), found(next)), (Finding::Rebound(next), Finding::Nothing));
        table.forget_qp(5);
        assert_eq!(by(next), Unbinding::QueuePair);
        assert_eq!(found(key), Finding::Unbound(None), "it is bound by no key");
        let last = bind(two, 11);
        table.deregister_bound(keys.lkey, |_| ()).unwrap();
        assert_eq!(by(last), Unbinding::Region);
        table.free_window(last);
        assert!(matches!(found(last), Finding::WindowEnded(_)));
        assert!(matches!(found(keys.rkey), Finding::Ended(_)));
    }

    #[test]
    fn a_zero_based_region_is_told_from_a_range_that_is_too_long() {
        let table = MrTable::new(10, 1);
        let access = REGION.access | Access::ZERO_BASED;
        let keys = table.register(Region { access, iova: 0, ..REGION }).unwrap();
        let found =
            |va, len| table.diagnose_remote(keys.rkey, (7, 5), (va, len), Access::REMOTE_READ);
        assert_eq!(found(0xf8, 16), Finding::Behind(8));
        assert_eq!(found(REGION.addr + 8, 8), Finding::ZeroBased);
        assert_eq!((found(0x100, 0), found(0x100, 1)), (Finding::Nothing, Finding::ZeroBased));
    }

    #[test]
    fn a_null_region_has_no_remote_key_to_ask_about() {
        let table = MrTable::new(10, 1);
        let keys = table.register(Region { access: Access::NULL, ..REGION }).unwrap();
        // Another key of the same place.
        let other = keys.lkey ^ 1;
        let remote = |key| table.diagnose_remote(key, (7, 1), (0x1000, 8), Access::empty());
        assert_eq!(remote(keys.lkey), Finding::OtherKey(0));
        assert_eq!((remote(0), remote(other)), (Finding::Unknown, Finding::Unknown));
        let local = |key, need| table.diagnose_local(key, 7, (0x1000, 8), need);
        assert_eq!(local(keys.lkey, Access::empty()), Finding::Nothing);
        let write = Access::LOCAL_WRITE;
        assert_eq!(local(keys.lkey, write), Finding::Lacks(write));
        assert_eq!((local(0, write), local(other, write)), (Finding::Unknown, Finding::Unknown));
    }
}
