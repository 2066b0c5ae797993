//! Holders of objects: an object with holders is not destroyed (`EBUSY`), and the log names them.
//!
//! Lock-free, so that a forked child can drop inherited objects.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::base::Core;
use crate::error::{DestroyError, Useless};

/// The kind of an object that holds another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Holder {
    /// Memory region.
    Mr,
    /// Address handle.
    Ah,
    /// Queue pair.
    Qp,
    /// Shared receive queue.
    Srq,
    /// Completion queue.
    Cq,
    /// Parent domain.
    ParentDomain,
    /// Memory window.
    Mw,
    /// Buffer.
    Buf,
    /// Work queue.
    Wq,
    /// Indirection table.
    IndTable,
    /// Flow rule.
    Flow,
}

const NAMES: [&str; 11] = [
    "MR",
    "AH",
    "QP",
    "SRQ",
    "CQ",
    "parent domain",
    "MW",
    "buffer",
    "WQ",
    "indirection table",
    "flow rule",
];
const DEAD: u32 = 1 << 31;

/// The holders of one object, by kind.
#[derive(Debug, Default)]
pub struct Holders {
    /// All of them; with the [`DEAD`] bit once the object is destroyed.
    total: AtomicU32,
    kinds: [AtomicU32; NAMES.len()],
}

impl Holders {
    /// Whether the object was destroyed.
    pub fn is_dead(&self) -> bool {
        self.total.load(Ordering::Acquire) & DEAD != 0
    }

    /// Whether the object, which is `core`'s, can be used.
    #[inline]
    pub fn check(&self, core: &'static Core) -> Result<(), Useless> {
        if !core.is_current() {
            return Err(Useless::Forked);
        }
        if self.is_dead() { Err(Useless::Gone) } else { Ok(()) }
    }

    /// Whether somebody holds it.
    pub fn is_held(&self) -> bool {
        self.total.load(Ordering::Acquire) & !DEAD != 0
    }

    fn acquire(&self, kind: Holder) -> bool {
        let alive = self.total.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| {
            (n & DEAD == 0).then_some(n + 1)
        });
        if alive.is_ok() {
            self.kinds[kind as usize].fetch_add(1, Ordering::Relaxed);
        }
        alive.is_ok()
    }

    fn release(&self, kind: Holder) {
        self.kinds[kind as usize].fetch_sub(1, Ordering::Relaxed);
        self.total.fetch_sub(1, Ordering::AcqRel);
    }

    /// The identity of these holders.
    pub fn id(&self) -> u64 {
        std::ptr::from_ref(self).addr() as u64
    }

    /// Marks the object destroyed if it has no holder.
    pub fn retire(&self) -> Result<(), DestroyError> {
        match self.total.compare_exchange(0, DEAD, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(n) if n & DEAD != 0 => Err(DestroyError::Gone),
            Err(_) => Err(DestroyError::Busy(self.describe())),
        }
    }

    fn describe(&self) -> String {
        let parts: Vec<_> = NAMES
            .iter()
            .zip(&self.kinds)
            .map(|(name, n)| (name, n.load(Ordering::Relaxed)))
            .filter(|(_, n)| *n > 0)
            .map(|(name, n)| format!("{n} {name}"))
            .collect();
        parts.join(", ")
    }
}

/// An object that others can hold.
pub trait Holdable {
    /// Its holders.
    fn holders(&self) -> &Holders;
}

/// A hold on an object, given up by drop.
#[derive(Debug)]
pub struct Held<T: Holdable> {
    object: Arc<T>,
    kind: Holder,
}

impl<T: Holdable> Held<T> {
    /// Holds `object`; `None` if it was destroyed.
    pub fn new(object: &Arc<T>, kind: Holder) -> Option<Self> {
        object.holders().acquire(kind).then(|| Self { object: Arc::clone(object), kind })
    }

    /// The object.
    pub(crate) fn arc(&self) -> &Arc<T> {
        &self.object
    }
}

impl<T: Holdable> std::ops::Deref for Held<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.object
    }
}

impl<T: Holdable> Drop for Held<T> {
    fn drop(&mut self) {
        self.object.holders().release(self.kind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default)]
    struct Thing(Holders);
    impl Holdable for Thing {
        fn holders(&self) -> &Holders {
            &self.0
        }
    }

    // S1.9
    #[test]
    fn a_held_object_is_busy_and_names_its_holders() {
        let thing = Arc::new(Thing::default());
        let a = Held::new(&thing, Holder::Mr).unwrap();
        let b = Held::new(&thing, Holder::Mr).unwrap();
        let c = Held::new(&thing, Holder::Qp).unwrap();
        assert_eq!(thing.0.retire(), Err(DestroyError::Busy("2 MR, 1 QP".into())));
        drop((a, b, c));
        assert_eq!(thing.0.retire(), Ok(()));
        assert_eq!(thing.0.retire(), Err(DestroyError::Gone));
        assert!(Held::new(&thing, Holder::Mr).is_none());
        assert!(thing.0.is_dead());
    }
}
