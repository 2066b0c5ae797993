//! Stream sockets.

mod connection;
mod iomap;
mod setup;
mod transfer;

use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyverbs::cm::Address;
use parking_lot::Mutex;

use crate::epoll::Epoll;
use crate::errno::{Errno, Result};
use crate::options::{self, LINGER, Options, RDMA_UNREAD, SOL_RDMA, Value};
use crate::ready::Ready;
use crate::sleepers::{Asleep, Sleepers};
use crate::wire::Control;
use connection::Connection;
use iomap::IoMaps;
use setup::Setup;

pub(crate) use setup::AF_IB;

/// The stage of a socket's life.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Debug)]
#[repr(u8)]
pub(crate) enum Phase {
    Idle,
    Bound,
    Listening,
    /// Resolving, connecting or accepting.
    Opening,
    /// The socket was connected, and may be disconnected by now.
    Connected,
    /// The socket could not be connected.
    Failed,
}

impl Phase {
    const ALL: [Self; 6] =
        [Self::Idle, Self::Bound, Self::Listening, Self::Opening, Self::Connected, Self::Failed];
}

/// A stream socket. Its descriptor is readable when something happened that it must look at.
#[derive(Debug)]
pub(crate) struct Stream {
    family: i32,
    nonblocking: AtomicBool,
    phase: AtomicU8,
    /// `SO_ERROR` before there is a connection.
    error: AtomicI32,
    /// A send has said that the peer is gone.
    told_reset: AtomicBool,
    options: Mutex<Options>,
    connection: OnceLock<Connection>,
    setup: Mutex<Setup>,
    maps: Mutex<IoMaps>,
    keepalive_due: Mutex<Option<Instant>>,
    /// The threads that sleep on the descriptor.
    sleepers: Arc<Sleepers>,
    epoll: Epoll,
}

impl Stream {
    pub(crate) fn fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    pub(crate) fn phase(&self) -> Phase {
        Phase::ALL[usize::from(self.phase.load(Ordering::Acquire))]
    }

