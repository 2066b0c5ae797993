//! Memory windows: remote keys for a part of a region, bound and unbound by work requests (IBA 10.6.7).
//!
//! A window has a slot of the table like a region, and is looked up like one. Its key is not the region's, and it has
//! no local key. The low 8 bits of the key of a window of type 2 are the program's, and change with each bind.

use std::sync::atomic::Ordering;

use thiserror::Error;

use super::{Access, KeyError, MrTable, Slot, Unbinding};

/// `enum ibv_mw_type`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum WindowType {
    /// Bound by a verb, as often as the program likes; open to every queue pair of its protection domain.
    Type1 = 1,
    /// Bound by a work request, then open to that queue pair alone (2B) until it is invalidated.
    Type2 = 2,
}

/// The target of a bind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bind {
    /// The window, by any of its keys.
    pub window: u32,
    /// Its next key: the low 8 bits count.
    pub rkey: u32,
    /// The region; without a meaning where `len` is 0.
    pub lkey: u32,
    /// Remote rights, and whether the window's addresses count from 0.
    pub access: Access,
    /// Its first byte, in the region's terms.
    pub addr: u64,
    /// Bytes. 0 unbinds a window of type 1.
    pub len: u64,
}

/// The reason why a window was not bound; it is as before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum BindError {
    /// No such window.
    #[error("no such memory window")]
    Window,
    /// Window, region and queue pair are not all of one protection domain.
    #[error("window, region and queue pair are of several protection domains")]
    Pd,
    /// A window of type 2 that is bound already, or a bind of one to nothing.
    #[error("a window of type 2 is unbound by its invalidation alone, and bound once before it")]
    State,
    /// No such region.
    #[error("no such memory region")]
    Region,
    /// The range is not within the region.
    #[error("the window is not within the region")]
    Range,
    /// The region lacks these rights, of which the first lets windows be bound to it.
    #[error("the region does not grant the window's rights")]
    Access(Access),
}

/// The bits of a key that stay.
const FIXED: u32 = !0xff;

impl Access {
    /// The rights that a bind may ask for. Local write and bind are accepted, as programs give windows the rights of
    /// their region, and mean nothing.
    pub const OF_WINDOW: Self = Self::REMOTE_WRITE
        .union(Self::REMOTE_READ)
        .union(Self::REMOTE_ATOMIC)
        .union(Self::FLUSH_GLOBAL)
        .union(Self::FLUSH_PERSISTENT)
        .union(Self::ZERO_BASED)
        .union(Self::WITHOUT_MEANING);

    const WITHOUT_MEANING: Self = Self::LOCAL_WRITE.union(Self::MW_BIND);
}

impl MrTable {
    /// Makes a window that is bound to nothing, and returns its key; `None` when the table is full.
    pub fn alloc_window(&self, pd: u32, kind: WindowType) -> Option<u32> {
        let (keys, slot) = self.take_slot()?;
        slot.lkey.store(0, Ordering::Relaxed);
        slot.rkey.store(keys.rkey, Ordering::Relaxed);
        slot.pd.store(pd, Ordering::Relaxed);
        slot.store_unbound(kind);
        slot.uses.open();
        Some(keys.rkey)
    }

    /// Ends a window, bound or not, and waits until no access through it is in progress. False if there is none.
    pub fn free_window(&self, window: u32) -> bool {
        let mut bindings = self.bindings.lock();
        let Some(slot) = self.window(window) else { return false };
        let key = slot.rkey.load(Ordering::Relaxed);
        slot.uses.close();
        slot.uses.drain();
        self.unbind(slot, &mut bindings);
        drop(bindings);
        self.give_back(slot, key);
        true
    }

