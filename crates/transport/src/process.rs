//! The process that a script of faults kills or stops.

use std::io;
use std::time::Duration;

use anyverbs_faults::ProcessAction;

/// Does this to the process. It returns from a pause.
///
/// # Errors
/// The kernel refuses it.
pub fn strike(action: ProcessAction) -> io::Result<()> {
    match action {
        // SAFETY: a signal to this process touches no memory.
        ProcessAction::Dies => unsafe { done(libc::kill(libc::getpid(), libc::SIGKILL)) },
        ProcessAction::Pauses(time) => pause(time),
    }
}

/// The effect, for the log.
#[must_use]
pub fn told(action: ProcessAction) -> String {
    match action {
        ProcessAction::Dies => "the process is killed".into(),
        ProcessAction::Pauses(time) => format!("the process stands still for {time:?}"),
    }
}

/// Stops all threads of this process. A child of its own lets them go on: no thread of the process can.
fn pause(time: Duration) -> io::Result<()> {
    let seconds = libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX);
    let wait = libc::timespec { tv_sec: seconds, tv_nsec: time.subsec_nanos().into() };
    // SAFETY: as fork(2), but without the handlers of the process, and without SIGCHLD at its end (exit signal 0). The child has a copy of
    // this thread's stack, and makes nothing but system calls.
    unsafe {
        let parent = libc::getpid();
        let child = libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0);
        if child == 0 {
            libc::syscall(libc::SYS_kill, parent, libc::SIGSTOP);
            libc::syscall(libc::SYS_nanosleep, &raw const wait, 0);
            libc::syscall(libc::SYS_kill, parent, libc::SIGCONT);
            loop {
                libc::syscall(libc::SYS_exit_group, 0);
            }
        }
        let child = libc::pid_t::try_from(child).unwrap_or(-1);
        done(child)?;
        // It ends after the pause. Nobody else waits for a child without a signal.
        loop {
            let waited = done(libc::waitpid(child, std::ptr::null_mut(), libc::__WCLONE));
            match waited {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => return waited,
            }
        }
    }
}

/// The result of a call of C.
fn done(returned: libc::c_int) -> io::Result<()> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
