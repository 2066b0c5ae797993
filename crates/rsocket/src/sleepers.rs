//! The threads that sleep on a descriptor, and how all of them are woken.

use std::os::fd::{AsFd, BorrowedFd};

use anyverbs::{CompChannel, Cq};
use parking_lot::Mutex;

use crate::errno::Result;
use crate::eventfd::EventFd;

/// Threads that sleep, or poll, on one epoll set. The set holds the descriptor of this, and channels of events.
///
/// An event must wake all threads, but the one that reads it takes it from the others. So whoever reads one wakes them by
/// [`Sleepers::wake`], after it has put down what the event says. The same holds for a change that comes by no event.
///
/// No thread sleeps through a change. A thread begins, looks, sleeps and ends, in this order. If it begins before `wake`,
/// that counts it, and the descriptor is readable until it ends. Otherwise it sees the change when it looks. Threads that
/// begin after `wake` do not keep the descriptor readable.
#[derive(Debug)]
pub(crate) struct Sleepers {
    state: Mutex<State>,
    /// Readable while `due` is not 0.
    alarm: EventFd,
}

#[derive(Debug, Default)]
struct State {
    asleep: u32,
    /// The queue owes an event, or the event waits in the channel.
    armed: bool,
    /// How often `wake` found a thread asleep.
    wakes: u64,
    /// Threads that were asleep at the last of these, and have not ended since.
    due: u32,
}

/// A sleep of a thread.
#[derive(Clone, Copy, Debug)]
#[must_use = "`Sleepers::end` takes it"]
pub(crate) struct Asleep {
    /// `wakes` at its begin.
    since: u64,
}

impl Sleepers {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { state: Mutex::default(), alarm: EventFd::new()? })
    }

    /// A thread is about to sleep: the queue, if there is one, owes an event from now on. The thread must look for
    /// earlier completions, and for changes, afterwards.
    pub(crate) fn begin(&self, cq: Option<&Cq>) -> Asleep {
        let mut state = self.state.lock();
        state.asleep += 1;
        if !state.armed
            && let Some(cq) = cq
        {
            state.armed = cq.req_notify(false).is_ok();
        }
        Asleep { since: state.wakes }
    }

    /// A thread has slept; `woken`: there was something to read.
    pub(crate) fn end(&self, asleep: Asleep, woken: bool, channel: Option<&CompChannel>) {
        let mut state = self.state.lock();
        state.asleep -= 1;
        if asleep.since < state.wakes {
            state.due -= 1;
            if state.due == 0 {
                self.alarm.clear();
            }
        }
        if woken
            && let Some(channel) = channel
            && channel.get_event().is_ok()
        {
            state.armed = false;
            self.wake_all(&mut state);
        }
    }

    /// Whether a thread sleeps, or is about to. One that begins later sees what the caller has changed.
    pub(crate) fn are_there(&self) -> bool {
        self.state.lock().asleep > 0
    }

    /// Wakes all threads that sleep now. Something has changed for them, and no other descriptor tells of it.
    pub(crate) fn wake(&self) {
        self.wake_all(&mut self.state.lock());
    }

    fn wake_all(&self, state: &mut State) {
        if state.asleep == 0 {
            return;
        }
        if state.due == 0 {
            self.alarm.set();
        }
        state.wakes += 1;
        state.due = state.asleep;
    }
}

impl AsFd for Sleepers {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.alarm.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    use super::*;
    use crate::sleep;

    fn is_readable(sleepers: &Sleepers) -> bool {
        let fd = sleepers.as_fd().as_raw_fd();
        let mut set = [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }];
        sleep::poll(&mut set, Some(Duration::ZERO)).unwrap() > 0
    }

    #[test]
    fn those_who_sleep_are_woken_and_those_who_come_later_are_not_waited_for() {
        let sleepers = Sleepers::new().unwrap();
        sleepers.wake();
        assert!(!is_readable(&sleepers), "nobody slept");
        let (a, b) = (sleepers.begin(None), sleepers.begin(None));
        assert!(!is_readable(&sleepers));
        sleepers.wake();
        let later = sleepers.begin(None);
        assert!(is_readable(&sleepers));
        sleepers.end(a, true, None);
        assert!(is_readable(&sleepers), "b sleeps still");
        sleepers.end(b, true, None);
        assert!(!is_readable(&sleepers));
        sleepers.end(later, false, None);
        sleepers.wake();
        assert!(!is_readable(&sleepers), "nobody sleeps");
    }

    #[test]
    fn a_second_change_wakes_those_who_came_after_the_first() {
        let sleepers = Sleepers::new().unwrap();
        let first = sleepers.begin(None);
        sleepers.wake();
        let second = sleepers.begin(None);
        sleepers.wake();
        sleepers.end(first, true, None);
        assert!(is_readable(&sleepers), "for the second");
        sleepers.end(second, true, None);
        assert!(!is_readable(&sleepers));
    }
}
