//! Event channel: ids report their events on it.
//!
//! The events of an id wait in its own mailbox, and its channel holds a ticket for each: which id has the next one. So an
//! id that is destroyed or migrates takes its events along without a search; its tickets stay behind and are skipped.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use anyverbs_locks::{Monitor, rank};
use anyverbs_net::Uncancelled;
use anyverbs_objects::error::EventError;
use anyverbs_objects::event_queue::Tokens;

use super::Gsi;
use super::error::CmError;
use super::event::{Event, Pending};
use super::id::IdCell;

/// Stale tickets that are not worth a search.
const FEW: usize = 64;

/// Event channel (`rdma_create_event_channel(3)`). Its descriptor is readable exactly while an event waits, and may be set to
/// `O_NONBLOCK`.
#[derive(Debug)]
pub struct EventChannel(pub(crate) Arc<ChannelCell>);

#[derive(Debug)]
pub(crate) struct ChannelCell {
    pub(super) gsi: &'static Gsi,
    /// One for each event in the mailboxes of this channel's ids.
    tokens: Tokens,
    /// Notified when there is another ticket, or one that was passed over need not wait any longer.
    tickets: Monitor<rank::EventChannel, Tickets>,
}

#[derive(Debug, Default)]
struct Tickets {
    queue: VecDeque<Arc<IdCell>>,
    /// Tokens whose event is gone. They keep their ids in memory.
    stale: usize,
}

/// The events of one id, and where they are read.
#[derive(Debug)]
pub(super) struct Mailbox {
    /// None once the id is destroyed.
    channel: Option<Arc<ChannelCell>>,
    events: VecDeque<Box<Pending>>,
}

impl EventChannel {
    /// See [`EventChannel::new`].
    #[doc(hidden)]
    pub fn with(gsi: &'static Gsi) -> Result<Self, CmError> {
        let tokens = Tokens::new().map_err(|e| CmError::System {
            what: "make an eventfd",
            errno: e.raw_os_error().unwrap_or(libc::EMFILE),
        })?;
        Ok(Self(Arc::new(ChannelCell { gsi, tokens, tickets: Monitor::default() })))
    }

    /// The oldest event (`rdma_get_cm_event`). Waits for one unless the program set `O_NONBLOCK`; holds no lock meanwhile.
    ///
    /// # Errors
    /// [`EventError`].
    pub fn get_event(&self) -> Result<Event, EventError> {
        self.get_event_with(Some)
    }

    /// As [`get_event`](Self::get_event), for the result of `take` on the event. If `take` returns nothing, the event
    /// is not the program's: it is acknowledged here, and the next one is waited for. `take` runs while the thread
    /// cannot be cancelled.
    ///
    /// # Errors
    /// [`EventError`].
    pub fn get_event_with<T>(&self, take: impl FnMut(Event) -> Option<T>) -> Result<T, EventError> {
        self.read(false, take)
    }

    /// As [`get_event_with`](Self::get_event_with). If it may wait, the next request of a listener is handed out up to
    /// some time slices later, if the program has done nothing yet with the one before ([`Id::take_up`](super::Id::take_up)).
    /// Other events are not held up. Otherwise programs in C lose a request that they have stored for another thread.
    /// After three such waits in a row that were in vain there are no more for that listener.
    ///
    /// # Errors
    /// [`EventError`].
    #[doc(hidden)] // for programs in C, like `take_up`
    pub fn get_event_one_by_one<T>(
        &self,
        take: impl FnMut(Event) -> Option<T>,
    ) -> Result<T, EventError> {
        self.read(true, take)
    }

    fn read<T>(
        &self,
        one_by_one: bool,
        mut take: impl FnMut(Event) -> Option<T>,
    ) -> Result<T, EventError> {
        if !self.0.gsi.core().is_current() {
            return Err(EventError::Forked);
        }
        self.0.gsi.core().progress().end_polling();
        loop {
            // Here alone the thread may be cancelled: it holds nothing.
            self.0.tokens.wait()?;
            let _uncancelled = Uncancelled::new();
            // None is left when the event of our token went away with its id.
            let Some((id, pending)) = self.0.pop(one_by_one) else { continue };
            match id.hand_out(*pending, &self.0).and_then(&mut take) {
                Some(taken) => return Ok(taken),
                None => id.acks.acknowledge(1),
            }
        }
    }
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.tokens.fd()
    }
}

impl ChannelCell {
    /// The oldest event and its id, which counts it as read. `one_by_one`: passes over listeners whose last request is
    /// not taken up, and waits if there is nothing else. The caller's token then stands for one of those passed over.
    fn pop(self: &Arc<Self>, one_by_one: bool) -> Option<(Arc<IdCell>, Box<Pending>)> {
        let event = self.next_event(one_by_one);
        let _tickets = self.tickets.lock();
        self.tokens.is_used(event.is_some());
        event
    }

