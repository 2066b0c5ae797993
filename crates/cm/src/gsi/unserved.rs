//! Requests for services without a listener are kept for a moment before they are refused, if a listener may be about
//! to come. That is the case if a process holds the port, or has listened there a moment ago.
//!
//! Programs stop listening and start again, and their clients come back at once (perftest between its two connections).
//! Other devices take milliseconds to make the objects that a client needs for its request, this one microseconds. A
//! client that never met a closed port there would always meet one here. A process that stops listening enters that in
//! the store of the host.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use anyverbs_net::Datagram;
use anyverbs_net::host::LOOK_AGAIN;
use anyverbs_objects::base::NEVER;
use anyverbs_proto::cm::id::ServiceId;
use anyverbs_proto::cm::mad::Mad;
use anyverbs_proto::cm::{LONGEST_WAIT, Recipient, recipient};
use anyverbs_proto::qp::Arrival;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::Gid;

use super::Incoming;
use super::{Events, Gsi};

/// The number of looks for a listener. They come after [`LOOK_AGAIN`], and after twice as long each time: for 127 ms in all.
const LOOKS: u32 = 8;
/// More are refused at once.
const MOST: usize = 64;

/// A request that waits for a listener.
#[derive(Debug)]
pub(super) struct Unserved {
    /// Its bytes are in `bytes`.
    datagram: Datagram<'static>,
    bytes: Box<[u8]>,
    arrival: Arrival,
    mad: Mad,
    looks: u32,
    at: Time,
}

/// A program may come back in another port space (perftest for UD), so only the port counts.
fn port_of(service_id: ServiceId) -> u64 {
    service_id.0 & 0xffff
}

/// The listeners of services, with their places. They are looked for once for all requests.
type Listeners = HashMap<(ServiceId, Gid), Option<u8>>;

impl<I: Events> Gsi<I> {
    /// Keeps a request without a listener, once. False if it is to be answered now: this process listens, or was asked
    /// before, or too many wait.
    pub(super) fn keep_for_listener(&self, now: Time, incoming: &Incoming<'_>, mad: &Mad) -> bool {
        let arrival = incoming.arrival;
        if self.state.lock().machine.awaits_request(&arrival, mad) {
            return false;
        }
        let mut unserved = self.unserved.lock();
        let from = |arrival: &Arrival| (arrival.source, arrival.interface);
        let is_repeated = |r: &Unserved| from(&r.arrival) == from(&arrival) && r.mad == *mad;
        if unserved.iter().any(is_repeated) {
            return true;
        }
        if unserved.len() >= MOST {
            return false;
        }
        let request = Unserved {
            datagram: Datagram { bytes: &[], ..incoming.datagram },
            bytes: incoming.datagram.bytes.into(),
            arrival,
            mad: mad.clone(),
            looks: 0,
            at: now + LOOK_AGAIN,
        };
        self.look_for_listeners_at(request.at);
        unserved.push(request);
        true
    }

    /// A listener has ended: it may come back for clients that repeat their requests. perftest's two ends sleep a second each
    /// before the one listens again and the other asks.
    pub(crate) fn leave_service(&self, service_id: ServiceId) {
        match self.services.leave(port_of(service_id), LONGEST_WAIT) {
            Ok(()) => self.forget_left(self.transport.core.now()),
            Err(error) => tracing::debug!(%error, "a listener that may come back is not expected"),
        }
    }

    /// Whether somebody listened there a moment ago.
    pub(super) fn was_left(&self, service_id: ServiceId) -> bool {
        self.services.was_left(port_of(service_id))
    }

    /// Drops listeners that did not come back in time.
    pub(super) fn forget_left(&self, now: Time) {
        let next = self.services.forget_left().map_or(NEVER, |wait| (now + wait).as_nanos());
        self.times.left_until.store(next, Ordering::SeqCst);
        self.transport.links.waker.wake_before(next);
    }

    fn look_for_listeners_at(&self, at: Time) {
        self.times.unserved_at.fetch_min(at.as_nanos(), Ordering::SeqCst);
        self.transport.links.waker.wake_before(at.as_nanos());
    }

    /// Gives the waiting requests to present listeners; refuses those that have waited long enough.
    pub(super) fn look_for_listeners(&'static self, now: Time) {
        let due: Vec<Unserved> = {
            let mut unserved = self.unserved.lock();
            self.times.unserved_at.store(NEVER, Ordering::SeqCst);
            let due = unserved.extract_if(.., |request| request.at <= now).collect();
            if let Some(next) = unserved.iter().map(|request| request.at).min() {
                self.look_for_listeners_at(next);
            }
            due
        };
        let mut listeners = Listeners::new();
        let ended: Vec<_> =
            due.into_iter().filter_map(|r| self.served(now, r, &mut listeners)).collect();
        if !ended.is_empty() {
            self.drive_cm(|machine, _, now| {
                for request in ended {
                    machine.handle_mad(now, &request.arrival, &request.mad);
                }
            });
        }
    }

    /// A request for this process, or for none. `None`: it was forwarded, or waits on.
    fn served(
        &self,
        now: Time,
        mut request: Unserved,
        listeners: &mut Listeners,
    ) -> Option<Unserved> {
        let Recipient::Service(service_id) = recipient(&request.mad) else { return Some(request) };
        let at = request.arrival.destination;
        let listener =
            listeners.entry((service_id, at)).or_insert_with(|| self.listener(service_id, at));
        match *listener {
            Some(slot) if slot != self.transport.core.slot => {
                let datagram = Datagram { bytes: &request.bytes, ..request.datagram };
                (!self.hand_on(now, slot, &datagram)).then_some(request)
            }
            _ if self.state.lock().machine.awaits_request(&request.arrival, &request.mad) => {
                Some(request)
            }
            _ if request.looks + 1 < LOOKS => {
                request.looks += 1;
                request.at = now + LOOK_AGAIN * 2u32.pow(request.looks);
                let mut unserved = self.unserved.lock();
                self.look_for_listeners_at(request.at);
                unserved.push(request);
                None
            }
            _ => Some(request),
        }
    }
}
