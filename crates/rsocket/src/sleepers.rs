//! The threads that sleep on a completion channel, and whether it will wake them.

use anyverbs::{CompChannel, Cq};
use parking_lot::Mutex;

/// Threads that sleep, or poll, on one channel.
///
/// The channel's event must wake all of them, but the thread that reads it takes it from the others. So the last one
/// reads it.
#[derive(Debug, Default)]
pub(crate) struct Sleepers(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    asleep: u32,
    /// The queue owes an event, or the event waits in the channel.
    armed: bool,
}

impl Sleepers {
    /// A thread is about to sleep: the queue, if there is one, owes an event from now on. The thread must look for
    /// earlier completions afterwards.
    pub(crate) fn begin(&self, cq: Option<&Cq>) {
        let mut state = self.0.lock();
        state.asleep += 1;
        if !state.armed
            && let Some(cq) = cq
        {
            state.armed = cq.req_notify(false).is_ok();
        }
    }

    /// A thread has slept; `woken`: there was something to read.
    pub(crate) fn end(&self, woken: bool, channel: Option<&CompChannel>) {
        let mut state = self.0.lock();
        state.asleep -= 1;
        if woken
            && state.asleep == 0
            && let Some(channel) = channel
            && let Ok(event) = channel.get_event()
        {
            event.ack();
            state.armed = false;
        }
    }
}