    /// Binds a window for a work request of queue pair `qpn` of protection domain `pd`. Returns its new key, which from
    /// now on is its only one. Waits until no access by the old key is in progress.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn bind(&self, bind: &Bind, pd: u32, qpn: u32) -> Result<u32, BindError> {
        let mut bindings = self.bindings.lock();
        let slot = self.window(bind.window).ok_or(BindError::Window)?;
        if slot.pd.load(Ordering::Relaxed) != pd {
            return Err(BindError::Pd);
        }
        let kind = slot.window_type();
        let bound = slot.bound.load(Ordering::Relaxed) != 0;
        if kind == WindowType::Type2 && (bound || bind.len == 0) {
            return Err(BindError::State);
        }
        let region = if bind.len == 0 { None } else { Some(self.bindable(bind, pd)?) };
        slot.uses.close();
        slot.uses.drain();
        self.unbind(slot, &mut bindings);
        if let Some((region, addr)) = region {
            region.bound.fetch_add(1, Ordering::Relaxed);
            let zero_based = bind.access.contains(Access::ZERO_BASED);
            let rights = bind.access & Access::OF_WINDOW & !Access::WITHOUT_MEANING;
            let marks = kind.flags() | region.access() & Access::MAY_VANISH;
            slot.access.store((rights | marks).bits(), Ordering::Relaxed);
            slot.iova.store(if zero_based { 0 } else { bind.addr }, Ordering::Relaxed);
            slot.len.store(bind.len, Ordering::Relaxed);
            slot.addr.store(addr, Ordering::Relaxed);
            slot.bound.store(bind.lkey, Ordering::Relaxed);
            if kind == WindowType::Type2 {
                slot.qpn.store(qpn, Ordering::Relaxed);
                *bindings += 1;
            }
        }
        let key = slot.rkey.load(Ordering::Relaxed) & FIXED | bind.rkey & !FIXED;
        slot.rkey.store(key, Ordering::Relaxed);
        slot.uses.open();
        Ok(key)
    }

    /// Unbinds the windows that only this queue pair, which ends, could use.
    pub fn forget_qp(&self, qpn: u32) {
        let mut bindings = self.bindings.lock();
        if *bindings == 0 {
            return;
        }
        for slot in self.chunks.iter().filter_map(|chunk| chunk.get()).flatten() {
            let valid = slot.uses.is_valid();
            if valid
                && slot.access().contains(Access::WINDOW_2)
                && slot.qpn.load(Ordering::Relaxed) == qpn
            {
                self.free_again(slot, Unbinding::QueuePair, &mut bindings);
            }
        }
    }

    /// Unbinds the windows that are bound to a region.
    pub(super) fn unbind_all(&self, lkey: u32, bindings: &mut u32) {
        for slot in self.chunks.iter().filter_map(|chunk| chunk.get()).flatten() {
            let valid = slot.uses.is_valid();
            if valid
                && slot.access().contains(Access::WINDOW)
                && slot.bound.load(Ordering::Relaxed) == lkey
            {
                self.free_again(slot, Unbinding::Region, bindings);
            }
        }
    }

    /// See [`MrTable::invalidate`].
    pub(super) fn invalidate_window(
        &self,
        slot: &Slot,
        qpn: Option<u32>,
        bindings: &mut u32,
    ) -> Result<(), KeyError> {
        let bound = slot.bound.load(Ordering::Relaxed) != 0;
        let admits = qpn.is_none_or(|qpn| slot.admits(qpn));
        if slot.window_type() != WindowType::Type2 || !bound || !admits {
            return Err(KeyError::Access);
        }
        self.free_again(slot, Unbinding::Invalidated, bindings);
        Ok(())
    }

    /// A window is bound to nothing, its key finds nothing.
    fn free_again(&self, slot: &Slot, by: Unbinding, bindings: &mut u32) {
        slot.uses.close();
        slot.uses.drain();
        self.unbind(slot, bindings);
        self.ended.lock().note_unbound(slot.rkey.load(Ordering::Relaxed), by);
        slot.uses.open();
    }

    /// The region that a window is to be bound to, and the window's address in this process. The region stays, since
    /// taking one back needs the lock of the bindings.
    fn bindable(&self, bind: &Bind, pd: u32) -> Result<(&Slot, u64), BindError> {
        let held = self.slot(bind.lkey).and_then(Slot::hold).ok_or(BindError::Region)?;
        let region = held.slot;
        if bind.lkey == 0 || region.lkey.load(Ordering::Relaxed) != bind.lkey {
            return Err(BindError::Region);
        }
        if region.pd.load(Ordering::Relaxed) != pd {
            return Err(BindError::Pd);
        }
        let (granted, wanted) = (region.access(), bind.access);
        // IBA 10.6.7.2.1 (C10-73, C10-74).
        let writes = wanted.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        let flushes = wanted & (Access::FLUSH_GLOBAL | Access::FLUSH_PERSISTENT);
        let mut needed = Access::MW_BIND | flushes;
        needed.set(Access::LOCAL_WRITE, writes);
        if !granted.contains(needed) {
            return Err(BindError::Access(needed.difference(granted)));
        }
        let iova = region.iova.load(Ordering::Relaxed);
        let offset = bind.addr.checked_sub(iova).ok_or(BindError::Range)?;
        let end = offset.checked_add(bind.len).ok_or(BindError::Range)?;
        if end > region.len.load(Ordering::Relaxed) {
            return Err(BindError::Range);
        }
        Ok((region, region.addr.load(Ordering::Relaxed).wrapping_add(offset)))
    }

    /// The window with this key, or that had it.
    fn window(&self, key: u32) -> Option<&Slot> {
        let slot = self.slot(key)?;
        let valid = slot.uses.is_valid();
        let same = is_same_window(slot.rkey.load(Ordering::Relaxed), key);
        (valid && same && slot.access().contains(Access::WINDOW)).then_some(slot)
    }

    /// Takes a window off its region. The window is not in use.
    fn unbind(&self, slot: &Slot, bindings: &mut u32) {
        let lkey = slot.bound.load(Ordering::Relaxed);
        if lkey == 0 {
            return;
        }
        if let Some(region) = self.slot(lkey) {
            region.bound.fetch_sub(1, Ordering::Relaxed);
        }
        let kind = slot.window_type();
        if kind == WindowType::Type2 {
            *bindings -= 1;
        }
        slot.store_unbound(kind);
    }
}

