//! One process's place on the host, and the way to it.

use std::collections::{HashMap, HashSet};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyverbs_locks::{Mutex, rank};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use socket2::Socket;

use super::name::{Name, Registry};
use super::orders::{MAX_ORDER, Order, Orders};
use super::page::Page;
use super::pass;
use super::store::{Start, Store};
use crate::random_u64;
use crate::sys::{self, AT_ONCE, Uncancelled, is_scarcity};

/// Connections of other processes; one has one, and one more while it asks for the store.
const MAX_CONNECTIONS: usize = 1024;
/// A message with an order.
const MAX_ORDER_AND_KIND: usize = MAX_ORDER + 1;
/// Questions of other processes that are answered in one call of [`Slot::receive`]. The others wait for the next one, so that a
/// process which asks all the time does not keep the caller.
const MAX_ANSWERS: usize = 64;
/// The key of the listener, which is ready when a process connects.
const LISTENER: u64 = 0;

/// One process's place on the host: a number from 1 to 255, freed when the process ends.
///
/// A child that `fork`s without `exec` keeps its parent's slot; every descriptor here is close-on-exec.
#[derive(Debug)]
pub struct Slot {
    store: Arc<Store>,
    number: u8,
    listener: Socket,
    /// Watches the listener and the accepted connections.
    epoll: OwnedFd,
    connections: Mutex<rank::HostConnections, Connections>,
    /// The page that others read of it.
    page: Page,
    /// So many orders have come.
    told: AtomicU64,
}

#[derive(Debug, Default)]
struct Connections {
    by_key: HashMap<u64, Socket>,
    /// The connections that were given the page.
    have_page: HashSet<u64>,
    next: u64,
    orders: Orders,
    /// There was no descriptor for one that waits.
    accept_again: bool,
}

impl Connections {
    fn forget(&mut self, key: u64) {
        self.by_key.remove(&key);
        self.have_page.remove(&key);
        self.orders.forget(key);
    }
}

/// The result of [`Slot::receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Received {
    Nothing,
    /// A message of another process of this user, and its length.
    Message(usize),
    /// Another user has connected. Its bytes were not read.
    Stranger,
}

impl Slot {
    /// Takes a free slot of the registry called `name`, searching from a random place so that a slot is not reused at
    /// once after its owner's death. Slot 0 is never given out.
    ///
    /// # Errors
    /// `InvalidInput` for a bad name, `AddrInUse` when all 255 slots are taken, and those of socket(2).
    pub fn claim(name: &str) -> io::Result<Self> {
        Self::claim_in(&Registry::new(name)?)
    }

    /// As [`Slot::claim`], in a registry that the caller has.
    ///
    /// # Errors
    /// See [`Slot::claim`].
    pub fn claim_in(registry: &Registry) -> io::Result<Self> {
        let start = (random_u64() % 255) as u16;
        Self::claim_one_of(registry, (0..255).map(|i| ((start + i) % 255 + 1) as u8))
    }

