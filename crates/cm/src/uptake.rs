//! A listener's requests one after the other, for programs that keep the last one only.
//!
//! Some programs have an event thread that stores a request's id where another thread fetches it, without waiting for
//! that. They lose the first of two requests that come back to back. Other devices take so long over a request that
//! this does not show. So the next request of a listener waits until the program has used the one before, for
//! [`TIME_SLICES`] at most. A program that lets that pass [`MOST_IN_VAIN`] times in a row collects requests: there is no
//! more waiting.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use anyverbs_locks::{Mutex, rank};
use anyverbs_net::host::TIME_SLICES;

use super::channel::ChannelCell;

const MOST_IN_VAIN: u8 = 3;

/// An id's own uptake, if it came from a request. On a listener, also the uptake of the last request that was handed
/// out.
#[derive(Debug, Default)]
pub(super) struct Uptake {
    is_taken_up: AtomicBool,
    /// The channel whose readers want to know.
    read_on: OnceLock<Weak<ChannelCell>>,
    requests: Mutex<rank::ListenerRequests, Requests>,
}

#[derive(Debug, Default)]
struct Requests {
    /// Handed out, and not seen to be taken up.
    last: Option<Weak<Uptake>>,
    /// When the next one began to wait for that.
    since: Option<Instant>,
    in_vain: u8,
}

impl Uptake {
    /// A request of this listener was handed out.
    pub(super) fn handed_out(&self, child: &Arc<Self>, channel: &Arc<ChannelCell>) {
        let mut requests = self.requests.lock();
        if requests.in_vain < MOST_IN_VAIN && child.read_on.set(Arc::downgrade(channel)).is_ok() {
            requests.last = Some(Arc::downgrade(child));
            requests.since = None;
        }
    }

    /// Until when the next request waits at the latest; `None` if it does not.
    pub(super) fn waits_until(&self) -> Option<Instant> {
        let mut requests = self.requests.lock();
        let last = requests.last.as_ref()?;
        // A request that no longer exists counts as taken up.
        let is_open = |child: Arc<Self>| !child.is_taken_up.load(Ordering::SeqCst);
        if !last.upgrade().is_some_and(is_open) {
            // A wait that was of use, unless there was none.
            let in_vain = if requests.since.is_some() { 0 } else { requests.in_vain };
            *requests = Requests { in_vain, ..Requests::default() };
            return None;
        }
        let now = Instant::now();
        let end = *requests.since.get_or_insert(now) + TIME_SLICES;
        if now < end {
            return Some(end);
        }
        let in_vain = requests.in_vain + 1;
        *requests = Requests { in_vain, ..Requests::default() };
        None
    }
    /// The program does something with the id.
    pub(super) fn take_up(&self) {
        self.is_taken_up.store(true, Ordering::SeqCst);
        if let Some(channel) = self.read_on.get().and_then(Weak::upgrade) {
            channel.wake();
        }
    }

    pub(super) fn is_taken_up(&self) -> bool {
        self.is_taken_up.load(Ordering::Relaxed)
    }
}
