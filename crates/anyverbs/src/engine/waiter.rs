//! A thread of the program that waits for a completion event (`ibv_get_cq_event`) receives by itself: to be woken by the
//! worker, which the network has woken, costs a second wake-up.
//!
//! It first looks for a while, where events have lately come that soon, and then sleeps at the sockets and the channel's
//! descriptor. The worker takes that for polls and stays away. One thread does so at a time: what comes would wake
//! all of them. Others sleep at their channel, and the worker serves them. Nothing depends on a thread's coming back from
//! its sleep, for it may be cancelled there or jump out of it (siglongjmp(3)): as long as it counts as waiting, the worker
//! serves all others.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use super::{Engine, worker};

/// How long a thread looks for an event before it sleeps. An answer of a peer that is looking, too, comes sooner; so does that
/// of one that has to be woken, so that of two that sleep one may begin to look.
const LOOK: Duration = Duration::from_micros(60);
/// Waits of which one is spent looking although the last ones were longer than that.
const TRY_EVERY: u32 = 16;
/// How often another thread may have taken what woke one that waits: it receives then what this one would, and this one sleeps
/// at its channel.
const TOO_LATE: u32 = 3;
/// How many waits in a row count.
const SCORE: u32 = 8;
/// What a wait that was too long takes from the score.
const PENALTY: u32 = 2;
/// What a thread sleeps at, at most: the channel, the port's descriptors (three) and those of frames (two).
const DESCRIPTORS: usize = 1 + 3 + 2;

/// What is known about the waits for the events of one channel.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    /// Waits that were short, less those that were not.
    score: AtomicU32,
    waits: AtomicU32,
    /// The program waits in `ibv_get_cq_event`, not in poll(2): until it does, nobody need receive for it.
    waits_here: AtomicBool,
    /// The worker made an event since the program last waited.
    by_worker: AtomicBool,
}

impl Patience {
    /// An event is added, by the calling thread.
    pub(crate) fn note_event(&self) {
        if worker::is_here() {
            self.by_worker.store(true, Ordering::Relaxed);
        }
    }

    /// The program found an event that was there already.
    pub(crate) fn note_found(&self) {
        if self.by_worker.swap(false, Ordering::Relaxed) {
            // It may have slept at the descriptor.
            self.waits_here.store(false, Ordering::Relaxed);
        }
    }

    /// The program does not wait for events here.
    pub(crate) fn note_polled(&self) {
        self.waits_here.store(false, Ordering::Relaxed);
    }

    /// Whether the program is likely to wait here for the next event.
    pub(crate) fn waits(&self) -> bool {
        self.waits_here.load(Ordering::Relaxed)
    }

    /// How long to look.
    fn look(&self) -> Duration {
        let waits = self.waits.fetch_add(1, Ordering::Relaxed);
        if self.score.load(Ordering::Relaxed) > 0 || waits.is_multiple_of(TRY_EVERY) {
            LOOK
        } else {
            Duration::ZERO
        }
    }

    /// A wait has ended.
    fn note_waited(&self, time: Duration) {
        self.waits_here.store(true, Ordering::Relaxed);
        self.by_worker.store(false, Ordering::Relaxed);
        let score = self.score.load(Ordering::Relaxed);
        let score =
            if time <= LOOK { (score + 1).min(SCORE) } else { score.saturating_sub(PENALTY) };
        self.score.store(score, Ordering::Relaxed);
    }
}

thread_local! {
    static WAITS: Waits = const { Waits(Cell::new(None)) };
}