/// Whether these are keys of one window, if the first is a window's.
pub(super) fn is_same_window(key: u32, other: u32) -> bool {
    key & FIXED == other & FIXED
}

impl WindowType {
    fn flags(self) -> Access {
        match self {
            Self::Type1 => Access::WINDOW,
            Self::Type2 => Access::WINDOW | Access::WINDOW_2,
        }
    }
}

impl Slot {
    fn window_type(&self) -> WindowType {
        if self.access().contains(Access::WINDOW_2) { WindowType::Type2 } else { WindowType::Type1 }
    }

    fn store_unbound(&self, kind: WindowType) {
        self.access.store(kind.flags().bits(), Ordering::Relaxed);
        self.iova.store(0, Ordering::Relaxed);
        self.len.store(0, Ordering::Relaxed);
        self.addr.store(0, Ordering::Relaxed);
        self.qpn.store(0, Ordering::Relaxed);
        self.bound.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Keys, Region, RetireError};
    use super::*;

    const PD: u32 = 7;
    const QPN: u32 = 0x10;
    const OTHER: u32 = 0x11;
    const ALL: Access = Access::LOCAL_WRITE.union(Access::MW_BIND);

    fn table() -> (MrTable, Keys) {
        let table = MrTable::new(10, 1);
        let region = Region { pd: PD, access: ALL, iova: 0x1000, len: 0x100, addr: 0xabc0_0000 };
        let keys = table.register(region).unwrap();
        (table, keys)
    }

    fn bind(window: u32, keys: Keys, access: Access) -> Bind {
        Bind {
            window,
            rkey: window.wrapping_add(1),
            lkey: keys.lkey,
            access,
            addr: 0x1010,
            len: 16,
        }
    }

