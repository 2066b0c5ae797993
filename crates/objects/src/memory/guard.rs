//! Turns a fault in a guarded copy into a return value: the signal handler, and the other way where it does not run.
//!
//! A thread that blocks SIGSEGV or SIGBUS is killed by a fault, and a handler that the program installs later takes the
//! place of ours. Neither can be prevented, so both are looked for: by a thread's first copy, and then every few
//! milliseconds. If one is found, the kernel makes that thread's copies, or all (process_vm_writev(2) on
//! this very process), and tells which parts are not mapped. That takes some 0.4 us a copy, and ends when the cause
//! ends. Where the kernel refuses that call, copies are made as ever.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Once, OnceLock};

use anyverbs_proto::memory::Fault;
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use rustix::param::page_size;

use super::feeding;
use super::{
    anyverbs_guarded_begin, anyverbs_guarded_copy, anyverbs_guarded_end, anyverbs_guarded_landing,
};

/// A thread's knowledge of its copies.
#[derive(Clone, Copy)]
struct Known {
    /// The tick in which it looked; 0 if it never did.
    tick: i64,
    /// A fault would not reach our handler.
    by_kernel: bool,
}

thread_local! {
    static KNOWN: Cell<Known> = const { Cell::new(Known { tick: 0, by_kernel: false }) };
}

/// Installs the signal handler, once in a process.
pub(super) fn install_once() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        install(libc::SIGSEGV, &PREVIOUS_SEGV);
        install(libc::SIGBUS, &PREVIOUS_BUS);
    });
}

/// A number that changes every few milliseconds; never 0.
#[cfg(target_arch = "x86_64")]
#[inline]
fn tick() -> i64 {
    // 2^22 cycles are one to four milliseconds. The coarse clock costs 60 instructions, in each copy.
    // SAFETY: every processor of this architecture has the counter.
    (unsafe { std::arch::x86_64::_rdtsc() } >> 22).cast_signed() | 1 << 62
}

/// A number that changes every few milliseconds; never 0.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn tick() -> i64 {
    use rustix::time::{ClockId, clock_gettime};
    let now = clock_gettime(ClockId::MonotonicCoarse);
    now.tv_sec.wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec) | 1
}

/// Whether a fault of this thread would not reach our handler.
#[inline]
fn is_deaf() -> bool {
    let (known, now) = (KNOWN.get(), tick());
    if known.tick == now { known.by_kernel } else { look(now) }
}

#[cold]
#[inline(never)]
fn look(now: i64) -> bool {
    let by_kernel = [libc::SIGSEGV, libc::SIGBUS].into_iter().any(|signal| {
        // SAFETY: all-zero is a valid sigset_t and a valid sigaction; the calls get live ones, and change nothing.
        unsafe {
            let mut mask: libc::sigset_t = MaybeUninit::zeroed().assume_init();
            libc::pthread_sigmask(libc::SIG_BLOCK, ptr::null(), &raw mut mask);
            let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
            libc::sigaction(signal, ptr::null(), &raw mut action);
            libc::sigismember(&raw const mask, signal) == 1
                || action.sa_sigaction != handler as *const () as usize
        }
    });
    KNOWN.set(Known { tick: now, by_kernel });
    by_kernel
}

/// The protection of this thread's copies from memory that is not mapped: our signal handler, or the kernel.
#[derive(Clone, Copy, Debug)]
pub struct Guard {
    by_kernel: bool,
    /// Not for another thread.
    thread: PhantomData<*const ()>,
}

impl Guard {
    /// That of the calling thread, for the copies of one call.
    #[inline]
    pub(super) fn of_thread() -> Self {
        Self { by_kernel: is_deaf(), thread: PhantomData }
    }

    /// Whether the kernel makes the copies.
    #[inline]
    pub(super) fn is_by_kernel(self) -> bool {
        self.by_kernel
    }

