//! One process's part of the link: its listener and its channels.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyverbs_locks::{Mutex, rank};
use rustix::event::epoll::{self, EventFlags};
use rustix::fs::{Mode, OFlags, fcntl_setfl, open, readlink};
use socket2::Socket;
use thiserror::Error;

use super::channel::{Channel, Closed};
use super::control::{Connection, Control, LISTENER_KEY, News, Opening};
use super::handshake::{self, Status, is_valid_ring};
use super::lane::LaneWriter;
use super::layout::{ALLOCATION, answers, lanes, page, side_len, words};
use super::manner::Manner;
use super::memory::{Access, Area, SharedObject};
use super::notify::{Doorbell, Ears, OWN_DOORBELL};
use super::poller::Poller;
use super::process;
use super::published::Published;
use crate::host::{Name, Registry, Slot};
use crate::random_u64;
use crate::sys::{Descriptor, Uncancelled, is_scarcity};

/// The sizes of the rings that this process makes. The other process takes the offered sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Bytes of a ring, there are two to a channel: a power of two from 64 KiB to 64 MiB.
    pub ring: usize,
    /// Longest payload: at most a quarter of the ring.
    pub max_payload: usize,
    /// Bytes of the memory in which this process publishes.
    pub published: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { ring: 512 << 10, max_payload: 64 << 10, published: 1 }
    }
}

/// The reason why there is no channel to a slot.
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

/// A process as the others of its user and host find it. See [`super`].
#[derive(Debug)]
pub struct Endpoint {
    shared: Arc<Shared>,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) slot: u8,
    /// The registry of listeners.
    pub(super) registry: Registry,
    pub(super) config: Config,
    pub(super) listener: Socket,
    pub(super) epoll: OwnedFd,
    pub(super) epoch: SharedObject,
    pub(super) doorbells: SharedObject,
    pub(super) wake: PipeReader,
    /// The pipe that peers get to wake this process.
    pub(super) given: PipeWriter,
    /// Wakes this process itself, as peers do.
    waker: Waker,
    pub(super) published: Published,
    /// The doorbell to this process's own poller.
    pub(super) doorbell: Doorbell,
    /// Never freed: a process without it runs another program.
    pub(super) proof_value: &'static u64,
    pub(super) control: Mutex<rank::ShmEndpoint, Control>,
    /// For the poller.
    pub(super) news: Mutex<rank::ShmNews, Vec<News>>,
    /// The word of its [`Manner`]; written under the lock of `control`.
    pub(super) manner: AtomicU64,
    /// The log already says that descriptors or memory have run out.
    scarce: AtomicBool,
    /// The process that made it, and that alone may take it apart. A forked child shares the sockets.
    pub(super) owner: u32,
}

