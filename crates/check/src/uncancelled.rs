//! Work of a thread that the program may cancel (`pthread_cancel(3)`). A cancelled thread releases no lock.

use std::ffi::c_int;
use std::marker::PhantomData;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

const PTHREAD_CANCEL_DISABLE: c_int = 1;

/// The calling thread is not cancelled while this lives. Only what makes system calls needs it, so that a call without a finding pays
/// nothing.
pub(crate) struct Uncancelled {
    before: c_int,
    _of_this_thread: PhantomData<*const ()>,
}

impl Uncancelled {
    pub(crate) fn new() -> Self {
        let mut before = 0;
        // SAFETY: a live integer.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut before) };
        Self { before, _of_this_thread: PhantomData }
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        let mut ours = 0;
        // SAFETY: a live integer, and the state that the thread had.
        unsafe { pthread_setcancelstate(self.before, &raw mut ours) };
    }
}
