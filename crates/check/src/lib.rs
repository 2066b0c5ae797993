//! Mistakes of a program that no RDMA device reports, found while it runs.
//!
//! The C ABI tells this crate what the program makes, posts, polls and ends, if `ANYVERBS_CHECK` asks for it. The crate keeps a
//! ledger of it, with the stack of each step, and reports what does not fit.
//!
//! Each check has a page in the book, which is also where a report has its words from.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod catalogue;
mod facts;
mod ledger;
mod map;
mod memory;
mod report;
pub mod stack;
mod uncancelled;

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyverbs_sanitizers::Quiet;
use parking_lot::{Condvar, Mutex, MutexGuard};

pub use catalogue::Check;
pub use facts::{
    Activity, Completion, Dropped, DroppedDatagrams, DropsOf, Elements, Kind, LONGEST_WAIT, Piece,
    Pieces, QueuePair, Refusal, Region, Work, Works,
};
pub use ledger::Ledger;
pub use memory::Read;
use report::Reporter;
pub use report::check_suppressions;
use stack::Stack;

/// The ledger of this process, and where reports go.
#[derive(Debug)]
pub struct Checker {
    ledger: Mutex<Ledger>,
    /// Makes what a thread of the caller needs, and what has a destructor.
    prepare: fn(),
}

thread_local!(static IS_PREPARED: Cell<bool> = const { Cell::new(false) });

/// This process was forked by one that is checked, while that had objects. The ledger is its parent's, whose objects are not its own.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

static CHECKER: OnceLock<Option<Checker>> = OnceLock::new();

/// The checker, if the environment asks for one (`ANYVERBS_CHECK`). `None` in a forked child whose parent had objects.
#[inline]
pub fn checker() -> Option<&'static Checker> {
    CHECKER.get()?.as_ref().filter(|_| !IS_CHILD.load(Ordering::Relaxed))
}

/// The program posts to a queue of this address. In a forked child that is a mistake, if it was its parent's.
pub fn posts(queue: usize) {
    in_a_child(|ledger| ledger.posts_in_child(queue));
}

/// The program ends the object of this address. In a forked child that is a mistake, if it was its parent's.
pub fn ends_in_child(address: usize) {
    in_a_child(|ledger| ledger.ends_in_child(address));
}

/// Tells the ledger, if this is a forked child.
fn in_a_child(tell: impl FnOnce(&mut Ledger)) {
    if !IS_CHILD.load(Ordering::Relaxed) {
        return;
    }
    // A thread that only the parent has may hold it for good.
    let ledger =
        CHECKER.get().and_then(Option::as_ref).and_then(|checker| checker.ledger.try_lock());
    if let Some(mut ledger) = ledger {
        tell(&mut ledger);
    }
}

unsafe extern "C" {
    /// The C library calls `f(status, argument)` at exit(3). The function belongs to no object.
    fn on_exit(f: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// A child whose parent has no objects is checked like any other program. A thread that only the parent has may hold the ledger for
/// good: then it has used the device.
extern "C" fn in_child() {
    let ledger =
        CHECKER.get().and_then(Option::as_ref).and_then(|checker| checker.ledger.try_lock());
    let is_anew = ledger.is_some_and(|mut ledger| ledger.begins_anew());
    if is_anew {
        stack::begins_anew();
    }
    IS_CHILD.store(!is_anew, Ordering::Relaxed);
}

/// Reads the environment, when the library is loaded. `read` looks at the program's memory. `prepare` makes the variables of a thread that the
/// caller uses with the ledger locked, and that have a destructor.
pub fn init(read: Read, drops_of: DropsOf, prepare: fn()) {
    let checker = CHECKER.get_or_init(|| {
        let reporter = Reporter::from_environment()?;
        // SAFETY: extern "C" functions without preconditions.
        unsafe {
            // The handlers of an object run when its turn comes. This one belongs to none, and runs behind all that are registered later.
            on_exit(at_exit, ptr::null_mut());
            libc::pthread_atfork(None, None, Some(in_child));
        }
        Some(Checker { ledger: Mutex::new(Ledger::new(reporter, read, drops_of)), prepare })
    });
    let _: &Option<Checker> = checker;
}

impl Checker {
    /// The C library notes each destructor of a thread's variable with the loader's lock. A thread in dlopen(3) has that lock while
    /// constructors run, which may wait for the ledger. So nobody may wait for it with the ledger locked.
    #[inline]
    fn prepare(&self) {
        if !IS_PREPARED.get() {
            self.prepare_thread();
        }
    }

    #[cold]
    fn prepare_thread(&self) {
        IS_PREPARED.set(true);
        stack::make_cache();
        // The lock's own, which it needs when it waits.
        Condvar::new().wait_until(&mut Mutex::new(()).lock(), Instant::now());
        (self.prepare)();
    }

    /// The ledger. Calls into the device may be made while it is locked, if they wait for no other call of the program.
    pub fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.prepare();
        self.ledger.lock()
    }

    /// As [`Ledger::ends`]. A call that waits for an acknowledgement is reported after a second, since another thread may be about
    /// to give it.
    pub fn ends(
        &'static self,
        address: usize,
        activity: impl Fn(usize) -> Activity,
        waiting: impl Fn(usize) -> Vec<Completion>,
    ) {
        let Some(call) = self.ledger().ends(address, activity, waiting) else { return };
        let stack = Stack::here();
        let report = move || {
            let _quiet = Quiet::new();
            thread::sleep(LATE);
            self.ledger().is_late(address, call, stack);
        };
        let spawn = || thread::Builder::new().name("av-check".into()).spawn(report);
        // The device's log tells of it in any case.
        drop(without_signals(spawn));
    }
}

/// Makes a thread, which begins with this one's signals: none. The program's handlers of signals run in its own threads.
fn without_signals<T>(make: impl FnOnce() -> T) -> T {
    // SAFETY: plain data, and the masks are those of the calling thread.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut old: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        let made = make();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut());
        made
    }
}

/// The time after which a call that waits is late.
const LATE: Duration = Duration::from_secs(1);

/// Reports what was not ended. A program that has done its work, and has findings, gets a status that says so; one that failed keeps its
/// own. Of several statuses the C library takes the last, and goes on with what is to be done at exit.
extern "C" fn at_exit(status: c_int, _: *mut c_void) {
    let Some(checker) = CHECKER.get().and_then(Option::as_ref) else { return };
    // The parent process sees the lowest byte alone.
    let status = status & 0xff;
    // Until this function ends: the program has further work at exit.
    let quiet = Quiet::new();
    checker.prepare();
    // A thread that is stopped in the middle of a call may hold it.
    let Some(mut ledger) = checker.ledger.try_lock_for(LATE) else {
        return;
    };
    let has_findings = if IS_CHILD.load(Ordering::Relaxed) {
        ledger.has_findings_in_child()
    } else {
        ledger.end(status);
        ledger.has_findings()
    };
    // The program's handlers that are still to run may end objects.
    drop(ledger);
    drop(quiet);
    if has_findings && status == 0 {
        // SAFETY: within exit(3), of the same thread.
        unsafe { libc::exit(report::STATUS) };
    }
}