    fn at(table: &MrTable, rkey: u32, qpn: u32, va: u64, need: Access) -> Result<u64, KeyError> {
        table.remote(rkey, (PD, qpn), va, 8, need).map(|hold| hold.addr())
    }

    #[test]
    fn a_window_opens_its_part_and_nothing_else() {
        let (table, keys) = table();
        let write = Access::REMOTE_WRITE;
        for kind in [WindowType::Type1, WindowType::Type2] {
            let window = table.alloc_window(PD, kind).unwrap();
            assert_eq!(at(&table, window, QPN, 0x1010, write), Err(KeyError::Access));
            let rkey = table.bind(&bind(window, keys, write), PD, QPN).unwrap();
            assert_eq!((rkey & FIXED, rkey & 0xff), (window & FIXED, (window + 1) & 0xff));
            assert_eq!(at(&table, rkey, QPN, 0x1010, write), Ok(0xabc0_0010));
            assert_eq!(at(&table, rkey, QPN, 0x1018, write), Ok(0xabc0_0018));
            assert_eq!(at(&table, rkey, QPN, 0x1019, write), Err(KeyError::Range));
            assert_eq!(at(&table, rkey, QPN, 0x100f, write), Err(KeyError::Range));
            assert_eq!(at(&table, rkey, QPN, 0x1010, Access::REMOTE_READ), Err(KeyError::Access));
            assert_eq!(at(&table, window, QPN, 0x1010, write), Err(KeyError::Key));
            let through_other = at(&table, rkey, OTHER, 0x1010, write);
            assert_eq!(through_other.is_ok(), kind == WindowType::Type1);
            assert!(table.local(rkey, PD, 0x1010, 8, Access::empty()).is_err());
            assert!(table.remote(rkey, (PD + 1, QPN), 0x1010, 8, write).is_err());
            assert!(table.free_window(rkey) && !table.free_window(rkey));
            assert_eq!(at(&table, rkey, QPN, 0x1010, write), Err(KeyError::Key));
        }
        assert_eq!(table.deregister(keys.lkey, |_| ()), Ok(()));
    }

    #[test]
    fn addresses_of_a_zero_based_window_count_from_zero() {
        let (table, keys) = table();
        let window = table.alloc_window(PD, WindowType::Type2).unwrap();
        let access = Access::REMOTE_READ | Access::ZERO_BASED;
        let rkey = table.bind(&bind(window, keys, access), PD, QPN).unwrap();
        assert_eq!(at(&table, rkey, QPN, 0, Access::REMOTE_READ), Ok(0xabc0_0010));
        assert_eq!(at(&table, rkey, QPN, 9, Access::REMOTE_READ), Err(KeyError::Range));
    }

