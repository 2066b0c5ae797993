//! Requests that were sent: their number, and the slots that answered.
//!
//! A request carries no slot, so it reaches any process of the host that it is for. On this host the store tells the
//! listener. For another host this process remembers the slot that answered last. If that is wrong, it only costs the
//! receiving host a hand-over. A repetition of a request takes another way than the first, since it may have reached a
//! process that is stopped.

use std::collections::HashMap;

use anyverbs_proto::cm::id::ServiceId;
use anyverbs_proto::types::Gid;

/// Most that are remembered, of each kind.
const MOST: usize = 4096;

type Service = (Gid, ServiceId);

#[derive(Debug, Default)]
pub(super) struct Requests {
    /// By transaction: the service, and the number of times it was asked.
    asked: HashMap<u64, (Service, u8)>,
    /// The slot that answered last.
    answered: HashMap<Service, u8>,
}

impl Requests {
    /// A request is to be sent. Returns the slot that answered the last such request, and the number of times that this
    /// one was sent.
    pub(super) fn ask(
        &mut self,
        transaction: u64,
        dgid: Gid,
        service: ServiceId,
    ) -> (Option<u8>, u8) {
        if self.asked.len() >= MOST && !self.asked.contains_key(&transaction) {
            self.asked.clear();
        }
        let service = (dgid, service);
        let (_, n) = self.asked.entry(transaction).or_insert((service, 0));
        let before = *n;
        *n = n.wrapping_add(1);
        // A process that no longer answers may be stopped.
        let slot = if before == 0 { self.answered.get(&service).copied() } else { None };
        (slot, before)
    }

    /// A process accepted.
    pub(super) fn answered(&mut self, transaction: u64, from: Gid, slot: u8) {
        let Some((service, _)) = self.asked.remove(&transaction) else { return };
        if service.0 == from {
            if self.answered.len() >= MOST {
                self.answered.clear();
            }
            self.answered.insert(service, slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slot_that_answered_is_asked_first_and_once() {
        let (a, b) = (Gid([1; 16]), Gid([2; 16]));
        let service = ServiceId(7);
        let mut requests = Requests::default();
        assert_eq!(requests.ask(1, a, service), (None, 0));
        assert_eq!(requests.ask(1, a, service), (None, 1));
        requests.answered(1, b, 9);
        assert_eq!(requests.ask(2, a, service), (None, 0), "a stranger's answer");
        requests.answered(2, a, 5);
        assert_eq!(requests.ask(3, b, service), (None, 0));
        assert_eq!(requests.ask(4, a, service), (Some(5), 0));
        assert_eq!(requests.ask(4, a, service), (None, 1));
        for n in 100..3 * MOST as u64 {
            requests.ask(n, a, service);
            requests.answered(n, a, 5);
            requests.ask(n, a, ServiceId(n));
        }
        assert!(requests.asked.len() <= MOST && requests.answered.len() <= MOST);
    }
}
