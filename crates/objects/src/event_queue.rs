//! Queues of events behind a pollable descriptor, and the account of events that were read but not acknowledged.
//!
//! An eventfd in semaphore mode counts the events that wait, so it is readable exactly when there is one. A reader blocks
//! in read(2) on it and holds no guard meanwhile: a thread may be cancelled there. Programs get an epoll descriptor that
//! holds the eventfd. An eventfd is always writable, and the descriptors of the kernel's RDMA devices never are. A program
//! that waits for both would spin.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use anyverbs_causes::Cause;
use anyverbs_locks::{Monitor, Mutex, rank};
use anyverbs_net::Descriptor;
use arrayvec::ArrayVec;
use rustix::event::{EventfdFlags, epoll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{ReadWriteFlags, preadv2};

use crate::base::HOUSEKEEPING;
use crate::error::EventError;

/// Makes an eventfd, close-on-exec.
pub(crate) fn eventfd(flags: EventfdFlags) -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | flags)?)
}

/// Adds 1 to an eventfd. Unlike write(2) this is no cancellation point: callers hold locks.
pub(crate) fn signal(fd: BorrowedFd<'_>) {
    // It can only fail when the count is at its maximum, and then the descriptor is readable anyway.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// A descriptor that is readable while tokens are there: one for each event that waits. It is never writable.
#[derive(Debug)]
pub struct Tokens {
    count: Descriptor,
    shown: Descriptor,
}

impl Tokens {
    /// No events.
    ///
    /// # Errors
    /// Those of eventfd(2) and epoll_create1(2).
    pub fn new() -> io::Result<Self> {
        let count = eventfd(EventfdFlags::SEMAPHORE)?;
        let shown = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&shown, &count, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(Self { count: count.into(), shown: shown.into() })
    }

    /// Readable while an event waits.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.shown.as_fd()
    }

    /// Adds an event.
    pub fn put(&self) {
        signal(self.count.as_fd());
    }

    /// Takes one. Waits for it unless the program set `O_NONBLOCK` on the descriptor.
    pub fn wait(&self) -> Result<(), EventError> {
        // The read is on another descriptor than the program's.
        let flags = fcntl_getfl(&self.shown).map_err(io::Error::from).map_err(EventError::Io)?;
        let flags = flags & OFlags::NONBLOCK;
        fcntl_setfl(&self.count, flags).map_err(io::Error::from).map_err(EventError::Io)?;
        let mut count = 0u64;
        // A cancellation point: the caller holds no lock, and programs cancel threads that wait here.
        // SAFETY: eight live bytes to write to.
        let n = unsafe { libc::read(self.count.as_raw_fd(), (&raw mut count).cast(), 8) };
        if n >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        Err(match error.kind() {
            io::ErrorKind::WouldBlock => EventError::WouldBlock,
            _ => EventError::Io(error),
        })
    }

    /// Whether [`wait`](Self::wait) waits.
    pub fn may_wait(&self) -> bool {
        fcntl_getfl(&self.shown).is_ok_and(|flags| !flags.contains(OFlags::NONBLOCK))
    }

    /// Takes one, without waiting. Another reader may have been faster, which then finds no event and waits on. Tells
    /// whether there was one.
    pub fn take(&self) -> bool {
        const OWN_POSITION: u64 = u64::MAX;
        let mut count = [0; 8];
        let mut into = [IoSliceMut::new(&mut count)];
        // No cancellation point either.
        preadv2(&self.count, &mut into, OWN_POSITION, ReadWriteFlags::NOWAIT).is_ok()
    }
}

/// Events that wait for the program to read them.
#[derive(Debug)]
pub(crate) struct EventQueue<T> {
    tokens: Tokens,
    events: Mutex<rank::Events, VecDeque<T>>,
}

