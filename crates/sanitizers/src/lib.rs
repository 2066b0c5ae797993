//! Tells MemorySanitizer and ThreadSanitizer of a program what this library does.
//!
//! The library itself is built without them. So they do not see what it writes, but they do see its calls of `memcpy(3)` and the
//! like. A program would get reports that are wrong:
//!
//! - MemorySanitizer takes memory for undefined that the library has written. The library [says](initialised) what it wrote for
//!   the program.
//! - ThreadSanitizer knows neither the library's locks nor that a completion follows the post of its work. The library says so
//!   ([`release`], [`acquire`]). What it does itself is left out ([`Quiet`]).
//!
//! The C library looks for the functions of the sanitizers ([`init`]). Where nobody does, as in a Rust program that compiles the
//! device into itself, and where there are none, each call here is a look at one word.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::mem;
use std::sync::OnceLock;

type OnMemory = unsafe extern "C" fn(*const c_void, usize);
type OnAddress = unsafe extern "C" fn(*const c_void);
type OnThread = unsafe extern "C" fn();
type Annotation = unsafe extern "C" fn(*const c_char, c_int);

/// The functions of <sanitizer/msan_interface.h>.
#[derive(Clone, Copy)]
struct Memory {
    unpoison: OnMemory,
    disable_checks: OnThread,
    enable_checks: OnThread,
}

/// Those of <sanitizer/tsan_interface.h>, and annotations that are older.
#[derive(Clone, Copy)]
struct Thread {
    acquire: OnAddress,
    release: OnAddress,
    ignore: [Annotation; 2],
    heed: [Annotation; 2],
}

#[derive(Default)]
struct Hooks {
    memory: Option<Memory>,
    thread: Option<Thread>,
}

/// Inside: `None` if the program has no sanitizer.
static HOOKS: OnceLock<Option<Hooks>> = OnceLock::new();

#[inline]
fn hooks() -> Option<&'static Hooks> {
    HOOKS.get()?.as_ref()
}

/// Looks for sanitizers, once. For a library that is not built with them itself.
#[inline]
pub fn init() {
    let _: &Option<Hooks> = HOOKS.get_or_init(find);
}

#[cold]
fn find() -> Option<Hooks> {
    // SAFETY: each function has this type in all releases of the sanitizers.
    let hooks = unsafe {
        let memory = || {
            Some(Memory {
                unpoison: mem::transmute::<*mut c_void, OnMemory>(symbol(c"__msan_unpoison")?),
                disable_checks: mem::transmute::<*mut c_void, OnThread>(symbol(
                    c"__msan_scoped_disable_interceptor_checks",
                )?),
                enable_checks: mem::transmute::<*mut c_void, OnThread>(symbol(
                    c"__msan_scoped_enable_interceptor_checks",
                )?),
            })
        };
        let annotation = |name| Some(mem::transmute::<*mut c_void, Annotation>(symbol(name)?));
        let on_address = |name| Some(mem::transmute::<*mut c_void, OnAddress>(symbol(name)?));
        let thread = || {
            Some(Thread {
                acquire: on_address(c"__tsan_acquire")?,
                release: on_address(c"__tsan_release")?,
                ignore: [
                    annotation(c"AnnotateIgnoreReadsBegin")?,
                    annotation(c"AnnotateIgnoreWritesBegin")?,
                ],
                heed: [
                    annotation(c"AnnotateIgnoreReadsEnd")?,
                    annotation(c"AnnotateIgnoreWritesEnd")?,
                ],
            })
        };
        Hooks { memory: memory(), thread: thread() }
    };
    (hooks.memory.is_some() || hooks.thread.is_some()).then_some(hooks)
}

/// A function of the program, if it has it.
fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a C string; the call has no other condition.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Whether the program is built with a sanitizer that is told.
#[must_use]
pub fn are_there() -> bool {
    hooks().is_some()
}

/// The library has written this value for the program, or may write it at any time.
#[inline]
pub fn initialised<T>(value: *const T) {
    initialised_bytes(value.cast(), size_of::<T>());
}

/// As [`initialised`], of so many bytes. Memory that is not mapped may be named as well.
#[inline]
#[expect(clippy::not_unsafe_ptr_arg_deref, reason = "nothing is read or written there")]
pub fn initialised_bytes(start: *const c_void, len: usize) {
    if let Some(Hooks { memory: Some(memory), .. }) = hooks()
        && !start.is_null()
    {
        // SAFETY: it changes the sanitizer's own memory alone.
        unsafe { (memory.unpoison)(start, len) };
    }
}

/// The address that stands for the device. The order of all calls goes by it: nobody knows whose completion tells of whose work.
static DEVICE: u8 = 0;

/// The program gives work to the device. Whoever [acquires](acquire) later sees all that it did before.
#[inline]
pub fn release() {
    if let Some(Hooks { thread: Some(thread), .. }) = hooks() {
        // SAFETY: any address will do.
        unsafe { (thread.release)((&raw const DEVICE).cast()) };
    }
}

/// The program sees what was done before others [released](release): the device tells it of work that has ended.
#[inline]
pub fn acquire() {
    if let Some(Hooks { thread: Some(thread), .. }) = hooks() {
        // SAFETY: any address will do.
        unsafe { (thread.acquire)((&raw const DEVICE).cast()) };
    }
}

fn ignore() {
    let Some(hooks) = hooks() else { return };
    // SAFETY: functions without conditions.
    unsafe {
        if let Some(memory) = &hooks.memory {
            (memory.disable_checks)();
        }
        if let Some(thread) = &hooks.thread {
            thread.ignore.iter().for_each(|ignore| ignore(c"anyverbs".as_ptr(), 0));
        }
    }
}

fn heed() {
    let Some(hooks) = hooks() else { return };
    // SAFETY: as above.
    unsafe {
        if let Some(memory) = &hooks.memory {
            (memory.enable_checks)();
        }
        if let Some(thread) = &hooks.thread {
            thread.heed.iter().for_each(|heed| heed(c"anyverbs".as_ptr(), 0));
        }
    }
}

/// While it lives, the calling thread is in the library: the sanitizers leave out what it does.
#[derive(Debug)]
pub struct Quiet(PhantomData<*const ()>);

impl Quiet {
    /// The thread enters the library.
    #[inline]
    #[must_use]
    pub fn new() -> Self {
        ignore();
        Self(PhantomData)
    }
}

impl Default for Quiet {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Quiet {
    #[inline]
    fn drop(&mut self) {
        heed();
    }
}

/// The calling thread was cancelled while it was [`Quiet`], and runs no destructor.
pub fn cancelled() {
    heed();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_sanitizer_nothing_happens() {
        init();
        assert!(!are_there());
        let _quiet = Quiet::new();
        release();
        acquire();
        initialised(&raw const DEVICE);
        initialised_bytes(std::ptr::null(), 7);
    }
}
