//! Looks at the device's processes from outside: what `anyverbs top` shows.
//!
//! A process that is looked at tells what it does on its own thread. Its program does not notice it. It tells that to processes of its user
//! only, and nothing while nobody looks.

use std::io;
use std::time::Duration;

use anyverbs_net::Registry;
use anyverbs_net::host;
pub use anyverbs_page::{Snapshot, Unreadable};

/// Looks at the processes of this user that share a UDP port.
#[derive(Debug)]
pub struct Watcher(host::Watcher);

/// A process, as it was seen last.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Its number here; 0 where it has none, in another PID namespace.
    pub pid: u32,
    /// The top byte of its queue pair numbers.
    pub slot: u8,
    /// What it told last, if anything.
    pub page: Option<Result<Snapshot, Unreadable>>,
    /// The age of that.
    pub age: Duration,
    /// What it does, if it does not answer.
    pub condition: Condition,
}

/// The condition of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// It has told something just now.
    Fresh,
    /// It is stopped, by a signal or a debugger.
    Stopped,
    /// It does not run, or its worker thread does not get the processor.
    Silent,
    /// It may have no page: a limit or a filter of the process forbids it.
    Refuses,
}

/// A page that is older than this is not fresh: its process writes several a second.
const FRESH: Duration = Duration::from_millis(1500);

impl Watcher {
    /// Looks at the processes of a [registry and a port](crate::Details).
    ///
    /// # Errors
    /// `InvalidInput` for a bad name.
    pub fn new(registry: &str, port: u16) -> io::Result<Self> {
        Ok(Self(host::Watcher::new(Registry::of_port(registry, port)?)))
    }

    /// Looks now, and waits up to `patience` for processes that do not answer at once.
    pub fn look(&mut self, patience: Duration) -> Vec<Seen> {
        let seen = self.0.look(patience);
        seen.iter()
            .map(|seen| Seen {
                pid: seen.pid.try_into().unwrap_or(0),
                slot: seen.slot,
                page: seen.contents.map(Snapshot::decode),
                age: seen.age,
                condition: match seen.contents {
                    Some(_) if seen.age < FRESH => Condition::Fresh,
                    _ if is_stopped(seen.pid) => Condition::Stopped,
                    _ if seen.refuses => Condition::Refuses,
                    _ => Condition::Silent,
                },
            })
            .collect()
    }
}

/// Tells whether a process is stopped (proc(5), `stat`).
fn is_stopped(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    matches!(state, Some('T' | 't'))
}
