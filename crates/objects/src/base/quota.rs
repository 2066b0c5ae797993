//! How many objects of each kind the device holds.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::limits::{Bound, DeviceAttr, bound};

/// The limit and the number of objects of a kind.
#[derive(Debug)]
pub struct Quota {
    /// The objects, for people.
    pub(super) what: &'static str,
    /// The name of the limit.
    pub(super) limit: &'static str,
    pub(super) max: u32,
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
    fn new(what: &'static str, bound: Bound, attr: &DeviceAttr) -> Self {
        Self { what, limit: bound.name, max: (bound.of)(attr), used: AtomicU32::new(0) }
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
    /// A place for an object in both quotas.
    ///
    /// # Errors
    /// The quota that has none.
    pub(super) fn of(
        device: &'static Quota,
        process: &'static Quota,
    ) -> Result<Self, &'static Quota> {
        Ok(Self(device.take().ok_or(device)?, process.take().ok_or(process)?))
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
            pd: Quota::new("protection domains", bound!(max_pd), attr),
            mr: Quota::new("memory regions", bound!(max_mr), attr),
            mw: Quota::new("memory windows", bound!(max_mw), attr),
            cq: Quota::new("completion queues", bound!(max_cq), attr),
            srq: Quota::new("shared receive queues", bound!(max_srq), attr),
            // The device has no limit of its own for them.
            xrcd: Quota::new("XRC domains", bound!(max_pd), attr),
            wq: Quota::new("work queues", bound!(max_wq), attr),
            ind_table: Quota::new("indirection tables", bound!(max_rwq_ind_tables), attr),
            ah: Quota::new("address handles", bound!(max_ah), attr),
            qp: Quota::new("queue pairs", bound!(max_qp), attr),
            comp_cntr: Quota::new("completion counters", bound!(max_comp_cntr), attr),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Quota;
    use crate::limits::{self, DeviceAttr, bound};

    #[test]
    fn a_quota_is_whole_again_when_all_is_returned() {
        let attr = DeviceAttr { max_qp: 3, ..limits::DEFAULT };
        let quota: &'static Quota =
            Box::leak(Box::new(Quota::new("queue pairs", bound!(max_qp), &attr)));
        for _ in 0..3 {
            let tickets: Vec<_> = std::iter::from_fn(|| quota.take()).collect();
            assert_eq!(tickets.len(), 3);
            assert!(quota.take().is_none());
        }
        assert!(quota.take().is_some());
    }
}
