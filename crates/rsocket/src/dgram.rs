//! Datagram sockets.

mod endpoint;
mod wire;

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use anyverbs::cm::Address;
use parking_lot::Mutex;
use socket2::{Domain, Socket};

use crate::config::config;
use crate::device::device;
use crate::epoll::Epoll;
use crate::errno::{Errno, Result};
use crate::needs::slots;
use crate::options::{LINGER, Options, RDMA_UNREAD, SOL_RDMA, Value};
use crate::ready::Ready;
use crate::ring::Cursor;
use crate::sleep::{Wake, wait_readable};
use crate::sleepers::{Asleep, Sleepers};
use endpoint::{Data, Endpoint, State};

pub(crate) use wire::MAX_DATAGRAM;

/// Reads any bytes as the headers of a datagram from `source`. What is read must be written as the same header.
#[cfg(any(test, fuzzing))]
pub(crate) fn check_headers(bytes: &[u8], source: SocketAddr) {
    if let Some((header, data)) = wire::UdpHeader::parse(bytes, source) {
        let (written, len) = header.encode();
        assert_eq!(wire::UdpHeader::parse(&written[..len], source), Some((header, &[][..])));
        assert_eq!(data.len(), bytes.len() - len);
    }
    let mut first = [0; wire::Header::MAX];
    let len = bytes.len().min(first.len());
    first[..len].copy_from_slice(&bytes[..len]);
    if let Some((from, len)) = wire::Header::parse(&first, bytes.len()) {
        assert!(len <= bytes.len());
        assert_eq!(wire::Header::new(from).len(), len);
    }
}

/// A received datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Datagram {
    /// Bytes that were copied.
    pub(crate) len: usize,
    /// Bytes that there were.
    pub(crate) full: usize,
    pub(crate) from: SocketAddr,
}

/// A datagram socket. Its descriptor is readable when something happened that it must look at.
#[derive(Debug)]
pub(crate) struct Dgram {
    family: i32,
    nonblocking: AtomicBool,
    options: Mutex<Options>,
    endpoint: OnceLock<Endpoint>,
    /// The socket on which peers meet.
    udp: Socket,
    making: Mutex<()>,
    closed: (AtomicBool, AtomicBool),
    sleepers: Arc<Sleepers>,
    epoll: Epoll,
}

