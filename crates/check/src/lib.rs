//! Mistakes of a program that no RDMA device reports, found while it runs.
//!
//! The C ABI tells this crate what the program makes, posts, polls and ends, if `ANYVERBS_CHECK` asks for it. The crate keeps a
//! ledger of it, with the stack of each step, and reports what does not fit. It changes nothing that the program sees.
//!
//! Each check has a page in the book, which is also where a report has its words from.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod catalogue;
mod facts;
mod ledger;
mod memory;
mod report;
mod stack;

use std::process;
use std::sync::OnceLock;

use parking_lot::{Mutex, MutexGuard};

pub use catalogue::Check;
pub use facts::{Completion, Kind, Piece, QueuePair, Region, Work};
pub use ledger::Ledger;
use report::Reporter;

/// The ledger of this process, and where reports go.
#[derive(Debug)]
pub struct Checker {
    ledger: Mutex<Ledger>,
    /// A forked child is another program: its parent's objects are not its own.
    process: u32,
}

static CHECKER: OnceLock<Option<Checker>> = OnceLock::new();

/// The checker, if the environment asks for one (`ANYVERBS_CHECK`). `None` in a forked child of a program that is checked.
#[inline]
pub fn checker() -> Option<&'static Checker> {
    CHECKER.get()?.as_ref().filter(|checker| checker.process == process::id())
}

/// Reads the environment. Before the first object is made; later calls do nothing.
pub fn init() {
    let checker = CHECKER.get_or_init(|| {
        let reporter = Reporter::from_environment()?;
        // SAFETY: an extern "C" function without preconditions.
        unsafe { libc::atexit(at_exit) };
        Some(Checker { ledger: Mutex::new(Ledger::new(reporter)), process: process::id() })
    });
    let _: &Option<Checker> = checker;
}

impl Checker {
    /// The ledger. Calls into the device may be made while it is locked, if they do not wait.
    pub fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock()
    }
}

/// Reports what was not ended, and turns the exit status into that of a program with findings.
extern "C" fn at_exit() {
    let Some(checker) = checker() else { return };
    // A thread that is stopped in the middle of a call may hold it.
    let Some(mut ledger) = checker.ledger.try_lock_for(std::time::Duration::from_secs(1)) else {
        return;
    };
    ledger.end();
    if ledger.has_findings() {
        // SAFETY: NULL means all streams; `_exit` ends the process.
        unsafe {
            libc::fflush(std::ptr::null_mut());
            libc::_exit(report::STATUS);
        }
    }
}
