//! `rpoll`: waiting for many descriptors, sockets and others.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::config::config;
use crate::errno::Result;
use crate::sleep;
use crate::sleepers::Asleep;
use crate::socket::Socket;
use crate::table;

/// Reused by the thread's next call.
#[derive(Default)]
struct Scratch {
    /// The entries for the system's poll, in the order of the caller's.
    set: Vec<libc::pollfd>,
    sockets: Vec<Option<Arc<Socket>>>,
    /// The thread's sleep on each of the sockets.
    asleep: Vec<Asleep>,
}

thread_local! {
    static SCRATCH: Cell<Scratch> = Cell::default();
}

/// `poll(2)` of sockets and ordinary descriptors: how many have events. Without a timeout for ever.
///
/// Polls for as long as the configuration's `polling_time` says before it sleeps. A signal ends it with `EINTR`.
///
/// # Errors
/// As that call's.
pub fn poll(fds: &mut [libc::pollfd], timeout: Option<Duration>) -> Result<usize> {
    // The variables of a thread may be gone in an exit handler. Then there is no scratch.
    let mut scratch = SCRATCH.try_with(Cell::take).unwrap_or_default();
    scratch.sockets.clear();
    scratch.sockets.extend(fds.iter().map(|fd| table::get(fd.fd).ok()));
    let result = if scratch.sockets.iter().all(Option::is_none) {
        sleep::wait(fds, timeout, || ())
    } else {
        poll_sockets(fds, timeout, &mut scratch)
    };
    scratch.sockets.clear();
    let _ = SCRATCH.try_with(|cell| cell.set(scratch));
    result
}

fn poll_sockets(
    fds: &mut [libc::pollfd],
    timeout: Option<Duration>,
    scratch: &mut Scratch,
) -> Result<usize> {
    let Scratch { set, sockets, asleep } = scratch;
    set.clear();
    set.extend(fds.iter().zip(&*sockets).map(|(fd, socket)| libc::pollfd {
        fd: fd.fd,
        events: if socket.is_some() { libc::POLLIN } else { fd.events },
        revents: 0,
    }));
    let others = sockets.iter().any(Option::is_none);
    let begin = Instant::now();
    // A timeout that cannot be expressed is for ever.
    let deadline = timeout.and_then(|timeout| begin.checked_add(timeout));
    loop {
        let mut found = look(fds, sockets);
        if others {
            found += look_at_others(fds, set, sockets)?;
        }
        if found > 0 || timeout.is_some_and(|timeout| timeout.is_zero()) {
            return Ok(found);
        }
        if begin.elapsed() >= config().polling_time {
            break;
        }
        std::hint::spin_loop();
    }
    loop {
        let mut wake = Instant::now().checked_add(config().wake_up_interval);
        let mut earlier = |at: Option<Instant>| {
            wake = match (wake, at) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
        };
        earlier(deadline);
        asleep.clear();
        for socket in sockets.iter().flatten() {
            let (begun, due) = socket.begin_sleep();
            asleep.push(begun);
            earlier(due);
        }
        let asleep = || sockets.iter().flatten().zip(asleep.iter().copied());
        // Events from before they were armed.
        let found = look(fds, sockets);
        if found > 0 {
            asleep().for_each(|(socket, asleep)| socket.end_sleep(asleep, false));
            if others {
                return Ok(found + look_at_others(fds, set, sockets)?);
            }
            return Ok(found);
        }
        let slept = sleep::wait(set, wake.map(sleep::until), || give_up(asleep()));
        let of_sockets = set.iter().zip(&*sockets).filter(|(_, socket)| socket.is_some());
        for ((entry, _), (socket, asleep)) in of_sockets.zip(asleep()) {
            socket.end_sleep(asleep, slept.is_ok() && entry.revents != 0);
        }
        let slept = slept?;
        let mut found = look(fds, sockets);
        for ((fd, entry), socket) in fds.iter_mut().zip(&*set).zip(&*sockets) {
            if socket.is_none() {
                fd.revents = if slept > 0 { entry.revents } else { 0 };
                found += usize::from(fd.revents != 0);
            }
        }
        if found > 0 || deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return Ok(found);
        }
    }
}

/// Ends the sleep of a thread that was cancelled in it, and its holds of the sockets.
pub(crate) fn give_up<'a>(sockets: impl Iterator<Item = (&'a Arc<Socket>, Asleep)>) {
    for (socket, asleep) in sockets {
        socket.end_sleep(asleep, false);
        // SAFETY: the thread's own hold, which it never drops, since it runs no destructors any more.
        unsafe { Arc::decrement_strong_count(Arc::as_ptr(socket)) };
    }
}

/// Asks the sockets.
fn look(fds: &mut [libc::pollfd], sockets: &[Option<Arc<Socket>>]) -> usize {
    let mut found = 0;
    for (fd, socket) in fds.iter_mut().zip(sockets) {
        if let Some(socket) = socket {
            fd.revents = socket.ready().asked(fd.events);
            found += usize::from(fd.revents != 0);
        }
    }
    found
}

/// Asks the system for the others.
fn look_at_others(
    fds: &mut [libc::pollfd],
    set: &mut [libc::pollfd],
    sockets: &[Option<Arc<Socket>>],
) -> Result<usize> {
    // A negative entry is skipped.
    for (entry, socket) in set.iter_mut().zip(sockets) {
        if socket.is_some() {
            entry.fd = -1;
        }
    }
    let found = sleep::poll(set, Some(Duration::ZERO));
    for ((fd, entry), socket) in fds.iter_mut().zip(&mut *set).zip(sockets) {
        if socket.is_some() {
            entry.fd = fd.fd;
        } else {
            fd.revents = entry.revents;
        }
    }
    found
}