impl Dgram {
    pub(crate) fn new(family: i32, close_on_exec: bool) -> Result<Self> {
        let udp = anyverbs::udp_socket(Domain::from(family))?;
        let epoll = Epoll::new(close_on_exec)?;
        epoll.add(udp.as_fd())?;
        let sleepers = Arc::new(Sleepers::new()?);
        epoll.add(sleepers.as_fd())?;
        Ok(Self {
            family,
            nonblocking: AtomicBool::new(false),
            options: Mutex::new(Options::new()),
            endpoint: OnceLock::new(),
            udp,
            making: Mutex::new(()),
            closed: (AtomicBool::new(false), AtomicBool::new(false)),
            sleepers,
            epoll,
        })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    pub(crate) fn family(&self) -> i32 {
        self.family
    }

    pub(crate) fn set_nonblocking(&self, on: bool) {
        self.nonblocking.store(on, Ordering::Relaxed);
    }

    pub(crate) fn is_nonblocking(&self) -> bool {
        self.nonblocking.load(Ordering::Relaxed)
    }

    /// The queue pair and its buffers, made at first use.
    fn endpoint(&self) -> Result<&Endpoint> {
        if let Some(endpoint) = self.endpoint.get() {
            return Ok(endpoint);
        }
        let _turn = self.making.lock();
        if let Some(endpoint) = self.endpoint.get() {
            return Ok(endpoint);
        }
        let options = self.options.lock();
        let send = slots(options.send_queue, options.send_buffer);
        let recv = slots(options.recv_queue, options.recv_buffer);
        let inline = options.inline.into();
        drop(options);
        let endpoint = Endpoint::new(&device()?, &self.sleepers, send, recv, inline)?;
        self.epoll.add(endpoint.channel.as_fd())?;
        let endpoint = self.endpoint.get_or_init(|| endpoint);
        // The queue owes no event to threads that began to sleep without it.
        self.sleepers.wake();
        Ok(endpoint)
    }

    fn ip(address: &Address) -> Result<SocketAddr> {
        match address {
            Address::Ip(address) => Ok(*address),
            Address::Ib(_) => Err(Errno(libc::EAFNOSUPPORT)),
        }
    }

    pub(crate) fn bind(&self, address: &Address) -> Result<()> {
        let address = Self::ip(address)?;
        self.endpoint()?;
        Ok(self.udp.bind(&address.into())?)
    }

    pub(crate) fn connect(&self, address: &Address) -> Result<()> {
        let address = Self::ip(address)?;
        let endpoint = self.endpoint()?;
        self.udp.connect(&address.into())?;
        let address = self.udp.peer_addr()?.as_socket().unwrap_or(address);
        endpoint.state.lock().connected = Some(address);
        endpoint.peer(&self.udp, address)?;
        Ok(())
    }

    /// `connect(2)` to `AF_UNSPEC`.
    pub(crate) fn disconnect(&self) -> Result<()> {
        // SAFETY: all-zero is a valid sockaddr, of AF_UNSPEC.
        let none: libc::sockaddr = unsafe { std::mem::zeroed() };
        let len = size_of::<libc::sockaddr>() as libc::socklen_t;
        // SAFETY: a live address of that length.
        if unsafe { libc::connect(self.udp.as_raw_fd(), &raw const none, len) } != 0 {
            return Err(Errno::last());
        }
        if let Some(endpoint) = self.endpoint.get() {
            endpoint.forget();
        }
        Ok(())
    }

    pub(crate) fn local_address(&self) -> Result<Address> {
        let address = self.udp.local_addr()?.as_socket().ok_or(Errno(libc::EINVAL))?;
        Ok(Address::Ip(address))
    }

    pub(crate) fn peer_address(&self) -> Result<Address> {
        let address = self.udp.peer_addr()?.as_socket().ok_or(Errno(libc::ENOTCONN))?;
        Ok(Address::Ip(address))
    }

    pub(crate) fn set_option(&self, level: i32, name: i32, value: &[u8]) -> Result<()> {
        let sized = self.endpoint.get().is_some();
        if level == SOL_RDMA {
            return self.options.lock().set(level, name, value, sized);
        }
        let len = value.len() as libc::socklen_t;
        let fd = self.udp.as_raw_fd();
        // SAFETY: a live value of that length.
        if unsafe { libc::setsockopt(fd, level, name, value.as_ptr().cast(), len) } != 0 {
            return Err(Errno::last());
        }
        // Options for our own buffers and waits; the others are the UDP socket's alone.
        match self.options.lock().set(level, name, value, sized) {
            Err(Errno(libc::ENOPROTOOPT)) => Ok(()),
            result => result,
        }
    }

    pub(crate) fn option(&self, level: i32, name: i32) -> Result<Value> {
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_ERROR) => {
                let errno = self.endpoint.get().map_or(0, |e| e.error.swap(0, Ordering::AcqRel));
                return Ok(Value::int(errno));
            }
            (SOL_RDMA, RDMA_UNREAD) => {
                let unread = self.endpoint.get().map_or(0, |endpoint| {
                    endpoint.progress(&self.udp);
                    endpoint.state.lock().received.front().map_or(0, |r| r.len())
                });
                return Ok(Value::int(unread as i32));
            }
            _ => {}
        }
        match self.options.lock().get(level, name) {
            Err(Errno(libc::ENOPROTOOPT)) if level != SOL_RDMA => {}
            result => return result,
        }
        let mut value = [0u8; 64];
        let mut len = value.len() as libc::socklen_t;
        let fd = self.udp.as_raw_fd();
        // SAFETY: a live array of that length.
        let rc =
            unsafe { libc::getsockopt(fd, level, name, value.as_mut_ptr().cast(), &raw mut len) };
        if rc != 0 {
            return Err(Errno::last());
        }
        Ok(Value::new(&value[..(len as usize).min(value.len())]))
    }

    /// `sendmsg(2)`: to `to`, or to the peer that the socket is connected to.
    pub(crate) fn send(
        &self,
        mut from: Cursor<'_>,
        flags: i32,
        to: Option<&Address>,
    ) -> Result<usize> {
        if self.closed.1.load(Ordering::Relaxed) {
            return Err(Errno(libc::EPIPE));
        }
        let endpoint = self.endpoint()?;
        let to = match to {
            Some(to) => Self::ip(to)?,
            None => endpoint.state.lock().connected.ok_or(Errno(libc::EDESTADDRREQ))?,
        };
        if self.family == libc::AF_INET && to.is_ipv6() {
            return Err(Errno(libc::EAFNOSUPPORT));
        }
        let total = from.left();
        let nonblocking = self.is_nonblocking() || flags & libc::MSG_DONTWAIT != 0;
        let peer = endpoint.peer(&self.udp, to)?;
        loop {
            if endpoint.send(&self.udp, to, &peer, &mut from)? {
                return Ok(total);
            }
            endpoint.progress(&self.udp);
            if endpoint.state.lock().can_send() {
                continue;
            }
            if nonblocking {
                return Err(Errno(libc::EAGAIN));
            }
            let timeout = self.options.lock().send_timeout;
            let deadline = timeout.map(|timeout| Instant::now() + timeout);
            self.wait(endpoint, deadline, State::can_send)?;
        }
    }

    /// `recvmsg(2)`; `None` once it was shut down.
    pub(crate) fn recv(&self, mut to: Cursor<'_>, flags: i32) -> Result<Option<Datagram>> {
        let endpoint = self.endpoint()?;
        let nonblocking = self.is_nonblocking() || flags & libc::MSG_DONTWAIT != 0;
        let peek = flags & libc::MSG_PEEK != 0;
        let total = to.left();
        loop {
            let mut state = endpoint.state.lock();
            if peek {
                // Under the lock, so that no other caller takes it meanwhile.
                if let Some(received) = state.received.front() {
                    let (full, from) = (received.len(), received.from);
                    endpoint.copy(received, &mut to)?;
                    return Ok(Some(Datagram { len: total - to.left(), full, from }));
                }
            } else if let Some(received) = state.received.pop_front() {
                drop(state);
                let (full, from) = (received.len(), received.from);
                let copied = endpoint.copy(&received, &mut to);
                if let Data::Buffer { slot, .. } = received.data {
                    endpoint.give_back(slot);
                }
                copied?;
                return Ok(Some(Datagram { len: total - to.left(), full, from }));
            }
            drop(state);
            if self.closed.0.load(Ordering::Relaxed) {
                return Ok(None);
            }
            endpoint.progress(&self.udp);
            if !endpoint.state.lock().received.is_empty() {
                continue;
            }
            match endpoint.error.swap(0, Ordering::AcqRel) {
                0 => {}
                errno => return Err(Errno(errno)),
            }
            if nonblocking {
                return Err(Errno(libc::EAGAIN));
            }
            let timeout = self.options.lock().recv_timeout;
            let deadline = timeout.map(|timeout| Instant::now() + timeout);
            let ready = |state: &State| {
                !state.received.is_empty()
                    || endpoint.error.load(Ordering::Acquire) != 0
                    || self.closed.0.load(Ordering::Relaxed)
            };
            self.wait(endpoint, deadline, ready)?;
        }
    }

    fn wait(
        &self,
        endpoint: &Endpoint,
        deadline: Option<Instant>,
        test: impl Fn(&State) -> bool,
    ) -> Result<()> {
        let begin = Instant::now();
        loop {
            endpoint.progress(&self.udp);
            if test(&endpoint.state.lock()) {
                return Ok(());
            }
            if begin.elapsed() >= config().polling_time {
                break;
            }
            std::hint::spin_loop();
        }
        loop {
            let (asleep, _) = self.begin_sleep();
            endpoint.progress(&self.udp);
            if test(&endpoint.state.lock()) {
                self.end_sleep(asleep, false);
                return Ok(());
            }
            let undo = || self.end_sleep(asleep, false);
            let woken = wait_readable(self.epoll.as_fd(), deadline, undo);
            self.end_sleep(asleep, woken == Ok(Wake::Ready));
            let wake = woken?;
            endpoint.progress(&self.udp);
            if test(&endpoint.state.lock()) {
                return Ok(());
            }
            if wake == Wake::TimedOut {
                return Err(Errno(libc::EAGAIN));
            }
        }
    }

    pub(crate) fn ready(&self) -> Ready {
        let Some(endpoint) = self.endpoint.get() else { return Ready::new(libc::POLLOUT) };
        endpoint.progress(&self.udp);
        let state = endpoint.state.lock();
        let mut events = 0;
        let closed = self.closed.0.load(Ordering::Relaxed);
        if !state.received.is_empty() || closed {
            events |= libc::POLLIN | libc::POLLRDNORM;
        }
        if state.can_send() {
            events |= libc::POLLOUT | libc::POLLWRNORM;
        }
        if endpoint.error.load(Ordering::Acquire) != 0 {
            events |= libc::POLLERR;
        }
        Ready { events, read_edges: state.edges.0, write_edges: state.edges.1 }
    }

    /// As of a stream.
    pub(crate) fn begin_sleep(&self) -> (Asleep, Option<Instant>) {
        (self.sleepers.begin(self.endpoint.get().map(|endpoint| &endpoint.cq)), None)
    }

    /// As of a stream.
    pub(crate) fn end_sleep(&self, asleep: Asleep, woken: bool) {
        self.sleepers.end(asleep, woken, self.endpoint.get().map(|endpoint| &endpoint.channel));
    }

    pub(crate) fn shutdown(&self, read: bool, write: bool) -> Result<()> {
        let connected = self.endpoint.get().is_some_and(|e| e.state.lock().connected.is_some());
        if !connected {
            return Err(Errno(libc::ENOTCONN));
        }
        if read {
            self.closed.0.store(true, Ordering::Relaxed);
        }
        if write {
            self.closed.1.store(true, Ordering::Relaxed);
        }
        self.sleepers.wake();
        Ok(())
    }

    /// Waits until all datagrams sent have left, for [`LINGER`] at most.
    pub(crate) fn close(&self) {
        if let Some(endpoint) = self.endpoint.get() {
            let deadline = Some(Instant::now() + LINGER);
            let _ = self.wait(endpoint, deadline, State::all_sent);
        }
    }
}
