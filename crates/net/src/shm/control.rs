//! The control side of an endpoint: connections, answers, and peers that have gone.

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

use super::channel::{Channel, ChannelId, Closed, PeerDoorbell, has_hung_up};
use super::endpoint::{Config, Shared, Waker};
use super::handshake::{self, Greeting, ProofWord, Received, Status};
use super::lane::LaneWriter;
use super::layout::{MANNER, page, side_len, words};
use super::manner::Manner;
use super::memory::{Access, Area, Memory, SharedObject};
use super::notify::{Doorbell, doorbell_of};
use super::own_table;
use super::process::{self, PeerProcess};
use super::published::{Marks, PeerPublished};
use super::ring::{Reader, Writer};
use crate::sys::{AT_ONCE, is_scarcity};

/// Most channels of a process: two for each other process, and the same number of channels that are about to be closed.
const MAX_CHANNELS: usize = 1024;
/// Most connections that have not said anything yet.
const MAX_STRANGERS: usize = 64;
/// Events handled in one go.
const BUDGET: usize = 64;
/// Under which the listener is watched.
pub(super) const LISTENER_KEY: u64 = 0;

/// Something that [`super::Poller::poll`] has to know and that does not come through a ring.
#[derive(Debug)]
pub(super) enum News {
    Opened(Arc<Channel>, Box<Reader>),
    Answered(Arc<Channel>),
    Closed(Arc<Channel>),
    /// A lane whose answers are to be looked at, and its tag.
    Lane(Arc<Channel>, Arc<LaneWriter>, u32),
}

/// The descriptors that are watched, and the channels.
#[derive(Debug)]
pub(super) struct Control {
    /// In the order of their beginning.
    pub(super) connections: BTreeMap<u64, Connection>,
    strangers: usize,
    next_key: u64,
    /// The youngest channel to each slot.
    pub(super) by_slot: Vec<Option<Arc<Channel>>>,
    /// The numbers of rings that are taken.
    indices: Vec<bool>,
    /// Connections wait for descriptors.
    accept_again: bool,
    /// A descriptor that is kept for [`Shared::turn_away`].
    reserve: Option<OwnedFd>,
    pub(super) shut_down: bool,
}

#[derive(Debug)]
pub(super) enum Connection {
    /// Accepted, and has not said anything yet.
    Stranger {
        socket: OwnedFd,
        process: PeerProcess,
    },
    Channel(Arc<Channel>),
}

/// The parts of a new channel.
pub(super) struct Opening {
    pub(super) index: usize,
    pub(super) slot: u8,
    pub(super) process: Arc<PeerProcess>,
    pub(super) socket: OwnedFd,
    pub(super) own: Area,
    pub(super) peer: Area,
    pub(super) ring: usize,
    pub(super) max_payload: usize,
}

impl Control {
    pub(super) fn new(reserve: OwnedFd) -> Self {
        Self {
            connections: BTreeMap::new(),
            strangers: 0,
            next_key: LISTENER_KEY + 1,
            by_slot: vec![None; 256],
            indices: Vec::new(),
            accept_again: false,
            reserve: Some(reserve),
            shut_down: false,
        }
    }

    pub(super) fn take_index(&mut self) -> Option<usize> {
        let free = self.indices.iter().position(|&taken| !taken).unwrap_or(self.indices.len());
        if free >= MAX_CHANNELS || self.shut_down {
            return None;
        }
        self.indices.resize(self.indices.len().max(free + 1), false);
        self.indices[free] = true;
        Some(free)
    }

    #[cfg(test)]
    pub(super) fn taken_indices(&self) -> usize {
        self.indices.iter().filter(|&&taken| taken).count()
    }

    pub(super) fn free_index(&mut self, index: usize) {
        self.indices[index] = false;
    }
}

impl Shared {
    /// This process's description of itself.
    pub(super) fn greeting(
        &self,
        status: Status,
        ring: usize,
        max_payload: usize,
        index: usize,
    ) -> Greeting {
        let proof =
            ProofWord { address: (&raw const *self.proof_value) as u64, value: *self.proof_value };
        let (index, published) = (index as u32, self.published.len());
        Greeting { status, ring, max_payload, proof, index, slot: self.slot, published }
    }

    /// Tells the peer of this process's manner before the first message.
    pub(super) fn introduce(&self, own: &Area) {
        own.store(MANNER, self.manner.load(Ordering::Relaxed), Ordering::Release);
    }

