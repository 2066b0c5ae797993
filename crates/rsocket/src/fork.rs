//! A forked child gets these in place of its parent's.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A lock, and what it guards, of this process. A forked child begins with another, since threads that only its parent has
/// may hold the old one, or wait at it.
#[derive(Debug)]
pub(crate) struct OfProcess<T: 'static>(AtomicPtr<T>);

/// Handlers as `pthread_atfork(3)` takes them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Handlers {
    pub(crate) before: Option<unsafe extern "C" fn()>,
    pub(crate) in_parent: Option<unsafe extern "C" fn()>,
    pub(crate) in_child: Option<unsafe extern "C" fn()>,
}

impl<T: Default> OfProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// The one of this process. The first call makes it, and registers the handlers, of which the one in the child calls
    /// [`OfProcess::begin_anew`].
    pub(crate) fn get(&self, handlers: Handlers) -> &'static T {
        let value = self.0.load(Ordering::Acquire);
        if !value.is_null() {
            // SAFETY: a leaked box.
            return unsafe { &*value };
        }
        let new = Box::into_raw(Box::<T>::default());
        match self.0.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                let Handlers { before, in_parent, in_child } = handlers;
                // SAFETY: handlers without preconditions, valid for the life of the process: this object is never unloaded.
                unsafe { libc::pthread_atfork(before, in_parent, in_child) };
                // SAFETY: just leaked.
                unsafe { &*new }
            }
            Err(theirs) => {
                // SAFETY: `new` was never shared; `theirs` is a leaked box.
                unsafe {
                    drop(Box::from_raw(new));
                    &*theirs
                }
            }
        }
    }

    /// In a forked child: the old one is never touched again.
    pub(crate) fn begin_anew(&self, value: T) {
        self.0.store(Box::into_raw(Box::new(value)), Ordering::Release);
    }
}
