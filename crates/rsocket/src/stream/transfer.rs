//! Moving bytes.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::Stream;
use super::connection::Connection;
use crate::errno::{Errno, Result};
use crate::machine::{Machine, Piece, Sender};
use crate::ring::Cursor;
use crate::sleep::{Wake, wait_readable};

fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.map(|timeout| Instant::now() + timeout)
}

impl Stream {
    /// `send(2)` of a list of buffers: all of it, unless the socket does not block.
    pub(crate) fn send(&self, mut from: Cursor<'_>, flags: i32) -> Result<usize> {
        if flags & libc::MSG_OOB != 0 {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        let nonblocking = self.is_nonblocking() || flags & libc::MSG_DONTWAIT != 0;
        let deadline = deadline(self.options.lock().send_timeout);
        let connection = self.established(nonblocking, deadline)?;
        let total = from.left();
        let mut turn = connection.send.lock();
        loop {
            let result = self.send_some(connection, &mut from);
            let done = total - from.left();
            match result {
                Ok(()) if from.left() == 0 => return Ok(done),
                Ok(()) => {}
                Err(_) if done > 0 => return Ok(done),
                Err(errno) => return Err(errno),
            }
            connection.progress();
            if connection.core.lock().sender.can_send() {
                continue;
            }
            let waited = if nonblocking {
                Err(Errno(libc::EAGAIN))
            } else {
                let test = |core: &Machine| core.sender.can_send() || !core.writable;
                MutexGuard::unlocked(&mut turn, || self.wait(connection, deadline, test))
            };
            match waited {
                Ok(()) => {}
                Err(_) if done > 0 && connection.core.lock().writable => return Ok(done),
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Sends until there is no more, or no room. With `send` held.
    fn send_some(&self, connection: &Connection, from: &mut Cursor<'_>) -> Result<()> {
        if !self.send_maps(connection)? {
            return Ok(());
        }
        loop {
            let together = from.contiguous(from.left()).map_or(0, |(_, n)| n);
            let plan = |sender: &mut Sender| sender.plan_at_once(together);
            let sent = self.send_piece(connection, from, plan, Connection::post_at_once)?;
            if sent == Some(true) {
                continue;
            }
            let left = from.left();
            let plan = |sender: &mut Sender| sender.plan(left);
            let post = |connection: &Connection, piece: &Piece, from: &mut Cursor<'_>| {
                connection.post_piece(piece, from).map(|()| true)
            };
            if self.send_piece(connection, from, plan, post)?.is_none() {
                return Ok(());
            }
        }
    }

    /// Posts the piece that `plan` plans, if there is one. False if `post` refuses it. With `send` held.
    fn send_piece<'a>(
        &self,
        connection: &Connection,
        from: &mut Cursor<'a>,
        plan: impl FnOnce(&mut Sender) -> Option<Piece>,
        post: impl FnOnce(&Connection, &Piece, &mut Cursor<'a>) -> Result<bool>,
    ) -> Result<Option<bool>> {
        let piece = {
            let mut core = connection.core.lock();
            if !core.writable {
                drop(core);
                return Err(self.broken(connection));
            }
            plan(&mut core.sender)
        };
        let Some(piece) = piece else { return Ok(None) };
        let before = from.clone();
        let posted = post(connection, &piece, from);
        if posted != Ok(true) {
            *from = before;
            connection.core.lock().sender.cancel(&piece);
        }
        if let Err(errno) = posted {
            // Another thread may have found no room while the piece had it.
            self.sleepers.wake();
            if errno.0 != libc::EFAULT {
                connection.fail(errno.0);
            }
        }
        posted.map(Some)
    }

    /// The error of a send on a connection that has ended: the reason once, then `EPIPE`.
    pub(super) fn broken(&self, connection: &Connection) -> Errno {
        match connection.take_error() {
            0 if connection.core.lock().connected => Errno(libc::EPIPE),
            0 if self.told_reset.swap(true, Ordering::Relaxed) => Errno(libc::EPIPE),
            0 => Errno(libc::ECONNRESET),
            errno => {
                self.told_reset.store(true, Ordering::Relaxed);
                Errno(errno)
            }
        }
    }

    /// Waits for `test`, with keepalives meanwhile; `EAGAIN` at the deadline.
    pub(super) fn wait(
        &self,
        connection: &Connection,
        deadline: Option<Instant>,
        test: impl Fn(&Machine) -> bool,
    ) -> Result<()> {
        if connection.spin(&test) {
            return Ok(());
        }
        loop {
            let (asleep, due) = self.begin_sleep();
            let until = match (deadline, due) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
            connection.progress();
            if test(&connection.core.lock()) {
                self.end_sleep(asleep, false);
                return Ok(());
            }
            let undo = || self.end_sleep(asleep, false);
            let woken = wait_readable(self.epoll.as_fd(), until, undo);
            self.end_sleep(asleep, woken == Ok(Wake::Ready));
            woken?;
            connection.progress();
            if test(&connection.core.lock()) {
                return Ok(());
            }
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Err(Errno(libc::EAGAIN));
            }
        }
    }

    /// `recv(2)` into a list of buffers: the data that is there, or with `MSG_WAITALL` all of it.
    pub(crate) fn recv(&self, mut to: Cursor<'_>, flags: i32) -> Result<usize> {
        if flags & libc::MSG_OOB != 0 {
            return Err(Errno(libc::EINVAL));
        }
        let nonblocking = self.is_nonblocking() || flags & libc::MSG_DONTWAIT != 0;
        let deadline = deadline(self.options.lock().recv_timeout);
        let connection = self.established(nonblocking, deadline)?;
        let total = to.left();
        if total == 0 {
            return Ok(0);
        }
        let peek = flags & libc::MSG_PEEK != 0;
        let all = flags & libc::MSG_WAITALL != 0 && !peek;
        let mut turn = connection.recv.lock();
        loop {
            let result = Self::recv_some(connection, &mut to, peek);
            let done = total - to.left();
            match result {
                Ok(()) if to.left() == 0 || (done > 0 && !all) => return Ok(done),
                Ok(()) => {}
                Err(_) if done > 0 => return Ok(done),
                Err(errno) => return Err(errno),
            }
            connection.progress();
            let (unread, readable) = {
                let core = connection.core.lock();
                (core.receiver.unread() > 0, core.readable)
            };
            if unread {
                continue;
            }
            if !readable {
                return match connection.take_error() {
                    _ if done > 0 => Ok(done),
                    0 => Ok(0),
                    errno => Err(Errno(errno)),
                };
            }
            let waited = if nonblocking {
                Err(Errno(libc::EAGAIN))
            } else {
                let test = |core: &Machine| core.receiver.unread() > 0 || !core.readable;
                MutexGuard::unlocked(&mut turn, || self.wait(connection, deadline, test))
            };
            match waited {
                Ok(()) => {}
                Err(_) if done > 0 => return Ok(done),
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Takes the data that is there. With `recv` held.
    fn recv_some(connection: &Connection, to: &mut Cursor<'_>, peek: bool) -> Result<()> {
        let mut skip = 0;
        while to.left() > 0 {
            let Some(part) = connection.core.lock().receiver.peek(skip, to.left()) else { break };
            connection.copy_received(part.at, to, part.len)?;
            if peek {
                skip += part.len;
            } else {
                connection.core.lock().receiver.consume(part.len);
                connection.grant();
            }
        }
        Ok(())
    }
}
