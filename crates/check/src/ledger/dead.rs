//! Objects that have ended, of which the program may still hold a pointer or a key.

use std::collections::VecDeque;

use crate::catalogue::Check;
use crate::facts::Kind;
use crate::map::Map;
use crate::stack::Stack;

use super::{Ledger, Object, here};

/// Objects that are remembered.
const MOST: usize = 4096;

/// The last objects that have ended, by address.
#[derive(Debug, Default)]
pub(super) struct Dead {
    objects: Map<usize, One>,
    /// Their addresses and numbers, the oldest first. Those that are not in `objects` under their number are of the past.
    order: VecDeque<(usize, u64)>,
    /// The number of the next one.
    next: u64,
}

/// An object that has ended.
#[derive(Clone, Debug)]
struct One {
    /// Tells it from others of its address.
    number: u64,
    kind: Kind,
    /// The number that the device gave it.
    device_number: Option<u32>,
    made: Stack,
    ended: Stack,
    /// The local key of a region.
    lkey: Option<u32>,
    is_reported: bool,
}

impl Dead {
    pub(super) fn add(&mut self, address: usize, object: Object, lkey: Option<u32>) {
        let (kind, device_number) = (object.kind, object.number);
        let (made, ended) = (object.stack, Stack::here());
        let number = self.next;
        self.next += 1;
        let one = One { number, kind, device_number, made, ended, lkey, is_reported: false };
        self.objects.insert(address, one);
        self.order.push_back((address, number));
        while self.order.len() > MOST
            && let Some((oldest, number)) = self.order.pop_front()
        {
            if self.objects.get(&oldest).is_some_and(|one| one.number == number) {
                self.objects.remove(&oldest);
            }
        }
    }

    /// The address is a new object's.
    pub(super) fn remove(&mut self, address: usize) {
        self.objects.remove(&address);
    }
}

impl Ledger {
    /// The program uses this address, where there is no live object. True if one has ended there, which is reported once.
    pub fn uses_dead(&mut self, address: usize) -> bool {
        let Some(one) = self.dead.objects.get_mut(&address) else { return false };
        if std::mem::replace(&mut one.is_reported, true) {
            return true;
        }
        let One { kind, device_number, made, ended, .. } = one.clone();
        let name = kind.name();
        let what = format!("the {} is used, and it has ended", kind.at(address, device_number));
        let ended = (format!("The {name} was ended here"), ended);
        let made = (format!("The {name} was made here"), made);
        self.report(Check::UseAfterDestroy, what, vec![here(Stack::here()), ended, made]);
        true
    }

    /// Where the region was registered and deregistered that had this local key.
    pub(super) fn dead_region(&self, lkey: u32) -> Option<[Stack; 2]> {
        let one = self.dead.objects.values().find(|one| one.lkey == Some(lkey))?;
        Some([one.made, one.ended])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Reporter;

    #[test]
    fn the_last_objects_of_an_address_that_is_used_again_are_remembered() {
        let mut ledger = Ledger::new(Reporter::new("", None), |_, _| false, |_, _| vec![]);
        let end = |ledger: &mut Ledger, address| {
            ledger.made(address, Kind::Mr, 0);
            ledger.ended(address);
        };
        end(&mut ledger, 1);
        (0..MOST).for_each(|_| end(&mut ledger, 2));
        assert!(ledger.dead.order.len() <= MOST);
        assert!(!ledger.uses_dead(1) && ledger.uses_dead(2));
        ledger.made(2, Kind::Mr, 0);
        assert!(!ledger.uses_dead(2));
    }
}
