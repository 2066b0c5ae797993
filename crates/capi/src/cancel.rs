//! Calls that are cancellation points, and those that are none.
//!
//! Calls that set up or take down are not cancellation points. They make system calls below locks, so they disable
//! cancellation ([`Uncancelled`]).
//!
//! Waiting in a call that a thread may be cancelled in (`pthread_cancel(3)`): programs end their event threads so.
//!
//! A handler of the C library gives up what a cancelled thread holds ([`undone_if_cancelled`]).

use std::sync::Arc;

pub(crate) use anyverbs::Uncancelled;
use anyverbs::undone_if_cancelled;

/// Holds `object` while `wait` waits in a system call, during which the thread may be cancelled. `wait` holds nothing else
/// meanwhile, and does not panic.
pub(crate) fn holding<T, R>(object: Arc<T>, wait: impl FnOnce(&T) -> R) -> R {
    let object = Arc::into_raw(object);
    // SAFETY: the object is ours until the last of these, which is either in the handler, after which no code here runs,
    // or below.
    unsafe {
        let result = undone_if_cancelled(|| Arc::decrement_strong_count(object), || wait(&*object));
        Arc::decrement_strong_count(object);
        result
    }
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