    /// Copies bytes. Either side may not be mapped.
    ///
    /// # Safety
    /// As for [`super::copy_guarded`].
    #[inline]
    pub(super) unsafe fn copy(self, to: *mut u8, from: *const u8, len: usize) -> Result<(), Fault> {
        if self.by_kernel {
            // SAFETY: the caller's promise.
            return unsafe { copy_by_kernel(to, from, len) };
        }
        // SAFETY: the caller's promise; the routine answers 1 where nothing is mapped.
        let code = unsafe { anyverbs_guarded_copy(to, from, len) };
        if code == 0 { Ok(()) } else { Err(Fault) }
    }
}

/// As [`Guard::copy`], for a single copy.
///
/// # Safety
/// As for [`super::copy_guarded`].
#[inline]
pub(super) unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> Result<(), Fault> {
    // SAFETY: the caller's promise.
    unsafe { Guard::of_thread().copy(to, from, len) }
}

/// # Safety
/// As for [`copy`].
#[cold]
#[inline(never)]
unsafe fn copy_by_kernel(to: *mut u8, from: *const u8, len: usize) -> Result<(), Fault> {
    let mut done = 0;
    while done < len {
        let piece = |at: *mut u8, from: usize, to: usize| libc::iovec {
            iov_base: at.wrapping_add(from).cast(),
            iov_len: to - from,
        };
        // The last line by itself, after the others: inside a page the kernel copies by a string instruction, too.
        let tail = len.saturating_sub(64).max(done);
        let (near, far) =
            (piece(from.cast_mut(), done, len), [piece(to, done, tail), piece(to, tail, len)]);
        // Not by the C library's function: AddressSanitizer takes its place, and stops at bytes that this may find to be missing.
        // SAFETY: live pieces, as many as are said; the kernel checks the addresses, and that they may be touched is the
        // caller's promise.
        let n = unsafe {
            let (call, one, two) = (libc::SYS_process_vm_writev, 1_usize, 2_usize);
            libc::syscall(call, libc::getpid(), &raw const near, one, far.as_ptr(), two, 0_usize)
        };
        match usize::try_from(n) {
            Ok(n) if n > 0 => done += n,
            Ok(_) => return Err(Fault),
            Err(_) => match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EPERM | libc::ENOSYS | libc::EACCES) => {
                    // SAFETY: the caller's promise.
                    let code =
                        unsafe { anyverbs_guarded_copy(to.add(done), from.add(done), len - done) };
                    return if code == 0 { Ok(()) } else { Err(Fault) };
                }
                _ => return Err(Fault),
            },
        }
    }
    Ok(())
}

/// Tests whether a word can be changed, where a fault would not reach our handler: the kernel has no call for an atomic
/// operation on 64 bits. Not certain: the page may go before the operation.
#[inline]
pub(super) fn probe(addr: u64) -> Result<(), Fault> {
    if is_deaf() { probe_by_kernel(addr) } else { Ok(()) }
}

#[cold]
#[inline(never)]
fn probe_by_kernel(addr: u64) -> Result<(), Fault> {
    match populate(addr) {
        Ok(()) => Ok(()),
        // A kernel older than 5.14 cannot say. A later one says the same of a page without the right to write.
        Err(Errno::INVAL) if !knows_populate() => Ok(()),
        Err(_) => Err(Fault),
    }
}

/// Makes the page of an address writable in fact, if the program may write there.
fn populate(addr: u64) -> rustix::io::Result<()> {
    let page = page_size();
    let begin = (addr & !(page as u64 - 1)) as *mut c_void;
    // SAFETY: the content of the page does not change.
    unsafe { madvise(begin, page, Advice::LinuxPopulateWrite) }
}

/// Whether the kernel knows that advice.
fn knows_populate() -> bool {
    static KNOWS: OnceLock<bool> = OnceLock::new();
    *KNOWS.get_or_init(|| {
        let writable = 0u64;
        populate(&raw const writable as u64).is_ok()
    })
}

pub(super) static PREVIOUS_SEGV: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());
static PREVIOUS_BUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// The default action.
struct NoHandler(libc::sigaction);

// SAFETY: plain data that does not change.
unsafe impl Sync for NoHandler {}

// SAFETY: all-zero is a valid sigaction: the default action, no flags.
static NO_HANDLER: NoHandler = NoHandler(unsafe { MaybeUninit::zeroed().assume_init() });

