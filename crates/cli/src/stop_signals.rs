//! Signals on their way from the launcher to its program.

use std::{io, mem, process, ptr};

/// The signals that are passed on. `SIGCHLD` is waited for with them.
const PASSED_ON: [libc::c_int; 6] =
    [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGUSR1, libc::SIGUSR2];

/// The signals above, blocked in this thread until this value is gone.
pub(crate) struct Blocked {
    set: libc::sigset_t,
    before: libc::sigset_t,
}

/// Events that [`Blocked::wait`] reports.
pub(crate) enum Seen {
    /// A child changed its state.
    Child,
    /// A signal that was sent to this process alone.
    Signal(libc::c_int),
}

impl Blocked {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: signal sets are plain data that sigemptyset initialises; the mask is this thread's own.
        unsafe {
            let mut set = mem::zeroed();
            let mut before = mem::zeroed();
            libc::sigemptyset(&mut set);
            for signal in PASSED_ON.into_iter().chain([libc::SIGCHLD]) {
                libc::sigaddset(&mut set, signal);
            }
            match libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut before) {
                0 => Ok(Blocked { set, before }),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }

    /// The mask that the program shall start with.
    pub(crate) fn before(&self) -> libc::sigset_t {
        self.before
    }

    /// Waits for a child or for a signal to pass on.
    ///
    /// A signal from the terminal reaches the program directly, since it is in the same process group. So only signals
    /// of other processes are reported.
    pub(crate) fn wait(&self) -> io::Result<Seen> {
        loop {
            // SAFETY: `info` is plain data that the call fills; the set was initialised above.
            let (signal, info) = unsafe {
                let mut info: libc::siginfo_t = mem::zeroed();
                (libc::sigwaitinfo(&self.set, &mut info), info)
            };
            match signal {
                -1 => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
                libc::SIGCHLD => return Ok(Seen::Child),
                signal if info.si_code <= 0 => return Ok(Seen::Signal(signal)),
                _ => {}
            }
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: restores a mask that the system gave.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, ptr::null_mut()) };
    }
}

/// Ends this process as the program ended, so that a shell sees the same.
pub(crate) fn die_of(signal: libc::c_int) -> ! {
    // SAFETY: plain system calls on this process; the structures are initialised.
    unsafe {
        // The program has left its core; a second one would be the launcher's.
        let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        libc::setrlimit(libc::RLIMIT_CORE, &no_core);
        libc::signal(signal, libc::SIG_DFL);
        let mut set: libc::sigset_t = mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, ptr::null_mut());
        libc::raise(signal);
    }
    process::exit(128 + signal)
}
