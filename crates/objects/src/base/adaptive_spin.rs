//! How long a thread that waits for a completion event looks for it before it sleeps.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use super::PROMPT_REPLY;

/// The time for which a thread looks for an event before it sleeps. A peer that has to be woken answers within it, too, so that
/// of two that sleep one may begin to look (test `looks_where_events_come_soon_and_tries_at_times`).
const LOOK: Duration = PROMPT_REPLY;
/// One in this many waits is spent looking, although the last ones were longer than that.
const TRY_EVERY: u32 = 16;
/// The number of waits in a row that count.
const SCORE: u32 = 8;
/// The amount that a wait that was too long takes from the score.
const PENALTY: u32 = 2;

thread_local! {
    /// Whether the calling thread is the worker.
    pub static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Experience with the waits for the events of one channel.
#[derive(Debug, Default)]
pub struct AdaptiveSpin {
    /// Waits that were short, less those that were not.
    score: AtomicU32,
    waits: AtomicU32,
    /// The program waits in `ibv_get_cq_event`, not in poll(2). Until it does, no other thread need receive for it.
    waits_here: AtomicBool,
    /// The worker made an event since the program last waited.
    by_worker: AtomicBool,
}

impl AdaptiveSpin {
    /// An event is added, by the calling thread.
    pub(crate) fn note_event(&self) {
        if IS_WORKER.get() {
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

    /// The time to look.
    pub fn look(&self) -> Duration {
        let waits = self.waits.fetch_add(1, Ordering::Relaxed);
        if self.score.load(Ordering::Relaxed) > 0 || waits.is_multiple_of(TRY_EVERY) {
            LOOK
        } else {
            Duration::ZERO
        }
    }

    /// A wait has ended.
    pub fn note_waited(&self, time: Duration) {
        self.waits_here.store(true, Ordering::Relaxed);
        self.by_worker.store(false, Ordering::Relaxed);
        let score = self.score.load(Ordering::Relaxed);
        let score =
            if time <= LOOK { (score + 1).min(SCORE) } else { score.saturating_sub(PENALTY) };
        self.score.store(score, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_where_events_come_soon_and_tries_at_times() {
        let spin = AdaptiveSpin::default();
        let looks = |n| (0..n).filter(|_| spin.look() > Duration::ZERO).count();
        assert_eq!(looks(160), 10);
        spin.note_waited(LOOK);
        assert_eq!(looks(160), 160);
        for _ in 0..100 {
            spin.note_waited(Duration::ZERO);
        }
        for _ in 0..SCORE / PENALTY {
            assert_eq!(looks(16), 16);
            spin.note_waited(LOOK * 2);
        }
        assert_eq!(looks(160), 10);
    }

    #[test]
    fn a_program_that_sleeps_at_the_descriptor_is_found_out() {
        let spin = AdaptiveSpin::default();
        assert!(!spin.waits());
        spin.note_waited(LOOK);
        spin.note_event();
        spin.note_found();
        assert!(spin.waits(), "it was there, but made by the program's own thread");
        spin.by_worker.store(true, Ordering::Relaxed);
        spin.note_found();
        assert!(!spin.waits());
    }
}
