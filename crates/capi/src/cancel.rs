//! Calls that are cancellation points, and those that are none.
//!
//! Calls that set up or take down are not cancellation points. They make system calls below locks, so they disable
//! cancellation ([`Uncancelled`]).
//!
//! Waiting in a call that a thread may be cancelled in (`pthread_cancel(3)`): programs end their event threads so.
//!
//! A handler of the C library gives up what a cancelled thread holds ([`undone_if_cancelled`]).
//!
//! The sanitizers of a program are told of both kinds.

use std::sync::Arc;

use anyverbs::undone_if_cancelled;
use anyverbs_sanitizers::{self as sanitizers, Quiet};

/// A call that is no cancellation point, while it lives.
pub(crate) struct Uncancelled {
    _uncancelled: anyverbs::Uncancelled,
    _quiet: Quiet,
}

impl Uncancelled {
    /// The call begins.
    pub(crate) fn new() -> Self {
        sanitizers::init();
        sanitizers::release();
        Self { _uncancelled: anyverbs::Uncancelled::new(), _quiet: Quiet::new() }
    }
}

/// Holds `object` while `wait` waits in a system call, during which the thread may be cancelled. `wait` holds nothing else
/// meanwhile, and does not panic.
pub(crate) fn holding<T, R>(object: Arc<T>, wait: impl FnOnce(&T) -> R) -> R {
    sanitizers::init();
    sanitizers::release();
    let quiet = Quiet::new();
    let object = Arc::into_raw(object);
    // SAFETY: the object is ours until the last of these, which is either in the handler, after which no code here runs,
    // or below.
    let result = unsafe {
        let undo = || {
            Arc::decrement_strong_count(object);
            sanitizers::cancelled();
        };
        let result = undone_if_cancelled(undo, || wait(&*object));
        Arc::decrement_strong_count(object);
        result
    };
    drop(quiet);
    sanitizers::acquire();
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_object_is_given_up_once() {
        let object = Arc::new(7);
        assert_eq!(holding(Arc::clone(&object), |n| *n + Arc::strong_count(&object)), 9);
        assert_eq!(Arc::strong_count(&object), 1);
    }
}
