//! The end of the process: what its peers, and who reads the log, should hear.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::{Engine, worker};
use crate::fork;

/// Longest that exit(3) is held up.
const PATIENCE: Duration = Duration::from_secs(1);

/// Called by exit(3). The work is done by a thread of its own: that of the caller has lost its thread-local data, which
/// logging needs, and may hold any lock.
pub(super) extern "C" fn at_exit() {
    static DONE: Mutex<bool> = Mutex::new(false);
    static CHANGED: Condvar = Condvar::new();
    let Some(engine) = fork::current::<Engine>() else { return };
    let spawned = worker::spawn_quiet("anyverbs-exit", || {
        engine.say_farewell();
        engine.log_counters();
        *DONE.lock() = true;
        CHANGED.notify_all();
    });
    if spawned.is_err() {
        return engine.say_farewell();
    }
    let mut done = DONE.lock();
    CHANGED.wait_while_for(&mut done, |done| !*done, PATIENCE);
}

impl Engine {
    /// A peer whose last message was received, or that is connected, must not learn from a timeout that this process has
    /// ended.
    fn say_farewell(&'static self) {
        self.shut_gsi_down();
        self.flush_owed_at_exit();
    }
}
