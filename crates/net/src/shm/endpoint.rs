//! One process's part of the link: its listener and its channels.

use std::ffi::c_int;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use socket2::{Domain, SockAddr, Socket, Type};
use thiserror::Error;

use super::channel::{Channel, Closed};
use super::control::{Connection, Control, LISTENER_KEY, News, Opening};
use super::handshake::{self, Status, is_valid_ring};
use super::layout::{ALLOCATION, page, side_len};
use super::memory::{Access, Area, SharedObject};
use super::notify::{Door, Ears, OWN_BELL};
use super::poller::Poller;
use super::process;
use super::published::Board;
use crate::registry::{Slot, random_u64};

/// The sizes of the rings that this process makes. The other process takes what it is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Bytes of a ring, there are two to a channel: a power of two from 64 KiB to 64 MiB.
    pub ring: usize,
    /// Longest payload: at most a quarter of the ring.
    pub max_payload: usize,
    /// Bytes of the board on which this process publishes.
    pub board: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { ring: 512 << 10, max_payload: 64 << 10, board: 1 }
    }
}

/// Why there is no channel to a slot.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// No process holds the slot, or it has no such link.
    #[error("nobody listens at this slot")]
    Nobody,
    /// It is this process's own slot, or 0.
    #[error("not the slot of another process")]
    NotAnother,
    /// A process of another user has the slot's name.
    #[error("the slot's name belongs to another user")]
    OtherUser,
    /// This process or the other has too many channels for the moment.
    #[error("too many channels")]
    TooMany,
    /// The kernel refused.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// This process as others of its user and host find it. See [`super`].
#[derive(Debug)]
pub struct Endpoint {
    shared: Arc<Shared>,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) slot: u8,
    pub(super) uid: u32,
    /// Of the names of listeners.
    pub(super) prefix: String,
    pub(super) config: Config,
    pub(super) listener: Socket,
    pub(super) epoll: OwnedFd,
    pub(super) epoch: SharedObject,
    pub(super) bells: SharedObject,
    pub(super) wake: OwnedFd,
    pub(super) board: Board,
    /// How this process tells its own poller.
    pub(super) door: Door,
    pub(super) probe_value: Box<u64>,
    pub(super) control: Mutex<Control>,
    /// For the poller.
    pub(super) news: Mutex<Vec<News>>,
    /// Who made it, and alone may take it apart: a forked child shares the sockets.
    pub(super) owner: u32,
}

