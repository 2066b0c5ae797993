//! Numbers of protection domains.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use anyverbs_locks::{Mutex, rank};

/// The numbers that are in use. The slot stands in their top byte, so that no other process of the host has the same.
#[derive(Debug)]
pub struct PdNumbers {
    slot: u8,
    state: Mutex<rank::ProtectionDomainNumbers, State>,
}

#[derive(Debug, Default)]
struct State {
    last: u32,
    /// The device of each.
    live: HashMap<u32, usize>,
}

/// The greatest, without the slot: with the last slot it makes no number of all ones, which is no domain's.
const LAST: u32 = (1 << 24) - 2;

impl PdNumbers {
    /// Numbers of a slot.
    pub fn new(slot: u8) -> Self {
        Self { slot, state: Mutex::default() }
    }

    /// A number that no protection domain has, for one of this device.
    pub(crate) fn take(&self, device: usize) -> u32 {
        let mut state = self.state.lock();
        loop {
            state.last = state.last % LAST + 1;
            let number = u32::from(self.slot) << 24 | state.last;
            if let Entry::Vacant(entry) = state.live.entry(number) {
                entry.insert(device);
                return number;
            }
        }
    }

    /// The device of the live domain whose number has these lower 24 bits.
    pub fn device_of(&self, number: u32) -> Option<usize> {
        let number = u32::from(self.slot) << 24 | number;
        self.state.lock().live.get(&number).copied()
    }

    /// The domain with this number has ended.
    pub(crate) fn give_back(&self, number: u32) {
        self.state.lock().live.remove(&number);
    }
}
