//! Posting under one hold of the queue pair's lock.

use std::fmt;

use anyverbs_locks::{MutexGuard, rank};
use anyverbs_objects::error::PostError;
use anyverbs_proto::wr::{RecvWr, SendWr};

use super::env::Call;
use super::{QpCell, State};

/// Posts to a queue pair; see [`Qp::post`].
pub struct Poster<'a> {
    pub(super) cell: &'a QpCell,
    /// Some until the drop.
    pub(super) state: Option<MutexGuard<'a, rank::QueuePair, State>>,
    /// From the first request on that is more than a receive that is queued.
    pub(super) call: Option<Call<'a>>,
    pub(super) sends: bool,
}

impl Poster<'_> {
    /// Queues a send. It starts when the poster is dropped.
    ///
    /// # Errors
    /// [`PostError::Send`].
    pub fn send(&mut self, wr: &SendWr<'_>) -> Result<(), PostError> {
        self.sends = true;
        let Some(state) = &mut self.state else { return Err(PostError::Gone) };
        let State { machine, link, .. } = &mut **state;
        let call = self.call.get_or_insert_with(|| Call::new(self.cell));
        Ok(machine.post_send(wr, &mut call.env(link))?)
    }

    /// The number of sends that the queue still takes, so that a list can be posted whole or not at all.
    #[must_use]
    pub fn send_room(&self) -> u32 {
        self.state.as_ref().map_or(0, |state| state.machine.send_room())
    }

    /// Queues a receive.
    ///
    /// # Errors
    /// [`PostError::Recv`].
    #[inline]
    pub fn recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let Some(state) = &mut self.state else { return Err(PostError::Gone) };
        let State { machine, link, .. } = &mut **state;
        if let Some(queued) = machine.queue_recv(wr) {
            return Ok(queued?);
        }
        let call = self.call.get_or_insert_with(|| Call::new(self.cell));
        Ok(machine.post_recv(wr, &mut call.env(link))?)
    }
}

impl Drop for Poster<'_> {
    #[inline]
    fn drop(&mut self) {
        let is_starved = self.state.as_ref().is_some_and(|state| state.link.starved.is_some());
        if self.sends || self.call.is_some() || is_starved {
            return self.finish();
        }
        // Receives that were queued, and that no sender waits for.
        self.state = None;
        self.cell.transport.after_unlock();
    }
}

impl Poster<'_> {
    /// Starts the posted requests, and tells senders that wait for receives.
    fn finish(&mut self) {
        // In place: a call is long to move about.
        let Some(state) = &mut self.state else { return };
        let sent = self.sends && self.call.as_mut().is_some_and(|call| call.send(state));
        if !sent && state.link.starved.is_none() {
            // Receives alone, and sends that gather, change nothing that others have to know.
            self.call = None;
            self.state = None;
            return self.cell.transport.after_unlock();
        }
        let call = self.call.get_or_insert_with(|| Call::new(self.cell));
        // Receives posted for a sender that waits for them.
        if let Some(asked) = state.link.starved.take() {
            let limit = self.cell.message_limit(state, &asked);
            if limit > asked.packet.counts.messages {
                call.echo(&asked, limit);
            } else {
                state.link.starved = Some(asked);
            }
        }
        call.settle(state);
        self.call = None;
        self.state = None;
        self.cell.transport.after_unlock();
    }
}

impl fmt::Debug for Poster<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poster").finish_non_exhaustive()
    }
}
