//! Warnings that a program can cause again and again: said at first, then counted.

use std::sync::atomic::{AtomicU64, Ordering};

/// Objects that one warning tells apart.
const OBJECTS: usize = 4;

/// Counts the causes of one warning, by object. The first [`OBJECTS`] have a count each, all others have one together,
/// so that the memory is bounded. Takes no lock.
#[derive(Debug)]
pub struct Repeats {
    /// The objects, 0 where there is none yet, and their counts.
    known: [(AtomicU64, AtomicU64); OBJECTS],
    others: AtomicU64,
}

impl Default for Repeats {
    fn default() -> Self {
        Self::new()
    }
}

impl Repeats {
    /// None so far.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            known: [const { (AtomicU64::new(0), AtomicU64::new(0)) }; OBJECTS],
            others: AtomicU64::new(0),
        }
    }

    /// Counts one. Returns the count if it should be logged: the first, the tenth, the hundredth, and so on.
    pub fn count(&self, object: u64) -> Option<u64> {
        let key = object.saturating_add(1);
        let mine = self.known.iter().find(|(known, _)| {
            match known.compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => true,
                Err(other) => other == key,
            }
        });
        let count = mine.map_or(&self.others, |(_, count)| count);
        let times = count.fetch_add(1, Ordering::Relaxed) + 1;
        (10u64.checked_pow(times.ilog10()) == Some(times)).then_some(times)
    }
}

/// A line of a level (`warn`, `error`) about an object, a number, which a program can cause again and again. It goes to
/// the log for the first time, the tenth, the hundredth, and so on, of each object.
#[macro_export]
macro_rules! say_again {
    ($level:ident, $object:expr, $($arg:tt)+) => {{
        static REPEATS: $crate::Repeats = $crate::Repeats::new();
        match REPEATS.count($object) {
            Some(1) => ::tracing::$level!(target: "anyverbs", $($arg)+),
            Some(times) => {
                ::tracing::$level!(target: "anyverbs", "{} ({times} times)", format_args!($($arg)+));
            }
            None => {}
        }
    }};
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_object_is_logged_first_and_at_powers_of_ten() {
        let repeats = Repeats::new();
        let said = |object| (0..100_000).filter_map(|_| repeats.count(object)).collect::<Vec<_>>();
        assert_eq!(said(0), [1, 10, 100, 1000, 10_000, 100_000]);
        assert_eq!(said(u64::MAX), [1, 10, 100, 1000, 10_000, 100_000]);
    }

    #[test]
    fn many_objects_are_counted_together() {
        let repeats = Repeats::new();
        let said = (0..10_000).filter(|object| repeats.count(*object).is_some()).count();
        assert_eq!(said, OBJECTS + 4, "each of the first, then the 1st, 10th, 100th, 1000th");
    }
}
