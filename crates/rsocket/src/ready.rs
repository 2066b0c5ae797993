//! Operations that a socket could do without waiting.

/// The events of `poll(2)` that hold, and counts for callers that want changes only.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Ready {
    pub(crate) events: i16,
    /// Grows with each event that makes the socket readable.
    pub(crate) read_edges: u64,
    /// Grows when it becomes writable.
    pub(crate) write_edges: u64,
}

impl Ready {
    pub(crate) fn new(events: i16) -> Self {
        Self { events, read_edges: 0, write_edges: 0 }
    }

    /// The part of it that a program which asked for `events` sees.
    pub(crate) fn asked(&self, events: i16) -> i16 {
        self.events & (events | libc::POLLERR | libc::POLLHUP | libc::POLLNVAL)
    }
}