impl Endpoint {
    /// Listens at the name of `slot`, and makes the poller that reads the messages.
    ///
    /// # Errors
    /// `InvalidInput` for sizes that [`Config`] does not allow, `AddrInUse` if the name is taken, and those of
    /// socket(2), memfd_create(2), pipe(2) and epoll_create(2); `FileTooLarge` where `RLIMIT_FSIZE` is too low.
    pub fn new(slot: &Slot, config: Config) -> io::Result<(Self, Poller)> {
        let _uncancelled = Uncancelled::new();
        if !is_valid_ring(config.ring, config.max_payload) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a ring is a power of two from 64 KiB to 64 MiB, a payload at most a quarter of it",
            ));
        }
        let name = Name::Channels(slot.number());
        let listener = slot.registry().listen(name).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => io::Error::new(error.kind(), slot.registry().holder(name)),
            _ => error,
        })?;
        let (epoch, doorbells) = (SharedObject::new(page())?, SharedObject::new(page())?);
        epoch.allocate(0, page())?;
        doorbells.allocate(0, page())?;
        let epoch_area = Area::map(epoch.as_fd(), page(), Access::ReadWrite)?;
        let doorbells_area = Area::map(doorbells.as_fd(), page(), Access::ReadWrite)?;
        epoch.seal_future_writes();
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let (wake, given) = io::pipe()?;
        // Only the other end is given away, so this one stays as it is.
        fcntl_setfl(&wake, OFlags::NONBLOCK)?;
        let waker = Waker::open(given.as_fd())?.ok_or(io::ErrorKind::Unsupported)?;
        let reserve = given.as_fd().try_clone_to_owned()?;
        let shared = Arc::new(Shared {
            slot: slot.number(),
            registry: slot.registry().clone(),
            config,
            listener,
            epoll,
            epoch,
            doorbells,
            wake,
            given,
            waker,
            published: Published::new(config.published)?,
            doorbell: Doorbell::new(doorbells_area.clone(), epoch_area.clone(), OWN_DOORBELL),
            proof_value: Box::leak(Box::new(random_u64())),
            control: Mutex::new(Control::new(reserve)),
            news: Mutex::new(Vec::new()),
            manner: AtomicU64::default(),
            scarce: AtomicBool::new(false),
            owner: std::process::id(),
        });
        // Edge-triggered: a connection that cannot be accepted for want of descriptors must not keep the caller awake.
        shared.watch(shared.listener.as_fd(), LISTENER_KEY, EventFlags::IN | EventFlags::ET)?;
        let poller = Poller::new(Arc::clone(&shared), Ears::new(doorbells_area, epoch_area));
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
        let _uncancelled = Uncancelled::new();
        let connected = self.connect_to(slot);
        if let Err(ConnectError::Io(error)) = &connected {
            shared.report_scarcity(Some(slot), error);
        }
        connected
    }

    /// Whether the process that holds `slot` is stopped, by a signal or a debugger.
    #[must_use]
    pub fn is_process_stopped(&self, slot: u8) -> bool {
        slot != 0 && slot != self.shared.slot && self.shared.registry.is_process_stopped(slot)
    }

    fn connect_to(&self, slot: u8) -> Result<Arc<Channel>, ConnectError> {
        let shared = &self.shared;
        let mut control = shared.control.lock();
        if let Some(channel) = &control.by_slot[usize::from(slot)]
            && channel.closed().is_none()
        {
            return Ok(Arc::clone(channel));
        }
        let (socket, _) =
            shared.registry.connect(Name::Channels(slot)).map_err(|error| match error.kind() {
                io::ErrorKind::ConnectionRefused => ConnectError::Nobody,
                io::ErrorKind::PermissionDenied => ConnectError::OtherUser,
                io::ErrorKind::WouldBlock => ConnectError::TooMany,
                _ => error.into(),
            })?;
        let process = process::peer(socket.as_fd())?;
        let Config { ring, max_payload, .. } = shared.config;
        let side = side_len(ring);
        let object = SharedObject::new(2 * side)?;
        for start in [0, side] {
            object.allocate(start, words() + ALLOCATION)?;
            object.allocate(start + answers(ring), lanes(ring) - answers(ring))?;
        }
        let map = Area::map(object.as_fd(), 2 * side, Access::ReadWrite)?;
        let (own, peer) = (map.part(0, side), map.part(side, side));
        shared.introduce(&own);
        let process = Arc::new(process);
        let index = control.take_index().ok_or(ConnectError::TooMany)?;
        if !shared.published.attach(slot, [&own, &peer], &process) {
            control.free_index(index);
            return Err(ConnectError::TooMany);
        }
        let greeting = shared.greeting(Status::Ok, ring, max_payload, index);
        let fds = [
            object.as_fd(),
            shared.epoch.as_fd(),
            shared.doorbells.as_fd(),
            shared.given.as_fd(),
            shared.published.object.as_fd(),
        ];
        let known = Arc::clone(&process);
        let socket: OwnedFd = socket.into();
        let opened = handshake::send(socket.as_fd(), &greeting.emit(), &fds).and_then(|()| {
            let opening = Opening { index, slot, process, socket, own, peer, ring, max_payload };
            shared.open(&mut control, opening)
        });
        if opened.is_err() {
            control.free_index(index);
            shared.published.detach(&known);
        }
        Ok(opened?)
    }

    /// Accepts connections and notices peers that have gone. Call it when [`control_fd`](Self::control_fd) is readable;
    /// it is harmless at other times. [`Poller::poll`] tells the results.
    ///
    /// # Errors
    /// Those of epoll_wait(2). An error of one connection only ends that one.
    pub fn control(&self) -> io::Result<()> {
        let _uncancelled = Uncancelled::new();
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

    /// The memory in which this process publishes.
    #[must_use]
    pub fn published(&self) -> &Published {
        &self.shared.published
    }

    /// Waits until all copies have ended that others may have begun before the last change of the published memory. Memory
    /// that was taken back is then no longer touched. It takes as long as a copy does. If a process is stopped in the middle
    /// of one, the wait lasts until it goes on or ends.
    pub fn settle(&self) {
        let _uncancelled = Uncancelled::new();
        self.shared.published.settle();
    }

    /// Has the poller look at the answers to a lane, and name it by `tag`.
    pub fn watch_lane(&self, channel: &Arc<Channel>, lane: &Arc<LaneWriter>, tag: u32) {
        self.shared.tell(News::Lane(Arc::clone(channel), Arc::clone(lane), tag));
    }

    /// Says to all peers, those of later channels as well, what this process does to packets.
    pub fn say(&self, manner: Manner) {
        self.shared.say(manner);
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
        self.shared.registry.connect(Name::Channels(slot)).unwrap().0.into()
    }

    /// Fills the pipe by the end that peers have, which then blocks.
    pub(super) fn fill_pipe(&self) {
        let given = self.shared.given.as_fd();
        fcntl_setfl(given, OFlags::NONBLOCK).unwrap();
        while rustix::io::write(given, &[0; 4096]).is_ok_and(|n| n > 0) {}
        fcntl_setfl(given, OFlags::empty()).unwrap();
    }

    /// Stops watching a channel, as for one that has closed.
    pub(super) fn forget(&self, channel: &Arc<Channel>) {
        self.shared.forget(&mut self.shared.control.lock(), channel);
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

impl Shared {
    /// Says once that another process is reached by UDP for want of descriptors or memory.
    pub(super) fn report_scarcity(&self, slot: Option<u8>, error: &io::Error) {
        let kinds = [io::ErrorKind::FileTooLarge, io::ErrorKind::OutOfMemory];
        let is_one = is_scarcity(error) || kinds.contains(&error.kind());
        if is_one && !self.scarce.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                slot,
                %error,
                "no shared memory with another process of this host: messages go by UDP"
            );
        }
    }

    /// Wakes this process's own reader.
    pub(super) fn wake(&self) {
        self.waker.wake();
    }
}

