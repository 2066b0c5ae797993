//! How many objects of each kind the device holds.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::limits::DeviceAttr;

/// The limit and the number of objects of a kind.
#[derive(Debug)]
pub struct Quota {
    max: u32,
    used: AtomicU32,
}

/// One object's place in the quotas of its process and of its device, given back by drop.
#[derive(Debug)]
#[expect(dead_code, reason = "held for their drop")]
pub struct Ticket(Place, Place);

/// A place in a quota.
#[derive(Debug)]
struct Place(&'static Quota);

impl Quota {
    fn new(max: u32) -> Self {
        Self { max, used: AtomicU32::new(0) }
    }

    /// Objects that exist.
    #[must_use]
    pub fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }

    fn take(&'static self) -> Option<Place> {
        let used = self
            .used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < self.max).then_some(n + 1));
        // A ticket that is made is given back: not before there is a place.
        used.is_ok().then(|| Place(self))
    }
}

impl Ticket {
    /// A place for an object, if both quotas have one.
    pub(super) fn of(process: &'static Quota, device: &'static Quota) -> Option<Self> {
        Some(Self(process.take()?, device.take()?))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Objects of each type that may still be made.
#[derive(Debug)]
pub struct Quotas {
    /// Protection domains.
    pub pd: Quota,
    /// Memory regions.
    pub mr: Quota,
    /// Memory windows.
    pub mw: Quota,
    /// Completion queues.
    pub cq: Quota,
    /// Shared receive queues.
    pub srq: Quota,
    /// XRC domains.
    pub xrcd: Quota,
    /// Work queues.
    pub wq: Quota,
    /// Indirection tables.
    pub ind_table: Quota,
    /// Address handles.
    pub ah: Quota,
    /// Queue pairs.
    pub qp: Quota,
    pub(crate) comp_cntr: Quota,
}

impl Quotas {
    /// As many as the attributes say.
    pub fn new(attr: &DeviceAttr) -> Self {
        Self {
            pd: Quota::new(attr.max_pd),
            mr: Quota::new(attr.max_mr),
            mw: Quota::new(attr.max_mw),
            cq: Quota::new(attr.max_cq),
            srq: Quota::new(attr.max_srq),
            // The device has no limit of its own for them.
            xrcd: Quota::new(attr.max_pd),
            wq: Quota::new(attr.max_wq),
            ind_table: Quota::new(attr.max_rwq_ind_tables),
            ah: Quota::new(attr.max_ah),
            qp: Quota::new(attr.max_qp),
            comp_cntr: Quota::new(attr.max_comp_cntr),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Quota;

    #[test]
    fn a_quota_is_whole_again_when_all_is_returned() {
        let quota: &'static Quota = Box::leak(Box::new(Quota::new(3)));
        for _ in 0..3 {
            let tickets: Vec<_> = std::iter::from_fn(|| quota.take()).collect();
            assert_eq!(tickets.len(), 3);
            assert!(quota.take().is_none());
        }
        assert!(quota.take().is_some());
    }
}
