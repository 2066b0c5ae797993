//! Requests that are repeated when their listener is no more: the process that was asked has the connection still.
//!
//! A process with such connections enters that in the store of the host, since nothing in a request tells. A request
//! without a listener goes through these processes, in the order of their slots, until one knows it; the last refuses
//! it. One whose queue is full is passed over. It may be stopped, and another client of a closed port should get its
//! answer.

use std::sync::atomic::Ordering;

use anyverbs_net::forward::Forwarded;
use anyverbs_objects::base::NEVER;
use anyverbs_proto::cm::mad::Mad;
use anyverbs_proto::cm::{Cm, LONGEST_WAIT};
use anyverbs_proto::counters::Counter;
use anyverbs_proto::time::Time;

use super::Incoming;
use super::{Events, Gsi};

impl<I: Events> Gsi<I> {
    /// A listener is no more. Its clients repeat their requests for as long as anybody waits for an answer.
    pub(super) fn linger(&self, machine: &Cm, now: Time) {
        if !machine.may_be_asked_again() {
            return;
        }
        let mut lingering = self.lingering.lock();
        if lingering.is_none() {
            *lingering = Some(self.services.linger());
        }
        self.times.linger_until.store((now + LONGEST_WAIT).as_nanos(), Ordering::SeqCst);
    }

    /// The peers have stopped asking.
    pub(super) fn linger_no_longer(&self) {
        let mut lingering = self.lingering.lock();
        *lingering = None;
        self.times.linger_until.store(NEVER, Ordering::SeqCst);
    }

    /// Tells whether a request without a listener ends here. If not, it was forwarded.
    pub(super) fn is_asked_in_vain(&self, incoming: &Incoming<'_>, mad: &Mad) -> bool {
        let others = self.services.lingering();
        if others.is_empty() {
            return true;
        }
        let state = self.state.lock();
        let is_known = state.machine.knows_request(&incoming.arrival, mad);
        drop(state);
        let least = if incoming.was_forwarded { self.transport.core.slot } else { 0 };
        let handed_on = !is_known
            && others.into_iter().filter(|slot| *slot > least).any(|slot| {
                self.transport.links.port.forward(slot, &incoming.datagram) == Forwarded::Sent
            });
        if handed_on {
            self.transport.core.count_for_none(Counter::Forwarded, 1);
            self.note_forwarded(self.transport.core.now());
        }
        !handed_on
    }
}