    pub(super) fn say(&self, manner: Manner) {
        let control = self.control.lock();
        if self.manner.swap(manner.word(), Ordering::Relaxed) == manner.word() {
            return;
        }
        for connection in control.connections.values() {
            if let Connection::Channel(channel) = connection {
                channel.say(manner);
            }
        }
    }

    /// Watches `fd` under `key`.
    pub(super) fn watch(&self, fd: BorrowedFd<'_>, key: u64, events: EventFlags) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(key), events)?)
    }

    fn watch_again(&self, fd: BorrowedFd<'_>, key: u64, events: EventFlags) {
        let _ = epoll::modify(&self.epoll, fd, EventData::new_u64(key), events);
    }

    /// Needed although the descriptor is closed next: a forked child may hold it open.
    fn unwatch(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    pub(super) fn take_news(&self) -> Vec<News> {
        std::mem::take(&mut *self.news.lock())
    }

    pub(super) fn tell(&self, news: News) {
        self.news.lock().push(news);
        if self.doorbell.ring_always() {
            self.wake();
        }
    }

    /// Makes the channel and its reader known. On failure the index is still the caller's.
    pub(super) fn open(&self, control: &mut Control, opening: Opening) -> io::Result<Arc<Channel>> {
        let Opening { index, slot, process, socket, own, peer, ring, max_payload } = opening;
        peer.make_read_only()?;
        let writer = Writer::new(own.clone(), peer.clone(), words(), ring, max_payload);
        let marks = Marks::new(own.clone());
        let reader = Box::new(Reader::new(own.clone(), peer, words(), ring, max_payload));
        let key = control.next_key;
        control.next_key += 1;
        let channel = Arc::new(Channel::new(
            ChannelId { index, key, slot },
            process,
            socket,
            (writer, ring),
            marks,
            own,
        ));
        self.watch(channel.socket.as_fd(), key << 1, EventFlags::IN | EventFlags::RDHUP)?;
        if let Some(pidfd) = &channel.process.pidfd
            && let Err(error) = self.watch(pidfd.as_fd(), key << 1 | 1, EventFlags::IN)
        {
            self.unwatch(channel.socket.as_fd());
            return Err(error);
        }
        control.connections.insert(key, Connection::Channel(Arc::clone(&channel)));
        control.by_slot[usize::from(slot)] = Some(Arc::clone(&channel));
        self.tell(News::Opened(Arc::clone(&channel), reader));
        Ok(channel)
    }

    pub(super) fn control(&self) -> io::Result<()> {
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); BUDGET];
        let mut control = self.control.lock();
        let events = match epoll::wait(&self.epoll, &mut events, Some(&AT_ONCE)) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        if control.accept_again {
            self.accept(&mut control);
        }
        for event in events {
            let key = event.data.u64();
            if key == LISTENER_KEY {
                self.accept(&mut control);
                continue;
            }
            // Another event of this round may have ended it.
            let Some(connection) = control.connections.get(&(key >> 1)) else { continue };
            match connection {
                Connection::Stranger { .. } => self.meet(&mut control, key >> 1),
                Connection::Channel(channel) => {
                    let channel = Arc::clone(channel);
                    self.attend(&mut control, &channel, key & 1 == 1);
                }
            }
        }
        Ok(())
    }

    fn accept(&self, control: &mut Control) {
        if control.shut_down {
            self.unwatch(self.listener.as_fd());
            return;
        }
        control.accept_again = false;
        for _ in 0..BUDGET {
            let socket = match self.registry.accept(&self.listener) {
                Ok(socket) => socket,
                // A connection of another user.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => continue,
                Err(error) if is_scarcity(&error) => {
                    // The kernel says so also if no connection waits.
                    if self.turn_away(control) {
                        continue;
                    }
                    return;
                }
                Err(_) => return,
            };
            let process = match process::peer(socket.as_fd()) {
                Ok(process) => process,
                Err(error) if is_scarcity(&error) => {
                    self.report_scarcity(None, &error);
                    self.decline(socket.as_fd());
                    continue;
                }
                _ => continue,
            };
            let key = control.next_key;
            if self.watch(socket.as_fd(), key << 1, EventFlags::IN | EventFlags::RDHUP).is_err() {
                continue;
            }
            control.next_key += 1;
            control.strangers += 1;
            let socket = socket.into();
            control.connections.insert(key, Connection::Stranger { socket, process });
            if control.strangers > MAX_STRANGERS {
                let is_stranger = |c: &Connection| matches!(c, Connection::Stranger { .. });
                let oldest = control.connections.iter().find(|(_, c)| is_stranger(c));
                if let Some(key) = oldest.map(|(&key, _)| key) {
                    self.dismiss(control, key);
                }
            }
        }
        // There may be more, and the edge has passed.
        self.watch_again(self.listener.as_fd(), LISTENER_KEY, EventFlags::IN | EventFlags::ET);
    }

    /// Accepts a connection for which there is no descriptor by the one that is kept for this, and declines it. False if there
    /// was none, or that descriptor is missing, too.
    fn turn_away(&self, control: &mut Control) -> bool {
        let decline_next = || {
            let declined = self.listener.accept().map(|(socket, _)| self.decline(socket.as_fd()));
            declined.map_err(|error| is_scarcity(&error))
        };
        // Another thread could take a descriptor that becomes free in the table of the process.
        let apart = control.reserve.as_ref().map(OwnedFd::as_fd);
        let declined = apart.and_then(|spare| own_table::run(spare, decline_next));
        let declined = declined.unwrap_or_else(|| {
            drop(control.reserve.take());
            let declined = decline_next();
            control.reserve = self.given.as_fd().try_clone_to_owned().ok();
            declined
        });
        control.accept_again = declined == Err(true);
        if declined.is_ok() {
            self.report_scarcity(None, &io::Error::from_raw_os_error(libc::EMFILE));
        }
        declined.is_ok()
    }

    /// Tells the connecting process that there is no place, so that it takes another way at once.
    fn decline(&self, socket: BorrowedFd<'_>) {
        // Bytes that are unread when the socket is closed would be an error at the other end, in front of the answer.
        let _ = handshake::receive(socket);
        let _ = handshake::send(socket, &self.no().emit(), &[]);
    }

    /// Closes the connection of a stranger, and hands it out.
    fn dismiss(&self, control: &mut Control, key: u64) -> Option<(OwnedFd, PeerProcess)> {
        let Some(Connection::Stranger { socket, process }) = control.connections.remove(&key)
        else {
            return None;
        };
        self.unwatch(socket.as_fd());
        control.strangers -= 1;
        Some((socket, process))
    }

    /// Reads a stranger's hello.
    fn meet(&self, control: &mut Control, key: u64) {
        let Some(Connection::Stranger { socket, .. }) = control.connections.get(&key) else {
            return;
        };
        let received = match handshake::receive(socket.as_fd()) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            received => received.ok().flatten(),
        };
        self.unwatch(socket.as_fd());
        control.strangers -= 1;
        let Some(Connection::Stranger { socket, process }) = control.connections.remove(&key)
        else {
            return;
        };
        // It is gone without a message.
        let Some(received) = received else { return };
        let mut socket = Some(socket);
        if let Err(status) = self.welcome(control, &mut socket, process, received)
            && let Some(socket) = socket
        {
            let refusal = Greeting { status, ..self.no() };
            let _ = handshake::send(socket.as_fd(), &refusal.emit(), &[]);
        }
    }

    /// Makes the channel that a hello asks for, which takes the socket. Otherwise gives the answer.
    fn welcome(
        &self,
        control: &mut Control,
        place: &mut Option<OwnedFd>,
        process: PeerProcess,
        received: Received,
    ) -> Result<(), Status> {
        let hello = received.greeting?;
        let socket = place.as_ref().ok_or(Status::Nonsense)?.as_fd();
        let Ok([object, epoch, doorbells, waker, published]) =
            <[OwnedFd; 5]>::try_from(received.fds)
        else {
            return Err(Status::Nonsense);
        };
        let taken = control.by_slot[usize::from(hello.slot)].as_ref().is_some_and(|other| {
            other.closed().is_none()
                && other.process.pid != process.pid
                && !other.process.has_ended()
                && !has_hung_up(other.socket.as_fd())
        });
        if hello.status != Status::Ok || hello.slot == self.slot || taken {
            return Err(Status::Nonsense);
        }
        let side = side_len(hello.ring);
        let object = SharedObject::check(object, 2 * side).ok_or(Status::Nonsense)?;
        let map = Area::map(object.as_fd(), 2 * side, Access::ReadWrite);
        let map = map.map_err(|error| Status::from(Unusable::NoPlace(error)))?;
        let (own, peer) = (map.part(side, side), map.part(0, side));
        self.introduce(&own);
        let doorbell = peer_doorbell(&hello, epoch, doorbells, waker, published)?;
        let index = control.take_index().ok_or(Status::Full)?;
        let answer = self.greeting(Status::Ok, hello.ring, hello.max_payload, index);
        let fds = [
            self.epoch.as_fd(),
            self.doorbells.as_fd(),
            self.given.as_fd(),
            self.published.object.as_fd(),
        ];
        let process = Arc::new(process);
        if !self.published.attach(hello.slot, [&own, &peer], &process) {
            control.free_index(index);
            return Err(Status::Full);
        }
        self.published.introduce(&process, hello.proof);
        let known = Arc::clone(&process);
        let told = match handshake::send(socket, &answer.emit(), &fds) {
            // The process has ended since. Its messages are read nevertheless, and the hang-up says the rest.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
                ) =>
            {
                Ok(())
            }
            told => told,
        };
        let opened = told.and_then(|()| {
            let socket = place.take().ok_or(io::ErrorKind::NotConnected)?;
            let Greeting { slot, ring, max_payload, .. } = hello;
            let opening = Opening { index, slot, process, socket, own, peer, ring, max_payload };
            self.open(control, opening)
        });
        match opened {
            Ok(channel) => {
                channel.establish(doorbell);
                self.tell(News::Answered(channel));
                Ok(())
            }
            Err(error) => {
                tracing::debug!(%error, slot = hello.slot, "a channel failed to open");
                control.free_index(index);
                self.published.detach(&known);
                Err(Status::Full)
            }
        }
    }

    /// Handles an event of a channel's socket, or the end of its process.
    fn attend(&self, control: &mut Control, channel: &Arc<Channel>, ended: bool) {
        let reason = if ended {
            Some(Closed::Died)
        } else {
            let received = match handshake::receive(channel.socket.as_fd()) {
                // The other side closed it without having read everything. Its answer lies behind that.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    handshake::receive(channel.socket.as_fd())
                }
                received => received,
            };
            match received {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
                Ok(Some(received)) => self.answered(channel, received).err(),
                _ if channel.process.has_ended() => Some(Closed::Died),
                _ => Some(Closed::HungUp),
            }
        };
        // In this order: what this process closes itself hangs up as well.
        if has_hung_up(channel.socket.as_fd()) && channel.closed().is_none() {
            channel.process.leave();
        }
        if let Some(reason) = reason {
            channel.close(reason);
        }
        if channel.closed().is_some() {
            self.forget(control, channel);
            self.tell(News::Closed(Arc::clone(channel)));
        }
    }

    /// Reads the answer to our hello, or the refusal of a process that cannot take it.
    fn answered(&self, channel: &Arc<Channel>, received: Received) -> Result<(), Closed> {
        let answer = received.greeting;
        match answer.map_or_else(|status| status, |answer| answer.status) {
            Status::Ok if channel.is_established() => return Err(Closed::Nonsense),
            Status::Ok => {}
            Status::Version => return Err(Closed::Version),
            // Its descriptors did not come with it: there is no place for them here.
            Status::Full if answer.is_err() => {
                let none_left = io::Error::from_raw_os_error(libc::EMFILE);
                return Err(self.refuse(channel, &none_left));
            }
            Status::Full => return Err(Closed::Refused),
            Status::Nonsense => return Err(Closed::Nonsense),
        }
        let (Ok(answer), Ok([epoch, doorbells, waker, published])) =
            (answer, <[OwnedFd; 4]>::try_from(received.fds))
        else {
            return Err(Closed::Nonsense);
        };
        self.published.introduce(&channel.process, answer.proof);
        let doorbell = match peer_doorbell(&answer, epoch, doorbells, waker, published) {
            Err(Unusable::NoPlace(error)) => return Err(self.refuse(channel, &error)),
            doorbell => doorbell.map_err(|_| Closed::Nonsense)?,
        };
        channel.establish(doorbell);
        self.tell(News::Answered(Arc::clone(channel)));
        Ok(())
    }

    /// Tells the other process, which takes the channel for good, that this one has no place for it, and the log what was
    /// missing.
    fn refuse(&self, channel: &Channel, error: &io::Error) -> Closed {
        self.report_scarcity(Some(channel.slot()), error);
        let _ = handshake::send(channel.socket.as_fd(), &self.no().emit(), &[]);
        Closed::Refused
    }

    /// A refusal without further contents.
    fn no(&self) -> Greeting {
        let Config { ring, max_payload, .. } = self.config;
        Greeting {
            proof: ProofWord::default(),
            ..self.greeting(Status::Full, ring, max_payload, 0)
        }
    }

    /// Stops watching a channel. Its index stays taken until [`give_back`](Self::give_back).
    pub(super) fn forget(&self, control: &mut Control, channel: &Arc<Channel>) {
        if control.connections.remove(&channel.id.key).is_none() {
            return;
        }
        self.published.detach(&channel.process);
        self.unwatch(channel.socket.as_fd());
        if let Some(pidfd) = &channel.process.pidfd {
            self.unwatch(pidfd.as_fd());
        }
        let place = &mut control.by_slot[usize::from(channel.slot())];
        if place.as_ref().is_some_and(|c| Arc::ptr_eq(c, channel)) {
            *place = None;
        }
    }

    /// The poller has done with a closed channel.
    pub(super) fn give_back(&self, channel: &Arc<Channel>) {
        let mut control = self.control.lock();
        self.forget(&mut control, channel);
        control.free_index(channel.id.index);
    }
}

