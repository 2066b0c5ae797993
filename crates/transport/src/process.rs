//! The process that a script of faults kills or stops.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::time::Duration;

use anyverbs_faults::ProcessAction;

/// Does this to the process. It returns from a pause.
///
/// # Errors
/// The kernel refuses it.
pub fn strike(action: ProcessAction) -> io::Result<()> {
    match action {
        // SAFETY: a signal to this process touches no memory.
        ProcessAction::Dies => done(unsafe { libc::kill(libc::getpid(), libc::SIGKILL) }.into()),
        ProcessAction::Pauses(time) => stand_still(time, false),
    }
}

/// Stops the process for this time. At its end it goes on, or it dies.
///
/// # Errors
/// The kernel refuses it.
pub fn stand_still(time: Duration, dies: bool) -> io::Result<()> {
    pause(time, if dies { libc::SIGKILL } else { libc::SIGCONT })
}

/// Stops all threads of this process. A child of its own sends it the signal that ends this: no thread of the process can.
fn pause(time: Duration, end: libc::c_int) -> io::Result<()> {
    let seconds = libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX);
    let wait = libc::timespec { tv_sec: seconds, tv_nsec: time.subsec_nanos().into() };
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: as fork(2), but without the handlers of the process, and without SIGCHLD at its end (exit signal 0). The child has a copy of
    // this thread's stack, and makes nothing but system calls. No signal to the group of both reaches it or a handler in it.
    let child = unsafe {
        let parent = libc::getpid();
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let child = libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0);
        if child == 0 {
            stop(parent, &wait, end);
        }
        let result = done(child).map(|()| child);
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        result?
    };
    let mut status = 0;
    loop {
        // A system call and not waitpid(3), which would be a point of cancellation.
        // SAFETY: a live number. Nobody else waits for a child without a signal, unless he asks for all kinds.
        let waited = done(unsafe {
            libc::syscall(libc::SYS_wait4, child, &raw mut status, libc::__WCLONE, 0)
        });
        match waited.map_err(|error| error.raw_os_error()) {
            Err(Some(libc::EINTR)) => {}
            Ok(()) if status != 0 => return Err(io::Error::other("the process was not stopped")),
            _ => return Ok(()),
        }
    }
}

/// The child: stops its parent for this time, which a signal ends. It ends with its parent, and keeps nothing open that belongs to it.
///
/// # Safety
/// It is the only thread of its process.
unsafe fn stop(parent: libc::pid_t, wait: &libc::timespec, end: libc::c_int) -> ! {
    // SAFETY: system calls, which touch the time alone.
    unsafe {
        libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, 0);
        let stopped = libc::syscall(libc::SYS_getppid) == parent.into()
            && libc::syscall(libc::SYS_kill, parent, libc::SIGSTOP) == 0;
        if stopped {
            libc::syscall(libc::SYS_nanosleep, ptr::from_ref(wait), 0);
            libc::syscall(libc::SYS_kill, parent, end);
        }
        loop {
            libc::syscall(libc::SYS_exit_group, libc::c_int::from(!stopped));
        }
    }
}

/// The result of a system call.
fn done(returned: libc::c_long) -> io::Result<()> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