/// Wakes another process through its pipe, which this process opened for itself. Other holders of the pipe cannot make
/// writing to it block, as they could with a descriptor that they gave away. The pipe never lacks a reader, so there is
/// no `SIGPIPE`.
#[derive(Debug)]
pub(super) struct Waker(Descriptor);

impl Waker {
    /// Opens the pipe that a peer sent. None if it is none, or lies in a file system: that may be one of FUSE, whose
    /// server need not answer. The name tells without a question to a file system.
    ///
    /// # Errors
    /// Those of open(2) and readlink(2) of `/proc/self/fd`.
    pub(super) fn open(given: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        let name = format!("/proc/self/fd/{}", given.as_raw_fd());
        if !readlink(&name, Vec::new())?.as_bytes().starts_with(b"pipe:[") {
            return Ok(None);
        }
        let fd = open(name, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Some(Self(fd.into())))
    }

    /// Wakes the process. A full pipe (`EAGAIN`) means that it is awake or will be.
    pub(super) fn wake(&self) {
        let _ = rustix::io::write(&self.0, &[1]);
    }
}

/// Empties this process's pipe, or some of it where others go on writing.
pub(super) fn read_wakes(pipe: BorrowedFd<'_>) {
    let mut bytes = [0; 256];
    for _ in 0..256 {
        if rustix::io::read(pipe, &mut bytes) != Ok(bytes.len()) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pipe_of_no_file_system_is_a_waker() {
        let (_reader, pipe) = io::pipe().unwrap();
        assert!(Waker::open(pipe.as_fd()).unwrap().is_some());
        let path = std::env::temp_dir().join(format!("anyverbs-fifo-{}", std::process::id()));
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a string with its end.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let named = open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        std::fs::remove_file(&path).unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(Waker::open(null.as_fd()).unwrap().is_none());
        assert!(Waker::open(named.unwrap().as_fd()).unwrap().is_none());
    }
}