    /// Takes slot `number`.
    ///
    /// # Errors
    /// `AddrInUse` when it is taken; `InvalidInput` for 0, and those of socket(2).
    pub fn claim_number(registry: &Registry, number: u8) -> io::Result<Self> {
        if number == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "slot 0 is reserved"));
        }
        Self::claim_one_of(registry, std::iter::once(number))
    }

    fn claim_one_of(registry: &Registry, numbers: impl Iterator<Item = u8>) -> io::Result<Self> {
        let _uncancelled = Uncancelled::new();
        let _start = Start::begin(registry);
        let found = Store::find(registry)?;
        let is_new = found.is_none();
        let mut store = found.map_or_else(|| Store::make(registry), Ok)?;
        let mut tried = 0;
        for number in numbers {
            tried += 1;
            let listener = match registry.listen(Name::Slot(number)) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => continue,
                listener => listener?,
            };
            // A process that did not see the start lock may have made a store, too. The name decides which one counts.
            if is_new && let Some(other) = Store::older(registry, &store, number)? {
                store = other;
            }
            if store.take_slot(number) {
                store.settle();
                return Self::with(Arc::new(store), number, listener);
            }
        }
        Err(io::Error::new(io::ErrorKind::AddrInUse, taken(registry, tried)))
    }

    fn with(store: Arc<Store>, number: u8, listener: Socket) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let connections = Mutex::new(Connections { next: LISTENER + 1, ..Default::default() });
        let slot = Self {
            store,
            number,
            listener,
            epoll,
            connections,
            page: Page::default(),
            told: AtomicU64::new(0),
        };
        // Edge-triggered: a connection that cannot be accepted for want of descriptors must not keep the caller awake.
        slot.watch(&slot.listener, LISTENER, EventFlags::IN | EventFlags::ET)?;
        Ok(slot)
    }

    /// This process's number, 1 to 255.
    #[must_use]
    pub fn number(&self) -> u8 {
        self.number
    }

    /// The store that the processes of the host share.
    #[must_use]
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// The registry in which the processes find each other.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        self.store.registry()
    }

    /// The page that others read of this process.
    #[must_use]
    pub fn page(&self) -> &Page {
        &self.page
    }

    /// How often others have told this process something. When it changes, [`take_order`](Self::take_order) gives it. Who is woken by a
    /// [look](Page::on_look) is woken by an order as well.
    #[inline]
    #[must_use]
    pub fn told(&self) -> u64 {
        self.told.load(Ordering::Acquire)
    }

    /// Takes the oldest order.
    #[must_use]
    pub fn take_order(&self) -> Option<Order> {
        self.connections.lock().orders.take()
    }

    /// Answers an order. A longer answer is cut.
    pub fn answer(&self, order: &Order, bytes: &[u8]) {
        if let Some(socket) = self.connections.lock().by_key.get(&order.key) {
            pass::answer(socket, &bytes[..bytes.len().min(MAX_ORDER)]);
        }
    }

    /// Says that this process has `port` open, until the value is dropped.
    pub(crate) fn announce(self: &Arc<Self>, port: u16) -> Announced {
        self.store.table().set_port(self.number, Some(port));
        Announced(Arc::clone(self))
    }

    fn watch(&self, socket: &Socket, key: u64, events: EventFlags) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, socket, EventData::new_u64(key), events)?)
    }

    /// The next message of another process, if there is one. A process that asks for the store gets it.
    ///
    /// # Errors
    /// Those of epoll_wait(2).
    pub(crate) fn receive(&self, into: &mut [u8]) -> io::Result<Received> {
        let _uncancelled = Uncancelled::new();
        let mut connections = self.connections.lock();
        if connections.accept_again && self.accept(&mut connections) {
            return Ok(Received::Stranger);
        }
        let mut answers = 0;
        // The descriptor stays readable.
        while answers < MAX_ANSWERS {
            let mut event = [MaybeUninit::<epoll::Event>::uninit()];
            let key = match epoll::wait(&self.epoll, &mut event, Some(&AT_ONCE)) {
                Ok(([event], _)) => event.data.u64(),
                Ok(_) => return Ok(Received::Nothing),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            if key == LISTENER {
                if self.accept(&mut connections) {
                    return Ok(Received::Stranger);
                }
                continue;
            }
            let Some(socket) = connections.by_key.get(&key) else { continue };
            match read(socket, into) {
                Ok(1) if into[0] == pass::ASK => {
                    answers += 1;
                    pass::give(socket, self.store.copy());
                }
                Ok(1) if into[0] == pass::LOOK => {
                    answers += 1;
                    if !connections.have_page.contains(&key) {
                        let copy = self.page.copy();
                        // Without a descriptor for it now, the next look may get one.
                        let has_page = copy.is_some();
                        pass::give(socket, copy);
                        if has_page {
                            connections.have_page.insert(key);
                        }
                    }
                    self.page.note_look();
                }
                // One that is cut off is none.
                Ok(len @ 2..=MAX_ORDER_AND_KIND) if into[0] == pass::TELL => {
                    answers += 1;
                    if connections.orders.add(key, &into[1..len]) {
                        self.told.fetch_add(1, Ordering::Release);
                        self.page.wake();
                    }
                }
                // Its end.
                Ok(0) => connections.forget(key),
                Ok(len) => return Ok(Received::Message(len)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => connections.forget(key),
            }
        }
        Ok(Received::Nothing)
    }

    /// Accepts all that wait. True if there was one of another user; there may be more then.
    fn accept(&self, connections: &mut Connections) -> bool {
        connections.accept_again = false;
        loop {
            match self.registry().accept(&self.listener) {
                Ok(socket) if connections.by_key.len() < MAX_CONNECTIONS => {
                    let key = connections.next;
                    if self.watch(&socket, key, EventFlags::IN).is_ok() {
                        connections.next += 1;
                        connections.by_key.insert(key, socket);
                    }
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    connections.accept_again = true;
                    return true;
                }
                Err(error) => {
                    connections.accept_again = is_scarcity(&error);
                    return false;
                }
            }
        }
    }
}

impl AsFd for Slot {
    /// Readable when [`Slot::receive`] has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.store.leave_slot(self.number);
    }
}

