//! Memory that vanishes although the program has it: a script of faults lets it.
//!
//! The table gives an address at which nothing is. So an access fails as where the program has unmapped the memory, and as late: the
//! packets before it have been copied.

use std::fmt::Debug;
use std::sync::atomic::Ordering;

use crate::{Access, Hold, KeyError, MrTable, Region, Slot, index};

/// Added to an address, the same place of the kernel's half of the address space, which no program can touch.
const NOWHERE: u64 = 0xffff_8000_0000_0000;

/// Says which memory of regions is gone.
pub trait Vanishing: Debug + Send + Sync {
    /// A device has a new region, which is entered at this place of the table.
    fn registered(&self, place: usize, device: usize, addr: u64);

    /// The region at a place is changed: it begins at another address. No access to it is in progress, and none begins before this
    /// returns.
    fn moved(&self, place: usize, addr: u64);

    /// Whether some of `len` bytes at an address of the region at a place are gone. If so, an access fails by that.
    fn is_gone(&self, place: usize, addr: u64, len: u64) -> bool;

    /// A request has failed at these bytes. Whether that was because some of them were gone: [`is_gone`](Self::is_gone) said so to it.
    fn has_failed(&self, place: usize, addr: u64, len: u64) -> bool;
}

impl MrTable {
    /// Lets memory vanish, of regions that are entered from now on. Once.
    pub fn let_vanish(&self, vanishing: &'static dyn Vanishing) {
        let is_first = self.vanishing.set(vanishing).is_ok();
        debug_assert!(is_first, "a process has one script of faults");
    }

    /// The script that lets memory vanish.
    #[must_use]
    pub fn vanishing(&self) -> Option<&'static dyn Vanishing> {
        self.vanishing.get().copied()
    }

    /// A region whose memory may vanish has a mark.
    pub(super) fn marked(&self, mut region: Region) -> Region {
        if self.vanishing.get().is_some() && !region.access.contains(Access::NULL) {
            region.access |= Access::MAY_VANISH;
        }
        region
    }
}

impl Hold<'_> {
    /// Tells whether the memory has vanished. An access that copies finds that by itself.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.addr() & NOWHERE == NOWHERE
    }
}

impl Slot {
    /// As [`place`](Self::place), for a slot that lacks a right, or whose memory may vanish.
    #[cold]
    #[inline(never)]
    pub(super) fn place_of_vanishing(
        &self,
        table: &MrTable,
        (va, len): (u64, u64),
        need: Access,
    ) -> Result<(u64, Access), KeyError> {
        let access = self.access();
        if !access.contains(need) {
            return Err(KeyError::Access);
        }
        let addr = self.addr_of(va, len)?;
        let vanishing = self.vanishing(table);
        let gone = vanishing.is_some_and(|(vanishing, place)| vanishing.is_gone(place, addr, len));
        Ok((if gone { addr | NOWHERE } else { addr }, access))
    }

