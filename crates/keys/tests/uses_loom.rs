//! The lookup of memory keys against registration and deregistration, under every interleaving and every reordering that the
//! memory model allows.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::atomic::Ordering;

use anyverbs_keys::uses::{Uses, Word};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

/// A word of the model checker. Without `ORDERED` every access is relaxed, to show that the models notice.
#[derive(Default)]
struct Model<const ORDERED: bool>(loom::sync::atomic::AtomicU64);

impl<const ORDERED: bool> Model<ORDERED> {
    fn order(wanted: Ordering) -> Ordering {
        if ORDERED { wanted } else { Ordering::Relaxed }
    }
}

impl<const ORDERED: bool> Word for Model<ORDERED> {
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(Self::order(order))
    }

    fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_add(value, Self::order(order))
    }

    fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_sub(value, Self::order(order))
    }

    fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
        self.0.fetch_or(bits, Self::order(order))
    }

    fn fetch_and(&self, bits: u64, order: Ordering) -> u64 {
        self.0.fetch_and(bits, Self::order(order))
    }

    fn pause(&self, _: u32) {
        thread::yield_now();
    }
}

/// A slot of the table: its state, and the region behind it. The model checker finds an access to the region that is
/// not ordered with another one.
#[derive(Default)]
struct Slot<const ORDERED: bool> {
    uses: Uses<Model<ORDERED>>,
    region: UnsafeCell<u64>,
}

// SAFETY: this test checks that accesses of `region` exclude each other.
unsafe impl<const ORDERED: bool> Sync for Slot<ORDERED> {}
// SAFETY: as above.
unsafe impl<const ORDERED: bool> Send for Slot<ORDERED> {}

impl<const ORDERED: bool> Slot<ORDERED> {
    fn register(&self, region: u64) {
        // SAFETY: the model checker finds out whether another thread is there.
        self.region.with_mut(|at| unsafe { *at = region });
        self.uses.open();
    }

    fn deregister(&self) {
        self.uses.close();
        self.uses.drain();
        // SAFETY: as above. The memory is the program's again, which writes it.
        self.region.with_mut(|at| unsafe { *at = 0 });
    }

    fn access(&self) -> Option<u64> {
        let _use = self.uses.begin()?;
        // SAFETY: as above.
        Some(self.region.with(|at| unsafe { *at }))
    }
}

fn lookups_against_registration<const ORDERED: bool>() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let slot = Arc::new(Slot::<ORDERED>::default());
        let peers: Vec<_> = (0..2)
            .map(|_| {
                let slot = slot.clone();
                thread::spawn(move || {
                    let found = slot.access();
                    assert!(matches!(found, None | Some(1 | 2)), "{found:?}");
                })
            })
            .collect();
        slot.register(1);
        slot.deregister();
        // The slot has another owner: a dead key's access may still count itself in and out.
        slot.register(2);
        assert_eq!(slot.access(), Some(2));
        slot.deregister();
        assert_eq!(slot.access(), None);
        for peer in peers {
            peer.join().unwrap();
        }
    });
}

#[test]
fn an_access_has_the_region_for_itself_until_its_end() {
    lookups_against_registration::<true>();
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_its_order_it_has_not() {
    lookups_against_registration::<false>();
}

/// A waiter that starts before the bit is cleared lets an access in behind itself.
#[test]
#[should_panic(expected = "Causality violation")]
fn waiting_before_closing_is_too_early() {
    loom::model(|| {
        let slot = Arc::new(Slot::<true>::default());
        slot.register(1);
        let peer = {
            let slot = slot.clone();
            thread::spawn(move || slot.access())
        };
        slot.uses.drain();
        slot.uses.close();
        // SAFETY: as above.
        slot.region.with_mut(|at| unsafe { *at = 0 });
        peer.join().unwrap();
    });
}
