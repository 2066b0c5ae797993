//! Calls that are cancellation points, and those that are none.
//!
//! Calls that set up or take down are not cancellation points. They make system calls below locks, so they disable
//! cancellation ([`Uncancelled`]).
//!
//! Waiting in a call that a thread may be cancelled in (`pthread_cancel(3)`): programs end their event threads so.
//!
//! The C library unwinds the stack of a cancelled thread, and knows nothing of Rust's destructors. A held lock or
//! reference would be held for ever. The C library does run its own cleanup handlers, so one of them gives the object
//! up.

use std::{
    ffi::{c_int, c_void},
    mem::MaybeUninit,
    sync::Arc,
};

pub(crate) use anyverbs::Uncancelled;

/// `struct _pthread_cleanup_buffer` of glibc.
#[repr(C)]
struct CleanupBuffer {
    routine: Option<unsafe extern "C" fn(*mut c_void)>,
    argument: *mut c_void,
    cancel_type: c_int,
    previous: *mut CleanupBuffer,
}

unsafe extern "C" {
    fn _pthread_cleanup_push(
        buffer: *mut CleanupBuffer,
        routine: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    );
    fn _pthread_cleanup_pop(buffer: *mut CleanupBuffer, execute: c_int);
}

/// # Safety
/// `object` is from `Arc::into_raw`, and this is its last use.
unsafe extern "C" fn release<T>(object: *mut c_void) {
    // SAFETY: the caller's promise.
    drop(unsafe { Arc::from_raw(object.cast_const().cast::<T>()) });
}

/// Holds `object` while `wait` waits in a system call, during which the thread may be cancelled. `wait` holds nothing else
/// meanwhile, and does not panic.
pub(crate) fn holding<T, R>(object: Arc<T>, wait: impl FnOnce(&T) -> R) -> R {
    let object = Arc::into_raw(object);
    let mut buffer = MaybeUninit::<CleanupBuffer>::uninit();
    // SAFETY: the buffer lies on this thread's stack until it is popped below. `release` gets its own argument, once:
    // from the handler, after which no code here runs, or below.
    unsafe {
        _pthread_cleanup_push(buffer.as_mut_ptr(), release::<T>, object.cast_mut().cast());
        let result = wait(&*object);
        _pthread_cleanup_pop(buffer.as_mut_ptr(), 1);
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