    fn set_phase(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Release);
        // One thread takes the event that others wait for.
        self.sleepers.wake();
    }

    pub(crate) fn set_nonblocking(&self, on: bool) {
        self.nonblocking.store(on, Ordering::Relaxed);
    }

    pub(crate) fn is_nonblocking(&self) -> bool {
        self.nonblocking.load(Ordering::Relaxed)
    }

    pub(crate) fn family(&self) -> i32 {
        self.family
    }

    /// The connection, while there was one.
    fn connected(&self) -> Option<&Connection> {
        if self.phase() == Phase::Connected { self.connection.get() } else { None }
    }

    pub(crate) fn local_address(&self) -> Option<Address> {
        self.setup.lock().local()
    }

    pub(crate) fn peer_address(&self) -> Result<Address> {
        let setup = self.setup.lock();
        // An accepted socket knows its peer before the connection is there.
        if self.phase() == Phase::Connected || setup.is_accepting() {
            setup.peer().ok_or(Errno(libc::ENOTCONN))
        } else {
            Err(Errno(libc::ENOTCONN))
        }
    }

    pub(crate) fn set_option(&self, level: i32, name: i32, value: &[u8]) -> Result<()> {
        let sized = self.phase() >= Phase::Opening;
        let mut options = self.options.lock();
        if (level, name) == (SOL_RDMA, options::RDMA_ROUTE) {
            // A path that the program found itself: the device's own is the only one.
            return if sized { Err(Errno(libc::EINVAL)) } else { Ok(()) };
        }
        options.set(level, name, value, sized)?;
        let (keepalive, idle) = (options.keepalive, options.keep_idle);
        drop(options);
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_REUSEADDR) | (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => {
                self.setup.lock().set_option(level, options::flag(value)?)
            }
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) | (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => {
                let idle = Duration::from_secs(idle.unsigned_abs().into());
                *self.keepalive_due.lock() = keepalive.then(|| Instant::now() + idle);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn option(&self, level: i32, name: i32) -> Result<Value> {
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_ERROR) => {
                self.drive();
                let errno = self.error.swap(0, Ordering::AcqRel);
                let errno = match self.connection.get() {
                    Some(connection) if errno == 0 => connection.take_error(),
                    _ => errno,
                };
                Ok(Value::int(errno))
            }
            (libc::SOL_SOCKET, libc::SO_TYPE) => Ok(Value::int(libc::SOCK_STREAM)),
            (libc::SOL_SOCKET, libc::SO_PROTOCOL) => Ok(Value::int(libc::IPPROTO_TCP)),
            (libc::SOL_SOCKET, libc::SO_DOMAIN) => Ok(Value::int(self.family)),
            (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => {
                Ok(Value::int((self.phase() == Phase::Listening).into()))
            }
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => Ok(Value::int(self.setup.lock().mtu())),
            (SOL_RDMA, options::RDMA_ROUTE) => self.setup.lock().route(),
            (SOL_RDMA, RDMA_UNREAD) => {
                let unread = self.connected().map_or(0, |connection| {
                    connection.progress();
                    connection.core.lock().receiver.unread()
                });
                Ok(Value::int(unread.try_into().unwrap_or(i32::MAX)))
            }
            _ => self.options.lock().get(level, name),
        }
    }

    /// Operations that could be done without waiting.
    pub(crate) fn ready(&self) -> Ready {
        self.drive();
        match self.phase() {
            Phase::Idle | Phase::Bound => Ready::new(libc::POLLOUT | libc::POLLHUP),
            Phase::Opening => Ready::default(),
            Phase::Listening => self.ready_to_accept(),
            Phase::Failed => Ready::new(
                libc::POLLIN | libc::POLLOUT | libc::POLLERR | libc::POLLHUP | libc::POLLRDHUP,
            ),
            Phase::Connected => self.connection.get().map_or(Ready::default(), |connection| {
                connection.progress();
                let core = connection.core.lock();
                let mut events = 0;
                if core.receiver.unread() > 0 || !core.readable {
                    events |= libc::POLLIN | libc::POLLRDNORM;
                }
                if core.sender.can_send() || !core.writable {
                    events |= libc::POLLOUT | libc::POLLWRNORM;
                }
                if !core.readable {
                    events |= libc::POLLRDHUP;
                }
                // Programs take a hang-up for the end, and would not read data from before it.
                if !core.connected && core.receiver.unread() == 0 {
                    events |= libc::POLLHUP;
                }
                if connection.has_error() {
                    events |= libc::POLLERR;
                }
                Ready { events, read_edges: core.read_edges, write_edges: core.write_edges }
            }),
        }
    }

    /// A thread is about to sleep: the descriptor tells of events from now on. The thread must look for earlier ones
    /// afterwards. Returns the time at which the socket must be looked at in any case.
    pub(crate) fn begin_sleep(&self) -> (Asleep, Option<Instant>) {
        let asleep = self.sleepers.begin(self.connection.get().map(|connection| &connection.cq));
        (asleep, *self.keepalive_due.lock())
    }

    /// A thread has slept; `woken`: the descriptor is readable.
    pub(crate) fn end_sleep(&self, asleep: Asleep, woken: bool) {
        let channel = self.connection.get().map(|connection| &connection.channel);
        self.sleepers.end(asleep, woken, channel);
        if !woken {
            return self.tick();
        }
        if self.phase() != Phase::Listening {
            self.take_events();
        }
    }

    /// Sends the keepalive that is due.
    fn tick(&self) {
        let mut due = self.keepalive_due.lock();
        let Some(at) = *due else { return };
        let now = Instant::now();
        if at > now {
            return;
        }
        let idle = self.options.lock().keep_idle.unsigned_abs();
        *due = Some(now + Duration::from_secs(idle.into()));
        drop(due);
        if let Some(connection) = self.connected()
            && connection.core.lock().connected
            && let Err(errno) = connection.post_control(Control::Keepalive)
        {
            connection.fail(errno.0);
        }
    }

    /// `shutdown(2)`.
    pub(crate) fn shutdown(&self, read: bool, write: bool) -> Result<()> {
        let deadline = Instant::now() + LINGER;
        self.finish_accept(deadline);
        let connection = self.connected().ok_or(Errno(libc::ENOTCONN))?;
        self.shutdown_by(connection, read, write, deadline)
    }

    /// A socket that was accepted is connected as soon as the peer's confirmation is here.
    fn finish_accept(&self, deadline: Instant) {
        if self.phase() == Phase::Opening && self.setup.lock().is_accepting() {
            let _ = self.wait_opened(Some(deadline), libc::ETIMEDOUT);
        }
    }

    /// Tells the peer, and waits until its device has everything.
    fn shutdown_by(
        &self,
        connection: &Connection,
        read: bool,
        write: bool,
        deadline: Instant,
    ) -> Result<()> {
        // No thread is in the middle of a message.
        let turn = connection.send.lock();
        let control = connection.core.lock().shutdown(read, write);
        drop(turn);
        // Threads that wait to receive or to send on this socket. No completion may follow.
        self.sleepers.wake();
        let Some(control) = control else { return Ok(()) };
        while !connection.post_control(control)? {
            let free = |core: &crate::machine::Machine| core.control_free() || !core.connected;
            self.wait(connection, Some(deadline), free)?;
            if !connection.core.lock().connected {
                return Ok(());
            }
        }
        self.wait(connection, Some(deadline), |core| core.all_sent() || !core.connected)?;
        if !connection.core.lock().connected {
            self.setup.lock().disconnect();
        }
        Ok(())
    }

    /// Ends the connection in good order, for `close(2)`.
    pub(crate) fn close(&self) {
        let linger = self.options.lock().linger;
        let wait = match (linger.on, u64::try_from(linger.seconds)) {
            (true, Ok(0)) => None,
            (true, Ok(seconds)) => Some(Duration::from_secs(seconds)),
            _ => Some(LINGER),
        };
        let deadline = wait.and_then(|wait| Instant::now().checked_add(wait));
        if let Some(deadline) = deadline {
            self.finish_accept(deadline);
        }
        if let Some(connection) = self.connected() {
            if let Some(deadline) = deadline
                && connection.core.lock().connected
                && let Err(errno) = self.shutdown_by(connection, true, true, deadline)
            {
                tracing::debug!("rsocket: closed without the peer's acknowledgement: {errno}");
            }
            connection.core.lock().disconnect();
            self.sleepers.wake();
        }
        self.setup.lock().close();
    }

    /// Ends it in a hurry: the process ends.
    pub(crate) fn close_by(&self, deadline: Instant) {
        self.finish_accept(deadline);
        if let Some(connection) = self.connected()
            && let Some(_turn) = connection.send.try_lock_until(deadline)
        {
            drop(_turn);
            let _ = self.shutdown_by(connection, true, true, deadline);
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // The id lets go of the queue pair before that is destroyed.
        self.setup.get_mut().close();
    }
}
