//! Queues of events behind a pollable descriptor, and the account of events that were read but not acknowledged.
//!
//! An eventfd in semaphore mode counts the events that wait, so it is readable exactly when there is one. A reader blocks
//! in read(2) on it and holds no guard meanwhile: a thread may be cancelled there. Programs get an epoll descriptor that
//! holds the eventfd. An eventfd is always writable, and the descriptors of the kernel's RDMA devices never are. A program
//! that waits for both would spin.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

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
///
/// A reader takes a token first, and then an event. Meanwhile its event may be withdrawn, and it takes another one or none. So
/// tokens and readers that have one are as many as events and tokens that are owed.
#[derive(Debug)]
pub struct Tokens {
    count: Descriptor,
    shown: Descriptor,
    /// Tokens of events that were withdrawn, which readers had. Below zero where a reader came first.
    owed: AtomicI64,
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
        Ok(Self { count: count.into(), shown: shown.into(), owed: AtomicI64::new(0) })
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

    /// The events of so many tokens were withdrawn. Not at the same time as another call or [`is_used`](Self::is_used).
    pub fn withdraw(&self, n: usize) {
        self.owed.fetch_add(n as i64, Ordering::SeqCst);
        self.settle();
    }

    /// A reader that had a token has looked for an event, and `found` one or none.
    pub fn is_used(&self, found: bool) {
        if !found {
            self.owed.fetch_sub(1, Ordering::SeqCst);
        }
        self.settle();
    }

    fn settle(&self) {
        let one_less = |owed| (owed > 0).then_some(owed - 1);
        let less = || self.owed.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_ok();
        while less() {
            if !self.take() {
                // A reader has it, and settles later.
                self.owed.fetch_add(1, Ordering::SeqCst);
                return;
            }
        }
    }

    /// Takes one, without waiting. Tells whether there was one.
    fn take(&self) -> bool {
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
        let mut events = self.events.lock();
        events.push_back(event);
        // Under the lock: each event that is withdrawn has its token.
        self.tokens.put();
    }

    /// As [`push`](Self::push). If `most` events wait, it drops the oldest for which `may_go` holds: the last ones tell the present
    /// state.
    pub(crate) fn push_among(&self, event: T, most: usize, may_go: impl Fn(&T) -> bool) {
        let mut events = self.events.lock();
        let is_full = events.len() >= most;
        let oldest = is_full.then(|| events.iter().position(may_go)).flatten();
        let earlier = oldest.and_then(|i| events.remove(i));
        events.push_back(event);
        if earlier.is_none() {
            self.tokens.put();
        }
    }

    /// The oldest event, as `read` makes it; passed over where that is `None`. Waits for one unless the program set
    /// `O_NONBLOCK` on the descriptor. `read` sees the event before anybody can find it gone from the queue.
    pub(crate) fn pop_with<U>(&self, read: impl Fn(T) -> Option<U>) -> Result<U, EventError> {
        loop {
            self.tokens.wait()?;
            if let Some(event) = self.next(&read) {
                return Ok(event);
            }
        }
    }

    /// The oldest event, for a reader that has a token. There is none if its event was withdrawn since.
    fn next<U>(&self, read: impl Fn(T) -> Option<U>) -> Option<U> {
        let mut events = self.events.lock();
        let event = events.pop_front();
        self.tokens.is_used(event.is_some());
        // Under the lock: see `pop_with`.
        event.and_then(read)
    }