    /// The script that may let the memory vanish, and the place of its region.
    pub(super) fn vanishing(&self, table: &MrTable) -> Option<(&'static dyn Vanishing, usize)> {
        let access = self.access();
        let vanishing = table.vanishing().filter(|_| access.contains(Access::MAY_VANISH))?;
        let is_window = access.contains(Access::WINDOW);
        // A window lies in the region that it is bound to.
        let lkey = if is_window { &self.bound } else { &self.lkey };
        Some((vanishing, index(lkey.load(Ordering::Relaxed))))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{Bind, Finding, LastLocal, LastRemote, WindowType};

    /// The byte at this address is gone.
    const GONE: u64 = 0xabc0_0080;

    /// The calls that came.
    #[derive(Debug, Default)]
    struct Seen(Mutex<Vec<(&'static str, usize, u64)>>);

    impl Vanishing for Seen {
        fn registered(&self, place: usize, _: usize, addr: u64) {
            self.0.lock().unwrap().push(("registered", place, addr));
        }

        fn moved(&self, place: usize, addr: u64) {
            self.0.lock().unwrap().push(("moved", place, addr));
        }

        fn is_gone(&self, _: usize, addr: u64, len: u64) -> bool {
            (addr..addr + len).contains(&GONE)
        }

        fn has_failed(&self, place: usize, addr: u64, len: u64) -> bool {
            let is_it = (addr..addr + len).contains(&GONE);
            if is_it {
                self.0.lock().unwrap().push(("failed", place, addr));
            }
            is_it
        }
    }

    const REGION: Region = Region {
        pd: 7,
        access: Access::LOCAL_WRITE.union(Access::REMOTE_READ).union(Access::MW_BIND),
        iova: 0x1000,
        len: 0x100,
        addr: 0xabc0_0000,
    };

    fn table() -> (MrTable, &'static Seen) {
        let (table, seen): (_, &Seen) = (MrTable::new(10, 1), Box::leak(Box::default()));
        table.let_vanish(seen);
        (table, seen)
    }

    #[test]
    fn what_is_gone_lies_where_nothing_can_be_and_the_rest_where_it_was() {
        let (table, _) = table();
        let keys = table.register(REGION).unwrap();
        let (mut local, mut remote) = (LastLocal::default(), LastRemote::default());
        for (va, len, is_gone) in
            [(0x1000, 0x80, false), (0x1081, 0x7f, false), (0x1000, 0x81, true), (0x1080, 1, true)]
        {
            let at = REGION.addr + va - REGION.iova;
            let wanted = if is_gone { at | NOWHERE } else { at };
            let none = Access::empty();
            assert_eq!(table.local(keys.lkey, 7, va, len, none).unwrap().addr(), wanted);
            let read = Access::REMOTE_READ;
            assert_eq!(table.remote(keys.rkey, (7, 1), va, len, read).unwrap().addr(), wanted);
            assert_eq!(local.find(&table, keys.lkey, 7, va, len, none), Ok(Some(wanted)));
            assert_eq!(remote.find(&table, keys.rkey, (7, 1), va, len, read), Ok(wanted));
        }
    }

    #[test]
    fn mistakes_are_found_before_what_is_gone() {
        let (table, _) = table();
        let keys = table.register(REGION).unwrap();
        let local = |pd, va, need| table.local(keys.lkey, pd, va, 1, need).map(|hold| hold.addr());
        assert_eq!(local(8, 0x1080, Access::empty()), Err(KeyError::Pd));
        assert_eq!(local(7, 0x1080, Access::REMOTE_WRITE), Err(KeyError::Access));
        assert_eq!(local(7, 0x1100, Access::empty()), Err(KeyError::Range));
        let null = table.register(Region { access: Access::NULL, ..REGION }).unwrap();
        let hold = table.local(null.lkey, 7, 0x1080, 1, Access::empty()).unwrap();
        assert!(hold.is_null() && hold.addr() == GONE, "no memory, none that vanishes");
    }

    #[test]
    fn a_window_loses_what_its_region_loses() {
        let (table, seen) = table();
        let keys = table.register(REGION).unwrap();
        for kind in [WindowType::Type1, WindowType::Type2] {
            let window = table.alloc_window(7, kind).unwrap();
            let access = Access::REMOTE_READ;
            let bind = Bind { window, rkey: 1, lkey: keys.lkey, access, addr: 0x1070, len: 0x20 };
            let rkey = table.bind(&bind, 7, 5).unwrap();
            let remote = |va| table.remote(rkey, (7, 5), va, 1, access).unwrap().addr();
            assert_eq!((remote(0x1070), remote(0x1080)), (0xabc0_0070, GONE | NOWHERE));
            let found = table.diagnose_remote(rkey, (7, 5), (0x1070, 0x20), access);
            assert_eq!(found, Finding::Vanished);
            assert_eq!(
                seen.0.lock().unwrap().pop(),
                Some(("failed", index(keys.lkey), 0xabc0_0070))
            );
            assert!(table.free_window(rkey));
        }
    }

    #[test]
    fn a_changed_region_may_vanish_as_before() {
        let (table, seen) = table();
        let keys = table.register(REGION).unwrap();
        let moved = Region { addr: REGION.addr + 0x80, ..REGION };
        table.replace(keys, moved, |_| ()).unwrap();
        let addr = |va| table.local(keys.lkey, 7, va, 1, Access::empty()).unwrap().addr();
        assert_eq!((addr(0x1000), addr(0x1080)), (GONE | NOWHERE, 0xabc0_0100));
        assert_eq!(seen.0.lock().unwrap().pop(), Some(("moved", index(keys.lkey), moved.addr)));
        let local = |range| table.diagnose_local(keys.lkey, 7, range, Access::empty());
        assert_eq!(local((0x1001, 1)), Finding::Nothing);
        assert!(seen.0.lock().unwrap().is_empty());
        assert_eq!(local((0x1000, 8)), Finding::Vanished);
        assert_eq!(seen.0.lock().unwrap().pop(), Some(("failed", index(keys.lkey), GONE)));
    }

    /// Tries to use a region while it is changed.
    #[derive(Debug)]
    struct Tries {
        table: MrTable,
        keys: std::sync::OnceLock<crate::Keys>,
        found: std::sync::OnceLock<Option<KeyError>>,
    }

    impl Vanishing for Tries {
        fn registered(&self, _: usize, _: usize, _: u64) {}

        fn moved(&self, _: usize, _: u64) {
            let keys = self.keys.get().unwrap();
            let used = self.table.local(keys.lkey, 7, REGION.iova, 1, Access::empty());
            self.found.set(used.err()).unwrap();
        }

        fn is_gone(&self, _: usize, _: u64, _: u64) -> bool {
            false
        }

        fn has_failed(&self, _: usize, _: u64, _: u64) -> bool {
            false
        }
    }

    #[test]
    fn no_access_comes_before_the_script_knows_of_the_change() {
        let (keys, found) = (Default::default(), Default::default());
        let tries: &Tries = Box::leak(Box::new(Tries { table: MrTable::new(10, 1), keys, found }));
        tries.table.let_vanish(tries);
        let keys = tries.table.register(REGION).unwrap();
        tries.keys.set(keys).unwrap();
        tries.table.replace(keys, Region { addr: REGION.addr + 0x80, ..REGION }, |_| ()).unwrap();
        assert_eq!(tries.found.get(), Some(&Some(KeyError::Key)));
    }
}
