//! Counts the system calls of a piece of code.

/// Counts the system calls of the calling thread while `work` runs; `None` where this kernel or machine has no way to.
///
/// The kernel delivers `SIGSYS` for each (prctl(2), `PR_SET_SYSCALL_USER_DISPATCH`), and its handler makes the call.
#[cfg(target_arch = "x86_64")]
pub fn system_calls(work: impl FnOnce()) -> Option<u64> {
    use std::sync::atomic::Ordering::Relaxed;
    let handler = KernelAction {
        handler: dispatch,
        flags: (libc::SA_SIGINFO | libc::SA_NODEFER) as u64 | SA_RESTORER,
        restorer: return_from_signal,
        mask: 0,
    };
    // SAFETY: a live action in the kernel's layout; nothing in a test expects SIGSYS.
    let rc = unsafe {
        libc::syscall(libc::SYS_rt_sigaction, libc::SIGSYS, &raw const handler, 0usize, 8usize)
    };
    assert_eq!(rc, 0);
    let set = |on: u64| {
        let start = return_from_signal as *const () as u64;
        let (start, len) = if on == 1 { (start, RESTORER_LEN) } else { (0, 0) };
        let selector = if on == 1 { SELECTOR.with(|s| s.as_ptr()) } else { std::ptr::null_mut() };
        // SAFETY: the selector is this thread's, and lives as long as it does.
        unsafe { libc::prctl(PR_SET_SYSCALL_USER_DISPATCH, on, start, len, selector) }
    };
    COUNT.with(|count| count.store(0, Relaxed));
    if set(1) != 0 {
        return None;
    }
    SELECTOR.with(|selector| selector.store(1, Relaxed));
    work();
    SELECTOR.with(|selector| selector.store(0, Relaxed));
    assert_eq!(set(0), 0);
    Some(COUNT.with(|count| count.load(Relaxed)))
}

/// Other machines are not counted on.
#[cfg(not(target_arch = "x86_64"))]
pub fn system_calls(work: impl FnOnce()) -> Option<u64> {
    work();
    None
}

#[cfg(target_arch = "x86_64")]
mod dispatch {
    use std::sync::atomic::Ordering::Relaxed;
    use std::sync::atomic::{AtomicU8, AtomicU64};

    pub(super) const PR_SET_SYSCALL_USER_DISPATCH: i32 = 59;
    pub(super) const SA_RESTORER: u64 = 0x0400_0000;
    pub(super) const RESTORER_LEN: u64 = 16;

    thread_local! {
        /// 1: system calls are trapped.
        pub(super) static SELECTOR: AtomicU8 = const { AtomicU8::new(0) };
        pub(super) static COUNT: AtomicU64 = const { AtomicU64::new(0) };
    }

    /// `struct sigaction` as the kernel has it.
    #[repr(C)]
    pub(super) struct KernelAction {
        pub(super) handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::ucontext_t),
        pub(super) flags: u64,
        pub(super) restorer: unsafe extern "C" fn(),
        pub(super) mask: u64,
    }

    // The one system call that is not trapped: rt_sigreturn(2), from here.
    std::arch::global_asm!(
        ".balign 16",
        ".globl anyverbs_testing_return_from_signal",
        "anyverbs_testing_return_from_signal:",
        "mov eax, 15",
        "syscall",
        ".balign 16",
    );
    unsafe extern "C" {
        #[link_name = "anyverbs_testing_return_from_signal"]
        pub(super) fn return_from_signal();
    }

    pub(super) extern "C" fn dispatch(
        _: i32,
        _: *mut libc::siginfo_t,
        context: *mut libc::ucontext_t,
    ) {
        SELECTOR.with(|selector| selector.store(0, Relaxed));
        COUNT.with(|count| count.fetch_add(1, Relaxed));
        // SAFETY: the kernel's context of the interrupted call, which is this thread's alone.
        let registers = unsafe { &mut (*context).uc_mcontext.gregs };
        let argument = |n: i32| registers[n as usize];
        let result: i64;
        // SAFETY: the very call that the program made, with its arguments.
        unsafe {
            std::arch::asm!(
                "syscall",
                inlateout("rax") argument(libc::REG_RAX) => result,
                in("rdi") argument(libc::REG_RDI),
                in("rsi") argument(libc::REG_RSI),
                in("rdx") argument(libc::REG_RDX),
                in("r10") argument(libc::REG_R10),
                in("r8") argument(libc::REG_R8),
                in("r9") argument(libc::REG_R9),
                lateout("rcx") _,
                lateout("r11") _,
            );
        }
        registers[libc::REG_RAX as usize] = result;
        SELECTOR.with(|selector| selector.store(1, Relaxed));
    }
}
#[cfg(target_arch = "x86_64")]
use dispatch::*;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_and_made() {
        let mut pid = 0;
        let calls = system_calls(|| {
            for _ in 0..3 {
                // SAFETY: a call without arguments.
                pid = unsafe { libc::syscall(libc::SYS_getpid) };
            }
        });
        assert_eq!(pid, std::process::id().into());
        assert!(calls.is_none_or(|calls| calls == 3), "{calls:?}");
    }
}