/// Announces, as long as this value lives, that this process has a port open.
#[derive(Debug)]
pub(crate) struct Announced(Arc<Slot>);

impl Drop for Announced {
    fn drop(&mut self) {
        if self.0.store.is_own() {
            self.0.store.table().set_port(self.0.number, None);
        }
    }
}

/// Reads one message, without the descriptors that come with it.
fn read(socket: &Socket, into: &mut [u8]) -> io::Result<usize> {
    let mut iov = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: all-zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut iov, 1);
    // SAFETY: the iovec's bytes are live, exclusive and of the given size.
    let n = unsafe { sys::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Describes the processes that have the slots.
fn taken(registry: &Registry, tried: usize) -> String {
    if tried == 1 {
        return "the slot is taken".into();
    }
    let mut foreign: Vec<u8> = Vec::new();
    for number in 1..=255 {
        let refused = registry.connect(Name::Slot(number)).map(drop).map_err(|e| e.kind());
        if refused != Ok(()) {
            foreign.push(number);
        }
    }
    let all = "all 255 process slots of this host are taken";
    match &foreign[..] {
        [] => all.into(),
        [first, ..] => {
            let holder = registry.holder(Name::Slot(*first));
            format!("{all}, {} of them not by processes of this user: {holder}", foreign.len())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registry(test: &str) -> Registry {
        Registry::new(&format!("anyverbs-test-{test}-{}", std::process::id())).unwrap()
    }

    #[test]
    fn slots_are_distinct_and_freed_by_drop() {
        let registry = registry("slots");
        let keeper = Store::join(&registry).unwrap();
        let slots: Vec<_> = (0..255).map(|_| Slot::claim_in(&registry).unwrap()).collect();
        assert_eq!(keeper.live_slots(), (1..=255).collect::<Vec<u8>>());
        let error = Slot::claim_in(&registry).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert_eq!(error.to_string(), "all 255 process slots of this host are taken");
        assert!(!keeper.is_alive(0));
        // Something else of the process may still have the store.
        let _stores: Vec<_> = slots.iter().map(|slot| Arc::clone(slot.store())).collect();
        drop(slots);
        assert_eq!(keeper.live_slots(), [] as [u8; 0]);
        let error = Slot::claim_number(&registry, 0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn the_next_owner_of_a_slot_is_another() {
        let registry = registry("incarnations");
        let keeper = Store::join(&registry).unwrap();
        let slots = [3, 200].map(|n| Slot::claim_number(&registry, n).unwrap());
        let error = Slot::claim_number(&registry, 3).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert_eq!(error.to_string(), "the slot is taken");
        let before = keeper.incarnations();
        assert_eq!(before.len(), 2);
        assert_eq!(before, slots[0].store().incarnations());
        drop(slots);
        assert_eq!(keeper.incarnations(), HashMap::new());
        let _again = Slot::claim_number(&registry, 3).unwrap();
        assert_ne!(keeper.incarnations()[&3], before[&3]);
    }

    #[test]
    fn a_port_is_announced_as_long_as_it_is_open() {
        let registry = registry("announced");
        let keeper = Store::join(&registry).unwrap();
        let slot = Arc::new(Slot::claim_in(&registry).unwrap());
        let announced = slot.announce(4791);
        assert_eq!(keeper.announced(4791), [slot.number()]);
        assert_eq!(keeper.announced(4792), [] as [u8; 0]);
        drop(announced);
        assert_eq!(keeper.announced(4791), [] as [u8; 0]);
    }

    /// The kernel tells of one that did not read what it was given by an error.
    #[test]
    fn a_connection_that_ends_is_forgotten_whatever_it_left_unread() {
        let registry = registry("ends");
        let slot = Slot::claim_in(&registry).unwrap();
        let asks = || {
            let (socket, _) = registry.connect(Name::Slot(slot.number())).unwrap();
            pass::ask(&socket).unwrap();
            socket
        };
        for reads in [true, false] {
            let socket = asks();
            assert_eq!(slot.receive(&mut [0; 100]).unwrap(), Received::Nothing);
            assert_eq!(slot.connections.lock().by_key.len(), 1);
            assert!(!reads || pass::take(&socket).is_some());
            drop(socket);
            assert_eq!(slot.receive(&mut [0; 100]).unwrap(), Received::Nothing);
            assert!(slot.connections.lock().by_key.is_empty());
        }
    }

    #[test]
    fn one_who_asks_all_the_time_does_not_keep_the_receiver() {
        let registry = registry("asks");
        let slot = Slot::claim_in(&registry).unwrap();
        let sockets: Vec<_> = (0..2 * MAX_ANSWERS)
            .map(|_| {
                let (socket, _) = registry.connect(Name::Slot(slot.number())).unwrap();
                pass::look(&socket).unwrap();
                socket
            })
            .collect();
        let mut calls = 0;
        while slot.page().looks() < sockets.len() as u64 {
            let before = slot.page().looks();
            assert_eq!(slot.receive(&mut [0; 100]).unwrap(), Received::Nothing);
            calls += 1;
            assert!(slot.page().looks() - before <= MAX_ANSWERS as u64);
            assert!(calls < 10, "it goes on where it stopped");
        }
        assert!(calls >= 2);
    }

    #[test]
    fn an_order_is_answered() {
        use std::time::Duration;
        let registry = registry("orders");
        let slot = Arc::new(Slot::claim_in(&registry).unwrap());
        let of = (slot.number(), std::process::id() as i32);
        let tell = |of, message: &[u8], patience| {
            super::super::tell(&registry, of, message, Duration::from_millis(patience))
        };
        let kind = |result: io::Result<Vec<u8>>| result.map_err(|error| error.kind());
        assert_eq!(kind(tell((of.0, 1), b"x", 10)), Err(io::ErrorKind::NotFound));
        assert_eq!(kind(tell(of, &[0; MAX_ORDER + 1], 10)), Err(io::ErrorKind::InvalidInput));
        assert_eq!(kind(tell(of, b"x", 10)), Err(io::ErrorKind::TimedOut));
        let longest = vec![7; MAX_ORDER];
        let mut buffer = vec![0; 2 * MAX_ORDER];
        std::thread::scope(|scope| {
            let teller = scope.spawn(|| tell(of, &longest, 10_000));
            let begin = std::time::Instant::now();
            while slot.told() < 2 {
                assert_eq!(slot.receive(&mut buffer).unwrap(), Received::Nothing);
                assert!(begin.elapsed() < Duration::from_secs(60));
            }
            // The first has gone meanwhile, and thinks that nothing was done.
            let order = slot.take_order().unwrap();
            assert_eq!(order.bytes, longest);
            slot.answer(&order, b"done");
            assert_eq!(teller.join().unwrap().unwrap(), b"done");
        });
        assert!(slot.take_order().is_none());
    }

    #[test]
    fn the_connections_that_a_process_accepts_are_bounded() {
        let name = "host::slot::tests::the_connections_that_a_process_accepts_are_bounded";
        anyverbs_testing::in_own_process(name, || {
            let wanted = 2 * MAX_CONNECTIONS as libc::rlim_t + 100;
            // SAFETY: all-zero is a valid rlimit, and the calls get a live one.
            let can = unsafe {
                let mut limit: libc::rlimit = std::mem::zeroed();
                libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
                limit.rlim_cur = wanted;
                limit.rlim_max >= wanted
                    && libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) == 0
            };
            if !can {
                return anyverbs_testing::skip("the limit of descriptors is too low");
            }
            let registry = registry("many");
            let slot = Slot::claim_in(&registry).unwrap();
            let mut sockets = Vec::new();
            for _ in 0..MAX_CONNECTIONS + 3 {
                sockets.push(registry.connect(Name::Slot(slot.number())).unwrap());
                assert_eq!(slot.receive(&mut [0; 100]).unwrap(), Received::Nothing);
            }
            assert_eq!(slot.connections.lock().by_key.len(), MAX_CONNECTIONS);
            // One that ends makes room.
            drop(sockets);
            slot.receive(&mut [0; 100]).unwrap();
            let _socket = registry.connect(Name::Slot(slot.number())).unwrap();
            slot.receive(&mut [0; 100]).unwrap();
            assert_eq!(slot.connections.lock().by_key.len(), 1);
        });
    }

    #[test]
    fn slots_begin_at_random_places() {
        let registry = registry("random");
        let _keeper = Store::join(&registry).unwrap();
        let numbers: std::collections::BTreeSet<u8> =
            (0..40).map(|_| Slot::claim_in(&registry).unwrap().number()).collect();
        assert!(numbers.len() > 5, "{numbers:?}");
    }

    #[test]
    fn descriptors_are_close_on_exec() {
        let slot = Slot::claim_in(&registry("cloexec")).unwrap();
        let fds = [slot.as_fd(), slot.listener.as_fd(), slot.store().file().unwrap().as_fd()];
        for fd in fds {
            // SAFETY: fcntl with F_GETFD only reads flags of an open fd.
            let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
            assert_ne!(flags & libc::FD_CLOEXEC, 0);
        }
    }
}