    /// As [`pop_with`](Self::pop_with), but never waits: `None` if there is no event yet.
    pub(crate) fn try_pop_with<U>(&self, read: impl Fn(T) -> Option<U>) -> Option<U> {
        loop {
            if self.events.lock().is_empty() || !self.tokens.take() {
                return None;
            }
            if let Some(event) = self.next(&read) {
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
        self.tokens.withdraw(before - events.len());
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
    /// All that were ever read, and acknowledged.
    read: u64,
    acknowledged: u64,
    /// Their types, as far as there is room; some of these may be acknowledged.
    types: ArrayVec<&'static str, 4>,
    /// The thread that read the last one, and when.
    last: Option<(i32, Instant)>,
}

impl Unacknowledged {
    fn events(&self) -> u64 {
        self.read - self.acknowledged
    }

    fn by(&self) -> String {
        let Some((thread, at)) = self.last else { return String::new() };
        format!(" (thread {thread} read the last one {} ms ago)", at.elapsed().as_millis())
    }
}

impl Acks {
    /// The program has read an event of this type.
    pub fn read(&self, event: &'static str) {
        let reader = rustix::thread::gettid().as_raw_pid();
        let mut unacknowledged = self.unacknowledged.lock();
        unacknowledged.read += 1;
        unacknowledged.last = Some((reader, Instant::now()));
        if !unacknowledged.types.contains(&event) {
            let _ = unacknowledged.types.try_push(event);
        }
    }

    /// Events that were read and not acknowledged.
    #[must_use]
    pub fn unacknowledged(&self) -> u64 {
        self.unacknowledged.lock().events()
    }

    /// Events that were read until now, for [`wait_for`](Self::wait_for).
    #[must_use]
    pub fn read_so_far(&self) -> u64 {
        self.unacknowledged.lock().read
    }

    /// The program acknowledges `n` events. More than it read count as all.
    pub fn acknowledge(&self, n: u32) {
        let mut unacknowledged = self.unacknowledged.lock();
        let acknowledged = unacknowledged.acknowledged + u64::from(n);
        unacknowledged.acknowledged = acknowledged.min(unacknowledged.read);
        if unacknowledged.events() == 0 {
            unacknowledged.types.clear();
        }
        self.unacknowledged.notify_all();
    }

    /// Waits until every event that was read is acknowledged; the log says why it waits.
    pub fn wait(&self, what: std::fmt::Arguments<'_>) {
        self.wait_for(u64::MAX, what);
    }

    /// As [`wait`](Self::wait), for as many as were `read` at some time. Events that are read later are not waited for.
    pub fn wait_for(&self, read: u64, what: std::fmt::Arguments<'_>) {
        let waits = |now: &Unacknowledged| now.acknowledged < read.min(now.read);
        let mut unacknowledged = self.unacknowledged.lock();
        if !waits(&unacknowledged) {
            return;
        }
        let events = unacknowledged.events();
        drop(unacknowledged);
        let _shown = WaitingCall::new(events, what);
        unacknowledged = self.unacknowledged.lock();
        while waits(&unacknowledged) {
            let is_late = unacknowledged.wait_for(HOUSEKEEPING);
            if is_late && waits(&unacknowledged) {
                crate::say_again!(
                    error,
                    std::ptr::from_ref(self).addr() as u64,
                    "destroying {what} waits for events that were read and not acknowledged ({}): {}{}; see `anyverbs explain {}`",
                    unacknowledged.events(),
                    unacknowledged.types.join(", "),
                    unacknowledged.by(),
                    Cause::Unacknowledged
                );
            }
        }
    }
}

/// Calls that wait until events are acknowledged, for those who look.
static WAITING: Monitor<rank::WaitingCalls, Vec<(i32, Instant, String)>> = Monitor::new(Vec::new());

/// The calls that wait until events are acknowledged, and for how long they have.
pub fn waiting_calls() -> Vec<(String, Duration)> {
    WAITING.lock().iter().map(|(_, since, what)| (what.clone(), since.elapsed())).collect()
}

/// Shows that this thread waits, while it lives.
struct WaitingCall(i32);

impl WaitingCall {
    fn new(events: u64, what: std::fmt::Arguments<'_>) -> Self {
        let thread = rustix::thread::gettid().as_raw_pid();
        let (events, are) = if events == 1 {
            ("an event".into(), "was")
        } else {
            (format!("{events} events"), "were")
        };
        let cause = Cause::Unacknowledged;
        let what = format!(
            "thread {thread} is ending {what}; {events} {are} read and not acknowledged ({cause})"
        );
        WAITING.lock().push((thread, Instant::now(), what));
        Self(thread)
    }
}

impl Drop for WaitingCall {
    fn drop(&mut self) {
        WAITING.lock().retain(|(thread, ..)| *thread != self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

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
    fn events_wait_in_their_order_and_a_full_queue_drops_the_oldest_that_may_go() {
        let queue = EventQueue::new().unwrap();
        set_nonblocking(&queue);
        let drain = || std::iter::from_fn(|| pop(&queue).ok()).collect::<Vec<_>>();
        let is_odd = |e: &u32| e % 2 == 1;
        for event in [1, 3, 1, 3, 1] {
            queue.push_among(event, 5, is_odd);
        }
        assert_eq!(drain(), [1, 3, 1, 3, 1]);
        for event in 2..9 {
            queue.push_among(event, 5, is_odd);
        }
        assert_eq!(drain(), [2, 4, 6, 7, 8]);
        for event in [2, 2, 2] {
            queue.push_among(event, 2, is_odd);
        }
        assert_eq!(drain(), [2, 2, 2], "none of them may go");
        assert!(!readable(&queue));
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
    fn a_reader_whose_event_is_withdrawn_leaves_no_token_behind() {
        let queue = EventQueue::new().unwrap();
        set_nonblocking(&queue);
        queue.push(1);
        queue.tokens.wait().unwrap();
        queue.withdraw(|e| *e == 1);
        queue.push(2);
        assert_eq!(queue.next(Some), Some(2));
        assert!(!readable(&queue));
        // The same where nothing else came.
        queue.push(3);
        queue.tokens.wait().unwrap();
        queue.withdraw(|e| *e == 3);
        assert_eq!(queue.next(Some), None::<u32>);
        queue.push(4);
        assert!(readable(&queue));
        assert_eq!(pop(&queue).unwrap(), 4);
        assert!(!readable(&queue));
    }

    /// A push whose token came late left a descriptor that was readable for ever.
    #[test]
    fn pushes_and_withdrawals_at_once_leave_no_token_behind() {
        const ROUNDS: u32 = 100_000;
        let queue = EventQueue::new().unwrap();
        set_nonblocking(&queue);
        std::thread::scope(|scope| {
            let pushes = scope.spawn(|| (0..ROUNDS).for_each(|_| queue.push(1)));
            let withdrawals = scope.spawn(|| {
                for _ in 0..ROUNDS {
                    queue.push(2);
                    queue.withdraw(|e| *e == 2);
                }
            });
            while !pushes.is_finished() || !withdrawals.is_finished() {
                let _ = pop(&queue);
                let events = queue.events.lock();
                assert!(!events.is_empty() || !readable(&queue));
            }
        });
    }

    #[test]
    fn the_thread_that_read_a_completion_event_is_known() {
        let acks = Acks::default();
        acks.read(COMPLETION);
        let thread = rustix::thread::gettid().as_raw_pid();
        std::thread::sleep(Duration::from_millis(20));
        let said = acks.unacknowledged.lock().by();
        let rest = said.strip_prefix(&format!(" (thread {thread} read the last one ")).unwrap();
        let ms: u64 = rest.strip_suffix(" ms ago)").unwrap().parse().unwrap();
        assert!(ms >= 20, "{said}");
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
        let calls = waiting_calls();
        assert!(calls.iter().any(|(what, _)| what.contains(" is ending it; ")), "{calls:?}");
        acks.acknowledge(1);
        waiter.join().unwrap();
        assert!(waiting_calls().is_empty());
    }
}
