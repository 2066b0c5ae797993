//! The end of the process: the last messages for its peers, and for the log.
//!
//! A thread of its own says it, which starts with the device and sleeps until then. The one that calls exit(3) has lost its
//! thread-local data, which logging needs, may hold any lock, and may be in a signal handler that interrupted malloc(3): it
//! allocates nothing here.

use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyverbs_objects::fork;
use anyverbs_proto::counters::Counter;
use anyverbs_transport::progress::Debts;
use anyverbs_transport::progress::worker::spawn_quiet;

use super::Device;

/// Longest that exit(3) is held up.
const PATIENCE: Duration = Duration::from_secs(1);
/// Longest wait of the thread for each lock, and of the caller itself if there is no thread.
const LOCK_PATIENCE: Duration = Duration::from_millis(200);
const LOCK_PATIENCE_HERE: Duration = Duration::from_millis(2);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    NoThread,
    Sleeping,
    Wanted,
    Done,
}

/// Where the caller and the thread meet: the standard library's locks, which allocate nothing where they wait.
#[derive(Debug)]
pub(super) struct Farewell {
    state: Mutex<State>,
    changed: Condvar,
}

impl Default for Farewell {
    fn default() -> Self {
        Self { state: Mutex::new(State::NoThread), changed: Condvar::new() }
    }
}

impl Farewell {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, state: State) {
        *self.lock() = state;
        self.changed.notify_all();
    }

    fn wait_until_wanted(&self) {
        let is_early = |state: &mut State| *state == State::Sleeping;
        drop(self.changed.wait_while(self.lock(), is_early));
    }

    /// Whether the thread was there to do it.
    fn ask(&self) -> bool {
        let mut state = self.lock();
        match *state {
            State::NoThread => return false,
            State::Sleeping => *state = State::Wanted,
            State::Wanted | State::Done => {}
        }
        self.changed.notify_all();
        drop(self.changed.wait_timeout_while(state, PATIENCE, |state| *state != State::Done));
        true
    }
}

/// Called by exit(3).
pub(super) extern "C" fn at_exit() {
    let Some(device) = fork::current::<Device>() else { return };
    if !device.farewell.ask() {
        device.say_farewell(LOCK_PATIENCE_HERE);
    }
}

impl Device {
    /// Arranges that the end of the process is announced.
    pub(super) fn watch_for_exit(&'static self) {
        self.farewell.set(State::Sleeping);
        let spawned = spawn_quiet("anyverbs-exit", || {
            self.farewell.wait_until_wanted();
            self.say_farewell(LOCK_PATIENCE);
            self.log_counters();
            self.farewell.set(State::Done);
        });
        if let Err(error) = spawned {
            tracing::debug!(%error, "no thread for the end of the process");
            self.farewell.set(State::NoThread);
        }
        // SAFETY: an extern "C" function without preconditions. Full: peers wait for their timeouts.
        unsafe { libc::atexit(at_exit) };
    }

    /// Sends last ACKs and disconnects. A peer whose last message was received, or that is connected, must not learn
    /// from a timeout that this process has ended.
    fn say_farewell(&'static self, patience: Duration) {
        self.gsi.shut_down(patience);
        self.driver.flush(Debts::AtExit);
        self.driver.say_farewell();
    }

    /// Logs the counters of a process at its end, for the analysis of failures.
    fn log_counters(&self) {
        if tracing::enabled!(target: "anyverbs::counters", tracing::Level::INFO) {
            let counted =
                Counter::ALL.iter().map(|c| (c.name().to_owned(), self.counters().read(*c)));
            let counted = counted.chain(self.gsi.cm_counters());
            let shown: Vec<_> =
                counted.filter(|(_, n)| *n > 0).map(|(name, n)| format!("{name}={n}")).collect();
            tracing::info!(
                target: "anyverbs::counters",
                kernel_drops = self.transport.links.port.dropped(),
                unsent = self.transport.links.send_drops.load(Ordering::Relaxed),
                "{}",
                shown.join(" ")
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_is_woken_and_waited_for() {
        let farewell: &'static Farewell = Box::leak(Box::default());
        assert!(!farewell.ask());
        farewell.set(State::Sleeping);
        let thread = std::thread::spawn(|| {
            farewell.wait_until_wanted();
            farewell.set(State::Done);
        });
        assert!(farewell.ask() && farewell.ask());
        assert_eq!(*farewell.lock(), State::Done);
        thread.join().unwrap();
    }
}