    #[test]
    fn invalid_windows_are_not_bound() {
        let (table, keys) = table();
        let window = table.alloc_window(PD, WindowType::Type2).unwrap();
        let good = bind(window, keys, Access::REMOTE_WRITE);
        let refused = |bind: Bind, pd| table.bind(&bind, pd, QPN).unwrap_err();
        assert_eq!(refused(good, PD + 1), BindError::Pd);
        assert_eq!(refused(Bind { window: keys.rkey, ..good }, PD), BindError::Window);
        assert_eq!(refused(Bind { window: 0, ..good }, PD), BindError::Window);
        // The low 8 bits are the program's, the others are the window's.
        assert_eq!(refused(Bind { window: window ^ 0x100, ..good }, PD), BindError::Window);
        assert_eq!(refused(Bind { lkey: keys.rkey, ..good }, PD), BindError::Region);
        assert_eq!(refused(Bind { lkey: 0, ..good }, PD), BindError::Region);
        assert_eq!(refused(Bind { lkey: window, ..good }, PD), BindError::Region);
        assert_eq!(refused(Bind { len: 0, ..good }, PD), BindError::State);
        assert_eq!(refused(Bind { addr: 0xfff, ..good }, PD), BindError::Range);
        assert_eq!(refused(Bind { len: 0xf1, ..good }, PD), BindError::Range);
        assert_eq!(refused(Bind { len: u64::MAX, ..good }, PD), BindError::Range);
        let flush = Access::FLUSH_GLOBAL;
        assert_eq!(refused(Bind { access: flush, ..good }, PD), BindError::Access(flush));
        let region =
            |pd, access| table.register(Region { pd, access, iova: 0x1000, len: 0x100, addr: 0 });
        for (pd, access, error) in [
            (PD, Access::LOCAL_WRITE, BindError::Access(Access::MW_BIND)),
            (PD, Access::MW_BIND, BindError::Access(Access::LOCAL_WRITE)),
            (PD + 1, ALL, BindError::Pd),
        ] {
            let lkey = region(pd, access).unwrap().lkey;
            assert_eq!(refused(Bind { lkey, ..good }, PD), error);
        }
        // A reader needs no right to write, and a window may open all of its region.
        let lkey = region(PD, Access::MW_BIND).unwrap().lkey;
        let whole = Bind { lkey, access: Access::REMOTE_READ, addr: 0x1000, len: 0x100, ..good };
        table.bind(&Bind { window: window ^ 0xff, ..whole }, PD, QPN).unwrap();
        assert_eq!(refused(good, PD), BindError::State);
    }

    #[test]
    fn a_region_stays_while_windows_are_bound_to_it() {
        let (table, keys) = table();
        let [one, two] = [WindowType::Type1, WindowType::Type2]
            .map(|kind| table.alloc_window(PD, kind).unwrap());
        table.bind(&bind(one, keys, Access::REMOTE_READ), PD, QPN).unwrap();
        let region = Region { pd: PD, access: ALL, iova: 0, len: 1, addr: 0 };
        assert_eq!(table.deregister(keys.lkey, |_| ()), Err(RetireError::Bound));
        assert_eq!(table.replace(keys, region, |_| ()), Err(RetireError::Bound));
        assert!(table.local(keys.lkey, PD, 0x1000, 1, Access::empty()).is_ok());
        // Bound anew, and then to nothing.
        table.bind(&bind(one, keys, Access::REMOTE_READ), PD, QPN).unwrap();
        table.bind(&Bind { len: 0, ..bind(one, keys, Access::empty()) }, PD, QPN).unwrap();
        let rkey = table.bind(&bind(two, keys, Access::REMOTE_READ), PD, QPN).unwrap();
        assert_eq!(table.deregister(keys.lkey, |_| ()), Err(RetireError::Bound));
        assert_eq!(table.invalidate(rkey, PD, None), Ok(()));
        assert_eq!(table.deregister(keys.lkey, |_| ()), Ok(()));
    }

    #[test]
    fn a_type_2_window_is_invalidated_once() {
        let (table, keys) = table();
        let [one, two] = [WindowType::Type1, WindowType::Type2]
            .map(|kind| table.alloc_window(PD, kind).unwrap());
        assert_eq!(table.invalidate(two, PD, Some(QPN)), Err(KeyError::Access));
        let one = table.bind(&bind(one, keys, Access::REMOTE_READ), PD, QPN).unwrap();
        let two = table.bind(&bind(two, keys, Access::REMOTE_READ), PD, QPN).unwrap();
        assert_eq!(table.invalidate(one, PD, Some(QPN)), Err(KeyError::Access));
        assert_eq!(table.invalidate(two, PD + 1, Some(QPN)), Err(KeyError::Pd));
        assert_eq!(table.invalidate(two, PD, Some(OTHER)), Err(KeyError::Access));
        assert_eq!(table.invalidate(two, PD, Some(QPN)), Ok(()));
        assert_eq!(table.invalidate(two, PD, Some(QPN)), Err(KeyError::Access));
        assert_eq!(at(&table, two, QPN, 0x1010, Access::REMOTE_READ), Err(KeyError::Access));
        let again = table.bind(&bind(two, keys, Access::REMOTE_READ), PD, OTHER).unwrap();
        assert_ne!(again, two);
        assert!(at(&table, again, OTHER, 0x1010, Access::REMOTE_READ).is_ok());
    }

