//! A thread of the program that waits for a completion event (`ibv_get_cq_event`) receives by itself. If the network
//! woke the worker, and the worker the thread, that would cost a second wake-up.
//!
//! It first looks for a while, if events have lately come that soon. Then it sleeps at the sockets and the channel's
//! descriptor. The worker takes that for polls and stays away. One thread does so at a time, since an arrival would
//! wake all of them. Others sleep at their channel, and the worker serves them. A thread need not come back from its
//! sleep: it may be cancelled there or jump out of it (siglongjmp(3)). As long as it counts as waiting, the worker
//! serves all others.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering;

use anyverbs_links::Links;
use anyverbs_objects::base::AdaptiveSpin;

use super::Driver;
use super::owed::Debts;
use super::receive::Reader;

/// Times that another thread may have taken the event that woke a waiting one. Then that thread receives in its place,
/// and this one sleeps at its channel. Otherwise each packet would wake both for as long as the other polls. The first
/// times may be chance, and at its channel this thread costs a second wake-up.
const TOO_LATE: u32 = 3;
/// The most descriptors that a thread sleeps at: the channel, the links' and those of frames (two).
const DESCRIPTORS: usize = 1 + Links::MOST_FDS + 2;

thread_local! {
    static WAITS: Waits = const { Waits(Cell::new(None)) };
}

/// Whether this thread is counted as waiting, and where. Ends with the thread, which may be cancelled.
struct Waits(Cell<Option<&'static Driver>>);

impl Drop for Waits {
    fn drop(&mut self) {
        if let Some(driver) = self.0.take().filter(|driver| driver.core.is_current()) {
            driver.waits_no_longer();
        }
    }
}

impl Driver {
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
            self.end_polling();
        }
    }

    /// Receives until `found` gets an event of the channel whose descriptor is `channel`. False: the caller waits at the
    /// descriptor, since others wait already or were faster, and calls [`end_wait`](Self::end_wait) then.
    pub(super) fn wait_for_event(
        &'static self,
        spin: &AdaptiveSpin,
        channel: BorrowedFd<'_>,
        found: &mut dyn FnMut() -> bool,
    ) -> io::Result<bool> {
        if !self.begin_wait() {
            self.end_polling();
            return Ok(false);
        }
        let begin = self.core.now();
        let until = begin + spin.look();
        let mut late = 0;
        loop {
            loop {
                self.poll_progress(None);
                if found() {
                    spin.note_waited(self.core.now().since(begin));
                    self.end_wait();
                    return Ok(true);
                }
                if self.core.now() >= until {
                    break;
                }
                std::hint::spin_loop();
            }
            self.flush(Debts::AtOnce);
            self.worker.note_waiter();
            self.let_shm_wake();
            match self.sleep_at(channel) {
                Ok(Ready { input, event, closed }) => {
                    if input && self.receive(Reader::Wait) == 0 {
                        late += 1;
                        // Another thread is at it, and may wait for this processor.
                        std::thread::yield_now();
                    }
                    if event && !input {
                        if found() {
                            spin.note_waited(self.core.now().since(begin));
                            self.end_wait();
                            return Ok(true);
                        }
                        // Somebody else was faster.
                        late = TOO_LATE;
                    }
                    if closed || late >= TOO_LATE {
                        self.end_polling();
                        return Ok(false);
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
        let fds = std::iter::once(channel).chain(self.links.fds()).chain(self.above().frames.fds());
        for (at, fd) in set.iter_mut().zip(fds) {
            at.fd = fd.as_raw_fd();
        }
        // SAFETY: live entries, of the given number.
        let n = unsafe { libc::poll(set.as_mut_ptr(), DESCRIPTORS as libc::nfds_t, -1) };
        if n < 0 {
            return Err(io::Error::last_os_error());
        }
        let closed = set.iter().any(|at| at.revents & libc::POLLNVAL != 0);
        let [event, input @ ..] = set.map(|at| at.revents & !libc::POLLNVAL != 0);
        Ok(Ready { event, input: input.contains(&true), closed })
    }
}

/// The events that ended a sleep.
struct Ready {
    event: bool,
    input: bool,
    /// The program has closed one of the descriptors.
    closed: bool,
}

/// Tells whether a signal handler lets a read(2) that it interrupted go on (`SA_RESTART`), as far as one can tell
/// afterwards: poll(2), which waits in its place, never does. With handlers of both kinds it does not: a program that
/// installs one that interrupts reckons with `EINTR`.
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