/// Puts our handler in front of the one that is there.
pub(super) fn install(signal: c_int, previous: &AtomicPtr<libc::sigaction>) {
    // SAFETY: all-zero is a valid sigaction, and the calls get live pointers to them. Our handler does nothing that a
    // signal handler must not do, and it chains to the old handler.
    unsafe {
        let mut old: libc::sigaction = MaybeUninit::zeroed().assume_init();
        if libc::sigaction(signal, ptr::null(), &raw mut old) != 0 {
            return;
        }
        // Before ours is installed, so that it never runs without.
        previous.store(Box::into_raw(Box::new(old)), Ordering::Release);
        let mut new: libc::sigaction = MaybeUninit::zeroed().assume_init();
        new.sa_sigaction = handler as *const () as usize;
        new.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
        libc::sigemptyset(&raw mut new.sa_mask);
        libc::sigaction(signal, &raw const new, ptr::null_mut());
    }
}

unsafe extern "C" fn handler(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a ucontext to a handler with SA_SIGINFO, and no one else touches it now.
    let pc = unsafe { program_counter(context.cast()) };
    // SAFETY: as above. A signal that was sent has nothing to do with the copy that it hits.
    let is_fault = unsafe { (*info).si_code } > 0;
    let (begin, end) =
        (&raw const anyverbs_guarded_begin as usize, &raw const anyverbs_guarded_end as usize);
    let landing = |pc: usize| {
        let common = || &raw const anyverbs_guarded_landing as usize;
        (begin..end).contains(&pc).then(common).or_else(|| feeding::landing(pc))
    };
    // SAFETY: as above.
    unsafe {
        if is_fault && let Some(landing) = landing(*pc as usize) {
            *pc = landing as _;
            return;
        }
        chain(signal, info, context);
    }
}

#[cfg(target_arch = "x86_64")]
unsafe fn program_counter(context: *mut libc::ucontext_t) -> *mut i64 {
    // SAFETY: the caller's context is live.
    unsafe { &raw mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize] }
}

#[cfg(target_arch = "aarch64")]
unsafe fn program_counter(context: *mut libc::ucontext_t) -> *mut u64 {
    // SAFETY: the caller's context is live.
    unsafe { &raw mut (*context).uc_mcontext.pc }
}

/// Acts as the process would without our handler.
///
/// # Safety
/// Called from a signal handler with its arguments.
unsafe fn chain(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let previous = if signal == libc::SIGBUS { &PREVIOUS_BUS } else { &PREVIOUS_SEGV };
    // SAFETY: stored before our handler was installed, and never freed.
    let old = unsafe { &*previous.load(Ordering::Acquire) };
    if old.sa_flags & libc::SA_RESETHAND != 0 {
        // It runs once; afterwards it is as if there were none.
        previous.store((&raw const NO_HANDLER.0).cast_mut(), Ordering::Release);
    }
    // SAFETY: the kernel passes a valid siginfo.
    let sent = unsafe { (*info).si_code } <= 0;
    match old.sa_sigaction {
        libc::SIG_IGN if sent => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: restoring the default action. A fault comes again at once when this handler returns, and then
            // ends the process with the right core; one that was sent is sent again.
            unsafe {
                let mut default: libc::sigaction = MaybeUninit::zeroed().assume_init();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &raw const default, ptr::null_mut());
                if sent {
                    libc::raise(signal);
                }
            }
        }
        action => {
            // SAFETY: a handler that the program installed, called as the kernel would have: with the signals blocked
            // that it asked for. Returning from our own handler restores the mask.
            unsafe {
                let mut mask = old.sa_mask;
                if old.sa_flags & libc::SA_NODEFER == 0 {
                    libc::sigaddset(&raw mut mask, signal);
                }
                libc::pthread_sigmask(libc::SIG_BLOCK, &raw const mask, ptr::null_mut());
                if old.sa_flags & libc::SA_SIGINFO != 0 {
                    let f: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                        std::mem::transmute(action);
                    f(signal, info, context);
                } else {
                    let f: extern "C" fn(c_int) = std::mem::transmute(action);
                    f(signal);
                }
            }
        }
    }
}