    #[test]
    fn a_queue_pair_takes_its_windows_along() {
        let (table, keys) = table();
        let windows = [QPN, OTHER].map(|qpn| {
            let window = table.alloc_window(PD, WindowType::Type2).unwrap();
            table.bind(&bind(window, keys, Access::REMOTE_READ), PD, qpn).unwrap()
        });
        table.forget_qp(QPN);
        assert!(at(&table, windows[0], QPN, 0x1010, Access::REMOTE_READ).is_err());
        assert!(at(&table, windows[1], OTHER, 0x1010, Access::REMOTE_READ).is_ok());
        assert_eq!(table.deregister(keys.lkey, |_| ()), Err(RetireError::Bound));
        assert_eq!(table.deregister_bound(keys.lkey, |_| ()), Ok(()));
        assert!(at(&table, windows[1], OTHER, 0x1010, Access::REMOTE_READ).is_err());
        assert_eq!(table.deregister_bound(keys.lkey, |_| ()), Err(RetireError::Key));
    }

    #[test]
    fn a_region_takes_no_window_of_another_along() {
        let (table, keys) = table();
        let region = Region { pd: PD, access: ALL, iova: 0x1000, len: 0x100, addr: 0 };
        let other = table.register(region).unwrap();
        let [own, others] = [keys, other].map(|keys| {
            let window = table.alloc_window(PD, WindowType::Type1).unwrap();
            table.bind(&bind(window, keys, Access::REMOTE_READ), PD, QPN).unwrap()
        });
        assert_eq!(table.deregister_bound(keys.lkey, |_| ()), Ok(()));
        assert!(at(&table, own, QPN, 0x1010, Access::REMOTE_READ).is_err());
        assert!(at(&table, others, QPN, 0x1010, Access::REMOTE_READ).is_ok());
    }

    #[test]
    fn a_region_ends_however_often_windows_are_bound_to_it() {
        let (table, _) = table();
        for _ in 0..200 {
            let region = Region { pd: PD, access: ALL, iova: 0x1000, len: 0x100, addr: 0 };
            let Some(keys) = table.register(region) else { panic!("the table has room") };
            let window = table.alloc_window(PD, WindowType::Type1).unwrap();
            let to = Bind { rkey: window, ..bind(window, keys, Access::REMOTE_READ) };
            table.bind(&to, PD, QPN).unwrap();
            std::thread::scope(|s| {
                s.spawn(|| while table.bind(&to, PD, QPN).is_ok() {});
                assert_eq!(table.deregister_bound(keys.lkey, |_| ()), Ok(()));
            });
            assert!(at(&table, window, QPN, 0x1010, Access::REMOTE_READ).is_err());
            assert!(table.free_window(window));
        }
    }

    #[test]
    fn binding_and_looking_up_at_once() {
        let (table, keys) = table();
        let window = table.alloc_window(PD, WindowType::Type1).unwrap();
        std::thread::scope(|s| {
            s.spawn(|| {
                for len in [0u64, 16].into_iter().cycle().take(2000) {
                    let to = Bind { len, rkey: window, ..bind(window, keys, Access::REMOTE_READ) };
                    table.bind(&to, PD, QPN).unwrap();
                }
            });
            for _ in 0..20_000 {
                // Never half of one and half of the other.
                let found = at(&table, window, QPN, 0x1010, Access::REMOTE_READ);
                assert!(matches!(found, Ok(0xabc0_0010) | Err(_)), "{found:?}");
            }
        });
        table.free_window(window);
        assert_eq!(table.deregister(keys.lkey, |_| ()), Ok(()));
    }
}
