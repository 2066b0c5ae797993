//! The words of a lock, as the model checker knows them.

use std::sync::atomic::Ordering;
use std::time::Duration;

use anyverbs_locks::fast::Word;
use loom::sync::atomic::{AtomicU32, fence};
use loom::sync::{Condvar, Mutex};
use loom::thread;

/// A word of the model checker, and who sleeps at it. The light fence is a whole one here, since the checker knows no
/// membarrier(2). Without `FENCED` there is none, to show that the models notice.
pub(crate) struct Model<const FENCED: bool> {
    word: AtomicU32,
    /// Those who sleep and were not woken.
    sleepers: Mutex<u32>,
    woken: Condvar,
}

impl<const FENCED: bool> Default for Model<FENCED> {
    fn default() -> Self {
        Self { word: AtomicU32::new(0), sleepers: Mutex::new(0), woken: Condvar::new() }
    }
}

impl<const FENCED: bool> Word for Model<FENCED> {
    fn load(&self, order: Ordering) -> u32 {
        self.word.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        // For the checker, a swap of a thread that waits may come behind the release that it precedes. Swaps have one order.
        self.word.swap(value, order);
    }

    fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.word.swap(value, order)
    }

    fn light_fence() {
        if FENCED {
            fence(Ordering::SeqCst);
        }
    }

    fn heavy_fence() -> bool {
        fence(Ordering::SeqCst);
        true
    }

    fn sleep(&self, value: u32, timeout: Option<Duration>) {
        assert!(timeout.is_none(), "a model has no clock");
        // As in the kernel, the look and the sleep are one step for whoever wakes. An addition reads the last value.
        let mut sleepers = self.sleepers.lock().unwrap();
        if self.word.fetch_add(0, Ordering::Relaxed) != value {
            return;
        }
        *sleepers += 1;
        if FENCED {
            drop(self.woken.wait(sleepers).unwrap());
            return;
        }
        // The only thread that sleeps. The checker would abort the process if it found it asleep for ever.
        while *sleepers > 0 {
            drop(sleepers);
            thread::yield_now();
            sleepers = self.sleepers.lock().unwrap();
        }
    }

    fn wake(&self) -> bool {
        let mut sleepers = self.sleepers.lock().unwrap();
        let has_one = *sleepers > 0;
        *sleepers = sleepers.saturating_sub(1);
        self.woken.notify_one();
        has_one
    }

    fn spin(&self, mut is_over: impl FnMut() -> bool) -> bool {
        is_over()
    }

    fn give_way(&self) {
        thread::yield_now();
    }
}