/// Why the objects of a greeting cannot be used.
#[derive(Debug)]
enum Unusable {
    Nonsense,
    /// Descriptors or memory have run out.
    NoPlace(io::Error),
}

impl From<io::Error> for Unusable {
    fn from(error: io::Error) -> Self {
        Self::NoPlace(error)
    }
}

impl From<Unusable> for Status {
    fn from(unusable: Unusable) -> Self {
        match unusable {
            Unusable::Nonsense => Self::Nonsense,
            Unusable::NoPlace(error) => {
                tracing::debug!(%error, "a channel has no place");
                Self::Full
            }
        }
    }
}

/// Checks the descriptors by which a peer wants to be woken.
fn peer_doorbell(
    greeting: &Greeting,
    epoch: OwnedFd,
    doorbells: OwnedFd,
    waker: OwnedFd,
    published: OwnedFd,
) -> Result<PeerDoorbell, Unusable> {
    let map = |object: OwnedFd, access| {
        let object = SharedObject::check(object, page()).ok_or(Unusable::Nonsense)?;
        Area::map(object.as_fd(), page(), access).map_err(Unusable::NoPlace)
    };
    let (epoch, doorbells) = (map(epoch, Access::ReadOnly)?, map(doorbells, Access::ReadWrite)?);
    let waker = Waker::open(waker.as_fd())?.ok_or(Unusable::Nonsense)?;
    let published = SharedObject::check(published, greeting.published).ok_or(Unusable::Nonsense)?;
    let published = PeerPublished::new(&published, greeting.published)?;
    let index = usize::try_from(greeting.index).ok().filter(|&i| i < MAX_CHANNELS);
    let doorbell = Doorbell::new(doorbells, epoch, doorbell_of(index.ok_or(Unusable::Nonsense)?));
    Ok(PeerDoorbell { doorbell, waker, proof: greeting.proof, published })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The log says what has run out.
    #[test]
    fn a_peers_pipe_that_finds_no_descriptor_names_that() {
        let name = "shm::control::tests::a_peers_pipe_that_finds_no_descriptor_names_that";
        anyverbs_testing::in_own_process(name, || {
            let greeting = Greeting {
                status: Status::Ok,
                ring: 64 << 10,
                max_payload: 16 << 10,
                proof: ProofWord::default(),
                index: 0,
                slot: 7,
                published: page(),
            };
            let word = SharedObject::new(page()).unwrap();
            let (_reader, wake) = std::io::pipe().unwrap();
            let given = || word.as_fd().try_clone_to_owned().unwrap();
            let (epoch, doorbells, published) = (given(), given(), given());
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: a live value, and the process ends with this test.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) }, 0);
            let unusable = peer_doorbell(&greeting, epoch, doorbells, wake.into(), published);
            let Err(Unusable::NoPlace(error)) = unusable else { panic!("{unusable:?}") };
            assert_eq!(error.raw_os_error(), Some(libc::EMFILE));
            assert!(crate::sys::is_scarcity(&error));
            assert_eq!(Status::from(Unusable::NoPlace(error)), Status::Full);
        });
    }
}
