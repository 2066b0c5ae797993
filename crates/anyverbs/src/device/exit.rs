//! The end of the process: the last messages for its peers, and for the log.
//!
//! A thread of its own says it, which starts with the device and sleeps until then. The one that calls exit(3) has lost its
//! thread-local data, which logging needs, may hold any lock, and may be in a signal handler that interrupted malloc(3): it
//! allocates nothing here.

use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyverbs_net::host::MAX_ENDED;
use anyverbs_objects::base::{AT_EXIT, Progress as _};
use anyverbs_objects::fork;
use anyverbs_proto::counters::{Counter, Counters};
use anyverbs_transport::progress::Debts;
use anyverbs_transport::progress::worker::spawn_quiet;

use super::Device;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    NoThread,
    Sleeping,
    Wanted,
    Done,
}

/// Where the caller and the thread meet: the standard library's locks, which allocate nothing where they wait.
#[derive(Debug)]
pub(super) struct ExitThread {
    state: Mutex<State>,
    changed: Condvar,
}

impl Default for ExitThread {
    fn default() -> Self {
        Self { state: Mutex::new(State::NoThread), changed: Condvar::new() }
    }
}

impl ExitThread {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, state: State) {
        *self.lock() = state;
        self.changed.notify_all();
    }

    fn wait_until_wanted(&self) {
        let is_asleep = |state: &mut State| *state == State::Sleeping;
        drop(self.changed.wait_while(self.lock(), is_asleep));
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
        drop(self.changed.wait_timeout_while(state, AT_EXIT, |state| *state != State::Done));
        true
    }
}

/// Called by exit(3).
pub(super) extern "C" fn at_exit() {
    let Some(device) = fork::current::<Device>() else { return };
    if !device.exit_thread.ask() {
        device.tell_peers();
    }
}

impl Device {
    /// Arranges that the end of the process is announced.
    pub(super) fn watch_for_exit(&'static self) {
        self.exit_thread.set(State::Sleeping);
        let spawned = spawn_quiet(c"anyverbs-exit", || {
            self.exit_thread.wait_until_wanted();
            let end = self.tell_peers();
            self.leave_counters();
            // The log gets the faults of the last messages. That may wait for a thread that writes to it, perhaps the one that ends the process.
            self.driver.explain_failures();
            self.log_counters(end);
            self.log_idle_faults();
            self.exit_thread.set(State::Done);
        });
        if let Err(error) = spawned {
            tracing::debug!(%error, "no thread for the end of the process");
            self.exit_thread.set(State::NoThread);
        }
        // SAFETY: an extern "C" function without preconditions. Full: peers wait for their timeouts.
        unsafe { libc::atexit(at_exit) };
    }

    /// Sends last ACKs and disconnects. A peer whose last message was received, or that is connected, must not learn
    /// from a timeout that this process has ended. The connection manager gets half of the time; returns its end.
    fn tell_peers(&'static self) -> Instant {
        let end = Instant::now() + AT_EXIT / 2;
        self.gsi.shut_down(end);
        self.driver.flush(Debts::AtExit);
        self.driver.repeat_last_answers();
        end
    }

    /// Leaves the counters to the host, whose sums must not fall.
    fn leave_counters(&'static self) {
        let counters = self.counters();
        if let Some(slot) = self.transport.links.port.slot() {
            let values = |of: &Counters| -> [u64; Counter::ALL.len()] {
                std::array::from_fn(|n| of.read(Counter::ALL[n]))
            };
            let all: Vec<_> = counters.iter().map(values).collect();
            const { assert!(Counter::ALL.len() <= MAX_ENDED, "the store keeps all counters") };
            slot.store().add_ended(Counter::DIGEST, &all);
        }
    }

    /// Names the rules of a script of faults that never did anything: whoever wrote them believes that they did.
    fn log_idle_faults(&self) {
        let faults = self.transport.links.faults.iter();
        for line in faults.flat_map(|faults| faults.idle(self.core.now())) {
            tracing::warn!(target: "anyverbs", "faults: {line}");
        }
    }

    /// Logs the counters of a process at its end, for the analysis of failures.
    fn log_counters(&self, end: Instant) {
        if tracing::enabled!(target: "anyverbs::counters", tracing::Level::INFO) {
            self.counters();
            let counted = Counter::ALL.iter().map(|c| (c.name().to_owned(), self.core.total(*c)));
            let counted = counted.chain(self.gsi.cm_counters(end));
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
        let exit_thread: &'static ExitThread = Box::leak(Box::default());
        assert!(!exit_thread.ask());
        exit_thread.set(State::Sleeping);
        let thread = std::thread::spawn(|| {
            exit_thread.wait_until_wanted();
            exit_thread.set(State::Done);
        });
        assert!(exit_thread.ask() && exit_thread.ask());
        assert_eq!(*exit_thread.lock(), State::Done);
        thread.join().unwrap();
    }

    #[test]
    fn the_end_of_the_process_is_not_delayed_long() {
        let exit_thread = ExitThread::default();
        exit_thread.set(State::Sleeping);
        let (begin, watch) = (Instant::now(), anyverbs_testing::Stopwatch::start());
        assert!(exit_thread.ask(), "the thread does not get done");
        assert!(begin.elapsed() >= AT_EXIT && watch.elapsed() < 2 * AT_EXIT);
    }
}