impl<T> EventQueue<T> {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { tokens: Tokens::new()?, events: Mutex::new(VecDeque::with_capacity(16)) })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.tokens.fd()
    }

    pub(crate) fn push(&self, event: T) {
        self.events.lock().push_back(event);
        self.tokens.put();
    }

    /// As [`push`](Self::push), in place of an event that waits for which `same` holds: the last of each kind tells the
    /// present state.
    pub(crate) fn push_last(&self, event: T, same: impl Fn(&T) -> bool) {
        let mut events = self.events.lock();
        let earlier = events.iter().position(same).and_then(|i| events.remove(i));
        events.push_back(event);
        drop(events);
        if earlier.is_none() {
            self.tokens.put();
        }
    }

    /// The oldest event, as `read` makes it; passed over where that is `None`. Waits for one unless the program set
    /// `O_NONBLOCK` on the descriptor. `read` sees the event before anybody can find it gone from the queue.
    pub(crate) fn pop_with<U>(&self, read: impl Fn(T) -> Option<U>) -> Result<U, EventError> {
        loop {
            self.tokens.wait()?;
            let mut events = self.events.lock();
            // Empty when its event was withdrawn between the read and here.
            if let Some(event) = events.pop_front().and_then(&read) {
                return Ok(event);
            }
        }
    }

    /// As [`pop_with`](Self::pop_with), but never waits: `None` if there is no event yet.
    pub(crate) fn try_pop_with<U>(&self, read: impl Fn(T) -> Option<U>) -> Option<U> {
        loop {
            if self.events.lock().is_empty() || !self.tokens.take() {
                return None;
            }
            let mut events = self.events.lock();
            if let Some(event) = events.pop_front().and_then(&read) {
                return Some(event);
            }
        }
    }

    /// Whether [`pop_with`](Self::pop_with) waits.
    pub(crate) fn may_wait(&self) -> bool {
        self.tokens.may_wait()
    }

    /// Removes the events for which `gone` holds; the descriptor's count falls with them.
    pub(crate) fn withdraw(&self, gone: impl Fn(&T) -> bool) {
        let mut events = self.events.lock();
        let before = events.len();
        events.retain(|event| !gone(event));
        for _ in events.len()..before {
            self.tokens.take();
        }
    }
}

/// The name of the event of a completion channel.
pub(crate) const COMPLETION: &str = "completion";

/// Events of one object that the program has read, and how many of them it has acknowledged.
#[derive(Debug, Default)]
pub struct Acks {
    unacknowledged: Monitor<rank::UnacknowledgedEvents, Unacknowledged>,
}

#[derive(Debug, Default)]
struct Unacknowledged {
    events: u64,
    /// Their types, as far as there is room; some of these may be acknowledged.
    types: ArrayVec<&'static str, 4>,
    /// The thread that read the last one, or 0.
    reader: i32,
}

impl Unacknowledged {
    fn by(&self) -> String {
        match self.reader {
            0 => String::new(),
            thread => format!(" (thread {thread} read the last one)"),
        }
    }
}

impl Acks {
    /// The program has read an event of this type.
    pub fn read(&self, event: &'static str) {
        let reader = rustix::thread::gettid().as_raw_pid();
        let mut unacknowledged = self.unacknowledged.lock();
        unacknowledged.events += 1;
        unacknowledged.reader = reader;
        if !unacknowledged.types.contains(&event) {
            let _ = unacknowledged.types.try_push(event);
        }
    }

    /// Events that were read and not acknowledged.
    #[must_use]
    pub fn unacknowledged(&self) -> u64 {
        self.unacknowledged.lock().events
    }

    /// The program acknowledges `n` events. More than it read count as all.
    pub fn acknowledge(&self, n: u32) {
        let mut unacknowledged = self.unacknowledged.lock();
        unacknowledged.events = unacknowledged.events.saturating_sub(n.into());
        if unacknowledged.events == 0 {
            unacknowledged.types.clear();
        }
        self.unacknowledged.notify_all();
    }