impl Endpoint {
    /// Listens at the name of `slot`, and makes the poller that reads what comes.
    ///
    /// # Errors
    /// `InvalidInput` for sizes that [`Config`] does not allow, `AddrInUse` when somebody has taken the name, and those
    /// of socket(2), memfd_create(2), eventfd(2) and epoll_create(2).
    pub fn new(slot: &Slot, config: Config) -> io::Result<(Self, Poller)> {
        if !is_valid_ring(config.ring, config.max_payload) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a ring is a power of two from 64 KiB to 64 MiB, a payload at most a quarter of it",
            ));
        }
        let prefix = slot.registry().prefix().to_owned();
        let listener = Socket::new(Domain::UNIX, Type::SEQPACKET.nonblocking(), None)?;
        listener.bind(&address(&prefix, slot.number())?)?;
        listener.listen(4096)?;
        let (epoch, bells) = (SharedObject::new(page())?, SharedObject::new(page())?);
        epoch.allocate(0, page())?;
        bells.allocate(0, page())?;
        let epoch_area = Area::map(epoch.as_fd(), page(), Access::ReadWrite)?;
        let bells_area = Area::map(bells.as_fd(), page(), Access::ReadWrite)?;
        epoch.seal_future_writes();
        let epoll = owned(
            // SAFETY: flags only.
            unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) },
        )?;
        let wake = owned(
            // SAFETY: a number and flags only.
            unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) },
        )?;
        let shared = Arc::new(Shared {
            slot: slot.number(),
            uid: slot.registry().uid(),
            prefix,
            config,
            listener,
            epoll,
            epoch,
            bells,
            wake,
            board: Board::new(config.board)?,
            door: Door::new(bells_area.clone(), epoch_area.clone(), OWN_BELL),
            probe_value: Box::new(random_u64()),
            control: Mutex::new(Control::new()),
            news: Mutex::new(Vec::new()),
            owner: std::process::id(),
        });
        // Edge-triggered: what cannot be accepted for want of descriptors must not keep the caller awake.
        shared.watch(shared.listener.as_fd(), LISTENER_KEY, libc::EPOLLIN | libc::EPOLLET)?;
        let poller = Poller::new(Arc::clone(&shared), Ears::new(bells_area, epoch_area));
        Ok((Self { shared }, poller))
    }

    /// The channel to the process that holds `slot`: the one that there is, or a new one. Does not wait: messages sent
    /// before the other process has answered lie in the ring.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect(&self, slot: u8) -> Result<Arc<Channel>, ConnectError> {
        let shared = &self.shared;
        if slot == shared.slot || slot == 0 {
            return Err(ConnectError::NotAnother);
        }
        let mut control = shared.control.lock();
        if let Some(channel) = &control.by_slot[usize::from(slot)]
            && channel.closed().is_none()
        {
            return Ok(Arc::clone(channel));
        }
        let socket = Socket::new(Domain::UNIX, Type::SEQPACKET.nonblocking(), None)?;
        socket.connect(&address(&shared.prefix, slot)?).map_err(|error| {
            match error.raw_os_error() {
                Some(libc::ECONNREFUSED) => ConnectError::Nobody,
                Some(libc::EAGAIN) => ConnectError::TooMany,
                _ => error.into(),
            }
        })?;
        let (process, uid) = process::peer(socket.as_fd())?;
        if uid != shared.uid {
            return Err(ConnectError::OtherUser);
        }
        let Config { ring, max_payload, .. } = shared.config;
        let side = side_len(ring);
        let object = SharedObject::new(2 * side)?;
        for start in [0, side] {
            object.allocate(start, page() + ALLOCATION)?;
        }
        let map = Area::map(object.as_fd(), 2 * side, Access::ReadWrite)?;
        let (own, peer) = (map.part(0, side), map.part(side, side));
        let index = control.take_index().ok_or(ConnectError::TooMany)?;
        let greeting = shared.greeting(Status::Ok, ring, max_payload, index);
        let fds = [
            object.as_fd(),
            shared.epoch.as_fd(),
            shared.bells.as_fd(),
            shared.wake.as_fd(),
            shared.board.object.as_fd(),
        ];
        let process = Arc::new(process);
        shared.board.attach(peer.clone(), &process);
        let known = Arc::clone(&process);
        let socket: OwnedFd = socket.into();
        let opened = handshake::send(socket.as_fd(), &greeting.emit(), &fds).and_then(|()| {
            let opening = Opening { index, slot, process, socket, own, peer, ring, max_payload };
            shared.open(&mut control, opening)
        });
        if opened.is_err() {
            control.free_index(index);
            shared.board.detach(&known);
        }
        Ok(opened?)
    }

    /// Accepts connections and notices who is gone. To be called when [`control_fd`](Self::control_fd) is readable;
    /// harmless at other times. What comes of it, [`Poller::poll`] tells.
    ///
    /// # Errors
    /// Those of epoll_wait(2). What concerns one connection only ends that one.
    pub fn control(&self) -> io::Result<()> {
        self.shared.control()
    }

    /// Readable when [`control`](Self::control) has something to do. Rare: to be watched at all times.
    #[must_use]
    pub fn control_fd(&self) -> BorrowedFd<'_> {
        self.shared.epoll.as_fd()
    }

    /// Readable when messages came after [`Poller::arm`].
    #[must_use]
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }

    /// What this process publishes.
    #[must_use]
    pub fn board(&self) -> &Board {
        &self.shared.board
    }

    /// Waits until all copies have ended that others may have begun before the last change of the board: what was taken back
    /// is not touched any more. It takes as long as a copy does. A process that is stopped in the middle of one may still
    /// finish it when it goes on: it is waited for a second, once, and loses its channels.
    pub fn settle(&self) {
        let stuck = self.shared.board.settle();
        if !stuck.is_empty() {
            self.shared.end(&stuck);
        }
    }

    /// The slot of this process.
    #[must_use]
    pub fn slot(&self) -> u8 {
        self.shared.slot
    }
}

#[cfg(test)]
impl Endpoint {
    /// A connection to `slot` that says nothing.
    pub(super) fn dial(&self, slot: u8) -> OwnedFd {
        let socket = Socket::new(Domain::UNIX, Type::SEQPACKET.nonblocking(), None).unwrap();
        socket.connect(&address(&self.shared.prefix, slot).unwrap()).unwrap();
        socket.into()
    }

    /// Connections that are watched, and numbers of rings that are taken.
    pub(super) fn in_use(&self) -> (usize, usize) {
        let control = self.shared.control.lock();
        (control.connections.len(), control.taken_indices())
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if self.shared.owner != std::process::id() {
            return;
        }
        let mut control = self.shared.control.lock();
        control.shut_down = true;
        for connection in control.connections.values() {
            if let Connection::Channel(channel) = connection {
                channel.close(Closed::Local);
            }
        }
        let _ = self.shared.listener.shutdown(std::net::Shutdown::Both);
    }
}

fn owned(fd: c_int) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor that the kernel has just made for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Where the process with slot `slot` listens.
fn address(prefix: &str, slot: u8) -> io::Result<SockAddr> {
    SockAddr::unix(format!("\0{prefix}/shm/{slot}"))
}

/// Counts an eventfd up.
pub(super) fn write_word(fd: BorrowedFd<'_>) {
    let one = 1u64;
    // SAFETY: eight live bytes. A full counter (`EAGAIN`) means that the reader is awake or will be.
    unsafe { libc::write(fd.as_raw_fd(), (&raw const one).cast(), size_of::<u64>()) };
}

/// Sets an eventfd to zero.
pub(super) fn read_word(fd: BorrowedFd<'_>) {
    let mut count = 0u64;
    // SAFETY: eight live bytes; the descriptor does not block.
    unsafe { libc::read(fd.as_raw_fd(), (&raw mut count).cast(), size_of::<u64>()) };
}