/// Whether this thread is counted as waiting, and where. Ends with the thread, which may be cancelled.
struct Waits(Cell<Option<&'static Engine>>);

impl Drop for Waits {
    fn drop(&mut self) {
        if let Some(engine) = self.0.take().filter(|engine| engine.is_current()) {
            engine.waits_no_longer();
        }
    }
}

impl Engine {
    /// A thread begins to wait. Whether it is the only one.
    fn begin_wait(&'static self) -> bool {
        // It did not come back from its last wait.
        let counted = WAITS.try_with(|waits| waits.0.replace(Some(self)).is_some());
        let others = if counted.unwrap_or(false) {
            self.waiters.load(Ordering::SeqCst).saturating_sub(1)
        } else {
            self.waiters.fetch_add(1, Ordering::SeqCst)
        };
        others == 0
    }

    fn waits_no_longer(&'static self) {
        if self.waiters.fetch_sub(1, Ordering::SeqCst) > 1 {
            self.end_lease();
        }
    }

    /// Receives until `take` gets an event of the channel whose descriptor is `channel`. `None`: the caller waits at the
    /// descriptor, since others wait already or were faster, and calls [`end_wait`](Self::end_wait) then.
    pub(crate) fn wait_for_event<T>(
        &'static self,
        patience: &Patience,
        channel: BorrowedFd<'_>,
        mut take: impl FnMut() -> Option<T>,
    ) -> io::Result<Option<T>> {
        if !self.begin_wait() {
            self.end_lease();
            return Ok(None);
        }
        let begin = self.now();
        let until = begin + patience.look();
        let mut late = 0;
        loop {
            loop {
                self.poll_progress();
                if let Some(event) = take() {
                    patience.note_waited(self.now().since(begin));
                    self.end_wait();
                    return Ok(Some(event));
                }
                if self.now() >= until {
                    break;
                }
                std::hint::spin_loop();
            }
            self.flush_owed_at_once();
            self.worker.note_waiter();
            self.let_shm_wake();
            match self.sleep_at(channel) {
                Ok(Ready { input, event, closed }) => {
                    if input && self.receive_ready() == 0 {
                        late += 1;
                        // Another thread is at it, and may wait for this processor.
                        std::thread::yield_now();
                    }
                    if event && !input {
                        let event = take();
                        if event.is_some() {
                            patience.note_waited(self.now().since(begin));
                            self.end_wait();
                            return Ok(event);
                        }
                        // Somebody else was faster.
                        late = TOO_LATE;
                    }
                    if closed || late >= TOO_LATE {
                        self.end_lease();
                        return Ok(None);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted && restarts() => {}
                Err(error) => {
                    self.end_wait();
                    return Err(error);
                }
            }
        }
    }

    /// A thread waits no longer. Others that do had left the sockets to it.
    pub(crate) fn end_wait(&'static self) {
        // Without the mark its end would count a second time.
        let _ = WAITS.try_with(|waits| waits.0.take());
        self.waits_no_longer();
    }

    /// Sleeps until there is input or an event. May be cancelled.
    fn sleep_at(&self, channel: BorrowedFd<'_>) -> io::Result<Ready> {
        let mut set = [libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; DESCRIPTORS];
        let fds = std::iter::once(channel).chain(self.port.fds()).chain(self.switch.fds());
        for (at, fd) in set.iter_mut().zip(fds) {
            at.fd = fd.as_raw_fd();
        }
        // SAFETY: live entries, as many as are passed.
        let n = unsafe { libc::poll(set.as_mut_ptr(), DESCRIPTORS as libc::nfds_t, -1) };
        if n < 0 {
            return Err(io::Error::last_os_error());
        }
        let closed = set.iter().any(|at| at.revents & libc::POLLNVAL != 0);
        let [event, input @ ..] = set.map(|at| at.revents & !libc::POLLNVAL != 0);
        Ok(Ready { event, input: input.contains(&true), closed })
    }
}

/// What a sleep ended with.
struct Ready {
    event: bool,
    input: bool,
    /// The program has closed one of the descriptors.
    closed: bool,
}

/// Whether a signal handler lets a read(2) that it interrupted go on (`SA_RESTART`), as far as one can tell afterwards: poll(2),
/// which waits in its place, never does. With handlers of both kinds it does not: who installs one that interrupts
/// reckons with `EINTR`.
fn restarts() -> bool {
    let faults = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP];
    (1..=libc::SIGRTMAX()).filter(|signal| !faults.contains(signal)).all(|signal| {
        // SAFETY: all-zero is a valid sigaction; the call gets a live one, and changes nothing.
        let action = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &raw mut action);
            action
        };
        matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN)
            || action.sa_flags & libc::SA_RESTART != 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_where_events_come_soon_and_tries_at_times() {
        let patience = Patience::default();
        let looks = |n| (0..n).filter(|_| patience.look() > Duration::ZERO).count();
        assert_eq!(looks(160), 10);
        patience.note_waited(LOOK);
        assert_eq!(looks(160), 160);
        for _ in 0..100 {
            patience.note_waited(Duration::ZERO);
        }
        for _ in 0..SCORE / PENALTY {
            assert_eq!(looks(16), 16);
            patience.note_waited(LOOK * 2);
        }
        assert_eq!(looks(160), 10);
    }

    #[test]
    fn a_program_that_sleeps_at_the_descriptor_is_found_out() {
        let patience = Patience::default();
        assert!(!patience.waits());
        patience.note_waited(LOOK);
        patience.note_event();
        patience.note_found();
        assert!(patience.waits(), "it was there, but made by the program's own thread");
        patience.by_worker.store(true, Ordering::Relaxed);
        patience.note_found();
        assert!(!patience.waits());
    }
}