    /// Waits until every event that was read is acknowledged; the log says why it waits.
    pub fn wait(&self, what: std::fmt::Arguments<'_>) {
        let mut unacknowledged = self.unacknowledged.lock();
        while unacknowledged.events > 0 {
            let is_late = unacknowledged.wait_for(HOUSEKEEPING);
            if is_late && unacknowledged.events > 0 {
                crate::say_again!(
                    error,
                    std::ptr::from_ref(self).addr() as u64,
                    events = unacknowledged.events,
                    "destroying {what} waits for events that were read and not acknowledged: {}{}; see `anyverbs explain {}`",
                    unacknowledged.types.join(", "),
                    unacknowledged.by(),
                    Cause::Unacknowledged
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn pop(queue: &EventQueue<u32>) -> Result<u32, EventError> {
        queue.pop_with(Some)
    }

    fn readable(queue: &EventQueue<u32>) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(queue.fd(), PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
    }

    fn set_nonblocking(queue: &EventQueue<u32>) {
        fcntl_setfl(queue.fd(), OFlags::NONBLOCK).unwrap();
    }

    /// The last holder of a channel may be a thread that receives, and that holds locks then.
    #[test]
    fn nobody_is_cancelled_while_a_queue_is_dropped() {
        unsafe extern "C" {
            fn pthread_cancel(thread: libc::pthread_t) -> libc::c_int;
        }
        let queue = EventQueue::<u32>::new().unwrap();
        let (sender, done) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            // SAFETY: this thread's own id.
            assert_eq!(unsafe { pthread_cancel(libc::pthread_self()) }, 0);
            drop(queue);
            // For the rest of this thread.
            std::mem::forget(anyverbs_net::Uncancelled::new());
            sender.send(()).unwrap();
        });
        done.recv_timeout(Duration::from_secs(20)).unwrap();
        thread.join().unwrap();
    }

    #[test]
    fn readable_exactly_while_an_event_waits() {
        let queue = EventQueue::new().unwrap();
        assert!(!readable(&queue));
        queue.push(1);
        queue.push(2);
        queue.push(3);
        queue.withdraw(|e| *e == 2);
        assert_eq!(pop(&queue).unwrap(), 1);
        assert!(readable(&queue));
        assert_eq!(pop(&queue).unwrap(), 3);
        assert!(!readable(&queue));
        set_nonblocking(&queue);
        assert!(matches!(pop(&queue), Err(EventError::WouldBlock)));
        queue.push(4);
        queue.withdraw(|_| true);
        assert!(!readable(&queue));
    }

    /// As the descriptors of the kernel's devices. InfiniStore waits for both, and spun.
    #[test]
    fn never_writable() {
        let queue = EventQueue::new().unwrap();
        let poll_both = || {
            let both = PollFlags::IN | PollFlags::OUT;
            let mut fds = [PollFd::from_borrowed_fd(queue.fd(), both)];
            poll(&mut fds, Some(&Timespec::default())).unwrap();
            fds[0].revents()
        };
        assert_eq!(poll_both(), PollFlags::empty());
        queue.push(1);
        assert_eq!(poll_both(), PollFlags::IN);
    }

    #[test]
    fn a_waiting_event_is_told_once_and_last() {
        let queue = EventQueue::new().unwrap();
        set_nonblocking(&queue);
        for event in [1, 2, 2, 1] {
            queue.push_last(event, |e| *e == event);
        }
        assert_eq!((pop(&queue).unwrap(), pop(&queue).unwrap()), (2, 1));
        assert!(matches!(pop(&queue), Err(EventError::WouldBlock)));
        queue.push_last(1, |e| *e == 1);
        assert_eq!(pop(&queue).unwrap(), 1);
    }

    #[test]
    fn a_reader_waits_for_the_next_event() {
        let queue = Arc::new(EventQueue::new().unwrap());
        let reader = std::thread::spawn({
            let queue = Arc::clone(&queue);
            move || pop(&queue).unwrap()
        });
        std::thread::sleep(Duration::from_millis(20));
        queue.push(9);
        assert_eq!(reader.join().unwrap(), 9);
    }

    #[test]
    fn the_thread_that_read_a_completion_event_is_known() {
        let acks = Acks::default();
        acks.read(COMPLETION);
        let thread = rustix::thread::gettid().as_raw_pid();
        let said = acks.unacknowledged.lock().by();
        assert_eq!(said, format!(" (thread {thread} read the last one)"));
    }

    #[test]
    fn waiting_ends_with_the_last_acknowledgement() {
        let acks = Arc::new(Acks::default());
        acks.read("a");
        acks.read("b");
        let waiter = std::thread::spawn({
            let acks = Arc::clone(&acks);
            move || acks.wait(format_args!("it"))
        });
        acks.acknowledge(1);
        std::thread::sleep(Duration::from_millis(20));
        assert!(!waiter.is_finished());
        acks.acknowledge(1);
        waiter.join().unwrap();
    }
}
