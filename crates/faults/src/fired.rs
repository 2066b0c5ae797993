//! Whether a rule has ever done something.

use std::sync::atomic::{AtomicBool, Ordering};

/// A mark of a rule that has done something. It is no part of what the rule says: a copy of the rule has done nothing, and rules that
/// say the same are equal.
#[derive(Debug, Default)]
pub struct Fired(AtomicBool);

impl Fired {
    /// The rule does something.
    pub fn set(&self) {
        // Threads that inject faults share the mark, and most of them find it there.
        if !self.is_set() {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// Whether it has.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Clone for Fired {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl PartialEq for Fired {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Fired {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_stays_and_a_copy_has_none() {
        let fired = Fired::default();
        assert!(!fired.is_set());
        fired.set();
        fired.set();
        let copy = fired.clone();
        assert!(fired.is_set() && !copy.is_set() && fired == copy);
    }
}