    fn next_event(self: &Arc<Self>, one_by_one: bool) -> Option<(Arc<IdCell>, Box<Pending>)> {
        while let Some(id) = self.next_ticket(one_by_one) {
            let mut mailbox = id.mailbox.lock();
            if let Some(pending) = mailbox.take(self) {
                id.acks.read(pending.kind.name());
                drop(mailbox);
                return Some((id, pending));
            }
            drop(mailbox);
            let mut tickets = self.tickets.lock();
            tickets.stale = tickets.stale.saturating_sub(1);
        }
        None
    }

    fn next_ticket(&self, mut one_by_one: bool) -> Option<Arc<IdCell>> {
        let mut tickets = self.tickets.lock();
        loop {
            let mut until: Option<Instant> = None;
            let mut is_ready = |id: &Arc<IdCell>| {
                let end = if one_by_one { id.uptake.waits_until() } else { None };
                until = until.into_iter().chain(end).min();
                end.is_none()
            };
            let at = tickets.queue.iter().position(&mut is_ready);
            if at != Some(0) && until.is_some() && !self.tokens.may_wait() {
                one_by_one = false;
                continue;
            }
            match (at, until) {
                (Some(at), _) => return tickets.queue.remove(at),
                (None, Some(until)) => tickets.wait_until(until),
                (None, None) => return None,
            };
        }
    }

    /// Its readers look again at events that they passed over.
    pub(super) fn wake(&self) {
        // Under the lock: a reader that has looked waits by now.
        let _tickets = self.tickets.lock();
        self.tickets.notify_all();
    }

    fn push(&self, id: &Arc<IdCell>) {
        self.tickets.lock().queue.push_back(Arc::clone(id));
        self.tickets.notify_one();
        self.tokens.put();
    }

    /// `n` events of an id are no longer here.
    fn forget(&self, n: usize) {
        let mut tickets = self.tickets.lock();
        self.tokens.withdraw(n);
        tickets.stale += n;
        if tickets.stale > FEW + tickets.queue.len() / 2 {
            tickets.stale = 0;
            // An id's lock is taken before the channel's: one that is busy keeps its tickets.
            tickets.queue.retain(|id| id.mailbox.try_lock().is_none_or(|m| !m.events.is_empty()));
        }
    }
}

impl Mailbox {
    pub(super) fn new(channel: &Arc<ChannelCell>) -> Self {
        Self { channel: Some(Arc::clone(channel)), events: VecDeque::new() }
    }

    /// The next event, if they are read at `channel`.
    fn take(&mut self, channel: &Arc<ChannelCell>) -> Option<Box<Pending>> {
        if !self.channel.as_ref().is_some_and(|c| Arc::ptr_eq(c, channel)) {
            return None;
        }
        let event = self.events.pop_front();
        if self.events.is_empty() {
            self.events = VecDeque::new();
        }
        event
    }
}

impl IdCell {
    /// Queues an event for the program. Does nothing once the id is destroyed.
    pub(super) fn post(self: &Arc<Self>, pending: Pending) {
        let mut mailbox = self.mailbox.lock();
        let Some(channel) = mailbox.channel.clone() else { return };
        mailbox.events.push_back(Box::new(pending));
        channel.push(self);
    }

    /// Where its events are read.
    pub(super) fn channel(&self) -> Option<Arc<ChannelCell>> {
        self.mailbox.lock().channel.clone()
    }

    /// Takes the id off its channel: none of its events is handed out any more. Returns those that waited.
    pub(super) fn leave_channel(&self) -> VecDeque<Box<Pending>> {
        let mut mailbox = self.mailbox.lock();
        let events = std::mem::take(&mut mailbox.events);
        let channel = mailbox.channel.take();
        drop(mailbox);
        if let Some(channel) = channel.filter(|_| !events.is_empty()) {
            channel.forget(events.len());
        }
        events
    }

    /// Forgets the events that wait and for which `gone` holds.
    pub(super) fn withdraw(&self, gone: impl Fn(&Pending) -> bool) {
        let mut mailbox = self.mailbox.lock();
        let before = mailbox.events.len();
        mailbox.events.retain(|pending| !gone(pending));
        let forgotten = before - mailbox.events.len();
        let channel = mailbox.channel.clone();
        drop(mailbox);
        if let Some(channel) = channel.filter(|_| forgotten > 0) {
            channel.forget(forgotten);
        }
    }

    /// Its events, those that wait included, go to another channel. How many were read before; None if it is destroyed.
    pub(super) fn change_channel(self: &Arc<Self>, to: &Arc<ChannelCell>) -> Option<u64> {
        let mut mailbox = self.mailbox.lock();
        let Some(from) = mailbox.channel.replace(Arc::clone(to)) else {
            mailbox.channel = None;
            return None;
        };
        // Readers count an event under this lock.
        let read = self.acks.read_so_far();
        let waiting = mailbox.events.len();
        for _ in 0..waiting {
            to.push(self);
        }
        drop(mailbox);
        if waiting > 0 {
            from.forget(waiting);
        }
        Some(read)
    }
}
