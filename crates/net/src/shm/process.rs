//! The process at the other end of a Unix socket.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, PidfdFlags};

use crate::sockopt;
use crate::sys::{Descriptor, is_scarcity};

const SO_PEERPIDFD: i32 = 77; // Linux 6.5

/// A process of this host.
#[derive(Debug)]
pub(crate) struct PeerProcess {
    /// Its number in our PID namespace, 0 when it has none there.
    pub(crate) pid: i32,
    /// Becomes readable when the process ends. `None` where the kernel has no such thing to give.
    pub(crate) pidfd: Option<Descriptor>,
    /// It has closed its end of the channel.
    left: AtomicBool,
}

/// The process that connected, or that listens.
///
/// # Errors
/// Those of a process or a system that has no descriptor left.
pub(crate) fn peer(socket: BorrowedFd<'_>) -> io::Result<PeerProcess> {
    let pid = sockopt::credentials(socket)?.pid;
    let pidfd = match peer_pidfd(socket)? {
        None => pidfd_open(pid)?,
        pidfd => pidfd,
    };
    Ok(PeerProcess::new(pid, pidfd.map(Descriptor::from)))
}

/// None where the kernel has no such option, or nothing to give.
///
/// # Errors
/// Those of a process or a system that has no descriptor left: its end would go unnoticed.
fn peer_pidfd(socket: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    let mut fd: i32 = -1;
    let mut len = size_of::<i32>() as libc::socklen_t;
    // SAFETY: a live int, and its size.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut len,
        )
    };
    if rc != 0 {
        return unless_scarce(io::Error::last_os_error());
    }
    // SAFETY: on success a new descriptor, close-on-exec, that is ours.
    Ok((fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// The number may meanwhile be another process's, which its socket's hang-up makes up for.
fn pidfd_open(pid: i32) -> io::Result<Option<OwnedFd>> {
    let Some(pid) = Pid::from_raw(pid).filter(|_| pid > 0) else { return Ok(None) };
    match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(fd) => Ok(Some(fd)),
        Err(error) => unless_scarce(error.into()),
    }
}

/// The error, if something has run out; None for others.
fn unless_scarce<T>(error: io::Error) -> io::Result<Option<T>> {
    if is_scarcity(&error) { Err(error) } else { Ok(None) }
}

impl PeerProcess {
    pub(crate) fn new(pid: i32, pidfd: Option<Descriptor>) -> Self {
        Self { pid, pidfd, left: AtomicBool::new(false) }
    }

    /// The channel's socket has hung up, and this process did not cause it.
    pub(super) fn leave(&self) {
        self.left.store(true, Ordering::Release);
    }

    /// Whether it has left. A process that lives does not before the last of its copies has ended
    /// ([`close`](super::channel::Channel::close)); one that lies may.
    pub(super) fn has_left(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }

    /// Whether the process is known to have ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.pidfd
            .as_ref()
            .is_some_and(|fd| sockopt::poll(fd.as_fd(), libc::POLLIN, 0).unwrap_or(false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_peer_of_a_socket_pair_is_this_process() {
        let (a, _b) = UnixStream::pair().unwrap();
        let peer = peer(a.as_fd()).unwrap();
        assert_eq!(peer.pid, std::process::id() as i32);
        assert!(peer.pidfd.is_some() && !peer.has_ended());
    }

    #[test]
    fn a_process_that_ended_has_ended() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id() as i32;
        let process = PeerProcess::new(pid, pidfd_open(pid).unwrap().map(Descriptor::from));
        child.wait().unwrap();
        assert!(process.has_ended());
        assert!(pidfd_open(pid).unwrap().is_none() && pidfd_open(0).unwrap().is_none());
    }
}
