//! A DREQ waits for earlier messages.
//!
//! The peer acknowledges a message and disconnects. On other devices the device completes the message at once, and the
//! DREQ goes through the kernel's workers. So a program that looks at its completion queue and its event channel in
//! turn has seen the completion before the end. Here both may be read in one go, or the DREQ first, since messages
//! through shared memory and datagrams lie in different places. So a DREQ goes to the machine when all earlier messages
//! are read, and the program has polled the completions of that queue pair. For programs that do not poll it goes there
//! a moment later.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyverbs_locks::{Mutex, rank};
use anyverbs_net::host::TIME_SLICES;
use anyverbs_objects::base::NEVER;
use anyverbs_proto::cm::mad::Mad;
use anyverbs_proto::cm::message::Message;
use anyverbs_proto::qp::Arrival;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::Qpn;

use super::Incoming;
use super::{Events, Gsi};

/// Longest wait: a program that polls may have lost the processor. One that does not poll hears of the end all the same
/// (`device::tests::a_program_that_does_not_poll_hears_of_the_end` of `anyverbs`).
const LONGEST: Duration = TIME_SLICES;

/// More are handed on at once.
const MOST: usize = 1024;

/// The DREQs that wait.
#[derive(Debug)]
pub(super) struct Disconnects {
    waiting: Mutex<rank::WaitingDisconnects, Vec<Disconnect>>,
    /// When the first has waited long enough, in nanoseconds; [`NEVER`] if none waits.
    until: AtomicU64,
    /// Longest wait, in nanoseconds.
    longest: AtomicU64,
}

impl Default for Disconnects {
    fn default() -> Self {
        Self {
            waiting: Mutex::default(),
            until: AtomicU64::new(NEVER),
            longest: AtomicU64::new(LONGEST.as_nanos() as u64),
        }
    }
}

#[derive(Debug)]
struct Disconnect {
    arrival: Arrival,
    mad: Mad,
    /// Number of the queue pair here.
    qpn: Qpn,
    /// It had been read by then.
    came: Time,
}

impl Disconnects {
    /// See the field.
    pub(super) fn until(&self) -> u64 {
        self.until.load(Ordering::SeqCst)
    }

    /// Whether some wait.
    pub(super) fn any(&self) -> bool {
        self.until() != NEVER
    }

    fn wait(&self, disconnect: Disconnect) -> Time {
        let end = disconnect.came + self.longest();
        let mut waiting = self.waiting.lock();
        waiting.push(disconnect);
        self.until.fetch_min(end.as_nanos(), Ordering::SeqCst);
        end
    }

    fn longest(&self) -> Duration {
        Duration::from_nanos(self.longest.load(Ordering::Relaxed))
    }

    fn take(&self) -> Vec<Disconnect> {
        let mut waiting = self.waiting.lock();
        self.until.store(NEVER, Ordering::SeqCst);
        std::mem::take(&mut *waiting)
    }

    fn is_repeated(&self, incoming: &Incoming<'_>, mad: &Mad) -> bool {
        let source = incoming.arrival.source;
        self.waiting.lock().iter().any(|d| d.arrival.source == source && d.mad == *mad)
    }

    fn len(&self) -> usize {
        self.waiting.lock().len()
    }
}

impl<I: Events> Gsi<I> {
    /// Has DREQs wait for up to this time. Tests choose a long one, so that they see the other ends of the wait.
    #[doc(hidden)]
    pub fn keep_disconnects_for(&self, longest: Duration) {
        self.disconnects.longest.store(longest.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Keeps a DREQ of a connection whose queue pair lives. False for all other messages.
    pub(super) fn keep_disconnect(&self, incoming: &Incoming<'_>, mad: &Mad) -> bool {
        let disconnects = &self.disconnects;
        let Message::Dreq(dreq) = &mad.message else { return false };
        let qpn = dreq.remote_qpn;
        if self.transport.qps.find(qpn).is_none() {
            return false;
        }
        if disconnects.is_repeated(incoming, mad) {
            return true;
        }
        if disconnects.len() >= MOST {
            return false;
        }
        let end = disconnects.wait(Disconnect {
            arrival: incoming.arrival,
            mad: mad.clone(),
            qpn,
            came: self.transport.core.now(),
        });
        self.transport.links.waker.wake_before(end.as_nanos());
        true
    }

    /// Hands on the DREQs that need not wait any longer. `empty`: from when on nothing was left to be read, if that was seen.
    #[cold]
    pub(super) fn hand_on_disconnects(&'static self, now: Time, empty: Option<Time>) {
        let longest = self.disconnects.longest();
        let is_over = |d: &Disconnect| {
            now >= d.came + longest
                || empty.is_some_and(|empty| empty >= d.came) && !self.has_completions(d.qpn)
        };
        let (over, waiting): (Vec<_>, Vec<_>) =
            self.disconnects.take().into_iter().partition(is_over);
        for disconnect in waiting {
            let end = self.disconnects.wait(disconnect);
            self.transport.links.waker.wake_before(end.as_nanos());
        }
        if over.is_empty() {
            return;
        }
        self.sender.earn(over.len() as u32);
        self.drive_cm(|machine, _, now| {
            for disconnect in over {
                machine.handle_mad(now, &disconnect.arrival, &disconnect.mad);
            }
        });
    }

    /// Whether completions of a queue pair wait to be polled.
    fn has_completions(&self, qpn: Qpn) -> bool {
        self.transport.qps.find(qpn).is_some_and(|cell| {
            let cqs = [&cell.send_cq, &cell.recv_cq];
            cqs.into_iter().flatten().any(|cq| cq.holds_of(qpn))
        })
    }
}
